"""Reads the state of an optimiser and its counters; torch reads it with `weights_only`, which runs no code."""

from pathlib import Path
from typing import Any, TypeGuard

import torch

from metalearn.checks import first_line
from metalearn.runs.metrics import deciding, main_metric


def load_state(path: Path) -> dict[str, Any]:
    """The state of an optimiser and the counters of a run.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises many types for what it cannot read
        raise ValueError(f"{path}: holds no state ({first_line(error)})") from error
    if not isinstance(state, dict) or not all(isinstance(state.get(name), dict) for name in ("optimizer", "progress")):
        raise ValueError(f"{path}: holds no state of a run")
    _check_counters(path, state)
    return state


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
    """Whether this is the outcome of a validation: its step, its loss, and a number for the metric that decides."""
    if not isinstance(value, dict) or not _is_count(value.get("step")):
        return False
    needed = {main_metric(value), deciding(value)}
    return _is_number(value.get("loss", 0.0)) and all(_is_number(value.get(name)) for name in needed)


def _is_sum(value: object) -> bool:
    """Whether this is a sum and the number of its terms."""
    return isinstance(value, list | tuple) and len(value) == 2 and _is_number(value[0]) and _is_count(value[1])


def _is_number(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and value.bit_length() < 64
    return isinstance(value, float)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_number(value) and value >= 0
