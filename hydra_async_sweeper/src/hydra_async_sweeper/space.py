"""The search space: what the sweep overrides of a command line say, in Hydra's own syntax; and a trial's overrides.

`key=a,b`, `key=choice(a,b)`, `key=glob(*)` and config groups are categories. `key=range(start,stop,step)` has Hydra's
meaning: `stop` is not among the values. `key=interval(low,high)` is a number between both ends; in
`int(interval(low,high))` it is whole. `tag(log, interval(…))` is searched on a logarithmic scale.
"""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep, Transformer

Value = str | int | float  # A parameter's value. Of categories it is the text that stands on the right of the override.
Params = dict[str, Value]


class SpaceError(ValueError):
    """A sweep override that describes no space, or a key of the sweeper that is not allowed."""


class Category(NamedTuple):
    """One of some texts."""

    options: tuple[str, ...]


class Number(NamedTuple):
    """A number from `low` to `high`, both included; with `step`, one of low, low + step, …, high."""

    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False

    @property
    def spacing(self) -> float | None:
        """The step, which is 1 of whole numbers without one."""
        return 1 if self.whole and self.step is None else self.step

    def steps_to(self, value: float) -> int:
        """How many steps lead from the low end to the step that is nearest to a value."""
        assert self.spacing is not None
        return round((value - self.low) / self.spacing)

    def at(self, index: int) -> int | float:
        """The value after `index` steps from the low end, as the decimal that a person would write."""
        value = Decimal(repr(self.low)) + index * Decimal(repr(self.spacing))
        return int(value) if self.whole else float(value)

    def values(self) -> list[int | float]:
        """All values of a number with steps."""
        return [self.at(index) for index in range(self.steps_to(self.high) + 1)]


Dimension = Category | Number
Space = dict[str, Dimension]


class SweepPlan(NamedTuple):
    """The space, and the overrides of a trial: the fixed ones as they are, and the key where a parameter stands."""

    space: Space
    template: list[tuple[str, bool]]

    def overrides(self, params: Mapping[str, Value]) -> list[str]:
        """A trial's overrides, in the order of the command line."""
        return [f"{text}={params[text]}" if searched else text for text, searched in self.template]


def plan_of(arguments: Sequence[str], params: Mapping[str, Any], options: Callable[[str], Sequence[str]]) -> SweepPlan:
    """What the overrides on the command line ask for, and for other keys those of `hydra.sweeper.params`: key → value
    or sweep, as text. `options` leads from the name of a config group to its options. Raises SpaceError for a sweep
    that describes no space, or a searched key that comes once more."""
    parser = OverridesParser.create()
    typed = parser.parse_overrides(list(arguments))
    keys = {override.get_key_element().lstrip("+~") for override in typed}
    more = parser.parse_overrides([f"{key}={value}" for key, value in params.items() if key.lstrip("+~") not in keys])
    space: Space = {}
    template: list[tuple[str, bool]] = []
    searched: dict[str, str | None] = {}
    for override in (*more, *typed):
        key = override.get_key_element()
        name = key.lstrip("+~")
        if name in searched:  # the last one would count, but the records would have the values of the first
            raise SpaceError(
                f"{override.input_line}: comes after {searched[name]}, which searches this key; leave one of them out"
            )
        if override.is_sweep_override():
            searched[name] = override.input_line
            space[key] = dimension_of(override, options)
            template.append((key, True))
        else:
            template.append((str(override.input_line), False))
    return SweepPlan(space, template)


