"""The distributed layer on real processes: pytest itself is rank zero, the other ranks are started once."""

import copy
import os
import pickle
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import distributed as todist
from distributed.api import parallelize, remote_async_call, remote_sync_call
from distributed.calls import session as sessions
from distributed.launch.elastic import LaunchConfig, launch
from distributed.partition import TensorDimensionPartitioner, batch_partitioner, exclusive_batch_partitioner, whole
from distributed.reduce import mean_reducer, stack_reducer, sum_reducer, weighted_mean_reducer
from tests.distributed import remote_functions as functions
from tests.distributed.worlds import WORLD, environment, run_program, run_ranks
from tests.forks import Forked
from tests.runs import ROOT, slow

pytestmark = pytest.mark.thorough


def test_who_is_who(workers: list[Forked]) -> None:
    info = todist.get_world_info()
    assert (info.rank, info.world_size, info.worker_name) == (0, WORLD, "worker0")
    assert remote_sync_call(functions.rank, partitioner="worker2") == [2]
    assert todist.get_worker_id("worker1") == 1 == todist.get_worker_id(1)
    assert todist.get_worker_id() == 0
    with pytest.raises(ValueError, match="worker0, worker1, worker2"):
        todist.get_worker_id("worker9")
    with pytest.raises(ValueError, match="0 to 2"):
        remote_sync_call(functions.rank, partitioner=3)
    assert remote_sync_call(functions.rank) == [0], "without tensors the caller computes alone"
    threads = remote_sync_call(functions.threads, partitioner=lambda: [(i, None, None) for i in range(1, WORLD)])
    assert threads == [1, 1], "each has the threads that were asked for"


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 64])
def test_batch_partitioner_deals_out_everything_once(workers: list[Forked], batch: int) -> None:
    results = remote_sync_call(functions.size_and_rank, args=(torch.arange(batch),), kwargs={"label": "a"})
    parts = min(batch, WORLD)
    assert [rank for _, rank, _ in results] == list(range(parts))
    assert [size for size, _, _ in results] == [batch // parts] * (parts - 1) + [batch - batch // parts * (parts - 1)]
    assert {label for _, _, label in results} == {"a"}


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_exclusive_partitioner_calls_once_a_sample(workers: list[Forked], batch: int) -> None:
    x = torch.arange(batch)
    results = remote_sync_call(functions.size_and_rank, args=(x,), partitioner=exclusive_batch_partitioner)
    assert [(size, rank) for size, rank, _ in results] == [(1, i % WORLD) for i in range(batch)]
    values = remote_sync_call(functions.total, args=(x,), partitioner=exclusive_batch_partitioner)
    assert [int(value) for value in values] == list(range(batch))


def test_what_is_sliced_and_what_is_not(workers: list[Forked]) -> None:
    x, parameter, uncut = torch.zeros(2, 6), nn.Parameter(torch.zeros(5)), whole({"w": torch.zeros(4)}["w"])
    along = TensorDimensionPartitioner(1)
    shapes = remote_sync_call(functions.shape_of, args=(x, parameter, uncut), partitioner=along)
    assert shapes == [[(2, 2), (5,), (4,)]] * WORLD
    single = TensorDimensionPartitioner(1, exclusive=True, keepdim=False, workers=["worker2"])
    assert remote_sync_call(functions.shape_of, args=(x,), partitioner=single) == [[(2,)]] * 6
    with pytest.raises(ValueError, match="differ in size"):
        remote_sync_call(functions.shape_of, args=(x, torch.zeros(3, 1)))
    with pytest.raises(ValueError, match="does not have it"):
        remote_sync_call(functions.shape_of, args=(torch.tensor(1.0),))


def test_partitioners_pickle_copy_and_check_themselves() -> None:
    partitioner = todist.dim_partitioner(1, exclusive=True, keepdim=False, workers=[1])
    for twin in (pickle.loads(pickle.dumps(partitioner)), copy.deepcopy(partitioner)):
        assert repr(twin) == repr(partitioner)
    assert TensorDimensionPartitioner(0).keepdim is batch_partitioner.keepdim is True
    with pytest.raises(ValueError, match="exclusive=True"):
        todist.dim_partitioner(0, keepdim=False)


def test_reducers_take_nested_tensors_and_numbers() -> None:
    results = [{"a": torch.tensor([1.0, 2.0]), "b": (3, 4.0)}, {"a": torch.tensor([3.0, 4.0]), "b": (5, 6.0)}]
    mean, total = mean_reducer(results), sum_reducer(results)
    assert mean["a"].tolist() == [2.0, 3.0] and mean["b"] == (4, 5.0)
    assert total["a"].tolist() == [4.0, 6.0] and total["b"] == (8, 10.0)
    for reducer in (mean_reducer, sum_reducer):
        with pytest.raises(ValueError, match="nothing"):
            reducer([])
    for reducer in (mean_reducer, sum_reducer, stack_reducer):
        assert repr(reducer(iter(results))) == repr(reducer(results))
        with pytest.raises(ValueError, match="nothing"):
            reducer(iter(()))
    assert weighted_mean_reducer((value, 1) for value in (2.0, 4.0)) == 3.0


def test_many_tasks_that_call_back_finish(workers: list[Forked]) -> None:
    reference = todist.rpc.RRef(torch.tensor(2.0))
    x = torch.arange(64.0)
    values = remote_sync_call(
        functions.fetch, args=(x, reference), partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False)
    )
    assert values == [2.0 * i for i in range(64)]


