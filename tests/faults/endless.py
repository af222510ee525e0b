"""A run without end, to which the tests of this room do harm."""

from pathlib import Path

from tests.runs import Program, metrics, ranks_of, result_of, train_in, until

ENDLESS = (
    "run=seed0", "trainer.steps=100000", "trainer.meta_batch_size=6", "trainer.task_chunk=2",
    "trainer.val_every=100000", "trainer.val_tasks=4", "checkpoint.every=2", "logger.every=1",
    "logger.tensorboard=false", "logger.plots=false", "logger.report=false", "model.filters=16",
)  # fmt: skip

RUN = Path("outputs/maml_glyphs/seed0")
"""Its folder."""

TOGETHER = {
    "ddp-maml": ("strategy=ddp",),
    "ddp-supervised": ("strategy=ddp", "experiment=supervised_glyphs", "trainer.meta_batch_size=20"),
    "split": ("strategy=split", "experiment=supervised_glyphs", "trainer.meta_batch_size=20"),
}
"""Ways in which all ranks step together; the run's folder must be named, since they are other experiments."""


def started(program: Program, folder: Path, steps: int = 3) -> list[int]:
    """Waits until the run has made some steps; returns the processes of its ranks."""
    until(lambda: len(metrics(folder / RUN)) >= steps, f"step {steps}")
    return ranks_of(program)


def paused_alike(program: Program, folder: Path) -> str:
    """Pauses a run; returns what it says. A run of one process has the same parameters after as many steps."""
    (folder / RUN / "stop").touch()
    outcome = program.wait()
    assert outcome.code == 0, outcome.text
    assert not (folder / RUN / "world.json").exists()
    steps = result_of(folder / RUN)["steps"]
    train_in(folder / "alone", *ENDLESS, "workers=1", f"pause_after={steps}")
    params = [(run / "checkpoints/last/params.safetensors").read_bytes() for run in (folder / RUN, folder / "alone")]
    assert params[0] == params[1]
    return outcome.text
