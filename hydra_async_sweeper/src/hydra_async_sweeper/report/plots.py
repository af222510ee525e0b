"""The plots of a sweep."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra_async_sweeper.islands import Exchange
from hydra_async_sweeper.ranking import OUTCOMES, losses_of
from hydra_async_sweeper.report.evolution import islands_plot, population_plot
from hydra_async_sweeper.report.figures import (
    BLUE,
    GREEN,
    RED,
    STYLES,
    FinishedTrials,
    best_so_far,
    legend_below,
    new_figure,
    number_places,
    save,
    say,
    scale,
    title,
    wrapped,
)  # fmt: skip
from hydra_async_sweeper.report.parallel import parallel_plot
from hydra_async_sweeper.report.words import number_text
from hydra_async_sweeper.space import Space
from hydra_async_sweeper.terms import COMPLETED, ONE_LANE, PRUNED, FinishedTrial, Lanes


def draw(
    folder: Path,
    trials: Sequence[FinishedTrial],
    objectives: Sequence[str],
    directions: Sequence[str],
    space: Space,
    *,
    exchanges: Sequence[Exchange] = (),
    lanes: Lanes = ONE_LANE,
    importances: Mapping[str, float] | None = None,
) -> list[Path]:
    """Draws the plots of a sweep into folder/plots and returns their files.

    Args:
        folder: of the sweep.
        trials: all that have ended.
        objectives: their names.
        directions: `minimize` or `maximize` for each objective.
        space: what is searched.
        exchanges: between islands.
        lanes: the islands, or the members of a population.
        importances: of each parameter.
    """
    ended = FinishedTrials(
        sorted(trials, key=lambda t: (t.told, t.number)), tuple(objectives), tuple(directions), lanes
    )
    figures = {"history": _history(ended), "parallel": parallel_plot(ended, space)}
    if importances:
        figures["importance"] = _importance(importances, objectives[0])
    if len(objectives) == 2:
        figures["front"] = _front(ended)
    if lanes.by_round:
        figures["population"] = population_plot(ended, space)
    elif lanes.size > 1:
        figures["islands"] = islands_plot(ended, exchanges, lanes.size)
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    return [save(figure, folder / "plots" / f"{name}.png") for name, figure in figures.items()]


def _history(ended: FinishedTrials) -> Any:
    """The value of each trial against its place in time, and the best so far."""
    rows = len(ended.objectives)
    without = [outcome for outcome in OUTCOMES if any(_has_no_place(t) for t in ended.trials if t.outcome == outcome)]
    strip = 0.3 + 0.3 * len(without) if without else 0.0
    figure = new_figure(9.0, 0.9 + 3.6 * rows + strip)
    panels = figure.subplots(
        rows + bool(without), 1, sharex=True, squeeze=False,
        height_ratios=[3.6] * rows + ([strip] if without else []),
    )[:, 0]  # fmt: skip
    places = ended.places()
    for objective, axes in enumerate(panels[:rows]):
        _draw_history(axes, ended, objective, places)
    if without:
        _draw_strip(panels[-1], ended, without, places)
    number_places(panels[-1], len(places))
    panels[-1].set_xlabel("trials in the order in which they ended")
    title(figure, "Value of each trial", ended)
    legend_below(figure, panels[:rows])
    return figure


def _has_no_place(trial: FinishedTrial) -> bool:
    return trial.values is None or trial.outcome not in (COMPLETED, PRUNED)


def _draw_history(axes: Any, ended: FinishedTrials, objective: int, places: Mapping[int, int]) -> None:
    for outcome in (COMPLETED, PRUNED):
        points = [
            (places[trial.number], trial.values[objective])
            for trial in ended.trials
            if trial.outcome == outcome and trial.values is not None
        ]
        if points:
            marker, colour = STYLES[outcome]
            size = 34 if len(places) <= 60 else 16
            axes.scatter(*zip(*points, strict=True), s=size, marker=marker, color=colour, label=outcome, zorder=3)
    steps = best_so_far(ended.completed(), objective, ended.directions[objective])
    if steps:
        x = [places[trial.number] for trial, _ in steps]
        y = [value for _, value in steps]
        axes.plot(
            [*x, len(places) + 0.5], [*y, y[-1]], drawstyle="steps-post", color=GREEN, lw=1.6, label="best so far"
        )
        axes.set_title(f"best {number_text(y[-1])} (trial {steps[-1][0].number})", fontsize=9, loc="right", color=GREEN)
    else:
        say(axes, "no completed trial has a value yet")
    scale(axes.yaxis, [t.values[objective] for t in ended.trials if t.values], ended.directions[objective])
    axes.set_ylabel(ended.axis_name(objective))
    axes.grid(alpha=0.25)


def _draw_strip(axes: Any, ended: FinishedTrials, outcomes: Sequence[str], places: Mapping[int, int]) -> None:
    """Marks the trials that have no value."""
    for row, outcome in enumerate(outcomes):
        marker, colour = STYLES[outcome]
        x = [places[trial.number] for trial in ended.trials if trial.outcome == outcome and _has_no_place(trial)]
        axes.scatter(x, [row] * len(x), s=30, marker=marker, color=colour, linewidths=1.2)
    axes.set_yticks(range(len(outcomes)), outcomes)
    axes.set_ylim(len(outcomes) - 0.4, -0.6)
    axes.grid(alpha=0.25, axis="x")


def _importance(importances: Mapping[str, float], objective: str) -> Any:
    """A bar for each parameter, the most important on top."""
    ranked = sorted(importances.items(), key=lambda item: -item[1])
    figure = new_figure(8.0, 1.3 + 0.42 * len(ranked))
    axes = figure.subplots()
    bars = axes.barh(range(len(ranked)), [value for _, value in ranked], color=BLUE, height=0.65)
    axes.bar_label(bars, [f"{value:.1%}" for _, value in ranked], padding=4, fontsize=9)
    axes.set_yticks(range(len(ranked)), [wrapped(key, 36) for key, _ in ranked])
    axes.set_ylim(len(ranked) - 0.4, -0.6)
    axes.set_xlim(0, max(value for _, value in ranked) * 1.15 or 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("share of the importance (PED-ANOVA)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Importance of each parameter for\n{wrapped(objective, 60)}", fontsize=11)
    return figure


def _front(ended: FinishedTrials) -> Any:
    """Two objectives against each other, and the trials that no other one beats in both."""
    figure = new_figure(7.5, 6.0)
    axes = figure.subplots()
    x, y = ended.values(0), ended.values(1)
    if x:
        best = sorted(ended.best(), key=lambda trial: losses_of(trial, ended.directions) or ())
        corners = [trial.values for trial in best if trial.values]
        axes.scatter(x, y, s=26, color=BLUE, alpha=0.7, label="completed")
        scale(axes.xaxis, x, ended.directions[0])
        scale(axes.yaxis, y, ended.directions[1])
        style = {"color": RED, "lw": 1.4, "marker": "o", "ms": 6, "drawstyle": "steps-post", "zorder": 3}
        axes.plot(*zip(*corners, strict=True), label="Pareto front", **style)
        axes.margins(0.08)
        _name_points(figure, axes, best, ended.directions)
    else:
        say(axes, "no completed trial has a value yet")
        axes.set_xticks([])
    axes.set_xlabel(ended.axis_name(0))
    axes.set_ylabel(ended.axis_name(1))
    axes.grid(alpha=0.25)
    title(figure, "Pareto front", ended)
    legend_below(figure, [axes])
    return figure


def _name_points(figure: Any, axes: Any, best: Sequence[FinishedTrial], directions: Sequence[str]) -> None:
    """Writes the numbers of the front's trials on its free side, but none over another."""
    figure.draw_without_rendering()  # the layout decides where the points are
    right, up = (direction == "maximize" for direction in directions)
    style = {"ha": "left" if right else "right", "va": "bottom" if up else "top", "fontsize": 8, "color": RED}
    written: list[tuple[float, float]] = []
    for trial in best:
        x, y = axes.transData.transform(trial.values)
        if all(abs(x - a) > 30 or abs(y - b) > 14 for a, b in written):
            written.append((x, y))
            offset = (5 if right else -5, 3 if up else -3)
            axes.annotate(str(trial.number), trial.values, offset, textcoords="offset points", zorder=4, **style)
