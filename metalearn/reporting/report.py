"""report.html, a finished run on one page; and index.html, all runs below a folder in one table that sorts. Both need
nothing else, not even a network."""

import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from metalearn.config.saved import read_config, typed_keys
from metalearn.config.values import Config, leaves
from metalearn.reporting.charts import Chart, Line, chart
from metalearn.reporting.loggers import METRICS, as_yaml, rows_of
from metalearn.reporting.page import Tile, has_pictures, page, picture_of, shown_classes
from metalearn.reporting.plots import COSTS, adaptation_chart, costs_of, gradient_chart, learning_charts
from metalearn.reporting.provenance import made_with
from metalearn.runs.metrics import METRIC_NAMES, describe, main_metric
from metalearn.storage.files import read_object, write_atomically
from metalearn.types import Adapt, Episode, Params

REPORT = "report.html"


class ShownTask(NamedTuple):
    """An episode of one test task, or of test samples, with the outputs [1, n, d] for its queries after adaptation, and
    the names of the classes by their labels, if they are known."""

    name: str
    episode: Episode
    outputs: Tensor
    classes: Sequence[str] = ()

    def class_name(self, label: int) -> str:
        """What people call a class."""
        return self.classes[label] if label < len(self.classes) else f"class {label}"


class ShownLearner(NamedTuple):
    """The learner behind the drawn predictions: the algorithm's `adapt`, and the tested parameters."""

    adapt: Adapt
    params: Params


def write_report(
    run_dir: Path,
    commands: Sequence[str],
    config: Config,
    result: Mapping[str, Any],
    tasks: Sequence[ShownTask],
    learned: ShownLearner,
) -> Path:
    """Writes the page of a completed run.

    Args:
        run_dir: its folder, with metrics.jsonl.
        commands: what makes it again, in order.
        config: the whole config.
        result: the fields of result.json.
        tasks: the test tasks to show.
        learned: what adapts to them.

    Raises:
        RunError: it cannot be written.
    """
    rows = list(rows_of(run_dir))
    test, val, device = result["test"], result["val"], result.get("device") or {}
    metric, value, *interval = describe(dict(test)).split(" ")
    kind = "transductive" if test["transductive"] else "not transductive"
    words = f"{' '.join(interval[:2])} test {metric} {' '.join(interval[2:])}, {kind}"
    if metric == "accuracy" and tasks:
        ways = tasks[0].outputs.shape[-1]
        words += f"; guessing among {ways} classes gives {1 / ways:.1%}"
    minutes, seconds = divmod(round(result["seconds"]), 60)
    hours, minutes = divmod(minutes, 60)
    pictures = bool(tasks) and has_pictures(tasks[0].episode)
    curve = bool(tasks) and not pictures and tasks[0].episode.query.x.shape[2:] == (1,)
    content = page(
        "run.html",
        title=" / ".join(run_dir.parts[-2:]),
        value=value,
        words=words,
        about={
            "best validation": f"{describe(val)}, after step {val['step']}",
            "steps": f"{result['steps']:,}",
            "time": f"{hours} h {minutes} min"
            if hours
            else f"{minutes} min {seconds} s"
            if minutes
            else f"{seconds} s",
            "workers": result["workers"],
            "seed": result["seed"],
            "list of test tasks": test.get("task_list", "-"),
        },
        curves=[*learning_charts(rows), *_inner_steps(test, config)],
        episodes=[_episode(task) for task in tasks] if pictures else [],
        fits=[adaptation_chart(task.name, *learned, task.episode) for task in tasks] if curve else [],
        costs=COSTS,
        workers=[list(costs.values()) for costs in costs_of(rows)],
        gradient=gradient_chart(rows),
        made=made_with() | ({"computed by": device.get("name") or device["type"].upper()} if device else {}),
        commands=commands,
        config=as_yaml(config),
    )
    write_atomically(run_dir / REPORT, content)
    return run_dir / REPORT


