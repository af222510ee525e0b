"""report.html: a finished run on one page that needs nothing else, not even a network."""

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from metalearn.config.values import Config
from metalearn.errors import printable
from metalearn.reporting import episode_pictures, figures
from metalearn.reporting.loggers.protocol import as_yaml
from metalearn.runs.metrics import describe, main_metric
from metalearn.storage.files import write_atomically
from metalearn.types import Adapt, Episode, Params

REPORT = "report.html"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64em; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ddd; }
img { max-width: 100%; } pre { background: #f5f5f5; padding: .8em; overflow-x: auto; }
table { border-collapse: collapse; } td, th { padding: .2em .8em .2em 0; text-align: left; vertical-align: top; }
.number { text-align: right; } .result { font-size: 1.3em; }
.tile { width: 48px; margin: 1px; border: 3px solid transparent; image-rendering: pixelated; }
.right { border-color: #009E73; } .wrong { border-color: #D55E00; border-style: dashed; }
"""

_NO_NETWORK = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""A browser that reads this loads nothing and runs nothing."""


class ShownTask(NamedTuple):
    """An episode of one test task, or of test samples, with the outputs [1, n, d] for its queries after adaptation."""

    name: str
    episode: Episode
    outputs: Tensor


class ShownLearner(NamedTuple):
    """The learner behind the drawn predictions: the algorithm's `adapt`, and the tested parameters."""

    adapt: Adapt
    params: Params


def write_report(
    run_dir: Path,
    command: str,
    config: Config,
    result: Mapping[str, Any],
    tasks: Sequence[ShownTask],
    learned: ShownLearner,
) -> Path:
    """Writes the page of a completed run.

    Args:
        run_dir: its folder, with metrics.jsonl.
        command: what repeats it; several lines where it was made by several commands.
        config: the whole config.
        result: the fields of result.json.
        tasks: the test tasks to show.
        learned: what adapts to them.

    Raises:
        RunError: it cannot be written.
    """
    rows = list(figures.rows_of(run_dir))
    title = " / ".join(run_dir.parts[-2:])
    sections = [
        _result(title, command, result),
        _section("Learning curves", _figure(figures.learning_figure(rows), "loss and metric against meta-steps")),
        *_inner_steps(result["test"]),
        *_episodes(tasks, learned),
        *_costs(rows),
        *_gradient(rows),
        _section("Config", f"<pre>{html.escape(as_yaml(config))}</pre>"),
    ]
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_NO_NETWORK}">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )
    write_atomically(run_dir / REPORT, page.encode("ascii", "xmlcharrefreplace").decode())
    return run_dir / REPORT


def _result(title: str, command: str, result: Mapping[str, Any]) -> str:
    test, val = result["test"], result["val"]
    kind = "transductive" if test["transductive"] else "not transductive"
    lines = {
        "best validation": f"{describe(val)}, after step {val['step']}",
        "steps": result["steps"],
        "seconds": f"{result['seconds']:.0f}",
        "workers": result["workers"],
        "seed": result["seed"],
        "list of test tasks": test.get("task_list", "-"),
    }
    table = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in lines.items())
    return (
        f'<h1>{_text(title)}</h1>\n<p class="result">test {_text(describe(test))}, {kind}</p>\n'
        f"<pre>{_text(command)}</pre>\n<table>{table}</table>"
    )


def _inner_steps(test: Mapping[str, Any]) -> Iterator[str]:
    """The section on inner steps, if there are any."""
    if len(test["by_step"]) > 1:
        metric = main_metric(dict(test))
        yield _section(
            "After each inner step", _figure(figures.inner_steps_figure(test, metric), f"test {metric} by inner step")
        )


def _episodes(tasks: Sequence[ShownTask], learned: ShownLearner) -> Iterator[str]:
    """The section on single tasks: pictures with predictions, or fits of curves."""
    if tasks and episode_pictures.has_pictures(tasks[0].episode):
        note = (
            "<p>A row is a class: its support pictures, then its queries. A frame of dashes marks a wrong prediction; "
            "point at a picture to read the predicted class.</p>"
        )
        yield _section("Test episodes", note + "".join(map(_episode, tasks)))
    elif tasks and tasks[0].episode.query.x.shape[2:] == (1,):
        drawn = (
            _figure(figures.adaptation_figure(*learned, task.episode), f"{task.name} before and after adaptation")
            for task in tasks
        )
        yield _section("Test tasks", "".join(drawn))


def _episode(task: ShownTask) -> str:
    (support, query) = task.episode
    predicted = task.outputs[0].argmax(dim=1).tolist()
    wrong = sum(guess != label for guess, label in zip(predicted, query.y[0].tolist(), strict=True))
    rows = []
    for shown in episode_pictures.shown_classes(task.episode):
        known = "".join(_tile(support.x[0, place], "tile", f"class {shown.label}, support") for place in shown.support)
        asked = "".join(
            _tile(
                query.x[0, place],
                "tile right" if predicted[place] == shown.label else "tile wrong",
                f"class {shown.label}, predicted {predicted[place]}",
            )
            for place in shown.query
        )
        rows.append(f"<tr><td>{shown.label}</td><td>{known}</td><td>{asked}</td></tr>")
    return (
        f"<h3>{_text(task.name)}: {wrong} of {len(predicted)} queries wrong</h3>\n"
        f"<table><tr><th>class</th><th>support</th><th>queries</th></tr>\n{chr(10).join(rows)}</table>"
    )


def _costs(rows: Sequence[figures.Row]) -> Iterator[str]:
    """The section on time, if the lines of metrics.jsonl have it."""
    workers = figures.costs_of(rows)
    if workers:
        head = "".join(f'<th class="number">{name}</th>' for name in figures.COSTS)
        lines = (
            f"<tr><td>{rank}</td>"
            + "".join(f'<td class="number">{1000 * s:.2f}</td>' for s in worker.values())
            + "</tr>"
            for rank, worker in enumerate(workers)
        )
        note = "<p>Milliseconds of a mean step. Making the episodes (data) is the mean over all workers.</p>"
        table = f"<table><tr><th>worker</th>{head}</tr>{''.join(lines)}</table>"
        yield _section("Where the time went", note + _figure(figures.costs_figure(workers), "bars by worker") + table)


def _gradient(rows: Sequence[figures.Row]) -> Iterator[str]:
    """The section on the gradient's norm, if the lines of metrics.jsonl have it."""
    if figures.gradient_norms(rows):
        yield _section("Gradient", _figure(figures.gradient_figure(rows), "norm of the meta-gradient by meta-step"))


def _section(title: str, content: str) -> str:
    return f"<h2>{_text(title)}</h2>\n{content}"


def _figure(figure: Any, meaning: str) -> str:
    return _image(figures.png_of(figure), meaning)


def _tile(x: Tensor, style: str, meaning: str) -> str:
    png = episode_pictures.png_of(episode_pictures.picture_of(x))
    return _image(png, meaning, f' class="{style}" title="{_text(meaning)}"')


def _image(png: bytes, meaning: str, more: str = "") -> str:
    return f'<img alt="{_text(meaning)}"{more} src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _text(value: object) -> str:
    return html.escape(printable(str(value)))
