"""What needs no training is worth on the drawn sets: class means of pixels, and of frozen features. Markdown tables.

    pip install 'metalearn-train[pictures]'
    metalearn data emoji && metalearn data kanji
    python -m benchmarks.drawn_pictures emoji kanji
    python -m benchmarks.drawn_pictures kanji --tasks 100 --only pixels
    python -m benchmarks.drawn_pictures --confusions outputs/protonet_emoji/seed0/checkpoints/best --tasks 2000

A query belongs to the class whose mean is nearest. The tasks are those of `metalearn train dataset=NAME` with the same
keys: the rows of trained learners in docs/results/drawn.md have the same test. With --confusions: a table of the pairs
of classes that a trained learner confuses most in its own test tasks; --page FILE.html shows their pictures.
"""

import argparse
import hashlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import metalearn
from metalearn.api.load import found as found_folder
from metalearn.classifier.backbones import backbone_of
from metalearn.cli.arguments import whole
from metalearn.config.build import build
from metalearn.config.compose import compose_config
from metalearn.errors import ConfigError
from metalearn.reporting import page
from metalearn.reporting.episode_pictures import picture_of, png_of
from metalearn.reporting.loggers.protocol import Picture
from metalearn.reporting.provenance import made_with
from metalearn.runs.published import named
from metalearn.storage.files import write_atomically
from metalearn.tasks.common.identities import class_names_of
from metalearn.types import TaskSource

HELD = {
    "emoji": "noto-v1,emojione-v1,fxemoji",
    "kanji": "bizudgothic,cwfs,cwyen,dotum,ipaexm,kiloji,mona,reggaeone,setofont,trainone,vl-gothic",
}
"""Drawers that a test of unseen ones holds back: of emoji the older three designs; of kanji eleven fonts, chosen before
anything was measured."""

FULL = {"emoji": 84, "kanji": 56}
"""The pictures' height and width, for the frozen network; pixels are compared in the size of the trained networks."""


class Protocol(NamedTuple):
    """A test: its ways, shots and queries, and what it shows, as `dataset.test` says."""

    ways: int
    shots: int
    queries: int
    test: str = "all"

    @property
    def title(self) -> str:
        shown = "" if self.test == "all" else f" {self.test}"
        return f"{self.ways}w{self.shots}s{shown}"

    def keys(self, name: str) -> list[str]:
        """The overrides of a test on the set called `name`."""
        held = [] if self.test == "all" else [f"dataset.held_drawers=[{HELD[name]}]", f"dataset.test={self.test}"]
        return [f"dataset.ways={self.ways}", f"dataset.shots={self.shots}", f"dataset.queries={self.queries}", *held]


PROTOCOLS = {
    "emoji": (
        Protocol(5, 1, 3), Protocol(5, 5, 1), Protocol(20, 1, 3), Protocol(5, 1, 1, "held"), Protocol(5, 1, 1, "cross"),
        Protocol(5, 5, 1, "cross"),
    ),
    "kanji": (
        Protocol(5, 1, 5), Protocol(5, 5, 5), Protocol(20, 1, 5), Protocol(5, 1, 5, "held"), Protocol(5, 1, 5, "cross"),
        Protocol(20, 1, 5, "held"), Protocol(20, 1, 5, "cross"),
    ),
}  # fmt: skip

SHOWN_PAIRS = 20
"""Pairs of classes in the table of confusions."""

Features = Callable[[Tensor], Tensor]
"""From pictures [n, c, h, w] in [0, 1] to features [n, d]."""


def frozen_features() -> Features:
    """Those of EfficientNet-Lite0. Each picture is computed once, whatever task it is in."""
    backbone, known = backbone_of(), dict[bytes, Tensor]()

    def features(pictures: Tensor) -> Tensor:
        names = [hashlib.sha256(picture.numpy().tobytes()).digest() for picture in pictures.contiguous()]
        fresh = {name: number for number, name in enumerate(names) if name not in known}
        if fresh:
            shown = pictures[list(fresh.values())].expand(-1, 3, -1, -1)
            size = backbone.form.size
            large = torch.nn.functional.interpolate(
                shown, size=(size, size), mode="bicubic", align_corners=False, antialias=True
            )
            with torch.inference_mode():
                found = backbone.network(large.clamp(0, 1))
            known.update(zip(fresh, found.clone(), strict=True))
        return torch.stack([known[name] for name in names])

    return features


def accuracy_of(source: TaskSource, features: Features, tasks: int) -> tuple[float, float]:
    """Mean and 95% interval of the accuracy over test tasks."""
    right = []
    for number in range(tasks):
        support, query = source.episodes("test", torch.tensor([number]))
        known, asked = (features(batch.x[0]) for batch in (support, query))
        ways = int(support.y.max()) + 1
        means = torch.stack([known[support.y[0] == label].mean(0) for label in range(ways)])
        right.append((torch.cdist(asked, means).argmin(1) == query.y[0]).double().mean())
    values = torch.stack(right)
    return values.mean().item(), 1.96 * values.std().item() / math.sqrt(tasks)


def source_of(name: str, protocol: Protocol, *keys: str) -> TaskSource:
    """The tasks of `metalearn train dataset=NAME` with the keys of a protocol."""
    found: TaskSource = build(compose_config([f"dataset={name}", *protocol.keys(name), *keys]).config, "dataset")
    return found


