"""The shape of an episode, and how the tasks of a picture source are drawn: by numpy, many at once in C, and changed
(augmented).

Nothing here keeps state. Task number i of a split is drawn from a generator seeded by (seed, split, i). So any worker
can make any task, and a resumed run draws the same tasks as a run that was never stopped.

A class has one identity, the same in every dataset, split and run.
"""

import csv
import ctypes
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from metalearn.errors import DataError, Invalid, enough_classes, not_negative, one_of, whole_number
from metalearn.storage.cache import library_of
from metalearn.types import Batch, Episode, NamesClasses, NamesDrawers, TaskSource, TellsClasses, Unit

SPLITS = {"train": 0, "val": 1, "test": 2}

Images = NDArray[np.uint8]


class Seeds(NamedTuple):
    """Training is drawn from `seed`; validation and test only from `eval_seed`, so they are the same in every run."""

    seed: int
    eval_seed: int

    def of(self, split: str) -> int:
        """The seed of a split."""
        return self.seed if split == "train" else self.eval_seed

    def generator(self, split: str, index: int, *purpose: int) -> np.random.Generator:
        """The generator of a task, or for another `purpose`, which keeps its numbers apart from the task's."""
        return np.random.default_rng((self.of(split), SPLITS[split], index, *purpose))


# A number of support samples; or a range: the fewest and the most, of which each task draws one; or the rule of
# `sizes_of_task`.
Shots = int | Sequence[int] | Literal["meta_dataset"]

META_DATASET = "meta_dataset"
# Of that rule: the fewest classes of a task, how many pictures of a class count, the most support pictures.
FEWEST_WAYS, MOST_OF_CLASS, MOST_SHOTS = 5, 100, 500

