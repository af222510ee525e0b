"""Backbones of other libraries and of code. Their networks are tiny, and have random weights: nothing is downloaded."""

import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from metalearn.api.pictures import all_seen
from metalearn.classifier.backbones import Backbone, backbone_of, of_module
from metalearn.classifier.classifier import PictureClassifier
from metalearn.errors import ConfigError, Invalid, install
from tests import drawn_pictures

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]  # those of other libraries

LABELS = ["star", "star", "ring", "ring"]


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    generator = np.random.default_rng(0)
    return [drawn_pictures.drawn(thing, generator).resize((200, 150)) for thing in LABELS]


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.BatchNorm2d(8), nn.ReLU())


def features(backbone: Backbone, images: list[Image.Image]) -> torch.Tensor:
    return backbone.features(all_seen(images, backbone.form, "X"))


def test_a_module_of_code_is_a_backbone(network: nn.Module, images: list[Image.Image], tmp_path: Path) -> None:
    backbone = of_module(network, size=32, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2), whole=True)
    x = np.stack([np.asarray(image.resize((32, 32), Image.Resampling.BICUBIC)) for image in images])
    with torch.no_grad():
        expected = network.eval()((torch.from_numpy(x).permute(0, 3, 1, 2) / 255 - 0.5) / 0.2).mean(dim=(2, 3))
    torch.testing.assert_close(features(backbone, images), expected)
    classifier = PictureClassifier(backbone).fit(images, LABELS)
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(again.predict_proba(images), classifier.predict_proba(images))
    classifier.save(tmp_path / "c")
    loaded = PictureClassifier.load(tmp_path / "c", backbone=backbone)
    np.testing.assert_array_equal(loaded.predict_proba(images), classifier.predict_proba(images))
    with pytest.raises(ConfigError, match="was made with module Sequential; give it in Python"):
        PictureClassifier.load(tmp_path / "c")
    with pytest.raises(ConfigError, match="other weights"):
        PictureClassifier.load(tmp_path / "c", backbone=of_module(network, size=40))
    assert PictureClassifier(network).fit(images, LABELS).opened().form.size == 224


def test_a_network_of_timm(images: list[Image.Image], tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed; type pip install timm")
    torch.manual_seed(0)
    made = timm.create_model("test_resnet", num_classes=5)
    state = {f"module.{name}": value.half() for name, value in made.state_dict().items() if "num_batches" not in name}
    torch.save(state, tmp_path / "w.pth")
    backbone = backbone_of("timm:test_resnet", str(tmp_path / "w.pth"))
    made.half().float()
    made.reset_classifier(0)
    shown = timm.data.create_transform(**timm.data.resolve_model_data_config(made))
    with torch.no_grad():
        expected = made.eval()(torch.stack([shown(image) for image in images]))
    found = features(backbone, images)
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.999
    assert torch.nn.functional.cosine_similarity(found, expected.roll(1, 0)).min() < 0.99
    assert "licence: not known" in backbone.note and backbone.form.crop == 0.95
    PictureClassifier("timm:test_resnet", weights=str(tmp_path / "w.pth")).fit(images, LABELS).save(tmp_path / "c")
    PictureClassifier.load(tmp_path / "c", weights=str(tmp_path / "w.pth"))
    with pytest.raises(Invalid, match="are not those of timm:test_vit"):
        backbone_of("timm:test_vit", str(tmp_path / "w.pth"))
    with pytest.raises(ConfigError, match="nearest are resnet18"):
        backbone_of("timm:resnet1", str(tmp_path / "w.pth"))


MISSING = f"is not installed; type {install('backbones')}"

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no pictures": (lambda: of_module(nn.Linear(4, 4)), "cannot take pictures"),
    "no width": (lambda: of_module(nn.Flatten(0)), "gives [150528] for a picture; it must give"),
    "not finite": (lambda: of_module(nn.BatchNorm2d(3, eps=float("nan"))), "are not finite; take other weights"),
    "size": (lambda: of_module(nn.Flatten(), size=0), "size=0"),
    "crop": (lambda: of_module(nn.Flatten(), crop=1.5), "crop=1.5"),
    "mean": (lambda: of_module(nn.Flatten(), mean=(0.5,)), "must have 3 numbers"),
    "resample": (lambda: of_module(nn.Flatten(), resample="magic"), "resample='magic'"),
    "a module with weights": (lambda: backbone_of(nn.Flatten(), "w.pth"), "is a module, which has its own"),
    "no such network": (lambda: backbone_of("resnet19"), "swin_t, vit_b_16, timm:NAME"),
    "without timm": (lambda: backbone_of("timm:x"), f"timm {MISSING}"),
}
"""What is made, and a part of the message."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_backbone_is_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.startswith("without"):
        monkeypatch.setattr("sys.path", [])
        monkeypatch.delitem(sys.modules, case.split()[1], raising=False)
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