def test_an_async_call_returns_a_future(workers: list[Forked]) -> None:
    x = torch.arange(7.0)
    future = remote_async_call(functions.total, args=(x,), reducer=sum_reducer)
    assert isinstance(future, torch.futures.Future)
    assert future.wait() == x.sum()
    failing = remote_async_call(functions.fail, args=(x,))
    with pytest.raises(functions.OwnError):
        failing.wait()


def test_parallelized_functions(workers: list[Forked]) -> None:
    x = torch.arange(6.0)
    assert functions.mean_of_squares(x) == x.square().mean()
    assert functions.sum_by_task(x.view(3, 2), 2.0) == 2 * x.sum()
    assert functions.later(x).wait()[0].tolist() == (x + 1).tolist()
    assert functions.renamed(x).tolist() == [15.0] and functions.wrapped(x).tolist() == [15.0]
    with pytest.raises(TypeError, match="top of a module"):
        parallelize()(lambda x: x)


def test_a_remote_exception_keeps_type_message_and_origin(workers: list[Forked]) -> None:
    with pytest.raises(functions.OwnError) as caught:
        remote_sync_call(functions.fail, args=(torch.arange(6),), partitioner=todist.dim_partitioner(workers=[2, 1]))
    (note,) = caught.value.__notes__
    first = "worker2" in note  # both workers fail; the first failure is raised
    assert f"no good: {[0, 1, 2] if first else [3, 4, 5]} \\N{{DASH}}" in str(caught.value)
    assert f"raised on worker{2 if first else 1} by item {0 if first else 1}" in note and "remote_functions.py" in note
    with pytest.raises(RuntimeError, match="StubbornError: 1 and 2"):
        remote_sync_call(functions.fail_stubbornly, args=(torch.arange(2),), partitioner=1)
    assert remote_sync_call(functions.rank, partitioner=2) == [2]


def test_a_slow_worker_is_named(workers: list[Forked]) -> None:
    with pytest.raises(TimeoutError, match=r"worker1.*0\.5 s"):
        remote_sync_call(functions.sleep, args=(2.0,), partitioner=1, timeout=0.5)
    with pytest.raises(ValueError, match="timeout=0"):
        remote_sync_call(functions.rank, partitioner=1, timeout=0)
    assert remote_sync_call(functions.rank, partitioner=1, timeout=None) == [1]


