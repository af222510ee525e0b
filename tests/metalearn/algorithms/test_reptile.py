"""Reptile: its mini-batches, and the Adam that it carries from task to task. It is in the property table
(test_algorithms.py), too."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from distributed.reduce import mean_of_sums
from metalearn.algorithms.common import inner
from metalearn.algorithms.reptile import mini_batches, reptile
from metalearn.training.optimizers import Rates
from metalearn.training.optimizers import sgd as outer_sgd
from metalearn.training.trainer import TrainState, meta_gradient
from metalearn.types import Algorithm, Batch, Episode, Params
from tests.metalearn import written_out
from tests.metalearn.learners import FLOAT64, close, network, part_of, random, tasks


def test_mini_batches_take_the_classes_in_turn() -> None:
    y = torch.tensor([[0, 1, 2, 0, 0, 1, 1, 2, 2]])
    batch_of = mini_batches(Batch(torch.arange(9.0).view(1, 9, 1), y), 4)
    batches = [batch_of(step) for step in range(3)]
    assert [batch.y[0].tolist() for batch in batches] == [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert [batch.x.flatten().tolist() for batch in batches] == [[0, 1, 2], [3, 5, 7], [4, 6, 8]]


ONE_ADAM = {"betas": (0.0, 0.9), "eps": 1e-3}


def carrying(meta_batch: int, **changes: object) -> Algorithm:
    chosen = {"inner_lr": 0.05, "inner_steps": 3, "eval_steps": 2, "inner_batch": None, "eval_batch": None} | changes
    optimizer = inner.adam(beta1=0.0, beta2=0.9, eps=1e-3)
    return reptile(
        model=network(filters=2),
        inner=optimizer,
        inner_state="carried",
        meta_batch=meta_batch,
        **chosen,  # type: ignore[arg-type]
    )


def stepped(learner: Algorithm, params: Params, episodes: list[Episode], rate: float) -> Params:
    """The meta-parameters after a meta-step of the training loop on each episode, by gradient descent."""
    trained = TrainState.new(params, outer_sgd(rates=Rates(rate), momentum=0.0).start)
    for step, episode in enumerate(episodes, start=1):
        now = {name: value.detach() for name, value in trained.params.items()}
        halves = [learner.meta_grad(now, part_of(learner, episode, [i]), step) for i in range(len(episode.query.y))]
        trained.update(dict.__or__(*meta_gradient(mean_of_sums, halves)), rate)
    return {name: value.detach() for name, value in trained.params.items()}


def test_reptile_carries_one_adam_into_every_test_task() -> None:
    """One task a step: torch's Adam goes on from task to task, and from the training into each test task."""
    learner, trained = carrying(1), tasks(5)
    start = {name: value.double() for name, value in learner.init(Generator().manual_seed(0)).items()}
    ours = stepped(learner, start, [part_of(learner, trained, [i]) for i in range(5)], rate=0.5)
    plain = {name: value for name, value in start.items() if not name.startswith("state.")}
    theta, phi, adam = written_out.reptile_with_one_adam(
        plain, trained, steps=3, rate=0.5, adam=lambda params: torch.optim.Adam(params, lr=0.05, **ONE_ADAM)
    )
    moments = {f"state.v.{name}": adam.state[value]["exp_avg_sq"] for name, value in phi.items()}
    close(ours, theta | moments | {"state.steps": torch.tensor([15.0], dtype=FLOAT64)}, atol=1e-11)

    evaluated = tasks(2, seed=90)
    losses, before = [], copy.deepcopy(adam.state_dict())
    for sx, sy, qx, qy in written_out.tasks_of(evaluated):
        with torch.no_grad():
            for name, value in phi.items():
                value.copy_(theta[name])
        adam.load_state_dict(copy.deepcopy(before))
        losses += [
            F.cross_entropy(written_out.conv4(phi, qx, qx), qy).item()
            for _ in itertools.chain([None], written_out.conv4_with(phi, adam, sx, sy, 2))
        ]
    assert learner.evaluate(ours, evaluated)["loss"].flatten().tolist() == pytest.approx(losses, abs=1e-11)


def adam_after(done: int, moments: Params) -> Callable[[list[Tensor]], torch.optim.Adam]:
    """Makes torch's Adam as it is after `done` steps, with these second moments of the parameters in their order."""

    def adam(params: list[Tensor]) -> torch.optim.Adam:
        optimizer = torch.optim.Adam(params, lr=0.05, **ONE_ADAM)
        for value, moment in zip(params, moments.values(), strict=True):
            steps = torch.tensor(float(done))
            optimizer.state[value] = {"step": steps, "exp_avg": torch.zeros_like(value), "exp_avg_sq": moment.clone()}
        return optimizer

    return adam


