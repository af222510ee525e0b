"""A learner, the tasks that it is adapted to, and how both are saved and loaded. Nothing that a folder holds is run."""

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, ListConfig
from PIL import Image
from torch import Tensor

from distributed.reduce import tree_sum
from distributed.strategies.common.work import join
from metalearn.algorithms.common.losses import measured_by
from metalearn.algorithms.common.metrics import reporting
from metalearn.algorithms.common.wrappers import of_present_classes, with_fixed, with_present_classes
from metalearn.api import objects
from metalearn.api.documents import ReadDocument
from metalearn.api.pictures import form_of, listed, prepared
from metalearn.app.parts import REFUSE, REPORT, check_unseen, chosen_loss, evaluated_at_once
from metalearn.config.build import build, import_plugins, option_of
from metalearn.config.check import PRECISIONS
from metalearn.config.options import Named, as_named, plain_config
from metalearn.config.saved import NETWORK, OWN, changed_config, check_saved
from metalearn.config.values import quoted, to_container
from metalearn.errors import ConfigError, NotAdmittedError, one_of, true_or_false, whole_number
from metalearn.models.module import noted_inputs
from metalearn.nn import surroundings
from metalearn.nn.surroundings import computing_with, type_of, with_gradients
from metalearn.reporting.provenance import made_with
from metalearn.runs.checkpoint import Snapshot, fill_learner, fitted, read_named
from metalearn.runs.metrics import KEY, Seen, figures_of, from_meta, to_meta
from metalearn.saved import exporter, form, hub
from metalearn.saved.exporter import FOLDER, Card, NetworkToExport, described, read_form, use
from metalearn.saved.form import MANIFEST, USES, Kind, kind_of
from metalearn.storage.files import StrPath, is_folder, whole_folder
from metalearn.tasks.common.pictures import PictureForm
from metalearn.training.chunks import check_evaluation, chunk_functions
from metalearn.training.settings import tasks_in_chunks
from metalearn.types import Algorithm, Batch, Loss, Model, Params, TaskSource, ways_differ

# The most pixels or numbers of queries that are computed together, which bounds the memory; a transductive learner
# computes all of them together.
_NUMBERS_TOGETHER = 2**18
LEARNER = "learner"  # the folder of the learner within that of a task
TASK = Kind("task", 1, {"labels": list | None, "steps": int | None, "flat": bool}, Batch._fields)

Label = Hashable
Result = TypeVar("Result")


class Prediction(NamedTuple):
    """The most probable `label` of a picture, and the `probabilities` by label."""

    label: Label
    probabilities: dict[Label, float]


class SupportSet(NamedTuple):
    """What a learner is adapted to."""

    batch: Batch  # as the network takes it; y [1, n] of the places in `labels`, or [1, n, outputs] of numbers
    steps: int | None  # inner steps; None: as in the test
    labels: tuple[Label, ...] | None = None  # of the classes; None for a regression
    flat: bool = False  # whether the targets of a regression were [n]


