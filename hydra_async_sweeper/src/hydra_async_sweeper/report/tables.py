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
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from hydra_async_sweeper.settings import PBT, RESULTS
from hydra_async_sweeper.slots import write_atomically
from hydra_async_sweeper.space import Params
from hydra_async_sweeper.trials import OUTCOMES, FinishedTrials


def write_tables(
    folder: Path,
    ended: FinishedTrials,
    *,
    total: int,
    command: str | None,
    folder_of: Callable[[int], str] = str,
) -> None:
    """Writes trials.csv and, with the field names of Hydra's Optuna sweeper, optimization_results.yaml.

    Args:
        folder: of the sweep.
        ended: all trials that have ended.
        total: how many trials the sweep is to have.
        command: the command that trains the best configuration.
        folder_of: from a trial's number to its folder in the sweep's.
    """
    ordered = sorted(ended.trials, key=lambda trial: trial.number)
    params = list(dict.fromkeys(key for trial in ordered for key in trial.params))
    parent = ["parent"] if ended.lanes.by_round else []
    lane = [*ended.lanes.place_of(0), *parent]
    rows: list[list[Any]] = [
        ["number", "told", "outcome", *lane, *ended.objectives, "seconds", "same_as", "failure", *params]
    ]
    for trial in ordered:
        rows.append([
            trial.number, trial.told, trial.outcome, *ended.lanes.place_of(trial.number).values(),
            *(trial.parent for _ in parent), *(trial.values or [""] * len(ended.objectives)), trial.seconds,
            trial.same_as, " ".join(trial.failure.split()), *(trial.params.get(key, "") for key in params),
        ])  # fmt: skip
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomically(folder / "trials.csv", text.getvalue())
    counts = Counter(trial.outcome for trial in ended.trials)
    results = {
        "name": PBT if ended.lanes.by_round else "async",
        **_best(ended, folder_of),
        "command": command,
        "objectives": dict(zip(ended.objectives, ended.directions, strict=True)),
        "trials": {"total": total, **{outcome: counts[outcome] for outcome in OUTCOMES}},
    }
    write_atomically(folder / RESULTS, yaml.safe_dump(results, sort_keys=False, allow_unicode=True, width=math.inf))


def _best(ended: FinishedTrials, folder_of: Callable[[int], str]) -> dict[str, Any]:
    best = ended.best()
    if len(ended.objectives) > 1:
        return {
            "solutions": [
                {"params": _plain_params(trial.params), "values": list(trial.values or ()), "trial": trial.number,
                 "folder": folder_of(trial.number)}
                for trial in best
            ]
        }  # fmt: skip
    if not best:
        return dict.fromkeys(("best_params", "best_value", "best_trial", "best_folder"))
    trial = best[0]
    results: dict[str, Any] = {
        "best_params": _plain_params(trial.params), "best_value": trial.values and trial.values[0],
        "best_trial": trial.number, "best_folder": folder_of(trial.number),
    }  # fmt: skip
    if ended.lanes.by_round:
        chain = ended.lineage(trial.number)
        results["lineage"] = [
            {"trial": t.number, "folder": folder_of(t.number), "params": dict(t.params)} for t in chain
        ]
    return results


def _plain_params(params: Params) -> dict[str, Any]:
    return {key: _plain(value) if isinstance(value, str) else value for key, value in params.items()}


@lru_cache(maxsize=4096)
def _plain(text: str) -> str | int | float | bool | None:
    """What Hydra reads in the text of an override, where that is one plain value; else the text."""
    try:
        value: Any = OverridesParser.create().parse_override(f"key={text}").value()
    except HydraException:
        return text
    return value if isinstance(value, str | int | float | None) else text


def best_command(folder: Path, number: int) -> str | None:
    """The command in optimization_results.yaml, where trial `number` is its best one, or its first solution."""
    try:
        results = yaml.safe_load((folder / RESULTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    best = results["solutions"][0]["trial"] if results.get("solutions") else results.get("best_trial")
    return results["command"] if best == number else None
