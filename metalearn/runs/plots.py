"""Plots of a run: the learning curve, and the adaptation to a regression task."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from metalearn.files import lines_of

if TYPE_CHECKING:
    from metalearn.types import Adapt, Episode, Params

ADAPTATION_STEPS = (1, 10)

METRICS = "metrics.jsonl"
"""The file of a run folder with a line for each logged step."""


class Curve(NamedTuple):
    """The validations of a run: the values of a metric, accuracy or mse, with the meta-step of each and, if they are
    known, the seconds of training and validation until then."""

    name: str
    metric: str
    steps: list[int]
    seconds: list[float] | None
    values: list[float]


def curve_of(run_dir: Path) -> Curve:
    """The validations in metrics.jsonl, without those that are not finite.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: the run has not been validated yet, or its metrics.jsonl holds something else.
    """
    rows = [row for row in _rows_of(run_dir) if row.get("split") == "val"]
    if not rows:
        raise ValueError(f"{run_dir}: has not been validated yet; let it run for trainer.val_every steps")
    metric = "accuracy" if "accuracy" in rows[0] else "mse"
    timed = all("elapsed_seconds" in row for row in rows)
    try:
        rows = [row for row in rows if row[metric] is not None]
        return Curve(
            run_dir.name,
            metric,
            [int(row["step"]) for row in rows],
            [float(row["elapsed_seconds"]) for row in rows] if timed else None,
            [float(row[metric]) for row in rows],
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{run_dir / METRICS}: has a line without step and {metric} as numbers ({error!r})") from error


def _rows_of(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of metrics.jsonl: a running program may be writing the last one."""
    for line in lines_of(run_dir / METRICS):
        if line.endswith(b"\n"):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{run_dir / METRICS}: has a line that is no JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{run_dir / METRICS}: has a line that is no JSON object")
            yield row


def comparison(curves: Sequence[Curve], path: Path) -> Path:
    """Draws the validations of several runs with the same metric, against wall-clock minutes and against meta-steps.

    The axis of accuracy has its distance from 100%, on a logarithmic scale: 98% to 99% is as far as 96% to 98%.
    """
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(13, 5.5), layout="constrained", sharey=True)
    accuracy = all(curve.metric == "accuracy" for curve in curves)
    for number, curve in enumerate(curves):
        heights = [_error(value) for value in curve.values] if accuracy else curve.values
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3], "linewidth": 1.4}
        if curve.seconds is not None:
            left.plot([seconds / 60 for seconds in curve.seconds], heights, marker=".", **style)
        right.plot(curve.steps, heights, marker=".", label=curve.name, **style)
    left.set_xlabel("minutes of training and validation")
    right.set_xlabel("meta-steps")
    left.set_yscale("log")
    left.set_ylabel("validation accuracy" if accuracy else "validation: mean squared error")
    if accuracy:
        _name_accuracies(left, [value for curve in curves for value in curve.values])
    for axes in (left, right):
        axes.grid(alpha=0.3)
    right.legend(fontsize="small")
    return _save(figure, path)


_ACCURACIES = (0.0, 0.2, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.985, 0.99, 0.995, 0.998, 0.9999)


def _error(accuracy: float) -> float:
    """The distance from 100%, and never 0: a logarithmic axis has no 0."""
    return max(1 - accuracy, 1 - _ACCURACIES[-1])


def _name_accuracies(axes: Any, values: Sequence[float]) -> None:
    """Turns an axis of errors into one of accuracies, with ticks from just below the values to just above them."""
    low = max((tick for tick in _ACCURACIES if tick <= min(values)), default=0.0)
    high = min((tick for tick in _ACCURACIES if tick >= max(values)), default=_ACCURACIES[-1])
    ticks = [tick for tick in _ACCURACIES if low <= tick <= high]
    axes.set_yticks([_error(tick) for tick in ticks], [f"{tick:.1%}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(_error(low) * 1.02, _error(high) * 0.98)


def learning_curve(run_dir: Path) -> Path:
    """Draws loss and main metric against the meta-step, from metrics.jsonl to plots/learning_curve.png."""
    rows = list(_rows_of(run_dir))
    metric = "accuracy" if any("accuracy" in row for row in rows) else "mse"
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(11, 4), layout="constrained")
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
            axes.axhline(row[name], color="C2", linestyle="--", label=f"test {_figure(name, row[name])}")
        axes.set_xlabel("meta-step")
        axes.set_ylabel("query " + {"loss": "loss", "accuracy": "accuracy", "mse": "mean squared error"}[name])
        axes.grid(alpha=0.3)
        axes.legend()
    if metric == "mse":
        right.set_yscale("log")
    return _save(figure, run_dir / "plots" / "learning_curve.png")


def adaptation(run_dir: Path, adapt: "Adapt", params: "Params", episode: "Episode") -> Path:
    """Draws a one-dimensional regression task: the truth, and the prediction before and after adapting.

    Args:
        run_dir: the plot goes to plots/adaptation.png in it.
        adapt: the algorithm's `adapt`.
        params: meta-parameters.
        episode: one task, whose query points show the truth.
    """
    (support, query) = episode
    x, order = query.x[0, :, 0].sort()
    figure, axes = _pyplot().subplots(figsize=(7, 4.5), layout="constrained")
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
    return _save(figure, run_dir / "plots" / "adaptation.png")


def _figure(name: str, value: float) -> str:
    return f"{value:.2%}" if name == "accuracy" else f"{value:.3f}"


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    _pyplot().close(figure)
    return path


def _pyplot() -> Any:
    """pyplot, imported here: it takes most of a second, and only the rank that draws needs it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
