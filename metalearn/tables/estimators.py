"""Prior-fitted networks as scikit-learn's estimators: `fit` shows known rows to a trained network, which learns nothing
more. Needs scikit-learn and pandas: the extra `tables`."""

import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metalearn.algorithms.pfn import answers
from metalearn.api.learner import Learner, load
from metalearn.errors import ConfigError, fraction, install
from metalearn.models.table import table
from metalearn.reporting.provenance import made_with
from metalearn.saved import exporter, form
from metalearn.saved.exporter import FOLDER, ONNX, TORCH, Card, NetworkToExport, use
from metalearn.saved.form import Kind, SavedFolder
from metalearn.storage.files import StrPath, whole_folder
from metalearn.tasks.priors.source import PriorTasks
from metalearn.types import Batch, InContext

try:
    import pandas as pd
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, check_X_y, validate_data
except ImportError as error:
    raise ImportError(
        f"metalearn.PFNClassifier and PFNRegressor need scikit-learn and pandas; type {install('tables')}"
    ) from error

Array = NDArray[Any]

GROUPS, TASKS = 1000, 64  # groups of a prior's tasks, or other tasks, that show the sizes of tables in the training
MOST_ROWS = 1000  # known rows that are read together: memory and time grow with their square and cube
MOST_TEXTS = 20  # a column of up to this many different texts may hold categories, however few the rows are
NETWORK = "network"  # the folder of the learner within that of a fitted estimator
TABLE = Kind("table", 1, {
    "columns": [{"name": str}], "named": bool, "classes": list | None, "labels_as": str | None,
}, ("cells", "targets"))  # fmt: skip
"""Its tensors are `cells`, the known rows as numbers, and `targets`. A column of texts has `categories`, which its
numbers stand for, and one of dates a `unit`; they are `named` if they came from a data frame. numpy's type of the
labels is `labels_as`."""

# The folders `classes` and `numbers`: learners that docs/how-to/pfn.md says how to train.
SHIPPED = Path(__file__).parent / "networks"
TABLE_MODEL = "metalearn.models.table.table"
COLUMNS = "columns.json"  # how the columns of a table become the numbers that a program reads
FARTHEST = 1e6  # spreads from the mean; what lies beyond is brought there, so that float32 has its square
LEVELS = (0.05, 0.5, 0.95)  # quantiles that the program of a regressor gives
FOR_NUMBERS = "for numbers, take PFNRegressor, --network numbers, or a run of model.head=bars"

log = logging.getLogger("metalearn")