NO_LABELS = "none"
_SHOTS, _AUGMENT = 3, 4  # purposes of generators: a task's number of shots, and the changes of its pictures


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
    number as in validation and test. `augment` names the changes of its pictures, see `AUGMENTATIONS`. `labels`:
    `none` makes those of training and validation by `each_picture`.
    """

    ways: int
    shots: Shots
    queries: int
    train_ways: int | None = None
    train_queries: int | None = None
    augment: Sequence[str] = ()
    labels: str = "all"


class Classes(NamedTuple):
    """The classes of a split, by their `identities`. The smallest class has `fewest` pictures; `pictures(label)` gives
    those of class number `label`, uint8 [n, h, w] or [n, h, w, 3].
    `drawn`: a program draws them, always alike. `names` is what people call them, if that is known. If `support` is
    not empty, the first `support[label]` pictures of a class are for support sets only, and the others for queries.
    `drawers` are those of `metalearn.types.NamesDrawers`."""

    identities: Sequence[str]
    fewest: int
    pictures: Callable[[int], Images]
    drawn: bool = False
    names: Sequence[str] = ()
    support: Sequence[int] = ()
    drawers: Mapping[str, str] = {}

    def of_each(self) -> Iterator[Images]:
        """The pictures of each class."""
        return map(self.pictures, range(len(self.identities)))


def each_picture(classes: Classes, copies: int) -> Classes:
    """Classes of tasks without labels: each picture is one, in as many `copies` as an episode needs, which augmentation
    makes different (UMTRA, Khodadadeh et al. 2019, arXiv 1811.11819). Two pictures of a task may show the same."""
    places = [(label, place) for label, of_class in enumerate(classes.of_each()) for place in range(len(of_class))]

    def pictures(number: int) -> Images:
        label, place = places[number]
        picture = classes.pictures(label)[place]
        return np.broadcast_to(picture, (copies, *picture.shape))

    # Their identities say which classes have been seen, and no task knows them.
    return Classes([classes.identities[label] for label, _ in places], copies, pictures, drawers=classes.drawers)


@runtime_checkable
class HoldsClasses(Protocol):
    """A task source whose classes can be looked at."""

    def classes_of(self, split: str) -> Classes:
        """The classes of a split, with all their pictures."""
        ...


def are_fractions(parts: object) -> bool:
    """Whether these are three numbers above 0 with the sum 1, of training, validation and test."""
    return (
        isinstance(parts, list | tuple)
        and len(parts) == len(SPLITS)
        and all(isinstance(part, int | float) and part > 0 for part in parts)
        and math.isclose(sum(parts), 1, abs_tol=1e-6)
    )


def by_fractions(names: Sequence[str], fractions: Sequence[float], seed: int) -> dict[str, list[str]]:
    """The names of each split: all of them, shuffled by a seed that is the same in every run, cut by the fractions."""
    mixed = [names[number] for number in np.random.default_rng(seed).permutation(len(names))]
    # Sums are rounded, not parts: so each name is in one split.
    ends = [round(sum(fractions[:part]) * len(names)) for part in range(len(SPLITS) + 1)]
    return {split: mixed[first:end] for split, (first, end) in zip(SPLITS, pairwise(ends), strict=True)}


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
    return int(seeds.generator(split, index, _SHOTS).integers(shots[0], shots[1] + 1))


def shapes_of(episode: EpisodeSpec) -> dict[str, EpisodeShape]:
    """The shape of each split's episodes. Raises ValueError for a number out of range."""
    ways, shots, queries, train_ways, train_queries, augment, labels = episode
    is_list = isinstance(augment, list | tuple)
    if not is_list or any(name not in AUGMENTATIONS or augment.count(name) > 1 for name in augment):
        allowed = f"must be a list of different names out of {', '.join(AUGMENTATIONS)}"
        raise Invalid("augment", augment, allowed, "type KEY=[shift,scale], for example")
    one_of("labels", labels, ("all", NO_LABELS))
    if labels == NO_LABELS and not augment:
        allowed = "makes a class of changed copies of a picture, and augment=[] changes none"
        raise Invalid("labels", labels, allowed, "type GROUP.augment=[shift,scale,turn], for example")
    if labels == NO_LABELS and shots == META_DATASET:
        raise Invalid("shots", shots, "with labels=none all classes are of one size", "type KEY=1, for example")
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
    """Raises ValueError for too few classes to fill a split's episodes, or too few pictures of a class. `counts` are
    (classes, pictures of the smallest class) of each split; a message puts `group` before the names of keys."""
    evaluation = shapes["test"]
    for split, shape in shapes.items():
        (ways, _, queries), shots = shape, most_shots(shape.shots)
        queries = 1 if shape.shots == META_DATASET else queries  # a small class makes them fewer
        classes, pictures = counts[split]
        enough_classes(f"{group}train_ways" if ways != evaluation.ways else f"{group}ways", ways, split, classes)
        name = f"{group}train_queries" if queries != evaluation.queries else f"{group}queries"
        if shots + queries > pictures:
            less = f"KEY={pictures - shots}", f"GROUP.{group}shots={max(1, pictures - queries)}"
            fewer = less[pictures <= shots]
            allowed = (
                f"with {group}shots={shots} an episode needs {shots + queries} pictures of a class, and the split "
                f"'{split}' has classes of {pictures}"
            )
            raise Invalid(name, queries, allowed, f"type {fewer} or fewer")


def check_read(shapes: Mapping[str, EpisodeShape], counts: Mapping[str, tuple[int, int]], where: str) -> None:
    """As `check_filled`, for classes that have been read from `where`: raises DataError."""
    try:
        check_filled(shapes, counts, "dataset.")
    except ValueError as error:
        raise DataError(f"{error}. This is {where}") from error


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


def sizes_of_task(rng: np.random.Generator, pictures: NDArray[np.int64], queries: int) -> tuple[list[int], int]:
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
    return np.minimum(shots, room).tolist(), queries


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
        # Contiguous: kernels get the same layout for any number of tasks, and so round alike.
        return Batch(part.flatten(1, 2).contiguous(), y.contiguous())

    return Episode(batch(pictures[:, :, :shots]), batch(pictures[:, :, shots:]))


