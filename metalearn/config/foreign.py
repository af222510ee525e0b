"""Configs of unknown origin: the config of a checkpoint, and that of a run folder.

They are data. Their values are never resolved, since a resolver reads environment variables and files; and what they
hold is bounded before anything is made of it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf._utils import get_yaml_loader

from metalearn.config.links import LINK
from metalearn.config.names import inner_rate
from metalearn.config.values import Config, leaves
from metalearn.errors import ConfigError

MOST_VALUES = 10_000
"""The most values in the config of a checkpoint; one of this program has about 100."""

_COMPUTED = re.compile(r"(\$\{inner_rate:)?\$\{oc\.select:(\w[\w.]*),null\}(?(1)\})")
"""Of all functions in a recorded value, these two: they are known here, and read nothing but another key."""

_MOST_LINKS = 8
"""The most links in a row, from a key to its value."""


def read_yaml(path: Path) -> Any:
    """The content of a YAML file as plain values; `${…}` stays as it is.

    Raises:
        OSError: there is no such file, or it may not be read.
        ValueError: it holds no YAML.
    """
    try:
        return yaml.load(path.read_bytes(), get_yaml_loader())  # noqa: S506 (OmegaConf's is a SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path}: holds no YAML ({str(error).splitlines()[0]})") from error


def read_config(path: Path) -> Config:
    """The config in a YAML file. Every `${KEY}` is replaced by the value of that key, and so are the two functions of
    another key in `conf/` that Hydra records as they are typed; nothing else is resolved.

    Raises:
        OSError, ValueError: as `read_yaml`; or it holds something else.
    """
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no config")
    config = {str(key): value for key, value in content.items()}
    return _followed(config, dict(leaves(config)))


def typed_keys(run_dir: Path) -> dict[str, str]:
    """The keys and groups that were typed for a run, with their values, as its .hydra folder has them; none without it.

    Raises:
        OSError, ValueError: as `read_yaml`.
    """
    path = run_dir / ".hydra" / "overrides.yaml"
    words = read_yaml(path) if path.exists() else None
    pairs = (str(word).lstrip("+~").partition("=") for word in (words if isinstance(words, list) else ()))
    return {key: value for key, _, value in pairs}


def _followed(node: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _followed(value, values) if isinstance(value, Mapping) else _behind(value, values)
        for name, value in node.items()
    }


def _behind(value: Any, values: Mapping[str, Any]) -> Any:
    rate = False
    for _ in range(_MOST_LINKS):
        text = value if isinstance(value, str) else ""
        if computed := _COMPUTED.fullmatch(text):
            rate, value = rate or computed[1] is not None, values.get(computed[2])
        elif (link := LINK.fullmatch(text)) and link[1] in values:
            value = values[link[1]]
        else:
            break
    return inner_rate(value) if rate else value


def check_saved(saved: object) -> dict[str, Any]:
    """The config of a checkpoint.

    Raises:
        ConfigError: it is none, it has more values than any config of this program, or one of them is to be resolved.
    """
    if not isinstance(saved, dict):
        raise ConfigError("the checkpoint's meta.json holds no config; take another checkpoint")
    nodes: list[tuple[str, Any]] = [("", saved)]
    for key, value in nodes:  # grows on the way
        if isinstance(value, dict):
            nodes += [(f"{key}.{name}".lstrip("."), child) for name, child in value.items()]
        elif isinstance(value, list):
            nodes += [(key, child) for child in value]
        if len(nodes) > MOST_VALUES:
            raise ConfigError(f"the checkpoint's config has more than {MOST_VALUES:,} values; take another checkpoint")
        if value == "???":
            raise ConfigError(f"{key}=???: the checkpoint's config has no value here; take another checkpoint")
        for text in (key, value):
            if isinstance(text, str) and "${" in text:
                raise ConfigError(
                    f"{key}={_short(value)}: the checkpoint's config holds a ${{…}}, and a saved config is never "
                    "resolved; take another checkpoint"
                )
    return saved


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
