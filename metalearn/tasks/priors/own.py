"""A prior of the user's own: a module with two functions, `shape(rng)` and `table(rng, shape)`, or with a `prior`."""

from types import ModuleType
from typing import Any

from metalearn.checks import Invalid
from metalearn.tasks.common.episodes import Seeds
from metalearn.tasks.priors.source import Prior, PriorTasks, one_by_one, tasks_of


def own_prior(*, prior: ModuleType, classes: int | None, group: int, seeds: Seeds) -> PriorTasks:
    """Tasks that a module draws.

    Args:
        prior: the module. `shape(rng)` gives the `Shape` of a group of tasks, and `table(rng, shape)` the arrays x
            [rows, features] and y [rows] of a task. In place of it, `tables(rngs, shape)` may draw a table by each of
            several generators, x [t, rows, features] and y [t, rows], such that none depends on those beside it. Or the
            module has a `prior`, such as `metalearn.tasks.priors.mixture` makes it.
        classes: the most classes of a task; None: the targets are real numbers.
        group: how many tasks share a shape.

    Raises:
        ValueError: the module has no such functions, or a number is out of range.
    """
    made = getattr(prior, "prior", None)
    if isinstance(made, Prior):
        return tasks_of(made, classes=classes, group=group, seeds=seeds)
    found: dict[str, Any] = {name: getattr(prior, name, None) for name in ("shape", "table", "tables")}
    if not callable(found["shape"]) or not (callable(found["table"]) or callable(found["tables"])):
        missing = "shape(rng)" if not callable(found["shape"]) else "table(rng, shape)"
        raise Invalid(
            "prior", prior.__name__, f"the module defines no {missing}", "see docs/how-to/prior.md", quoted=False
        )
    tables = found["tables"] if callable(found["tables"]) else one_by_one(found["table"])
    return tasks_of(Prior(prior.__name__, found["shape"], tables), classes=classes, group=group, seeds=seeds)
