"""Prior-fitted networks as scikit-learn's estimators: `fit` shows known rows to a trained network, which learns nothing
more. Needs scikit-learn: pip install 'metalearn-train[tables]'."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metalearn.algorithms.pfn import answers
from metalearn.api.learner import Learner
from metalearn.api.load import load
from metalearn.checks import fraction
from metalearn.errors import ConfigError
from metalearn.storage.files import whole_folder
from metalearn.tasks.priors.source import PriorTasks
from metalearn.types import Batch, InContext

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, check_X_y, validate_data
except ImportError as error:
    raise ImportError(
        "metalearn.PFNClassifier and PFNRegressor need scikit-learn; type pip install 'metalearn-train[tables]'"
    ) from error

Array = NDArray[Any]

GROUPS, TASKS = 1000, 64
"""How many groups of a prior's tasks, or other tasks, say what sizes of tables a network was trained on."""

MOST_TEXTS = 20
"""A column of so many different texts may hold categories, however few the rows are."""

KNOWN, TARGETS, NETWORK = "known.parquet", "targets.parquet", "network"
"""What a folder of a fitted estimator holds."""

log = logging.getLogger("metalearn")


class _Reader(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What both estimators share: the network, and how cells become numbers."""

    def __init__(self, path: str | os.PathLike[str], *, plugins: Sequence[str] = (), device: str = "cpu") -> None:
        self.path, self.plugins, self.device = path, plugins, device

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        raise NotImplementedError

    def _show(self, X: Any, y: Tensor) -> None:  # noqa: N803 (scikit-learn's name)
        """Remembers the known rows: their numbers, and the keys and values that queries read."""
        learner = self._opened()
        codes = _codes(X)
        cells = _numbers(X, codes)
        place = _mean_and_spread(cells) if self._standardizes() else None
        x = _shown(cells, place)
        rows, features = _trained_on(learner)
        for what, found, most in (("known rows", len(x), rows), ("features", x.shape[1], features)):
            if found > most:
                log.warning(
                    "%s: there are %d %s, and it was trained on tables of at most %d: nothing says how good it is here",
                    self.path, found, what, most,
                )  # fmt: skip
        with learner.computing(), torch.no_grad():
            support = Batch(learner.on_device(x[None]), y[None].to(learner.device))
            known = self._reads().remember(learner.params, support)
        self._codes, self._place, self._known = codes, place, known

    def _standardizes(self) -> bool:
        """Whether the network reads columns and targets with mean 0 and variance 1. Then they are brought there in
        float64, before they become float32: of 1.7e9 seconds, float32 has no minutes."""
        return bool(self._opened().taught.config.model.get("standardize", False))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves what was fitted in a new folder: the network, as `Learner.save` does, and the known rows, a Parquet
        file of one's data.

        Raises:
            ValueError: it is not fitted, there is something at `path`, it cannot be written, or the known rows are
                nothing that Parquet has types for.
        """
        check_is_fitted(self)
        import pyarrow
        from pyarrow import parquet

        x, y = self._table
        columns = x if _is_frame(x) else {f"{number}": column for number, column in enumerate(x.T)}
        try:
            tables = {KNOWN: pyarrow.table(columns), TARGETS: pyarrow.table({"target": y})}
        except pyarrow.ArrowException as error:
            raise ConfigError(f"X, y: Parquet has no type for a column ({error}); give it numbers or texts") from error
        with whole_folder("path", Path(path)) as folder:
            for name, table in tables.items():
                parquet.write_table(table, folder / name)
            self._opened().save(folder / NETWORK)

    def export(self, path: str | os.PathLike[str], *, format: str = "onnx", licence: str | None = None) -> str:  # noqa: A002 (the option's name)
        """Writes a new folder with one program, which runs without this one: the network with the keys and values of
        the known rows. columns.json says how columns become its numbers. Returns what there is to say.

        Args:
            format: `onnx` (`pip install metalearn-train[onnx]`) or `torch-export`.
            licence: of the network and the known rows, for the model card.

        Raises:
            ValueError: it is not fitted, a package is missing, the program differs from this one by more than 1e-4, or
                the folder cannot be written.
        """
        from metalearn.api.exported_table import export

        check_is_fitted(self)
        return export(self, Path(path), file_format=format, licence=licence, key="path")

    def texts(self) -> list[str]:
        """The names of the columns whose values stand for categories."""
        check_is_fitted(self)
        return [str(name) for place, name in enumerate(_names(self._table[0])) if place in self._codes]

    def _columns(self) -> list[dict[str, Any]]:
        """The name of each number of a row that the network reads, and the texts that it stands for."""
        x = self._table[0]
        return [
            {"name": str(name)} | ({"categories": self._codes[place]} if place in self._codes else {})
            for place, name in enumerate(_names(x))
        ]

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, plugins: Sequence[str] = (), device: str = "cpu") -> Self:
        """What `save` has saved, fitted.

        Args:
            path: the folder.
            plugins, device: as for the class.

        Raises:
            ValueError: there is no such folder, it holds something else, or a file is damaged.
        """
        return cls(Path(path) / NETWORK, plugins=plugins, device=device)._show_again(Path(path))

    def _show_again(self, folder: Path) -> Self:
        """Fits to the known rows that `save` has put into a folder."""
        from pyarrow import parquet

        if not (folder / KNOWN).exists():
            raise ConfigError(f"path={folder}: holds no {KNOWN}; give a folder that PFNClassifier.save has made")
        table, y = (parquet.read_table(folder / name) for name in (KNOWN, TARGETS))
        was_frame = b"pandas" in (table.schema.metadata or {})
        x = table.to_pandas() if was_frame else np.column_stack([column.to_numpy() for column in table.columns])
        return self.fit(x, y["target"].to_numpy())

    def _outputs(self, X: Any) -> Tensor:  # noqa: N803
        """The outputs [n, d] of the network. Those of a row have the same bits in any call."""
        check_is_fitted(self)
        is_frame = _is_frame(X)
        checked = validate_data(
            self, X, reset=False, dtype=None, ensure_all_finite="allow-nan", skip_check_array=is_frame
        )
        x, learner = _shown(_numbers(X if is_frame else checked, self._codes), self._place), self._opened()
        with learner.computing(), torch.no_grad():
            found = answers(self._reads(), learner.params, self._known, learner.on_device(x[None]))[0].double().cpu()
        if not found.isfinite().all():
            raise ConfigError(f"X: the answers of path={self.path} to these rows are not finite; are they too large?")
        return found

    def _opened(self) -> Learner:
        """The trained learner, read once for the same parameters."""
        asked = (os.fspath(self.path), tuple(self.plugins), self.device)
        if getattr(self, "_read", None) != asked:
            self._learner, self._read = load(self.path, plugins=self.plugins, device=self.device), asked
        return self._learner

    def _reads(self) -> InContext:
        reads = self._opened().taught.model.in_context
        if reads is None or (reads.predictive is None) is not isinstance(self, ClassifierMixin):
            other = "a network that reads labels" if reads is None else "a network for this kind of target"
            wanted = "classes" if isinstance(self, ClassifierMixin) else "gaussian"
            raise ConfigError(
                f"path={self.path}: is no run of {other}; give a run of algorithm=pfn model=table model.head={wanted}"
            )
        return reads

    def __getstate__(self) -> dict[str, Any]:
        # A learner is made of functions, which cannot be pickled; it is read again where it is needed.
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name not in ("_learner", "_read")}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        return tags


