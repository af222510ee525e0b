"""Small files that ask a decoder for all memory or for hours: each is named, and the others are read."""

import io
import os
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from metalearn.tasks.common import decoding
from metalearn.tasks.common.decoding import decoded
from metalearn.tasks.common.pictures import LARGEST_FILE, PictureForm
from tests.runs import said_by, slow

FORM = PictureForm(8, 3)
TIME, MEMORY = "takes more than", "too much memory"


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def tiff(*tags: tuple[int, int, int, int]) -> bytes:
    """A grey picture of 8×8 pixels with further tags: (number, type, count, place of the values)."""
    own = [(256, 4, 1, 8), (257, 4, 1, 8), (258, 3, 1, 8), (262, 3, 1, 1), (273, 4, 1, 600), (278, 4, 1, 8),
           (279, 4, 1, 64)]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", *tag) for tag in sorted([*own, *tags]))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(own) + len(tags)) + entries + bytes(4)


def bmp(width: int, height: int, codes: bytes) -> bytes:
    """A picture of run lengths."""
    sizes = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(codes), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + 1024) + sizes + bytes(1024) + codes


def png(kind: bytes, content: bytes) -> bytes:
    """A small picture with a further chunk."""
    whole = saved(Image.new("L", (8, 8)), "PNG")
    chunk = struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return whole[:33] + chunk + whole[33:]


def bomb() -> bytes:
    """256 MiB of zeros."""
    return zlib.compress(bytes(2**28), 9)


def scans(side: int) -> bytes:
    """A progressive JPEG whose last scan is repeated without end."""
    whole = saved(Image.new("RGB", (side, side)), "JPEG", progressive=True)
    return whole[:-2] + (b"\xff\xda\0\x08\1\1\0\1\5\0") * 90_000 + b"\xff\xd9"


HEADER, SEVERAL = b"GIF89a\x08\0\x08\0\0\0\0", 2**27 - 2000

HOSTILE: dict[str, tuple[Callable[[], bytes], int, str]] = {
    "values.tif": (lambda: tiff((274, 3, 1, 6), (700, 3, SEVERAL, 600)), LARGEST_FILE, MEMORY),
    "comment.ppm": (lambda: b"P6 #", LARGEST_FILE, TIME),
    "comment.gif": (lambda: HEADER + (b"!\xfe" + b"\xffx" * 128) * 4000, 0, "not recognised"),
    "zeros.gif": (lambda: HEADER, LARGEST_FILE, TIME),
    "lines.bmp": (lambda: bmp(1, 2**26, b""), LARGEST_FILE, TIME),
    "jump.bmp": (lambda: bmp(2**26, 1, b"\0\2\0\xff" * 9), 0, "read"),
    "scans.jpg": (lambda: scans(8000), 0, TIME),
    "markers.jpg": (lambda: b"\xff\xd8\xff\xe5\0\2", LARGEST_FILE, TIME),
    "large.webp": (lambda: saved(Image.new("RGB", (8192, 8191)), "WEBP", lossless=True, method=0), 0, MEMORY),
    "bomb.png": (lambda: png(b"zTXt", b"x\0\0" + bomb()), 0, "too large"),
    "profile.png": (lambda: png(b"iCCP", b"x\0\0" + bomb()), 0, "too large"),
    "wide.png": (lambda: saved(Image.new("1", (2**26 + 1, 1)), "PNG"), 0, "has more than"),
    "sizes.jp2": (lambda: saved(Image.new("L", (64, 64)), "JPEG2000")[:150], 0, ""),
}
"""The first bytes of a file; its size, if it is larger by a hole; and a part of the reason."""

QUICK = ("values.tif", "comment.ppm", "comment.gif", "bomb.png", "sizes.jp2")


def put(folder: Path, name: str) -> Path:
    make, size, _ = HOSTILE[name]
    path = folder / name
    path.write_bytes(make())
    if size:
        os.truncate(path, size)
    assert path.stat().st_blocks * 512 < 2_500_000
    return path


@pytest.mark.timeout(60)
def test_what_hurts_is_named_and_what_follows_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MOST_SECONDS", 3.0)
    Image.new("RGB", (8, 8), (1, 2, 3)).save(tmp_path / "good.png")
    paths = [path for name in QUICK for path in (put(tmp_path, name), tmp_path / "good.png")]
    answers = list(decoded(paths, FORM))
    for name, hurt, read in zip(QUICK, answers[::2], answers[1::2], strict=True):
        assert isinstance(hurt, str) and HOSTILE[name][2] in hurt, (name, hurt)
        assert np.array_equal(read, np.full((8, 8, 3), (1, 2, 3))), (name, read)


def test_a_process_that_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert list(decoded([tmp_path], FORM)) == ["ends the process that decodes it (exit code 1); save it anew"]


def test_what_lies_in_the_working_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "PIL.py").write_text("open('executed', 'w')")
    Image.new("RGB", (8, 8)).save(tmp_path / "good.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (picture,) = decoded([tmp_path / "good.png"], FORM)
    assert not isinstance(picture, str) and not (tmp_path / "executed").exists()


MEASURE = """
import resource, sys
from pathlib import Path
from metalearn.tasks.common.decoding import decoded
from metalearn.tasks.common.pictures import PictureForm
(answer,) = decoded([Path(sys.argv[1])], PictureForm(8, 3))
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_maxrss // 1024, used.ru_utime + used.ru_stime, answer if isinstance(answer, str) else "read")
"""


@slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", HOSTILE)
def test_no_file_takes_more_than_a_gigabyte_or_ten_seconds(name: str, tmp_path: Path) -> None:
    done = said_by([sys.executable, "-c", MEASURE, str(put(tmp_path, name))])
    megabytes, seconds, answer = done.stdout.split(maxsplit=2)
    print(f"{name}: {megabytes} MB, {float(seconds):.1f} s: {answer}")
    assert int(megabytes) < 1000 and float(seconds) < 12 and HOSTILE[name][2] in answer, done.stdout
