"""Saved configs: those of run folders, and that of a checkpoint, changed for an evaluation."""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metalearn.config import compose
from metalearn.config.values import Config, differences, keys_of, leaves, to_container
from metalearn.errors import ConfigError
from metalearn.saved.form import MANIFEST, USES, kind_of
from metalearn.storage.files import is_folder

STARTS = ("resume", "resume_changes", "pause_after", "init_from", "init_strict")  # where a run starts and pauses
TRUST = ("plugins", "seen_classes")  # keys of an evaluation that only its command line may set
OF_THE_MACHINE = ("strategy", "partitioner", "launch")
OF_TRAINING = ("optimizer", "reducer", "logger", "checkpoint", "run", "experiment", "hydra", *STARTS)
"""Groups and keys that get their defaults: an evaluation may run on another machine, and the others have no effect."""

LINKS = {
    "dataset.seed": "seed",
    "dataset.eval_seed": "trainer.eval_seed",
    "algorithm.ways": "dataset.ways",
    "algorithm.meta_batch": "trainer.meta_batch_size",
}
"""Keys that follow other keys. A checkpoint has their values as numbers, which do not follow."""

NETWORK = "model.network"  # the key below which a checkpoint may name a network that is not ours
OWN = "own-object"  # the key of a part that was an object of a program; no factory can have such a parameter
OUTPUTS = ("ways", "outputs")  # keys of models that say how many outputs there are
DATA = "data"  # dataset.root where `METALEARN_DATA` is not set, as in `conf/dataset/`


def read_config(path: Path) -> Config:
    """The config in the yaml of a run folder, where Hydra has written it as it was composed: with `${…}`, which are
    resolved here. Those of the environment stay as they are, since it may be another one now. Raises OSError if there
    is no such file, or it may not be read, and ValueError if it holds no config."""
    config = _loaded(path)
    if not isinstance(config, DictConfig):
        raise ValueError(f"{path}: holds no config")
    for key, value in leaves(to_container(config, resolve=False)):
        if "${" in str(value) and "${oc.env:" not in str(value):
            with suppress(OmegaConfBaseException, ConfigError):
                OmegaConf.update(config, key, OmegaConf.select(config, key))
    return to_container(config, resolve=False)


def typed_keys(run_dir: Path) -> dict[str, str]:
    """The keys and groups that were typed for a run, with their values, as its .hydra folder has them; none without it.
    Raises OSError or ValueError as `read_config`."""
    path = run_dir / ".hydra" / "overrides.yaml"
    # Not resolved: a typed `${seed}` stands for a key of the config, which this list has not.
    words: Any = OmegaConf.to_container(_loaded(path), resolve=False) if path.exists() else []
    pairs = (str(word).lstrip("+~").partition("=") for word in words)
    return {key: value for key, _, value in pairs}


def _loaded(path: Path) -> DictConfig | ListConfig:
    try:
        return OmegaConf.load(path)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: holds no YAML ({str(error).splitlines()[0]})") from error


def check_saved(saved: object) -> dict[str, Any]:
    """The config of a checkpoint. Raises ConfigError if it names a resolver, which would run here, or is none."""
    if not isinstance(saved, dict) or "${" in json.dumps(saved, default=str):
        raise ConfigError("the checkpoint's meta.json holds no config of plain values; take another checkpoint")
    return saved


def trained_otherwise(source: str, saved: Config, present: Config, sections: Sequence[str]) -> list[str]:
    """A line for each key of these sections that the config of a checkpoint, the `source`, has otherwise than the
    present one, but for the number of outputs. Where shapes are the same, as with another `downsample`, the network
    computes something else with the parameters."""
    lines = []
    for section in sections:
        pairs = differences(saved[section], present[section])
        if "_target_" in pairs:  # the other keys are those of another component
            pairs = {"_target_": pairs["_target_"]}
        lines += [
            f"{source}: was trained with {section}.{key}={old!r:.60}, which is {new!r:.60} here"
            for key, (old, new) in pairs.items()
            if key not in OUTPUTS
        ]
    return lines


