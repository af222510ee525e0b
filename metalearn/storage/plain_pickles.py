"""Pickles of unknown origin, of which only plain values and arrays of numbers are read.

A pickle is a program: it may call whatever it names. Here the few operations that build lists, dicts, texts, numbers
and numpy's arrays are admitted, and the names that arrays need stand for functions of this file. Nothing of numpy, nor
of any other module, is called with what the file says. Files of Python 2 are read too; their texts are latin-1.
"""

import math
import os
import pickle
import re
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LARGEST_FILE = 2**34
"""Bytes of a member of an npz file."""
MOST_OPERATIONS = 2**24
"""Operations of a pickle; a picture takes about 20."""
DEEPEST_VALUE = 8
"""Levels of containers in each other."""

_DTYPE = re.compile(r"[<>|=]?(b1|u[1248]|i[1248]|f[248]|O8?|O|S\d{1,4}|U\d{1,4})")

_ADMITTED = (
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET",
    "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4",
    "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "EMPTY_LIST", "LIST", "APPEND", "APPENDS",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "GLOBAL",
    "STACK_GLOBAL",
)  # fmt: skip
"""Operations that are left as they are; REDUCE, BUILD and BYTEARRAY8 are ours."""


def read_plain(path: Path) -> Any:
    """The value in a pickle: lists, tuples, dicts, texts, bytes, numbers, and arrays of them.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else, is damaged, or asks for too much.
    """
    with path.open("rb") as file:
        try:
            return _settled(_PlainUnpickler(_Bounded(file)).load(), {}, 0)
        except ValueError:
            raise
        except MemoryError as error:
            raise ValueError("there is too little memory to read it") from error
        except Exception as error:  # a damaged pickle raises many types
            raise ValueError(f"it is damaged, or holds more than plain values ({error!s:.100})") from error


class _Bounded:
    """A file that refuses to read more than is there: else a few bytes could ask for all memory."""

    def __init__(self, file: BufferedReader) -> None:
        self._file, self._left = file, os.fstat(file.fileno()).st_size
        self.readline = file.readline

    def read(self, count: int) -> bytes:
        if count > self._left:
            raise ValueError("it is cut off")
        return self._file.read(count)

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer)


class _Name(NamedTuple):
    """A name that a pickle may use, and the function that stands for it."""

    make: Callable[..., Any]


class _Kind:
    """A numpy.dtype that is being read."""

    def __init__(self, code: str) -> None:
        if not isinstance(code, str) or not _DTYPE.fullmatch(code):
            raise ValueError(f"it holds an array of {code!s:.40}")
        self.dtype = np.dtype(code)

    def fill(self, state: Any) -> None:
        if state[1] in ("<", ">") and state[3] is None and state[4] is None:
            self.dtype = self.dtype.newbyteorder(state[1])
        elif state[1] not in ("|", "=") or state[3] is not None or state[4] is not None:
            raise ValueError("it holds an array of records")