class PFNClassifier(ClassifierMixin, _Reader):  # type: ignore[misc]
    """Classes of the rows of a table, by a run of `algorithm=pfn` with `model.head=classes`.

    X is an array or a data frame. Columns of texts, categories and truth values become the numbers of their sorted
    values, which are compared as texts, with `true` as True; a value that no known row has, NaN and None are missing
    values. If the network standardises, columns are shifted and scaled in float64, so that any unit will do. The order
    of columns and classes has no influence, so no ensemble over orders is needed. The keys and values of the known rows
    are computed once, in `fit`.

    Args:
        path: as for `metalearn.load`.
        plugins: as for `metalearn.load`: packages of your own that the run was trained with.
        device: `cpu` or `cuda`.

    Attributes:
        classes_: the labels, sorted.
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Shows the known rows and their labels to the network.

        Raises:
            ValueError: what scikit-learn refuses, no such run, or more classes than the network was made for.
        """
        X, y = _checked(self, X, y)  # noqa: N806
        check_classification_targets(y)
        classes, numbers = np.unique(y, return_inverse=True)
        self._reads()
        most = self._opened().taught.config.model.classes
        if len(classes) > most:
            raise ConfigError(
                f"y: has {len(classes)} classes, and path={self.path} was made for {most}; give fewer, or a run with "
                f"model.classes={len(classes)} or more"
            )
        self._show(X, torch.from_numpy(numbers))
        self.classes_, self._table = classes, (X.copy(), y.copy())  # the caller may change theirs
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """The probability of each class: [n, classes]."""
        logits = self._outputs(X)[:, : len(self.classes_)]
        return np.asarray(logits.softmax(dim=1).numpy())

    def predict(self, X: Any) -> Array:  # noqa: N803
        """The most probable class of each row."""
        best = self.predict_proba(X).argmax(axis=1)  # first, since it refuses what is not fitted
        found: Array = self.classes_[best]
        return found


