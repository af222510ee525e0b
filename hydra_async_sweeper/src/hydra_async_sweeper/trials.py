"""Trials: what one is, what the end of its process means, and which are the best. Imports no optuna."""

import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from hydra_async_sweeper.slots import TrialExit
from hydra_async_sweeper.space import Params

Values = tuple[float, ...]  # A trial's values, one for each objective
Direction = Literal["minimize", "maximize"]

COMPLETED, PRUNED, DIVERGED, FAILED = OUTCOMES = ("completed", "pruned", "diverged", "failed")  # how a trial can end
RETRY, STOPPED, DISK = "retry", "stopped", "disk"
"""Ends that are no results: the trial is run again; it was stopped with the sweep; a disk has failed."""

METRICS = ("val.accuracy", "val.mse")
"""What is searched for, the first that there is, where no objective is given and the task returns a mapping."""

STOP_CODES = (130, 143, -2, -15)


class StudyError(ValueError):
    """A study that cannot be opened or read any more, or belongs to another sweep."""


class PausedError(RuntimeError):
    """The disk of a trial has failed; the message says how."""


class StartedTrial(NamedTuple):
    """A trial that has been given parameters; and the trial whose checkpoint it goes on from, if there is one."""

    number: int
    params: Params
    parent: int | None = None


class FinishedTrial(NamedTuple):
    """A trial that has ended; `values` are None where there are none. `told` counts the ends."""

    number: int
    params: Params
    outcome: str
    values: Values | None
    told: int
    same_as: int | None
    failure: str
    seconds: float | None
    parent: int | None = None

    def losses(self, directions: Sequence[str]) -> tuple[float, ...] | None:
        """The values of a completed trial with the sign that makes lower better."""
        if self.outcome != COMPLETED or self.values is None:
            return None
        both = zip(self.values, directions, strict=True)
        return tuple(-value if direction == "maximize" else value for value, direction in both)


class Lanes(NamedTuple):
    """Trial n belongs to lane n mod `size`: to an island, or to a member of a population.

    With `by_round`, trial n is of round n // `size`, and the best trial is the best of the latest round.
    """

    name: str
    size: int
    by_round: bool = False

    def place_of(self, number: int) -> dict[str, int]:
        """The round and the lane of a trial, by their names; empty where there is neither."""
        round_ = {"round": number // self.size} if self.by_round else {}
        return round_ | ({self.name: number % self.size} if self.size > 1 else {})


ONE_LANE = Lanes("", 1)


class TrialResult(NamedTuple):
    """How a trial has ended, with its values or the reason why there are none, and the seconds that it says it took."""

    outcome: str
    values: Values | None = None
    failure: str = ""
    seconds: float | None = None


def result_of(
    ended: TrialExit, objective: Sequence[str] | None, count: int, *, searching: bool, stopping: bool
) -> TrialResult:
    """What a trial's end means.

    Args:
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
        if ended.code == os.EX_IOERR:
            return TrialResult(DISK)
        cause = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
        return TrialResult(RETRY, failure=f"its process ended with {cause}")
    if outcome["status"] != "COMPLETED":
        return TrialResult(FAILED if outcome["status"] == "REFUSED" else RETRY, failure=outcome["error"])
    value = outcome["value"]
    if objective is None and not searching and not _is_numbers(value) and not isinstance(value, Mapping):
        return TrialResult(COMPLETED)
    if not isinstance(value, Mapping) or "status" not in value:
        return _of_value(value, objective, count)
    # A task that returns its status, exit code and result
    status, code, seconds = value["status"], value.get("exit", 0), value.get("seconds")
    if status == STOPPED or code in STOP_CODES:
        return TrialResult(STOPPED) if stopping else TrialResult(RETRY, failure="a signal stopped it alone")
    seconds = seconds if _is_numbers(seconds) else None
    if code == os.EX_IOERR or status == DIVERGED:
        outcome = DISK if code == os.EX_IOERR else DIVERGED
        return TrialResult(outcome, failure=str(value.get("error", "")), seconds=seconds)
    if code != 0:
        failure = value.get("error", "its config is refused" if code == 2 else f"exit code {code}")
        return TrialResult(FAILED if code == 2 else RETRY, failure=str(failure), seconds=seconds)
    result = _of_value(value, objective, count)._replace(seconds=seconds)
    return result._replace(outcome=PRUNED, failure="") if status == PRUNED else result


def _of_value(value: Any, objective: Sequence[str] | None, count: int) -> TrialResult:
    fields = dict(leaves(value)) if isinstance(value, Mapping) else {}
    if fields and objective is None:
        objective = [next((name for name in METRICS if name in fields), METRICS[0])]
    missing = [name for name in objective or () if name not in fields]
    if missing:
        names = [name for name, field in fields.items() if _is_numbers(field)]
        hint = f"{', '.join(names)}; type hydra.sweeper.objective={names[0]}" if names else repr(value)
        reason = f"objective={', '.join(missing)}: the task returned no such field, but {hint}"
        return TrialResult(FAILED, failure=reason)
    numbers = [fields[name] for name in objective] if objective is not None else _listed(value)
    if "status" in fields:  # of a result.json, which has null for a number that is not finite
        numbers = [math.nan if number is None else number for number in numbers]
    if len(numbers) != count or not _is_numbers(numbers):
        must = "a number" if count == 1 else f"{count} numbers"
        return TrialResult(FAILED, failure=f"the task returned {value!r}; it must return {must}")
    return TrialResult(COMPLETED if all(map(math.isfinite, numbers)) else DIVERGED, tuple(map(float, numbers)))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_numbers(value: Any) -> bool:
    values = _listed(value)
    return bool(values) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of whatever is no mapping, or an empty one."""
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, node


class FinishedTrials(NamedTuple):
    """Trials in the order in which they ended; the names and directions of their values; and how they are numbered."""

    trials: Sequence[FinishedTrial]
    objectives: Sequence[str]
    directions: Sequence[str]
    lanes: Lanes = ONE_LANE

    def completed(self) -> list[FinishedTrial]:
        return [trial for trial in self.trials if trial.losses(self.directions) is not None]

    def best(self) -> list[FinishedTrial]:
        """The best completed trial, of equal ones the earliest; of several objectives the Pareto front, by number."""
        scored = [(losses, t.told, t) for t in self.trials if (losses := t.losses(self.directions)) is not None]
        ranked = sorted(scored, key=lambda entry: entry[:2])
        if self.lanes.by_round:
            latest = max((trial.number // self.lanes.size for _, _, trial in ranked), default=0)
            ranked = [entry for entry in ranked if entry[2].number // self.lanes.size == latest]
        if len(self.directions) == 1:
            return [trial for _, _, trial in ranked[:1]]
        front: list[tuple[tuple[float, ...], FinishedTrial]] = []
        for losses, _, trial in ranked:  # what beats a trial has a smaller key, and is on the front or beaten by it
            if not any(other != losses and all(map(operator.le, other, losses)) for other, _ in front):
                front.append((losses, trial))
        return sorted((trial for _, trial in front), key=lambda trial: trial.number)

    def lineage(self, number: int) -> list[FinishedTrial]:
        """The trials that lead to trial `number`, from the first round on; the last is that trial itself."""
        trials = {trial.number: trial for trial in self.trials}
        chain = [trials[number]]
        while (parent := chain[-1].parent) is not None:
            chain.append(trials[parent])
        return chain[::-1]
