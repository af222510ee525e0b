"""Tasks of the rows of a table: what a task has, counted by hand; and what of a file is refused, with its place."""

import csv
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import metalearn
from metalearn.errors import ConfigError, DataError
from metalearn.tasks.common.episodes import Seeds, content_of
from metalearn.tasks.table import _ordered, arrays, table
from metalearn.types import Episode, TaskSource
from tests.runs import assert_same_bytes, slow, train_in

NAMES = ["who", "age", "note", "dose", "effect"]


def rows_of(tasks: int = 10, each: int = 6) -> list[list[Any]]:
    """Row r of task t: age = 100 t + r, dose = r, effect = t - r / 8."""
    return [[f"p{t}", 100 * t + r, "a" if r % 2 else "b", r, t - r / 8] for t in range(tasks) for r in range(each)]


def write(file: Path, rows: list[list[Any]], names: list[str] = NAMES) -> Path:
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([names, *rows])
    return file


def source(file: Path, **changes: Any) -> TaskSource:
    chosen: dict[str, Any] = {
        "task": "who", "target": "effect", "targets": "numbers", "features": ["age", "dose"], "split": [0.6, 0.2, 0.2],
        "missing": "refuse", "standardize": False, "shots": 2, "queries": 3, "seeds": Seeds(0, 1),
    } | changes  # fmt: skip
    return table(file=str(file), **chosen)


