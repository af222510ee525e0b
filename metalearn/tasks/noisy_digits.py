"""Handwritten digits of which some training labels are wrong: the 1797 pictures of 8 × 8 that scikit-learn brings
(Alpaydin and Kaynak 1998, UCI). A task is a replicate of one training. All tasks have the same training examples in the
same order, then a few clean ones, whose order is all that a task draws.

The queries of a training task are these clean examples; those of validation and test are others. The division of the
pictures, and which labels are wrong, are the same in every run.
"""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from metalearn.errors import DataError, fraction, install, one_of, whole_number
from metalearn.tasks.common.episodes import SeededTasks, Seeds
from metalearn.types import Batch, Episode

PICTURES, CLASSES = 1797, 10
_SHUFFLE = 1797  # seeds the division of the pictures and the wrong labels, which are the same in every run


class NoisyDigits(SeededTasks):
    """A source of replicates; see `noisy_digits`."""

    def __init__(self, examples: int, clean: int, queries: int, wrong: float, noise: str, seeds: Seeds) -> None:
        super().__init__(seeds)
        self._ends, self._wrong, self._noise = (examples, clean, queries), wrong, noise

    def classes(self, split: str) -> int:
        return CLASSES

    def wrong_labels(self) -> Tensor:
        return self._pictures[2]

    def episodes(self, split: str, indices: Tensor) -> Episode:
        (x, y, _), (examples, clean, queries) = self._pictures, self._ends
        held = examples + clean
        first, end = {"train": (examples, held), "val": (held, held + queries)}.get(split, (held + queries, PICTURES))
        orders = [self._seeds.generator(split, index).permutation(clean) for index in indices.tolist()]
        numbers = torch.stack([torch.arange(held)] * len(orders))
        numbers[:, examples:] = examples + torch.from_numpy(np.stack(orders))
        asked = torch.arange(first, end).expand(len(orders), -1)
        return Episode(Batch(x[numbers], y[numbers]), Batch(x[asked], y[asked]))

    @cached_property
    def _pictures(self) -> tuple[Tensor, Tensor, Tensor]:
        """In the order of the parts: the pictures [n, 1, 8, 8], their labels, and of training examples whether the
        label is wrong."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise DataError(
                f"dataset=noisy_digits: the pictures come with scikit-learn; type {install('tables')}"
            ) from error
        rng, (pictures, classes) = np.random.default_rng(_SHUFFLE), load_digits(return_X_y=True)
        order, examples = rng.permutation(PICTURES), self._ends[0]
        x, y = pictures[order].reshape(-1, 1, 8, 8).astype(np.float32) / 16, classes[order].astype(np.int64)
        wrong = rng.permutation(examples) < round(self._wrong * examples)
        shift = rng.integers(1, CLASSES, examples) if self._noise == "any" else 1
        y[:examples] = np.where(wrong, (y[:examples] + shift) % CLASSES, y[:examples])
        return torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(wrong)


def noisy_digits(*, examples: int, clean: int, queries: int, wrong: float, noise: str, seeds: Seeds) -> NoisyDigits:
    """Replicates of a training on digits with wrong labels: of the next digit (pair flipping, Han et al. 2018, arXiv
    1804.06872), or of any other. Raises DataError at the first task if scikit-learn is not installed."""
    whole_number("examples", examples, at_least=1, at_most=PICTURES - 3)
    whole_number("clean", clean, at_least=1, at_most=PICTURES - examples - 2)
    whole_number("queries", queries, at_least=1, at_most=PICTURES - examples - clean - 1)
    fraction("wrong", wrong)
    one_of("noise", noise, ("next", "any"))
    return NoisyDigits(examples, clean, queries, wrong, noise, seeds)
