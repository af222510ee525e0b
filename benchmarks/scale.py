"""Measures what a step costs by the number of workers, and compares it with the law in docs/explanation/strategies.md.

    python benchmarks/scale.py                                     on this host: CPU time, sockets, threads, bytes
    python benchmarks/scale.py --latency-ms 5 --mbit 400           every rank behind a link of its own

A step sends 448 kB of parameters to every worker and adds up one gradient of each. Nothing is computed beside that.
Links are emulated, see `links`. The law's times are computed from the latency and the rate alone, and from the time
that the smallest world needs without a link.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 (the path comes first, here and below)
from torch import Tensor  # noqa: E402

from benchmarks.links import Switch, address_of, enter_link  # noqa: E402
from distributed.calls.traffic import tcp_bytes_sent  # noqa: E402
from distributed.partition import batch_partitioner  # noqa: E402
from distributed.reduce import mean  # noqa: E402
from distributed.remote import remote_sync_call  # noqa: E402
from distributed.strategies.common.relay import FAN_OUT, Branch, grow  # noqa: E402
from distributed.strategies.common.work import ChunkStrategy, Work, WorkPlan  # noqa: E402
from distributed.strategies.ddp import ddp  # noqa: E402
from distributed.strategies.rpc import rpc  # noqa: E402

ELEMENTS = 112_005
"""Parameters of the 5-way Omniglot network, in float32."""

WARM_UP, STEPS = 20, 40
WAYS = ("hub", "tree", "ddp")
TIMEOUT = 120.0


class StepCost(NamedTuple):
    """Medians over the steps of one world.

    Attributes:
        seconds: of a step, on rank zero.
        own_cpu, other_cpu: CPU seconds of a step, of rank zero and of the busiest other rank.
        sent: bytes that rank zero sends in a step, as TCP counts them.
        sockets, threads: of rank zero, after the last step.
    """

    seconds: float
    own_cpu: float
    other_cpu: float
    sent: float
    sockets: int
    threads: int


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3, 4, 5, 7, 9, 13], help="sizes of the world")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="only these")
    parser.add_argument("--rounds", type=int, default=3, help="worlds of every size and way, interleaved")
    parser.add_argument("--latency-ms", type=float, help="of every link, one way")
    parser.add_argument("--mbit", type=float, default=1000.0, help="rate of every link, in each direction")
    parser.add_argument("--rank", nargs=2, metavar=("WAY", "LINK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        way, link = options.rank
        return run_rank(way, int(link))
    link = None if options.latency_ms is None else EmulatedLink(options.latency_ms / 1000, options.mbit * 1e6 / 8)
    print_table(options.ranks, options.ways, options.rounds, link)
    return 0


# The law


class EmulatedLink(NamedTuple):
    """Every rank's link: latency in seconds, one way, and rate in bytes a second, in each direction."""

    latency: float
    rate: float


def predict(way: str, ranks: int, link: EmulatedLink, size: float) -> float:
    """Seconds of a step that sends `size` bytes each way, by latency and rate alone."""
    if way == "ddp":  # two times an `all_to_all`; in gloo the receiver tells the sender first that it is ready
        return 2 * ((ranks - 1) / ranks * size / link.rate + 2 * link.latency)
    tree = grow({rank: [rank] for rank in range(ranks)}, 0, fan_out_of(way, ranks))
    return _branch_seconds(tree, link, size / link.rate)


def _branch_seconds(branch: Branch, link: EmulatedLink, transfer: float) -> float:
    """From when a worker has its message until it has the sum of its branch. Messages leave one after the other, the
    answers come in one after the other."""
    arrivals = []
    for position, below in enumerate(branch.branches, start=1):
        there = position * transfer + link.latency
        arrivals.append(there + _branch_seconds(below, link, transfer) + link.latency)
    ended = 0.0
    for arrival in sorted(arrivals):
        ended = max(arrival, ended) + transfer
    return ended


def fan_out_of(way: str, ranks: int) -> int:
    return max(2, ranks) if way == "hub" else FAN_OUT


# The measurement


