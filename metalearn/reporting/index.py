"""index.html: all runs below a folder in one table that sorts, with links to their reports."""

import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from metalearn.config.foreign import read_config, typed_keys
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
_DAMAGED = "damaged: "
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


Cell = tuple[object, object]
"""What is shown, and what sorts; None: that which is shown."""


class FoundRun(NamedTuple):
    """A run, by its path from the folder: its `status` in words, the keys that were typed, the values of all, the
    `_cells` of its result, and whether it has a report."""

    path: Path
    status: str
    changed: Mapping[str, str]
    config: Mapping[str, Any]
    cells: Sequence[Cell]
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
            return FoundRun(path, str(result["status"]), changed, config, _cells(result), has_report)
        last = None
        if (run_dir / METRICS).exists():
            for row in rows_of(run_dir):
                last = row
        status = f"no result yet, step {last['step']}" if last else "no result, and no step logged"
        return FoundRun(path, status, changed, config, _cells({}), has_report)
    except Exception as error:  # whatever a foreign folder holds: it is one row, and the others are shown
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        return FoundRun(path, _DAMAGED + reason.removeprefix(f"{run_dir}/"), {}, {}, _cells({}), has_report)


def _changed(run_dir: Path) -> dict[str, str]:
    """What was typed of what is learned."""
    typed = typed_keys(run_dir).items()
    return {key: value for key, value in typed if not any(f"{key}.".startswith(f"{name}.") for name in _OF_THE_RUN)}


def _config(run_dir: Path) -> dict[str, Any]:
    path = run_dir / ".hydra/config.yaml"
    return dict(leaves(read_config(path))) if path.exists() else {}


def _table(runs: Sequence[FoundRun]) -> list[str]:
    """The words above the table, and the table."""
    typed = list(dict.fromkeys(key for run in runs for key in run.changed))
    values = {key: [run.changed.get(key, run.config.get(key, "")) for run in runs] for key in typed}
    whole = [place for place, run in enumerate(runs) if not run.status.startswith(_DAMAGED)]
    alike = {key for key in typed if len({str(values[key][place]) for place in whole}) == 1}
    keys = [key for key in typed if key not in alike]
    parts = [note("A click on the head of a column sorts by it. Behind ± stand 95% intervals.")]
    if alike:
        words = " ".join(f"{key}={values[key][whole[0]]}" for key in typed if key in alike)
        parts.append(note(f"Typed for all of them: {words}"))
    if len(keys) > _MOST_KEYS:
        parts.append(note(f"{len(keys) - _MOST_KEYS} more keys differ: {', '.join(keys[_MOST_KEYS:])}"))
        keys = keys[:_MOST_KEYS]
    heads = ["run", "status", "test", "best validation", *keys, "steps", "seconds"]
    head = "".join(f"<th>{text(name)}</th>" for name in heads)
    body = ""
    for place, run in enumerate(runs):
        of_keys = [(values[key][place], None) for key in keys]
        cells = [(run.status, None), *run.cells[:2], *of_keys, *run.cells[2:]]
        body += f"<tr>{_linked(run)}{''.join(_cell(*cell) for cell in cells)}</tr>"
    table = f'<table class="index"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return [*parts, f'<div class="scroll">{table}</div>']


def _cells(result: Mapping[str, Any]) -> list[Cell]:
    """Of test, validation, steps and seconds what is shown, and what sorts.

    Raises:
        Exception: of any type, for a result that this program has not written.
    """
    cells: list[Cell] = []
    for figures in (result.get("test") or {}, result.get("val") or {}):
        metric = main_metric(figures)
        value, half = figures.get(metric), figures.get("ci95")
        form, unit = (".2%", "") if metric == "accuracy" else (".4g", f" {metric}")
        interval = "" if half is None else f" ± {half:{form}}"
        cells.append(("", None) if value is None else (f"{value:{form}}{interval}{unit}", float(value)))
    numbers = [result.get(name) for name in ("steps", "seconds")]
    return [*cells, *(("", None) if number is None else (f"{number:,.0f}", number) for number in numbers)]


def _cell(shown: object, sort: object = None) -> str:
    words = str(shown)
    words = words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"
    numeric = ' class="n"' if sort is not None else ""
    return f'<td{numeric} data-sort="{text(shown if sort is None else sort)}">{text(words)}</td>'


def _linked(run: FoundRun) -> str:
    name = text(run.path)
    address = text("./" + urllib.parse.quote(os.fsencode(run.path / REPORT)))
    return f'<td data-sort="{name}">' + (f'<a href="{address}">{name}</a>' if run.has_report else name) + "</td>"
