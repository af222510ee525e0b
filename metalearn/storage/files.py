"""Files: read within bounds, and written whole or not at all.

What lies in a folder may be somebody else's. So nothing here waits for a named pipe, reads without a limit, or writes
through a link.
"""

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from metalearn.errors import ConfigError, DiskError, RunError

STANDS = "what was saved before stands, and the same command resumes the run"

_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN}
"""What a disk that is full or fails answers, or one that is not mounted any more."""

LARGEST_JSON = 4 * 2**20
"""Bytes of a JSON file: result.json, meta.json, manifest.json."""

LARGEST_HEADER = 8 * 2**20
"""Bytes of the header of a safetensors file: those of some 60,000 tensors, which take a second to read."""

LARGEST_LINE = 2**20
"""Bytes of a line of metrics.jsonl."""

DEEPEST = 32
"""Levels of lists and objects in each other."""


class RefusedFileError(ValueError):
    """A file that is not read: no regular file, too large, or nested too deeply."""


def open_regular(path: Path, at_most: int) -> BufferedReader:
    """Opens a file for reading.

    Raises:
        OSError: there is no such file, or it may not be read.
        RefusedFileError: it is no regular file, such as a named pipe or a device, or has more than `at_most` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for its writer
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise RefusedFileError(f"{path}: is not a regular file")
        if status.st_size > at_most:
            raise RefusedFileError(f"{path}: has {status.st_size:,} bytes, and at most {at_most:,} are read")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bounded(path: Path, at_most: int) -> bytes:
    """The content of a file.

    Raises:
        OSError, RefusedFileError: as `open_regular`.
    """
    with open_regular(path, at_most) as file:
        return file.read(at_most)


def check_header(path: Path) -> None:
    """Checks the header of a safetensors file, which names its tensors.

    Raises:
        OSError, RefusedFileError: as `open_regular`; or the header has more than `LARGEST_HEADER` bytes.
    """
    with open_regular(path, 2**63 - 1) as file:
        size = int.from_bytes(file.read(8), "little")
    if size > LARGEST_HEADER:
        raise RefusedFileError(f"{path}: its header has {size:,} bytes, and at most {LARGEST_HEADER:,} are read")


def check_nesting(value: object, what: str) -> None:
    """Raises RefusedFileError for lists and dicts in each other that are more than `DEEPEST` deep."""
    level = [value]
    for _ in range(DEEPEST + 1):
        nodes = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        level = [child for node in nodes for child in node]
        if not level:
            return
    raise RefusedFileError(f"{what}: is nested more than {DEEPEST} deep")


def _integer(text: str) -> int:
    """Raises ValueError for a number of more than 64 bits, which no real number can hold, nor any field need."""
    number = int(text)
    if number.bit_length() > 64:
        raise ValueError(f"the number {text[:20]}… has more than 64 bits")
    return number


def read_object(path: Path, at_most: int = LARGEST_JSON) -> dict[str, Any]:
    """The JSON object in a file of at most so many bytes.

    Raises:
        OSError, RefusedFileError: as `open_regular`; or it is nested too deeply.
        ValueError: it holds no JSON object.
    """
    text = read_bounded(path, at_most)
    try:
        content = json.loads(text, parse_int=_integer)
    except RecursionError as error:
        raise RefusedFileError(f"{path}: is nested more than {DEEPEST} deep") from error
    except ValueError as error:
        raise ValueError(f"{path}: holds no JSON ({error})") from error
    check_nesting(content, str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return content


def read_json(path: Path, at_most: int = LARGEST_JSON) -> dict[str, Any]:
    """As `read_object`; empty if there is no such file, or it is refused or holds no JSON object.

    Raises:
        ConfigError: the file is there, and may not be read.
    """
    try:
        return read_object(path, at_most)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; make it readable, or move it away") from error


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file, one at a time; the last one may have no end, if a program is writing it or was killed.

    Raises:
        OSError, RefusedFileError: as `open_regular`; or a line has more than `LARGEST_LINE` bytes.
    """
    with open_regular(path, 2**63 - 1) as file:
        while line := file.readline(LARGEST_LINE + 1):
            if len(line) > LARGEST_LINE:
                raise RefusedFileError(f"{path}: has a line of more than {LARGEST_LINE:,} bytes")
            yield line


def logged_lines(path: Path) -> list[bytes]:
    """The complete lines of a log that a run goes on with; none if there is no such file.

    Raises:
        RunError: it cannot be read.
    """
    try:
        return [line for line in lines_of(path) if line.endswith(b"\n")]
    except FileNotFoundError:
        return []
    except RefusedFileError as error:
        raise RunError(f"{error}; move it away, and the same command resumes the run") from error
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}; make it readable, or move it away") from error


def real(path: Path) -> Path:
    """The path without links; where links lead in a circle, one of them."""
    return Path(os.path.realpath(path))


def is_folder(path: Path) -> bool:
    """Whether this is a folder. A name that the system refuses, such as one that is too long, is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


@contextmanager
def creating(key: str, path: Path) -> Iterator[None]:
    """Makes a failure to write `path`, the output folder or file that `key` names, a ConfigError."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        raise ConfigError(
            f"{key}={path}: cannot be written: {getattr(error, 'strerror', None) or error}; type another {key}, where "
            "you may write"
        ) from error


