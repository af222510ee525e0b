"""How many tasks are computed together, and that workers get equal shares of them where that changes no bit."""

import math

import pytest
import torch

from benchmarks.gpu_check.learners import ALGORITHMS, ON_SAMPLES, training_of
from distributed.reduce import tree_sum
from metalearn.models.conv4 import conv4
from metalearn.training.chunks import chunk_functions
from metalearn.training.settings import TrainerSettings, chunk_size

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MODEL = conv4(ways=5, channels=1, image_size=28, filters=64, activation="relu")
IMAGES = 10


def settings(tasks: int, chunk: int | str = "auto") -> TrainerSettings:
    return TrainerSettings(1, tasks, chunk, 1, 2, 2)


def shares(chunk: int, tasks: int, workers: int) -> list[int]:
    """The tasks of each worker, where the first chunks go to the first worker."""
    each, more = divmod(math.ceil(tasks / chunk), workers)
    ends = [chunk * (each * (rank + 1) + min(rank + 1, more)) for rank in range(workers)]
    return [min(end, tasks) - min(begin, tasks) for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 16, 32])
@pytest.mark.parametrize("tasks", [32, 25, 16])
def test_workers_get_equal_shares(device: torch.device, workers: int, tasks: int) -> None:
    alone = chunk_size(settings(tasks), MODEL, IMAGES, device, pairs=True)
    chunk = chunk_size(settings(tasks), MODEL, IMAGES, device, workers, pairs=True)
    assert chunk == alone or chunk.bit_count() == 1
    if alone == tasks or alone.bit_count() == 1:  # the bits allow it
        largest = max(shares(chunk, tasks, workers))
        least = min(max(shares(size, tasks, workers)) for size in (alone, *(1 << power for power in range(6))))
        assert largest <= max(1.15 * tasks / workers, least)


def test_eight_gpus_share_the_tasks_of_a_step() -> None:
    assert shares(chunk_size(settings(32), MODEL, IMAGES, GPU), 32, 8) == [32, 0, 0, 0, 0, 0, 0, 0]
    assert shares(chunk_size(settings(32), MODEL, IMAGES, GPU, 8, pairs=True), 32, 8) == [4] * 8


def test_chunks_stay_where_others_would_change_bits() -> None:
    assert chunk_size(settings(32), MODEL, IMAGES, GPU, 8) == 32
    assert chunk_size(settings(32, chunk=16), MODEL, IMAGES, GPU, 8, pairs=True) == 16


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ON_SAMPLES])
def test_algorithms_that_add_in_pairs_have_the_bits_of_one_chunk(name: str) -> None:
    algorithm, source, _ = training_of(name)
    functions = chunk_functions(algorithm, source, CPU, torch.float32, tree_sum)
    params = algorithm.init(torch.Generator().manual_seed(0))
    whole, *cut = (
        tree_sum([functions.map(params, tasks, 1) for tasks in torch.arange(7).split(size)]) for size in (7, 4, 2, 1)
    )
    for sums in cut:
        for key, value in whole.grads.items():
            torch.testing.assert_close(sums.grads[key], value, rtol=1e-3, atol=1e-4 * float(value.abs().max()))
            if algorithm.adds_in_pairs:
                assert sums.grads[key].equal(value), key
        torch.testing.assert_close(sums.metrics["loss"], whole.metrics["loss"], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("tasks", "workers", "chunk"), [(25, 8, 4), (10, 3, 4), (32, 3, 4), (32, 5, 1)])
def test_chunks_are_as_large_as_equal_shares_allow(tasks: int, workers: int, chunk: int) -> None:
    assert chunk_size(settings(tasks), MODEL, IMAGES, GPU, workers, pairs=True) == chunk
