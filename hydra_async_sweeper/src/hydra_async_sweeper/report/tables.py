"""The tables of a sweep: trials.csv and optimization_results.yaml."""

import csv
import io
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra_async_sweeper.files import read_yaml
from hydra_async_sweeper.population import lineage
from hydra_async_sweeper.ranking import OUTCOMES, best_trials, place_of
from hydra_async_sweeper.settings import RESULTS
from hydra_async_sweeper.space import Params
from hydra_async_sweeper.terms import ONE_LANE, FinishedTrial, Lanes


def write_tables(
    folder: Path,
    trials: Sequence[FinishedTrial],
    objectives: Sequence[str],
    directions: Sequence[str],
    *,
    total: int,
    command: str | None,
    lanes: Lanes = ONE_LANE,
    name: str = "optuna",
    folder_of: Callable[[int], str] = str,
) -> None:
    """Writes trials.csv and, with the field names of Hydra's Optuna sweeper, optimization_results.yaml.

    Args:
        folder: of the sweep.
        trials: all that have ended.
        objectives: their names.
        directions: `minimize` or `maximize` for each objective.
        total: how many trials the sweep is to have.
        command: the command that trains the best configuration.
        lanes: the islands, or the members of a population.
        name: of the sweeper.
        folder_of: from a trial's number to its folder in the sweep's.
    """
    _write_atomically(folder / "trials.csv", _csv(trials, objectives, lanes))
    results = _results(trials, objectives, directions, total, command, name, folder_of, lanes)
    _write_atomically(folder / RESULTS, _yaml(results))


def _csv(trials: Sequence[FinishedTrial], objectives: Sequence[str], lanes: Lanes) -> str:
    ordered = sorted(trials, key=lambda trial: trial.number)
    params = list(dict.fromkeys(key for trial in ordered for key in trial.params))
    lane = [*place_of(0, lanes), *(["parent"] if lanes.by_round else [])]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["number", "told", "outcome", *lane, *objectives, "seconds", "same_as", "failure", *params])
    for trial in ordered:
        writer.writerow([
            trial.number, trial.told, trial.outcome, *place_of(trial.number, lanes).values(),
            *([trial.parent] if lanes.by_round else []),
            *(trial.values or [""] * len(objectives)), trial.seconds, trial.same_as, " ".join(trial.failure.split()),
            *(trial.params.get(key, "") for key in params),
        ])  # fmt: skip
    return text.getvalue()


def _results(
    trials: Sequence[FinishedTrial],
    objectives: Sequence[str],
    directions: Sequence[str],
    total: int,
    command: str | None,
    name: str,
    folder_of: Callable[[int], str],
    lanes: Lanes,
) -> dict[str, Any]:
    best = best_trials(trials, directions, lanes)
    results: dict[str, Any] = {"name": name}
    if len(objectives) == 1:
        trial = best[0] if best else None
        results["best_params"] = _plain_params(trial.params) if trial else None
        results["best_value"] = trial.values[0] if trial and trial.values else None
        results["best_trial"] = trial.number if trial else None
        results["best_folder"] = folder_of(trial.number) if trial else None
    else:
        results["solutions"] = [
            {
                "params": _plain_params(trial.params),
                "values": list(trial.values or ()),
                "trial": trial.number,
                "folder": folder_of(trial.number),
            }
            for trial in best
        ]
    if lanes.by_round and best:
        chosen = {trial.number: trial for trial in trials}
        chain = lineage(best[0].number, {number: trial.parent for number, trial in chosen.items()})
        results["lineage"] = [{"trial": n, "folder": folder_of(n), "params": dict(chosen[n].params)} for n in chain]
    counts = Counter(trial.outcome for trial in trials)
    return {
        **results,
        "command": command,
        "objectives": dict(zip(objectives, directions, strict=True)),
        "trials": {"total": total, **{outcome: counts[outcome] for outcome in OUTCOMES}},
    }


def _plain_params(params: Params) -> dict[str, Any]:
    return {key: _plain(value) if isinstance(value, str) else value for key, value in params.items()}


@lru_cache(maxsize=4096)
def _plain(text: str) -> str | int | float | bool | None:
    """What Hydra reads in the text of an override, where that is one plain value; else the text."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        value: Any = OverridesParser.create().parse_override(f"key={text}").value()
    except HydraException:
        return text
    return value if isinstance(value, str | int | float | None) else text


def best_command(folder: Path, number: int) -> str | None:
    """The command in optimization_results.yaml, where trial `number` is its best one, or its first solution."""
    try:
        results = read_yaml(folder / RESULTS)
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(results, dict):
        return None
    solutions = results.get("solutions") or [{}]
    best = results["best_trial"] if "best_trial" in results else solutions[0].get("trial")
    command = results.get("command") if best == number else None
    return command if isinstance(command, str) else None


def _yaml(results: Mapping[str, Any]) -> str:
    import yaml  # type: ignore[import-untyped]

    return str(yaml.safe_dump(dict(results), sort_keys=False, allow_unicode=True, width=math.inf))


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # sweep_report.py may write it, too
    temporary.write_text(text)
    temporary.replace(path)
