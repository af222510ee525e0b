"""The plots of a sweep."""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sweeps.islands import Exchange
from sweeps.space import Dimension, Number, Space, Value
from sweeps.terms import COMPLETED, DIVERGED, FAILED, PRUNED, Finished

if TYPE_CHECKING:
    pass


from sweeps.report.ranking import OUTCOMES, best_trials, losses_of
from sweeps.report.words import count_text, number_text

_BLUE, _ORANGE, _RED, _GREEN, _GREY = "#0072B2", "#E69F00", "#D55E00", "#009E73", "#999999"
_STYLES = {COMPLETED: ("o", _BLUE), PRUNED: ("v", _ORANGE), DIVERGED: ("x", _RED), FAILED: ("P", "#444444")}


def draw(
    folder: Path,
    trials: Sequence[Finished],
    objectives: Sequence[str],
    directions: Sequence[str],
    space: Space,
    *,
    exchanges: Sequence[Exchange] = (),
    islands: int = 1,
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
        islands: trial n belongs to island n mod `islands`.
        importances: of each parameter.
    """
    ended = _Ended(sorted(trials, key=lambda t: (t.told, t.number)), tuple(objectives), tuple(directions))
    figures = {"history": _history(ended), "parallel": _parallel(ended, space)}
    if importances:
        figures["importance"] = _importance(importances, objectives[0])
    if len(objectives) == 2:
        figures["front"] = _front(ended)
    if islands > 1:
        figures["islands"] = _islands(ended, exchanges, islands)
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    return [_save(figure, folder / "plots" / f"{name}.png") for name, figure in figures.items()]


class _Ended(NamedTuple):
    """Trials in the order in which they ended."""

    trials: Sequence[Finished]
    objectives: tuple[str, ...]
    directions: tuple[str, ...]

    def completed(self) -> list[Finished]:
        return [trial for trial in self.trials if losses_of(trial, self.directions) is not None]

    def best(self) -> list[Finished]:
        return best_trials(self.trials, self.directions)

    def values(self, objective: int) -> list[float]:
        return [trial.values[objective] for trial in self.completed() if trial.values]

    def places(self) -> dict[int, int]:
        """From a trial's number to its place in the order of ends, from 1."""
        return {trial.number: place for place, trial in enumerate(self.trials, 1)}

    def axis_name(self, objective: int) -> str:
        better = "higher" if self.directions[objective] == "maximize" else "lower"
        return f"{_label(self.objectives[objective], 34)}\n({better} is better)"


def _history(ended: _Ended) -> Any:
    """The value of each trial against its place in time, and the best so far."""
    rows = len(ended.objectives)
    without = [outcome for outcome in OUTCOMES if any(_has_no_place(t) for t in ended.trials if t.outcome == outcome)]
    strip = 0.3 + 0.3 * len(without) if without else 0.0
    figure = _figure(9.0, 0.9 + 3.6 * rows + strip)
    panels = figure.subplots(
        rows + bool(without), 1, sharex=True, squeeze=False,
        height_ratios=[3.6] * rows + ([strip] if without else []),
    )[:, 0]  # fmt: skip
    places = ended.places()
    for objective, axes in enumerate(panels[:rows]):
        _draw_history(axes, ended, objective, places)
    if without:
        _draw_strip(panels[-1], ended, without, places)
    _number_places(panels[-1], len(places))
    panels[-1].set_xlabel("trials in the order in which they ended")
    _title(figure, "Value of each trial", ended)
    _legend_below(figure, panels[:rows])
    return figure


def _number_places(axes: Any, count: int) -> None:
    """Sets up an x axis of places from 1 to `count`."""
    from matplotlib.ticker import MaxNLocator

    margin = 0.5 + 0.01 * count
    axes.set_xlim(1 - margin, max(count, 1) + margin)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def _has_no_place(trial: Finished) -> bool:
    return trial.values is None or trial.outcome not in (COMPLETED, PRUNED)


def _draw_history(axes: Any, ended: _Ended, objective: int, places: Mapping[int, int]) -> None:
    for outcome in (COMPLETED, PRUNED):
        points = [
            (places[trial.number], trial.values[objective])
            for trial in ended.trials
            if trial.outcome == outcome and trial.values is not None
        ]
        if points:
            marker, colour = _STYLES[outcome]
            size = 34 if len(places) <= 60 else 16
            axes.scatter(*zip(*points, strict=True), s=size, marker=marker, color=colour, label=outcome, zorder=3)
    steps = _best_so_far(ended.completed(), objective, ended.directions[objective])
    if steps:
        x = [places[trial.number] for trial, _ in steps]
        y = [value for _, value in steps]
        axes.plot(
            [*x, len(places) + 0.5], [*y, y[-1]], drawstyle="steps-post", color=_GREEN, lw=1.6, label="best so far"
        )
        axes.set_title(
            f"best {number_text(y[-1])} (trial {steps[-1][0].number})", fontsize=9, loc="right", color=_GREEN
        )
    else:
        _say(axes, "no completed trial has a value yet")
    _scale(axes.yaxis, [t.values[objective] for t in ended.trials if t.values], ended.directions[objective])
    axes.set_ylabel(ended.axis_name(objective))
    axes.grid(alpha=0.25)


def _best_so_far(trials: Iterable[Finished], objective: int, direction: str) -> list[tuple[Finished, float]]:
    """The trials that were better in one objective than all before them, with their values."""
    steps: list[tuple[Finished, float]] = []
    for trial in trials:
        assert trial.values is not None
        value = trial.values[objective]
        if not steps or (value > steps[-1][1] if direction == "maximize" else value < steps[-1][1]):
            steps.append((trial, value))
    return steps


def _draw_strip(axes: Any, ended: _Ended, outcomes: Sequence[str], places: Mapping[int, int]) -> None:
    """Marks the trials that have no value."""
    for row, outcome in enumerate(outcomes):
        marker, colour = _STYLES[outcome]
        x = [places[trial.number] for trial in ended.trials if trial.outcome == outcome and _has_no_place(trial)]
        axes.scatter(x, [row] * len(x), s=30, marker=marker, color=colour, linewidths=1.2)
    axes.set_yticks(range(len(outcomes)), outcomes)
    axes.set_ylim(len(outcomes) - 0.4, -0.6)
    axes.grid(alpha=0.25, axis="x")


def _importance(importances: Mapping[str, float], objective: str) -> Any:
    """A bar for each parameter, the most important on top."""
    ranked = sorted(importances.items(), key=lambda item: -item[1])
    figure = _figure(8.0, 1.3 + 0.42 * len(ranked))
    axes = figure.subplots()
    bars = axes.barh(range(len(ranked)), [value for _, value in ranked], color=_BLUE, height=0.65)
    axes.bar_label(bars, [f"{value:.1%}" for _, value in ranked], padding=4, fontsize=9)
    axes.set_yticks(range(len(ranked)), [_label(key, 36) for key, _ in ranked])
    axes.set_ylim(len(ranked) - 0.4, -0.6)
    axes.set_xlim(0, max(value for _, value in ranked) * 1.15 or 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("share of the importance (PED-ANOVA)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Importance of each parameter for\n{_label(objective, 60)}", fontsize=11)
    return figure


def _front(ended: _Ended) -> Any:
    """Two objectives against each other, and the trials that no other one beats in both."""
    figure = _figure(7.5, 6.0)
    axes = figure.subplots()
    x, y = ended.values(0), ended.values(1)
    if x:
        best = sorted(ended.best(), key=lambda trial: losses_of(trial, ended.directions) or ())
        corners = [trial.values for trial in best if trial.values]
        axes.scatter(x, y, s=26, color=_BLUE, alpha=0.7, label="completed")
        _scale(axes.xaxis, x, ended.directions[0])
        _scale(axes.yaxis, y, ended.directions[1])
        style = {"color": _RED, "lw": 1.4, "marker": "o", "ms": 6, "drawstyle": "steps-post", "zorder": 3}
        axes.plot(*zip(*corners, strict=True), label="Pareto front", **style)
        axes.margins(0.08)
        _name_points(figure, axes, best, ended.directions)
    else:
        _say(axes, "no completed trial has a value yet")
        axes.set_xticks([])
    axes.set_xlabel(ended.axis_name(0))
    axes.set_ylabel(ended.axis_name(1))
    axes.grid(alpha=0.25)
    _title(figure, "Pareto front", ended)
    _legend_below(figure, [axes])
    return figure


def _name_points(figure: Any, axes: Any, best: Sequence[Finished], directions: Sequence[str]) -> None:
    """Writes the numbers of the front's trials on its free side, but none over another."""
    figure.draw_without_rendering()  # the layout decides where the points are
    right, up = (direction == "maximize" for direction in directions)
    style = {"ha": "left" if right else "right", "va": "bottom" if up else "top", "fontsize": 8, "color": _RED}
    written: list[tuple[float, float]] = []
    for trial in best:
        x, y = axes.transData.transform(trial.values)
        if all(abs(x - a) > 30 or abs(y - b) > 14 for a, b in written):
            written.append((x, y))
            offset = (5 if right else -5, 3 if up else -3)
            axes.annotate(str(trial.number), trial.values, offset, textcoords="offset points", zorder=4, **style)


def _islands(ended: _Ended, exchanges: Sequence[Exchange], islands: int) -> Any:
    """The best trial of each island over time, and what the islands sent to each other."""
    lanes = 0.8 + 0.32 * islands
    figure = _figure(9.5, 4.8 + lanes)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3.6, lanes])
    places, last = ended.places(), len(ended.trials) + 0.5
    for island in range(islands):
        colour, line = f"C{island % 10}", ("-", "--", ":")[island // 10 % 3]
        own = [trial for trial in ended.completed() if trial.number % islands == island]
        steps = _best_so_far(own, 0, ended.directions[0])
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
        _say(top, "no completed trial has a value yet")
    _scale(top.yaxis, ended.values(0), ended.directions[0])
    top.set_ylabel(ended.axis_name(0))
    top.grid(alpha=0.25)
    gains = _draw_exchanges(bottom, ended, exchanges, islands)
    bottom.set_yticks(range(islands), [f"island {island}" for island in range(islands)])
    bottom.set_ylim(islands - 0.5, -0.5)
    _number_places(bottom, len(places))
    others = "grey" if len(exchanges) <= _MANY_EXCHANGES else "not shown"
    bottom.set_xlabel(
        "trials in the order in which they ended; ring: a new best of its island\n"
        f"coloured arrow: an exchange that gives its target a better trial than all it had "
        f"({gains} of {len(exchanges)}; the others: {others})"
        if exchanges
        else "trials in the order in which they ended; ring: a new best of its island"
    )
    bottom.grid(alpha=0.25, axis="x")
    _title(figure, "Best trial of each island", ended)
    _legend_below(figure, [top])
    return figure


_MANY_EXCHANGES = 100


def _draw_exchanges(axes: Any, ended: _Ended, exchanges: Sequence[Exchange], islands: int) -> int:
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


class _Axis(NamedTuple):
    """An axis of the parallel coordinates: its name, its ticks, and from a value to its height, if it has one.

    Lines that share an option of a category are drawn up to `spread` apart.
    """

    label: str
    ticks: list[tuple[float, str]]
    height: Callable[[Value | None], float | None]
    spread: float = 0.0


def _parallel(ended: _Ended, space: Space) -> Any:
    """A line for each trial through its parameters and values, in the colour of its place among the first values."""
    from matplotlib.collections import LineCollection

    goals = [_goal_axis(ended, objective) for objective in range(len(ended.objectives))]
    axes_ = [_axis(name, dimension) for name, dimension in space.items()] + goals
    figure = _figure(max(6.4, 1.6 * len(axes_) + 0.8), 5.6)
    axes = figure.subplots()
    _draw_axes(axes, axes_)
    ranks = _ranks(ended)
    lines = {trial.number: _line(trial, space, axes_) for trial in ended.trials}
    others = [lines[trial.number] for trial in ended.trials if trial.number not in ranks and lines[trial.number]]
    ranked = sorted(ranks, key=lambda number: -ranks[number])  # the best are drawn last
    best = [trial.number for trial in ended.best()]
    label: dict[str, Any] = {"label": "no final value"} if others else {}
    axes.add_collection(LineCollection(others, colors=_GREY, linewidths=0.8, linestyles="--", alpha=0.6, **label))
    width, alpha = (1.6, 0.9) if len(ranked) <= 30 else (1.0, 0.65)
    coloured = LineCollection([lines[n] for n in ranked], cmap="viridis", linewidths=width, alpha=alpha)
    coloured.set_array([ranks[n] for n in ranked])
    coloured.set_clim(0, 1.05)  # the lightest yellow is hard to see
    axes.add_collection(coloured)
    if len(best) == 1:
        axes.plot(*zip(*lines[best[0]], strict=True), color=_RED, lw=2.6, label=f"best: trial {best[0]}")
    else:
        edges: dict[str, Any] = {"label": f"Pareto front ({len(best)} trials)"} if best else {}
        axes.add_collection(LineCollection([lines[n] for n in best], colors=_RED, linewidths=1.8, **edges))
    if ranks:
        _draw_colours(axes, ended, len(space), goals[0], ranks)
    else:
        _say(axes, "no completed trial has a value yet")
    _title(figure, f"Parameters and values\ncolour: {_shortened(ended.objectives[0], 40)}, dark is better", ended)
    _legend_below(figure, [axes])
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


def _draw_colours(axes: Any, ended: _Ended, x: int, goal: _Axis, ranks: Mapping[int, float]) -> None:
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


def _ranks(ended: _Ended) -> dict[int, float]:
    """The place of each completed trial among the different values of the first objective: 0 the best, 1 the worst."""
    losses = {trial.number: (losses_of(trial, ended.directions) or (0.0,))[0] for trial in ended.completed()}
    order = {loss: rank for rank, loss in enumerate(sorted(set(losses.values())))}
    return {number: order[loss] / max(1, len(order) - 1) for number, loss in losses.items()}


def _line(trial: Finished, space: Space, axes: Sequence[_Axis]) -> list[tuple[float, float]]:
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
    ticks = [(height, _shortened(option, 16)) for option, height in heights.items()][::every]
    spread = min(0.06, 0.5 / len(heights))
    return _Axis(_label(name, 19), ticks, lambda value: heights.get(str(value)), spread)


def _goal_axis(ended: _Ended, objective: int) -> _Axis:
    name, values = ended.objectives[objective], ended.values(objective)
    if not values:
        return _Axis(_label(name, 19), [], lambda value: None)
    return _number_axis(name, min(values), max(values), _is_wide(values, ended.directions[objective]))


def _number_axis(name: str, low: float, high: float, log: bool, whole: bool = False) -> _Axis:
    def height(value: Value | None) -> float | None:
        if not isinstance(value, int | float) or (log and value <= 0):
            return None
        if low == high:
            return 0.5
        if log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    inner = [(height(tick) or 0.0, number_text(tick)) for tick in _inner_ticks(low, high, log, whole)]
    outer = [(0.5, number_text(low))] if low == high else [(0.0, number_text(low)), (1.0, number_text(high))]
    label = _label(name, 19) + ("\n(log)" if log else "")
    return _Axis(label, [*outer, *(tick for tick in inner if 0.06 < tick[0] < 0.94)], height)


def _inner_ticks(low: float, high: float, log: bool, whole: bool) -> list[float]:
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


def _is_wide(values: Sequence[float], direction: str) -> bool:
    """Whether values need a logarithmic scale. A few values near 0 must not decide, if higher is better."""
    if not values or min(values) <= 0:
        return False
    low = min(values) if direction == "minimize" else sorted(values)[len(values) // 10]
    return max(values) / low > 100


def _scale(axis: Any, values: Sequence[float], direction: str) -> None:
    if _is_wide(values, direction):
        (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log")
    else:
        axis.get_major_formatter().set_useOffset(False)


def _figure(width: float, height: float) -> Any:
    """A figure that needs no display and no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> Path:
    temporary = path.with_name(f".{path.name}.tmp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may have a sign that the font lacks
        figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)
    return path


def _title(figure: Any, text: str, ended: _Ended) -> None:
    counts = Counter(trial.outcome for trial in ended.trials)
    parts = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    figure.suptitle(f"{text}\n{count_text(len(ended.trials), 'trial')}{': ' if parts else ''}{parts}", fontsize=11)


def _legend_below(figure: Any, panels: Iterable[Any]) -> None:
    entries = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        entries.update(dict(zip(labels, handles, strict=True)))
    if entries:
        figure.legend(
            list(entries.values()), list(entries), loc="outside lower center", ncols=min(6, len(entries)),
            frameon=False, fontsize=9,
        )  # fmt: skip


def _say(axes: Any, text: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 4}
    style = {"ha": "center", "va": "center", "color": "#666666", "fontsize": 12, "bbox": box, "zorder": 5}
    axes.text(0.5, 0.5, text, transform=axes.transAxes, **style)
    if not axes.has_data():
        axes.set_yticks([])


def _label(name: str, width: int) -> str:
    """A name in lines of at most `width` signs, broken after dots, slashes and underscores where it has them."""
    lines = [""]
    piece = ""
    for at, sign in enumerate(name):
        piece += sign
        if sign in "._/" or at == len(name) - 1 or len(piece) == width:
            if lines[-1] and len(lines[-1]) + len(piece) > width:
                lines.append("")
            lines[-1] += piece
            piece = ""
    return "\n".join(_escaped(line) for line in lines)


def _shortened(text: str, width: int) -> str:
    """A text in one line, without its middle where it is longer than `width`."""
    line = " ".join(text.split())
    if len(line) > width:
        line = f"{line[: width // 2]}…{line[-(width - width // 2 - 1) :]}"
    return _escaped(line)


def _escaped(text: str) -> str:
    """Matplotlib would read what stands between two dollar signs as mathematics."""
    return text.replace("$", r"\$")
