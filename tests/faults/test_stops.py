"""SIGTERM and SIGINT at any moment of the real program: it saves, ends at once, and the same command goes on."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from metalearn.runs.checkpoint import read
from metalearn.runs.signals import SAME_REQUEST_SECONDS
from tests.runs import ROOT, Outcome, Program, Start, alive, metrics, params_of, ranks_of, result_of, slow, until

pytestmark = pytest.mark.thorough

SINUSOID = (
    "experiment=maml_sinusoid", "trainer.steps=4", "trainer.meta_batch_size=12", "trainer.task_chunk=4",
    "trainer.val_every=2", "trainer.val_tasks=1000", "trainer.test_tasks=3000", "logger.every=1",
    "logger.tensorboard=false", "logger.plots=false", "logger.report=false", "hydra.run.dir=run",
)  # fmt: skip
"""A validation of 250 chunks and a test of 750, to be stopped in: each takes a second or more."""

SAMPLES = (
    "experiment=supervised_glyphs", "trainer.steps=2", "trainer.meta_batch_size=12", "trainer.task_chunk=1",
    "trainer.val_every=2", "trainer.val_tasks=400", "trainer.test_tasks=2", "model.filters=32", "logger.every=1",
    "logger.tensorboard=false", "logger.plots=false", "logger.report=false", "hydra.run.dir=run",
)  # fmt: skip
"""A validation of 400 chunks, for strategies that train on samples."""

ENDLESS = (*SINUSOID, "trainer.steps=100000", "trainer.val_every=100000")

STOP_SECONDS = 10.0
"""How long a stop may take."""


def content_of(run_dir: Path) -> dict[str, Any]:
    """What result.json, metrics.jsonl and the last checkpoint say of a run, without the costs."""
    result = result_of(run_dir)
    rows = [{name: row.get(name) for name in ("step", "split", "loss", "mse", "accuracy")} for row in metrics(run_dir)]
    return {"val": result["val"], "test": result["test"], "rows": rows, "params": params_of(run_dir)}


def stopped(program: Program, number: signal.Signals = signal.SIGTERM) -> str:
    """The output of a program that gets a signal now; it must end in time, with the signal's exit code."""
    ranks = ranks_of(program)
    began = time.monotonic()
    program.process.send_signal(number)
    outcome = program.wait(STOP_SECONDS)
    print(f"ended {time.monotonic() - began:.1f} s after {number.name}")
    assert outcome.code == 128 + number and "Traceback" not in outcome.text, outcome.text
    assert not any(map(alive, ranks))
    return outcome.text


def good(outcome: Outcome) -> str:
    assert outcome.code == 0, outcome.text
    return outcome.text


