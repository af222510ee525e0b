"""Thirteen functions to minimise, with the limits under which Propulate's documentation poses them.

All are standard test functions: De Jong's sphere and step, Rosenbrock's valley, Himmelblau's, Bukin's sixth, the egg
crate, Keane's bump, Leon's, and those of Griewank, Schwefel and Rastrigin. The double sphere and the double Rastrigin
function are of Lunacek, Whitley and Sutton 2008, "The impact of global structure on search".
"""

from collections.abc import Callable, Sequence
from math import cos, hypot, pi, prod, sin, sqrt, trunc
from typing import NamedTuple

from hydra_async_sweeper.space import Number, Space

Loss = Callable[[Sequence[float]], float]


class Problem(NamedTuple):
    """A function, the limits of each of its parameters, its least value, and how often a search may evaluate it."""

    name: str
    loss: Loss
    limits: tuple[tuple[float, float], ...]
    minimum: float

    @property
    def evaluations(self) -> int:
        return 200 if len(self.limits) == 2 else 1000

    @property
    def space(self) -> Space:
        """Parameters x00, x01, …"""
        return {f"x{index:02}": Number(low, high) for index, (low, high) in enumerate(self.limits)}


def sphere(x: Sequence[float]) -> float:
    return sum(v * v for v in x)


def rosenbrock(x: Sequence[float]) -> float:
    return 100 * (x[0] ** 2 - x[1]) ** 2 + (1 - x[0]) ** 2


def himmelblau(x: Sequence[float]) -> float:
    return (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2


def bukin(x: Sequence[float]) -> float:
    return 100 * sqrt(abs(x[1] - 0.01 * x[0] ** 2)) + 0.01 * abs(x[0] + 10)


def eggcrate(x: Sequence[float]) -> float:
    return sum(v * v + 25 * sin(v) ** 2 for v in x)


def keane(x: Sequence[float]) -> float:
    """At the origin it is the limit, 0, where the formula divides by 0."""
    radius = hypot(x[0], x[1])
    return -((sin(x[0] - x[1]) * sin(x[0] + x[1])) ** 2) / radius if radius > 0 else 0.0


def leon(x: Sequence[float]) -> float:
    return 100 * (x[1] - x[0] ** 3) ** 2 + (1 - x[0]) ** 2


def step(x: Sequence[float]) -> float:
    """Flat between whole numbers, cut towards 0 as Propulate has it; De Jong's own rounds down."""
    return float(sum(map(trunc, x)))


def griewank(x: Sequence[float]) -> float:
    return 1 + sphere(x) / 4000 - prod(cos(v / sqrt(index)) for index, v in enumerate(x, 1))


def schwefel(x: Sequence[float]) -> float:
    """With the minimum at 420.9687… in every direction, far from the next best."""
    return 418.982887 * len(x) - sum(v * sin(sqrt(abs(v))) for v in x)


def rastrigin(x: Sequence[float]) -> float:
    return sum(10 + v * v - 10 * cos(2 * pi * v) for v in x)


def bisphere(x: Sequence[float]) -> float:
    """The lower of two spheres: around 2.5 the deep one, around a negative point the wide one."""
    s = 1 - 1 / sqrt(2 * sqrt(len(x) + 20) - 8.2)
    wide = -sqrt((2.5**2 - 1) / s)
    return min(sum((v - 2.5) ** 2 for v in x), len(x) + s * sum((v - wide) ** 2 for v in x))


def birastrigin(x: Sequence[float]) -> float:
    return bisphere(x) + 10 * sum(1 - cos(2 * pi * (v - 2.5)) for v in x)


PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem("sphere", sphere, ((-5.12, 5.12),) * 2, 0.0),
        Problem("rosenbrock", rosenbrock, ((-2.048, 2.048),) * 2, 0.0),
        Problem("himmelblau", himmelblau, ((-6.0, 6.0),) * 2, 0.0),
        Problem("bukin", bukin, ((-15.0, -5.0), (-3.0, 3.0)), 0.0),
        Problem("eggcrate", eggcrate, ((-5.0, 5.0),) * 2, 0.0),
        Problem("keane", keane, ((0.0, 10.0),) * 2, -0.673668),
        Problem("leon", leon, ((0.0, 10.0),) * 2, 0.0),
        Problem("step", step, ((-5.12, 5.12),) * 5, -25.0),
        Problem("griewank", griewank, ((-600.0, 600.0),) * 10, 0.0),
        Problem("schwefel", schwefel, ((-500.0, 500.0),) * 10, 0.0),
        Problem("rastrigin", rastrigin, ((-5.12, 5.12),) * 20, 0.0),
        Problem("bisphere", bisphere, ((-5.12, 5.12),) * 30, 0.0),
        Problem("birastrigin", birastrigin, ((-5.12, 5.12),) * 30, 0.0),
    )
}
