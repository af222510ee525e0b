"""Programs that the tests run on several ranks: python program.py NAME."""

import functools
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

from torch.distributed import rpc

import distributed as todist
from distributed.calls import session, worker
from tests.distributed import remote_functions


def serve() -> None:
    """Serves remote calls until rank zero stops the session."""
    session.start_rpc(timeout=20)
    session.stop_rpc()


@todist.auto_init_rpc()
def twice_inner() -> int:
    if todist.get_rank() == 0:
        ranks = todist.remote_sync_call(remote_functions.rank, partitioner=1)
        todist.remote_sync_call(remote_functions.rank, partitioner=f"worker{todist.get_world_size() - 1}")
        return int(ranks[0])
    return -1


def twice() -> None:
    """Starts and stops RPC two times in one process."""
    print(twice_inner(), twice_inner())


def init_fails() -> None:
    def prepare() -> None:
        if todist.get_rank() == 1:
            raise OSError("no such thing here")

    @todist.auto_init_rpc(prepare)
    def main() -> None:
        print("main was entered")

    main()


def one() -> None:
    """A world of one under plain python."""

    @todist.auto_init_rpc()
    def main() -> list[int]:
        return list(todist.remote_sync_call(remote_functions.rank, partitioner=0))

    print(main(), todist.get_world_info())


def counted(strategy: Any, params: Any, chunks: Any) -> Any:
    """The values of an evaluation, which has counted every sample."""
    done: list[int] = []
    values = strategy.evaluate(params, "val", chunks, done.append)
    assert sum(done) == len(values["loss"])
    return values


def strategies() -> None:
    """Every strategy by remote calls gives the values of `local`, for even and uneven numbers of chunks."""
    import torch

    from distributed import partition, reduce
    from distributed.strategies.common.work import WorkPlan
    from distributed.strategies.local import local
    from distributed.strategies.rpc import rpc
    from distributed.strategies.rpc_autograd import rpc_autograd
    from tests.distributed.chunk_work import PARAMS, WORK

    workers = todist.get_world_size()
    partitioners = {
        "batch": partition.batch_partitioner,
        "exclusive": partition.exclusive_batch_partitioner,
        "backwards": partition.function(name="tests.own_functions.deal_backwards"),
    }
    size = sum(p.numel() * p.element_size() for p in PARAMS.values())
    # A reducer that only adds gets one result, the sum; another one gets every chunk's result.
    for reducer, dealings in ((reduce.mean(), partitioners), (reduce.stack(), ["backwards"])):
        plan = WorkPlan(WORK, workers, partition.batch_partitioner, reducer)
        alone = local(plan=plan._replace(workers=1), timeout=20)()
        for factory in (rpc, rpc_autograd):
            for name in dealings:
                strategy = factory(plan=plan._replace(partitioner=partitioners[name]), timeout=20)()
                for count in (1, 3, 7, 8) if strategy.drives else ():
                    chunks = list(torch.arange(2 * count - 1).split(2))
                    ours, theirs = strategy.map(PARAMS, chunks, 4), alone.map(PARAMS, chunks, 4)
                    assert len(ours) == (1 if plan.only_adds else count)
                    for (grads, loss, samples), (their_grads, their_loss, their_samples) in zip(
                        ours, theirs, strict=True
                    ):
                        assert samples == their_samples and torch.equal(loss, their_loss)
                        assert grads.keys() == their_grads.keys()
                        assert all(torch.equal(grads[key], their_grads[key]) for key in grads), factory
                    values = counted(strategy, PARAMS, chunks)
                    assert torch.equal(values["loss"], alone.evaluate(PARAMS, "val", chunks)["loss"])
                    diagnosis = strategy.diagnose(PARAMS, chunks, 4)
                    assert diagnosis["fault"].tolist() == [4 * (number == 5) for number in range(2 * count - 1)]
                    if name == "batch":  # of chunks (0 1) … (12): 5 is in the third
                        firsts = [number for number in range(2 * count - 1) if diagnosis["worker"][number] == 0]
                        assert firsts == list(range(len(firsts)))
                        assert diagnosis["worker"].max() == min(count, workers) - 1
                    if name == "batch" and workers == 2 and count == 8:  # chunks 4 to 7 are a subtree
                        cost, sums = strategy.cost(), 1 if plan.only_adds else 4
                        there = size * (1 if factory is rpc else sums)
                        assert there <= cost["worker0/bytes_sent"] < there + 6000, cost
                        assert size * sums <= cost["worker1/bytes_sent"] < (size + 2000) * sums, cost
                strategy.close()
                print(factory.__name__, name, "ok")


