"""Networks as users write them, for the recipes of bench.py that measure `model=module`: torch's layers alone."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

WAYS = 5
"""The classes that each of them tells apart."""


class _Block(nn.Module):
    """A convolution, an activation and max pooling."""

    def __init__(self, channels: int, filters: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.pool, self.act = nn.Conv2d(channels, filters, 3, padding=1), nn.MaxPool2d(2), act

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.pool(self.act(self.conv(x))))


class Convolutions(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Block(1, 32, act), _Block(32, 32, act), _Block(32, 32, act))
        self.head = nn.Linear(32 * 9, WAYS)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.blocks(x).flatten(1)))


class Perceptron(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act, self.first, self.second, self.head = act, nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, WAYS)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.act(self.second(self.act(self.first(x))))))


class Encoder(nn.Module):
    """A transformer encoder over 16 tokens."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation=act, batch_first=True)
        self.first, self.head = nn.Linear(16, 64), nn.Linear(64, WAYS)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.layers(self.first(x)).mean(1)))


class Graph(nn.Module):
    """A graph network (Kipf and Welling 2017): 16 nodes, whose first 16 features are the edges to the others."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act, self.first, self.second, self.head = act, nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, WAYS)

    def forward(self, x: Tensor) -> Tensor:
        edges = torch.softmax(x, dim=2)
        h = self.act(edges @ self.first(x))
        return cast(Tensor, self.head(self.act(edges @ self.second(h)).mean(1)))


class Recurrent(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 64, batch_first=True), nn.Linear(64, WAYS)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.lstm(x)[0][:, -1]))


NETWORKS: dict[str, tuple[Callable[[Callable[[Tensor], Tensor]], nn.Module], tuple[int, ...]]] = {
    "own-mlp": (Perceptron, (64,)),
    "own-convolutions": (Convolutions, (1, 28, 28)),
    "own-transformer": (Encoder, (16, 16)),
    "own-graph": (Graph, (16, 16)),
    "own-lstm": (Recurrent, (16, 16)),
}
"""By kind of recipe: the class, and the shape of an input."""
