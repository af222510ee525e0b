"""Functions and networks that the tests choose by config, as users choose their own."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed.reduce import tree_sum
from metalearn.types import Batch, Episode, Unit


def deal_backwards(numbers: Tensor) -> list[tuple[int, tuple[Tensor], None]]:
    """A partitioner: the last chunk goes to worker 0, the one before to worker 1, and so on."""
    import distributed as todist

    size = todist.get_world_size()
    return [(i % size, (number,), None) for i, number in enumerate(numbers.flip(0))]


def deal_twice(numbers: Tensor) -> list[tuple[int, tuple[Tensor], None]]:
    """A partitioner that deals out chunk 1 twice."""
    return [(0, (numbers,), None), (0, (numbers[1:2],), None)]


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
        if self.kind == "shared":
            h = self.twice(self.again(torch.tanh(h))) * torch.arange(1.0, 4.0, dtype=x.dtype).view(3, 1, 1)
        h = h.mean(dim=(2, 3))
        if self.kind == "random":
            return F.dropout(h, 0.5)
        if self.kind == "remembers":
            return h + self.seen.add_(1)
        if self.kind == "tuples":
            return h, (h, h)
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


WORDS, LENGTH = 10, 6

FORMS: dict[str, Callable[[Tensor], Any]] = {
    "ids": lambda ids: ids,
    "ids_of_32_bits": lambda ids: ids.int(),
    "dictionary": lambda ids: {"ids": ids, "mask": ids < WORDS},
    "tuple": lambda ids: (ids, ids < WORDS),
    "far": lambda ids: ids * 11,
}


class Texts:
    """Sequences of ids whose first one is that of the task, plus the class."""

    def __init__(self, form: str = "ids", **_: int) -> None:
        self.form = FORMS[form]

    def classes(self, split: str) -> int:
        return 2

    def unit(self, split: str) -> Unit:
        return "tasks"

    def size(self, split: str) -> None:
        return None

    def episodes(self, split: str, indices: Tensor) -> Episode:
        def part(shots: int) -> Batch:
            y = torch.arange(2).repeat_interleave(shots).expand(len(indices), -1)
            drawn = [
                torch.randint(WORDS, (2 * shots, LENGTH), generator=torch.Generator().manual_seed(int(number)))
                for number in indices
            ]
            ids = torch.stack(drawn)
            ids[:, :, 0] = y + (indices % 8).unsqueeze(1)
            return Batch(self.form(ids), y)

        return Episode(part(2), part(3))


class TextsInParts(Texts):
    def __init__(self, **_: int) -> None:
        super().__init__("dictionary")


class Reads(nn.Module):
    """An embedding, an LSTM and attention; `mask` is true where there is a word."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, num_classes)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.lstm(self.embedding(ids))[0]
        h = h + self.attention(h, h, h, key_padding_mask=None if mask is None else ~mask, need_weights=False)[0]
        logits: Tensor = self.head(h.mean(dim=1))
        return logits