class _Reader(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What both estimators share: the network, and how cells become numbers."""

    def __init__(self, path: StrPath | None = None, *, plugins: Sequence[str] = (), device: str = "cpu") -> None:
        self.path, self.plugins, self.device = path, plugins, device

    def _learn(self, columns: list[dict[str, Any]], cells: Tensor, targets: Tensor) -> None:
        """Remembers the known rows: their numbers [n, d] and [n], and the keys and values that queries read."""
        learner, of_classes = self._opened(), not targets.is_floating_point()
        # If the network reads columns and targets with mean 0 and variance 1, they are brought there in float64, before
        # they become float32: of 1.7e9 seconds, float32 has no minutes.
        standardizes = bool(learner.taught.config.model.get("standardize", False))
        scaling = _scaling_of(cells, standardizes)
        target = _mean_and_spread(targets[:, None])[:2] if standardizes and not of_classes else None
        x = _shown(cells, scaling)
        y = targets if of_classes else _shown(targets[:, None], Scaling(torch.arange(1), target), "y")
        source = learner.taught.source
        if isinstance(source, PriorTasks):  # which tells the shapes of its tables without drawing them
            shapes = [source.shape("train", group) for group in range(GROUPS)]
            sizes = [(shape.support, shape.features) for shape in shapes]
        else:
            tasks = [source.episodes("train", torch.tensor([number])).support.x for number in range(TASKS)]
            sizes = [(task.shape[1], task.shape[2:].numel()) for task in tasks]
        rows, features = map(max, zip(*sizes, strict=True))
        for what, number, most in (("known rows", len(x), rows), ("features", x.shape[1], features)):
            if number > most:
                log.warning(
                    "%s: there are %d %s, and it was trained on tables of at most %d: cross-validate it",
                    self._run, number, what, most,
                )  # fmt: skip
        parts = _parts(targets)
        if len(parts) > 1:
            log.warning(
                "%s: %d known rows are read in %d parts of at most %d, and the answers by each are averaged",
                self._run, len(x), len(parts), MOST_ROWS,
            )  # fmt: skip
        reads, contexts = self._reads(None if not of_classes else int(targets.max()) + 1), []
        for rows in parts:
            with learner.computing(), torch.no_grad():
                support = Batch(learner.on_device(x[rows][None]), y[rows][None].to(learner.device))
                contexts.append(reads.remember(learner.params, support))
        self._columns, self._cells, self._targets = columns, cells, targets
        self._scaling, self._target, self._contexts = scaling, target, contexts

    def save(self, path: StrPath) -> None:
        """Saves what was fitted in a new folder: the network, as `Learner.save` does, and the known rows, which are
        your data. Raises ValueError if it is not fitted, there is something at `path`, it cannot be written, or a label
        is neither a text nor a number."""
        check_is_fitted(self)
        with whole_folder("path", Path(path)) as folder:
            self._fill(folder)

    def _fill(self, folder: Path) -> None:
        classes = getattr(self, "classes_", None)
        labels = None if classes is None else classes.tolist()
        for label in labels or ():
            if not isinstance(label, str | int | float):
                raise ConfigError(f"y: {label!r} is neither a text nor a number, and no other label can be saved")
        self._opened().save(folder / NETWORK)
        meta = {
            "columns": self._columns, "named": hasattr(self, "feature_names_in_"), "classes": labels,
            "labels_as": None if classes is None else classes.dtype.str,
        }  # fmt: skip
        form.fill(folder, TABLE, {"cells": self._cells, "targets": self._targets}, meta)

    def export(
        self, path: StrPath, *, format: str = "onnx", licence: str | None = None, key: str = "path"
    ) -> list[str]:
        """Writes a new folder with one program, which runs without this one: the network with the keys and values of
        the known rows. columns.json says how columns become its numbers. Returns what there is to say, in lines. Raises
        ValueError if it is not fitted, a package is missing, the program differs from this one by more than 1e-4, or
        the folder cannot be written.

        Args:
            format: `onnx` (the extra `onnx`) or `torch-export`; or `folder`, as `save`, with a card.
            licence: of the network and the known rows, for the model card.
            key: how messages name the path.
        """
        check_is_fitted(self)
        out, of_classes = Path(path), isinstance(self, ClassifierMixin)
        outputs = ["probabilities"] if of_classes else ["mean", "quantiles"]

        def program() -> NetworkToExport:
            if self._opened().device.type != "cpu":
                raise ConfigError(f"format={format}: programs are made on the CPU; give the estimator device='cpu'")
            x = self._cells[torch.arange(4) % len(self._cells)].clone()
            x[3, 0] = torch.nan
            return NetworkToExport(self._program, x, f"path={self._run}", outputs, inputs="rows", folded=True)

        words = "rows: float64 [n, columns]; NaN is a missing value, or a new category"
        means = {"classes": self.classes_.tolist()} if of_classes else {"quantiles": list(LEVELS)}
        kernels = self._opened().taught.config.model.get("kernels", False)
        held = "as numbers" if kernels else "by their keys and values, not the rows themselves"
        rows = "" if format == FOLDER else f"; they are in the program, {held}"
        facts = {
            "Predicts": "the probabilities of classes" if of_classes else "the mean, and quantiles",
            "Known rows": f"{len(self._targets)}{rows}",
            "Licence": licence or "not known", **made_with(),
        }  # fmt: skip
        call = f"{', '.join(outputs)} = run(rows)  # float64 [n, columns], see {COLUMNS}"
        folder = use("table", ESTIMATOR=f"metalearn.{type(self).__name__}", NAME=out.name)
        uses = {FOLDER: folder, ONNX: use("table_onnx"), TORCH: use("torch", CALL=call)}
        task = f"tabular-{'classification' if of_classes else 'regression'}"
        return exporter.export(
            key, out, format, fill=self._fill, program=program,
            about=(COLUMNS, {"input": words, "columns": self._columns, **means}),
            card=Card(out.name, task, ["prior-fitted network"], licence, facts, uses),
        )  # fmt: skip

    def _program(self, rows: Tensor) -> tuple[Tensor, ...]:
        """From rows float64 [n, columns] to the probabilities [n, classes], or to the mean [n] and the quantiles
        [n, levels]."""
        learner, reads = self._opened(), self._reads()
        x = in_spreads(rows, self._scaling)[None]
        with learner.computing():
            outputs = [reads.answer(learner.params, context, x)[0].double() for context in self._contexts]
        if isinstance(self, PFNClassifier):
            return (self._probabilities(outputs).float(),)
        assert isinstance(self, PFNRegressor)
        return self._means(outputs), self._quantiles(outputs, LEVELS)

    def texts(self) -> list[str]:
        """The names of the columns whose values stand for categories."""
        check_is_fitted(self)
        return [column["name"] for column in self._columns if "categories" in column]

    @classmethod
    def load(cls, path: StrPath, *, plugins: Sequence[str] = (), device: str = "cpu") -> Self:
        """What `save` has saved in the folder `path`, fitted; `plugins` and `device` are those of the class. Raises
        ValueError if there is no such folder, it holds something else, or a file is damaged."""
        saved = _saved(Path(path))
        return cls(Path(path) / NETWORK, plugins=plugins, device=device)._show_saved(saved)

    def _show_saved(self, saved: SavedFolder) -> Self:
        self._reads()
        meta = saved.meta
        names = [column["name"] for column in meta["columns"]]
        self.n_features_in_ = len(names)
        if meta["named"]:
            self.feature_names_in_ = np.array(names, dtype=object)
        if meta["classes"] is not None:
            self.classes_ = np.array(meta["classes"], dtype=meta["labels_as"])
        self._learn(meta["columns"], *(saved.tensors[name] for name in TABLE.tensors))
        return self

    def _outputs(self, X: Any) -> list[Tensor]:  # noqa: N803
        """The outputs [n, d] of the network by each part of the known rows. Those of a row have the same bits in any
        call."""
        check_is_fitted(self)
        is_frame = _is_frame(X)
        if is_frame and not len(X):
            raise ConfigError("X: has no rows")
        options = {"dtype": None, "ensure_all_finite": "allow-nan", "skip_check_array": is_frame}
        checked = validate_data(self, X, reset=False, **options)
        x, learner = _shown(_numbers(X if is_frame else checked, self._columns), self._scaling), self._opened()
        with learner.computing(), torch.no_grad():
            rows, reads = learner.on_device(x[None]), self._reads()
            outputs = [answers(reads, learner.params, part, rows)[0].double().cpu() for part in self._contexts]
        if not all(part.isfinite().all() for part in outputs):
            raise ConfigError(f"X: the answers of path={self._run} to these rows are not finite; are they too large?")
        return outputs

    @property
    def _run(self) -> StrPath:
        """Where the network is."""
        kind = "classes" if isinstance(self, ClassifierMixin) else "numbers"
        return SHIPPED / kind if self.path is None else self.path

    def _opened(self) -> Learner:
        """The trained learner, read once for the same parameters."""
        source = (os.fspath(self._run), tuple(self.plugins), self.device)
        if getattr(self, "_read", None) != source:
            self._learner, self._read = load(self._run, plugins=self.plugins, device=self.device), source
        return self._learner

    def _reads(self, classes: int | None = None) -> InContext:
        """How the network reads tables of this number of classes, by default those that are fitted."""
        reads = self._opened().taught.model.in_context
        if reads is None or (reads.predictive is None) is not isinstance(self, ClassifierMixin):
            other = "a network that reads labels" if reads is None else "a network for this kind of target"
            head = "classes" if isinstance(self, ClassifierMixin) else "gaussian"
            raise ConfigError(
                f"path={self._run}: is no run of {other}; give a run of algorithm=pfn model=table model.head={head}"
            )
        classes = len(getattr(self, "classes_", ())) if classes is None else classes
        config = self._opened().taught.config.model
        if reads.predictive is None and classes > config.classes and config.get("_target_") == TABLE_MODEL:
            options = {key: value for key, value in config.items() if key != "_target_"} | {"classes": classes}
            reads = table(**options).in_context  # the parameters do not depend on it
            assert reads is not None
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

    X is an array or a data frame. Texts that look like numbers are numbers in an array, and texts in a frame. Dates
    become days since 1970. Columns of texts, categories and truth values become the numbers of their sorted values,
    which are compared as texts, with `true` as True; a value that no known row has, NaN and None are missing values. If
    the network standardises, columns are shifted and scaled in float64, so that any unit will do. The order of columns
    and classes has no influence, so no ensemble over orders is needed. The keys and values of the known rows are
    computed once, in `fit`; more than 1,000 rows are read in parts, whose answers are averaged.

    Args:
        path: as for `metalearn.load`; None: the network that comes with this package, for up to 10 classes.
        plugins: as for `metalearn.load`: packages of your own that the run was trained with.
        device: `cpu` or `cuda`.

    Attributes:
        classes_: the labels, sorted.
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Shows the known rows and their labels to the network. Raises ValueError for what scikit-learn refuses, if
        there is no such run, or for more classes than the network was made for."""
        X, y = _checked(self, X, y)  # noqa: N806
        self._reads()
        try:
            check_classification_targets(y)
        except ValueError as error:
            raise ConfigError(f"y: {error} path={self._run} predicts classes; {FOR_NUMBERS}") from error
        classes, numbers = np.unique(y, return_inverse=True)
        config = self._opened().taught.config.model
        if len(classes) > config.classes and (config.get("_target_") != TABLE_MODEL or len(classes) > len(y) / 2):
            raise ConfigError(
                f"y: has {len(classes)} classes, and path={self._run} was made for {config.classes}; give fewer, or a "
                f"run with model.classes={len(classes)} or more; {FOR_NUMBERS}"
            )
        if len(classes) > config.classes:
            log.warning(
                "%s: there are %d classes, and it was trained on tables of at most %d: cross-validate it",
                self._run, len(classes), config.classes,
            )  # fmt: skip
        columns = _columns(X)
        self._learn(columns, _numbers(X, columns), torch.from_numpy(numbers))
        self.classes_ = classes
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """The probability of each class: [n, classes]."""
        return np.asarray(self._probabilities(self._outputs(X)).numpy())

    def _probabilities(self, outputs: list[Tensor]) -> Tensor:
        return _mean([logits[:, : len(self.classes_)].softmax(dim=1) for logits in outputs])

    def predict(self, X: Any) -> Array:  # noqa: N803
        """The most probable class of each row."""
        best = self.predict_proba(X).argmax(axis=1)  # first, since it refuses what is not fitted
        return np.asarray(self.classes_[best])


class PFNRegressor(RegressorMixin, _Reader):  # type: ignore[misc]
    """Real numbers of the rows of a table, by a run of `algorithm=pfn` with another `model.head` than `classes`.

    X and the arguments are those of `PFNClassifier`.
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Shows the known rows and their targets to the network. Raises ValueError for what scikit-learn refuses, or if
        there is no such run."""
        self._reads()
        cells = pd.Series(np.asarray(y).ravel())
        if cells.dtype.kind not in "biufc":
            words = cells.dropna().astype(str)
            for word in words[pd.to_numeric(words, errors="coerce").isna()]:
                raise ConfigError(
                    f"y: holds {word!r}, and path={self._run} predicts numbers; give numbers, or take for classes "
                    "PFNClassifier, --network classes, or a run of model.head=classes"
                )
        X, y = _checked(self, X, y, y_numeric=True)  # noqa: N806
        columns = _columns(X)
        self._learn(columns, _numbers(X, columns), torch.from_numpy(y.astype(np.float64)))
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """The mean of the predictive distribution of each row, [n]."""
        return np.asarray(self._means(self._outputs(X)).numpy())

    def predict_quantiles(self, X: Any, levels: Sequence[float]) -> NDArray[np.float64]:  # noqa: N803
        """The quantiles [n, levels] of the predictive distribution of each row; levels lie between 0 and 1."""
        for level in levels:
            fraction("levels", level)
        return np.asarray(self._quantiles(self._outputs(X), levels).numpy())

    def _means(self, outputs: list[Tensor]) -> Tensor:
        predictive: Any = self._reads().predictive
        return self._in_units(_mean([predictive.mean(part[None])[0, :, 0] for part in outputs]))

    def _quantiles(self, outputs: list[Tensor], levels: Sequence[float]) -> Tensor:
        predictive: Any = self._reads().predictive
        asked = torch.tensor(list(levels), dtype=torch.float64)
        return self._in_units(_mean([predictive.quantiles(part[None], asked)[0] for part in outputs]))

    def _in_units(self, answered: Tensor) -> Tensor:
        """What the network answers, in the units of the targets."""
        return answered if self._target is None else answered * self._target[1] + self._target[0]

    def predict_interval(self, X: Any, coverage: float = 0.9) -> NDArray[np.float64]:  # noqa: N803
        """The lower and upper end [n, 2] of the central interval that holds the target with this probability."""
        fraction("coverage", coverage)
        return self.predict_quantiles(X, [(1 - coverage) / 2, (1 + coverage) / 2])


def estimator(path: StrPath, *, plugins: Sequence[str] = ()) -> PFNClassifier | PFNRegressor:
    """The estimator for what a run predicts, classes or real numbers; the arguments are those of both. Raises
    ValueError for what `metalearn.load` refuses."""
    learner = load(path, plugins=plugins)
    reads = learner.taught.model.in_context
    kind = PFNClassifier if reads is None or reads.predictive is None else PFNRegressor
    made = kind(path, plugins=plugins)
    made._learner, made._read = learner, (os.fspath(path), tuple(plugins), "cpu")  # so that it is not read again
    return made


def fitted(path: StrPath, *, plugins: Sequence[str] = ()) -> PFNClassifier | PFNRegressor:
    """The estimator, of either kind, that `save` has put into a folder. Raises ValueError as `PFNClassifier.load`."""
    saved = _saved(Path(path))
    return estimator(Path(path) / NETWORK, plugins=plugins)._show_saved(saved)


def _saved(folder: Path) -> SavedFolder:
    try:
        saved = form.load(folder, TABLE)
        form.check_fields(saved.meta["classes"] or [], [str | int | float | bool], "classes")
        return saved
    except ValueError as error:
        raise ConfigError(f"path={folder}: {error}; give a folder that PFNClassifier.save has made") from error


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


def _columns(X: Any) -> list[dict[str, Any]]:  # noqa: N803
    """The name of each column, and, of those that do not hold numbers, the values as texts in their order."""
    columns: list[dict[str, Any]] = []
    for name, cells in pd.DataFrame(X).items():
        columns.append({"name": str(name)})
        if cells.isna().all():
            columns[-1]["categories"] = []  # whatever a new row has there, counts as missing
            log.warning("X: column %s is empty in the known rows: it is left out", name)
        elif _as_days(cells) is not None:
            columns[-1]["unit"] = "days since 1970-01-01"
        # Texts of a frame also where these ones look like numbers: what its column holds does not depend on which rows
        # are known. An array has one type for all of its columns.
        elif _as_numbers(cells) is None or (
            _is_frame(X) and pd.api.types.infer_dtype(cells) in ("string", "categorical")
        ):
            values = {text: value for value in cells if (text := _text(value)) is not None}
            try:
                columns[-1]["categories"] = sorted(values, key=lambda text, of=values: of[text])  # type: ignore[misc]
            except TypeError:  # of several types
                columns[-1]["categories"] = sorted(values)
            if len(values) > max(MOST_TEXTS, len(X) / 2):
                log.warning(
                    "X: column %s has %d different texts in %d rows, which are no categories: leave it out, or give "
                    "what they mean as numbers", name, len(values), len(X),
                )  # fmt: skip
    return columns


def _text(value: Any) -> str | None:
    """A cell that is no number as a text, the same whatever type a reader has given it; None for a missing one."""
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return None
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)  # of whole numbers among missing ones, pandas makes real ones
    text = str(value)
    return text.title() if text.lower() in ("true", "false") else text


