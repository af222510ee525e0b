"""`metalearn fit` and `metalearn predict` of a table, by a prior-fitted network."""

import argparse
import io
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from metalearn.app.process import print_all, set_up_process
from metalearn.errors import ConfigError, install, log_to_stderr, nearest, printable
from metalearn.storage.files import creating, refuse_used

SUFFIXES = (".csv", ".parquet")

log = logging.getLogger("metalearn")

KINDS = ("classes", "numbers")
MOST_CLASSES = 10

LEVELS = (0.05, 0.95)  # the quantiles of a real number that are written


def fit(options: argparse.Namespace, others: Sequence[str]) -> int:
    """Fits a table, and says what cross-validation finds; returns the exit code. `others` are options of pictures."""
    if others:
        raise ConfigError(f"{', '.join(others)}: of pictures; a table has no use for it, leave it out")
    if options.target is None:
        raise ConfigError("--target: missing; a table needs it, type --target price")
    refuse_used("--out", options.out)
    set_up_process(options.threads)
    log_to_stderr()
    from metalearn.tables.estimators import SHIPPED, PFNClassifier, estimator

    frame, target, network = read(options.folder), options.target, options.network
    if target not in frame:
        names = [str(name) for name in frame]
        hint = nearest(target, names) or f"; it has {', '.join(names[:10])}{', …' if len(names) > 10 else ''}"
        raise ConfigError(f"--target={target}: {options.folder} has no such column{hint}")
    without = frame[target].isna()
    if without.all():
        raise ConfigError(f"--target={target}: is missing in every row of {options.folder}; type another column")
    if network is None:
        network = kind_of_target(frame[target])
        print(f"{target}: {network}, by the network that comes with metalearn; --network names another", flush=True)
    model = estimator(SHIPPED / network if network in KINDS else network, plugins=options.plugins or ())
    of_classes = isinstance(model, PFNClassifier)
    if of_classes and options.folder.suffix.lower() == ".csv":
        labels = read(options.folder, [target])[target]
        without = labels.isna()
        # Others than whole numbers stay texts: as numbers, 01 and 1, or 2 and 2.0, would be one class.
        whole = labels.dropna().str.fullmatch("0|-?[1-9][0-9]{0,14}").all()
        frame[target] = labels.astype(float) if whole else labels
    x, y = frame[~without].drop(columns=target), frame.loc[~without, target].to_numpy()
    # Where some are missing, pandas makes real numbers of whole ones. From 2⁵³ on all of them are whole.
    if y.dtype.kind == "f" and ((y % 1 == 0) & (abs(y) < 2**53)).all():
        y = y.astype(np.int64)
    if of_classes and len(set(y.tolist())) < 2:
        raise ConfigError(f"--target={target}: has one class, {y[0]}; type a column of two classes or more")
    try:
        model.fit(x, y)
    except ValueError as error:
        if not str(error).startswith("y: "):
            raise
        raise ConfigError(f"--target={target}: {str(error)[3:].replace('path=', '--network=')}") from error
    model.save(options.out)
    lines = [f"{len(y)} rows, {x.shape[1]} columns", *cross_validated(model, x, y, options.folds)]
    if without.any():
        lines.append(f"{without.sum()} rows without {target} are left out; metalearn predict answers for such rows")
    return print_all(printable("\n".join([*lines, f"all in {options.out}"])))


def kind_of_target(cells: Any) -> str:
    """Which shipped network is for a column: numbers, if it has more different ones than that for classes takes."""
    is_number = cells.dtype.kind in "iuf" and cells.nunique() > MOST_CLASSES
    return KINDS[is_number]


