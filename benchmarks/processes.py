"""The speed of several processes: train.py on one recipe under the strategies, in turns."""

from collections.abc import Sequence
from typing import Any

from benchmarks import strategies
from benchmarks.strategies import RunWay, Workload

WAYS = (
    RunWay("local", ("strategy=local",), 1),
    RunWay("local, two independent at once", ("strategy=local",), 1, at_once=2),
    RunWay("rpc", ("strategy=rpc",), 1),
    RunWay("rpc", ("strategy=rpc",), 2),
    RunWay("ddp", ("strategy=ddp",), 2),
)
"""The speeds of two independent processes are added: two workers can reach this at best."""

STEPS_A_RUN = 60_000
"""The number of steps in the published recipe."""

FEW = ("trainer.meta_batch_size=4", "trainer.val_tasks=2", "trainer.test_tasks=2")


def measure(experiment: str, rounds: int, *, short: bool) -> dict[str, Any]:
    """Tasks a second of every way.

    Args:
        experiment: train.py's experiment, measured with its own recipe.
        rounds: runs of every way.
        short: few tasks, and two of the ways only.
    """
    case = Workload(experiment, (f"experiment={experiment}",), strategies.WARM_UP + (10 if short else 60))
    ways = [way._replace(overrides=(*way.overrides, *FEW)) for way in WAYS[1:4:2]] if short else list(WAYS)
    speeds = [[strategies.run(case, way).speed for way in ways] for _ in range(rounds)]
    by_way = [
        {"strategy": way.name, "workers": way.workers, "at_once": way.at_once, "tasks_per_second": list(values)}
        for way, values in zip(ways, zip(*speeds, strict=True), strict=True)
    ]
    return {"experiment": experiment, "rows": by_way}


def ratios(rows: Sequence[dict[str, Any]], row: dict[str, Any], *, at_once: int) -> list[float]:
    """A row's speed divided by a reference, round by round: one worker of the same strategy (for `ddp`: of `local`);
    with `at_once` 2, two independent processes. Empty if the reference was not measured."""
    name = "rpc" if row["strategy"] == "rpc" and at_once == 1 else "local"
    for other in rows:
        if other["strategy"].startswith(name) and other["workers"] == 1 and other["at_once"] == at_once:
            pairs = zip(row["tasks_per_second"], other["tasks_per_second"], strict=True)
            return [speed / reference for speed, reference in pairs]
    return []


def project(experiment: str) -> dict[str, Any]:
    """The hours of the published number of steps on a GPU, from 500 measured steps after the warm-up."""
    steps = 500
    case = Workload(experiment, (f"experiment={experiment}", "device=cuda"), strategies.WARM_UP + steps)
    figures = strategies.run(case, RunWay("local", ("strategy=local", "logger.every=1"), 1))
    seconds = STEPS_A_RUN * figures.means["step_seconds"]
    return {"experiment": experiment, "measured_steps": steps, "steps": STEPS_A_RUN, "hours": seconds / 3600}