class _Array:
    """A numpy.ndarray that is being read."""

    def __init__(self) -> None:
        self.values: Any = np.empty(0, np.uint8)

    def fill(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        self.values = _array(content, kind, shape, "F" if fortran else "C")


def _array(content: Any, kind: Any, shape: Any, order: str) -> Any:
    if isinstance(content, str):  # of Python 2
        content = content.encode("latin-1")
    sizes = tuple(shape) if isinstance(shape, list | tuple) else (shape,)
    if not isinstance(kind, _Kind) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("it holds an array without a shape or kind")
    if kind.dtype.hasobject:
        if not isinstance(content, list) or len(sizes) != 1 or len(content) != sizes[0]:
            raise ValueError("it holds an array of objects of more than one dimension")
        return content
    if not isinstance(content, bytes) or len(content) != math.prod(sizes) * kind.dtype.itemsize:
        raise ValueError("it holds an array that is shorter or longer than it says")
    return np.frombuffer(content, kind.dtype).reshape(sizes, order=order)  # type: ignore[call-overload]


def _rebuilt(content: Any, kind: Any, shape: Any, order: str) -> _Array:
    array = _Array()
    array.values = _array(content, kind, shape, order)
    return array


def _number(kind: Any, content: Any = None) -> Any:
    value = _array(content, kind, (), "C")
    return value.item()


def _encoded(text: Any, encoding: Any) -> bytes:
    """Bytes, as protocols up to 2 write them."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"it names the encoding {encoding!s:.40}")
    return bytes(text.encode("latin-1"))


_NAMES: dict[str, Any] = {
    "_codecs encode": _Name(_encoded),
    "builtins bytes": _Name(lambda: b""),
    "__builtin__ bytes": _Name(lambda: b""),
    "collections OrderedDict": _Name(lambda pairs=(): dict(pairs)),
    "numpy ndarray": None,  # only said to _reconstruct
    "numpy dtype": _Name(lambda code, *_: _Kind(code)),
}
for _module in ("numpy.core", "numpy._core"):
    _NAMES[f"{_module}.multiarray _reconstruct"] = _Name(lambda *_: _Array())
    _NAMES[f"{_module}.multiarray scalar"] = _Name(_number)
    _NAMES[f"{_module}.numeric _frombuffer"] = _Name(_rebuilt)


class _PlainUnpickler(pickle._Unpickler):
    """Python's own unpickler with fewer operations. That of C grows by a number that the file names."""

    stack: list[Any]
    read: Callable[[int], bytes]

    def __init__(self, file: _Bounded) -> None:
        super().__init__(file, encoding="latin1")
        self.operations = 0

    def find_class(self, module: str, name: str) -> Any:
        if f"{module} {name}" not in _NAMES:
            raise ValueError(f"it names {module!s:.40} {name!s:.40}, which is no plain value")
        return _NAMES[f"{module} {name}"]

    def reduce(self) -> None:
        arguments, name = self.stack.pop(), self.stack[-1]
        if not isinstance(name, _Name):
            raise ValueError("it calls something that is no plain value")
        self.stack[-1] = name.make(*arguments)

    def build(self) -> None:
        state, value = self.stack.pop(), self.stack[-1]
        if not isinstance(value, _Kind | _Array):
            raise ValueError("it holds an object that is no plain value")
        value.fill(state)

    def bytes_of_array(self) -> None:
        self.stack.append(self.read(int.from_bytes(self.read(8), "little")))


def _counted(handler: Callable[[Any], None]) -> Callable[[Any], None]:
    def counted(reader: Any) -> None:
        reader.operations += 1
        if reader.operations > MOST_OPERATIONS:
            raise ValueError(f"it has more than {MOST_OPERATIONS:,} operations")
        handler(reader)

    return counted


def _refused(reader: Any) -> None:
    raise ValueError("it has an operation that no plain value needs")


_OURS = {"REDUCE": _PlainUnpickler.reduce, "BUILD": _PlainUnpickler.build, "BYTEARRAY8": _PlainUnpickler.bytes_of_array}
_PlainUnpickler.dispatch = dict.fromkeys(range(256), _refused) | {
    getattr(pickle, name)[0]: _counted(_OURS.get(name) or pickle._Unpickler.dispatch[getattr(pickle, name)[0]])
    for name in (*_ADMITTED, *_OURS)
}


def _settled(value: Any, seen: dict[int, Any], depth: int) -> Any:
    """The value with numpy's arrays in place of those that were being read; each container is visited once."""
    if isinstance(value, _Array):
        return _settled(value.values, seen, depth) if isinstance(value.values, list) else value.values
    if isinstance(value, _Kind | _Name):
        raise ValueError("it holds a name where a value should be")
    if not isinstance(value, list | tuple | dict):
        return value
    if depth > DEEPEST_VALUE:
        raise ValueError(f"it is nested more than {DEEPEST_VALUE} deep")
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = value
    if isinstance(value, dict):
        for key in value:
            value[key] = _settled(value[key], seen, depth + 1)
    elif isinstance(value, list):
        value[:] = [_settled(item, seen, depth + 1) for item in value]
    else:
        seen[id(value)] = tuple(_settled(item, seen, depth + 1) for item in value)
    return seen[id(value)]
