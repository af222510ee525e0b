"""The figures of runs: as charts for pages, and as files of plots."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from metalearn.reporting.loggers import Row, rows_of
from metalearn.reporting.page import Chart, Line, chart, new_figure, percent, save
from metalearn.runs.metrics import METRIC_NAMES, main_metric

if TYPE_CHECKING:
    from torch import Tensor

    from metalearn.types import Adapt, Episode, Params


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
            whole=True, logarithmic=name not in ("loss", "accuracy"),
        )  # fmt: skip
        charts.append(drawn)
    return charts


def adaptation_chart(name: str, adapt: "Adapt", params: "Params", episode: "Episode") -> Chart:
    """A one-dimensional regression task: the truth, which its query points show, the prediction before and after
    adapting, and the support points."""
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


_LONGER = 10  # the axes of minutes and steps are logarithmic if one run is this many times as long as another
_LEGEND_WIDTH = 48  # characters in a line of the legend, which leave the plots their room
_BEST = 0.9999  # accuracies above are drawn as this one: their axis has no 100%


_ACCURACIES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999)
"""Ticks that stay apart on an axis of odds."""


class Curve(NamedTuple):
    """The validations of a run: the values of a metric, accuracy or mse, with the meta-step of each and, if they are
    known, the seconds of training and validation until then."""

    name: str
    metric: str
    steps: list[int]
    seconds: list[float] | None
    values: list[float]


def learning_curve(run_dir: Path) -> Path:
    """Draws loss and main metric against the meta-step, from metrics.jsonl to plots/learning_curve.png."""
    return save(learning_charts(list(rows_of(run_dir))), run_dir / "plots" / "learning_curve.png")


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


def bits_by_position(run_dir: Path, test: Mapping[str, Any]) -> None:
    """Draws the bits of documents by position, to plots/bits_by_position.png; of other tasks nothing."""
    if charts := position_charts(test):
        save(charts, run_dir / "plots" / "bits_by_position.png")


def adaptation(run_dir: Path, adapt: "Adapt", params: "Params", episode: "Episode") -> Path:
    """Draws a one-dimensional regression task before and after adapting, to plots/adaptation.png."""
    return save([adaptation_chart("", adapt, params, episode)], run_dir / "plots" / "adaptation.png")


def curve_of(run_dir: Path) -> Curve:
    """The validations in metrics.jsonl, without those that are not finite.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: the run has not been validated yet, or its metrics.jsonl has a line that is no JSON.
    """
    rows = [row for row in rows_of(run_dir) if row["split"] == "val"]
    if not rows:
        raise ValueError(f"{run_dir}: has not been validated yet; let it run for trainer.val_every steps")
    metric = main_metric(rows[0])
    timed = all("elapsed_seconds" in row for row in rows)
    rows = [row for row in rows if row[metric] is not None]
    seconds = [row["elapsed_seconds"] for row in rows] if timed else None
    return Curve(run_dir.name, metric, [row["step"] for row in rows], seconds, [row[metric] for row in rows])


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
        axes.xaxis.set_major_formatter("{x:,.10g}")


def comparison(curves: Sequence[Curve], path: Path) -> Path:
    """Draws the validations of several runs with the same metric, against wall-clock minutes and against meta-steps.

    The axis of accuracy is that of its odds: 98% to 99% is as far as 96% to 98%.
    """
    with new_figure(15, 5.5) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        accuracy = all(curve.metric == "accuracy" for curve in curves)
        for number, curve in enumerate(curves):
            heights = [min(max(value, 1 - _BEST), _BEST) for value in curve.values] if accuracy else curve.values
            style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3], "linewidth": 1.4}
            if curve.seconds is not None:
                left.plot([seconds / 60 for seconds in curve.seconds], heights, marker=".", **style)
            label = textwrap.fill(curve.name, _LEGEND_WIDTH)
            right.plot(curve.steps, heights, marker=".", label=label, **style)
        left.set_xlabel("minutes of training and validation")
        right.set_xlabel("meta-steps")
        left.set_ylabel("validation: " + " or ".join(dict.fromkeys(METRIC_NAMES[curve.metric] for curve in curves)))
        left.set_yscale("logit" if accuracy else "log")  # shows the last small differences
        if accuracy:
            low, high = left.get_ylim()
            ticks = [tick for tick in _ACCURACIES if low <= tick <= high]
            if len(ticks) > 2:  # else matplotlib finds closer ones
                left.set_yticks(ticks)
                left.minorticks_off()
            for set_formatter in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
                set_formatter(percent)
        for axes in (left, right):
            _spread_out(axes)
            axes.grid(alpha=0.3)
        figure.legend(*right.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
        figure.savefig(path, format="png", dpi=120)
    return path
