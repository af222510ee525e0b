"""The figures of a run, from metrics.jsonl and from single tasks, as charts."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from metalearn.reporting.charts import Chart, Line, chart
from metalearn.reporting.loggers.to_jsonl import Row
from metalearn.runs.metrics import METRIC_NAMES, main_metric

if TYPE_CHECKING:
    from torch import Tensor

    from metalearn.types import Adapt, Episode, Params

ADAPTATION_STEPS = (1, 10)

COSTS = ("data", "compute", "waiting", "communication", "update")
"""The costs of a worker's step, in seconds."""

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
            whole=True, logarithmic=name not in ("loss", "accuracy"),
        )  # fmt: skip
        charts.append(drawn)
    return charts


def adaptation_chart(name: str, adapt: "Adapt", params: "Params", episode: "Episode") -> Chart:
    """A one-dimensional regression task: the truth, the prediction before and after adapting, and the support points.

    Args:
        name: of the task.
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
        label = "before" if steps == 0 else f"after {steps} inner step{'s' if steps > 1 else ''}"
        lines.append(line(label, adapt(params, support, steps)(query.x).detach(), "line" if steps > 1 else "dashes"))
    points = list(zip(support.x[0, :, 0].tolist(), support.y[0, :, 0].tolist(), strict=True))
    return chart(name, [*lines, Line("support points", points, (), "points")], x="x", y="y")


def gradient_chart(rows: Sequence[Row]) -> Chart:
    """The norm of the meta-gradient against the meta-step, of every line that has one above 0."""
    norms = [(row["step"], row["gradient_norm"]) for row in rows if (row.get("gradient_norm") or 0) > 0]
    lines = [Line("meta-gradient", norms)]
    return chart("Norm of the meta-gradient", lines, x="meta-step", y="norm", whole=True, logarithmic=True)


def costs_of(rows: Sequence[Row]) -> list[dict[str, float]]:
    """For each worker the mean seconds of a step by name, as in `COSTS`.

    The lines know the seconds of making episodes only as a sum over the workers: each one gets the mean. The update is
    that of rank zero.
    """
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
