"""The folder of a classifier: names of any bytes, many classes, and what changes it meanwhile."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from metalearn.classifier import saved
from metalearn.classifier.backbones import Backbone, of_module
from metalearn.classifier.classifier import PictureClassifier
from metalearn.classifier.collected import Collected
from metalearn.classifier.saved import DESCRIPTION
from metalearn.cli import export, fit, predict
from tests import drawn_pictures
from tests.metalearn.classifier.test_classifier import said

pytestmark = pytest.mark.thorough


@pytest.fixture
def backbone() -> Backbone:
    torch.manual_seed(0)
    return of_module(nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.Flatten()), size=8)


def fitted(backbone: Backbone, classes: int, seed: int = 0) -> PictureClassifier:
    """A classifier of classes with two pictures each."""
    values = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (2 * classes, 8, 8, 3), np.uint8))
    labels = [f"c{number // 2}" for number in range(2 * classes)]
    return PictureClassifier(backbone, head="class means").fit_collected(
        Collected([f"{number}.png" for number in range(2 * classes)], labels, list(values))
    )


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


def test_what_fit_can_save_can_be_loaded(backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fitted(backbone, 3)
    # As large as the confusion matrix of 1,500 classes, which take a minute to fit.
    made.report_["wrong"] = [{"picture": f"{n}.png", "label": "c0", "answer": "c1"} for n in range(10**5)]
    made.save(tmp_path / "c")
    assert PictureClassifier.load(tmp_path / "c", backbone=backbone).report_ == made.report_
    size = (tmp_path / "c" / DESCRIPTION).stat().st_size
    monkeypatch.setattr(saved, "LARGEST", size - 1)
    with pytest.raises(ValueError, match=f"would have {size:,} bytes, and at most {size - 1:,} are read: its 3 cl"):
        made.save(tmp_path / "d")
    assert not (tmp_path / "d" / DESCRIPTION).exists()