def dimension_of(override: Override, options: Callable[[str], Sequence[str]]) -> Dimension:
    """The dimension that a sweep override spans; `options` gives those of a config group, for `glob`. Raises SpaceError
    for an interval that is empty, reversed or not finite, a logarithm of 0, or an empty list."""
    value: Any = override.value()
    line = override.input_line
    dimension: Dimension
    if isinstance(value, IntervalSweep):
        low, high = value.start, value.end
        if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
            raise SpaceError(f"{line}: an interval needs two finite ends; type interval(0.1,1.0)")
        if low >= high:
            swapped = f"; type interval({high},{low})" if low > high else ""
            raise SpaceError(f"{line}: the interval is empty: {low} must be below {high}{swapped}")
        whole = isinstance(low, int) and isinstance(high, int)
        low, high = (low, high) if whole else (float(low), float(high))
        dimension = Number(low, high, log="log" in value.tags, whole=whole)
    elif isinstance(value, RangeSweep) and not value.shuffle:
        start, stop, step = value.start, value.stop, value.step
        if start is None or stop is None or not step:
            raise SpaceError(f"{line}: a range needs a start, a stop and a step that is not 0")
        first, end, by = (Decimal(repr(number)) for number in (start, stop, step))
        count = math.ceil((end - first) / by)
        if count < 1:
            raise SpaceError(f"{line}: the range is empty: {stop} is not among its values")
        whole = all(isinstance(number, int) for number in (start, stop, step))
        low, high = map(int if whole else float, sorted((first, first + (count - 1) * by)))
        several = Number(low, high, log="log" in value.tags, step=abs(step), whole=whole)
        dimension = several if count > 1 else Category((str(start),))
    elif isinstance(value, Glob):
        dimension = Category(tuple(value.filter(list(options(override.key_or_group)))))
    else:
        texts = map(str, override.sweep_iterator(transformer=Transformer.encode))
        dimension = Category(tuple(dict.fromkeys(texts)))
    if isinstance(dimension, Category) and not dimension.options:
        raise SpaceError(f"{line}: has no values")
    if isinstance(dimension, Number) and dimension.log and dimension.low <= 0:
        raise SpaceError(f"{line}: a logarithmic scale must begin above 0, not at {dimension.low}")
    return dimension


def size(space: Space) -> int | None:
    """How many combinations there are; None if they cannot be counted."""
    counts = []
    for dimension in space.values():
        if isinstance(dimension, Category):
            counts.append(len(dimension.options))
        elif dimension.spacing is not None:
            counts.append(dimension.steps_to(dimension.high) + 1)
        else:
            return None
    return math.prod(counts)


def combinations(space: Space) -> list[Params]:
    """Every combination of a space whose values can be counted, the last dimension changing fastest."""
    values: list[Sequence[Value]] = [
        dimension.options if isinstance(dimension, Category) else dimension.values() for dimension in space.values()
    ]
    return [dict(zip(space, one, strict=True)) for one in itertools.product(*values)]


def uniform(rng: random.Random, dimension: Dimension) -> Value:
    """A value drawn uniformly, on a logarithmic scale if the number has one. With steps, too, a value stands for the
    interval up to the next: 1 is drawn from 1 to 2."""
    if isinstance(dimension, Category):
        return rng.choice(dimension.options)
    low, high, step = dimension.low, dimension.high, dimension.spacing
    if step is None:
        if dimension.log:
            return min(float(high), max(float(low), math.exp(rng.uniform(math.log(low), math.log(high)))))
        return rng.uniform(low, high)
    steps = dimension.steps_to(high)
    if not dimension.log:
        return dimension.at(rng.randint(0, steps))
    drawn = math.exp(rng.uniform(math.log(low), math.log(high + step)))
    return dimension.at(min(steps, int((drawn - low) / step)))


def uniform_params(rng: random.Random, space: Space) -> Params:
    """A value of each dimension, drawn uniformly."""
    return {key: uniform(rng, dimension) for key, dimension in space.items()}


def ends_of(dimension: Dimension) -> tuple[Value, ...]:
    """The values by which a dimension is checked before a sweep: every option; both ends of a number."""
    return dimension.options if isinstance(dimension, Category) else (dimension.low, dimension.high)


def to_plain(space: Space) -> dict[str, Any]:
    """The space as nested plain values, for the journal."""
    return {
        key: list(dimension.options) if isinstance(dimension, Category) else dimension._asdict()
        for key, dimension in space.items()
    }


def from_plain(plain: Mapping[str, Any]) -> Space:
    """What `to_plain` was given."""
    return {
        key: Number(**value) if isinstance(value, Mapping) else Category(tuple(value)) for key, value in plain.items()
    }
