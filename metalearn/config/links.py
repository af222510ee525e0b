"""Links between keys: `${KEY}` in a value stands for the value of another key, which must exist."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metalearn.config.options import groups, keys_in
from metalearn.config.values import keys_of, leaves, to_container
from metalearn.errors import ConfigError, nearest

LINK = re.compile(r"(?<!\\)\$\{(\w[\w.\[\]]*)\}")
"""`${KEY}` in a value: the value of another key."""


class KeyLink(NamedTuple):
    """A key with its value, in which `${target}` stands for the value of another key."""

    key: str
    value: str
    target: str


def check_links(config: DictConfig, chosen: Mapping[str, str], typed: set[str]) -> None:
    """Checks that the key in every `${KEY}` of a config exists.

    Args:
        config: not resolved yet.
        chosen: the option of every group.
        typed: the keys that overrides set.

    Raises:
        ConfigError: a key does not exist; the message names the options that need it.
    """
    missing = [link for link in _links_of(config) if not _exists(config, link.target)]
    if not missing:
        return
    first = missing[0]
    group, _, name = first.target.partition(".")
    if first.key in typed or group not in chosen:
        hint = nearest(first.target, sorted(keys_of(config)))
        raise ConfigError(f"{first.key}={first.value}: there is no key {first.target}{hint}")
    needs = {_origin(link, chosen): link for link in reversed(missing) if link.target == first.target}
    names = " and ".join(f"{by}={chosen[by]} ({link.key}={link.value})" for by, link in sorted(needs.items()))
    advice = ", and ".join(_another(by, config) for by in sorted(needs))
    raise ConfigError(
        f"{group}={chosen[group]} has no key {name}, which {names} need{'s' * (len(needs) == 1)}: these options do not "
        f"fit together; type {advice}, or another {group}"
    )


def _links_of(config: DictConfig) -> list[KeyLink]:
    values = leaves(to_container(config, resolve=False))
    return [KeyLink(key, str(value), target) for key, value in values for target in LINK.findall(str(value))]


def _links_in(group: str, option: str) -> list[KeyLink]:
    """The links in an option's own yaml."""
    return _links_of(keys_in(group, option))


def _exists(config: DictConfig, key: str) -> bool:
    if key in keys_of(config):
        return True
    absent = object()
    try:
        return OmegaConf.select(config, key, default=absent) is not absent  # an item of a list, or behind another link
    except OmegaConfBaseException:
        return True  # it is a link itself, and checked as such


def _origin(link: KeyLink, chosen: Mapping[str, str]) -> str:
    """The group whose option has set a link: the one of its key, or `experiment`."""
    group, _, name = link.key.partition(".")
    by_option = group in chosen and link._replace(key=name) in _links_in(group, chosen[group])
    return group if by_option else "experiment"


def _another(group: str, config: DictConfig) -> str:
    """Advice to choose another option of a group; the example has no link to a missing key."""
    for option in groups()[group] if group != "experiment" else ():
        if all(_exists(config, link.target) for link in _links_in(group, option)):
            return f"another {group}, such as {group}={option}"
    return f"another {group}"
