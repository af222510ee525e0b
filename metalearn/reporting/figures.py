"""The figures of one run, drawn from metrics.jsonl, from its result and from single tasks."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metalearn.reporting.svg import Line
from metalearn.runs.metrics import METRIC_NAMES, main_metric

if TYPE_CHECKING:
    from torch import Tensor

    from metalearn.types import Adapt, Episode, Params

ADAPTATION_STEPS = (1, 10)

METRICS = "metrics.jsonl"
"""The file of a run folder with a line for each logged step."""

Row = dict[str, Any]

COSTS = ("data", "compute", "waiting", "communication", "update")
"""The costs of a worker's step, in seconds."""

_COST = re.compile(r"worker(\d+)/(compute|waiting|communication)_seconds")


def rows_of(run_dir: Path) -> Iterator[Row]:
    """The complete lines of metrics.jsonl: a running program may be writing the last one.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: a line is no JSON object.
    """
    if not (run_dir / METRICS).exists():
        raise FileNotFoundError(f"{run_dir}: holds no {METRICS}; type the folder of a run that has begun")
    with (run_dir / METRICS).open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{run_dir / METRICS}: has a line that is no JSON ({error})") from error
                if not isinstance(row, dict):
                    raise ValueError(f"{run_dir / METRICS}: has a line that is no JSON object")
                yield row


def learning_lines(rows: Sequence[Row], name: str) -> list[Line]:
    """A loss or metric against the meta-step: training, validations (a metric's with their 95% intervals), and the
    test."""
    known = [row for row in rows if row.get(name) is not None]
    train, val = ([row for row in known if row["split"] == split] for split in ("train", "val"))
    lines = [Line("training", [(row["step"], row[name]) for row in train])] if train else []
    if val:
        intervals = [] if name == "loss" else [row.get("ci95") or 0.0 for row in val]
        lines.append(Line("validation", [(row["step"], row[name]) for row in val], intervals, "dots"))
    ends = min((row["step"] for row in known), default=0), max((row["step"] for row in known), default=0)
    for row in (row for row in known if row["split"] == "test"):
        lines.append(Line(f"test {_number(name, row[name])}", [(end, row[name]) for end in ends], (), "dashes"))
    return lines


def adaptation_lines(adapt: "Adapt", params: "Params", episode: "Episode") -> list[Line]:
    """A one-dimensional regression task: the truth, the prediction before and after adapting, and the support points.

    Args:
        adapt: the algorithm's `adapt`.
        params: meta-parameters.
        episode: one task, whose query points show the truth.
    """
    (support, query) = episode
    x, order = query.x[0, :, 0].sort()

    def line(name: str, y: "Tensor", style: str = "line") -> Line:
        return Line(name, list(zip(x.tolist(), y[0, order, 0].tolist(), strict=True)), (), style)

    lines = [line("truth", query.y)]
    for steps in (0, *ADAPTATION_STEPS):
        name = "before" if steps == 0 else f"after {steps} inner step{'s' if steps > 1 else ''}"
        lines.append(line(name, adapt(params, support, steps)(query.x).detach(), "line" if steps > 1 else "dashes"))
    known = list(zip(support.x[0, :, 0].tolist(), support.y[0, :, 0].tolist(), strict=True))
    return [*lines, Line("support points", known, (), "points")]


def learning_figure(rows: Sequence[Row]) -> Any:
    """Loss and main metric against the meta-step."""
    metric = main_metric({name for row in rows for name in row})
    figure, (left, right) = new_axes(11, 4, columns=2)
    for axes, name in ((left, "loss"), (right, metric)):
        _draw(axes, learning_lines(rows, name), "meta-step", f"query {METRIC_NAMES.get(name, name)}")
    if metric != "accuracy":
        right.set_yscale("log")
    return figure


def adaptation_figure(adapt: "Adapt", params: "Params", episode: "Episode") -> Any:
    """What `adaptation_lines` gives."""
    figure, axes = new_axes(7, 4.5)
    _draw(axes, adaptation_lines(adapt, params, episode), "x", "y")
    return figure


_STYLES = {"line": "-", "dots": "o-", "dashes": "--", "points": "^"}


def _draw(axes: Any, lines: Sequence[Line], x: str, y: str) -> None:
    for line in lines:
        at, values = zip(*line.points, strict=True)
        axes.errorbar(at, values, line.intervals or None, fmt=_STYLES[line.style], markersize=3, label=line.name)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend()


def gradient_norms(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """The meta-step and the norm of the meta-gradient of every line that has one above 0."""
    return [(row["step"], row["gradient_norm"]) for row in rows if (row.get("gradient_norm") or 0) > 0]


def costs_of(rows: Sequence[Row]) -> list[dict[str, float]]:
    """For each worker the mean seconds of a step by name, as in `COSTS`.

    The lines know the seconds of making episodes only as a sum over the workers: each one gets the mean. The update is
    that of rank zero.
    """
    train = [row for row in rows if row["split"] == "train"]
    means: dict[int, dict[str, float]] = {}
    for name in {name for row in train for name in row}:
        if found := _COST.fullmatch(name):
            means.setdefault(int(found[1]), {})[found[2]] = _mean(train, name)
    data = _mean(train, "data_seconds") / max(len(means), 1)
    workers = []
    for rank, own in sorted(means.items()):
        making = min(data, own.get("compute", 0.0))  # compute includes it
        own["compute"] = own.get("compute", 0.0) - making
        own |= {"data": making, "update": _mean(train, "update_seconds") if rank == 0 else 0.0}
        workers.append({name: own.get(name, 0.0) for name in COSTS})
    return workers


def _mean(rows: Sequence[Row], name: str) -> float:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else 0.0


def _number(name: str, value: float) -> str:
    return f"{value:.2%}" if name == "accuracy" else f"{value:.3f}"


# Files


def new_axes(width: float, height: float, *, columns: int = 1, sharey: bool = False) -> tuple[Any, Any]:
    """A figure that needs no display and no global state, with its axes. matplotlib is imported here: it takes half a
    second, and only the rank that draws needs it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, sharey=sharey)


def save(figure: Any, path: Path) -> Path:
    """Writes a figure as PNG; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)
    return path
