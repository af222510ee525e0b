"""One trial: its folder, what its process runs, and what that returns."""

import errno
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf, read_write

from hydra_async_sweeper.slots import fault_in, line_of


def trial_folders(config: DictConfig, folder: Path) -> Callable[[int], Path] | None:
    """From a trial's number to its folder; None where that depends on more than the number."""

    def folder_of(number: int) -> Path:
        numbered = config.copy()
        with read_write(numbered.hydra):
            numbered.hydra.job.num, numbered.hydra.job.override_dirname = number, ""
        singleton = HydraConfig.instance()
        before: Any = singleton.cfg
        singleton.cfg = numbered  # type: ignore[assignment]  # where `${hydra:…}` looks
        try:
            return folder / str(OmegaConf.select(numbered, "hydra.sweep.subdir", throw_on_missing=True))
        finally:
            singleton.cfg = before

    try:
        return folder_of if folder_of(0) != folder_of(1) else None
    except Exception:  # the interpolations of an application may fail in any way
        return None


def gpus_of(config: DictConfig) -> list[str]:
    """The GPUs that the slots of the basic launcher share out; CUDA is not asked, which would spoil later forks."""
    if not str(config.hydra.launcher._target_).endswith(".BasicLauncher"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def import_path() -> str:
    """The PYTHONPATH by which another Python finds the plugin and the program, too."""
    paths = [str(Path(__file__).resolve().parents[1]), sys.path[0], os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(dict.fromkeys(filter(None, paths)))


def run_trial(launcher: Launcher, number: int, overrides: Sequence[str]) -> dict[str, Any]:
    """In a trial's process: runs it by the launcher; what has become of it, as JSON can hold it."""
    os.environ["PYTHONPATH"] = import_path()  # for a Python that a launcher starts
    try:
        returned = launcher.launch([list(overrides)], initial_job_idx=number)[0]
    except (ConfigCompositionException, HydraException) as error:
        return {"status": "REFUSED", "error": str(error)}
    status, value, failure = returned.status.name, returned._return_value, ""
    if returned.status == JobStatus.FAILED:
        traceback.print_exception(value)  # only its text reaches the controller
        folder = Path(returned.hydra_cfg.hydra.runtime.output_dir) if returned.hydra_cfg is not None else Path()
        fault = fault_in(value)
        if fault is None and not folder.is_dir():
            fault = FileNotFoundError(errno.ENOENT, "is not there any more", str(folder))
        failure = f"{type(value).__name__}: {value}" if fault is None else line_of(fault, folder)
        status, value = status if fault is None else "DISK", None
    configs = {
        key: None if config is None else OmegaConf.to_container(config, enum_to_str=True)
        for key, config in (("cfg", returned.cfg), ("hydra_cfg", returned.hydra_cfg))
    }
    return {
        "status": status, "value": value, "error": failure, "overrides": list(returned.overrides or ()), **configs,
        "working_dir": returned.working_dir, "task_name": returned.task_name,
    }  # fmt: skip


def job_return(outcome: Mapping[str, Any] | None) -> JobReturn:
    """What Hydra expects of a launcher."""
    if outcome is None or "overrides" not in outcome:
        return JobReturn(status=JobStatus.FAILED)
    returned = JobReturn(
        overrides=outcome["overrides"], cfg=OmegaConf.create(outcome["cfg"]),
        hydra_cfg=OmegaConf.create(outcome["hydra_cfg"]), working_dir=outcome["working_dir"],
        task_name=outcome["task_name"], status=JobStatus[outcome["status"]],
    )  # fmt: skip
    returned.return_value = outcome["value"]
    return returned
