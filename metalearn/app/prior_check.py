"""What can be learned from the tasks of a prior: measured before hours of training are spent on them."""

import contextlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from metalearn.config.build import build
from metalearn.config.options import Named, groups, plain_config
from metalearn.errors import ConfigError, DataError
from metalearn.reporting.page import Chart, Line, chart, page
from metalearn.reporting.provenance import made_with
from metalearn.tasks.priors.source import Prior, PriorTasks, Shape, is_constant
from metalearn.training.chunks import digests
from metalearn.types import Episode

SHAPES = 64  # that say how many classes the tasks of a module have
SPLIT = "val"  # the split whose tasks are looked at: they are the same for every seed
SECONDS = 1.0  # so long tasks are drawn to measure the speed
SHOWN = 6  # tasks that the page shows
MOST_CONSTANT = 0.05  # the part of tasks that may have constant targets, as a rare draw has
USELESS = {"AUC": 0.6, "R²": 0.05}  # A task on which no learner reaches this counts as one that cannot be learned
LEARNERS = ("forest", "linear")
Array = NDArray[Any]


class PriorFigures(NamedTuple):
    """What was measured: of each task the `scores` of each learner (a share of `measure`; empty without scikit-learn),
    how many have constant targets, the tasks a second of one core, and the first tasks."""

    measure: str
    scores: Mapping[str, Sequence[float]]
    tasks: int
    constant: int
    per_second: float
    shapes: Sequence[Shape]
    shown: Sequence[Episode]

    @property
    def chance(self) -> float:
        """What a guess reaches."""
        return 0.5 if self.measure == "AUC" else 0.0

    @property
    def useless(self) -> float:
        """The share of tasks that no learner has learned."""
        best = np.max([self.scores[name] for name in LEARNERS], axis=0)
        return float((best < USELESS[self.measure]).mean())


def source_of(name: str, settings: Mapping[str, Any], plugins: Sequence[str]) -> PriorTasks:
    """The tasks of a prior by its name: `gp` or `gp_prior` is that option of the group dataset, any other one a module.
    Where no setting says how many classes the tasks of a module have, the shapes that it draws do. Raises ConfigError
    for a name or a setting that is not allowed."""
    options = groups()["dataset"]
    option = next((key for key in (f"{name}_prior", name) if key in options), None)
    if option is None:
        option, settings, plugins = "prior", {"prior": name, **settings}, [*plugins, name.partition(".")[0]]
    source = build(plain_config({"dataset": Named(option, settings)}, {"plugins": list(plugins)}), "dataset")
    if not isinstance(source, PriorTasks):
        priors = ", ".join(option.removesuffix("_prior") for option in options if option.endswith("_prior"))
        raise ConfigError(f"NAME={name}: is no prior; type {priors}, or the name of a module of your own")
    if option == "prior" and "classes" not in settings:
        with contextlib.suppress(Exception):  # of a module of the user's own; the check of a task names it
            drawn = [source.prior.shape(np.random.default_rng(seed)).classes for seed in range(SHAPES)]
            classes = None if None in drawn else max(number for number in drawn if number is not None)
            return source_of(name, {**settings, "classes": classes}, plugins)
    return source


def prior(name: str, /, **settings: Any) -> Prior:
    """A prior of ours by its name, `gp`, `sine` or `table`, as a part of `metalearn.tasks.priors.mixture`; other keys
    than `settings` are as in `conf/dataset/`. Raises ConfigError for a name or a setting that is not allowed."""
    return source_of(name, settings, []).prior


def check_prior(source: PriorTasks, tasks: int, learn: Callable[[Episode], Mapping[str, float]] | None) -> PriorFigures:
    """Looks at the first task of each of `tasks` groups; `learn` gives the scores of learners on one. Raises DataError
    for a task that cannot be used, two that are alike, or too many with constant targets."""
    name, group = source.prior.name, source.group(SPLIT)
    seen: dict[int, int] = {}
    scores: list[Mapping[str, float]] = []
    shown, shapes, constant = list[Episode](), list[Shape](), 0
    for number in range(0, tasks * group, group):
        source.check(SPLIT, number)
        task = source.episodes(SPLIT, torch.tensor([number]))
        shapes.append(source.shape(SPLIT, number // group))
        first = seen.setdefault(int(digests(task)), number)
        if first != number:
            raise DataError(f"prior {name}: tasks {first} and {number} of {SPLIT} are alike; let it draw from `rng`")
        constant += is_constant(task)
        if len(shown) < SHOWN:
            shown.append(task)
        if learn is not None and not is_constant(task):
            scores.append(learn(task))
    if constant > MOST_CONSTANT * tasks:
        raise DataError(f"prior {name}: {constant} of {tasks} tasks have constant targets; nothing can be learned")
    by_learner = {learner: [values[learner] for values in scores] for learner in LEARNERS} if scores else {}
    measure = "R²" if source.classes(SPLIT) is None else "AUC"
    drawn, began = 0, time.process_time()
    while (elapsed := time.process_time() - began) < SECONDS:  # whole groups, on one core
        source.episodes("train", torch.arange(drawn, drawn + group))
        drawn += group
    return PriorFigures(measure, by_learner, tasks, constant, drawn / elapsed, shapes, shown)


def learners() -> Callable[[Episode], Mapping[str, float]] | None:
    """A function that gives the scores of a forest and of a linear model on a task: the area under the curve, a mean
    over the classes, or R². None: scikit-learn is not installed."""
    try:
        from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor
        from sklearn.impute import SimpleImputer
        from sklearn.linear_model import LogisticRegression, Ridge
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError:
        return None

    def scores(task: Episode) -> dict[str, float]:
        context, y, asked, truth = (value[0].numpy() for batch in task for value in batch)
        real = y.ndim == 2
        forest: Any = ExtraTreesRegressor if real else ExtraTreesClassifier
        line: Any = Ridge() if real else LogisticRegression(max_iter=1000)
        models = {
            "forest": make_pipeline(SimpleImputer(keep_empty_features=True), forest(100, random_state=0)),
            "linear": make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler(), line),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a line has not converged says that the task is hard
            if real:
                answers = {name: model.fit(context, y[:, 0]).predict(asked) for name, model in models.items()}
                return {name: r_squared(answer, truth[:, 0]) for name, answer in answers.items()}
            if len(np.unique(y)) < 2:
                return dict.fromkeys(models, 0.5)
            votes = {name: model.fit(context, y).predict_proba(asked) for name, model in models.items()}
        return {name: area(vote, truth, np.unique(y)) for name, vote in votes.items()}

    return scores


def r_squared(answers: Array, truth: Array) -> float:
    """The part of the variance that is explained; at least −1."""
    from sklearn.metrics import r2_score

    return max(-1.0, float(r2_score(truth, answers)))


def area(votes: Array, truth: Array, classes: Array) -> float:
    """The area under the curve of each class against the others, a mean over the classes that some but not all asked
    rows have; `votes` [n, classes]. 0.5 if there is none."""
    from sklearn.metrics import roc_auc_score

    of_each = [(truth == label, votes[:, column]) for column, label in enumerate(classes)]
    areas = [roc_auc_score(inside, vote) for inside, vote in of_each if 0 < inside.sum() < len(truth)]
    return float(np.mean(areas)) if areas else 0.5


def in_lines(name: str, figures: PriorFigures) -> list[str]:
    """The figures in words."""
    sizes = {
        "rows": [shape.rows for shape in figures.shapes],
        "known rows": [shape.support for shape in figures.shapes],
        "features": [shape.features for shape in figures.shapes],
        "classes": [shape.classes for shape in figures.shapes if shape.classes is not None],
    }
    ranges = ", ".join(f"{what} {min(of)} to {max(of)}" for what, of in sizes.items() if of)
    lines = [f"prior {name}: {figures.tasks} tasks of as many groups; {ranges}"]
    if figures.scores:
        means = [f"{learner} {np.mean(figures.scores[learner]):.3f}" for learner in LEARNERS]
        lines.append(f"mean {figures.measure}: {', '.join(means)}, chance {figures.chance:g}")
        below = f"{figures.measure} below {USELESS[figures.measure]:g}, by the better of both"
        lines.append(f"not learned: {figures.useless:.0%} of the tasks ({below})")
    if figures.constant:
        lines.append(f"constant targets: {figures.constant} of {figures.tasks} tasks")
    lines.append(f"{figures.per_second:,.0f} tasks are drawn in a second of one core")
    return lines


def page_of(name: str, figures: PriorFigures, command: str) -> str:
    """The figures as a page, with pictures of the first tasks."""
    ordered = [
        Line(learner, [(100 * (n + 0.5) / len(of), value) for n, value in enumerate(sorted(of))])
        for learner, of in figures.scores.items()
    ]
    guess = Line("chance", [(0, figures.chance), (100, figures.chance)], style="dashes")
    summaries: dict[str, Callable[[Any], Any]] = {"mean": np.mean, "worst": np.min, "median": np.median, "best": np.max}
    return page(
        "prior.html",
        title=f"Prior {name}",
        lines=in_lines(name, figures),
        learned=chart("", [*ordered, guess], x="tasks, from the hardest, %", y=figures.measure) if ordered else None,
        heads=[figures.measure, *figures.scores],
        summaries=[
            [what, *(f"{summary(of):.3f}" for of in figures.scores.values())] for what, summary in summaries.items()
        ],
        tasks=[_sample(f"task {number}", task) for number, task in enumerate(figures.shown)],
        made=made_with(),
        commands=[command],
    )


def _sample(title: str, task: Episode) -> tuple[dict[str, int], Chart]:
    """The sizes of a task, and a chart of its rows."""
    (context, y), (asked, truth) = ((batch.x[0].double().numpy(), batch.y[0].double().numpy()) for batch in task)
    sizes = {"known": len(context), "asked": len(asked), "features": context.shape[1]}
    if y.ndim == 2:
        lines = [
            Line(name, sorted(zip(x[:, 0].tolist(), of[:, 0].tolist(), strict=True)), style="points")
            for name, x, of in (("known", context, y), ("asked", asked, truth))
        ]
        return sizes, chart(title, lines, x="first feature", y="target")
    second = min(1, context.shape[1] - 1)
    x, labels = np.concatenate([context, asked]), np.concatenate([y, truth])
    lines = [
        Line(f"class {int(label)}", x[labels == label][:, [0, second]].tolist(), style="points")
        for label in np.unique(labels)
    ]
    return sizes, chart(title, lines, x="first feature", y="second feature" if second else "first feature")
