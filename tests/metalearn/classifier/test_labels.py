"""Labels of a classifier: texts and numbers, in Python, folders and commands."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from metalearn.classifier.backbones import Backbone, of_module
from metalearn.classifier.classifier import PictureClassifier
from metalearn.cli import fit, predict
from metalearn.saved.form import META, TENSORS
from tests import drawn_pictures
from tests.metalearn.classifier.test_classifier import said

pytestmark = pytest.mark.thorough

THINGS = ("fish", "ring", "star")


@pytest.fixture
def backbone() -> Backbone:
    torch.manual_seed(0)
    return of_module(nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.Flatten()), size=8)


@pytest.fixture
def numbered(tmp_path: Path) -> tuple[Path, Path]:
    """A classifier whose classes are 1, 2 and 3, and further pictures of them in folders."""
    paths = sorted(drawn_pictures.put(tmp_path / "a", 3, things=THINGS).glob("*/*.png"))
    labels = [1 + THINGS.index(path.parent.name) for path in paths]
    PictureClassifier(head="class means").fit(paths, labels).save(tmp_path / "c")
    more = drawn_pictures.put(tmp_path / "b", 2, seed=1, things=THINGS)
    for number, name in enumerate(THINGS, start=1):
        (more / name).rename(more / str(number))
    return tmp_path / "c", more


def pictures(count: int) -> list[Any]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, (8, 8, 3), np.uint8) for _ in range(count)]


def test_folders_and_commands_name_classes_that_are_numbers(numbered: tuple[Path, Path], tmp_path: Path) -> None:
    classifier, more = numbered
    assert "6 new pictures, 0 that it had; 3 classes" in said(fit.add, classifier, more)
    assert PictureClassifier.load(classifier).classes_.tolist() == [1, 2, 3]
    before = {name: (classifier / name).read_bytes() for name in (META, TENSORS)}
    shutil.copytree(more / "1", tmp_path / "other/4")
    message = said(fit.add, classifier, tmp_path / "other", code=2)
    assert "FOLDER: the class 4 is a text, and those of this classifier are numbers: 1, 2, 3" in message
    assert before == {name: (classifier / name).read_bytes() for name in before}
    assert "is no class of it; allowed: 1, 2, 3" in said(fit.remove, classifier, "4", code=2)
    said(fit.remove, classifier, "1")
    assert PictureClassifier.load(classifier).classes_.tolist() == [2, 3]
    said(predict.main, classifier, more)


@pytest.mark.parametrize(
    "labels",
    [
        [1, "a"], [1, "1"], [1, True], [1.0, 2], ["a"], [0.5, 1.0], [float("nan"), 1.0], [None, 1],
        [["a"], ["b"]], ["a", "b", "c"],
    ],
)  # fmt: skip
def test_labels_that_are_none_are_refused(labels: list[Any], backbone: Backbone) -> None:
    """Of several types, which numpy would make equal; of one class; no texts or whole numbers."""
    with pytest.raises(ValueError, match=r"^y: |^y=") as refused:
        PictureClassifier(backbone).fit(pictures(4), labels if len(labels) == 3 else [*labels, *labels][:4])
    assert "give" in str(refused.value) or "must be" in str(refused.value)
