"""Packages of public registries, fetched by the registry's own client and read without unpacking.

Nothing of a package is run. Version and SHA-256 of each are known before, and it is opened only if they are right.
"""

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from metalearn.errors import ConfigError, DataError, RunError
from metalearn.storage.files import writing

SECONDS = 300.0
"""How long a client may take for all packages."""


class Package(NamedTuple):
    """A package by its name in the registry."""

    name: str
    version: str
    sha256: str


class Client(NamedTuple):
    """The program that fetches from a registry. `fetch` is the command that puts packages into the working folder.
    `advice` says how to get the program."""

    program: str
    advice: str
    fetch: Callable[[Sequence[Package]], list[str]]


NPM = Client(
    "npm",
    "type apt-get install npm, or install Node.js",
    lambda packages: [
        "npm", "pack", "--ignore-scripts", "--fetch-timeout=20000", "--fetch-retries=1",
        *(f"{package.name}@{package.version}" for package in packages),
    ],
)  # fmt: skip

APT = Client(
    "apt-get",
    "it belongs to Debian 12; elsewhere work in a container of it, of the image debian:12",
    lambda packages: [
        "apt-get", "download", "-q", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::Retries=1",
        *(f"{package.name}={package.version}" for package in packages),
    ],
)  # fmt: skip


def fetched(packages: Sequence[Package], client: Client, folder: Path) -> dict[str, Path]:
    """Package → its file in `folder`. Those that are there already are not fetched again.

    Raises:
        ConfigError: the client is missing.
        DataError: the registry has another file of a version.
        RunError: a package did not come: the registry does not answer, or has other versions. What has come is kept.
    """
    files = {package.name: folder / f"{package.sha256}.package" for package in packages}
    wanted = {package.sha256: package for package in packages if not _is(files[package.name], package.sha256)}
    if not wanted:
        return files
    if shutil.which(client.program) is None:
        raise ConfigError(f"{client.program} is not installed, which fetches {len(wanted)} packages: {client.advice}")
    incoming = folder / "incoming"
    others = ""
    with writing(incoming):
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir(parents=True)
        answer = _answer(client.fetch(list(wanted.values())), incoming)
        for path in sorted(incoming.iterdir()):
            digest = _digest(path)
            if digest in wanted:
                path.replace(files[wanted.pop(digest).name])
            else:
                others += f"; {path.name} came with SHA-256 {digest[:12]}…"
        shutil.rmtree(incoming)
    if wanted:
        first = next(iter(wanted.values()))
        raise (DataError if others else RunError)(
            f"{len(wanted)} of {len(files)} packages did not come; the first is {first.name}, version {first.version} "
            f"with SHA-256 {first.sha256[:12]}…{others}: {answer[-300:].strip() or 'no word'}; the others are kept, "
            f"and the same command goes on ({client.program}: {client.advice})"
        )
    return files


def _answer(command: Sequence[str], folder: Path) -> str:
    """What a client writes."""
    try:
        return subprocess.run(
            command, cwd=folder, env=os.environ | {"LC_ALL": "C"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=SECONDS,
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{command[0]} has not answered within {SECONDS:g} s"


def _is(path: Path, sha256: str) -> bool:
    return path.is_file() and _digest(path) == sha256


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def members(package: Path, names: Collection[str], *, debian: bool = False) -> dict[str, bytes]:
    """Files of a package by their names in it: of an archive of npm, or of a package of Debian.

    Raises:
        ConfigError: the program is missing that opens packages of Debian.
        DataError: a file is missing.
    """
    if debian and shutil.which("dpkg-deb") is None:
        raise ConfigError(f"dpkg-deb is not installed, which opens packages of Debian: {APT.advice}")
    try:
        if debian:
            command = ["dpkg-deb", "--fsys-tarfile", str(package)]
            content = io.BytesIO(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            archive = tarfile.open(fileobj=content)  # noqa: SIM115 (closed below)
        else:
            archive = tarfile.open(package)  # noqa: SIM115
        with archive:
            files = {name: archive.extractfile(name) for name in names}
            if none := [name for name, file in files.items() if file is None]:
                raise DataError(f"{package}: has no file {none[0]}")
            return {name: file.read() for name, file in files.items() if file is not None}
    except KeyError as error:
        raise DataError(f"{package}: has no such file ({error})") from error
    except (tarfile.TarError, EOFError, OSError, subprocess.CalledProcessError) as error:
        raise DataError(f"{package}: is no package that can be opened ({error})") from error
