"""Configs as plain values: their keys, their leaves, and what differs between two of them."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

Config = dict[str, Any]


def quoted(value: object) -> str:
    """`value` as it must be written on the right of an override, with any signs in it escaped."""
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def as_typed(value: object) -> str:
    """A value as one types it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def keys_of(node: DictConfig, prefix: str = "") -> set[str]:
    """The dotted path of every node."""
    keys = set()
    for name in map(str, node):
        keys.add(f"{prefix}{name}")
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            keys |= keys_of(child, f"{prefix}{name}.")
    return keys


def to_container(config: DictConfig, *, resolve: bool = True) -> Config:
    """The config as plain dicts, with every interpolation replaced by its value if `resolve`."""
    container = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """(old value, new value) of every leaf that differs between two configs, by its dotted key."""
    before, after = dict(leaves(old)), dict(leaves(new))
    pairs = {key: (before.get(key, "absent"), after.get(key, "absent")) for key in sorted(before.keys() | after.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def is_below(key: str, names: Collection[str]) -> bool:
    """Whether a dotted key is one of these, or below one."""
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a config that is not a dict."""
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