def changed_config(
    saved: object, overrides: Sequence[str], aliases: Mapping[str, str], objects: Collection[str] = ()
) -> DictConfig:
    """The config of a checkpoint of any origin, the `saved` one in its meta.json, changed by overrides. Foreign code
    runs only if an override names it. Its KEY may be one of the `aliases`, short names of keys; the caller has
    `objects` for these groups. Raises ConfigError if a key or a choice does not exist or has no effect on an
    evaluation, or a value cannot be read; or the saved config is refused."""
    plain = check_saved(saved)
    for name in [name for name in ("algorithm", "model", "dataset") if name not in objects]:
        group = plain.get(name)
        if isinstance(group, Mapping) and OWN in group:
            raise ConfigError(
                f"{name}: was an object of a program ({str(group[OWN])[:40]}), and no code of it is saved; load it in "
                "Python, by metalearn.load, which takes such objects"
            )
        if not isinstance(group, Mapping) or not isinstance(group.get("_target_"), str):
            raise ConfigError(
                f"{name}: the checkpoint's config does not say which {name} the run had; take another checkpoint"
            )
    all_overrides = compose.parsed(compose.with_sets(overrides))
    for override in all_overrides:
        if override.key_or_group.partition(".")[0].partition("/")[0] in OF_TRAINING:
            raise ConfigError(f"{override.input_line}: has no effect on an evaluation; leave it out")
        if override.is_sweep_override() or override.is_delete():
            raise ConfigError(f"{override.input_line}: must be one value; type {override.key_or_group}=VALUE")
    choices, values = compose.sorted_out(all_overrides)
    for choice in choices:
        compose.check_choice(choice)
    selected = {choice.key_or_group: str(choice.value()) for choice in choices}
    named = {aliases.get(override.key_or_group, override.key_or_group): override.value() for override in values}
    try:
        selection = [f"{group}={option}" for group, option in selected.items()]
        config = compose.composed_by_hydra(["~experiment", *selection])
        OmegaConf.set_struct(config, False)  # a network's arguments have any names
        for name in {*map(str, config)} & plain.keys() - {*OF_THE_MACHINE, *TRUST, *OF_TRAINING, *selected}:
            config[name] = plain[name]
        config.workers = None  # that of the training says nothing about this machine
        keys, saved_values = keys_of(config), dict(leaves(plain))
        for key, followed in LINKS.items():
            if key not in keys:
                continue
            both = {key, followed} <= saved_values.keys()
            if key.partition(".")[0] in selected or not both or saved_values[key] == saved_values[followed]:
                OmegaConf.update(config, key, f"${{{followed}}}")
        _find_data(config)
        for key, value in named.items():
            compose.check_key(key, keys)
            OmegaConf.update(config, key, value)
        compose.check_plugins(config, named)
        target = OmegaConf.select(config, f"{NETWORK}._target_")
        if target is not None and "model" not in selected and not {NETWORK, f"{NETWORK}._target_"} & named.keys():
            raise ConfigError(
                f"{NETWORK}._target_={target}: only the checkpoint names this network, and its code would run here; "
                f"if you trust it, type {NETWORK}._target_={target}"
            )
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{str(error).splitlines()[0]}: the overrides do not fit the checkpoint's config") from error
    return config


def _find_data(config: DictConfig) -> None:
    """Takes this machine's dataset.root for a missing one; downloads into no folder that the checkpoint names."""
    config.dataset.pop("shards", None)  # of older checkpoints
    root, usual = config.dataset.get("root"), os.environ.get("METALEARN_DATA", DATA)
    if root is None or root == usual:
        return
    downloads = "download" in config.dataset
    if not is_folder(Path(str(root))) and (downloads or "METALEARN_DATA" in os.environ):
        config.dataset.root = usual
    elif downloads:
        config.dataset.download = False


def check_checkpoint(key: str, path: object, *, published: bool = True) -> None:
    """Checks that `key` names the folder of a checkpoint or, if that will do, of a `published` model. Raises
    ConfigError if it is something else. The message says what to type in its place."""
    if not isinstance(path, str) or not path or not is_folder(Path(path)):
        raise ConfigError(f"{key}={path}: must be the folder of a checkpoint; type {key}=…/checkpoints/best")
    folder = Path(path)
    kind = kind_of(folder)
    is_checkpoint = kind in (None, "checkpoint") and (folder / MANIFEST).exists()  # None: its meta.json is damaged
    if is_checkpoint or (kind == "learner" and published):
        return
    if kind == "learner":
        raise ConfigError(
            f"{key}={path}: is a published model, which has no state to go on from; type init_from={path}, which "
            "begins with its parameters"
        )
    names = ["checkpoints/best", "checkpoints/last"] if published else ["checkpoints/last", "checkpoints/best"]
    inside = next((name for name in names if is_folder(folder / name)), None)
    if inside is not None:
        raise ConfigError(f"{key}={path}: is the folder of a run; type {key}={folder / inside}")
    if kind in USES:
        raise ConfigError(f"{key}={path}: is {USES[kind].format(folder=path)}")
    raise ConfigError(f"{key}={path}: holds no complete checkpoint; type {key}=…/checkpoints/best")


def run_folder_of(checkpoint: Path) -> Path:
    """The run folder of a checkpoint, two levels above …/checkpoints/step_000100; links are followed. For any other
    folder, such as a published model, the folder itself."""
    folder = checkpoint.resolve()
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder
