"""Reducers make one result of many, each any nesting of tensors and numbers; and the tree in whose order they add."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from distributed.partition import find_function

T = TypeVar("T")
Reducer = Callable[[list[Any]], Any]
Tensors = dict[str, Tensor]
Combine = Callable[[Sequence[Tensors], Sequence[int]], Tensors]
"""The reducers of the trainers. Arguments: each chunk's gradient, summed over its samples, and each chunk's number of
samples, both in chunk order. A reducer that only adds may get the sum of all chunks instead. Returns the gradient of
the step."""


# Pairwise summation: one order of addition, on whichever workers the terms are.
#
# The terms, numbered from 0 to count − 1, are the leaves of a binary tree. A subtree of level l at position p holds the
# terms from p·2ˡ to (p + 1)·2ˡ − 1, as far as they exist. Its sum is its left half's sum plus its right half's; where
# the right half is empty, it is the left half's sum. So the order depends on `count` only, and a worker can add whole
# subtrees of its terms before it passes them on.


class Subtree(NamedTuple):
    """A subtree of 2**level terms, from term number position·2**level on."""

    level: int
    position: int

    def first(self) -> int:
        """The number of its first term."""
        return self.position << self.level


def partials(parts: Iterable[tuple[int | Subtree, T]], count: int) -> dict[Subtree, T]:
    """Adds terms, or sums of subtrees, as far as that is possible: two halves become one as soon as both are here.

    A run of consecutive terms becomes 2·log₂(count) sums or fewer, and a single one if it is a subtree. If the
    terms come in order, log₂(count) + 1 sums or fewer are held at any time.

    Args:
        parts: terms by number, or sums by subtree, nested in any way, with tensors and numbers as leaves; in any order.
        count: the number of all terms.
    """
    sums: dict[Subtree, T] = {}
    for place, value in parts:
        level, position = (0, place) if isinstance(place, int) else place
        total = value
        while 1 << level < count:
            other = Subtree(level, position ^ 1)
            if other in sums and position & 1:
                total = pytree.tree_map(operator.add, sums.pop(other), total)
            elif other in sums:
                total = pytree.tree_map(operator.add, total, sums.pop(other))
            elif other.first() < count:
                break
            level, position = level + 1, position >> 1
        sums[Subtree(level, position)] = total
        del value, total  # before the next term is computed
    return sums


def combine(parts: Iterable[tuple[int | Subtree, T]], count: int) -> T:
    """The sum of all `count` terms. Each must be in one of the parts, which are as those of `partials`."""
    (total,) = partials(parts, count).values()
    return total


def tree_sum(terms: Sequence[T]) -> T:
    """The sum of the terms, leaf by leaf: always the same bits, whichever worker added a subtree. Raises ValueError if
    there are no terms."""
    if not terms:
        raise ValueError("terms=[]: there is nothing to add")
    return combine(enumerate(terms), len(terms))


def subtrees_of(numbers: Iterable[int], count: int) -> list[Subtree]:
    """The subtrees that `partials` adds these terms to, ordered by their first term."""
    nothing: Any = ()
    return sorted(partials(((number, nothing) for number in numbers), count), key=Subtree.first)


def mean_reducer(results: Iterable[T]) -> T:
    """The unweighted mean of the results, leaf by leaf. Raises ValueError if there are none."""
    return _leafwise(results, lambda leaves: torch.stack(leaves).mean(dim=0), lambda leaves: sum(leaves) / len(leaves))


def sum_reducer(results: Iterable[T]) -> T:
    """The sum of the results, leaf by leaf. Raises ValueError if there are none."""
    return _leafwise(results, lambda leaves: torch.stack(leaves).sum(dim=0), sum)


def stack_reducer(results: Iterable[T]) -> T:
    """The n results stacked, leaf by leaf: tensors [n, …] (numbers as tensors [n]). Raises ValueError if n is 0."""
    return _leafwise(results, torch.stack, torch.tensor)


def weighted_mean_reducer(results: Iterable[tuple[T, float]]) -> T:
    """The mean over samples of results `(mean over the part, number of samples)`, however uneven the parts. Raises
    ValueError if there are no results, or no samples."""
    results = list(results)
    count = sum(weight for _, weight in results)
    if not results:
        raise ValueError("results=[]: there is nothing to reduce")
    if not count:
        raise ValueError("results: the numbers of samples add up to 0")
    shares = [pytree.tree_map(lambda leaf, w=weight: leaf * w, value) for value, weight in results]
    mean: T = pytree.tree_map(lambda leaf: leaf / count, tree_sum(shares))
    return mean


def _leafwise(
    results: Iterable[T], of_tensors: Callable[[list[Tensor]], Tensor], of_numbers: Callable[[list[Any]], Any]
) -> T:
    results = list(results)
    if not results:
        raise ValueError("results=[]: there is nothing to reduce")

    def reduced(*leaves: Any) -> Any:
        return of_tensors(list(leaves)) if isinstance(leaves[0], Tensor) else of_numbers(list(leaves))

    value: T = pytree.tree_map(reduced, *results)
    return value


# The reducers of the trainers, chosen in config


def mean_of_sums(sums: Sequence[Tensors], counts: Sequence[int]) -> Tensors:
    """Σ sums ÷ Σ counts: the mean over samples, however unevenly they were dealt out. Added by `tree_sum`."""
    return {name: value / sum(counts) for name, value in tree_sum(sums).items()}


def add_up(sums: Sequence[Tensors], counts: Sequence[int]) -> Tensors:
    """The sum over samples, not divided. Added by `tree_sum`."""
    return tree_sum(sums)


def mean() -> Combine:
    """Returns `mean_of_sums`."""
    return mean_of_sums


def total() -> Combine:
    """Returns `add_up`."""
    return add_up


def stack() -> Combine:
    """As `mean`, by one operation on the stacked sums [chunks, …]. torch chooses the order of addition."""

    def combine(sums: Sequence[Tensors], counts: Sequence[int]) -> Tensors:
        return {name: value.sum(dim=0) / sum(counts) for name, value in stack_reducer(sums).items()}

    return combine


def function(*, name: str) -> Combine:
    """The user's own reducer: `name` has module and name, such as `robust.median_of_chunks`. The function is called
    with the chunks' stacked sums [chunks, …] by parameter and their numbers of samples [chunks]; it returns the
    gradient by parameter. Raises ValueError if there is no such function; when called: if it fails, or returns no
    gradient."""
    reducer = find_function(name)

    def combine(sums: Sequence[Tensors], counts: Sequence[int]) -> Tensors:
        try:
            gradients = reducer(stack_reducer(sums), torch.tensor(counts))
        except Exception as error:
            raise ValueError(f"reducer={name}: failed with {type(error).__name__}: {error}") from error
        for key, value in sums[0].items():
            gradient = gradients.get(key) if isinstance(gradients, dict) else None
            if not isinstance(gradient, Tensor) or gradient.shape != value.shape:
                shape = tuple(value.shape)
                raise ValueError(f"reducer={name}: must return a dict with a tensor of shape {shape} for {key!r}")
        return {key: gradients[key] for key in sums[0]}

    return combine
