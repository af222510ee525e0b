"""A classifier leaves the machine: as a folder, as a program for others, and by a hub. Damaged folders are refused."""

import json
import logging
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor, nn

from metalearn.classifier.backbones import Backbone
from metalearn.classifier.classifier import PictureClassifier
from metalearn.classifier.saved import WEIGHTS
from metalearn.cli import export, predict
from metalearn.errors import ConfigError, install
from metalearn.nn.surroundings import compute_with
from metalearn.saved.exporter import FILES, FORMATS, ONNX, TORCH
from metalearn.saved.form import MANIFEST, META, TENSORS
from metalearn.tasks.common.pictures import PictureForm
from tests import drawn_pictures
from tests.hub import Hub, needs_hub
from tests.programs import needs_onnx, said_by_card
from tests.runs import slow

pytestmark = pytest.mark.thorough


class Tiny(nn.Module):
    """Features of pictures of 16 pixels: those of a convolution, pooled. `factor` changes them where it is exported."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Conv2d(3, 12, 4, stride=4), factor

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor if torch.compiler.is_exporting() else 1
        return self.layer(x * 4 * factor).relu().mean(dim=(2, 3))


def tiny(head: str = "ridge 1", labels: Any = ("a", "b", "c"), factor: float = 1) -> PictureClassifier:
    """A classifier of random pictures with a tiny network; `factor` makes the network that is exported another one."""
    torch.manual_seed(0)
    network = Tiny(factor).eval().requires_grad_(False)
    made, form = PictureClassifier(head=head), PictureForm(16, 3)
    made._opened = Backbone("tiny", "", network.state_dict(), False, "digest", form, 12, "", "MIT", network)
    return made.fit([*random_pictures(24)], [label for label in labels for _ in range(24 // len(labels))])


def random_pictures(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).integers(0, 256, (count, 16, 16, 3), np.uint8)


@pytest.mark.parametrize("head", ["ridge 1", pytest.param("nearest pictures", marks=slow)])
@pytest.mark.parametrize("file_format", [pytest.param(ONNX, marks=needs_onnx), TORCH])
def test_an_exported_program_answers_as_ours(file_format: str, head: str, tmp_path: Path) -> None:
    classifier = tiny(head)
    compute_with("float32")  # as after a training in this process
    (said,) = classifier.export(tmp_path / "out", format=file_format)
    assert float(re.fullmatch(r"largest difference from this program: (.+)", said)[1]) <= 1e-4  # type: ignore[index]
    pictures = random_pictures(5)
    x = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255
    path = tmp_path / "out" / FILES[file_format]
    for count in (1, 5):  # another number of pictures than it was exported with
        if file_format == ONNX:
            import onnxruntime

            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            found, near = session.run(None, {"pictures": x[:count].numpy()})
        else:
            found, near = torch.export.load(path).module()(x[:count])
        np.testing.assert_allclose(found, classifier.predict_proba([*pictures[:count]]), atol=1e-4)
        assert near.shape == (count,)
    about = json.loads((tmp_path / "out/preprocessing.json").read_text())
    assert about["classes"] == ["a", "b", "c"] and about["image_size"] == 16 and about["filter"] == "lanczos"


def test_what_would_be_wrong_elsewhere_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"differs from this program by .* and at most 1e-04 is allowed"):
        tiny(factor=0.5).export(tmp_path / "out", format=TORCH)
    here = [f"{tmp_path}/{name}" for name in "abc"]
    for file_format in ("folder", TORCH):
        with pytest.raises(ConfigError, match=f"classes={tmp_path}/a: is a path of this machine"):
            tiny(labels=here).export(tmp_path / "out", format=file_format)
    with pytest.raises(ValueError, match=r"format='pickle'"):
        tiny().export(tmp_path / "out", format="pickle")
    classifier = tiny()
    monkeypatch.setattr(sys, "path", [])
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("onnx")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=re.escape(f"onnxruntime are not installed; type {install('onnx')}")):
        classifier.export(tmp_path / "out", format=ONNX)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn_pictures.put(tmp_path_factory.mktemp("drawn") / "a", 3, things=("star", "house", "ring"))


@pytest.fixture(scope="module")
def fitted(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> PictureClassifier:
    """With a small network of torchvision, whose weights are in a file."""
    from torchvision import models

    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("weights") / "w.pth"
    torch.save(models.mobilenet_v3_small().state_dict(), file)
    paths = sorted(pictures.glob("*/*.png"))
    made = PictureClassifier("mobilenet_v3_small", weights=str(file))
    return made.fit(paths, [path.parent.name for path in paths])


@pytest.fixture(scope="module")
def folder(fitted: PictureClassifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its export, by the command."""
    root = tmp_path_factory.mktemp("exported")
    fitted.save(root / "saved")
    assert export.main([str(root / "saved"), "--out", str(root / "out"), "--licence", "BSD-3-Clause"]) == 0
    return root / "out"


