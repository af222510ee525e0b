"""Several runs side by side: index.html, a page with their curves and a table that sorts; tables of text; and a plot of
their validations."""

import colorsys
import json
import os
import re
import socket
import textwrap
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from rich.progress import track

from metalearn.config.check import LOCK
from metalearn.config.saved import read_config, typed_keys
from metalearn.config.values import leaves
from metalearn.errors import first_line
from metalearn.reporting.loggers import METRICS, Row, rows_of
from metalearn.reporting.logging import CONSOLE, on_terminal
from metalearn.reporting.page import (
    PALETTE,
    Chart,
    Line,
    chart,
    far_apart,
    new_figure,
    page,
    pages,
    percent,
    set_logarithmic,
)
from metalearn.reporting.report import REPORT, duration, report_of
from metalearn.runs.metrics import ERRORS, METRIC_NAMES, better, deciding, from_json, main_metric, shown
from metalearn.storage.files import holder_of, read_object, write_atomically, writing

INDEX = "index.html"
REPORTS = "index-reports"
"""The folder beside the index with the pages of those runs that have no report.html: nothing of a run is changed."""

_SIGNS = ("result.json", METRICS, ".hydra")  # a folder with one of these holds a run
_DEEPEST, _MOST_KEYS = 4, 12  # folders below the first one that are searched, and the keys that have a column
_MOST_CURVES = 100  # in a chart: of more, none can be told from the others
_LONGEST = 24  # characters of a folder's name that is no long list of overrides
_DAMAGED = "damaged: "

_NOT_LEARNED = ("run", "resume", "pause_after", "workers", "hydra", "logger", "launch", "checkpoint", "device")
"""Keys, and groups, that do not change what is learned."""

Cell = tuple[object, object]  # what is shown, and what sorts; None: that which is shown


class ListedRun(NamedTuple):
    """A run, by its path from the folder: its `status` in words, the keys that were typed, the values of all, its
    result, and its `curve`: the metric, what it is of, and points (step, value)."""

    path: Path
    status: str
    typed: Mapping[str, str]
    config: Mapping[str, Any]
    result: Mapping[str, Any]
    curve: tuple[str, str, Sequence[tuple[float, float]]] = ("", "", ())


def runs_below(folder: Path) -> list[ListedRun]:
    """The runs below a folder, by path; none if it is missing."""
    runs = []
    for here, folders, files in os.walk(folder):  # links are not followed
        path = Path(here).relative_to(folder)
        is_run = path.parts and not {*folders, *files}.isdisjoint(_SIGNS)
        if is_run:
            ended, lines = (_stamp(folder / path / name) for name in _SIGNS[:2])
            runs.append(_listed(folder, path, (ended, lines, not any(ended) and _is_held(folder / path))))
        is_last = is_run or len(path.parts) >= _DEEPEST
        folders[:] = [] if is_last else sorted(name for name in folders if not name.startswith("."))
    return runs


def _stamp(path: Path) -> tuple[int, int]:
    """When a file was written, and its size; zeros if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _is_held(run_dir: Path) -> bool:
    """Whether the process that last held the folder is there; one of another host counts as there. The lock itself is
    not tried: a run that starts meanwhile would be refused."""
    holder = re.fullmatch(r"process (\d+) on (.*)", holder_of(run_dir / LOCK))
    return holder is not None and (holder[2] != socket.gethostname() or Path(f"/proc/{holder[1]}").exists())


@lru_cache(maxsize=4096)
def _listed(folder: Path, path: Path, stamp: tuple[object, ...]) -> ListedRun:
    """The run at a path; of a page that renews itself, only those are read again whose `stamp` is another one."""
    run_dir = folder / path
    saved, ended = run_dir / ".hydra/config.yaml", run_dir / "result.json"
    try:
        typed = learned_keys(typed_keys(run_dir).items())
        config = dict(leaves(read_config(saved))) if saved.exists() else {}
        result = read_object(ended) if ended.exists() else {}
        rows = list(rows_of(run_dir)) if (run_dir / METRICS).exists() else []
        status = str(result["status"]) if ended.exists() else _progress(rows, config.get("trainer.steps"), run_dir)
        _cells(result)  # what is damaged there shall be one row, too
        return ListedRun(path, status, typed, config, result, _curve(rows))
    except Exception as error:  # whatever is damaged in a folder: it is one row, and the others are shown
        reason = first_line(error)
        return ListedRun(path, _DAMAGED + reason.removeprefix(f"{run_dir}/"), {}, {}, {})


def learned_keys(typed: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Of keys with their values those that change what is learned."""
    pairs = ((key.lstrip("+~"), value) for key, value in typed)
    return {key: value for key, value in pairs if re.split("[./]", key)[0] not in _NOT_LEARNED}


