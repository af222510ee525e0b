"""Which trials are best."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sweeps.terms import COMPLETED, DIVERGED, FAILED, PRUNED, Finished

if TYPE_CHECKING:
    pass


OUTCOMES = (COMPLETED, PRUNED, DIVERGED, FAILED)


def best_trials(trials: Iterable[Finished], directions: Sequence[str]) -> list[Finished]:
    """The best completed trial, of equal ones the earliest; of several objectives the Pareto front, by number."""
    completed = [trial for trial in trials if losses_of(trial, directions) is not None]
    ranked = sorted(completed, key=lambda trial: (losses_of(trial, directions), trial.told))
    if len(directions) == 1:
        return ranked[:1]
    front: list[Finished] = []
    for trial in ranked:  # what beats a trial has a smaller key, and is on the front or beaten by it
        if not any(_beats(other, trial, directions) for other in front):
            front.append(trial)
    return sorted(front, key=lambda trial: trial.number)


def losses_of(trial: Finished, directions: Sequence[str]) -> tuple[float, ...] | None:
    """The values of a completed trial with the sign that makes lower better."""
    if trial.outcome != COMPLETED or trial.values is None:
        return None
    return tuple(
        -value if direction == "maximize" else value for value, direction in zip(trial.values, directions, strict=True)
    )


def _beats(a: Finished, b: Finished, directions: Sequence[str]) -> bool:
    first, second = losses_of(a, directions), losses_of(b, directions)
    assert first is not None and second is not None
    return first != second and all(x <= y for x, y in zip(first, second, strict=True))
