"""Prior-fitted networks in scikit-learn's tools, and on tables as they come."""

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metalearn.types import Batch
from tests.runs import slow
from tests.saved import saved_run

pytest.importorskip("sklearn", reason="scikit-learn is not installed; type pip install scikit-learn")
pytest.importorskip("pandas", reason="pandas is not installed; type pip install pandas")

import pandas as pd
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import check_estimator

from metalearn import PFNClassifier, PFNRegressor

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]

SMALL = ("model.width=8", "model.heads=1", "model.layers=1", "logger.tensorboard=false")
PLUGINS = ["tests"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Networks that have learned nothing: their answers are those of any network, as far as these tests look."""
    home = tmp_path_factory.mktemp("runs")
    saved_run(home / "numbers", "experiment=pfn_gp", "model.standardize=true", *SMALL)
    saved_run(home / "classes", "experiment=pfn_own", "dataset.prior=tests.own_prior", "plugins=[tests]", *SMALL)
    yield {name: home / name for name in ("numbers", "classes")}


def frame(rows: int = 40, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = pd.DataFrame({
        "size": rng.normal(size=rows), "colour": rng.choice(["red", "blue", None], size=rows),
        "kind": pd.Categorical(rng.choice(["a", "b", "c"], size=rows)), "old": rng.random(rows) < 0.5,
    })  # fmt: skip
    x.loc[3, "size"] = np.nan
    return x, np.where(x["old"], "yes", "no")


NOT_PASSED = {"check_classifiers_train", "check_regressors_train"}
"""Checks that expect a learner that has learned something; the networks here have not."""


@slow
@pytest.mark.parametrize("name", ["classes", "numbers"])
def test_check_estimator_passes(runs: dict[str, Path], name: str) -> None:
    make = PFNClassifier if name == "classes" else PFNRegressor
    found = check_estimator(make(runs[name], plugins=PLUGINS), on_fail=None)
    failed = {r["check_name"]: r["exception"] for r in found if r["status"] == "failed"}
    assert failed.keys() <= NOT_PASSED, failed


def test_a_frame_is_read_by_its_columns_and_the_order_of_columns_and_classes_is_nothing(runs: dict[str, Path]) -> None:
    x, y = frame()
    fitted = PFNClassifier(runs["classes"], plugins=PLUGINS).fit(x, y)
    asked, _ = frame(seed=1)
    found = fitted.predict_proba(asked)
    assert fitted.classes_.tolist() == ["no", "yes"]
    np.testing.assert_allclose(found.sum(axis=1), 1)
    np.testing.assert_array_equal(fitted.predict_proba(asked.iloc[[7]]), found[[7]])  # the same bits in any call
    others = np.where(y == "yes", "0", "1")  # the classes change places, and so do the columns
    order = ["kind", "old", "size", "colour"]
    turned = PFNClassifier(runs["classes"], plugins=PLUGINS).fit(x[order], others).predict_proba(asked[order])
    np.testing.assert_allclose(turned[:, ::-1], found, atol=1e-6)
    new = asked.assign(colour="green")  # a value that no known row has is a missing one
    np.testing.assert_array_equal(fitted.predict_proba(new), fitted.predict_proba(asked.assign(colour=None)))


def test_the_numbers_are_those_of_the_network(runs: dict[str, Path]) -> None:
    """By the network's training pass, which knows nothing of the estimator."""
    rng = np.random.default_rng(0)
    x, y, asked = rng.normal(size=(12, 2)), rng.normal(size=12), rng.normal(size=(3, 2))
    fitted = PFNRegressor(runs["numbers"]).fit(x, y)
    learner = fitted._opened()
    reads = learner.taught.model.in_context
    support = Batch(*(torch.tensor(v, dtype=torch.float32)[None] for v in (x, y[:, None])))
    with torch.no_grad():
        outputs = reads.outputs(learner.params, support, torch.tensor(asked, dtype=torch.float32)[None])[0]
    mean, sd = outputs[:, 0].numpy(), outputs[:, 1].exp().numpy()
    np.testing.assert_allclose(fitted.predict(asked), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        fitted.predict_quantiles(asked, [0.5, 0.8413447]), np.stack([mean, mean + sd], axis=1), rtol=1e-4, atol=1e-4
    )
    low, high = fitted.predict_interval(asked, 0.6826895).T
    np.testing.assert_allclose((low, high), (mean - sd, mean + sd), rtol=1e-4, atol=1e-4)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict(asked), fitted.predict(asked))
    with pytest.raises(NotFittedError):
        clone(fitted).predict(asked)


def test_larger_tables_are_said_and_what_does_not_fit_is_refused(
    runs: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    with caplog.at_level(logging.WARNING, logger="metalearn"):
        PFNRegressor(runs["numbers"]).fit(rng.normal(size=(70, 3)), rng.normal(size=70))
    assert "there are 70 known rows, and it was trained on tables of at most 50" in caplog.text
    assert "there are 3 features, and it was trained on tables of at most 1" in caplog.text
    x = rng.normal(size=(22, 2))
    with pytest.raises(ValueError, match=r"model.classes=10: a task has 11 classes"):
        PFNClassifier(runs["classes"], plugins=PLUGINS).fit(x, np.arange(22) % 11)
    with pytest.raises(ValueError, match=r"give a run of algorithm=pfn model=table model.head=classes"):
        PFNClassifier(runs["numbers"]).fit(x, np.arange(22) % 2)
    with pytest.raises(ValueError, match="infinity, or a value too large"):
        PFNRegressor(runs["numbers"]).fit(np.full((4, 2), 1e300), np.arange(4.0))
    with pytest.raises(ValueError, match="levels=1: must be below 1"):
        PFNRegressor(runs["numbers"]).fit(x, x[:, 0]).predict_quantiles(x, [1])