def _progress(rows: Sequence[Row], steps: Any, run_dir: Path) -> str:
    """How far a run without a result is, and how long its steps and validations may still take."""
    step = rows[-1]["step"] if rows else 0
    far = f"step {step} of {steps}" if isinstance(steps, int) else f"step {step}"
    if not _is_held(run_dir):
        return f"stopped at {far}" if rows else "no step yet"
    if step == steps:
        return "running, all steps are done"
    timed = next((row for row in reversed(rows) if row["split"] == "val" and row.get("elapsed_seconds")), None)
    if timed is not None and timed["step"]:
        each = timed["elapsed_seconds"] / timed["step"]
    else:
        each = next((row["step_seconds"] for row in reversed(rows) if "step_seconds" in row), 0.0)
    left = f", about {duration((steps - step) * each)} left" if each and isinstance(steps, int) else ""
    return f"running, {far}{left}"


def _curve(rows: Sequence[Row]) -> tuple[str, str, list[tuple[float, float]]]:
    """The validations, or before the first one the training."""
    split = next((split for split in ("val", "train") if any(row["split"] == split for row in rows)), "")
    metric = main_metric({name for row in rows if row["split"] == split for name in row})
    points = [(row["step"], row[metric]) for row in rows if row["split"] == split and row.get(metric) is not None]
    if not all(isinstance(number, int | float) for point in points for number in point):
        raise ValueError(f"{METRICS}: has a step or a value that is no number")
    return metric, {"val": "validation", "train": "training"}.get(split, ""), points


def what_differs(runs: Sequence[ListedRun]) -> tuple[dict[str, list[object]], dict[str, object]]:
    """Of the keys that were typed for any of the runs those with another value in at least two of them, with the values
    of each run; and those with the same value in all."""

    def value(run: ListedRun, key: str) -> object:
        # 1e-2 is 0.01, and both may have been typed.
        return _spelled(run.config[key]) if key in run.config else run.typed.get(key, "")

    whole = [run for run in runs if not run.status.startswith(_DAMAGED)]
    keys = dict.fromkeys(key for run in whole for key in run.typed)
    alike = {key: value(whole[0], key) for key in keys if len({str(value(run, key)) for run in whole}) == 1}
    return {key: [value(run, key) for run in runs] for key in keys if key not in alike}, alike