def print_table(sizes: Sequence[int], ways: Sequence[str], rounds: int, link: EmulatedLink | None) -> None:
    size = ELEMENTS * 4
    print(
        "| ranks | way | ms a step | by the law | CPU ms of rank zero | of the busiest other | kB sent by rank zero | "
        "sockets | threads |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    for ranks in sizes:
        measured: dict[str, list[StepCost]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                measured[way].append(run_world(way, ranks, link))
        for way in ways:
            figures = [statistics.median(values) for values in zip(*measured[way], strict=True)]
            seconds, own, other, sent, sockets, threads = figures
            law = "" if link is None else f"{predict(way, ranks, link, size) * 1e3:.1f}"
            print(
                f"| {ranks} | {way} | {seconds * 1e3:.1f} | {law} | {own * 1e3:.2f} | {other * 1e3:.2f} | "
                f"{sent / 1e3:.0f} | {sockets:.0f} | {threads:.0f} |",
                flush=True,
            )


def run_world(way: str, ranks: int, link: EmulatedLink | None) -> StepCost:
    """Starts the ranks of a world, and waits."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        channels = [] if link is None else stack.enter_context(Switch(ranks, link.latency, link.rate)).channels
        processes = []
        try:
            for rank in range(ranks):
                command = [sys.executable, __file__, "--rank", way, str(channels[rank]) if channels else "-1"]
                processes.append(
                    subprocess.Popen(
                        command, env=environment(rank, ranks, port, link is not None), stdout=subprocess.PIPE,
                        pass_fds=channels[rank : rank + 1], text=True,
                    )
                )  # fmt: skip
            outputs = [process.communicate(timeout=600)[0] for process in processes]
            if any(process.returncode for process in processes):
                raise SystemExit(f"error: {way} with {ranks} ranks: {[process.returncode for process in processes]}")
        finally:
            for process in processes:
                process.kill()
    first, *_ = (json.loads(output) for output in outputs if output)
    return StepCost(**first)


def environment(rank: int, ranks: int, port: int, linked: bool) -> dict[str, str]:
    variables = {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "LOCAL_RANK": "0" if linked else str(rank), "LOCAL_WORLD_SIZE": "1" if linked else str(ranks),
        "MASTER_ADDR": address_of(0) if linked else "127.0.0.1",
    }  # fmt: skip
    return {**os.environ, **variables}


def run_rank(way: str, link: int) -> int:
    """A rank of the world; the first one prints its figures."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if link >= 0:
        enter_link(rank, link)
    torch.set_num_threads(1)
    plan = WorkPlan(_work(), ranks, batch_partitioner, mean())
    if way == "ddp":
        strategy = ddp(plan=plan, timeout=TIMEOUT)()
    else:
        strategy = rpc(plan=plan, timeout=TIMEOUT, fan_out=fan_out_of(way, ranks))()
    figures = _take_steps(strategy, way, ranks) if strategy.drives else None
    if figures is not None and rank == 0:
        print(json.dumps(figures._asdict()))
    strategy.close()
    return 0


def _work() -> Work:
    def gradient(params: dict[str, Tensor], indices: Tensor, step: int) -> tuple[dict[str, Tensor], Tensor, int]:
        return {name: value + step for name, value in params.items()}, torch.zeros(()), len(indices)

    def nothing(*_: Any) -> Any:
        raise NotImplementedError

    return Work(map=gradient, evaluate=nothing, diagnose=nothing, loss=None, result=nothing, device=torch.device("cpu"))


def _take_steps(strategy: ChunkStrategy, way: str, ranks: int) -> StepCost:
    params = {"weight": torch.zeros(ELEMENTS)}
    chunks = [torch.tensor([number]) for number in range(ranks)]
    for step in range(WARM_UP):
        strategy.map(params, chunks, step)
    before, sent = _cpu_seconds(way, ranks), tcp_bytes_sent() or 0
    durations = []
    for step in range(STEPS):
        began = time.perf_counter()
        strategy.map(params, chunks, step)
        durations.append(time.perf_counter() - began)
    sent = (tcp_bytes_sent() or 0) - sent
    spent = [(after - start) / STEPS for after, start in zip(_cpu_seconds(way, ranks), before, strict=True)]
    return StepCost(
        statistics.median(durations), spent[0], max(spent[1:], default=0.0), sent / STEPS, _sockets(),
        threads=len(list(Path("/proc/self/task").iterdir())),
    )  # fmt: skip


def _cpu_seconds(way: str, ranks: int) -> list[float]:
    """CPU seconds of every rank so far; under `ddp` of this one only."""
    if way == "ddp":
        return [time.process_time()]
    every = [(rank, (), None) for rank in range(ranks)]
    seconds: list[float] = remote_sync_call(time.process_time, partitioner=lambda: every)
    return seconds


def _sockets() -> int:
    targets = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if os.path.lexists(fd)]  # noqa: PTH115
    return sum(target.startswith("socket:") for target in targets)


if __name__ == "__main__":
    sys.exit(main())
