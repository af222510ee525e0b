"""Tasks that differ in shape, within a chunk and among chunks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

import metalearn
from distributed.reduce import tree_sum
from metalearn.algorithms.maml import maml
from metalearn.models.conv4 import conv4
from metalearn.models.mlp import mlp
from metalearn.tasks.common.episodes import EpisodeSpec, Seeds, shots_of_task
from metalearn.tasks.glyphs import glyphs
from metalearn.tasks.sinusoid import sinusoid
from metalearn.training.chunks import chunk_functions, chunk_of, digests, episodes_of
from metalearn.types import Algorithm, Batch, Episode, TaskSource, Unit

CPU = torch.device("cpu")


class Varying:
    """Tasks of three classes with 1 to 3 shots; `stack` makes what several tasks are given as."""

    def __init__(self, stack: Callable[[list[Episode]], Any]) -> None:
        self._stack = stack

    def classes(self, split: str) -> int:
        return 3

    def unit(self, split: str) -> Unit:
        return "tasks"

    def size(self, split: str) -> None:
        return None

    def episodes(self, split: str, indices: Tensor) -> Any:
        tasks = [self._task(int(index)) for index in indices]
        return tasks[0] if len(tasks) == 1 else self._stack(tasks)

    def _task(self, index: int) -> Episode:
        def part(each: int, seed: int) -> Batch:
            y = torch.arange(3).repeat_interleave(each)
            x = torch.randn(3 * each, 4, generator=Generator().manual_seed(seed)) + y.unsqueeze(1)
            return Batch(x.unsqueeze(0), y.unsqueeze(0))

        return Episode(part(1 + index % 3, 2 * index), part(2, 2 * index + 1))


def stacked(tasks: list[Episode]) -> Episode:
    """As users write it: it fails where tasks differ."""
    parts = zip(*tasks, strict=True)
    return Episode(*(Batch(*map(torch.cat, zip(*part, strict=True))) for part in parts))  # type: ignore[arg-type]


def learner() -> Algorithm:
    return maml(
        model=mlp(inputs=4, outputs=3, hidden=[6], activation="tanh"), inner_lr=0.2, inner_steps=2, eval_steps=2
    )


@pytest.mark.parametrize("stack", [stacked, list], ids=["fails", "a list"])
def test_a_chunk_is_the_sum_of_its_tasks_each_by_itself(stack: Callable[[list[Episode]], Any]) -> None:
    algorithm, source = learner(), Varying(stack)
    functions = chunk_functions(algorithm, source, CPU, torch.float64, tree_sum)
    params = {name: value.double() for name, value in algorithm.init(Generator().manual_seed(0)).items()}
    numbers = torch.arange(5)
    result = functions.map(params, numbers, 1)
    assert result.count == 5
    alone = [functions.map(params, number, 1) for number in numbers.split(1)]
    for name, value in result.grads.items():
        torch.testing.assert_close(value, torch.stack([one.grads[name] for one in alone]).sum(dim=0))
    values, rows = functions.evaluate(params, "val", numbers), []
    for number in numbers.split(1):
        task = episodes_of(source, "val", number)
        predicted = algorithm.adapt(params, Batch(task.support.x.double(), task.support.y))(task.query.x.double())
        rows.append((predicted.argmax(dim=2) == task.query.y).double().mean().item())
        assert values["digest"][int(number)].equal(digests(task)[0])
    assert values["accuracy"][:, -1].tolist() == pytest.approx(rows)
    assert functions.diagnose(params, numbers, 1)["fault"].tolist() == [0] * 5


def test_tasks_of_one_shape_are_computed_together() -> None:
    (episode,) = chunk_of(Varying(list), "train", torch.tensor([0, 3, 6]))
    assert episode.support.x.shape == (3, 3, 4)
    together = stacked([Varying(list).episodes("train", torch.tensor([n])) for n in (0, 3, 6)])
    assert all(one.x.equal(two.x) and one.y.equal(two.y) for one, two in zip(episode, together, strict=True))


def test_a_source_that_fails_for_another_reason_says_so() -> None:
    def broken(tasks: list[Episode]) -> Episode:
        raise ZeroDivisionError("of my own")

    with pytest.raises(ZeroDivisionError, match="of my own"):
        chunk_of(Varying(broken), "train", torch.tensor([0, 3]))


def picture_learner(shots: Any) -> tuple[Algorithm, TaskSource]:
    spec = EpisodeSpec(ways=3, shots=shots, queries=1)
    source = glyphs(episode=spec, image_size=12, channels=1, rotations=True, seeds=Seeds(0, 1))
    model = conv4(ways=3, channels=1, image_size=12, filters=4)
    return maml(model=model, inner_lr=0.4, inner_steps=1, eval_steps=1), source


def test_bits_do_not_depend_on_chunks_and_gradients_agree() -> None:
    """MAML on compiled kernels adds in pairs; its chunks may depend on the number of workers."""
    algorithm, source = picture_learner([1, 2])
    functions = chunk_functions(algorithm, source, CPU, torch.float32, tree_sum)
    params = algorithm.init(Generator().manual_seed(0))
    shots = {task.support.x.shape[1] for task in chunk_of(source, "train", torch.arange(6))}
    assert shots == {3, 6}, "these tasks differ"
    sizes = (6, 4, 2, 1)
    whole, *cut = (tree_sum([functions.map(params, c, 1) for c in torch.arange(6).split(size)]) for size in sizes)
    for sums in cut:
        assert all(sums.grads[name].equal(value) for name, value in whole.grads.items())
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    assert functions.loss is not None
    total, (metrics, count) = functions.loss(leaves, torch.arange(6), 1)
    total.backward()  # type: ignore[no-untyped-call]
    assert count == 6 and metrics["loss"] == whole.metrics["loss"]
    assert all(leaves[name].grad.equal(value) for name, value in whole.grads.items())  # type: ignore[union-attr]


def test_a_tasks_number_of_shots_follows_from_its_number() -> None:
    seeds = Seeds(3, 4)
    drawn = [shots_of_task((2, 5), seeds, "test", index) for index in range(400)]
    assert np.bincount(drawn)[2:].min() > 70 and set(drawn) == {2, 3, 4, 5}
    assert drawn == [shots_of_task((2, 5), Seeds(9, 4), "test", index) for index in range(400)]
    _, source = picture_learner([1, 3])
    _, fixed = picture_learner(3)
    for index in range(6):
        task, most = (episodes_of(one, "val", torch.tensor([index])) for one in (source, fixed))
        shots = shots_of_task((1, 3), Seeds(0, 1), "val", index)
        assert task.support.x.shape[1] == 3 * shots and task.query.x.shape[1] == 3
        first = most.support.x.view(3, 3, 1, 12, 12)[:, :shots].flatten(0, 1)
        assert task.support.x[0].equal(first), "the same classes and pictures, fewer of them"
    waves = sinusoid(shots=[2, 4], queries=3, eval_queries=3, seeds=Seeds(0, 1))
    assert {task.support.x.shape[1] for task in chunk_of(waves, "train", torch.arange(20))} == {2, 3, 4}


def test_the_library_trains_on_them_and_evaluates() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    settings: dict[str, Any] = {"meta_batch_size": 4, "val_tasks": 4, "test_tasks": 5, "progress": False}
    learned = [
        metalearn.train(metalearn.named("maml", inner_lr=0.1), network, Varying(stack), steps=2, **settings)
        for stack in (stacked, list)
    ]
    assert all(learned[0].params[name].equal(value) for name, value in learned[1].params.items())
    assert learned[0].evaluate()["tasks"] == 5
