"""Population based training: what each member does after a round, as a pure function of that round's results.

Jaderberg et al. 2017, "Population Based Training of Neural Networks" (arXiv 1711.09846): truncation selection exploits,
and factors or resampling explore. Trial n is round n // `members` of member n mod `members`. What a trial does follows
from its own random numbers, seeded by its number, and from the results of the round before. So a search that resumes,
with any number of slots, takes the same decisions.
"""

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hydra_async_sweeper.islands import ScoredTrial
from hydra_async_sweeper.space import Category, Dimension, Space, Value, uniform, uniform_params
from hydra_async_sweeper.trials import StartedTrial


class PopulationSettings(NamedTuple):
    """Settings of the search."""

    seed: int  # of all random numbers
    members: int  # how many runs train side by side
    rounds: int  # how often all of them train, and are compared
    quantile: float = 0.25  # after a round this share of the members, the worst, takes over from this share, the best
    factors: Sequence[float] = (0.8, 1.2)  # a number that is taken over is multiplied by one of them
    resample: float = 0.25  # the probability that a parameter that is taken over is drawn afresh


def decide(
    number: int, finished: Iterable[ScoredTrial], space: Space, settings: PopulationSettings
) -> StartedTrial | None:
    """What trial `number` = round · members + member does; in the first round it has no parent. One that has `finished`
    without a finite value has the loss None. Returns None while the results that decide it are not there yet: a member
    that is certain to stay needs its own and those of enough members behind it; one that takes over needs the whole
    round. It is None for good if no member of the round has a value."""
    round_, parent = number // settings.members, number - settings.members
    rng = random.Random(f"{settings.seed}-{number}")
    if round_ == 0:
        return StartedTrial(number, uniform_params(rng, space))
    before = {trial.number: trial for trial in finished if trial.number // settings.members == round_ - 1}
    if parent not in before:
        return None
    last, replaced = before[parent], max(1, int(settings.members * settings.quantile))
    behind = sum(_rank(other) > _rank(last) for other in before.values())
    if last.loss is not None and behind >= replaced:
        return StartedTrial(number, last.params, parent)
    best = [trial for trial in sorted(before.values(), key=_rank)[:replaced] if trial.loss is not None]
    if len(before) < settings.members or not best:
        return None
    donor = rng.choice(best)
    explored = {key: _changed(rng, dimension, donor.params[key], settings) for key, dimension in space.items()}
    return StartedTrial(number, explored, donor.number)


def _rank(trial: ScoredTrial) -> tuple[bool, float, int]:
    """Lower is better; a trial without a value is the worst."""
    return trial.loss is None, trial.loss or 0.0, trial.number


def _changed(rng: random.Random, dimension: Dimension, value: Value, settings: PopulationSettings) -> Value:
    """Drawn afresh; or, if it is a number, times a factor. A number with steps moves by one step at least."""
    if rng.random() < settings.resample:
        return uniform(rng, dimension)
    if isinstance(dimension, Category):
        return value
    factor = rng.choice(settings.factors)
    moved = min(max(float(value) * factor, dimension.low), dimension.high)
    if dimension.spacing is None:
        return moved
    old, new = dimension.steps_to(float(value)), dimension.steps_to(moved)
    if new == old:
        new += (factor > 1) - (factor < 1)
    return dimension.at(min(max(new, 0), dimension.steps_to(dimension.high)))
