"""The sum over ranks by collectives alone, for many numbers of ranks and terms; flat buffers."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from distributed.reduce import partials, subtrees_of, tree_sum
from distributed.strategies import ddp as module
from distributed.strategies.common.work import flatten, unflatten


class Ranks:
    """Stands in for torch.distributed in one process, with a thread for each rank. As under NCCL, a collective is done
    when every rank has come to it; `collectives` counts them."""

    def __init__(self, size: int, backend: str) -> None:
        self.size, self.backend, self.collectives = size, backend, 0
        self._own = threading.local()
        self._posted: list[tuple[str, Sequence[Tensor]]] = [("", ())] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def run(self, program: Callable[[], Any]) -> list[Any]:
        """The results of the program on all ranks."""

        def of_rank(rank: int) -> Any:
            self._own.rank = rank
            return program()

        with ThreadPoolExecutor(self.size) as ranks:
            return list(ranks.map(of_rank, range(self.size)))

    def get_rank(self) -> int:
        return int(self._own.rank)

    def get_world_size(self) -> int:
        return self.size

    def get_backend(self) -> str:
        return self.backend

    def all_to_all_single(self, output: Tensor, values: Tensor, output_splits: Any = 1, input_splits: Any = 1) -> None:
        self._exchange("all_to_all", values.split(input_splits), output.split(output_splits))

    def all_gather(self, outputs: Sequence[Tensor], values: Tensor) -> None:
        self._exchange("all_gather", [values] * self.size, outputs)

    def all_gather_into_tensor(self, output: Tensor, values: Tensor, *, async_op: bool) -> "Ranks":
        assert async_op  # what is recorded may not wait
        self._exchange("all_gather", [values] * self.size, list(output))
        return self

    def synchronize(self) -> None:
        """The stream waits, which is none here."""

    def _exchange(self, kind: str, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        rank = self.get_rank()
        self._posted[rank] = kind, sent
        self._barrier.wait()
        assert {other for other, _ in self._posted} == {kind}
        for part, (_, theirs) in zip(received, self._posted, strict=True):
            part.copy_(theirs[rank])  # fails if the sizes differ
        self.collectives += rank == 0
        self._barrier.wait()


def terms_of(count: int, elements: int) -> list[list[Tensor]]:
    """Terms of two types, whose sum has other bits in another order of addition."""
    draw = torch.Generator().manual_seed(count)
    return [[torch.randn(elements, generator=draw) * 10.0 ** (i % 5), torch.tensor([i, 1])] for i in range(count)]


@pytest.mark.parametrize(("count", "elements"), [(1, 1), (5, 7), (8, 100), (16, 1000), (19, 333)])
@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_every_rank_gets_the_bits_of_one_process(
    backend: str, ranks: int, count: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = terms_of(count, elements)
    ends = [count * (rank + 1) // ranks for rank in range(ranks)]
    runs = [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    subtrees = [subtrees_of(run, count) for run in runs]
    stand_in = Ranks(ranks, backend)
    monkeypatch.setattr(module, "dist", stand_in)

    def program() -> tuple[list[Tensor], Tensor, int]:
        rank = stand_in.get_rank()
        own = partials([(i, terms[i]) for i in runs[rank]], count)
        row = torch.tensor([rank, 0.5 * rank], dtype=torch.float64)
        return *module.sum_over_ranks(own, terms[0], subtrees, count, row), module.bytes_sent(terms[0], len(own))

    results = stand_in.run(program)
    for total, rows, _ in results:
        assert all(map(torch.equal, total, tree_sum(terms)))
        assert rows.tolist() == [[rank, 0.5 * rank] for rank in range(ranks)]
    assert stand_in.collectives == (2 if ranks > 1 else 0)
    if count == 16 and ranks in (1, 2, 4, 8):  # a partial sum a rank
        ring = 2 * (ranks - 1) / ranks * sum(buffer.nbytes for buffer in terms[0])
        assert all(ring <= sent <= ring + 2 * 2 * 16 * 12 * (ranks - 1) for _, _, sent in results)


@pytest.mark.parametrize("count", [1, 2, 5, 8, 19])
@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_one_collective_gives_all_ranks_the_bits(
    backend: str, ranks: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of nested values of two types; also to ranks that have no chunk of their own."""
    terms = [({"w": a.view(-1, 1), "b": a[:3]}, {"loss": a.double().sum()}) for a, _ in terms_of(count, 37)]
    stand_in = Ranks(ranks, backend)
    monkeypatch.setattr(module, "dist", stand_in)

    def program() -> tuple[range, Any]:
        shares = module.SharesOfRanks(torch.device("cpu"), 60, nullcontext)
        run = shares.run(count)
        return run, shares.add([terms[number] for number in run], count)

    results = stand_in.run(program)
    assert {number for run, _ in results for number in run} == set(range(count))
    expected = tree_sum(terms)
    for _, (weights, figures) in results:
        assert weights.keys() == expected[0].keys() and figures["loss"].equal(expected[1]["loss"])
        assert all(weights[name].equal(value) for name, value in expected[0].items())
    assert stand_in.collectives == 1


def test_no_operation_of_a_shared_sum_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under NCCL: tensors without values stand for those of a GPU, and whatever asks for a value fails."""
    terms = [({"w": torch.empty(5, 3, device="meta")}, {"loss": torch.empty((), device="meta")}) for _ in range(6)]
    stand_in = Ranks(2, "nccl")
    monkeypatch.setattr(module, "dist", stand_in)

    def program() -> Any:
        shares = module.SharesOfRanks(torch.device("meta"), 60, nullcontext)
        return shares.add([terms[number] for number in shares.run(6)], 6)

    for weights, figures in stand_in.run(program):
        assert weights["w"].shape == (5, 3) and {weights["w"].device.type, figures["loss"].device.type} == {"meta"}


class Result(NamedTuple):
    grads: dict[str, Tensor]
    loss: Any
    number: int


def test_a_nested_value_survives_its_flat_buffers() -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    value = {(0, 1): Result({"w": weight, "b": torch.randn(0), "half": torch.randn(2).half()}, torch.tensor(2.5), 7)}
    value[0, 2] = Result({"w": weight.detach().t()}, 0.25, 2**40)
    flat = flatten(value)
    assert [buffer.dtype for buffer in flat.buffers] == [torch.float32, torch.float16, torch.int64, torch.float64]
    back = unflatten(flat)
    assert list(back) == list(value)
    first, second = back[0, 1], back[0, 2]
    assert torch.equal(first.grads["w"], weight) and not first.grads["w"].requires_grad
    assert first.grads["b"].shape == (0,) and torch.equal(first.grads["half"], value[0, 1].grads["half"])
    assert first.loss.shape == () and first.loss == 2.5 and first.number == 7
    assert torch.equal(second.grads["w"], weight.t()) and second.loss == 0.25 and second.number == 2**40
    for tensor in (*first.grads.values(), *second.grads.values()):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # a tensor of its own, aligned like any other
