"""Documents of Markov chains: each document has a chain of its own, and the best prediction of each symbol is known.

A chain of order two over k symbols: for each pair of symbols the probabilities of the next one are drawn from
Dirichlet(α, …, α). After counts c of what has followed the pair (a, b), the probability of s is (c_s + α) divided by
(Σ c + k α), the posterior predictive: no other prediction by α and the document alone is better on average.
"""

import numpy as np
import torch
from torch import Tensor

from metalearn.errors import positive, whole_number
from metalearn.tasks.common.episodes import SeededTasks, Seeds, reading_tasks
from metalearn.types import Episode

ORDER = 2


class Chains(SeededTasks):
    """A source of documents; see `chains`."""

    def __init__(self, symbols: int, alpha: float, lengths: dict[str, int], seeds: Seeds) -> None:
        super().__init__(seeds)
        self._symbols, self._alpha, self._lengths = symbols, alpha, lengths

    def classes(self, split: str) -> int:
        return self._symbols

    def episodes(self, split: str, indices: Tensor) -> Episode:
        k, n = self._symbols, self._lengths["train" if split == "train" else "test"] + 1
        rows, starts, uniform = [], [], []
        for number in indices.tolist():  # each document follows from its number alone
            rng = self._seeds.generator(split, number)
            rows.append(rng.standard_gamma(self._alpha, (k**ORDER, k)) + 1e-30)
            starts.append(rng.integers(0, k, ORDER))
            uniform.append(rng.random(n))
        weights = np.stack(rows)
        steps = np.cumsum(weights / weights.sum(axis=2, keepdims=True), axis=2)
        text, each, at = np.empty((len(rows), n), np.int64), np.arange(len(rows)), np.stack(uniform)
        text[:, :ORDER] = np.stack(starts)
        for place in range(ORDER, n):
            pair = text[:, place - 2] * k + text[:, place - 1]
            # Rounding may leave the last sum below 1.
            text[:, place] = np.minimum((steps[each, pair] < at[:, place, None]).sum(axis=1), k - 1)
        return reading_tasks(torch.from_numpy(text))

    def optimum(self, episode: Episode, last: int | None = None) -> Tensor:
        """The loss of the best prediction of every symbol [t, n], in nats; with `last`, by counts
        in that number of last symbols alone (what the first pair of a window says of its chain is left out)."""
        k, alpha = self._symbols, self._alpha
        text = torch.cat([episode.query.x[:, :1, 0].long(), episode.query.y], dim=1).numpy()
        documents, n = text.shape
        each, counts = np.arange(documents), np.zeros((documents, k**ORDER, k))
        losses = np.full((documents, n - 1), np.log(k))  # of the symbols before there is a pair
        if last is not None and last < ORDER:
            return torch.from_numpy(losses)
        for place in range(ORDER, n):
            pair, symbol = text[:, place - 2] * k + text[:, place - 1], text[:, place]
            followed = counts[each, pair]
            losses[:, place - 1] = -np.log((followed[each, symbol] + alpha) / (followed.sum(axis=1) + k * alpha))
            counts[each, pair, symbol] += 1
            if last is not None and place >= last:
                gone = place - last  # the triple that begins there is out of reach
                counts[each, text[:, gone] * k + text[:, gone + 1], text[:, gone + 2]] -= 1
        return torch.from_numpy(losses)


def chains(*, symbols: int, alpha: float, length: int, eval_length: int, seeds: Seeds) -> Chains:
    """Documents of Markov chains of order two over k = `symbols`, with α = `alpha`."""
    whole_number("symbols", symbols, at_least=2)
    positive(alpha=alpha)
    for name, value in (("length", length), ("eval_length", eval_length)):
        whole_number(name, value, at_least=ORDER)
    return Chains(symbols, alpha, {"train": length, "test": eval_length}, seeds)
