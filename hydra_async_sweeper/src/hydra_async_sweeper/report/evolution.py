"""Plots of populations: islands and their exchanges; members, their rounds and what they take over."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hydra_async_sweeper.islands import Exchange
from hydra_async_sweeper.population import lineage
from hydra_async_sweeper.ranking import losses_of
from hydra_async_sweeper.report.figures import (
    FinishedTrials,
    best_so_far,
    legend_below,
    new_figure,
    number_places,
    say,
    scale,
    title,
    wrapped,
)
from hydra_async_sweeper.report.parallel import inner_ticks
from hydra_async_sweeper.report.words import number_text
from hydra_async_sweeper.space import Number, Space
from hydra_async_sweeper.terms import FinishedTrial


def islands_plot(ended: FinishedTrials, exchanges: Sequence[Exchange], islands: int) -> Any:
    """The best trial of each island over time, and what the islands sent to each other."""
    lanes = 0.8 + 0.32 * islands
    figure = new_figure(9.5, 4.8 + lanes)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3.6, lanes])
    places, last = ended.places(), len(ended.trials) + 0.5
    for island in range(islands):
        colour, line = f"C{island % 10}", ("-", "--", ":")[island // 10 % 3]
        own = [trial for trial in ended.completed() if trial.number % islands == island]
        steps = best_so_far(own, 0, ended.directions[0])
        x, y = [places[trial.number] for trial, _ in steps], [value for _, value in steps]
        if steps:
            top.plot(
                [*x, last], [*y, y[-1]], drawstyle="steps-post", color=colour, ls=line, lw=1.6, alpha=0.9,
                label=f"island {island}",
            )  # fmt: skip
            top.plot(x, y, ".", color=colour, ms=5)
        bred = [places[trial.number] for trial in own]
        bottom.scatter(bred, [island] * len(bred), s=16, color=colour, zorder=3)
        bottom.scatter(x, [island] * len(x), s=46, facecolors="none", edgecolors=colour, zorder=3)
    if not ended.completed():
        say(top, "no completed trial has a value yet")
    scale(top.yaxis, ended.values(0), ended.directions[0])
    top.set_ylabel(ended.axis_name(0))
    top.grid(alpha=0.25)
    gains = _draw_exchanges(bottom, ended, exchanges, islands)
    bottom.set_yticks(range(islands), [f"island {island}" for island in range(islands)])
    bottom.set_ylim(islands - 0.5, -0.5)
    number_places(bottom, len(places))
    others = "grey" if len(exchanges) <= _MANY_EXCHANGES else "not shown"
    bottom.set_xlabel(
        "trials in the order in which they ended; ring: a new best of its island\n"
        f"coloured arrow: an exchange that gives its target a better trial than all it had "
        f"({gains} of {len(exchanges)}; the others: {others})"
        if exchanges
        else "trials in the order in which they ended; ring: a new best of its island"
    )
    bottom.grid(alpha=0.25, axis="x")
    title(figure, "Best trial of each island", ended)
    legend_below(figure, [top])
    return figure


_MANY_EXCHANGES = 100


def _draw_exchanges(axes: Any, ended: FinishedTrials, exchanges: Sequence[Exchange], islands: int) -> int:
    """An arrow for each exchange that gives its target a better trial than all it had, in the colour of its source.
    The others are grey, and left out where there are many. Returns how many gave such a trial."""
    after: dict[int, list[Exchange]] = {}
    for exchange in exchanges:
        after.setdefault(exchange.told, []).append(exchange)
    losses = {trial.number: (losses_of(trial, ended.directions) or (math.inf,))[0] for trial in ended.trials}
    best = [math.inf] * islands
    gains = 0
    for place, trial in enumerate(ended.trials, 1):
        home = trial.number % islands
        best[home] = min(best[home], losses[trial.number])
        for exchange in after.get(trial.told, ()):
            sent = min((losses.get(number, math.inf) for number in exchange.numbers), default=math.inf)
            if sent < best[exchange.target]:
                best[exchange.target] = sent
                gains += 1
                _arrow(axes, place, exchange, lw=1.2, color=f"C{exchange.source % 10}", zorder=2)
            elif len(exchanges) <= _MANY_EXCHANGES:
                _arrow(axes, place, exchange, lw=0.7, color="#D0D0D0", zorder=1)
    return gains


def _arrow(axes: Any, place: int, exchange: Exchange, **style: Any) -> None:
    down = exchange.target > exchange.source
    tip = exchange.target + (-0.14 if down else 0.14)
    axes.plot([place, place], [exchange.source, tip], **style)
    axes.plot(place, tip, marker="v" if down else "^", ms=4, **style)


def population_plot(ended: FinishedTrials, space: Space) -> Any:
    """The value of each member, and the numbers that it trains with, against the rounds; the winner's lineage bold."""
    numbers = {key: dimension for key, dimension in space.items() if isinstance(dimension, Number)}
    heights = [3.4] + [1.5] * len(numbers)
    figure = new_figure(9.0, 1.0 + sum(heights))
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    trials = {trial.number: trial for trial in ended.trials}
    best = ended.best()
    chain = lineage(best[0].number, {number: trial.parent for number, trial in trials.items()}) if best else []
    members = ended.lanes.size
    values = {number: trial.values[0] for number, trial in trials.items() if trial.values}
    _draw_members(panels[0], trials, chain, members, values)
    if not ended.completed():
        say(panels[0], "no completed trial has a value yet")
    scale(panels[0].yaxis, ended.values(0), ended.directions[0])
    panels[0].set_ylabel(ended.axis_name(0))
    for axes, (key, number) in zip(panels[1:], numbers.items(), strict=True):
        _draw_members(axes, trials, chain, members, {n: trial.params.get(key) for n, trial in trials.items()})
        if number.log:
            _draw_log_axis(axes, [float(trial.params[key]) for trial in trials.values()])
        axes.set_ylabel(wrapped(key, 19), fontsize=8.5)
    for axes in panels:
        axes.grid(alpha=0.25)
    panels[-1].set_xticks(range(1 + max((number // members for number in trials), default=0)))
    panels[-1].set_xlabel("round; dotted: a member takes over checkpoint and parameters of another")
    title(figure, "Value of each member after each round", ended)
    legend_below(figure, panels[:1])
    return figure


def _draw_log_axis(axes: Any, values: Sequence[float]) -> None:
    from matplotlib.ticker import NullFormatter

    low, high = min(values), max(values)
    ticks = inner_ticks(low, high, log=True, whole=False) or [low, high]
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(ticks, [number_text(tick) for tick in ticks], fontsize=8)


def _draw_members(
    axes: Any, trials: Mapping[int, FinishedTrial], chain: Sequence[int], members: int, values: Mapping[int, Any]
) -> None:
    """A line for each member, dotted where it takes over from another."""
    points = {n: (n // members, value) for n, value in values.items() if isinstance(value, int | float)}
    for member in range(members):
        own = [points[number] for number in sorted(points) if number % members == member]
        if own:
            x, y = zip(*own, strict=True)
            axes.plot(x, y, ".", ms=7, color=f"C{member % 10}", label=f"member {member}")
    for number in sorted(points):
        parent = trials[number].parent
        if parent is not None and parent in points:
            taken = parent % members != number % members
            x, y = zip(points[parent], points[number], strict=True)
            axes.plot(x, y, ":" if taken else "-", lw=1.0, alpha=0.8, color=f"C{number % members % 10}")
    winner = [points[number] for number in chain if number in points]
    if winner:
        x, y = zip(*winner, strict=True)
        axes.plot(x, y, color="black", lw=2.6, alpha=0.35, label="the winner's lineage", zorder=1)
