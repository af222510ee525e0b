"""A world.json of any content ends in one line; what it names is not run."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metalearn.cli import join, leave
from tests.runs import ROOT


def genuine(folder: Path) -> dict[str, Any]:
    return {
        "address": "127.0.0.1", "port": 1, "interface": "none0", "token": "", "workers": 2, "host": os.uname().nodename,
        "pid": os.getpid(), "born": 1, "arguments": ["seed=1"], "folder": str(folder), "inode": folder.stat().st_ino,
    }  # fmt: skip


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "a huge port": ({"port": 10**30}, "port=1000000000000000000000000000000 is no number from 0 to 65535"),
    "a port below 0": ({"port": -1}, "port=-1 is no number"),
    "a truth value": ({"workers": True}, "workers=True is no number"),
    "a real number": ({"pid": 1.5}, "pid=1.5 is no number"),
    "no token": ({"token": None}, "token=None is no text"),
    "a list as a host": ({"host": ["a"]}, "host=['a'] is no text"),
    "a zero byte": ({"folder": "/a\0b"}, "is no text"),
    "half a sign": ({"token": "\ud800"}, "token='\\ud800' is no text"),
    "half a sign as an argument": ({"arguments": ["\ud800"]}, "arguments are no list of texts"),
    "no number": ({"port": float("nan")}, "port=nan is no number"),
    "an escape": ({"interface": 5, "address": "\x1b[2J"}, "interface=5 is no text"),
    "a text as arguments": ({"arguments": "seed=1"}, "arguments are no list of texts"),
    "a number as an argument": ({"arguments": [1]}, "arguments are no list of texts"),
    "another field": ({"command": "rm"}, "'command' is no field"),
    "another folder": ({"inode": 1}, "was written for another folder"),
}


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("program", [join, leave])
def test_a_forged_world_is_refused_in_one_line(
    program: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, message = FORGED[name]
    refused(program, tmp_path, json.dumps(genuine(tmp_path) | changes), message, capsys)


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b"[]", b"null", b"{", b"\x1b[2J", b'{"port": ' + b"9" * 5000 + b"}", b"\xff\xfe{", b""],
    ids=lambda content: repr(content[:9]),
)
def test_what_is_no_world_at_all_is_refused_too(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(leave, tmp_path, content, "is no description of a run under way", capsys)


OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder": (Path.mkdir, "is not a regular file"),
    "a named pipe": (os.mkfifo, "is not a regular file"),
    "a large file": (
        lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**30),
        "has 1,073,741,824 bytes",
    ),
    "a link": (lambda path: path.symlink_to("/etc/hostname"), "is a link"),
    "a link to itself": (lambda path: path.symlink_to(path), "is a link"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_file_of_ours_is_refused_before_torch_is_imported(name: str, tmp_path: Path) -> None:
    make, message = OTHERS[name]
    make(tmp_path / "world.json")
    code = f"""
import sys
from metalearn.cli import join, leave
print(join.main({[str(tmp_path)]}), leave.main({[str(tmp_path), "worker1"]}), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 2 False\n" and [message in line for line in done.stderr.splitlines()] == [True] * 2, done


STRANGE: list[Any] = [
    None, True, [], {}, [[]], {"a": 1}, -1, 10**30, 2**64, 1.5, 1e308, float("inf"), float("nan"), "\0", "\ud800",
    "\x1b[2J\n", "x" * 100_000, ["\0"], [1], [None], [["a"]], "9" * 5000,
]  # fmt: skip


def forged(draw: random.Random, folder: Path) -> bytes:
    """A world.json with something wrong in it. Its rank zero is not there, nor is its interface: none is right."""
    content = genuine(folder)
    for _ in range(draw.randint(1, 3)):
        name = draw.choice([*content, "other"])
        match draw.randrange(3):
            case 0:
                content.pop(name, None)
            case 1:
                content[name] = draw.choice(STRANGE)
            case 2:
                content[name] = {"a": [content.get(name)]}
    data = bytearray(json.dumps(content, ensure_ascii=draw.random() < 0.5).encode(errors="surrogatepass"))
    for _ in range(draw.choice([0, 0, 1, 5, 50])):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data[: draw.choice([None, None, draw.randrange(len(data))])])


def test_no_forged_world_of_five_hundred_ends_in_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(0)
    for _ in range(250):
        for program in (join, leave):
            refused(program, tmp_path, forged(draw, tmp_path), "error: ", capsys)


def refused(program: Any, folder: Path, content: str | bytes, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "world.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(0o600)
    assert program.main([str(folder), *(["worker1"] if program is leave else [])]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and "\x1b" not in said, said
