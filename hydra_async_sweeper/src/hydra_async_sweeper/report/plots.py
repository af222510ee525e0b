"""The plots of a sweep: Optuna's where it has one; ours of islands and populations. Imports neither when it is loaded.

Optuna draws by pyplot, which has a global state and may open windows. So a sweep draws in a process of its own:
`python -m hydra_async_sweeper.report`.
"""

import inspect
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_async_sweeper.disk import fault_in
from hydra_async_sweeper.islands import Exchange
from hydra_async_sweeper.ranking import FinishedTrials
from hydra_async_sweeper.report.populations import is_wide, islands_plot, population_plot, scale
from hydra_async_sweeper.space import Space
from hydra_async_sweeper.terms import printable

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
    figures: list[tuple[str, Callable[[], Any]]] = list(_by_optuna(study, ended, len(space)))
    if ended.lanes.by_round:
        figures.append(("population", lambda: population_plot(ended, space)))
    elif ended.lanes.size > 1:
        figures.append(("islands", lambda: islands_plot(ended, exchanges)))
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    written = []
    for name, make in figures:
        path = folder / "plots" / f"{name}.png"
        try:
            with matplotlib.rc_context(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # all of these plots are experimental
                _save(make(), path)
        except Exception as error:  # the parameters of an application may have any names and values
            if fault_in(error):
                raise
            log.warning("no plot %s: %s: %s", path.name, type(error).__name__, printable(str(error)))
        else:
            written.append(path)
    return written


def _by_optuna(study: "optuna.Study", ended: FinishedTrials, width: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The names of Optuna's plots, and what draws them. Those of a further objective have its number in their name."""
    from optuna.visualization import matplotlib as plots

    completed = ended.completed()
    for at, name in enumerate(ended.objectives if completed else ()):
        own: dict[str, Any] = {"target_name": name}
        if len(ended.objectives) > 1:  # without a target, Optuna draws the best value so far, too
            own["target"] = partial(_value, at)
        number = f"_{at}" if at else ""
        values, direction = [trial.values[at] for trial in completed if trial.values], ended.directions[at]
        scaled = partial(scale, values=values, direction=direction)
        yield f"history{number}", partial(_scaled, plots.plot_optimization_history, study, own, scaled)
        if width:
            yield f"slice{number}", partial(_scaled, plots.plot_slice, study, own, scaled, columns=width)
            if direction == "minimize" and is_wide(values, direction):  # with a target, Optuna takes low as better
                own = {"target": partial(_log10, at), "target_name": f"log10 {name}"}
            yield f"parallel{number}", partial(_scaled, plots.plot_parallel_coordinate, study, own, columns=width + 2)
    differ = len({trial.values for trial in completed}) > 1
    if len(ended.objectives) == 1 and len(completed) >= _FEWEST and differ:
        yield "importance", partial(_importance, plots, study, len(completed), ended.objectives[0])
    if len(ended.objectives) == 2 and completed:
        yield "front", partial(_figure, plots.plot_pareto_front, study, target_names=list(ended.objectives))
    if any(trial.intermediate_values for trial in study.get_trials(deepcopy=False)):
        yield "intermediate", partial(_intermediate, plots, study)
    if ended.trials:
        yield "timeline", partial(_figure, plots.plot_timeline, study)


def _value(at: int, trial: "optuna.trial.FrozenTrial") -> float:
    return float(trial.values[at])


def _log10(at: int, trial: "optuna.trial.FrozenTrial") -> float:
    return math.log10(trial.values[at])


def _figure(plot: Callable[..., Any], study: "optuna.Study", **own: Any) -> Any:
    axes = plot(study, **own)
    return (axes if hasattr(axes, "figure") else axes.flat[0]).figure


def _scaled(
    plot: Callable[..., Any],
    study: "optuna.Study",
    own: dict[str, Any],
    scaled: Callable[[Any], None] = lambda axes: None,
    *,
    columns: int = 0,
) -> Any:
    """A figure whose first axes `scaled` changes, wide enough for so many columns."""
    figure = _figure(plot, study, **own)
    scaled(figure.axes[0])
    figure.set_size_inches(max(6.4, 2.4 * columns), 4.8)
    return figure


def _importance(plots: Any, study: "optuna.Study", completed: int, name: str) -> Any:
    """How much each parameter decides whether a trial is among the best tenth.

    Watanabe et al. 2023, "PED-ANOVA" (arXiv 2304.10255). With few trials the best five take the place of the tenth.
    """
    import optuna

    evaluator = optuna.importance.PedAnovaImportanceEvaluator
    given = inspect.signature(evaluator).parameters
    quantile = "target_quantile" if "target_quantile" in given else "baseline_quantile"  # before Optuna 4.3
    options: dict[str, Any] = {quantile: max(0.1, _FEWEST_TOP / completed)}
    top = evaluator(**options)
    return _figure(plots.plot_param_importances, study, evaluator=top, target_name=name)


def _intermediate(plots: Any, study: "optuna.Study") -> Any:
    figure = _figure(plots.plot_intermediate_values, study)
    legend = figure.axes[0].get_legend()
    if legend is not None and len(legend.get_texts()) > _MOST_NAMED:
        legend.remove()
    return figure


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two processes may write it
    try:
        figure.savefig(temporary, format="png", dpi=120, bbox_inches="tight")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    pyplot.close("all")