def joined(tasks: Sequence[Episode], *, alike: bool = True) -> Any:
    """Tasks as one episode, if their shapes are `alike`; else as a list, or an only one as it is."""
    if alike:
        return pytree.tree_map(lambda *values: torch.cat(values), *tasks)
    return tasks[0] if len(tasks) == 1 else tasks


class SeededTasks:
    """What sources share whose tasks are drawn from seeds: any number of them, if they do not say another `size`.
    Raises ValueError for a negative seed."""

    def __init__(self, seeds: Seeds) -> None:
        not_negative(**seeds._asdict())
        self._seeds = seeds

    def unit(self, split: str) -> Unit:
        return "tasks"

    def size(self, split: str) -> int | None:
        return None


class FixedTask(NamedTuple):
    """A task: its classes, by the labels of the split, and the numbers of the pictures of each of them: of the support
    set, then of the queries."""

    labels: Sequence[int]
    places: Sequence[int]


class Grouped(NamedTuple):
    """By split: the labels of each group that tasks are drawn within, and tasks that are not drawn, but fixed.

    The classes of such a task show the pictures of the same numbers: those of one drawer are the support set, for
    example, and those of another the queries. A class is turned as its whole group is."""

    groups: Mapping[str, Sequence[Sequence[int]]]
    fixed: Mapping[str, Sequence[FixedTask]]


UNGROUPED = Grouped({}, {})


class TaskPlan(NamedTuple):
    """What a task shows: its classes, by the labels of the split; all pictures of each; the numbers of those that are
    drawn; how many of these, the first ones, are the support set; and by how many quarters each class is turned."""

    labels: Sequence[int]
    pictures: Sequence[Images]
    places: Sequence[NDArray[np.int64]]
    shots: Sequence[int]
    turns: Sequence[int]

    def drawn(self) -> list[Images]:
        """The pictures of each class that are drawn."""
        each = zip(self.pictures, self.places, self.turns, strict=True)
        return [turned(pictures[places], turns) for pictures, places, turns in each]


