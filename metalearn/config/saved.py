"""The config of a checkpoint, changed for an evaluation."""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metalearn.config.compose import (
    check_choice,
    check_key,
    check_plugins,
    composed_by_hydra,
    parsed,
    sorted_out,
    with_sets,
)
from metalearn.config.foreign import check_saved
from metalearn.config.values import keys_of, leaves
from metalearn.errors import ConfigError
from metalearn.storage.files import is_folder

OF_THE_MACHINE = ("strategy", "partitioner", "launch")
"""Groups that get their defaults: an evaluation may run on another machine than the training."""

STARTS = ("resume", "resume_changes", "pause_after", "init_from", "init_strict")
"""Keys that say where a run starts and pauses."""

TRUST = ("plugins", "seen_classes")
"""Keys of an evaluation that only its command line may set."""

OF_TRAINING = ("optimizer", "reducer", "logger", "checkpoint", "run", "experiment", "hydra", *STARTS)
"""Groups and keys without effect on an evaluation. They get their defaults."""

LINKS = {
    "dataset.seed": "${seed}",
    "dataset.eval_seed": "${trainer.eval_seed}",
    "algorithm.ways": "${dataset.ways}",
    "algorithm.meta_batch": "${trainer.meta_batch_size}",
}
"""Keys that follow other keys. A checkpoint has their values as numbers, which do not follow."""

FORMERLY = {
    "loss": {"_target_": "metalearn.algorithms.common.losses.auto"},
    "metric": {"_target_": "metalearn.algorithms.common.metrics.auto"},
}
"""Groups that older configs lack, and what they stand for."""

FORMER_KEYS = {
    "trainer.patience": None, "trainer.best_by": "metric", "trainer.draw_ahead": "auto",
    "optimizer.clip_norm": None, "optimizer.clip_value": None, "optimizer.weight_decay": 0.0,
}  # fmt: skip
"""Keys that older configs lack, and what they stand for."""

MANIFEST, DESCRIPTION = "manifest.json", "model.json"
"""Files that mark the folder of a checkpoint, and that of a published model."""

NETWORK = "model.network"
"""The key below which a checkpoint may name a network that is not ours."""

OWN = "own-object"
"""The key of a part that was an object of the user's own: its name. No factory can have a parameter of this name."""

DATA = "data"
"""dataset.root where `METALEARN_DATA` is not set, as in `conf/dataset/`."""


def changed_config(
    saved: object, overrides: Sequence[str], aliases: Mapping[str, str], own: Collection[str] = ()
) -> DictConfig:
    """The config of a checkpoint of any origin, changed by overrides. Its values are never resolved, and foreign code
    runs only if an override names it.

    Args:
        saved: the config in its meta.json.
        overrides: `GROUP=OPTION` and `KEY=VALUE`; KEY may be an alias.
        aliases: short names of keys.
        own: groups that the caller has objects for.

    Raises:
        ConfigError: a key or a choice does not exist or has no effect on an evaluation, or a value cannot be read; or
            the saved config is refused.
    """
    plain = check_saved(saved)
    check_groups(plain, [name for name in ("algorithm", "model", "dataset") if name not in own])
    all_overrides = parsed(with_sets(overrides))
    for override in all_overrides:
        _check_part(override)
    choices, values = sorted_out(all_overrides)
    for choice in choices:
        check_choice(choice)
    chosen = {choice.key_or_group: str(choice.value()) for choice in choices}
    named = {aliases.get(override.key_or_group, override.key_or_group): override.value() for override in values}
    try:
        fresh = composed_by_hydra(["~experiment", *(f"{group}={option}" for group, option in chosen.items())])
        config = _with_saved(fresh, plain, {*OF_THE_MACHINE, *TRUST, *OF_TRAINING, *chosen})
        config.workers = None
        known, saved_values = keys_of(config), dict(leaves(plain))
        for key, link in LINKS.items():
            if key in known and (key.partition(".")[0] in chosen or _follows(saved_values, key, link)):
                OmegaConf.update(config, key, link)
        _find_data(config)
        for key, value in named.items():
            check_key(key, known)
            OmegaConf.update(config, key, value)
        check_plugins(config, named)
        if "model" not in chosen:
            _refuse_unnamed_network(config.model, named)
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{str(error).splitlines()[0]}: the overrides do not fit the checkpoint's config") from error
    return config


