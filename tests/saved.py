"""Runs that are saved before their first step: real folders without the time that training takes."""

from pathlib import Path

from metalearn.config.compose import compose_config, to_container
from metalearn.program.job import script, to_job
from metalearn.program.parts import Parts, assemble
from metalearn.runs.checkpoint import write
from metalearn.training.loop import Progress, new_learner, snapshot
from tests.runs import ROOT


def saved_run(run_dir: Path, *overrides: str) -> Parts:
    """Makes the run folder, with one checkpoint, to which `best` points; returns what the run is made of."""
    composed = compose_config([*overrides, f"hydra.run.dir={run_dir}"])
    parts = assemble(to_job(*composed, script(ROOT / "train.py"), []))
    learner = new_learner(parts.start, parts.outer.start)
    (run_dir / ".hydra").mkdir(parents=True)
    (run_dir / ".hydra/config.yaml").write_text("seed: 0\n")
    checkpoint = write(run_dir / "checkpoints", snapshot(learner, Progress(), to_container(composed.config), {}))
    (run_dir / "checkpoints/best").symlink_to(checkpoint.name)
    return parts
