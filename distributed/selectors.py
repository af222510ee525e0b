"""Decorators that let only some ranks call a function; the others get None."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from distributed.world import get_world_rank

P = ParamSpec("P")
T = TypeVar("T")


def _on(chosen: Callable[[int], bool]) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    def decorate(func: Callable[P, T]) -> Callable[P, T | None]:
        @functools.wraps(func)
        def selected(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return func(*args, **kwargs) if chosen(get_world_rank()) else None

        return selected

    return decorate


def on_rank(*ranks: int) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """A decorator: only these ranks call the function, the others get None."""
    return _on(lambda rank: rank in ranks)


def not_on_rank(*ranks: int) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """A decorator: these ranks get None, the others call the function."""
    return _on(lambda rank: rank not in ranks)


def rank_all(func: Callable[P, T]) -> Callable[P, T | None]:
    """Every rank calls the function."""
    return _on(lambda rank: True)(func)


def rank_zero_only(func: Callable[P, T]) -> Callable[P, T | None]:
    """Only rank zero calls the function."""
    return on_rank(0)(func)


def rank_non_zero_only(func: Callable[P, T]) -> Callable[P, T | None]:
    """Every rank but zero calls the function."""
    return not_on_rank(0)(func)
