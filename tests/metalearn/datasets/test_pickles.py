"""Pickles of which only plain values and arrays are read; nothing in them is run."""

import collections
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metalearn.datasets.layouts import read_plain
from metalearn.errors import DataError

OF_PYTHON_2 = (
    b"\x80\x02}q\x00(U\x04dataq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85U\x01b\x87R"
    b"(K\x01(K\x02K\x02tcnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    b"U\x04\x00\xff\x80\x01tbU\x05names]U\x04caf\xe9au."
)
"""{"data": array of 2 × 2, "names": ["café"]} as Python 2 and numpy 1 write it."""


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.sprung),)


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "some.pkl"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_and_arrays_are_read(protocol: int, tmp_path: Path) -> None:
    arrays = {
        "pictures": np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3), "fortran": np.asfortranarray(np.eye(2, 3)),
        "big": np.arange(3, dtype=">i4"), "texts": np.array(["ab", "c"]), "one": np.array(5), "none": np.zeros((0, 3)),
    }  # fmt: skip
    plain = {
        "numbers": [1, -2, 2**70, 1.5, True, None], "bytes": [b"", b"\x00\xff"], "tuple": (1, ("a", [])), "é": {1: 2},
        "scalars": [np.int64(3), np.float32(2.5)], "ordered": collections.OrderedDict(a=1),
    }  # fmt: skip
    pngs = np.array([np.arange(2), np.arange(3)], dtype=object)
    found = read_plain(written(tmp_path, pickle.dumps(arrays | plain | {"pngs": pngs}, protocol)))
    for name, array in arrays.items():
        assert np.array_equal(found[name], array) and found[name].dtype.kind == array.dtype.kind, name
    assert {name: found[name] for name in plain} == plain
    assert [png.tolist() for png in found["pngs"]] == [[0, 1], [0, 1, 2]]


def test_pickles_of_python_2_are_read(tmp_path: Path) -> None:
    found = read_plain(written(tmp_path, OF_PYTHON_2))
    assert found["data"].tolist() == [[0, 255], [128, 1]] and found["data"].dtype == np.uint8
    assert found["names"] == ["café"]


ADDRESSES = (
    b"\x80\x02cnumpy._core.numeric\n_frombuffer\n(cnumpy._core.multiarray\nscalar\ncnumpy\ndtype\nU\x02S8K\x00K\x01\x87R"
    b"U\x08AAAAAAAA\x86Rcnumpy\ndtype\nU\x01OK\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    b"K\x01\x85U\x01CtR."
)
"""An array of objects whose dtype says that it holds none: eight letters would become the address of one."""


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(print), pickle.dumps(Path("x")), b"cbuiltins\ngetattr\n(cnumpy\nndarray\nS'tofile'\ntR.",
        b"cnumpy\nfromfile\n(S'/etc/passwd'\ntR.", b"\x80\x04\x8c\x05numpy\x8c\x0bndarray.sum\x93.",
        b"\x80\x02U\x01a)R.", b"cnumpy\ndtype\n}S'make'\nNsb.", b"]}b.", b"Pabc\n.", b"\x80\x02\x82\x01.",
        pickle.dumps(np.zeros(2, [("a", "i4")])), ADDRESSES, b"", b"<html>not found</html>",
        pickle.dumps({"data": np.zeros(1000, np.uint8)})[:500],
    ],
    ids=[
        "a function", "a class", "an attribute", "a part of numpy", "a dotted name", "a call of a value",
        "a state of a name", "a state of a list", "a persistent id", "an extension", "an array of records", "addresses",
        "nothing", "a text", "half of it",
    ],
)  # fmt: skip
def test_what_is_no_plain_value_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"some\.pkl: "):
        read_plain(written(tmp_path, content))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_nothing_is_run(protocol: int, tmp_path: Path) -> None:
    trap = pickle.dumps({"data": [Trap(tmp_path / "sprung")]}, protocol)
    with pytest.raises(DataError, match="it names posix mkdir, which is no plain value; nothing in it was run"):
        read_plain(written(tmp_path, trap))
    assert not (tmp_path / "sprung").exists()
    pickle.loads(trap)
    assert (tmp_path / "sprung").exists()
