"""A network of one's own for property tables: it may draw in training, and have a fixed or an unused parameter."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tests.metalearn.learners import SIZE, WAYS


class Net(nn.Module):
    """Two blocks with norms, and a linear head. The first convolution is a parameter, is fixed, or is a buffer."""

    def __init__(self, *, p: float = 0.0, first: str = "learns", spare: bool = False) -> None:
        super().__init__()
        drawn = Generator().manual_seed(5)
        weight = torch.randn(4, 1, 3, 3, generator=drawn) / 3
        if first == "buffer":
            self.register_buffer("first", weight)
        else:
            self.first = nn.Parameter(weight, requires_grad=first == "learns")
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(4 * (SIZE // 4) ** 2, WAYS)
        if spare:
            self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(F.softplus(self.norm1(F.conv2d(x, self.first, stride=2, padding=1))))
        h = self.drop(F.softplus(self.norm2(self.second(h))))
        return self.head(h.flatten(1))  # type: ignore[no-any-return]
