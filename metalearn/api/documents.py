"""Documents that a learner has read, as `metalearn.load(run).adapt(text)` gives them."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metalearn.algorithms.reading import OneDocument
from metalearn.errors import positive, whole_number
from metalearn.tasks.texts import BYTES


class ReadDocument:
    """A document that was read so far, and what it has taught. Nothing of it changes. `symbols` is how many the network
    knows: 256 stands for bytes."""

    def __init__(self, stream: OneDocument, symbols: int, device: torch.device) -> None:
        self._stream, self._symbols, self._device = stream, symbols, device

    def bits(self, more: Any) -> float:
        """The mean bits of a symbol of `more`, as if it was read next; of a text, of a byte. `more` is a text, which is
        taken in UTF-8, or bytes; or whole numbers [n] below `symbols`. Raises ValueError if it is empty, or holds
        something else."""
        return float(self._stream.copy().read(self._taken(more)).mean()) / math.log(2)

    def read(self, more: Any) -> "ReadDocument":
        """The document with `more` read after it; `more` as for `bits`."""
        stream = self._stream.copy()
        stream.read(self._taken(more))
        return ReadDocument(stream, self._symbols, self._device)

    def continuation(self, symbols: int, *, temperature: float = 1.0, seed: int = 0) -> Any:
        """How it might go on: text of bytes, in which what is no UTF-8 is replaced; or whole numbers [n]. Raises
        ValueError for a number below 1, or a temperature that is not above 0.

        Args:
            symbols: how many.
            temperature: below 1, likely symbols are drawn more often.
            seed: of what is drawn.
        """
        whole_number("symbols", symbols, at_least=1)
        positive(temperature=temperature)
        stream, generator, drawn = self._stream.copy(), torch.Generator().manual_seed(seed), list[int]()
        for _ in range(symbols):
            chances = torch.softmax(stream.scores().double().cpu() / temperature, dim=0)
            drawn.append(int(torch.multinomial(chances, 1, generator=generator)))
            stream.read(torch.tensor(drawn[-1:], device=self._device))
        return bytes(drawn).decode("utf-8", errors="replace") if self._symbols == BYTES else np.array(drawn)

    def _taken(self, text: Any) -> Tensor:
        """A text as numbers [n]. Raises ValueError if it is empty, or has something else than the network knows."""
        symbols = self._symbols
        if isinstance(text, str | bytes):
            if symbols != BYTES:
                raise ValueError(f"text: this network knows {symbols} symbols, not bytes; give numbers below {symbols}")
            text = np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)
        array = np.asarray(text)
        if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or not array.size):
            raise ValueError(f"text: has the shape {list(array.shape)} of {array.dtype}; give a text, or numbers [n]")
        if not len(array):
            raise ValueError("text: is empty; give at least one symbol")
        if not 0 <= array.min() <= array.max() < symbols:
            raise ValueError(
                f"text: its numbers run from {array.min()} to {array.max()}, and this network knows 0 to {symbols - 1}"
            )
        return torch.tensor(array, dtype=torch.int64, device=self._device)