def _inner_steps(test: Mapping[str, Any], config: Config) -> list[Chart]:
    """The metric after each inner step of the test, if there are any."""
    steps = sorted(map(int, test["by_step"]))
    if len(steps) < 2:
        return []
    metric = main_metric(dict(test))
    percent = metric == "accuracy"
    line = Line(
        f"test after {steps[0]} to {steps[-1]} inner steps, with 95% intervals",
        [(step, test["by_step"][str(step)]) for step in steps],
        [test["ci95_by_step"][str(step)] for step in steps],
        "dots",
    )
    trained = config.get("algorithm", {}).get("inner_steps")
    note = f"Step 0 is before adaptation; the result is that after step {steps[-1]}."
    drawn = chart(
        "After each inner step", [line], x="inner step", y=f"test {METRIC_NAMES[metric]}{' (%)' if percent else ''}",
        percent=percent, whole=True, note=note + (f" Inner steps in training: {trained}." if trained else ""),
    )  # fmt: skip
    return [drawn]


def _episode(task: ShownTask) -> dict[str, Any]:
    """A task of pictures: of each class first those that were learned from, then the queries with their predictions."""
    (support, query) = task.episode
    predicted = task.outputs[0].argmax(dim=1).tolist()
    wrong = sum(guess != label for guess, label in zip(predicted, query.y[0].tolist(), strict=True))
    classes = []
    for shown in shown_classes(task.episode):
        name = task.class_name(shown.label)
        tiles = [Tile(picture_of(support.x[0, at]), f"{name}, learned from", "learned") for at in shown.support]
        for at in shown.query:
            right, answer = predicted[at] == shown.label, task.class_name(predicted[at])
            words = "" if right else f"as {answer}"
            tiles.append(Tile(picture_of(query.x[0, at]), f"{name}, predicted as {answer}", words, right))
        classes.append((name, tiles))
    return {"title": f"{task.name}: {wrong} of {len(predicted)} queries wrong", "classes": classes}


INDEX = "index.html"

_SIGNS = ("result.json", METRICS, ".hydra")  # a folder with one of these holds a run
_DEEPEST, _MOST_KEYS = 4, 12  # folders below the first one that are searched, and the keys that have a column
_DAMAGED = "damaged: "

_NOT_LEARNED = ("run", "resume", "pause_after", "workers", "hydra", "logger", "launch", "checkpoint", "device")
"""Keys, and groups, that do not change what is learned."""

Cell = tuple[object, object]  # what is shown, and what sorts; None: that which is shown


class ListedRun(NamedTuple):
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
            runs.append(_listed(folder, path))
            folders.clear()
        elif len(path.parts) >= _DEEPEST:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    if not runs:
        raise FileNotFoundError(f"{folder}: has no runs below it, {_DEEPEST} deep; type the folder of some")
    write_atomically(folder / INDEX, page("index.html", title=folder.resolve().name, **_table(runs)))
    return len(runs)


def _listed(folder: Path, path: Path) -> ListedRun:
    run_dir = folder / path
    report = "./" + urllib.parse.quote(os.fsencode(path / REPORT)) if (run_dir / REPORT).is_file() else None
    saved, ended = run_dir / ".hydra/config.yaml", run_dir / "result.json"
    try:
        typed = {key: value for key, value in typed_keys(run_dir).items() if key.split(".")[0] not in _NOT_LEARNED}
        config = dict(leaves(read_config(saved))) if saved.exists() else {}
        result = read_object(ended) if ended.exists() else {"status": "no result, and no step logged"}
        if not ended.exists() and (run_dir / METRICS).exists():
            for row in rows_of(run_dir):
                result["status"] = f"no result yet, step {row['step']}"
        return ListedRun(path, report, str(result["status"]), typed, config, _cells(result))
    except Exception as error:  # whatever is damaged in a folder: it is one row, and the others are shown
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        return ListedRun(path, report, _DAMAGED + reason.removeprefix(f"{run_dir}/"), {}, {}, _cells({}))


def _table(runs: Sequence[ListedRun]) -> dict[str, Any]:
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
    for outcome in (result.get("test") or {}, result.get("val") or {}):
        metric = main_metric(outcome)
        value, half = outcome.get(metric), outcome.get("ci95")
        form, unit = (".2%", "") if metric == "accuracy" else (".4g", f" {metric}")
        interval = "" if half is None else f" ± {half:{form}}"
        cells.append(("", None) if value is None else (f"{value:{form}}{interval}{unit}", float(value)))
    numbers = [result.get(name) for name in ("steps", "seconds")]
    return [*cells, *(("", None) if number is None else (f"{number:,.0f}", number) for number in numbers)]
