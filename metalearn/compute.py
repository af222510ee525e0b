"""What any worker computes of a chunk: makes its episodes, runs the algorithm, brings the result home."""

from collections.abc import Callable

import torch
from torch import Tensor

from metalearn.errors import ConfigError
from metalearn.functional import per_task
from metalearn.types import Algorithm, Batch, ChunkResult, Episode, Metrics, Model, Params, TaskSource

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


def check_fit(model: Model, params: Params, episode: Episode) -> None:
    """Tries the model on one task.

    Raises:
        ConfigError: it cannot take the task's inputs, or its outputs do not fit the targets.
    """
    dtype = next(iter(params.values())).dtype
    query = episode.query
    try:
        with torch.no_grad():
            outputs = model.apply(per_task(params, 1), query.x[:1].to(dtype), episode.support.x[:1].to(dtype))
    except (RuntimeError, IndexError) as error:
        shape = tuple(query.x.shape[2:])
        raise ConfigError(f"model: it cannot take this dataset's inputs of shape {shape} ({error})") from error
    wanted = query.y.shape[2] if query.y.is_floating_point() else int(query.y.max()) + 1
    if outputs.shape[2] != wanted:
        raise ConfigError(
            f"model: it has {outputs.shape[2]} outputs, and this dataset's tasks need {wanted}; "
            f"type model.ways={wanted}, or model.outputs={wanted} for an mlp"
        )
