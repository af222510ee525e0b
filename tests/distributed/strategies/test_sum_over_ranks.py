"""The sum over ranks under NCCL's rules, for many numbers of ranks and terms; flat buffers."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from distributed.strategies.common import sum_over_ranks as module
from distributed.strategies.common.work import flatten, unflatten
from distributed.tree_sum import partials_of_terms, subtrees_of, tree_sum
from tests.distributed.nccl_rules import Deadlock, NcclRules


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
    stand_in = NcclRules(ranks, backend)
    monkeypatch.setattr(module, "dist", stand_in)

    def program() -> tuple[list[Tensor], Tensor, int]:
        rank = stand_in.get_rank()
        own = partials_of_terms([(i, terms[i]) for i in runs[rank]], count)
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


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_rules_forbid_to_post_all_receives_before_any_send(ranks: int) -> None:
    """A sum from rank to rank and back round the ring, as gloo allows it."""
    stand_in = NcclRules(ranks)

    def ring() -> None:
        rank = stand_in.get_rank()
        before, after = (rank - 1) % ranks, (rank + 1) % ranks
        arriving = [stand_in.irecv(torch.zeros(1), before)] if rank else []
        coming_back = [stand_in.irecv(torch.zeros(1), before)] if rank < ranks - 1 else []
        for work in arriving:
            work.wait()
        sent = [stand_in.isend(torch.ones(1), after)]
        for work in [*coming_back, *sent]:
            work.wait()

    with pytest.raises(Deadlock):
        stand_in.run(ring)


def test_the_rules_let_a_send_and_its_receive_pass() -> None:
    stand_in = NcclRules(2)
    received = torch.zeros(3)

    def program() -> None:
        first = stand_in.get_rank() == 0
        operation = stand_in.isend(torch.ones(3), 1) if first else stand_in.irecv(received, 0)
        operation.wait()

    stand_in.run(program)
    assert received.tolist() == [1.0, 1.0, 1.0]


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
