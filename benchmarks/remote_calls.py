"""Compares our remote calls with the original's (torchopt.distributed) and with torch's bare `rpc_sync`.

    python benchmarks/remote_calls.py --install      first: puts the original from PyPI into .torchopt
    python benchmarks/remote_calls.py                prints the tables

One step is second-order MAML on sine waves, with one remote call for each task, on two processes in turn. A task
fetches the network from an RRef and takes two differentiable inner steps. Its loss is differentiated through RPC.
"""

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.rpc import internal

ROOT = Path(__file__).resolve().parent.parent
ORIGINAL = ROOT / ".torchopt"
PACKAGES = ("torchopt", "optree", "graphviz", "pandas", "python-dateutil", "six", "setproctitle")
LAYERS = ("distributed", "torchopt.distributed")
TASKS = (8, 32, 128)
STEPS = 10
RUNS = 3
ROUNDS, CALLS = 20, 100
SOAK = 20_000


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="install the original into a folder of its own")
    parser.add_argument("--soak", type=int, default=SOAK, help="calls of the soak")
    parser.add_argument("--rank", nargs=3, metavar=("JOB", "LAYER", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        job, layer, size = options.rank
        JOBS[job](importlib.import_module(layer), int(size))
        return 0
    if options.install and not install():
        return 1
    print("| tasks | layer | finishes | ms a step, each run | bytes a step |\n| --- | --- | --- | --- | --- |")
    for tasks in TASKS:
        for layer in LAYERS:
            print(f"| {tasks} | `{layer}` | {row(layer, tasks)} |")
    calls = run("overhead", "distributed", CALLS)
    print(f"\nper call: ours {calls['ours']:.0f} µs, bare rpc_sync {calls['bare']:.0f} µs, ratio {calls['ratio']:.2f}")
    soak = run("soak", "distributed", options.soak)
    grown = ", ".join(f"{name} {growth:.2f} KB" for name, growth in soak.items())
    print(f"soak of {options.soak} calls, memory growth a call: {grown}")
    return 0


def install() -> bool:
    """Installs the original, and what it needs besides torch, into a folder that only its own processes see."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(ORIGINAL)]
    done = subprocess.run([*command, *PACKAGES])
    if done.returncode:
        print(f"error: {', '.join(PACKAGES)} cannot be installed here; see pip's message", file=sys.stderr)
    return done.returncode == 0


def row(layer: str, tasks: int) -> str:
    if layer != "distributed" and not (ORIGINAL / "torchopt").is_dir():
        return "not installed: --install | |"
    results = [run("steps", layer, tasks)]
    if "error" in results[0]:
        return f"no: {results[0]['error']} | |"
    results += [run("steps", layer, tasks) for _ in range(RUNS - 1)]
    seconds = sorted(result["seconds"] for result in results if "error" not in result)
    return f"yes | {', '.join(f'{1000 * s:.0f}' for s in seconds)} | {results[0]['bytes']:,.0f}"


def run(job: str, layer: str, size: int, limit: float = 90.0) -> dict[str, Any]:
    """Runs a job on two processes; returns its result, or {"error": message}."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}:{ORIGINAL}", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
            "BENCH_RESULT": str(result), "TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command = [*launcher, str(Path(__file__).resolve()), "--rank", job, layer, str(size)]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate()
            return {"error": f"hangs, stopped after {limit:g} s"}
        if not result.exists():
            lines = [line for line in output.splitlines() if "Error" in line]
            return {"error": lines[0].strip() if lines else f"exit code {process.returncode}"}
        values: dict[str, Any] = json.loads(result.read_text())
        return values


def write_values(values: dict[str, Any]) -> None:
    Path(os.environ["BENCH_RESULT"]).write_text(json.dumps(values))


# A step of the comparison


def build_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def inner_loop(reference: Any, x: Tensor, y: Tensor) -> Tensor:
    net = reference.to_here()
    theta = [tensor for layer in (net[0], net[2], net[4]) for tensor in (layer.weight, layer.bias)]

    def loss(params: list[Tensor]) -> Tensor:
        hidden = torch.tanh(torch.tanh(x @ params[0].T + params[1]) @ params[2].T + params[3])
        return (hidden @ params[4].T + params[5] - y).square().mean()

    for _ in range(2):
        grads = torch.autograd.grad(loss(theta), theta, create_graph=True)
        theta = [p - 0.01 * g for p, g in zip(theta, grads, strict=True)]
    return loss(theta)


def steps(todist: Any, tasks: int) -> None:
    """Measures seconds and bytes of a step."""
    clone = importlib.import_module("distributed" if todist.__name__ == "distributed" else "torchopt").module_clone
    sent = [0]
    count_bytes(sent)

    def deal_out(reference: Any, x: Tensor, y: Tensor) -> list[tuple[int, tuple[Any, ...], None]]:
        return [(i % 2, (reference, x[i], y[i]), None) for i in range(tasks)]

    def step(net: nn.Module, x: Tensor, y: Tensor) -> None:
        with todist.autograd.context() as ctx:
            loss = todist.remote_sync_call(
                inner_loop, args=(rpc.RRef(clone(net, by="copy")), x, y),
                partitioner=deal_out, reducer=todist.mean_reducer,
            )  # fmt: skip
            todist.autograd.backward(ctx, loss)

    def measure() -> None:
        if todist.get_rank() == 0:
            net, (x, y) = build_net(), torch.rand(2, tasks, 10, 1)
            step(net, x, y)
            others_before, before = rpc.rpc_sync("worker1", bytes_so_far), sent[0]
            taken = []
            for _ in range(STEPS):
                began = time.perf_counter()
                step(net, x, y)
                taken.append(time.perf_counter() - began)
            moved = rpc.rpc_sync("worker1", bytes_so_far) - others_before + sent[0] - before
            write_values({"seconds": statistics.median(taken), "bytes": moved / STEPS})

    todist.auto_init_rpc()(measure)()


_sent = [0]


def bytes_so_far() -> int:
    return _sent[0]


def count_bytes(sent: list[int]) -> None:
    """Counts all bytes that torch's pickler packs in this process, with tensors, for every layer in the same way."""
    global _sent
    _sent = sent
    pack = internal._internal_rpc_pickler.serialize

    def counting(value: Any) -> tuple[bytes, list[Tensor]]:
        payload, tensors = pack(value)  # type: ignore[no-untyped-call]
        sent[0] += len(payload) + sum(t.numel() * t.element_size() for t in tensors)
        return payload, tensors

    internal._internal_rpc_pickler.serialize = counting  # type: ignore[method-assign]


# The cost of one call


def same(x: Tensor) -> Tensor:
    return x


def overhead(todist: Any, calls: int) -> None:
    """Measures microseconds of a call with a small tensor, ours and bare in turns; the ratio is the rounds' median."""

    def measure() -> None:
        if todist.get_rank() == 0:
            x = torch.ones(10)
            ways: tuple[Callable[[], Any], ...] = (
                lambda: todist.remote_sync_call(same, args=(x,), partitioner=1),
                lambda: rpc.rpc_sync("worker1", same, (x,)),
            )
            rounds = [[_microseconds(way, calls) for way in ways] for _ in range(ROUNDS + 1)][1:]
            ours, bare = (statistics.median(column) for column in zip(*rounds, strict=True))
            write_values({"ours": ours, "bare": bare, "ratio": statistics.median(a / b for a, b in rounds)})

    todist.auto_init_rpc()(measure)()


def _microseconds(way: Callable[[], Any], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        way()
    return 1e6 * (time.perf_counter() - began) / calls


def peak_kilobytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def soak(todist: Any, calls: int) -> None:
    """Measures the growth of both processes' peak memory, in KB a call, after a tenth as many calls to warm up."""

    def some(count: int) -> None:
        for i in range(count):
            if i % 10:
                todist.remote_sync_call(same, args=(torch.ones(100),), partitioner=1)
            else:
                todist.remote_sync_call(same, args=(torch.ones(100),), partitioner=todist.dynamic_partitioner())

    def measure() -> None:
        if todist.get_rank() == 0:
            some(calls // 10)
            before = [peak_kilobytes(), rpc.rpc_sync("worker1", peak_kilobytes)]
            some(calls)
            after = [peak_kilobytes(), rpc.rpc_sync("worker1", peak_kilobytes)]
            write_values({f"worker{i}": (after[i] - before[i]) / calls for i in range(2)})

    todist.auto_init_rpc()(measure)()


JOBS: dict[str, Callable[[Any, int], None]] = {"steps": steps, "overhead": overhead, "soak": soak}

if __name__ == "__main__":
    sys.exit(main())
