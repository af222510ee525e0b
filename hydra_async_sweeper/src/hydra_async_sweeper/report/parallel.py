"""Parallel coordinates: a line for each trial through its parameters and values."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hydra_async_sweeper.ranking import losses_of
from hydra_async_sweeper.report.figures import (
    GREY,
    RED,
    FinishedTrials,
    is_wide,
    legend_below,
    new_figure,
    say,
    shortened,
    title,
    wrapped,
)
from hydra_async_sweeper.report.words import number_text
from hydra_async_sweeper.space import Dimension, Number, Space, Value
from hydra_async_sweeper.terms import COMPLETED, FinishedTrial


class _Axis(NamedTuple):
    """An axis of the parallel coordinates: its name, its ticks, and from a value to its height, if it has one.

    Lines that share an option of a category are drawn up to `spread` apart.
    """

    label: str
    ticks: list[tuple[float, str]]
    height: Callable[[Value | None], float | None]
    spread: float = 0.0


def parallel_plot(ended: FinishedTrials, space: Space) -> Any:
    """A line for each trial through its parameters and values, in the colour of its place among the first values."""
    from matplotlib.collections import LineCollection

    goals = [_goal_axis(ended, objective) for objective in range(len(ended.objectives))]
    axes_ = [_axis(name, dimension) for name, dimension in space.items()] + goals
    figure = new_figure(max(6.4, 1.6 * len(axes_) + 0.8), 5.6)
    axes = figure.subplots()
    _draw_axes(axes, axes_)
    ranks = _ranks(ended)
    lines = {trial.number: _line(trial, space, axes_) for trial in ended.trials}
    others = [lines[trial.number] for trial in ended.trials if trial.number not in ranks and lines[trial.number]]
    ranked = sorted(ranks, key=lambda number: -ranks[number])  # the best are drawn last
    best = [trial.number for trial in ended.best()]
    label: dict[str, Any] = {"label": "no final value"} if others else {}
    axes.add_collection(LineCollection(others, colors=GREY, linewidths=0.8, linestyles="--", alpha=0.6, **label))
    width, alpha = (1.6, 0.9) if len(ranked) <= 30 else (1.0, 0.65)
    coloured = LineCollection([lines[n] for n in ranked], cmap="viridis", linewidths=width, alpha=alpha)
    coloured.set_array([ranks[n] for n in ranked])
    coloured.set_clim(0, 1.05)  # the lightest yellow is hard to see
    axes.add_collection(coloured)
    if len(best) == 1:
        axes.plot(*zip(*lines[best[0]], strict=True), color=RED, lw=2.6, label=f"best: trial {best[0]}")
    else:
        edges: dict[str, Any] = {"label": f"Pareto front ({len(best)} trials)"} if best else {}
        axes.add_collection(LineCollection([lines[n] for n in best], colors=RED, linewidths=1.8, **edges))
    if ranks:
        _draw_colours(axes, ended, len(space), goals[0], ranks)
    else:
        say(axes, "no completed trial has a value yet")
    title(figure, f"Parameters and values\ncolour: {shortened(ended.objectives[0], 40)}, dark is better", ended)
    legend_below(figure, [axes])
    return figure


def _draw_axes(axes: Any, lines: Sequence[_Axis]) -> None:
    for x, line in enumerate(lines):
        axes.axvline(x, color="#555555", lw=1.0, zorder=2.5)
        for height, text in line.ticks:
            axes.plot([x, x + 0.03], [height, height], color="#555555", lw=1.0, zorder=2.5)
            box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.6}
            axes.text(x + 0.05, height, text, fontsize=7.5, va="center", zorder=4, bbox=box)
    axes.set_xticks(range(len(lines)), [line.label for line in lines], fontsize=8.5)
    axes.tick_params(length=0)
    axes.set_yticks([])
    axes.set_xlim(-0.12, len(lines) - 1 + 0.55)
    axes.set_ylim(-0.05, 1.05)
    axes.spines[:].set_visible(False)


def _draw_colours(axes: Any, ended: FinishedTrials, x: int, goal: _Axis, ranks: Mapping[int, float]) -> None:
    """Colours the axis of the first objective as the lines are."""
    from matplotlib.collections import LineCollection

    known = sorted(
        {(goal.height(t.values[0]) or 0.0, ranks[t.number]) for t in ended.completed() if t.values is not None}
    )
    pieces = 100
    middles = [(piece + 0.5) / pieces for piece in range(pieces)]
    colours = [min(known, key=lambda pair: abs(pair[0] - middle))[1] for middle in middles]
    parts = [[(x, piece / pieces), (x, (piece + 1) / pieces)] for piece in range(pieces)]
    strip = LineCollection(parts, cmap="viridis", linewidths=7, zorder=2.6)
    strip.set_array(colours)
    strip.set_clim(0, 1.05)
    axes.add_collection(strip)


def _ranks(ended: FinishedTrials) -> dict[int, float]:
    """The place of each completed trial among the different values of the first objective: 0 the best, 1 the worst."""
    losses = {trial.number: (losses_of(trial, ended.directions) or (0.0,))[0] for trial in ended.completed()}
    order = {loss: rank for rank, loss in enumerate(sorted(set(losses.values())))}
    return {number: order[loss] / max(1, len(order) - 1) for number, loss in losses.items()}


def _line(trial: FinishedTrial, space: Space, axes: Sequence[_Axis]) -> list[tuple[float, float]]:
    """The points of a trial's line."""
    goals = (trial.values or ()) if trial.outcome == COMPLETED else ()
    values: list[Value | None] = [*(trial.params.get(key) for key in space), *goals]
    shift = (trial.number * 0.618034) % 1 - 0.5
    heights = [axis.height(value) for value, axis in zip(values, axes, strict=False)]
    return [(x, height + shift * axes[x].spread) for x, height in enumerate(heights) if height is not None]


