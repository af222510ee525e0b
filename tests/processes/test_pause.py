"""Runs that pause after a step, and runs that begin from the checkpoint of another one."""

import html
import json
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from metalearn.cli import train
from metalearn.training import trainer
from tests.runs import (
    PROGRAM,
    ROOT,
    Program,
    Start,
    assert_same_bytes,
    metrics,
    params_of,
    result_of,
    slow,
    train_in,
    until,
)

pytestmark = pytest.mark.thorough

TINY = (
    "experiment=maml_sinusoid", "trainer.steps=80", "trainer.meta_batch_size=8", "trainer.val_every=40",
    "trainer.val_tasks=20", "trainer.test_tasks=20", "trainer.task_chunk=4", "logger.tensorboard=false",
    "logger.plots=false", "logger.report=false",
)  # fmt: skip


def run(folder: Path, *overrides: str) -> str:
    return train_in(folder, *TINY, *overrides)


def losses_of(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in metrics(folder) if row["split"] == "train"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was not paused."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder)
    return folder


@slow
def test_dropout_has_the_same_bits_on_other_workers(tmp_path: Path) -> None:
    """Its fixed parameters are those that the seed has drawn, to the end."""
    own = (
        "model=module", "model.network._target_=tests.own_functions.Dropping", "model.channels=1", "algorithm=maml",
        "trainer.steps=4", "trainer.meta_batch_size=6", "trainer.task_chunk=2", "trainer.val_every=4",
        "trainer.val_tasks=4", "trainer.test_tasks=4", "logger.tensorboard=false", "logger.plots=false",
        "logger.report=false",
    )  # fmt: skip
    whole, paused, without = tmp_path / "whole", tmp_path / "paused", tmp_path / "without"
    assert "Dropping: dropout, or what else its training mode changes, is on in training" in train_in(whole, *own)
    train_in(paused, *own, "workers=2", "pause_after=2")
    first = load_file(paused / "checkpoints/last/params.safetensors")
    train_in(paused, *own)
    assert params_of(paused) == params_of(whole)
    last = load_file(whole / "checkpoints/last/params.safetensors")
    assert [name for name in last if torch.equal(first[name], last[name])] == [
        "state.fixed.body.bias", "state.fixed.body.weight"
    ]  # fmt: skip
    train_in(without, *own, "model.dropout=false")
    assert params_of(without) != params_of(whole)


@slow
def test_patience_ends_a_run_at_the_same_step_after_a_pause(tmp_path: Path) -> None:
    """The outer rate is so large that validations soon get worse."""
    own = ("optimizer=muon", "optimizer.lr=0.3", "optimizer.clip_norm=1.0", "trainer.val_every=5", "trainer.patience=2")
    whole, paused = tmp_path / "whole", tmp_path / "paused"
    said = run(whole, *own)
    assert "Muon updates " in said
    errors = {row["step"]: row["mse"] for row in metrics(whole) if row["split"] == "val"}
    end, best = max(errors), min(errors, key=errors.__getitem__)
    assert (end, end < 80) == (best + 2 * 5, True)
    message = f"after step {end} of 80: trainer.patience=2 validations were no better than that of step {best}"
    assert message in said
    result = result_of(whole)
    assert (result["status"], result["steps"], result["patience"]) == ("completed", end, 2)
    assert (whole / "checkpoints/last").resolve().name == f"step_{end:06d}"
    again = run(whole, *own)
    assert f"{end} steps" in again and "training ends" not in again  # it is complete

    run(paused, *own, "workers=2", "pause_after=7")
    run(paused, *own)
    assert_same_bytes(paused, whole)
    run(whole, *own, "trainer.patience=null")  # goes on
    assert result_of(whole)["steps"] == 80 and "patience" not in result_of(whole)


def test_only_the_validation_of_a_pause_gives_way_to_a_worse_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of 15 steps that validates every 10, and goes on to 20; and one that pauses after 7."""
    settings = SimpleNamespace(val_every=10, steps=15, val_tasks=1, best_by="metric")
    strategy = SimpleNamespace(evaluate=lambda params, *_: params["error"])
    monkeypatch.setattr(trainer, "summary", lambda value, unit: {"mse": float(value), "loss": float(value)})

    def best_of(*errors: tuple[int, float], longer: int = 15) -> int:
        """The step of the best of these validations; the last one is of a run of so many steps."""
        state = trainer.TrainState({}, cast(Any, None))
        units = trainer.Units(1, "tasks")
        run = trainer.Trainer(cast(Any, settings), state, cast(Any, strategy), cast(Any, None), max, units, units)  # type: ignore[arg-type]
        for step, error in errors:
            settings.steps = longer if (step, error) == errors[-1] else 15
            state.step, state.params = step, {"error": torch.tensor(error)}
            run.validate()
        assert state.best is not None
        return int(state.best["step"])

    assert best_of((10, 3.6), (15, 3.4), (20, 3.7), longer=20) == 15
    assert best_of((7, 3.0), (10, 3.6)) == 10


def test_a_run_draws_before_its_result_is_written(tmp_path: Path) -> None:
    """Who finds a result is done, and would draw nothing."""
    killed = (
        "import os, runpy; from metalearn.app import run; run.folder.write_result = lambda *_: os._exit(9); "
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')"
    )
    own = ("trainer.steps=2", "logger.plots=true", "logger.report=true", f"hydra.run.dir={tmp_path}/run")
    assert Program([sys.executable, "-c", killed, *TINY, *own], tmp_path).wait().code == 9
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"plots", "report.html"} <= left and "result.json" not in left


def test_a_complete_run_that_goes_on_has_no_result_until_its_end(tmp_path: Path) -> None:
    run(tmp_path / "run", "trainer.steps=4")
    assert (tmp_path / "run/result.json").exists()
    longer = ("trainer.steps=100000", f"hydra.run.dir={tmp_path}/run")
    program = Program([sys.executable, str(ROOT / "train.py"), *TINY, *longer], tmp_path)
    until(lambda: not (tmp_path / "run/result.json").exists(), "the run to go on")
    os.kill(program.process.pid, signal.SIGTERM)
    assert program.wait().code == 143 and not (tmp_path / "run/result.json").exists()


@pytest.mark.parametrize("ranks", [(), pytest.param(("workers=2", "strategy=ddp"), marks=slow)])
def test_a_run_pauses_and_goes_on_to_the_same_bits(ranks: tuple[str, ...], whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert "paused after step 30; pause_after=null goes on" in run(folder, "pause_after=30", *ranks)
    result = result_of(folder)
    assert (result["status"], result["steps"], result["val"]["step"]) == ("paused", 30, 30)
    assert [(row["split"], row["step"]) for row in metrics(folder) if row["split"] != "train"] == [("val", 30)]
    assert (folder / "checkpoints/last").resolve().name == "step_000030"

    (folder / "result.json").unlink()  # as if killed before it was written
    run(folder, "pause_after=30", *ranks)
    assert result_of(folder) | {"seconds": 0} == result | {"seconds": 0}
    assert len([row for row in metrics(folder) if row["split"] == "val"]) == 1  # it has not validated again
    before = (folder / "result.json").stat().st_mtime_ns
    assert "paused after step 30: pause_after=null resumes the run" in run(folder, "pause_after=30", *ranks)
    assert (folder / "result.json").stat().st_mtime_ns == before
    back = f"resume={folder / 'checkpoints/step_000030'}"
    assert "paused after step 32" in run(folder, "pause_after=32", *ranks)
    assert "going on after step 30" in run(folder, "pause_after=32", back, *ranks)

    run(folder, *ranks)
    assert params_of(folder) == params_of(whole)
    assert result_of(folder)["test"] == result_of(whole)["test"] and result_of(folder)["status"] == "completed"
    assert losses_of(folder) == losses_of(whole)  # the line of step 40 covers the steps before the pause too


def test_the_report_names_the_commands_that_make_the_run(tmp_path: Path) -> None:
    """The rates of the first 20 steps fall towards step 40, and those of the others towards step 60: no single command
    makes this run. A pause and another number of workers change nothing, and are not named."""
    folder, again = tmp_path / "run", tmp_path / "again"
    shown = ("optimizer.schedule=cosine", "trainer.val_every=20")
    warning = "the rates so far were those of a run of 40"
    assert warning not in run(folder, *shown, "trainer.steps=40", "pause_after=20")
    assert warning in run(folder, *shown, "trainer.steps=60", "workers=2", "logger.report=true")
    page = re.search("<pre>(.*?)</pre>", (folder / "report.html").read_text(), re.DOTALL)
    assert page is not None
    commands = [shlex.split(line) for line in html.unescape(page[1]).splitlines()]
    assert [command[-1] for command in commands][:-1] == ["pause_after=20"] and len(commands) == 2
    for python, program, *arguments in commands:
        assert (python, program) == ("python", "train.py")
        own = [argument.replace(str(folder), str(again)) for argument in arguments]
        assert train.main([*own, "logger.report=false"], PROGRAM) == 0
    assert params_of(again) == params_of(folder)
    assert result_of(again)["test"] == result_of(folder)["test"]


def test_a_carried_state_keeps_its_bits(tmp_path: Path) -> None:
    """Reptile's Adam, which goes on from step to step: one worker at once; two workers by remote calls, then two by
    all-reduce."""
    carried = (
        "algorithm=reptile", "inner=adam", "inner.beta1=0", "optimizer=sgd", "optimizer.schedule=constant",
        "optimizer.lr=0.5", "algorithm.inner_state=carried", "algorithm.inner_steps=3", "trainer.steps=20",
    )  # fmt: skip
    run(tmp_path / "whole", *carried)
    run(tmp_path / "parts", *carried, "pause_after=10", "workers=2", "strategy=rpc")
    run(tmp_path / "parts", *carried, "workers=2", "strategy=ddp")
    assert params_of(tmp_path / "parts") == params_of(tmp_path / "whole")
    assert result_of(tmp_path / "parts")["test"] == result_of(tmp_path / "whole")["test"]
    saved = load_file(tmp_path / "parts/checkpoints/last/params.safetensors")
    assert saved["state.steps"].item() == 20 * 8 * 3
    moments = [value for name, value in saved.items() if name.startswith("state.v.")]
    assert len(moments) == 6 and all((value >= 0).all() and value.max() > 0 for value in moments)


def test_a_run_begins_from_a_checkpoint_with_named_changes(whole: Path, tmp_path: Path) -> None:
    folder, donor = tmp_path / "run", whole / "checkpoints/last"
    changed = ("trainer.steps=100", f"resume={donor}", "optimizer.lr=0.01", "algorithm.inner_lr=0.02")
    named = "resume_changes=[optimizer.lr,algorithm.inner_lr]"
    assert "going on after step 80" in run(folder, *changed, named)
    assert [row["lr"] for row in metrics(folder) if row["split"] == "train"] == [pytest.approx(0.01)]
    assert params_of(folder) != params_of(whole)
    saved = json.loads((folder / "checkpoints/last/meta.json").read_text())
    assert saved["step"] == 100 and saved["config"]["algorithm"]["inner_lr"] == 0.02
    assert result_of(folder)["val"]["step"] == 100  # the donor's best is not ours


def test_a_run_goes_on_with_the_checkpoint_it_began_from(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, donor = tmp_path / "run", tmp_path / "donor"
    first, second = (f"resume={path}/checkpoints/last" for path in (whole, donor))
    run(donor, "trainer.steps=40")
    named = ("resume_changes=[optimizer.lr]", "optimizer.lr=0.01", "trainer.steps=100")
    run(folder, *named, first, "pause_after=90")
    output = run(folder, *named, first)
    assert "going on after step 90" in output and "rates so far" not in output
    done = "100 steps, "
    assert done in run(folder, *named, first) and done in run(folder, *named, "resume=auto", "resume_changes=[]")
    for place, begun in ((folder, second), (whole, second)):
        own = named if place == folder else ()
        assert train.main([*TINY, *own, begun, f"hydra.run.dir={place}"]) == 2
        message = f"{begun}: {place} holds a run that has not begun from this checkpoint; type run=NAME to"
        assert message in capsys.readouterr().err
    assert "going on after step 40" in run(tmp_path / "other", *named, second)


def test_a_run_that_has_saved_needs_its_first_checkpoint_no_more(whole: Path, tmp_path: Path) -> None:
    donor, folder = tmp_path / "donor", tmp_path / "run"
    shutil.copytree((whole / "checkpoints/best").resolve(), donor)
    begun = ("trainer.steps=20", f"init_from={donor}")
    run(folder, *begun, "pause_after=10")
    shutil.rmtree(donor)
    assert "going on after step 10" in run(folder, *begun)
    assert train.main([*TINY, *begun, f"hydra.run.dir={tmp_path / 'other'}"]) == 2  # which has no checkpoint


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("optimizer.lr=0.01", "type the same values, or 'resume_changes=[optimizer.lr]'"),
        ("optimizer.lr=0.01 algorithm.inner_lr=0.1 resume_changes=[algorithm.inner_lr]",
         "'resume_changes=[algorithm.inner_lr,optimizer.lr]'"),
        ("optimizer=sgd resume_changes=[optimizer]", "holds the state of another optimizer"),
        ("model.hidden=[20,20] resume_changes=[model]", "holds parameters of another model: "),
        ("optimizer.lr=0.01 resume_changes=[optimizer.rate]", "resume_changes=[optimizer.rate]: optimizer.rate: there"),
        ("optimizer.lr=0.01 resume_changes=optimizer.lr", "must be a list of keys; type 'resume_changes=["),
        ("optimizer.lr=0.01 resume_changes=[optimizer.lr] resume=auto", "needs the checkpoint to begin from"),
        ("pause_after=0", "pause_after=0: must be a whole number of at least 1"),
    ],
)  # fmt: skip
def test_what_is_not_named_or_does_not_fit_is_refused(
    overrides: str, message: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    own = overrides.split(" ")
    start = [] if "resume=auto" in own else [f"resume={whole / 'checkpoints/last'}"]
    assert train.main([*TINY, *start, *own]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


LIST_THREADS = """
import atexit, os, pathlib

def list_threads():
    if "RANK" in os.environ:
        names = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
        pathlib.Path(os.environ["THREADS"], os.environ["RANK"]).write_text("".join(names))

atexit.register(list_threads)
"""
"""A `sitecustomize.py`: a rank that ends normally lists its threads, of which torch's have names of their own."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are listed by /proc")
@slow
def test_no_thread_of_the_process_group_outlives_a_paused_run(start: Start, tmp_path: Path) -> None:
    """A thread that returns to Python while Python ends aborts the process: the run then counts as failed. torch's
    DistributedDataParallel, too, must not keep the group. Ranks are programs here, as on GPUs; a fork ends without
    Python's own end."""
    (tmp_path / "sitecustomize.py").write_text(LIST_THREADS)
    threads = tmp_path / "threads"
    threads.mkdir()
    outcome = start(
        *TINY, "experiment=supervised_glyphs", "strategy=ddp", "pause_after=1", "model.filters=8",
        torchrun=2, PYTHONPATH=str(tmp_path), THREADS=str(threads),
    ).wait()  # fmt: skip
    assert outcome.code == 0 and "paused after step 1" in outcome.text, outcome.text
    assert sorted(path.name for path in threads.iterdir()) == ["0", "1"]
    assert [path.read_text() for path in threads.iterdir() if "gloo" in path.read_text()] == []