def test_an_exported_folder_is_all_that_another_machine_needs(
    folder: Path, fitted: PictureClassifier, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {path.name for path in folder.iterdir()} == {
        META, MANIFEST, TENSORS, WEIGHTS, "preprocessing.json", "README.md",
    }  # fmt: skip
    assert "preprocessing.json" in json.loads((folder / MANIFEST).read_text())
    here = str(Path(str(fitted.weights)).parent.parent).encode()
    assert not [path.name for path in folder.iterdir() if here in path.read_bytes()]
    query = [pictures / "star/00.png", pictures / "ring/01.png"]
    loaded = PictureClassifier.load(folder)
    np.testing.assert_array_equal(loaded.predict_proba(query), fitted.predict_proba(query))
    assert predict.main([str(folder), *map(str, query), "--out", str(tmp_path / "a.csv")]) == 0
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    fields = yaml.safe_load(front)
    assert fields["license"] == "bsd-3-clause" and fields["pipeline_tag"] == "image-classification"
    (figure,) = fields["model-index"][0]["results"][0]["metrics"]
    assert figure["value"] == pytest.approx(fitted.report_["accuracy"], abs=1e-4)
    low, high = fitted.report_["interval95"]
    for part in (
        f"95% interval {low:.1%} to {high:.1%}", "house (3), ring (3), star (3)", "9 pictures of 3 classes",
        f"torch {torch.__version__.split('+')[0]}", fitted.data_digest(), "**Hardware**",
    ):  # fmt: skip
        assert part in text, text
    loaded.export(tmp_path / "again")
    assert "bsd-3-clause" in (tmp_path / "again/README.md").read_text()  # the licence goes with the weights
    capsys.readouterr()
    for arguments, message in (
        (["nowhere", "--format", "onnx"], "--format: is not for a run"),
        ([str(folder), "--network", "x.Y"], "--network: is not for a classifier"),
    ):
        assert export.main([*arguments, "--out", str(tmp_path / "new")]) == 2
        assert message in capsys.readouterr().err


def test_a_changed_classifier_marks_its_card_as_outdated(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("metalearn"), "propagate", True)
    shutil.copytree(folder, tmp_path / "out")
    loaded = PictureClassifier.load(tmp_path / "out")
    loaded.remove(["ring"]).save(tmp_path / "out", replace=True)
    assert "README.md tells of the classifier before" in caplog.text
    assert PictureClassifier.load(tmp_path / "out").classes_.tolist() == ["house", "star"]


# The hub


@needs_hub
def test_a_classifier_goes_to_a_hub_and_comes_back(
    hub: type[Hub], fitted: PictureClassifier, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = fitted.push_to_hub("me/animals", private=True, licence="BSD-3-Clause", timeout=60)
    assert address.endswith("/me/animals") and hub.private == [True]
    assert set(hub.files) == {META, MANIFEST, TENSORS, WEIGHTS, "preprocessing.json", "README.md"}
    assert b'from_pretrained("me/animals")' in hub.files["README.md"]
    hub.files["evil.py"] = b"raise SystemExit"
    back = PictureClassifier.from_pretrained("me/animals", revision="main", timeout=60)
    query = [pictures / "star/00.png"]
    np.testing.assert_array_equal(back.predict_proba(query), fitted.predict_proba(query))
    assert not list((tmp_path / "cache").rglob("evil.py"))
    del hub.files[TENSORS]
    monkeypatch.setattr(hub, "COMMIT", "b" * 40)
    with pytest.raises(ConfigError, match=rf"{TENSORS}: No such file"):
        PictureClassifier.from_pretrained("me/animals", timeout=60)
    with pytest.raises(ConfigError, match=r"name=me/nothing: .*404"):
        PictureClassifier.from_pretrained("me/nothing", timeout=60)
    with pytest.raises(ConfigError, match=r"name=../x: "):
        PictureClassifier.from_pretrained("../x", timeout=60)


@needs_hub
def test_a_hub_that_does_not_answer_is_not_waited_for(hub: type[Hub], fitted: PictureClassifier) -> None:
    hub.silent = threading.Event()
    with pytest.raises(ConfigError, match=r"repo_id=me/animals: the hub has not answered within 0.5 s"):
        fitted.push_to_hub("me/animals", timeout=0.5)
    hub.silent.set()


def test_without_its_package_the_hub_is_a_line(
    folder: Path, fitted: PictureClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=re.escape(f"type {install('hub')}")):
        PictureClassifier.from_pretrained("me/animals")
    assert PictureClassifier.from_pretrained(folder).classes_.tolist() == fitted.classes_.tolist()


@slow
@needs_onnx
def test_the_card_of_an_onnx_program_runs_without_this_program(pictures: Path, tmp_path: Path) -> None:
    """With the default network; the interpreter sees neither this checkout nor torch."""
    paths = sorted(pictures.glob("*/*.png"))
    classifier = PictureClassifier().fit(paths, [path.parent.name for path in paths])
    query = [paths[0], paths[4], drawn_pictures.put(tmp_path / "s", 1, things=("dots",)) / "dots/00.png"]
    Image.open(paths[0]).convert("RGBA").resize((90, 160)).save(tmp_path / "transparent.png")
    query.append(tmp_path / "transparent.png")
    classifier.export(tmp_path / "out", format=ONNX)
    said = said_by_card(tmp_path / "out", query)
    ours = classifier.answers(query)
    for (name, label, probability), path, answer in zip(said, query, ours, strict=True):
        assert (name, label) == (str(path), answer.label or "none of these")
        assert float(probability) == pytest.approx(answer.probability, abs=1e-4)


assert FORMATS == ("folder", ONNX, TORCH) == export.FORMATS
