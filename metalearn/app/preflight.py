"""What is checked before a run: the device of this rank, whether every host computes the bits of rank zero, and whether
a learner is evaluated on classes that it has not seen, as few-shot learning wants it."""

import functools
import hashlib
import importlib.util
import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from metalearn.config.saved import STARTS
from metalearn.config.values import FREE_KEYS, is_below, leaves, to_container
from metalearn.errors import ConfigError
from metalearn.nn.backends import computed_by
from metalearn.nn.surroundings import type_of
from metalearn.runs.metrics import KEY, SEEN_DRAWERS, UNKNOWN_OVERLAP, Seen, overlap
from metalearn.tasks.common.identities import Content, drawers_of, identities_of
from metalearn.tasks.common.pictures import first_few
from metalearn.types import TaskSource

log = logging.getLogger("metalearn")

TAKEN = 0.1  # the part of a GPU's memory that others may hold without a word: processes that only wait hold about 1%

DRIVER = Path("/proc/driver/nvidia/version")

PACKAGES = ("distributed", "metalearn")
SOURCES = (".py", ".c", ".h", ".csv")  # endings of the files that make results

NOT_COMPARED = (*FREE_KEYS, *STARTS, "device", "dataset", "model.weights")
"""Keys that change no number, that may be another path on another host, or whose effect is compared instead."""


# The device


def check_device(name: str, precision: str, ranks: int | None = None) -> None:
    """Raises ConfigError where the config asks for a GPU, or for what only a GPU can do, and there is none, or fewer
    than `ranks` of this host, by default those that torchrun has started. With `auto` they share them."""
    if name == "cuda" and not torch.cuda.is_available():
        reason = why_no_gpu()
        raise ConfigError(
            f"device=cuda: torch sees no GPU here{f': {reason}' if reason else ''}; type device=auto or device=cpu"
        )
    ranks = ranks or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if name == "cuda" and ranks > (gpus := torch.cuda.device_count()):
        raise ConfigError(
            f"device=cuda: this host has {gpus} GPUs for {ranks} ranks; type workers={gpus} for each host, or "
            "device=auto to let ranks share a GPU"
        )
    if precision == "tf32" and own_device(name).type == "cpu":
        raise ConfigError("precision=tf32: is a mode of NVIDIA GPUs; type precision=float32, or precision=bf16")


def own_device(name: str) -> torch.device:
    """This rank's device. `auto` takes a GPU where there is one, chosen by the local rank."""
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def warn_of_other_users(device: torch.device) -> None:
    """Says how much of a GPU's memory others use, if that is more than a driver and its contexts need."""
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free - torch.cuda.memory_reserved(device)
    if taken > TAKEN * total:
        log.warning(
            "%s: other processes hold %.0f of its %.0f GiB, and may slow this run down; nvidia-smi lists them, and "
            "CUDA_VISIBLE_DEVICES chooses another GPU", device, taken / 2**30, total / 2**30,
        )  # fmt: skip


def why_no_gpu() -> str | None:
    """Why torch sees no GPU on a machine with a driver for one, in torch's own words; None where there is no driver."""
    if torch.cuda.is_available() or not DRIVER.exists():
        return None
    if torch.version.cuda is None:
        return "there is an NVIDIA driver, and this torch is one without CUDA; install one with CUDA"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).splitlines()[0].rstrip(".")
    return "there is an NVIDIA driver, and torch counts no card"


def described(name: str) -> dict[str, Any]:
    """The device for result.json: its `type`; a GPU's `name`; and `why` it is no GPU, with `device=auto`."""
    device = own_device(name)
    if device.type == "cuda":
        return {"type": "cuda", "name": torch.cuda.get_device_name(device)}
    reason = why_no_gpu() if name == "auto" else None
    return {"type": "cpu", **({"why": reason} if reason else {})}


# The likeness of two hosts


def likeness_of(config: DictConfig, content: Callable[[], Content], device: torch.device) -> dict[str, str]:
    """What is compared, by its name."""
    rest = {key: str(value) for key, value in leaves(to_container(config)) if not is_below(key, NOT_COMPARED)}
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
    info = Path("/proc/cpuinfo")
    first = info.read_text(encoding="utf-8").partition("\n\n")[0] if info.exists() else ""
    named = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    parts = [named[key] for key in ("model name", "cpu family", "model", "CPU implementer", "CPU part") if key in named]
    parts = parts or [platform.machine(), platform.processor()]
    return " ".join([*parts, torch.backends.cpu.get_cpu_capability()])


# The classes of an evaluation


REFUSE, REPORT = "refuse", "report"

UNKNOWN = (
    "the identities of its training classes are not all known (its dataset does not name them, or it began from "
    "pretrained weights or another checkpoint without them), so it cannot be checked whether "
    "test classes are among them"
)


def seen_in(source: TaskSource, steps: int) -> Seen:
    """Classes seen when training on `source`. It is not complete if the source has classes and does not
    name them. Without steps, a training only validates."""
    train, val = (identities_of(source, split) for split in ("train", "val"))
    complete = train is not None or not steps or source.classes("train") is None
    drawers = frozenset(drawers_of(source, "train")) if steps else frozenset()
    return Seen(train if train and steps else frozenset(), val or frozenset(), complete, drawers)


def check_unseen(seen: Seen, source: TaskSource, split: str, choice: str) -> dict[str, Any]:
    """Checks that no class of the tasks of a split has been `seen` in training and validation. Raises ConfigError if
    some have, and the `choice` is `refuse`. Neither training tasks nor plain samples are checked: they are of known
    classes on purpose.

    Returns:
        What result.json says of it: if the choice is `report`, `seen_classes`; and `seen_drawers`, if it holds back
        drawers whose pictures the training has shown.
    """
    if split == "train" or source.unit(split) == "samples":
        return {}
    drawers = seen_drawers(seen, source, split)
    shown: dict[str, Any] = {SEEN_DRAWERS: drawers} if drawers else {}
    identities = identities_of(source, split)
    if identities is None:
        has_classes = source.classes(split) is not None
        return {KEY: UNKNOWN_OVERLAP} if choice == REPORT and has_classes else {}
    shared = overlap(seen, split, identities)
    if choice == REPORT:
        return shown | {KEY: shared._asdict() | {"complete": seen.complete}}
    if shared.trained_on or shared.validated_on:
        also = f", and {shared.validated_on} more were validated on" if shared.validated_on else ""
        raise ConfigError(
            f"dataset: {shared.trained_on} of its {shared.classes} {split} classes were trained on before{also}, as "
            f"their names say; type the dataset and dataset.split of the training, or {KEY}={REPORT} to evaluate on "
            "them and count them in the result"
        )
    return shown


def seen_drawers(seen: Seen, source: TaskSource, split: str) -> list[str]:
    """The names of the drawers whom a test holds back, and whose pictures the training has shown."""
    held = drawers_of(source, split) if split == "test" else {}
    return sorted(name for key, name in held.items() if key in seen.drawers)


def warn_of_seen_drawers(counted: Mapping[str, Any]) -> None:
    """Says so if `check_unseen` has found any. Nothing is refused: with the same test, they show what unseen drawers
    cost."""
    if names := counted.get(SEEN_DRAWERS):
        log.warning(
            "dataset.held_drawers: the training has shown pictures by %s, so this test is none of unseen drawers; "
            "result.json names them as %s", first_few(names), SEEN_DRAWERS,
        )  # fmt: skip
