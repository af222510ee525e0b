"""Every code block of README.md and docs/ is run by a test, or says what it needs."""

import json
import re
import sys

import pytest

from tests.docs import blocks
from tests.docs.blocks import ELSEWHERE, PAGES, Block
from tests.runs import ROOT, Program

ALL = [block for page in PAGES for block in blocks.blocks(page)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What each block said that failed; None for those that have run."""
    home = tmp_path_factory.mktemp("blocks")
    program = Program([sys.executable, "-m", "tests.docs.blocks", str(home)], home, {"PYTHONPATH": str(ROOT)})
    ended = program.wait(900)
    assert ended.code == 0, ended.text
    found: dict[str, str | None] = json.loads((home / "outcomes.json").read_text())
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("block", blocks.to_run(), ids=lambda block: block.place)
def test_a_block_runs(block: Block, outcomes: dict[str, str | None]) -> None:
    assert outcomes[block.place] is None, outcomes[block.place]


@pytest.mark.parametrize(
    ("language", "code", "message"),
    [
        ("bash", "metalearn train trainer.stepz=1", "did you mean trainer.steps?"),
        ("bash", "make all", "make: is no program that a test runs; mark it by <!-- needs: … -->"),
        ("python", "learned = train()", "name 'train' is not defined"),
    ],
)
def test_a_block_that_does_not_run_says_why(language: str, code: str, message: str) -> None:
    assert message in str(blocks.outcome(Block("page.md", 1, language, code, None)))


def test_there_are_blocks_to_run_and_marked_ones() -> None:
    assert len(blocks.to_run()) > 20 and sum(block.needs is not None for block in ALL) > 15


def test_a_mark_is_read_and_nothing_else_is() -> None:
    """Comments that are nearly marks would leave their lines unread; other languages would leave blocks unseen."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert blocks.languages(page) <= {"bash", "json", "python", "text", "yaml"}, page
        near = re.findall(r"^.*<!--.*needs?\b.*|^# ?needs?\b.*", text, re.MULTILINE | re.IGNORECASE)
        assert all(re.fullmatch(r"<!-- needs: \S.* -->", line) for line in near), (page, near)
        assert len(near) == sum(block.needs is not None for block in ALL if block.page == page), page


@pytest.mark.parametrize("place", ELSEWHERE)
def test_pages_that_another_test_runs_are_named_there(place: tuple[str, str]) -> None:
    assert f'"{place[0]}"' in (ROOT / ELSEWHERE[place]).read_text()
