"""Starts worlds of real processes for the tests of the distributed layer."""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import torch.distributed as dist

from distributed.calls import session
from distributed.launch import meeting
from tests import forks
from tests.runs import ROOT

WORLD = 3
"""Ranks of the world that most tests share."""


def environment(rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def agent_store() -> dist.TCPStore:
    """A store of this process, as an agent has it for its ranks, on loopback."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


@contextmanager
def world() -> Iterator[list[forks.Forked]]:
    """A world of `WORLD` ranks: this process is rank zero, the others serve."""
    agent = agent_store()
    port = agent.port
    command = [sys.executable, str(ROOT / "tests/distributed/program.py"), "serve"]
    others = [forks.start(command, Path.cwd(), os.environ | environment(rank, port), 2) for rank in range(1, WORLD)]
    before = dict(os.environ)
    os.environ.update(environment(0, port))
    try:
        session.start_rpc(timeout=60)
        yield others
        session.stop_rpc()
        assert [process.wait(20) for process in others] == [0] * len(others)
    finally:
        for process in others:
            process.kill()
            process.wait()
        os.environ.clear()
        os.environ.update(before)
        meeting._store = None


def comes_true(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true within ten seconds."""
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def run_program(name: str, ranks: int, *arguments: str) -> list[tuple[int, str]]:
    """Exit code and output of every rank of tests/distributed/program.py."""
    return run_ranks([str(ROOT / "tests/distributed/program.py"), name, *arguments], ranks)


def run_ranks(arguments: Sequence[str], ranks: int) -> list[tuple[int, str]]:
    """Exit code and output of every rank of a Python program, each a fork of a process that has imported torch."""
    clean = {key: value for key, value in os.environ.items() if key not in environment(0, 0)} | {
        "PYTHONPATH": str(ROOT),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # as in the program: torch may note that a peer has left a moment earlier
    }
    processes: list[forks.Forked] = []
    agent = agent_store()
    with ExitStack() as stack:
        outputs = [stack.enter_context(TemporaryFile("w+")) for _ in range(ranks)]
        try:
            for rank, output in enumerate(outputs):
                own = environment(rank, agent.port) | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
                variables = clean | (own if ranks > 1 else {})
                command = [sys.executable, *arguments]
                processes.append(forks.start(command, Path.cwd(), variables, output.fileno()))
            codes = [process.wait(200) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [(code, _read(output)) for code, output in zip(codes, outputs, strict=True)]


def _read(output: IO[str]) -> str:
    output.seek(0)
    return output.read()
