"""How a process begins and ends: threads, memory and torch before it computes; exit codes, errors that need no
traceback, and output that is read to its end or not."""

import ctypes
import errno
import gc
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from metalearn.errors import ConfigError, DataError, DiskError, RunError, ToStderr, first_line, printable
from metalearn.reporting.provenance import own_version, version_of
from metalearn.runs.signals import INTERRUPTED, PREEMPTIONS, end_with_parent
from metalearn.storage.files import comes_from_disk, is_disk_fault, unwritten

if TYPE_CHECKING:  # metalearn predict, which has no config, starts without Hydra
    from omegaconf import DictConfig

OK, FAILED, BAD_CONFIG, DIVERGED = 0, 1, 2, 3  # a run that has diverged does so again: launchers do not repeat it
DISK = os.EX_IOERR  # of a rank, or of a trial, whose disk has failed; the program itself ends with `FAILED`
_OWN_RANK_SECONDS = 10.0
_NO_MEMORY = ("can't allocate memory", "out of memory", "failed to map segment")  # of torch, and of the loader
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_LARGEST_ALLOWED = 32 * 2**20

log = logging.getLogger("metalearn")


def end_with_starter() -> None:
    """Asks the kernel (Linux) to kill this rank when what has started it dies for any reason: torchrun, or an actor. It
    is called first of all, since importing torch takes seconds. Our own launcher does the same for its ranks."""
    from metalearn.config.check import started_by_launcher

    if not sys.platform.startswith("linux") or not (started_by_launcher() or "TORCHELASTIC_RUN_ID" in os.environ):
        return
    end_with_parent()
    if started_by_launcher():
        if os.getppid() != int(os.environ["DISTRIBUTED_LAUNCHER_PID"]):  # it died before the line above
            sys.exit(1)
        for number in PREEMPTIONS:  # its launcher handles them
            signal.signal(number, signal.SIG_IGN)
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            socket.create_connection(store, timeout=1.0).close()
        except ConnectionRefusedError:  # torchrun, which serves the store, died before the lines above
            sys.exit(1)
        except OSError:  # it may be slow, or behind a name that is not known yet
            return


def log_sweep() -> None:
    """Sends the log messages of a sweep to stderr."""
    logger = logging.getLogger("hydra_async_sweeper")
    if not any(isinstance(handler, ToStderr) for handler in logger.handlers):
        logger.addHandler(ToStderr())
    logger.setLevel(logging.INFO)
    logger.propagate = False


def set_up_process(threads: int) -> None:
    """Sets what must be set before torch is imported."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # we report ourselves that a peer has left
    logging.getLogger("hydra.utils").addHandler(logging.NullHandler())  # and a class that is not found
    keep_freed_memory()


@contextmanager
def importing() -> Iterator[None]:
    """Halts the garbage collector while modules are imported: it would search what stays again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def set_up_torch(config: "DictConfig") -> None:
    """Sets threads, memory and precision of torch, and the network interface."""
    import torch  # after `set_up_process`

    from distributed.info import use_interface
    from distributed.launch.processes import share_arena
    from metalearn.nn.surroundings import compute_with

    torch.set_num_threads(config.threads)
    share_arena()
    compute_with(config.precision)
    if config.launch.interface is not None:
        use_interface(config.launch.interface)


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory instead of giving it back to the kernel, which would have to zero every page again:
    an inner loop frees and takes the same tensors a thousand times a second."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_ALLOWED)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


# The end of a process


def exit_code_of(run: Callable[[], int]) -> int:
    """What `run` returns. If it raises an error that needs no traceback: reports it and gives its exit code."""
    return ending_of(run)[0]


def exit_code_of_process(run: Callable[[], int]) -> int:
    """As `exit_code_of`, for all that a process does: it may be interrupted at any moment."""
    try:
        code = exit_code_of(run)
        if code != DISK:
            return code
        from metalearn.config.check import started_by_launcher  # imports Hydra, which not every command needs

        return DISK if started_by_launcher() else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def ending_of(run: Callable[[], int]) -> tuple[int, str]:
    """As `exit_code_of`, with the error's message; empty without an error."""
    try:
        return run(), ""
    except (ConfigError, DataError) as error:
        return report_error(error, DISK if comes_from_disk(error) else BAD_CONFIG), str(error)
    except RunError as error:
        return report_error(error, DISK if isinstance(error, DiskError) else FAILED), str(error)
    except OSError as error:
        if not is_disk_fault(error):
            raise
        disk_error = unwritten(Path(os.fsdecode(error.filename or "a file")), error, "used")
        return report_error(disk_error, DISK), str(disk_error)


def report_error(error: BaseException, code: int) -> int:
    """Prints what is wrong, once for all ranks of a host; returns `code`."""
    local_rank = os.environ.get("LOCAL_RANK", "0")
    if not local_rank.isdecimal() or int(local_rank) == 0:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        log.debug("ended by %s: %s%s", type(error).__name__, error, notes)  # for train.log
        print_cause(f"error: {error}{notes}")
    elif code == BAD_CONFIG:
        # torchrun ends all ranks when the first one fails: give rank zero of the host the time to report.
        time.sleep(_OWN_RANK_SECONDS)
        number = os.environ.get("RANK", "?").zfill(len(os.environ.get("WORLD_SIZE", "")))
        print_cause(f"error: worker{number}: {error}")
    return code


def print_cause(message: str) -> None:
    """Prints what ends this process to stderr, and notes it for torchrun."""
    with suppress(OSError):  # stderr may be a file on the same full disk
        print(printable(message), file=sys.stderr)
    note_cause(printable(message))


def note_cause(message: str) -> None:
    """Leaves the message where torchrun looks for the cause of a rank's end: it prints that below its own traceback,
    which it shows for any exit code but 0."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        # The form of torch's `record`, which would catch exceptions only, and print their tracebacks.
        cause = {"message": {"message": message, "extraInfo": {"timestamp": int(time.time())}}}
        with suppress(OSError):
            Path(path).write_text(json.dumps(cause), encoding="utf-8")


def without_memory(error: Exception) -> str | None:
    """What to report of an error that is a lack of memory; None for another one."""
    line = first_line(error)
    lacks = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if not lacks and not any(sign in line for sign in _NO_MEMORY):
        return None
    return f"the memory is not enough: {line}; type a smaller trainer.task_chunk, or fewer workers"


def reader_has_left() -> bool:
    """Whether stdout is a pipe without a reader: `head` has had enough. What is left of the output is dropped then, or
    Python would complain at its end."""
    pipe = select.poll()
    pipe.register(1, 0)
    left = any(event & select.POLLERR for _, event in pipe.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return left


def print_all(text: str) -> int:
    """Prints what a command was asked for, with control characters written out; returns the exit code. That its reader
    has left is no failure, and changes no other code of the command."""
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        if not reader_has_left():
            raise
    return OK


def versions() -> str:
    """This program's version, and those of torch and hydra-core if they are installed."""
    others = {name: version_of(name) for name in ("torch", "hydra-core")}
    packages = [f"{name} {version}" if version else f"no {name}" for name, version in others.items()]
    return ", ".join([f"metalearn {own_version() or '(a checkout that is not installed)'}", *packages])
