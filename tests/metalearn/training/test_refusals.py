"""What is refused: sources of the user's own, rates, and the state of another optimiser; and the line that says so."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import metalearn
from distributed.reduce import tree_sum
from metalearn.algorithms.maml import maml
from metalearn.errors import DataError
from metalearn.models.mlp import mlp
from metalearn.tasks.common.episodes import EpisodeSpec, Seeds, shapes_of
from metalearn.tasks.glyphs import glyphs
from metalearn.training.chunks import chunk_functions, chunk_of, episodes_of
from metalearn.training.optimizers import Rates, adam, scheduled
from metalearn.training.trainer import TrainState
from metalearn.types import Batch, Episode, Unit


class Own:
    """Three classes of two support samples and three queries; `change` spoils the episode."""

    def __init__(self, change: Callable[[Episode], Any]) -> None:
        self._change = change

    def classes(self, split: str) -> int:
        return 3

    def unit(self, split: str) -> Unit:
        return "tasks"

    def size(self, split: str) -> None:
        return None

    def episodes(self, split: str, indices: Tensor) -> Any:
        def part(count: int) -> Batch:
            y = torch.arange(3).repeat_interleave(count).expand(len(indices), -1)
            return Batch(torch.randn(len(indices), 3 * count, 4), y.clone())

        return self._change(Episode(part(2), part(3)))


def with_labels(change: Callable[[Tensor], Tensor]) -> Callable[[Episode], Episode]:
    return lambda episode: episode._replace(query=episode.query._replace(y=change(episode.query.y)))


BAD: dict[str, tuple[Callable[[Episode], Any], str]] = {
    "labels from 1": (with_labels(lambda y: y + 1), "labels of train run from 1 to 3"),
    "a label of -100": (with_labels(lambda y: y.index_fill(1, torch.tensor([0]), -100)), "run from -100 to 2"),
    "real labels": (with_labels(lambda y: y.float()), r"torch\.float32"),
    "a dict": (lambda episode: {"support": episode.support}, "a dict"),
    "lists": (lambda episode: (episode.support, ([1.0], [0])), r"query\.[xy] is a list"),
    "an array": (lambda e: (e.support, Batch(e.query.x.numpy(), e.query.y)), r"query\.x is a ndarray"),
    "other numbers of samples": (with_labels(lambda y: y[:, 1:]), "query"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_episode_is_named_with_its_code(name: str) -> None:
    change, named = BAD[name]
    with pytest.raises(DataError, match=rf"^dataset: Own\.episodes \(.*test_refusals\.py:\d+\): .*{named}"):
        episodes_of(Own(change), "train", torch.tensor([0]))


def test_the_library_names_the_code_of_what_is_no_episode() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    source = Own(BAD["labels from 1"][0])
    with pytest.raises(ValueError, match="labels of train run from 1 to 3"):
        metalearn.train("maml", network, source, steps=1, meta_batch_size=2, val_tasks=2, progress=False)


def test_a_label_of_a_later_task_is_named_too() -> None:
    """Compiled networks write at the place of a label."""
    model = mlp(inputs=4, outputs=3, hidden=(8,), activation="relu")
    changes = iter([0, 0, 1])
    source = Own(lambda episode: with_labels(lambda y: y + next(changes))(episode))
    learner = maml(model=model, inner_lr=0.01, inner_steps=1, eval_steps=2)
    functions = chunk_functions(learner, source, torch.device("cpu"), torch.float32, tree_sum)
    params = learner.init(torch.Generator().manual_seed(0))
    for _ in range(2):
        functions.map(params, torch.arange(2), 1)
    with pytest.raises(DataError, match="labels of train run from 1 to 3"):
        functions.map(params, torch.arange(2), 2)


def test_a_tuple_of_tuples_is_an_episode() -> None:
    plain = Own(lambda episode: tuple(tuple(part) for part in episode))
    episode = episodes_of(plain, "train", torch.arange(2))
    assert isinstance(episode, Episode) and episode.query.x.shape == (2, 9, 4)


def rate(**wrong: Any) -> None:
    right = {"lr": 0.1, "schedule": "linear", "min_lr": 0, "decay": 0.5, "decay_every": 1, "warmup": 0}
    scheduled(Rates(**right | wrong))


def state_of_others(**others: Tensor) -> None:
    """The state of an optimiser of the parameters a and b."""
    start = adam(rates=Rates(0.01), beta1=0.8, beta2=0.95, eps=1e-5).start
    saved = TrainState.new({"a": torch.ones(2), "b": torch.ones(3)}, start)
    for value in saved.params.values():
        value.grad = torch.ones_like(value)
    saved.optimizer.step()
    TrainState.new(others, start).optimizer.load_state_dict(saved.optimizer.state_dict())


def shots(value: object) -> None:
    shapes_of(EpisodeSpec(ways=2, shots=value, queries=1))  # type: ignore[arg-type]


def large_task() -> None:
    """Of 20 support samples and a query of each class, which has 20 pictures."""
    glyphs(episode=EpisodeSpec(2, [1, 20], 1), image_size=8, channels=1, rotations=True, seeds=Seeds(0, 0))


def listed(of: Callable[[Episode], list[Episode]]) -> None:
    """A list of another number of tasks than the three that were asked for."""
    chunk_of(Own(of), "train", torch.arange(3))


REFUSED: list[tuple[Callable[[], None], str]] = [
    *((partial(rate, **{key: value}), f"^{key}=") for key, value in (
        ("min_lr", 1), ("lr", 2e30), ("schedule", "no"), ("decay", 1), ("warmup", 0.5))),
    *((partial(shots, value), "^shots=") for value in ([1, 2, 3], [5, 1], [0, 2], "two", [1.0, 2.0], 0)),
    (large_task, "shots=20"),
    (partial(state_of_others, a=torch.ones(2)), "other parameters"),
    (partial(state_of_others, a=torch.ones(2), b=torch.ones(4)), "other parameters"),
    (partial(listed, lambda episode: [episode]), "a list of 1 episodes for 3 tasks"),
    (partial(listed, lambda episode: [episode] * 3), "a list of 3 episodes for 3 tasks"),  # each of three tasks
]  # fmt: skip


@pytest.mark.parametrize(("make", "named"), REFUSED)
def test_what_is_wrong_is_named(make: Callable[[], None], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()
