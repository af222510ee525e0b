"""The results of our runs: of each finished run a small file in `results/`."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metalearn.config.foreign import read_config
from metalearn.errors import ConfigError
from metalearn.reporting.plots import Curve, curve_of
from metalearn.storage.files import read_object, write_atomically
from scripts.reproduction.rows import LAST, Row

Result = dict[str, Any]
"""The result of a run, as a file in `results/` holds it; see `result_of_run`."""


def result_of_run(row: Row, run_dir: Path, facts: Mapping[str, Any]) -> Result:
    """The result of a completed run; `facts` (command, date, commit, machine) are added as they are.

    Raises:
        FileNotFoundError: the run is not complete.
        ConfigError: its test has not what the row asks for.
    """
    result = read_object(run_dir / "result.json")
    choices = read_config(run_dir / ".hydra" / "hydra.yaml")["hydra"]["runtime"]["choices"]
    return {
        "row": row.name,
        "algorithm": choices["algorithm"],
        "dataset": choices["dataset"],
        **_evaluation(row, run_dir, run_dir / ".hydra" / "config.yaml"),
        "steps": result["steps"],
        "seconds": result["seconds"],
        "seed": result["seed"],
        "workers": result["workers"],
        **facts,
        "validation": _rounded(curve_of(run_dir)),
    }


def result_of_evaluation(
    row: Row, seed: int, trained: Sequence[Result], folder: Path, facts: Mapping[str, Any]
) -> Result:
    """The result of scripts/evaluate.py in `folder`. Steps, seconds and workers are those of the training, whose result
    is `trained`; an ensemble has several, and took the seconds of all. Algorithm and dataset are those of the training
    if the row names no others. There is no learning curve.

    Raises:
        FileNotFoundError: the evaluation is not complete.
        ConfigError: its test has not what the row asks for.
    """
    chosen = {key: option for key, _, option in (change.partition("=") for change in row.overrides)}
    first = trained[0]
    return {
        "row": row.name,
        **{key: chosen.get(key, first[key]) for key in ("algorithm", "dataset")},
        **_evaluation(row, folder, folder / "config.yaml"),
        "steps": first["steps"],
        "seconds": seconds_of(trained),
        "seed": seed,
        "workers": first["workers"],
        **facts,
        "validation": None,
    }


def seconds_of(trained: Sequence[Result]) -> float:
    """The seconds of trainings, in all."""
    return math.fsum(result["seconds"] for result in trained)


def _evaluation(row: Row, folder: Path, config: Path) -> Result:
    """The episodes and the figures of a test."""
    test = read_object(folder / "result.json").get("test")
    metric = row.metric
    if test is None:
        raise ConfigError(f"{folder}: ended without a test; leave pause_after out of the row {row.name}")
    if test.get(metric) is None:
        raise ConfigError(f"metric={metric}: the test of the row {row.name} has none; type the metric of its dataset")
    steps = [published.after for published in row.published if published.after != LAST]
    missing = [after for after in steps if after not in test["by_step"]]
    if missing:
        raise ConfigError(
            f"paper: the test of the row {row.name} has inner steps {', '.join(test['by_step'])}, and not "
            f"{', '.join(missing)}; type algorithm.eval_steps in its run"
        )
    dataset = read_config(config)["dataset"]
    return {
        **{key: dataset.get(key) for key in ("split", "ways", "shots")},
        "queries": dataset.get("eval_queries", dataset.get("queries")),
        **{key: test.get(key) for key in (metric, "ci95", "tasks", "task_list", "transductive")},
        **{key: test[key] for key in ("by_step", "ci95_by_step", "seen_classes") if key in test},
    }


def _rounded(curve: Curve) -> dict[str, Any]:
    seconds = [] if curve.seconds is None else [round(value, 1) for value in curve.seconds]
    return {"steps": curve.steps, "seconds": seconds, "values": [round(value, 5) for value in curve.values]}


def write_result(folder: Path, result: Result) -> Path:
    """Writes a result where `read_results` reads it, whole or not at all."""
    path = result_path(folder, result["row"], result["seed"])
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(result, indent=2) + "\n")
    return path


def result_path(folder: Path, row: str, seed: int) -> Path:
    """The file of a row's result."""
    return folder / f"{row}_seed{seed}.json"


def read_result(path: Path) -> Result:
    """The result in a file.

    Raises:
        ConfigError: it holds something else, such as the marks of a merge.
    """
    try:
        result = read_object(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); mend it, or remove it to run the row again") from error
    if not result.keys() >= {"row", "seed", "seconds", "command"}:
        raise ConfigError(f"{path}: is not the result of a run; remove it to run the row again")
    return result


def read_results(folder: Path, row: str) -> list[Result]:
    """A row's results, by seed.

    Raises:
        ConfigError: a file that is no result.
    """
    results = [read_result(path) for path in folder.glob(f"{row}_seed*.json")]
    return sorted((result for result in results if result["row"] == row), key=lambda result: int(result["seed"]))
