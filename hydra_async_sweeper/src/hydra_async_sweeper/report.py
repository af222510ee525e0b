"""What a sweep leaves behind: its tables, and its plots, which are Optuna's where it has one. A sweep imports neither
optuna nor matplotlib by this file. As a command, it draws the plots from study.journal; the sweep may still be running.

    python -m hydra_async_sweeper.report outputs/maml_omniglot/sweep
    python -m hydra_async_sweeper.report outputs/maml_omniglot/sweep --study-name second

Writes plots/*.png into the folder, and only reads the journal. Exit codes: 0 written; 2 the folder holds no such study,
the journal is damaged, or a file cannot be written.
"""

import argparse
import csv
import inspect
import io
import logging
import math
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from hydra_async_sweeper.settings import JOURNAL, PBT, RESULTS
from hydra_async_sweeper.slots import write_atomically
from hydra_async_sweeper.space import Number, Space, from_plain
from hydra_async_sweeper.trials import COMPLETED, ONE_LANE, OUTCOMES, FinishedTrials, Lanes

if TYPE_CHECKING:
    import optuna

OK, BAD_USAGE = 0, 2
_FEWEST, _FEWEST_TOP = 10, 5  # Importances need at least 10 completed trials, of which at least 5 count as the top ones
_MOST_ROWS = 30  # Rows of the table that a sweep ends with; trials.csv has all
_MOST_NAMED = 20  # A legend with more trials would be larger than the plot

log = logging.getLogger("hydra_async_sweeper")


def write_tables(
    folder: Path, ended: FinishedTrials, *, total: int, command: str | None, folder_of: Callable[[int], str] = str
) -> None:
    """Writes trials.csv and, with the field names of Hydra's Optuna sweeper, optimization_results.yaml. The sweep is to
    have `total` trials; `command` trains its best configuration; `folder_of` gives a trial's folder in the sweep's."""
    ordered = sorted(ended.trials, key=lambda trial: trial.number)
    params = list(dict.fromkeys(key for trial in ordered for key in trial.params))
    parent = ["parent"] if ended.lanes.by_round else []
    lane = [*ended.lanes.place_of(0), *parent]
    rows: list[list[Any]] = [
        ["number", "told", "outcome", *lane, *ended.objectives, "seconds", "same_as", "failure", *params]
    ]
    for trial in ordered:
        rows.append([
            trial.number, trial.told, trial.outcome, *ended.lanes.place_of(trial.number).values(),
            *(trial.parent for _ in parent), *(trial.values or [""] * len(ended.objectives)), trial.seconds,
            trial.same_as, " ".join(trial.failure.split()), *(trial.params.get(key, "") for key in params),
        ])  # fmt: skip
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomically(folder / "trials.csv", text.getvalue())
    counts = Counter(trial.outcome for trial in ended.trials)
    results = {
        "name": PBT if ended.lanes.by_round else "async",
        **_best(ended, folder_of),
        "command": command,
        "objectives": dict(zip(ended.objectives, ended.directions, strict=True)),
        "trials": {"total": total, **{outcome: counts[outcome] for outcome in OUTCOMES}},
    }
    write_atomically(folder / RESULTS, yaml.safe_dump(results, sort_keys=False, allow_unicode=True, width=math.inf))


def text_table(ended: FinishedTrials) -> str:
    """A line for each trial: its value and its parameters; the best first, and those without a value last."""
    best = {trial.number for trial in ended.best()}
    params = list(dict.fromkeys(key for trial in ended.trials for key in trial.params))
    rows = [["trial", *ended.objectives, *params, ""]]
    for trial in sorted(ended.trials, key=lambda t: (t.number not in best, t.losses(ended.directions) or (math.inf,))):
        values = [f"{value:.4g}" for value in trial.values or ()] or [""] * len(ended.objectives)
        searched = [trial.params.get(key, "") for key in params]
        words = "best" if trial.number in best else "" if trial.outcome == COMPLETED else trial.outcome
        shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in searched]
        rows.append([str(trial.number), *values, *shown, words])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    hidden = len(lines) - 1 - _MOST_ROWS
    return "\n".join([*lines[: _MOST_ROWS + 1], *([f"and {hidden} more in trials.csv"] if hidden > 0 else [])])


