"""A document that a saved learner reads, from Python and from the command line."""

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import metalearn
from metalearn.api.export import export
from metalearn.cli import adapt
from tests.runs import Program
from tests.saved import saved_run

SMALL = ("model=decoder", "algorithm=reading", "model.width=8", "model.heads=2", "model.hidden=12", "algorithm.chunk=5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two learners at their start: `bytes` of texts, and `chains` of eight symbols."""
    path = tmp_path_factory.mktemp("documents")
    saved_run(path / "bytes", "dataset=texts", "trainer.val_tasks=4", "trainer.test_tasks=4", *SMALL)
    saved_run(path / "chains", "dataset=chains", *SMALL)
    (path / "text.txt").write_text("to be or not to be, " * 20)
    return path


def test_bits_are_those_of_the_stream_in_pieces(folder: Path) -> None:
    learner = metalearn.load(folder / "bytes")
    text = b"to be or not to be, " * 5
    assert learner.taught.algorithm.stream is not None
    losses = learner.taught.algorithm.stream(learner.params).read(torch.tensor(list(text))) / math.log(2)
    first = learner.adapt(text[:31])
    assert first.bits(text[31:]) == pytest.approx(float(losses[30:].mean()), rel=1e-5)
    assert first.read(text[31:60]).bits(text[60:].decode()) == pytest.approx(float(losses[59:].mean()), rel=1e-5)
    assert first.bits(text[31:]) == first.bits(text[31:])  # nothing was changed
    assert first.continuation(8, seed=3) == first.continuation(8, seed=3)


def test_numbers_are_read_where_symbols_are_no_bytes(folder: Path) -> None:
    learner = metalearn.load(folder / "chains")
    document = learner.adapt(np.array([1, 2, 3, 1, 2, 3, 1]))
    assert document.bits([2, 3]) > 0 and len(document.continuation(4)) == 4
    for text, message in [("text", "knows 8 symbols"), ([9], "run from 9 to 9"), ([], "is empty"), ([0.5], "float64")]:
        with pytest.raises(ValueError, match=message):
            document.read(text)
    with pytest.raises(ValueError, match="a text is all"):
        learner.adapt([1], [1])


def test_a_text_is_read_by_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert adapt.main(["--model", str(folder / "bytes"), "--text", str(folder / "text.txt")]) == 0
    said = capsys.readouterr().out
    assert "bits a byte, each before it was learned from (400 bytes)" in said and "it might go on: '" in said
    assert adapt.main(["--model", str(folder / "bytes"), "--text", "nowhere.txt"]) == 2
    assert "--text=nowhere.txt: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bytes", "chains"])
def test_the_card_of_a_published_reader_has_code_that_runs(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    export(folder / name, "reader")
    card = Path("reader/README.md").read_text()
    assert "text-generation" in card and "-way" not in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    done = Program([sys.executable, "-c", code], tmp_path).wait(120)
    assert done.code == 0 and done.text, done.text
