"""Pickles of which only plain values are read."""

import collections
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metalearn.storage import plain_pickles
from metalearn.storage.plain_pickles import read_plain

OF_PYTHON_2 = (
    b"\x80\x02}q\x00(U\x04dataq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85U\x01b\x87R"
    b"(K\x01(K\x02K\x02tcnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    b"U\x04\x00\xff\x80\x01tbU\x05names]U\x04caf\xe9au."
)
"""{"data": array of 2 × 2, "names": ["café"]} as Python 2 and numpy 1 write it."""


class Trap:
    """Makes a file when it is unpickled."""

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
    }  # fmt: skip
    more = {
        "scalars": [np.int64(3), np.float32(2.5)], "ordered": collections.OrderedDict(a=1),
        "pngs": np.array([np.arange(2), np.arange(3)], dtype=object), "nested": [{"a": np.arange(2)}],
    }  # fmt: skip
    found = read_plain(written(tmp_path, pickle.dumps(arrays | plain | more, protocol)))
    for name, array in arrays.items():
        assert np.array_equal(found[name], array) and found[name].dtype == array.dtype, name
    assert {name: found[name] for name in plain} == plain
    assert found["scalars"] == [3, 2.5] and found["ordered"] == {"a": 1}
    assert [png.tolist() for png in found["pngs"]] == [[0, 1], [0, 1, 2]]
    assert found["nested"][0]["a"].tolist() == [0, 1]


def test_pickles_of_python_2_are_read(tmp_path: Path) -> None:
    found = read_plain(written(tmp_path, OF_PYTHON_2))
    assert found["data"].tolist() == [[0, 255], [128, 1]] and found["data"].dtype == np.uint8
    assert found["names"] == ["café"]


def records() -> Any:
    return np.zeros(2, [("a", "i4")])


HUGE = (2**40).to_bytes(8, "little")
RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n"
HOSTILE = {
    "a function": (pickle.dumps(print), "it names builtins print"),
    "a class": (pickle.dumps(Path("x")), "it names pathlib"),
    "an attribute": (b"cbuiltins\ngetattr\n(cnumpy\nndarray\nS'tofile'\ntR.", "it names builtins getattr"),
    "a part of numpy": (b"cnumpy\nfromfile\n(S'/etc/passwd'\ntR.", "it names numpy fromfile"),
    "a dotted name": (b"\x80\x04\x8c\x05numpy\x8c\x0bndarray.sum\x93.", "it names numpy ndarray.sum"),
    "a call of a value": (b"\x80\x02U\x01a)R.", "it calls something that is no plain value"),
    "an object": (b"\x80\x02cnumpy\nndarray\n)\x81.", "an operation that no plain value needs"),
    "a state of a name": (b"cnumpy\ndtype\n}S'make'\nNsb.", "an object that is no plain value"),
    "a state of a list": (b"]}b.", "an object that is no plain value"),
    "a name as a value": (b"cnumpy\ndtype\n.", "a name where a value should be"),
    "a persistent id": (b"Pabc\n.", "an operation that no plain value needs"),
    "an extension": (b"\x80\x02\x82\x01.", "an operation that no plain value needs"),
    "an array of records": (pickle.dumps(records()), "it holds an array of V4"),
    "a kind of records": (pickle.dumps(records().dtype), "it holds an array of V4"),
    "a long text": (b"\x80\x04\x8d" + HUGE + b"abc", "it is cut off"),
    "long bytes": (b"\x80\x04\x8e" + HUGE + b"abc", "it is cut off"),
    "a long array of bytes": (b"\x80\x05\x96" + HUGE + b"abc", "it is cut off"),
    "a long frame": (b"\x80\x04\x95" + HUGE + b"abc", "it is cut off"),
    "an array without content": (
        pickle.dumps(np.zeros(4, np.uint8), 2).replace(b"K\x04\x85", b"J\x00\x00\x00\x7f\x85"),
        "an array that is shorter or longer than it says"),
    "deep lists": (b"]" * 50 + b"a" * 49 + b".", "nested more than 8 deep"),
    "nothing": (b"", "it is cut off"),
    "a text": (b"<html>not found</html>", "an operation that no plain value needs"),
    "half of it": (pickle.dumps({"data": np.zeros(1000, np.uint8)})[:500], "it is cut off"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_plain_value_is_refused(name: str, tmp_path: Path) -> None:
    content, said = HOSTILE[name]
    with pytest.raises(ValueError, match=said):
        read_plain(written(tmp_path, content))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_nothing_is_run(protocol: int, tmp_path: Path) -> None:
    trap = pickle.dumps({"data": [Trap(tmp_path / "sprung")]}, protocol)
    with pytest.raises(ValueError, match="it names posix mkdir, which is no plain value"):
        read_plain(written(tmp_path, trap))
    assert not (tmp_path / "sprung").exists()
    pickle.loads(trap)
    assert (tmp_path / "sprung").exists()


def test_a_few_bytes_do_not_take_memory(tmp_path: Path) -> None:
    """Python's own unpickler in C takes 32 GB for the second: its table grows to the number that the file names."""
    ten = b"".join(b"q" + bytes([level]) + b"](" + 10 * (b"h" + bytes([level])) + b"e" for level in range(8))
    program = (
        "import resource, sys; from pathlib import Path; from metalearn.storage.plain_pickles import read_plain\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({2**31}, {2**31}))\n"
        "for path in sys.argv[1:]:\n"
        "    try: print(len(read_plain(Path(path))))\n"
        "    except ValueError as error: print('refused')\n"
    )
    files = {
        "memo": b"\x80\x04]r\xff\xff\xff\x7f.", "array": RECONSTRUCT + b"(I1099511627776\ntS'b'\ntR.",
        "laughs": b"]" + ten + b".", "bytes": b"cbuiltins\nbytes\n(I1099511627776\ntR.",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    run = subprocess.run(
        [sys.executable, "-c", program, *(str(tmp_path / name) for name in files)], capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert run.stdout.split() == ["0", "0", "10", "refused"], run.stdout + run.stderr


def test_there_are_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, pickle.dumps(list(range(100))))
    monkeypatch.setattr(plain_pickles, "MOST_OPERATIONS", 110)
    assert len(read_plain(path)) == 100
    monkeypatch.setattr(plain_pickles, "MOST_OPERATIONS", 99)
    with pytest.raises(ValueError, match="it has more than 99 operations"):
        read_plain(path)