def check_groups(saved: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises ConfigError if one of these groups is missing in a saved config, or names no factory."""
    for name in names:
        group = saved.get(name)
        if isinstance(group, Mapping) and OWN in group:
            raise ConfigError(
                f"{name}: was an object of a program ({str(group[OWN])[:40]}), and no code of it is saved; load it in "
                "Python, by metalearn.load, which takes such objects"
            )
        if not isinstance(group, Mapping) or not isinstance(group.get("_target_"), str):
            raise ConfigError(
                f"{name}: the checkpoint's config does not say which {name} the run had; take another checkpoint"
            )


def _with_saved(fresh: DictConfig, saved: Mapping[str, Any], own: Collection[str]) -> DictConfig:
    """The config `fresh` with the values of a checkpoint, except for the groups and keys in `own`.

    Raises:
        ConfigError: a group of the checkpoint is no group.
    """
    config = fresh.copy()
    OmegaConf.set_struct(config, False)  # a network's arguments have any names
    for name in (str(name) for name in fresh if str(name) in saved and str(name) not in own):
        if isinstance(fresh[name], DictConfig) and not isinstance(saved[name], Mapping):
            raise ConfigError(f"{name}: is no group of keys in the checkpoint's config; take another checkpoint")
        config[name] = saved[name]
    return config


def _follows(values: Mapping[str, Any], key: str, link: str) -> bool:
    """Whether a saved key has the value of the key that it follows, as far as both are there."""
    followed = link.removeprefix("${").removesuffix("}")
    return not {key, followed} <= values.keys() or values[key] == values[followed]


def _refuse_unnamed_network(model: DictConfig, named: Collection[str]) -> None:
    """Raises ConfigError for a network that only the checkpoint names: its code would run."""
    network = model.get("network")
    target = network.get("_target_") if isinstance(network, DictConfig) else None
    if target is not None and not {NETWORK, f"{NETWORK}._target_"} & set(named):
        raise ConfigError(
            f"{NETWORK}._target_={target}: only the checkpoint names this network, and its code would run here; if you "
            f"trust it, type {NETWORK}._target_={target}"
        )


def _check_part(override: Override) -> None:
    name = override.key_or_group.partition(".")[0].partition("/")[0]
    if name in OF_TRAINING:
        raise ConfigError(f"{override.input_line}: has no effect on an evaluation; leave it out")
    if override.is_sweep_override() or override.is_delete():
        raise ConfigError(f"{override.input_line}: must be one value; type {override.key_or_group}=VALUE")


def _find_data(config: DictConfig) -> None:
    """Takes this machine's dataset.root where the folder of the training is not there, and no shards where theirs is
    not; and downloads into no folder that only the checkpoint names."""
    shards = config.dataset.get("shards")
    if shards is not None and not is_folder(Path(str(shards))):
        config.dataset.shards = None
    root, own = config.dataset.get("root"), os.environ.get("METALEARN_DATA", DATA)
    if root is None or root == own:
        return
    downloads = "download" in config.dataset
    if not is_folder(Path(str(root))) and (downloads or "METALEARN_DATA" in os.environ):
        config.dataset.root = own
    elif downloads:
        config.dataset.download = False


def check_checkpoint(key: str, path: object, *, published: bool = True) -> None:
    """Checks that `key` names the folder of a checkpoint or, if that will do, of a `published` model.

    Raises:
        ConfigError: it is something else. The message says what to type in its place.
    """
    if not isinstance(path, str) or not path or not is_folder(Path(path)):
        raise ConfigError(f"{key}={path}: must be the folder of a checkpoint; type {key}=…/checkpoints/best")
    folder = Path(path)
    is_published = (folder / DESCRIPTION).exists()
    if (folder / MANIFEST).exists() or (is_published and published):
        return
    if is_published:
        raise ConfigError(
            f"{key}={path}: is a published model, which has no state to go on from; type init_from={path}, which "
            "begins with its parameters"
        )
    names = ["checkpoints/best", "checkpoints/last"] if published else ["checkpoints/last", "checkpoints/best"]
    inside = next((name for name in names if is_folder(folder / name)), None)
    if inside is not None:
        raise ConfigError(f"{key}={path}: is the folder of a run; type {key}={folder / inside}")
    raise ConfigError(f"{key}={path}: holds no complete checkpoint; type {key}=…/checkpoints/best")


def run_folder_of(checkpoint: Path) -> Path:
    """The run folder of a checkpoint, two levels above …/checkpoints/step_000100; links are followed. For any other
    folder, such as a published model, the folder itself."""
    folder = checkpoint.resolve()
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder
