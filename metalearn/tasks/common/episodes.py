"""The shape of an episode, and the way in which task sources draw one.

Nothing here keeps state. Task number i of a split is drawn from a generator seeded by (seed, split, i). So any worker
can make any task, and a resumed run draws the same tasks as a run that was never stopped.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metalearn.checks import Invalid, enough_classes, true_or_false, whole_number
from metalearn.errors import DataError
from metalearn.tasks.common.augmenting import augmented, check_augmentations
from metalearn.tasks.common.draws import TaskDraws, draw_many
from metalearn.types import Batch, Episode, TaskSource, Unit

SPLITS = {"train": 0, "val": 1, "test": 2}

Images = NDArray[np.uint8]
TaskGenerator = Callable[[str, int], np.random.Generator]
Samples = Callable[[Unit], tuple[TaskSource, str]]


class Seeds(NamedTuple):
    """Training is drawn from `seed`; validation and test only from `eval_seed`, so they are the same in every run."""

    seed: int
    eval_seed: int

    def of(self, split: str) -> int:
        """The seed of a split."""
        return self.seed if split == "train" else self.eval_seed


Shots = int | Sequence[int] | Literal["meta_dataset"]
"""A number of support samples; or a range: the fewest and the most, of which each task draws one; or the rule of
`sizes_of_task`."""

META_DATASET = "meta_dataset"
FEWEST_WAYS, MOST_OF_CLASS, MOST_SHOTS = 5, 100, 500
"""Of that rule: the fewest classes of a task, how many pictures of a class count, the most support pictures."""

_SHOTS, _AUGMENT = 3, 4
"""The last numbers of the seeds of a task's number of shots, and of the changes of its pictures. Those of other
generators differ from them."""


class EpisodeShape(NamedTuple):
    """An episode has `ways` classes; of each class it has `shots` support pictures and `queries` query pictures."""

    ways: int
    shots: Shots
    queries: int

    @property
    def most(self) -> int:
        """The most pictures of a class."""
        return most_shots(self.shots) + self.queries


class EpisodeSpec(NamedTuple):
    """The episodes of a dataset: `ways`, `shots` and `queries` as in `EpisodeShape`.

    A training episode has `train_ways` classes and `train_queries` query pictures of each class; None means the same
    number as in validation and test. `augment` names the changes of its pictures, see `AUGMENTATIONS`.
    """

    ways: int
    shots: Shots
    queries: int
    train_ways: int | None = None
    train_queries: int | None = None
    augment: Sequence[str] = ()


class Classes(NamedTuple):
    """The classes of a split, by their `identities`. The smallest class has `fewest` pictures; `pictures(label)` gives
    those of class number `label`, uint8 [n, h, w] or [n, h, w, 3]. `decoder` names their decoder, with its version.
    `drawn`: a program draws them, always alike. `names` is what people call them, if that is known. If `support` is
    not empty, the first `support[label]` pictures of a class are for support sets only, and the others for queries.
    `drawers` are those of `metalearn.types.NamesDrawers`."""

    identities: Sequence[str]
    fewest: int
    pictures: Callable[[int], Images]
    decoder: str
    drawn: bool = False
    names: Sequence[str] = ()
    support: Sequence[int] = ()
    drawers: Mapping[str, str] = {}


@runtime_checkable
class HoldsClasses(Protocol):
    """A task source whose classes can be cut into shards."""

    def classes_of(self, split: str) -> Classes:
        """The classes of a split, with all their pictures."""
        ...


def are_fractions(parts: object) -> bool:
    """Whether these are three numbers above 0 with the sum 1, of training, validation and test."""
    if not isinstance(parts, list | tuple) or len(parts) != len(SPLITS):
        return False
    return all(isinstance(part, int | float) and part > 0 for part in parts) and math.isclose(
        sum(parts), 1, abs_tol=1e-6
    )


def by_fractions(names: Sequence[str], fractions: Sequence[float], seed: int) -> dict[str, list[str]]:
    """The names of each split: all of them, shuffled by a seed that is the same in every run, cut by the fractions."""
    mixed = [names[number] for number in np.random.default_rng(seed).permutation(len(names))]
    ends = [round(sum(fractions[:part]) * len(names)) for part in range(len(SPLITS) + 1)]
    return {split: mixed[first:end] for split, (first, end) in zip(SPLITS, pairwise(ends), strict=True)}


def check_seeds(seeds: Seeds) -> None:
    """Raises ValueError for a negative seed."""
    whole_number("seed", seeds.seed, at_least=0)
    whole_number("eval_seed", seeds.eval_seed, at_least=0)


def task_generator(seeds: Seeds) -> TaskGenerator:
    """(split, index) → the generator that draws this task.

    Raises:
        ValueError: a negative seed.
    """
    check_seeds(seeds)

    def generator(split: str, index: int) -> np.random.Generator:
        if split not in SPLITS:
            raise ValueError(f"split={split!r}: must be one of {', '.join(SPLITS)}")
        return np.random.default_rng((seeds.of(split), SPLITS[split], index))

    return generator


def check_shots(shots: Shots, *, by_rule: bool = False) -> None:
    """Raises ValueError for what is neither a number of samples nor a range, nor, if `by_rule`, the rule of
    Meta-Dataset."""
    if by_rule and shots == META_DATASET:
        return
    if isinstance(shots, int):
        whole_number("shots", shots, at_least=1)
    elif not isinstance(shots, list | tuple) or [type(part) for part in shots] != [int, int]:
        allowed, advice = "must be a whole number, or the fewest and the most", "type KEY=5 or KEY=[1,5]"
        if by_rule:
            allowed, advice = f"{allowed}, or {META_DATASET}", f"{advice} or KEY={META_DATASET}"
        raise Invalid("shots", shots, allowed, advice)
    elif not 1 <= shots[0] <= shots[1]:
        raise Invalid("shots", list(shots), "must begin with the fewest, at least 1", "type KEY=[1,5], for example")


def most_shots(shots: Shots) -> int:
    """The most support samples; by the rule of Meta-Dataset those that each class must have."""
    return shots if isinstance(shots, int) else 1 if isinstance(shots, str) else shots[1]


def shots_of_task(shots: Shots, seeds: Seeds, split: str, index: int) -> int:
    """The number of a task's support samples."""
    if isinstance(shots, int | str):
        return most_shots(shots)
    rng = np.random.default_rng((seeds.of(split), SPLITS[split], index, _SHOTS))
    return int(rng.integers(shots[0], shots[1] + 1))


