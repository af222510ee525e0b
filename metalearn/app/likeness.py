"""What every worker has in common with rank zero, so that it computes the same bits: code, versions, kernels,
processor, config and data."""

import functools
import hashlib
import importlib.util
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from omegaconf import DictConfig

from metalearn.config.names import FREE_KEYS
from metalearn.config.saved import STARTS
from metalearn.config.values import leaves, to_container
from metalearn.nn.native import computed_by
from metalearn.nn.precision import type_of
from metalearn.tasks.common.identities import Content

PACKAGES = ("distributed", "metalearn")
SOURCES = (".py", ".c", ".h", ".csv")
"""Endings of the files that make results."""

NOT_COMPARED = (*FREE_KEYS, *STARTS, "device", "dataset", "model.weights")
"""Keys that change no number, that may be another path on another host, or whose effect is compared instead."""


def likeness_of(config: DictConfig, content: Callable[[], Content], device: torch.device) -> dict[str, str]:
    """What is compared, by its name."""
    rest = {
        key: str(value)
        for key, value in leaves(to_container(config))
        if not any(key == free or key.startswith(f"{free}.") for free in NOT_COMPARED)
    }
    return {
        "code": code_digest(tuple(config.plugins)),
        "torch": torch.__version__,
        "kernels": computed_by(device, type_of(config.precision)),
        "processor": _processor() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "data": content().digest,
        **rest,
    }


@functools.cache
def code_digest(plugins: Sequence[str] = ()) -> str:
    """A digest of the sources of this program and of the plugins, as they are at the first call. Line endings do not
    count."""
    digest = hashlib.sha256()
    for name in (*PACKAGES, *plugins):
        for path in sorted(_sources(name)):
            content = path.read_bytes().replace(b"\r\n", b"\n")
            digest.update(f"{name} {path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _sources(package: str) -> Iterator[Path]:
    """The source files of an imported module, or of all modules of a package."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        yield from (path for path in Path(folder).rglob("*") if path.suffix in SOURCES)
    if spec and spec.origin and not spec.submodule_search_locations:
        yield Path(spec.origin)


def _processor() -> str:
    """The model of the CPU, as far as the system says it, and the instructions that torch takes of it."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        first = ""
    named = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    known = [named[key] for key in ("model name", "cpu family", "model", "CPU implementer", "CPU part") if key in named]
    known = known or [platform.machine(), platform.processor()]
    return " ".join([*known, torch.backends.cpu.get_cpu_capability()])