@dataclass(frozen=True, eq=False)
class AdaptedTask:
    """What the kinds of tasks have in common."""

    _learner: "Learner" = field(repr=False)
    _support: SupportSet = field(repr=False)

    def save(self, path: StrPath) -> None:
        """Saves it in a new folder, for `metalearn.load_task` in any process: the learner, as `Learner.save` does, and
        the support set, to which it adapts again when it is loaded. So any algorithm will do, and no code is saved.
        Raises ValueError if there is something at `path`, it cannot be written, or a label is neither a text nor a
        number."""
        with whole_folder("path", Path(path)) as folder:
            self._fill(folder)

    def _fill(self, folder: Path) -> None:
        """Writes the task into an empty folder."""
        batch, steps, labels, flat = self._support
        for label in labels or ():
            if type(label) not in (str, int, float, bool) or label != label:  # JSON keeps no others
                raise ConfigError(f"labels: {label!r} is neither a text nor a number, and no other can be saved")
        self._learner.save(folder / LEARNER)
        form.fill(folder, TASK, batch._asdict(), {"labels": labels, "steps": steps, "flat": flat})

    def export(
        self, path: StrPath, *, format: str = "onnx", licence: str | None = None, key: str = "path"
    ) -> list[str]:
        """Writes a new folder with one program of the adapted network, which runs without this one, and its model card;
        returns what there is to say, in lines. Raises ValueError if the learner takes no pictures, a package is
        missing, torch cannot export the algorithm, the program differs from `predict` by more than 1e-4, or the folder
        cannot be written.

        Args:
            format: `onnx` (the extra `onnx`) or `torch-export`; or `folder`, as `save`, with a card.
            licence: of the program, for the card.
            key: how messages name the path.
        """
        learner, labels, out = self._learner, [str(label) for label in self._support.labels or ()], Path(path)

        def program() -> NetworkToExport:
            if learner.form is None or not isinstance(self, Classification):
                raise ConfigError(
                    f"format={format}: only learners of pictures become programs, and this one takes arrays"
                )
            if learner.device.type != "cpu":
                raise ConfigError(f"format={format}: programs are made on the CPU; load the learner with device='cpu'")
            if learner.taught.algorithm.transductive:
                raise ConfigError(
                    f"algorithm={learner.name}: learns from the pictures that are asked, so there is no program that "
                    "only answers; take a learner of another algorithm, such as protonet"
                )
            x = learner.shown([Image.fromarray(picture) for picture in exporter.noise(learner.form)])[0].float()

            def answer(pictures: Tensor) -> tuple[Tensor]:
                return (self._probabilities(learner.on_device(pictures[None])).float(),)

            return NetworkToExport(answer, x, f"algorithm={learner.name}", ["probabilities"], folded=True)

        facts = {
            "Classes": exporter.first_few_of(labels), "Algorithm": learner.name,
            "Queries": "all pictures of a call are normalised together" if learner.transductive else "",
            "Licence": licence or "not known", **made_with(),
        }  # fmt: skip
        uses = {FOLDER: use("task", NAME=out.name), **exporter.uses_of_pictures("probabilities")}
        kind = "image-classification" if learner.form else "tabular-classification"
        output = "probabilities [n, classes]"
        about = exporter.picture_input(learner.form, labels, output=output) if learner.form else None
        card = Card(out.name, kind, ["few-shot", learner.name], licence, facts, uses)
        return exporter.export(key, out, format, fill=self._fill, program=program, about=about, card=card)


