"""Photographs for few-shot learning that people have on disk, in whatever layout: checked, and written as one set.

What is published is compared with what is there: the classes of each split and the number of pictures of each class.
The written set does not depend on the layout, as far as the pictures do not: a class's pictures are ordered by their
digests.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from metalearn.datasets.drawing import ATTRIBUTION, HERE, made_once
from metalearn.datasets.layouts import ENCODED, FOLDERS, LISTS, PICKLES, FoundSet, PublishedPictures, recognised
from metalearn.errors import DataError
from metalearn.storage.files import write_atomically
from metalearn.tasks.common.episodes import SPLITS, Images, csv_rows, published_list
from metalearn.tasks.common.pictures import PictureForm, decoded, first_few, formed
from metalearn.tasks.common.stored import INDEX, PARTLY, PICTURES, DrawnClass, DrawnSet, write_set
from metalearn.tasks.photographs import published_splits

_OF_IMAGENET = "ImageNet's terms of access: research and education, not commercial"

log = logging.getLogger("metalearn")


def _mini_imagenet() -> PublishedPictures:
    classes = published_splits("mini_imagenet")
    totals = {split: 600 * list(classes.values()).count(split) for split in SPLITS}
    return PublishedPictures(
        "mini_imagenet", "mini-ImageNet", 84, classes, dict.fromkeys(classes, (600, 600)), totals,
        (LISTS, FOLDERS, PICKLES),
        "Vinyals et al. 2016 (arXiv 1606.04080), divided by Ravi and Larochelle 2017 (ICLR)", _OF_IMAGENET,
        ("mini-imagenet-cache-{split}.pkl", "miniImageNet_category_split_{split}.pickle",
         "mini_imagenet_{split}.pickle"),
    )  # fmt: skip


def _tiered_imagenet() -> PublishedPictures:
    classes = published_splits("tiered_imagenet")
    # Training pictures of the smallest and the largest class of ImageNet (Russakovsky et al. 2015, arXiv 1409.0575).
    counts = dict.fromkeys(classes, (732, 1300))
    totals = {"train": 448_695, "val": 124_261, "test": 206_209}
    return PublishedPictures(
        "tiered_imagenet", "tiered-ImageNet", 84, classes, counts, totals, (FOLDERS, ENCODED),
        "Ren et al. 2018 (arXiv 1803.00676)", _OF_IMAGENET,
    )  # fmt: skip


def _cub() -> PublishedPictures:
    classes = published_splits("cub")
    counts = {row["class"]: int(row["pictures"]) for row in published_list("cub_classes.csv")}
    totals = {split: sum(counts[name] for name, part in classes.items() if part == split) for split in SPLITS}
    return PublishedPictures(
        "cub", "CUB-200-2011", 84, classes, {name: (count, count) for name, count in counts.items()}, totals,
        (LISTS, FOLDERS), "Wah et al. 2011 (Caltech, CNS-TR-2011-001), divided by Chen et al. 2019 (arXiv 1904.04232)",
        "research and education, not commercial; the pictures are those of their photographers",
    )  # fmt: skip


SETS: Mapping[str, Callable[[], PublishedPictures]] = {
    "mini_imagenet": _mini_imagenet, "tiered_imagenet": _tiered_imagenet, "cub": _cub
}  # fmt: skip


def collect(published: PublishedPictures, folder: Path, out: Path, *, partly: bool) -> DrawnSet:
    """Writes the set that lies in `folder` into `out`, or finds it there; with `partly` also one that is not whole.
    Raises DataError if it is not there, or not as published; a picture is damaged; or `out` holds another set."""

    def other(old: DrawnSet) -> str:
        if old.name != published.name:
            return old.name
        return "" if partly or not old.is_partial else f"a part of {old.name}, as --partial writes it"

    def make() -> DrawnSet:
        raw = recognised(folder, published)
        log.info("%s: %s in %s", published.title, raw.layout, raw.place)
        for line in digests(published, raw):
            log.info("%s", line)
        wrong = deviations(published, raw)
        if wrong and not partly:
            raise DataError(
                f"--from={folder}: is not {published.title} as published: {'; '.join(wrong)}. Complete it, or type "
                "--partial to write what is there; its results are none of the published set"
            )
        for line in wrong:
            log.warning("%s: %s", published.title, line)
        if not wrong:
            log.info("%s: the classes and the numbers of pictures are the published ones", published.title)
        classes = {key: one for key, one in raw.classes.items() if one.total and published.belongs(*key)}
        order = sorted(classes, key=lambda key: (list(SPLITS).index(key[0]), key[1]))
        total, side = sum(classes[key].total for key in order), published.side
        if not total:
            raise DataError(f"--from={folder}: has no picture of {published.title}")
        log.info("%s: %d pictures are brought to %d × %d pixels", published.title, total, side, side)
        written = _written(published, raw, order)
        layout = raw.layout + (PARTLY if wrong else "")
        try:
            made = write_set(out, published.name, [layout], (side, side, 3), written, total)
        finally:
            if not (out / INDEX).exists():
                (out / PICTURES).unlink(missing_ok=True)  # many gigabytes, which could not be completed
        lines = [f"# {published.title}", "", f"{published.paper}.", "", f"Terms: {published.terms}.", ""]
        lines += [f"{len(made.classes)} classes, {made.total} pictures, read from {raw.layout}."]
        lines += ["", "Not as published:", *(f"- {line}" for line in wrong)] if wrong else []
        write_atomically(out / ATTRIBUTION, "\n".join([*lines, ""]))
        return made

    return made_once(out, other, make, "; to read it again, remove it")


def digests(published: PublishedPictures, raw: FoundSet) -> list[str]:
    """Lines that say whether the files are, byte for byte, those whose MD5 is published."""
    rows = csv_rows(HERE / "photograph_files.csv")
    published_files = {row["file"].lower(): row for row in rows if row["set"] == published.name}
    lines = []
    for path in raw.files:
        if row := published_files.get(path.name.lower()):
            with path.open("rb") as content:
                md5 = hashlib.file_digest(content, partial(hashlib.md5, usedforsecurity=False)).hexdigest()
            which = "the one" if md5 == row["md5"] else f"another than the {row['md5']}"
            lines.append(f"{path.name}: its MD5, {md5}, is {which} that {row['published']} publishes")
    return lines


def deviations(published: PublishedPictures, raw: FoundSet) -> list[str]:
    """Lines on what is not as published."""
    lines = list(raw.wrong)
    for split in SPLITS:
        names = published.of(split)
        counts = {name: pictures.total for (part, name), pictures in raw.classes.items() if part == split}
        if not sum(counts.values()):
            lines.append(f"{split}: there is nothing of its {len(names)} classes")
            continue
        if all(published.is_named(split, name) for name in counts):
            if missing := [name for name in names if not counts.get(name)]:
                lines.append(f"{split}: {len(missing)} of {len(names)} classes are missing: {first_few(missing)}")
            if more := sorted(set(counts) - set(names)):
                lines.append(f"{split}: {len(more)} classes do not belong there, and are left out: {first_few(more)}")
        elif len(counts) != len(names):
            lines.append(f"{split}: has {len(counts)} classes, and {len(names)} are published")
        in_split = {name: count for name, count in counts.items() if count and published.belongs(split, name)}
        few, many = list[str](), list[str]()
        for name, count in in_split.items():
            fewest, most = published.counts.get(name, published.counts[names[0]])
            if count < fewest:
                few.append(f"{name} ({count} of {fewest})")
            elif count > most:
                many.append(f"{name} ({count} of {most})")
        for what, classes in (("few", few), ("many", many)):
            if classes:
                lines.append(f"{split}: {len(classes)} classes have too {what} pictures: {first_few(classes)}")
        total = sum(in_split.values())
        if not few + many and len(in_split) == len(names) and total != published.totals[split]:
            lines.append(f"{split}: has {total:,} pictures, and {published.totals[split]:,} are published")
    return lines


def _written(
    published: PublishedPictures, raw: FoundSet, classes: Sequence[tuple[str, str]]
) -> Iterator[tuple[DrawnClass, Images]]:
    """Each class with its pictures, uint8 [n, side, side, 3], in the order of their digests."""
    form, right = PictureForm(published.side, 3), (published.side, published.side)
    for split, name in classes:
        pictures = raw.classes[split, name].get()
        if isinstance(pictures, np.ndarray):
            whole = np.ascontiguousarray(pictures)
            if whole.shape[1:3] != right:
                whole = np.stack([formed(Image.fromarray(one), form) for one in whole])
        else:
            each = list(decoded(pictures, form))
            broken = [
                f"{file if isinstance(file, Path) else f'one of {name}'} ({picture})"
                for file, picture in zip(pictures, each, strict=True) if isinstance(picture, str)
            ]  # fmt: skip
            if broken:
                reasons = f"{len(broken)} pictures cannot be read: {first_few(broken)}"
                raise DataError(f"{reasons}; repair them, or fetch them again")
            whole = np.stack(each)
        order = sorted(range(len(whole)), key=lambda number: hashlib.sha256(whole[number].tobytes()).digest())
        words = raw.words.get(name) or name.partition(".")[2] or name
        yield DrawnClass(name, words.replace("_", " "), split, [0] * len(whole)), whole[order]
