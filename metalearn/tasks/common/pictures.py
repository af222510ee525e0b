"""Reads one picture of any origin, and gives it the form in which a dataset shows pictures to the network."""

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from metalearn.storage.files import RefusedFileError, open_regular
from metalearn.tasks.common.episodes import Images

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM", "TGA", "JPEG2000", "AVIF")
"""Formats that Pillow may read, whatever a file's name. It hands others to other programs: EPS to Ghostscript."""

LARGEST_FILE = 2**28
"""The most bytes of a picture's file."""
MOST_PIXELS = 2**26
"""The most pixels of a picture. Decoding takes up to 20 bytes of memory for each."""

_LARGE = 2**22
"""Pictures with more pixels than this are decoded one at a time."""

_one_at_a_time = threading.Lock()


class PictureForm(NamedTuple):
    """The form in which a dataset shows pictures to the network.

    Each has `size` × `size` pixels of `channels` channels: 1 (grey) or 3 (red, green, blue). The Lanczos filter reduces
    (or enlarges) the `whole` picture to a square; or, if false, its shorter side, and the middle of the longer one is
    kept. `inverted`: black becomes the largest value, as ink on paper.
    """

    size: int
    channels: int
    whole: bool = False
    inverted: bool = False


def formed(image: Image.Image, form: PictureForm) -> Images:
    """A picture as `opened` gives it, in its form: uint8 [size, size] or [size, size, 3]."""
    image = image.convert("L" if form.channels == 1 else "RGB")
    size, lanczos = (form.size, form.size), Image.Resampling.LANCZOS
    values = np.asarray(image.resize(size, lanczos) if form.whole else ImageOps.fit(image, size, lanczos), np.uint8)
    return 255 - values if form.inverted else values


def picture(path: Path, size: int, channels: int) -> Images:
    """Reads a photograph: uint8 [size, size] or [size, size, 3].

    The Lanczos filter reduces (or enlarges) its shorter side to `size`; of the longer side, the middle is kept. The
    picture is turned as its EXIF says. Transparent pixels become white. Of several frames, the first is read.

    Raises:
        Exception: as `opened`.
    """
    with opened(path) as image:
        return formed(image, PictureForm(size, channels))


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """The picture in a file, turned as its EXIF says, as `of_8_bits` gives it.

    Raises:
        Exception: of any type, if it cannot be read; `reason` puts it in words.
        ValueError: its values have 32 bits, or its file is no regular file or too large.
        DecompressionBombError: it has too many pixels.
    """
    with open_regular(path, LARGEST_FILE) as file, Image.open(file, formats=FORMATS) as image:
        check_pixels(image)
        with _one_at_a_time if image.width * image.height > _LARGE else nullcontext():
            ImageOps.exif_transpose(image, in_place=True)
            yield of_8_bits(image, image.format)


def bounded_picture(file: IO[bytes], name: str) -> Image.Image:
    """The picture in an open file, or in bytes.

    Raises:
        ValueError: it has more than `LARGEST_FILE` bytes, or is no picture; the message begins with `name`.
    """
    content = file.read(LARGEST_FILE + 1)
    if not isinstance(content, bytes) or len(content) > LARGEST_FILE:
        raise ValueError(f"{name}: must be open for reading bytes, at most {LARGEST_FILE:,}")
    try:
        return Image.open(io.BytesIO(content), formats=FORMATS)
    except Exception as error:  # Pillow raises many types for broken pictures
        raise ValueError(f"{name}: cannot be read: {reason(error)}") from error


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
        return Image.fromarray(((np.asarray(image, np.uint32) + 128) // 257).astype(np.uint8))  # 65535 becomes 255
    if image.mode in ("I", "F"):
        raise ValueError("its values have 32 bits, so what is white is not known; save it with 8 or 16 bits")
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


def reason(error: Exception) -> str:
    """The reason why a picture cannot be read, for a message after its name."""
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"has more than {MOST_PIXELS:,} pixels; make it smaller"
    if isinstance(error, RefusedFileError):
        return str(error).partition(": ")[2]
    if isinstance(error, UnidentifiedImageError):
        return "not recognised as a picture"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
