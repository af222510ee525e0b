"""A world.json of any content ends in one line; what it names is not run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from metalearn.cli import join, leave


def genuine(folder: Path) -> dict[str, Any]:
    return {
        "address": "127.0.0.1", "port": 1, "interface": "lo", "token": "", "workers": 2, "host": os.uname().nodename,
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


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "null", "{", "\x1b[2J", '{"port": ' + "9" * 5000 + "}"])
def test_what_is_no_world_at_all_is_refused_too(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(leave, tmp_path, content, "is no description of a run under way", capsys)


def refused(program: Any, folder: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "world.json"
    path.write_text(content)
    path.chmod(0o600)
    assert program.main([str(folder), *(["worker1"] if program is leave else [])]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and "\x1b" not in said, said
