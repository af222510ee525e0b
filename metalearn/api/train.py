"""Training without a command line, a run folder and other processes: `metalearn.train`."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from distributed.strategies.common.work import join
from metalearn.app.job import Job, installed
from metalearn.app.parts import Parts, check_device, connect, evaluation_chunk, first_tasks, put_together
from metalearn.app.run import make_run, seen_by
from metalearn.app.unseen import REFUSE, REPORT, check_unseen
from metalearn.checks import one_of, whole_number
from metalearn.config.build import build
from metalearn.config.check import check_top_level
from metalearn.config.plain import Named, plain_config
from metalearn.errors import ConfigError
from metalearn.models.common.adapter import model_of
from metalearn.nn.precision import computing_with
from metalearn.reporting.loggers.protocol import Window
from metalearn.reporting.logging import SILENT, bar_log
from metalearn.runs.checkpoint import NO_CHECKPOINTS, Checkpointer, Snapshot
from metalearn.runs.metrics import summary
from metalearn.runs.seen import Seen
from metalearn.runs.signals import NEVER
from metalearn.training.chunks import chunk_functions
from metalearn.training.compatibility import check_compatible, check_evaluation
from metalearn.training.loop import Progress, fit, new_learner, tasks_in_chunks
from metalearn.types import Algorithm, Batch, Model, Params, TaskSource

Learns = str | Named | Algorithm | Callable[..., Algorithm]
Network = str | Named | Model | nn.Module | Callable[[], nn.Module]
Tasks = str | Named | TaskSource


def train(
    algorithm: Learns,
    model: Network,
    tasks: Tasks,
    *,
    steps: int,
    inner: str | Named = "sgd",
    optimizer: str | Named = "adam",
    seed: int = 0,
    device: str = "auto",
    precision: str = "float32",
    transductive: bool = True,
    progress: bool = True,
    seen_classes: str = REFUSE,
    **trainer: Any,
) -> "TrainedLearner":
    """Trains in this process, with the loop of train.py. Nothing is written.

    With the same settings, and if torch computes with as many threads as `threads` says there, the parameters have the
    bits of train.py's `checkpoints/best`. A part that is a name is that option of `conf/`; `metalearn.named` gives it
    settings.

    Args:
        algorithm: a name; a function that takes `model` and gives an `Algorithm`; or an `Algorithm`.
        model: a name; a `Model`; an `nn.Module`, which begins with its own weights; or a class or function that gives
            one, whose weights are then drawn from `seed`. A module takes the inputs [n, …] of the tasks, and gives
            [n, classes], or [n, outputs] for real numbers.
        tasks: a name, or an object of your own (`metalearn.types.TaskSource`).
        steps: meta-steps.
        inner: a name: the optimiser of the inner steps.
        optimizer: a name: the optimiser of the meta-parameters.
        seed: of the parameters, and of the training tasks of a name.
        device, precision: as the keys of `conf/config.yaml`.
        transductive: of a module with batch norm: normalise a batch by its own statistics, not by the support set's.
        progress: draw a progress bar where stderr is a terminal.
        seen_classes: `refuse`, or `report`, which allows that validation tasks are of training classes.
        trainer: other keys of `conf/trainer/default.yaml`, such as `meta_batch_size`.

    Raises:
        ValueError: a name, key or value that is not allowed, parts that do not fit together, or validation classes
            that are among the training classes.
        RunError: a loss or gradient is not finite.
    """
    keys = {"seed": seed, "device": device, "precision": precision, "trainer": {"steps": steps, **trainer}}
    chosen = {"algorithm": algorithm, "model": model, "dataset": tasks, "inner": inner, "optimizer": optimizer}
    one_of("seen_classes", seen_classes, (REFUSE, REPORT))
    with computing_with(precision):
        try:
            parts, job = _assemble(chosen, keys, transductive)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{reason}; give that key a value by metalearn.named(NAME, KEY=VALUE)") from error
        check_compatible(parts.algorithm, parts.model, parts.start, parts.source, first_tasks(parts))
        check_unseen(seen_by(parts, None), parts.source, "val", seen_classes)
        return _trained(parts, job, progress)


def _trained(parts: Parts, job: Job, progress: bool) -> "TrainedLearner":
    settings = parts.settings
    window = Window(0, 0, settings.steps, settings.meta_batch_size, parts.algorithm.trained_on)
    log = bar_log(window) if progress else SILENT
    kept: list[Snapshot] = []
    run = make_run(job, parts, connect(parts), _in_memory(kept), log, NEVER, Seen())
    try:
        reached = fit(run, new_learner(parts.start, parts.outer.start, settings.ema_decay), Progress())
    finally:
        log.close()
    return TrainedLearner(kept[0].params, reached.best or {}, parts, job.config)


@dataclass(frozen=True)
class TrainedLearner:
    """A learner that `train` has trained: the meta-parameters of the best validation, and its figures."""

    params: Params = field(repr=False)
    validation: dict[str, Any]
    _parts: Parts = field(repr=False)
    _config: DictConfig = field(repr=False)

    def evaluate(
        self,
        tasks: Tasks | None = None,
        *,
        split: str = "test",
        count: int | None = None,
        seen_classes: str = "refuse",
    ) -> dict[str, Any]:
        """The figures over `count` tasks (default: `test_tasks`) of a split, by default of the tasks that it has
        learned from: `accuracy` or `mse`, `ci95`, `loss`, `by_step` and others. With `seen_classes="report"` they have
        `seen_classes`, which counts the split's classes that it was trained on.

        Raises:
            ValueError: a name that does not exist, tasks that do not fit the network, no number of tasks, or classes
                that it was trained on.
        """
        one_of("split", split, ("train", "val", "test"))
        one_of("seen_classes", seen_classes, (REFUSE, REPORT))
        if count is not None:
            whole_number("count", count, at_least=2)
        parts, seen = self._parts, seen_by(self._parts, None)
        if tasks is not None:
            _check_kinds({"dataset": tasks})
            parts = parts._replace(source=_source(_with_dataset(self._config, tasks), tasks))
        dtype = next(iter(self.params.values())).dtype
        evaluate = chunk_functions(parts.algorithm, parts.source, parts.device, dtype).evaluate
        numbers = tasks_in_chunks(0, count or parts.settings.test_tasks, evaluation_chunk(parts))
        with computing_with(self._config.precision):
            check_evaluation(parts.algorithm, parts.model, self.params, parts.source, split)
            counted = check_unseen(seen, parts.source, split, seen_classes)
            values = join([evaluate(self.params, split, chunk) for chunk in numbers])
        return summary(values, parts.algorithm.evaluated_on) | counted

    def adapt(self, x: ArrayLike | Tensor, y: ArrayLike | Tensor, *, steps: int | None = None) -> "ArrayTask":
        """Adapts to one task.

        Args:
            x: inputs [n, …], as the tasks of the training have them.
            y: labels [n], whole numbers of any size; or real numbers [n] or [n, d].
            steps: inner steps (default: `eval_steps`). Learners without an inner loop do not use it.

        Raises:
            ValueError: inputs of another shape, targets of another kind or number than it has learned, or more labels
                than the network has outputs.
        """
        algorithm, of_numbers = self._parts.algorithm, self._parts.source.classes("train") is None
        if algorithm.evaluated_on != "tasks":
            raise ConfigError("algorithm: it classifies what it was trained on, and learns no tasks")
        if steps is not None:
            whole_number("steps", steps, at_least=0)
        inputs, targets, labels = self._inputs("x", x), _tensor("y", y), None
        if len(targets) != inputs.shape[1]:
            raise ValueError(f"y: has {len(targets)} targets for {inputs.shape[1]} inputs; give one for each")
        if not len(targets):
            raise ValueError("x, y: there is nothing to learn from; give one input or more, with its target")
        if of_numbers:
            targets = self._inputs("y", targets.reshape(len(targets), -1))
        else:
            if targets.ndim != 1 or (targets.is_floating_point() and not (targets == targets.round()).all()):
                raise ValueError("y: must be one whole number for each input, its label: this learner learns classes")
            labels, places = targets.unique(return_inverse=True)
            targets = places.unsqueeze(0).to(self._parts.device)
        params = {name: value.to(self._parts.device) for name, value in self.params.items()}
        support = Batch(inputs, targets)
        try:
            with computing_with(self._config.precision):
                outputs_of = algorithm.adapt(params, support, 0)(inputs).shape[2]
                _check_targets(outputs_of, targets, labels)
                predict = algorithm.adapt(params, support, steps)
        except (IndexError, RuntimeError) as error:
            raise ValueError(f"x, y: this network cannot learn such a task ({error})") from error
        flat = labels is None and _tensor("y", y).ndim == 1

        def outputs(x: ArrayLike | Tensor) -> Tensor:
            inputs = self._inputs("x", x)
            try:
                with computing_with(self._config.precision):
                    return predict(inputs)[0].cpu()
            except (IndexError, RuntimeError, ValueError) as error:
                shape = list(inputs.shape[1:])
                raise ValueError(f"x: this network does not take inputs of shape {shape} ({error})") from error

        return ArrayTask(outputs, labels, flat)

    def _inputs(self, name: str, values: ArrayLike | Tensor) -> Tensor:
        like = next(iter(self.params.values()))
        return _tensor(name, values).to(self._parts.device, like.dtype).unsqueeze(0)


@dataclass(frozen=True)
class ArrayTask:
    """A task of arrays that a learner is adapted to."""

    _outputs: Callable[[ArrayLike | Tensor], Tensor]
    _labels: Tensor | None
    _flat: bool

    def predict(self, x: ArrayLike | Tensor) -> NDArray[np.generic]:
        """The labels of inputs [n, …]; or the real numbers, [n] if the targets of the support set were [n].

        If the model is transductive, the prediction for an input depends on the other inputs of the call.
        """
        outputs = self._outputs(x)
        if self._labels is not None:
            outputs = self._labels[outputs[:, : len(self._labels)].argmax(dim=1)]
        values: NDArray[np.generic] = outputs.numpy()
        return values[:, 0] if self._flat else values


# From the arguments to the parts


def _assemble(chosen: dict[str, Any], keys: dict[str, Any], transductive: bool) -> tuple[Parts, Job]:
    _check_kinds(chosen)
    described: dict[str, Named | dict[str, Any]] = {
        group: _as_named(part) if isinstance(part, str | Named) else {} for group, part in chosen.items()
    }
    if not isinstance(described["dataset"], Named):
        described["dataset"] = _facts(chosen["dataset"])
    config = plain_config(described, keys)
    check_top_level(config)
    check_device(config.device, config.precision)
    source = _source(config, chosen["dataset"])
    model = chosen["model"]
    if isinstance(described["model"], Named):
        model = build(config, "model")
    elif not isinstance(model, Model):
        model = _from_module(model, source, transductive)
    algorithm = chosen["algorithm"]
    if isinstance(described["algorithm"], Named):
        algorithm = build(config, "algorithm", model=model, inner=build(config, "inner"))
    elif not isinstance(algorithm, Algorithm):
        algorithm = algorithm(model=model)
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"algorithm: gives a {type(algorithm).__name__}, and must give a metalearn.types.Algorithm")
    job = Job(config, Path(), "library", None, installed(), [], workers=1)
    return put_together(job, source, model, algorithm), job


_KINDS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "algorithm": (
        "algorithm", lambda part: callable(part) or isinstance(part, Algorithm),
        "a function of `model`, or a metalearn.types.Algorithm"),
    "model": (
        "model", lambda part: callable(part) or isinstance(part, Model),
        "an nn.Module, a class of one, or a metalearn.types.Model"),
    "dataset": (
        "tasks", lambda part: hasattr(part, "episodes"), "an object with the methods of metalearn.types.TaskSource"),
    "inner": ("inner", lambda part: False, "metalearn.named(NAME, KEY=VALUE)"),
    "optimizer": ("optimizer", lambda part: False, "metalearn.named(NAME, KEY=VALUE)"),
}  # fmt: skip
"""By group: its argument, a test of values that are no names, and a description of the values allowed."""


def _check_kinds(chosen: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument of a wrong kind."""
    for group, part in chosen.items():
        argument, fits, what = _KINDS[group]
        if not isinstance(part, str | Named) and not fits(part):
            raise ConfigError(f"{argument}={part!r}: must be a name of conf/, or {what}")


