"""What a trial's end means: its values, or why it has none."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from hydra_async_sweeper.disk import DISK_FAULT
from hydra_async_sweeper.slots import TrialExit
from hydra_async_sweeper.terms import COMPLETED, DIVERGED, FAILED, PRUNED, Direction, Values

RETRY, STOPPED, DISK = "retry", "stopped", "disk"
"""Ends that are no results: the trial is run again; it was stopped with the sweep; a disk has failed."""

METRICS = ("val.accuracy", "val.mse")
"""What is searched for, the first that there is, where no objective is given and the task returns a mapping."""

STOP_CODES = (130, 143, -2, -15)


class TrialResult(NamedTuple):
    """How a trial has ended, with its values or the reason why there are none, and the seconds that it says it took."""

    outcome: str
    values: Values | None = None
    failure: str = ""
    seconds: float | None = None


def direction_of(objective: str, maximized: Collection[str] = ()) -> Direction:
    """Accuracies are maximised, and fields that end in a name of `maximized`; everything else is minimised."""
    return "maximize" if "accuracy" in objective or objective.rpartition(".")[2] in maximized else "minimize"


def result_of(
    ended: TrialExit, objective: Sequence[str] | None, count: int, *, searching: bool, stopping: bool
) -> TrialResult:
    """What a trial's end means.

    Args:
        ended: the end of its process, and the outcome that it left.
        objective: the fields of the returned mapping that are the values; None: the value that is returned, or the
            validation metric of a mapping.
        count: how many values there must be.
        searching: whether the sampler needs values. If not, a task may return none, or something else.
        stopping: whether the sweep has been asked to stop.
    """
    outcome = ended.outcome
    if outcome is None:
        if ended.code in STOP_CODES and stopping:
            return TrialResult(STOPPED)
        if ended.code == DISK_FAULT:
            return TrialResult(DISK)
        cause = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
        return TrialResult(RETRY, failure=f"its process ended with {cause}")
    if outcome["status"] == "DISK":
        return TrialResult(DISK, failure=outcome["error"])
    if outcome["status"] == "REFUSED":
        return TrialResult(FAILED, failure=outcome["error"])
    if outcome["status"] != "COMPLETED":
        return TrialResult(RETRY, failure=outcome["error"])
    value = outcome["value"]
    if objective is None and not searching and not _is_numbers(value) and not isinstance(value, Mapping):
        return TrialResult(COMPLETED)
    if isinstance(value, Mapping) and "status" in value:
        took = value.get("seconds")
        return _of_run(value, objective, count, stopping)._replace(seconds=took if _is_numbers(took) else None)
    return _of_value(value, objective, count)


def _of_run(run: Mapping[str, Any], objective: Sequence[str] | None, count: int, stopping: bool) -> TrialResult:
    """Of a task that returns its status, exit code and result."""
    status, code = run["status"], run.get("exit", 0)
    if status == STOPPED or code in STOP_CODES:
        return TrialResult(STOPPED) if stopping else TrialResult(RETRY, failure="a signal stopped it alone")
    if code == DISK_FAULT:
        return TrialResult(DISK, failure=str(run.get("error", "")))
    if status == DIVERGED:
        return TrialResult(DIVERGED, failure=str(run.get("error", "")))
    if code == 2:
        return TrialResult(FAILED, failure=str(run.get("error", "its config is refused")))
    if code != 0:
        return TrialResult(RETRY, failure=str(run.get("error", f"exit code {code}")))
    found = _of_value(run, objective, count)
    return found._replace(outcome=PRUNED, failure="") if status == PRUNED else found


def _of_value(value: Any, objective: Sequence[str] | None, count: int) -> TrialResult:
    if isinstance(value, Mapping):
        objective = objective or _own_metric(value)
    if objective is None:
        values = list(value) if isinstance(value, list | tuple) else [value]
    else:
        values = [_field(value, name) for name in objective]
        missing = [name for name, number in zip(objective, values, strict=True) if number is _MISSING]
        if missing:
            return TrialResult(FAILED, failure=f"objective={', '.join(missing)}: the trial has returned no such field")
    numbers = [math.nan if number is None else number for number in values]
    if len(numbers) != count or not _is_numbers(numbers):
        return TrialResult(FAILED, failure=f"the trial has returned {value!r}; it must return {count} numbers")
    return TrialResult(COMPLETED if all(map(math.isfinite, numbers)) else DIVERGED, tuple(map(float, numbers)))


def _is_numbers(value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return bool(values) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _own_metric(value: Mapping[str, Any]) -> list[str]:
    return [next((name for name in METRICS if _field(value, name) is not _MISSING), METRICS[0])]


_MISSING = object()


def _field(value: Any, name: str) -> Any:
    """The field with a dotted name; JSON has None for a number that is not finite."""
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value