def few_descriptors(limit: str) -> None:
    """Rank zero calls all others, although it may have few files open at first."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    session.start_rpc(timeout=20)
    if todist.get_rank() == 0:
        everyone = [(rank, (), None) for rank in range(todist.get_world_size())]
        print(todist.remote_sync_call(todist.get_rank, partitioner=lambda: everyone))
    session.stop_rpc()


def added_by_tree() -> None:
    """Sums over the ranks of a process group, and all-reduce as a strategy, against one process."""
    import torch

    from distributed import partition, reduce
    from distributed.launch import process_group
    from distributed.reduce import partials, subtrees_of, tree_sum
    from distributed.strategies.common.work import WorkPlan
    from distributed.strategies.ddp import ddp, sum_over_ranks
    from distributed.strategies.local import local
    from tests.distributed.chunk_work import PARAMS, WORK

    workers, rank = todist.get_world_size(), todist.get_rank()
    process_group.start_process_group(timeout=20, backend="gloo")
    for size, counts in ((1, [1] * workers), (2500, [3, 1, 2][:workers]), (999, [2, 0, 0][:workers])):
        generator = torch.Generator().manual_seed(size)
        count = sum(counts)
        terms = [[torch.randn(size, generator=generator) * 10.0**i, torch.tensor([i])] for i in range(count)]
        runs = [range(sum(counts[:i]), sum(counts[: i + 1])) for i in range(workers)]
        own = partials([(i, terms[i]) for i in runs[rank]], count)
        row = torch.tensor([float(rank)])
        total, rows = sum_over_ranks(own, terms[0], [subtrees_of(run, count) for run in runs], count, row)
        assert all(map(torch.equal, total, tree_sum(terms))), (size, counts)
        assert rows.flatten().tolist() == list(range(workers))
    process_group.stop_process_group()

    plan = WorkPlan(WORK, workers, partition.dim_partitioner(0), reduce.mean())
    alone = local(plan=plan._replace(workers=1), timeout=20)()
    for work in (WORK, WORK._replace(plain=True)):
        strategy = ddp(plan=plan._replace(work=work), timeout=20)()
        for count in (1, 3, 7):
            chunks = list(torch.arange(2 * count - 1).split(2))
            ((grads, loss, size),) = strategy.map(PARAMS, chunks, 4)
            ((sums, expected_loss, expected_size),) = alone.map(PARAMS, chunks, 4)
            assert size == expected_size and abs(loss.item() - expected_loss.item()) < 1e-9
            for name, value in sums.items():
                assert torch.equal(grads[name], value) or (work.plain and (grads[name] - value).abs().max() < 1e-9)
            values = counted(strategy, {k: v * (rank == 0) for k, v in PARAMS.items()}, chunks)
            assert torch.equal(values["loss"], alone.evaluate(PARAMS, "val", chunks)["loss"])
            diagnosis = strategy.diagnose(PARAMS, chunks, 4)
            assert diagnosis["fault"].tolist() == [4 * (number == 5) for number in range(2 * count - 1)]
            assert diagnosis["worker"].tolist() == sorted(diagnosis["worker"].tolist())
            assert diagnosis["worker"].max() == min(count, workers) - 1
            cost = strategy.cost()
            assert {name.partition("/")[0] for name in cost} == {f"worker{i}" for i in range(workers)}
        assert strategy.share(b"of rank zero" if rank == 0 else b"") == b"of rank zero"
        strategy.close()
        print("ok")


def gpus() -> None:
    """Remote calls run on the GPU of the thread that has started RPC. There are no GPUs; torch.cuda is replaced."""
    import torch

    cuda: Any = torch.cuda
    rank, own = todist.get_rank(), remote_functions.own_gpu
    cuda.is_initialized, cuda.current_device = lambda: True, lambda: 10 + rank
    cuda.set_device = lambda device: setattr(own, "number", device)
    session.start_rpc(timeout=20)
    if rank == 0:
        futures = [todist.remote_async_call(remote_functions.current_gpu, partitioner=i) for i in (0, 1)]
        assert [future.wait() for future in futures] == [[10], [11]]
        print("ok")
    session.stop_rpc()


def leaves_well() -> None:
    """Rank zero's main function ends by `sys.exit(0)`, as programs do."""

    @todist.auto_init_rpc()
    @todist.rank_zero_only
    def main() -> None:
        sys.exit(0)

    main()