class PictureTasks(SeededTasks):
    """A source of few-shot classification tasks; see `metalearn.tasks.common.samples.few_shot`. `augment` names the
    changes of each split's pictures, and `samples` is that of `metalearn.types.GivesSamples`."""

    def __init__(
        self, load: Callable[[], Mapping[str, Classes]], shapes: Mapping[str, EpisodeShape], rotations: bool,
        augment: Mapping[str, Sequence[str]], seeds: Seeds, samples: Callable[[Unit], tuple[TaskSource, str]],
        grouped: Grouped,
    ) -> None:  # fmt: skip
        super().__init__(seeds)
        self.samples = samples
        self._load, self._shapes, self._rotations, self._augment = load, shapes, rotations, augment
        self._grouped, self.ways_differ = grouped, shapes["test"].shots == META_DATASET
        # How many pictures each class has.
        self._sizes = functools.cache(lambda split: np.array(list(map(len, self._splits[split].of_each()))))

    @functools.cached_property
    def _splits(self) -> Mapping[str, Classes]:
        """The classes, which are loaded for the first task."""
        return self._load()

    def size(self, split: str) -> int | None:
        return len(self._grouped.fixed[split]) if split in self._grouped.fixed else None

    def classes(self, split: str) -> int:
        return self._shapes[split].ways

    def classes_of(self, split: str) -> Classes:
        return self._splits[split]

    def identities(self, split: str) -> Sequence[str]:
        return self._splits[split].identities

    def class_names(self, split: str, index: int) -> Sequence[str]:
        names = self._splits[split].names
        return [names[label] for label in self._plan(split, index).labels] if names else ()

    def drawers(self, split: str) -> Mapping[str, str]:
        return self._splits[split].drawers

    # As `metalearn.types.DrawsByNumber`

    def shots_of(self, split: str) -> int | None:
        shots = self._shapes[split].shots
        return shots if isinstance(shots, int) else None

    def bytes_of(self, split: str) -> int:
        return int(self._sizes(split).sum()) * int(self._splits[split].pictures(0)[0].nbytes)

    def pictures_of(self, split: str) -> Tensor:
        return torch.from_numpy(np.concatenate(list(self._splits[split].of_each())))

    def numbers(self, split: str, indices: Tensor) -> Tensor:
        shape, sizes = self._shapes[split], self._sizes(split)
        draws = TaskDraws(self._seeds.of(split), SPLITS[split], sizes, shape.ways, shape.most, self._rotations)
        if split not in self._grouped.groups and split not in self._grouped.fixed:
            return torch.from_numpy(draw_many(draws, indices.numpy()))
        rows = []
        for index in indices.tolist():
            plan = self._plan(split, index)
            places = draws.firsts[list(plan.labels), None] + np.stack(plan.places)
            rows.append(np.column_stack([plan.turns, places]))
        return torch.from_numpy(np.stack(rows))

    def episodes(self, split: str, indices: Tensor) -> Any:
        plans, shots = (self._plan(split, index) for index in indices.tolist()), self.shots_of(split)
        augment = self._augment.get(split, ())
        if shots is not None and not augment:
            return image_episode(np.stack([plan.drawn() for plan in plans]), shots=shots)
        tasks = list(map(_episode_of, plans))
        if augment:
            for place, (index, task) in enumerate(zip(indices.tolist(), tasks, strict=True)):
                rng = self._seeds.generator(split, index, _AUGMENT)
                changed = (augmented_pictures(batch.x[0], augment, rng).unsqueeze(0) for batch in task)
                tasks[place] = Episode(*(Batch(x, batch.y) for x, batch in zip(changed, task, strict=True)))
        return joined(tasks, alike=shots is not None)

    def _plan(self, split: str, index: int) -> TaskPlan:
        """What a task shows; its classes are what its generator draws first."""
        classes, shape, grouped = self._splits[split], self._shapes[split], self._grouped
        rng, (ways, rule, queries) = self._seeds.generator(split, index), shape
        shots = shots_of_task(rule, self._seeds, split, index)
        if split in grouped.fixed or split in grouped.groups:
            turn = 0
            if split in grouped.fixed:
                task = grouped.fixed[split][index]
            else:
                groups = [group for group in grouped.groups[split] if len(group) >= ways]
                sizes = np.array(list(map(len, groups)))
                group = groups[rng.choice(len(groups), p=sizes / sizes.sum())]
                labels = rng.choice(group, ways, replace=False).tolist()
                task = FixedTask(labels, rng.permutation(classes.fewest)[: shots + queries].tolist())
                turn = int(rng.integers(4)) if self._rotations else 0
            pictures = [classes.pictures(label) for label in task.labels]
            ways = len(task.labels)
            return TaskPlan(task.labels, pictures, [np.array(task.places)] * ways, [shots] * ways, [turn] * ways)
        if rule == META_DATASET:
            ways = int(rng.integers(min(FEWEST_WAYS, ways), ways + 1))
        labels = rng.choice(len(classes.identities), ways, replace=False).tolist()
        pictures, counts = [classes.pictures(label) for label in labels], [shots] * ways
        if rule == META_DATASET:
            counts, queries = sizes_of_task(rng, np.array(list(map(len, pictures))), queries)
        turns = rng.integers(0, 4, ways) if self._rotations else np.zeros(ways, np.int64)
        places = []
        for label, of_class, count in zip(labels, pictures, counts, strict=True):
            order = rng.permutation(len(of_class))
            if classes.support:
                is_support = order < classes.support[label]
                order = np.concatenate([order[is_support][:count], order[~is_support]])
            places.append(order[: count + queries])
        return TaskPlan(labels, pictures, places, counts, turns.tolist())


