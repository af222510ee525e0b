"""An optimiser whose parameters are updated as one flat tensor, in one pass for all of them.

It stands in place of torch.optim.Adam and torch.optim.SGD: it steps by their functional forms, to the same bits, and
reads and writes their `state_dict`. But to construct one of torch's imports torch._dynamo, which takes seconds.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from metalearn.types import STATE, Params

OptimizerSettings = dict[str, Any]
STEPS = "step"
"""The name of the number of steps in the state; it is one number for all parameters."""

Step = Callable[[Tensor, Tensor, Params, OptimizerSettings], None]
"""From the values and gradients [P] of all parameters, the state and the settings. It changes values and state."""


GuardedStep = Callable[[Tensor, Tensor, Params, OptimizerSettings, Tensor, Tensor], None]
"""As `Step`, at a rate [] of its own, and it changes nothing where the last argument [] is not 0."""


class FlatOptimizer:
    """An optimiser of parameters of one type, on one device; see `metalearn.types.Optimizer`.

    Args:
        params: leaves. A step needs the `grad` of each, but for state (`metalearn.types.STATE`), which it leaves alone.
        settings: the settings of the only parameter group, with `lr`.
        update: one step.
        guarded: one step on a GPU, which may be skipped there.
        names: of the state once a step is done; each tensor is [P], but for the number `STEPS`.
    """

    def __init__(
        self,
        params: Params,
        settings: OptimizerSettings,
        update: Step,
        guarded: GuardedStep,
        names: Sequence[str],
    ) -> None:
        self._params = [param for name, param in params.items() if not name.startswith(STATE)]
        self._settings, self._update, self._guarded, self._names = list(settings), update, guarded, list(names)
        self.param_groups: list[OptimizerSettings] = [settings | {"params": self._params}]
        self._state: Params = {}

    @torch.no_grad()
    def step(self) -> None:
        gradients = [param.grad for param in self._params if param.grad is not None]
        assert len(gradients) == len(self._params), "every parameter has a gradient"
        values, grads = joined(self._params), joined(gradients)
        self._update(values, grads, self._state, self.param_groups[0])
        for param, value in zip(self._params, self._parts(values), strict=True):
            param.copy_(value)

    @torch.no_grad()
    def step_of_device(self, values: Tensor, grads: Tensor, rate: Tensor, skip: Tensor) -> None:
        """A step of all parameters, which lie one after the other in `values` [P], without waiting for the device. The
        rate [] is its own; nothing changes where `skip` [] is not 0."""
        self._guarded(values, grads, self._state, self.param_groups[0], rate, skip)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """The state of each parameter, in its shape. A single number belongs to all."""
        if flat.dim() == 0:
            return [flat] * len(self._params)
        parts = flat.split([param.numel() for param in self._params])
        return [part.view_as(param) for part, param in zip(parts, self._params, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Copies of the state by the parameters' positions, and the settings."""
        by_name = {name: self._parts(value) for name, value in self._state.items()}
        numbers = list(range(len(self._params)))
        state = {i: {name: parts[i].clone() for name, parts in by_name.items()} for i in numbers if by_name}
        return {"state": state, "param_groups": [self.param_groups[0] | {"params": numbers}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over copies of the state and the settings.

        Raises:
            ValueError: the state belongs to other parameters.
        """
        (group,), state = state_dict["param_groups"], state_dict["state"]
        rows = [state.get(i, {}) for i in range(len(self._params))]
        begun = all(row.get(name) is not None for row in rows for name in self._names)
        parts = {name: [torch.as_tensor(row[name]) for row in rows] for name in (self._names if begun else [])}
        shapes = [param.shape for param in self._params]
        of_these = all([part.shape for part in values] == shapes for name, values in parts.items() if name != STEPS)
        if len(group["params"]) != len(self._params) or not of_these:
            raise ValueError(f"the state is that of other parameters than these {len(self._params)}")
        self._state = {
            name: values[0].to(self._params[0].device, torch.float32, copy=True)
            if name == STEPS
            else joined(part.to(self._params[0]) for part in values).detach()
            for name, values in parts.items()
        }
        self.param_groups[0] |= {name: group[name] for name in self._settings}


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """All numbers in one new tensor [P]."""
    return torch.cat([tensor.flatten() for tensor in tensors])
