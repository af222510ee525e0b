"""What any worker computes of a chunk: makes its episodes, runs the algorithm, brings the result home."""

from collections.abc import Callable

import torch
from torch import Tensor

from metalearn.types import Algorithm, Batch, ChunkResult, Episode, Metrics, Params, TaskSource

MapChunk = Callable[[Params, Tensor, int], ChunkResult]
EvaluateChunk = Callable[[Params, str, Tensor], Metrics]


def chunk_functions(
    algorithm: Algorithm, source: TaskSource, device: torch.device, dtype: torch.dtype
) -> tuple[MapChunk, EvaluateChunk]:
    """(map, evaluate) over chunks of task numbers, computed on `device` in `dtype`; parameters come from
    the CPU and results go back there."""

    def batch(values: Batch) -> Batch:
        y = values.y.to(device, dtype) if values.y.is_floating_point() else values.y.to(device)
        return Batch(values.x.to(device, dtype), y)

    def episodes(split: str, indices: Tensor) -> Episode:
        support, query = source.episodes(split, indices)
        return Episode(batch(support), batch(query))

    def map_chunk(params: Params, indices: Tensor, step: int) -> ChunkResult:
        result = algorithm.meta_grad(moved(params, device), episodes("train", indices), step)
        home = torch.device("cpu")
        return ChunkResult(moved(result.grads, home), moved(result.metrics, home), result.count)

    def evaluate(params: Params, split: str, indices: Tensor) -> Metrics:
        return moved(algorithm.evaluate(moved(params, device), episodes(split, indices)), torch.device("cpu"))

    return map_chunk, evaluate


def moved(values: Params, device: torch.device) -> Params:
    """The same tensors on `device`."""
    return {name: value.to(device) for name, value in values.items()}
