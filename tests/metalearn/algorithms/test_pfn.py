"""Prior-fitted networks: they approach an exact posterior, through the trainer's own computation of chunks."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.priors import gaps
from metalearn.algorithms.pfn import pfn
from metalearn.cli import train
from metalearn.models.table import table
from metalearn.types import Batch, Episode
from tests.runs import ROOT, Program, assert_same_bytes, metrics, slow, train_in, until

SMALL = ("experiment=pfn_gp", "model.width=16", "model.layers=1", "dataset.group=4", "trainer.meta_batch_size=16",
         "trainer.val_tasks=8", "trainer.test_tasks=8", "logger.plots=false", "logger.report=false",
         "logger.tensorboard=false")  # fmt: skip


def test_it_learns_the_mean_of_one_known_value() -> None:
    """y is a constant plus noise of the same variance: given y₁, the best answer is N(y₁ / 2, 3 / 2)."""
    learner = pfn(model=table(head="gaussian", width=8, heads=1, layers=1, standardize=False))
    params = {name: value.requires_grad_() for name, value in learner.init(torch.Generator().manual_seed(0)).items()}
    outer = torch.optim.Adam(params.values(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)

    def batch() -> Episode:
        y = torch.randn(256, 1, 1, generator=generator) + torch.randn(256, 3, 1, generator=generator)
        return Episode(Batch(torch.zeros(256, 1, 1), y[:, :1]), Batch(torch.zeros(256, 2, 1), y[:, 1:]))

    for step in range(120):
        grads = learner.meta_grad({k: v.detach() for k, v in params.items()}, batch(), step).grads
        for name, value in params.items():
            value.grad = grads[name] / 256
        outer.step()
    end, y = {name: value.detach() for name, value in params.items()}, torch.tensor([-1.5, 0.0, 1.0])
    support = Batch(torch.zeros(3, 1, 1), y.view(3, 1, 1))
    reads = table(head="gaussian", width=8, heads=1, layers=1, standardize=False).in_context
    assert reads is not None
    mean, log_sd = reads.outputs(end, support, torch.zeros(3, 1, 1))[:, 0].unbind(1)
    np.testing.assert_allclose(mean, y / 2, atol=0.15)
    np.testing.assert_allclose(log_sd.exp() ** 2, 1.5, atol=0.25)


def test_the_gap_of_a_run_is_that_of_its_test_loss(tmp_path: Path) -> None:
    """Without a step, the network knows nothing: its gap is far above 0, and every number of known points has one."""
    assert (
        train.main([*SMALL, "model.head=bars", "trainer.steps=1", "trainer.val_every=1", f"hydra.run.dir={tmp_path}/r"])
        == 0
    )
    found = gaps(f"{tmp_path}/r", 10)
    assert found["gap"]["exact"] > found["gap"]["exact in bars"] > 0.05
    assert list(found["by_known"]) == [1, 2, 5, 10, 20, 40]


@slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_workers_and_a_kill_change_no_bit(tmp_path: Path, precision: str) -> None:
    keys = (*SMALL, f"precision={precision}", "trainer.steps=40", "trainer.val_every=40", "checkpoint.every=2",
            "logger.every=1")  # fmt: skip
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    train_in(alone, *keys)
    for workers in (2, 4):
        train_in(tmp_path / str(workers), *keys, f"workers={workers}")
        assert_same_bytes(tmp_path / str(workers), alone)
    program = Program([sys.executable, str(ROOT / "train.py"), f"hydra.run.dir={killed}", *keys, "workers=2"], tmp_path)
    until(lambda: len(metrics(killed)) >= 5, "step 5")
    program.kill()
    assert not (killed / "result.json").exists()
    train_in(killed, *keys)
    assert_same_bytes(killed, alone)


@slow
def test_a_shared_prior_is_learned_in_a_minute(tmp_path: Path) -> None:
    """The gap to the exact posterior falls below a tenth of a nat."""
    run = f"hydra.run.dir={tmp_path}/r"
    keys = ("trainer.steps=400", "trainer.val_every=400", "trainer.val_tasks=64", "trainer.test_tasks=64")
    assert train.main(["experiment=pfn_gp", *keys, "logger.plots=false", "logger.report=false", run]) == 0
    assert gaps(f"{tmp_path}/r", 100)["gap"]["exact"] < 0.1


def test_the_best_validation_is_that_of_the_least_loss(tmp_path: Path) -> None:
    assert train.main([
        *SMALL[1:], "experiment=pfn_own", "dataset.prior=tests.own_prior", "plugins=[tests]", "trainer.steps=8",
        "trainer.val_every=1", "checkpoint.keep_best=2", "optimizer.warmup=0", "optimizer.lr=0.01", "logger.every=1",
        f"hydra.run.dir={tmp_path}/r",
    ]) == 0  # fmt: skip
    rows = [row for row in metrics(tmp_path / "r") if row["split"] == "val"]
    by_loss = sorted(rows, key=lambda row: row["loss"])
    assert max(rows, key=lambda row: row["accuracy"])["step"] != by_loss[0]["step"], "else nothing is shown"
    assert json.loads((tmp_path / "r/result.json").read_text())["val"]["step"] == by_loss[0]["step"]
    kept = [(tmp_path / "r/checkpoints" / name).resolve().name for name in ("best", "best_2")]
    assert [int(name.partition("_")[2]) for name in kept] == [row["step"] for row in by_loss[:2]]
