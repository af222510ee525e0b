"""Slots in which trials run: processes that are forked from one parent, which has imported what trials need.

The parent, the *nursery*, only imports and forks. It has one thread and computes nothing, so that what it forks is
sound. A trial's process dies with the nursery, and the nursery dies with the controller, so nothing is orphaned.
multiprocessing's forkserver works alike, but pickles what a process runs, and a task function cannot be pickled.
"""

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

Work = Callable[[int, Sequence[str]], Any]
"""`work(number, overrides)` runs a trial in this process and returns its outcome, which JSON can hold."""

_PR_SET_PDEATHSIG = 1
_LARGEST_MESSAGE = 1 << 16
_STOPPING = (signal.SIGINT, signal.SIGTERM)


class NurseryGoneError(RuntimeError):
    """The process that forks the trials has died, and its trials with it."""

    def __str__(self) -> str:
        return "the process that starts the trials is gone; the same command resumes the sweep"


class TrialExit(NamedTuple):
    """A trial's process has ended: its exit code (below 0: the signal that killed it), and the trial's outcome if it
    has returned one."""

    number: int
    code: int
    outcome: Any


class TrialSlots:
    """Runs trials by `work`, each in a process of its own, with their logs and outcomes in `folder`.

    Args:
        preload: modules that the nursery imports; empty: trials import for themselves.
        gpus: slot i sees only the GPU at place i, modulo their number; empty: all see what there is.
    """

    def __init__(self, work: Work, folder: Path, *, preload: Sequence[str] = (), gpus: Sequence[str] = ()) -> None:
        folder = self.folder = folder.resolve()  # a trial may change its working folder
        folder.mkdir(parents=True, exist_ok=True)
        # SEQPACKET keeps the borders of messages, so neither side needs a framing of its own.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pids: dict[int, int] = {}
        self._ended: list[tuple[int, int]] = []  # numbers and exit codes that `wait` has not returned yet
        sys.stdout.flush()  # or the child would print what is buffered once more
        sys.stderr.flush()
        self._nursery = os.fork()
        if self._nursery == 0:
            self._socket.close()
            _serve(work, folder, theirs, preload, gpus)
        theirs.close()

    @property
    def running(self) -> list[int]:
        """The numbers of the trials under way."""
        return list(self._pids)

    def start(self, number: int, overrides: Sequence[str], slot: int) -> None:
        """Starts a trial in a slot, and waits for its fork, the first time also for what is preloaded. Raises
        NurseryGoneError if the nursery is gone, and its trials with it."""
        _file(self.folder, number, "json").unlink(missing_ok=True)
        self._socket.settimeout(None)
        try:
            self._socket.send(json.dumps([number, list(overrides), slot]).encode())
        except ConnectionError as error:
            raise NurseryGoneError from error
        while number not in self._pids:
            self._receive()

    def wait(self, seconds: float) -> list[TrialExit]:
        """The trials that have ended, after at most `seconds`. Raises NurseryGoneError if the nursery is gone, and its
        trials with it."""
        self._socket.settimeout(0 if self._ended else seconds)
        with suppress(TimeoutError, BlockingIOError):
            while self._pids:
                self._receive()
                self._socket.settimeout(0)  # takes what has ended meanwhile, and waits no longer
        ended, self._ended = self._ended, []
        return [TrialExit(number, code, self._outcome(number)) for number, code in ended]

    def _outcome(self, number: int) -> Any:
        path = _file(self.folder, number, "json")
        outcome = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        path.unlink(missing_ok=True)
        return outcome

    def _receive(self) -> None:
        """Receives a message of the nursery: it has forked a trial, or a trial has ended."""
        try:
            message = self._socket.recv(_LARGEST_MESSAGE)
        except ConnectionError:
            message = b""
        if not message:
            raise NurseryGoneError
        number, pid, code = json.loads(message)
        if code is None:
            self._pids[number] = pid
            return
        del self._pids[number]
        self._ended.append((number, code))

    def signal(self, what: signal.Signals, numbers: Sequence[int] | None = None) -> None:
        """Sends a signal to the processes of these trials, or of all."""
        for number in [*self._pids] if numbers is None else numbers:
            with suppress(ProcessLookupError):  # it has ended already
                os.kill(self._pids[number], what)

    def log_of(self, number: int) -> Path:
        """Where a trial's output goes."""
        return _file(self.folder, number, "log")

    def close(self) -> None:
        """Ends the nursery, and with it whatever is still running."""
        self._socket.close()
        with suppress(ProcessLookupError, ChildProcessError):  # it has ended already
            os.kill(self._nursery, signal.SIGKILL)
            os.waitpid(self._nursery, 0)


def _serve(work: Work, folder: Path, controller: socket.socket, preload: Sequence[str], gpus: Sequence[str]) -> None:
    """The nursery, the parent of all trials' processes: serves the controller until it leaves; never returns."""
    try:
        die_with_parent()
        # The controller decides what a signal means, and passes it on to the trials.
        for stopping in _STOPPING:
            signal.signal(stopping, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would leave nothing to wait for
        for name in preload:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # the trials share these pages
        trials: dict[int, tuple[int, int]] = {}  # from a descriptor of a trial's process to its number and pid
        while True:
            ready, _, _ = select.select([controller.fileno(), *trials], [], [])
            for descriptor in trials.keys() & set(ready):
                number, pid = trials.pop(descriptor)
                _, status = os.waitpid(pid, 0)
                os.close(descriptor)
                controller.send(json.dumps([number, pid, os.waitstatus_to_exitcode(status)]).encode())
            if controller.fileno() in ready:
                message = controller.recv(_LARGEST_MESSAGE)
                if not message:
                    break
                number, overrides, slot = json.loads(message)
                signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # until the trial no longer ignores them
                pid = os.fork()
                if pid == 0:
                    controller.close()
                    if gpus:
                        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
                    _become_trial(work, folder, number, overrides)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
                trials[os.pidfd_open(pid)] = number, pid  # select waits for it, without a handler of SIGCHLD
                controller.send(json.dumps([number, pid, None]).encode())
    except ConnectionError:  # the controller is gone, and with it this process soon
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # the fork must run none of the atexit functions of the controller


def _become_trial(work: Work, folder: Path, number: int, overrides: Sequence[str]) -> None:
    """In the new process: runs the trial; never returns."""
    code = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        log = _file(folder, number, "log").open("a", buffering=1, encoding="utf-8")
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        sys.stdout = sys.stderr = log
        outcome = json.dumps(work(number, overrides), default=plain)
        code = os.EX_IOERR  # unless the disk takes the outcome
        write_atomically(_file(folder, number, "json"), outcome)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:  # where output goes may be gone
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def plain(value: Any) -> Any:
    """What JSON cannot hold: numbers of other libraries as they are, numpy's and torch's among them; else its text."""
    try:
        return value.tolist() if hasattr(value, "tolist") else float(value)
    except (TypeError, ValueError):
        return str(value)


def die_with_parent() -> None:
    """Asks the kernel (Linux) to kill this process when its parent dies."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _file(folder: Path, number: int, kind: str) -> Path:
    return folder / f"trial_{number:04d}.{kind}"


def write_atomically(path: Path, text: str) -> None:
    """Writes or replaces a file; readers find the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two processes may write it
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