def _episode_of(plan: TaskPlan) -> Episode:
    """A task, whose classes may have different numbers of shots."""
    if len(set(plan.shots)) == 1:
        return image_episode(np.stack(plan.drawn())[None], shots=plan.shots[0])
    each = []
    for way, (drawn, shots) in enumerate(zip(plan.drawn(), plan.shots, strict=True)):
        support, query = image_episode(np.stack([drawn])[None], shots=shots)
        each.append(Episode(Batch(support.x, support.y + way), Batch(query.x, query.y + way)))
    whole: Episode = pytree.tree_map(lambda *values: torch.cat(values, dim=1), *each)
    return whole


# The numbers of many tasks at once, in C: numpy takes 90 µs for a task

SOURCE = Path(__file__).with_name("draws.c")
FLOYD = 10_000  # the most classes of which numpy chooses by Floyd's algorithm, as draws.c does

Numbers = NDArray[np.int64]


class TaskDraws(NamedTuple):
    """What tasks are drawn of: the seed, the number of the split, and the number of pictures of each class; and `ways`
    classes of a task, `per_class` pictures of each, and whether classes are turned."""

    root: int
    split: int
    sizes: Numbers
    ways: int
    per_class: int
    rotations: bool

    @property
    def firsts(self) -> Numbers:
        """The number of the first picture of each class."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes)[:-1]])


def draw_one(draws: TaskDraws, index: int) -> Numbers:
    """A task by numpy: [ways, 1 + per_class], of each class the quarter turns, then the numbers of its pictures."""
    rng = np.random.default_rng((draws.root, draws.split, index))
    labels = rng.choice(len(draws.sizes), draws.ways, replace=False)
    turns = rng.integers(0, 4, draws.ways) if draws.rotations else np.zeros(draws.ways, np.int64)
    firsts = draws.firsts
    pictures = [firsts[label] + rng.permutation(draws.sizes[label])[: draws.per_class] for label in labels]
    return np.column_stack([turns, np.stack(pictures)])


def draw_many(draws: TaskDraws, indices: Numbers) -> Numbers:
    """The tasks with these numbers, [t, ways, 1 + per_class], as `draw_one` draws each."""
    by_c = _drawn_by_c()
    # draws.c has numpy's way for few classes alone, and takes seeds of 64 bits, where numpy takes any.
    if by_c is None or len(draws.sizes) > FLOYD or draws.root >= 2**64:
        return np.stack([draw_one(draws, int(index)) for index in indices])
    return by_c(draws, indices)


@functools.cache
def _drawn_by_c() -> Callable[[TaskDraws, Numbers], Numbers] | None:
    """`draw_many` by draws.c; None if it cannot be compiled, or draws otherwise than this numpy, whose streams may
    change."""
    library = library_of("the drawing of tasks", "draws", [SOURCE])
    if library is None:
        return None
    number, unsigned, address = ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
    library.draw_tasks.argtypes = [
        number, address, unsigned, unsigned, number, number, number, number, address, address, number, address,
    ]  # fmt: skip
    library.draw_tasks.restype = number

    def drawn(draws: TaskDraws, indices: Numbers) -> Numbers:
        indices, sizes, firsts = (np.ascontiguousarray(one, np.int64) for one in (indices, draws.sizes, draws.firsts))
        result = np.empty((len(indices), draws.ways, 1 + draws.per_class), np.int64)
        failed = library.draw_tasks(
            len(indices), indices.ctypes.data, draws.root, draws.split, len(sizes), draws.ways, draws.per_class,
            draws.rotations, sizes.ctypes.data, firsts.ctypes.data, int(sizes.max()), result.ctypes.data,
        )  # fmt: skip
        if failed:
            raise MemoryError("there is no memory to draw tasks")
        return result

    indices = np.array([0, 1, 2, 59_999, 2**33])
    for draws in (
        TaskDraws(0, 0, np.full(1100, 20), 5, 2, True), TaskDraws(2**63 + 7, 2, np.arange(3, 43), 20, 3, False)
    ):  # fmt: skip
        by_numpy = np.stack([draw_one(draws, int(index)) for index in indices])
        if not np.array_equal(drawn(draws, indices), by_numpy):
            return None
    return drawn


# Changes of training pictures that leave their class

AUGMENTATIONS = ("shift", "scale", "turn", "mirror", "shear", "warp", "light", "colour")

# The farthest that a picture goes, as a part of its side; the most it is enlarged or reduced; the widest angle.
SHIFT, SCALE, TURN = 0.125, 1.25, math.radians(15)
# The most that a row moves sideways for each row below (0.3 in Koch et al. 2015); the farthest that a point of an even
# grid moves by itself, as a part of the side, and the grid's points in each direction (Simard et al. 2003).
SHEAR, WARP, WARP_POINTS = 0.3, 0.05, 5
# How much brightness and contrast, and saturation, differ from 1 at most; and the widest angle of the hue.
LIGHT, COLOUR, HUE = 0.4, 0.5, math.radians(36)
_NUMBERS = 10  # random numbers of a picture. All are drawn, whatever is used: another choice changes nothing else
_LUMA = (0.299, 0.587, 0.114)  # of red, green and blue, by ITU-R BT.601


def augmented_pictures(x: Tensor, names: Sequence[str], generator: np.random.Generator) -> Tensor:
    """Pictures [n, c, h, w] in [0, 1], each changed in the ways that `names` says. Raises DataError if `colour` is to
    change grey pictures."""
    if "colour" in names and x.shape[1] != 3:
        raise DataError("dataset.augment: these pictures are grey, and colour changes nothing; leave colour out")
    drawn = torch.from_numpy(generator.random((len(x), _NUMBERS), np.float32)).T.reshape(_NUMBERS, -1, 1, 1)
    even = drawn * 2 - 1  # from -1 to 1
    if {"shift", "scale", "turn", "mirror", "shear", "warp"}.intersection(names):
        # Drawn last, so that what `warp` needs changes nothing else.
        points = generator.random((len(x), 2, WARP_POINTS, WARP_POINTS), np.float32) if "warp" in names else None
        x = _moved(x, names, even, points)
    if "light" in names:
        x = x * (1 + LIGHT * even[5].unsqueeze(1))
        mean = x.mean(dim=(1, 2, 3), keepdim=True)
        x = mean + (x - mean) * (1 + LIGHT * even[6].unsqueeze(1))
    if "colour" in names:
        x = _coloured(x, 1 + COLOUR * even[7], HUE * even[8])
    return x.clamp(0, 1)


def _moved(x: Tensor, names: Sequence[str], even: Tensor, points: NDArray[np.float32] | None) -> Tensor:
    """Pictures whose pixels come from elsewhere; beyond its edges, a picture goes on with their colours."""
    # Not by `affine_grid`: its matrix product may round otherwise for another number of pictures.
    none = torch.zeros_like(even[0])
    angle = TURN * even[0] if "turn" in names else none
    smaller = torch.exp(math.log(SCALE) * even[1]) if "scale" in names else none + 1
    left = torch.where(even[2] < 0, -1.0, 1.0) if "mirror" in names else none + 1
    right, down = (2 * SHIFT * even[3:5]).unbind() if "shift" in names else (none, none)  # of sides from -1 to 1
    h, w = x.shape[-2:]
    rows = ((torch.arange(h) * 2 + 1) / h - 1).view(1, h, 1)
    columns = ((torch.arange(w) * 2 + 1) / w - 1).view(1, 1, w)
    cosine, sine = torch.cos(angle) * smaller, torch.sin(angle) * smaller
    if "shear" in names:
        columns = columns + SHEAR * even[9] * rows
    places = torch.stack(
        ((columns * cosine - rows * sine) * left + right, columns * sine + rows * cosine + down), dim=-1
    )
    if points is not None:
        bent = F.interpolate(torch.from_numpy(points) * 2 - 1, (h, w), mode="bicubic", align_corners=True)
        places = places + 2 * WARP * bent.permute(0, 2, 3, 1)
    return F.grid_sample(x, places, padding_mode="border", align_corners=False)


def _coloured(x: Tensor, saturation: Tensor, hue: Tensor) -> Tensor:
    """Pictures in other colours: turned around the grey axis of the colour cube, then farther from it or nearer."""
    across = (1 - torch.cos(hue)) / 3
    along = torch.sin(hue) / math.sqrt(3)
    weights = (torch.cos(hue) + across, across - along, across + along)
    turned = [sum(weights[(other - colour) % 3] * x[:, other] for other in range(3)) for colour in range(3)]
    grey = sum(weight * channel for weight, channel in zip(_LUMA, turned, strict=True))
    return torch.stack([grey + saturation * (channel - grey) for channel in turned], dim=1)


def reading_tasks(documents: Tensor) -> Episode:
    """Documents [t, n + 1] as tasks without a support set: each symbol is asked for the next one."""
    x, y = documents[:, :-1].unsqueeze(2).float(), documents[:, 1:].contiguous()
    return Episode(Batch(x[:, :0], y[:, :0]), Batch(x, y))


_FIRST = 4  # the tasks of each split that a digest of the data covers

# Bytes of pictures that are read whole for a digest, in a second or less; of more, the first and the last of each
# class.
_WHOLE = 2**28


class Content(NamedTuple):
    """What a source shows: a digest of the first tasks of each split and of the pictures of all classes. It begins with
    the way in which it is made."""

    digest: str

    def is_known_otherwise(self, digest: object) -> bool:
        """Whether a digest that was made in the same way is another one."""
        way = self.digest.partition("-")[0]
        return isinstance(digest, str) and digest.startswith(f"{way}-") and digest != self.digest


@functools.cache
def csv_rows(path: Path) -> tuple[Mapping[str, str], ...]:
    """The rows of a list of ours. All callers share them."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def published_list(name: str) -> tuple[Mapping[str, str], ...]:
    """The rows of a list of classes, one of the files `*_classes.csv` and `*_characters.csv` beside the datasets."""
    return csv_rows(Path(__file__).parents[1] / name)


