"""Prior-fitted networks in scikit-learn's tools, and on tables as they come."""

import json
import logging
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metalearn.types import Batch
from tests.programs import needs_onnx, said_by_card
from tests.runs import slow
from tests.saved import forge, saved_run

pytest.importorskip("sklearn", reason="scikit-learn is not installed; type pip install scikit-learn")
pytest.importorskip("pandas", reason="pandas is not installed; type pip install pandas")

import pandas as pd
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import check_estimator

from metalearn import PFNClassifier, PFNRegressor
from metalearn.cli import export, fit, predict, train
from metalearn.saved.exporter import ONNX, TORCH
from metalearn.tables import estimators
from metalearn.tables.estimators import COLUMNS, LEVELS, SHIPPED

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]

SMALL = ("model.width=8", "model.heads=1", "model.layers=1", "logger.tensorboard=false")
PLUGINS = ["tests"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Networks that have learned nothing: their answers are those of any network, as far as these tests look."""
    home = tmp_path_factory.mktemp("runs")
    saved_run(home / "numbers", "experiment=pfn_gp", "model.standardize=true", *SMALL)
    saved_run(home / "classes", "experiment=pfn_own", "dataset.prior=tests.own_prior", "plugins=[tests]", *SMALL)
    saved_run(home / "bars", "experiment=pfn_tables", "model.head=bars", "dataset.classes=null", *SMALL)
    yield {name: home / name for name in ("numbers", "classes", "bars")}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def network(runs: dict[str, Path]) -> list[str]:
    return ["--network", str(runs["classes"]), "--plugins", "tests"]


def classifier(runs: dict[str, Path], x: Any, y: Any) -> PFNClassifier:
    fitted: PFNClassifier = PFNClassifier(runs["classes"], plugins=PLUGINS).fit(x, y)
    return fitted


def frame(rows: int = 40, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = pd.DataFrame({
        "size": rng.normal(size=rows), "colour": rng.choice(["red", "blue", None], size=rows),
        "kind": pd.Categorical(rng.choice(["a", "b", "c"], size=rows)), "old": rng.random(rows) < 0.5,
    })  # fmt: skip
    x.loc[3, "size"] = np.nan
    return x, np.where(x["old"], "yes", "no")


TRAINED = {"classes": ["model.classes=4"], "numbers": ["dataset.classes=null", "model.head=gaussian"]}


@slow
@pytest.mark.parametrize("name", TRAINED)
def test_check_estimator_passes_with_a_trained_network(name: str, tmp_path: Path) -> None:
    """Some of its checks ask whether anything was learned: 400 steps of a small network, about a minute of a core."""
    small = ("model.width=32", "model.layers=2", "dataset.rows=[40,150]", "dataset.missing=0", "trainer.steps=400",
             "trainer.val_tasks=32", "trainer.test_tasks=32", "logger.plots=false", "logger.report=false",
             "logger.tensorboard=false")  # fmt: skip
    assert train.main(["experiment=pfn_tables", *small, *TRAINED[name], f"hydra.run.dir={tmp_path}/run"]) == 0
    check_estimator((PFNClassifier if name == "classes" else PFNRegressor)(tmp_path / "run"))


def test_a_frames_column_and_class_order_does_not_matter(runs: dict[str, Path]) -> None:
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
    named, answers = frame()
    with caplog.at_level(logging.WARNING, logger="metalearn"):
        PFNClassifier(runs["classes"], plugins=PLUGINS).fit(
            named.assign(name=[f"n{number}" for number in range(40)]), answers
        )
    assert "column name has 40 different texts in 40 rows" in caplog.text and "column colour" not in caplog.text
    x = rng.normal(size=(22, 2))
    with pytest.raises(ValueError, match=r"y: has 21 classes, and path=.* was made for 10"):
        PFNClassifier(runs["classes"], plugins=PLUGINS).fit(x, np.arange(22) % 21)
    with pytest.raises(ValueError, match=r"give a run of algorithm=pfn model=table model.head=classes"):
        PFNClassifier(runs["numbers"]).fit(x, np.arange(22) % 2)
    with pytest.raises(ValueError, match="X: column a holds infinity"):
        PFNRegressor(runs["numbers"]).fit(pd.DataFrame({"a": [1, np.inf, 2, 3]}), np.arange(4.0))
    with pytest.raises(ValueError, match="levels=1: must be below 1"):
        PFNRegressor(runs["numbers"]).fit(x, x[:, 0]).predict_quantiles(x, [1])


def test_more_classes_than_those_of_the_training_are_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Twelve places, five known rows each: of the shipped network, made for ten."""
    rng = np.random.default_rng(0)
    places, labels = 4 * rng.normal(size=(12, 3)), np.arange(120) % 12
    x = places[labels] + 0.3 * rng.normal(size=(120, 3))
    with caplog.at_level(logging.WARNING, logger="metalearn"):
        fitted = PFNClassifier().fit(x[:60], labels[:60])
    assert "there are 12 classes, and it was trained on tables of at most 10: cross-validate it" in caplog.text
    assert fitted.predict_proba(x).shape == (120, 12) and fitted.score(x[60:], labels[60:]) > 0.9
    fitted.save(tmp_path / "fitted")
    np.testing.assert_array_equal(PFNClassifier.load(tmp_path / "fitted").predict_proba(x), fitted.predict_proba(x))


def test_many_known_rows_are_read_in_parts(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer is the mean of those by networks that see one part each; each part has all classes."""
    monkeypatch.setattr(estimators, "MOST_ROWS", 20)
    rng = np.random.default_rng(0)
    x, asked = rng.normal(size=(45, 2)), rng.normal(size=(5, 2))
    labels = np.repeat([0, 1, 2], [33, 9, 3])
    parts = estimators._parts(torch.from_numpy(labels))
    assert sorted(torch.cat(parts).tolist()) == list(range(45)) and all(
        set(labels[part]) == {0, 1, 2} for part in parts
    )
    scaled = (x - x.mean(axis=0)) / x.std(axis=0), (asked - x.mean(axis=0)) / x.std(axis=0)
    for kind, y in ((PFNClassifier, labels), (PFNRegressor, x[:, 0])):
        plugins = PLUGINS if kind is PFNClassifier else ()
        model = kind(runs["classes" if kind is PFNClassifier else "numbers"], plugins=plugins)
        with caplog.at_level(logging.WARNING, logger="metalearn"):
            whole = model.fit(x, y)
        assert "45 known rows are read in 3 parts of at most 20, and the answers by each are averaged" in caplog.text
        answer = "predict_proba" if kind is PFNClassifier else "predict"
        found = getattr(whole, answer)(asked)
        alone = [
            getattr(clone(model).fit(scaled[0][part], y[part]), answer)(scaled[1])
            for part in (part.numpy() for part in estimators._parts(torch.from_numpy(y)))
        ]
        np.testing.assert_allclose(found, np.mean(alone, axis=0), atol=1e-4)


def test_a_target_of_another_kind_names_the_network_to_give(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    x = pd.DataFrame({"size": np.arange(22.0), "price": ["1,125", "2,250"] * 11, "sold": ["yes", "no"] * 11})
    x["day"] = pd.date_range("2024-01-01", periods=22)
    for name, value in (("price", "'1,125'"), ("sold", "'yes'"), ("day", "'2024-01-01'")):
        with pytest.raises(ValueError, match=f"y: holds {value}, and path=.* predicts numbers; .* model.head=classes"):
            PFNRegressor(runs["numbers"]).fit(x[["size"]], x[name])
    with pytest.raises(
        ValueError, match=r"y: Unknown label type: continuous.* path=.* predicts classes.* model.head=bars"
    ):
        classifier(runs, x[["size"]], np.arange(22) / 3)
    x.assign(mass=np.arange(22) / 3).to_csv("known.csv", index=False)
    other = ["--network", str(runs["numbers"])]
    assert fit.main(["known.csv", "--target", "price", *other, "--out", "made"]) == 2
    assert "--target=price: holds '1,125', and --network=" in capsys.readouterr().err
    assert fit.main(["known.csv", "--target", "mass", *network(runs), "--out", "made"]) == 2
    said = capsys.readouterr().err
    assert "--target=mass: has 22 classes, and --network=" in said and "model.head=bars" in said


def test_the_shipped_networks_predict_at_once() -> None:
    """Tables that no part of them was chosen by; a forest has 0.95 and 0.4 or so."""
    x, y = load_iris(return_X_y=True, as_frame=True)
    assert cross_val_score(PFNClassifier(), x, y).mean() > 0.93
    x, y = load_diabetes(return_X_y=True, as_frame=True)
    assert cross_val_score(PFNRegressor(), x, y).mean() > 0.4
    sizes = [path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()]
    assert len(sizes) >= 6 and sum(sizes) < 5e6


def test_durations_are_numbers_of_days() -> None:
    days, y = np.arange(20.0), np.arange(20) % 2
    fitted = PFNClassifier().fit(pd.DataFrame({"d": pd.to_timedelta(days, unit="D")}), y)
    asked = fitted.predict_proba(pd.DataFrame({"d": pd.to_timedelta(days * 24, unit="h")}))
    np.testing.assert_array_equal(asked, fitted.predict_proba(pd.DataFrame({"d": days})))
    with pytest.raises(ValueError, match="the known rows have numbers there"):
        fitted.predict(pd.DataFrame({"d": pd.to_datetime(["2024-01-01"])}))


def test_a_table_needs_no_network_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = frame()
    x.assign(bought=y).to_csv("known.csv", index=False)
    for target, kind, said in (("bought", "classes", "accuracy"), ("size", "numbers", "explains")):
        assert fit.main(["known.csv", "--target", target, "--out", target]) == 0
        out = capsys.readouterr().out
        assert f"{target}: {kind}, by the network that comes with metalearn" in out and said in out
        assert predict.main([target, "known.csv"]) == 0
    with pytest.raises(SystemExit):
        predict.main(["size", "known.csv", "--always-name"])
    assert fit.main(["known.csv", "--target", "size", "--network", "classes", "--out", "made"]) == 2
    assert "--target=size: has 39 classes" in capsys.readouterr().err


def test_what_is_saved_answers_with_the_same_bits(runs: dict[str, Path], tmp_path: Path) -> None:
    x, y = frame()
    asked, _ = frame(seed=1)
    fitted = PFNClassifier(runs["classes"], plugins=PLUGINS).fit(x, y)
    fitted.save(tmp_path / "classes")
    again = PFNClassifier.load(tmp_path / "classes", plugins=PLUGINS)
    assert again.classes_.tolist() == ["no", "yes"]
    np.testing.assert_array_equal(again.predict_proba(asked), fitted.predict_proba(asked))
    mixed = np.array([[1.5, "a"], [None, "b"], [2.5, "a"], [0.5, "b"]], dtype=object)
    of_array = PFNRegressor(runs["numbers"]).fit(mixed, [1.0, 2.0, 3.0, 4.0])
    of_array.save(tmp_path / "numbers")
    np.testing.assert_array_equal(PFNRegressor.load(tmp_path / "numbers").predict(mixed), of_array.predict(mixed))
    with pytest.raises(ValueError, match=r"numbers: is there already"):
        of_array.save(tmp_path / "numbers")
    with pytest.raises(ValueError, match=r"give a folder that PFNClassifier\.save has made"):
        PFNClassifier.load(runs["classes"])
    with pytest.raises(ValueError, match=r"give a run of algorithm=pfn model=table model.head=classes"):
        PFNClassifier.load(tmp_path / "numbers")


@pytest.mark.parametrize(("offset", "scale"), [(1.7e9, 1.0), (1.7e12, 1e3), (0.0, 1e20), (0.0, 1e300), (0.0, 1e-300)])
def test_units_have_no_influence(offset: float, scale: float, runs: dict[str, Path]) -> None:
    """In float32, seconds of this year are all equal, and the square of 1e20 is no number."""
    rng = np.random.default_rng(0)
    x, asked = rng.normal(size=(30, 3)), rng.normal(size=(5, 3))
    label, number = (x[:, 0] > 0).astype(int), x[:, 1]
    with np.errstate(all="raise", under="ignore"):
        found = classifier(runs, offset + scale * x, label).predict_proba(offset + scale * asked)
        mean = PFNRegressor(runs["numbers"]).fit(x, offset + scale * number).predict(asked)
    np.testing.assert_allclose(found, classifier(runs, x, label).predict_proba(asked), atol=1e-3)
    plain = PFNRegressor(runs["numbers"]).fit(x, number).predict(asked)
    np.testing.assert_allclose((mean - offset) / scale, plain, atol=1e-3)


def test_a_row_has_the_same_answer_in_any_table(runs: dict[str, Path]) -> None:
    """Whatever type the other rows give its columns."""
    rng = np.random.default_rng(0)
    size = rng.normal(size=30)
    x = pd.DataFrame({"size": size, "old": size > 0, "code": rng.choice(["1", "2", "A"], size=30)})
    fitted = classifier(runs, x, size > 0)
    row = pd.DataFrame({"size": [0.3], "old": [True], "code": ["1"]})
    alone = fitted.predict_proba(row)
    others = [
        {"size": [0.3, "1.5"], "old": [True, "unknown"], "code": ["1", "Z"]},
        {"size": [0.3, np.nan], "old": ["true", None], "code": [1, 2]},
        {"size": [0.3, np.nan], "old": [True, np.nan], "code": [1, np.nan]},
    ]
    frames = [pd.DataFrame(other) for other in others]
    frames.append(frames[0].assign(size=[0.3, np.nan]).convert_dtypes())
    frames.append(frames[0].assign(size=[0.3, np.nan], code=["1", None]).convert_dtypes())
    for other in frames:
        np.testing.assert_array_equal(fitted.predict_proba(other)[:1], alone)
    nothing = fitted.predict_proba(row.assign(code=np.nan))
    np.testing.assert_array_equal(fitted.predict_proba(row.assign(code="new")), nothing)
    with pytest.raises(ValueError, match="X: column size holds 'large'; the known rows have numbers there"):
        fitted.predict_proba(row.assign(size="large"))


def test_a_column_without_a_known_value_is_said(runs: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    x, y = frame()
    fitted = classifier(runs, x, y)
    with caplog.at_level(logging.WARNING, logger="metalearn"):
        fitted.predict(x.assign(old="no"))
    assert "column old has no value that the known rows have, such as no; all of it counts as missing" in caplog.text


@pytest.mark.parametrize("name", ["classes", "numbers"])
def test_empty_and_constant_columns_are_left_out(
    name: str, runs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With them, the answers have the same bits as without, also in a saved folder and a program."""
    x, asked = (frame(seed=seed)[0][["size", "kind"]] for seed in (0, 1))
    label = np.arange(40) % 2
    kind: Any = PFNClassifier if name == "classes" else PFNRegressor
    more: Any = {"plugins": PLUGINS} if name == "classes" else {}
    answers: Any = PFNClassifier.predict_proba if name == "classes" else PFNRegressor.predict
    expected = answers(kind(runs[name], **more).fit(x, label), asked)
    useless: dict[str, Any] = {"note": [None] * 40, "paid": [np.nan] * 40, "unit": 3.0, "land": "NL"}
    wide, filled = x.assign(**useless), asked.assign(note="red", paid="3", unit=4.0, land="BE")
    fitted = kind(runs[name], **more).fit(wide, label)
    assert caplog.text.count("is empty in the known rows: it is left out") == 2 and "X: column note is" in caplog.text
    np.testing.assert_array_equal(answers(fitted, filled), expected)
    fitted.save(tmp_path / "saved")
    again = kind.load(tmp_path / "saved", **more)
    np.testing.assert_array_equal(answers(again, filled), expected)
    assert len(fitted.export(tmp_path / "program", format=TORCH)) == 1
    sparse = x.assign(land=["NL" if one else None for one in label])  # whether a cell is missing says something
    assert not np.array_equal(answers(kind(runs[name], **more).fit(sparse, label), asked.assign(land="NL")), expected)
    nothing = kind(runs[name], **more).fit(wide[[*useless]], label)  # what is left are the frequencies, or the mean
    assert len(np.unique(answers(nothing, filled[[*useless]]), axis=0)) == 1


def test_an_empty_column_of_a_file_is_said_once(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    x, y = frame()
    x.assign(note=None, bought=y).to_csv("known.csv", index=False)
    assert fit.main(["known.csv", "--target", "bought", *network(runs), "--out", "made"]) == 0
    assert capsys.readouterr().err.count("X: column note is empty in the known rows: it is left out") == 1
    x.assign(note="red").to_csv("asked.csv", index=False)
    assert predict.main(["made", "asked.csv", "--plugins", "tests"]) == 0
    assert "note" not in capsys.readouterr().err


def test_a_constant_column_stays_where_scales_mean_something(runs: dict[str, Path], tmp_path: Path) -> None:
    """Without standardisation, how far an asked row is from the known ones says how sure an answer is."""
    saved_run(tmp_path / "scaled", "experiment=pfn_gp", *SMALL)
    fitted = PFNRegressor(tmp_path / "scaled").fit([[1.0]], [2.0])
    near, far = fitted.predict_interval([[1.0], [3.0]])
    assert not np.array_equal(near, far)


def test_numeric_texts_are_numbers_also_after_saving(runs: dict[str, Path], tmp_path: Path) -> None:
    texts = np.array([["1"], ["2"], ["10"]] * 5)
    fitted = classifier(runs, texts, texts[:, 0] == "10")
    fitted.save(tmp_path / "saved")
    again = PFNClassifier.load(tmp_path / "saved", plugins=PLUGINS)
    numbers = classifier(runs, texts.astype(float), texts[:, 0] == "10")
    for other in (again, numbers):
        np.testing.assert_array_equal(other.predict_proba(texts), fitted.predict_proba(texts))


def test_a_column_of_texts_is_one_whichever_rows_are_known(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    ages = ["41", "57", "?", *map(str, range(20, 37))]
    people = pd.DataFrame({"age": ages, "b": np.linspace(-1, 1, 20)})
    y = np.arange(20) % 2
    fitted = classifier(runs, people[people["age"] != "?"], y[people["age"] != "?"])
    assert fitted.predict_proba(people).shape == (20, 2)
    kinds = classifier(runs, pd.DataFrame({"code": pd.Series([10, 9] * 5).astype("category")}), np.arange(10) % 2)
    assert kinds.texts() == ["code"]
    # A fold whose known rows lack the ? has met it among the others.
    people.assign(y=y).to_csv("t.csv", index=False)
    assert fit.main(["t.csv", "--target", "y", *network(runs), "--out", "made"]) == 0
    assert "accuracy" in capsys.readouterr().out


def test_truth_values_are_categories_with_or_without_gaps(runs: dict[str, Path]) -> None:
    known = pd.DataFrame({"member": [True, False, None, False] * 5})
    fitted = classifier(runs, known, np.array([1, 0, 0, 0] * 5))
    answers = fitted.predict_proba(pd.DataFrame({"member": [True, False]}))
    np.testing.assert_array_equal(answers, fitted.predict_proba(known)[:2])


def test_dates_are_days_and_no_rows_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    days = pd.Series(pd.date_range("2024-01-01", periods=20).repeat(2), name="day")
    number = (days - pd.Timestamp(0)).dt.days.astype(float)
    label = (np.arange(40) % 3 == 0).astype(int)
    known = classifier(runs, number.to_frame(), label)
    asked = pd.to_datetime(pd.Series(["2024-01-20", "2024-01-21", "2030-01-01", None]))
    expected = known.predict_proba(pd.DataFrame({"day": (asked - pd.Timestamp(0)).dt.days}))
    assert len(np.unique(expected[:, 0])) == 4  # days that are not known differ, also from a missing one
    texts, lasted = asked.astype(str).where(asked.notna()), asked - pd.Timestamp(0)
    dates = (days, days.dt.tz_localize("UTC"), days.dt.date, days.astype(object))
    for of_known, of_asked in (
        *((kind, cells) for kind in dates for cells in (asked, texts)),
        (days - pd.Timestamp(0), lasted),
    ):
        found = classifier(runs, pd.DataFrame({"day": of_known}), label).predict_proba(pd.DataFrame({"day": of_asked}))
        np.testing.assert_array_equal(found, expected)
    fitted = classifier(runs, days.to_frame(), label)
    fitted.save(tmp_path / "saved")
    again = PFNClassifier.load(tmp_path / "saved", plugins=PLUGINS)
    np.testing.assert_array_equal(again.predict_proba(asked.to_frame("day")), expected)
    with pytest.raises(ValueError, match="X: column day holds 'Monday'; the known rows have dates there"):
        fitted.predict(pd.DataFrame({"day": ["Monday"]}))
    with pytest.raises(
        ValueError, match="X: column day holds '2024-01-20 00:00:00'; the known rows have numbers there"
    ):
        known.predict(asked.to_frame("day"))
    with pytest.raises(ValueError, match="X: has no rows"):
        fitted.predict_proba(days[:0].to_frame())


def test_a_forged_label_that_is_not_finite_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    classifier(runs, np.arange(20.0)[:, None], np.arange(20) % 2).save(tmp_path / "saved")
    forge(tmp_path / "saved", lambda meta: meta.update(classes=[float("nan"), 1.0], labels_as="<f8"))
    with pytest.raises(ValueError, match=r"path=.*: classes=nan: must be finite"):
        PFNClassifier.load(tmp_path / "saved", plugins=PLUGINS)


def test_intervals_and_sparse_columns_are_saved(runs: dict[str, Path], tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=40)
    table = pd.DataFrame({"size": pd.cut(x, 4), "count": pd.arrays.SparseArray(np.round(x))})
    fitted = classifier(runs, table, x > 0)
    fitted.save(tmp_path / "saved")
    again = PFNClassifier.load(tmp_path / "saved", plugins=PLUGINS)
    np.testing.assert_array_equal(again.predict_proba(table), fitted.predict_proba(table))


def test_the_fitted_table_is_saved_not_the_changed_one(runs: dict[str, Path], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    array = rng.normal(size=(20, 2))
    for name, x in (("array", array), ("frame", pd.DataFrame({"a": array[:, 0], "b": array[:, 1]}))):
        asked, y = x.copy(), np.arange(20) % 2
        fitted = classifier(runs, x, y)
        before = fitted.predict_proba(asked)
        x *= -1
        y[:] = 0
        fitted.save(tmp_path / name)
        again = PFNClassifier.load(tmp_path / name, plugins=PLUGINS)
        np.testing.assert_array_equal(again.predict_proba(asked), before)


def test_a_refused_refit_leaves_the_last_fit(runs: dict[str, Path], tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 2))
    fitted = classifier(runs, x, np.arange(20) % 2)
    before = fitted.predict_proba(x)
    with pytest.raises(ValueError, match="y: has 20 classes"):
        fitted.fit(x, np.arange(20))
    np.testing.assert_array_equal(fitted.predict_proba(x), before)
    assert fitted.classes_.tolist() == [0, 1]
    with pytest.raises(ValueError, match="nowhere"):
        fitted.set_params(path=tmp_path / "nowhere").fit(x, np.arange(20) % 2)


def test_the_commands_fit_a_table_and_predict_rows(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = frame()
    table = x.assign(bought=y)
    table.loc[5, "bought"] = None
    table.to_csv("known.csv", index=False)
    x.to_csv("asked.csv", index=False)
    assert fit.main(["known.csv", "--target", "bought", *network(runs), "--out", "made"]) == 0
    said = capsys.readouterr().out
    assert "39 rows, 4 columns" in said and "1 rows without bought are left out" in said
    assert re.search(r"accuracy \d+\.\d% of rows not known \(95% interval", said)
    assert predict.main(["made", "asked.csv", "--out", "answers.csv", "--plugins", "tests"]) == 0
    found = pd.read_csv("answers.csv")
    read = pd.read_csv("known.csv")
    shown = read.dropna(subset="bought")
    fitted = PFNClassifier(runs["classes"], plugins=PLUGINS).fit(shown.drop(columns="bought"), shown["bought"])
    np.testing.assert_allclose(found["probability of yes"], fitted.predict_proba(pd.read_csv("asked.csv"))[:, 1])
    assert found["label"].tolist() == fitted.predict(pd.read_csv("asked.csv")).tolist()
    assert fit.main(["known.csv", "--target", "size", "--network", str(runs["numbers"]), "--out", "sizes"]) == 0
    assert "of the variance of rows not known (R²)" in capsys.readouterr().out
    assert predict.main(["sizes", "known.csv"]) == 0
    assert "quantile 0.95" in capsys.readouterr().out


def test_a_missing_number_is_no_class(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"{n / 10},{'NA' if n == 7 else n % 2}\n" for n in range(20))
    (tmp_path / "known.csv").write_text("size,sold\n" + rows)
    assert fit.main(["known.csv", "--target", "sold", *network(runs), "--out", "made"]) == 0
    assert "1 rows without sold are left out" in capsys.readouterr().out
    assert PFNClassifier.load("made", plugins=PLUGINS).classes_.tolist() == [0, 1]


def test_targets_beyond_whole_numbers_stay_as_they_are(runs: dict[str, Path], tmp_path: Path) -> None:
    x, _ = frame()
    x.assign(mass=np.arange(len(x)) * 1e30).to_csv("known.csv", index=False)
    assert fit.main(["known.csv", "--target", "mass", "--network", str(runs["numbers"]), "--out", "made"]) == 0
    assert predict.main(["made", "known.csv", "--out", "answers.csv"]) == 0
    assert pd.read_csv("answers.csv")["mean"].between(0, len(x) * 1e30).any()


def test_files_say_what_arrays_say(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = "".join(f"{n / 10},{'true' if n % 2 else 'false'},{'' if n == 7 else n % 2}\n" for n in range(20))
    (tmp_path / "known.CSV").write_text("size,old,label\n" + known)
    assert fit.main(["known.CSV", "--target", "label", *network(runs), "--out", "made"]) == 0
    answers = []
    for name, last in (("two", ""), ("three", "0.5,unknown\n"), ("four", ",\n")):
        (tmp_path / f"{name}.csv").write_text(f"size,old\n0.1,true\n0.2,false\n{last}")
        assert predict.main(["made", f"{name}.csv", "--out", f"a_{name}.csv", "--plugins", "tests"]) == 0
        answers.append(pd.read_csv(f"a_{name}.csv"))
    assert list(answers[0]) == ["label", "probability of 0", "probability of 1"]  # a label is missing: they stay whole
    for other in answers[1:]:
        pd.testing.assert_frame_equal(other[:2], answers[0])

    (tmp_path / "longer.csv").write_text("size,old\n0.1,true,\n0.2,false,\n")
    capsys.readouterr()
    assert predict.main(["made", "longer.csv", "--plugins", "tests"]) == 2
    assert "lines have more cells than there are names; is there a comma at their ends?" in capsys.readouterr().err
    pd.read_csv("known.CSV").to_csv("with_index.csv")
    assert fit.main(["with_index.csv", "--target", "label", *network(runs), "--out", "other"]) == 0
    assert "its first column has no name and is read as any other; is it an index?" in capsys.readouterr().err


@pytest.mark.parametrize("labels", [("01", "1"), ("1", "1.0"), ("+2", "2"), ("3.1", "3.10"), ("false", "true")])
def test_labels_that_are_equal_as_numbers_are_kept_as_they_are(
    labels: tuple[str, str], runs: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "known.csv").write_text("size,label\n" + "".join(f"{n},{labels[n % 2]}\n" for n in range(20)))
    assert fit.main(["known.csv", "--target", "label", *network(runs), "--out", "made"]) == 0
    assert predict.main(["made", "known.csv", "--out", "answers.csv", "--plugins", "tests"]) == 0
    assert list(pd.read_csv("answers.csv"))[1:] == [f"probability of {label}" for label in sorted(labels)]


def test_a_blank_line_is_a_row_and_one_class_is_refused(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "known.csv").write_text("size,label\n" + "".join(f"{n},{n % 2}\n" for n in range(20)))
    assert fit.main(["known.csv", "--target", "label", *network(runs), "--out", "made"]) == 0
    (tmp_path / "asked.csv").write_text("size\n-3\n\n3\n\n5\n\n")
    assert predict.main(["made", "asked.csv", "--out", "answers.csv", "--plugins", "tests"]) == 0
    assert len(pd.read_csv("answers.csv")) == 5
    (tmp_path / "one.csv").write_text("size,label\n1,\n2,mild\n3,mild\n")
    assert fit.main(["one.csv", "--target", "label", *network(runs), "--out", "other"]) == 2
    assert "--target=label: has one class, mild" in capsys.readouterr().err


def test_a_written_word_is_a_class_or_category(runs: dict[str, Path], tmp_path: Path) -> None:
    """Of texts, only an empty cell is missing; among numbers, R's NA is too."""
    words, wide = ["None", "NA", "red", "<NA>", ""], ["1", "NA", "3", "", "5"]
    lines = [f"{words[n % 5]},{wide[n % 5]},{words[n % 5]}\n" for n in range(20)]
    (tmp_path / "known.csv").write_text("kind,size,label\n" + "".join(lines))
    assert fit.main(["known.csv", "--target", "label", *network(runs), "--out", "made"]) == 0
    model = PFNClassifier.load(tmp_path / "made", plugins=PLUGINS)
    assert model.classes_.tolist() == ["<NA>", "NA", "None", "red"]
    assert model._columns == [{"name": "kind", "categories": ["<NA>", "NA", "None", "red"]}, {"name": "size"}]
    assert model._cells[:4].tolist()[0] == [2, 1] and model._cells[1, 1].isnan()
    (tmp_path / "asked.csv").write_text("kind,size\nNA,NA\nred,7\n,7\n")
    assert predict.main(["made", "asked.csv", "--out", "answers.csv", "--plugins", "tests"]) == 0
    asked = pd.DataFrame({"kind": ["NA", "red", None], "size": [None, 7.0, 7.0]})
    found = pd.read_csv("answers.csv", keep_default_na=False)
    np.testing.assert_allclose(found.iloc[:, 1:].astype(float), model.predict_proba(asked))


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("known.csv --out o --target price --network NETWORK", "has no such column; it has size, colour, kind, old"),
        ("known.csv --out o --target sizes --network NETWORK", "--target=sizes: known.csv has no such column"),
        ("known.csv --out o --target size --network NETWORK --head linear", "--head: of pictures"),
        ("none.csv --out o --target size --network NETWORK", "TABLE=none.csv: cannot be read"),
        ("empty.csv --out o --target size --network NETWORK", "TABLE=empty.csv: has no rows"),
    ],
)
def test_a_table_that_cannot_be_fitted_is_refused(
    typed: str, message: str, runs: dict[str, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    frame()[0].to_csv("known.csv", index=False)
    (tmp_path / "empty.csv").write_text("size,colour\n")
    assert fit.main(typed.replace("NETWORK", str(runs["numbers"])).split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["classes", "numbers", "bars"])
@pytest.mark.parametrize("file_format", [pytest.param(ONNX, marks=needs_onnx), TORCH])
def test_a_fitted_table_becomes_one_program(
    name: str, file_format: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (x, labels), numbers = frame(), np.linspace(0, 1, 40)
    asked = frame(9, seed=1)[0]
    asked.loc[2, "kind"] = None
    if name == "classes":
        model: Any = PFNClassifier(runs["classes"], plugins=PLUGINS).fit(x, labels)
        wanted = model.predict_proba(asked)
    else:
        model = PFNRegressor(runs[name]).fit(x, numbers)
        wanted = np.column_stack([model.predict(asked), model.predict_quantiles(asked, LEVELS)])
    model.save(tmp_path / "fitted")
    out = ["--out", f"{tmp_path}/program", "--format", file_format]
    assert export.main([f"{tmp_path}/fitted", *out, *["--plugins", "tests"] * (name == "classes")]) == 0
    assert "largest difference from this program: " in capsys.readouterr().out
    about = json.loads((tmp_path / "program" / COLUMNS).read_text())
    assert [column["name"] for column in about["columns"]] == ["size", "colour", "kind", "old"]
    assert [column.get("categories") for column in about["columns"]] == [
        None, ["blue", "red"], ["a", "b", "c"], ["False", "True"],
    ]  # fmt: skip
    if file_format == ONNX:
        text = asked.to_csv(index=False, na_rep="NA")  # as other programs write it
        (tmp_path / "asked.csv").write_text(text.replace("True", "true").replace("False", "FALSE"))
        said = said_by_card(tmp_path / "program", [tmp_path / "asked.csv"])
        if name == "classes":
            assert [row[0] for row in said] == model.predict(asked).tolist()
            wanted = wanted.max(axis=1, keepdims=True)
        found = np.array([row[-wanted.shape[1] :] for row in said], np.float64)
    else:
        codes = [{text: code for code, text in enumerate(c.get("categories", ()))} for c in about["columns"]]
        rows = [
            [of.get(str(value), np.nan) if of else value for value, of in zip(row, codes, strict=True)]
            for row in asked[[column["name"] for column in about["columns"]]].itertuples(index=False)
        ]
        run = torch.export.load(tmp_path / "program/model.pt2").module()
        found = np.column_stack([part.numpy() for part in run(torch.tensor(rows, dtype=torch.float64))])
    np.testing.assert_allclose(found, wanted, atol=1e-4)
