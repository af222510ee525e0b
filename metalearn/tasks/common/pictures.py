"""Reads one picture of any origin, and gives it the form in which a dataset shows pictures to the network."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from metalearn.storage.files import RefusedFileError, open_regular

Pixels = NDArray[np.uint8]  # not from a module that imports torch: decoding processes start without

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM", "TGA", "JPEG2000", "AVIF")
"""Formats that Pillow may read, whatever a file's name. It hands others to other programs: EPS to Ghostscript."""

LARGEST_FILE = 2**28
"""The most bytes of a picture's file."""
MOST_PIXELS = 2**26
"""The most pixels of a picture."""

_PHOTOMETRIC, _WHITE_IS_ZERO = 262, 0
"""A field of TIFF, and what it says of pictures whose white is 0."""

_LARGE = 2**22
"""Pictures with more pixels than this are decoded one at a time."""
_BAND = 2**20
"""Pixels that are converted at once. Copies of a whole large picture would not fit into the memory of a decoder."""


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


def formed(image: Image.Image, form: PictureForm) -> Pixels:
    """A picture as `opened` gives it, in its form: uint8 [size, size] or [size, size, 3]."""
    image = _in_mode(image, "L" if form.channels == 1 else "RGB")
    size, resample, edge = (form.size, form.size), Image.Resampling[form.resample.upper()], (1 - form.crop) / 2
    if form.whole:
        (w, h), far = image.size, 1 - edge
        image = image.resize(size, resample, box=(w * edge, h * edge, w * far, h * far) if edge else None)
    else:
        image = ImageOps.fit(image, size, resample, bleed=edge)
    values = np.asarray(image, np.uint8)
    return 255 - values if form.inverted else values


def thumbnail(image: Image.Image, side: int) -> Pixels:
    """A picture as `opened` gives it, reduced to fit into a square of this side: uint8 [h, w, 3]."""
    small = _in_mode(image, "RGB")
    small.thumbnail((side, side))
    return np.asarray(small, np.uint8)


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == "LAB" and mode == "L":  # Pillow knows no direct way
        image = image.convert("RGB")
    return image if image.mode == mode else image.convert(mode)


@contextmanager
def opened(path: Path, alone: Callable[[], AbstractContextManager[None]] = nullcontext) -> Iterator[Image.Image]:
    """The picture in a file, turned as its EXIF says, as `of_8_bits` gives it. Transparent pixels become white. Of
    several frames, the first is read. A large picture is decoded within `alone()`.

    Raises:
        Exception: of any type, if it cannot be read; `reason` puts it in words.
        ValueError: its values have 32 bits, or its file is no regular file or too large.
        DecompressionBombError: it has too many pixels.
    """
    with open_regular(path, LARGEST_FILE) as file, Image.open(file, formats=FORMATS) as image:
        check_pixels(image)
        with alone() if image.width * image.height > _LARGE else nullcontext():
            ImageOps.exif_transpose(image, in_place=True)
            yield of_8_bits(image, image.format)


def check_pixels(image: Image.Image) -> None:
    """Raises DecompressionBombError for a picture of too many pixels."""
    if image.width * image.height > MOST_PIXELS:
        raise Image.DecompressionBombError


def of_8_bits(image: Image.Image, file_format: str | None) -> Image.Image:
    """The picture without transparency, in a mode that Pillow converts to L and RGB correctly.

    Raises:
        ValueError: its values have 32 bits.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and file_format in ("PNG", "PPM")):
        # Pillow turns TIFF pictures of 8 bits in which 0 is white, but not those of 16.
        inverted = getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == _WHITE_IS_ZERO
        return _by_bands(image, "L", partial(_of_16_bits, clear=image.info.get("transparency"), inverted=inverted))
    if image.mode in ("I", "F"):
        raise ValueError("its values have 32 bits, so what is white is not known; save it with 8 or 16 bits")
    if image.mode in ("La", "RGBa"):  # colours that are multiplied by their opacity
        image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        return _by_bands(image, "RGB", _on_white)
    return image


def _of_16_bits(image: Image.Image, clear: int | None, inverted: bool) -> Image.Image:
    """In 8 bits: 65535, or 0 if `inverted`, and what is `clear` (transparent), become 255."""
    values = np.asarray(image, np.uint32)
    small = (((65535 - values if inverted else values) + 128) // 257).astype(np.uint8)
    return Image.fromarray(small if clear is None else np.where(values == clear, np.uint8(255), small))


def _on_white(image: Image.Image) -> Image.Image:
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))


def _by_bands(image: Image.Image, mode: str, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """The whole picture in `mode`, converted in bands of a few rows."""
    whole, rows = Image.new(mode, image.size), max(1, _BAND // image.width)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        whole.paste(convert(band), (0, top))
    return whole


def reason(error: Exception) -> str:
    """The reason why a picture cannot be read, for a message after its name."""
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"has more than {MOST_PIXELS:,} pixels; make it smaller"
    if isinstance(error, RefusedFileError):
        return str(error).partition(": ")[2]
    if isinstance(error, UnidentifiedImageError):
        return "not recognised as a picture"
    if isinstance(error, MemoryError):
        return "takes too much memory to decode; make it smaller"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
