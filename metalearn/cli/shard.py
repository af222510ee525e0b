"""Cuts a dataset's decoded pictures, by class, into shards that `dataset.shards=FOLDER` reads.

    metalearn shard dataset=omniglot --out shards/omniglot
    metalearn shard dataset=cifar_fs --out shards/cifar100 --classes 4
    metalearn train experiment=maml_omniglot dataset.shards=shards/omniglot

The folder holds a file for every --classes classes, and index.json. The classes of different splits lie in different
shards. A run with shards has the same tasks and the same numbers as one without. Each split list of a dataset reads the
same shards, and so do the datasets of plain samples: the shards of omniglot serve omniglot_characters and
omniglot_pretraining, and those of cifar_fs serve fc100. Exit codes: 0 done; 2 a dataset that cannot be cut, or wrong
arguments.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from metalearn.app.process import OK, exit_code_of_process, set_up_process
from metalearn.cli.arguments import command_parser, whole
from metalearn.config.build import build
from metalearn.config.compose import compose_config
from metalearn.errors import ConfigError
from metalearn.storage.files import creating, refuse_used

if TYPE_CHECKING:
    from metalearn.tasks.common.episodes import HoldsClasses, Images

CLASSES = 64
"""The default number of classes in a shard."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = command_parser("shard", __doc__)
    parser.add_argument("keys", nargs="+", metavar="KEY=VALUE", help="dataset=NAME, and keys of the dataset")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="the output folder; new, or empty")
    parser.add_argument(
        "--classes", default=CLASSES, type=whole(1), metavar="N", help=f"of a shard (default {CLASSES})"
    )
    options = parser.parse_args(arguments)
    return exit_code_of_process(lambda: cut(options))


def cut(options: argparse.Namespace) -> int:
    """Cuts the dataset; returns the exit code."""
    set_up_process(1)
    from metalearn.tasks.common.episodes import HoldsClasses  # imports torch, after the line above
    from metalearn.tasks.common.stored import ShardForm, write_shards

    composed = compose_config(options.keys)
    source = build(composed.config, "dataset")
    if "shards" not in composed.config.dataset or not isinstance(source, HoldsClasses):
        raise ConfigError(
            f"dataset: {composed.config.dataset._target_} cannot be cut into shards; type dataset=omniglot (its shards "
            "serve omniglot_characters and omniglot_pretraining too), mini_imagenet, cifar_fs or glyphs"
        )
    if held := composed.config.dataset.get("held_drawers"):
        raise ConfigError(
            f"dataset.held_drawers={list(held)}: shards hold the drawings of all drawers; leave it out here, and "
            "type it where the shards are used"
        )
    refuse_used("--out", options.out)
    train = source.classes_of("train")
    form = ShardForm(train.decoder, train.pictures(0).shape[1:])
    with creating("--out", options.out):
        options.out.mkdir(parents=True, exist_ok=True)
        shards = write_shards(options.out, form, groups(source, options.classes))
    print(f"{options.out}: {shards} shards")
    return OK


def groups(source: "HoldsClasses", size: int) -> Iterator[Mapping[str, "Images"]]:
    """The classes of a source by their identities, in groups of at most `size` classes of one split."""
    for split in ("train", "val", "test"):
        classes = source.classes_of(split)
        upright: dict[str, int] = {}
        for label, name in enumerate(classes.identities):
            upright.setdefault(name, label)  # the turned copies of a character come after it, with the same identity
        names = list(upright)
        for first in range(0, len(names), size):
            yield {name: classes.pictures(upright[name]) for name in names[first : first + size]}