def shapes_of(episode: EpisodeSpec) -> dict[str, EpisodeShape]:
    """The shape of each split's episodes.

    Raises:
        ValueError: a number out of range.
    """
    ways, shots, queries, train_ways, train_queries, augment = episode
    check_augmentations(augment)
    whole_number("ways", ways, at_least=2)
    check_shots(shots, by_rule=True)
    whole_number("queries", queries, at_least=1)
    if train_ways is not None:
        whole_number("train_ways", train_ways, at_least=2)
    if train_queries is not None:
        whole_number("train_queries", train_queries, at_least=1)
    evaluation = EpisodeShape(ways, shots, queries)
    training = EpisodeShape(train_ways or ways, shots, train_queries or queries)
    return {split: training if split == "train" else evaluation for split in SPLITS}


def check_filled(shapes: Mapping[str, EpisodeShape], counts: Mapping[str, tuple[int, int]], group: str = "") -> None:
    """Checks that every split fills its episodes; `counts` are (classes, pictures of the smallest class) of each split.

    A message puts `group` before the names of keys.

    Raises:
        ValueError: too few classes, or too few pictures of a class.
    """
    evaluation = shapes["test"]
    for split, shape in shapes.items():
        (ways, _, queries), shots = shape, most_shots(shape.shots)
        queries = 1 if shape.shots == META_DATASET else queries  # a small class makes them fewer
        classes, pictures = counts[split]
        enough_classes(f"{group}train_ways" if ways != evaluation.ways else f"{group}ways", ways, split, classes)
        name = f"{group}train_queries" if queries != evaluation.queries else f"{group}queries"
        if shots + queries > pictures:
            fewer = (
                f"KEY={pictures - shots}" if pictures > shots else f"GROUP.{group}shots={max(1, pictures - queries)}"
            )
            raise Invalid(
                name,
                queries,
                f"with {group}shots={shots} an episode needs {shots + queries} pictures of a class, and the split "
                f"'{split}' has classes of {pictures}",
                f"type {fewer} or fewer",
            )


