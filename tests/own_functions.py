"""Functions that the tests choose by config, as users choose theirs."""

import torch
from torch import Tensor


def deal_backwards(numbers: Tensor) -> list[tuple[int, tuple[Tensor], None]]:
    """A partitioner: the last chunk goes to worker 0, the one before to worker 1, and so on."""
    import distributed as todist

    size = todist.get_world_size()
    return [(i % size, (number,), None) for i, number in enumerate(numbers.flip(0))]


def deal_twice(numbers: Tensor) -> list[tuple[int, tuple[Tensor], None]]:
    """A partitioner that gives chunk 1 out twice."""
    return [(0, (numbers,), None), (0, (numbers[1:2],), None)]


def deal_to_nobody(numbers: Tensor) -> list[tuple[int, tuple[Tensor], None]]:
    """A partitioner that names a worker that does not exist."""
    return [(0, (numbers[:1],), None), (7, (numbers[1:],), None)]


def mean(sums: dict[str, Tensor], counts: Tensor) -> dict[str, Tensor]:
    """A reducer: the mean over tasks, chunk after chunk as `reducer=mean` adds."""
    total = counts.sum().item()
    added = {}
    for name, value in sums.items():
        first, *others = value.unbind()
        for other in others:
            first = first + other
        added[name] = first / total
    return added


def fail_at_the_third_call(sums: dict[str, Tensor], counts: Tensor, calls: list[int] = []) -> dict[str, Tensor]:  # noqa: B006
    """A reducer that works twice."""
    calls.append(1)
    if len(calls) == 3:
        raise ArithmeticError("cannot reduce this")
    return {name: value.sum(dim=0) / counts.sum() for name, value in sums.items()}


def lose_a_parameter(sums: dict[str, Tensor], counts: Tensor) -> dict[str, Tensor]:
    """A reducer that returns less than it was given."""
    return {"other": torch.zeros(1)}