def identity(family: str, name: object) -> str:
    """The identity of a class, 16 hexadecimal digits: a digest of its name in a family of datasets, such as all splits
    of Omniglot."""
    return hashlib.sha256(f"{family}/{name}".encode(errors="surrogateescape")).hexdigest()[:16]


def content_of(source: TaskSource) -> Content:
    """The content of a source."""
    digest, of_pictures, read = hashlib.sha256(), hashlib.sha256(), 0
    for split in SPLITS:
        for number in range(min(_FIRST, source.size(split) or _FIRST)):  # one by one: a task may be large
            for values in pytree.tree_leaves(source.episodes(split, torch.tensor([number]))):
                digest.update(f"{tuple(values.shape)} {values.dtype}".encode())
                digest.update(values.detach().cpu().contiguous().numpy().data)
        if not isinstance(source, HoldsClasses) or (classes := source.classes_of(split)).drawn:
            continue
        for pictures in classes.of_each():
            read += pictures.nbytes
            for number in range(len(pictures)) if read <= _WHOLE else (0, len(pictures) - 1):
                of_pictures.update(hashlib.sha256(pictures[number].tobytes()).digest())
    digest.update(of_pictures.digest())
    if hasattr(source, "digest_of_all"):
        digest.update(source.digest_of_all())
    return Content(f"2-{digest.hexdigest()}")  # 2: the way in which it is made; raise it with any change above


def identities_of(source: TaskSource, split: str) -> frozenset[str] | None:
    """The identities of a split's classes; None if the source does not name them."""
    return (frozenset(source.identities(split)) or None) if isinstance(source, NamesClasses) else None


def drawers_of(source: TaskSource, split: str) -> Mapping[str, str]:
    """The drawers of a split, as `NamesDrawers` has them; empty if the source does not name them."""
    return source.drawers(split) if isinstance(source, NamesDrawers) else {}


def class_names_of(source: TaskSource, split: str, index: int) -> Sequence[str]:
    """What people call the classes of a task, by their labels; empty if the source does not tell."""
    return source.class_names(split, index) if isinstance(source, TellsClasses) else ()
