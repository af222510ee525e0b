"""The config of a checkpoint, changed for an evaluation."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metalearn.config.compose import CONF, check_choice, check_key, keys_of, parsed, sorted_out
from metalearn.errors import ConfigError

OF_THE_MACHINE = ("strategy", "partitioner", "launch")
"""Groups that get their defaults: an evaluation may run on another machine than the training."""

STARTS = ("resume", "resume_changes", "pause_after", "init_from")
"""Where a run starts, and where it pauses."""

OF_TRAINING = ("optimizer", "reducer", "logger", "checkpoint", "run", "experiment", "hydra", *STARTS)
"""Groups and keys without effect on an evaluation. They get their defaults: a checkpoint may be older than they."""

LINKS = {"dataset.seed": "${seed}", "dataset.eval_seed": "${trainer.eval_seed}", "algorithm.ways": "${dataset.ways}"}
"""Keys that follow other keys. A checkpoint has their values as numbers, which do not follow."""

FREE_KEYS = (
    "run", "workers", "strategy", "partitioner", "launch", "resume", "resume_changes", "pause_after", "checkpoint",
    "logger", "dataset.root", "dataset.download", "trainer.steps",
)  # fmt: skip
"""Keys that may differ when a run goes on: they change no number, or, `trainer.steps`, extend the run."""

MOVED = {
    "metalearn.inner.": "metalearn.algorithms.common.inner.",
    "metalearn.optimizers.": "metalearn.training.optimizers.",
    "metalearn.trainer.": "metalearn.training.settings.",
    "metalearn.checkpoint.": "metalearn.runs.checkpoint.",
    "metalearn.logging.": "metalearn.runs.logging.",
}
"""The old and the present beginnings of `_target_`: an earlier version saved configs with the old ones."""


def with_present_targets(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved config with the present name of every group's `_target_`."""
    return {name: _retargeted(node) if isinstance(node, Mapping) else node for name, node in saved.items()}


def _retargeted(group: Mapping[str, Any]) -> dict[str, Any]:
    target = str(group.get("_target_"))
    for before, now in MOVED.items():
        if target.startswith(before):
            return {**group, "_target_": now + target.removeprefix(before)}
    return dict(group)


def changed_config(saved: Mapping[str, Any], overrides: Sequence[str], aliases: Mapping[str, str]) -> DictConfig:
    """The config of a checkpoint, changed by overrides.

    Args:
        saved: the config in its meta.json.
        overrides: `GROUP=OPTION` and `KEY=VALUE`; KEY may be an alias.
        aliases: short names of keys.

    Raises:
        ConfigError: a key or a choice does not exist or has no effect on an evaluation, or a value cannot be read.
    """
    all_overrides = parsed(overrides)
    for override in all_overrides:
        _check_part(override)
    choices, values = sorted_out(all_overrides)
    for choice in choices:
        check_choice(choice)
    chosen = {choice.key_or_group: str(choice.value()) for choice in choices}
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            lines = [f"{group}={option}" for group, option in chosen.items()]
            fresh = compose("config", overrides=["~experiment", *lines])
        config = OmegaConf.create(with_present_targets(saved))
        for group in fresh:
            if group in (*OF_THE_MACHINE, *OF_TRAINING, *chosen) or group not in config:
                config[group] = fresh[group]
        config.workers = None
        known = keys_of(config)
        for key, link in LINKS.items():
            if key in known:
                OmegaConf.update(config, key, link)
        _find_data(config)
        for override in values:
            key = aliases.get(override.key_or_group, override.key_or_group)
            check_key(key, known)
            OmegaConf.update(config, key, override.value())
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{str(error).splitlines()[0]}: the overrides do not fit the checkpoint's config") from error
    return config


def _check_part(override: Override) -> None:
    name = override.key_or_group.partition(".")[0].partition("/")[0]
    if name in OF_TRAINING:
        raise ConfigError(f"{override.input_line}: has no effect on an evaluation; leave it out")
    if override.is_sweep_override() or override.is_delete():
        raise ConfigError(f"{override.input_line}: must be one value; type {override.key_or_group}=VALUE")


def _find_data(config: DictConfig) -> None:
    """Sets dataset.root to `METALEARN_DATA`, if it is set, where the folder of the training is not there."""
    root = config.dataset.get("root")
    if root is not None and not Path(root).is_dir() and "METALEARN_DATA" in os.environ:
        config.dataset.root = os.environ["METALEARN_DATA"]


def run_folder_of(checkpoint: Path) -> Path:
    """The run folder of a checkpoint, two levels above …/checkpoints/step_000100; links are followed."""
    return checkpoint.resolve().parent.parent
