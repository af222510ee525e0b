"""What a user sees of the program beside its runs: the first line, help in a pipe, the page of keys."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from metalearn.app.process import BAD_CONFIG, report_error
from metalearn.config.values import RESOLVERS, folder_name
from metalearn.errors import ConfigError
from tests.runs import ROOT

pytestmark = pytest.mark.thorough


def test_the_run_is_announced_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    run = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "run=first"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.stderr.splitlines()[0] == "maml_glyphs: starting in outputs/maml_glyphs/first"
    assert "no torch here" in run.stderr


@pytest.mark.parametrize(
    ("file", "typed", "message"),
    [
        ("run", (), "hydra.run.dir=run: is no folder; type run=NAME"),
        ("run/x", ("resume=never",), "resume=never: run is not empty; type run=NAME"),
        ("run/x", (), "run is not empty and holds no run; type run=NAME"),
    ],
)
def test_a_refused_folder_is_refused_before_torch(
    tmp_path: Path, file: str, typed: tuple[str, ...], message: str
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    run = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "hydra.run.dir=run", *typed],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 2 and run.stderr.startswith(f"error: {message}"), run.stderr


def test_help_may_be_cut_by_its_reader() -> None:
    for program in ("train.py", "scripts/evaluate.py"):
        command = [sys.executable, str(ROOT / program), "--help"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()  # as `head` does once it has enough
            assert process.stderr.read() == ""
            assert process.wait(60) == 0


def test_a_folder_of_a_multirun_is_one_short_name() -> None:
    assert folder_name("seed=1,init_from=../y/s20").startswith("seed=1,init_from=..-y-s20-")
    assert folder_name("init_from=y/s20") != folder_name("init_from=y-s20")
    long = folder_name("name=" + "ü" * 100)
    assert len(long.encode()) <= 120 and long != folder_name("name=" + "ü" * 101)


def test_a_long_folder_name_begins_with_the_searched_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALEARN_SEARCHED", "trainer.steps,seed")
    names = set()
    for searched in (("seed=0", "trainer.steps=2"), ("seed=1", "trainer.steps=2"), ("seed=1", "trainer.steps=20")):
        typed = [*(f"algorithm.a_long_key_{number}=0.125" for number in range(9)), *searched]
        names.add(name := RESOLVERS["trial_folder"](0, None, typed))
        assert name.startswith(f"{','.join(searched)},algorithm.") and len(name) <= 120
    assert len(names) == 3
    assert RESOLVERS["trial_folder"](0, None, ["seed=0", "+a=1"]) == "+a=1,seed=0"
    assert RESOLVERS["trial_folder"](7, "search", ["seed=0"]) == "trial_0007"
    monkeypatch.setenv("METALEARN_SEARCHED", "seed")  # a larger trainer.steps goes on in the same folder
    assert RESOLVERS["trial_folder"](0, None, ["experiment=x", "trainer.steps=9", "seed=0", "workers=2"]) == "seed=0"


def test_torchrun_shows_our_message_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert report_error(ConfigError("seed=-1: must be at least 0"), BAD_CONFIG) == BAD_CONFIG
    others = ProcessFailure(local_rank=1, pid=2, exitcode=75, error_file="<N/A>")
    ours = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(path))
    lines = str(ChildFailedError("train.py", {0: ours, 1: others})).rstrip("=\n").splitlines()
    assert lines[-1] == "  traceback : error: seed=-1: must be at least 0"
