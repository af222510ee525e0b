"""index.html: all runs below a folder in one table that sorts, with links to their reports."""

import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from metalearn.config.foreign import read_config, read_yaml
from metalearn.config.values import leaves
from metalearn.reporting.figures import METRICS, rows_of
from metalearn.reporting.page import note, page, text
from metalearn.reporting.report import REPORT
from metalearn.runs.metrics import main_metric
from metalearn.storage.files import read_object, write_atomically

INDEX = "index.html"

_SIGNS = ("result.json", METRICS, ".hydra")
"""A folder with one of these holds a run."""
_DEEPEST = 4
_MOST_KEYS = 12
_LONGEST = 120
"""Characters of a value that are shown."""
_OF_THE_RUN = ("run", "resume", "pause_after", "workers", "hydra", "logger", "launch", "checkpoint", "device")
"""Keys, and groups of them, that do not say what is learned."""

# A table that a browser without JavaScript shows as it is.
_SORT = """
document.querySelectorAll("th").forEach((head, column) => {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  head.append(button);
  button.onclick = () => {
    const up = head.ariaSort !== "ascending", body = document.querySelector("tbody");
    const value = row => {
      const { sort } = row.cells[column].dataset;
      return sort === "" || isNaN(sort) ? sort : +sort;
    };
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1);
    });
    body.append(...rows);
    document.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
    head.ariaSort = up ? "ascending" : "descending";
  };
});
"""


class FoundRun(NamedTuple):
    """A run, by its path from the folder: its `status` in words, the keys that were typed, the values of all, its
    result, and whether it has a report."""

    path: Path
    status: str
    changed: Mapping[str, str]
    config: Mapping[str, Any]
    result: Mapping[str, Any]
    has_report: bool


def write_index(folder: Path) -> int:
    """Writes the page into the folder; returns the number of runs.

    Raises:
        FileNotFoundError: there is no such folder, or no run below it.
        RunError: it cannot be written.
    """
    runs = [_found(folder, path) for path in _folders_of_runs(folder)]
    if not runs:
        raise FileNotFoundError(f"{folder}: there are no runs below it, {_DEEPEST} deep; type the folder of some")
    name = folder.resolve().name
    parts = [f"<h1>{text(name)}: {len(runs)} run{'s' * (len(runs) > 1)}</h1>", *_table(runs)]
    write_atomically(folder / INDEX, page(name, parts, script=_SORT))
    return len(runs)


def _folders_of_runs(folder: Path) -> list[Path]:
    """The folders, from `folder`, that hold runs; links are not followed."""
    found = []
    for here, folders, files in os.walk(folder):
        path = Path(here).relative_to(folder)
        if path.parts and not {*folders, *files}.isdisjoint(_SIGNS):
            found.append(path)
            folders.clear()
        elif len(path.parts) >= _DEEPEST:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    return found


def _found(folder: Path, path: Path) -> FoundRun:
    run_dir = folder / path
    has_report = (run_dir / REPORT).is_file()
    try:
        changed, config = _changed(run_dir), _config(run_dir)
        if (run_dir / "result.json").exists():
            result = read_object(run_dir / "result.json")
            _cells(result)  # raises where the result has another form
            return FoundRun(path, str(result["status"]), changed, config, result, has_report)
        last = None
        if (run_dir / METRICS).exists():
            for row in rows_of(run_dir):
                last = row
        status = f"no result yet, step {last['step']}" if last else "no result, and no step logged"
        return FoundRun(path, status, changed, config, {}, has_report)
    except Exception as error:  # whatever a foreign folder holds: it is one row, and the others are shown
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        return FoundRun(path, f"damaged: {reason}", {}, {}, {}, has_report)


def _changed(run_dir: Path) -> dict[str, str]:
    """The keys and groups that were typed, with their values."""
    path = run_dir / ".hydra/overrides.yaml"
    words = read_yaml(path) if path.exists() else None
    pairs = [str(word).lstrip("+~").partition("=") for word in (words if isinstance(words, list) else ())]
    return {key: value for key, _, value in pairs if not any(f"{key}.".startswith(f"{name}.") for name in _OF_THE_RUN)}


def _config(run_dir: Path) -> dict[str, Any]:
    path = run_dir / ".hydra/config.yaml"
    return dict(leaves(read_config(path))) if path.exists() else {}


def _table(runs: Sequence[FoundRun]) -> list[str]:
    """The words above the table, and the table."""
    typed = list(dict.fromkeys(key for run in runs for key in run.changed))
    values = {key: [run.changed.get(key, run.config.get(key, "")) for run in runs] for key in typed}
    alike = {key for key in typed if len(set(map(str, values[key]))) == 1}
    keys = [key for key in typed if key not in alike]
    parts = [note("A click on the head of a column sorts by it. Accuracies are in percent, with 95% intervals.")]
    if alike:
        parts.append(
            note("Typed for all of them: " + " ".join(f"{key}={values[key][0]}" for key in typed if key in alike))
        )
    if len(keys) > _MOST_KEYS:
        parts.append(note(f"{len(keys) - _MOST_KEYS} more keys differ: {', '.join(keys[_MOST_KEYS:])}"))
        keys = keys[:_MOST_KEYS]
    heads = ["run", "status", *keys, "best validation", "test", "steps", "seconds"]
    head = "".join(f"<th>{text(name)}</th>" for name in heads)
    body = "".join(
        f"<tr>{_linked(run)}{_cell(run.status)}"
        + "".join(_cell(values[key][place]) for key in keys)
        + "".join(_cell(*pair) for pair in _cells(run.result)) + "</tr>"
        for place, run in enumerate(runs)
    )  # fmt: skip
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return [*parts, f'<div class="scroll">{table}</div>']


def _cells(result: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Of validation, test, steps and seconds what is shown, and what sorts.

    Raises:
        Exception: of any type, for a result that this program has not written.
    """
    cells: list[tuple[str, object]] = []
    for figures in (result.get("val") or {}, result.get("test") or {}):
        metric = main_metric(figures)
        value = figures.get(metric)
        if value is None:
            cells.append(("", ""))
            continue
        half = figures["ci95"]
        factor, form, unit = (100, ".2f", "%") if metric == "accuracy" else (1, ".4g", f" {metric}")
        interval = "" if half is None else f" ± {factor * half:{form}}"
        cells.append((f"{factor * value:{form}}{interval}{unit}", float(value)))
    steps, seconds = result.get("steps"), result.get("seconds")
    return [
        *cells,
        ("" if steps is None else f"{steps:,}", steps),
        ("" if seconds is None else f"{seconds:,.0f}", seconds),
    ]


def _cell(shown: object, sort: object = None) -> str:
    words = str(shown)
    words = words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"
    numeric = ' class="n"' if sort is not None else ""
    return f'<td{numeric} data-sort="{text(shown if sort is None else sort)}">{text(words)}</td>'


def _linked(run: FoundRun) -> str:
    name = text(run.path)
    address = text("./" + urllib.parse.quote(os.fsencode(run.path / REPORT)))
    return f'<td data-sort="{name}">' + (f'<a href="{address}">{name}</a>' if run.has_report else name) + "</td>"
