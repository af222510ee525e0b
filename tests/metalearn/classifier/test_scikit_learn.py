"""The classifier in scikit-learn's tools."""

import pickle
from typing import Any

import numpy as np
import pytest
from PIL import Image

from metalearn.classifier.classifier import PictureClassifier
from tests import drawn_pictures

pytest.importorskip("sklearn", reason="scikit-learn is not installed; type pip install scikit-learn")

from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import estimator_checks

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def drawings() -> tuple[list[Image.Image], list[str]]:
    generator, things = np.random.default_rng(0), ("fish", "ring", "star")
    return [drawn_pictures.drawn(thing, generator) for thing in things for _ in range(4)], np.repeat(things, 4).tolist()


class OfRows(PictureClassifier):
    """Says that it takes the arrays [n, d] with which scikit-learn's checks work; it then runs all of them."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = True
        return tags


CANNOT = {
    "check_classifier_data_not_an_array": "a list of pictures has a length",
    "check_classifiers_one_label": "one class cannot be told apart",
    "check_classifiers_regression_target": "rows are no pictures",
    "check_complex_data": "no picture has complex numbers; the message differs",
    "check_estimator_sparse_array": "no picture is sparse; the message differs",
    "check_estimator_sparse_matrix": "no picture is sparse; the message differs",
    "check_estimator_sparse_tag": "no picture is sparse; the message differs",
    "check_estimators_empty_data_messages": "the message differs",
    "check_estimators_nan_inf": "the message differs",
    "check_fit2d_1feature": "the message differs",
    "check_fit2d_1sample": "the message differs",
    "check_positive_only_tag_during_fit": "rows are no pictures",
    "check_requires_y_none": "the message differs",
}
"""Checks that fail for another reason than that a 2-d array is one picture, not many."""


def test_check_estimator_passes_where_pictures_allow() -> None:
    assert {r["status"] for r in estimator_checks.check_estimator(PictureClassifier())} == {"passed"}
    found = estimator_checks.check_estimator(OfRows(), on_fail=None)
    failed = {r["check_name"]: str(r["exception"]) for r in found if r["status"] == "failed"}
    other = {name for name, message in failed.items() if "must be a list, and is a single" not in message}
    assert other <= CANNOT.keys()
    passed = {r["check_name"] for r in found if r["status"] == "passed"}
    assert {"check_estimators_unfitted", "check_set_params", "check_no_attributes_set_in_init"} <= passed


def test_cross_validation_grids_pipelines_and_copies(drawings: tuple[list[Image.Image], list[str]]) -> None:
    pictures, labels = drawings
    parts = StratifiedKFold(2)
    by_hand = [
        PictureClassifier().fit([pictures[i] for i in known], [labels[i] for i in known])
        .score([pictures[i] for i in asked], [labels[i] for i in asked])
        for known, asked in parts.split(labels, labels)
    ]  # fmt: skip
    assert cross_val_score(PictureClassifier(), pictures, labels, cv=parts).tolist() == by_hand
    grid = GridSearchCV(PictureClassifier(), {"head": ["ridge 1", "nearest pictures"]}, cv=parts, error_score="raise")
    grid.fit(pictures, labels)
    assert grid.best_estimator_.report_["head"] == grid.best_params_["head"] == "ridge 1"
    small = make_pipeline(FunctionTransformer(lambda x: [np.asarray(image) for image in x]), PictureClassifier())
    small.fit(pictures, labels)
    direct = PictureClassifier().fit(pictures, labels)
    np.testing.assert_array_equal(small.predict_proba(pictures), direct.predict_proba(pictures))
    copy = clone(grid.best_estimator_)
    assert copy.head == "ridge 1" and is_classifier(copy) and not hasattr(copy, "classes_")
    with pytest.raises(NotFittedError, match="call fit first"):
        copy.predict(pictures)
    again = pickle.loads(pickle.dumps(grid.best_estimator_))
    np.testing.assert_array_equal(again.predict(pictures), grid.best_estimator_.predict(pictures))