def _as_named(part: str | Named) -> Named:
    return part if isinstance(part, Named) else Named(part, {})


def _with_dataset(config: DictConfig, tasks: Tasks) -> DictConfig:
    """The config with the dataset of this name, if it is a name."""
    if not isinstance(tasks, str | Named):
        return config
    keys = {key: config[key] for key in ("seed", "trainer")}
    return plain_config({"dataset": _as_named(tasks)}, keys)


def _source(config: DictConfig, tasks: Tasks) -> TaskSource:
    source: TaskSource = build(config, "dataset") if isinstance(tasks, str | Named) else tasks
    return source


def _check_targets(outputs: int, targets: Tensor, labels: Tensor | None) -> None:
    """Raises ValueError for targets that a network with this number of outputs cannot learn."""
    if labels is None and targets.shape[2] != outputs:
        raise ValueError(f"y: has {targets.shape[2]} numbers for each input, and this network gives {outputs}")
    if labels is not None and len(labels) > outputs:
        raise ValueError(f"y: has {len(labels)} labels, and this network has {outputs} outputs; give no more")


def _shape(source: TaskSource) -> tuple[int, ...]:
    """The shape of one input."""
    return tuple(source.episodes("train", torch.tensor([0])).query.x.shape[2:])


def _tensor(name: str, values: ArrayLike | Tensor) -> Tensor:
    """The values of an argument, at least one dimension.

    Raises:
        ValueError: they are no numbers.
    """
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: must be an array of numbers; {error}") from error
    if not tensor.ndim:
        raise ValueError(f"{name}={values!r}: must be an array, of one dimension or more; give [{name}]")
    return tensor


