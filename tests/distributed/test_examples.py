"""The programs in docs/how-to/remote-calls.md run, and print what stands beside their prints."""

import re
from pathlib import Path

import pytest

from tests.distributed.worlds import run_ranks
from tests.runs import ROOT

pytestmark = pytest.mark.thorough

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how-to/remote-calls.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_document_run(example: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(example)
    ranks = run_ranks([str(program)], 2)
    assert [code for code, _ in ranks] == [0, 0], ranks
    printed = ranks[0][1].splitlines()
    for expected in re.findall(r"print\(.*\)  # (.*)", example):
        assert expected in printed