class PFNRegressor(RegressorMixin, _Reader):  # type: ignore[misc]
    """Real numbers of the rows of a table, by a run of `algorithm=pfn` with another `model.head` than `classes`.

    X and the arguments are those of `PFNClassifier`.
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Shows the known rows and their targets to the network.

        Raises:
            ValueError: what scikit-learn refuses, or no such run.
        """
        X, y = _checked(self, X, y, y_numeric=True)  # noqa: N806
        self._reads()
        targets = y.astype(np.float64)[:, None]
        place = _mean_and_spread(targets) if self._standardizes() else None
        self._show(X, _shown(targets, place, "y"))
        self._target, self._table = place, (X.copy(), y.copy())  # the caller may change theirs
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """The mean of the predictive distribution of each row, [n]."""
        return np.asarray(self._in_units(self._predictive().mean(self._outputs(X)[None])[0, :, 0]).numpy())

    def predict_quantiles(self, X: Any, levels: Sequence[float]) -> NDArray[np.float64]:  # noqa: N803
        """The quantiles [n, levels] of the predictive distribution of each row; levels lie between 0 and 1."""
        for level in levels:
            fraction("levels", level)
        asked = torch.tensor(list(levels), dtype=torch.float64)
        return np.asarray(self._in_units(self._predictive().quantiles(self._outputs(X)[None], asked)[0]).numpy())

    def _in_units(self, answered: Tensor) -> Tensor:
        """What the network answers, in the units of the targets."""
        if self._target is None:
            return answered
        mean, spread = self._target
        return answered * spread + mean

    def predict_interval(self, X: Any, coverage: float = 0.9) -> NDArray[np.float64]:  # noqa: N803
        """The lower and upper end [n, 2] of the central interval that holds the target with this probability."""
        fraction("coverage", coverage)
        return self.predict_quantiles(X, [(1 - coverage) / 2, (1 + coverage) / 2])

    def _predictive(self) -> Any:
        return self._reads().predictive


def estimator(path: str | os.PathLike[str], *, plugins: Sequence[str] = ()) -> PFNClassifier | PFNRegressor:
    """The estimator for what a run predicts, classes or real numbers; the arguments are those of both.

    Raises:
        ValueError: what `metalearn.load` refuses, or no run of algorithm=pfn.
    """
    learner = load(path, plugins=plugins)
    reads = learner.taught.model.in_context
    kind = PFNClassifier if reads is None or reads.predictive is None else PFNRegressor
    made = kind(path, plugins=plugins)
    made._learner, made._read = learner, (os.fspath(path), tuple(plugins), "cpu")  # so that it is not read again
    return made


def fitted(path: str | os.PathLike[str], *, plugins: Sequence[str] = ()) -> PFNClassifier | PFNRegressor:
    """The estimator, of either kind, that `save` has put into a folder.

    Raises:
        ValueError: as `PFNClassifier.load`.
    """
    return estimator(Path(path) / NETWORK, plugins=plugins)._show_again(Path(path))


def _checked(model: Any, X: Any, y: Any, **kinds: bool) -> tuple[Any, Array]:  # noqa: N803
    """X and y as scikit-learn checks them; a data frame stays one, and its cells are checked when they are read."""
    checked: Array
    if _is_frame(X):
        validate_data(model, X, skip_check_array=True)
        _, checked = check_X_y(np.zeros((len(X), max(1, X.shape[1]))), y, **kinds)
        return X, checked
    X, checked = validate_data(model, X, y, dtype=None, ensure_all_finite="allow-nan", **kinds)  # noqa: N806
    return X, checked


def _is_frame(X: Any) -> bool:  # noqa: N803
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def _names(X: Any) -> list[Any]:  # noqa: N803
    return list(X.columns) if _is_frame(X) else list(range(X.shape[1]))


def _columns_of(X: Any) -> list[Any]:  # noqa: N803
    return [X.iloc[:, place] for place in range(X.shape[1])] if _is_frame(X) else list(X.T)


def _codes(X: Any) -> dict[int, list[str]]:  # noqa: N803
    """The values, as texts in their order, of the columns of `X` that do not hold numbers, by their places."""
    codes: dict[int, list[str]] = {}
    for place, (name, column) in enumerate(zip(_names(X), _columns_of(X), strict=True)):
        if _as_numbers(column) is not None:
            continue
        values = {text: value for value in column if (text := _text(value)) is not None}
        try:
            codes[place] = sorted(values, key=lambda text, of=values: of[text])  # type: ignore[misc]
        except TypeError:  # of several types
            codes[place] = sorted(values)
        if len(values) > max(MOST_TEXTS, len(X) / 2):
            log.warning(
                "X: column %s has %d different texts in %d rows, which are no categories: leave it out, or give what "
                "they mean as numbers", name, len(values), len(X),
            )  # fmt: skip
    return codes


