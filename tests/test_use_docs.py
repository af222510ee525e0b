"""Every command and program of docs/use.md runs as it stands there, but for fewer steps."""

import os
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from metalearn.tasks.glyphs import character
from tests.runs import ROOT, Program

pytestmark = pytest.mark.thorough

BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

FEWER = "trainer.steps=4 trainer.val_every=4 trainer.val_tasks=4 trainer.test_tasks=4"
"""In place of trainer.steps=300."""

NEEDS = "# needs "
"""The first line of a block that needs more than this test has."""


def test_every_block_runs(tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "docs/use.md").read_text())
    assert len(blocks) >= 7 and [code for _, code in blocks if code.startswith(NEEDS)] == [blocks[-1][1]]
    for name in ("train.py", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    for number, name in enumerate(("alpha", "beta", "gamma")):
        for place, folder in ((1, "my_folder"), (7 + number, "other_folder")):
            (tmp_path / folder / name).mkdir(parents=True)
            paper = Image.fromarray(255 - character(510 + number, 40)[place])
            paper.save(tmp_path / folder / name / f"{place}.png")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for language, code in blocks[:-1]:
        code = code.replace("trainer.steps=300", FEWER)
        command = ["bash", "-euc", code] if language == "bash" else [sys.executable, "-c", code]
        outcome = Program(command, tmp_path, {"PATH": path, "PYTHONPATH": str(ROOT)}).wait()
        assert outcome.code == 0, f"{code}\n{outcome.text}"
    assert (tmp_path / "answers/page.png").is_file() and (tmp_path / "answers2/accuracy.json").is_file()
