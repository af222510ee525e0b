"""Starts the real program and reads what it wrote."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from distributed.launch.isolation import CannotIsolateError, new_network
from metalearn.app.job import script
from tests import forks

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = script(ROOT / "train.py")

slow = pytest.mark.slow
"""Marks the further cases of a table; at least one case of it is not marked. ./scripts/test.sh --slow runs all."""

LIMIT = 240.0
"""Seconds after which a started program counts as hanging."""


class Outcome(NamedTuple):
    """The exit code of a program, and its whole output."""

    code: int
    text: str


class Program:
    """A started program, in its own process group, so that all its processes can be killed. Programs of ours are forks
    of a process that has loaded their libraries, wherever that makes no difference to them."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        extra: dict[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        environment = _outside() | {"PYTHONFAULTHANDLER": "1"} | (extra or {})
        self._output = folder / f"output-{time.monotonic_ns()}.txt"
        self.process: subprocess.Popen[bytes] | forks.Forked
        with self._output.open("w") as output:
            if forks.can_fork(command, extra or {}) and not pass_fds:
                self.process = forks.start(command, folder, environment, output.fileno())
            else:
                self.process = subprocess.Popen(
                    command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True, pass_fds=pass_fds,
                )  # fmt: skip

    def wait(self, seconds: float = LIMIT) -> Outcome:
        """Waits for the end; a program that hangs fails the test, with the place of every thread of its processes."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGABRT)  # Python's fault handler prints the threads
            time.sleep(2)
            pytest.fail(f"{self.process.args!r} did not end within {seconds:g} s; its output:\n{self.said()}")
        finally:
            self.kill()
        return Outcome(code, self.said())

    def said(self) -> str:
        """The output so far."""
        return self._output.read_text()

    def kill(self) -> None:
        """Sends SIGKILL to all processes of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _outside() -> dict[str, str]:
    """The environment, without what makes a program one of several ranks."""
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


def said_by(
    command: Sequence[str], folder: Path = ROOT, extra: dict[str, str] | None = None, seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, as `Program` does; its stdout and stderr are kept apart."""
    environment = _outside() | (extra or {})
    if not forks.can_fork(command, extra or {}):
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        program = forks.start(command, folder, environment, output.fileno(), errors.fileno())
        try:
            code = program.wait(seconds)
        finally:
            program.kill()
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(command, code, output.read(), errors.read())


def train_in(folder: Path, *overrides: str, code: int = 0) -> str:
    """Runs train.py in `folder`.parent with the run folder `folder`, checks its exit code, and returns its output."""
    command = [sys.executable, str(ROOT / "train.py"), f"hydra.run.dir={folder}", *overrides]
    outcome = Program(command, folder.parent).wait()
    assert outcome.code == code, outcome.text
    return outcome.text


Start = Callable[..., Program]


def until(
    condition: Callable[[], Any], what: str, seconds: float = LIMIT, by: "subprocess.Popen[Any] | None" = None
) -> None:
    """Waits until the condition holds; fails if `what` does not come in time, or the process that brings it ends."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert by is None or by.poll() is None, f"{what} did not come: its process has ended with {by.returncode}"
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        time.sleep(0.02)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def params_of(run_dir: Path) -> bytes:
    """The file with the parameters of the last checkpoint."""
    return (run_dir / "checkpoints/last/params.safetensors").read_bytes()


def result_of(run_dir: Path) -> dict[str, Any]:
    """The content of result.json."""
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return result


def assert_same_bytes(run_dir: Path, other: Path, *names: str) -> None:
    """Two runs have the same parameters and test, and these other files."""
    for name in ("checkpoints/last/params.safetensors", "test.csv", *names):
        assert (run_dir / name).read_bytes() == (other / name).read_bytes(), name


def ranks_of(program: Program) -> list[int]:
    """The process ids of the ranks that the program has started, itself or by an agent in a network of their own."""

    def leaves(pid: int) -> list[int]:
        return [leaf for child in children_of(pid) for leaf in leaves(child) or [child]]

    return leaves(program.process.pid)


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def why_not_isolable() -> str | None:
    """Why the kernel gives no network of their own to the ranks that this user starts; None if it does."""
    try:
        network, listener = new_network("127.0.0.1", 0)
    except CannotIsolateError as error:
        return str(error)
    for namespace in network:
        os.close(namespace)
    listener.close()
    return None


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or before it was read
        return False
