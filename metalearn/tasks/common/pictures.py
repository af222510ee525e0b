"""Reads pictures of any origin, and gives them the form in which a dataset shows pictures to the network.

Pillow decodes them in threads of this process: it frees the interpreter while it works. It runs no code of theirs, and
its limit of pixels is the only one.
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

Pixels = NDArray[np.uint8]

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM", "TGA", "JPEG2000", "AVIF")
"""Formats that Pillow decodes itself, whatever a file's name. It hands others to other programs: EPS to Ghostscript."""

_THREADS = 8

_PHOTOMETRIC, _WHITE_IS_ZERO = 262, 0
"""A field of TIFF, and what it says of pictures whose white is 0."""


class PictureForm(NamedTuple):
    """The form in which a dataset shows pictures to the network.

    Each has `size` × `size` pixels of `channels` channels: 1 (grey) or 3 (red, green, blue). The Lanczos filter reduces
    (or enlarges) the `whole` picture to a square; or, if false, its shorter side, and the middle of the longer one is
    kept. `inverted`: black becomes the largest value, as ink on paper. `crop`: the part of each side that is shown, its
    middle. `resample`: another filter of Pillow's.
    """

    size: int
    channels: int
    whole: bool = False
    inverted: bool = False
    crop: float = 1.0
    resample: str = "lanczos"


def decoded(pictures: Iterable[Path | bytes], form: PictureForm | int) -> Iterator[Pixels | str]:
    """The pictures in files, or in the bytes of files, in their order, each as `formed` gives it. In place of one that
    cannot be read, the reason."""

    def decode(picture: Path | bytes) -> Pixels | str:
        try:
            with Image.open(BytesIO(picture) if isinstance(picture, bytes) else picture, formats=FORMATS) as image:
                return formed(image, form)
        except Exception as error:  # Pillow raises many types for broken pictures
            return reason(error)

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        yield from pool.map(decode, pictures)


def formed(image: Image.Image, form: PictureForm | int) -> Pixels:
    """An open picture in its form: uint8 [size, size] or [size, size, 3]; or, for a number, reduced to fit into a
    square of this side: uint8 [h, w, 3]. It is turned as its EXIF says, and transparent pixels become white. Of several
    frames, the first is shown.

    Raises:
        Exception: of any type, if it is damaged; `reason` puts it in words.
        ValueError: its values have 32 bits.
    """
    image = _of_8_bits(image)
    mode = "L" if isinstance(form, PictureForm) and form.channels == 1 else "RGB"
    if image.mode == "LAB" and mode == "L":  # Pillow knows no direct way
        image = image.convert("RGB")
    image = image if image.mode == mode else image.convert(mode)
    if isinstance(form, int):
        image.thumbnail((form, form))
        return np.asarray(image, np.uint8)
    size, resample, edge = (form.size, form.size), Image.Resampling[form.resample.upper()], (1 - form.crop) / 2
    if form.whole:
        (w, h), far = image.size, 1 - edge
        image = image.resize(size, resample, box=(w * edge, h * edge, w * far, h * far) if edge else None)
    else:
        image = ImageOps.fit(image, size, resample, bleed=edge)
    values = np.asarray(image, np.uint8)
    return 255 - values if form.inverted else values


def _of_8_bits(image: Image.Image) -> Image.Image:
    """The picture upright and without transparency, in a mode that Pillow converts to L and RGB correctly."""
    upright, clear = ImageOps.exif_transpose(image), image.info.get("transparency")
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values = np.asarray(upright, np.uint32)
        # Pillow turns TIFF pictures of 8 bits in which 0 is white, but not those of 16.
        inverted = getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == _WHITE_IS_ZERO
        small = (((65535 - values if inverted else values) + 128) // 257).astype(np.uint8)
        return Image.fromarray(small if clear is None else np.where(values == clear, np.uint8(255), small))
    if image.mode in ("I", "F"):
        raise ValueError("its values have 32 bits, so what is white is not known; save it with 8 or 16 bits")
    if image.mode in ("La", "RGBa"):  # colours that are multiplied by their opacity
        upright = upright.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
    if upright.mode in ("LA", "PA", "RGBA") or clear is not None:
        white = Image.new("RGBA", upright.size, "white")
        return Image.alpha_composite(white, upright.convert("RGBA")).convert("RGB")
    return upright


def reason(error: Exception) -> str:
    """The reason why a picture cannot be read, for a message after its name."""
    if isinstance(error, UnidentifiedImageError):
        return "not recognised as a picture"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
