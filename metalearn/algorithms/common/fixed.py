"""Parameters that do not learn: any algorithm's meta-parameters hold them, and the algorithm does not see them."""

from collections.abc import Callable
from typing import Any

from torch import Generator, Tensor

from metalearn.algorithms.common.learners import part, prefixed, without
from metalearn.nn.surroundings import surrounded
from metalearn.types import FIXED, Algorithm, Batch, Model, Params


def with_fixed(algorithm: Algorithm, model: Model) -> Algorithm:
    """The algorithm, with the model's fixed parameters among its own, as `state.fixed.…`. They have no gradient."""
    draw = model.fixed
    if draw is None:
        return algorithm

    def init(generator: Generator) -> Params:
        same = Generator().set_state(generator.get_state())  # the network is drawn from the same seed again
        drawn = algorithm.init(generator)
        return drawn | prefixed(FIXED, draw(same)) if drawn else drawn  # without the others, there is nothing to learn

    def surrounding(compute: Callable[..., Any] | None) -> Any:
        def computed(params: Params, *args: Any) -> Any:
            fixed = {name: value.detach() for name, value in part(FIXED, params).items()}
            with surrounded(fixed=fixed):
                return compute(without(FIXED, params), *args)  # type: ignore[misc]

        return None if compute is None else computed

    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        fixed = part(FIXED, params)
        with surrounded(fixed=fixed):
            predict = algorithm.adapt(without(FIXED, params), support, steps)

        def predicted(x: Tensor) -> Tensor:
            with surrounded(fixed=fixed):
                return predict(x)

        return predicted

    def classify(params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        """Of per-task parameters, which all have the same fixed ones."""
        fixed = {name: value[0] for name, value in part(FIXED, params).items()}
        with surrounded(fixed=fixed):
            return (algorithm.classify or model.apply)(without(FIXED, params), x, support_x)

    return algorithm._replace(
        init=init,
        meta_grad=surrounding(algorithm.meta_grad),
        evaluate=surrounding(algorithm.evaluate),
        adapt=adapt,
        loss=surrounding(algorithm.loss),
        outcome=surrounding(algorithm.outcome),
        classify=classify,
    )