def _spelled(value: object) -> object:
    """A value as one types it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else value


def short_keys(keys: Sequence[str]) -> list[str]:
    """The last words of dotted keys, as many as tell them apart."""
    lasts = [key.rpartition(".")[2] for key in keys]
    return [last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)]


def rounded(value: object) -> str:
    """A value as text; a long number with four digits."""
    text = str(value)
    try:
        return f"{float(text):.4g}" if len(text) > 7 else text
    except ValueError:
        return text


def short_names(runs: Sequence[ListedRun]) -> list[tuple[str, str]]:
    """Of each run the folder that it is in, and its name there: that of its folder if it is short, else what differs
    between the runs of long names in that folder."""
    lists: dict[Path, list[ListedRun]] = {}
    for run in runs:
        if len(run.path.name) > _LONGEST:
            lists.setdefault(run.path.parent, []).append(run)
    names = {run.path: run.path.name for run in runs}
    for siblings in lists.values():
        values, _ = what_differs(siblings)
        short = short_keys([*values])
        for place, run in enumerate(siblings):
            pairs = [f"{key}={rounded(each[place])}" for key, each in zip(short, values.values(), strict=True)]
            names[run.path] = " ".join(pairs) or re.sub(r",(?:\w+\.)*", " ", run.path.name)
    whole = [(str(path.parent), name) for path, name in names.items()]
    return whole if len({*whole}) == len(whole) else [(str(run.path.parent), run.path.name) for run in runs]


def jobs_table(folder: Path, jobs: Sequence[Sequence[str]], places: Sequence[Path] = ()) -> str:
    """A line for each job of a multirun in the folder: what differs, its best validation and its test; empty if none of
    them has begun, or all have been on other disks. `places` are the folders of its runs; none: runs of other processes
    are found by the typed words of the `jobs`. Earlier runs may lie there, too."""
    runs = runs_below(folder)
    if places:
        of_place = {folder / run.path: run for run in runs}
        made = [of_place[place]._replace(typed=typed_keys(place)) for place in places if place in of_place]
    else:
        asked = [learned_keys(word.partition("=")[::2] for word in job) for job in jobs]
        made = sorted((run for run in runs if run.typed in asked), key=lambda run: asked.index(dict(run.typed)))
    if not made:
        return ""
    (values, _), best = what_differs(made), _best(made)
    rows = [
        [*(rounded(each[place]) for each in values.values()), *(str(text) for text, _ in _cells(run.result)[1::-1]),
         "best" if run is best else "" if run.result.get("status") == "completed" else run.status]
        for place, run in enumerate(made)
    ]  # fmt: skip
    return text_columns([[*short_keys([*values]), "best validation", "test", ""], *rows])


def _best(runs: Sequence[ListedRun]) -> ListedRun | None:
    """The run with the best validation, if they can be compared. The test is not there to choose by."""
    best: ListedRun | None = None
    for run in runs:
        if not (val := from_json(run.result.get("val") or {})):
            continue
        metric = deciding(val)
        if best is not None and metric not in best.result["val"]:
            return None
        if metric in val and better(metric, val[metric], best and from_json(best.result["val"])[metric]):
            best = run
    return best


def text_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cells(result: Mapping[str, Any]) -> list[Cell]:
    """Of test, validation, steps and seconds what is shown, and what sorts."""
    cells: list[Cell] = []
    for outcome in (result.get("test") or {}, result.get("val") or {}):
        metric = main_metric(outcome)
        if (value := outcome.get(metric)) is None:
            cells.append(("", None))
        else:
            unit = "" if metric == "accuracy" else f" {metric}"
            cells.append((shown(metric, value, outcome.get("ci95")) + unit, float(value)))
    numbers = [result.get(name) for name in ("steps", "seconds")]
    return [*cells, *(("", None) if number is None else (f"{number:,.0f}", number) for number in numbers)]


def index_page(folder: Path, runs: Sequence[ListedRun], renew: int = 0) -> str:
    """The page of the runs below a folder, with links to their reports (`report_at`). If it is served, it asks for
    itself again after `renew` seconds; 0: it stays as it is."""
    values, alike = what_differs(runs)
    keys, more = [*values][:_MOST_KEYS], [*values][_MOST_KEYS:]
    names, folders = short_names(runs), {run.path.parent for run in runs}
    return page(
        "index.html", title=folder.resolve().name, renew=renew, charts=_charts(runs), sweeps=_sweeps(folder, runs),
        alike=" ".join(f"{key}={value}" for key, value in alike.items()), more=more,
        heads=[
            ("run", ""), ("status", ""), ("test", ""), ("best validation", ""),
            *zip(short_keys(keys), keys, strict=True), ("steps done", ""), ("seconds", ""),
        ],
        runs=[
            {
                "number": number, "path": run.path,
                "colour": f"var(--c{number + 1})" if number < len(PALETTE) else colour(number),
                "link": link_of(folder, run), "folder": names[number][0] if len(folders) > 1 else "",
                "name": names[number][1],
                "cells": [
                    (run.status, None), *(cells := _cells(run.result))[:2],
                    *((rounded(value), value) for value in (values[key][number] for key in keys)), *cells[2:],
                ],
            }
            for number, run in enumerate(runs)
        ],
    )  # fmt: skip


def _sweeps(folder: Path, runs: Sequence[ListedRun]) -> list[str]:
    """How far each search under way is, and how long it may still take."""
    lines = []
    for place in dict.fromkeys(run.path.parent for run in runs):
        try:
            counts = yaml.safe_load((folder / place / "optimization_results.yaml").read_text("utf-8"))["trials"]
            total, ended = int(counts["total"]), sum(int(count) for name, count in counts.items() if name != "total")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):  # no search, or damaged
            continue
        if ended >= total:
            continue
        trials = [run for run in runs if run.path.parent == place]
        seconds = [run.result["seconds"] for run in trials if run.result.get("seconds")]
        slots = sum(run.status.startswith("running") for run in trials)
        left = f", about {duration((total - ended) * fmean(seconds) / slots)} left" if slots and seconds else ""
        lines.append(f"{place}: {ended} of {total} trials have ended{left}")
    return lines


def colour(number: int) -> str:
    """The colour of a run: those of all charts, then hues that lie far from the last ones."""
    if number < len(PALETTE):
        return PALETTE[number]
    red, green, blue = colorsys.hls_to_rgb(number * 0.618 % 1, 0.48, 0.55)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _charts(runs: Sequence[ListedRun]) -> list[Chart]:
    """The curves of the runs, a chart for each metric."""
    kinds: dict[tuple[str, str], list[Line]] = {}
    for number, run in enumerate(runs):
        metric, split, points = run.curve
        if points:
            style = "dots" if split == "validation" else "line"
            line = Line(str(run.path), points, (), style, colour(number), str(number))
            kinds.setdefault((metric, split), []).append(line)
    return [
        chart(
            f"{split} {METRIC_NAMES[metric]}".capitalize(), lines[:_MOST_CURVES], x="meta-step",
            y=f"{METRIC_NAMES[metric]}{' (%)' if metric == 'accuracy' else ''}", percent=metric == "accuracy",
            whole=True, logarithmic=metric in ERRORS,
            note=f"The curves of the first {_MOST_CURVES} of {len(lines)} runs." if len(lines) > _MOST_CURVES else "",
        )
        for (metric, split), lines in kinds.items()
    ]  # fmt: skip


def link_of(folder: Path, run: ListedRun) -> str | None:
    """The address of a run's report from the index: its report.html, else one that is made of its metrics.jsonl."""
    address = urllib.parse.quote(os.fsencode(run.path / REPORT))
    if (folder / run.path / REPORT).is_file():
        return f"./{address}"
    has_lines = (folder / run.path / METRICS).is_file() and not run.status.startswith(_DAMAGED)
    return f"./{REPORTS}/{address}" if has_lines else None


