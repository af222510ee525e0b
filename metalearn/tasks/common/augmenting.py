"""Changes of training pictures that leave their class: shifted, scaled, turned, mirrored, in other light and colours.

Each picture is changed on its own, by random numbers of the generator that it is given: a task's numbers are always the
same, on whatever worker it is made.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.checks import Invalid
from metalearn.errors import DataError
from metalearn.types import Batch, Episode

AUGMENTATIONS = ("shift", "scale", "turn", "mirror", "light", "colour")

SHIFT, SCALE, TURN = 0.125, 1.25, math.radians(15)
"""The farthest that a picture goes, as a part of its side; the most it is enlarged or reduced; the widest angle."""
LIGHT, COLOUR, HUE = 0.4, 0.5, math.radians(36)
"""How much brightness and contrast, and saturation, differ from 1 at most; and the widest angle of the hue."""

_NUMBERS = 10
"""Random numbers of a picture. All are drawn, whatever is used: another choice changes nothing else."""
_LUMA = (0.299, 0.587, 0.114)  # of red, green and blue, by ITU-R BT.601


def check_augmentations(names: Sequence[str]) -> None:
    """Raises ValueError for what is no list of different names of `AUGMENTATIONS`."""
    known = isinstance(names, list | tuple) and all(name in AUGMENTATIONS for name in names)
    if not known or len(set(names)) != len(names):
        allowed = f"must be a list of names out of {', '.join(AUGMENTATIONS)}"
        raise Invalid("augment", names, allowed, "type KEY=[shift,scale], for example")


def augmented(episode: Episode, names: Sequence[str], generator: np.random.Generator) -> Episode:
    """An episode of one task, x [1, n, c, h, w], with its pictures changed by `augmented_pictures`."""
    return Episode(
        *(Batch(augmented_pictures(batch.x[0], names, generator).unsqueeze(0), batch.y) for batch in episode)
    )


def augmented_pictures(x: Tensor, names: Sequence[str], generator: np.random.Generator) -> Tensor:
    """Pictures [n, c, h, w] in [0, 1], each changed in the ways that `names` says.

    Raises:
        DataError: `colour` is to change grey pictures.
    """
    if "colour" in names and x.shape[1] != 3:
        raise DataError("dataset.augment: these pictures are grey, and colour changes nothing; leave colour out")
    drawn = torch.from_numpy(generator.random((len(x), _NUMBERS), np.float32)).T.reshape(_NUMBERS, -1, 1, 1)
    even = drawn * 2 - 1  # from -1 to 1
    if {"shift", "scale", "turn", "mirror"}.intersection(names):
        x = _moved(x, names, even)
    if "light" in names:
        x = x * (1 + LIGHT * even[5].unsqueeze(1))
        mean = x.mean(dim=(1, 2, 3), keepdim=True)
        x = mean + (x - mean) * (1 + LIGHT * even[6].unsqueeze(1))
    if "colour" in names:
        x = _coloured(x, 1 + COLOUR * even[7], HUE * even[8])
    return x.clamp(0, 1)


def _moved(x: Tensor, names: Sequence[str], even: Tensor) -> Tensor:
    """Pictures whose pixels come from elsewhere; beyond its edges, a picture goes on with their colours. Not by
    `affine_grid`, whose matrix product may round otherwise for another number of pictures."""
    none = torch.zeros_like(even[0])
    angle = TURN * even[0] if "turn" in names else none
    smaller = torch.exp(math.log(SCALE) * even[1]) if "scale" in names else none + 1
    left = torch.where(even[2] < 0, -1.0, 1.0) if "mirror" in names else none + 1
    right, down = (2 * SHIFT * even[3:5]).unbind() if "shift" in names else (none, none)  # of sides from -1 to 1
    h, w = x.shape[-2:]
    rows = ((torch.arange(h) * 2 + 1) / h - 1).view(1, h, 1)
    columns = ((torch.arange(w) * 2 + 1) / w - 1).view(1, 1, w)
    cosine, sine = torch.cos(angle) * smaller, torch.sin(angle) * smaller
    places = ((columns * cosine - rows * sine) * left + right, columns * sine + rows * cosine + down)
    return F.grid_sample(x, torch.stack(places, dim=-1), padding_mode="border", align_corners=False)


def _coloured(x: Tensor, saturation: Tensor, hue: Tensor) -> Tensor:
    """Pictures in other colours: turned around the grey axis of the colour cube, then farther from it or nearer."""
    across = (1 - torch.cos(hue)) / 3
    along = torch.sin(hue) / math.sqrt(3)
    weights = (torch.cos(hue) + across, across - along, across + along)
    turned = [sum(weights[(other - own) % 3] * x[:, other] for other in range(3)) for own in range(3)]
    grey = sum(weight * channel for weight, channel in zip(_LUMA, turned, strict=True))
    return torch.stack([grey + saturation * (channel - grey) for channel in turned], dim=1)
