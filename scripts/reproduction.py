"""The table of published accuracies: its rows, what their runs have found, and the page that shows both.

A row of `conf/reproduce/*.yaml` names a command and the figures of a paper. A finished run of it becomes a finding, a
small file of its own; RESULTS.md is drawn from findings alone, so that it can be drawn anew without the runs.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from metalearn.checks import one_of
from metalearn.config.compose import CONF
from metalearn.errors import ConfigError
from metalearn.files import write_atomically
from metalearn.runs.plots import Curve, curve_of

TABLES = CONF / "reproduce"
LAST = "last"
METRICS = ("accuracy", "mse")


class Published(NamedTuple):
    """A figure of a paper: after so many inner steps (or `last`), with its interval where the paper gives one."""

    after: str
    value: float | None
    ci95: float | None


class Row(NamedTuple):
    """One line of the table: the run that stands for it, and what the paper reports. Its overrides are those of
    train.py; or, where it judges the checkpoints `of` another row, those of scripts/evaluate.py."""

    name: str
    of: str | None
    method: str
    metric: str
    overrides: list[str]
    published: list[Published]
    source: str
    seeds: list[int]
    note: str


class Table(NamedTuple):
    """Rows that are compared with each other."""

    name: str
    title: str
    rows: list[Row]


Finding = dict[str, Any]
"""What a run has found, as `results/*.json` holds it; see `finding_of`."""


# Rows


def read_tables(folder: Path) -> list[Table]:
    """All tables, each from a yaml file, in the order of the files' names.

    Raises:
        ConfigError: no files, one that does not describe a table, or a row's name that is there twice.
    """
    tables = [_table(path) for path in sorted(folder.glob("*.yaml"))]
    names = [row.name for table in tables for row in table.rows]
    if not names:
        raise ConfigError(
            f"--tables {folder}: holds no tables; name a folder of yaml files such as {TABLES.name}/*.yaml"
        )
    for of in (row.of for table in tables for row in table.rows if row.of is not None):
        if of not in names:
            raise ConfigError(f"{folder}: of={of}: there is no such row; there are {', '.join(names)}")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{folder}: the row {name} is there {names.count(name)} times; give each a name of its own"
            )
    return tables


def _table(path: Path) -> Table:
    held = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    try:
        assert isinstance(held, dict)
        metric = str(held.get("metric", "accuracy"))
        one_of("metric", metric, METRICS)
        common = str(held.get("all", "")).split()
        rows = [_row(str(name), metric, common, fields) for name, fields in held["rows"].items()]
        return Table(path.stem, str(held["title"]), rows)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: does not describe a table ({error!r}); see the other files beside it") from error


def _row(name: str, metric: str, common: list[str], fields: Mapping[str, Any]) -> Row:
    unknown = fields.keys() - {"of", "method", "run", "paper", "ci95", "source", "seeds", "note"}
    if unknown:
        raise ValueError(f"{name}: {', '.join(sorted(unknown))}")
    paper = fields.get("paper")
    values = paper if isinstance(paper, Mapping) else {LAST: paper}
    return Row(
        name=name,
        of=fields.get("of"),
        method=str(fields["method"]),
        metric=metric,
        overrides=[*str(fields["run"]).split(), *common],
        published=[Published(str(after), value, fields.get("ci95")) for after, value in values.items()],
        source=str(fields.get("source", "")),
        seeds=list(fields.get("seeds", [0, 1])),
        note=str(fields.get("note", "")),
    )


# Findings


def finding_of(row: Row, run_dir: Path, facts: Mapping[str, Any]) -> Finding:
    """What a completed run has found; `facts` (command, date, commit) are added as they are.

    Raises:
        FileNotFoundError: the run is not complete.
    """
    result = json.loads((run_dir / "result.json").read_text())
    choices = OmegaConf.load(run_dir / ".hydra" / "hydra.yaml").hydra.runtime.choices
    return {
        "row": row.name,
        "algorithm": choices.algorithm,
        "dataset": choices.dataset,
        **_judgement(row.metric, run_dir, run_dir / ".hydra" / "config.yaml"),
        "steps": result["steps"],
        "seconds": result["seconds"],
        "seed": result["seed"],
        "workers": result["workers"],
        **facts,
        "validation": _rounded(curve_of(run_dir)),
    }


def finding_from(row: Row, trained: Finding, folder: Path, facts: Mapping[str, Any]) -> Finding:
    """What scripts/evaluate.py has found in `folder` with the checkpoint that `trained` tells of; steps, seconds and
    workers are those of the training, and there is no curve.

    Raises:
        FileNotFoundError: the test_report is not complete.
    """
    test_report = _judgement(row.metric, folder, folder / "config.yaml")
    return {**trained, "row": row.name, **test_report, **facts, "validation": None}


def _judgement(metric: str, folder: Path, config: Path) -> Finding:
    """The episodes that a checkpoint was tested on, and how it did."""
    test = json.loads((folder / "result.json").read_text())["test"]
    dataset = OmegaConf.load(config).dataset
    return {
        **{key: dataset.get(key) for key in ("split", "ways", "shots")},
        "queries": dataset.get("eval_queries", dataset.get("queries")),
        **{key: test.get(key) for key in (metric, "ci95", "tasks", "task_list", "transductive")},
        **{key: test[key] for key in ("by_step", "ci95_by_step")},
    }


def _rounded(curve: Curve) -> dict[str, Any]:
    seconds = [] if curve.seconds is None else [round(value, 1) for value in curve.seconds]
    return {"steps": curve.steps, "seconds": seconds, "values": [round(value, 5) for value in curve.values]}


def write_finding(folder: Path, finding: Finding) -> Path:
    """Puts a finding where `read_findings` looks, whole or not at all."""
    path = finding_path(folder, finding["row"], finding["seed"])
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(finding, indent=2) + "\n")
    return path


def finding_path(folder: Path, row: str, seed: int) -> Path:
    """The file of a row's finding."""
    return folder / f"{row}_seed{seed}.json"


