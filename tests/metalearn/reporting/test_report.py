"""report.html: it needs nothing but itself, shows what the run did, and marks what was wrong."""

import base64
import io
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from metalearn.config.build import build
from metalearn.config.compose import compose_config
from metalearn.reporting.index import Curve, comparison
from metalearn.reporting.page import Line, chart, pages, svg, svg_file
from metalearn.reporting.report import ShownTask, costs_of, learning_charts, write_report
from metalearn.tasks.common.episodes import class_names_of
from metalearn.tasks.glyphs import character
from metalearn.types import Batch, Episode
from tests.runs import ROOT, Program

LOADS = {"script", "link", "iframe", "object", "embed", "base", "form"}
VOID = {"meta", "img", "br", "hr"}
"""Tags that hold nothing, and so have no end."""

NAME = "a<b>&c"


class Page(HTMLParser):
    """The tags of a page, its headings and its text. Every tag must end, inside the tag that it began in."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.headings, self.open = "", [], []
        self.source = path.read_text()
        self.feed(self.source)
        self.close()
        assert self.open == [], f"no end of {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag}: an attribute twice"
        self.tags.append((tag, dict(attrs)))
        self.open += [tag] if tag not in VOID else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"line {self.getpos()[0]}: </{tag}> ends what has not begun here"

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.tags and self.tags[-1][0] == "h2" and data.strip():
            self.headings.append(data.strip())

    def images(self) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == "img"]


def assert_stands_alone(page: Page) -> None:
    assert not LOADS & {tag for tag, _ in page.tags}
    policies = [tag["content"] for _, tag in page.tags if tag.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1 and "default-src 'none'" in str(policies[0])
    assert not re.search(r"url\((?!#)|@import|https?://", page.source)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert page.source.isascii() and page.source.startswith("<!DOCTYPE html>")
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") or name == "href" for name in attributes), (tag, attributes)
    for image in page.images():
        kind, _, data = str(image["src"]).partition(",")
        assert kind == "data:image/png;base64" and image["alt"]
        Image.open(io.BytesIO(base64.b64decode(data, validate=True))).load()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the program, with a name that would break a page."""
    folder = tmp_path_factory.mktemp("report")
    overrides = [
        "trainer.steps=4", "trainer.meta_batch_size=2", "trainer.val_every=2", "trainer.val_tasks=4",
        "trainer.test_tasks=4", "model.filters=8", "logger.every=1", f"run='{NAME}'",
    ]  # fmt: skip
    outcome = Program([sys.executable, str(ROOT / "train.py"), *overrides], folder).wait()
    assert outcome.code == 0, outcome.text
    return folder / "outputs/maml_glyphs" / NAME


@pytest.mark.thorough
def test_a_run_writes_a_page_that_stands_alone(run_dir: Path) -> None:
    page = Page(run_dir / "report.html")
    assert "<pre>python train.py trainer.steps=4 " in (run_dir / "report.html").read_text()
    assert all(f"{name}: glyph " not in page.text and name not in page.text for name in ("class 0", "class 1"))
    assert re.search(r"glyph [56]\d\d", page.text)  # the test characters have the numbers 500 to 699
    assert_stands_alone(page)
    assert page.headings == [
        "Curves", "Test episodes", "Where the time went", "Gradient", "Where this comes from", "Config",
    ]  # fmt: skip
    result = json.loads((run_dir / "result.json").read_text())
    assert f"{result['test']['accuracy']:.2%}" in page.text and f"maml_glyphs / {NAME}" in page.text
    assert "python train.py trainer.steps=4" in page.text and "meta_batch_size: 2" in page.text
    tiles = page.images()
    assert len(tiles) == 4 * 5 * (1 + 2)  # tasks, classes, support and queries


def rows(path: Path, *lines: dict[str, float | str]) -> None:
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


RESULT = {
    "experiment": "x", "run": "y", "steps": 1, "seconds": 2.0, "workers": 1, "seed": 0,
    "val": {"accuracy": 0.5, "ci95": 0.1, "tasks": 4, "step": 1},
    "test": {"accuracy": 0.5, "ci95": 0.1, "tasks": 4, "transductive": True, "by_step": {"0": 0.5},
             "ci95_by_step": {"0": 0.1}},
}  # fmt: skip


HOSTILE = "</pre><script>'{{ 1 }}"


def test_wrong_predictions_are_marked_and_names_escaped(tmp_path: Path) -> None:
    rows(tmp_path, {"step": 1, "split": "val", "loss": 1.0, "accuracy": 0.5, "ci95": 0.1})
    y = torch.tensor([[0, 0, 1, 1]])
    episode = Episode(*(Batch(torch.rand(1, 4, 1, 9, 9), y) for _ in range(2)))
    task = ShownTask("task 7", episode, torch.eye(2)[torch.tensor([[0, 1, 1, 1]])], [HOSTILE, "fox"])
    write_report(tmp_path, [f"python {HOSTILE}"], {"a": HOSTILE}, RESULT, [task], (lambda *a: None, {}))
    page = Page(tmp_path / "report.html")
    assert_stands_alone(page)
    assert [image["alt"] for image in page.images()] == [
        *[f"{HOSTILE}, learned from"] * 2, f"{HOSTILE}, predicted as {HOSTILE}", f"{HOSTILE}, predicted as fox",
        *["fox, learned from"] * 2, *["fox, predicted as fox"] * 2,
    ]  # fmt: skip
    assert page.text.count("\u2713 right") == 3 and page.text.count("\u2717 wrong as fox") == 1
    assert "task 7: 1 of 4 queries wrong" in page.text and f"python {HOSTILE}" in page.text
    assert "guessing among 2 classes gives 50.0%" in page.text
    assert page.headings == [
        "Curves",
        "Test episodes",
        "Where this comes from",
        "Config",
    ]  # nothing of the rest is known