def _as_days(column: Any) -> NDArray[np.float64] | None:
    """Dates as days since 1970, NaN for what is missing; None if it holds something else."""
    if not pd.api.types.infer_dtype(column).startswith("date"):
        return None
    since = pd.to_datetime(column, utc=True) - pd.Timestamp("1970-01-01", tz="UTC")
    return np.asarray(since / pd.Timedelta(days=1), np.float64)


def _as_numbers(column: Any) -> NDArray[np.float64] | None:
    """A column as numbers, durations in days, NaN for what is missing; None if it holds something else."""
    if pd.api.types.infer_dtype(column) == "boolean":  # also with gaps, where pandas has objects
        return None
    if pd.api.types.infer_dtype(column).startswith("timedelta"):
        column = pd.to_timedelta(column) / pd.Timedelta(days=1)
    if column.dtype.kind not in "iufO":
        return None
    try:
        return np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan))
    except (TypeError, ValueError):
        return None


def _numbers(X: Any, columns: Sequence[dict[str, Any]]) -> Tensor:  # noqa: N803
    """The cells [n, d] as numbers, float64, with NaN for what is missing or new."""
    numbered: list[NDArray[np.float64]] = []
    for (name, cells), column in zip(pd.DataFrame(X).items(), columns, strict=True):
        if "categories" not in column:
            of_dates = "unit" in column
            numbers = _as_days(cells) if of_dates else _as_numbers(cells)
            if numbers is None:
                texts = pd.Series([_text(value) for value in cells], dtype=object)
                dates = partial(pd.to_datetime, format="ISO8601", utc=True)
                parsed = (dates if of_dates else pd.to_numeric)(texts, errors="coerce")
                for strange in texts[texts.notna() & parsed.isna()]:
                    kind = "dates" if of_dates else "numbers"
                    raise ConfigError(f"X: column {name} holds {strange!r}; the known rows have {kind} there")
                numbers = _as_days(parsed) if of_dates else parsed.to_numpy(np.float64)
            assert numbers is not None
            if np.isinf(numbers).any():
                raise ConfigError(f"X: column {name} holds infinity; NaN stands for a missing value")
            numbered.append(numbers)
            continue
        words = [_text(value) for value in cells]
        codes = pd.Categorical(words, categories=column["categories"]).codes  # -1 of what is missing or new
        present = [text for text in words if text is not None]
        if present and column["categories"] and (codes < 0).all():
            log.warning(
                "X: column %s has no value that the known rows have, such as %s; all of it counts as missing",
                name, present[0],
            )  # fmt: skip
        numbered.append(np.where(codes < 0, np.nan, codes))
    return torch.from_numpy(np.stack(numbered, axis=1) if numbered else np.zeros((len(X), 0)))


