"""Files of torch.save that ask for more memory than they have bytes are refused; genuine ones of any age are read."""

import io
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from metalearn.storage import torch_files
from metalearn.storage.torch_files import check_torch_file


def saved(value: object, *, old: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=not old)
    return buffer.getvalue()


def calls(module: str, name: str, *arguments: bytes) -> bytes:
    """A pickle that calls what it names."""
    return b"\x80\x02c%s\n%s\n" % (module.encode(), name.encode()) + b"(" + b"".join(arguments) + b"tR."


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


def overlapping() -> bytes:
    """An archive whose directory names the same megabyte twenty times."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("state/data.pkl", b"\x80\x02}.")
        archive.writestr("state/data/0", bytes(2**20))
        for number in range(1, 20):
            again = zipfile.ZipInfo(f"state/data/{number}")
            whole = archive.getinfo("state/data/0")
            again.file_size = again.compress_size = whole.file_size
            again.CRC, again.header_offset = whole.CRC, whole.header_offset
            archive.filelist.append(again)
    return buffer.getvalue()


GENUINE = {
    "a state dict": saved(OrderedDict(a=torch.zeros(3))),
    "a state dict of old": saved(OrderedDict(a=torch.zeros(3)), old=True),
    "parameters": saved({"a": torch.nn.Parameter(torch.zeros(3)), "b": torch.zeros(2, dtype=torch.bfloat16)}),
    "a state": saved({"optimizer": {"a": torch.zeros(2)}, "progress": {"step": 3, "best": None, "seconds": 0.5}}),
}

HOSTILE = {
    "a byte array": (calls("__builtin__", "bytearray", b"J" + struct.pack("<i", 2**31 - 1)), "it names __builtin__"),
    "digits that double": (calls("_codecs", "encode", text(b"x" * 9), text(b"utf-32")), "it names _codecs encode"),
    "a tensor without values": (calls("torch", "FloatTensor", b"J" + struct.pack("<i", 2**30)), "it names torch Float"),
    "many operations": (b"\x80\x02" + b"N0" * 2**21 + b"N.", "it has more than 2,097,152 operations"),
    "a long text": (b"\x80\x02X\xff\xff\xff\x7fabc.", "expected 2147483647 bytes"),
    "members that overlap": (overlapping(), "its members overlap"),
    "nothing": (b"", "pickle exhausted"),
}


@pytest.mark.parametrize("name", GENUINE)
def test_what_torch_has_saved_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(GENUINE[name])
    check_torch_file(path, old=True)
    assert isinstance(torch.load(path, weights_only=True), dict)
    if "old" not in name:
        check_torch_file(path)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", HOSTILE)
def test_what_asks_for_more_than_it_has_is_refused(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "file.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        check_torch_file(path, old=True)


def test_files_of_old_are_read_only_where_they_may_be(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(GENUINE["a state dict of old"])
    with pytest.raises(ValueError, match=r"it is no file of torch\.save"):
        check_torch_file(path)


def test_a_network_of_a_thousand_layers_is_far_from_the_bound() -> None:
    state = {f"layer{number}.weight": torch.zeros(1) for number in range(1000)}
    with zipfile.ZipFile(io.BytesIO(saved(state))) as archive:
        pickle = archive.read("archive/data.pkl")
    assert 20 * sum(1 for _ in torch_files._operations(io.BytesIO(pickle))) < torch_files.MOST_OPERATIONS
