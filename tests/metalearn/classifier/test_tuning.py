"""Tuning of the last layers, on classes that the frozen network hardly tells apart: the colour of the light hides a
pattern that makes the class."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from metalearn.classifier import validation
from metalearn.classifier.backbones import Backbone, of_module
from metalearn.classifier.classifier import Collected, PictureClassifier
from metalearn.cli import fit
from metalearn.cli.fit import summary
from metalearn.errors import ConfigError
from metalearn.models.common.pretrained import cut
from metalearn.saved.form import META
from tests import drawn_pictures
from tests.runs import slow

pytestmark = pytest.mark.thorough

STEPS = 10


def pictures(count: int, seed: int, classes: int = 4) -> tuple[list[Any], list[str]]:
    generator, patterns = np.random.default_rng(seed), np.random.default_rng(9).normal(0, 12, (classes, 8, 8, 3))
    values = [128 + generator.normal(0, 40, 3) + pattern for pattern in patterns for _ in range(count)]
    noisy = [(x + generator.normal(0, 3, x.shape)).clip(0, 255).astype(np.uint8) for x in values]
    return noisy, [f"c{label}" for label in range(classes) for _ in range(count)]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METALEARN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(256, 32))
    with torch.no_grad():
        network[2].weight.mul_(0.05)
    return of_module(network, size=8)


def learner(backbone: Backbone, **options: Any) -> PictureClassifier:
    return PictureClassifier(backbone, **({"head": "class means", "minutes": 30, "steps": STEPS} | options))


@pytest.fixture(scope="module")
def tuned(backbone: Backbone) -> PictureClassifier:
    return learner(backbone).fit(*pictures(6, 0))


def test_tuned_layers_are_kept_where_they_help(tuned: PictureClassifier, backbone: Backbone) -> None:
    frozen = learner(backbone, minutes=0).fit(*pictures(6, 0))
    before, after = (classifier.score(*pictures(20, 1)) for classifier in (frozen, tuned))
    assert before < 0.6 and after > 0.8
    found = tuned.report_["tuning"]
    assert found["kept"] and found["steps"] == STEPS and found["frozen"] == frozen.report_["accuracy"]
    assert tuned.report_["accuracy"] == found["tuned"] and tuned._tuned.keys() == {"network.2.weight", "network.2.bias"}
    [line] = [line for line in summary(tuned) if line.startswith("tuning")]
    assert line == (
        f"tuning: {STEPS} steps; nested cross-validation: frozen {found['frozen']:.1%}, tuned {found['tuned']:.1%}; "
        "the tuned network is kept"
    )


def test_interrupted_tuning_gives_the_same_bits(
    tuned: PictureClassifier, backbone: Backbone, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drawn = np.random.default_rng

    def until_ctrl_c(seed: Any) -> Any:
        if seed == [0, 3, STEPS]:  # the fourth network, which is in its step after the last one
            raise KeyboardInterrupt
        return drawn(seed)

    monkeypatch.setattr("numpy.random.default_rng", until_ctrl_c)
    other = learner(backbone, steps=10**6).fit(*pictures(6, 0))
    assert f"tuning was interrupted after {STEPS} steps" in caplog.text
    assert other.report_["tuning"] == tuned.report_["tuning"]
    assert all(torch.equal(other._tuned[name], value) for name, value in tuned._tuned.items())
    query, _ = pictures(2, 3)
    np.testing.assert_array_equal(other.predict_proba(query), tuned.predict_proba(query))


def test_tuning_without_a_step_keeps_the_frozen_network(backbone: Backbone) -> None:
    found = learner(backbone, minutes=1e-9).fit(*pictures(6, 0))
    assert found.report_["tuning"] == {"steps": 0, "kept": False} and not found._tuned
    assert "no step fitted into the time" in "\n".join(summary(found))


def test_what_does_not_help_is_not_kept(backbone: Backbone) -> None:
    images, labels = pictures(6, 0)
    shuffled = np.random.default_rng(0).permutation(labels).tolist()
    found, frozen = (learner(backbone, minutes=m).fit(images, shuffled) for m in (30, 0))
    assert not found.report_["tuning"]["kept"] and "the frozen network is kept" in "\n".join(summary(found))
    query, _ = pictures(2, 3)
    np.testing.assert_array_equal(found.predict_proba(query), frozen.predict_proba(query))
    assert found.report_["accuracy"] == frozen.report_["accuracy"]


def test_it_is_saved_loaded_pickled_changed_and_exported(
    tuned: PictureClassifier, backbone: Backbone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    query, truth = pictures(5, 4)
    expected = tuned.predict_proba(query)
    tuned.save(tmp_path / "c")
    loaded = PictureClassifier.load(tmp_path / "c", backbone=backbone)
    for one in (loaded, pickle.loads(pickle.dumps(tuned))):
        np.testing.assert_array_equal(one.predict_proba(query), expected)
    # The classifier of features by hand: the network with the tuned layer, and class means of what it gives.
    network = backbone.network
    with torch.no_grad():
        x = torch.from_numpy(np.stack(query)).permute(0, 3, 1, 2) / 255
        maps = network.network[0]((x - network.mean) / network.std).flatten(1)  # type: ignore[index,operator]
        features = maps @ tuned._tuned["network.2.weight"].T + tuned._tuned["network.2.bias"]
    by_hand = tuned.answers_of(features)
    assert [answer.label for answer in by_hand] == [answer.label for answer in tuned.answers(query)]
    loaded.remove(["c0"])
    assert loaded.report_["accuracy"] is None and "its network was tuned on these pictures" in caplog.text
    images, labels = pictures(6, 0)
    form = backbone.form
    assert form.size == 8
    loaded.add(Collected([f"{n}" for n in range(6)], labels[:6], [torch.from_numpy(x) for x in images[:6]]))
    kept = [value == "c0" for value in truth]
    assert (
        loaded.score(query, truth) > 0.8
        and loaded.score([q for q, k in zip(query, kept, strict=True) if k], ["c0"] * 5) > 0.5
    )
    assert "accuracy: not known: its network" in summary(loaded)[0]
    loaded.save(tmp_path / "changed")
    again = PictureClassifier.load(tmp_path / "changed", backbone=backbone)
    np.testing.assert_array_equal(again.predict_proba(query), loaded.predict_proba(query))
    assert "its network was tuned" in (tmp_path / "changed/report.html").read_text()
    said = tuned.export(tmp_path / "program", format="torch-export")
    assert any("largest difference" in line for line in said)
    assert "the tuned network is kept" in (tmp_path / "program/README.md").read_text()
    assert not loaded.fit(images, labels)._tuned  # learned anew, with no minutes


def test_no_picture_chooses_the_head_that_it_is_asked_with() -> None:
    generator = torch.Generator().manual_seed(0)
    features, y = torch.randn(24, 5, generator=generator), torch.arange(24) % 3
    fold, heads = validation.folds_of(y, 3), list(validation.HEADS)

    def chosen(features: torch.Tensor, y: torch.Tensor) -> str:
        over = validation.Validation(y, ["a", "b", "c"], [""] * 24, heads, folds=5, seed=0)
        return validation._head_for_fold(features, fold != 1, over)

    first = chosen(features, y)
    for seed in range(5):
        generator.manual_seed(seed)
        other, labels = features.clone(), y.clone()
        other[fold == 1] = torch.randn(int((fold == 1).sum()), 5, generator=generator)
        labels[fold == 1] = torch.randint(3, (int((fold == 1).sum()),), generator=generator)
        assert chosen(other, labels) == first


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16"])
@slow
def test_networks_are_cut_where_nothing_else_crosses(name: str) -> None:
    """What the two parts compute, one after the other, is what the network does, for any number of pictures."""
    from torchvision import models

    torch.manual_seed(0)
    whole = of_module(models.get_model(name, num_classes=10))
    fixed, last = cut(whole.network, (3, 224, 224))
    x = torch.rand(3, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(last(fixed(x)), whole.network(x)) and torch.equal(last(fixed(x[:1])), whole.network(x[:1]))
    after, every = (sum(p.numel() for p in part.parameters()) for part in (last, whole.network))
    assert 0.25 * every <= after <= 0.6 * every and not {n for n, _ in last.named_parameters()} & {
        n for n, _ in fixed.named_parameters()
    }


def test_too_few_pictures_and_no_time_are_refused(backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match="minutes=30: tuning needs two classes"):
        learner(backbone).fit(*pictures(2, 0))
    with pytest.raises(ValueError, match="minutes=-1"):
        learner(backbone, minutes=-1).fit(*pictures(6, 0))


@slow
def test_the_command_tunes_the_default_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = drawn_pictures.put(tmp_path / "a", 5, things=("star", "house", "ring", "fish"))
    out = tmp_path / "c"
    assert fit.main([str(root), "--out", str(out), "--minutes", "10", "--steps", "2"]) == 0
    assert "tuning: 2 steps; nested cross-validation: frozen " in capsys.readouterr().out
    report = json.loads((out / META).read_text())["report"]
    assert report["tuning"]["steps"] == 2