_TRUTHS = {"true": "True", "false": "False"}


def _text(value: Any) -> str | None:
    """A cell that is no number as a text, the same whatever type a reader has given it; None for a missing one."""
    if value is None or str(value) in ("<NA>", "NaT") or value != value:  # pandas' NA equals nothing, nor differs
        return None
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)  # of whole numbers among missing ones, pandas makes real ones
    text = str(value)
    return _TRUTHS.get(text.lower(), text)


def _as_numbers(column: Any) -> NDArray[np.float64] | None:
    """A column as numbers, NaN for what is missing; None if it holds something else."""
    if getattr(column.dtype, "kind", "O") not in "iufOU":
        return None
    try:
        if hasattr(column, "to_numpy"):
            found: NDArray[np.float64] = column.to_numpy(dtype=np.float64, na_value=np.nan)
            return found
        return np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError):
        return None


def _numbers(X: Any, codes: dict[int, list[str]]) -> NDArray[np.float64]:  # noqa: N803
    """The cells [n, d] as numbers, with NaN for what is missing or new.

    Raises:
        ConfigError: a text, or infinity, in a column of numbers.
    """
    columns: list[NDArray[np.float64]] = []
    for place, (name, column) in enumerate(zip(_names(X), _columns_of(X), strict=True)):
        if place not in codes:
            numbers = _as_numbers(column)
            if numbers is None:
                numbers = _as_numbers(np.array([_text(value) for value in column], object))
            if numbers is None:
                raise ConfigError(f"X: column {name} holds {_first_text(column)}; the known rows have numbers there")
            if np.isinf(numbers).any():
                raise ConfigError(f"X: column {name} holds infinity; NaN stands for a missing value")
            columns.append(numbers)
            continue
        known = {text: float(number) for number, text in enumerate(codes[place])}
        texts = [_text(value) for value in column]
        there = [text for text in texts if text is not None]
        if there and not known.keys() & set(there):
            log.warning(
                "X: column %s has no value that the known rows have, such as %s; all of it counts as missing",
                name, there[0],
            )  # fmt: skip
        columns.append(np.array([known.get(text, np.nan) if text is not None else np.nan for text in texts]))
    return np.stack(columns, axis=1) if columns else np.zeros((len(X), 0))


def _first_text(column: Any) -> str:
    """The first cell of a column that is no number."""
    for value in column:
        try:
            float(value)
        except (TypeError, ValueError):
            return repr(value)
    return "no numbers"


Place = tuple[Tensor, Tensor]
"""The mean and the spread of each column, float64."""

FARTHEST = 1e6
"""How many spreads from the mean a value may lie; what is beyond is brought there, so that float32 has its square."""


def _mean_and_spread(x: NDArray[np.float64]) -> Place:
    """Over rows [n, d], without missing values. The spread of a column that is constant or missing is 1."""
    there = ~np.isnan(x)
    largest = np.where(there, np.abs(x), 0.0).max(axis=0, initial=0.0)
    unit = np.where(largest > 0, largest, 1.0)  # the squares of 1e200 are no numbers
    scaled, count = np.where(there, x / unit, 0.0), there.sum(axis=0).clip(min=1)
    mean = scaled.sum(axis=0) / count
    spread = np.sqrt((np.where(there, scaled - mean, 0.0) ** 2).sum(axis=0) / count)
    varies = spread > 1e-12 * np.abs(mean)
    return torch.from_numpy(mean * unit), torch.from_numpy(np.where(varies, spread * unit, 1.0))


def _shown(x: NDArray[np.float64], place: Place | None, what: str = "X") -> Tensor:
    """The float32 tensor [n, d] that the network reads.

    Raises:
        ConfigError: a number that float32 does not hold.
    """
    if place is None and (np.abs(x) > np.finfo(np.float32).max).any():
        raise ConfigError(f"{what}: holds a value too large for float32")
    return in_spreads(torch.from_numpy(x), place)


def in_spreads(x: Tensor, place: Place | None) -> Tensor:
    """The float32 tensor [n, d] of the numbers `x`, float64, in spreads from the mean; without a place as they are."""
    return (x if place is None else ((x - place[0]) / place[1]).clamp(-FARTHEST, FARTHEST)).float()


def _trained_on(learner: Learner) -> tuple[int, int]:
    """The most known rows, and the most features, of some training tasks."""
    source = learner.taught.source
    if isinstance(source, PriorTasks):  # which tells the shapes of its tables without drawing them
        shapes = [source.shape("train", group) for group in range(GROUPS)]
        return max(shape.support for shape in shapes), max(shape.features for shape in shapes)
    tasks = [source.episodes("train", torch.tensor([number])).support.x for number in range(TASKS)]
    return max(x.shape[1] for x in tasks), max(x.shape[2:].numel() for x in tasks)
