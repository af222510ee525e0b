"""The folder of a classifier: names of any bytes, many classes, and what changes it meanwhile."""

import csv
import os
from pathlib import Path

import pytest

from metalearn.classifier.classifier import PictureClassifier
from metalearn.cli import export, fit, predict
from tests import drawn_pictures
from tests.metalearn.classifier.test_classifier import said

pytestmark = pytest.mark.thorough


def test_names_that_are_not_utf_8_stay_as_they_are(tmp_path: Path) -> None:
    strange = os.fsdecode(b"caf\xe9")
    root = drawn_pictures.put(tmp_path / "a", 2, things=("fish", "ring"))
    (root / "fish").rename(root / strange)
    (root / "ring/00.png").rename(root / f"ring/{strange}.png")
    said(fit.main, root, "--out", tmp_path / "c", "--head", "class means")
    assert PictureClassifier.load(tmp_path / "c").classes_.tolist() == [strange, "ring"]
    said(predict.main, tmp_path / "c", root)
    said(predict.main, tmp_path / "c", root, "--out", tmp_path / "answers.csv")
    with (tmp_path / "answers.csv").open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[3]["file"] == str(root / f"ring/{strange}.png") and strange in rows[0]
    said(predict.main, tmp_path / "c", root, "--out", tmp_path / "answers.jsonl")
    said(export.main, tmp_path / "c", "--out", tmp_path / "elsewhere")
    assert PictureClassifier.load(tmp_path / "elsewhere").classes_.tolist() == [strange, "ring"]
