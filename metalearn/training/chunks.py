"""A worker's computation for a chunk: it makes the episodes, runs the algorithm, and returns the result.

Before anything is started, one task shows whether learner and dataset fit.
"""

import hashlib
import inspect
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metalearn.algorithms.common.losses import by_sample
from metalearn.errors import ConfigError, DataError, first_line
from metalearn.nn.layers import per_task
from metalearn.nn.surroundings import Inputs, PassSeeds, inputs_of, packed, surrounded
from metalearn.types import (
    Algorithm,
    Apply,
    Batch,
    ChunkResult,
    ComesInGroups,
    Episode,
    Loss,
    Metrics,
    Model,
    Params,
    Stage,
    Targets,
    TaskSource,
    Unit,
    summed,
    ways_differ,
)

DATA_SECONDS = "data_seconds"  # the metric of a chunk for the seconds that its episodes took to make
EPISODE = "metalearn.types.Episode(support=Batch(x, y), query=Batch(x, y)) of tensors"

log = logging.getLogger("metalearn")


class ChunkFunctions(NamedTuple):
    """The computations on a chunk of task numbers that `distributed.strategies.common.work.Work` explains. Parameters
    may lie on any device; gradients, metrics and losses are returned on the device of the parameters. For tasks,
    `evaluate` also gives a `digest` of their content. Beside the loss, `loss` gives (metrics, count)."""

    map: Callable[[Params, Tensor, int], ChunkResult]
    evaluate: Callable[[Params, str, Tensor], Metrics]
    diagnose: Callable[[Params, Tensor, int], Metrics]
    loss: Callable[[Params, Tensor, int], tuple[Tensor, tuple[Metrics, int]]] | None
    result: Callable[[Params, tuple[Metrics, int]], ChunkResult]


def single_stage(stage: Stage) -> Stage:
    """The stage for parameters without a leading task dimension."""
    return stage._replace(apply=lambda params, h, support_size: stage.apply(per_task(params, 1), h, support_size))


def episodes_of(source: TaskSource, split: str, indices: Tensor, loss: Loss | None = None) -> Episode:
    """What a source gives for these numbers, which may be code of the user's own. Raises DataError if it is no episode,
    a label is none of the task's classes, or the loss is not for such targets. The message names the source's code."""
    return _episode(source, split, source.episodes(split, indices), loss, first=True)


def chunk_of(
    source: TaskSource, split: str, indices: Tensor, loss: Loss | None = None, *, first: bool = True
) -> list[Episode]:
    """The tasks with these numbers: one episode, or, where they differ in shape, an episode for each task. Of a chunk
    that is not the `first` of its split, only the range of the labels is checked. Raises DataError as `episodes_of`."""
    drawn: Any
    try:
        drawn = source.episodes(split, indices)
    except Exception:  # of code of the user's own, which may not be able to stack what differs
        if len(indices) == 1 or source.unit(split) == "samples":
            raise
        tasks = [_episode(source, split, source.episodes(split, index), loss, first) for index in indices.split(1)]
        if _alike(tasks):
            raise
        return tasks
    if not (isinstance(drawn, list) and drawn and all(isinstance(task, Episode) for task in drawn)):
        return [_episode(source, split, drawn, loss, first)]
    tasks = [_episode(source, split, task, loss, first) for task in drawn]
    if len(tasks) != len(indices) or any(len(task.query.x) != 1 for task in tasks):
        raise DataError(
            f"{_place_of(source)}: gives a list of {len(tasks)} episodes for {len(indices)} tasks; a list has an "
            "episode of one task for each number"
        )
    if not _alike(tasks) or (ways_differ(source) and len({int(task.support.y.max()) for task in tasks}) > 1):
        return tasks
    return [Episode(*(Batch(*map(torch.cat, zip(*part, strict=True))) for part in zip(*tasks, strict=True)))]


def _alike(tasks: Sequence[Episode]) -> bool:
    return len({tuple(value.shape for batch in task for value in batch) for task in tasks}) == 1


