"""metalearn prior check: its figures by hand, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest

from metalearn.app.prior_check import area, check_prior, r_squared, source_of
from metalearn.cli.data import prior
from metalearn.errors import DataError
from metalearn.tasks.common.episodes import Seeds
from metalearn.tasks.priors import Prior, Shape, tasks_of
from metalearn.tasks.priors.source import one_by_one
from metalearn.types import Episode


def test_the_area_is_the_share_of_pairs_in_the_right_order() -> None:
    """Of class 1, by hand: 0.9 and 0.4 against 0.4 and 0.1: 3 pairs of 4 are right, one is even. Class 0 mirrors it."""
    votes = np.array([[0.1, 0.9], [0.6, 0.4], [0.6, 0.4], [0.9, 0.1]])
    assert area(votes, np.array([1, 1, 0, 0]), np.array([0, 1])) == 3.5 / 4
    assert area(votes, np.array([1, 1, 1, 1]), np.array([0, 1])) == 0.5
    assert r_squared(np.array([1.0, 2, 4]), np.array([1.0, 2, 3])) == pytest.approx(0.5)


def drawing(table: object) -> object:
    return tasks_of(
        Prior("own", lambda rng: Shape(12, 6, 1), one_by_one(table)), classes=None, group=4, seeds=Seeds(0, 1)  # type: ignore[arg-type]
    )  # fmt: skip


def test_figures_of_learners_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    def table(rng: np.random.Generator, shape: Shape) -> tuple[object, object]:
        x = rng.normal(size=(12, 1))
        return x, x[:, 0]

    scores = iter([0.9, 0.5, 0.01, 0.04])

    def learn(task: Episode) -> dict[str, float]:
        assert task.query.x.shape == (1, 6, 1)
        value = next(scores)
        return {"forest": value, "linear": 0.0}

    found = check_prior(drawing(table), 4, learn)  # type: ignore[arg-type]
    assert found.measure == "R²" and found.useless == 0.5 and found.constant == 0 and found.tasks == 4


@pytest.mark.parametrize(("every", "message"), [(2, r"tasks \d+ and \d+ of val are alike"), (1000, "constant targets")])
def test_tasks_that_repeat_or_stay_constant_are_refused(every: int, message: str) -> None:
    """A rule that keeps its promise within a group of four, but repeats itself in others; or is often constant."""

    def table(rng: np.random.Generator, shape: Shape) -> tuple[object, object]:
        number = int(rng.integers(10**6))
        own = np.random.default_rng(number % every)
        x = own.normal(size=(12, 1))
        return x, 0 * x[:, 0] if every == 1000 and number % 4 == 0 else x[:, 0]

    with pytest.raises(DataError, match=message):
        check_prior(drawing(table), 12, None)  # type: ignore[arg-type]


def test_a_prior_outside_is_looked_at_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("metalearn.app.prior_check.SECONDS", 0.01)
    page = tmp_path / "prior.html"
    assert prior(["check", "--tasks", "4", "dataset.group=4", "tests.own_prior", "--page", str(page)]) == 0
    said = capsys.readouterr().out
    assert "prior tests.own_prior: 4 tasks" in said and "features 3 to 3, classes 2 to 2" in said
    assert "mean AUC: forest 0." in said or "scikit-learn is not installed" in said
    content = page.read_text()
    assert content.count("<svg") >= 4
    assert "metalearn prior check --tasks 4 dataset.group=4 tests.own_prior" in content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_prior"], "plugins=[no_such_prior]: cannot be imported"),
        (["omniglot"], "NAME=omniglot: is no prior; type gp, sine, table"),
        (["gp", "noise=1"], "noise=1: must be a key of the prior; type dataset.KEY=VALUE"),
        (["gp", "dataset.nois=1"], "dataset.nois"),
    ],
)
def test_wrong_names_and_keys_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prior(["check", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_line_without_the_name_of_a_prior_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        prior(["check", "dataset.group=4", "--tasks", "4"])
    assert "dataset.group=4: is no NAME of a prior; type gp, sine, table" in capsys.readouterr().err


@pytest.mark.parametrize("classes", [15, None])
def test_the_classes_of_a_module_are_those_that_it_draws(
    classes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"prior_of_{classes}"
    (tmp_path / f"{name}.py").write_text(
        "from metalearn.tasks.priors import Shape\n\n\n"
        f"def shape(rng):\n    return Shape(90, 60, 2, {classes})\n\n\n"
        "def table(rng, shape):\n    return rng.normal(size=(90, 2)), rng.permutation(90) % (shape.classes or 90)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert source_of(name, {}, []).classes("val") == classes