class Scaling(NamedTuple):
    """Which columns are `kept`, the numbers of them; the mean and the spread of each, float64, None: as they are."""

    kept: Tensor
    scale: tuple[Tensor, Tensor] | None


def _parts(targets: Tensor) -> list[Tensor]:
    """The known rows in parts of at most `MOST_ROWS`, alike in their targets; the same ones in each call."""
    count = -(-len(targets) // MOST_ROWS)
    mixed = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    order = mixed[targets[mixed].argsort(stable=True)] if count > 1 else torch.arange(len(targets))
    return [order[first::count] for first in range(count)]


def _mean(parts: list[Tensor]) -> Tensor:
    """Of the answers by each part of the known rows."""
    # No torch.mean: in ONNX its name would be that of the output.
    return torch.stack(parts).sum(dim=0) / len(parts)


def _scaling_of(cells: Tensor, standardizes: bool) -> Scaling:
    """Keeps the columns that vary. Without scales also constants: how far an asked value is from one says something."""
    present = ~cells.isnan()
    kept = present.any(dim=0)
    if not standardizes:
        return Scaling(kept.nonzero().flatten(), None)
    mean, spread, varies = _mean_and_spread(cells)
    kept &= varies | ~present.all(dim=0)  # whether a cell is missing may say something
    return Scaling(kept.nonzero().flatten(), (mean[kept], spread[kept]))


def _mean_and_spread(cells: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Over rows [n, d], without missing values; and which columns vary. The spread of others is 1."""
    x = cells.numpy()
    x = np.where(np.isnan(x).all(axis=0), 0.0, x)  # numpy warns of columns without numbers
    largest = np.nanmax(np.abs(x), axis=0)
    unit = np.where(largest > 0, largest, 1.0)  # the squares of 1e200 are no numbers
    mean, spread = np.nanmean(x / unit, axis=0), np.nanstd(x / unit, axis=0)
    varies = spread > 1e-12 * np.abs(mean)
    parts = (mean * unit, np.where(varies, spread * unit, 1.0), varies)
    return torch.from_numpy(parts[0]), torch.from_numpy(parts[1]), torch.from_numpy(parts[2])


def _shown(x: Tensor, scaling: Scaling, what: str = "X") -> Tensor:
    """The float32 tensor [n, d] that the network reads; refuses numbers that float32 does not hold."""
    if scaling.scale is None and bool((x.abs() > torch.finfo(torch.float32).max).any()):
        raise ConfigError(f"{what}: holds a value too large for float32")
    return in_spreads(x, scaling)


def in_spreads(x: Tensor, scaling: Scaling) -> Tensor:
    """The columns that are kept of the numbers `x`, float64, as float32 [n, d]: in spreads from the mean, or as they
    are. One of zeros if none is kept."""
    x = x.index_select(1, scaling.kept)
    if scaling.scale is not None:
        x = ((x - scaling.scale[0]) / scaling.scale[1]).clamp(-FARTHEST, FARTHEST)
    return x.float() if x.shape[1] else x.new_zeros(len(x), 1).float()
