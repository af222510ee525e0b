"""From config to objects."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig

from metalearn.config.compose import nearest
from metalearn.errors import ConfigError

OWN_PACKAGES = ("metalearn.", "distributed.")

_NOT_CHOSEN = {"inner": "metalearn.algorithms.common.inner.sgd"}
"""Parts that an object may have no use for, and the target of the default of each."""


def build(config: DictConfig, group: str, **parts: Any) -> Any:
    """The object that a group of the config describes; `parts` are passed on beside its keys.

    Raises:
        ConfigError: a target outside our packages, a key that it does not take, a value that it refuses.
    """
    node = config[group]
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{group}={node}: is a group of keys; type {group}.KEY=VALUE")
    target = str(node.get("_target_"))
    if not target.startswith(OWN_PACKAGES):
        raise ConfigError(f"{group}._target_={target}: must be in {' or '.join(OWN_PACKAGES)}")
    try:
        factory = get_object(target)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{group}._target_={target}: {error}") from error
    accepted = inspect.signature(factory).parameters
    parts = _wanted(config, group, parts, set(accepted))
    for key in map(str, node):
        if key != "_target_" and key not in accepted:
            raise ConfigError(f"{group}.{key}: {target} does not take it{nearest(key, list(accepted))}")
    for name, parameter in accepted.items():
        if parameter.default is inspect.Parameter.empty and name not in node and name not in parts:
            raise ConfigError(f"{group}.{name}: missing; {target} needs it; type {group}.{name}=VALUE")
    try:
        return instantiate(node, _convert_="all", _recursive_=False, **parts)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError | TypeError):
            raise ConfigError(_with_group(group, list(map(str, node)), str(cause))) from cause
        raise


def _wanted(config: DictConfig, group: str, parts: Mapping[str, Any], accepted: set[str]) -> dict[str, Any]:
    """The parts that the object of a group takes.

    Raises:
        ConfigError: a part that it does not take was chosen, that is, is not the default.
    """
    for name in sorted(parts.keys() - accepted):
        target = config[name]._target_
        if target != _NOT_CHOSEN.get(name):
            raise ConfigError(f"{name}: {config[group]._target_} has no use for {target}; leave {name}=… out")
    return {name: part for name, part in parts.items() if name in accepted}


def _with_group(group: str, keys: Sequence[str], message: str) -> str:
    """A component's message about its argument, as one about the config's key: what it names and what it
    says to type get the group before them."""
    names = "|".join(map(re.escape, keys))
    return re.sub(rf"(^|type |for example )(?=(?:{names})(?:\.\w+)*=)", rf"\g<1>{group}.", message)
