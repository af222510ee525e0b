"""The plots of a sweep: Optuna's where it has one; ours of islands and populations. Imports neither when it is loaded.

Optuna draws by pyplot, which has a global state and may open windows. So a sweep draws in a process of its own:
`python -m hydra_async_sweeper.report`.
"""

import inspect
import logging
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_async_sweeper.islands import Exchange
from hydra_async_sweeper.slots import fault_in
from hydra_async_sweeper.space import Number, Space
from hydra_async_sweeper.trials import FinishedTrial, FinishedTrials

if TYPE_CHECKING:
    import optuna

_FEWEST, _FEWEST_TOP = 10, 5
"""Importances need at least 10 completed trials, of which at least 5 count as the top ones."""

_MOST_NAMED = 20
"""A legend with more trials would be larger than the plot."""

log = logging.getLogger("hydra_async_sweeper")


def draw(
    folder: Path, study: "optuna.Study", ended: FinishedTrials, space: Space, exchanges: Sequence[Exchange] = ()
) -> list[Path]:
    """Draws the plots of a sweep into folder/plots and returns their files. One that fails is left out, with a warning.

    Args:
        folder: of the sweep.
        study: Optuna's.
        ended: its trials that have ended.
        space: what is searched.
        exchanges: between islands.
    """
    import matplotlib

    matplotlib.use("Agg")  # no window
    from matplotlib import pyplot

    figures: list[tuple[str, Callable[[], Any]]] = list(_by_optuna(study, ended, len(space)))
    if ended.lanes.by_round:
        figures.append(("population", partial(population_plot, ended, space)))
    elif ended.lanes.size > 1:
        figures.append(("islands", partial(islands_plot, ended, exchanges)))
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    written = []
    for name, make in figures:
        path = folder / "plots" / f"{name}.png"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two processes may write it
        try:
            with matplotlib.rc_context(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # all of these plots are experimental
                make().savefig(temporary, format="png", dpi=120, bbox_inches="tight")
            temporary.replace(path)
            written.append(path)
        except Exception as error:  # the parameters of an application may have any names and values
            temporary.unlink(missing_ok=True)
            if fault_in(error):
                raise
            log.warning("no plot %s: %s: %s", path.name, type(error).__name__, error)
        pyplot.close("all")
    return written


# Optuna's


def _by_optuna(study: "optuna.Study", ended: FinishedTrials, width: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The names of Optuna's plots, and what draws them. Those of a further objective have its number in their name."""
    from optuna.visualization import matplotlib as plots

    completed = ended.completed()
    for at, name in enumerate(ended.objectives if completed else ()):
        target: dict[str, Any] = {"target_name": name}
        if len(ended.objectives) > 1:  # without a target, Optuna draws the best value so far, too
            target["target"] = partial(_value, at)
        number = f"_{at}" if at else ""
        scaled = partial(scale, values=[t.values[at] for t in completed if t.values], direction=ended.directions[at])
        yield f"history{number}", partial(_figure, partial(plots.plot_optimization_history, study, **target), scaled)
        if width:
            yield f"slice{number}", partial(_figure, partial(plots.plot_slice, study, **target), scaled, width)
            parallel = partial(plots.plot_parallel_coordinate, study, **target)
            yield f"parallel{number}", partial(_figure, parallel, columns=width + 2)
    differ = len({trial.values for trial in completed}) > 1
    if len(ended.objectives) == 1 and len(completed) >= _FEWEST and differ:
        yield "importance", partial(_figure, partial(_importance, plots, study, len(completed), ended.objectives[0]))
    if len(ended.objectives) == 2 and completed:
        yield "front", partial(_figure, partial(plots.plot_pareto_front, study, target_names=list(ended.objectives)))
    if any(trial.intermediate_values for trial in study.get_trials(deepcopy=False)):
        yield "intermediate", partial(_figure, partial(plots.plot_intermediate_values, study))
    if ended.trials:
        yield "timeline", partial(_figure, partial(plots.plot_timeline, study))


def _importance(plots: Any, study: "optuna.Study", completed: int, name: str) -> Any:
    """How much each parameter decides whether a trial is among the best tenth; with few trials, the best five.

    Watanabe et al. 2023, "PED-ANOVA" (arXiv 2304.10255).
    """
    import optuna

    evaluator: Any = optuna.importance.PedAnovaImportanceEvaluator
    names = inspect.signature(evaluator).parameters
    quantile = "target_quantile" if "target_quantile" in names else "baseline_quantile"  # up to Optuna 4.6
    top = evaluator(**{quantile: max(0.1, _FEWEST_TOP / completed)})
    return plots.plot_param_importances(study, evaluator=top, target_name=name)


def _value(at: int, trial: "optuna.trial.FrozenTrial") -> float:
    return float(trial.values[at])


def _figure(plot: Callable[[], Any], scaled: Callable[[Any], None] | None = None, columns: int = 0) -> Any:
    """A figure by Optuna, whose first axes `scaled` changes, wide enough for so many columns."""
    axes = plot()
    figure = (axes if hasattr(axes, "figure") else axes.flat[0]).figure
    if scaled is not None:
        scaled(figure.axes[0])
    if columns:
        figure.set_size_inches(max(6.4, 2.4 * columns), 4.8)
    legend = figure.axes[0].get_legend()
    if legend is not None and len(legend.get_texts()) > _MOST_NAMED:
        legend.remove()
    return figure


def scale(axes: Any, values: Sequence[float], direction: str) -> None:
    """Gives the y axis a logarithmic scale if the values need one. A few near 0 must not decide that if higher is
    better."""
    if values and min(values) > 0:
        low = min(values) if direction == "minimize" else sorted(values)[len(values) // 10]
        if max(values) / low > 100:
            axes.set_yscale("log")
            return
    axes.yaxis.get_major_formatter().set_useOffset(False)


# Ours


def islands_plot(ended: FinishedTrials, exchanges: Sequence[Exchange]) -> Any:
    """The best trial of each island over time, and what the islands sent to each other."""
    islands = ended.lanes.size
    figure, (top, bottom) = _panels([3.6, 0.8 + 0.32 * islands], ended, "Best trial of each island")
    places = {trial.number: place for place, trial in enumerate(ended.trials, 1)}
    for island in range(islands):
        bred = [trial for trial in ended.completed() if trial.number % islands == island]
        best: list[FinishedTrial] = []
        for trial in bred:
            if not best or (trial.losses(ended.directions) or ()) < (best[-1].losses(ended.directions) or ()):
                best.append(trial)
        x, y = [places[trial.number] for trial in best], [trial.values[0] for trial in best if trial.values]
        if best:
            steps = {"drawstyle": "steps-post", "color": f"C{island % 10}", "marker": ".", "alpha": 0.9}
            top.plot([*x, len(places)], [*y, y[-1]], label=f"island {island}", **steps)
        bottom.scatter([places[trial.number] for trial in bred], [island] * len(bred), s=16, color=f"C{island % 10}")
    # An arrow, in the colour of its source, for each exchange that gives its target a better trial than all it had.
    losses = {trial.number: (trial.losses(ended.directions) or (math.inf,))[0] for trial in ended.trials}
    lowest, arrows = [math.inf] * islands, 0
    for place, trial in enumerate(ended.trials, 1):
        lowest[trial.number % islands] = min(lowest[trial.number % islands], losses[trial.number])
        for exchange in exchanges:
            sent = min((losses.get(number, math.inf) for number in exchange.numbers), default=math.inf)
            if exchange.told == trial.told and sent < lowest[exchange.target]:
                lowest[exchange.target] = sent
                arrows += 1
                style = {"arrowstyle": "->", "color": f"C{exchange.source % 10}"}
                bottom.annotate("", (place, exchange.target), (place, exchange.source), arrowprops=style)
    bottom.set_yticks(range(islands), [f"island {island}" for island in range(islands)])
    bottom.set_ylim(islands - 0.5, -0.5)
    better = f"; arrow: an exchange with a better trial than all of its target ({arrows} of {len(exchanges)})"
    bottom.set_xlabel(f"trials in the order in which they ended{better if exchanges else ''}")
    _legend_below(figure, top)
    return figure


def population_plot(ended: FinishedTrials, space: Space) -> Any:
    """The value of each member, and the numbers that it trains with, against the rounds; the winner's lineage bold."""
    numbers = {key: dimension for key, dimension in space.items() if isinstance(dimension, Number)}
    figure, panels = _panels([3.4] + [1.5] * len(numbers), ended, "Value of each member after each round")
    best = ended.best()
    chain = [trial.number for trial in ended.lineage(best[0].number)] if best else []
    _draw_members(panels[0], ended, chain, {t.number: t.values[0] for t in ended.trials if t.values})
    for axes, (key, number) in zip(panels[1:], numbers.items(), strict=True):
        _draw_members(axes, ended, chain, {t.number: t.params[key] for t in ended.trials if key in t.params})
        if number.log:
            axes.set_yscale("log")
        axes.set_ylabel(_escaped(key.replace(".", ".\n")), fontsize=8.5)
    panels[-1].set_xticks(range(1 + max((trial.number // ended.lanes.size for trial in ended.trials), default=0)))
    panels[-1].set_xlabel("round; dotted: a member takes over checkpoint and parameters of another")
    _legend_below(figure, panels[0])
    return figure


def _draw_members(axes: Any, ended: FinishedTrials, chain: Sequence[int], values: Mapping[int, Any]) -> None:
    """A line for each member, dotted where it takes over from another."""
    members, parents = ended.lanes.size, {trial.number: trial.parent for trial in ended.trials}
    points = {number: (number // members, values[number]) for number in sorted(values)}
    for member in range(members):
        line = [point for number, point in points.items() if number % members == member]
        if line:
            axes.plot(*zip(*line, strict=True), ".", ms=7, color=f"C{member % 10}", label=f"member {member}")
    for number, point in points.items():
        if (parent := parents[number]) in points:
            style = {"ls": ":" if parent % members != number % members else "-", "lw": 1.0, "alpha": 0.8}
            axes.plot(*zip(points[parent], point, strict=True), color=f"C{number % members % 10}", **style)
    winner = [points[number] for number in chain if number in points]
    if winner:
        axes.plot(*zip(*winner, strict=True), color="black", lw=2.6, alpha=0.35, label="the winner's lineage", zorder=1)


def _panels(heights: Sequence[float], ended: FinishedTrials, title: str) -> tuple[Any, Any]:
    """A figure with panels one below the other, of which the first shows the first objective."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 1.0 + sum(heights)), layout="constrained")  # of no global state
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    counts = Counter(trial.outcome for trial in ended.trials)
    figure.suptitle(f"{title}\n{', '.join(f'{count} {outcome}' for outcome, count in counts.items())}", fontsize=11)
    scale(panels[0], [trial.values[0] for trial in ended.completed() if trial.values], ended.directions[0])
    panels[0].set_ylabel(f"{_escaped(ended.objectives[0])}\n({ended.directions[0]})")
    for axes in panels:
        axes.grid(alpha=0.25)
    return figure, panels


def _legend_below(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, ncols=min(6, len(handles)), loc="outside lower center", fontsize=9)


def _escaped(text: str) -> str:
    """Matplotlib would read what stands between two dollar signs as mathematics."""
    return text.replace("$", r"\$")
