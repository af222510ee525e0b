"""The saved form of a learner, which `metalearn export` and `Learner.save` write: parameters, and a config as plain
values. It has no path of the machine that wrote it, and it may come from anybody.

As in a checkpoint, a `_target_` names a factory of `conf/`, or one that runs only if the reader admits it: the class of
a network, or a plugin's part (`metalearn.config.build`).
"""

import os
from collections.abc import Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor

from metalearn.config.saved import DATA, OWN, check_saved
from metalearn.config.values import leaves
from metalearn.errors import ConfigError
from metalearn.saved import form
from metalearn.saved.form import META, Kind, NotSavedError, SavedFolder, check_fields

GROUPS = ("algorithm", "inner", "loss", "model", "dataset", "trainer")
"""Groups of the config that are published."""

LEARNER = Kind("learner", 1, {
    "config": dict.fromkeys(GROUPS, dict) | {"precision": str}, "preprocessing": dict | None, "step": int,
})  # fmt: skip

OWN_FIELDS: dict[str, dict[str, Any]] = {
    "model": {OWN: str, "shape": [int], "transductive": bool, "dropout": bool},
    "dataset": {OWN: str, "shape": [int], "classes": dict},
}
"""The fields of a group that was an object of the user's own."""

WEIGHTS = "weights.safetensors"
"""The pretrained weights, where they came from a file. Networks need it even if their parameters are all saved: it says
how pictures are shown to them."""

OF_THE_MACHINE = ("root", "download", "shards", "seed", "eval_seed")
"""Keys of a dataset that are not published."""


def fill(
    folder: Path,
    params: Mapping[str, Tensor],
    config: Mapping[str, Any],
    facts: Mapping[str, Any],
    *,
    weights: bytes | None = None,
    without: Collection[str] = (),
) -> None:
    """Writes a learner into an empty folder.

    Args:
        facts: what else meta.json says: its `preprocessing`, the `step`, and fields for its readers.
        weights: a safetensors file in place of the path of the network's pretrained weights.
        without: keys of the config whose paths are left out.

    Raises:
        ConfigError: the config holds a path.
    """
    published = _published(config, carried=weights is not None, without=without)
    if weights is not None:
        (folder / WEIGHTS).write_bytes(weights)
    form.fill(folder, LEARNER, params, {"config": published} | dict(facts))


def read(folder: Path) -> SavedFolder:
    """The learner in a folder. The data of its config are those of this machine, wherever it says that they are.

    Raises:
        NotSavedError: it is damaged, not complete, or refused.
    """
    saved = form.load(folder, LEARNER)
    config = check_saved(saved.meta["config"])
    for group, fields in OWN_FIELDS.items():
        if OWN in config[group]:
            check_fields(config[group], fields, f"{META}: {group}")
    here = {"root": os.environ.get("METALEARN_DATA", DATA), "download": True, "shards": None, "seed": 0}
    here["eval_seed"] = config["trainer"].get("eval_seed")  # which it follows
    config["dataset"] |= {name: value for name, value in here.items() if name in config["dataset"]}
    weights = config["model"].get("weights")
    if weights == WEIGHTS:
        config["model"]["weights"] = str(folder.absolute() / WEIGHTS)
    elif is_path(weights):
        raise NotSavedError(f"{folder}: model.weights={weights}: is a path, and a published model names none")
    return saved


def _published(config: Mapping[str, Any], *, carried: bool, without: Collection[str]) -> dict[str, Any]:
    """A config without what only this machine has.

    Raises:
        ConfigError: a value is a path of this machine, or there is no such key.
    """
    parts: dict[str, Any] = {group: deepcopy(dict(config[group])) for group in GROUPS}
    dataset = parts["dataset"]
    gone = [name for name in OF_THE_MACHINE if name in dataset]
    dataset |= dict.fromkeys([*gone, *(["split"] if is_path(dataset.get("split")) else [])])  # a folder of lists
    if carried:
        parts["model"]["weights"] = WEIGHTS
    for key in without:
        *groups, name = key.split(".")
        node: Any = parts
        for group in groups:
            node = node.get(group) if isinstance(node, dict) else None
        if not isinstance(node, dict) or name not in node or isinstance(node[name], dict):
            paths = ", ".join(key for key, value in leaves(parts) if is_path(value)) or "none: leave it out"
            raise ConfigError(f"without={key}: is no key of the config that has a path; these have: {paths}")
        node[name] = None
    for key, value in leaves(parts):
        if is_path(value):
            raise ConfigError(
                f"{key}={value}: is a path of this machine, and a published model holds none; if the network needs no "
                f"file there once it has its parameters, type metalearn export … --without {key}, which tries that"
            )
    return parts | {"precision": config.get("precision", "float32")}


def is_path(value: object) -> bool:
    """Whether a value is a path, or has one within it."""
    if isinstance(value, dict | list):
        return any(map(is_path, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and (os.sep in value or "\\" in value or value.startswith("~"))
