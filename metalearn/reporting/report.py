"""report.html: a finished run on one page that needs nothing else, not even a network."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from metalearn.config.values import Config
from metalearn.reporting import episode_pictures, figures
from metalearn.reporting.loggers.protocol import as_yaml
from metalearn.reporting.page import card, facts, folded, grid, note, page, provenance, section, table, text, tile
from metalearn.reporting.provenance import made_with
from metalearn.reporting.svg import Line, chart
from metalearn.runs.metrics import METRIC_NAMES, describe, main_metric
from metalearn.storage.files import write_atomically
from metalearn.types import Adapt, Episode, Params

REPORT = "report.html"


class ShownTask(NamedTuple):
    """An episode of one test task, or of test samples, with the outputs [1, n, d] for its queries after adaptation, and
    the names of the classes by their labels, if they are known."""

    name: str
    episode: Episode
    outputs: Tensor
    classes: Sequence[str] = ()

    def class_name(self, label: int) -> str:
        """What people call a class."""
        return self.classes[label] if label < len(self.classes) else f"class {label}"


class ShownLearner(NamedTuple):
    """The learner behind the drawn predictions: the algorithm's `adapt`, and the tested parameters."""

    adapt: Adapt
    params: Params


def write_report(
    run_dir: Path,
    commands: Sequence[str],
    config: Config,
    result: Mapping[str, Any],
    tasks: Sequence[ShownTask],
    learned: ShownLearner,
) -> Path:
    """Writes the page of a completed run.

    Args:
        run_dir: its folder, with metrics.jsonl.
        commands: what makes it again, in order.
        config: the whole config.
        result: the fields of result.json.
        tasks: the test tasks to show.
        learned: what adapts to them.

    Raises:
        RunError: it cannot be written.
    """
    rows = list(figures.rows_of(run_dir))
    title = " / ".join(run_dir.parts[-2:])
    parts = [
        *_result(title, result, tasks),
        section("Curves", grid([*_learning(rows), *_inner_steps(result["test"], config)])),
        *_episodes(tasks, learned),
        *_costs(rows),
        *_gradient(rows),
        provenance(made_with() | _device(result), commands),
        section("Config", folded("every key of this run", f"<pre>{text(as_yaml(config))}</pre>")),
    ]
    write_atomically(run_dir / REPORT, page(title, parts))
    return run_dir / REPORT


def _result(title: str, result: Mapping[str, Any], tasks: Sequence[ShownTask]) -> Iterator[str]:
    test, val = result["test"], result["val"]
    kind = "transductive" if test["transductive"] else "not transductive"
    metric, value, *interval = describe(dict(test)).split(" ")
    words = f"{' '.join(interval[:2])} test {metric} {' '.join(interval[2:])}, {kind}"
    if metric == "accuracy" and tasks:
        ways = tasks[0].outputs.shape[-1]
        words += f"; guessing among {ways} classes gives {1 / ways:.1%}"
    yield f'<h1>{text(title)}</h1>\n<p class="result"><b>{text(value)}</b>{text(words)}</p>'
    yield facts({
        "best validation": f"{describe(val)}, after step {val['step']}",
        "steps": f"{result['steps']:,}",
        "time": _duration(result["seconds"]),
        "workers": result["workers"],
        "seed": result["seed"],
        "list of test tasks": test.get("task_list", "-"),
    })  # fmt: skip


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _device(result: Mapping[str, Any]) -> dict[str, str]:
    device = result.get("device") or {}
    return {"computed by": device.get("name") or str(device["type"]).upper()} if "type" in device else {}


def _learning(rows: Sequence[figures.Row]) -> Iterator[str]:
    metric = main_metric({name for row in rows for name in row})
    for name in ("loss", metric):
        percent, unit = name == "accuracy", " (%)" if name == "accuracy" else ""
        drawn = chart(
            figures.learning_lines(rows, name), x="meta-step", y=f"query {METRIC_NAMES.get(name, name)}{unit}",
            percent=percent, logarithmic=name not in ("loss", "accuracy"),
        )  # fmt: skip
        yield card(METRIC_NAMES.get(name, name).capitalize(), drawn)


