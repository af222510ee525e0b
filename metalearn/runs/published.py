"""The published form of what a run has learned: a folder with `model.safetensors` (the parameters) and `model.json`.

`model.json` says in plain values how to build and use the network. It names options of `conf/`; where a plugin makes a
part, it names the plugin's factory, which runs only if the reader admits the plugin. It holds no path of the machine
that wrote it.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from metalearn.config.compose import PACKAGE
from metalearn.config.options import shipped
from metalearn.config.saved import DATA, DESCRIPTION, FORMERLY, OWN, check_saved
from metalearn.config.values import to_container
from metalearn.errors import ConfigError, nearest
from metalearn.runs.checkpoint import Snapshot, read_named
from metalearn.runs.seen import KEY
from metalearn.saved.form import digest_of
from metalearn.storage.files import read_object, whole_folder

PARAMETERS = "model.safetensors"

WEIGHTS, WEIGHTS_DIGEST = "weights.safetensors", "weights_sha256"
"""The file of pretrained weights, where they came from a file, and the field of its digest. Networks need it even if
their parameters are all in `PARAMETERS`: it says how pictures are shown to them."""

CARD = "README.md"

FILES = (PARAMETERS, DESCRIPTION, WEIGHTS, CARD)

FORMAT = "metalearn-model-1"

KIND = "kind"
"""The key of a group that names the option of `conf/`."""

FACTORY = "made-by"
"""In place of `KIND`, the key that names a plugin's factory. No factory can have a parameter of this name."""

GROUPS = {
    "algorithm": "algorithm",
    "inner": "inner",
    "loss": "loss",
    "model": "architecture",
    "dataset": "dataset",
    "trainer": "trainer",
}
"""Groups of the config → their names in model.json."""

NOTES: dict[str, dict[str, type]] = {
    "model": {"shape": list, "transductive": bool, "dropout": bool},
    "dataset": {"shape": list, "classes": dict},
}
"""The fields of a group that was an object of the user's own, beside its name, and their types."""

OUTSIDE = {
    "ways": ("dataset", "ways"), "shots": ("dataset", "shots"), "transductive": ("model", "transductive"),
    "image_size": ("dataset", "image_size"), "channels": ("dataset", "channels"),
}  # fmt: skip
"""Keys that stand at the top of model.json, or in its preprocessing, and not in their group."""

OF_THE_MACHINE = {"root": None, "download": True, "shards": None, "seed": 0, "eval_seed": 0}
"""Keys of a dataset that are not published, and what a reader takes: its own folder, and seeds that follow others."""

REQUIRED: dict[str, type | tuple[type, ...]] = {
    "format": str, "algorithm": dict, "inner": dict, "loss": dict, "architecture": dict, "dataset": dict,
    "trainer": dict, "preprocessing": (dict, type(None)), "ways": (int, type(None)), "shots": (int, list, type(None)),
    "transductive": (bool, type(None)), "step": int, "precision": str, "sha256": str,
}  # fmt: skip
"""Fields without which a model cannot be used, and their types. The others are for its readers."""


OF_A_LEARNER = ("validation", "queries_together", "probe")
"""Fields that only a learner has that was saved by `Learner.save`."""


def is_published(path: Path) -> bool:
    """Whether the folder holds a published model."""
    return (path / DESCRIPTION).exists() or (path / DESCRIPTION).is_symlink()


def named(key: str, path: Path, *, links: bool = False) -> Snapshot:
    """The published model or the checkpoint that `key` names; a published one has no state, and its files may be
    `links`.

    Raises:
        ConfigError: it cannot be read, or it is refused.
    """
    return read(key, path, links=links) if is_published(path) else read_named(key, path)


def parameters_in(path: Path) -> Path:
    """The file of the parameters in the folder of a published model, or of a checkpoint."""
    return path / (PARAMETERS if is_published(path) else "params.safetensors")


# Writing


def write(
    key: str,
    folder: Path,
    snapshot: Snapshot,
    facts: Mapping[str, Any],
    *,
    weights: bytes | None = None,
    card: str = "",
    without: Collection[str] = (),
) -> None:
    """Writes the folder, whole or not at all.

    Args:
        folder: must not exist, or be empty; messages name it by `key`.
        snapshot: parameters, step and config. `state` is left out.
        facts: what else model.json says: its `preprocessing`, and fields for its readers.
        weights: a safetensors file in place of the path of the network's pretrained weights.
        card: the text of README.md, if there is to be one.
        without: keys of model.json whose values are left out.

    Raises:
        ConfigError: the folder is not empty or cannot be written, or the config holds a path.
    """
    with whole_folder(key, folder) as temporary:
        params = {name: value.detach().cpu().contiguous() for name, value in snapshot.params.items()}
        save_file(params, temporary / PARAMETERS)
        content = description(snapshot, facts, carried=weights is not None, without=without)
        content |= {"sha256": digest_of(temporary / PARAMETERS)}
        if weights is not None:
            (temporary / WEIGHTS).write_bytes(weights)
            content |= {WEIGHTS_DIGEST: digest_of(temporary / WEIGHTS)}
        if card:
            (temporary / CARD).write_text(card, encoding="utf-8")
        (temporary / DESCRIPTION).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def weights_file(config: Mapping[str, Any]) -> str | None:
    """The path of the pretrained weights that a config names, if a file has them and this program reads it."""
    model = config["model"]
    weights = model.get("weights")
    known = OWN not in model and option_of("model", model["_target_"]) is not None
    return weights if known and _is_path(weights) else None


