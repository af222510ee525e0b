"""The folder of a classifier: names of any bytes, many classes, and what changes it meanwhile."""

import csv
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from metalearn.classifier.backbones import Backbone, of_module
from metalearn.classifier.classifier import Collected, PictureClassifier
from metalearn.classifier.saved import WEIGHTS, read
from metalearn.cli import export, fit, predict
from metalearn.errors import ConfigError, DataError
from metalearn.saved import form
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


class Killed(BaseException):
    pass


def test_a_kill_while_it_is_replaced_leaves_a_whole_one(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each renaming in turn, where the system exchanges no folders; then the classifier is saved again. Files of
    people's own stay."""
    monkeypatch.setattr(form, "exchanged", lambda one, other: False)
    folder, states = tmp_path / "c", [{"w": torch.full((2,), float(number))} for number in range(2)]
    made = [fitted(replace(backbone, state=state), classes) for state, classes in zip(states, (2, 3), strict=True)]
    for calls in range(4):
        shutil.rmtree(folder, ignore_errors=True)
        made[0].save(folder)
        (folder / "notes.txt").write_text("mine")
        left, rename = [calls], Path.rename

        def killed(path: Path, to: Any, left: list[int] = left, rename: Any = rename) -> Path:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return rename(path, to)  # type: ignore[no-any-return]

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", killed)
            try:
                made[1].save(folder, replace=True)
            except Killed:
                pass
            else:
                assert calls == 2  # the number of renamings
                break
        found, file = read(folder, "path")
        assert found["classes"] == made[0].classes_.tolist() and file is not None
        assert torch.equal(load_file(file)["w"], states[0]["w"])
        made[0].save(folder, replace=True)
        assert (folder / "notes.txt").read_text() == "mine"
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
    found, file = read(folder, "path")
    assert found["classes"] == made[1].classes_.tolist() and torch.equal(load_file(file or "")["w"], torch.ones(2))
    fitted(backbone, 3).save(folder, replace=True)
    assert read(folder, "path")[1] is None and not (folder / WEIGHTS).exists()


def test_who_reads_while_it_is_replaced_gets_the_new_one(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted(backbone, 2).save(tmp_path / "c")
    other, calls, digest_of = fitted(backbone, 3), list[Path](), form.digest_of

    def replaced(path: Path) -> str:
        if not calls:
            calls.append(path)
            other.save(tmp_path / "c", replace=True)
        return digest_of(path)

    monkeypatch.setattr(form, "digest_of", replaced)  # is called after the manifest was read
    found = PictureClassifier.load(tmp_path / "c", backbone=backbone)
    assert calls and found.classes_.tolist() == other.classes_.tolist()


def test_a_picture_that_is_known_is_in_no_other_class(backbone: Backbone) -> None:
    made = fitted(backbone, 3)
    pictures = list(torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), np.uint8)))
    again = Collected(["a.png", "b.png"], ["c0", "c0"], pictures[:2])
    assert made.add(again).classes_.tolist() == ["c0", "c1", "c2"] and len(made._y) == 6
    with pytest.raises(DataError, match=r"a.png is the same picture as 0.png, in another class"):
        made.add(again._replace(labels=["new", "new"]))
    assert made.classes_.tolist() == ["c0", "c1", "c2"]
    made.classes_ = np.array(["caf\u00e9", "c1", "c2"])  # and a system that writes an accent apart
    made.add(again._replace(labels=["cafe\u0301", "cafe\u0301"]))
    assert made.classes_.tolist() == ["c1", "c2", "caf\u00e9"]


def test_a_refused_fit_leaves_what_was_learned(backbone: Backbone) -> None:
    made, pictures = fitted(backbone, 3), np.random.default_rng(1).integers(0, 256, (4, 8, 8, 3), np.uint8)
    before = made.predict_proba(list(pictures))
    for labels in (["a"], ["a"] * 4, ["a", 1, "a", 1]):
        with pytest.raises(ValueError, match="y: "):
            made.fit(list(pictures), labels)
    assert np.array_equal(made.predict_proba(list(pictures)), before)


def test_labels_that_are_numbers_are_answered_as_plain_values(backbone: Backbone) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
    made = PictureClassifier(backbone, head="class means").fit(list(pictures), [1, 1, 2, 2])
    assert json.loads(json.dumps([answer.label for answer in made.answers(list(pictures))])) == [1, 1, 2, 2]


def test_a_full_disk_is_named(backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise SafetensorError("Error while serializing: IoError(No space left on device (os error 28))")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ConfigError, match=r"path=.*c: cannot be written: .*No space left on device"):
        fitted(backbone, 2).save(tmp_path / "c")