def test_names_are_those_of_the_pictures_of_a_task() -> None:
    """The names of a task's classes are drawn again; here they are read from its pictures."""
    config = compose_config(["dataset.ways=4", "dataset.rotations=false"]).config
    source = build(config, "dataset")
    for index in (0, 3):
        support, _ = source.episodes("test", torch.tensor([index]))
        for name, picture in zip(class_names_of(source, "test", index), support.x[0, :, 0], strict=True):
            drawings = character(int(name.removeprefix("glyph ")), 28)
            assert any(np.array_equal(drawing, (picture * 255).round().numpy()) for drawing in drawings)


def corners(drawn: str, colour: str = "var(--c1)") -> list[tuple[float, float]]:
    """The corners of the line of this colour."""
    (path,) = re.findall(rf'<path d="(M[^"]*)"[^>]*style="fill: none; stroke: {re.escape(colour)}', drawn)
    return [tuple(map(float, corner.split())) for corner in path[1:].split("L")]  # type: ignore[misc]


def test_a_chart_puts_points_in_proportion_and_names_units() -> None:
    lines = [Line("a", [(0, 0.2), (10, 0.4), (20, float("nan")), (30, 0.8)]), Line("b", [(0, 0.5)], [0.1], "dots")]
    drawn = svg(chart("title", lines, x="step of <$x$>", y="accuracy (%)", percent=True))
    (left, low), (middle, between), (right, high) = corners(drawn)
    assert (middle - left) / (right - left) == pytest.approx(1 / 3, abs=0.01)
    assert (low - between) / (low - high) == pytest.approx(1 / 3, abs=0.01)
    for expected in (">20%<", ">80%<", ">accuracy (%)<", ">step of &lt;$x$&gt;<"):
        assert expected in drawn
    decades = [Line("a", [(0, 1e-3), (1, 1e-1), (2, 0.0), (3, 10.0)])]
    heights = [y for _, y in corners(svg(chart("", decades, x="x", y="y", logarithmic=True)))]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)


@pytest.mark.parametrize("points", [[], [(0, float("nan"))], [(5, 5)], [(0, 0), (1, 0)], [(1e9, 1e-9), (2e9, 1e-9)]])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_chart_of_little_is_drawn_or_says_so(points: list[tuple[float, float]], logarithmic: bool) -> None:
    little = chart("t", [Line("a", points)], x="x", y="y", logarithmic=logarithmic)
    drawn = pages().from_string('{% from "parts.html" import chart %}{{ chart(little) }}').render(little=little)
    visible = any(y > 0 or (y == 0 and not logarithmic) for _, y in points)
    assert ("nothing to draw" in drawn) != visible and "nan" not in drawn and "inf" not in drawn
    assert visible == ("var(--c1)" in drawn)  # also a single point, which is no line


def test_a_long_line_shows_means_and_says_of_how_many() -> None:
    drawn = chart("", [Line("loss", [(step, step % 2) for step in range(2000)])], x="x", y="y")
    (line,) = drawn.lines
    assert len(line.points) == 500 and {y for _, y in line.points} == {0.5} and "means of 4 lines" in line.name


def test_a_chart_file_has_its_legend_and_fixed_colours() -> None:
    drawn = svg_file(chart("", [Line("a & b", [(0, 1), (1, 3)])], x="x", y="y"))
    assert ElementTree.fromstring(drawn).tag.endswith("svg") and ">a &amp; b<" in drawn and "var(" not in drawn


def test_the_time_of_each_worker_adds_up() -> None:
    """Two workers of which the second waits; making the episodes takes 0.2 s in all."""
    line = {
        "split": "train", "data_seconds": 0.2, "update_seconds": 0.05,
        "worker0/compute_seconds": 0.5, "worker0/waiting_seconds": 0.0, "worker0/communication_seconds": 0.1,
        "worker1/compute_seconds": 0.3, "worker1/waiting_seconds": 0.2, "worker1/communication_seconds": 0.1,
    }  # fmt: skip
    first, second = costs_of([line, line, {"split": "val"}])
    expected = {"data": 0.1, "compute": 0.4, "waiting": 0.0, "communication": 0.1, "update": 0.05}
    assert first == pytest.approx(expected)
    assert second == pytest.approx({"data": 0.1, "compute": 0.2, "waiting": 0.2, "communication": 0.1, "update": 0.0})


@pytest.mark.parametrize(("metric", "values"), [("score", [-3.0, 0.0, 2.0]), ("mse", [3.5, 0.2]), ("mse", [3.5, 3.1])])
def test_curves_of_every_metric_are_drawn(
    metric: str, values: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where more is better, values may be 0 or less; and ticks are plain numbers."""
    rows = [{"step": step, "split": "val", "loss": 1.0, metric: value} for step, value in enumerate(values)]
    (_, drawn) = learning_charts(rows)
    assert [y for _, y in drawn.lines[0].points] == values
    labels: list[str] = []

    def noted(figure: Figure, *_: object, **__: object) -> None:
        figure.draw_without_rendering()
        labels.extend(text.get_text() for text in figure.axes[0].get_yticklabels(which="both"))

    monkeypatch.setattr(Figure, "savefig", noted)
    comparison([Curve("a", metric, [*range(len(values))], None, values)], tmp_path / "a.png")
    assert any(labels) and not any("$" in label for label in labels)