def description(
    snapshot: Snapshot, facts: Mapping[str, Any], *, carried: bool = False, without: Collection[str] = ()
) -> dict[str, Any]:
    """The content of model.json, without digests.

    Args:
        carried: the pretrained weights are a file of the folder.
        without: keys whose values are left out.

    Raises:
        ConfigError: a value is a path of this machine, or there is no such key.
    """
    config = snapshot.meta["config"]
    parts = {name: _part(group, (FORMERLY | config)[group]) for group, name in GROUPS.items()}
    top = {key: config[group].get(name) for key, (group, name) in OUTSIDE.items()}
    if _is_path(parts["dataset"].get("split")):
        parts["dataset"]["split"] = None  # a folder of lists
    # A reader refuses every `_target_`, which names code; a class is looked up only if the user names it too.
    network = parts["architecture"].get("network")
    if isinstance(network, dict):
        parts["architecture"]["network"] = {"class" if key == "_target_" else key: v for key, v in network.items()}
    if carried:
        parts["architecture"]["weights"] = WEIGHTS
    for key in without:
        _leave_out(parts, key)
    for key, value in _leaves(parts):
        if _is_path(value):
            raise ConfigError(
                f"{key}={value}: is a path of this machine, and a published model holds none; if the network needs no "
                f"file there once it has its parameters, type metalearn export … --without {key}, which tries that"
            )
    sizes = {name: top[name] for name in ("ways", "shots", "transductive")}
    precision = config.get("precision", "float32")
    numbers = {"step": snapshot.meta["step"], "seed": config.get("seed"), "precision": precision}
    seen = {KEY: snapshot.meta[KEY]} if KEY in snapshot.meta else {}
    return {"format": FORMAT} | parts | sizes | dict(facts) | numbers | seen


def _leave_out(parts: dict[str, Any], key: str) -> None:
    node, names = parts, key.split(".")
    for name in names[:-1]:
        below = node.get(name)
        node = below if isinstance(below, dict) else {}
    if names[-1] not in node or isinstance(node[names[-1]], dict):
        known = ", ".join(key for key, value in _leaves(parts) if _is_path(value)) or "none: leave it out"
        raise ConfigError(f"without={key}: is no key of model.json that has a path; these have: {known}")
    node[names[-1]] = None


def _part(group: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """A group as model.json has it. A plugin's part keeps all keys; keys of the machine lose their values. A part that
    was an object of the user's own is a note alone."""
    if OWN in keys:
        return dict(keys)
    values = {name: value for name, value in keys.items() if name != "_target_"}
    of_the_machine = OF_THE_MACHINE if group == "dataset" else {}
    option = option_of(group, keys["_target_"])
    if option is None:  # a plugin's, whose yaml the reader does not have: it must learn all keys from here
        return {FACTORY: keys["_target_"]} | values | {name: None for name in of_the_machine if name in values}
    elsewhere = {name for of, name in OUTSIDE.values() if of == group}
    return {KIND: option} | {name: values[name] for name in values if name not in (elsewhere | of_the_machine.keys())}


def option_of(group: str, target: str) -> str | None:
    """The option of a group whose file in `conf/` names the factory `target`; if there are several, the one of its own
    name; None if there is none."""
    found = [option for option, content in _options(group).items() if content.get("_target_") == target]
    own = target.rpartition(".")[2]
    return own if own in found else next(iter(found), None)


@cache
def _options(group: str) -> dict[str, dict[str, Any]]:
    """The content of a group's yamls by their names. Yamls of the user's own folder are left out."""
    return {option: to_container(keys, resolve=False) for option, keys in shipped(group).items()}


def _is_path(value: object) -> bool:
    return isinstance(value, str) and (os.sep in value or "\\" in value or value.startswith("~"))


def _leaves(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, value) of everything that is neither a dict nor a list."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _leaves(value, f"{prefix}.{name}".lstrip("."))
    elif isinstance(node, list):
        for value in node:
            yield from _leaves(value, prefix)
    else:
        yield prefix, node


# Reading


def read(key: str, path: Path, *, links: bool = False) -> Snapshot:
    """The published model in a folder, with an empty state. Its `meta` has the step, a config and the seen classes as a
    checkpoint has them, and the `preprocessing`. Its files may be `links`, as those in the cache of a hub are.

    Raises:
        ConfigError: it is damaged, not complete, or refused: the config's `key` names it.
    """
    try:
        for name in (DESCRIPTION, PARAMETERS, WEIGHTS):
            # A folder from elsewhere must not lead to other files of this machine.
            if (path / name).is_symlink() and not links:
                raise ValueError(f"{name} is a link; copy the file that it leads to")
        content = {"loss": {KIND: "auto"}} | check_saved(read_object(path / DESCRIPTION))
        _check_fields(content)
        if content["sha256"] != digest_of(path / PARAMETERS):
            raise ValueError(f"{PARAMETERS} differs from what was published (sha256 in {DESCRIPTION})")
        # Copies, as in `checkpoint.read`: kernels may round by the alignment of a mapped file.
        params = {name: value.clone() for name, value in load_file(path / PARAMETERS).items()}
        config = _config(content)
        _place_weights(config, content, path)
    except Exception as error:  # safetensors raises many types
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{key}={path}: is no published model that can be used: {reason.splitlines()[0]}; publish or save it anew, "
            "or take another"
        ) from error
    kept = {name: content[name] for name in ("step", "preprocessing", KEY, *OF_A_LEARNER) if name in content}
    return Snapshot(params, {}, kept | {"config": config})


