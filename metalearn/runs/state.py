"""Reads the state of an optimiser and its counters from a file of unknown origin.

torch reads it with `weights_only`, which runs no code. A file that could take all memory is refused before that.
"""

import pickletools
import zipfile
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from metalearn.runs.metrics import main_metric

_ZIP = b"PK\x03\x04"
"""The first bytes of a zip archive."""

_LARGEST_PICKLE = 2**26
_LARGEST_NUMBER_OF_PARTS = 2**16

_MADE_BY_US = ("collections OrderedDict", "torch._utils _rebuild_tensor_v2")
_STORAGE = ("torch ", "Storage")
"""The beginning and the end of the names of torch's storage types."""


def load_state(path: Path) -> dict[str, Any]:
    """The state of an optimiser and the counters of a run.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else.
    """
    try:
        _check_archive(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises many types for what it cannot read
        raise ValueError(f"{path}: holds no state ({_first_line(error)})") from error
    if not isinstance(state, dict) or not all(isinstance(state.get(name), dict) for name in ("optimizer", "progress")):
        raise ValueError(f"{path}: holds no state of a run")
    _check_tensors(path, state)
    _check_counters(path, state)
    return state


def _check_archive(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(4) != _ZIP:  # zipfile would find the archive behind something else, which torch would read
            raise ValueError("it is no file of torch.save")
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        # torch.save compresses nothing; a small compressed member could unpack to any size.
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("its members are compressed")
        pickles = [member for member in members if member.filename.lower().endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > _LARGEST_PICKLE or len(members) > _LARGEST_NUMBER_OF_PARTS:
            raise ValueError("it is no file of torch.save, or too large")
        # `weights_only` admits more names than a state has. One of them makes byte arrays of any size.
        for opcode, name, _ in pickletools.genops(archive.read(pickles[0])):
            if "GLOBAL" in opcode.name and not _is_ours(name):
                raise ValueError(f"it names {name}")


def _is_ours(name: object) -> bool:
    text = str(name)
    return text in _MADE_BY_US or (text.startswith(_STORAGE[0]) and text.endswith(_STORAGE[1]))


def _check_tensors(path: Path, state: object) -> None:
    """Raises ValueError for a tensor that repeats its values."""
    # With a stride of 0, a small file can hold a tensor of any size.
    seen: set[int] = set()
    left = [state]
    while left:
        node = left.pop()
        if isinstance(node, Tensor) and node.nbytes > node.untyped_storage().nbytes():
            raise ValueError(f"{path}: holds a tensor {list(node.shape)} of {node.untyped_storage().nbytes()} bytes")
        if isinstance(node, dict | list | tuple) and id(node) not in seen:
            seen.add(id(node))
            left += node.values() if isinstance(node, dict) else node


def _check_counters(path: Path, state: dict[str, Any]) -> None:
    """Raises ValueError for counters, validations, or sums of the log, that no run has written."""
    # Checked when it is read, so that the run can still take an older checkpoint.
    seconds = state["progress"].get("seconds", 0.0)
    if not _is_number(seconds):
        raise ValueError(f"{path}: progress.seconds={seconds!r:.60}: is no number")
    for name in ("best", "latest"):
        validation = state["progress"].get(name)
        if validation is not None and not is_validation(validation):
            raise ValueError(f"{path}: progress.{name}={validation!r:.60}: is no validation")
    sums = state.get("pending", {})
    if not isinstance(sums, dict) or not all(isinstance(name, str) and _is_sum(pair) for name, pair in sums.items()):
        raise ValueError(f"{path}: pending={sums!r:.60}: has no sums over steps")


def is_validation(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether this is the outcome of a validation: its step, and a number for the metric that decides."""
    return isinstance(value, dict) and _is_count(value.get("step")) and _is_number(value.get(main_metric(value)))


def _is_sum(value: object) -> bool:
    """Whether this is a sum and the number of its terms."""
    return isinstance(value, list | tuple) and len(value) == 2 and _is_number(value[0]) and _is_count(value[1])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_number(value) and value >= 0


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
