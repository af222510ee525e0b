"""What a source of the user's own gives is checked before it is used."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import metalearn
from distributed.tree_sum import tree_sum
from metalearn.algorithms.maml import maml
from metalearn.algorithms.supervised import supervised
from metalearn.errors import DataError
from metalearn.models.conv4 import conv4
from metalearn.models.mlp import mlp
from metalearn.tasks.common.episodes import Seeds
from metalearn.tasks.glyphs import glyph_characters
from metalearn.tasks.sinusoid import sinusoid
from metalearn.training.chunks import chunk_functions, episodes_of
from metalearn.types import Batch, Episode, Metrics, Params, Unit


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
    "real labels": (with_labels(lambda y: y.float()), r"torch\.float32 .*give whole numbers"),
    "a dict": (lambda episode: {"support": episode.support}, "gives a dict"),
    "lists": (lambda episode: (episode.support, ([1.0], [0])), r"query\.[xy] is a list"),
    "an array": (
        lambda episode: (episode.support, Batch(episode.query.x.numpy(), episode.query.y)), r"query\.x is a ndarray"),
    "other numbers of samples": (
        with_labels(lambda y: y[:, 1:]), "query has the shapes"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_episode_is_named_with_its_code(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(DataError, match=rf"^dataset: Own\.episodes \(.*test_chunks\.py:\d+\): .*{message}"):
        episodes_of(Own(change), "train", torch.tensor([0]))
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=message):
        metalearn.train("maml", network, Own(change), steps=1, meta_batch_size=2, val_tasks=2, progress=False)


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


@pytest.mark.parametrize("most", [2, 0])
def test_an_evaluation_that_does_not_fit_the_memory_is_computed_in_halves(
    most: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp(inputs=1, outputs=1, hidden=(8,), activation="relu")
    whole = maml(model=model, inner_lr=0.01, inner_steps=1, eval_steps=2)
    source = sinusoid(shots=5, queries=5, eval_queries=5, seeds=Seeds(0, 0))
    params, sizes = whole.init(torch.Generator().manual_seed(0)), list[int]()

    def small(params: Params, episode: Episode) -> Metrics:
        sizes.append(len(episode.query.x))
        if sizes[-1] > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
        return whole.evaluate(params, episode)

    functions, wanted = (
        chunk_functions(algorithm, source, torch.device("cpu"), torch.float32, tree_sum)
        for algorithm in (whole._replace(evaluate=small), whole)
    )
    if not most:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            functions.evaluate(params, "val", torch.arange(2))
        assert sizes == [2, 1]
        return
    for first in (0, 5):
        chunk = torch.arange(first, first + 5)
        found, exact = functions.evaluate(params, "val", chunk), wanted.evaluate(params, "val", chunk)
        assert found.keys() == exact.keys() and all(found[name].equal(value) for name, value in exact.items())
    assert sizes == [5, 3, 2, 1, 2] * 2
    assert caplog.text.count("5 tasks of val at once do not fit the memory of cpu (CUDA out of memory") == 1


def test_samples_that_may_be_normalised_together_are_not_halved() -> None:
    source = glyph_characters(
        ways=2, train_drawings=10, val_drawings=5, image_size=8, channels=1, known=2, seeds=Seeds(0, 0)
    )
    model = conv4(channels=1, image_size=8, filters=2, downsample="stride", ways=2, transductive=True)
    whole, tried = supervised(model=model), list[int]()

    def small(params: Params, episode: Episode) -> Metrics:
        tried.append(episode.query.x.shape[1])
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    functions = chunk_functions(
        whole._replace(evaluate=small), source, torch.device("cpu"), torch.float32, tree_sum
    )  # fmt: skip
    with pytest.raises(torch.cuda.OutOfMemoryError):
        functions.evaluate(whole.init(torch.Generator().manual_seed(0)), "val", torch.arange(4))
    assert tried == [4]
