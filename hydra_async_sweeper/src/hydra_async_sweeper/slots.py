"""Slots in which trials run: processes that are forked from one parent, which has imported what trials need.

The parent, the *nursery*, only imports and forks. It has one thread and computes nothing, so that what it forks is
sound. A trial's process dies with the nursery, and the nursery dies with the controller, so nothing is orphaned.
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
from types import FrameType
from typing import Any, NamedTuple

from hydra_async_sweeper.disk import DISK_FAULT, fault_in, write_atomically

Work = Callable[[int, Sequence[str]], Any]
"""`work(number, overrides)` runs a trial in this process and returns its outcome, which JSON can hold."""

_PR_SET_PDEATHSIG = 1
_LARGEST_MESSAGE = 1 << 16
_STOPPING = (signal.SIGINT, signal.SIGTERM)


_GONE = "the process that starts the trials is gone; the same command resumes the sweep"


class NurseryGoneError(RuntimeError):
    """The process that forks the trials has died."""


class TrialExit(NamedTuple):
    """A trial's process has ended: its exit code (below 0: the signal that killed it), and the trial's outcome where it
    lived to return one."""

    number: int
    code: int
    outcome: Any


class TrialSlots:
    """Runs trials, each in a process of its own.

    Args:
        work: what a trial's process runs.
        folder: for the trials' logs and outcomes.
        preload: modules that the nursery imports; empty: trials import for themselves.
        gpus: slot i sees only the GPU at place i, modulo their number; empty: all see what there is.
    """

    def __init__(self, work: Work, folder: Path, *, preload: Sequence[str] = (), gpus: Sequence[str] = ()) -> None:
        folder = self.folder = folder.resolve()  # a trial may change its working folder
        folder.mkdir(parents=True, exist_ok=True)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pids: dict[int, int] = {}  # 0: it is still to be forked
        self._unsent: dict[int, signal.Signals] = {}
        sys.stdout.flush()
        sys.stderr.flush()
        self._nursery = os.fork()
        if self._nursery == 0:
            self._socket.close()
            _Nursery(work, folder, theirs, gpus).serve(preload)
        theirs.close()

    @property
    def running(self) -> list[int]:
        """The numbers of the trials under way."""
        return list(self._pids)

    def start(self, number: int, overrides: Sequence[str], slot: int) -> None:
        """Starts a trial in a slot.

        Raises:
            NurseryGoneError: the nursery is gone, and its trials with it.
        """
        _outcome_path(self.folder, number).unlink(missing_ok=True)
        self._send({"number": number, "overrides": list(overrides), "slot": slot})
        self._pids[number] = 0

    def wait(self, seconds: float) -> list[TrialExit]:
        """The trials that have ended, after at most so many seconds.

        Raises:
            NurseryGoneError: the nursery is gone, and its trials with it.
        """
        ended: list[TrialExit] = []
        self._socket.settimeout(seconds)
        while self._pids:
            try:
                message = self._socket.recv(_LARGEST_MESSAGE)
            except (TimeoutError, BlockingIOError):
                break
            except ConnectionError:
                message = b""
            if not message:
                raise NurseryGoneError(_GONE)
            event = json.loads(message)
            number = event["number"]
            if "code" in event:
                del self._pids[number]
                self._unsent.pop(number, None)
                ended.append(TrialExit(number, event["code"], _read_outcome(self.folder, number)))
                self._socket.settimeout(0)
            else:
                self._pids[number] = event["pid"]
                if number in self._unsent:
                    _send_signal(event["pid"], self._unsent.pop(number))
        return ended

    def signal(self, what: signal.Signals, numbers: Sequence[int] | None = None) -> None:
        """Sends a signal to the processes of these trials, or of all; to one that is still to be forked, as soon as
        `wait` hears of it."""
        for number, pid in [(n, self._pids[n]) for n in (self._pids if numbers is None else numbers)]:
            if pid:
                _send_signal(pid, what)
            else:
                self._unsent[number] = what

    def log_of(self, number: int) -> Path:
        """Where a trial's output goes."""
        return _log_path(self.folder, number)

    def close(self) -> None:
        """Ends the nursery, and with it whatever is still running."""
        self._socket.close()
        with suppress(ProcessLookupError, ChildProcessError):  # it has ended already
            os.kill(self._nursery, signal.SIGKILL)
            os.waitpid(self._nursery, 0)

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.settimeout(None)
        try:
            self._socket.send(json.dumps(message).encode())
        except ConnectionError as error:
            raise NurseryGoneError(_GONE) from error


