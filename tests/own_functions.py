"""Functions and networks that the tests choose by config, as users choose their own."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed.tree_sum import tree_sum


def deal_backwards(numbers: Tensor) -> list[tuple[int, tuple[Tensor], None]]:
    """A partitioner: the last chunk goes to worker 0, the one before to worker 1, and so on."""
    import distributed as todist

    size = todist.get_world_size()
    return [(i % size, (number,), None) for i, number in enumerate(numbers.flip(0))]


def deal_twice(numbers: Tensor) -> list[tuple[int, tuple[Tensor], None]]:
    """A partitioner that deals out chunk 1 twice."""
    return [(0, (numbers,), None), (0, (numbers[1:2],), None)]


def deal_to_nobody(numbers: Tensor) -> list[tuple[int, tuple[Tensor], None]]:
    """A partitioner that names a worker that does not exist."""
    return [(0, (numbers[:1],), None), (7, (numbers[1:],), None)]


def mean(sums: dict[str, Tensor], counts: Tensor) -> dict[str, Tensor]:
    """A reducer: the mean over tasks, added as `reducer=mean` adds."""
    total = counts.sum().item()
    return {name: tree_sum(value.unbind()) / total for name, value in sums.items()}


def fail_at_the_third_call(sums: dict[str, Tensor], counts: Tensor, calls: list[int] = []) -> dict[str, Tensor]:  # noqa: B006
    """A reducer that fails at the third call."""
    calls.append(1)
    if len(calls) == 3:
        raise ArithmeticError("cannot reduce this")
    return {name: value.sum(dim=0) / counts.sum() for name, value in sums.items()}


def lose_a_parameter(sums: dict[str, Tensor], counts: Tensor) -> dict[str, Tensor]:
    """A reducer whose result lacks parameters."""
    return {"other": torch.zeros(1)}


class Small(nn.Module):
    """A network of convolutions of every kind."""

    def __init__(self, ways: int, norm: str = "2d") -> None:
        super().__init__()
        self.convs = nn.ModuleList([
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.Conv2d(16, 16, 3, groups=4),
            nn.Conv2d(16, 16, 3, dilation=2),
            nn.Conv2d(16, 16, 3, padding="same"),
            nn.Conv2d(16, 16, (3, 1), padding=(1, 0)),
        ])  # fmt: skip
        self.norm = nn.BatchNorm2d(16) if norm == "2d" else nn.BatchNorm1d(16)
        self.head = nn.Linear(16, ways)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x)
        return self.head(torch.tanh(self.norm(x)).mean(dim=(2, 3)))  # type: ignore[no-any-return]


class Double(nn.Conv2d):
    """A subclass of convolution that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Odd(nn.Module):
    """Networks with one peculiarity each; `kind` names it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(1 if kind == "grey" else 3, 3, 3, padding=1)
        if kind == "remembers":
            self.register_buffer("seen", torch.zeros(1))
        if kind == "batch":
            self.norm = nn.BatchNorm1d(3, track_running_stats=False)
        if kind == "shared":
            self.again, self.twice = self.conv, Double(3, 3, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.conv(x)
        if self.kind == "images":
            return h
        if self.kind == "shared":
            h = self.twice(self.again(torch.tanh(h))) * torch.arange(1.0, 4.0, dtype=x.dtype).view(3, 1, 1)
        h = h.mean(dim=(2, 3))
        if self.kind == "random":
            return F.dropout(h, 0.5)
        if self.kind == "remembers":
            return h + self.seen.add_(1)
        if self.kind == "dict":
            return {"logits": h}
        return self.norm(h) if self.kind == "batch" else h


class Dropping(nn.Module):
    """A network with dropout, whose first convolution is drawn and then fixed."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 8, 5, stride=4).requires_grad_(False)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8 * 36, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.body(x))).flatten(1))  # type: ignore[no-any-return]