def test_tasks_of_a_step_start_from_the_same_carried_adam() -> None:
    """Three tasks a step, of three inner steps: v ← β⁹ v + (1 − β⁹) / (1 − β³) · mean (u − β³ v), by torch's Adam."""
    learner, episodes = carrying(3), [tasks(3), tasks(3, seed=20)]
    start = {name: value.double() for name, value in learner.init(Generator().manual_seed(0)).items()}
    ours = stepped(learner, start, episodes, rate=0.5)
    theta = {name: value for name, value in start.items() if not name.startswith("state.")}
    moments, done = {name: torch.zeros_like(value) for name, value in theta.items()}, 0
    for episode in episodes:
        ends, added = [], []
        for number in range(3):
            task = part_of(learner, episode, [number])
            end, phi, used = written_out.reptile_with_one_adam(
                theta, task, steps=3, rate=1.0, adam=adam_after(done, moments)
            )
            ends.append(end)
            added.append({k: used.state[value]["exp_avg_sq"] - 0.9**3 * moments[k] for k, value in phi.items()})
        theta = {k: value + 0.5 * (sum(end[k] for end in ends) / 3 - value) for k, value in theta.items()}
        mean = {k: sum(one[k] for one in added) / 3 for k in theta}
        moments = {k: 0.9**9 * v + (1 - 0.9**9) / (1 - 0.9**3) * mean[k] for k, v in moments.items()}
        done += 9
    expected = theta | {f"state.v.{name}": value for name, value in moments.items()}
    close(ours, expected | {"state.steps": torch.tensor([18.0], dtype=FLOAT64)}, atol=1e-11)


def test_uneven_mini_batches_have_all_classes_if_they_can() -> None:
    """5 ways in batches of 9, 8 and 8 of 25 pictures: in each, a class is once or twice, and no class is favoured."""
    x, y = random(300, 25, 1, seed=1), torch.arange(5).repeat_interleave(5).repeat(300, 1)
    batch_of = mini_batches(Batch(x, y), 10)
    counts = [torch.stack([labels.bincount(minlength=5) for labels in batch_of(step).y]) for step in range(3)]
    assert [int(count[0].sum()) for count in counts] == [9, 8, 8]
    assert all(count.min() >= 1 and count.max() <= 2 for count in counts)
    assert torch.equal(counts[0] + counts[1] + counts[2], torch.full((300, 5), 5))
    twice = (counts[2] == 2).sum(dim=0)  # 180 ± 8.5 each
    assert twice.min() > 140 and twice.max() < 220


def test_classes_of_other_sizes_are_shuffled_by_task() -> None:
    """In turn, the last batches of nine samples of one class and three of another would always be of the first."""
    y = torch.tensor([[0] * 9 + [1] * 3, [0, 1] * 6])
    x = random(2, 12, 1, seed=1).half()  # whose bits are the seeds, too
    batch_of = mini_batches(Batch(x, y), 2)
    last = torch.stack([batch_of(6 * number + 5).y for number in range(40)])
    assert last[:, 0].float().mean() == pytest.approx(0.25, abs=0.15)
    assert torch.equal(last[:, 1].sort(dim=1).values, torch.tensor([[0, 1]]).expand(40, 2))
    alone = mini_batches(Batch(x[:1], y[:1]), 2)
    assert all(torch.equal(alone(6 * number + 5).y[0], last[number, 0]) for number in range(40))


@pytest.mark.parametrize(("each", "size"), [(1, 5), (3, 30)])
def test_an_uneven_mini_batch_has_no_favourite_labels(each: int, size: int) -> None:
    """20 ways in batches of 5 of 20 pictures, or of 30 of 60: every pass has each sample once, in an order of its own;
    each label is equally often in the last batch. If the classes took turns, it would always be the same labels."""
    x = random(400, 20 * each, 1, seed=1)
    y = torch.arange(20).repeat_interleave(each).repeat(400, 1)
    batch_of = mini_batches(Batch(x, y), size)
    count = -(-20 * each // size)
    passes = [torch.cat([batch_of(count * number + place).x for place in range(count)], dim=1) for number in range(2)]
    assert all(torch.equal(part.sort(dim=1).values, x.sort(dim=1).values) for part in passes)
    assert not (passes[0] == passes[1]).flatten(1).all(dim=1).any()
    last = batch_of(2 * count - 1)
    places = (last.x == x.transpose(1, 2)).long().argmax(dim=2)
    assert torch.equal(y.gather(1, places), last.y)
    counts = last.y.flatten().bincount(minlength=20) * 5 / last.y.shape[1]  # 100 ± 8.7 each, or less
    assert counts.min() > 60 and counts.max() < 140
    alone = mini_batches(Batch(x[7:8], y[7:8]), size)
    assert torch.equal(alone(2 * count - 1).y[0], last.y[7])


def test_a_carried_square_rounded_below_0_counts_as_0() -> None:
    """As that of a dead unit, whose gradients are 0 for long."""
    assert inner._root(torch.tensor([-1e-44, 0.0, 4.0])).tolist() == [0, 0, 2]