def _facts(source: TaskSource) -> dict[str, Any]:
    """The keys of a dataset that models read: the number of classes, and the sizes of a picture."""
    shape, classes = _shape(source), source.classes("train")
    facts = {} if classes is None else {"ways": classes}
    return facts | ({"channels": shape[0], "image_size": shape[1]} if len(shape) == 3 else {})


def _from_module(network: nn.Module | Callable[[], nn.Module], source: TaskSource, transductive: bool) -> Model:
    of = type(network) if isinstance(network, nn.Module) else network
    name = str(getattr(of, "__name__", "model"))

    def make() -> nn.Module:
        made = copy.deepcopy(network) if isinstance(network, nn.Module) else network()
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model: {name} gives a {type(made).__name__}, and must give an nn.Module")
        return made

    advice = "give a network that takes the inputs of the tasks"
    return model_of(make, name=name, shape=_shape(source), transductive=transductive, advice=advice)


def _in_memory(kept: list[Snapshot]) -> Checkpointer:
    """Keeps the parameters of the best validation in `kept`."""

    def save(snapshot: Snapshot, best: bool) -> None:
        if best:
            params = {name: value.detach().clone() for name, value in snapshot.params.items()}
            kept[:] = [snapshot._replace(params=params)]

    return Checkpointer(NO_CHECKPOINTS.due, save, lambda: kept[0] if kept else None, lambda step, best: False)
