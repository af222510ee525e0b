"""A run folder with a file that is cut off or has a flipped bit: the run names the file, or nothing is different."""

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import ROOT, Program, slow

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

RUN = (
    "experiment=maml_sinusoid", "model.hidden=[8]", "dataset.shots=2", "dataset.eval_queries=4",
    "trainer.meta_batch_size=2", "trainer.task_chunk=2", "trainer.val_every=3", "trainer.val_tasks=4",
    "trainer.test_tasks=4", "checkpoint.every=4", "logger.every=1", "logger.tensorboard=false", "logger.plots=false",
    "logger.report=false", "hydra.run.dir=run",
)  # fmt: skip
FIRST, ALL = "trainer.steps=12", "trainer.steps=16"

KINDS = ("checkpoints/step_*/params.safetensors", "checkpoints/step_*/state.pt", "checkpoints/step_*/meta.json",
         "checkpoints/step_*/manifest.json", ".hydra/config.yaml", "metrics.jsonl")  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has done 12 steps."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = Program([sys.executable, str(ROOT / "train.py"), *RUN, FIRST], folder).wait()
    assert outcome.code == 0, outcome.text
    assert len(list(folder.glob("run/checkpoints/step_*"))) > 1
    return folder / "run"


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def flip(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


def resumed(folders: list[Path]) -> list[int]:
    """Resumes the runs in these folders up to step 16; returns their exit codes."""
    codes = []
    for folder in folders:
        outcome = Program([sys.executable, str(ROOT / "train.py"), *RUN, ALL], folder).wait()
        (folder / "output.txt").write_text(outcome.text)
        codes.append(outcome.code)
    return codes


def results(run_dir: Path) -> tuple[bytes, list[dict[str, object]]]:
    """The test of every task, and the lines of metrics.jsonl without the costs."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    named = [{name: row.get(name) for name in ("step", "split", "loss", "mse", "ci95")} for row in rows]
    return (run_dir / "test.csv").read_bytes(), named


@pytest.mark.parametrize(
    ("damage", "count"),
    [(flip, len(KINDS)), *(pytest.param(*case, marks=slow) for case in ((cut, len(KINDS)), (cut, 100), (flip, 100)))],
)
def test_a_damaged_file_is_named_or_changes_nothing(
    damage: Callable[[bytes, random.Random], bytes], count: int, run_dir: Path, tmp_path: Path
) -> None:
    draw = random.Random(count)
    folders, damaged = [tmp_path / "undisturbed"], [Path()]
    shutil.copytree(run_dir, folders[0] / "run", symlinks=True)
    for number in range(count):
        folders.append(tmp_path / str(number))
        copy = folders[-1] / "run"
        shutil.copytree(run_dir, copy, symlinks=True)
        damaged.append(draw.choice(sorted(copy.glob(KINDS[number % len(KINDS)]))))
        damaged[-1].write_bytes(damage(damaged[-1].read_bytes(), draw))
    undisturbed, *codes = resumed(folders)
    assert undisturbed == 0, (folders[0] / "output.txt").read_text()
    params, expected = "run/checkpoints/last/params.safetensors", results(folders[0] / "run")
    told = 0
    for folder, file, code in zip(folders[1:], damaged[1:], codes, strict=True):
        said = (folder / "output.txt").read_text()
        name = str(file.relative_to(folder)).removesuffix(file.name)
        named = str(file.relative_to(folder)) in said or (name.startswith("run/checkpoints/") and name[:-1] in said)
        told += named
        assert code == 0 or (code == 2 and named), f"{file}\n{said}"
        if code == 0:
            assert (folder / params).read_bytes() == (folders[0] / params).read_bytes(), f"{file}\n{said}"
            assert named or results(folder / "run") == expected, f"{file}\n{said}"
    assert "Traceback" not in "".join((folder / "output.txt").read_text() for folder in folders)
    print(f"{damage.__name__}: {count} files, {told} named, {count - told} harmless, {codes.count(2)} refused")
