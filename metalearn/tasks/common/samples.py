"""Sources of plain samples, for learners that do not adapt; and of few-shot tasks that give their pictures as such.

Nothing here keeps state. Of n training samples, number i is the (i mod n)-th of the permutation that (seed, i div n)
draws. So any worker can make any micro-batch, and a resumed run draws the same samples as a run that was never stopped.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metalearn.errors import ConfigError, Invalid, enough_classes, true_or_false, whole_number
from metalearn.tasks.common.episodes import (
    NO_LABELS,
    SPLITS,
    UNGROUPED,
    Classes,
    EpisodeShape,
    EpisodeSpec,
    Grouped,
    Images,
    PictureTasks,
    SeededTasks,
    Seeds,
    augmented_pictures,
    class_names_of,
    drawers_of,
    each_picture,
    identities_of,
)
from metalearn.types import Batch, Episode, TaskSource, Unit, ways_differ

# The most training samples whose statistics normalise validation and test samples, where a source has any number.
KNOWN = 256
_ORDER, _KNOWN, _AUGMENT = 1, 2, 5  # purposes of generators; they differ from those of tasks


class Labelled(NamedTuple):
    """Pictures uint8 [n, h, w] or [n, h, w, 3] with their classes [n]."""

    pictures: Images
    classes: NDArray[np.int64]

    def take(self, numbers: list[int]) -> "Labelled":
        """The samples with these numbers."""
        return Labelled(self.pictures[numbers], self.classes[numbers])


class Chosen(NamedTuple):
    """Some pictures of each class, class after class: those with the numbers `places[label]`. `pictures(label)` gives a
    class, [m, h, w] or [m, h, w, 3]; only classes of the samples taken are read."""

    pictures: Callable[[int], Images]
    places: Sequence[NDArray[np.int64]]

    def take(self, numbers: list[int]) -> Labelled:
        """The samples with these numbers."""
        firsts = np.cumsum([0, *map(len, self.places)])
        labels = np.searchsorted(firsts, numbers, side="right") - 1
        pairs = zip(labels.tolist(), numbers, strict=True)
        # Picture by picture: of a mapped file, only the pages of these are read.
        drawn = [self.pictures(label)[self.places[label][number - firsts[label]]] for label, number in pairs]
        return Labelled(np.stack(drawn), labels)


Split = Labelled | Chosen


class SampleSource(SeededTasks):
    """A source of plain samples. Raises ValueError for a negative seed, or `known` that is not between 1 and the number
    of training samples.

    Args:
        load: reads the splits `train`, `val` and `test`, which have these `sizes`; called once, for the first sample.
        identities: those of the classes, which all splits share; `names` is what people call them, if that is known.
        known: how many training samples are the support set in validation and test, for normalisation statistics.
        seeds: the order of the samples is drawn from them; the known samples are drawn from `eval_seed`.
        augment: the changes of each training sample, names of `AUGMENTATIONS`.
    """

    def __init__(
        self, load: Callable[[], Mapping[str, Split]], sizes: Mapping[str, int], identities: Sequence[str], *,
        known: int, seeds: Seeds, names: Sequence[str] = (), augment: Sequence[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(seeds)
        whole_number("known", known, at_least=1, at_most=sizes["train"])
        self._load, self._sizes, self._identities, self._names = load, sizes, identities, names
        self._support_size, self._augment = known, augment

        @functools.lru_cache(4)  # of training the last epoch's too, in which a chunk may begin
        def order(split: str, epoch: int) -> NDArray[np.int64]:
            return seeds.generator(split, epoch, _ORDER).permutation(sizes[split])

        self._order = order

    @functools.cached_property
    def _splits(self) -> Mapping[str, Split]:
        """The pictures, which are loaded for the first sample."""
        return self._load()

    @functools.cached_property
    def _support(self) -> Batch:
        """Training samples of the whole set, the same for every `seed`."""
        rng = np.random.default_rng((self._seeds.eval_seed, SPLITS["train"], 0, _KNOWN))
        return self._batch("train", rng.permutation(self._sizes["train"])[: self._support_size].tolist())

    def classes(self, split: str) -> int:
        return len(self._identities)

    def identities(self, split: str) -> Sequence[str]:
        return self._identities

    def class_names(self, split: str, index: int) -> Sequence[str]:
        return self._names

    def unit(self, split: str) -> Unit:
        return "samples"

    def size(self, split: str) -> int | None:
        return None if split == "train" else self._sizes[split]

    def episodes(self, split: str, indices: Tensor) -> Episode:
        query = self._batch(split, [self._number(split, index) for index in indices.tolist()])
        if split != "train":
            return Episode(self._support, query)
        if self._augment:  # each sample by the generator of its number
            changed = []
            for place, index in enumerate(indices.tolist()):
                rng = self._seeds.generator(split, index, _AUGMENT)
                changed.append(augmented_pictures(query.x[0, place : place + 1], self._augment, rng))
            query = Batch(torch.cat(changed).unsqueeze(0), query.y)
        return Episode(Batch(query.x[:, :0], query.y[:, :0]), query)

    def _number(self, split: str, index: int) -> int:
        size = self._sizes[split]
        epoch, place = divmod(index, size)
        if epoch and split != "train":
            raise ValueError(f"split={split!r}: has {size} samples, and there is no number {index}")
        return int(self._order(split, epoch)[place])

    def _batch(self, split: str, numbers: list[int]) -> Batch:
        pictures, classes = self._splits[split].take(numbers)
        x = torch.from_numpy(np.ascontiguousarray(pictures)).to(torch.float32).div_(255)
        x = x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous()
        return Batch(x.unsqueeze(0), torch.from_numpy(classes).unsqueeze(0))


class Pretraining:
    """A source that trains on `samples`, and validates and tests on `tasks`."""

    def __init__(self, samples: TaskSource, tasks: TaskSource) -> None:
        self._sources = {"train": samples, "val": tasks, "test": tasks}
        self.ways_differ = ways_differ(tasks)

    def classes(self, split: str) -> int | None:
        return self._sources[split].classes(split)

    def unit(self, split: str) -> Unit:
        return self._sources[split].unit(split)

    def size(self, split: str) -> int | None:
        return self._sources[split].size(split)

    def identities(self, split: str) -> Sequence[str]:
        return sorted(identities_of(self._sources[split], split) or ())

    def class_names(self, split: str, index: int) -> Sequence[str]:
        return class_names_of(self._sources[split], split, index)

    def drawers(self, split: str) -> Mapping[str, str]:
        return drawers_of(self._sources["test"], split)

    def episodes(self, split: str, indices: Tensor) -> Episode:
        return self._sources[split].episodes(split, indices)


def few_shot(
    load: Callable[[], Mapping[str, Classes]], shapes: Mapping[str, EpisodeShape], episode: EpisodeSpec, *,
    rotations: bool, seeds: Seeds, instead: str | Callable[[], tuple[TaskSource, str]], grouped: Grouped = UNGROUPED,
) -> PictureTasks:  # fmt: skip
    """A source of few-shot classification tasks. Algorithms that are trained on plain samples get all pictures of the
    training classes. Raises ValueError for a negative seed, or `rotations` that is neither true nor false.

    Args:
        load: gives the classes of the splits `train`, `val` and `test`; called once, for the first task.
        shapes: the shape of each split's episodes.
        rotations: turn each drawn class by a random multiple of 90°, in every split; plain samples stay upright.
        instead: evaluates on plain samples: a function that gives their source, and says what they are; or, for a
            message, the name of another dataset.
        grouped: draws tasks within groups of classes, and has fixed ones.
    """
    true_or_false("rotations", rotations)
    unlabelled = ("train", "val") if episode.labels == NO_LABELS else ()

    def load_splits() -> Mapping[str, Classes]:
        splits = load()
        return {**splits} | {split: each_picture(splits[split], shapes[split].most) for split in unlabelled}

    def plain(evaluated_on: Unit) -> tuple[TaskSource, str]:
        if episode.labels == NO_LABELS:
            raise Invalid("labels", NO_LABELS, "this algorithm trains on plain samples with labels", "type KEY=all")
        for name, value in (("train_ways", episode.train_ways), ("train_queries", episode.train_queries)):
            if value is not None:
                allowed = "this algorithm trains on plain samples, which have no training tasks"
                raise Invalid(name, value, allowed, "type KEY=null")
        if evaluated_on != "tasks":
            if callable(instead):
                return instead()
            raise ConfigError(
                "dataset: this one has tasks of classes, and algorithm=supervised wants one problem with the same "
                f"classes in training and test; type dataset={instead} or dataset=image_folder"
            )
        classes = tasks.classes_of("train")
        sizes = list(map(len, classes.of_each()))
        train, counts = sum(sizes), {"train": sum(sizes), "val": 0, "test": 0}
        training = SampleSource(
            lambda: {"train": Chosen(classes.pictures, list(map(np.arange, sizes)))}, counts, classes.identities,
            known=min(KNOWN, train), augment=episode.augment, seeds=seeds,
        )  # fmt: skip
        upright = ", upright" * rotations
        words = f"all {train} pictures of the {len(sizes)} training classes{upright}; the others' tasks evaluate"
        return Pretraining(training, tasks), words

    changes = dict.fromkeys(unlabelled or ("train",), episode.augment)
    tasks = PictureTasks(load_splits, shapes, rotations, changes, seeds, plain, grouped)
    return tasks


def drawn_samples(
    load: Callable[[], Callable[[int], Images]], identities: Sequence[str], drawings: int, *, ways: int, train: int,
    val: int, known: int, seeds: Seeds, names: Sequence[str] = (),
) -> TaskSource:  # fmt: skip
    """Plain samples of the first `ways` classes, which have as many `drawings` each: the first `train` train, the next
    `val` validate, and the others test. `load` gives the function from a class's number to its drawings. Raises
    ValueError if there are too few classes, or a split would be empty; or as `SampleSource`."""
    whole_number("ways", ways, at_least=2)
    enough_classes("ways", ways, "train", len(identities))
    whole_number("train_drawings", train, at_least=1, at_most=drawings - 2)
    whole_number("val_drawings", val, at_least=1, at_most=drawings - train - 1)
    parts = dict(zip(SPLITS, np.split(np.arange(drawings), [train, train + val]), strict=True))

    def splits() -> dict[str, Chosen]:
        pictures = load()
        return {split: Chosen(pictures, [part] * ways) for split, part in parts.items()}

    sizes = {split: ways * len(part) for split, part in parts.items()}
    return SampleSource(splits, sizes, identities[:ways], known=known, seeds=seeds, names=names[:ways])
