"""Which trials are best."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hydra_async_sweeper import islands
from hydra_async_sweeper.terms import COMPLETED, DIVERGED, FAILED, ONE_LANE, PRUNED, FinishedTrial, Lanes

OUTCOMES = (COMPLETED, PRUNED, DIVERGED, FAILED)


class FinishedTrials(NamedTuple):
    """Trials in the order in which they ended; the names and directions of their values; and how they are numbered."""

    trials: Sequence[FinishedTrial]
    objectives: Sequence[str]
    directions: Sequence[str]
    lanes: Lanes = ONE_LANE

    def completed(self) -> list[FinishedTrial]:
        return [trial for trial in self.trials if losses_of(trial, self.directions) is not None]

    def best(self) -> list[FinishedTrial]:
        return best_trials(self.trials, self.directions, self.lanes)

    def places(self) -> dict[int, int]:
        """From a trial's number to its place in the order of ends, from 1."""
        return {trial.number: place for place, trial in enumerate(self.trials, 1)}


def best_trials(
    trials: Iterable[FinishedTrial], directions: Sequence[str], lanes: Lanes = ONE_LANE
) -> list[FinishedTrial]:
    """The best completed trial, of equal ones the earliest; of several objectives the Pareto front, by number."""
    completed = [trial for trial in trials if losses_of(trial, directions) is not None]
    if lanes.by_round:
        latest = max((trial.number // lanes.size for trial in completed), default=0)
        completed = [trial for trial in completed if trial.number // lanes.size == latest]
    ranked = sorted(completed, key=lambda trial: (losses_of(trial, directions), trial.told))
    if len(directions) == 1:
        return ranked[:1]
    front: list[FinishedTrial] = []
    for trial in ranked:  # what beats a trial has a smaller key, and is on the front or beaten by it
        if not any(_beats(other, trial, directions) for other in front):
            front.append(trial)
    return sorted(front, key=lambda trial: trial.number)


def losses_of(trial: FinishedTrial, directions: Sequence[str]) -> tuple[float, ...] | None:
    """The values of a completed trial with the sign that makes lower better."""
    if trial.outcome != COMPLETED or trial.values is None:
        return None
    return tuple(
        -value if direction == "maximize" else value for value, direction in zip(trial.values, directions, strict=True)
    )


def results_of(trials: Iterable[FinishedTrial], directions: Sequence[str]) -> list[islands.ScoredTrial]:
    """The trials in the order of their ends, as the searches take them: only a completed one has a loss."""
    ordered = sorted(trials, key=lambda trial: (trial.told, trial.number))
    return [
        islands.ScoredTrial(trial.told, trial.number, trial.params, (losses_of(trial, directions) or (None,))[0])
        for trial in ordered
    ]


def _beats(a: FinishedTrial, b: FinishedTrial, directions: Sequence[str]) -> bool:
    first, second = losses_of(a, directions), losses_of(b, directions)
    assert first is not None and second is not None
    return first != second and all(x <= y for x, y in zip(first, second, strict=True))
