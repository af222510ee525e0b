"""Records what Propulate 1.2.2 does, for test_islands.py to compare.

    python -m venv propulate-env
    propulate-env/bin/pip install --no-deps propulate==1.2.2 numpy colorlog
    propulate-env/bin/python hydra_async_sweeper/tests/record_propulate.py     writes propulate.json beside it

Propulate needs no MPI here: its workers are objects of one process, and a small stub carries their messages. GPy and
deepdiff stay away too: only its surrogate models and a debugging check use them.
"""

import argparse
import json
import random
import sys
import tempfile
import types
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

Limits = dict[str, tuple[Any, ...]]

TEXTS_FIRST: Limits = {"optimizer": ("sgd", "adam", "lion"), "layers": (1, 6), "lr": (0.001, 0.1), "decay": (0.0, 0.5)}
"""Propulate's category must be the first of all: after a number it cannot be assigned again."""

WHOLE: Limits = {"layers": (1, 6), "width": (8, 512), "heads": (-3, 3)}

BREEDING = (
    ("sphere", 8, range(2), 160),
    ("bukin", 2, range(2), 120),
    ("keane", 16, range(1), 100),
    ("step", 6, range(2), 160),
    ("griewank", 5, range(1), 80),
    ("schwefel", 5, range(1), 50),
    ("rastrigin", 4, range(1), 40),
    ("bisphere", 4, range(1), 30),
    ("birastrigin", 4, range(1), 30),
    ("himmelblau", 4, range(1), 40),
    ("eggcrate", 4, range(1), 40),
    ("leon", 4, range(1), 40),
    ("rosenbrock", 4, range(1), 40),
    ("mixed", 8, range(3), 160),
    ("whole", 4, range(2), 120),
)
"""Search space, pop_size, seeds and number of individuals. Keane's function is NaN at (0, 0), where clamping puts
the individual 118. Quartic is left out because it is noisy."""

