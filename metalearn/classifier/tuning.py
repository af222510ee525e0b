"""Tunes the last layers of a backbone on episodes of the user's classes (Snell et al. 2017), and keeps them only if
nested cross-validation says that it helps.

What comes before those layers is computed once a picture. The network of each fold, and that of all pictures, take a
step in turn: whenever the time is over, all of them have taken equally many, and can be compared.
"""

import logging
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from metalearn.classifier.backbones import Backbone
from metalearn.classifier.heads import class_means
from metalearn.errors import ConfigError
from metalearn.models.common.pretrained import cut

STEPS = 100  # the most steps, however much time there is
_RATE = 3e-4
_SHARPNESS = 10.0  # factor of the cosine similarities in an episode
_WAYS, _PICTURES = 8, 6  # the most classes of an episode, and pictures of each; half of these are learned from
_AT_ONCE = 16  # pictures whose features are computed together

log = logging.getLogger("metalearn")


class Tuned(NamedTuple):
    """Layers after tuning.

    Attributes:
        steps: that each network has taken.
        weights: by their names in `backbone.network`, learned from all pictures.
        by_fold: for each fold the features [n, width] by the network that has learned from the others.
    """

    steps: int
    weights: dict[str, Tensor]
    by_fold: list[Tensor]


class _Learner:
    """The last layers of one network while they learn."""

    def __init__(self, layers: fx.GraphModule, names: Collection[str]) -> None:
        self.layers = layers
        self.weights = {name: layers.get_parameter(name).detach().clone() for name in names}
        self._optimizer = torch.optim.AdamW([w.requires_grad_() for w in self.weights.values()], lr=_RATE)

    def step(self, x: Tensor, y: Tensor, shots: int) -> None:
        """A step on the episode x [n, …], y [n], the first `shots` of which are learned from."""
        features: Tensor = torch.func.functional_call(self.layers, self.weights, (x,))
        z = F.normalize(features - features[:shots].mean(dim=0), dim=1)
        means = class_means(z[:shots], y[:shots], int(y.max()) + 1)
        loss = F.cross_entropy(_SHARPNESS * z[shots:] @ means.T, y[shots:])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


def tune(
    backbone: Backbone, pictures: Sequence[Tensor], y: Tensor, fold: Tensor, *, minutes: float, steps: int, seed: int
) -> Tuned | None:
    """Tunes until the minutes or the steps are over. Ctrl-C ends it as the end of the time does.

    Args:
        pictures: as the backbone takes them.
        y: their classes, [n] int64.
        fold: of each picture, [n]; the network of a fold does not see its pictures.
        seed: of the episodes.

    Returns:
        None if not one step fitted.

    Raises:
        ConfigError: the network cannot be cut in two, or there are too few pictures.
    """
    end = time.monotonic() + 60 * minutes
    learned_by = [torch.nonzero(fold != number).flatten() for number in range(int(fold.max()) + 1)]
    learned_by.append(torch.arange(len(y)))
    if any((torch.bincount(y[among]) > 1).sum() < 2 for among in learned_by):
        raise ConfigError(
            f"minutes={minutes:g}: tuning needs two classes with two pictures in all folds but one; add pictures to "
            "your classes, or leave it out"
        )
    try:
        fixed, last = cut(backbone.network, (3, backbone.form.size, backbone.form.size))
    except ValueError as error:
        raise ConfigError(f"backbone={backbone.name}: its last layers cannot be tuned: {error}") from error
    done, kept = 0, list[dict[str, Tensor]]()
    try:
        maps = list[Tensor]()
        for picture in pictures:
            if time.monotonic() > end:
                return None
            with torch.no_grad():
                maps.append(fixed(picture[None].permute(0, 3, 1, 2).float() / 255))
        x = torch.cat(maps)
        shared = dict(fixed.named_parameters())
        names = [name for name, _ in last.named_parameters() if name not in shared]
        learners = [_Learner(last, names) for _ in learned_by]
        while done < steps and time.monotonic() < end:
            for number, (learner, among) in enumerate(zip(learners, learned_by, strict=True)):
                places, labels, shots = _episode(y, among, [seed, number, done])
                learner.step(x[places], labels, shots)
            # Copies, since Ctrl-C may come while only some of the networks have taken the next step.
            kept, done = [{name: w.detach().clone() for name, w in each.weights.items()} for each in learners], done + 1
    except KeyboardInterrupt:
        log.warning("tuning was interrupted after %d steps, which are kept if they help", done)
    if not done:
        return None
    with torch.no_grad():
        by_fold = [
            torch.cat([torch.func.functional_call(last, weights, (part,)) for part in x.split(_AT_ONCE)])
            for weights in kept[:-1]
        ]
    return Tuned(done, kept[-1], by_fold)


def _episode(y: Tensor, among: Tensor, seed: Sequence[int]) -> tuple[Tensor, Tensor, int]:
    """The places of the pictures of an episode, their labels in it, and how many of them are learned from. A class with
    one picture is only learned from."""
    generator, learned, asked = np.random.default_rng(seed), list[int](), list[int]()
    counts = torch.bincount(y[among], minlength=int(y.max()) + 1)
    several = torch.nonzero(counts > 1).flatten().numpy()
    for label in generator.permutation(several)[:_WAYS].tolist():
        members = generator.permutation(among[y[among] == label].numpy())[:_PICTURES].tolist()
        learned += members[: len(members) // 2]
        asked += members[len(members) // 2 :]
    places = torch.tensor([*learned, *asked])
    return places, y[places].unique(return_inverse=True)[1], len(learned)
