"""How far a run is: what is drawn where, and what is counted in the time left."""

import contextlib
import importlib.util
import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import TextIO

import pytest

from metalearn.reporting.loggers import Window
from metalearn.reporting.logging import SILENT, RunProgress, bar_log, on_terminal
from tests.runs import ROOT, slow

WINDOW = Window(0, 0, 10, 4, val_every=4, val_tasks=8, test_tasks=20)
"""Three validations, after the steps 4, 8 and 10."""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, int]]:
    """A terminal, and where one reads what it shows. FORCE_COLOR is not set."""
    shown, typed = os.openpty()
    for name in ("FORCE_COLOR", "JPY_PARENT_PID", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with os.fdopen(typed, "w", encoding="utf-8") as stderr:
        yield stderr, shown
    os.close(shown)


def all_of(stderr: TextIO, shown: int) -> str:
    """What the terminal has shown until now, when nothing more can come. One read may give only a part of it."""
    stderr.close()
    parts = []
    with contextlib.suppress(OSError):  # Linux ends a terminal that nobody writes to by EIO
        while part := os.read(shown, 65536):
            parts.append(part)
    return b"".join(parts).decode()


def test_a_terminal_has_bars_for_steps_and_validation(terminal: tuple[TextIO, int]) -> None:
    with contextlib.redirect_stderr(terminal[0]):
        log = bar_log(WINDOW)
        log.step(1, {"loss": 0.5, "step_seconds": 2.0})
        log.evaluating("val", 8)(5)
        log.close()
    drawn = all_of(*terminal)
    assert "1/10" in drawn and "loss 0.500  2.0 tasks/s" in drawn
    assert "val" in drawn and "5/8" in drawn


@pytest.mark.parametrize("variable", [("TERM", "dumb"), ("JPY_PARENT_PID", "1"), ("TTY_COMPATIBLE", "0")])
def test_a_terminal_that_draws_no_line_again_gets_lines(
    variable: tuple[str, str], terminal: tuple[TextIO, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JPY_PARENT_PID: a command in a cell of a notebook."""
    with contextlib.redirect_stderr(terminal[0]):
        assert on_terminal()
        monkeypatch.setenv(*variable)
        assert not on_terminal() and bar_log(WINDOW) is SILENT


def test_a_file_gets_lines_also_where_colours_are_wanted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("metalearn.reporting.logging.LINE_SECONDS", 0.0)
    logger = logging.getLogger("metalearn")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])  # a program of this process may have left its own
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level(logging.INFO, "metalearn")
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        shown = RunProgress(WINDOW)
        done = shown.evaluating("val", 8)
        for more in (3, 4, 1):
            done(more)
        shown.close()
    assert stderr.getvalue() == "" and shown.bars is None
    assert [message.partition(" tasks")[0] for message in caplog.messages] == [
        "val: 0 of 8",
        "val: 3 of 8",
        "val: 7 of 8",
    ]


def test_the_time_left_counts_validations_and_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes two seconds, and a task of a validation half a second, which is not known before the first one."""
    clock = iter((0.0, 0.0, 4.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    shown = RunProgress(WINDOW)
    assert shown.time_left() == ""
    shown.step(4, {"step_seconds": 2.0})
    assert shown.time_left() == "00:00:12 left for steps"
    shown.evaluating("val", 8)(8)
    for step, seconds in ((4, 6 * 2 + (24 + 20) / 2), (5, 5 * 2 + (16 + 20) / 2)):
        shown.step(step, {"step_seconds": 2.0})
        assert shown.time_left() == f"00:00:{seconds:02.0f} left"
    shown.step(10, {"step_seconds": 2.0})
    assert shown.time_left("val", 6) == "00:00:11 left"  # two of the last validation, and the test
    assert shown.time_left("test", 16) == "00:00:02 left"


@slow
def test_a_notebook_keeps_one_output_without_control_characters() -> None:
    for name in ("nbclient", "ipykernel"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the package {name} is not installed; type pip install {name}")
    import nbformat
    from nbclient import NotebookClient

    train = "import metalearn; metalearn.train('maml', 'mlp', 'sinusoid', steps=9, val_every=3, val_tasks=20)"
    command = f"!{sys.executable} {ROOT}/train.py --version"
    cells = [nbformat.v4.new_code_cell(text) for text in (train, train.replace("20)", "20, progress=False)"), command)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    drawn, silent, typed = ([o for o in cell.outputs if o.output_type != "execute_result"] for cell in notebook.cells)
    noted, bar = drawn[0].data["text/plain"].splitlines()[-2:]
    assert len(drawn) == 1 and noted.startswith("step 9/9  val: ") and re.match("step 9/9 .* loss ", bar)
    assert silent == [] and "\\u001b" not in json.dumps([drawn, typed])
