"""Every page in headless Chromium: none is wider than the screen, and each is dark where the reader wants it."""

import json
import os
import re
from pathlib import Path

import pytest

from metalearn.classifier.classifier import PictureClassifier
from metalearn.cli import fit
from metalearn.reporting.index import write_index
from metalearn.reporting.page import page
from tests import drawn_pictures
from tests.browser import CHROMIUM, WIDTHS, check_fits, chromium
from tests.runs import slow, train_in

pytestmark = [slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")]

SHOWN = os.environ.get("METALEARN_SCREENSHOTS", "")
"""A folder that gets a picture of each page, for people to look at."""

LONG = "a_name_of_a_class_without_any_blank_that_is_longer_than_a_narrow_screen_" * 2


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("pages")
    short = ("trainer.steps=4", "trainer.val_every=2", "trainer.val_tasks=4", "trainer.test_tasks=4", "model.filters=8")
    (home / "outputs/x").mkdir(parents=True)
    train_in(home / "outputs/x" / LONG[:100], *short, "logger.every=1", "logger.report=true")
    train_in(home / "outputs/x/curves", "experiment=maml_sinusoid", *short[:4], "logger.report=true")
    (home / "outputs/x/damaged").mkdir()
    (home / "outputs/x/damaged/result.json").write_text("?" * 500)
    write_index(home / "outputs")
    pictures = drawn_pictures.put(home / "pictures", 4)
    (pictures / "fish").rename(pictures / LONG)
    (pictures / "star/03.png").rename(pictures / LONG / "star.png")
    assert fit.main([str(pictures), "--out", str(home / LONG[:80])]) == 0
    demo = home / "demo.html"
    classes = PictureClassifier.load(home / LONG[:80]).classes_
    demo.write_text(page("demo.html", title=LONG, classes=classes))
    return {
        "run": home / "outputs/x" / LONG[:100] / "report.html", "curves": home / "outputs/x/curves/report.html",
        "index": home / "outputs/index.html", "fit": home / LONG[:80] / "report.html", "demo": demo,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["run", "curves", "index", "fit", "demo"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_page_is_wider_than_the_screen(name: str, dark: bool, pages: dict[str, Path], tmp_path: Path) -> None:
    for width in WIDTHS:
        picture = SHOWN and Path(SHOWN) / f"{name}_{width}_{'dark' if dark else 'light'}.png"
        check_fits(pages[name], width, dark=dark, home=tmp_path, picture=picture or None)


@pytest.mark.parametrize(
    ("body", "width", "message"),
    [
        ('<p style="width: 400px">wide', 360, "at 360 px is 4"),
        (
            '<table><tr><td style="max-width: 60px; white-space: nowrap">much longer<td>next',
            800,
            "1 cells of tables run",
        ),
    ],
)
def test_a_page_that_does_not_fit_is_found(body: str, width: int, message: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f'<!DOCTYPE html><meta name="color-scheme" content="light dark">{body}')
    with pytest.raises(AssertionError, match=message):
        check_fits(page, width, dark=False, home=tmp_path)


def test_a_browser_runs_the_script_of_a_page_and_no_other(pages: dict[str, Path], tmp_path: Path) -> None:
    shown = chromium("--dump-dom", pages["index"].as_uri(), dark=False, home=tmp_path / "browser")
    assert "<th><button>status</button></th>" in shown
    hostile = tmp_path / "report.html"
    hostile.write_text(pages["run"].read_text().replace("</main>", "<script>document.title = 'run'</script></main>"))
    assert "<title>run</title>" not in chromium("--dump-dom", hostile.as_uri(), dark=False, home=tmp_path / "browser")


def test_words_and_ticks_choose_runs_and_their_curves(pages: dict[str, Path], tmp_path: Path) -> None:
    script = """<script>const box = document.querySelector("#controls input");
      box.value = "curves"; box.dispatchEvent(new Event("input"));
      const rows = all("tbody tr"), on = () => rows.map(row => curves(row).map(c => c.style.display || "on")).flat();
      const found = [rows.filter(row => !row.hidden).map(row => row.dataset.path.split("/").pop()), on()];
      box.value = ""; box.dispatchEvent(new Event("input")); found.push(on());
      rows.find(row => row.dataset.path.endsWith("curves")).querySelector("input").click(); found.push(on());
      document.title = JSON.stringify(found);</script>"""
    chosen = tmp_path / "index.html"
    chosen.write_text(pages["index"].read_text().replace("</body>", f"{script}</body>"))
    shown = chromium("--dump-dom", chosen.as_uri(), dark=False, home=tmp_path / "browser")
    title = re.search("<title>(.*)</title>", shown)
    assert title is not None
    names, by_words, whole, by_tick = json.loads(title[1])
    assert names == ["curves"] and sorted(by_words) == ["none", "on"] and whole == ["on", "on"]
    assert by_tick == by_words[::-1]
