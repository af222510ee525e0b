"""The tables of published accuracies, from `conf/reproduce/*.yaml`. A row names a command and a paper's figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from metalearn.checks import one_of, real_number, true_or_false, whole_number
from metalearn.config.options import CONF
from metalearn.errors import ConfigError

TABLES = CONF / "reproduce"
LAST = "last"
METRICS = ("accuracy", "mse")


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
