"""index.html: all runs below a folder in one table that sorts, with links to their reports."""

import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from metalearn.config.saved import read_config, typed_keys
from metalearn.config.values import leaves
from metalearn.reporting.loggers.to_jsonl import METRICS, rows_of
from metalearn.reporting.page import page
from metalearn.reporting.report import REPORT
from metalearn.runs.metrics import main_metric
from metalearn.storage.files import read_object, write_atomically

INDEX = "index.html"

_SIGNS = ("result.json", METRICS, ".hydra")
"""A folder with one of these holds a run."""
_DEEPEST = 4
_MOST_KEYS = 12
_DAMAGED = "damaged: "
_OF_THE_RUN = ("run", "resume", "pause_after", "workers", "hydra", "logger", "launch", "checkpoint", "device")
"""Keys, and groups, that do not say what is learned."""

Cell = tuple[object, object]
"""What is shown, and what sorts; None: that which is shown."""


class FoundRun(NamedTuple):
    """A run, by its path from the folder: the address of its report, its `status` in words, the keys that were typed,
    the values of all, and the `_cells` of its result."""

    path: Path
    report: str | None
    status: str
    typed: Mapping[str, str]
    config: Mapping[str, Any]
    cells: Sequence[Cell]


def write_index(folder: Path) -> int:
    """Writes the page into the folder; returns the number of runs.

    Raises:
        FileNotFoundError: the folder is missing, or has no run below it.
        RunError: it cannot be written.
    """
    runs = []
    for here, folders, files in os.walk(folder):  # links are not followed
        path = Path(here).relative_to(folder)
        if path.parts and not {*folders, *files}.isdisjoint(_SIGNS):
            runs.append(_found(folder, path))
            folders.clear()
        elif len(path.parts) >= _DEEPEST:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    if not runs:
        raise FileNotFoundError(f"{folder}: has no runs below it, {_DEEPEST} deep; type the folder of some")
    write_atomically(folder / INDEX, page("index.html", title=folder.resolve().name, **_table(runs)))
    return len(runs)


def _found(folder: Path, path: Path) -> FoundRun:
    run_dir = folder / path
    report = "./" + urllib.parse.quote(os.fsencode(path / REPORT)) if (run_dir / REPORT).is_file() else None
    saved, ended = run_dir / ".hydra/config.yaml", run_dir / "result.json"
    try:
        typed = {key: value for key, value in typed_keys(run_dir).items() if key.split(".")[0] not in _OF_THE_RUN}
        config = dict(leaves(read_config(saved))) if saved.exists() else {}
        result = read_object(ended) if ended.exists() else {"status": "no result, and no step logged"}
        if not ended.exists() and (run_dir / METRICS).exists():
            for row in rows_of(run_dir):
                result["status"] = f"no result yet, step {row['step']}"
        return FoundRun(path, report, str(result["status"]), typed, config, _cells(result))
    except Exception as error:  # whatever is damaged in a folder: it is one row, and the others are shown
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        return FoundRun(path, report, _DAMAGED + reason.removeprefix(f"{run_dir}/"), {}, {}, _cells({}))


def _table(runs: Sequence[FoundRun]) -> dict[str, Any]:
    """The table, and the words above it, as the template takes them."""
    typed = list(dict.fromkeys(key for run in runs for key in run.typed))
    values = {key: [run.typed.get(key, run.config.get(key, "")) for run in runs] for key in typed}
    whole = [place for place, run in enumerate(runs) if not run.status.startswith(_DAMAGED)]
    alike = [key for key in typed if len({str(values[key][place]) for place in whole}) == 1]
    keys = [key for key in typed if key not in alike]
    shown = keys[:_MOST_KEYS]
    return {
        "alike": " ".join(f"{key}={values[key][whole[0]]}" for key in alike),
        "more": keys[_MOST_KEYS:],
        "heads": ["run", "status", "test", "best validation", *shown, "steps", "seconds"],
        "runs": [
            {
                "name": run.path,
                "report": run.report,
                "cells": [
                    (run.status, None), *run.cells[:2], *((values[key][place], None) for key in shown), *run.cells[2:]
                ],
            }
            for place, run in enumerate(runs)
        ],
    }  # fmt: skip


def _cells(result: Mapping[str, Any]) -> list[Cell]:
    """Of test, validation, steps and seconds what is shown, and what sorts."""
    cells: list[Cell] = []
    for figures in (result.get("test") or {}, result.get("val") or {}):
        metric = main_metric(figures)
        value, half = figures.get(metric), figures.get("ci95")
        form, unit = (".2%", "") if metric == "accuracy" else (".4g", f" {metric}")
        interval = "" if half is None else f" ± {half:{form}}"
        cells.append(("", None) if value is None else (f"{value:{form}}{interval}{unit}", float(value)))
    numbers = [result.get(name) for name in ("steps", "seconds")]
    return [*cells, *(("", None) if number is None else (f"{number:,.0f}", number) for number in numbers)]
