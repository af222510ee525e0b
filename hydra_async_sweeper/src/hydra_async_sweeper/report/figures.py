"""What all plots of a sweep share: the trials in their order, and the look of a figure."""

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra_async_sweeper.ranking import OUTCOMES, best_trials, losses_of
from hydra_async_sweeper.report.words import count_text
from hydra_async_sweeper.terms import COMPLETED, DIVERGED, FAILED, ONE_LANE, PRUNED, FinishedTrial, Lanes

BLUE, ORANGE, RED, GREEN, GREY = "#0072B2", "#E69F00", "#D55E00", "#009E73", "#999999"
STYLES = {COMPLETED: ("o", BLUE), PRUNED: ("v", ORANGE), DIVERGED: ("x", RED), FAILED: ("P", "#444444")}


class FinishedTrials(NamedTuple):
    """Trials in the order in which they ended."""

    trials: Sequence[FinishedTrial]
    objectives: tuple[str, ...]
    directions: tuple[str, ...]
    lanes: Lanes = ONE_LANE

    def completed(self) -> list[FinishedTrial]:
        return [trial for trial in self.trials if losses_of(trial, self.directions) is not None]

    def best(self) -> list[FinishedTrial]:
        return best_trials(self.trials, self.directions, self.lanes)

    def values(self, objective: int) -> list[float]:
        return [trial.values[objective] for trial in self.completed() if trial.values]

    def places(self) -> dict[int, int]:
        """From a trial's number to its place in the order of ends, from 1."""
        return {trial.number: place for place, trial in enumerate(self.trials, 1)}

    def axis_name(self, objective: int) -> str:
        better = "higher" if self.directions[objective] == "maximize" else "lower"
        return f"{wrapped(self.objectives[objective], 34)}\n({better} is better)"


def number_places(axes: Any, count: int) -> None:
    """Sets up an x axis of places from 1 to `count`."""
    from matplotlib.ticker import MaxNLocator

    margin = 0.5 + 0.01 * count
    axes.set_xlim(1 - margin, max(count, 1) + margin)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def best_so_far(trials: Iterable[FinishedTrial], objective: int, direction: str) -> list[tuple[FinishedTrial, float]]:
    """The trials that were better in one objective than all before them, with their values."""
    steps: list[tuple[FinishedTrial, float]] = []
    for trial in trials:
        assert trial.values is not None
        value = trial.values[objective]
        if not steps or (value > steps[-1][1] if direction == "maximize" else value < steps[-1][1]):
            steps.append((trial, value))
    return steps


def is_wide(values: Sequence[float], direction: str) -> bool:
    """Whether values need a logarithmic scale. A few values near 0 must not decide, if higher is better."""
    if not values or min(values) <= 0:
        return False
    low = min(values) if direction == "minimize" else sorted(values)[len(values) // 10]
    return max(values) / low > 100


def scale(axis: Any, values: Sequence[float], direction: str) -> None:
    if is_wide(values, direction):
        (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log")
    else:
        axis.get_major_formatter().set_useOffset(False)


def new_figure(width: float, height: float) -> Any:
    """A figure that needs no display and no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # sweep_report.py may write it, too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may have a sign that the font lacks
        figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)
    return path


def title(figure: Any, text: str, ended: FinishedTrials) -> None:
    counts = Counter(trial.outcome for trial in ended.trials)
    parts = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    figure.suptitle(f"{text}\n{count_text(len(ended.trials), 'trial')}{': ' if parts else ''}{parts}", fontsize=11)


def legend_below(figure: Any, panels: Iterable[Any]) -> None:
    entries = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        entries.update(dict(zip(labels, handles, strict=True)))
    if entries:
        figure.legend(
            list(entries.values()), list(entries), loc="outside lower center", ncols=min(6, len(entries)),
            frameon=False, fontsize=9,
        )  # fmt: skip


def say(axes: Any, text: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 4}
    style = {"ha": "center", "va": "center", "color": "#666666", "fontsize": 12, "bbox": box, "zorder": 5}
    axes.text(0.5, 0.5, text, transform=axes.transAxes, **style)
    if not axes.has_data():
        axes.set_yticks([])


def wrapped(name: str, width: int) -> str:
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


def shortened(text: str, width: int) -> str:
    """A text in one line, without its middle where it is longer than `width`."""
    line = " ".join(text.split())
    if len(line) > width:
        line = f"{line[: width // 2]}…{line[-(width - width // 2 - 1) :]}"
    return _escaped(line)


def _escaped(text: str) -> str:
    """Matplotlib would read what stands between two dollar signs as mathematics."""
    return text.replace("$", r"\$")