def _best(ended: FinishedTrials, folder_of: Callable[[int], str]) -> dict[str, Any]:
    solutions: list[dict[str, Any]] = [
        {
            "params": {key: _plain(value) if isinstance(value, str) else value for key, value in trial.params.items()},
            "values": list(trial.values or ()), "trial": trial.number, "folder": folder_of(trial.number),
        }
        for trial in ended.best()
    ]  # fmt: skip
    if len(ended.objectives) > 1:
        return {"solutions": solutions}
    if not solutions:
        return dict.fromkeys(("best_params", "best_value", "best_trial", "best_folder"))
    (value,), number = solutions[0]["values"], solutions[0]["trial"]
    best = {"best_params": solutions[0]["params"], "best_value": value, "best_trial": number}
    best["best_folder"] = solutions[0]["folder"]
    if ended.lanes.by_round:
        chain = ended.lineage(number)
        best["lineage"] = [{"trial": t.number, "folder": folder_of(t.number), "params": dict(t.params)} for t in chain]
    return best


@lru_cache(maxsize=4096)
def _plain(text: str) -> str | int | float | bool | None:
    """What Hydra reads in the text of an override, where that is one plain value; else the text."""
    try:
        value: Any = OverridesParser.create().parse_override(f"key={text}").value()
    except HydraException:
        return text
    return value if isinstance(value, str | int | float | None) else text


# Plots. Optuna draws by pyplot, which has a global state and may open windows: a sweep runs the command below for them.


def draw(folder: Path, study: "optuna.Study", ended: FinishedTrials, space: Space) -> list[Path]:
    """Draws the plots of a sweep into folder/plots and returns their files. One that fails is left out, with a
    warning."""
    import matplotlib
    from matplotlib import pyplot

    pyplot.switch_backend("Agg")  # no window
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    written = []
    for name, make in _figures(study, ended, space):
        path = folder / "plots" / f"{name}.png"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two processes may write it
        try:
            with matplotlib.rc_context(), warnings.catch_warnings(action="ignore"):  # all plots are experimental
                make().savefig(temporary, format="png", dpi=120, bbox_inches="tight")
            temporary.replace(path)
            written.append(path)
        except Exception as error:  # the parameters of an application may have any names and values
            temporary.unlink(missing_ok=True)
            log.warning("no plot %s: %s: %s", path.name, type(error).__name__, error)
        pyplot.close("all")
    return written


