"""A learner, and the tasks that it is adapted to."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metalearn.api.pictures import Picture, listed, prepared
from metalearn.checks import whole_number
from metalearn.tasks.common.pictures import PictureForm
from metalearn.types import Algorithm, Batch, Params

_PIXELS_TOGETHER = 2**18
"""The most pixels of queries that are computed together, unless the learner is transductive. It bounds the memory."""

Label = Hashable
Result = TypeVar("Result")


class Prediction(NamedTuple):
    """The most probable `label` of a picture, and the `probabilities` by label."""

    label: Label
    probabilities: dict[Label, float]


@dataclass(frozen=True, eq=False)
class PictureTask:
    """A task of classified pictures that a learner is adapted to. `labels` are in the order of their first pictures."""

    labels: tuple[Label, ...]
    _learner: "Learner" = field(repr=False)
    _logits: Callable[[Tensor], Tensor] = field(repr=False)

    def predict(self, images: Sequence[Picture]) -> list[Prediction]:
        """The prediction for each picture, in their order.

        If the learner is transductive, it depends on all pictures of the call.

        Raises:
            ValueError: a picture cannot be read or is too large, or something is no picture.
        """
        pictures = listed(images, "images")
        if not pictures:
            return []
        assert self._learner.form is not None
        some = max(1, _PIXELS_TOGETHER // self._learner.form.size**2)
        together = len(pictures) if self._learner.transductive else some
        parts = [pictures[first : first + together] for first in range(0, len(pictures), together)]
        return [prediction for part in parts for prediction in self._predict(part)]

    def _predict(self, pictures: Sequence[Picture]) -> list[Prediction]:
        learner = self._learner
        assert learner.form is not None
        x = learner.on_device(prepared(pictures, learner.form).unsqueeze(0))
        rows = self._logits(x)[0].double().softmax(dim=1).tolist()
        tables = [dict(zip(self.labels, row, strict=True)) for row in rows]
        return [Prediction(max(table, key=lambda label: table[label]), table) for table in tables]


@dataclass(frozen=True, eq=False)
class Regression:
    """A task of real numbers that a learner is adapted to."""

    _learner: "Learner" = field(repr=False)
    _values: Callable[[Tensor], Tensor] = field(repr=False)
    _flat: bool = field(repr=False)

    def predict(self, x: Any) -> NDArray[np.float64]:
        """The values at `x` [n] or [n, inputs]: [n] if the targets were [n], else [n, outputs].

        Raises:
            ValueError: `x` holds something else than finite numbers, or another number of inputs.
        """
        inputs = self._learner.on_device(_numbers(x, "x"))
        values: NDArray[np.float64] = _tried(lambda: self._values(inputs), inputs)[0].double().cpu().numpy()
        return values[:, 0] if self._flat else values


@dataclass(frozen=True, eq=False)
class Learner:
    """The learner that a run has trained.

    `name` is its algorithm. `ways` is the number of classes of every task; None if any number will do, or if it learns
    real numbers. `trained_ways` and `shots` are sizes of the run's tasks. `form` is the form of its pictures; None for
    real numbers. If it is `transductive`, all pictures of a call of `predict` are normalised, or predicted, together.
    """

    name: str
    ways: int | None
    trained_ways: int | None
    shots: int | None
    transductive: bool
    form: PictureForm | None
    _algorithm: Algorithm = field(repr=False)
    _params: Params = field(repr=False)

    def adapt(self, inputs: Any, targets: Any, *, steps: int | None = None) -> PictureTask | Regression:
        """Adapts to one task: its support set.

        Args:
            inputs: pictures of any sizes (`metalearn.api.pictures.Picture`); for real numbers, x [n] or [n, inputs].
            targets: the label of each picture, any hashable values; or y [n] or [n, outputs].
            steps: inner steps (default: as in the run's test). Learners without an inner loop do not use it.

        Raises:
            ValueError: not as many targets as inputs, pictures that cannot be read, too few of them, or a number of
                classes that this learner does not take.
        """
        if steps is not None:
            whole_number("steps", steps, at_least=0)
        if self.form is None:
            return self._adapt_to_numbers(inputs, targets, steps)
        pictures, labels = listed(inputs, "images"), _labels(targets)
        if len(pictures) != len(labels):
            raise ValueError(
                f"labels: there are {len(labels)} for {len(pictures)} images; give one label for each image"
            )
        numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        self._check_classes(len(numbers))
        y = torch.tensor([[numbers[label] for label in labels]])
        support = Batch(self.on_device(prepared(pictures, self.form).unsqueeze(0)), y.to(self.device))
        return PictureTask(tuple(numbers), self, self._algorithm.adapt(self._params, support, steps))

    def _check_classes(self, classes: int) -> None:
        if self.ways is not None and classes != self.ways:
            raise ValueError(
                f"labels: they name {classes} classes, and this learner (algorithm={self.name}) has an output for each "
                f"of the {self.ways} classes that it was trained with; give images of {self.ways} classes, or load a "
                "run of algorithm=protonet or algorithm=r2d2, which take any number"
            )
        if classes < 2:
            raise ValueError(
                f"labels: they name {classes} classes, and a task has at least 2; give images of another class"
            )

    def _adapt_to_numbers(self, x: Any, y: Any, steps: int | None) -> Regression:
        inputs, targets = _numbers(x, "x"), _numbers(y, "y")
        if inputs.shape[1] != targets.shape[1]:
            raise ValueError(f"y: has {targets.shape[1]} values for the {inputs.shape[1]} of x; give one for each")
        if not inputs.shape[1]:
            raise ValueError("x: is empty; give at least one point")
        support = Batch(self.on_device(inputs), self.on_device(targets))
        outputs = _tried(lambda: self.try_on(support), inputs)
        if outputs != targets.shape[2]:
            raise ValueError(f"y: has {targets.shape[2]} numbers for each x, and this learner has {outputs} outputs")
        return Regression(self, self._algorithm.adapt(self._params, support, steps), np.ndim(y) == 1)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self._params.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters."""
        return next(iter(self._params.values())).dtype

    def on_device(self, x: Tensor) -> Tensor:
        """Inputs in the device and type of the parameters."""
        return x.to(self.device, self.dtype)

    def try_on(self, support: Batch) -> int:
        """The number of outputs for a support set, without an inner step."""
        return self._algorithm.adapt(self._params, support, 0)(support.x).shape[2]


def _labels(labels: Any) -> list[Label]:
    """The labels as plain values."""
    # Elements of an array or tensor must compare and hash as numbers do.
    values = listed(labels.tolist() if hasattr(labels, "tolist") else labels, "labels")
    values = [value.item() if isinstance(value, Tensor) and value.ndim == 0 else value for value in values]
    for number, value in enumerate(values):
        try:
            hash(value)
        except TypeError as error:
            raise ValueError(
                f"labels[{number}]={value!r}: a {type(value).__name__} cannot be a label; give texts or numbers"
            ) from error
    return values


def _numbers(values: Any, name: str) -> Tensor:
    """[n] or [n, d] as a tensor [1, n, d].

    Raises:
        ValueError: something else, or a number that is not finite.
    """
    try:
        array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: must be an array of numbers; {error}") from error
    if array.ndim not in (1, 2) or not np.isfinite(array).all():
        raise ValueError(f"{name}: must be finite numbers of shape [n] or [n, d], and its shape is {list(array.shape)}")
    return torch.from_numpy(array.reshape(1, len(array), -1 if array.size else 1))


def _tried(compute: Callable[[], Result], x: Tensor) -> Result:
    try:
        return compute()
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"x: the network does not take {x.shape[2]} numbers for each point ({error})") from error