def _inner_steps(test: Mapping[str, Any], config: Config) -> Iterator[str]:
    """The card on inner steps, if there are any."""
    steps = sorted(map(int, test["by_step"]))
    if len(steps) < 2:
        return
    metric = main_metric(dict(test))
    intervals = [test["ci95_by_step"][str(step)] for step in steps]
    line = Line(
        f"test after {steps[0]} to {steps[-1]} inner steps, with 95% intervals",
        [(step, test["by_step"][str(step)]) for step in steps], intervals, "dots",
    )  # fmt: skip
    unit = " (%)" if metric == "accuracy" else ""
    drawn = chart(
        [line], x="inner step", y=f"test {METRIC_NAMES[metric]}{unit}", percent=metric == "accuracy", whole=True
    )
    trained = config.get("algorithm", {}).get("inner_steps")
    words = f"Step 0 is before adaptation; the result is that after step {steps[-1]}."
    yield card(
        "After each inner step", drawn + note(words + (f" Inner steps in training: {trained}." if trained else ""))
    )


def _episodes(tasks: Sequence[ShownTask], learned: ShownLearner) -> Iterator[str]:
    """The section on single tasks: pictures with predictions, or fits of curves."""
    if tasks and episode_pictures.has_pictures(tasks[0].episode):
        words = "Of each class first the pictures that were learned from, then those that were asked."
        yield section("Test episodes", note(words), grid(map(_episode, tasks), "17rem"))
    elif tasks and tasks[0].episode.query.x.shape[2:] == (1,):
        curves = (
            card(task.name, chart(figures.adaptation_lines(*learned, task.episode), x="x", y="y")) for task in tasks
        )
        yield section("Test tasks", grid(curves))


def _episode(task: ShownTask) -> str:
    (support, query) = task.episode
    predicted = task.outputs[0].argmax(dim=1).tolist()
    wrong = sum(guess != label for guess, label in zip(predicted, query.y[0].tolist(), strict=True))
    parts = []
    for shown in episode_pictures.shown_classes(task.episode):
        name = task.class_name(shown.label)
        known = [tile(_png(support.x[0, place]), f"{name}, learned from", answer="learned") for place in shown.support]
        asked = []
        for place in shown.query:
            right, answer = predicted[place] == shown.label, task.class_name(predicted[place])
            caption = f"{name}, predicted as {answer}"
            asked.append(tile(_png(query.x[0, place]), caption, right=right, answer="" if right else f"as {answer}"))
        parts.append(f'<p class="class">{text(name)}</p><div class="tiles">{"".join([*known, *asked])}</div>')
    return card(f"{task.name}: {wrong} of {len(predicted)} queries wrong", "".join(parts))


def _png(x: Tensor) -> bytes:
    return episode_pictures.png_of(episode_pictures.picture_of(x))


def _costs(rows: Sequence[figures.Row]) -> Iterator[str]:
    """The section on time, if the lines of metrics.jsonl have it."""
    workers = figures.costs_of(rows)
    if workers:
        longest = max(sum(worker.values()) for worker in workers) or 1.0
        lines = [
            [str(rank), *(f"{1000 * seconds:.2f}" for seconds in worker.values()), _bar(worker, longest)]
            for rank, worker in enumerate(workers)
        ]
        keys = "".join(f'<span class="key points c{n}">{name}</span>' for n, name in enumerate(figures.COSTS, 1))
        yield section(
            "Where the time went",
            note("Milliseconds of a mean step. Making the episodes (data) is the mean over all workers."),
            table(["worker", *(f"{name} (ms)" for name in figures.COSTS), ""], lines),
            f"<figcaption>{keys}</figcaption>",
        )


def _bar(worker: Mapping[str, float], longest: float) -> str:
    shares = (
        f'<i class="c{n}" style="width:{100 * value / longest:.1f}%"></i>' for n, value in enumerate(worker.values(), 1)
    )
    return f'<div class="bar">{"".join(shares)}</div>'


def _gradient(rows: Sequence[figures.Row]) -> Iterator[str]:
    """The section on the gradient's norm, if the lines of metrics.jsonl have it."""
    norms = figures.gradient_norms(rows)
    if norms:
        line = Line("meta-gradient", norms)
        drawn = chart([line], x="meta-step", y="norm", logarithmic=True)
        yield section("Gradient", grid([card("Norm of the meta-gradient", drawn)]))
