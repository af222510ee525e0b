"""Reducers: many results into one. Results may be any nesting of tensors and numbers."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")
Reducer = Callable[[Sequence[Any]], Any]
Finish = Callable[[dict[str, Tensor], int], dict[str, Tensor]]


def mean_reducer(results: Sequence[T]) -> T:
    """The unweighted mean of the results, leaf by leaf.

    Raises:
        ValueError: there are no results.
    """
    return _leafwise(results, lambda leaves: torch.stack(leaves).mean(dim=0), lambda leaves: sum(leaves) / len(leaves))


def sum_reducer(results: Sequence[T]) -> T:
    """The sum of the results, leaf by leaf.

    Raises:
        ValueError: there are no results.
    """
    return _leafwise(results, lambda leaves: torch.stack(leaves).sum(dim=0), sum)


def _leafwise(
    results: Sequence[T], of_tensors: Callable[[list[Tensor]], Tensor], of_numbers: Callable[[list[Any]], Any]
) -> T:
    if not results:
        raise ValueError("results=[]: there is nothing to reduce")

    def reduced(*leaves: Any) -> Any:
        return of_tensors(list(leaves)) if isinstance(leaves[0], Tensor) else of_numbers(list(leaves))

    value: T = pytree.tree_map(reduced, results[0], *results[1:])
    return value


def add_in_order(results: Sequence[T]) -> T:
    """((r₀ + r₁) + r₂) + …, leaf by leaf: always the same bits, whoever computed the results.

    Raises:
        ValueError: there are no results.
    """
    if not results:
        raise ValueError("results=[]: there is nothing to add")
    total = results[0]
    for result in results[1:]:
        total = pytree.tree_map(lambda a, b: a + b, total, result)
    return total


def mean() -> Finish:
    """What the trainers use: Σ sums ÷ Σ counts, a mean over samples however unevenly they were dealt out."""
    return lambda sums, count: {name: value / count for name, value in sums.items()}


def total() -> Finish:
    """The sum over samples, not divided."""
    return lambda sums, count: sums
