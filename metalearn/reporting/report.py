"""A run on one page, report.html, which needs nothing else, not even a network; and its charts."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from metalearn.config.saved import read_config
from metalearn.config.values import Config
from metalearn.errors import as_typed
from metalearn.reporting.loggers import Row, as_yaml, rows_of
from metalearn.reporting.page import Chart, Line, Tile, chart, has_pictures, page, picture_of, shown_classes
from metalearn.reporting.provenance import made_with
from metalearn.runs.metrics import ERRORS, METRIC_NAMES, describe, from_json, main_metric
from metalearn.storage.files import read_json, write_atomically
from metalearn.types import Adapt, Episode, Params

REPORT = "report.html"
ADAPTATION_STEPS = (1, 10)
COSTS = ("data", "compute", "waiting", "communication", "update")  # the costs of a worker's step, in seconds
_COST = re.compile(r"worker(\d+)/(compute|waiting|communication)_seconds")


def learning_charts(rows: Sequence[Row]) -> list[Chart]:
    """Loss and main metric against the meta-step: training, validations (a metric's with their 95% intervals), and the
    test."""
    metric = main_metric({name for row in rows for name in row})
    charts = []
    for name in ("loss", metric):
        shown = [row for row in rows if row.get(name) is not None]
        train, val, test = ([row for row in shown if row["split"] == split] for split in ("train", "val", "test"))
        lines = [Line("training", [(row["step"], row[name]) for row in train])] if train else []
        if val:
            intervals = [] if name == "loss" else [row.get("ci95") or 0.0 for row in val]
            lines.append(Line("validation", [(row["step"], row[name]) for row in val], intervals, "dots"))
        steps, percent = [row["step"] for row in shown], name == "accuracy"
        for row in test:
            value = f"test {row[name]:.2%}" if percent else f"test {row[name]:.3f}"
            lines.append(Line(value, [(end, row[name]) for end in (min(steps), max(steps))], (), "dashes"))
        words = METRIC_NAMES.get(name, name)
        drawn = chart(
            words.capitalize(), lines, x="meta-step", y=f"query {words}{' (%)' if percent else ''}", percent=percent,
            whole=True, logarithmic=name in ERRORS and name != "loss",
        )  # fmt: skip
        charts.append(drawn)
    return charts


def adaptation_chart(name: str, adapt: Adapt, params: Params, episode: Episode) -> Chart:
    """A one-dimensional regression task: the truth, which its query points show, the prediction before and after
    adapting, and the support points."""
    (support, query) = episode
    x, order = query.x[0, :, 0].sort()

    def line(name: str, y: Tensor, style: str = "line") -> Line:
        return Line(name, list(zip(x.tolist(), y[0, order, 0].tolist(), strict=True)), (), style)

    lines = [line("truth", query.y)]
    for steps in (0, *ADAPTATION_STEPS):
        label = "before" if steps == 0 else f"after {steps} inner step{'s' if steps > 1 else ''}"
        lines.append(line(label, adapt(params, support, steps)(query.x).detach(), "line" if steps > 1 else "dashes"))
    points = list(zip(support.x[0, :, 0].tolist(), support.y[0, :, 0].tolist(), strict=True))
    return chart(name, [*lines, Line("support points", points, (), "points")], x="x", y="y")


def costs_of(rows: Sequence[Row]) -> list[dict[str, float]]:
    """For each worker the mean seconds of a step by name, as in `COSTS`. The lines know the seconds of making episodes
    only as a sum over the workers: each one gets the mean. The update is that of rank zero."""
    train = [row for row in rows if row["split"] == "train"]

    def mean(name: str) -> float:
        values = [row[name] for row in train if row.get(name) is not None]
        return sum(values) / len(values) if values else 0.0

    means: dict[int, dict[str, float]] = {}
    for name in {name for row in train for name in row}:
        if match := _COST.fullmatch(name):
            means.setdefault(int(match[1]), {})[match[2]] = mean(name)
    data = mean("data_seconds") / max(len(means), 1)
    workers = []
    for rank, costs in sorted(means.items()):
        making = min(data, costs.get("compute", 0.0))  # compute includes it
        costs["compute"] = costs.get("compute", 0.0) - making
        costs |= {"data": making, "update": mean("update_seconds") if rank == 0 else 0.0}
        workers.append({name: costs.get(name, 0.0) for name in COSTS})
    return workers


def position_charts(test: Mapping[str, Any]) -> list[Chart]:
    """Of documents, the bits of a symbol by its position, beside those of the best prediction where it is known."""
    bits = test.get("bits_by_position")
    if not bits:
        return []
    starts = [int(place) for place in bits]
    middles = [(a + b) / 2 for a, b in zip(starts, [*starts[1:], test["symbols"]], strict=True)]
    lines = [
        Line("test, with 95% intervals", list(zip(middles, bits.values(), strict=True)),
             [value or 0.0 for value in test["ci95_by_position"].values()], "dots")
    ]  # fmt: skip
    of_counts = "counts in the reach of the network's window"
    for name, words in (("optimum", "best prediction"), ("window_optimum", of_counts)):
        if best := test.get(f"{name}_by_position"):
            lines.append(Line(words, list(zip(middles, best.values(), strict=True)), (), "dashes"))
    note = "Each point is the mean from one position to the next, drawn in the middle."
    return [chart("Bits by position", lines, x="position in the document (symbols)", y="bits a symbol", whole=True,
                  note=note)]  # fmt: skip


class ShownTask(NamedTuple):
    """An episode of one test task, or of test samples, with the outputs [1, n, d] for its queries after adaptation, and
    the names of the classes by their labels, if they are known."""

    name: str
    episode: Episode
    outputs: Tensor
    classes: Sequence[str] = ()


def write_report(
    run_dir: Path, commands: Sequence[str], config: Config, result: Mapping[str, Any], tasks: Sequence[ShownTask],
    learned: tuple[Adapt, Params],
) -> None:  # fmt: skip
    """Writes the page of a completed run: the `commands` that make it again, in order, its metrics.jsonl and the fields
    of its result.json, and the test tasks, to which the algorithm adapts the tested parameters. Raises RunError if it
    cannot be written."""
    write_atomically(run_dir / REPORT, _report(run_dir, commands, config, result, made_with(), tasks, learned))


def report_of(run_dir: Path, result: Mapping[str, Any]) -> str:
    """The page of a run that has none, as the jobs of a sweep, of what lies in its folder: without test tasks. `result`
    has the fields of its result.json; it is empty while the run is under way. Raises OSError or ValueError if a file is
    damaged."""
    saved, path = read_json(run_dir / "checkpoints/last/meta.json"), run_dir / ".hydra/config.yaml"
    config = saved.get("config") or (read_config(path) if path.exists() else {})
    commands = [as_typed(shlex.join(words)) for _, words in saved.get("commands", ())]
    versions = ", ".join(f"{name} {version}" for name, version in saved.get("versions", {}).items())
    return _report(run_dir, commands, config, result, {"versions": versions} if versions else {})


def _report(
    run_dir: Path, commands: Sequence[str], config: Config, result: Mapping[str, Any], made: Mapping[str, str],
    tasks: Sequence[ShownTask] = (), learned: tuple[Adapt, Params] | None = None,
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
    query = tasks[0].episode.query if tasks else None
    curve = query is not None and query.x.shape[2:] == (1,) and query.y.is_floating_point()
    validated = f"{describe(dict(val))}, after step {val['step']}" if val else "-"
    about = {
        f"{'best' if result else 'latest'} validation": validated,
        "steps": f"{result.get('steps', last):,}", "time": "-" if seconds is None else duration(seconds),
        "workers": result.get("workers", "-"), "seed": result.get("seed", config.get("seed", "-")),
        "list of test tasks": (test or {}).get("task_list", "-"),
    }  # fmt: skip
    norms = [(row["step"], row["gradient_norm"]) for row in rows if (row.get("gradient_norm") or 0) > 0]
    gradient = chart(
        "Norm of the meta-gradient", [Line("meta-gradient", norms)], x="meta-step", y="norm", whole=True,
        logarithmic=True,
    )  # fmt: skip
    curves = [*(learning_charts(rows) if rows else ()), *(_inner_steps(test, config) if test else ())]
    return page(
        "run.html", title=" / ".join(run_dir.parts[-2:]), value=value, words=words, about=about,
        curves=[*curves, *(position_charts(test) if test else ())],
        episodes=[_episode(task) for task in tasks] if pictures else [],
        fits=[adaptation_chart(task.name, *learned, task.episode) for task in tasks] if learned and curve else [],
        costs=COSTS, workers=[list(costs.values()) for costs in costs_of(rows)], gradient=gradient,
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
    points = [(step, test["by_step"][str(step)]) for step in steps]
    intervals = [test["ci95_by_step"][str(step)] for step in steps]
    line = Line(f"test after {steps[0]} to {steps[-1]} inner steps, with 95% intervals", points, intervals, "dots")
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

    def name_of(label: int) -> str:
        return task.classes[label] if label < len(task.classes) else f"class {label}"

    classes = []
    for label, learned, asked in shown_classes(task.episode):
        name = name_of(label)
        tiles = [Tile(picture_of(support.x[0, at]), f"{name}, learned from", "learned") for at in learned]
        for at in asked:
            right, answer = predicted[at] == label, name_of(predicted[at])
            words = "" if right else f"as {answer}"
            tiles.append(Tile(picture_of(query.x[0, at]), f"{name}, predicted as {answer}", words, right))
        classes.append((name, tiles))
    return {"title": f"{task.name}: {wrong} of {len(predicted)} queries wrong", "classes": classes}
