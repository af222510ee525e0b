"""Finds pictures in folders, decodes them with Pillow, and gives them the form that a dataset shows to the network.

Pillow decodes in threads of this process: it frees the interpreter while it works. It runs no code of theirs, and its
limit of pixels is the only one."""

import logging
import os
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from metalearn.errors import DataError
from metalearn.storage.files import warn_once

Pixels = NDArray[np.uint8]

# Formats that Pillow decodes itself, whatever a file's name. It hands others to other programs: EPS to Ghostscript.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM", "TGA", "JPEG2000", "AVIF")

_THREADS = 8

_MOST_OF_12_BITS = 4096
_PHOTOMETRIC, _WHITE_IS_ZERO = 262, 0  # a field of TIFF, and what it says of pictures whose white is 0


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
    frames, the first is shown. Raises ValueError for values of 32 bits, and errors of any type for damage, whose
    messages `reason` gives."""
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
        if values.max() < _MOST_OF_12_BITS:
            warn_once(
                "some pictures of 16 bits have no value above 4095, as cameras and microscopes of 12 bits write them, "
                "and come out nearly black; multiply their values by 16"
            )
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


SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm",
    ".tga", ".jp2", ".avif",
)  # fmt: skip

_LEFT_BY_SYSTEMS = ("thumbs.db", "desktop.ini", "icon\r")
# Beginnings of the names of hidden folders, and of those in which a NAS or an archive of a Mac keeps previews.
_OF_SYSTEMS = (".", "@eaDir", "__MACOSX")
_NAMED = 5  # a message names this many of the files or folders that are wrong, and counts the others

log = logging.getLogger(__name__)


def first_few(names: Sequence[str]) -> str:
    """The first names, and an ellipsis if there are more."""
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


def is_picture(name: str) -> bool:
    """Whether the name of a file ends like that of a picture."""
    return name.lower().endswith(SUFFIXES)


def one_form(name: str) -> str:
    """A name in the composed form of Unicode: some systems write é as e and an accent, and others as one sign."""
    return unicodedata.normalize("NFC", name)


def picture_folders(root: Path, key: str = "dataset.root=", *, strict: bool = False) -> dict[str, list[str]]:
    """The pictures of every folder that holds some itself, at any depth below `root`; both by their paths from `root`.

    Hidden files and folders, and files that file managers leave behind, are ignored. Lines name other files beside
    pictures, folders below `root` whose files are no pictures, as those of a phone may be, and class folders within
    another one, as a folder of copies may be. Messages put `key`, as a user types it, before the folder. Raises
    DataError if `root` is missing or holds no pictures, a folder cannot be read, links lead to a folder twice, or two
    folders differ only in the form of Unicode; or, if `strict`, there are other files."""
    if not root.is_dir():
        raise DataError(f"{key}{root}: there is no such folder; type {key}/path/to/pictures")

    def refuse(error: OSError) -> None:
        raise DataError(f"{key}{root}: {error.filename} cannot be read: {error.strerror}") from error

    folders: dict[str, list[str]] = {}
    beside, without = list[str](), list[str]()
    visited: dict[str, str] = {}
    for path, subfolders, files in os.walk(root, followlinks=True, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(_OF_SYSTEMS))
        first = visited.setdefault(os.path.realpath(path), path)
        if first != path:
            raise DataError(f"{key}{root}: {path} and {first} are the same folder; remove the link")
        name = Path(path).relative_to(root).as_posix()
        before = "" if name == "." else f"{name}/"
        visible = sorted(f for f in files if not f.startswith(".") and f.lower() not in _LEFT_BY_SYSTEMS)
        if pictures := [f"{before}{file}" for file in visible if is_picture(file)]:
            folders[name] = pictures
            beside += [f"{before}{file}" for file in visible if not is_picture(file)]
        elif visible and before:
            without.append(f"{before}{visible[0]}")
    if not folders:
        raise DataError(
            f"{key}{root}: there are no pictures below it ({' '.join(SUFFIXES)}); put them there, a "
            f"folder for each class, or type {key}/path/to/pictures"
        )
    forms: dict[str, str] = {}
    for name in folders:
        if (other := forms.setdefault(one_form(name), name)) != name:
            raise DataError(
                f"{key}{root}: two folders have the name {name}, in two forms of Unicode: {name!a} and "
                f"{other!a}; put their pictures into one"
            )
    for passed, what in (
        (without, f"{len(without)} folders hold files, but no pictures"),
        (beside, f"{len(beside)} files in class folders do not have the names of pictures"),
    ):
        if passed and strict:
            advice = f"convert them to {SUFFIXES[0]}, or remove"
            raise DataError(f"{key}{root}: --strict: {what}: {first_few(passed)}; {advice}")
        if passed:
            log.warning("%s%s: %s, and are passed over: %s", key, root, what, first_few(passed))
    above = {name: [str(folder) for folder in PurePosixPath(name).parents][:-1] for name in folders}
    if inner := [name for name in folders if any(folder in folders for folder in above[name])]:
        log.warning(
            "%s%s: %d folders within class folders count as classes of their own: %s; take them out if they hold the "
            "same pictures", key, root, len(inner), first_few(inner),
        )  # fmt: skip
    return folders