def report_at(folder: Path, runs: Sequence[ListedRun], address: str) -> bytes | None:
    """The page at an address that `link_of` gives; None for any other one. Raises OSError or ValueError if a file of
    the run is damaged."""
    run = next((run for run in runs if link_of(folder, run) == f".{address}"), None)
    if run is None:
        return None
    if address.startswith(f"/{REPORTS}/"):
        return report_of(folder / run.path, run.result).encode()
    file = (folder / run.path / REPORT).resolve()
    # It may be a link, in a folder that comes from elsewhere.
    return file.read_bytes() if file.is_relative_to(folder.resolve()) else None


def write_index(folder: Path) -> int:
    """Writes the page into the folder, and beside it, in `REPORTS`, the reports of runs that have none; returns the
    number of runs. Raises FileNotFoundError if the folder is missing, or has no run below it, and RunError if it cannot
    be written."""
    runs = runs_below(folder)
    if not runs:
        raise FileNotFoundError(f"{folder}: has no runs below it, {_DEEPEST} deep; type the folder of some")
    linked = [run for run in runs if (link_of(folder, run) or "").startswith(f"./{REPORTS}/")]
    newest = {run.path: max(_stamp(folder / run.path / name)[0] for name in _SIGNS[:2]) for run in linked}
    stale = [run for run in linked if _stamp(folder / REPORTS / run.path / REPORT)[0] <= newest[run.path]]
    for run in track(stale, "reports", console=CONSOLE, transient=True, disable=not on_terminal()):
        target = folder / REPORTS / run.path / REPORT
        try:
            content = report_of(folder / run.path, run.result)
        except Exception as error:  # as in `_listed`
            content = page(pages().from_string("{{ title }}"), title=f"{_DAMAGED}{error}")
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, content)
    write_atomically(folder / INDEX, index_page(folder, runs))
    return len(runs)


