"""Pictures of all kinds, as files and in memory: what is read of them, and what is named instead."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from metalearn.storage.files import warn_once
from metalearn.tasks.common.pictures import PictureForm, Pixels, decoded, formed

SIZE = 12


def drawing(name: str, number: int) -> Pixels:
    """Noise, different for each name and number: [SIZE, SIZE, 3]."""
    return np.random.default_rng([number, *name.encode()]).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)


def read(path: Path, channels: int = 3, size: int = SIZE) -> NDArray[np.int64]:
    (picture,) = decoded([path], PictureForm(size, channels))
    assert not isinstance(picture, str), picture
    return picture.astype(np.int64)


def test_grey_is_the_luma_of_the_colours(tmp_path: Path) -> None:
    pixels = drawing("x", 0)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    assert (read(tmp_path / "x.png") == pixels).all()
    luma = pixels @ np.array([0.299, 0.587, 0.114])
    assert np.abs(read(tmp_path / "x.png", channels=1) - luma).max() <= 1


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_16_bits_are_brought_to_8(suffix: str, tmp_path: Path) -> None:
    wide = np.linspace(0, 65535, SIZE * SIZE).astype(np.uint16).reshape(SIZE, SIZE)
    path = tmp_path / f"x.{suffix}"
    if suffix == "pgm":
        path.write_bytes(b"P5 12 12 65535\n" + wide.astype(">u2").tobytes())
    else:
        Image.fromarray(wide).save(path)
    for channels in (1, 3):
        narrow = read(path, channels).reshape(SIZE, SIZE, -1)
        assert np.abs(narrow - wide[:, :, None] / 257).max() <= 0.5
        assert (narrow.min(), narrow.max()) == (0, 255)


def test_12_bits_in_16_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    for name, brightest in (("usual", 65535), ("dark", 4095), ("darker", 1000)):
        Image.fromarray(np.linspace(0, brightest, SIZE * SIZE).astype(np.uint16).reshape(SIZE, SIZE)).save(
            tmp_path / f"{name}.png"
        )
        read(tmp_path / f"{name}.png", 1)
        assert caplog.text.count("multiply their values by 16") == (name != "usual")


def test_a_tiff_whose_white_is_0_is_turned(tmp_path: Path) -> None:
    wide = np.linspace(0, 65535, SIZE * SIZE).astype(np.uint16).reshape(SIZE, SIZE)
    for pixels in (wide, (wide // 257).astype(np.uint8)):
        Image.fromarray(pixels).save(tmp_path / "usual.tif")
        # A field of the file: tag 262, of the type SHORT, one value, which is 1: black is 0.
        usual = (tmp_path / "usual.tif").read_bytes()
        field = struct.pack("<HHIH", 262, 3, 1, 1)
        assert usual.count(field) == 1
        (tmp_path / "turned.tif").write_bytes(usual.replace(field, struct.pack("<HHIH", 262, 3, 1, 0)))
        assert np.abs(255.0 - read(tmp_path / "usual.tif", 1) - read(tmp_path / "turned.tif", 1)).max() <= 1


def test_colours_that_are_multiplied_by_their_opacity_are_read() -> None:
    for mode, whole in (("RGBA", "RGBa"), ("LA", "La")):
        for opacity, expected in ((0, 255), (255, 100)):
            picture = Image.new(mode, (2, 2), (*(100,) * (len(mode) - 1), opacity)).convert(whole)
            assert (formed(picture, PictureForm(2, 1)) == expected).all()


def test_what_is_transparent_becomes_white(tmp_path: Path) -> None:
    alpha = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 1))
    alpha[:3], alpha[3:6] = 0, 255
    for name, pixels in (("RGBA", drawing("x", 0)), ("LA", drawing("x", 1)[:, :, :1])):
        both = np.concatenate([pixels, alpha], axis=2).astype(np.uint8)
        Image.fromarray(both, name).save(tmp_path / f"{name}.png")
        over = (pixels * (alpha / 255) + 255 * (1 - alpha / 255)).round()
        assert np.abs(read(tmp_path / f"{name}.png") - over).max() <= 1
        assert (read(tmp_path / f"{name}.png", channels=1)[:3] == 255).all()
    wide = np.full((SIZE, SIZE), 257 * 20, np.uint16)
    wide[:3] = 257 * 9
    Image.fromarray(wide).save(tmp_path / "wide.png", transparency=257 * 9)
    for channels in (1, 3):
        assert (read(tmp_path / "wide.png", channels)[:3] == 255).all()
        assert (read(tmp_path / "wide.png", channels)[3:] == 20).all()


def test_lab_is_read_as_its_colours(tmp_path: Path) -> None:
    lab = np.zeros((SIZE, SIZE, 3), np.uint8)
    lab[..., 0] = np.linspace(0, 255, SIZE).astype(np.uint8)[:, None]
    Image.fromarray(lab, "LAB").save(tmp_path / "lab.tif")
    grey, colours = (read(tmp_path / "lab.tif", channels).reshape(SIZE, SIZE, -1) for channels in (1, 3))
    assert np.abs(grey - colours).max() <= 1 and grey.min() < 20 and grey.max() > 235


def test_palettes_and_bits_and_ink_are_converted(tmp_path: Path) -> None:
    numbers = np.arange(SIZE * SIZE, dtype=np.uint8).reshape(SIZE, SIZE) % 4
    colours = np.array([[255, 0, 0], [0, 200, 0], [0, 0, 100], [9, 9, 9]], np.uint8)
    indexed = Image.fromarray(numbers, "P")
    indexed.putpalette(colours.tobytes())
    indexed.save(tmp_path / "p.png")
    assert (read(tmp_path / "p.png") == colours[numbers]).all()
    indexed.save(tmp_path / "t.gif", transparency=3)
    colours[3] = 255
    assert (read(tmp_path / "t.gif") == colours[numbers]).all()
    Image.fromarray(numbers > 1).save(tmp_path / "b.png")
    assert (read(tmp_path / "b.png", channels=1) == 255 * (numbers > 1)).all()
    Image.new("CMYK", (SIZE, SIZE), (0, 255, 255, 0)).save(tmp_path / "c.tif")
    assert (read(tmp_path / "c.tif") == [255, 0, 0]).all()


@pytest.mark.parametrize(("orientation", "quarters", "mirrored"), [(1, 0, False), (3, 2, False), (6, 3, False),
                                                                    (8, 1, False), (2, 0, True)])  # fmt: skip
def test_exif_says_which_side_is_up(orientation: int, quarters: int, mirrored: bool, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = drawing("x", 0)
    Image.fromarray(pixels).save(tmp_path / "x.png", exif=exif)
    upright = pixels[:, ::-1] if mirrored else np.rot90(pixels, quarters)
    assert (read(tmp_path / "x.png") == upright).all()


def test_the_middle_is_taken_and_reduced_without_aliases(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for width, height, middle in ((120, 40, (10, 0, 20, 10)), (40, 120, (0, 10, 10, 20))):
        whole = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        whole.save(tmp_path / "x.png")
        reduced = whole.resize((width // 4, height // 4), Image.Resampling.LANCZOS).crop(middle)
        assert np.abs(read(tmp_path / "x.png", size=10) - np.asarray(reduced, np.int64)).max() <= 1
    Image.new("RGB", (5, 9), (1, 2, 3)).save(tmp_path / "x.png")
    assert (read(tmp_path / "x.png", size=20) == [1, 2, 3]).all()
    board = np.indices((80, 80)).sum(0) % 2 * 255
    Image.fromarray(board.astype(np.uint8)).save(tmp_path / "x.png")
    assert np.abs(read(tmp_path / "x.png", channels=1, size=8) - 127.5).max() < 4


def test_a_picture_is_cropped_and_resized_as_asked() -> None:
    values = np.random.default_rng(0).integers(0, 256, (60, 100, 3)).astype(np.uint8)
    image = Image.fromarray(values)
    middle = formed(image, PictureForm(30, 3, crop=0.5, resample="nearest"))
    np.testing.assert_array_equal(middle, values[15:45, 35:65])
    whole = formed(image, PictureForm(30, 3, whole=True, crop=0.5, resample="box"))
    np.testing.assert_array_equal(
        whole, np.asarray(image.crop((25, 15, 75, 45)).resize((30, 30), Image.Resampling.BOX))
    )


def test_a_thumbnail_fits_into_its_square() -> None:
    assert [formed(Image.new("L", size), 10).shape for size in ((40, 20), (20, 40))] == [(5, 10, 3), (10, 5, 3)]


# What is refused


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "half.png": (half, "truncated"),
    "text.png": (lambda path: path.write_text("no picture"), "not recognised"),
    "empty.png": (lambda path: path.write_bytes(b""), "not recognised"),
    "gone.png": (Path.unlink, "No such file"),
    "giga.png": (lambda path: path.write_bytes(b"P4 40000 40000\n"), "exceeds limit"),
    "real.tif": (lambda path: Image.fromarray(np.full((9, 9), 0.5, np.float32)).save(path), "32 bits"),
    "nan.tif": (lambda path: Image.fromarray(np.full((9, 9), np.nan, np.float32)).save(path), "32 bits"),
    "whole.tif": (lambda path: Image.fromarray(np.full((9, 9), 7, np.int32)).save(path), "32 bits"),
    "postscript.png": (lambda path: Image.new("RGB", (8, 8)).save(path, "EPS"), "not recognised"),
}
"""What becomes of a whole picture, and a part of the reason."""


def test_unreadable_files_have_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    sources: list[Path | bytes] = []
    for name, (spoil, _) in REFUSED.items():
        Image.fromarray(drawing(name, 0)).save(tmp_path / name)
        sources += [(tmp_path / name).read_bytes(), tmp_path / name]
        spoil(tmp_path / name)
    answers = list(decoded(sources, PictureForm(SIZE, 3)))
    for (name, (_, part)), whole, refused in zip(REFUSED.items(), answers[::2], answers[1::2], strict=True):
        np.testing.assert_array_equal(whole, drawing(name, 0))
        assert isinstance(refused, str) and part in refused and "\n" not in refused, (name, refused)
    assert not (tmp_path / "executed").exists()  # Ghostscript


def test_many_pictures_keep_their_order(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(60)]
    for number, path in enumerate(paths):
        Image.new("RGB", (400 if number % 7 == 0 else 5, 20), (number, 0, 0)).save(path)
    reds = [np.asarray(picture)[0, 0, 0] for picture in decoded(paths, PictureForm(2, 3))]
    assert reds == [*range(60)]
