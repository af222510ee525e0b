"""What is set up in every process before it computes: threads, memory, network, torch."""

import ctypes
import gc
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from metalearn.errors import printable
from metalearn.reporting.to_stderr import ToStderr
from metalearn.runs.signals import end_with_parent

if TYPE_CHECKING:  # metalearn predict, which has no config, starts without Hydra
    from omegaconf import DictConfig

    from metalearn.app.job import Job

_STORE_SECONDS = 1.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_LARGEST_ALLOWED = 32 * 2**20


def announce(job: "Job") -> None:
    """Prints at once which run is about to start, since importing torch takes seconds; once for all ranks."""
    from metalearn.config.check import started_by_launcher

    if int(os.environ.get("RANK", 0)) == 0 and not started_by_launcher():
        print(printable(f"{job.experiment}: starting in {job.run_dir}"), file=sys.stderr, flush=True)


def end_with_starter() -> None:
    """Asks the kernel (Linux) to kill this rank when what has started it dies for any reason: torchrun, or an actor.

    It is called first of all, since importing torch takes seconds. Our own launcher does the same for its ranks.
    """
    from metalearn.config.check import started_by_launcher

    if not sys.platform.startswith("linux") or not (started_by_launcher() or "TORCHELASTIC_RUN_ID" in os.environ):
        return
    end_with_parent()
    if started_by_launcher():
        if os.getppid() != int(os.environ["DISTRIBUTED_LAUNCHER_PID"]):  # it died before the line above
            sys.exit(1)
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_connection(store, timeout=_STORE_SECONDS).close()
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
    """Halts the garbage collector while modules are imported. What they make stays; without this, it is searched again
    and again."""
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
    from metalearn.nn.precision import compute_with

    torch.set_num_threads(config.threads)
    share_arena()
    compute_with(config.precision)
    if config.launch.interface is not None:
        use_interface(config.launch.interface)


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory instead of giving it back to the kernel.

    An inner loop frees and takes the same tensors a thousand times a second. If the memory went back, the kernel would
    have to zero every page again each time.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent in other C libraries
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_ALLOWED)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
