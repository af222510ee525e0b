"""Pairwise summation: one order of addition, on whichever workers the terms are.

The terms are numbered from 0 to count − 1. They are the leaves of a binary tree. A subtree of level l at position p
holds the terms from p·2ˡ to (p + 1)·2ˡ − 1, as far as they exist. Its sum is its left half's sum plus its right half's.
If the right half is empty, it is the left half's sum. So the order depends on `count` only, and a worker can add whole
subtrees of its terms before it passes them on.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch.utils import _pytree as pytree

T = TypeVar("T")


class Subtree(NamedTuple):
    """A subtree of 2**level terms, from term number position·2**level on."""

    level: int
    position: int

    def first(self) -> int:
        """The number of its first term."""
        return self.position << self.level


def partials(parts: Iterable[tuple[Subtree, T]], count: int) -> dict[Subtree, T]:
    """Adds sums of subtrees as far as that is possible: two halves become one as soon as both are here.

    A run of consecutive terms becomes 2·log₂(count) sums or fewer, and a single one if it is a subtree. If the
    terms come in order, log₂(count) + 1 sums or fewer are held at any time.

    Args:
        parts: sums of subtrees, nested in any way, with tensors and numbers as leaves; in any order.
        count: the number of all terms.
    """
    sums: dict[Subtree, T] = {}
    for (level, position), value in parts:
        total = value
        while 1 << level < count:
            other = Subtree(level, position ^ 1)
            if other in sums:
                left_is_here = position & 1
                total = _added(sums.pop(other), total) if left_is_here else _added(total, sums.pop(other))
            elif other.first() < count:
                break
            level, position = level + 1, position >> 1
        sums[Subtree(level, position)] = total
        del value, total  # before the next term is computed
    return sums


def _added(left: T, right: T) -> T:
    total: T = pytree.tree_map(lambda a, b: a + b, left, right)
    return total


def partials_of_terms(terms: Iterable[tuple[int, T]], count: int) -> dict[Subtree, T]:
    """As `partials`, for single terms with their numbers."""
    return partials(map(_as_subtree, terms), count)  # a generator here would hold each term until it has the next


def _as_subtree(numbered: tuple[int, T]) -> tuple[Subtree, T]:
    number, term = numbered
    return Subtree(0, number), term


def combine(parts: Iterable[tuple[Subtree, T]], count: int) -> T:
    """The sum of all `count` terms, from sums of subtrees. Each term must be in one of them."""
    (total,) = partials(parts, count).values()
    return total


def tree_sum(terms: Sequence[T]) -> T:
    """The sum of the terms, leaf by leaf: always the same bits, whichever worker added a subtree.

    Raises:
        ValueError: there are no terms.
    """
    if not terms:
        raise ValueError("terms=[]: there is nothing to add")
    total: T = combine(partials_of_terms(enumerate(terms), len(terms)).items(), len(terms))
    return total


def subtrees_of(numbers: Iterable[int], count: int) -> list[Subtree]:
    """The subtrees that `partials_of_terms` adds these terms to, ordered by their first term."""
    nothing: Any = ()
    sums = partials_of_terms(((number, nothing) for number in numbers), count)
    return sorted(sums, key=Subtree.first)
