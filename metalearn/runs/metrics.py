"""From the values of every task to the reported figures; and the classes that parameters have been trained and
validated on, which every checkpoint and published model names."""

import csv
import hashlib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metalearn.storage.files import writing
from metalearn.types import (
    BITS,
    EXAMPLES,
    POSITIONS,
    KnowsOptimum,
    Metrics,
    OfSets,
    Params,
    TaskSource,
    TellsWrongLabels,
)

METRIC_NAMES = {
    BITS: "bits", "accuracy": "accuracy", "mse": "mean squared error", "mae": "mean absolute error",
    "top_k": "top-k accuracy", "exact_match": "exact match", "f1": "F1", "score": "score",
}  # fmt: skip
"""The metrics that decide which of two learners is better, and their names in words."""

ERRORS = (BITS, "mse", "mae", "loss")  # figures of which less is better
BEST_BY = "best_by"  # the key of a validation whose loss, not its metric, says how good it is. Its value is `loss`.
BY_SET = "by_set"  # the key of figures of each data set
PARTS = ("accuracy", "top_k", "exact_match", "f1")  # metrics that are parts of 1, and shown in percent


def main_metric(values: Collection[str]) -> str:
    """The metric among values."""
    return next((name for name in METRIC_NAMES if name in values), "mse")


def deciding(values: Mapping[str, Any]) -> str:
    """The figure of a validation that says how good it is."""
    return "loss" if BEST_BY in values else main_metric(values)


def better(metric: str, new: float, old: float | None) -> bool:
    """Whether `new` is better than `old`. Every value is better than None, and a finite one than one that is not."""
    # No comparison with NaN is true: a first value of NaN would stay the best for ever.
    if old is None or not math.isfinite(old):
        return old is None or math.isfinite(new)
    return math.isfinite(new) and (new < old if metric in ERRORS else new > old)


def jsonable(values: Any) -> Any:
    """The same values, with None for numbers that are not finite: JSON cannot write them."""
    if isinstance(values, dict):
        return {name: jsonable(value) for name, value in values.items()}
    return None if isinstance(values, float) and not math.isfinite(values) else values


def from_json(values: Any) -> Any:
    """The values before `jsonable`: NaN for every None, but for what is not known of classes."""
    if isinstance(values, dict):
        return {name: value if name == KEY else from_json(value) for name, value in values.items()}
    return math.nan if values is None else values


def summary(values: Metrics, unit: str = "tasks") -> dict[str, Any]:
    """Figures over tasks (or samples: `unit`), after the last inner step, from values [tasks, inner steps + 1].

    Returns:
        The metric, such as `accuracy` or `mse`; `ci95` (1.96 · σ / √tasks), `loss`, and `tasks` or `samples`, their
        number.
        `by_step` and `ci95_by_step` have metric and interval after each inner step; its number is the key, as a string.
        For tasks also `task_list`: two lists with the same name have the same tasks. Of documents, which have no inner
        steps of their own, `bits` is the mean over all symbols, and `bits_by_position` and `ci95_by_position` have the
        mean from each place to the next. Where there are figures of other learners beside, such as `equal_loss`, each
        of them and the loss has an interval, such as `ci95_equal_loss`.
    """
    metric = main_metric(values)
    table = values[metric].double()
    tasks = table.shape[0]
    name = task_list_id(values)
    means = table.mean(dim=0).tolist()
    intervals = [_ci95(column) for column in table.unbind(1)]
    by_position: dict[str, Any] = {}
    if POSITIONS in values:
        places = [str(place) for place in values[POSITIONS][0, :-1].tolist()]
        by_position = {
            "bits_by_position": dict(zip(places, means, strict=False)),
            "ci95_by_position": dict(zip(places, intervals, strict=False)),
            "symbols": int(values[POSITIONS][0, -1]),
        }
        means, intervals = means[-1:], intervals[-1:]
    others: dict[str, float] = {}
    for key in [key for key in values if key.endswith(("_loss", f"_{metric}"))]:
        others |= _with_interval(key, values[key])
    loss = _with_interval("loss", values["loss"]) if others else {"loss": values["loss"][:, -1].double().mean().item()}
    return {
        metric: means[-1], "ci95": intervals[-1], **loss, **others, unit: tasks,
        **({} if name is None else {"task_list": name}),
        "by_step": {str(step): value for step, value in enumerate(means)},
        "ci95_by_step": {str(step): value for step, value in enumerate(intervals)}, **by_position,
    }  # fmt: skip


