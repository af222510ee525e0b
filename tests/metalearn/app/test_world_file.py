"""What join and leave say of a folder that holds no run under way."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from metalearn.cli import join, leave

WORLD = {
    "address": "127.0.0.1", "port": 1, "interface": "none0", "token": "", "workers": 2, "host": os.uname().nodename,
    "pid": os.getpid(), "born": 1, "arguments": ["seed=1"], "folder": "/",
}  # fmt: skip

REFUSED = {
    "no file": None,
    "no file to read": "",
    "a run that has ended": json.dumps(WORLD | {"pid": 2**22 + 1}),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("program", [join, leave])
def test_a_folder_without_a_run_under_way_is_named(
    program: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = REFUSED[name]
    if content == "":
        (tmp_path / "world.json").mkdir()
    elif content is not None:
        (tmp_path / "world.json").write_text(content)
    assert program.main([str(tmp_path), *(["worker1"] if program is leave else [])]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path) in message and message.count("\n") == 1, message