def reaches(run_dir: Path, split: str, step: int) -> Any:
    return lambda: any((row["split"], row["step"]) == (split, step) for row in metrics(run_dir))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody stops."""
    folder = tmp_path_factory.mktemp("undisturbed")
    good(Program([sys.executable, str(ROOT / "train.py"), *SINUSOID], folder).wait())
    return folder / "run"


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        ("workers=1", "workers=1", "workers=1"),
        pytest.param("workers=2 strategy=ddp", "workers=2 strategy=rpc", "workers=1", marks=slow),
        pytest.param("workers=2 strategy=rpc", "workers=2 strategy=ddp", "workers=2 strategy=ddp", marks=slow),
        pytest.param(*["workers=2 strategy=rpc_autograd"] * 3, marks=slow),
    ],
)
def test_a_cut_validation_and_test_are_made_again_to_the_bit(
    first: str, second: str, third: str, reference: Path, start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    program = start(*SINUSOID, *first.split())
    until(reaches(run_dir, "train", 2), "step 2")  # its validation begins now
    assert "stopped after step 2, which is saved" in stopped(program)
    saved = json.loads((run_dir / "checkpoints/last/meta.json").read_text())
    assert (saved["step"], saved["metrics"]["best"]) == (2, None)
    assert not reaches(run_dir, "val", 2)()

    program = start(*SINUSOID, *second.split())
    until(lambda: (run_dir / "checkpoints/step_000004").exists(), "the last checkpoint")
    time.sleep(0.1)  # the test has begun
    assert "stopped in the test, which the same command makes again" in stopped(program)
    assert not (run_dir / "result.json").exists()

    good(start(*SINUSOID, *third.split()).wait())
    assert content_of(run_dir) == content_of(reference)


@slow
@pytest.mark.parametrize("strategy", ["split", "ddp"])
def test_a_cut_validation_on_samples_is_made_again(strategy: str, start: Start, tmp_path: Path) -> None:
    overrides = (*SAMPLES, "workers=2", f"strategy={strategy}")
    program = start(*overrides)
    until(reaches(tmp_path / "run", "train", 2), "step 2")
    stopped(program)
    assert not reaches(tmp_path / "run", "val", 2)()
    good(start(*overrides).wait())
    good(start(*overrides, "hydra.run.dir=undisturbed").wait())
    assert content_of(tmp_path / "run") == content_of(tmp_path / "undisturbed")


@slow
@pytest.mark.parametrize("strategy", ["rpc", "ddp"])
def test_torchrun_is_stopped_within_a_validation(strategy: str, reference: Path, start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    program = start(*SINUSOID, f"strategy={strategy}", torchrun=2)
    until(reaches(run_dir, "train", 2), "step 2")
    ranks = ranks_of(program)
    program.process.terminate()
    outcome = program.wait(STOP_SECONDS)
    assert outcome.code != 0 and "stopped after step 2, which is saved" in outcome.text, outcome.text
    assert outcome.text.count("Traceback") == 1 and "SignalException" in outcome.text, outcome.text  # torchrun's own
    assert not any(map(alive, ranks)) and not reaches(run_dir, "val", 2)()
    good(start(*SINUSOID, f"strategy={strategy}", torchrun=2).wait())
    assert content_of(run_dir) == content_of(reference)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=slow)])
def test_a_signal_before_the_workers_have_met_ends_the_run(
    number: signal.Signals, start: Start, tmp_path: Path
) -> None:
    bare = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    program = start(*ENDLESS, **bare)
    until(lambda: "for rank 1 of 2" in program.said(), "the wait for rank 1")
    assert "stopped before the workers had met" in stopped(program, number)


@slow
def test_a_second_signal_leaves_the_checkpoint_and_ends_the_run(start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, "workers=2")
    until(reaches(tmp_path / "run", "train", 2), "step 2")
    ranks = ranks_of(program)
    os.kill(ranks[1], signal.SIGSTOP)  # so that rank zero waits when it leaves
    program.process.terminate()
    until(lambda: "which is saved" in program.said(), "the first stop")
    time.sleep(SAME_REQUEST_SECONDS)
    stopped(program)
    assert not any(map(alive, ranks))
    step = max(row["step"] for row in metrics(tmp_path / "run"))
    assert read(tmp_path / "run/checkpoints/last").meta["step"] == step


def test_a_second_signal_ends_a_process_that_is_stuck_in_c(tmp_path: Path) -> None:
    code = (
        "import ctypes; from metalearn.runs.signals import StopSignal; StopSignal(); print('ready', flush=True); "
        "mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None); "
        "libc.pthread_mutex_lock(mutex); libc.pthread_mutex_lock(mutex)"
    )
    program = Program([sys.executable, "-c", code], tmp_path, {"PYTHONPATH": str(ROOT)})
    until(lambda: "ready" in program.said(), "the handlers")
    for _ in range(2):  # twice the same request
        program.process.terminate()
    time.sleep(SAME_REQUEST_SECONDS + 0.2)
    assert program.process.poll() is None
    program.process.send_signal(signal.SIGINT)
    assert program.wait(STOP_SECONDS) == Outcome(143, "ready\n")
