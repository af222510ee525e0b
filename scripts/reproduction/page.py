"""RESULTS.md, drawn from the rows of the tables and the results of their runs. It needs no run folder."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from metalearn.errors import ConfigError
from metalearn.reporting.plots import Curve, Panel
from scripts.reproduction.results import Result
from scripts.reproduction.rows import LAST, Published, Row, Table

MOST_MINUTES = 120
"""Minutes of one core that the training of a table's best row may take: an hour on two."""


def comparison_with_paper(metric: str, ours: float, ci95: float, published: Published) -> str:
    """`above` if our figure is better than the paper's, `below` if it is worse; `within` if they differ by no more than
    both intervals allow, √(ours² + theirs²)."""
    if published.value is None:
        return ""
    lead = ours - published.value if metric == "accuracy" else published.value - ours
    allowed = math.hypot(ci95, published.ci95 or 0.0)
    return "within" if abs(lead) <= allowed else "above" if lead > 0 else "below"


def page(tables: Sequence[Table], results: Mapping[str, Sequence[Result]], plots: Mapping[str, str]) -> str:
    """RESULTS.md: all tables, then all commands.

    Args:
        tables: what to show.
        results: the results of every row, by its name.
        plots: the paths of the tables' pictures, by the tables' names.
    """
    shown = [line for table in tables for line in _section(table, results, plots)]
    commands = [line for table in tables for line in _commands(table, results)]
    return "\n".join([_HEAD, *shown, *_COMMANDS, *commands]) + "\n"


_HEAD = """# Results

*Ours* is the test result of each seed; ± is its 95% interval over the test tasks, 1.96 · σ / √tasks. The word behind
the paper's figure compares it with the mean of our seeds: *within* means that they differ by at most √(a² + b²), where
a is the mean interval of our seeds and b that of the paper (0 if it gives none), *above* that ours is better, *below*
that ours is worse. In one table, rows with the same numbers of shots and queries have the same test tasks. *Split* is
the division of the characters ([docs/data.md](docs/data.md)). A *transductive* evaluation normalises, or predicts, all
queries of a task together; an inductive one normalises them by the statistics of the support set. *Minutes* are those
of training and validation, with one core for each worker; a mean of several networks has those of all of them. Many
runs had other work beside them, or were paused in between, so minutes say little about the speeds of two rows: see
[docs/performance.md](docs/performance.md). [docs/recipes.md](docs/recipes.md) says how the settings were chosen. The
[commands](#commands) stand at the end; `python scripts/reproduce.py --render` draws this page from `results/*.json`."""

_COMMANDS = (
    "", "## Commands", "",
    "Each figure above is the result of one of these commands, on this date, at this commit and on this machine. "
    "Commands without a machine ran on two cores, before machines were recorded; a `+` behind a commit says that the "
    "code had changes which were not committed. `python scripts/reproduce.py --only ROW --output FOLDER` runs a row "
    "again, in that folder.",
)  # fmt: skip


_FORMS = {"accuracy": "{:.2%}", "mse": "{:.3f}"}
"""How figures are written, by metric."""

_LARGE = 1000.0
"""From here on, as where a task diverges, a figure is written with an exponent."""


def _section(table: Table, results: Mapping[str, Sequence[Result]], plots: Mapping[str, str]) -> Iterator[str]:
    yield from ("", f"## {table.title}", "")
    yield from (table.about, "") if table.about else ()
    yield "| row | method | ours | paper | | split | queries | tasks | transductive | steps | minutes | workers |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in table.rows:
        for published in row.published:
            yield _line(row, results.get(row.name, []), published)
    yield from _best(table, results)
    if table.name in plots:
        shown = "test against inner steps" if table.by_step else "validation against time and steps"
        yield from ("", f"![{shown}]({plots[table.name]})")
    notes = [f"- `{row.name}`: {row.note}" for row in table.rows if row.note]
    sources = sorted({row.source for row in table.rows if row.source})
    yield from ["", f"Figures of the papers: {'; '.join(sources)}."] if sources else []
    yield from ["", *notes] if notes else []


def _line(row: Row, results: Sequence[Result], published: Published) -> str:
    method = row.method if published.after == LAST else f"{row.method}, {_counted(int(published.after), 'step')}"
    form = _FORMS[row.metric]
    paper = "–" if published.value is None else _with_interval(form, published.value, published.ci95)
    if not results:
        return f"| `{row.name}` | {method} | *not run* | {paper} | | | | | | | | |"
    values, ours = (
        [_at(result, row.metric, published.after) for result in results],
        _ours(row, results, published.after),
    )
    mean, ci95 = (statistics.fmean(column) for column in zip(*values, strict=True))
    word = comparison_with_paper(row.metric, mean, ci95, published)
    first = results[0]
    method += _seen(first.get("seen_classes"))
    minutes = ", ".join(f"{result['seconds'] / 60:.1f}" for result in results)
    cells = (
        first["split"] or "–", first["queries"], first["tasks"], "yes" if first["transductive"] else "no",
        first["steps"], minutes, first["workers"],
    )  # fmt: skip
    rest = " | ".join(map(str, cells))
    return f"| `{row.name}` | {method} | {ours} | {paper} | {word and f'*{word}*'} | {rest} |"