def _episode(source: TaskSource, split: str, drawn: Any, loss: Loss | None, first: bool) -> Episode:
    """What a source has given, with inputs as one tensor, and real numbers as [t, n, d]."""
    classes = source.classes(split)
    if first:
        parts = list(drawn) if isinstance(drawn, tuple | list) else []
        if not (len(parts) == 2 and all(isinstance(part, tuple) and len(part) == 2 for part in parts)):
            raise DataError(f"{_place_of(source)}: gives a {type(drawn).__name__}; give {EPISODE}")
        for name, (_, y) in zip(("support", "query"), parts, strict=True):
            if not isinstance(y, Tensor):
                raise DataError(f"{_place_of(source)}: {name}.y is a {type(y).__name__}; give {EPISODE}")
    batches = dict(zip(("support", "query"), drawn, strict=True))
    for name, (x, y) in batches.items():
        try:
            batches[name] = Batch(packed(x), y.flatten(2) if classes is None and y.dim() > 3 else y)
        except ValueError as error:
            raise DataError(f"{_place_of(source)}: {name}.x {error}") from error
        if first and batches[name].x.shape[:2] != y.shape[:2]:
            shapes = f"{list(batches[name].x.shape)} for x and {list(y.shape)} for y"
            raise DataError(f"{_place_of(source)}: {name} has the shapes {shapes}; both begin with [tasks, samples]")
    episode = Episode(**batches)
    for batch in episode if source.unit(split) == "tasks" else episode[1:]:  # the first only gives statistics
        if first:
            _check_targets(source, split, batch.y, classes, loss)
        if classes is not None and not batch.y.is_floating_point():
            _check_labels(source, split, batch.y, classes, None if loss is None else loss.ignored)
    return episode


def inputs_of_source(source: TaskSource) -> Inputs:
    """What an input of a source is, by its first task."""
    return inputs_of(source.episodes("train", torch.tensor([0])).query.x)


TARGETS: dict[Targets, tuple[str, str]] = {
    "classes": ("cross_entropy", "classes (whole numbers [tasks, samples], and a number of classes)"),
    "labels": ("binary", "several labels (0.0 or 1.0, [tasks, samples, classes])"),
    "numbers": ("squared", "real numbers ([tasks, samples, numbers], and None for classes)"),
}
"""The usual loss for targets, and how a message explains them."""


def _check_targets(source: TaskSource, split: str, y: Tensor, classes: int | None, loss: Loss | None) -> None:
    """Raises DataError for targets that contradict the source's number of classes, or that the loss is not for."""
    real = y.is_floating_point()
    kind: Targets = "numbers" if classes is None else "labels" if real else "classes"
    what = f"{_place_of(source)}: the labels of {split} are {y.dtype} {list(y.shape)}, and classes() gives {classes}"
    if y.dtype == torch.bool or (classes is None and not real):
        expected = "real numbers, such as y.float()" if classes is None else "whole numbers, of torch.int64"
        raise DataError(f"{what}; give {expected}")
    if loss is None and kind == "labels":
        raise DataError(
            f"{what}; give whole numbers, of torch.int64, for one class of {classes}; or type loss=binary if a sample "
            "may have several labels; or let classes() give None for real numbers"
        )
    if loss is not None and kind not in loss.allows:
        allowed = " or ".join(TARGETS[one][1] for one in loss.allows)
        raise DataError(
            f"{what}; loss={loss.name} is for {allowed}; type loss={TARGETS[kind][0]}, or give other targets"
        )
    if loss is not None and classes is not None and loss.weights not in (None, classes):
        raise ConfigError(
            f"loss.weights: has {loss.weights} numbers, and a task of {split} has {classes} classes; each split needs "
            f"{loss.weights} classes, else type loss.weights=null"
        )
    if kind == "labels" and not (y.dim() == 3 and y.shape[2] == classes and ((y >= 0) & (y <= 1)).all()):
        raise DataError(
            f"{what}; they run from {y.amin():g} to {y.amax():g}; give 0.0 or 1.0 for each of {classes} classes, "
            f"[tasks, samples, {classes}]"
        )


