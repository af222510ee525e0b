"""SIGKILL of all processes of a run, at random moments: the same command always ends with the undisturbed bytes."""

import random
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.runs import ROOT, Program, Start, assert_same_bytes, metrics, slow, until

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

KILLS = 20

STEPS = 2000

RUN = (
    "experiment=maml_sinusoid", f"trainer.steps={STEPS}", "trainer.meta_batch_size=8", "trainer.task_chunk=2",
    "trainer.val_every=10", "trainer.val_tasks=40", "trainer.test_tasks=40", "checkpoint.every=3", "logger.every=4",
    "logger.plots=false", "logger.report=false", "hydra.run.dir=run",
)  # fmt: skip
"""Validations, checkpoints and log lines fall on different steps."""


def what_it_says(run_dir: Path) -> list[dict[str, object]]:
    """The lines of metrics.jsonl, without the costs."""
    return [
        {name: row.get(name) for name in ("step", "split", "loss", "mse", "learning_rate")} for row in metrics(run_dir)
    ]


@slow
def test_twenty_random_kills_leave_the_undisturbed_bytes(start: Start, tmp_path: Path) -> None:
    """Moments are drawn after the next few steps, and now and then from the start of the program on."""
    run_dir, alone = tmp_path / "run", tmp_path / "alone"
    draw = random.Random(0)
    resumed = []
    for kill in range(KILLS):
        program = start(*RUN, f"workers={1 + kill % 2}")
        if kill % 4 == 3:
            time.sleep(draw.uniform(0, 3))
        else:
            done = max((row["step"] for row in metrics(run_dir)), default=0)
            until(lambda done=done: metrics(run_dir) and metrics(run_dir)[-1]["step"] > done, f"a step after {done}")
            time.sleep(draw.uniform(0, 0.1))
        assert program.process.poll() is None, program.said()
        program.kill()
        resumed.append("going on after step" in program.said())
    outcome = start(*RUN).wait()
    assert outcome.code == 0 and "going on after step" in outcome.text, outcome.text
    assert sum(resumed) >= KILLS / 2, resumed
    undisturbed = Program([sys.executable, str(ROOT / "train.py"), *RUN, f"hydra.run.dir={alone}"], tmp_path).wait()
    assert undisturbed.code == 0, undisturbed.text
    assert_same_bytes(run_dir, alone, "checkpoints/best/params.safetensors")
    assert what_it_says(run_dir) == what_it_says(alone)
    events = EventAccumulator(str(run_dir)).Reload().Scalars("train/loss")
    assert [event.step for event in events] == list(range(4, STEPS + 1, 4))
