"""The tables of published accuracies: their rows, the results of our runs, and the page that shows both.

A row of `conf/reproduce/*.yaml` names a command and the figures of a paper. The result of a finished run is a small
file in `results/`. RESULTS.md is drawn from these files alone: it needs no run folder.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from metalearn.checks import one_of, real_number, true_or_false, whole_number
from metalearn.config.foreign import read_config
from metalearn.config.options import CONF
from metalearn.errors import ConfigError
from metalearn.files import read_object, write_atomically
from metalearn.runs.plots import Curve, Panel, curve_of

TABLES = CONF / "reproduce"
LAST = "last"
METRICS = ("accuracy", "mse")

MOST_MINUTES = 120
"""Minutes of one core that the training of a table's best row may take: an hour on two."""


class Published(NamedTuple):
    """A paper's figure after so many inner steps (or `last`), with its interval if the paper gives one."""

    after: str
    value: float | None
    ci95: float | None


class Row(NamedTuple):
    """One line of a table: a run of ours, and the paper's figures. The overrides are those of train.py; with `of`, they
    are those of scripts/evaluate.py, and the row evaluates the checkpoints of the row that `of` names: each by itself,
    or, as an `ensemble`, those of all its seeds together. It may override what the table says in `all`."""

    name: str
    of: str | None
    method: str
    metric: str
    overrides: list[str]
    published: list[Published]
    source: str
    seeds: list[int]
    note: str
    ensemble: bool = False


class Table(NamedTuple):
    """Rows that are compared with each other; `by_step`: in a picture of their tests against inner steps, with a panel
    for each number of shots, in place of their validations. `about` stands below its title. Rows of a table that is
    `on_request` run only if they are named."""

    name: str
    title: str
    rows: list[Row]
    by_step: bool = False
    about: str = ""
    on_request: bool = False


Result = dict[str, Any]
"""The result of a run, as a file in `results/` holds it; see `result_of_run`."""


# Rows


def read_tables(folder: Path) -> list[Table]:
    """All tables, in the order of their yaml files' names.

    Raises:
        ConfigError: there is no file, a file does not describe a table, two rows have the same name, or `of` names no
            row that trains.
    """
    tables = [_table(path) for path in sorted(folder.glob("*.yaml"))]
    names = [row.name for table in tables for row in table.rows]
    if not names:
        raise ConfigError(
            f"--tables {folder}: holds no tables; name a folder of yaml files such as {TABLES.name}/*.yaml"
        )
    trained = [row.name for table in tables for row in table.rows if row.of is None]
    for row in (row for table in tables for row in table.rows if row.of is not None):
        if row.of not in trained:
            allowed = ", ".join(trained) or "none here"
            raise ConfigError(f"{folder}: {row.name}: of={row.of}: must name a row that trains; allowed: {allowed}")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{folder}: {names.count(name)} rows have the name {name}; give each another name")
    return tables


def _table(path: Path) -> Table:
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        assert isinstance(content, dict)
        metric = str(content.get("metric", "accuracy"))
        by_step, on_request = content.get("by_step", False), content.get("on_request", False)
        one_of("metric", metric, METRICS)
        true_or_false("by_step", by_step)
        true_or_false("on_request", on_request)
        common = str(content.get("all", "")).split()
        rows = [_row(str(name), metric, common, fields) for name, fields in content["rows"].items()]
        return Table(path.stem, str(content["title"]), rows, by_step, str(content.get("about", "")), on_request)
    except (
        AssertionError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        OmegaConfBaseException,
        YAMLError,
    ) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"{path}: does not describe a table ({reason}); see the other files beside it") from error


def _row(name: str, metric: str, common: list[str], fields: Mapping[str, Any]) -> Row:
    unknown = fields.keys() - {"of", "ensemble", "method", "run", "paper", "ci95", "source", "seeds", "note"}
    if unknown:
        raise ValueError(f"{name}: {', '.join(sorted(unknown))}")
    ensemble = fields.get("ensemble", False)
    true_or_false("ensemble", ensemble)
    if ensemble and ("of" not in fields or "seeds" in fields):
        raise ValueError(f"{name}: an ensemble has the seeds of the row that its `of` names")
    paper = fields.get("paper")
    values = paper if isinstance(paper, Mapping) else {LAST: paper}
    for value in (*values.values(), fields.get("ci95")):
        if value is not None:
            real_number(name, value)
    for after in values:
        if after != LAST:
            whole_number(f"{name}: paper, number of inner steps", after, at_least=0)
    seeds = list(fields.get("seeds", [0] if ensemble else [0, 1]))
    if not seeds:
        raise ValueError(f"{name}: seeds=[]: name one or more")
    for seed in seeds:
        whole_number(f"{name}: seed", seed, at_least=0)
    own = str(fields["run"]).split()
    named = {override.partition("=")[0] for override in own}
    return Row(
        name=name,
        of=fields.get("of"),
        ensemble=ensemble,
        method=str(fields["method"]),
        metric=metric,
        overrides=[*own, *(override for override in common if override.partition("=")[0] not in named)],
        published=[Published(str(after), value, fields.get("ci95")) for after, value in values.items()],
        source=str(fields.get("source", "")),
        seeds=seeds,
        note=str(fields.get("note", "")),
    )