@dataclass(frozen=True, eq=False)
class Classification(AdaptedTask):
    """A task of classes that a learner is adapted to. `labels` are in the order of their first examples."""

    labels: tuple[Label, ...]
    _logits: Callable[[Tensor], Tensor] = field(repr=False)

    @with_gradients()
    def predict(self, inputs: Any) -> list[Prediction]:
        """The prediction for each of the pictures, or for each of the inputs [n, …], in their order. If the learner is
        transductive, it depends on all inputs of the call. Raises ValueError if a picture cannot be read or is too
        large, something is no picture, or inputs do not fit."""
        learner = self._learner
        queries = learner.read(inputs)
        if not len(queries):
            return []
        size = learner.form.size**2 if learner.form else max(1, queries[0].numel())
        together = len(queries) if learner.transductive else max(1, _NUMBERS_TOGETHER // size)
        predictions = []
        for first in range(0, len(queries), together):
            x = learner.shown(queries[first : first + together])
            for row in _tried(partial(self._probabilities, x), x).tolist():
                table = dict(zip(self.labels, row, strict=True))
                predictions.append(Prediction(max(table, key=table.__getitem__), table))
        return predictions

    def _probabilities(self, x: Tensor) -> Tensor:
        """Of the classes [n, ways], float64, for inputs [1, n, …]."""
        with self._learner.computing():
            return self._logits(x)[0].double().softmax(dim=1)


@dataclass(frozen=True, eq=False)
class Regression(AdaptedTask):
    """A task of real numbers, or of several labels of a sample, that a learner is adapted to."""

    _values: Callable[[Tensor], Tensor] = field(repr=False)

    @with_gradients()
    def predict(self, x: Any) -> NDArray[np.floating[Any]]:
        """The values at `x` [n] or [n, …]: [n] if the targets were [n], else [n, outputs], in the learner's precision.
        Of several labels, the probability of each. Raises ValueError if `x` holds something else than finite numbers,
        or another number of inputs."""
        inputs = self._learner.shown(self._learner.read(x))
        with self._learner.computing():
            values: NDArray[np.floating[Any]] = _tried(lambda: self._values(inputs), inputs)[0].cpu().numpy()
        return values[:, 0] if self._support.flat else values


class Taught(NamedTuple):
    """What a learner is made of: as `metalearn.app.parts.Parts`, and the classes that it has seen."""

    config: DictConfig
    source: TaskSource
    model: Model
    algorithm: Algorithm
    seen: Seen


@dataclass(frozen=True, eq=False)
class Learner:
    """What a run has learned, or `metalearn.train`.

    `name` is its algorithm. `ways` is the number of classes of every task; None if any number will do, or if it learns
    real numbers. `trained_ways` and `shots` are sizes of the tasks that it was tested on; a range of shots is a list.
    `form` is the form of its pictures; None if it takes arrays. If it is `transductive`, all inputs of a call of
    `predict` are normalised, or predicted, together. `validation` has the figures of its best validation. `params` are
    the meta-parameters. `taught` has the parts that it is made of, as pure functions and its config.
    """

    name: str
    ways: int | None
    trained_ways: int | None
    shots: int | list[int] | None
    transductive: bool
    form: PictureForm | None
    validation: dict[str, Any] = field(repr=False)
    params: Params = field(repr=False)
    taught: Taught = field(repr=False)

    @overload
    def adapt(self, inputs: Any, targets: Any, *, steps: int | None = None) -> Classification | Regression: ...

    @overload
    def adapt(self, inputs: Any) -> ReadDocument: ...

    @with_gradients()
    def adapt(
        self, inputs: Any, targets: Any = None, *, steps: int | None = None
    ) -> Classification | Regression | ReadDocument:
        """Adapts to one task: its support set. To a learner of `algorithm=reading` give a text alone, which it reads.

        Args:
            inputs: pictures of any sizes (`metalearn.api.pictures.Picture`); if `form` is None, arrays x [n] or [n, …],
                or a dictionary or tuple of such, as the tasks of the training have them.
            targets: the label of each input, any hashable values; for real numbers, y [n] or [n, outputs]; for several
                labels of an input, y [n, classes] of 0 and 1. If the loss has `weights`, labels are the numbers of
                classes.
            steps: inner steps (default: as in the test). Learners without an inner loop do not use it.

        Raises:
            ValueError: it learns no tasks; not as many targets as inputs, inputs that cannot be read or do not fit, too
                few of them, or a number of classes that this learner does not take.
        """
        self._check_learns_tasks()
        if (stream := self.taught.algorithm.stream) is not None:
            if targets is not None or steps is not None:
                raise ValueError("targets, steps: a text is all that this learner takes; type adapt(text)")
            assert self.trained_ways is not None
            return ReadDocument(stream(self.params), self.trained_ways, self.device).read(inputs)
        if steps is not None:
            whole_number("steps", steps, at_least=0)
        loss = self.taught.algorithm.computes
        if self.trained_ways is None:
            x, y = self.read(inputs).unsqueeze(0), _numbers(targets, "y").flatten(2)
            if x.shape[1] != y.shape[1]:
                raise ValueError(f"y: has {y.shape[1]} values for the {x.shape[1]} of x; give one for each")
            if not x.shape[1]:
                raise ValueError("x: is empty; give at least one point")
            batch = Batch(self.on_device(x), self.on_device(y))
            return self.adapted_to(SupportSet(batch, steps, flat=np.ndim(targets) == 1))
        examples = self.read(inputs)
        several = loss is not None and "labels" in loss.allows
        if loss is not None and several and loss.allows != ("labels",):  # one's own loss takes both
            several = np.ndim(targets) == 2
        if several:
            y = _numbers(targets, "targets")
            if y.shape[1:] != (len(examples), self.trained_ways) or bool(((y < 0) | (y > 1)).any()):
                raise ValueError(
                    f"targets: must be 0 or 1 for each of {self.trained_ways} classes, [{len(examples)}, "
                    f"{self.trained_ways}], and have the shape {list(y.shape[1:])}"
                )
            return self.adapted_to(SupportSet(Batch(self.shown(examples), self.on_device(y)), steps))
        labels = _labels(targets)
        if len(examples) != len(labels):
            what = "images; give one label for each image" if self.form else "inputs; give one label for each"
            raise ValueError(f"labels: there are {len(labels)} for {len(examples)} {what}")
        # Classes are numbered in the order of their first examples, unless the loss has weights for their numbers.
        weights = None if loss is None else loss.weights
        numbers = {
            label: place for place, label in enumerate(dict.fromkeys(labels) if weights is None else range(weights))
        }
        if strange := [label for label in labels if label not in numbers]:
            raise ValueError(
                f"labels: {strange[0]!r} is no number from 0 to {len(numbers) - 1}, and the loss has a weight for each "
                "class by its number"
            )
        self._check_classes(self.ways, len(numbers))
        y = torch.tensor([[numbers[label] for label in labels]], device=self.device)
        return self.adapted_to(SupportSet(Batch(self.shown(examples), y), steps, tuple(numbers)))

    def adapted_to(self, support: SupportSet) -> Classification | Regression:
        """As `adapt`, from a support set as the network takes it. Raises ValueError if it does not fit."""
        batch, steps, labels, _ = support
        outputs = _tried(lambda: self.try_on(batch), batch.x)
        if labels is not None:
            self._check_classes(outputs, len(labels))
        elif outputs != batch.y.shape[2]:
            raise ValueError(f"y: has {batch.y.shape[2]} numbers for each x, and this learner has {outputs} outputs")
        with self.computing():
            predict = self.taught.algorithm.adapt(self.params, batch, steps)
        if labels is not None:
            return Classification(self, support, labels, predict)
        several = self.trained_ways is not None
        return Regression(self, support, (lambda x: predict(x).sigmoid()) if several else predict)

    def evaluate(
        self, tasks: str | Named | TaskSource | None = None, *, split: str = "test", count: int | None = None,
        seen_classes: str = REFUSE,
    ) -> dict[str, Any]:  # fmt: skip
        """The figures over `count` tasks (default: `test_tasks`) of a split, by default of the tasks that it has
        learned from: `accuracy`, `mse` or `mae`, `ci95`, `loss`, `by_step` and others. With `seen_classes="report"`
        they have `seen_classes`, which counts the split's classes that it was trained on. Raises ValueError for a name
        that does not exist, tasks that do not fit the network, no number of tasks, or classes that it was trained on.
        """
        one_of("split", split, ("train", "val", "test"))
        one_of("seen_classes", seen_classes, (REFUSE, REPORT))
        if count is not None:
            whole_number("count", count, at_least=2)  # one task has no interval
        config, source, model, algorithm, seen = self.taught
        if tasks is not None:
            check_tasks(tasks)
            if isinstance(tasks, str | Named):  # with the seed and the trainer of this learner
                keys = {key: config[key] for key in ("seed", "trainer")}
                source = build(plain_config({"dataset": as_named(tasks)}, keys), "dataset")
            else:
                source = tasks
        settings = build(config, "trainer")
        evaluate = chunk_functions(algorithm, source, self.device, self.dtype, tree_sum).evaluate
        chunk = evaluated_at_once(settings, algorithm, model, source, self.device)
        with self.computing():
            check_evaluation(algorithm, model, self.params, source, split)
            counted = check_unseen(seen, source, split, seen_classes)
            numbers = tasks_in_chunks(0, count or settings.test_tasks, chunk, split)
            values = join([evaluate(self.params, split, some) for some in numbers])
        return figures_of(values, source, split, algorithm.evaluated_on, model.reach) | counted

    def save(self, path: StrPath) -> None:
        """Saves it in a new folder, for `metalearn.load` in any process: `params.safetensors` has all parameters, and
        `meta.json` says how they are used. No code is saved: of a part that was an object, it has the name. Raises
        ValueError if there is something at `path`, it cannot be written, or the learner learns no tasks."""
        self._check_learns_tasks()
        taught = self.taught
        config = objects.without_file(to_container(taught.config), taught.source, taught.algorithm.computes)
        facts = {
            "preprocessing": described(self.form) if self.form else None, "step": self.validation.get("step", 0),
            "validation": self.validation, "probe": self.probe().tolist(),
            # As configured: a network whose samples do not see each other is found to be so again.
            "queries_together": config["model"].get("transductive", self.taught.model.transductive),
            KEY: to_meta(self.taught.seen),
        }  # fmt: skip
        with whole_folder("path", Path(path)) as folder:
            fill_learner(folder, self.params, config, facts, weights=objects.carried_weights(config))

    def probe(self, shape: Sequence[int] | None = None) -> NDArray[np.float64]:
        """The outputs for two inputs of this shape that are always the same; by default of that which the model notes,
        and empty if it notes none."""
        shape = shape or self.taught.config.model.get("shape")
        if shape is None:
            return np.empty(0)
        x = self.on_device(self._filled(torch.rand(1, 2, *shape, generator=torch.Generator().manual_seed(0))))
        y = x.new_zeros(1, 2, 1) if self.trained_ways is None else torch.tensor([[0, 1]], device=self.device)
        with self.computing():
            outputs = self.taught.algorithm.adapt(self.params, Batch(x, y), 0)(x)
        return outputs.double().flatten().cpu().numpy()

    def _filled(self, x: Tensor) -> Tensor:
        """Inputs [1, n, …] to try the network with."""
        inputs = noted_inputs(self.taught.config)
        return x if inputs is None else surroundings.filled(inputs, x[0]).unsqueeze(0)

    def _check_learns_tasks(self) -> None:
        if self.taught.algorithm.evaluated_on != "tasks":
            raise ConfigError(f"algorithm={self.name}: it classifies what it was trained on, and learns no tasks")

    def _check_classes(self, ways: int | None, classes: int) -> None:
        """Raises ValueError for a number of classes that the learner does not take."""
        fewer = ways is not None and classes < ways and ways_differ(self.taught.source)
        if ways is not None and classes != ways and not fewer:
            raise ValueError(
                f"labels: they name {classes} classes, and this learner (algorithm={self.name}) has an output for each "
                f"of the {ways} classes that it was trained with; give examples of {ways} classes, or take a "
                "learner of algorithm=protonet or algorithm=r2d2, which take any number"
            )
        if classes < 2:
            raise ValueError(
                f"labels: they name {classes} classes, and a task has at least 2; give examples of another class"
            )

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self.params.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters."""
        return next(iter(self.params.values())).dtype

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Within it, products have the precision of the training, whatever was trained since, and tensors can have
        gradients, whatever mode the caller is in."""
        with with_gradients(), computing_with(self.taught.config.precision):
            yield

    def read(self, inputs: Any) -> Any:
        """Pictures as a list, or numbers as a tensor [n, …]. Raises ValueError if they are neither."""
        if self.form:
            return listed(inputs, "images")
        several = noted_inputs(self.taught.config)
        return _parts(inputs, several) if several and len(several) > 1 else _numbers(inputs, "x")[0]

    def shown(self, examples: Any) -> Tensor:
        """What `read` has returned, as the network takes it: [1, n, …]. Raises ValueError if a picture cannot be read,
        or something is no picture."""
        return self.on_device((prepared(examples, self.form) if self.form else examples).unsqueeze(0))

    def on_device(self, x: Tensor) -> Tensor:
        """Inputs in the device and type of the parameters."""
        return x.to(self.device, self.dtype)

    def try_on(self, support: Batch) -> int:
        """The number of outputs for a support set, without an inner step."""
        with self.computing():
            return self.taught.algorithm.adapt(self.params, support, 0)(support.x).shape[2]


def learner_of(
    name: str, params: Params, taught: Taught, *, form: PictureForm | None, shape: tuple[int, ...] | None,
    validation: dict[str, Any],
) -> Learner:  # fmt: skip
    """A learner of tasks like those of a source. Inputs have this `shape`; None if it is not known. Raises ConfigError
    if the network does not take the inputs."""
    config, source, model, algorithm, _ = taught
    shots, trained = config.dataset.get("shots"), source.classes("test")
    learner = Learner(
        name=name, ways=None, trained_ways=trained, shots=list(shots) if isinstance(shots, ListConfig) else shots,
        transductive=model.transductive or algorithm.transductive, form=form, validation=validation, params=params,
        taught=taught,
    )  # fmt: skip
    if trained is None or shape is None or algorithm.evaluated_on != "tasks":
        return learner
    # Any number of classes will do if one of two blank inputs may be of a class that the run's tasks did not have.
    x = learner._filled(torch.zeros(1, 2, *shape, device=learner.device, dtype=learner.dtype))
    try:
        outputs = learner.try_on(Batch(x, torch.tensor([[0, trained]], device=learner.device)))
    except (RuntimeError, IndexError) as error:
        raise ConfigError(f"the network does not take inputs of shape {shape} ({error})") from error
    return replace(learner, ways=None if outputs == trained + 1 else outputs)


def check_tasks(tasks: object) -> None:
    """Raises ConfigError for what is neither a name nor a source of tasks."""
    if not isinstance(tasks, str | Named) and not hasattr(tasks, "episodes"):
        raise ConfigError(
            f"tasks={tasks!r}: must be a name of conf/, or an object with the methods of metalearn.types.TaskSource"
        )


def _labels(labels: Any) -> list[Label]:
    """The labels as plain values."""
    # Elements of an array or tensor must compare and hash as numbers do.
    values = listed(labels.tolist() if hasattr(labels, "tolist") else labels, "labels")
    values = [value.item() if isinstance(value, Tensor) and value.ndim == 0 else value for value in values]
    kinds: dict[Label, type] = {}
    for number, value in enumerate(values):
        try:
            kind = kinds.setdefault(value, type(value))  # 1, 1.0 and True are one key of a dictionary
        except TypeError as error:
            raise ValueError(
                f"labels[{number}]={value!r}: a {type(value).__name__} cannot be a label; give texts or numbers"
            ) from error
        if value != value:
            raise ValueError(f"labels[{number}]={value!r}: is missing; leave that example out")
        if kind is not type(value):
            raise ValueError(
                f"labels[{number}]={value!r}: equals a label of type {kind.__name__}; give labels of one type"
            )
    return values


def _numbers(values: Any, name: str) -> Tensor:
    """[n] or [n, …] as a tensor [1, n, 1] or [1, n, …]."""
    try:
        array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: must be an array of numbers; {error}") from error
    if not array.ndim:
        raise ValueError(f"{name}: must be numbers of shape [n] or [n, …], and is a single one")
    if not np.isfinite(array).all():
        raise ValueError(
            f"{name}: must be finite numbers, and {(~np.isfinite(array)).sum()} are not; leave those rows out"
        )
    return torch.from_numpy(array.reshape(1, len(array), *(array.shape[1:] or (1,))))


def _parts(values: Any, inputs: surroundings.Inputs) -> Tensor:
    """Several arrays [n, …], which must be the inputs of the training, as one tensor [n, f]."""
    arrays = values if isinstance(values, Mapping) else dict(enumerate(values)) if isinstance(values, tuple) else {}
    try:
        named = {str(name): torch.as_tensor(np.asarray(value)).unsqueeze(0) for name, value in arrays.items()}
        if any(not value.isfinite().all() for value in named.values()):
            raise ValueError("has numbers that are not finite")
        parts = surroundings.inputs_of(named)
        if {part.name: part.shape for part in parts} != {part.name: part.shape for part in inputs}:
            raise ValueError(f"has {surroundings.described(parts)}")
        return surroundings.packed({part.name: named[part.name] for part in inputs})[0]
    except (TypeError, ValueError) as error:
        expected = surroundings.described(inputs)
        raise ValueError(f"x: {error}; give {expected}, as the tasks of the training have them") from error


def _tried(compute: Callable[[], Result], x: Tensor) -> Result:
    try:
        return compute()
    except (IndexError, RuntimeError, ValueError) as error:
        raise ValueError(f"x: this network does not take inputs of shape {list(x.shape[2:])} ({error})") from error


@with_gradients()
def load_task(
    path: StrPath, *, network: objects.Network | None = None,
    algorithm: Algorithm | Callable[..., Algorithm] | None = None,
    loss: Loss | Callable[[Tensor, Tensor], Tensor] | None = None, plugins: Sequence[str] = (), device: str = "cpu",
) -> Classification | Regression:  # fmt: skip
    """A task that its `save` has saved in the folder `path`, of any origin: nothing in it is run. The learner adapts to
    it again; the other arguments are those of `metalearn.load`. Raises ValueError if there is no such folder, it is
    damaged or refused, or something that the learner needs is missing."""
    folder = Path(path)
    try:
        saved = form.load(folder, TASK)
    except ValueError as error:
        raise ConfigError(f"path={folder}: is no task that can be used: {error}; save it again") from error
    learner = load(folder / LEARNER, network=network, algorithm=algorithm, loss=loss, plugins=plugins, device=device)
    steps, labels, flat = (saved.meta[name] for name in ("steps", "labels", "flat"))
    batch = Batch(learner.on_device(saved.tensors["x"]), saved.tensors["y"].to(learner.device))
    return learner.adapted_to(SupportSet(batch, steps, None if labels is None else tuple(labels), flat))


@with_gradients()
def load(
    path: StrPath, *, network: objects.Network | None = None,
    algorithm: Algorithm | Callable[..., Algorithm] | None = None,
    loss: Loss | Callable[[Tensor, Tensor], Tensor] | None = None, plugins: Sequence[str] = (),
    transductive: bool | None = None, device: str = "cpu", key: str = "path",
) -> Learner:  # fmt: skip
    """The learner that a run has trained, or that `Learner.save` has saved. Raises ValueError if there is nothing to
    load, it is damaged or refused, or it learns no tasks; the message names the folder and what to type.

    Args:
        path: a run folder, whose best checkpoint is taken; the folder of a checkpoint; the folder of a model that
            metalearn export has published; or that of a saved learner.
        network: the class of the network, as package.module.Name, if it is not one of this program's. It runs here, so
            only you can name it. If `metalearn.train` got an object, give the same again: its weights are replaced.
        algorithm, loss: if `metalearn.train` got a function or an object of your own, the same again.
        plugins: packages of your own that the run was trained with. Their code runs here, so only you can admit them.
        transductive: if false, each query is normalised by the support pictures alone, so its prediction does not
            depend on other queries. If true, all queries of a call are normalised together, as a run with
            model.transductive=true does in its test. None: as the saved learner did; of a run, false. Runs of
            algorithm=tim, bd_cspn and laplacian_shot predict all queries of a call together in any case.
        device: `cpu` or `cuda`.
        key: how messages name the folder.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{key}={path!r}: must be the path of a folder, such as outputs/maml_glyphs/seed0")
    if transductive is not None:
        true_or_false("transductive", transductive)
    one_of("device", device, ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no GPU here; give device='cpu'")
    if plugins is None or isinstance(plugins, str):
        raise ConfigError(f"plugins={plugins!r}: must be a list of packages; give plugins=['my_package']")
    folder = checked_folder(key, Path(path))
    saved = read_named(key, folder)
    try:
        together = saved.meta.get("queries_together") is True if transductive is None else transductive
        config = _configured(saved, network, plugins, together)
        import_plugins(config.plugins)
        return _learner(config, saved, network, algorithm, loss, partial(fitted, key, folder), torch.device(device))
    except NotAdmittedError as error:
        raise ConfigError(
            f"{key}={folder}: {error.reason}. Code of {error.package} would run here; if you trust it, give "
            f"plugins=[{error.package!r}] (scripts: --plugins {error.package})"
        ) from error
    except ValueError as error:
        raise ConfigError(str(error) if str(error).startswith(f"{key}=") else f"{key}={folder}: {error}") from error


def from_pretrained(
    name_or_folder: StrPath, *, revision: str | None = None, timeout: float = hub.SECONDS, **options: Any
) -> Learner:
    """A learner in a folder, or in a repository of Hugging Face's hub, of any origin: only files of the kinds that
    `export` writes are fetched, and checked as `load` does; no code of it runs. They stay in the hub's cache. Raises
    ValueError if it cannot be fetched in time, or is refused.

    Args:
        name_or_folder: a folder that is there, or else a repository, such as `you/protonet`.
        revision: a branch, tag or commit of the repository.
        timeout: seconds for all of it.
        options: as for `load`.
    """
    return load(hub.fetch(name_or_folder, revision=revision, timeout=timeout), key="name_or_folder", **options)


def checked_folder(key: str, path: Path) -> Path:
    """The folder that holds the parameters. Raises ConfigError if `path` is no folder, or holds nothing to load."""
    if not is_folder(path):
        raise ConfigError(
            f"{key}={path}: there is no such folder; type the folder of a run, such as outputs/maml_glyphs/seed0"
        )
    kind = kind_of(path)
    if kind == "learner" or (kind in (None, "checkpoint") and (path / MANIFEST).exists()):
        return path
    if is_folder(path / "checkpoints/best"):
        return path / "checkpoints/best"
    if is_folder(path / "checkpoints/last"):
        raise ConfigError(
            f"{key}={path}: this run has not been validated yet, so it has no best checkpoint; type "
            f"{path}/checkpoints/last"
        )
    if kind in USES:
        raise ConfigError(f"{key}={path}: is {USES[kind].format(folder=path)}")
    raise ConfigError(
        f"{key}={path}: holds no run, no checkpoint and no published model; type the folder of a run (it holds "
        "checkpoints), of a checkpoint (…/checkpoints/best), or of a model that metalearn export has written"
    )


def _configured(
    saved: Snapshot, network: objects.Network | None, plugins: Sequence[str], transductive: bool
) -> DictConfig:
    """The config of what was saved, with the caller's choices."""
    plain = check_saved(saved.meta["config"])
    model, by_name = plain["model"], plain["model"].get("network")
    target = by_name.get("_target_") if isinstance(by_name, Mapping) else None
    groups = [group for group in ("algorithm", "model", "dataset", "loss") if OWN in plain.get(group, {})]
    overrides = [f"model.transductive={transductive}".lower()] if "transductive" in model else []
    if target is None:
        if network is not None and "model" not in groups:
            raise ConfigError(f"network={network!r}: its network is one of this program's; leave network out")
    elif network is None:
        raise ConfigError(
            f"it names the network {target}, whose code would run here; if you trust it, give "
            f"network={str(target)!r} (scripts: --network {target})"
        )
    elif not isinstance(network, str):
        raise ConfigError(
            f"network={network!r}: it was trained with a network by its name; give network={str(target)!r}"
        )
    else:
        overrides.append(f"{NETWORK}._target_={quoted(network)}")
    overrides.append(f"plugins=[{','.join(map(quoted, plugins))}]")
    return changed_config(plain, overrides, {}, groups)


def _learner(
    config: DictConfig, saved: Snapshot, network: objects.Network | None, algorithm_object: Any, loss_object: Any,
    fit: Callable[[Params, Params], Params], device: torch.device,
) -> Learner:  # fmt: skip
    one_of("precision", config.precision, PRECISIONS)
    source = objects.TasksElsewhere(config.dataset) if OWN in config.dataset else build(config, "dataset")
    if OWN in config.model:
        model = objects.model_from(objects.object_again("model", config.model, network, "network"), config.model)
    else:
        model = build(config, "model")
    is_object = OWN in config.loss
    loss = objects.object_again("loss", config.loss, loss_object, "loss") if is_object else build(config, "loss")
    loss = reporting(chosen_loss(loss, source), build(config, "metric"), source)
    model = of_present_classes(measured_by(model, loss), source)
    if OWN in config.algorithm:
        again = objects.object_again("algorithm", config.algorithm, algorithm_object, "algorithm")
        name, algorithm = str(config.algorithm[OWN]), objects.algorithm_from(again, model)
    elif algorithm_object is not None:
        raise ConfigError(f"algorithm={algorithm_object!r}: its algorithm is known by its name; leave algorithm out")
    else:
        target = str(config.algorithm._target_)
        name = option_of("algorithm", target) or target.rpartition(".")[2]
        algorithm = build(config, "algorithm", model=model, inner=build(config, "inner"))
    algorithm = with_fixed(with_present_classes(algorithm, source), model)
    if algorithm.evaluated_on != "tasks":
        raise ConfigError(
            f"algorithm={name} classifies what it was trained on, and learns no tasks; load a run of "
            "algorithm=protonet, for example"
        )
    # Only the shapes are needed, and a network of ours can give them without memory for its parameters.
    with torch.device("meta") if model.stages else nullcontext():
        drawn = algorithm.init(torch.Generator("cpu").manual_seed(0))
    shapes = {name: drawn[name].to(type_of(config.precision)) for name in sorted(drawn)}
    params = {name: value.to(device) for name, value in fit(saved.params, shapes).items()}
    for parameter, value in params.items():
        if not value.isfinite().all():
            raise ConfigError(f"the parameter {parameter} is not finite; take another checkpoint")
    if "preprocessing" in saved.meta:  # of a published one
        shown = saved.meta["preprocessing"]
        form = None if shown is None else read_form(shown)
    else:
        form = form_of(source, config.dataset)
    if form is not None and source.classes("test") is None:
        raise ConfigError(
            f"dataset._target_={config.dataset._target_}: gives real numbers for pictures, and no learner takes such"
        )
    shape: tuple[int, ...] | None = None if form is None else (form.channels, form.size, form.size)
    if OWN in config.dataset:
        shape = surroundings.shape_of(objects.inputs_in(config.dataset))
    taught = Taught(config, source, model, algorithm, from_meta(saved.meta))
    validation = saved.meta.get("validation") or {}
    learner = learner_of(name, params, taught, form=form, shape=shape, validation=validation)
    if OWN in config.model:
        expected, outputs = saved.meta.get("probe", []), learner.probe()
        # Rounding differs from machine to machine.
        if len(outputs) != len(expected) or not np.allclose(outputs, expected, rtol=1e-2, atol=1e-3):
            raise ConfigError(
                "network: with these parameters it gives other outputs than the network that was trained; give the "
                "same network, with the same buffers"
            )
    return learner
