"""From a run to its published form."""

import math
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from metalearn.api.load import found, load_as
from metalearn.api.pictures import described
from metalearn.config.foreign import check_saved
from metalearn.config.saved import FORMERLY, check_groups, run_folder_of
from metalearn.errors import ConfigError
from metalearn.runs.metrics import METRIC_NAMES
from metalearn.runs.published import GROUPS, is_published, named, option_of, write
from metalearn.runs.seen import KEY, is_count
from metalearn.storage.files import read_json, refuse_nameless, refuse_used

LICENCES = {
    "omniglot": "MIT (Lake, Salakhutdinov and Tenenbaum 2015)",
    "glyphs": "Apache-2.0 (drawn by this program)",
    "sinusoid": "Apache-2.0 (made by this program)",
    "mini_imagenet": "ImageNet's terms of access: research and education, not commercial",
    "cifar_fs": "none published (CIFAR-100, Krizhevsky 2009)",
    "fc100": "none published (CIFAR-100, Krizhevsky 2009)",
    "emoji": "Apache-2.0, MIT, CC-BY-4.0 and CC-BY-SA-4.0, by design (its ATTRIBUTION.txt)",
    "kanji": "free licences of fonts, by design (its ATTRIBUTION.txt)",
}
"""Licences of the data behind the datasets of `conf/`."""

SAME_DATA = {"omniglot_pretraining": "omniglot", "omniglot_drawers": "omniglot", "glyph_pretraining": "glyphs"}

_FIGURES = (*METRIC_NAMES, "ci95", "tasks", "transductive")
_VERSIONS = ("torch", "numpy", "python")
_LONGEST_VERSION = 40


def export(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    licence: str | None = None,
    network: str | None = None,
    plugins: Sequence[str] = (),
    keys: tuple[str, str] = ("path", "out"),
) -> dict[str, Any]:
    """Publishes a run's best checkpoint, or a checkpoint, in the folder `out`; returns the facts in its model.json.

    Args:
        licence: the licence of the data, if this program does not know it.
        network, plugins: as for `metalearn.load`, which needs them again to load what is published.
        keys: what messages call `run` and `out`.

    Raises:
        ConfigError: nothing that can be loaded, or `out` is not empty or cannot be written.
    """
    run_key, out_key = keys
    folder = found(run_key, Path(run))
    refuse_nameless(out_key, Path(out))
    refuse_used(out_key, Path(out))
    if is_published(folder):
        raise ConfigError(f"{run_key}={folder}: is published already; copy the folder")
    learner = load_as(run_key, folder, network=network, plugins=plugins)
    saved = named(run_key, folder)
    config = check_saved(saved.meta["config"])
    check_groups(FORMERLY | config, tuple(GROUPS))
    dataset = option_of("dataset", config["dataset"]["_target_"]) or ""
    facts = {
        "preprocessing": described(learner.form),
        "any_ways": learner.form is not None and learner.ways is None,
        "test": _test_of(folder, saved.meta["step"]),
        "licence": licence or LICENCES.get(SAME_DATA.get(dataset, dataset)),
        "versions": _versions(saved.meta.get("versions")),
    }
    write(out_key, Path(out), saved, facts)
    return facts


def _test_of(folder: Path, step: int) -> dict[str, Any] | None:
    """The result of the run's test, if `folder` is the checkpoint that was tested: the best one of a completed run."""
    # If the run has gone on since, its best checkpoint may be of a later step; so the step is compared too.
    run = run_folder_of(folder)
    best, result = run / "checkpoints/best", read_json(run / "result.json")
    if result.get("status") != "completed" or not best.exists() or not best.samefile(folder):
        return None
    test, validated = result.get("test"), result.get("val")
    if not isinstance(test, dict) or not isinstance(validated, dict) or validated.get("step") != step:
        return None
    figures = {name: test[name] for name in _FIGURES if name in test}
    known = all(isinstance(value, int | float) and math.isfinite(value) for value in figures.values())
    if KEY in test:
        figures[KEY] = test[KEY]
        known = known and is_count(test[KEY])
    return figures if known else None  # the file may be of any origin


def _versions(saved: object) -> dict[str, str]:
    """The versions of the run's libraries, and the version of this program."""
    known = saved if isinstance(saved, dict) else {}
    versions = {name: str(known[name])[:_LONGEST_VERSION] for name in _VERSIONS if name in known}
    try:
        return {"metalearn": metadata.version("metalearn")} | versions
    except metadata.PackageNotFoundError:  # the program runs from its folder
        return versions
