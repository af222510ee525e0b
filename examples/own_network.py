"""A network of one's own, any nn.Module, learns new characters from one drawing of each.

python examples/own_network.py [STEPS]
"""

import sys

from torch import Tensor, nn

import metalearn


class Network(nn.Module):
    """Two convolutions; pictures [n, 1, 20, 20] to logits [n, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(32 * 5 * 5, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).flatten(1))
        return logits


def main(steps: int = 300) -> None:
    """Trains, then evaluates on characters that the training has not seen."""
    learned = metalearn.train(
        metalearn.named("maml", inner_lr=0.4, inner_steps=1, eval_steps=3),
        Network,
        metalearn.named("glyphs", ways=5, shots=1, image_size=20),
        steps=steps,
        meta_batch_size=8,
        val_tasks=50,
    )
    figures = learned.evaluate(count=100)
    print(f"accuracy on new characters: {figures['accuracy']:.1%} ± {figures['ci95']:.1%}, by chance 20.0%")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
