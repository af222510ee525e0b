"""The average of the meta-parameters over the steps: its values, and runs with it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from metalearn.training.optimizers import Rates, sgd
from metalearn.training.trainer import Average, TrainState
from metalearn.types import Params
from tests.runs import slow, train_in

DECAY, STEPS = 0.8, 7
START = sgd(rates=Rates(1), momentum=0).start


def drawn(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3, generator=generator, dtype=torch.float64) for name in ("w", "state.v")}


def weighted(values: Sequence[Tensor]) -> Tensor:
    """The average of the values after each step, by its definition."""
    weights = [DECAY ** (len(values) - step) for step in range(1, len(values) + 1)]
    terms = [weight * value for weight, value in zip(weights, values, strict=True)]
    return torch.stack(terms).sum(dim=0) / sum(weights)


def test_it_is_the_weighted_mean_of_all_steps() -> None:
    average = Average(DECAY, drawn(0))
    assert torch.equal(average.params["w"], drawn(0)["w"])
    for step in range(1, STEPS + 1):
        average.add(drawn(step))
        expected = weighted([drawn(i)["w"] for i in range(1, step + 1)])
        torch.testing.assert_close(average.params["w"], expected, rtol=1e-14, atol=1e-15)
        assert torch.equal(average.params["state.v"], drawn(step)["state.v"])


def test_a_checkpoint_has_the_average_and_the_latest() -> None:
    learner = TrainState.new(drawn(1), START, DECAY)
    assert learner.average is not None
    learner.average.add(drawn(1))
    learner.average.add(drawn(2))
    saved = learner.snapshot({}, {})
    assert torch.equal(saved.params["w"], learner.average.params["w"])
    with_average = TrainState.restored(saved, START, DECAY)
    assert torch.equal(with_average.params["w"], drawn(1)["w"])
    assert with_average.average is not None
    with_average.average.add(drawn(3))
    learner.average.add(drawn(3))
    assert torch.equal(with_average.average.params["w"], learner.average.params["w"])
    without = TrainState.restored(saved, START)
    assert without.average is None and torch.equal(without.evaluated["w"], drawn(1)["w"])


def test_one_that_was_not_saved_begins_at_the_next_step() -> None:
    saved = TrainState.new(drawn(1), START).snapshot({}, {})
    learner = TrainState.restored(saved, START, DECAY)
    assert learner.average is not None
    learner.average.add(drawn(2))
    assert torch.equal(learner.evaluated["w"], drawn(2)["w"])


TINY = (
    "experiment=maml_sinusoid", "trainer.steps=7", "trainer.meta_batch_size=8", "trainer.val_every=4",
    "trainer.val_tasks=20", "trainer.test_tasks=20", "trainer.task_chunk=4", "checkpoint.every=1",
    "checkpoint.keep=10", "precision=float64", "logger.tensorboard=false", "logger.plots=false", "logger.report=false",
)  # fmt: skip


def run(folder: Path, *overrides: str, code: int = 0) -> str:
    return train_in(folder, *TINY, *overrides, code=code)


def params_of(folder: Path, step: int) -> Params:
    return load_file(folder / f"checkpoints/step_{step:06d}/params.safetensors")


@slow
def test_the_average_is_that_of_an_unpaused_run(tmp_path: Path) -> None:
    plain, averaged = tmp_path / "plain", tmp_path / "averaged"
    run(plain)
    run(averaged, f"trainer.ema_decay={DECAY}", "workers=2", "strategy=ddp", "pause_after=3")
    run(averaged, f"trainer.ema_decay={DECAY}")
    latest = [params_of(plain, step) for step in range(1, STEPS + 1)]
    for name, value in params_of(averaged, STEPS).items():
        torch.testing.assert_close(value, weighted([params[name] for params in latest]), rtol=1e-12, atol=1e-14)
    state = torch.load(averaged / "checkpoints/last/state.pt", weights_only=True)
    assert all(torch.equal(value, latest[-1][name]) for name, value in state["average"]["latest"].items())


@pytest.mark.parametrize("key", ["trainer.ema_decay=0.9", "optimizer.clip_norm=1"])
def test_a_split_network_has_no_average_and_no_clipping(key: str, tmp_path: Path) -> None:
    message = run(tmp_path / "run", "experiment=split_omniglot", "dataset=glyph_characters", key, code=2)
    assert "strategy=split" in message