def test_names_of_the_original(workers: list[Forked]) -> None:
    assert todist.api.dim_partitioner is todist.dim_partitioner and todist.world.on_rank is todist.on_rank
    assert todist.rpc is torch.distributed.rpc and todist.dist is torch.distributed
    assert remote_sync_call(functions.rank, partitioner=1, timeout=-1) == [1]
    empty = remote_sync_call(functions.size_and_rank, args=(torch.zeros(0, 2),))
    assert empty == [(0, 0, "")]


def test_rank_selectors(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, expected in ((0, ["zero", None, None, "not 2", "all"]), (2, [None, "others", "2", None, "all"])):
        monkeypatch.setenv("RANK", str(rank))
        results = [
            todist.rank_zero_only(lambda: "zero")(),
            todist.rank_non_zero_only(lambda: "others")(),
            todist.on_rank(2, 5)(lambda: "2")(),
            todist.not_on_rank(2)(lambda: "not 2")(),
            todist.rank_all(lambda: "all")(),
        ]
        assert results == expected


def test_ranks_that_never_exist_are_refused() -> None:
    for rank in ("0", [0], -1, 1.0, None, True, print):
        for select in (todist.on_rank, todist.not_on_rank):
            with pytest.raises(ValueError, match=r"rank=.*must be a whole number from 0; type on_rank\(0\)"):
                select(rank)  # type: ignore[arg-type]


def test_the_world_info_has_every_form_of_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (1, 2):
        monkeypatch.setenv("RANK", str(rank))
        info = todist.get_world_info()
        assert info.world_rank == info.rank == info[0] == rank
        read = todist.get_world_info
        for name in ("world_rank", "rank", "world_size", "local_rank", "local_world_size"):
            assert getattr(read, name) == getattr(read, name.upper()) == getattr(info, name)
        assert read.world_info == read.WORLD_INFO == info  # type: ignore[attr-defined]
    assert todist.world.default_worker_name_format(3, 10, 3, 10) == "worker03"
    assert todist.api.UNSET_RPC_TIMEOUT == todist.rpc.api.UNSET_RPC_TIMEOUT


# Programs with a world of their own


def test_start_and_stop_can_be_repeated() -> None:
    (code, output), other = run_program("twice", 2)
    assert code == other[0] == 0, (output, other[1])
    assert output.strip() == "1 1"


def test_a_world_needs_more_descriptors_than_the_soft_limit() -> None:
    results = run_program("few_descriptors", 4, "30")
    assert [code for code, _ in results] == [0] * 4 and "[0, 1, 2, 3]" in results[0][1], results


def test_a_failing_worker_init_fn_stops_every_rank() -> None:
    began = time.monotonic()
    results = run_program("init_fails", 2)
    assert all(code != 0 for code, _ in results), results
    assert all("main was entered" not in output for _, output in results)
    assert "worker_init_fn failed on worker1: OSError: no such thing here" in results[0][1]
    assert "OSError: no such thing here" in results[1][1]
    assert time.monotonic() - began < 60


def test_a_world_of_one_needs_no_torchrun() -> None:
    ((code, output),) = run_program("one", 1)
    assert code == 0, output
    assert "[0] WorldInfo(world_rank=0, world_size=1" in output


def test_an_exit_with_code_0_is_a_good_end() -> None:
    results = run_program("leaves_well", 2)
    assert [code for code, _ in results] == [0, 0], results


def test_a_failing_main_on_another_rank_ends_rank_zero() -> None:
    results = run_program("failing_main", 3)
    assert all(code != 0 for code, _ in results), results
    assert "worker1 has failed: OSError: rank 1 is out of order" in results[0][1]
    assert "stopped by worker0" in results[2][1]


def test_a_report_that_comes_too_late_does_not_hide_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    late = sessions.Session("worker2", sessions.rpc.TensorPipeRpcBackendOptions(), 1, sessions.dist.HashStore())
    late.workers = ["worker0", "worker1", "worker2"]

    def stopped_meanwhile(*args: object, **kwargs: object) -> None:
        late.finished[0] = "worker1 has failed"
        raise RuntimeError("EPIPE: broken pipe")

    monkeypatch.setattr(sessions.rpc, "rpc_sync", stopped_meanwhile)
    with pytest.raises(sessions.StoppedByLeader, match="stopped by worker0: worker1 has failed"):
        sessions._serve_until_dismissed(late, None)


@pytest.mark.parametrize("way", ["bare", pytest.param("launch", marks=slow), pytest.param("torchrun", marks=slow)])
def test_a_call_that_never_returns_does_not_keep_the_job_alive(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [str(ROOT / "tests/distributed/program.py"), "endless"]
    if way == "bare":
        (code, output), (other, reason) = run_ranks(command, 2)
        assert (code, output.splitlines()[0], other) == (0, "main has ended", 0), (output, reason)
        assert "a call is still running" in reason, reason
        return
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    if way == "launch":
        assert launch([sys.executable, *command], LaunchConfig(2)) == 0
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        assert subprocess.run([sys.executable, *torchrun, *command], timeout=90).returncode == 0


def test_the_first_failure_is_raised_while_others_still_compute() -> None:
    (code, output), (killed, _), *_ = run_program("first_failure", 4)
    assert code == 1 and killed == -signal.SIGKILL, output
    assert output.count("OwnError failed first") == output.count("\nConnectionError worker1 does not answer") == 2


@slow
def test_a_call_to_a_rank_that_is_still_starting_waits_for_it() -> None:
    assert run_program("slow_start", 2) == [(0, "[5]\n"), (0, "")]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        pytest.param("exit", "worker_init_fn failed on worker1: SystemExit: 3", marks=slow),
        ("die", "worker1 does not answer"),
    ],
)
def test_a_rank_that_leaves_in_worker_init_fn_is_named(how: str, reason: str) -> None:
    results = run_program("init_exits", 3, how)
    assert [code for code, _ in results] == [1, 3 if how == "exit" else 0, 1]
    assert all(reason in output and "entered" not in output for _, output in (results[0], results[2])), results


