"""The words that all parts of a sweep share. Imports no optuna."""

from typing import Literal, NamedTuple

from sweeps.space import Params

Values = tuple[float, ...]
"""A trial's values, one for each objective."""

Direction = Literal["minimize", "maximize"]

COMPLETED, PRUNED, DIVERGED, FAILED = "completed", "pruned", "diverged", "failed"
"""How a trial can end."""


class Trial(NamedTuple):
    """A trial that has been given parameters."""

    number: int
    params: Params


class Finished(NamedTuple):
    """A trial that has ended; `values` are None where there are none. `told` counts the ends."""

    number: int
    params: Params
    outcome: str
    values: Values | None
    told: int
    same_as: int | None
    failure: str
    seconds: float | None
