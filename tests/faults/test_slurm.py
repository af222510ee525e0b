"""A job whose time is over: it saves, is queued again, goes on, and has the bits of one that nobody stopped."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metalearn.app.job import script
from metalearn.app.sweep import run_sweep
from metalearn.config.compose import compose_config
from metalearn.errors import ConfigError
from tests.runs import ROOT, Program, Start, assert_same_bytes, children_of, metrics, slow, until
from tests.slurm import Slurm

pytestmark = pytest.mark.thorough

STEPS = 300

RUN = (
    "experiment=maml_sinusoid", f"trainer.steps={STEPS}", "trainer.meta_batch_size=8", "trainer.task_chunk=2",
    "trainer.val_every=100000", "trainer.val_tasks=8", "trainer.test_tasks=8", "logger.every=1",
    "logger.tensorboard=false", "logger.plots=false", "logger.report=false", "checkpoint.every=100000",
)  # fmt: skip
"""Only a stop, and the end, save."""

SWEEP = ("--multirun", *RUN, "hydra.sweep.dir=sweep", "hydra.sweep.subdir=run")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    outcome = Program([sys.executable, str(ROOT / "train.py"), *RUN, "hydra.run.dir=run"], folder).wait()
    assert outcome.code == 0, outcome.text
    return folder / "run"


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    made = Slurm(tmp_path / "slurm")
    yield made
    made.stop()


def saved_step(run_dir: Path) -> int:
    """The step of the only checkpoint of a run that was stopped once; 0 as long as there is none."""
    return next((int(path.name[5:]) for path in run_dir.glob("checkpoints/step_*")), 0)


@slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_of_submitit_saves_is_requeued_and_goes_on(
    workers: int, start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    """Its process and those of its workers get the signal, as from Slurm."""
    pytest.importorskip("submitit")
    run_dir = tmp_path / "sweep/run"
    program = start(*SWEEP, "hydra/launcher=submitit_local", f"workers={workers}")
    until(lambda: len(metrics(run_dir)) > 20, "the first steps")
    (controller,) = (int(path.name) for path in (tmp_path / "sweep/.submitit").glob("[0-9]*"))
    (task,) = children_of(controller)
    for process in (task, *children_of(task)):
        os.kill(process, signal.SIGUSR2)
    outcome = program.wait()
    assert outcome.code == 0, outcome.text
    log = (run_dir / "train.log").read_text()
    assert "saving, then stopping" in log and "going on after step" in log
    assert_same_bytes(run_dir, undisturbed)


@slow
@pytest.mark.parametrize("strategy", ["rpc", "ddp"])
def test_a_job_on_two_nodes_is_requeued_by_submitit(
    strategy: str, slurm: Slurm, start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    pytest.importorskip("submitit")
    run_dir = tmp_path / "sweep/run"
    nodes = ("hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2", "launch=slurm", "launch.interface=lo")
    program = start(*SWEEP, *nodes, "workers=2", f"strategy={strategy}", **slurm.environment)
    until(lambda: len(metrics(run_dir)) > 20, "the first steps")
    slurm.signal_tasks(signal.SIGUSR2)
    until(lambda: slurm.requeued() == 1, "the requeue")
    assert 20 < saved_step(run_dir) < STEPS
    outcome = program.wait()
    assert outcome.code == 0, outcome.text
    until(slurm.ended, "the end of the job")
    assert "going on after step" in (run_dir / "train.log").read_text()
    assert_same_bytes(run_dir, undisturbed)


@slow
@pytest.mark.parametrize("strategy", ["rpc", "ddp"])
def test_the_batch_script_requeues_a_job_on_two_nodes(
    strategy: str, slurm: Slurm, tmp_path: Path, undisturbed: Path
) -> None:
    script = shutil.copy(ROOT / "deploy/slurm/train.sbatch", tmp_path)
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    own = (*RUN, "hydra.run.dir=run", f"strategy={strategy}", "launch.interface=lo")
    outcome = Program([str(tmp_path / "slurm/sbatch"), str(script), *own], tmp_path, slurm.environment).wait()
    assert outcome.text == "Submitted batch job 7\n", outcome.text
    until(lambda: len(metrics(tmp_path / "run")) > 20, "the first steps")
    slurm.signal_batch(signal.SIGUSR1)
    until(lambda: slurm.requeued() == 1, "the requeue")
    assert 20 < saved_step(tmp_path / "run") < STEPS
    until(slurm.ended, "the end of the job")
    output = (tmp_path / "slurm/output").read_text()
    assert "going on after step" in output, output
    assert_same_bytes(tmp_path / "run", undisturbed)


def test_a_host_without_slurm_is_named(start: Start, tmp_path: Path) -> None:
    outcome = start(*SWEEP, "hydra/launcher=submitit_slurm", PATH=str(tmp_path)).wait()
    assert outcome.code == 2 and "this host has no srun" in outcome.text, outcome.text
    assert not (tmp_path / "sweep").exists()


def test_a_launcher_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hydra_plugins.hydra_submitit_launcher", None)
    with pytest.raises(ConfigError, match="is not installed; type pip install hydra-submitit-launcher"):
        run_sweep(script(ROOT / "train.py"), [*SWEEP[1:], "hydra/launcher=submitit_slurm"], lambda job: 0)


def test_the_hosts_are_those_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"JOB_NUM_NODES": "4", "NODEID": "3", "LAUNCH_NODE_IPADDR": "10.0.0.1", "JOB_ID": "123456"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    launch = compose_config(["launch=slurm", "workers=8"])[0].launch
    found = (launch.nnodes, launch.node_rank, launch.master_addr, launch.master_port)
    assert found == (4, 3, "10.0.0.1", 23456)
