"""The code blocks of README.md and docs/, and a program that runs them: `python -m tests.docs.blocks FOLDER`.

A line `<!-- needs: … -->` above a block says what it takes that a test does not have: it is not run. All other blocks
are run as they stand, but for fewer steps, tasks and trials; a sweep that several pages show is run once.
"""

import contextlib
import io
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hydra.core.global_hydra import GlobalHydra
from PIL import Image

from metalearn.__main__ import COMMANDS
from metalearn.__main__ import main as metalearn
from metalearn.config.compose import compose_config
from metalearn.tasks.glyphs import character
from tests.runs import ROOT

PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")))

ELSEWHERE = {
    ("docs/how-to/remote-calls.md", "python"): "tests/distributed/test_examples.py",
    ("docs/how-to/extend.md", "python"): "tests/processes/test_extending.py",
    ("docs/how-to/extend.md", "bash"): "tests/processes/test_extending.py",
    ("docs/how-to/prior.md", "python"): "tests/processes/test_own_prior.py",
    ("docs/how-to/prior.md", "bash"): "tests/processes/test_own_prior.py",
}
"""Pages and languages whose blocks another test runs."""

FENCE = re.compile(r"(?:^<!-- needs: (\S[^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

FEWER = {
    "trainer.steps": 2, "trainer.val_every": 2, "trainer.val_tasks": 2, "trainer.test_tasks": 2,
    "trainer.meta_batch_size": 2, "logger.report": "false", "logger.plots": "false",
}  # fmt: skip
FEWER_TRIALS = {
    "async": {"n_trials": 2, "plots": "false"},
    "pbt": {"members": 2, "rounds": 2, "plots": "false"},
}
"""By the sweeper."""

PLACES = {
    "/path/to/pictures": "pictures dataset.image_size=28 run=seed0",
    "choice(200,2000)": "choice(1,2)",
    "pause_after=100": "pause_after=1",
    "steps=200": "steps=2",
    "seed=0,1,2": "seed=0,1",
}
"""What stands in a block, and what is run."""


class Block(NamedTuple):
    """A block of bash or Python: its page, the number of its first line, and what it needs if a test cannot run it."""

    page: str
    line: int
    language: str
    code: str
    needs: str | None

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def languages(page: str) -> set[str]:
    """Those that the fences of a page name."""
    return {language for _, language, _ in FENCE.findall((ROOT / page).read_text())}


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for fence in FENCE.finditer(text):
        if fence[2] in ("bash", "python"):
            yield Block(page, text[: fence.start(3)].count("\n") + 1, fence[2], fence[3], fence[1])


def to_run() -> list[Block]:
    """The blocks that this program runs."""
    found = [block for page in PAGES for block in blocks(page) if block.needs is None]
    elsewhere = {block.code for block in found if (block.page, block.language) in ELSEWHERE}
    return [block for block in found if block.code not in elsewhere]


# Running

done: set[tuple[str, ...]] = set()
"""The sweeps that have been run; several pages show the same."""


def run(block: Block) -> None:
    """Runs a block in the working folder."""
    code = block.code
    for shown, there in PLACES.items():
        code = code.replace(shown, there)
    if block.language == "python":
        exec(compile(code, block.place, "exec"), {"__name__": "__main__"})
        return
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            ended = command(words)
            assert ended == 0, f"{line}: exit code {ended}"


def command(words: list[str]) -> int:
    """Runs a command in this process; returns its exit code."""
    program, *arguments = words
    assert program == "metalearn", f"{program}: is no program that a test runs; mark it by <!-- needs: … -->"
    name = arguments.pop(0) if arguments and arguments[0] in (*COMMANDS, "help") else "train"
    if name in ("train", "sweep"):
        typed = ["--multirun" if word == "-m" else word for word in arguments]
        arguments = shortened(typed)
        if name == "sweep" or "--multirun" in arguments:
            if (name, *arguments) in done:
                return 0
            done.add((name, *arguments))
        elif "--help" not in arguments:  # the run has the name of the command as it stands
            arguments = [*(word for word in arguments if not word.startswith("run=")), f"run={name_of(typed)}"]
    return metalearn([name, *arguments])


def name_of(typed: list[str]) -> str:
    """The value of the key `run`, as a word of Hydra."""
    run: str = compose_config(typed).config.run
    return "'" + run.replace("'", "\\'") + "'"


def shortened(arguments: list[str]) -> list[str]:
    """A training of a few steps. Keys with several values keep them."""
    if "--help" in arguments:
        return arguments
    line = " ".join(arguments)
    sweeper = "pbt" if "pbt" in line else "async" if re.search(r"\bsweep=|=async|hydra\.sweeper", line) else None
    fewer = FEWER | {f"hydra.sweeper.{key}": value for key, value in FEWER_TRIALS.get(sweeper or "", {}).items()}
    swept = [word for word in arguments if re.match(r"[\w.]+=(choice|\S+,)", word)]
    fewer = {key: value for key, value in fewer.items() if not any(word.startswith(f"{key}=") for word in swept)}
    kept = [word for word in arguments if word.partition("=")[0] not in fewer]
    return [*kept, *(f"{key}={value}" for key, value in fewer.items())]


def make_files() -> None:
    """Makes what the blocks take for granted in the working folder: pictures."""

    def draw(number: int, drawing: int, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(255 - character(number, 40)[drawing]).save(path)

    for number, name in enumerate(("alpha", "beta", "gamma")):
        draw(510 + number, 1, f"my_folder/{name}/1.png")
        draw(510 + number, 7 + number, f"other_folder/{name}/{7 + number}.png")
    for number, name in enumerate(("cat_1", "dog_1", "owl_1", "what_is_this")):
        draw(520 + number, 0, f"{name}.jpg")
    for number in range(32):
        for drawing in range(6):
            draw(number, drawing, f"pictures/{number}/{drawing}.png")


def outcome(block: Block) -> str | None:
    """Runs a block; what it said if it failed, else None."""
    GlobalHydra.instance().clear()
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            run(block)
    except BaseException:
        return f"{block.code}\n{said.getvalue()[-5000:]}\n{traceback.format_exc()}"
    return None


def main(home: Path) -> None:
    """Runs all blocks, those of a page in one folder and in their order; writes outcomes.json."""
    outcomes = {}
    for block in to_run():
        folder = home / Path(block.page).stem
        new = not folder.exists()
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        if new:
            make_files()
        outcomes[block.place] = outcome(block)
    (home / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
