"""Tasks from the rule of a prior: groups and chunks, the same bits alone and in a chunk, and what is refused."""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from metalearn.config.build import build
from metalearn.config.options import named, plain_config
from metalearn.errors import ConfigError, DataError, Invalid
from metalearn.tasks.common.episodes import Seeds
from metalearn.tasks.priors import Shape
from metalearn.tasks.priors.source import own_prior
from metalearn.training.chunks import chunk_of
from metalearn.training.settings import CHUNK_CELLS, TrainerSettings, chunk_in_group, tasks_in_chunks
from metalearn.types import Episode
from tests.own_prior import table
from tests.runs import ROOT

CPU = torch.device("cpu")


def shape(rng: np.random.Generator) -> Shape:
    return Shape(rows=int(rng.integers(20, 60)), known=0.6, features=int(rng.integers(1, 5)), classes=2)


def rule(**functions: Any) -> ModuleType:
    module = ModuleType("a_prior")
    vars(module).update({"shape": shape, "table": table} | functions)
    return module


def source(group: int = 8, classes: int | None = 2, seed: int = 0, **functions: Any) -> Any:
    return own_prior(prior=rule(**functions), classes=classes, group=group, seeds=Seeds(seed, 1))


def values(episode: Episode, task: int) -> list[bytes]:
    return [value[task].numpy().tobytes() for batch in episode for value in batch]


def test_a_task_has_the_bits_of_its_number_alone_and_in_a_chunk() -> None:
    together = source().episodes("train", torch.arange(8, 16))
    other_order = source().episodes("train", torch.arange(15, 7, -1))
    for number in range(8, 16):
        alone = source().episodes("train", torch.tensor([number]))
        assert values(alone, 0) == values(together, number - 8) == values(other_order, 15 - number)
    assert len({tuple(values(together, task)) for task in range(8)}) == 8


def test_the_tables_are_those_of_generators_of_the_numbers() -> None:
    """By the rule itself, with the generators that DESIGN's promise names."""
    its = shape(np.random.default_rng((3, 0, 2, 4)))
    x, y = table(np.random.default_rng((3, 0, 17)), its)
    (support, query) = source(seed=3).episodes("train", torch.tensor([17]))
    known = round(0.6 * its.rows)
    assert np.array_equal(torch.cat([support.x, query.x], dim=1)[0].numpy(), x.astype(np.float32))
    assert support.x.shape[1] == known and support.y.dtype == torch.int64
    assert np.array_equal(support.y[0].numpy(), y[:known]) and np.array_equal(query.y[0].numpy(), y[known:])


def test_splits_and_seeds_have_tasks_of_their_own() -> None:
    seen = {
        tuple(values(source(seed=seed).episodes(split, torch.tensor([0])), 0))
        for seed, split in itertools.product((0, 5), ("train", "val", "test"))
    }
    assert len(seen) == 4, "training follows seed, validation and test the seed of evaluation"


def test_tasks_of_several_groups_come_one_by_one() -> None:
    episodes = chunk_of(source(), "val", torch.arange(6, 10))
    assert len(episodes) == 4 and [len(one.query.x) for one in episodes] == [1] * 4
    both = source().episodes("val", torch.arange(8, 10))
    assert values(episodes[2], 0) == values(both, 0)


@pytest.mark.parametrize("first", [0, 5, 64, 100])
def test_chunks_divide_groups_and_never_cross_them(first: int) -> None:
    tasks, settings = source(group=24), TrainerSettings(1, 77, "auto", 1, 2, 2)
    big = source(group=24, shape=lambda rng: Shape(int(rng.integers(500, 2000)), 0.5, 4, 2))
    for made in (tasks, big):
        size = chunk_in_group(settings, made, CPU)
        chunks = tasks_in_chunks(first, 77, size, "val")
        assert torch.equal(torch.cat(chunks), torch.arange(first, first + 77))
        for chunk in chunks:
            start, end = int(chunk[0]), int(chunk[-1]) + 1
            assert start // 24 == (end - 1) // 24
            most = CHUNK_CELLS["cpu"] // made.cells("val", start)
            best = max(d for d in range(1, 25) if 24 % d == 0 and (d <= most or d == 1))
            assert len(chunk) == best or start == first or end == first + 77, "all but the ends are full"


