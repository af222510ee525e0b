"""A config without Hydra and without a command line: options of groups by their names, and settings of their keys."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from metalearn.config.options import CONF, check_option, groups, keys_in

_NO_PARTS = ("experiment", "sweep")
"""Groups whose options change other groups."""


class Named(NamedTuple):
    """An option of a config group, such as `maml` of `algorithm`, and settings of its keys."""

    name: str
    settings: Mapping[str, Any]


def named(name: str, /, **settings: Any) -> Named:
    """An option of a config group by its name. Keys that are not in `settings` have the values of `conf/`."""
    return Named(name, settings)


def as_named(part: str | Named) -> Named:
    """The option of a name, with the settings of `conf/`, or with its own."""
    return part if isinstance(part, Named) else Named(part, {})


def plain_config(parts: Mapping[str, Named | Mapping[str, Any]], keys: Mapping[str, Any]) -> DictConfig:
    """The config that has these parts, and the default options of all other groups.

    Args:
        parts: for a group, an option; or keys that options of other groups take values from.
        keys: values of keys that belong to no group.

    Raises:
        ConfigError: there is no such option.
    """
    config = OmegaConf.load(CONF / "config.yaml")
    assert isinstance(config, DictConfig)
    del config["hydra"]
    for entry in config.pop("defaults"):
        group, option = next(iter(entry.items())) if isinstance(entry, DictConfig) else (entry, "")
        if group in groups() and group not in _NO_PARTS:
            part = parts.get(group, Named(str(option), {}))
            keys_of_all = config.get(group, {})
            if isinstance(part, Named):
                check_option(group, part.name)
                keys_of_option = keys_in(group, part.name)
                config[group] = OmegaConf.merge(keys_of_all, keys_of_option, _without_arrays(part.settings))
            else:
                config[group] = OmegaConf.merge(keys_of_all, part)
    return OmegaConf.merge(config, _without_arrays(keys))  # type: ignore[return-value]


def _without_arrays(value: Any) -> Any:
    """The value, with plain numbers and lists in place of numpy's and torch's."""
    # A config can hold no others.
    if isinstance(value, Mapping):
        return {name: _without_arrays(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_arrays(inner) for inner in value]
    return value.tolist() if hasattr(value, "tolist") else value
