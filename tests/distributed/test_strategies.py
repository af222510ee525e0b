"""The strategies against `local`, on real processes; how chunks are dealt out; what is refused."""

from typing import Any

import pytest
import torch

from distributed import chunks, partition, reduce
from distributed.strategies import auto
from distributed.strategies.local import local
from distributed.strategies.rpc import rpc
from distributed.strategies.rpc_autograd import rpc_autograd
from distributed.work import Plan
from tests import own_functions
from tests.distributed.chunk_work import WORK
from tests.distributed.worlds import run_program


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_strategy_gives_the_bits_of_local(ranks: int) -> None:
    results = run_program("strategies", ranks)
    assert all(code == 0 for code, _ in results), results
    assert results[0][1].count("ok") == 8


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_every_chunk_is_dealt_out_once(count: int) -> None:
    for partitioner in (partition.batch_partitioner, partition.exclusive_batch_partitioner):
        dealt = chunks.deal(partitioner, count)
        assert sorted(number for _, numbers in dealt for number in numbers) == list(range(count))
    for keepdim in (True, False):
        dealt = chunks.deal(partition.dynamic_partitioner(keepdim=keepdim), count)
        assert dealt == [(None, [i]) for i in range(count)]


FAULTY: list[tuple[Any, str]] = [
    (own_functions.deal_twice, r"of 3 chunks it gave out \[1\] twice"),
    (lambda numbers: [(0, (numbers[:1],), None)], r"\[1, 2\] to nobody"),
    (lambda numbers: [(0, (torch.arange(5),), None)], r"\[3, 4\] that do not exist"),
    (lambda numbers: [], "returned no part"),
    (lambda numbers: [(0, None, None)], "must hold a tensor with the numbers of its chunks"),
]


@pytest.mark.parametrize(("partitioner", "message"), FAULTY)
def test_partitioners_that_lose_or_repeat_chunks_are_refused(partitioner: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunks.deal(partitioner, 3)


def test_settings_are_checked_before_anything_starts() -> None:
    plan = Plan(WORK, 2, partition.batch_partitioner, reduce.mean())
    for factory in (auto, rpc, rpc_autograd):
        with pytest.raises(ValueError, match="timeout=0"):
            factory(plan=plan, timeout=0)
        with pytest.raises(ValueError, match=r"type partitioner\.dim=0"):
            factory(plan=plan._replace(partitioner=partition.dynamic_partitioner(1)), timeout=5)
        with pytest.raises(ValueError, match="device_maps=some: must be auto or none"):
            factory(plan=plan, timeout=5, device_maps="some")
    with pytest.raises(ValueError, match="type strategy=rpc"):
        rpc_autograd(plan=plan._replace(work=WORK._replace(loss=None)), timeout=5)
    with pytest.raises(ValueError, match="workers=2: strategy=local is one process"):
        local(plan=plan, timeout=5)


def test_gpus_are_mapped_where_every_worker_has_one() -> None:
    assert chunks.mapped_devices(1, 3, gpus=3) == {"worker0": {1: 0}, "worker2": {1: 2}}
    assert chunks.mapped_devices(0, 12, gpus=12)["worker07"] == {0: 7}
    assert chunks.mapped_devices(0, 3, gpus=2) == {} == chunks.mapped_devices(0, 1, gpus=8)


SUMS = [{"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([3.0, 6.0])}, {"a": torch.tensor([2.0, 1.0])}]
COUNTS = [2, 2, 1]


def test_what_the_trainer_reduces_by() -> None:
    assert reduce.mean()(SUMS, COUNTS)["a"].tolist() == pytest.approx([1.2, 1.8])
    assert reduce.stack()(SUMS, COUNTS)["a"].tolist() == pytest.approx([1.2, 1.8])
    assert reduce.total()(SUMS, COUNTS)["a"].tolist() == [6.0, 9.0]
    own = reduce.function(name="tests.own_functions.mean")
    assert torch.equal(own(SUMS, COUNTS)["a"], reduce.mean()(SUMS, COUNTS)["a"])
    with pytest.raises(ValueError, match=r"reducer=tests.own_functions.lose_a_parameter.*shape \(2,\) for 'a'"):
        reduce.function(name="tests.own_functions.lose_a_parameter")(SUMS, COUNTS)
    for name in ("nowhere.at_all", "tests.own_functions.absent", "mean", "tests.own_functions"):
        with pytest.raises(ValueError, match=f"name={name}: .*"):
            reduce.function(name=name)


def test_uneven_parts_are_averaged_by_sample() -> None:
    """Means over parts of 1 and 2 samples: (1 · 1 + 2 · 4) ÷ 3."""
    parts = [({"loss": torch.tensor(1.0), "n": 1.0}, 1), ({"loss": torch.tensor(4.0), "n": 4.0}, 2)]
    mean = reduce.weighted_mean_reducer(parts)
    assert mean["loss"] == 3.0 == mean["n"]
    assert reduce.mean_reducer([parts[0][0], parts[1][0]])["loss"] == 2.5
    assert reduce.stack_reducer([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert reduce.stack_reducer(SUMS)["a"].shape == (3, 2)
    with pytest.raises(ValueError, match="add up to 0"):
        reduce.weighted_mean_reducer([(torch.tensor(1.0), 0)])
    with pytest.raises(ValueError, match="nothing"):
        reduce.weighted_mean_reducer([])