def _with_interval(name: str, table: Tensor) -> dict[str, float]:
    """The mean of the last column, and half its 95% interval."""
    column = table[:, -1].double()
    return {name: column.mean().item(), f"ci95_{name}": _ci95(column)}


def _ci95(column: Tensor) -> float:
    """Half the 95% interval of the mean over tasks; of a single one it is not known."""
    return 1.96 * column.std().item() / math.sqrt(len(column)) if len(column) > 1 else math.nan


def figures_of(
    values: Metrics, source: TaskSource, split: str, unit: str = "tasks", reach: int | None = None
) -> dict[str, Any]:
    """The `summary` of the first tasks of a split; where they are of several data sets, `by_set` has that of each.

    Where the best prediction of a source's documents is known, `optimum_by_position` has its bits, and
    `window_optimum_by_position` those of the best one by counts in the last `reach` symbols, which a network sees.
    """
    figures = summary(values, unit)
    if POSITIONS in values and isinstance(source, KnowsOptimum):
        documents = source.episodes(split, torch.arange(len(values["loss"])))
        starts = [int(place) for place in figures["bits_by_position"]]
        for name, last in (("optimum", None), *([("window_optimum", reach)] if reach else [])):
            bits = source.optimum(documents, last) / math.log(2)
            spans = zip(starts, [*starts[1:], bits.shape[1]], strict=True)
            figures[f"{name}_by_position"] = {str(a): bits[:, a:b].mean().item() for a, b in spans}
    if not isinstance(source, OfSets):
        return figures
    places: dict[str, list[int]] = {}
    for number in range(len(values["loss"])):
        places.setdefault(source.set_of(split, number), []).append(number)
    each = {name: summary({key: table[numbers] for key, table in values.items()}) for name, numbers in places.items()}
    return figures | {BY_SET: each}


def of_wrong_labels(params: Params, source: TaskSource) -> dict[str, float]:
    """Where a source has made labels wrong, and parameters weigh its examples, `wrong_auc`: the probability that an
    example with a right label weighs more than one with a wrong label."""
    weights = params.get(EXAMPLES)
    if weights is None or not isinstance(source, TellsWrongLabels):
        return {}
    wrong = source.wrong_labels()
    lead = weights[~wrong].unsqueeze(1) - weights[wrong]
    return {"wrong_auc": ((lead.sign() + 1) / 2).double().mean().item()} if lead.numel() else {}


LIST_VERSION = 1  # the version of the lists of test tasks. Raise it when the same config no longer gives the same tasks


def task_list_id(values: Metrics) -> str | None:
    """The name of a list of tasks: its version, and a digest of the content of all tasks; None without digests."""
    if "digest" not in values:
        return None
    numbers = values["digest"].flatten().tolist()
    return f"v{LIST_VERSION}-{hashlib.sha256(repr(numbers).encode()).hexdigest()[:12]}"


TESTS = "test.csv"  # the file of a run folder that `write_table` makes of the test


def write_table(path: Path, values: Metrics) -> None:
    """Writes a line for each task: its number, the digest of its content, its loss and metric after each inner step.
    Raises RunError if it cannot be written."""
    columns = {"task": range(len(values["loss"]))}
    for name, table in values.items():
        for step, column in enumerate(table.t().tolist()):
            columns[name if name == "digest" else f"{name}_{step}"] = column
    with writing(path), path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


class Tested(NamedTuple):
    """A metric of each test task, after the last inner step, and the digests of the tasks' contents, where there are
    any: tasks of equal digests are the same."""

    metric: str
    values: list[float]
    digests: list[str]

    def mean(self) -> tuple[float, float]:
        """The mean over the tasks, and half its 95% interval."""
        column = torch.tensor(self.values, dtype=torch.float64)
        return column.mean().item(), _ci95(column)


