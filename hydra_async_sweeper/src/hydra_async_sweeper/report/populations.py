"""Plots of populations: islands and their exchanges; members, their rounds and what they take over."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra_async_sweeper.islands import Exchange
from hydra_async_sweeper.population import lineage
from hydra_async_sweeper.ranking import OUTCOMES, FinishedTrials, losses_of
from hydra_async_sweeper.report.view import count_text
from hydra_async_sweeper.space import Number, Space
from hydra_async_sweeper.terms import FinishedTrial

_MANY_EXCHANGES = 100
"""With more of them, those that change nothing are not drawn."""


def islands_plot(ended: FinishedTrials, exchanges: Sequence[Exchange]) -> Any:
    """The best trial of each island over time, and what the islands sent to each other."""
    from matplotlib.ticker import MaxNLocator

    islands = ended.lanes.size
    height = 0.8 + 0.32 * islands
    figure, (top, bottom) = _panels(9.5, [3.6, height], ended, "Best trial of each island")
    places, last = ended.places(), len(ended.trials) + 0.5
    for island in range(islands):
        colour, line = f"C{island % 10}", ("-", "--", ":")[island // 10 % 3]
        own = [trial for trial in ended.completed() if trial.number % islands == island]
        steps = best_so_far(own, ended.directions[0])
        x, y = [places[trial.number] for trial, _ in steps], [value for _, value in steps]
        if steps:
            style = {"drawstyle": "steps-post", "color": colour, "ls": line, "lw": 1.6, "alpha": 0.9}
            top.plot([*x, last], [*y, y[-1]], label=f"island {island}", **style)
            top.plot(x, y, ".", color=colour, ms=5)
        bred = [places[trial.number] for trial in own]
        bottom.scatter(bred, [island] * len(bred), s=16, color=colour, zorder=3)
        bottom.scatter(x, [island] * len(x), s=46, facecolors="none", edgecolors=colour, zorder=3)
    gains = _draw_exchanges(bottom, ended, exchanges)
    bottom.set_yticks(range(islands), [f"island {island}" for island in range(islands)])
    bottom.set_ylim(islands - 0.5, -0.5)
    bottom.set_xlim(0.5, max(len(places), 1) + 0.5)
    bottom.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    others = "grey" if len(exchanges) <= _MANY_EXCHANGES else "not shown"
    arrows = (
        "\ncoloured arrow: an exchange that gives its target a better trial than all it had "
        f"({gains} of {len(exchanges)}; the others: {others})"
    )
    bottom.set_xlabel(
        f"trials in the order in which they ended; ring: a new best of its island{arrows if exchanges else ''}"
    )
    _legend_below(figure, top)
    return figure


def _draw_exchanges(axes: Any, ended: FinishedTrials, exchanges: Sequence[Exchange]) -> int:
    """An arrow for each exchange that gives its target a better trial than all it had, in the colour of its source.
    The others are grey, and left out where there are many. Returns how many gave such a trial."""
    after: dict[int, list[Exchange]] = {}
    for exchange in exchanges:
        after.setdefault(exchange.told, []).append(exchange)
    losses = {trial.number: (losses_of(trial, ended.directions) or (math.inf,))[0] for trial in ended.trials}
    best = [math.inf] * ended.lanes.size
    gains = 0
    for place, trial in enumerate(ended.trials, 1):
        home = trial.number % ended.lanes.size
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
    figure, panels = _panels(9.0, [3.4] + [1.5] * len(numbers), ended, "Value of each member after each round")
    trials = {trial.number: trial for trial in ended.trials}
    best = ended.best()
    chain = lineage(best[0].number, {number: trial.parent for number, trial in trials.items()}) if best else []
    members = ended.lanes.size
    values = {number: trial.values[0] for number, trial in trials.items() if trial.values}
    _draw_members(panels[0], trials, chain, members, values)
    for axes, (key, number) in zip(panels[1:], numbers.items(), strict=True):
        _draw_members(axes, trials, chain, members, {n: trial.params.get(key) for n, trial in trials.items()})
        if number.log:
            axes.set_yscale("log")
        axes.set_ylabel(_escaped(key.replace(".", ".\n")), fontsize=8.5)
    panels[-1].set_xticks(range(1 + max((number // members for number in trials), default=0)))
    panels[-1].set_xlabel("round; dotted: a member takes over checkpoint and parameters of another")
    _legend_below(figure, panels[0])
    return figure


def _draw_members(
    axes: Any, trials: Mapping[int, FinishedTrial], chain: Sequence[int], members: int, values: Mapping[int, Any]
) -> None:
    """A line for each member, dotted where it takes over from another."""
    points = {n: (n // members, value) for n, value in values.items() if isinstance(value, int | float)}
    for member in range(members):
        own = [points[number] for number in sorted(points) if number % members == member]
        if own:
            axes.plot(*zip(*own, strict=True), ".", ms=7, color=f"C{member % 10}", label=f"member {member}")
    for number in sorted(points):
        parent = trials[number].parent
        if parent is not None and parent in points:
            line = ":" if parent % members != number % members else "-"
            both = zip(points[parent], points[number], strict=True)
            axes.plot(*both, line, lw=1.0, alpha=0.8, color=f"C{number % members % 10}")
    winner = [points[number] for number in chain if number in points]
    if winner:
        axes.plot(*zip(*winner, strict=True), color="black", lw=2.6, alpha=0.35, label="the winner's lineage", zorder=1)


def best_so_far(trials: Iterable[FinishedTrial], direction: str) -> list[tuple[FinishedTrial, float]]:
    """The trials that were better than all before them, with their first values."""
    steps: list[tuple[FinishedTrial, float]] = []
    for trial in trials:
        assert trial.values is not None
        value = trial.values[0]
        if not steps or (value > steps[-1][1] if direction == "maximize" else value < steps[-1][1]):
            steps.append((trial, value))
    return steps


def is_wide(values: Sequence[float], direction: str) -> bool:
    """Whether values need a logarithmic scale. A few near 0 must not decide that if higher is better."""
    if not values or min(values) <= 0:
        return False
    low = min(values) if direction == "minimize" else sorted(values)[len(values) // 10]
    return max(values) / low > 100


def scale(axes: Any, values: Sequence[float], direction: str) -> None:
    """Gives the y axis the scale that the values need."""
    if is_wide(values, direction):
        axes.set_yscale("log")
    else:
        axes.yaxis.get_major_formatter().set_useOffset(False)


def _panels(width: float, heights: Sequence[float], ended: FinishedTrials, title: str) -> tuple[Any, Any]:
    """A figure with panels one below the other. The first shows the first objective. It needs no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 1.0 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    counts = Counter(trial.outcome for trial in ended.trials)
    parts = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    figure.suptitle(f"{title}\n{count_text(len(ended.trials), 'trial')}{': ' if parts else ''}{parts}", fontsize=11)
    values = [trial.values[0] for trial in ended.completed() if trial.values]
    if not values:
        panels[0].set_title("no completed trial has a value yet", fontsize=10)
    scale(panels[0], values, ended.directions[0])
    better = "higher" if ended.directions[0] == "maximize" else "lower"
    panels[0].set_ylabel(f"{_escaped(ended.objectives[0])}\n({better} is better)")
    for axes in panels:
        axes.grid(alpha=0.25)
    return figure, panels


def _legend_below(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        style = {"loc": "outside lower center", "frameon": False, "fontsize": 9}
        figure.legend(handles, labels, ncols=min(6, len(handles)), **style)


def _escaped(text: str) -> str:
    """Matplotlib would read what stands between two dollar signs as mathematics."""
    return text.replace("$", r"\$")
