"""A run without end, to which the tests of this room do harm."""

from pathlib import Path

from tests.runs import Program, metrics, ranks_of, until

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
