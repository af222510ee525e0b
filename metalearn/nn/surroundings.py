"""What a network needs beside its inputs and the parameters that learn: the parameters that do not, seeds, constants.

No algorithm knows of them. The code that computes a chunk sets the parameters and seeds, and the model reads them.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch
from torch import Tensor


class PassSeeds:
    """The seeds of what a network draws in training, such as the masks of dropout.

    A seed follows from the seed of the run, the step, the number of the task, and how many forward passes came before
    in the chunk. So it does not depend on the worker, on the other tasks of the chunk, or on a pause.

    Args:
        run: the seed of the run.
        step: the meta-step.
        tasks: the number of each task of the chunk; a micro-batch of samples counts as one task.
        passes: the forward passes before.
    """

    def __init__(self, run: int, step: int, tasks: Sequence[int], passes: int = 0) -> None:
        self._run, self._step, self._tasks, self._passes = run, step, tasks, passes

    def of_pass(self, tasks: int) -> list[int]:
        """The seed of each task in the next forward pass. Raises ValueError if the pass has another number of tasks
        than the chunk."""
        if tasks != len(self._tasks):
            raise ValueError(
                f"model.dropout=true: its random numbers follow from the number of a task, and this algorithm computes "
                f"{tasks} at once in a chunk of {len(self._tasks)} tasks; type model.dropout=false"
            )
        self._passes += 1
        keys = [f"{self._run} {self._step} {task} {self._passes}" for task in self._tasks]
        return [int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) for key in keys]

    def of_task(self, place: int) -> "PassSeeds":
        """Those of one task of the chunk, from the first pass on."""
        return PassSeeds(self._run, self._step, self._tasks[place : place + 1])

    def copy(self) -> "PassSeeds":
        return PassSeeds(self._run, self._step, self._tasks, self._passes)


class Surroundings(NamedTuple):
    """`fixed` are the parameters that do not learn, by name. Without `seeds`, a network is not in training. `ways` is
    the number of classes of every task, where it is known without a look at the labels, which may lie on a GPU. Of the
    outputs for classes, the first `present` are those of a task with fewer classes than others; None: all."""

    fixed: dict[str, Tensor]
    seeds: PassSeeds | None
    ways: int | None
    present: int | None = None


_NOTHING = Surroundings({}, None, None)

_here: ContextVar[Surroundings] = ContextVar("surroundings", default=_NOTHING)


def surroundings() -> Surroundings:
    return _here.get()


@contextmanager
def surrounded(**changes: Any) -> Iterator[None]:
    """Within it, the surroundings have these fields."""
    token = _here.set(_here.get()._replace(**changes))
    try:
        yield
    finally:
        _here.reset(token)


@contextmanager
def with_gradients() -> Iterator[None]:
    """Within it, tensors can have gradients, whatever mode the caller is in. It decorates functions, too."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def constant(value: Tensor) -> Callable[[torch.device, torch.dtype], Tensor]:
    """A function that gives `value` on a device, in a type. Several threads may call it."""
    # Copies are kept, since a step that is recorded as a CUDA graph may bring nothing to its GPU.
    copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def placed(device: torch.device, dtype: torch.dtype) -> Tensor:
        copy = copies.get((device, dtype))
        if copy is None:
            with torch.inference_mode(False):  # a copy made in this mode could be in no later graph of autograd
                copy = value.to(device, dtype)
            if type(copy) is Tensor:  # not one of torch.export's, which are only traced
                copies[device, dtype] = copy
        return copy

    return placed


def now_and_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For a computation that a backward pass repeats, in any thread: it has the same surroundings again."""
    return nullcontext(), _Again(_here.get())


class _Again(AbstractContextManager[None]):
    """It can be entered many times: a graph that is kept may have several backward passes."""

    def __init__(self, first: Surroundings) -> None:
        self._first = self._copied(first)
        self._tokens: list[Token[Surroundings]] = []

    def __enter__(self) -> None:
        self._tokens.append(_here.set(self._copied(self._first)))

    def __exit__(self, *_: object) -> None:
        _here.reset(self._tokens.pop())

    @staticmethod
    def _copied(values: Surroundings) -> Surroundings:
        return values if values.seeds is None else values._replace(seeds=values.seeds.copy())


# The precision of products: that of float32, unless the config asks for less.
#
# `tf32` keeps ten bits of float32's mantissa in the products of an NVIDIA GPU; `bf16` keeps seven, on any device. Sums,
# norms, losses and parameters stay float32.
#
# `bf16` rounds the operands of products to nearest even. Triton does so as it reads float32; torch's operations
# round the results too. The kernels in C round nothing, so that a CPU computes products in bf16 by torch's, layer by
# layer: it shows about what a run on a GPU would learn.


_rounds = False

_convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # torch has no type for it


def compute_with(precision: str) -> None:
    """Sets the precision of this process: `float32`, `float64`, `tf32` or `bf16`."""
    products = "tf32" if precision == "tf32" else "ieee"
    _set(precision == "bf16", products, products)


@contextmanager
def computing_with(precision: str) -> Iterator[None]:
    """As `compute_with`, for a block of code. After it, the precision is the one before."""
    before = _rounds, torch.backends.cuda.matmul.fp32_precision, _convolutions.fp32_precision
    compute_with(precision)
    try:
        yield
    finally:
        _set(*before)


def _set(rounds: bool, matmul: str, conv: str) -> None:
    global _rounds
    _rounds = rounds
    torch.backends.cuda.matmul.fp32_precision = matmul
    _convolutions.fp32_precision = conv


def type_of(precision: str) -> torch.dtype:
    """The type of parameters, inputs, and everything but products."""
    return torch.float64 if precision == "float64" else torch.float32


def rounds_products() -> bool:
    """Whether the operands of products are rounded to bfloat16."""
    return _rounds