class _Nursery:
    """The parent of all trials' processes."""

    def __init__(self, work: Work, folder: Path, controller: socket.socket, gpus: Sequence[str]) -> None:
        self._work, self._folder, self._controller, self._gpus = work, folder, controller, gpus
        self._numbers: dict[int, int] = {}

    def serve(self, preload: Sequence[str]) -> None:
        """Serves the controller until it leaves; never returns."""
        try:
            die_with_parent()
            # The controller decides what a signal means, and passes it on to the trials.
            for number in _STOPPING:
                signal.signal(number, signal.SIG_IGN)
            for name in preload:
                importlib.import_module(name)
            gc.collect()
            gc.freeze()  # the trials share these pages
            wake, waker = socket.socketpair()
            waker.setblocking(False)
            signal.set_wakeup_fd(waker.fileno())
            signal.signal(signal.SIGCHLD, _note_nothing)
            self._loop(wake)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _loop(self, wake: socket.socket) -> None:
        while True:
            ready, _, _ = select.select([self._controller, wake], [], [])
            if wake in ready:
                wake.recv(4096)
                self._reap()
            if self._controller in ready:
                message = self._controller.recv(_LARGEST_MESSAGE)
                if not message:
                    os._exit(0)
                self._fork(json.loads(message))

    def _fork(self, order: dict[str, Any]) -> None:
        number = order["number"]
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # until the trial no longer ignores them
        pid = os.fork()
        if pid == 0:
            self._become_trial(number, order["overrides"], order["slot"])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        self._numbers[pid] = number
        self._report({"number": number, "pid": pid})

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._numbers:
                self._report({"number": self._numbers.pop(pid), "code": os.waitstatus_to_exitcode(status)})

    def _report(self, event: dict[str, Any]) -> None:
        try:
            self._controller.send(json.dumps(event).encode())
        except OSError:  # the controller is gone, and with it this process soon
            os._exit(1)

    def _become_trial(self, number: int, overrides: Sequence[str], slot: int) -> None:
        """In the new process: runs the trial; never returns."""
        code = 1
        try:
            die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
            self._controller.close()
            if self._gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = self._gpus[slot % len(self._gpus)]
            self._send_output_to(_log_path(self._folder, number))
            outcome = self._work(number, overrides)
            write_atomically(_outcome_path(self._folder, number), json.dumps(outcome, default=repr))
            code = 0
        except KeyboardInterrupt:
            code = 130
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException as error:
            code = DISK_FAULT if fault_in(error) else 1
            traceback.print_exc()
        finally:
            try:  # where output goes may be gone
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def _send_output_to(self, path: Path) -> None:
        """Sends what this process says to a file, which may be new. A link is not followed."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            log = os.fdopen(os.open(path, flags, 0o666), "a", buffering=1, encoding="utf-8")
        except OSError:  # the controller looks what is wrong with the folder
            os._exit(DISK_FAULT)
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        sys.stdout = sys.stderr = log


def die_with_parent() -> None:
    """Asks the kernel (Linux) to kill this process when its parent dies."""
    parent = os.getppid()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)


def _note_nothing(number: int, frame: FrameType | None) -> None:
    """Lets SIGCHLD wake the loop."""


def _send_signal(pid: int, what: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended already
        os.kill(pid, what)


def _outcome_path(folder: Path, number: int) -> Path:
    return folder / f"trial_{number:04d}.json"


def _log_path(folder: Path, number: int) -> Path:
    return folder / f"trial_{number:04d}.log"


def _read_outcome(folder: Path, number: int) -> Any:
    path = _outcome_path(folder, number)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    finally:
        path.unlink(missing_ok=True)