def _check_labels(source: TaskSource, split: str, y: Tensor, classes: int, ignored: int | None) -> None:
    """Raises DataError for a label that is none of a task's classes, and for a task without any. Compiled networks
    write at the place of a label."""
    if ignored is not None:
        counted = y != ignored
        if 0 <= ignored < classes or not counted.any(dim=1).all():
            raise DataError(
                f"{_place_of(source)}: loss.ignored={ignored} is a class of {split}, or the label of all samples of a "
                "task; type a label that no class has, such as loss.ignored=-100"
            )
        y = y[counted]
    low, high = map(int, y.aminmax()) if y.numel() else (0, 0)
    if low < 0 or high >= classes:
        raise DataError(
            f"{_place_of(source)}: the labels of {split} run from {low} to {high}, and a task of {classes} classes has "
            f"the labels 0 to {classes - 1}"
        )


def _place_of(source: TaskSource) -> str:
    """Where the code of a source is."""
    function = inspect.unwrap(source.episodes)
    try:
        place = f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (OSError, TypeError):  # typed at a prompt
        place = "a prompt"
    return f"dataset: {type(source).__name__}.episodes ({place})"


def placing(device: torch.device, dtype: torch.dtype) -> Callable[[Episode], Episode]:
    """A function that moves episodes to `device`, in `dtype`."""

    def batch(values: Batch) -> Batch:
        y = values.y.to(device, dtype if values.y.is_floating_point() else torch.int64)
        return Batch(values.x.to(device, dtype), y)

    return lambda episode: Episode(batch(episode.support), batch(episode.query))


def piece_functions(
    model: Model, source: TaskSource, device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[..., Any]]:
    """The computations at both ends of a network that is cut into stages, on single samples, by name: those that
    `distributed.strategies.common.work.Pieces` explains."""
    on_device, seen = placing(device, dtype), set[str]()

    def episodes(split: str, indices: Tensor) -> Episode:
        (samples,) = chunk_of(source, split, indices, model.loss, first=split not in seen)
        seen.add(split)
        return on_device(samples)

    def inputs(split: str, indices: Tensor) -> tuple[Tensor, int]:
        support, query = episodes(split, indices)
        support_size = 0 if model.transductive else support.x.shape[1]
        return torch.cat([support.x[:, :support_size], query.x], dim=1), support_size

    def values(outputs: Tensor, split: str, indices: Tensor) -> Metrics:
        columns = by_sample(outputs, episodes(split, indices).query.y, model.loss)
        return {name: value[0].unsqueeze(1) for name, value in columns.items()}

    def outcome(outputs: Tensor, split: str, indices: Tensor) -> tuple[Tensor, tuple[Metrics, int]]:
        metrics = by_sample(outputs, episodes(split, indices).query.y, model.loss)
        return metrics["loss"].sum(), (summed(metrics), len(indices))

    def faults(metrics: Metrics) -> Metrics:
        return {"fault": torch.where(torch.isfinite(metrics["loss"][:, 0]), 0, LOSS)}

    return {"inputs": inputs, "outcome": outcome, "values": values, "faults": faults}