def test_a_chunk_size_that_divides_no_group_is_refused() -> None:
    with pytest.raises(Invalid, match=r"task_chunk=7: must divide dataset.group=24.*type task_chunk=6"):
        chunk_in_group(TrainerSettings(1, 24, 7, 1, 2, 2), source(group=24), CPU)
    end = chunk_in_group(TrainerSettings(1, 24, 6, 1, 2, 2), source(group=24), CPU)
    assert [len(chunk) for chunk in tasks_in_chunks(0, 20, end)] == [6, 6, 6, 2]


# What is refused

calls = itertools.count()


def _table(x: Any = None, y: Any = None) -> Callable[[np.random.Generator, Shape], Any]:
    """`table` with another x or y."""

    def other(rng: np.random.Generator, shape: Shape) -> Any:
        own_x, own_y = table(rng, shape)
        return (own_x if x is None else x(own_x)), (own_y if y is None else y(own_y))

    return other


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "clock": ({"table": _table(x=lambda x: x + time.time_ns() % 10**6)}, "two calls for task 0 of train differ"),
    "global generator": ({"table": _table(x=lambda x: x + np.random.normal())}, "two calls for task 0"),
    "memory": ({"table": _table(x=lambda x: x + next(calls))}, "two calls for task 0"),
    "shape by the clock": ({"shape": lambda rng: Shape(20 + next(calls), 5, 2, 2)}, "two calls for task 0"),
    "alike": ({"table": lambda rng, shape: table(np.random.default_rng(0), shape)}, "tasks 0 and 1 of train are alike"),
    "nan": ({"table": _table(x=lambda x: np.where(x > 1, np.nan, x))}, "x of task 0 of train has nan; .*missing=True"),
    "infinite": ({"table": _table(x=lambda x: x / 0.0)}, "x of task 0 of train has -?inf"),
    "text": ({"table": _table(x=lambda x: np.where(x > 0, "red", "blue"))}, "x holds <U4.*give each text a number"),
    "objects": ({"table": _table(x=lambda x: x.astype(object))}, "x holds object"),
    "rows": ({"table": _table(x=lambda x: x[1:])}, r"x has the shape \[\d+, \d\], and shape\(rng\) says"),
    "columns of y": ({"table": _table(y=lambda y: y[:, None])}, r"y has the shape \[\d+, 1\], and .* says \[\d+\]"),
    "shapes within a group": (
        {"table": lambda rng, shape: table(rng, shape._replace(rows=int(rng.integers(70, 90))))}, "x has the shape"),
    "labels": ({"table": _table(y=lambda y: y + 1)}, "from 1 to 2; 2 classes are the whole numbers 0 to 1"),
    "real labels": ({"table": _table(y=lambda y: y + 0.0)}, "y holds float64 from"),
    "no shape": ({"shape": lambda rng: (20, 5)}, "gives a tuple; give a metalearn.tasks.priors.Shape"),
    "known": ({"shape": lambda rng: Shape(20, 20, 2, 2)}, "known=20 of 20 rows; give a whole number from 1 to 19"),
    "a part above 1": ({"shape": lambda rng: Shape(20, 15.0, 2, 2)}, "known=15.0 of 20 rows; give a whole number"),
    "no part": ({"shape": lambda rng: Shape(20, 0.0, 2, 2)}, "known=0.0 of 20 rows; give a whole number"),
    "a part that is nan": ({"shape": lambda rng: Shape(20, float("nan"), 2, 2)}, "known=nan of 20 rows"),
    "too large": ({"table": _table(x=lambda x: x * 1e39)}, "x of task 0 of train has -?inf"),
    "features": ({"shape": lambda rng: Shape(20, 5, 0, 2)}, "features=0; give a whole number of at least 1"),
    "classes": ({"shape": lambda rng: Shape(20, 5, 2, 3)}, "classes=3, .*=2 is the most.*type dataset.classes=3"),
    "numbers": ({"shape": lambda rng: Shape(20, 5, 2)}, "classes=null, and .* type dataset.classes=null"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_that_breaks_its_promise_is_refused(name: str) -> None:
    functions, message = BROKEN[name]
    with pytest.raises(DataError, match=f"prior a_prior: .*{message}"), np.errstate(all="ignore"):
        source(**functions).episodes("train", torch.tensor([0]))


@pytest.mark.parametrize(("group", "index"), [(1, 0), (3, 2)])
@pytest.mark.parametrize("name", ["alike"])
def test_a_single_task_is_compared_with_the_next_group(name: str, group: int, index: int) -> None:
    functions, message = BROKEN[name]
    one_shape = {"shape": lambda rng: Shape(20, 5, 2, 2)}
    message = message.replace("tasks 0 and 1", f"tasks {index} and {index + 1}")
    with pytest.raises(DataError, match=message):
        source(group, **one_shape | functions).episodes("train", torch.tensor([index]))


def test_a_part_may_be_any_real_number() -> None:
    made = source(shape=lambda rng: Shape(30, np.float32(0.5), 2, 2))
    assert made.episodes("train", torch.tensor([0])).support.x.shape[1] == 15


def test_targets_that_float32_does_not_hold_are_refused() -> None:
    large = lambda rng, shape: (rng.normal(size=(30, 2)), 1e39 * rng.normal(size=30))  # noqa: E731
    with pytest.raises(DataError, match=r"y of task 0 of train has -?inf"):
        source(classes=None, shape=lambda rng: Shape(30, 12, 2), table=large).episodes("train", torch.arange(1))


def test_missing_cells_are_allowed_where_the_shape_says_so() -> None:
    made = source(
        shape=lambda rng: Shape(30, 0.5, 2, 2, missing=True), table=_table(x=lambda x: np.where(x > 1, np.nan, x))
    )
    assert made.episodes("train", torch.tensor([0])).support.x.isnan().any()


def test_real_targets_have_a_column() -> None:
    made = source(
        classes=None,
        shape=lambda rng: Shape(30, 12, 2),
        table=lambda rng, shape: (x := rng.normal(size=(30, 2)), x[:, 0]),
    )
    (support, query) = made.episodes("train", torch.arange(3))
    assert [support.y.shape, query.y.shape] == [(3, 12, 1), (3, 18, 1)]
    assert torch.equal(support.y, support.x[:, :, :1])


# From the command line


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module in a folder that is no part of the program."""
    (tmp_path / "lines_outside.py").write_bytes((ROOT / "tests" / "own_prior.py").read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    yield "lines_outside"
    sys.modules.pop("lines_outside", None)


def built(prior: str, *plugins: str) -> Any:
    return build(plain_config({"dataset": named("prior", prior=prior)}, {"plugins": plugins}), "dataset")


def test_an_admitted_module_makes_tasks(outside: str) -> None:
    episode = built(outside, outside).episodes("train", torch.arange(4))
    assert episode.query.x.shape[2] == 3 and set(episode.query.y.flatten().tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["lines_outside"], r"prior=lines_outside: its code would run here.*'plugins=\[lines_outside\]'"),
        (["lines_outside", "lines"], "its code would run here"),
        (["os.path", "lines_outside"], "dataset.prior=os.path: its code would run here"),
        (["lines-outside"], "must be the name of a module"),
        (["lines_nowhere", "lines_nowhere"], "lines_nowhere.: cannot be imported"),
        (["json", "json"], r"dataset.prior=json: the module defines no shape\(rng\)"),
    ],
)
def test_other_modules_are_refused(outside: str, names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(*names)
    assert "lines_outside" not in sys.modules, "no code of it has run"
