"""Programs as forks of one process that has imported their libraries.

Importing torch takes most of the time of a short run, and the tests start hundreds. So the processes of pytest share a
*server*, which only imports and forks. Its forks are what the programs are: sessions of their own, with their own
working folder, environment, output and exit code. Commands of metalearn end as its ranks do: Python's own end takes
every module apart, which costs 0.7 s of a core. Other programs keep that end.
"""

import atexit
import contextlib
import faulthandler
import fcntl
import functools
import importlib
import json
import os
import runpy
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

MODULES = ("metalearn", "benchmarks.", "tests.", "distributed.", "torch.distributed.run")
"""Beginnings of the names that may stand after `-m`."""

READ_LATE = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DISTRIBUTED_LAUNCHER_PID",
    "METALEARN_CACHE", "METALEARN_DATA", "MPLBACKEND", "STEPS",
}  # fmt: skip
"""Environment variables that nothing reads while it is imported. Others need a program of their own."""


class Forked:
    """A started program, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, args: Sequence[str], answers: int) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        self._answers = answers
        self._read = b""
        self._next(None)  # the first one waits for the server's imports
        self.pid = self._number()

    def poll(self) -> int | None:
        """The exit code, below 0 for a signal; None while it runs."""
        if self.returncode is None and self._next(0):
            self.returncode = self._number()
            os.close(self._answers)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is None and not self._next(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, sig: int) -> None:
        """Does nothing if the program has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _next(self, timeout: float | None) -> bool:
        """Whether another number comes in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._read:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._answers], [], [], left)[0]:
                return False
            part = os.read(self._answers, 64)
            if not part:
                raise ConnectionError(f"{self.args}: the process that forks the programs of the tests has died")
            self._read += part
        return True

    def _number(self) -> int:
        line, _, self._read = self._read.partition(b"\n")
        return int(line)


def can_fork(command: Sequence[str], extra: Mapping[str, str]) -> bool:
    """Whether this is a program of ours, or code, whose environment may be set after its imports."""
    own_path = extra.get("PYTHONPATH", ".") in (".", str(ROOT))  # another one may hide what is imported already
    python, first, second, *_ = *command, "", ""
    ours = first == "-c" or (first == "-m" and second.startswith(MODULES))
    ours |= first.endswith(".py") and Path(first).is_relative_to(ROOT)
    early = extra.keys() - READ_LATE - {"PYTHONPATH"}
    return python == sys.executable and ours and own_path and not early and sys.platform.startswith("linux")


def start(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    output: int,
    errors: int | None = None,
    pass_fds: Sequence[int] = (),
) -> Forked:
    """Starts a Python program in `folder`. Its output goes to the descriptor `output`, and what it says on stderr to
    `errors`, if that is another one; it inherits `pass_fds`, under the same numbers."""
    request = {
        "arguments": command[1:], "folder": str(folder), "environment": dict(environment), "inherited": list(pass_fds),
    }  # fmt: skip
    answers, answer = os.pipe()
    try:
        socket.send_fds(
            _server(), [json.dumps(request).encode()], [answer, output, output if errors is None else errors, *pass_fds]
        )
    finally:
        os.close(answer)
    return Forked(command, answers)


@functools.cache
def _server() -> socket.socket:
    """The channel of this process to the server. The first process of a test run that needs it starts it."""
    address = f"\0forks-{os.environ.get('PYTEST_XDIST_TESTRUNUID') or secrets.token_hex()}"
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            channel.connect(address)
            atexit.register(channel.close)
            return channel
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(address)
            except OSError:  # another process is about to start it
                continue
            listener.listen()
            listener.set_inheritable(True)
            nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
            arguments = [sys.executable, __file__, str(listener.fileno())]
            os.posix_spawn(sys.executable, arguments, os.environ, file_actions=[nothing], setsid=True)


# The server

IDLE = 10.0
"""Seconds without a channel after which the server ends."""


def serve(listener: socket.socket) -> dict[str, Any]:
    """Returns in each fork, with the request that it is to become; the server itself ends here."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the watchers
    channels: list[socket.socket] = []
    while ready := select.select([listener, *channels], [], [], None if channels else IDLE)[0]:
        for one in ready:
            if one is listener:
                channels.append(listener.accept()[0])
                continue
            message, descriptors, _, _ = socket.recv_fds(one, 2**20, 8)
            if not message:
                channels.remove(one)
                one.close()
            elif os.fork() == 0:
                for channel in (listener, *channels):
                    channel.close()
                return _program(message, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
    sys.exit()


def _program(message: bytes, descriptors: list[int]) -> dict[str, Any]:
    """Returns in a fork of its own, with the request and its descriptors in their places."""
    answer, output, errors, *inherited = descriptors
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        _watch(pid, answer)
    os.close(answer)
    request: dict[str, Any] = json.loads(message)
    _number([output, errors, *inherited], [1, 2, *request["inherited"]])
    return request


def _number(descriptors: list[int], numbers: list[int]) -> None:
    """Gives each descriptor its number, by way of high ones: a number may be that of another descriptor."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 500) for descriptor in descriptors]
    for descriptor in set(descriptors):
        os.close(descriptor)
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _watch(pid: int, answer: int) -> None:
    """Answers with the process id of the program, and with its exit code at its end."""
    os.write(answer, b"%d\n" % pid)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):  # pytest has ended
        os.write(answer, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def become(request: dict[str, Any]) -> None:
    """Runs the program of the request in this process."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    faulthandler.enable()  # PYTHONFAULTHANDLER, which Python reads when it starts
    sys.path[:0] = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    first, *others = request["arguments"]
    if first == "-c":
        sys.argv = ["-c", *others[1:]]
        sys.path.insert(0, "")
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(others[0], "<string>", "exec"), module.__dict__)
    elif first == "-m":
        sys.argv = others
        sys.path.insert(0, str(Path.cwd()))
        run = functools.partial(runpy.run_module, others[0], run_name="__main__", alter_sys=True)
        if others[0].startswith("metalearn"):
            _leave(run)
        run()
    else:
        sys.argv = [first, *others]
        sys.path.insert(0, str(Path(first).parent))
        _leave(functools.partial(runpy.run_path, first, run_name="__main__"))


def _leave(run: Callable[[], object]) -> None:
    """Runs a program to its end, and leaves its memory to the kernel. An error goes Python's own way."""
    code = 0
    try:
        run()
    except SystemExit as leaving:
        if not isinstance(leaving.code, int | None):
            raise
        code = leaving.code or 0
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not this folder, in which another `metalearn` is
    process = importlib.import_module("metalearn.app.process")
    process.set_up_process(1)  # before torch is imported
    with process.importing():
        importlib.import_module("sympy")  # which torch's optimizers load
        for name in importlib.import_module("metalearn.app.sweep").preload():
            importlib.import_module(name)
        importlib.import_module("metalearn.config.compose").compose_config([])  # fills the caches of Hydra's grammar
    become(serve(socket.socket(fileno=int(sys.argv[1]))))
