"""The real program, end to end: same bits everywhere, restarts, the run folder, exit codes."""

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.runs import ROOT, Outcome, Program, Start, metrics, params_of, ranks_of, result_of, slow, until

pytestmark = pytest.mark.thorough

TINY = (
    "run=seed${seed}", "trainer.steps=40", "trainer.meta_batch_size=6", "trainer.task_chunk=2", "trainer.val_every=20",
    "trainer.val_tasks=4", "trainer.test_tasks=10", "checkpoint.every=2", "logger.every=1",
    "logger.plots=false", "logger.report=false", "model.filters=16",
)  # fmt: skip
"""Overrides for a default experiment of a few seconds: three chunks of two tasks a step."""

OWN_FUNCTIONS = (
    "partitioner=function", "partitioner.name=tests.own_functions.deal_backwards",
    "reducer=function", "reducer.name=tests.own_functions.mean",
)  # fmt: skip

OUTPUTS = Path("outputs/maml_glyphs")


def good(outcome: Outcome) -> str:
    assert outcome.code == 0, outcome.text
    return outcome.text


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run in one process; every other way to run must give the same."""
    folder = tmp_path_factory.mktemp("reference")
    good(Program([sys.executable, str(ROOT / "train.py"), *TINY, "logger.plots=true"], folder).wait())
    return folder / OUTPUTS / "seed0"


def test_a_run_whose_test_is_not_finite_has_diverged(start: Start, tmp_path: Path) -> None:
    wild = ("experiment=maml_sinusoid", "algorithm.inner_lr=1e9", "trainer.steps=0", "trainer.val_tasks=4", "run=wild")
    outcome = start(*wild, "trainer.test_tasks=4", "logger=[]", "logger.plots=false", "logger.report=false").wait()
    assert outcome.code == 3 and "so this run has no result; it may be algorithm.inner_lr=" in outcome.text, (
        outcome.text
    )
    result = result_of(tmp_path / "outputs/maml_sinusoid/wild")
    assert result["status"] == "diverged" and "test" not in result
    assert result["val"]["step"] == 0 and result["seconds"] > 0


def test_a_run_folder_holds_what_it_should(reference: Path) -> None:
    names = {path.name for path in reference.iterdir()}
    assert {".hydra", "train.log", "metrics.jsonl", "checkpoints", "plots", "result.json"} <= names
    result = result_of(reference)
    assert (result["status"], result["steps"], result["workers"]) == ("completed", 40, 1)
    test = result["test"]
    assert test["tasks"] == 10 and test["transductive"] is True and list(test["by_step"]) == ["0", "1", "2", "3"]
    assert test["by_step"]["3"] == test["accuracy"] and 0 <= test["accuracy"] <= 1 and test["ci95"] > 0
    rows = metrics(reference)
    assert [row["step"] for row in rows if row["split"] == "train"] == list(range(1, 41))
    assert [row["step"] for row in rows if row["split"] == "val"] == [20, 40]
    assert all({"loss", "accuracy", "step_seconds"} <= row.keys() for row in rows if row["split"] == "train")
    for row in rows:
        if row["split"] == "train":
            assert 0 < row["data_seconds"] < row["worker0/compute_seconds"] < row["step_seconds"]
            assert 0 < row["update_seconds"] < row["step_seconds"] and row["gradient_norm"] > 0
    best = max((row for row in rows if row["split"] == "val"), key=lambda row: row["accuracy"])
    assert result["val"]["accuracy"] == best["accuracy"]
    assert (reference / "plots/learning_curve.png").read_bytes().startswith(b"\x89PNG")
    log = (reference / "train.log").read_text()
    assert "step 40/40" in log and "test: accuracy" in log
    assert "tasks a chunk" in log
    assert "the layers are computed by" in log


def test_a_checkpoint_is_complete_and_links_are_relative(reference: Path) -> None:
    folder = reference / "checkpoints"
    assert str((folder / "last").readlink()) == "step_000040"
    best = str((folder / "best").readlink())
    steps = sorted(path.name for path in folder.glob("step_*"))
    assert steps == sorted({best, "step_000038", "step_000040"})
    for step in steps:
        manifest = json.loads((folder / step / "manifest.json").read_text())
        assert set(manifest) == {"params.safetensors", "state.pt", "meta.json"}
        for name, digest in manifest.items():
            assert hashlib.sha256((folder / step / name).read_bytes()).hexdigest() == digest
    meta = json.loads((folder / "last/meta.json").read_text())
    assert meta["step"] == 40 and meta["config"]["trainer"]["meta_batch_size"] == 6 and "torch" in meta["versions"]


def test_tensorboard_has_scalars_and_hyperparameters(reference: Path) -> None:
    board = EventAccumulator(str(reference)).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == list(range(1, 41))
    assert [event.step for event in board.Scalars("val/accuracy")] == [20, 40]
    assert "_hparams_/session_start_info" in board.summary_metadata


def is_cost(name: str) -> bool:
    """Whether a figure of metrics.jsonl is a cost of the step, not a result."""
    return name.endswith(("_seconds", "_per_second")) or name.startswith("worker")


@pytest.mark.parametrize(
    ("overrides", "torchrun"),
    [
        pytest.param(["strategy=rpc", "workers=1"], None, marks=slow),
        (["strategy=rpc", "workers=2"], None),
        pytest.param(["partitioner=exclusive"], 2, marks=slow),
        pytest.param(["strategy=rpc_autograd", "workers=2", "partitioner=exclusive"], None, marks=slow),
        pytest.param(["workers=2", *OWN_FUNCTIONS], None, marks=slow),
    ],
    ids=["rpc-1", "rpc-2", "torchrun-2-exclusive", "rpc-autograd-exclusive", "own-functions"],
)
def test_every_way_to_run_gives_the_same_bits(
    overrides: list[str], torchrun: int | None, reference: Path, start: Start, tmp_path: Path
) -> None:
    good(start(*TINY, *overrides, torchrun=torchrun, PYTHONPATH=str(ROOT)).wait())
    run_dir = tmp_path / OUTPUTS / "seed0"
    assert params_of(run_dir) == params_of(reference)
    rows = metrics(run_dir)
    same = [{k: v for k, v in row.items() if not is_cost(k)} for row in rows]
    assert same == [{k: expected[k] for k in row} for expected, row in zip(metrics(reference), same, strict=True)]
    assert sorted(path.name for path in (tmp_path / "outputs").glob("*/*")) == ["seed0"]
    if "strategy=rpc" in overrides:  # the parameters travel once a worker, the gradients once a chunk
        size = sum(
            p.numel() * p.element_size() for p in load_file(run_dir / "checkpoints/last/params.safetensors").values()
        )
        elsewhere = 1 if "workers=2" in overrides else 0
        trained = [row for row in rows if row["split"] == "train"]
        for row in trained:
            assert size * elsewhere <= row["worker0/bytes_sent"] <= (size + 1500) * elsewhere, row
            assert not elsewhere or size <= row["worker1/bytes_sent"] <= 2 * (size + 1500), row
            for rank in range(1 + elsewhere):
                parts = [row[f"worker{rank}/{part}_seconds"] for part in ("compute", "waiting", "communication")]
                assert parts[0] > 0 and min(parts) >= 0 and sum(parts) <= row["step_seconds"], row


@pytest.mark.parametrize(("first", "second"), [pytest.param(2, 2, marks=slow), (2, 1), pytest.param(1, 2, marks=slow)])
def test_killed_and_resumed_equals_uninterrupted(
    first: int, second: int, reference: Path, start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / OUTPUTS / "seed0"
    program = start(*TINY, f"workers={first}")
    until(lambda: len(metrics(run_dir)) >= 5, "step 5")
    program.kill()
    assert not (run_dir / "result.json").exists()
    output = good(start(*TINY, f"workers={second}").wait())
    assert "going on after step" in output
    assert params_of(run_dir) == params_of(reference)
    # No line is there twice: those after the checkpoint were removed.
    rows = [(row["split"], row["step"]) for row in metrics(run_dir)]
    assert rows == [(row["split"], row["step"]) for row in metrics(reference)]
    events = EventAccumulator(str(run_dir)).Reload().Scalars("train/loss")
    assert [event.step for event in events] == list(range(1, 41))


def test_a_dead_worker_ends_a_run_that_is_not_started_again(start: Start, tmp_path: Path) -> None:
    program = start(*TINY, "trainer.steps=100000", "workers=2", "launch.max_restarts=0")
    until(lambda: len(metrics(tmp_path / OUTPUTS / "seed0")) >= 3, "step 3")
    os.kill(ranks_of(program)[1], signal.SIGKILL)
    began = time.monotonic()
    outcome = program.wait(30)
    assert outcome.code == 1, outcome.text
    assert time.monotonic() - began < 15
    assert "worker1" in outcome.text and "Traceback" not in outcome.text, outcome.text


@pytest.mark.parametrize(
    ("workers", "number", "code"),
    [
        pytest.param(1, signal.SIGTERM, 143, marks=slow),
        (2, signal.SIGTERM, 143),
        pytest.param(2, signal.SIGINT, 130, marks=slow),
    ],
)
def test_a_signal_saves_and_the_same_command_goes_on(
    workers: int, number: int, code: int, reference: Path, start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / OUTPUTS / "seed0"
    rarely = [*TINY, "checkpoint.every=1000", f"workers={workers}"]
    program = start(*rarely)
    until(lambda: len(metrics(run_dir)) >= 3, "step 3")
    if number == signal.SIGINT:
        os.killpg(program.process.pid, number)  # as a terminal does
    else:
        program.process.send_signal(number)
    outcome = program.wait(60)
    assert outcome.code == code, outcome.text
    assert "which is saved" in outcome.text and "Traceback" not in outcome.text, outcome.text
    good(start(*rarely).wait())
    assert params_of(run_dir) == params_of(reference)


@pytest.fixture
def finished(reference: Path, tmp_path: Path) -> Path:
    """A copy of the reference run, in the folder of the next run."""
    target = tmp_path / OUTPUTS / "seed0"
    shutil.copytree(reference, target, symlinks=True)
    return target


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_completed_run_prints_its_result(finished: Path, start: Start) -> None:
    before = contents(finished)
    assert "test accuracy" in good(start(*TINY).wait())
    assert contents(finished) == before


REFUSED: list[tuple[list[str], list[str]]] = [
    (["algorithm.inner_lr=0.5"], ["algorithm.inner_lr: 1.0 → 0.5", "run=NAME"]),
    (["resume=never"], ["run=NAME"]),
    (["trainer.steps=8"], ["trainer.steps=8", "40"]),
]


@pytest.mark.parametrize(("overrides", "named"), REFUSED, ids=[" ".join(pair[0]) for pair in REFUSED])
def test_what_a_run_folder_refuses(overrides: list[str], named: list[str], finished: Path, start: Start) -> None:
    before = contents(finished)
    outcome = start(*TINY, *overrides).wait()
    assert outcome.code == 2, outcome.text
    assert all(part in outcome.text for part in named), outcome.text
    assert contents(finished) == before


@slow
def test_more_steps_continue_after_the_last_whole_checkpoint(finished: Path, start: Start) -> None:
    (finished / "checkpoints/best").unlink()
    (finished / "checkpoints/best").symlink_to("step_000040")
    torn = finished / "checkpoints/step_000040/params.safetensors"
    torn.write_bytes(torn.read_bytes()[:-4])
    output = good(start(*TINY, "trainer.steps=42").wait())
    assert "differs from what was saved" in output and "going on after step 38" in output
    assert result_of(finished)["steps"] == 42
    assert [row["step"] for row in metrics(finished) if row["split"] == "train"] == list(range(1, 43))


@slow
def test_init_from_starts_with_the_parameters_of_another_run(finished: Path, start: Start, tmp_path: Path) -> None:
    checkpoint = finished / "checkpoints/last"
    good(start(*TINY, "run=next", f"init_from={checkpoint}", "trainer.steps=0").wait())
    ours, theirs = (
        load_file(path / "params.safetensors") for path in (tmp_path / OUTPUTS / "next/checkpoints/last", checkpoint)
    )
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    outcome = start(*TINY, "run=other", f"init_from={checkpoint}", "init_strict=true", "model.filters=32").wait()
    assert outcome.code == 2 and "conv1.weight (here (32, 1, 3, 3), there (16, 1, 3, 3))" in outcome.text, outcome.text


@slow
def test_a_sinusoid_run_draws_its_adaptation(start: Start, tmp_path: Path) -> None:
    tiny: dict[str, Any] = {
        "trainer.steps": 20,
        "trainer.val_tasks": 4,
        "trainer.test_tasks": 10,
        "precision": "float64",
    }
    quiet = ("run=seed0", "logger.tensorboard=false", "logger.report=false")
    good(start("experiment=maml_sinusoid", *(f"{key}={value}" for key, value in tiny.items()), *quiet).wait())
    run_dir = tmp_path / "outputs/maml_sinusoid/seed0"
    assert (run_dir / "plots/adaptation.png").read_bytes().startswith(b"\x89PNG")
    result = result_of(run_dir)
    assert (
        result["test"]["mse"] > 0 and "accuracy" not in result["test"] and list(result["test"]["by_step"])[-1] == "10"
    )
    assert {str(value.dtype) for value in load_file(run_dir / "checkpoints/last/params.safetensors").values()} == {
        "torch.float64"
    }


@slow
def test_products_in_bf16_train_the_same_float32_parameters(start: Start, tmp_path: Path, reference: Path) -> None:
    good(start(*TINY, "trainer.steps=5", "precision=bf16", "workers=2").wait())
    good(start(*TINY, "trainer.steps=5", "precision=bf16", "run=alone").wait())
    rounded, alone = (
        load_file(tmp_path / OUTPUTS / run / "checkpoints/last/params.safetensors") for run in ("seed0", "alone")
    )
    exact = load_file(reference / "checkpoints/last/params.safetensors")
    assert all(rounded[name].dtype == exact[name].dtype for name in exact)
    assert all((rounded[name] == alone[name]).all() for name in exact)
    losses = [metrics(folder)[0]["loss"] for folder in (tmp_path / OUTPUTS / "seed0", reference)]
    assert 0 < abs(losses[0] - losses[1]) < 0.1


@slow
def test_a_multirun_ends_with_the_largest_exit_code(start: Start, tmp_path: Path) -> None:
    outcome = start("--multirun", *TINY, "trainer.steps=2", "algorithm.inner_lr=1e30,0.1", "workers=1,2").wait()
    assert outcome.code == 3 and "HYDRA_FULL_ERROR" not in outcome.text, outcome.text
    folders = [path.parent for path in (tmp_path / OUTPUTS).glob("*/result.json")]
    results = [result_of(folder) for folder in folders]
    ends = sorted((result["status"], result["workers"]) for result in results)
    assert ends == [("completed", 1), ("completed", 2), ("diverged", 1), ("diverged", 2)]
    done = [folder for folder, result in zip(folders, results, strict=True) if result["status"] == "completed"]
    assert params_of(done[0]) == params_of(done[1])
    head, *rows = [line.split() for line in outcome.text.splitlines()[-5:]]
    assert head == ["inner_lr", "workers", "best", "validation", "test"]
    assert [row[0] for row in rows] == ["1e+30", "1e+30", "0.1", "0.1"]
    assert [row[-1] for row in rows[:2]] == ["diverged"] * 2 and {"best"} <= {row[-1] for row in rows[2:]}


def test_a_folder_in_use_is_refused(start: Start, tmp_path: Path) -> None:
    first = start(*TINY, "trainer.steps=100000")
    until(lambda: len(metrics(tmp_path / OUTPUTS / "seed0")) >= 2, "step 2")
    outcome = start(*TINY, "trainer.steps=100000").wait()
    assert outcome.code == 2 and "is in use by process " in outcome.text, outcome.text
    first.kill()


def test_checkpoints_that_cannot_be_read_are_no_new_start(finished: Path, start: Start) -> None:
    for path in finished.glob("checkpoints/step_*/state.pt"):
        path.write_bytes(b"torn")
    before = contents(finished)
    outcome = start(*TINY, "trainer.steps=42").wait()
    assert outcome.code == 2 and "none of its checkpoints can be read" in outcome.text, outcome.text
    assert contents(finished) == before


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=slow)])
def test_resuming_from_an_earlier_checkpoint_goes_back_to_it(
    workers: int, finished: Path, reference: Path, start: Start
) -> None:
    earlier = finished / "checkpoints/step_000038"
    output = good(start(*TINY, f"workers={workers}", f"resume={earlier}").wait())
    assert "going on after step 38" in output
    assert params_of(finished) == params_of(reference)
    assert [(row["split"], row["step"]) for row in metrics(finished)] == [
        (row["split"], row["step"]) for row in metrics(reference)
    ]


def test_a_worker_that_cannot_start_reports_why(start: Start, tmp_path: Path) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    alone = dict(zip(names, ["1", "2", "1", "2", "127.0.0.1", "1"], strict=True))
    outcome = start(*TINY, "strategy.timeout=3", **alone).wait(200)
    assert outcome.code == 1 and "error: worker1:" in outcome.text, outcome.text


def test_a_run_that_begins_after_its_last_step_is_tested(start: Start, tmp_path: Path) -> None:
    """Its best validation lies in the folder that it begins from, so it validates again and saves its own."""
    tiny = ("experiment=maml_sinusoid", "trainer.steps=2", "trainer.val_every=2", "trainer.val_tasks=4",
            "trainer.test_tasks=4", "logger.plots=false", "logger.report=false")  # fmt: skip
    first = start(*tiny, f"hydra.run.dir={tmp_path}/first").wait()
    assert first.code == 0, first.text
    again = start(*tiny, f"resume={tmp_path}/first/checkpoints/last", f"hydra.run.dir={tmp_path}/again").wait()
    assert again.code == 0 and (tmp_path / "again/checkpoints/best").is_dir(), again.text
