"""The rows of the check's table: every item of a part ends as one, whatever happens in it."""

import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"

ERROR_LINES = 20
"""The last lines of an error that a row keeps: one screen."""


class CheckRow(NamedTuple):
    """One item of a part: its state, its figures by name, and the error or the reason why it was left out."""

    part: str
    name: str
    state: str
    seconds: float
    figures: dict[str, Any]
    error: str = ""


class WrongError(Exception):
    """The computation has ended, and its result is wrong."""


class LeftOutError(Exception):
    """The item needs what this machine does not have."""


def row_of(part: str, name: str, work: Callable[[], dict[str, Any]]) -> CheckRow:
    """The row of an item whose `work` returns its figures. An exception ends in the row."""
    began = time.perf_counter()
    state, figures, error = FAILED, {}, ""
    try:
        state, figures = PASSED, work()
    except LeftOutError as reason:
        state, error = LEFT_OUT, str(reason)
    except WrongError as wrong:
        state, error = FAILED, str(wrong)
    except Exception:
        state, error = FAILED, last_lines(traceback.format_exc())
    return CheckRow(part, name, state, time.perf_counter() - began, figures, error)


def last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-ERROR_LINES:])


def at_most(what: str, value: float, allowed: float) -> float:
    """The value.

    Raises:
        WrongError: it is above what is allowed, or not a number.
    """
    if not value <= allowed:
        raise WrongError(f"{what}: {value:.2g}, and must be {allowed:.2g} at most")
    return value
