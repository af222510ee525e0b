"""From packages to a drawn set: fetched, drawn one design after the other, put together, described.

What has been fetched and drawn is kept in the folder `.work` until the set is whole, so that the same command goes on
after any end.
"""

import csv
import hashlib
import itertools
import logging
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from metalearn.datasets.packages import Client, Package, fetched
from metalearn.errors import DataError
from metalearn.storage.files import held, write_atomically, writing
from metalearn.tasks.common.drawn_set import DrawnClass, DrawnSet, read_pictures, read_set, write_set
from metalearn.tasks.common.episodes import SPLITS, Images
from metalearn.tasks.common.written import INDEX

ATTRIBUTION = "ATTRIBUTION.txt"
HERE = Path(__file__).parent
FEWEST = 2
"""The fewest pictures of a class: one to learn from, and one to ask about."""

_DIFFERENT, _SAME = 48, 0.04
"""Two pictures are copies if less than this part of their ink differs by more than so many of 255."""

log = logging.getLogger("metalearn")


class Design(NamedTuple):
    """The drawings of one designer, in a package; `file` is their place in it."""

    name: str
    package: str
    version: str
    sha256: str
    licence: str
    author: str
    file: str


class Listed(NamedTuple):
    """A class of a list: its row, and the published digest of its pictures."""

    one: DrawnClass
    row: dict[str, str]
    digest: str


Drawings = tuple[Sequence[int], Images]
"""The numbers of classes, rising, and a picture of each."""


class SetRecipe(NamedTuple):
    """How a set is made. `version` names the renderer, and whatever else changes the pictures. `draw(design, package,
    classes)` draws what a design has of the classes. With `distinct`, a drawing that copies another one of its class is
    left out. `texts` are licences in packages: (package, file)."""

    name: str
    version: str
    shape: tuple[int, ...]
    client: Client
    designs: Sequence[Design]
    classes: Sequence[Listed]
    draw: Callable[[Design, Path, Sequence[Listed]], Drawings]
    distinct: bool
    source: str


def designs_of(path: Path) -> list[Design]:
    """The designs of a list."""
    with path.open(encoding="utf-8", newline="") as file:
        return [Design(**row) for row in csv.DictReader(file)]