def cross_validated(model: Any, x: Any, y: Any, folds: int) -> list[str]:
    """What is predicted of rows that were not known, in lines."""
    from sklearn.base import is_classifier
    from sklearn.metrics import r2_score
    from sklearn.model_selection import KFold, StratifiedKFold, cross_val_predict

    from metalearn.api.results import wilson

    most = int(np.unique(y, return_counts=True)[1].min()) if is_classifier(model) else len(y)
    if most < 2:
        return ["accuracy: not known: a class has one row"]
    cut = (StratifiedKFold if is_classifier(model) else KFold)(min(folds, most), shuffle=True, random_state=0)
    log.disabled = True  # the fit to all rows has said what is to say
    try:
        predicted = cross_val_predict(model, x, y, cv=cut)
    finally:
        log.disabled = False
    if not is_classifier(model):
        return [f"explains {r2_score(y, predicted):.1%} of the variance of rows not known (R²)"]
    right, guess = int((predicted == y).sum()), np.unique(y, return_counts=True)[1].max() / len(y)
    low, high = wilson(right, len(y))
    return [
        f"accuracy {right / len(y):.1%} of rows not known (95% interval {low:.1%} to {high:.1%}; always the most "
        f"frequent class: {guess:.1%})"
    ]


def predict(options: argparse.Namespace) -> int:
    """Answers for the rows of a table; returns the exit code."""
    if len(options.pictures) != 1 or options.pictures[0].suffix.lower() not in SUFFIXES:
        paths = ", ".join(map(str, options.pictures))
        raise ConfigError(f"TABLE={paths}: must be one .csv or .parquet; {options.classifier} was made of a table")
    out: Path | None = options.out
    if out is not None and (out.suffix not in SUFFIXES or out.exists()):
        reason = "is there already" if out.exists() else "must end in .csv or .parquet"
        raise ConfigError(f"--out={out}: {reason}; type another name, such as answers.csv")
    set_up_process(options.threads)
    log_to_stderr()
    from metalearn.tables.estimators import PFNClassifier, fitted

    model = fitted(options.classifier, plugins=options.plugins or ())
    frame = read(options.pictures[0], model.texts())
    import pandas as pd

    columns = list(getattr(model, "feature_names_in_", frame.columns))  # those of an array have no names
    missing = [name for name in columns if name not in frame]
    if missing:
        raise ConfigError(f"TABLE={options.pictures[0]}: has no column {missing[0]}, which the network was shown")
    x = frame[columns] if hasattr(model, "feature_names_in_") else frame.to_numpy()
    if isinstance(model, PFNClassifier):
        votes = model.predict_proba(x)
        answers = pd.DataFrame(votes, columns=[f"probability of {name}" for name in model.classes_])
        answers.insert(0, "label", model.classes_[votes.argmax(axis=1)])
    else:
        answers = pd.DataFrame(model.predict_quantiles(x, LEVELS), columns=[f"quantile {level:g}" for level in LEVELS])
        answers.insert(0, "mean", model.predict(x))
    if out is None:
        return print_all(printable(answers.to_string(float_format="{:.4g}".format)))
    with creating("--out", out):
        answers.to_csv(out, index=False) if out.suffix == ".csv" else answers.to_parquet(out, index=False)
    return print_all(printable(f"{len(answers)} rows: {out}"))


def read(path: Path, texts: Sequence[str] = ()) -> Any:
    """The data frame of a file. In a CSV file, the columns `texts` are read as texts, whatever they look like, and of
    texts, only an empty cell is missing. Raises ValueError if it cannot be read, or has no rows."""
    try:
        import pandas as pd
    except ImportError as error:
        raise ConfigError(f"TABLE: needs pandas and more; type {install('tables')}") from error
    try:
        csv = path.suffix.lower() == ".csv"
        if csv:
            # A blank line is a row of a table of one column, but not at its ends.
            content = path.read_bytes().strip(b"\r\n")
            read_csv = partial(pd.read_csv, skip_blank_lines=False)
            frame = read_csv(io.BytesIO(content), dtype=str, keep_default_na=False, na_values="")
            # NA, None and the like are missing among numbers; among texts they are values.
            for name, cells in read_csv(io.BytesIO(content)).items():
                if cells.dtype.kind in "iuf" and name not in texts:
                    frame[name] = cells.to_numpy()
        else:
            frame = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"TABLE={path}: cannot be read ({error})") from error
    if not len(frame):
        raise ConfigError(f"TABLE={path}: has no rows")
    if csv and not isinstance(frame.index, pd.RangeIndex):
        raise ConfigError(f"TABLE={path}: lines have more cells than there are names; is there a comma at their ends?")
    if "Unnamed: 0" in frame:
        log.warning(
            "TABLE=%s: its first column has no name and is read as any other; is it an index? Leave it out then", path
        )
    return frame
