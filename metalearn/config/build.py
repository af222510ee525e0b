"""From config to objects."""

import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from metalearn.config.compose import composed_by_hydra
from metalearn.config.options import check_option, common, shipped, shipped_names, text_of
from metalearn.errors import ConfigError, Invalid, NotAdmittedError, nearest

_DEFAULT_PARTS = {"inner": "metalearn.algorithms.common.inner.sgd"}  # parts that some objects have no use for
_NO_PLUGINS = {"metalearn", "distributed", "hydra_async_sweeper", *sys.stdlib_module_names}
"""Packages that no message advises to admit."""


def build(config: DictConfig, group: str, **parts: Any) -> Any:
    """The object that a group of the config describes: calls its `_target_` with the group's keys and with `parts`. If
    a parameter is annotated with a NamedTuple class and is not among `parts`, the keys of the group are the fields of
    that class. Raises ConfigError for a target that is no factory of the group, a key that it does not take, a missing
    key, or a value that it refuses."""
    node = config[group]
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{group}={node}: is a group of keys; type {group}.KEY=VALUE")
    plugins = config.get("plugins") or ()
    factory = _factory(group, str(node.get("_target_")), plugins)
    parameters, hints = inspect.signature(factory).parameters, get_type_hints(factory)
    for name in sorted(parts.keys() - parameters.keys()):
        if config[name]._target_ != _DEFAULT_PARTS.get(name):
            raise ConfigError(f"{name}: {node._target_} has no use for {config[name]._target_}; leave {name}=… out")
    parts = {name: part for name, part in parts.items() if name in parameters}
    bundles: dict[str, Any] = {  # such as `seeds` → `Seeds`
        name: hint
        for name, hint in hints.items()
        if name in parameters.keys() - parts.keys() and inspect.isclass(hint) and hasattr(hint, "_fields")
    }
    accepted: dict[str, inspect.Parameter] = {}
    for name, parameter in parameters.items():
        accepted |= inspect.signature(bundles[name]).parameters if name in bundles else {name: parameter}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    for key in map(str, node):
        if key != "_target_" and key not in accepted and not takes_any:
            raise ConfigError(f"{group}.{key}: {node._target_} does not take it{nearest(key, list(accepted))}")
    for name, parameter in accepted.items():
        needed = parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD
        if needed and name not in node and name not in parts:
            raise ConfigError(f"{group}.{name}: missing; {node._target_} needs it; write {name}: VALUE into its yaml")
    values: Any = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    for name in hints.keys() & values.keys():
        if get_origin(hints[name]) is Mapping and get_args(hints[name])[1] is hints["return"]:
            values[name] = _beside_each_other(config, group, name, values)
        elif hints[name] is types.ModuleType:
            key, module = f"{group}.{name}", values[name]
            if not isinstance(module, str) or not all(part.isidentifier() for part in module.split(".")):
                advice = f"type {key}=my_module 'plugins=[my_module]'"
                raise ConfigError(f"{key}={module}: must be the name of a module; {advice}")
            if not any(f"{module}.".startswith(f"{package}.") for package in plugins):
                raise NotAdmittedError(f"{key}={module}: its code would run here", module.partition(".")[0])
            import_plugins([module])
            values[name] = sys.modules[module]
    fields = {field for bundle in bundles.values() for field in bundle._fields}
    arguments = {name: value for name, value in values.items() if name not in {"_target_", *fields - parameters.keys()}}
    for name, bundle in bundles.items():
        arguments[name] = bundle(**{field: values[field] for field in bundle._fields if field in values})
    try:
        return factory(**arguments | parts)
    except Invalid as error:
        raise ConfigError(error.text(group if _is_key(error.key, node) else "")) from error
    except (ValueError, TypeError) as error:  # of `distributed`, or of a factory of the user's own
        name, equals, _ = str(error).partition("=")
        prefix = f"{group}." if equals and _is_key(name, node) else ""
        raise ConfigError(f"{prefix}{error}") from error


@cache
def factories(group: str) -> tuple[str, ...]:
    """The factories of a group: those that its options and config.yaml name. No other function is called."""
    # Not by parsing all yamls of a group, which takes 0.2 s for the groups of a run.
    texts = (text_of(group, name) for name in shipped_names(group))
    named = [target for text in texts for target in re.findall(r"^_target_: *(\S+)", text, re.MULTILINE)]
    common_one = (common().get(group) or {}).get("_target_")
    return tuple(dict.fromkeys([str(common_one), *named] if common_one else named))


@cache
def option_of(group: str, target: str) -> str | None:
    """The option of a group whose yaml names the factory `target`, first the one of its own name; else None."""
    options = [option for option, keys in shipped(group).items() if keys.get("_target_") == target]
    name = target.rpartition(".")[2]
    return name if name in options else next(iter(options), None)


def import_plugins(packages: Sequence[str]) -> None:
    """Imports the packages that the command line admits. Raises ConfigError if one cannot be imported."""
    for name in packages:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever its code raises
            raise ConfigError(
                f"plugins=[{name}]: cannot be imported ({type(error).__name__}: {error}); put the folder that holds "
                f"{name} in PYTHONPATH, or install the package"
            ) from error


def _factory(group: str, target: str, plugins: Sequence[str]) -> Callable[..., Any]:
    """The function or class that `_target_` names. Raises ConfigError if it is neither a factory of the group nor one
    that an admitted package defines."""
    key = f"{group}._target_={target}"
    allowed = factories(group)
    admitting = next((name for name in plugins if target.startswith(f"{name}.")), None)
    if target not in allowed and admitting is None:
        reason = f"{key}: is no factory of {group}{nearest(target, allowed)}; allowed: {', '.join(allowed)}"
        package = target.partition(".")[0]
        raise ConfigError(reason) if package in _NO_PLUGINS else NotAdmittedError(reason, package)
    try:
        factory: Callable[..., Any] = get_object(target)
    except Exception as error:  # whatever a package's code raises
        raise ConfigError(f"{key}: is not found ({' '.join(str(error).split())}); type package.module.name") from error
    # What admitted packages import from elsewhere is not theirs: a saved config could name every function of Python.
    is_theirs = inspect.isfunction(factory) or inspect.isclass(factory)
    if target not in allowed and not (is_theirs and f"{factory.__module__}.".startswith(f"{admitting}.")):
        raise ConfigError(f"{key}: must be a function or class that {admitting} defines; type package.module.name")
    return factory


def _beside_each_other(config: DictConfig, group: str, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The objects of the options that are listed under a key of a group: with the group's keys, where they take them,
    else the defaults of their options. Raises ConfigError if there is no list of different options; or as `build`."""
    options = values[name]
    key = f"{group}.{name}={options}"
    if not isinstance(options, list) or not 2 <= len(set(options)) == len(options) or "several" in options:
        raise ConfigError(f"{key}: must be a list of different options of {group}; type {group}=[NAME,NAME]")
    built: dict[str, Any] = {}
    for option in options:
        try:
            check_option(group, str(option))
            defaults = composed_by_hydra(["~experiment", f"{group}={option}"])[group]
            node = {inner: values.get(inner, defaults._get_node(inner)) for inner in defaults if inner != "_target_"}
            beside = config.copy()
            OmegaConf.set_struct(beside, False)
            beside[group] = {"_target_": defaults._target_} | node
            built[option] = build(beside, group)
        except ConfigError as error:
            raise ConfigError(f"{key}: {option}: {error}") from error
    return built


def _is_key(name: str, node: DictConfig) -> bool:
    """Whether a name, up to its first dot, is a key of the group."""
    return name.partition(".")[0] in node