def _figures(study: "optuna.Study", ended: FinishedTrials, space: Space) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The names of the plots, and what draws them. Those of a further objective have its number in their name."""
    from optuna.visualization import matplotlib as plots

    completed, width = ended.completed(), len(space)
    for at, name in enumerate(ended.objectives if completed else ()):
        target: dict[str, Any] = {"target_name": name}
        if len(ended.objectives) > 1:  # without a target, Optuna draws the best value so far, too
            target["target"] = lambda trial, at=at: float(trial.values[at])
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
    if ended.lanes.by_round:
        yield "population", partial(population_plot, ended, space)


def _importance(plots: Any, study: "optuna.Study", completed: int, name: str) -> Any:
    """How much each parameter decides whether a trial is among the best tenth; with few trials, the best five. Watanabe
    et al. 2023, "PED-ANOVA" (arXiv 2304.10255)."""
    import optuna

    evaluator: Any = optuna.importance.PedAnovaImportanceEvaluator
    names = inspect.signature(evaluator).parameters
    quantile = "target_quantile" if "target_quantile" in names else "baseline_quantile"  # up to Optuna 4.6
    top = evaluator(**{quantile: max(0.1, _FEWEST_TOP / completed)})
    return plots.plot_param_importances(study, evaluator=top, target_name=name)


def _figure(plot: Callable[[], Any], scaled: Callable[[Any], None] | None = None, columns: int = 0) -> Any:
    """A figure by Optuna, whose first axes `scaled` changes, wide enough for `columns` columns."""
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


def population_plot(ended: FinishedTrials, space: Space) -> Any:
    """The value of each member, and the numbers that it trains with, against the rounds; the winner's lineage bold."""
    from matplotlib.figure import Figure

    numbers = {key: dimension for key, dimension in space.items() if isinstance(dimension, Number)}
    heights = [3.4] + [1.5] * len(numbers)
    figure = Figure(figsize=(9.0, 1.0 + sum(heights)), layout="constrained")  # of no global state
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    counts = Counter(trial.outcome for trial in ended.trials)
    shown = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    figure.suptitle(f"Value of each member after each round\n{shown}", fontsize=11)
    scale(panels[0], [trial.values[0] for trial in ended.completed() if trial.values], ended.directions[0])
    # Matplotlib would read what stands between two dollar signs as mathematics.
    panels[0].set_ylabel(f"{ended.objectives[0]}\n({ended.directions[0]})".replace("$", r"\$"))
    best = ended.best()
    chain = [trial.number for trial in ended.lineage(best[0].number)] if best else []
    _draw_members(panels[0], ended, chain, {t.number: t.values[0] for t in ended.trials if t.values})
    for axes, (key, number) in zip(panels[1:], numbers.items(), strict=True):
        _draw_members(axes, ended, chain, {t.number: t.params[key] for t in ended.trials if key in t.params})
        if number.log:
            axes.set_yscale("log")
        axes.set_ylabel(key.replace(".", ".\n").replace("$", r"\$"), fontsize=8.5)
    panels[-1].set_xticks(range(1 + max((trial.number // ended.lanes.size for trial in ended.trials), default=0)))
    panels[-1].set_xlabel("round; dotted: a member takes over checkpoint and parameters of another")
    for axes in panels:
        axes.grid(alpha=0.25)
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, ncols=min(6, len(handles)), loc="outside lower center", fontsize=9)
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


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of the sweep")
    parser.add_argument("--study-name", metavar="NAME", help="of the study, if the journal holds several")
    parser.add_argument("--storage", type=Path, metavar="FILE", help=f"the journal, if it is not FOLDER/{JOURNAL}")
    options = parser.parse_args(arguments)
    from hydra_async_sweeper.study import finished_of  # imports optuna

    try:
        study = open_study(options.storage or options.folder / JOURNAL, options.study_name)
        identity: Mapping[str, Any] = study.user_attrs["identity"]
        directions = [direction.name.lower() for direction in study.directions]
        by_round = identity["sampler"] == PBT
        lanes = Lanes("member", identity["population"]["members"], by_round=True) if by_round else ONE_LANE
        ended = FinishedTrials(finished_of(study), identity["objective"] or ["value"], directions, lanes)
        print("\n".join(map(str, draw(options.folder, study, ended, from_plain(identity["space"])))))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_USAGE
    return OK


def open_study(journal: Path, name: str | None) -> "optuna.Study":
    """The study of that name in a journal, or the only one that it holds. Writes nothing. Raises FileNotFoundError if
    there is no journal, and ValueError if it is damaged, does not hold the study, or is of another program."""
    if not journal.is_file():
        advice = "name the folder of a sweep, or type --storage FILE"
        raise FileNotFoundError(f"{journal}: there is no such journal; {advice}")
    import optuna

    from hydra_async_sweeper.study import without_experimental_warnings

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with without_experimental_warnings():
        names: list[str] = []
        try:
            storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
            names += sorted(study.study_name for study in storage.get_all_studies())
            study = optuna.load_study(study_name=name, storage=storage)
        except Exception as error:  # what Optuna raises depends on the line that is damaged
            several = f"type --study-name {names[0]}" if names else "it is damaged, or holds no study yet"
            raise ValueError(f"{journal}: {error}; it holds {', '.join(names) or 'none'}; {several}") from error
    if "identity" not in study.user_attrs:
        raise ValueError(f"study {study.study_name!r}: has no identity, so hydra/sweeper=async has not made it")
    return study


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
