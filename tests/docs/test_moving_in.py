"""Programs of other libraries, and ours in their place, print the same numbers."""

import importlib
import subprocess
import sys

import pytest

from tests.docs.blocks import blocks
from tests.runs import ROOT, slow

PAGE = "docs/how-to/moving-in.md"
PEERS = ("higher", "torchopt", "torchmeta", "learn2learn")


def printed(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    ).stdout


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
    theirs = next(block.code for block in blocks(PAGE) if f"import {peer}\n" in block.code)
    assert printed(theirs) == ours
