"""The names of run folders, and what else the yamls compute: the resolvers `${NAME:…}`."""

import hashlib
from collections.abc import Callable
from typing import Any

from metalearn.config import sagemaker

DEFAULT = ("maml_glyphs", "maml", "glyphs")
"""The default experiment, its algorithm and its dataset."""

_LONGEST_FOLDER_NAME = 120
"""The most bytes of a folder's name."""


def folder_name(overrides: str) -> str:
    """The name of a multirun job's folder: its overrides, with `-` for `/`. A long name is cut and made unique by a
    digest."""
    name, digest = overrides.replace("/", "-"), hashlib.sha256(overrides.encode()).hexdigest()[:8]
    if len(name.encode()) <= _LONGEST_FOLDER_NAME:
        return name
    return f"{name.encode()[: _LONGEST_FOLDER_NAME - 9].decode(errors='ignore')}-{digest}"


def trial_folder(overrides: str, number: int, study: str | None) -> str:
    """The folder of a job of a multirun: its number where a study keeps the jobs' parameters, else its overrides."""
    return folder_name(overrides) if study is None else f"trial_{number:04d}"


def study_folder(study: str | None) -> str:
    """The folder of the study, if there is one, below the experiment's folder."""
    return "" if study is None else f"/{study}"


def run_group(experiment: str, algorithm: str, dataset: str) -> str:
    """The name of the folder that holds a run's folder: the experiment.

    It is ALGORITHM-DATASET where the default experiment runs with another algorithm or dataset than its own.
    """
    default, *own = DEFAULT
    return f"{algorithm}-{dataset}" if experiment == default and [algorithm, dataset] != own else experiment


def slurm_port(job: str | int) -> int:
    """A port for a job of Slurm, so that two jobs on one host do not meet; 0, any free one, outside of Slurm."""
    return 20_000 + int(job) % 10_000 if int(job) else 0


def inner_rate(ways: int | None) -> float:
    """The rate of inner steps that learns tasks of classes (`ways`, by a network with norms), or of real numbers."""
    return 0.01 if ways is None else 1.0


RESOLVERS: dict[str, Callable[..., Any]] = {
    "folder_name": folder_name,
    "trial_folder": trial_folder,
    "study_folder": study_folder,
    "run_group": run_group,
    "inner_rate": inner_rate,
    "sagemaker": sagemaker.value,
    "slurm_port": slurm_port,
}
