"""A shard: the part of a network on one worker. It computes its stages for any caller, and steps its own parameters.

Every micro-batch has its own leaf copies of the parameters. So its gradients are separate and are added in one order,
by `distributed.reduce`, and training gives the same bits as in one process.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distributed.calls import autograd, rpc
from distributed.calls.session import use_own_gpu
from distributed.calls.worker import fetched
from distributed.errors import says_timeout
from distributed.reduce import Combine, Subtree, combine, partials
from distributed.strategies.common.chunks import to_cpu
from distributed.strategies.common.work import Pieces, Tensors, Windows, WorkerCost, watch


class Missed(NamedTuple):
    """In place of outputs: the reason why those of an earlier shard did not come in time. As an exception, torch would
    print it on every worker that it passes, with its traceback."""

    reason: str


class State(NamedTuple):
    """Parameters by name; the optimiser's state of each, by name; the settings of its one parameter group."""

    params: Tensors
    per_param: dict[str, dict[str, Any]]
    group: dict[str, Any]

    @classmethod
    def of(cls, params: Tensors, optimizer: dict[str, Any]) -> "State":
        """Of parameters, and the `state_dict` of their optimiser, which numbers them by sorted names."""
        saved, (group,) = optimizer["state"], optimizer["param_groups"]
        per_param = {name: saved[i] for i, name in enumerate(sorted(params)) if i in saved}
        values = {name: value.detach() for name, value in params.items()}
        return cls(values, per_param, {key: value for key, value in group.items() if key != "params"})

    def optimizer(self) -> dict[str, Any]:
        """The `state_dict` of the optimiser."""
        numbered = {i: self.per_param[name] for i, name in enumerate(sorted(self.params)) if name in self.per_param}
        return {"state": numbered, "param_groups": [self.group | {"params": list(range(len(self.params)))}]}


class Shard:
    """Stages `first` to `last` (exclusive) of a network, with their parameters and optimiser.

    `reduce` makes the gradient of the micro-batches' summed gradients and numbers of samples. The shard computes on
    `device`, and sends tensors through the CPU. The previous shard may take `timeout` seconds to send.
    """

    def __init__(
        self, pieces: Pieces, reduce: Combine, first: int, last: int, state: State, *, device: torch.device,
        timeout: float,
    ) -> None:  # fmt: skip
        self._pieces, self._reduce, self._timeout = pieces, reduce, timeout
        self._stages = pieces.stages[first:last]
        self._ends = last == len(pieces.stages)
        self._device = device
        self._params = {
            name: value.to(device, copy=True).requires_grad_() for name, value in sorted(state.params.items())
        }
        self._optimizer = pieces.start(self._params)
        if state.per_param:
            self._optimizer.load_state_dict(state.optimizer())
        self._one_at_a_time = threading.Lock()
        self._copies: dict[int, Tensors] = {}
        self._sums: dict[Subtree, Tensors] = {}
        self._seconds = 0.0
        self._backward: Windows = {}  # by micro-batch
        self._sent_back = 0

    def param_refs(self) -> list["rpc.RRef[Tensor]"]:
        return [rpc.RRef(value) for value in self._params.values()]

    def step(self) -> None:
        """Called by torch's DistributedOptimizer when `prepare` has set the gradients."""
        self._optimizer.step()

    def run(self, before: list[Any], split: str, indices: Tensor, number: int, params: Tensors | None) -> Any:
        """Computes micro-batch `number`, which has the samples `indices` of a split.

        `before` has a reference to the previous shard's outputs, or nothing on the first shard. With `params` it
        evaluates by these; without, it trains this shard's own. Returns the inputs of the next shard; on the last
        shard, the value of `Pieces.outcome` or `Pieces.values`; or a `Missed`.
        """
        use_own_gpu()
        first = not before
        if first:
            h, support_size = self._pieces.inputs(split, indices)
        else:
            try:
                received = fetched(before, self._timeout)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                if not says_timeout(reason):
                    raise
                return Missed(reason)
            if isinstance(received, Missed):
                return received
            h, support_size = received
        training = params is None
        with self._one_at_a_time, torch.set_grad_enabled(training):
            began = time.perf_counter()
            if params is None:
                params = self._copies[number] = {
                    name: value.detach().clone().requires_grad_() for name, value in self._params.items()
                }
                if not first:
                    self._sent_back += h.nbytes
            params = {name: value.to(self._device) for name, value in params.items()}
            outputs = h.to(self._device)
            for stage in self._stages:
                outputs = stage.apply(params, outputs, support_size)
            if training:
                watch(self._backward, number, [outputs, *params.values(), *([h] if h.requires_grad else [])])
            if self._ends:
                compute = self._pieces.outcome if training else self._pieces.values
                result: Any = to_cpu(compute(outputs[:, support_size:], split, indices))
            else:
                result = outputs.cpu(), support_size
            if training:
                self._seconds += time.perf_counter() - began
        return result

    def collect(self, ctx: int, count: int) -> None:
        """Takes the gradients of a backward pass from its context, and adds them to those of the step's `count`
        micro-batches as far as their order allows."""
        gradients = autograd.get_gradients(ctx)
        copies, self._copies = self._copies, {}
        for number in sorted(copies):
            values = {
                name: gradients[copy] if copy in gradients else torch.zeros_like(copy)
                for name, copy in copies[number].items()
            }
            self._sums = partials([*self._sums.items(), (Subtree(0, number), values)], count)

    def prepare(self, counts: Sequence[int], rate: float) -> str | None:
        """Sets the gradients and the learning rate of a step; returns a parameter whose gradient is not finite.
        `counts` are the micro-batches' numbers of samples."""
        sums, self._sums = self._sums, {}
        for name, gradient in self._reduce([combine(sums.items(), len(counts))], counts).items():
            if not torch.isfinite(gradient).all():
                return name
            self._params[name].grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return None

    def cost(self) -> WorkerCost:
        """Since the last call: seconds of training, and bytes of gradients sent back to the previous shard."""
        covered, until = 0.0, 0.0
        for began, ended in sorted(self._backward.values()):  # passes of several micro-batches overlap
            covered += max(0.0, ended - max(began, until))
            until = max(until, ended)
        cost = WorkerCost(self._seconds + covered, self._sent_back)
        self._seconds, self._backward, self._sent_back = 0.0, {}, 0
        return cost

    def state(self) -> State:
        return State(*to_cpu(tuple(State.of(self._params, self._optimizer.state_dict()))))