def chunk_functions(
    algorithm: Algorithm, source: TaskSource, device: torch.device, dtype: torch.dtype,
    add: Callable[[Sequence[Any]], Any], *, seed: int = 0,
) -> ChunkFunctions:  # fmt: skip
    """The functions of an algorithm on the tasks of a source, computed on `device` in `dtype`.

    Tasks of a chunk that differ in shape are computed one by one, and `add` adds up their results as a strategy does
    those of chunks. What the network draws in training follows from `seed`. An evaluation that does not fit the memory
    of a GPU is computed in halves.
    """
    on_device = placing(device, dtype)
    one_by_one, halved, seen = list[str](), list[str](), set[str]()

    def tasks_of(split: str, indices: Tensor) -> list[Episode]:
        tasks = chunk_of(source, split, indices, algorithm.computes, first=split not in seen)
        seen.add(split)
        if len(tasks) > 1 and not one_by_one:
            one_by_one.append("tasks differ in shape: those of a chunk with several shapes are computed one by one")
            log.info("%s", *one_by_one)
        return tasks

    def training(indices: Tensor, step: int) -> tuple[list[tuple[Episode, PassSeeds]], Metrics]:
        """The parts in which a chunk is computed, the whole or its tasks, with the seeds of each; and their seconds."""
        began = time.perf_counter()
        tasks = [on_device(task) for task in tasks_of("train", indices)]
        seconds = {DATA_SECONDS: torch.tensor(time.perf_counter() - began, dtype=torch.float64)}
        numbers = indices.tolist()
        whole = PassSeeds(seed, step, numbers if algorithm.trained_on == "tasks" else numbers[:1])
        seeds = [whole] if len(tasks) == 1 else [whole.of_task(place) for place in range(len(tasks))]
        return list(zip(tasks, seeds, strict=True)), seconds

    def map_chunk(params: Params, indices: Tensor, step: int) -> ChunkResult:
        origin = device_of(params)
        tasks, seconds = training(indices, step)
        here, parts = moved(params, device), list[ChunkResult]()
        for task, seeds in tasks:
            with surrounded(seeds=seeds):
                parts.append(algorithm.meta_grad(here, task, step))
        result = add(parts)
        return ChunkResult(moved(result.grads, origin), moved(result.metrics | seconds, origin), result.count)

    def evaluate(params: Params, split: str, indices: Tensor) -> Metrics:
        try:
            return evaluate_at_once(params, split, indices)
        except torch.cuda.OutOfMemoryError as error:
            if len(indices) == 1 or algorithm.evaluated_on == "samples":  # samples may be normalised together
                raise
            if not halved:
                what = f"{len(indices)} {source.unit(split)} of {split} at once do not fit the memory of {device}"
                halved.append(f"{what} ({first_line(error)}), so fewer are computed at once")
                log.warning("%s", *halved)
        # Not within `except`, where the error keeps what did not fit. No task sees the others of its chunk.
        halves = [evaluate(params, split, half) for half in indices.tensor_split(2)]
        return {name: torch.cat([values[name] for values in halves]) for name in halves[0]}

    def evaluate_at_once(params: Params, split: str, indices: Tensor) -> Metrics:
        origin = device_of(params)
        tasks, here = tasks_of(split, indices), moved(params, device)
        parts = [moved(algorithm.evaluate(here, on_device(task)), origin) for task in tasks]
        if algorithm.evaluated_on != "samples":
            parts = [values | {"digest": digests(task)} for values, task in zip(parts, tasks, strict=True)]
        return {name: torch.cat([values[name] for values in parts]) for name in parts[0]}

    def diagnose(params: Params, indices: Tensor, step: int) -> Metrics:
        here, (tasks, _) = moved(params, device), training(indices, step)
        return {"fault": torch.cat([faults_of(algorithm, here, task, step, seeds) for task, seeds in tasks])}

    def loss(params: Params, indices: Tensor, step: int) -> tuple[Tensor, tuple[Metrics, int]]:
        assert algorithm.outcome is not None
        origin = device_of(params)
        tasks, seconds = training(indices, step)
        copies, parts = _copies(moved(params, device), len(tasks)), list[Metrics]()
        for copy, (task, seeds) in zip(copies, tasks, strict=True):
            with surrounded(seeds=seeds):
                parts.append(algorithm.outcome(copy, task, step))
        total = add([values["loss"].sum() for values in parts])
        metrics = add([summed(values) for values in parts])
        return total.to(origin), (moved(metrics | seconds, origin), len(indices))

    return ChunkFunctions(
        map_chunk, evaluate, diagnose, None if algorithm.outcome is None else loss,
        result=lambda grads, rest: ChunkResult(grads, *rest),
    )  # fmt: skip


