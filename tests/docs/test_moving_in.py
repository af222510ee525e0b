"""Programs of other libraries, and ours in their place, print the same numbers."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import blocks, make_files
from tests.runs import ROOT, slow

PAGE = "docs/how-to/moving-in.md"
PEERS = {
    "torch.func": "from torch.func import functional_call, grad, vmap\n",
    **{name: f"import {name}\n" for name in ("higher", "torchopt", "torchmeta", "learn2learn")},
}
"""The line that marks each library's program."""


def printed(code: str, folder: Path = ROOT) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=True
    ).stdout


def program(line: str) -> str:
    """The block of the page that has this line."""
    return next(block.code for block in blocks(PAGE) if line in block.code)


@pytest.fixture(scope="module")
def ours() -> str:
    task_by_task, at_once = (
        printed(block.code) for block in blocks(PAGE) if "from metalearn.bilevel import" in block.code
    )
    assert task_by_task == at_once
    return task_by_task


@slow
@pytest.mark.parametrize("peer", PEERS)
def test_a_program_of_another_library_prints_our_numbers(peer: str, ours: str) -> None:
    try:
        importlib.import_module(peer)
    except ImportError as error:
        pytest.skip(f"{peer} is not installed, or not for this Python and torch: {error}")
    assert printed(program(PEERS[peer])) == ours


@slow
def test_easyfsl_has_our_probabilities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("easyfsl")
    monkeypatch.chdir(tmp_path)
    make_files()
    ours = printed(program("import metalearn\n"), tmp_path)
    assert printed(program("from easyfsl.methods import"), tmp_path) == ours
    assert ours.count("[") == 4  # three pictures
