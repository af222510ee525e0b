"""What more processes give: train.py on one recipe under the strategies, in turns."""

from collections.abc import Sequence
from typing import Any

from benchmarks import strategies
from benchmarks.strategies import Case, Way

WAYS = (
    Way("local", ("strategy=local",), 1),
    Way("local, two independent at once", ("strategy=local",), 1, at_once=2),
    Way("rpc", ("strategy=rpc",), 1),
    Way("rpc", ("strategy=rpc",), 2),
    Way("ddp", ("strategy=ddp",), 2),
)
"""Of two independent ones the speeds are added: what two workers could reach at best."""

STEPS_A_RUN = 60_000
"""Of the published recipe."""

FEW = ("trainer.meta_batch_size=4", "trainer.val_tasks=2", "trainer.test_tasks=2")


def measure(experiment: str, rounds: int, *, short: bool) -> dict[str, Any]:
    """Tasks a second of every way, and where each lies between one process and two independent ones.

    Args:
        experiment: of train.py; its own recipe is measured.
        rounds: runs of every way.
        short: few tasks, and the ways that differ in kind alone.
    """
    case = Case(experiment, (f"experiment={experiment}",), strategies.WARM_UP + (10 if short else 60))
    ways = [way._replace(overrides=(*way.overrides, *FEW)) for way in WAYS[1:4:2]] if short else list(WAYS)
    speeds = [[strategies.run(case, way).speed for way in ways] for _ in range(rounds)]
    by_way = [
        {"strategy": way.name, "workers": way.workers, "at_once": way.at_once, "tasks_per_second": list(values)}
        for way, values in zip(ways, zip(*speeds, strict=True), strict=True)
    ]
    return {"experiment": experiment, "rows": by_way}


def ratios(rows: Sequence[dict[str, Any]], row: dict[str, Any], *, at_once: int) -> list[float]:
    """A row's speed by that of one worker of the same strategy (`ddp`: of `local`), or, with `at_once` 2, of two
    independent processes, round by round; empty where that was not measured."""
    name = "rpc" if row["strategy"] == "rpc" and at_once == 1 else "local"
    for other in rows:
        if other["strategy"].startswith(name) and other["workers"] == 1 and other["at_once"] == at_once:
            pairs = zip(row["tasks_per_second"], other["tasks_per_second"], strict=True)
            return [speed / reference for speed, reference in pairs]
    return []


def project(experiment: str) -> dict[str, Any]:
    """How long the published number of steps takes on a GPU, from 500 measured ones after the warm-up."""
    steps = 500
    case = Case(experiment, (f"experiment={experiment}", "device=cuda"), strategies.WARM_UP + steps)
    figures = strategies.run(case, Way("local", ("strategy=local", "logger.every=1"), 1))
    seconds = STEPS_A_RUN * figures.means["step_seconds"]
    return {"experiment": experiment, "measured_steps": steps, "steps": STEPS_A_RUN, "hours": seconds / 3600}
