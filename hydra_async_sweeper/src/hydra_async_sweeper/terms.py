"""The words that all parts of a sweep share. Imports no optuna."""

import logging
from typing import Literal, NamedTuple

from hydra_async_sweeper.space import Params

Values = tuple[float, ...]
"""A trial's values, one for each objective."""

Direction = Literal["minimize", "maximize"]


def printable(text: str) -> str:
    """The text with its control characters written out: those of a file could change the terminal."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text)


def _with_escapes(record: logging.LogRecord) -> bool:
    """Makes a message printable: names and reasons may come from files of others."""
    record.msg, record.args = printable(record.getMessage()), ()
    return True


logging.getLogger("hydra_async_sweeper").addFilter(_with_escapes)

COMPLETED, PRUNED, DIVERGED, FAILED = "completed", "pruned", "diverged", "failed"
"""How a trial can end."""


class StudyError(ValueError):
    """A study that cannot be opened or read any more, or belongs to another sweep."""


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
