"""What Hydra does for a run: it makes the run folder with its `.hydra`, and calls a task for each job of a multirun."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, read_write

from metalearn.app.outcome import DISK, FAILED, OK
from metalearn.config.compose import own_error
from metalearn.config.options import CONF
from metalearn.runs.signals import STOPPED
from metalearn.storage.files import is_disk_fault, unwritten, writing

FULL_ERROR = "HYDRA_FULL_ERROR"


def show_by_hydra() -> int:
    """Lets Hydra print what `--cfg`, `--info` and the like ask for."""
    _call(lambda config: OK)
    return OK


def run_by_hydra(task: Callable[[DictConfig], int], whole: DictConfig, run_dir: Path) -> int:
    """Lets Hydra make the run folder and its `.hydra`, then call `task`; returns the task's exit code.

    This is what `hydra.main` does, but for composing the config, which `whole` is already: to do it again takes half a
    second, and `hydra.main` cannot name a run by what was typed and differs from the defaults of its experiment.

    Raises:
        RunError: the folder cannot be written.
    """
    from hydra import initialize_config_dir
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.utils import configure_log, run_job
    from hydra.types import HydraContext, RunMode

    with read_write(whole.hydra):
        whole.hydra.mode = RunMode.RUN
    configure_log(whole.hydra.hydra_logging, whole.hydra.verbose)
    callbacks = Callbacks(whole)
    with writing(run_dir), initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        callbacks.on_run_start(config=whole, config_name="config")
        done = run_job(task, whole, "hydra.run.dir", None, HydraContext(loader, callbacks))
        callbacks.on_run_end(config=whole, config_name="config", job_return=done)
        code: int = done.return_value  # or the error of the task
    return code


def run_grid_by_hydra(task: Callable[[DictConfig], int], sweep_dir: Path) -> int:
    """Lets one of Hydra's own sweepers call `task` for each job of a multirun; returns the largest exit code.

    A job that was stopped, or whose disk has failed, ends the multirun.

    Raises:
        RunError: the folder of the multirun cannot be written.
    """
    codes: list[int] = []
    controller = os.getpid()

    def job(config: DictConfig) -> None:
        codes.append(task(config))
        if codes[-1] in (*STOPPED, DISK):  # ends the sweep, where an Exception would only fail this job
            raise SystemExit(FAILED if codes[-1] == DISK else codes[-1])
        if codes[-1] != OK and os.getpid() != controller:  # only an error tells another process
            raise RuntimeError(f"the job ended with exit code {codes[-1]}")

    with _showing_errors():
        try:
            _call(job)
        except HydraException as error:
            raise own_error(error) from error
        except OSError as error:  # of multirun.yaml; those of a job are its own
            if not is_disk_fault(error) and not isinstance(error, PermissionError | IsADirectoryError):
                raise
            raise unwritten(Path(os.fsdecode(error.filename or sweep_dir)), error) from error
    return max(codes, default=OK)


def run_trials_by_hydra(task: Callable[[DictConfig], dict[str, Any]], attributes: Mapping[str, Any]) -> None:
    """Lets the sweeper `async` call `task` for each trial; the sweeper's `TaskTraits` reads the `attributes`."""

    def trial(config: DictConfig) -> dict[str, Any]:
        return task(config)

    for name, value in attributes.items():
        setattr(trial, name, value)
    _call(trial)


@contextmanager
def _showing_errors() -> Iterator[None]:
    """Hydra raises its errors and those of a task, in place of a print and an exit of its own."""
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = before


def _call(task: Callable[[DictConfig], Any]) -> None:
    import hydra

    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