def read_table(path: Path) -> Tested:
    """The inverse of `write_table`, for the main metric. Raises FileNotFoundError if there is no such file, and
    ValueError if it is damaged."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        metric = main_metric([name.rpartition("_")[0] for name in rows[0]])
        last = [name for name in rows[0] if name.rpartition("_")[0] == metric][-1]
        return Tested(metric, [float(row[last]) for row in rows], [row.get("digest", "") for row in rows])
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is no table of test tasks; bring back the one that the run wrote") from error


def difference(first: Tested, other: Tested) -> tuple[float, float, bool]:
    """The mean of another run's metric minus the first one's, half its 95% interval, and whether it is paired: with the
    same test tasks the interval is that of the mean of their differences, which is narrower, since what makes a task
    hard is in both. Else it is that of two independent means."""
    if first.digests == other.digests and all(first.digests):
        deltas = [b - a for a, b in zip(first.values, other.values, strict=True)]
        return *Tested(first.metric, deltas, first.digests).mean(), True
    (start, half), (end, other_half) = first.mean(), other.mean()
    return end - start, math.hypot(half, other_half), False


def shown(metric: str, value: float, ci95: float | None = None, sign: str = "") -> str:
    """A figure with its interval: `95.83% ± 0.74%`; one that is no part of 1 has the decimals of its interval, which
    has two digits. `sign` is `+` to show that of positive ones, too."""
    if metric in PARTS:
        form = ".2%"
    elif ci95 and math.isfinite(ci95):
        form = f".{max(0, 1 - math.floor(math.log10(ci95)))}f"
    else:
        form = ".4g"
    return f"{value:{sign}{form}}" + ("" if ci95 is None else f" ± {ci95:{form}}")


def describe(figures: dict[str, Any]) -> str:
    """A summary in words: `accuracy 95.83% ± 0.74% (600 tasks)`, or the mean error."""
    metric = main_metric(figures)
    form = ".2%" if metric in PARTS else ".4f"
    unit = "samples" if "samples" in figures else "tasks"
    losses = [f", {name} {figures[name]:.4f} ± {figures[f'ci95_{name}']:.4f}" for name in figures
              if name.endswith("loss") and f"ci95_{name}" in figures]  # fmt: skip
    return f"{metric} {figures[metric]:{form}} ± {figures['ci95']:{form}} ({figures[unit]} {unit}){''.join(losses)}"


KEY = "seen_classes"  # the key of the seen classes in meta.json
SEEN_DRAWERS = "seen_drawers"
"""The key of the names of drawers that a test holds back, and the training has shown, in result.json."""


class Seen(NamedTuple):
    """The identities (see `metalearn.types.NamesClasses`) of the classes in training and in validation. `complete` is
    false if some are not known: the training's, or those of the run that it began from. `drawers` are the known ones of
    the training (see `metalearn.types.NamesDrawers`)."""

    train: frozenset[str] = frozenset()
    val: frozenset[str] = frozenset()
    complete: bool = True
    drawers: frozenset[str] = frozenset()

    def joined(self, other: "Seen") -> "Seen":
        """The classes and drawers of both."""
        complete = self.complete and other.complete
        return Seen(self.train | other.train, self.val | other.val, complete, self.drawers | other.drawers)


UNKNOWN_OVERLAP = {"trained_on": None, "validated_on": None, "classes": None, "complete": False}
"""The report on classes that have no identities."""


def overlap(seen: Seen, split: str, identities: frozenset[str]) -> dict[str, Any]:
    """The report on the classes of a split, `test` or `val`: how many of all `classes` were trained on, and how many
    only validated on. Validation classes may be validated on again."""
    trained_on = identities & seen.train
    validated_on = identities & seen.val - trained_on if split == "test" else ()
    counts = {"trained_on": len(trained_on), "validated_on": len(validated_on), "classes": len(identities)}
    return counts | {"complete": seen.complete}


def to_meta(seen: Seen) -> dict[str, Any]:
    """Seen classes as plain values."""
    # Texts, not lists: indented JSON would give each of a hundred thousand classes a line.
    texts = {name: " ".join(sorted(getattr(seen, name))) for name in ("train", "val", "drawers")}
    return {"complete": seen.complete} | {name: text for name, text in texts.items() if text or name != "drawers"}


def from_meta(meta: Mapping[str, Any]) -> Seen:
    """The seen classes in the content of meta.json; nothing, and not complete, if it says none."""
    saved = meta.get(KEY)
    if not isinstance(saved, dict) or not all(isinstance(saved.get(name), str) for name in ("train", "val")):
        return Seen(complete=False)
    drawers = saved.get("drawers", "")
    return Seen(
        frozenset(saved["train"].split()), frozenset(saved["val"].split()), saved.get("complete") is True,
        frozenset(drawers.split() if isinstance(drawers, str) else ()),
    )  # fmt: skip