def _seen(counted: Mapping[str, Any] | None) -> str:
    """What follows the method if classes of the test may have been seen before it; see `seen_classes=report`."""
    if counted is None:
        return ""
    seen = (counted["trained_on"] or 0) + (counted["validated_on"] or 0)
    if seen:
        least = "" if counted["complete"] else "at least "
        return f"; **trained or validated on {least}{seen} of {counted['classes']} test classes**"
    return "" if counted["complete"] else "; **not known which test classes it was trained on**"


class _Figure(NamedTuple):
    """The mean of a row's seeds after so many inner steps."""

    value: float
    row: Row
    after: str
    results: Sequence[Result]


def _best(table: Table, results: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """The best of the rows that took at most `MOST_MINUTES`, for tests of either kind; in a table `by_step`, for each
    number of shots."""
    figures = [
        _Figure(statistics.fmean(_at(result, row.metric, p.after)[0] for result in found), row, p.after, found)
        for row in table.rows
        if (found := results.get(row.name)) and max(_core_minutes(result) for result in found) <= MOST_MINUTES
        for p in row.published
    ]
    groups = {"": figures}
    if table.by_step:
        shots = sorted({figure.results[0]["shots"] for figure in figures})
        groups = {
            f" with {_counted(k, 'shot')}": [figure for figure in figures if figure.results[0]["shots"] == k]
            for k in shots
        }
    for name, group in groups.items():
        if named := _best_of_kinds(group):
            limit = f"**Best of ours{name}**, as chosen by this test itself, within {MOST_MINUTES} minutes of one core"
            yield from ("", f"{limit}: {'; '.join(named)}.")


def _best_of_kinds(figures: Sequence[_Figure]) -> list[str]:
    """The best transductive and the best inductive figure, as far as there are any."""
    kinds = {
        kind: [figure for figure in figures if figure.results[0]["transductive"] == transductive]
        for kind, transductive in (("transductive", True), ("inductive", False))
    }
    return [
        f"{kind} `{best.row.name}`, {_ours(best.row, best.results, best.after)}"
        for kind, of_kind in kinds.items()
        if of_kind
        for best in [(max if of_kind[0].row.metric == "accuracy" else min)(of_kind, key=lambda figure: figure.value)]
    ]


def _core_minutes(result: Result) -> float:
    return float(result["seconds"]) / 60 * int(result["workers"])


def _ours(row: Row, results: Sequence[Result], after: str) -> str:
    """The figures of all seeds."""
    form = _FORMS[row.metric]
    return ", ".join(_with_interval(form, *_at(result, row.metric, after)) for result in results)


def _at(result: Result, metric: str, after: str) -> tuple[float, float]:
    """A result's figure after so many inner steps, and its interval.

    Raises:
        ConfigError: its test had other inner steps.
    """
    if after == LAST:
        return result[metric], result["ci95"]
    if after not in result["by_step"]:
        raise ConfigError(
            f"paper: the result of the row {result['row']}, seed {result['seed']}, has inner steps "
            f"{', '.join(result['by_step'])}, and not {after}; remove the result to run the row again"
        )
    return result["by_step"][after], result["ci95_by_step"][after]


def _with_interval(form: str, value: float, ci95: float | None) -> str:
    form = form if value < _LARGE else "{:.1e}"
    return form.format(value) + (f" ± {form.format(ci95)}" if ci95 is not None else "")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _commands(table: Table, results: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    yield from ("", f"### {table.title}", "", "```bash")
    for row in table.rows:
        for result in results.get(row.name, []):
            where = f", {result['machine']}" if "machine" in result else ""
            yield f"{result['command']}  # {result['date']}, {result['commit']}{where}"
        if not results.get(row.name):
            yield f"python scripts/reproduce.py --only {row.name}  # not run"
    yield "```"


def curves_of(table: Table, results: Mapping[str, Sequence[Result]]) -> list[Curve]:
    """The validation curves of a table's rows, each of the row's first seed."""
    first = [(row, results[row.name][0]) for row in table.rows if results.get(row.name)]
    return [_curve(row, result) for row, result in first if result["validation"] is not None]


def panels_of(table: Table, results: Mapping[str, Sequence[Result]]) -> list[Panel]:
    """The tests of a table's rows after each inner step, the mean over the seeds: a panel for each number of shots, a
    line for each algorithm."""
    shown = [found for row in table.rows if (found := results.get(row.name))]
    shots = sorted({found[0]["shots"] for found in shown})
    return [
        Panel(_counted(k, "shot"), {found[0]["algorithm"]: _means(found) for found in shown if found[0]["shots"] == k})
        for k in shots
    ]


def _means(results: Sequence[Result]) -> dict[int, float]:
    """The mean over the seeds after each inner step that all of them have."""
    common = set.intersection(*({int(step) for step in result["by_step"]} for result in results))
    return {step: statistics.fmean(result["by_step"][str(step)] for result in results) for step in sorted(common)}


def _curve(row: Row, result: Result) -> Curve:
    values = result["validation"]
    return Curve(row.method, row.metric, values["steps"], values["seconds"] or None, values["values"])