def listed(path: Path) -> list[Listed]:
    """The classes of a list, whose columns `key`, `name`, `split` and `digest` are read here."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [Listed(DrawnClass(row["key"], row["name"], row["split"], ()), row, row["digest"]) for row in rows]


def few(classes: Sequence[Listed], count: int | None) -> list[Listed]:
    """The first `count` classes of each split; None: all."""
    chosen = {split: [one for one in classes if one.one.split == split][:count] for split in SPLITS}
    return list(itertools.chain(*chosen.values()))


def build(recipe: SetRecipe, out: Path) -> DrawnSet:
    """Makes the set in the folder `out`, or goes on with it; what is whole already stays.

    Raises:
        ConfigError, DataError, RunError: as `fetched`; or `out` holds another set, or cannot be written.
    """
    classes = [(listed.one.key, listed.one.split) for listed in recipe.classes]

    def other(there: DrawnSet) -> str:
        is_this = (there.name, [(one.key, one.split) for one in there.classes]) == (recipe.name, classes)
        return "" if is_this else f"{len(there.classes)} classes of {there.name}, and not these"

    return made_once(out, other, lambda: _made(recipe, out))


def made_once(out: Path, other: Callable[[DrawnSet], str], make: Callable[[], DrawnSet], again: str = "") -> DrawnSet:
    """The set in the folder `out`: the whole one that is there, or what `make` writes. Of several processes, one does.

    Args:
        other: what `out` holds, in words, if the set that is there is another one; else empty.
        again: ends the line that says that it is there.

    Raises:
        DataError: it is another one, or damaged; another process takes too long; or as `make`.
        DiskError, RunError: `out` cannot be written.
    """
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = held(out / ".lock", f"{out} is being made")
    try:
        with lock:
            if not (out / INDEX).exists():
                return make()
            advice = f"remove {out}, or type another --out"
            found = read_set(out, advice)
            if holds := other(found):
                raise DataError(f"--out={out}: holds {holds}; {advice}")
            read_pictures(out, found, advice)
    except TimeoutError as error:
        raise DataError(str(error)) from error
    log.info("%s is there already%s", out, again)
    return found


def _made(recipe: SetRecipe, out: Path) -> DrawnSet:
    work = out / ".work"
    packages = {Package(design.package, design.version, design.sha256) for design in recipe.designs}
    log.info("%s: %d packages by %s", recipe.name, len(packages), recipe.client.program)
    files = fetched(sorted(packages), recipe.client, work)
    parts = []
    for number, design in enumerate(recipe.designs, 1):
        parts.append(_part(recipe, design, files[design.package], work))
        log.info(
            "%s: %s, %d drawings (%d of %d)", recipe.name, design.name, len(parts[-1][0]), number, len(recipe.designs)
        )
    places, left_out = _placed(recipe, parts)
    for listed_class, chosen in zip(recipe.classes, places, strict=True):
        if len(chosen) < FEWEST:
            raise DataError(
                f"{recipe.name}: {len(chosen)} drawings of {listed_class.one.name}, and {FEWEST} are needed"
            )
    if left_out:
        log.info("%s: %d drawings that copy another one of their class are left out", recipe.name, left_out)

    def classes() -> Iterator[tuple[DrawnClass, Images]]:
        for listed_class, chosen in zip(recipe.classes, places, strict=True):
            drawn = [parts[design][1][place] for design, place in chosen]
            yield listed_class.one._replace(drawers=[design for design, _ in chosen]), np.stack(drawn)

    names = [design.name for design in recipe.designs]
    made = write_set(out, recipe.name, names, recipe.shape, classes(), sum(map(len, places)))
    _report(recipe, made)
    write_atomically(out / ATTRIBUTION, attribution(recipe, made))
    shutil.rmtree(work, ignore_errors=True)
    return made


def _part(recipe: SetRecipe, design: Design, package: Path, work: Path) -> tuple[NDArray[np.int64], Images]:
    """What a design has of the classes: drawn before, or now."""
    keys = [one.one.key for one in recipe.classes]
    made_of = repr((recipe.name, recipe.version, recipe.shape, design, keys))
    path = work / f"{design.name}-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.npz"
    try:
        with path.open("rb") as part, np.load(part, allow_pickle=False) as saved:  # numpy leaves half files open
            return saved["classes"], saved["pictures"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # not there, or not whole
    numbers, pictures = recipe.draw(design, package, recipe.classes)
    temporary = path.with_suffix(".tmp")
    with writing(temporary), temporary.open("wb") as file:
        np.savez(file, classes=np.array(numbers, np.int64), pictures=pictures)
    temporary.replace(path)
    return np.array(numbers, np.int64), pictures


def _placed(
    recipe: SetRecipe, parts: Sequence[tuple[NDArray[np.int64], Images]]
) -> tuple[list[list[tuple[int, int]]], int]:
    """The drawings of each class as (design, place in its part), and how many copies are left out."""
    places: list[list[tuple[int, int]]] = [[] for _ in recipe.classes]
    for design, (numbers, _) in enumerate(parts):
        for place, number in enumerate(numbers.tolist()):
            places[number].append((design, place))
    if not recipe.distinct:
        return places, 0
    before = sum(map(len, places))
    for number, chosen in enumerate(places):
        if chosen:
            drawn = np.stack([parts[design][1][place] for design, place in chosen])
            places[number] = [chosen[place] for place in first_of_copies(drawn)]
    return places, before - sum(map(len, places))


def first_of_copies(drawn: Images) -> list[int]:
    """The numbers of the pictures [n, h, w] of ink on paper that are no copies of an earlier one."""
    kept: list[int] = []
    values = drawn.reshape(len(drawn), -1).astype(np.int16)
    for number in range(len(drawn)):
        others = values[kept]
        ink = (np.maximum(others, values[number]) > 10).sum(1)
        differ = (np.abs(others - values[number]) > _DIFFERENT).sum(1)
        if not (differ < _SAME * ink).any():
            kept.append(number)
    return kept


def _report(recipe: SetRecipe, made: DrawnSet) -> None:
    """Says how many pictures there are, and whether they are the published ones."""
    count, digest = made.total, made.digest[:16]
    log.info("%s: %d classes, %d pictures, SHA-256 %s…", recipe.name, len(made.classes), count, digest)
    other = [
        wanted.one.name for wanted, one in zip(recipe.classes, made.classes, strict=True) if wanted.digest != one.digest
    ]
    if other:
        log.warning(
            "%s: the pictures of %d of %d classes are not the published ones, bit for bit; the first is %s. They were "
            "drawn by %s; results may differ slightly", recipe.name, len(other), len(made.classes), other[0],
            recipe.version,
        )  # fmt: skip
    else:
        log.info("%s: the pictures of all classes are the published ones", recipe.name)


def attribution(recipe: SetRecipe, made: DrawnSet) -> str:
    """Who has drawn the pictures, and under which licence they may be used."""
    counts = [0] * len(made.drawers)
    for one in made.classes:
        for number in one.drawers:
            counts[number] += 1
    rows = [
        f"| {design.name} | {design.author} | {design.licence} | {design.package} {design.version} | {count} |"
        for design, count in zip(recipe.designs, counts, strict=True)
    ]
    return "\n".join([
        f"# {recipe.name}: who has drawn the pictures", "",
        f"Drawn by {recipe.version} from {recipe.source}. Each picture stays under the licence of its design: whoever "
        "passes it on names the author and the licence. CC-BY-SA also binds what is made of the pictures.", "",
        "| design | author | licence | package | pictures |", "| --- | --- | --- | --- | --- |", *rows, "",
    ])  # fmt: skip
