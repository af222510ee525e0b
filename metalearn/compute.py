"""What any worker computes of a chunk: makes its episodes, runs the algorithm, brings the result home."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from metalearn.errors import ConfigError
from metalearn.functional import by_sample, per_task, summed
from metalearn.types import Algorithm, Batch, ChunkResult, Episode, Metrics, Model, Params, Stage, TaskSource

DATA_SECONDS = "data_seconds"
"""Among a chunk's metrics: the seconds in which its episodes were made."""


class ChunkFunctions(NamedTuple):
    """What can be computed of a chunk of task numbers. Parameters may lie anywhere; gradients, metrics and
    losses go back to where the parameters came from.

    `loss(params, indices, step)` gives the summed loss with its graph, and (metrics, count); from gradients
    and these, `result` makes what `map` gives. None where the algorithm's loss has no graph.
    """

    map: Callable[[Params, Tensor, int], ChunkResult]
    evaluate: Callable[[Params, str, Tensor], Metrics]
    loss: Callable[[Params, Tensor, int], tuple[Tensor, tuple[Metrics, int]]] | None
    result: Callable[[Params, tuple[Metrics, int]], ChunkResult]


class PieceFunctions(NamedTuple):
    """What can be computed of single samples where a network is cut: the inputs [1, known + n, …] of its first stage
    and how many of them are known samples; and, from the outputs [1, n, …] of its last one, the summed loss with
    its graph and (metrics, count), or the values of every sample."""

    inputs: Callable[[str, Tensor], tuple[Tensor, int]]
    outcome: Callable[[Tensor, str, Tensor], tuple[Tensor, tuple[Metrics, int]]]
    values: Callable[[Tensor, str, Tensor], Metrics]


def single_stages(model: Model) -> tuple[Stage, ...]:
    """The model's stages for parameters without a leading task dimension."""

    def single(stage: Stage) -> Stage:
        return stage._replace(apply=lambda params, h, known: stage.apply(per_task(params, 1), h, known))

    return tuple(map(single, model.stages))


def placed(source: TaskSource, device: torch.device, dtype: torch.dtype) -> Callable[[str, Tensor], Episode]:
    """The source's episodes, on `device` in `dtype`."""

    def batch(values: Batch) -> Batch:
        y = values.y.to(device, dtype) if values.y.is_floating_point() else values.y.to(device)
        return Batch(values.x.to(device, dtype), y)

    def episodes(split: str, indices: Tensor) -> Episode:
        support, query = source.episodes(split, indices)
        return Episode(batch(support), batch(query))

    return episodes


def piece_functions(model: Model, source: TaskSource, device: torch.device, dtype: torch.dtype) -> PieceFunctions:
    """What is computed at both ends of a network that is cut."""
    episodes = placed(source, device, dtype)

    def inputs(split: str, indices: Tensor) -> tuple[Tensor, int]:
        support, query = episodes(split, indices)
        known = 0 if model.transductive else support.x.shape[1]
        return torch.cat([support.x[:, :known], query.x], dim=1), known

    def values(outputs: Tensor, split: str, indices: Tensor) -> Metrics:
        columns = by_sample(outputs, episodes(split, indices).query.y)
        return {name: value[0].unsqueeze(1) for name, value in columns.items()}

    def outcome(outputs: Tensor, split: str, indices: Tensor) -> tuple[Tensor, tuple[Metrics, int]]:
        found = by_sample(outputs, episodes(split, indices).query.y)
        return found["loss"].sum(), (summed(found), len(indices))

    return PieceFunctions(inputs, outcome, values)


def chunk_functions(
    algorithm: Algorithm, source: TaskSource, device: torch.device, dtype: torch.dtype
) -> ChunkFunctions:
    """The functions of an algorithm on the tasks of a source, computed on `device` in `dtype`."""
    episodes = placed(source, device, dtype)

    def training(indices: Tensor) -> tuple[Episode, Metrics]:
        began = time.perf_counter()
        episode = episodes("train", indices)
        return episode, {DATA_SECONDS: torch.tensor(time.perf_counter() - began, dtype=torch.float64)}

    def map_chunk(params: Params, indices: Tensor, step: int) -> ChunkResult:
        home = device_of(params)
        episode, seconds = training(indices)
        result = algorithm.meta_grad(moved(params, device), episode, step)
        return ChunkResult(moved(result.grads, home), moved(result.metrics | seconds, home), result.count)

    def evaluate(params: Params, split: str, indices: Tensor) -> Metrics:
        home = device_of(params)
        return moved(algorithm.evaluate(moved(params, device), episodes(split, indices)), home)

    def loss(params: Params, indices: Tensor, step: int) -> tuple[Tensor, tuple[Metrics, int]]:
        assert algorithm.outcome is not None
        home = device_of(params)
        episode, seconds = training(indices)
        values = algorithm.outcome(moved(params, device), episode, step)
        return values["loss"].sum().to(home), (moved(summed(values) | seconds, home), len(indices))

    def result(grads: Params, rest: tuple[Metrics, int]) -> ChunkResult:
        return ChunkResult(grads, *rest)

    return ChunkFunctions(map_chunk, evaluate, None if algorithm.outcome is None else loss, result)


def device_of(params: Params) -> torch.device:
    """Where parameters lie; the CPU where there are none."""
    return next((value.device for value in params.values()), torch.device("cpu"))


def moved(values: Params, device: torch.device) -> Params:
    """The same tensors on `device`."""
    return {name: value.to(device) for name, value in values.items()}


def check_fit(algorithm: Algorithm, model: Model, params: Params, episode: Episode, classes: int | None) -> None:
    """Tries the model on one task, or one sample, of a source with so many classes.

    Raises:
        ConfigError: the algorithm learns from something else; the model cannot take the task's inputs, or its
            outputs do not fit the targets.
    """
    if algorithm.episodic and not episode.support.x.shape[1]:
        raise ConfigError(
            "dataset: it gives plain samples, and this algorithm learns from tasks; type algorithm=supervised, or a "
            "dataset of tasks, such as dataset=omniglot"
        )
    if not algorithm.episodic and episode.support.x.shape[1]:
        raise ConfigError(
            "dataset: it gives tasks, and this algorithm learns from plain samples; type dataset=omniglot_characters, "
            "for example"
        )
    dtype = next(iter(params.values())).dtype
    query = episode.query
    try:
        with torch.no_grad():
            support = episode.support.x.to(dtype) if algorithm.episodic else None
            outputs = model.apply(per_task(params, 1), query.x.to(dtype), support)
    except (RuntimeError, IndexError, ValueError) as error:
        shape = tuple(query.x.shape[2:])
        few = (
            ""
            if algorithm.episodic or query.x.shape[1] > 1
            else (" in micro-batches of one sample; type a trainer.task_chunk that leaves none over")
        )
        raise ConfigError(f"model: it cannot take this dataset's inputs of shape {shape}{few} ({error})") from error
    wanted = query.y.shape[2] if classes is None else classes
    if outputs.shape[2] != wanted:
        raise ConfigError(
            f"model: it has {outputs.shape[2]} outputs, and this dataset's tasks need {wanted}; "
            f"type model.ways={wanted}, or model.outputs={wanted} for an mlp"
        )