def refuse_used(key: str, folder: Path) -> None:
    """Raises ConfigError if the output folder that `key` names is there already, and is not an empty folder."""
    with creating(key, folder):
        if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
            raise ConfigError(f"{key}={folder}: is there already, and not an empty folder; type another name")


@contextmanager
def whole_folder(key: str, folder: Path) -> Iterator[Path]:
    """Gives a folder to fill, which becomes the output folder `folder` that `key` names, if nothing fails.

    Raises:
        ConfigError: `folder` is there already and not empty, has no name, or cannot be written.
    """
    refuse_nameless(key, folder)
    refuse_used(key, folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        with creating(key, folder):
            temporary.mkdir(parents=True)
            yield temporary
            temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_path_here(text: str) -> bool:
    """Whether a text is a path of this machine: it begins with a folder that is there."""
    parts = Path(text).parts
    return os.path.isabs(text) and len(parts) > 1 and os.path.lexists(os.path.join(*parts[:2]))  # noqa: PTH117, PTH118


def refuse_nameless(key: str, folder: Path) -> None:
    """Raises ConfigError for a path such as `.` or `..`, as which nothing can be renamed when it is complete."""
    if folder.name in ("", ".."):
        raise ConfigError(f"{key}={folder}: must end in the name of a folder; type {key}=best, for example")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes a failure to write `path`, or a file below it, a RunError that names the file."""
    try:
        yield
    except OSError as error:
        raise unwritten(Path(os.fsdecode(error.filename or path)), error) from error


def is_disk_fault(error: BaseException | None) -> bool:
    """Whether a disk is to blame, and not who has called it."""
    return isinstance(error, DiskError) or (isinstance(error, OSError) and error.errno in _FAULTS)


def comes_from_disk(error: BaseException | None) -> bool:
    """Whether a disk is behind an error that somebody has put in words."""
    while error is not None and not is_disk_fault(error):
        error = error.__cause__
    return error is not None


def unwritten(path: Path, error: OSError, verb: str = "written") -> RunError:
    """The error for a file of a run that could not be written. Where a disk is to blame, it says how much is free."""
    reason = f"{path}: cannot be {verb}: {error.strerror or error}"
    if is_disk_fault(error) or error.errno == errno.ENOENT:  # its folder is gone
        advice = {errno.ENOSPC: "make room", errno.EDQUOT: "make room", errno.ENOENT: "bring its folder back"}
        todo = advice.get(error.errno or 0, "mend the disk")
        return DiskError(f"{reason} ({room_at(path)}); {todo}; {STANDS}")
    return RunError(f"{reason}; {STANDS}")


def room_at(path: Path) -> str:
    """How much room there is where a file is, or would be."""
    try:
        folders = path.absolute().parents
        place = next(folder for folder in folders if os.path.isdir(folder))  # noqa: PTH112 (Path's may raise)
        return f"{shutil.disk_usage(place).free // 1024:,} KiB are free in {place}"
    except OSError as error:
        return f"how much is free is not known: {error.strerror}"


def write_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Writes or replaces a file. Readers find the old text or the new one, never a part, even after a power loss. Its
    permissions are `mode`, less the process's umask.

    Raises:
        RunError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        temporary.unlink(missing_ok=True)  # left by a kill, or a link to somebody's file
        with open(
            temporary, "x", encoding="utf-8", errors="surrogateescape",  # the names of files may not be UTF-8
            opener=lambda name, flags: os.open(name, flags, mode),
        ) as file:  # fmt: skip
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def leads_out(path: Path, home: Path) -> bool:
    """Whether a path, by its links, leads out of the folder `home`."""
    return not real(path).is_relative_to(real(home))


def refuse_links(folder: Path, home: Path) -> None:
    """Raises ConfigError if writing below `folder` could change a file outside `home`, or wait for ever."""
    for path, reason in _unsafe_entries(folder, home):
        raise ConfigError(f"{path}: {reason}")


def _unsafe_entries(folder: Path, home: Path) -> Iterator[tuple[Path, str]]:
    """Links that lead out of `home`, files that have another name elsewhere (hard links), pipes and devices; each with
    the reason not to write to it. Files of checkpoints are never written to, and may be shared."""
    outward = f"leads out of {home}, and all is written in there; remove this link"
    if leads_out(folder, home):
        yield folder, outward
    for path, subfolders, files in os.walk(folder):
        for entry in (Path(path, name) for name in (*subfolders, *files)):
            try:
                status = entry.lstat()
            except FileNotFoundError:  # it has just been removed
                continue
            if stat.S_ISLNK(status.st_mode):
                if leads_out(entry, home):
                    yield entry, outward
            elif stat.S_ISREG(status.st_mode):
                if status.st_nlink > 1 and "checkpoints" not in entry.relative_to(folder).parts:
                    yield (
                        entry,
                        "is a hard link, and the file of its other name would be written to; replace it by a copy",
                    )
            elif not stat.S_ISDIR(status.st_mode) and not stat.S_ISSOCK(status.st_mode):
                yield entry, "is not a regular file, and who opens it may wait for ever; remove it"