def _copies(params: Params, count: int) -> list[Params]:
    """The same parameters for each of some tasks. Their gradients are added as those of terms are in
    `distributed.reduce`, not in the order in which autograd meets them."""
    if count == 1:
        return [params]
    left = 1 << (count - 1).bit_length() - 1
    halves = [{name: value.view_as(value) for name, value in params.items()} for _ in range(2)]
    return _copies(halves[0], left) + _copies(halves[1], count - left)


def digests(episode: Episode) -> Tensor:
    """A hash of the images and labels of every task, [t, 1] int64."""
    tasks = zip(*(value for batch in episode for value in batch), strict=True)
    contents = (b"".join(value.contiguous().numpy().tobytes() for value in task) for task in tasks)
    hashes = [int.from_bytes(hashlib.sha256(content).digest()[:8], "big", signed=True) for content in contents]
    return torch.tensor(hashes).unsqueeze(1)


def device_of(params: Params) -> torch.device:
    """The device of the parameters; the CPU if there are none."""
    return next((value.device for value in params.values()), torch.device("cpu"))


def moved(values: Params, device: torch.device) -> Params:
    """The same tensors on `device`."""
    return {name: value.to(device) for name, value in values.items()}


# The task at fault, if a step gives numbers that are not finite


FAULTS = ("", "its inputs are not finite", "its loss is not finite", "its gradient is not finite")
"""The faults that a task may have, by number; 0 is none."""

INPUTS, LOSS, GRADIENT = 1, 2, 3


def faults_of(algorithm: Algorithm, params: Params, episode: Episode, step: int, seeds: PassSeeds) -> Tensor:
    """The fault of each training task of an episode, or of each sample: [t] int64. It is computed with the same random
    numbers as in training."""
    if algorithm.trained_on == "tasks":
        faults = []
        for i in range(len(episode.query.x)):
            task = Episode(*(Batch(*(value[i : i + 1] for value in batch)) for batch in episode))
            if not all(torch.isfinite(value).all() for batch in task for value in batch):
                faults.append(INPUTS)
                continue
            with surrounded(seeds=seeds.of_task(i)):
                result = algorithm.meta_grad(params, task, step)
            finite = all(torch.isfinite(grad).all() for grad in result.grads.values())
            faults.append(LOSS if not torch.isfinite(result.metrics["loss"]) else 0 if finite else GRADIENT)
        return torch.tensor(faults)
    with surrounded(seeds=seeds.copy()):
        result = algorithm.meta_grad(params, episode, step)
    if algorithm.outcome is None:  # then a sample has no loss of its own either
        losses = result.metrics["loss"].expand(result.count)
    else:
        with surrounded(seeds=seeds.copy()):
            losses = algorithm.outcome(params, episode, step)["loss"].detach()
    inputs = torch.isfinite(episode.query.x[0]).flatten(1).all(dim=1)
    of_samples = torch.where(inputs, torch.where(torch.isfinite(losses), 0, LOSS), INPUTS)
    if not of_samples.any() and not all(torch.isfinite(grad).all() for grad in result.grads.values()):
        of_samples = torch.full_like(of_samples, GRADIENT)  # of the micro-batch: a sample has no gradient of its own
    return of_samples.cpu()


