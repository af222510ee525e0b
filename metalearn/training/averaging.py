"""The average of the meta-parameters over the steps."""

from metalearn.types import STATE, Params


class Average:
    """An exponential moving average of meta-parameters θ: after k steps Σᵢ dᵏ⁻ⁱ θᵢ / Σᵢ dᵏ⁻ⁱ, over i = 1 … k.

    Its start has no weight: Kingma and Ba 2015 (arXiv 1412.6980), section 7.2. Of state (`metalearn.types.STATE`) it
    has the present value.

    Args:
        decay: d, 0 or above, and below 1.
        params: the average so far; before the first step, the parameters at their start. They are copied.
        steps: k.
    """

    def __init__(self, decay: float, params: Params, steps: int = 0) -> None:
        self.params = {name: value.detach().clone() for name, value in sorted(params.items())}
        self.steps = steps
        self._decay = decay

    def next_weight(self) -> float:
        """The weight of the parameters after a further step, which is counted."""
        self.steps += 1
        return (1 - self._decay) / (1 - self._decay**self.steps)

    def add(self, params: Params) -> None:
        """Takes in the parameters after a step."""
        weight = self.next_weight()
        for name, value in self.params.items():
            value.lerp_(params[name].detach(), 1.0 if name.startswith(STATE) else weight)
