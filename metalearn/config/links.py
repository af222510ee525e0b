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
    needs: dict[str, KeyLink] = {}  # by the group whose option has set the link
    for link in (link for link in missing if link.target == first.target):
        owner, _, inner = link.key.partition(".")
        by_option = owner in chosen and link._replace(key=inner) in _links_of(keys_in(owner, chosen[owner]))
        needs.setdefault(owner if by_option else "experiment", link)
    names = " and ".join(f"{by}={chosen[by]} ({link.key}={link.value})" for by, link in sorted(needs.items()))
    others = []
    for by in sorted(needs):
        others.append(f"another {by}")
        for option in groups()[by] if by != "experiment" else ():
            if all(_exists(config, link.target) for link in _links_of(keys_in(by, option))):
                others[-1] += f", such as {by}={option}"
                break
    raise ConfigError(
        f"{group}={chosen[group]} has no key {name}, which {names} need{'s' * (len(needs) == 1)}: these options do not "
        f"fit together; type {', and '.join(others)}, or another {group}"
    )


def _links_of(config: DictConfig) -> list[KeyLink]:
    values = leaves(to_container(config, resolve=False))
    return [KeyLink(key, str(value), target) for key, value in values for target in LINK.findall(str(value))]


def _exists(config: DictConfig, key: str) -> bool:
    if key in keys_of(config):
        return True
    absent = object()
    try:
        return OmegaConf.select(config, key, default=absent) is not absent  # an item of a list, or behind another link
    except OmegaConfBaseException:
        return True  # it is a link itself, and checked as such