def explain(diagnosis: Metrics, numbers: Tensor, step: int, unit: Unit) -> str:
    """The error message for a diagnosis by `Strategy.diagnose` of the training tasks `numbers`."""
    faults = diagnosis["fault"]
    wrong = faults.nonzero().flatten()
    if not len(wrong):
        return f"step {step}: the meta-gradient is not finite, but the gradients of all its {unit} are"
    gravest = int(faults[wrong].min())  # inputs that are not finite spoil the loss of their whole micro-batch
    first = int((faults == gravest).nonzero()[0])
    what = f"{unit[:-1]} {int(numbers[first])}"
    if unit == "samples" and gravest != INPUTS:
        what = f"the micro-batch with {what}"
    others = f" (and {len(wrong) - 1} more of its {len(numbers)} {unit})" if len(wrong) > 1 else ""
    advice = "" if gravest == INPUTS else ". Lower rates may help: optimizer.lr, and algorithm.inner_lr if there is one"
    return f"step {step}: {what}, on worker{int(diagnosis['worker'][first])}: {FAULTS[gravest]}{others}{advice}"


def check_compatible(algorithm: Algorithm, model: Model, params: Params, source: TaskSource, first: Episode) -> None:
    """Tries the learner on `first`, the first training task or samples, and on the first test task. Raises ConfigError
    if the dataset gives tasks and the algorithm needs samples, or the reverse; the model cannot take the inputs; or its
    outputs do not fit the targets."""
    _check_unit(source.unit("train"), algorithm.trained_on, algorithm, "learns from")
    if algorithm.trained_on == "samples":
        _try_samples(algorithm.classify or model.apply, params, source, first, algorithm.computes)
    else:
        _try_task(algorithm, params, source, first, "train")
    for split in ("val", "test"):
        _check_unit(source.unit(split), algorithm.evaluated_on, algorithm, "is evaluated on")
    if algorithm.evaluated_on == "tasks":
        check_evaluation(algorithm, model, params, source, "test")


def check_evaluation(algorithm: Algorithm, model: Model, params: Params, source: TaskSource, split: str) -> None:
    """Tries the learner on the first task, or the first two samples, of a split that it is evaluated on. Raises
    ConfigError as `check_compatible`."""
    _check_unit(source.unit(split), algorithm.evaluated_on, algorithm, "is evaluated on")
    loss = algorithm.computes
    if algorithm.evaluated_on == "samples":
        two = episodes_of(source, split, torch.arange(2), loss)
        _try_samples(algorithm.classify or model.apply, params, source, two, loss)
    else:
        _try_task(algorithm, params, source, episodes_of(source, split, torch.tensor([0]), loss), split)


def _check_unit(unit: Unit, expected: Unit, algorithm: Algorithm, verb: str) -> None:
    if unit == expected:
        return
    if expected == "tasks":
        raise ConfigError(
            f"dataset: it gives plain samples, and this algorithm {verb} tasks; type algorithm=supervised, or a "
            "dataset of tasks, such as dataset=omniglot"
        )
    example = "omniglot" if algorithm.evaluated_on == "tasks" else "omniglot_characters"
    raise ConfigError(
        f"dataset: it gives tasks, and this algorithm {verb} plain samples; type dataset={example}, for example, or "
        "dataset=image_folder for pictures of your own"
    )


def _try_samples(classify: Apply, params: Params, source: TaskSource, first: Episode, loss: Loss | None) -> None:
    advice = (
        " in micro-batches of one sample; type a trainer.task_chunk that leaves none over, or a larger "
        "trainer.meta_batch_size (or other val_tasks and test_tasks)"
    )
    (support, query) = placing(first.query.x.device, next(iter(params.values())).dtype)(first)
    x, support_x = query.x, support.x if support.x.shape[1] else None
    outputs = _outputs(lambda: classify(per_task(params, 1), x, support_x), x, advice if x.shape[1] == 1 else "")
    _check_outputs(outputs, source.classes("train"), first.query)
    _try_loss(loss and loss.of_samples, outputs, query.y)


