"""Packages of public registries, fetched by the registry's own client and read without unpacking.

Nothing of a package is run. Version and SHA-256 of each are known before, and it is opened only if they are right.
"""

import hashlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from metalearn.errors import ConfigError, DataError, RunError
from metalearn.storage.files import writing

SECONDS = 300.0
"""How long a client may take for all packages."""

_DIGITS = 12
"""A message shows so many digits of a SHA-256."""


class Package(NamedTuple):
    """A package by its name in the registry."""

    name: str
    version: str
    sha256: str


class Client(NamedTuple):
    """The program that fetches from a registry. `fetch` is the command that puts packages into the working folder.
    If its output has `gone`, the registry has another version: the command `offer` prints which. `advice` says how to
    get the program."""

    program: str
    advice: str
    fetch: Callable[[Sequence[Package]], list[str]]
    gone: str
    offer: Callable[[str], list[str]]


NPM = Client(
    "npm",
    "type apt-get install npm, or install Node.js",
    lambda packages: [
        "npm", "pack", "--ignore-scripts", "--fetch-timeout=20000", "--fetch-retries=1",
        *(f"{package.name}@{package.version}" for package in packages),
    ],
    "ETARGET",
    lambda name: ["npm", "view", name, "version"],
)  # fmt: skip

APT = Client(
    "apt-get",
    "it belongs to Debian 12; elsewhere work in a container of it, of the image debian:12",
    lambda packages: [
        "apt-get", "download", "-q", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::Retries=1",
        *(f"{package.name}={package.version}" for package in packages),
    ],
    "was not found",
    lambda name: ["apt-cache", "madison", name],
)  # fmt: skip


def fetched(packages: Sequence[Package], client: Client, folder: Path) -> dict[str, Path]:
    """Package → its file in `folder`. Those that are there already are not fetched again.

    Raises:
        ConfigError: the client is missing.
        DataError: the registry has another version, or another file of this version.
        RunError: the registry does not answer, or the files cannot be written. What has come is kept.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files = {package.name: folder / f"{package.sha256}.package" for package in packages}
    missing = [package for package in packages if not _is(files[package.name], package.sha256)]
    if missing:
        if shutil.which(client.program) is None:
            raise ConfigError(
                f"{client.program} is not installed, which fetches {len(missing)} packages: {client.advice}"
            )
        _fetch(missing, client, folder, files)
    return files


def _fetch(missing: Sequence[Package], client: Client, folder: Path, files: dict[str, Path]) -> None:
    incoming = folder / "incoming"
    wanted = {package.sha256: package for package in missing}
    others: dict[str, str] = {}
    with writing(incoming):
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir()
        answer = _run(client.fetch(missing), incoming)
        for path in sorted(incoming.iterdir()):
            digest = _digest(path) if path.is_file() else ""
            if digest in wanted:
                path.replace(files[wanted.pop(digest).name])
            elif digest:
                others[path.name] = digest
        shutil.rmtree(incoming)
    for package in wanted.values():
        _refuse_another(package, client, answer.text, others)
    if wanted:
        first = next(iter(wanted.values()))
        raise RunError(
            f"{len(wanted)} of {len(files)} packages did not come; the first is {first.name}, version {first.version}: "
            f"{answer.text[-300:].strip() or 'no word'}; the others are kept, and the same command goes on"
        )


def _refuse_another(package: Package, client: Client, said: str, others: dict[str, str]) -> None:
    """Raises DataError if the registry has given, or has, another one than this package."""
    short = package.name.rpartition("/")[2]
    for name, digest in others.items():
        if f"{short}_" in name or f"-{short}-{package.version}" in name:
            raise DataError(
                f"{package.name}: {client.program} gave {name} with SHA-256 {digest[:_DIGITS]}…, and version "
                f"{package.version} with {package.sha256[:_DIGITS]}… is wanted; type the same command once more, in "
                "case the transfer was cut"
            )
    if client.gone in said:
        offer = " ".join(_run(client.offer(package.name), None).text.split())[:80]
        if offer and package.version not in offer:
            raise DataError(
                f"{package.name}: {client.program} offers {offer}, and version {package.version} is wanted; "
                f"{client.advice}"
            )


class _Answer(NamedTuple):
    text: str
    code: int


def _run(command: Sequence[str], folder: Path | None) -> _Answer:
    try:
        ended = subprocess.run(
            command, cwd=folder, env=os.environ | {"LC_ALL": "C"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return _Answer(f"{command[0]} has not answered within {SECONDS:g} s", 1)
    except OSError as error:
        return _Answer(str(error), 1)
    return _Answer(ended.stdout, ended.returncode)


def _is(path: Path, sha256: str) -> bool:
    return path.is_file() and _digest(path) == sha256


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Reading


def members(package: Path, names: Collection[str], *, debian: bool = False) -> dict[str, bytes]:
    """Files of a package by their names in it: of an archive of npm, or of a package of Debian.

    Raises:
        ConfigError: the program is missing that opens packages of Debian.
        DataError: a file is missing.
    """
    found: dict[str, bytes] = {}
    with _opened(package, debian) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name in names and member.isfile() else None
            if file is not None:
                found[member.name] = file.read()
    missing = sorted(set(names) - set(found))
    if missing:
        raise DataError(f"{package}: has no file {missing[0]}")
    return found


@contextmanager
def _opened(package: Path, debian: bool) -> Iterator[tarfile.TarFile]:
    if not debian:
        with package.open("rb") as file, _tar(file, "r|gz", package) as archive:
            yield archive
        return
    if shutil.which("dpkg-deb") is None:
        raise ConfigError(f"dpkg-deb is not installed, which opens packages of Debian: {APT.advice}")
    command = ["dpkg-deb", "--fsys-tarfile", str(package)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            with _tar(process.stdout, "r|", package) as archive:
                yield archive
        finally:
            process.kill()


@contextmanager
def _tar(file: IO[bytes], mode: str, package: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
            yield archive
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{package}: is no package that can be opened ({error})") from error