class Confusion(NamedTuple):
    """Two classes that were in a task together: how many queries were taken for one of the other class, and of how
    many; and the pictures [h, w, c] of each class in these tasks, each once."""

    wrong: int
    asked: int
    names: tuple[str, str]
    pictures: tuple[list[Picture], list[Picture]]


def confusions(checkpoint: str, tasks: int) -> list[Confusion]:
    """The pairs of classes that a learner confuses in the first of its own test tasks, as its run's test normalises
    them. The most frequent come first."""
    saved = named("checkpoint", found_folder("--confusions", Path(checkpoint)))
    learner = metalearn.load(checkpoint, transductive=saved.meta["config"]["model"].get("transductive", False))
    wrong, asked_of = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    pictures: dict[str, dict[bytes, Picture]] = defaultdict(dict)
    for number in range(tasks):
        names = class_names_of(learner.taught.source, "test", number)
        support, query = learner.taught.source.episodes("test", torch.tensor([number]))
        with learner.computing():
            adapted = learner.taught.algorithm.adapt(learner.params, support, None)
            answers = adapted(query.x)[0].argmax(1).tolist()
        for answer, label in zip(answers, query.y[0].tolist(), strict=True):
            asked_of.update(_pair(names[label], other) for other in names if other != names[label])
            if answer != label:
                wrong[_pair(names[label], names[answer])] += 1
        for batch in (support, query):
            shown = (batch.x[0] * 255).round().byte().movedim(1, -1).numpy()
            for label, picture in zip(batch.y[0].tolist(), shown, strict=True):
                pictures[names[label]].setdefault(picture.tobytes(), picture)
    kept = {name: [found[key] for key in sorted(found)] for name, found in pictures.items()}
    return [
        Confusion(count, asked_of[pair], pair, (kept[pair[0]], kept[pair[1]])) for pair, count in wrong.most_common()
    ]


def _pair(one: str, other: str) -> tuple[str, str]:
    return min(one, other), max(one, other)


def confusions_page(found: Sequence[Confusion], checkpoint: str) -> str:
    """A page that shows the pictures of both classes of each pair, in the size that the learner sees."""
    sections = [
        page.section(
            f"{number}. {' and '.join(pair.names)}: {pair.wrong} of {pair.asked} queries",
            *(
                f'<p class="class">{page.text(name)}</p><div class="tiles">'
                + "".join(
                    page.tile(png_of(picture_of(torch.from_numpy(one).movedim(-1, 0) / 255)), name) for one in some
                )
                + "</div>"
                for name, some in zip(pair.names, pair.pictures, strict=True)
            ),
        )
        for number, pair in enumerate(found, start=1)
    ]
    title = "Classes that are taken for each other"
    return page.page(title, [f"<h1>{title}</h1>", page.note(f"In the test tasks of {checkpoint}."), *sections])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(PROTOCOLS)}")
    parser.add_argument("--confusions", metavar="CHECKPOINT", help="the pairs of classes that this learner confuses")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write an HTML page with their pictures")
    parser.add_argument("--tasks", type=whole(2), default=600, help="test tasks of a figure")
    parser.add_argument("--only", choices=["pixels", "frozen", "frozen, of length 1"], help="one row")
    options = parser.parse_args(arguments)
    if unknown := set(options.sets).difference(PROTOCOLS):
        parser.error(f"{', '.join(unknown)}: no such set; allowed: {', '.join(PROTOCOLS)}")
    if options.page and not options.confusions:
        parser.error("--page shows the pictures of --confusions CHECKPOINT: add that")
    if bool(options.sets or options.only) == bool(options.confusions):
        parser.error("type sets, or --confusions CHECKPOINT alone")
    try:
        _show(options)
    except ConfigError as error:
        parser.error(str(error))


def _show(options: argparse.Namespace) -> None:
    if options.confusions:
        found = confusions(options.confusions, options.tasks)[:SHOWN_PAIRS]
        if options.page:
            write_atomically(options.page, confusions_page(found, options.confusions))
        print("| taken for each other | queries | of |\n| --- | --- | --- |")
        for pair in found:
            print(f"| {', '.join(pair.names)} | {pair.wrong} | {pair.asked} |")
        print("\n" + "; ".join(map(str, made_with().values())))
        return
    frozen = frozen_features()
    rows: dict[str, Features] = {
        "pixels": lambda pictures: pictures.flatten(1),
        "frozen": frozen,
        "frozen, of length 1": lambda pictures: torch.nn.functional.normalize(frozen(pictures)),
    }
    for name in options.sets:
        protocols = PROTOCOLS[name]
        print(
            f"\n| {name} | {' | '.join(one.title for one in protocols)} | minutes |\n|{' --- |' * (len(protocols) + 2)}"
        )
        for row in [options.only] if options.only else rows:
            began = time.perf_counter()
            size = [f"dataset.image_size={FULL[name]}"] if row != "pixels" else []
            cells = [
                "{:.2%} ± {:.2%}".format(*accuracy_of(source_of(name, one, *size), rows[row], options.tasks))
                for one in protocols
            ]
            print(f"| {row} | {' | '.join(cells)} | {(time.perf_counter() - began) / 60:.1f} |", flush=True)
    print("\n" + "; ".join(map(str, made_with().values())))


if __name__ == "__main__":
    main()
