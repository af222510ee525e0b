"""The strategies beside `local`, on real processes; how chunks are dealt out; the settings that are refused."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distributed import partition, reduce
from distributed.strategies import auto
from distributed.strategies.common import chunks
from distributed.strategies.common.work import WorkerCost, WorkPlan, as_metrics
from distributed.strategies.local import local
from distributed.strategies.rpc import rpc
from distributed.strategies.rpc_autograd import rpc_autograd
from distributed.strategies.split import shard_ends
from tests import own_functions
from tests.distributed.chunk_work import WORK
from tests.distributed.worlds import run_program
from tests.runs import slow

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=slow), pytest.param(2, marks=slow), 3])
def test_every_strategy_gives_the_bits_of_local(ranks: int) -> None:
    results = run_program("strategies", ranks)
    assert all(code == 0 for code, _ in results), results
    assert results[0][1].count("ok") == 8


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=slow), pytest.param(2, marks=slow), 3])
def test_sums_over_ranks_have_the_bits_of_one_process(ranks: int) -> None:
    results = run_program("added_by_tree", ranks)
    assert all(code == 0 for code, _ in results), results
    assert all(text.count("ok") == 2 for _, text in results)


def test_handler_threads_are_given_the_gpu_of_their_rank() -> None:
    results = run_program("gpus", 2)
    assert all(code == 0 for code, _ in results) and "ok" in results[0][1], results


def stages_of(*sizes: int) -> Any:
    return SimpleNamespace(stages=[SimpleNamespace(name=f"s{i}", size=size) for i, size in enumerate(sizes)])


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (9, 1, 1, 1), (1, 1, 1, 9), (5, 4, 3, 2, 1), (0, 0, 7, 0)])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_the_largest_shard_is_as_small_as_can_be(sizes: tuple[int, ...], workers: int) -> None:
    def largest(ends: Sequence[int]) -> int:
        return max(sum(sizes[begin:end]) for begin, end in pairwise([0, *ends]))

    ends = shard_ends(stages_of(*sizes), workers)
    assert len(ends) == workers == len(set(ends)) and ends == sorted(ends) and ends[-1] == len(sizes)
    every_way = combinations(range(1, len(sizes)), workers - 1)
    assert largest(ends) == min(largest([*cuts, len(sizes)]) for cuts in every_way)


def test_the_parts_of_a_step_add_up() -> None:
    metrics = as_metrics(2.0, [WorkerCost(1.5, 10), WorkerCost(0.5, 20)])
    for rank, (waiting, sent) in enumerate(((0.0, 10), (1.0, 20))):
        parts = {name: metrics[f"worker{rank}/{name}_seconds"] for name in ("compute", "waiting", "communication")}
        assert sum(parts.values()) == 2.0 and parts["waiting"] == waiting
        assert metrics[f"worker{rank}/bytes_sent"] == sent


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_every_chunk_is_dealt_out_once(count: int) -> None:
    for partitioner in (partition.batch_partitioner, partition.exclusive_batch_partitioner):
        dealt = chunks.deal(partitioner, count)
        assert sorted(number for _, numbers in dealt for number in numbers) == list(range(count))


def test_the_trainers_chunks_are_dealt_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "get_world_size", lambda: 8)
    dealt = chunks.deal(partition.dim_partitioner(0), 15)
    assert [(worker, len(numbers)) for worker, numbers in dealt] == [(rank, 2 - (rank == 7)) for rank in range(8)]
    assert [number for _, numbers in dealt for number in numbers] == list(range(15))
    assert [worker for worker, _ in chunks.deal(partition.dim_partitioner(0), 3)] == [0, 1, 2]


FAULTY: list[tuple[Any, str]] = [
    (own_functions.deal_twice, r"of 3 chunks it gave out \[1\] twice"),
    (lambda numbers: [(0, (numbers[:1],), None)], r"\[1, 2\] to no worker"),
    (lambda numbers: [(0, (torch.arange(5),), None)], r"\[3, 4\] that do not exist"),
    (lambda numbers: [], "returned no part"),
    (lambda numbers: [(0, None, None)], "must hold a tensor with the numbers of its chunks"),
]


@pytest.mark.parametrize(("partitioner", "message"), FAULTY)
def test_partitioners_that_lose_or_repeat_chunks_are_refused(partitioner: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunks.deal(partitioner, 3)


def test_settings_are_checked_before_anything_starts() -> None:
    plan = WorkPlan(WORK, 2, partition.batch_partitioner, reduce.mean())
    for factory in (auto, rpc, rpc_autograd):
        with pytest.raises(ValueError, match="timeout=0"):
            factory(plan=plan, timeout=0)
        with pytest.raises(ValueError, match=r"type partitioner\.dim=0"):
            factory(plan=plan._replace(partitioner=partition.dim_partitioner(1)), timeout=5)
    with pytest.raises(ValueError, match="type strategy=rpc"):
        rpc_autograd(plan=plan._replace(work=WORK._replace(loss=None)), timeout=5)
    with pytest.raises(ValueError, match="workers=2: strategy=local is one process"):
        local(plan=plan, timeout=5)


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
