"""Plots of runs as files: the learning curve, the adaptation to a regression task, and a comparison of runs."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from metalearn.reporting.figures import METRICS, adaptation_figure, learning_figure, new_axes, rows_of, save
from metalearn.runs.metrics import METRIC_NAMES, main_metric

if TYPE_CHECKING:
    from metalearn.types import Adapt, Episode, Params


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
    rows = [row for row in rows_of(run_dir) if row.get("split") == "val"]
    if not rows:
        raise ValueError(f"{run_dir}: has not been validated yet; let it run for trainer.val_every steps")
    metric = main_metric(rows[0])
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


def comparison(curves: Sequence[Curve], path: Path) -> Path:
    """Draws the validations of several runs with the same metric, against wall-clock minutes and against meta-steps.

    The axis of accuracy has its distance from 100%, on a logarithmic scale: 98% to 99% is as far as 96% to 98%. The
    axes of minutes and steps are logarithmic if one run is ten times as long as another.
    """
    figure, (left, right) = new_axes(15, 5.5, columns=2, sharey=True)
    accuracy = all(curve.metric == "accuracy" for curve in curves)
    for number, curve in enumerate(curves):
        heights = [_error(value) for value in curve.values] if accuracy else curve.values
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3], "linewidth": 1.4}
        if curve.seconds is not None:
            left.plot([seconds / 60 for seconds in curve.seconds], heights, marker=".", **style)
        right.plot(curve.steps, heights, marker=".", label=_folded(curve.name), **style)
    left.set_xlabel("minutes of training and validation")
    right.set_xlabel("meta-steps")
    left.set_yscale("log")
    left.set_ylabel("validation: " + " or ".join(dict.fromkeys(METRIC_NAMES[curve.metric] for curve in curves)))
    if accuracy:
        _name_accuracies(left, [value for curve in curves for value in curve.values])
    for axes in (left, right):
        _spread_out(axes)
        axes.grid(alpha=0.3)
    figure.legend(*right.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return save(figure, path)


def _spread_out(axes: Any) -> None:
    """Turns the horizontal axis into a logarithmic one, linear near 0, if a line of it is `_LONGER` than another."""
    lines = [sorted(x for x in line.get_xdata() if x > 0) for line in axes.get_lines()]
    ends = [line[-1] for line in lines if line]
    if ends and max(ends) >= _LONGER * min(ends):
        first = min(line[0] for line in lines if line)
        axes.set_xscale("symlog", linthresh=first, linscale=0.3)
        axes.set_xlim(left=0)
        # A power of ten in the linear part would touch the 0.
        axes.set_xticks([0, *(tick for tick in axes.get_xticks() if first <= tick <= max(ends))])
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.10g}")


def _folded(name: str) -> str:
    """A name in lines that leave the plots their room."""
    return textwrap.fill(name, _LEGEND_WIDTH, break_long_words=True)


_LONGER = 10

_LEGEND_WIDTH = 48
"""Characters in a line of the legend."""


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
    return save(learning_figure(list(rows_of(run_dir))), run_dir / "plots" / "learning_curve.png")


def adaptation(run_dir: Path, adapt: "Adapt", params: "Params", episode: "Episode") -> Path:
    """Draws a one-dimensional regression task before and after adapting, to plots/adaptation.png."""
    return save(adaptation_figure(adapt, params, episode), run_dir / "plots" / "adaptation.png")
