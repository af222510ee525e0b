"""Files of torch.save and safetensors of unknown origin: what is checked before torch reads them.

torch's `weights_only` runs no code, but it calls what a pickle names, such as `bytearray` or `encode`, and a few bytes
can ask these for all memory. A tensor needs few names; no other is admitted here.
"""

import hashlib
import io
import os
import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from metalearn.storage.files import open_regular

LARGEST_FILE = 2**36
"""Bytes of a file of torch.save or safetensors."""
LARGEST_PICKLE = 2**26
"""Bytes of the part that says what the tensors are."""
MOST_OPERATIONS = 2**21
"""Operations of that part; a tensor takes about 30."""
MOST_PARTS = 2**16
"""Files in the archive: one for each tensor, and a few more."""

_ZIP = b"PK\x03\x04"
"""The first bytes of an archive, by which torch knows it."""
_PICKLES_OF_OLD = 5
"""Up to version 1.5, torch.save has written so many pickles one after the other, and then the values of the tensors."""
_OF_TENSORS = re.compile(
    r"collections OrderedDict|torch \w+Storage|torch\._utils _rebuild_(tensor|tensor_v2|parameter)"
)
"""The names that a tensor needs, as `pickletools` gives them."""


def sha256_of(path: Path) -> str:
    """The digest of such a file; OSError and RefusedFileError as `open_regular`."""
    with open_regular(path, LARGEST_FILE) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_torch_file(path: Path, *, old: bool = False) -> None:
    """Checks that torch can read a file with memory in proportion to its size.

    Args:
        old: whether to take files of torch.save of before version 1.6, too.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no file of torch.save, or it names something else than tensors, or it is too large.
    """
    with open_regular(path, LARGEST_FILE) as file:
        # By its beginning: zipfile would find an archive behind something else, which torch would read.
        is_archive = file.read(len(_ZIP)) == _ZIP
        file.seek(0)
        if is_archive:
            _check_pickle(io.BytesIO(_described(file)))
        elif old:
            # The rest may be any number of gigabytes; what a pickle announces and is not there is found missing.
            head = io.BytesIO(file.read(LARGEST_PICKLE))
            for _ in range(_PICKLES_OF_OLD):
                _check_pickle(head)
        else:
            raise ValueError("it is no file of torch.save")


def _described(file: BinaryIO) -> bytes:
    """The pickle in an archive that says what the tensors are."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        # torch.save compresses nothing, and each member has its place: a small one could unpack to any size.
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("its members are compressed")
        if sum(member.file_size for member in members) > os.fstat(file.fileno()).st_size:
            raise ValueError("its members overlap")
        pickles = [member for member in members if member.filename.lower().endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > LARGEST_PICKLE or len(members) > MOST_PARTS:
            raise ValueError("it is no file of torch.save, or too large")
        return archive.read(pickles[0])


def _check_pickle(file: io.BytesIO) -> None:
    for number, (name, argument) in enumerate(_operations(file)):
        if "GLOBAL" in name and not _OF_TENSORS.fullmatch(str(argument)):
            raise ValueError(f"it names {argument!s:.60}")
        if number > MOST_OPERATIONS:
            raise ValueError(f"it has more than {MOST_OPERATIONS:,} operations")


def _operations(file: io.BytesIO) -> Iterator[tuple[str, object]]:
    for operation, argument, _ in pickletools.genops(file):
        yield operation.name, argument
