"""What may go wrong with a run's folder: kills, a full disk, a folder that moves, a clock that goes back."""

import errno
import fcntl
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from metalearn.app import ranks
from metalearn.app.job import installed, to_job
from metalearn.cli import train
from metalearn.config.compose import compose_config
from metalearn.errors import ConfigError, DiskError
from metalearn.reporting.logging import RunLog, Window, detach, log_to_file, run_log
from metalearn.runs import checkpoint, folder
from metalearn.storage.files import holder_of
from tests.runs import Start, metrics, result_of, until

TINY = (
    "experiment=maml_sinusoid", "run=seed0", "trainer.steps=80", "trainer.meta_batch_size=8", "trainer.val_every=40",
    "trainer.val_tasks=20", "trainer.test_tasks=20", "trainer.task_chunk=4", "logger.tensorboard=false",
    "logger.plots=false", "logger.report=false",
)  # fmt: skip

RUN = Path("outputs/maml_sinusoid/seed0")

KILLED_BEFORE_THE_LINKS = """
import os, signal, sys
def kill(event, arguments):
    if event == "os.symlink" and arguments[0] == "step_000080":
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
"""


@pytest.mark.thorough
def test_a_kill_before_the_links_changes_no_result(start: Start, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(KILLED_BEFORE_THE_LINKS)
    assert start(*TINY, PYTHONPATH=str(tmp_path)).wait().code == -9
    checkpoints = tmp_path / RUN / "checkpoints"
    assert (checkpoints / "step_000080/manifest.json").exists() and str(
        (checkpoints / "best").readlink()
    ) != "step_000080"
    (tmp_path / RUN / "plots").touch()  # where a folder is to be made
    (tmp_path / RUN / "report.html").mkdir()  # where a file is to be made
    resumed = start(*TINY, "logger.plots=true", "logger.report=true").wait()
    assert resumed.code == 0, resumed.text
    assert all(f"{RUN}/{name}: cannot be drawn" in resumed.text for name in ("plots", "report.html")), resumed.text
    result = result_of(tmp_path / RUN)
    assert {str((checkpoints / name).readlink()) for name in ("best", "last")} == {"step_000080"}
    tested = [row for row in metrics(tmp_path / RUN) if row["split"] == "test"]
    assert result["val"]["step"] == 80 and result["test"]["mse"] == pytest.approx(tested[0]["mse"])


# Files that cannot be written


def test_the_holder_of_a_folder_is_named_and_a_kill_frees_it(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with folder.lock(tmp_path):
            signal.pause()
    until(lambda: str(pid) in holder_of(tmp_path / folder.LOCK), "the lock")
    with pytest.raises(ConfigError, match=f"in use by process {pid} on "), folder.lock(tmp_path):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with folder.lock(tmp_path):
        pass


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log messages of metalearn, also where an earlier test has kept them from the root logger."""
    monkeypatch.setattr(logging.getLogger("metalearn"), "propagate", True)
    return caplog


def test_without_locks_a_run_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: pytest.LogCaptureFixture
) -> None:
    def no_locks(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with folder.lock(tmp_path / "run"):
        assert f"{tmp_path}/run/.lock: its file system has no locks (No locks available)" in messages.text


def test_a_log_on_a_full_disk_ends_the_run_at_its_next_step(
    messages: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    logger = logging.getLogger("metalearn")
    monkeypatch.setattr(logger, "handlers", [])
    log = run_log(every=10, plots=False)(tmp_path, Window(0, 0, 20, 4))
    handler = log_to_file(Path("/dev/full"))
    logger.propagate = True
    for number in range(3):
        logger.info("message %d", number)
    with pytest.raises(DiskError, match=r"/dev/full: cannot be written: No space left on device \(\d.* make room"):
        log.step(1, {"loss": 1.0, "step_seconds": 0.1})
    log.close()
    detach(handler)
    assert [record.levelname for record in messages.records] == ["INFO"] * 3
    assert "Traceback" not in capfd.readouterr().err


def test_a_config_that_was_cut_does_not_stop_the_start(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "train.log").touch()
    config = OmegaConf.create({"resume": "auto", "trainer": {"steps": 5}})
    for content in (b"trainer: {steps: 5", b"\xff\xfe", b"\0\0\0\0", b"- 1", b""):
        (tmp_path / ".hydra/config.yaml").write_bytes(content)
        assert folder.inspect(tmp_path, config, {}, lambda saved: None).snapshot is None, content


def test_a_run_without_a_checkpoint_keeps_its_config(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "train.log").touch()
    (tmp_path / ".hydra/config.yaml").write_text("trainer: {steps: 5}\nmodel: {name: resnet18, weights: null}\n")
    model = {"name": "resnet18", "weights": None}
    now = {"resume": "auto", "trainer": {"steps": 5}, "model": model}
    assert folder.inspect(tmp_path, OmegaConf.create(now), {}, lambda saved: None).snapshot is None
    for name, value in (("weights", "file"), ("frozen", False)):
        other = now | {"model": model | {name: value}}
        with pytest.raises(ValueError, match=rf"model\.{name}"):
            folder.inspect(tmp_path, OmegaConf.create(other), {}, lambda saved: None)


# The log of a run that goes on


def logged(log: RunLog, steps: range) -> None:
    for step in steps:
        log.step(step, {"loss": 1 / step, "step_seconds": 0.1})


def test_a_line_covers_the_steps_before_a_resume_too(tmp_path: Path) -> None:
    open_log = run_log(every=10, tensorboard=False, plots=False)
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    whole = open_log(tmp_path / "whole", Window(0, 0, 20, 4))
    logged(whole, range(1, 21))
    killed = open_log(tmp_path / "resumed", Window(0, 0, 20, 4))
    logged(killed, range(1, 8))
    saved = killed.saved()["pending"]
    logged(killed, range(8, 13))
    resumed = open_log(tmp_path / "resumed", Window(7, 7, 20, 4, pending=saved))
    logged(resumed, range(8, 21))
    for log in (whole, killed, resumed):
        log.close()
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "whole")
    assert [row["step"] for row in metrics(tmp_path / "whole")] == [10, 20]


def test_long_runs_log_a_line_and_an_event_every_so_many_steps(tmp_path: Path) -> None:
    log = run_log(every=100, tensorboard=True, plots=False)(tmp_path, Window(0, 0, 20_000, 4))
    logged(log, range(1, 20_001))
    log.close()
    expected = list(range(100, 20_001, 100))
    assert len(expected) == 200 and [row["step"] for row in metrics(tmp_path)] == expected
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [event.step for event in events] == expected


def test_lines_that_are_not_those_of_the_run_are_reported(tmp_path: Path, messages: pytest.LogCaptureFixture) -> None:
    open_log = run_log(every=1, tensorboard=False, plots=False)
    log = open_log(tmp_path, Window(0, 0, 20, 4))
    logged(log, range(1, 6))
    digest = log.saved()["digest"]
    logged(log, range(6, 9))  # after the checkpoint
    log.close()
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    for content, warned in ((whole, False), (whole[:150], True), (whole.replace('"loss": 0.5', '"loss": 0.4'), True)):
        messages.clear()
        path.write_text(content)
        open_log(tmp_path, Window(5, 5, 20, 4, digest=digest)).close()
        warning = f"{path}: its lines up to step 5 are not those that this run has written"
        assert (warning in messages.text) == warned, content


# Going back under torchrun


def test_torchrun_goes_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "checkpoints/step_000010"
    own.mkdir(parents=True)
    (tmp_path / "checkpoints/step_000020").mkdir()

    def started(run_id: str, restarts: int) -> bool:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        return folder.rewinds(tmp_path, str(own))

    assert started("first", 0) and started("first", 1)  # it failed before it went back
    checkpoint.rewind(tmp_path, 10)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_000010"]
    assert not started("first", 1) and not started("first", 2)
    assert started("second", 0) and started("second", 1)
    assert started("first", 0)  # the same command once more


def test_a_job_that_slurm_has_queued_again_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments of its first start, and under torchrun, which counts from 0 again."""
    own = tmp_path / "checkpoints/step_000010"
    own.mkdir(parents=True)
    (tmp_path / ".hydra").mkdir()
    config = compose_config(["resume=never"]).config
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(ConfigError, match=r"resume=never: .* is not empty"):
        folder.inspect(tmp_path, config, {}, lambda saved: None)
    assert folder.rewinds(tmp_path, str(own))
    checkpoint.rewind(tmp_path, 10)
    assert folder.rewinds(tmp_path, str(own)), "the same command once more, in the same job"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert not folder.rewinds(tmp_path, str(own))
    shutil.rmtree(tmp_path / "checkpoints")
    assert folder.inspect(tmp_path, config, {}, lambda saved: None).snapshot is None


def test_a_restart_does_not_refuse_the_folder_of_the_first_start() -> None:
    """With launch.max_restarts the same arguments are run again; resume=never is a condition of the first start."""
    overrides = ["resume=never", "workers=2"]
    job = to_job(*compose_config(overrides), installed(), overrides)
    again = ranks.job_of_ranks(job, folder.FolderState(None, None, False))
    assert again.arguments == [*overrides, "resume=auto"]
    assert (job.config.resume, again.config.resume) == ("never", "auto")
    assert again.whole is not None
    assert again.whole.resume == "auto"
    assert again.whole.hydra.overrides.task == again.arguments


def test_a_grid_whose_folder_cannot_be_written_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "multirun.yaml").mkdir()  # where Hydra writes a file, also if this user may write anywhere
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert train.main(["--multirun", *TINY[:2], "seed=0,1", f"hydra.sweep.dir={tmp_path}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}/multirun.yaml: cannot be written: ") and error.count("\n") == 1
    assert not list(tmp_path.glob("*/.hydra"))