def check_read(shapes: Mapping[str, EpisodeShape], splits: Mapping[str, Classes], where: str) -> None:
    """As `check_filled`, for classes that have been read from `where`.

    Raises:
        DataError: too few classes, or too few pictures of a class.
    """
    try:
        check_filled(shapes, {name: (len(part.identities), part.fewest) for name, part in splits.items()}, "dataset.")
    except ValueError as error:
        raise DataError(f"{error}. This is {where}") from error


def chosen_classes(rng: np.random.Generator, classes: int, ways: int) -> list[int]:
    """The classes of a task, of so many; what its generator draws first."""
    chosen: list[int] = rng.choice(classes, ways, replace=False).tolist()
    return chosen


def draw_images(
    rng: np.random.Generator,
    class_images: Callable[[int], Images],
    classes: int,
    *,
    ways: int,
    per_class: int,
    rotations: bool,
    shots: int = 0,
    support: Sequence[int] = (),
) -> Images:
    """Draws `ways` different classes and `per_class` different pictures of each: [ways, per_class, h, w] or
    [ways, per_class, h, w, 3].

    `class_images(label)` gives the pictures of a class; there are `classes` of them. With `rotations`, all pictures of
    a drawn class are turned by the same random multiple of 90°. With `support`, as in `Classes`, the first `shots` are
    of the pictures for support sets.
    """
    chosen = chosen_classes(rng, classes, ways)
    turns = rng.integers(0, 4, ways) if rotations else np.zeros(ways, np.int64)
    drawn = []
    for label, turn in zip(chosen, turns.tolist(), strict=True):
        pictures = class_images(label)
        picked = rng.permutation(len(pictures))
        if support:
            of_support = picked < support[label]
            picked = np.concatenate([picked[of_support][:shots], picked[~of_support]])
        picked = picked[:per_class]
        drawn.append(turned(pictures[picked], turn))
    return np.stack(drawn)


def turned(pictures: Images, quarters: int) -> Images:
    """`pictures` [n, h, w, …] turned by `quarters` of 90°: the same view as `np.rot90` over axes (1, 2), ten times as
    fast."""
    if quarters == 0:
        return pictures
    if quarters == 1:
        return pictures[:, :, ::-1].swapaxes(1, 2)
    if quarters == 2:
        return pictures[:, ::-1, ::-1]
    return pictures.swapaxes(1, 2)[:, :, ::-1]