def _try_task(algorithm: Algorithm, params: Params, source: TaskSource, task: Episode, split: str) -> None:
    (support, query) = placing(task.query.x.device, next(iter(params.values())).dtype)(task)
    with surrounded(present=sys.maxsize):  # all outputs of a head, for classes that this task does not have, too
        outputs = _outputs(lambda: algorithm.adapt(params, support, 0)(query.x), query.x)
    of_training, of_test = source.classes("train"), source.classes("test")
    if split == "train" and of_training != of_test and outputs.shape[2] != of_training:
        raise ConfigError(
            f"dataset.train_ways={of_training}: this algorithm's head has {outputs.shape[2]} outputs, in training and "
            "test alike; type dataset.train_ways=null, or algorithm=protonet, which has no head"
        )
    # Of tasks that differ, each may have fewer classes than the source; of others, all of them.
    differ = isinstance(source, ComesInGroups) or ways_differ(source)
    _check_outputs(outputs, source.classes(split), task.query, support, differ=differ)
    _try_loss(algorithm.computes and algorithm.computes.of_tasks, outputs, query.y)
    loss = algorithm.computes
    if split == "train" and loss is not None:
        # Some losses of torch have no second derivative, which not every algorithm needs.
        with torch.enable_grad():
            at = outputs.detach().requires_grad_()
            try:
                (slope,) = torch.autograd.grad(loss.of_tasks(at, query.y)["loss"].sum(), at, create_graph=True)
                if slope.requires_grad:
                    torch.autograd.grad(slope.sum(), at)
            except RuntimeError as error:
                try:
                    algorithm.meta_grad(params, Episode(support, query), 1)
                except RuntimeError:
                    raise ConfigError(
                        f"loss={loss.name}: has no second derivative ({error}), and this algorithm needs it; type "
                        "algorithm.first_order=true where there is such a key, algorithm=reptile, or another loss"
                    ) from error


def _try_loss(measure: Callable[[Tensor, Tensor], Metrics] | None, outputs: Tensor, y: Tensor) -> None:
    """Raises ConfigError for a loss, which may be code of the user's own, that fails."""
    try:
        if measure is not None:
            measure(outputs, y)
    except ConfigError:
        raise
    except Exception as error:  # whatever it is
        shapes = f"outputs {list(outputs.shape[1:])} and targets {list(y.shape[1:])} of {y.dtype}"
        raise ConfigError(f"loss: fails for {shapes} ({type(error).__name__}: {error}); type loss=auto") from error


def _outputs(compute: Callable[[], Tensor], x: Tensor, why: str = "") -> Tensor:
    try:
        with torch.no_grad():
            return compute()
    except ConfigError:
        raise
    except (RuntimeError, IndexError, ValueError) as error:
        mlp = f" (an mlp takes model.inputs={math.prod(x.shape[2:])})"
        reason, advice = str(error).splitlines()[0], why or f"; type another dataset, or a model for such inputs{mlp}"
        raise ConfigError(
            f"model: it cannot take this dataset's inputs of shape {tuple(x.shape[2:])} ({reason}){advice}"
        ) from error


def _check_outputs(
    outputs: Tensor, classes: int | None, query: Batch, support: Batch | None = None, differ: bool = False
) -> None:
    """Raises ConfigError unless there is an output for each class of the source, or, if tasks `differ`, of this task,
    whose `support` set may have fewer, or for each number."""
    if classes is None and query.y.dim() != 3:
        raise ConfigError(
            f"dataset: its targets have the shape {list(query.y.shape)}, and real numbers need [tasks, samples, "
            "numbers]; give y.unsqueeze(2)"
        )
    expected = query.y.shape[2] if classes is None else classes
    ways = expected
    if classes is not None and support is not None and support.y.dim() == 2 and support.y.numel():
        ways = int(support.y.max()) + 1
    few = ways < expected and outputs.shape[2] == ways
    if outputs.shape[2] != expected and not (few and differ):
        reason = f" (the first support set has no sample of class {ways}: type more dataset.shots)" if few else ""
        raise ConfigError(
            f"model: it has {outputs.shape[2]} outputs, and this dataset's tasks need {expected}{reason}; "
            f"type model.ways={expected}, model.outputs={expected} for an mlp, or, for a network of your own, its "
            f"argument, such as model.network.num_classes={expected}"
        )
