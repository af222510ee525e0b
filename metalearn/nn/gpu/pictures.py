"""The pictures of episodes, gathered on a GPU."""

import torch
from torch import Tensor

from metalearn.nn.gpu import launch


def gathered(
    pictures: Tensor, turns: Tensor, values: Tensor, numbers: Tensor, shots: int, shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Support and query pictures [t, n, c, h, w].

    Args:
        pictures: bytes [n, h · w · c], colours last.
        turns: [4, h · w] int64: the places from which a picture turned by so many quarters takes its pixels.
        values: [256]: the numbers for bytes.
        numbers: [t, ways, 1 + shots + queries] int64: of each class the quarter turns, then its pictures.
        shots: support pictures of a class.
        shape: (h, w, c).
    """
    tasks, ways, queries = numbers.shape[0], numbers.shape[1], numbers.shape[2] - 1 - shots
    height, width, channels = shape
    support, query = (
        torch.empty(tasks, ways * count, channels, height, width, device=pictures.device, dtype=values.dtype)
        for count in (shots, queries)
    )
    launch.gather(pictures, turns, values, numbers, support, query)
    return support, query