def failing_main() -> None:
    """Rank 1's main function fails while rank zero continues to call rank 2."""

    @todist.auto_init_rpc()
    def main() -> None:
        if todist.get_rank() == 1:
            raise OSError("rank 1 is out of order")
        while todist.get_rank() == 0:
            todist.remote_sync_call(remote_functions.rank, partitioner=2)
            time.sleep(0.05)

    main()


@todist.auto_init_rpc(rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=5))
def endless() -> None:
    """Rank 1 serves a call that never returns; rank zero's main ends well."""
    if todist.get_rank() == 0:
        try:
            todist.remote_sync_call(remote_functions.sleep, args=(1e9,), partitioner=1, timeout=0.5)
        except TimeoutError:
            print("main has ended")


def first_failure() -> None:
    """One of four workers fails, or is killed, while the others and rank zero itself compute for long."""

    @todist.auto_init_rpc(rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=900))
    def main() -> None:
        if todist.get_rank() != 0:
            return
        for fault in ("raise", "kill"):
            for call in (todist.remote_async_call, todist.remote_sync_call):
                others = [(worker, ("sleep", 600), None) for worker in (2, 3)]
                parts = [(1, (fault, 0.2), None), *others, *[(0, ("sleep", 0.1), None)] * 6000]
                try:
                    answer = call(remote_functions.fail_by, partitioner=lambda parts=parts: parts)
                    answer.wait()
                except Exception as error:
                    print(type(error).__name__, error)

    main()


def slow_start() -> None:
    """Rank 1 gets a call before its own start has returned."""
    called, answered = threading.Event(), threading.Event()
    start, serve = rpc.init_rpc, worker.serve

    def slow_init_rpc(*args: Any, **kwargs: Any) -> None:
        start(*args, **kwargs)
        called.wait(60)
        answered.wait(0.5)  # long enough for an answer that does not wait

    @functools.wraps(serve)
    def noted_serve(*args: Any) -> Any:
        called.set()
        try:
            return serve(*args)
        finally:
            answered.set()

    if todist.get_rank() == 1:
        rpc.init_rpc, worker.serve = slow_init_rpc, noted_serve
    session.start_rpc(timeout=60)
    if todist.get_rank() == 0:
        print(todist.remote_sync_call(remote_functions.call_back, args=(0, 5), partitioner=1))
    session.stop_rpc()


def init_exits(how: str) -> None:
    """Rank 1 leaves in worker_init_fn."""

    def prepare() -> None:
        if todist.get_rank() == 1:
            sys.exit(3) if how == "exit" else os._exit(0)

    @todist.auto_init_rpc(prepare, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=900))
    def main() -> None:
        print("main was entered")

    main()


@todist.auto_init_rpc(rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=3))
def late_barrier() -> None:
    """Rank 1 does not come to a barrier with rank zero; rank 2 is killed before a barrier of all."""
    if todist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for names in [["worker0", "worker1"], None][todist.get_rank() :]:
        try:
            todist.barrier(names)
        except (TimeoutError, ConnectionError, RuntimeError) as error:
            print(type(error).__name__, error, flush=True)


def missing_rank(timeout: str) -> None:
    """Rank 1 never joins the others."""
    if todist.get_rank() != 1:
        session.start_rpc(timeout=float(timeout))


def stops_after_meeting() -> None:
    """Rank zero stops when it has met the others, and before torch has started RPC."""
    meet = session.meet

    def meet_and_stop(*args: Any) -> Any:
        store = meet(*args)
        time.sleep(0.5)  # until rank 1 has met this one too
        os.kill(os.getpid(), signal.SIGSTOP)
        return store

    if todist.get_rank() == 0:
        session.meet = meet_and_stop
    session.start_rpc(timeout=2)


def passes_that_cannot_end() -> None:
    """Rank zero prints the errors of backward passes: a fetched tensor is not used; worker 1 dies."""
    import torch

    session.start_rpc(timeout=2)
    if todist.get_rank() == 0:
        net = torch.nn.Linear(3, 3)
        for function, value in (
            (remote_functions.fetches_in_vain, lambda: (todist.rpc.RRef(2 * net.weight),)),
            (remote_functions.leaves_backward, lambda: (net, torch.ones(2, 3))),
        ):
            try:
                with todist.autograd.context() as ctx:
                    (loss,) = todist.remote_sync_call(function, args=value(), partitioner=1)
                    todist.autograd.backward(ctx, loss if loss.requires_grad else net.weight.sum())
            except (RuntimeError, OSError) as error:
                print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
    session.stop_rpc()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
