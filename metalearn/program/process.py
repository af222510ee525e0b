"""What is set up in every process before it computes: threads, memory, network, torch."""

import ctypes
import logging
import os
import sys

from omegaconf import DictConfig

from metalearn.config.check import started_by_launcher
from metalearn.program.job import Job

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_LARGEST_ALLOWED = 32 * 2**20


def announce(job: Job) -> None:
    """Prints at once which run is about to start, since importing torch takes seconds; once for all ranks."""
    if int(os.environ.get("RANK", 0)) == 0 and not started_by_launcher():
        print(f"{job.experiment}: starting in {job.run_dir}", file=sys.stderr, flush=True)


def log_sweep() -> None:
    """Sends the log messages of a sweep to stderr."""
    logger = logging.getLogger("sweeps")
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.setLevel(logging.INFO)
    logger.propagate = False


def set_up_process(threads: int) -> None:
    """Sets what must be set before torch is imported."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # we report ourselves that a peer has left
    keep_freed_memory()


def set_up_torch(config: DictConfig) -> None:
    """Sets threads, memory and precision of torch and the network interface; ends this rank with its launcher."""
    import torch  # after `set_up_process`

    from distributed.engine import launch, memory
    from metalearn.nn.precision import compute_with

    torch.set_num_threads(config.threads)
    memory.share_arena()
    compute_with(config.precision)
    launch.die_with_parent()
    if config.launch.interface is not None:
        launch.use_interface(config.launch.interface)


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