@slow
def test_a_store_that_does_not_answer_is_waited_for_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # connections are accepted, and never answered
        command = [sys.executable, str(ROOT / "tests/distributed/program.py"), "missing_rank", "1"]
        own = os.environ | environment(2, listener.getsockname()[1])
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "rank 0 of 3 did not come" in done.stderr, done.stderr


@slow
def test_rank_zero_that_stops_after_the_meeting_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, str(ROOT / "tests/distributed/program.py"), "stops_after_meeting"]
    assert launch(command, LaunchConfig(2)) == 1
    assert "worker1: rank 0, or a rank that it waits for, did not go on within 2 s" in capfd.readouterr().err


@slow
def test_who_does_not_come_to_a_barrier_is_named() -> None:
    (code, output), (other, second), (killed, _) = run_program("late_barrier", 3)
    assert (code, other, killed) == (1, 1, -signal.SIGKILL), (output, second)
    late, lost = [line for line in output.splitlines() if "Error worker" in line]
    assert late == "TimeoutError worker1 did not come to the barrier within 3 s"
    assert lost.startswith("ConnectionError worker2 does not answer")
    assert "ConnectionError worker2 does not answer" in second


@slow
def test_a_rank_that_is_late_or_does_not_come_is_named() -> None:
    results = run_program("missing_rank", 3, "7")
    assert "waiting up to 7 s for rank 1 of 3" in results[0][1]
    assert "waiting up to 7 s for rank 0 of 3, or for ranks that it waits for" in results[2][1]
    assert [code for code, _ in results] == [1, 0, 1]
    assert "rank 1 of 3 did not come within 7 s" in results[0][1]
    assert "rank 0 of 3 did not come, or had not met all others" in results[2][1] or "rank 0 of 3 has" in results[2][1]