def sizes_of_task(rng: np.random.Generator, pictures: NDArray[np.int64], queries: int) -> tuple[NDArray[np.int64], int]:
    """The shots of each class of a task, and the queries of all, by the rule of Meta-Dataset (Triantafillou et al.
    2020, arXiv 1903.03096, appendix): larger classes have more shots.

    Args:
        pictures: how many each class has, [ways].
        queries: the most of a class; half of the smallest class at most.
    """
    queries = min(queries, int(pictures.min()) // 2)
    room, ways = pictures - queries, len(pictures)
    share = 1 - rng.random()
    total = min(MOST_SHOTS, int(np.ceil(share * np.minimum(MOST_OF_CLASS, room)).sum()))
    weights = np.exp(rng.uniform(math.log(0.5), math.log(2), ways)) * pictures
    shots = np.floor(weights / weights.sum() * (total - ways)).astype(np.int64) + 1
    return np.minimum(shots, room), queries


def image_episode(drawn: Images, *, shots: int) -> Episode:
    """`drawn` uint8 [t, ways, shots + queries, h, w] or […, h, w, 3] → an episode of images [t, n, c, h, w] in [0, 1].

    A class's label is its index among the ways.
    """
    tasks, ways = drawn.shape[:2]
    pictures = torch.from_numpy(drawn).to(torch.float32).div_(255)
    pictures = pictures.unsqueeze(3) if drawn.ndim == 5 else pictures.permute(0, 1, 2, 5, 3, 4)
    labels = torch.arange(ways).view(1, ways, 1)

    def batch(part: Tensor) -> Batch:
        y = labels.expand(tasks, ways, part.shape[2]).flatten(1)
        return Batch(part.flatten(1, 2).contiguous(), y.contiguous())

    return Episode(batch(pictures[:, :, :shots]), batch(pictures[:, :, shots:]))


class _PictureTasks:
    def __init__(
        self, load: Callable[[], Mapping[str, Classes]], shapes: Mapping[str, EpisodeShape], rotations: bool,
        augment: Sequence[str], seeds: Seeds, samples: Samples | None,
    ) -> None:  # fmt: skip
        self._augment = augment
        if samples is not None:
            self.samples = samples
        self._load, self._shapes, self._rotations, self._seeds = load, shapes, rotations, seeds
        self._generator = task_generator(seeds)
        self._splits: Mapping[str, Classes] | None = None
        self._counted: dict[str, NDArray[np.int64]] = {}

    def classes(self, split: str) -> int:
        return self._shapes[split].ways

    def unit(self, split: str) -> Unit:
        return "tasks"

    def size(self, split: str) -> None:
        return None

    def identities(self, split: str) -> Sequence[str]:
        return self.classes_of(split).identities

    def class_names(self, split: str, index: int) -> Sequence[str]:
        classes, ways = self.classes_of(split), self._shapes[split].ways
        chosen = chosen_classes(self._generator(split, index), len(classes.identities), ways)
        return [classes.names[label] for label in chosen] if classes.names else ()

    def drawers(self, split: str) -> Mapping[str, str]:
        return self.classes_of(split).drawers

    def classes_of(self, split: str) -> Classes:
        if self._splits is None:
            self._splits = self._load()
        return self._splits[split]

    def shots_of(self, split: str) -> int:
        return most_shots(self._shapes[split].shots)

    def _sizes(self, split: str) -> NDArray[np.int64]:
        """How many pictures each class has."""
        if split not in self._counted:
            classes = self.classes_of(split)
            self._counted[split] = np.array([len(classes.pictures(label)) for label in range(len(classes.identities))])
        return self._counted[split]

    def bytes_of(self, split: str) -> int:
        return int(self._sizes(split).sum()) * int(self.classes_of(split).pictures(0)[0].nbytes)

    def pictures_of(self, split: str) -> Tensor:
        classes = self.classes_of(split)
        return torch.from_numpy(np.concatenate([classes.pictures(label) for label in range(len(classes.identities))]))

    def numbers(self, split: str, indices: Tensor) -> Tensor:
        shape = self._shapes[split]
        draws = TaskDraws(
            self._seeds.of(split), SPLITS[split], self._sizes(split), shape.ways, shape.most, self._rotations
        )
        return torch.from_numpy(draw_many(draws, indices.numpy()))

    def episodes(self, split: str, indices: Tensor) -> Episode:
        shots = self.shots_of(split)
        drawn = [self._drawn(split, index, shots) for index in indices.tolist()]
        if split != "train" or not self._augment:
            return image_episode(np.stack(drawn), shots=shots)
        pairs = zip(indices.tolist(), drawn, strict=True)
        tasks = [self._augmented(split, index, image_episode(one[None], shots=shots)) for index, one in pairs]
        return Episode(*(Batch(*map(torch.cat, zip(*part, strict=True))) for part in zip(*tasks, strict=True)))

    def _augmented(self, split: str, index: int, task: Episode) -> Episode:
        if split != "train" or not self._augment:
            return task
        return augmented(task, self._augment, np.random.default_rng((self._seeds.seed, SPLITS[split], index, _AUGMENT)))

    def _drawn(self, split: str, index: int, shots: int) -> Images:
        shape, classes = self._shapes[split], self.classes_of(split)
        return draw_images(
            self._generator(split, index), classes.pictures, len(classes.identities), ways=shape.ways,
            per_class=shots + shape.queries, rotations=self._rotations, shots=shots, support=classes.support,
        )  # fmt: skip


class _VaryingPictureTasks(_PictureTasks):
    """Tasks with different numbers of shots."""

    def episodes(self, split: str, indices: Tensor) -> Any:
        tasks = [self._task(split, index) for index in indices.tolist()]
        return tasks[0] if len(tasks) == 1 else tasks

    def _task(self, split: str, index: int) -> Episode:
        shape = self._shapes[split]
        shots = shots_of_task(shape.shots, self._seeds, split, index)
        return self._augmented(split, index, image_episode(self._drawn(split, index, shots)[None], shots=shots))


class _MetaDatasetTasks(_VaryingPictureTasks):
    """Tasks with different numbers of classes, shots and queries, see `sizes_of_task`."""

    def _begun(self, split: str, index: int) -> tuple[np.random.Generator, list[int]]:
        """The generator of a task, which has drawn its classes."""
        rng, most = self._generator(split, index), self._shapes[split].ways
        ways = int(rng.integers(min(FEWEST_WAYS, most), most + 1))
        return rng, chosen_classes(rng, len(self.classes_of(split).identities), ways)

    def class_names(self, split: str, index: int) -> Sequence[str]:
        names = self.classes_of(split).names
        return [names[label] for label in self._begun(split, index)[1]] if names else ()

    def _task(self, split: str, index: int) -> Episode:
        rng, chosen = self._begun(split, index)
        shots, queries = sizes_of_task(rng, self._sizes(split)[chosen], self._shapes[split].queries)
        turns = rng.integers(0, 4, len(chosen)) if self._rotations else np.zeros(len(chosen), np.int64)
        parts: tuple[list[Batch], list[Batch]] = [], []
        for label, (name, turn, count) in enumerate(zip(chosen, turns.tolist(), shots.tolist(), strict=True)):
            pictures = self.classes_of(split).pictures(name)
            drawn = turned(pictures[rng.permutation(len(pictures))[: count + queries]], turn)
            for part, batch in zip(parts, image_episode(np.stack([drawn])[None], shots=count), strict=True):
                part.append(Batch(batch.x, batch.y + label))
        whole = (Batch(*(torch.cat(values, dim=1) for values in zip(*part, strict=True))) for part in parts)
        return self._augmented(split, index, Episode(*whole))


def picture_tasks(
    load: Callable[[], Mapping[str, Classes]],
    shapes: Mapping[str, EpisodeShape],
    *,
    rotations: bool,
    augment: Sequence[str] = (),
    seeds: Seeds,
    samples: Samples | None = None,
) -> TaskSource:
    """A source of few-shot classification tasks.

    Args:
        load: gives the classes of the splits `train`, `val` and `test`; called once, for the first task.
        shapes: the shape of each split's episodes.
        rotations: turn each drawn class by a random multiple of 90°, in every split.
        augment: the changes of each training picture, names of `AUGMENTATIONS`.
        samples: that of `metalearn.types.GivesSamples`, if the source is one.

    Raises:
        ValueError: a negative seed, or `rotations` is not true or false.
    """
    true_or_false("rotations", rotations)
    shots = shapes["test"].shots
    kind = _PictureTasks if isinstance(shots, int) else _VaryingPictureTasks
    return (_MetaDatasetTasks if shots == META_DATASET else kind)(load, shapes, rotations, augment, seeds, samples)
