"""report.html, a run on one page, which needs nothing else, not even a network."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from metalearn.config.saved import read_config
from metalearn.config.values import Config
from metalearn.errors import as_typed
from metalearn.reporting.loggers import as_yaml, rows_of
from metalearn.reporting.page import Chart, Line, Tile, chart, has_pictures, page, picture_of, shown_classes
from metalearn.reporting.plots import (
    COSTS,
    adaptation_chart,
    costs_of,
    gradient_chart,
    learning_charts,
    position_charts,
)
from metalearn.reporting.provenance import made_with
from metalearn.runs.metrics import METRIC_NAMES, describe, from_json, main_metric
from metalearn.storage.files import read_json, write_atomically
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
    run_dir: Path, commands: Sequence[str], config: Config, result: Mapping[str, Any], tasks: Sequence[ShownTask],
    learned: ShownLearner,
) -> Path:  # fmt: skip
    """Writes the page of a completed run: the `commands` that make it again, in order, its metrics.jsonl and the fields
    of its result.json, and the test tasks. Raises RunError if it cannot be written."""
    content = _report(run_dir, commands, config, result, made_with(), tasks, learned)
    write_atomically(run_dir / REPORT, content)
    return run_dir / REPORT


def report_of(run_dir: Path, result: Mapping[str, Any]) -> str:
    """The page of a run that has none, as the jobs of a sweep, of what lies in its folder: without test tasks. Raises
    OSError or ValueError if a file is damaged.

    Args:
        run_dir: its folder, with metrics.jsonl; the run may be under way.
        result: the fields of its result.json; empty if there is none yet.
    """
    saved, path = read_json(run_dir / "checkpoints/last/meta.json"), run_dir / ".hydra/config.yaml"
    config = saved.get("config") or (read_config(path) if path.exists() else {})
    commands = [as_typed(shlex.join(words)) for _, words in saved.get("commands", ())]
    versions = ", ".join(f"{name} {version}" for name, version in saved.get("versions", {}).items())
    return _report(run_dir, commands, config, result, {"versions": versions} if versions else {})


def _report(
    run_dir: Path, commands: Sequence[str], config: Config, result: Mapping[str, Any], made: Mapping[str, str],
    tasks: Sequence[ShownTask] = (), learned: ShownLearner | None = None,
) -> str:  # fmt: skip
    rows = list(rows_of(run_dir))
    last = rows[-1]["step"] if rows else 0
    val = from_json(result.get("val") or next((row for row in reversed(rows) if row["split"] == "val"), {}))
    test, device, seconds = result.get("test"), result.get("device") or {}, result.get("seconds")
    value, words = "no test", result.get("status", f"step {last}")
    if test:
        metric, value, *interval = describe(dict(test)).split(" ")
        kind = "transductive" if test["transductive"] else "not transductive"
        words = f"{' '.join(interval[:2])} test {metric} {' '.join(interval[2:])}, {kind}"
        if metric == "accuracy" and tasks:
            ways = tasks[0].outputs.shape[-1]
            words += f"; guessing among {ways} classes gives {1 / ways:.1%}"
    pictures = bool(tasks) and has_pictures(tasks[0].episode)
    curve = learned is not None and tasks and not pictures and tasks[0].episode.query.x.shape[2:] == (1,)
    curve = curve and tasks[0].episode.query.y.is_floating_point()
    about = {
        f"{'best' if result else 'latest'} validation": (
            f"{describe(dict(val))}, after step {val['step']}" if val else "-"
        ),
        "steps": f"{result.get('steps', last):,}", "time": "-" if seconds is None else duration(seconds),
        "workers": result.get("workers", "-"), "seed": result.get("seed", config.get("seed", "-")),
        "list of test tasks": (test or {}).get("task_list", "-"),
    }  # fmt: skip
    curves = [*(learning_charts(rows) if rows else ()), *(_inner_steps(test, config) if test else ())]
    return page(
        "run.html", title=" / ".join(run_dir.parts[-2:]), value=value, words=words, about=about,
        curves=[*curves, *(position_charts(test) if test else ())],
        episodes=[_episode(task) for task in tasks] if pictures else [],
        fits=[adaptation_chart(task.name, *learned, task.episode) for task in tasks] if learned and curve else [],
        costs=COSTS, workers=[list(costs.values()) for costs in costs_of(rows)], gradient=gradient_chart(rows),
        made={**made, **({"computed by": device.get("name") or device["type"].upper()} if device else {})},
        commands=commands, config=as_yaml(config),
    )  # fmt: skip


def duration(seconds: float) -> str:
    """A time as people say it: `2 h 5 min`, `3 min 20 s` or `7 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, part = divmod(minutes, 60)
    return f"{hours} h {part} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


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