def read_findings(folder: Path, row: str) -> list[Finding]:
    """A row's findings, by seed."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"{row}_seed*.json")]
    return sorted((f for f in found if f["row"] == row), key=lambda f: int(f["seed"]))


# The page


def verdict(metric: str, ours: float, ci95: float, published: Published) -> str:
    """`within`: our figure and the paper's differ by no more than both intervals allow, √(ours² + theirs²);
    `above`: ours is better; `below`: worse."""
    if published.value is None:
        return ""
    lead = ours - published.value if metric == "accuracy" else published.value - ours
    allowed = math.hypot(ci95, published.ci95 or 0.0)
    return "within" if abs(lead) <= allowed else "above" if lead > 0 else "below"


def page(tables: Sequence[Table], findings: Mapping[str, Sequence[Finding]], pictures: Mapping[str, str]) -> str:
    """RESULTS.md.

    Args:
        tables: what to show.
        findings: those of every row, by its name.
        pictures: the paths of the tables' learning curves, by the tables' names.
    """
    return "\n".join([_HEAD, *(line for table in tables for line in _section(table, findings, pictures))]) + "\n"


_HEAD = """# Results

Drawn from `results/*.json` by `python scripts/reproduce.py --render`; every figure there was found by the command that
stands below its table, and `python scripts/reproduce.py --only ROW` runs it again. ± is 1.96 · σ / √tasks over the test
tasks, which are the same for all rows of a table with as many queries a class. *Within* says that our figure (the mean
of our seeds) and the paper's differ by no more than both intervals allow; *above* is better than that, *below* worse,
*not run* what it says. Minutes are those of training and validation, with so many workers, each on one core. A
*transductive* evaluation normalises the queries of a task together, an inductive one by the task's support set."""


def _section(table: Table, findings: Mapping[str, Sequence[Finding]], pictures: Mapping[str, str]) -> Iterator[str]:
    yield from ("", f"## {table.title}", "")
    yield "| row | method | ours | paper | | queries | tasks | transductive | steps | minutes | workers |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in table.rows:
        for published in row.published:
            yield _line(row, findings.get(row.name, []), published)
    if table.name in pictures:
        yield from ("", f"![validation against time and steps]({pictures[table.name]})")
    notes = [f"- `{row.name}`: {row.note}" for row in table.rows if row.note]
    sources = sorted({row.source for row in table.rows if row.source})
    yield from ["", f"Figures of the papers: {'; '.join(sources)}."] if sources else []
    yield from ["", *notes] if notes else []
    yield from ["", *_commands(table, findings)]


def _line(row: Row, findings: Sequence[Finding], published: Published) -> str:
    method = row.method if published.after == LAST else f"{row.method}, {_counted(int(published.after), 'step')}"
    form = "{:.2%}" if row.metric == "accuracy" else "{:.3f}"
    paper = "–" if published.value is None else _with_interval(form, published.value, published.ci95)
    if not findings:
        return f"| `{row.name}` | {method} | *not run* | {paper} | | | | | | | |"
    values = [_at(finding, row.metric, published.after) for finding in findings]
    told = ", ".join(_with_interval(form, *value) for value in values)
    mean, ci95 = (statistics.fmean(column) for column in zip(*values, strict=True))
    judged = verdict(row.metric, mean, ci95, published)
    first = findings[0]
    minutes = ", ".join(f"{finding['seconds'] / 60:.1f}" for finding in findings)
    cells = (
        first["queries"], first["tasks"], "yes" if first["transductive"] else "no", first["steps"], minutes,
        first["workers"],
    )  # fmt: skip
    rest = " | ".join(map(str, cells))
    return f"| `{row.name}` | {method} | {told} | {paper} | {judged and f'*{judged}*'} | {rest} |"


def _at(finding: Finding, metric: str, after: str) -> tuple[float, float]:
    """A finding's figure after so many inner steps, and its interval."""
    if after == LAST:
        return finding[metric], finding["ci95"]
    return finding["by_step"][after], finding["ci95_by_step"][after]


def _with_interval(form: str, value: float, ci95: float | None) -> str:
    return form.format(value) + (f" ± {form.format(ci95)}" if ci95 is not None else "")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _commands(table: Table, findings: Mapping[str, Sequence[Finding]]) -> Iterator[str]:
    yield "```bash"
    for row in table.rows:
        found = findings.get(row.name, [])
        for finding in found:
            yield f"{finding['command']}  # {finding['date']}, {finding['commit']}"
        if not found:
            yield f"python scripts/reproduce.py --only {row.name}  # not run"
    yield "```"


def curves_of(table: Table, findings: Mapping[str, Sequence[Finding]]) -> list[Curve]:
    """The validation curves of a table's rows: of each the first seed that was run."""
    first = [(row, findings[row.name][0]) for row in table.rows if findings.get(row.name)]
    return [_curve(row, finding) for row, finding in first if finding["validation"] is not None]


def _curve(row: Row, finding: Finding) -> Curve:
    held = finding["validation"]
    return Curve(row.method, row.metric, held["steps"], held["seconds"] or None, held["values"])
