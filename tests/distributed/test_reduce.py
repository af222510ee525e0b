"""The order of addition: pairwise summation against its recursive definition, for any dealing of the terms."""

import gc
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from distributed import reduce
from distributed.reduce import combine, partials, subtrees_of, tree_sum

COUNTS = [*range(1, 18), 31, 32, 33, 64, 100]


def recursive(terms: Sequence[Any]) -> Any:
    """The definition: the left half has the largest power of two below the number of terms."""
    if len(terms) == 1:
        return terms[0]
    middle = 1 << (len(terms) - 1).bit_length() - 1
    return recursive(terms[:middle]) + recursive(terms[middle:])


def numbers_of(count: int) -> list[torch.Tensor]:
    """Terms of all magnitudes: another order of addition gives other bits."""
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(50, generator=generator) * 10.0 ** (i % 5) for i in range(count)]


def runs(count: int, workers: int) -> list[list[int]]:
    ends = [count * (worker + 1) // workers for worker in range(workers)]
    return [list(range(begin, end)) for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("count", COUNTS)
def test_every_dealing_gives_the_recursive_bits(count: int) -> None:
    terms = numbers_of(count)
    expected = recursive(terms)
    assert torch.equal(tree_sum(terms), expected)
    draw = random.Random(count)
    dealings = [runs(count, workers) for workers in range(1, 9)]
    dealings.append([list(range(worker, count, 3)) for worker in range(3)])
    dealings.append([draw.sample(range(count), count)])
    for dealing in dealings:
        sums = [partials([(i, terms[i]) for i in numbers], count) for numbers in dealing]
        assert [list(s) for s in map(sorted, sums)] == [sorted(subtrees_of(numbers, count)) for numbers in dealing]
        answers = [part for own in sums for part in own.items()]
        draw.shuffle(answers)
        assert torch.equal(combine(answers, count), expected), dealing


@pytest.mark.parametrize("count", [count for count in COUNTS if count < 40])
def test_a_run_becomes_few_sums_and_an_aligned_one_a_single_sum(count: int) -> None:
    most = max(1, math.floor(2 * math.log2(count)))
    for begin in range(count):
        for end in range(begin + 1, count + 1):
            assert len(subtrees_of(range(begin, end), count)) <= most
    for size in (1, 2, 4, 8, 16):
        for begin in range(0, count, size):
            assert len(subtrees_of(range(begin, min(begin + size, count)), count)) == 1


class Counted:
    """A term that counts how many of its kind exist."""

    alive = 0
    most = 0

    def __init__(self) -> None:
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)

    def __del__(self) -> None:
        Counted.alive -= 1

    def __add__(self, other: "Counted") -> "Counted":
        return Counted()


@pytest.mark.parametrize("count", [1, 2, 7, 8, 100, 128])
def test_terms_in_order_need_the_memory_of_few(count: int) -> None:
    gc.collect()
    Counted.alive = Counted.most = 0
    partials(((number, Counted()) for number in range(count)), count)
    assert Counted.most <= math.floor(math.log2(count)) + 2  # one of them is the result of an addition


def test_nested_terms_and_numbers() -> None:
    terms = [{"a": torch.tensor(float(i)), "b": (i, [0.5 * i])} for i in range(5)]
    total = tree_sum(terms)
    assert total["a"].item() == 10.0 and total["b"] == (10, [5.0])
    with pytest.raises(ValueError, match="nothing to add"):
        tree_sum([])


@pytest.mark.parametrize("count", [1, 3, 7, 16])
def test_the_reducers_of_the_trainers_add_in_this_order(count: int) -> None:
    terms = numbers_of(count)
    sums, counts = [{"w": term} for term in terms], list(range(1, count + 1))
    assert torch.equal(reduce.total()(sums, counts)["w"], recursive(terms))
    assert torch.equal(reduce.mean()(sums, counts)["w"], recursive(terms) / sum(counts))
