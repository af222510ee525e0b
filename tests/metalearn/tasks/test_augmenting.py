"""Augmented training pictures: what each change does, by another library or by hand; and who sees them."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as transforms
from torch import Tensor
from torchvision.transforms import InterpolationMode

from metalearn.config.build import build
from metalearn.config.compose import compose_config
from metalearn.errors import ConfigError, DataError, Invalid
from metalearn.tasks.common import episodes as episodes_module
from metalearn.tasks.common.episodes import AUGMENTATIONS, Seeds, augmented_pictures
from metalearn.tasks.common.samples import Labelled, SampleSource
from metalearn.types import Batch, TaskSource


def smooth(pictures: int = 3, channels: int = 3, side: int = 32) -> Tensor:
    """Pictures of slow waves, in which two ways of interpolation hardly differ."""
    rows, columns = torch.meshgrid(torch.arange(side) / side, torch.arange(side) / side, indexing="ij")
    waves = [
        0.5 + 0.3 * torch.sin(3 * rows + n + 2 * c) * torch.cos(4 * columns - c)
        for n in range(pictures)
        for c in range(channels)
    ]
    return torch.stack(waves).reshape(pictures, channels, side, side)


def numbers(seed: int, pictures: int) -> Tensor:
    """What the changes of each picture are made of, from -1 to 1: [10, pictures]."""
    drawn = np.random.default_rng(seed).random((pictures, 10), np.float32)
    return torch.from_numpy(drawn).T * 2 - 1


def changed(x: Tensor, *names: str, seed: int = 0) -> Tensor:
    return augmented_pictures(x, names, np.random.default_rng(seed))


def test_pictures_move_as_torchvision_moves_them() -> None:
    x, even = smooth(), numbers(0, 3)
    found = changed(x, "shift", "scale", "turn")
    for picture, result, drawn in zip(x, found, even.T, strict=True):
        angle, smaller = float(drawn[0]) * episodes_module.TURN, episodes_module.SCALE ** float(drawn[1])
        # There a picture is turned, then shifted; here the place that is shown is shifted first: so it is turned back.
        x_from, y_from = (float(part) * episodes_module.SHIFT * 32 / smaller for part in drawn[3:5])
        cosine, sine = math.cos(angle), math.sin(angle)
        translate = [-(x_from * cosine + y_from * sine), -(-x_from * sine + y_from * cosine)]
        expected = transforms.affine(
            picture, -math.degrees(angle), translate, 1 / smaller, [0.0, 0.0],
            interpolation=InterpolationMode.BILINEAR,
        )  # fmt: skip
        torch.testing.assert_close(result[:, 9:23, 9:23], expected[:, 9:23, 9:23], atol=0.01, rtol=0)


def test_half_of_the_pictures_are_mirrored() -> None:
    x = smooth(200, 1, 8)
    found = changed(x, "mirror")
    mirrored = numbers(0, 200)[2] < 0
    assert 70 < int(mirrored.sum()) < 130
    torch.testing.assert_close(found[mirrored], x[mirrored].flip(3))
    torch.testing.assert_close(found[~mirrored], x[~mirrored])


def ramps(pictures: int, side: int = 29) -> Tensor:
    """Pictures of two channels that say where each pixel is, in parts of the side: to the right, and down."""
    rows, columns = torch.meshgrid(torch.arange(side) / side, torch.arange(side) / side, indexing="ij")
    return torch.stack([columns, rows]).expand(pictures, -1, -1, -1)


def test_shear_moves_each_row_sideways() -> None:
    x, even = ramps(3), numbers(0, 3)
    below = ((torch.arange(29) - 14) / 29).view(29, 1)
    for result, drawn in zip(changed(x, "shear"), even.T, strict=True):
        torch.testing.assert_close(result[1], x[0, 1])
        torch.testing.assert_close(result[0, :, 5:-5], (x[0, 0] + 0.3 * drawn[9] * below)[:, 5:-5])


def test_warp_moves_each_point_by_itself() -> None:
    x, rng = ramps(3), np.random.default_rng(0)
    rng.random((3, 10), np.float32)
    moved = torch.from_numpy(rng.random((3, 2, 5, 5), np.float32)) * 2 - 1
    found = changed(x, "warp") - x
    # The 5 points lie at every seventh pixel; those of the edges show no farther than the picture.
    torch.testing.assert_close(found[:, :, 7:-7:7, 7:-7:7], episodes_module.WARP * moved[:, :, 1:-1, 1:-1])
    assert found[:, :, 4:-4, 4:-4].diff(dim=3).abs().max() < episodes_module.WARP / 2  # and between them, smoothly


def test_light_changes_mean_and_contrast() -> None:
    x, even = smooth() * 0.2 + 0.4, numbers(0, 3)
    found = changed(x, "light")
    bright, contrast = 1 + 0.4 * even[5], 1 + 0.4 * even[6]
    torch.testing.assert_close(found.mean((1, 2, 3)), x.mean((1, 2, 3)) * bright)
    torch.testing.assert_close(found.std((1, 2, 3)), x.std((1, 2, 3)) * bright * contrast)


def test_colours_turn_around_grey() -> None:
    x, one = smooth(), torch.ones(3, 1, 1)
    third = episodes_module._coloured(x, one, one * 2 * math.pi / 3)
    torch.testing.assert_close(third, x[:, [2, 0, 1]])  # red becomes green, green becomes blue
    grey = episodes_module._coloured(x, one * 0, one * 0)
    expected = 0.299 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2]
    torch.testing.assert_close(grey, expected.unsqueeze(1).expand_as(x))
    flat = x[:, :1].expand(-1, 3, -1, -1)
    torch.testing.assert_close(changed(flat, "colour"), flat)


def test_beyond_its_edges_a_picture_goes_on() -> None:
    white = torch.ones(4, 3, 16, 16)
    torch.testing.assert_close(changed(white, "shift", "scale", "turn", "mirror", "shear", "warp"), white)


def test_another_choice_changes_nothing_else() -> None:
    x = smooth()
    torch.testing.assert_close(changed(changed(x, "shift"), "light"), changed(x, "shift", "light"))


def source(*overrides: str) -> TaskSource:
    found: TaskSource = build(compose_config(["dataset=glyphs", "dataset.ways=3", *overrides]).config, "dataset")
    return found


def test_only_training_tasks_are_augmented_and_each_always_alike() -> None:
    plain, other = source(), source("dataset.augment=[shift,scale,shear,warp]")
    together, apart = torch.arange(5, 9), [torch.tensor([number]) for number in range(5, 9)]
    for split in ("val", "test"):
        for ours, theirs in zip(other.episodes(split, together), plain.episodes(split, together), strict=True):
            assert torch.equal(ours.x, theirs.x)
    whole = other.episodes("train", together)
    for part in ("support", "query"):
        one_by_one = [getattr(other.episodes("train", number), part) for number in apart]
        assert torch.equal(getattr(whole, part).x, torch.cat([batch.x for batch in one_by_one]))
        unchanged = getattr(plain.episodes("train", together), part)
        assert torch.equal(getattr(whole, part).y, unchanged.y)
        assert not torch.equal(getattr(whole, part).x, unchanged.x)
        # A part of each picture is elsewhere, and about as much ink is shown.
        assert getattr(whole, part).x.mean() == pytest.approx(float(unchanged.x.mean()), rel=0.2)


@pytest.mark.parametrize("shots", ["[1,3]", "meta_dataset"])
def test_tasks_of_other_shapes_are_augmented_too(shots: str) -> None:
    given = ("dataset.ways=5", f"dataset.shots={shots}", "dataset.queries=2")
    plain, other = (source(*given, *more) for more in ([], ["dataset.augment=[turn]"]))
    number = torch.tensor([3])
    before, after, again = (one.episodes("train", number) for one in (plain, other, other))
    assert torch.equal(after.support.x, again.support.x)
    assert after.support.x.shape == before.support.x.shape and not torch.equal(after.support.x, before.support.x)


def test_without_labels_a_class_is_one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    no_labels = ("dataset.labels=none", "dataset.augment=[shift]", "dataset.queries=1")
    plain, other, indices = source(no_labels[2]), source(*no_labels), torch.arange(4)
    for ours, theirs in zip(other.episodes("test", indices), plain.episodes("test", indices), strict=True):
        assert torch.equal(ours.x, theirs.x)
    for split in ("train", "val"):
        (support, query) = other.episodes(split, indices)
        assert not torch.equal(support.x[:, 0], query.x[:, 0]), "each copy is changed by itself"
    monkeypatch.setattr(episodes_module, "augmented_pictures", lambda x, names, generator: x)
    for split in ("train", "val"):
        (support, query) = other.episodes(split, indices)
        assert torch.equal(support.x, query.x) and torch.equal(support.y, query.y)
        assert len(set(other.identities(split))) < len(other.identities(split))  # pictures of one class are several


def test_what_needs_labels_refuses_to_do_without() -> None:
    no_labels = ["dataset=omniglot", "dataset.labels=none", "dataset.augment=[shift]"]
    config = compose_config([*no_labels, "dataset.within=alphabet", "dataset.split=alphabets"]).config
    with pytest.raises(ConfigError, match=r"^dataset\.within='alphabet': tasks without labels have no alphabet"):
        build(config, "dataset")
    tasks: Any = source(*no_labels[1:])
    with pytest.raises(Invalid, match="trains on plain samples with labels"):
        tasks.samples("tasks")


def test_plain_samples_are_augmented_by_their_numbers() -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (6, 8, 8), np.uint8)
    splits = {split: Labelled(pictures, np.arange(6)) for split in ("train", "val", "test")}
    sizes = dict.fromkeys(splits, 6)

    def of(*augment: str) -> TaskSource:
        names = [f"c{label}" for label in range(6)]
        return SampleSource(lambda: splits, sizes, names, known=4, augment=augment, seeds=Seeds(0, 1))

    plain, other = of(), of("shift")

    def query(source: TaskSource, split: str, *indices: int) -> Batch:
        return source.episodes(split, torch.tensor(indices)).query

    assert torch.equal(query(plain, "val", 0, 1).x, query(other, "val", 0, 1).x)
    first, second = query(other, "train", 1), query(other, "train", 2)
    assert torch.equal(query(other, "train", 1, 2).x, torch.cat([first.x, second.x], dim=1))
    assert not torch.equal(first.x, query(plain, "train", 1).x)
    known: Any = [one.episodes("val", torch.tensor([0])).support for one in (plain, other)]
    assert torch.equal(known[0].x, known[1].x)


def test_grey_pictures_have_no_colours_to_change() -> None:
    with pytest.raises(DataError, match=r"dataset\.augment: these pictures are grey.*leave colour out"):
        source("dataset.augment=[colour]").episodes("train", torch.tensor([0]))


def test_every_change_can_be_chosen_alone() -> None:
    x = smooth()
    for name in AUGMENTATIONS:
        found = changed(x, name)
        assert found.shape == x.shape and found.min() >= 0 and found.max() <= 1
        assert name == "mirror" or not torch.allclose(found, x), name
