"""The figures of one run, drawn from metrics.jsonl, from its result and from single tasks."""

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metalearn.runs.metrics import METRIC_NAMES, main_metric
from metalearn.storage.files import lines_of

if TYPE_CHECKING:
    from metalearn.types import Adapt, Episode, Params

ADAPTATION_STEPS = (1, 10)

METRICS = "metrics.jsonl"
"""The file of a run folder with a line for each logged step."""

Row = dict[str, Any]

COSTS = {"data": "#E69F00", "compute": "#0072B2", "waiting": "#BBBBBB", "communication": "#D55E00", "update": "#009E73"}
"""The costs of a worker's step, in seconds, and their colours."""

_COST = re.compile(r"worker(\d+)/(compute|waiting|communication)_seconds")


def rows_of(run_dir: Path) -> Iterator[Row]:
    """The complete lines of metrics.jsonl: a running program may be writing the last one.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: a line is no JSON object.
    """
    if not (run_dir / METRICS).exists():
        raise FileNotFoundError(f"{run_dir}: holds no {METRICS}; type the folder of a run that has begun")
    for line in lines_of(run_dir / METRICS):
        if line.endswith(b"\n"):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{run_dir / METRICS}: has a line that is no JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{run_dir / METRICS}: has a line that is no JSON object")
            yield row


def learning_figure(rows: Sequence[Row]) -> Any:
    """Loss and main metric against the meta-step; the metric's validations have their 95% intervals."""
    metric = main_metric({name for row in rows for name in row})
    figure, (left, right) = new_axes(11, 4, columns=2)
    for axes, name in ((left, "loss"), (right, metric)):
        known = [row for row in rows if row[name] is not None]
        train = [(row["step"], row[name]) for row in known if row["split"] == "train"]
        axes.plot(*zip(*train, strict=True), color="C0", linewidth=0.8, alpha=0.7, label="training") if train else None
        val = [(row["step"], row[name], row["ci95"] or 0) for row in known if row["split"] == "val"]
        if val:
            steps, values, intervals = zip(*val, strict=True)
            bars = intervals if name == metric else None
            axes.errorbar(steps, values, bars, color="C1", marker="o", markersize=3, capsize=2, label="validation")
        for row in (row for row in known if row["split"] == "test"):
            axes.axhline(row[name], color="C2", linestyle="--", label=f"test {_number(name, row[name])}")
        axes.set_xlabel("meta-step")
        axes.set_ylabel(f"query {METRIC_NAMES.get(name, name)}")
        axes.grid(alpha=0.3)
        axes.legend()
    if metric != "accuracy":
        right.set_yscale("log")
    return figure


def adaptation_figure(adapt: "Adapt", params: "Params", episode: "Episode") -> Any:
    """A one-dimensional regression task: the truth, and the prediction before and after adapting.

    Args:
        adapt: the algorithm's `adapt`.
        params: meta-parameters.
        episode: one task, whose query points show the truth.
    """
    (support, query) = episode
    x, order = query.x[0, :, 0].sort()
    figure, axes = new_axes(7, 4.5)
    axes.plot(x, query.y[0, order, 0], color="black", label="truth")
    for steps, style in zip((0, *ADAPTATION_STEPS), (":", "--", "-"), strict=True):
        predicted = adapt(params, support, steps)(query.x)[0, order, 0]
        label = "before" if steps == 0 else f"after {steps} step{'s' if steps > 1 else ''}"
        axes.plot(x, predicted, linestyle=style, label=label)
    axes.scatter(support.x[0, :, 0], support.y[0, :, 0], color="black", marker="^", zorder=3, label="support points")
    axes.set_xlabel("x")
    axes.set_ylabel("y")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def inner_steps_figure(test: Mapping[str, Any], metric: str) -> Any:
    """The test's metric after each inner step, with its 95% interval; from the fields of result.json."""
    figure, axes = new_axes(7, 3.6)
    steps = sorted(map(int, test["by_step"]))
    values = [test["by_step"][str(step)] for step in steps]
    intervals = [test["ci95_by_step"][str(step)] for step in steps]
    axes.errorbar(steps, values, intervals, color="C2", marker="o", markersize=4, capsize=3)
    axes.set_xlabel("inner step")
    axes.set_ylabel(f"test {METRIC_NAMES[metric]}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    return figure


def gradient_figure(rows: Sequence[Row]) -> Any:
    """The norm of the meta-gradient against the meta-step."""
    figure, axes = new_axes(7, 3.6)
    axes.plot(*zip(*gradient_norms(rows), strict=True), color="C3", linewidth=0.9)
    axes.set_yscale("log")
    axes.set_xlabel("meta-step")
    axes.set_ylabel("norm of the meta-gradient")
    axes.grid(alpha=0.3)
    return figure


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


def costs_figure(workers: Sequence[Mapping[str, float]]) -> Any:
    """A bar for each worker: where the time of a mean step went."""
    figure, axes = new_axes(9, 1.2 + 0.45 * len(workers))
    ends = [0.0] * len(workers)
    for name, colour in COSTS.items():
        widths = [1000 * worker[name] for worker in workers]
        axes.barh(range(len(workers)), widths, left=ends, color=colour, label=name, height=0.6)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.set_yticks(range(len(workers)), [f"worker {rank}" for rank in range(len(workers))])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a mean step")
    figure.legend(loc="outside upper center", ncols=len(COSTS), frameon=False, fontsize=9)
    return figure


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


def png_of(figure: Any) -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()
