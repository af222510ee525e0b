"""The tables of a sweep: trials.csv and optimization_results.yaml."""

import csv
import io
import math
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from hydra_async_sweeper.disk import write_atomically
from hydra_async_sweeper.population import lineage
from hydra_async_sweeper.ranking import OUTCOMES, FinishedTrials
from hydra_async_sweeper.settings import RESULTS, read_yaml
from hydra_async_sweeper.space import Params
from hydra_async_sweeper.terms import printable


def write_tables(
    folder: Path,
    ended: FinishedTrials,
    *,
    total: int,
    command: str | None,
    name: str = "async",
    folder_of: Callable[[int], str] = str,
) -> None:
    """Writes trials.csv and, with the field names of Hydra's Optuna sweeper, optimization_results.yaml.

    Args:
        folder: of the sweep.
        ended: all trials that have ended.
        total: how many trials the sweep is to have.
        command: the command that trains the best configuration.
        name: of the sweeper.
        folder_of: from a trial's number to its folder in the sweep's.
    """
    write_atomically(folder / "trials.csv", _csv(ended))
    results = {"name": name, **_results(ended, folder_of)}
    results["command"] = command
    results["objectives"] = dict(zip(ended.objectives, ended.directions, strict=True))
    counts = Counter(trial.outcome for trial in ended.trials)
    results["trials"] = {"total": total, **{outcome: counts[outcome] for outcome in OUTCOMES}}
    text = yaml.safe_dump(results, sort_keys=False, allow_unicode=True, width=math.inf)
    write_atomically(folder / RESULTS, text)


def _csv(ended: FinishedTrials) -> str:
    ordered = sorted(ended.trials, key=lambda trial: trial.number)
    params = list(dict.fromkeys(key for trial in ordered for key in trial.params))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    lane = [*ended.lanes.place_of(0), *(["parent"] if ended.lanes.by_round else [])]
    head = ["number", "told", "outcome", *lane, *ended.objectives, "seconds", "same_as", "failure", *params]
    writer.writerow(map(printable, head))
    for trial in ordered:
        row = [
            trial.number, trial.told, trial.outcome, *ended.lanes.place_of(trial.number).values(),
            *([trial.parent] if ended.lanes.by_round else []),
            *(trial.values or [""] * len(ended.objectives)), trial.seconds, trial.same_as,
            " ".join(trial.failure.split()), *(trial.params.get(key, "") for key in params),
        ]  # fmt: skip
        writer.writerow([printable(cell) if isinstance(cell, str) else cell for cell in row])
    return text.getvalue()


def _results(ended: FinishedTrials, folder_of: Callable[[int], str]) -> dict[str, Any]:
    best = ended.best()
    if len(ended.objectives) > 1:
        solutions = [
            {
                "params": _plain_params(trial.params), "values": list(trial.values or ()), "trial": trial.number,
                "folder": folder_of(trial.number),
            }
            for trial in best
        ]  # fmt: skip
        return {"solutions": solutions}
    trial = best[0] if best else None
    results: dict[str, Any] = {
        "best_params": _plain_params(trial.params) if trial else None,
        "best_value": trial.values[0] if trial and trial.values else None,
        "best_trial": trial.number if trial else None,
        "best_folder": folder_of(trial.number) if trial else None,
    }
    if trial and ended.lanes.by_round:
        chosen = {trial.number: trial for trial in ended.trials}
        chain = lineage(trial.number, {number: trial.parent for number, trial in chosen.items()})
        results["lineage"] = [{"trial": n, "folder": folder_of(n), "params": dict(chosen[n].params)} for n in chain]
    return results


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