_LONGER = 10  # the axes of minutes and steps are logarithmic if one run is this many times as long as another
_LEGEND_WIDTH = 48  # characters in a line of the legend, which leave the plots their room
_BEST = 0.9999  # accuracies above are drawn as this one: their axis has no 100%
_ACCURACIES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999)
"""Ticks that stay apart on an axis of odds."""


class Curve(NamedTuple):
    """The validations of a run: the values of a metric, accuracy or mse, with the meta-step of each and, if they are
    known, the seconds of training and validation until then."""

    name: str
    metric: str
    steps: list[int]
    seconds: list[float] | None
    values: list[float]


def curve_of(run_dir: Path) -> Curve:
    """The validations in metrics.jsonl, without those that are not finite. Raises ValueError if the run has not been
    validated yet, and as `rows_of`."""
    rows = [row for row in rows_of(run_dir) if row["split"] == "val"]
    if not rows:
        raise ValueError(f"{run_dir}: has not been validated yet; let it run for trainer.val_every steps")
    metric = main_metric(rows[0])
    timed = all("elapsed_seconds" in row for row in rows)
    rows = [row for row in rows if row[metric] is not None]
    seconds = [row["elapsed_seconds"] for row in rows] if timed else None
    return Curve(run_dir.name, metric, [row["step"] for row in rows], seconds, [row[metric] for row in rows])


def _spread_out(axes: Any) -> None:
    """Turns the horizontal axis into a logarithmic one, linear near 0, if a line of it is `_LONGER` than another."""
    lines = [sorted(x for x in line.get_xdata() if x > 0) for line in axes.get_lines()]
    ends = [line[-1] for line in lines if line]
    if ends and max(ends) >= _LONGER * min(ends):
        first = min(line[0] for line in lines if line)
        axes.set_xscale("symlog", linthresh=first, linscale=0.3)
        axes.set_xlim(left=0)
        # A power of ten in the linear part would touch the 0.
        axes.set_xticks([0, *(tick for tick in axes.get_xticks() if first <= tick <= max(ends))])
        axes.xaxis.set_major_formatter("{x:,.10g}")


DRAWN_AS = (".png", ".svg", ".pdf")


def comparison(curves: Sequence[Curve], path: Path) -> Path:
    """Draws the validations of several runs with the same metric, against wall-clock minutes and against meta-steps.
    The axis of accuracy is that of its odds: 98% to 99% is as far as 96% to 98%. The path ends as one of `DRAWN_AS`."""
    with new_figure(15, 5.5) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        accuracy = all(curve.metric == "accuracy" for curve in curves)
        values = [value for curve in curves for value in curve.values if curve.metric in ERRORS]
        for number, curve in enumerate(curves):
            heights = [min(max(value, 1 - _BEST), _BEST) for value in curve.values] if accuracy else curve.values
            style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3], "linewidth": 1.4}
            if curve.seconds is not None:
                left.plot([seconds / 60 for seconds in curve.seconds], heights, marker=".", **style)
            label = textwrap.fill(curve.name, _LEGEND_WIDTH)
            right.plot(curve.steps, heights, marker=".", label=label, **style)
        left.set_xlabel("minutes of training and validation")
        right.set_xlabel("meta-steps")
        left.set_ylabel("validation: " + " or ".join(dict.fromkeys(METRIC_NAMES[curve.metric] for curve in curves)))
        if accuracy:
            left.set_yscale("logit")  # shows the last small differences
            low, high = left.get_ylim()
            ticks = [tick for tick in _ACCURACIES if low <= tick <= high]
            if len(ticks) > 2:  # else matplotlib finds closer ones
                left.set_yticks(ticks)
                left.minorticks_off()
            for set_formatter in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
                set_formatter(percent)
        elif far_apart(values):
            set_logarithmic(left, values)
        else:
            left.yaxis.set_major_formatter("{x:,g}")
        for axes in (left, right):
            _spread_out(axes)
            axes.grid(alpha=0.3)
        figure.legend(*right.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
        figure.savefig(path, dpi=120)
    return path