# Results


def result_of_run(row: Row, run_dir: Path, facts: Mapping[str, Any]) -> Result:
    """The result of a completed run; `facts` (command, date, commit, machine) are added as they are.

    Raises:
        FileNotFoundError: the run is not complete.
        ConfigError: its test has not what the row asks for.
    """
    result = read_object(run_dir / "result.json")
    choices = read_config(run_dir / ".hydra" / "hydra.yaml")["hydra"]["runtime"]["choices"]
    return {
        "row": row.name,
        "algorithm": choices["algorithm"],
        "dataset": choices["dataset"],
        **_evaluation(row, run_dir, run_dir / ".hydra" / "config.yaml"),
        "steps": result["steps"],
        "seconds": result["seconds"],
        "seed": result["seed"],
        "workers": result["workers"],
        **facts,
        "validation": _rounded(curve_of(run_dir)),
    }


def result_of_evaluation(
    row: Row, seed: int, trained: Sequence[Result], folder: Path, facts: Mapping[str, Any]
) -> Result:
    """The result of scripts/evaluate.py in `folder`. Steps, seconds and workers are those of the training, whose result
    is `trained`; an ensemble has several, and took the seconds of all. Algorithm and dataset are those of the training
    if the row names no others. There is no learning curve.

    Raises:
        FileNotFoundError: the evaluation is not complete.
        ConfigError: its test has not what the row asks for.
    """
    chosen = {key: option for key, _, option in (change.partition("=") for change in row.overrides)}
    first = trained[0]
    return {
        "row": row.name,
        **{key: chosen.get(key, first[key]) for key in ("algorithm", "dataset")},
        **_evaluation(row, folder, folder / "config.yaml"),
        "steps": first["steps"],
        "seconds": seconds_of(trained),
        "seed": seed,
        "workers": first["workers"],
        **facts,
        "validation": None,
    }


def seconds_of(trained: Sequence[Result]) -> float:
    """The seconds of trainings, in all."""
    return math.fsum(result["seconds"] for result in trained)


def _evaluation(row: Row, folder: Path, config: Path) -> Result:
    """The episodes and the figures of a test."""
    test = read_object(folder / "result.json").get("test")
    metric = row.metric
    if test is None:
        raise ConfigError(f"{folder}: ended without a test; leave pause_after out of the row {row.name}")
    if test.get(metric) is None:
        raise ConfigError(f"metric={metric}: the test of the row {row.name} has none; type the metric of its dataset")
    steps = [published.after for published in row.published if published.after != LAST]
    missing = [after for after in steps if after not in test["by_step"]]
    if missing:
        raise ConfigError(
            f"paper: the test of the row {row.name} has inner steps {', '.join(test['by_step'])}, and not "
            f"{', '.join(missing)}; type algorithm.eval_steps in its run"
        )
    dataset = read_config(config)["dataset"]
    return {
        **{key: dataset.get(key) for key in ("split", "ways", "shots")},
        "queries": dataset.get("eval_queries", dataset.get("queries")),
        **{key: test.get(key) for key in (metric, "ci95", "tasks", "task_list", "transductive")},
        **{key: test[key] for key in ("by_step", "ci95_by_step", "seen_classes") if key in test},
    }


def _rounded(curve: Curve) -> dict[str, Any]:
    seconds = [] if curve.seconds is None else [round(value, 1) for value in curve.seconds]
    return {"steps": curve.steps, "seconds": seconds, "values": [round(value, 5) for value in curve.values]}


def write_result(folder: Path, result: Result) -> Path:
    """Writes a result where `read_results` reads it, whole or not at all."""
    path = result_path(folder, result["row"], result["seed"])
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(result, indent=2) + "\n")
    return path


def result_path(folder: Path, row: str, seed: int) -> Path:
    """The file of a row's result."""
    return folder / f"{row}_seed{seed}.json"


def read_result(path: Path) -> Result:
    """The result in a file.

    Raises:
        ConfigError: it holds something else, such as the marks of a merge.
    """
    try:
        result = read_object(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); mend it, or remove it to run the row again") from error
    if not result.keys() >= {"row", "seed", "seconds", "command"}:
        raise ConfigError(f"{path}: is not the result of a run; remove it to run the row again")
    return result


def read_results(folder: Path, row: str) -> list[Result]:
    """A row's results, by seed.

    Raises:
        ConfigError: a file that is no result.
    """
    results = [read_result(path) for path in folder.glob(f"{row}_seed*.json")]
    return sorted((result for result in results if result["row"] == row), key=lambda result: int(result["seed"]))


# The page


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