FULL = [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
RING = [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
SOME = [[0, 2, 1], [1, 0, 0], [3, 0, 0]]

ISLANDS = (
    ("rosenbrock", 4, True, FULL, 0.9),
    ("rosenbrock", 4, False, FULL, 0.9),
    ("step", 5, True, RING, 0.5),
    ("step", 5, False, SOME, 0.5),
    ("mixed", 3, True, FULL, 1.0),
    ("mixed", 3, False, SOME, 1.0),
)
"""Search space, pop_size, pollination, topology and migration probability. In pollination one individual goes to a
target: Propulate drops one for each message, ours drops one for each individual."""

TRIALS = 120


class Comm:
    """What Propulate uses of a communicator; all ranks share `mail`, by rank and tag."""

    def __init__(self, rank: int, size: int, mail: dict[tuple[int, int], deque[Any]]) -> None:
        self.rank, self.size, self.mail = rank, size, mail

    def send(self, message: Any, dest: int, tag: int) -> None:
        self.mail[int(dest), tag].append(message)

    def iprobe(self, source: int, tag: int, status: "Status") -> bool:
        return bool(self.mail[self.rank, tag])

    def recv(self, source: int, tag: int) -> Any:
        return self.mail[self.rank, tag].popleft()

    def barrier(self) -> None:
        """All workers are in one process: nobody is late."""


class Status:
    def Get_source(self) -> int:  # noqa: N802 (MPI's name)
        return 0


def comm(rank: int = 0, size: int = 1) -> Comm:
    return Comm(rank, size, defaultdict(deque))


def install_stubs() -> None:
    """Puts the stub where `from mpi4py import MPI` looks, and empty modules for what is not used."""
    mpi = types.SimpleNamespace(Comm=Comm, Status=Status, COMM_WORLD=comm(), COMM_SELF=comm(), ANY_SOURCE=-1)
    module: Any = types.ModuleType("mpi4py")
    module.MPI = mpi
    sys.modules |= {"mpi4py": module, "GPy": types.ModuleType("GPy"), "deepdiff": types.ModuleType("deepdiff")}


def problem(name: str) -> tuple[Any, Limits]:
    """The loss and the limits of one of Propulate's benchmark functions, or of one of the spaces above."""
    from propulate.utils.benchmark_functions import get_function_search_space

    if name == "mixed":
        return mixed_loss, TEXTS_FIRST
    if name == "whole":
        return whole_loss, WHOLE
    loss, limits = get_function_search_space(name)
    return loss, limits


def mixed_loss(params: Any) -> float:
    offset = {"sgd": 0.3, "adam": 0.0, "lion": 0.1}[params["optimizer"]]
    return float(offset + abs(params["layers"] - 3) + 10 * abs(params["lr"] - 0.02) + params["decay"])


def whole_loss(params: Any) -> float:
    return float(abs(params["layers"] - 4) + abs(params["width"] - 100) // 50 + params["heads"] ** 2)


def values(individual: Any) -> list[Any]:
    return [individual[key] for key in individual.limits]


def breeding(name: str, pop_size: int, seed: int, count: int) -> dict[str, Any]:
    """One island without workers: every individual is evaluated before the next is bred."""
    from propulate import get_default_propagator

    loss, limits = problem(name)
    rng = random.Random(seed)
    propagator = get_default_propagator(pop_size, limits, rng=rng)
    population: list[Any] = []
    for _ in range(count):
        individual = propagator(population)
        individual.loss = float(loss(individual))
        population.append(individual)
    return {
        "name": name, "pop_size": pop_size, "seed": seed, "limits": limits,
        "trials": [[*values(individual), individual.loss] for individual in population],
    }  # fmt: skip


def on_islands(
    name: str, pop_size: int, pollination: bool, topology: list[list[int]], migration_probability: float, seed: int = 7
) -> dict[str, Any]:
    """A whole search on three islands of one worker each, by Propulate's own loop.

    Before a worker breeds, and before it may send, its random numbers are seeded as the program seeds its own. Trials
    are evaluated in the order of their numbers, and every island receives at once.
    """
    import numpy as np
    from propulate import Migrator, Pollinator, get_default_propagator

    loss, limits = problem(name)
    rng = random.Random()
    propagator = get_default_propagator(pop_size, limits, rng=rng)
    count = len(topology)
    world: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
    number = 0

    def seeded(active: list[Any]) -> Any:
        rng.seed(f"{seed}-{number}")
        individual = propagator(active)
        rng.seed(f"{seed}-exchange-{number}")
        return individual

    with tempfile.TemporaryDirectory() as folder:
        workers = [
            (Pollinator if pollination else Migrator)(
                loss_fn=loss, propagator=seeded, rng=rng, generations=1, island_idx=island, island_comm=comm(),
                propulate_comm=Comm(island, count, world), worker_sub_comm=sys.modules["mpi4py"].MPI.COMM_SELF,
                checkpoint_path=folder, migration_topology=np.array(topology), migration_prob=migration_probability,
                island_displs=np.arange(count), island_counts=np.ones(count, dtype=int),
            )
            for island in range(count)
        ]  # fmt: skip
        trials, active = [], []
        for number in range(TRIALS):
            worker = workers[number % count]
            worker.generation = number
            worker.generations = number + 1
            worker.propulate()
            trials.append(next(i for w in workers for i in w.population if i.generation == number))
            for other in workers:
                other._receive_immigrants()
            active.append([[i.generation for i in w.population if i.active] for w in workers])
    return {
        "name": name, "pop_size": pop_size, "pollination": pollination, "topology": topology, "seed": seed,
        "migration_probability": migration_probability, "limits": limits,
        "trials": [[*values(individual), individual.loss] for individual in trials],
        "active": {str(told): active[told] for told in (*range(0, TRIALS, 10), TRIALS - 1)},
    }  # fmt: skip


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("propulate.json"))
    options = parser.parse_args()
    install_stubs()
    from importlib.metadata import version

    recordings = {
        "propulate": version("propulate"),
        "breeding": [breeding(name, size, seed, n) for name, size, seeds, n in BREEDING for seed in seeds],
        "islands": [on_islands(*case) for case in ISLANDS],
    }
    options.output.write_text(json.dumps(recordings, separators=(",", ":")) + "\n")
    print(options.output, options.output.stat().st_size, "bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