def tasks_in(episode: Episode) -> list[set[int]]:
    """The numbers of the tasks that the rows of each episode are from, by the ages."""
    ages = torch.cat([batch.x[:, :, 0] for batch in episode], dim=1)
    return [set((row // 100).tolist()) for row in ages.int()]


def test_a_task_has_different_rows_of_one_value(tmp_path: Path) -> None:
    found = source(write(tmp_path / "t.csv", rows_of()))
    seen: dict[str, set[int]] = {}
    for split in ("train", "val", "test"):
        episode = found.episodes(split, torch.arange(40))
        (support, query) = episode
        assert [support.x.shape, query.x.shape, query.y.shape] == [(40, 2, 2), (40, 3, 2), (40, 3, 1)]
        for batch in episode:
            assert torch.equal(batch.x[:, :, 0] % 100, batch.x[:, :, 1])
            assert torch.equal(batch.y[:, :, 0], batch.x[:, :, 0] // 100 - batch.x[:, :, 1] / 8)
        doses = torch.cat([support.x[:, :, 1], query.x[:, :, 1]], dim=1)
        assert all(len(set(row.tolist())) == 5 for row in doses), "no row twice"
        owners = tasks_in(episode)
        assert all(len(own) == 1 for own in owners)
        seen[split] = set.union(*owners)
    assert [len(numbers) for numbers in seen.values()] == [6, 2, 2]
    assert set.union(*seen.values()) == set(range(10)), "each task in one split, and every one drawn"
    again = source(tmp_path / "t.csv").episodes("val", torch.tensor([7]))
    one = found.episodes("val", torch.arange(8))
    assert all(torch.equal(a.x[0], b.x[7]) for a, b in zip(again, one, strict=True))


def test_a_column_divides_the_tasks_and_names_classes(tmp_path: Path) -> None:
    rows = [[*row, ("train", "val", "test")[int(row[0][1:]) % 3]] for row in rows_of()]
    file = write(tmp_path / "t.csv", rows, [*NAMES, "part"])
    found = source(file, target="note", targets="classes", split="part", features=None, shots=[1, 2])
    assert found.classes("test") == 2
    tasks = found.episodes("val", torch.arange(30))
    assert {len(task.support.y[0]) for task in tasks} == {1, 2}  # type: ignore[attr-defined]
    for task in tasks:
        assert tasks_in(task)[0] <= {1, 4, 7}  # type: ignore[arg-type]
        (x, y) = task.query  # type: ignore[attr-defined]
        assert x.shape == (1, 3, 3) and torch.equal(y, 1 - x[:, :, 1].long() % 2), "a is 0, of odd doses; b is 1"


def test_missing_features_are_the_mean_of_the_support_rows(tmp_path: Path) -> None:
    rows = rows_of()
    for row in rows:
        row[3] = row[3] if row[3] % 2 else ""
    found = source(write(tmp_path / "t.csv", rows), missing="mean")
    for index in range(20):
        support, query = found.episodes("train", torch.tensor([index]))
        given = [dose for age, dose in support.x[0].tolist() if age % 2]
        wanted = sum(given) / len(given) if given else 0.0
        for age, dose in torch.cat([support.x[0], query.x[0]]).tolist():
            assert dose == pytest.approx(age % 100 if age % 2 else wanted)


def test_features_are_standardized_over_the_training_tasks(tmp_path: Path) -> None:
    found = source(write(tmp_path / "t.csv", rows_of(each=5)), standardize=True)
    x = torch.cat([batch.x for batch in found.episodes("train", torch.arange(2000))], dim=1)
    owners = {row[0, 0].item(): row[:, 0] for row in x}  # tasks by their ages
    whole = torch.cat(
        [row.sort().values for row in {round(float(row.mean()), 4): row for row in owners.values()}.values()]
    )
    assert len(whole) == 30 and whole.mean().abs() < 1e-5 and abs(whole.std(correction=0) - 1) < 1e-5


def test_the_digest_covers_every_number(tmp_path: Path) -> None:
    rows = rows_of(tasks=40)
    before = content_of(source(write(tmp_path / "t.csv", rows)))
    rows[-1][1] += 0.5
    assert before.is_known_otherwise(content_of(source(write(tmp_path / "t.csv", rows))).digest)


def broken(change: Any) -> list[list[Any]]:
    rows = rows_of()
    change(rows)
    return rows


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (rows_of(), {"target": "effct"}, "has no column 'effct'; it has who, age, note, dose, effect"),
        (rows_of(), {"features": None}, "row 1, column 'note': is 'b', and must be a number; type dataset.features"),
        (rows_of(), {"target": "note"}, "column 'note': is 'b', and must be a number; type dataset.targets=classes"),
        (broken(lambda rows: rows[7].__setitem__(1, "old")), {}, "row 8, column 'age': is 'old', and must be a number"),
        (broken(lambda rows: rows[4].__setitem__(3, "NA")), {}, "row 5, column 'dose': is missing; type dataset"),
        (broken(lambda rows: rows[4].__setitem__(4, "")), {"missing": "mean"}, "row 5, column 'effect': is missing;"),
        (broken(lambda rows: rows[4].__setitem__(3, "inf")), {}, "row 5, column 'dose': is inf, and must be finite"),
        (broken(lambda rows: rows[2].append(1)), {}, "row 3 has 6 cells, and the first line names 5 columns"),
        (broken(lambda rows: rows.pop()), {"shots": 3}, "who=p9 has 5 rows, and shots=3 and queries=3 need 6 (1"),
        (rows_of(tasks=2), {}, "of 2 tasks (by who) none is left for"),
        (rows_of(), {"split": "note"}, "the task p0 has rows with the splits a, b; all rows of a task must have one"),
        (rows_of(), {"features": ["age", "effect"]}, "must be columns, without those of task, target and split"),
        ([], {}, "has no rows below its first line"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(rows: Any, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    found = source(write(tmp_path / "t.csv", rows), **changes)
    with pytest.raises(DataError) as caught:
        found.classes("train")
    assert message in str(caught.value)


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        source(tmp_path / "t.csv").classes("train")
    with pytest.raises(DataError, match="No such file or directory"):
        source(tmp_path / "absent.csv").classes("train")


def test_none_and_nan_are_names_of_tasks_and_classes(tmp_path: Path) -> None:
    """No value only where a cell is empty: NA is North America too."""
    rows = rows_of()
    for row in rows:
        row[0], row[2] = {"p0": "NA", "p1": "null"}.get(row[0], row[0]), "None" if row[2] == "a" else "nan"
    found = source(write(tmp_path / "t.csv", rows), target="note", targets="classes")
    assert _ordered(["10", "nan", "9", "1"]) == ["1", "10", "9", "nan"]  # it has no order among numbers
    assert found.classes("test") == 2 and found.episodes("train", torch.arange(40)).query.y.unique().tolist() == [0, 1]


def test_arrays_learn_in_code() -> None:
    """Two classes on either side of a line that each task turns."""
    rng = np.random.default_rng(0)
    x, task = rng.normal(size=(600, 2)), np.repeat(np.arange(30), 20)
    y = (x[:, 0] > 0) ^ (task % 2 == 1)
    source = metalearn.arrays(x, y.astype(int), task=task, shots=10, queries=10)
    torch.manual_seed(2)  # of the network's first weights
    learned = metalearn.train(
        metalearn.named("maml", inner_lr=0.5, inner_steps=2, eval_steps=2), torch.nn.Linear(2, 2), source,
        steps=20, meta_batch_size=8, val_every=20, val_tasks=20, test_tasks=20, progress=False,
    )  # fmt: skip
    by_step = learned.evaluate(count=50)["by_step"]
    assert by_step["2"] > 0.75  # chance is 0.5, and without inner steps no network is right in both kinds of tasks
    marked = arrays(x, x[:, :1], task=task, shots=2, queries=2, split=[("train", "val", "test")[t % 3] for t in task])
    assert marked.classes("val") is None and marked.episodes("val", torch.arange(3)).query.y.shape == (3, 2, 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 1, 2, 0, 1, 2], None),
        ([0, 2, 0, 0, 1, 2], "a support set has no sample of class 1, and this algorithm compares"),
        ([0, 1, 0, 0, 1, 2], r"needs? 3 \(the first support set has no sample of class 2: type more dataset.shots\)"),
    ],
)
def test_learners_that_compare_need_a_row_of_each_class(rows: list[int], message: str | None) -> None:
    y, x = np.tile(rows, 6), np.random.default_rng(0).normal(size=(36, 2))
    source = arrays(x, y, task=np.repeat(np.arange(6), 6), shots=3, queries=3)
    source._seeds = _InOrder()  # type: ignore[attr-defined]
    expects = nullcontext() if message is None else pytest.raises((ConfigError, DataError), match=message)
    with expects:
        metalearn.train(
            "protonet", torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)), source,
            steps=1, meta_batch_size=2, val_every=1, val_tasks=2, test_tasks=2, progress=False,
        )  # fmt: skip


class _InOrder:
    """Seeds whose generators draw the first task, and its rows as they come."""

    def generator(self, split: str, index: int) -> "_InOrder":
        return self

    def integers(self, end: int) -> int:
        return 0

    def permutation(self, rows: Any) -> Any:
        return rows


def test_several_arrays_keep_their_types_and_rows() -> None:
    row, task = np.arange(60), np.repeat(np.arange(6), 10)
    x = {"ids": np.stack([row, 2 * row], axis=1), "known": row % 2 == 0, "size": np.where(row % 5 == 0, np.nan, row)}
    source = arrays(x, row[:, None] / 4, task=task, shots=4, queries=6)
    for batch in source.episodes("train", torch.arange(3)):
        number: Any = (4 * batch.y[..., 0]).long()
        given: Any = batch.x
        assert torch.equal(given["ids"], torch.stack([number, 2 * number], dim=2))
        assert torch.equal(given["known"], number % 2 == 0)
        there = number % 5 != 0
        assert torch.equal(given["size"][there], number[there].float()) and given["size"].isfinite().all()
    of_ids = arrays(x["ids"], row % 2 == 0, task=task, shots=4, queries=6)  # truth values are two classes
    assert of_ids.classes("val") == 2 and of_ids.episodes("val", torch.arange(1)).query.x.dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": np.ones(4)}, r"have the shapes \[4\], \[4\] and 4"),
        ({"x": {"a": np.ones(4), "b": np.ones(3)}}, r"have the shapes \[4\], \[3\], \[4\] and 4"),
        ({"y": np.array([0.0, np.nan, 1, 1])}, "numbers that are not finite"),
        ({"x": np.full((4, 2), np.inf), "y": np.array([0, 0, 1, 1])}, "numbers that are not finite"),
        ({"y": np.array(["cat", "dog"] * 2)}, "y: must hold numbers .*'cat'.*; texts become numbers by numpy.unique"),
        ({"x": {"kind": np.array(["a", "b"] * 2)}}, "kind: must hold numbers .*'a'"),
        ({"task": [1, 1, 1, 2]}, "none is left for|has 1 rows"),
        (
            {"split": ["train", "val", "test", "tests"], "task": [1, 2, 3, 4]},
            "the task 4 has rows with the splits tests",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"x": np.ones((4, 2)), "y": np.ones(4), "task": [1, 1, 2, 2], "shots": 1, "queries": 1}
    with pytest.raises((ConfigError, DataError), match=message):
        arrays(**given | arguments)


@slow
def test_workers_give_the_bits_of_one(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", rows_of())
    own = (
        "dataset=table", f"dataset.file={file}", "dataset.task=who", "dataset.target=effect",
        "dataset.features=[age,dose]", "dataset.shots=[1,3]", "dataset.queries=3", "model=mlp", "model.inputs=2",
        "trainer.steps=6", "trainer.val_every=3", "trainer.val_tasks=4", "trainer.test_tasks=4",
        "trainer.meta_batch_size=5", "trainer.task_chunk=2", "logger=[]", "logger.plots=false", "logger.report=false",
    )  # fmt: skip
    train_in(tmp_path / "one", *own)
    train_in(tmp_path / "two", *own, "workers=2", "pause_after=2")
    train_in(tmp_path / "two", *own, "workers=2")
    assert_same_bytes(tmp_path / "one", tmp_path / "two")
