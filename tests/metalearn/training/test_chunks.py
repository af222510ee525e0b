"""An evaluation that does not fit the memory of a device is computed in halves."""

import pytest
import torch

from distributed.reduce import tree_sum
from metalearn.algorithms.maml import maml
from metalearn.algorithms.supervised import supervised
from metalearn.models.conv4 import conv4
from metalearn.models.mlp import mlp
from metalearn.tasks.common.episodes import Seeds
from metalearn.tasks.glyphs import glyph_characters
from metalearn.tasks.sinusoid import sinusoid
from metalearn.training.chunks import chunk_functions
from metalearn.types import Episode, Metrics, Params


@pytest.mark.parametrize("most", [2, 0])
def test_an_evaluation_too_large_for_memory_is_halved(most: int, caplog: pytest.LogCaptureFixture) -> None:
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