def _place_weights(config: dict[str, Any], content: Mapping[str, Any], path: Path) -> None:
    """Names the file of pretrained weights as it lies here."""
    weights = config["model"].get("weights")
    if _is_path(weights):
        raise ValueError(f"{DESCRIPTION}: architecture.weights is a path, and a published model names none")
    if weights == WEIGHTS:
        if content.get(WEIGHTS_DIGEST) != digest_of(path / WEIGHTS):
            raise ValueError(f"{WEIGHTS} differs from what was published ({WEIGHTS_DIGEST} in {DESCRIPTION})")
        config["model"]["weights"] = str(path.absolute() / WEIGHTS)


def _check_fields(content: Mapping[str, Any]) -> None:
    for name, kind in REQUIRED.items():
        if name not in content:
            raise ValueError(f"{DESCRIPTION} has no field {name}")
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if type(content[name]) not in allowed:
            wanted = " or ".join("null" if one is type(None) else one.__name__ for one in allowed)
            raise ValueError(f"{DESCRIPTION}: {name} must be {wanted}, and is {type(content[name]).__name__}")
    if content["format"] != FORMAT:
        raise ValueError(f"{DESCRIPTION}: format={content['format'][:40]!r} is not {FORMAT!r}")
    for key, _ in _keys(content):
        if key == "_target_":
            raise ValueError(f"{DESCRIPTION} has a _target_, which names code, and a published model never does")


def _keys(node: object) -> Iterator[tuple[str, object]]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield name, value
            yield from _keys(value)
    elif isinstance(node, list):
        for value in node:
            yield from _keys(value)


def _config(content: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a published model, as a checkpoint has it."""
    config: dict[str, Any] = {"precision": content["precision"]}
    for group, name in GROUPS.items():
        make = _group_of_plugin if FACTORY in content[name] else _note if OWN in content[name] else _group
        config[group] = make(group, content)
    network = config["model"].get("network")
    if isinstance(network, dict):
        config["model"]["network"] = {"_target_" if key == "class" else key: v for key, v in network.items()}
    if "eval_seed" in config["dataset"]:
        config["dataset"]["eval_seed"] = config["trainer"].get("eval_seed")  # which it follows
    return config


def _group(group: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """A group that is an option of `conf/`."""
    name = GROUPS[group]
    option = content[name].get(KIND)
    if option not in list(_options(group)):
        hint = nearest(str(option)[:40], list(_options(group)))
        raise ValueError(f"{DESCRIPTION}: {name}.{KIND}={str(option)[:40]!r} is no option of conf/{group}{hint}")
    values = {key: value for key, value in content[name].items() if key != KIND}
    own = _options(group)[option]
    outside = {key: _outside(content, top) for top, (of, key) in OUTSIDE.items() if of == group and key in own}
    here = {key: value for key, value in _here(group).items() if key in own}
    return {"_target_": own["_target_"]} | values | outside | here


def _note(group: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """A group that was an object of the user's own."""
    name = GROUPS[group]
    values, wanted = content[name], {OWN: str} | NOTES.get(group, {})
    for key, kind in wanted.items():
        if type(values.get(key)) is not kind:
            raise ValueError(f"{DESCRIPTION}: {name}.{key} must be {kind.__name__}")
    return dict(values)


def _group_of_plugin(group: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """A group that a plugin's factory makes. It is looked up only where the config is built, if it is admitted."""
    name = GROUPS[group]
    values = dict(content[name])
    target = values.pop(FACTORY)
    if not isinstance(target, str) or not PACKAGE.fullmatch(target):
        raise ValueError(f"{DESCRIPTION}: {name}.{FACTORY}={str(target)[:40]!r} is no package.module.name")
    here = {key: value for key, value in _here(group).items() if key in values}
    return {"_target_": target} | values | here


def _here(group: str) -> dict[str, Any]:
    """The values of keys that are not published."""
    return OF_THE_MACHINE | {"root": os.environ.get("METALEARN_DATA", DATA)} if group == "dataset" else {}


def _outside(content: Mapping[str, Any], name: str) -> object:
    preprocessing = content["preprocessing"] or {}
    return content[name] if name in content else preprocessing.get(name)
