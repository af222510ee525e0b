"""An algorithm of one's own: a query belongs to the class whose mean of features has the nearest direction.

python examples/own_algorithm.py [STEPS]
"""

import sys

import torch.nn.functional as F
from torch import Tensor

import metalearn
from metalearn.algorithms.common.inner import comparing_learner, features_and_head, one_hot, without_head
from metalearn.types import Algorithm, Batch, Model, Params

SHARPNESS = 10.0


def directions(*, model: Model) -> Algorithm:
    """Prototypical networks with cosines in place of distances. The model's head has no part in it."""
    features_of, _ = features_and_head(model)

    def compare(params: Params, support: Batch, x: Tensor) -> Tensor:
        tasks = support.x.shape[0]
        expanded = {name: value.unsqueeze(0).expand(tasks, *value.shape) for name, value in params.items()}
        features = features_of(expanded, support.x)  # [t, n, d]
        sums = (
            one_hot(support, features.dtype).transpose(1, 2) @ features
        )  # [t, ways, d]; a mean has the same direction
        asked = features_of(expanded, x, support.x)
        return SHARPNESS * F.normalize(asked, dim=2) @ F.normalize(sums, dim=2).transpose(1, 2)

    return comparing_learner(model, compare, without_head(model))


def main(steps: int = 200) -> None:
    """Trains, then evaluates on characters that the training has not seen."""
    learned = metalearn.train(
        directions,
        metalearn.named("conv4", filters=16),
        metalearn.named("glyphs", ways=5, shots=1, image_size=20),
        steps=steps,
        meta_batch_size=8,
        val_tasks=50,
    )
    figures = learned.evaluate(count=100)
    print(f"accuracy on new characters: {figures['accuracy']:.1%} ± {figures['ci95']:.1%}, by chance 20.0%")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
