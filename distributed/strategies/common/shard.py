"""A part of a network that lives on one worker: computes its stages for whoever calls, keeps its parameters, and
steps them where they are.

Every micro-batch gets leaf copies of the parameters of its own, so that gradients can be as_metrics apart and added in
one order; so the network is trained to the same bits as in one process.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import autograd, rpc

from distributed.reduce import Combine
from distributed.strategies.common.chunks import to_cpu
from distributed.strategies.common.cost import Share
from distributed.strategies.common.work import Pieces, Tensors

Window = tuple[float, float]


class State(NamedTuple):
    """Parameters by name; of the optimiser what it keeps for each, and the settings of its one group."""

    params: Tensors
    kept: dict[str, dict[str, Any]]
    group: dict[str, Any]


class Shard:
    """Stages `first` to `last` (exclusive) of a network, with their parameters and optimiser.

    Args:
        pieces: the whole network.
        reduce: from the micro-batches' summed gradients and numbers of samples to the gradient.
        first, last: this shard's stages.
        state: what it starts from.
        device: where it computes; what it sends goes by the CPU.
        timeout: seconds that the shard before may take to send.
    """

    def __init__(
        self,
        pieces: Pieces,
        reduce: Combine,
        first: int,
        last: int,
        state: State,
        *,
        device: torch.device,
        timeout: float,
    ) -> None:
        self._pieces, self._reduce, self._timeout = pieces, reduce, timeout
        self._stages = pieces.stages[first:last]
        self._ends = last == len(pieces.stages)
        self._device = device
        self._params = {
            name: value.to(device, copy=True).requires_grad_() for name, value in sorted(state.params.items())
        }
        self._optimizer = pieces.start(self._params)
        if state.kept:
            numbered = {i: state.kept[name] for i, name in enumerate(self._params) if name in state.kept}
            group = state.group | {"params": list(range(len(self._params)))}
            self._optimizer.load_state_dict({"state": numbered, "param_groups": [group]})
        self._one_at_a_time = threading.Lock()
        self._copies: dict[int, Tensors] = {}
        self._sums: dict[int, Tensors] = {}
        self._seconds = 0.0
        self._backward: dict[int, Window] = {}
        self._sent_back = 0

    def param_refs(self) -> list["rpc.RRef[Tensor]"]:
        return [rpc.RRef(value) for value in self._params.values()]

    def step(self) -> None:
        """What torch's DistributedOptimizer calls: the gradients are there already."""
        self._optimizer.step()

    def run(self, before: Any, split: str, indices: Tensor, number: int, params: Tensors | None) -> Any:
        """Computes a micro-batch.

        Args:
            before: a reference to what the shard before made of it; None: this is the first shard.
            split, indices: its samples.
            number: of the micro-batch.
            params: to evaluate by; None: train by own ones.

        Returns:
            What the next shard needs; from the last shard what `Pieces.outcome` or `Pieces.values` gives.
        """
        h, known = self._pieces.inputs(split, indices) if before is None else before.to_here(timeout=self._timeout)
        training = params is None
        with self._one_at_a_time, torch.set_grad_enabled(training):
            began = time.perf_counter()
            if params is None:
                params = self._copies[number] = {
                    name: value.detach().clone().requires_grad_() for name, value in self._params.items()
                }
                if before is not None:
                    self._sent_back += h.nbytes
            params = {name: value.to(self._device) for name, value in params.items()}
            outputs = h.to(self._device)
            for stage in self._stages:
                outputs = stage.apply(params, outputs, known)
            if training:
                self._watch(number, outputs, [*params.values(), *([h] if h.requires_grad else [])])
            result = self._result(outputs, split, indices, known)
            if training:
                self._seconds += time.perf_counter() - began
        return result

    def _result(self, outputs: Tensor, split: str, indices: Tensor, known: int) -> Any:
        if not self._ends:
            return outputs.cpu(), known
        judge = self._pieces.outcome if torch.is_grad_enabled() else self._pieces.values
        return to_cpu(judge(outputs[:, known:], split, indices))

    def _watch(self, number: int, outputs: Tensor, inputs: Sequence[Tensor]) -> None:
        """Notes when the backward pass comes to this shard, and when it has computed the latest gradient."""

        def note(gradient: Tensor) -> None:
            now = time.perf_counter()
            began, _ = self._backward.get(number, (now, now))
            self._backward[number] = (began, now)

        for tensor in (outputs, *inputs):
            tensor.register_hook(note)

    def collect(self, ctx: int) -> None:
        """Takes the gradients that a backward pass has left in its context."""
        found = autograd.get_gradients(ctx)
        for number, copies in self._copies.items():
            self._sums[number] = {
                name: found[copy] if copy in found else torch.zeros_like(copy) for name, copy in copies.items()
            }
        self._copies = {}

    def prepare(self, counts: Sequence[int], rate: float) -> str | None:
        """Makes the gradient of the step, to be applied at `rate`; the name of a parameter whose one is not finite."""
        sums, self._sums = self._sums, {}
        for name, gradient in self._reduce([sums[number] for number in sorted(sums)], counts).items():
            if not torch.isfinite(gradient).all():
                return name
            self._params[name].grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return None

    def cost(self) -> Share:
        """Since it was last asked: seconds of training, and bytes of gradients sent back to the shard before."""
        share = Share(self._seconds + _covered(self._backward.values()), self._sent_back)
        self._seconds, self._backward, self._sent_back = 0.0, {}, 0
        return share

    def state(self) -> State:
        saved = self._optimizer.state_dict()
        kept = {name: saved["state"][i] for i, name in enumerate(self._params) if i in saved["state"]}
        group = {key: value for key, value in saved["param_groups"][0].items() if key != "params"}
        state = State({name: value.detach() for name, value in self._params.items()}, kept, group)
        return State(*to_cpu(tuple(state)))


def _covered(windows: Any) -> float:
    """Seconds that lie in at least one window."""
    covered, until = 0.0, 0.0
    for began, ended in sorted(windows):
        covered += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return covered