def _axis(name: str, dimension: Dimension) -> _Axis:
    if isinstance(dimension, Number):
        return _number_axis(name, dimension.low, dimension.high, dimension.log, dimension.whole)
    heights = {
        option: 0.5 if len(dimension.options) == 1 else at / (len(dimension.options) - 1)
        for at, option in enumerate(dimension.options)
    }
    every = math.ceil(len(heights) / 16)
    ticks = [(height, shortened(option, 16)) for option, height in heights.items()][::every]
    spread = min(0.06, 0.5 / len(heights))
    return _Axis(wrapped(name, 19), ticks, lambda value: heights.get(str(value)), spread)


def _goal_axis(ended: FinishedTrials, objective: int) -> _Axis:
    name, values = ended.objectives[objective], ended.values(objective)
    if not values:
        return _Axis(wrapped(name, 19), [], lambda value: None)
    return _number_axis(name, min(values), max(values), is_wide(values, ended.directions[objective]))


def _number_axis(name: str, low: float, high: float, log: bool, whole: bool = False) -> _Axis:
    def height(value: Value | None) -> float | None:
        if not isinstance(value, int | float) or (log and value <= 0):
            return None
        if low == high:
            return 0.5
        if log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    inner = [(height(tick) or 0.0, number_text(tick)) for tick in inner_ticks(low, high, log, whole)]
    outer = [(0.5, number_text(low))] if low == high else [(0.0, number_text(low)), (1.0, number_text(high))]
    label = wrapped(name, 19) + ("\n(log)" if log else "")
    return _Axis(label, [*outer, *(tick for tick in inner if 0.06 < tick[0] < 0.94)], height)


def inner_ticks(low: float, high: float, log: bool, whole: bool) -> list[float]:
    """Round numbers between two ends."""
    if low == high:
        return []
    if not log:
        from matplotlib.ticker import MaxNLocator

        return [float(tick) for tick in MaxNLocator(5, integer=whole).tick_values(low, high) if low < tick < high]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1,) if len(decades) > 4 else (1, 2, 5) if len(decades) > 2 else (1, 1.5, 2, 3, 5, 7)
    ticks = [float(f"{digit}e{decade}") for decade in decades for digit in digits]
    ticks = [tick for tick in ticks if low < tick < high]
    return ticks[:: math.ceil(len(ticks) / 9) or 1]
