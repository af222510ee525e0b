"""The cache, a folder of files that can be made again, and the C libraries that are compiled into it.

A file is used only if it is still what was written: beside `NAME.so` or `NAME.npy` lies `NAME.json`, the record with
its SHA-256. What is damaged is made again.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path

from platformdirs import user_cache_path

from metalearn.errors import ConfigError, RunError
from metalearn.storage.files import held, read_json, write_atomically

# Bytes. A file up to this size is read whole at every start, to check its digest. A larger one is read whole only if
# its size or its time of change is not that of the record.
SMALL = 64 * 2**20
LEFTOVER = re.compile(r"\.[\w-]+\.(so|npy|json)(\.\w+)?\.tmp")  # names of files that a killed process has not finished
ADVICE = "name another folder: METALEARN_CACHE=/path/to/cache"

Parts = Sequence[bytes | memoryview]

log = logging.getLogger("metalearn")


class CacheError(Exception):
    """A cache that cannot be used; the message names the folder or file, and says what to type."""


def cache_folder() -> Path:
    """Where files are kept: `METALEARN_CACHE`, else `metalearn` in the user's cache folder."""
    folder = os.environ.get("METALEARN_CACHE")
    return Path(folder).absolute() if folder else user_cache_path("metalearn")


def get(name: str, make: Callable[[], Parts], *, head: bytes = b"") -> tuple[BufferedReader, Path, bool]:
    """The file `name` of the cache, with one suffix, such as `.npy`: open, its path, and whether it has been made just
    now. If it is not there, or not fit for use, or does not begin with `head`, `make` gives its content. If several
    processes start together, one makes the file and the others wait. It appears complete or not at all. Raises
    CacheError if the cache folder cannot be used."""
    path = cache_folder() / name
    with contextlib.ExitStack() as holding:
        with _using(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file, damage = _look(path, head)
            if file is None:
                holding.enter_context(held(path.with_suffix(".lock"), f"{path} is being made"))
                file, damage = _look(path, head)  # another process may have made it
        if file is not None:
            return file, path, False
        if damage:
            log.warning("%s %s: it is made again", path, damage)
        parts, digest = make(), hashlib.sha256()
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with _using(path):
            try:
                with temporary.open("wb") as new:
                    for part in parts:
                        digest.update(part)
                        new.write(part)
                    new.flush()
                    os.fsync(new.fileno())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            _write_record(path, digest.hexdigest(), path.stat())
            return path.open("rb"), path, True


@contextlib.contextmanager
def _using(path: Path) -> Iterator[None]:
    """Makes a failure of the disk a CacheError."""
    try:
        yield
    except OSError as error:
        raise CacheError(f"the cache {error.filename or path} cannot be used ({error.strerror}); {ADVICE}") from error
    except (ConfigError, RunError) as error:
        raise CacheError(f"{error}; {ADVICE}") from error


def _look(path: Path, head: bytes) -> tuple[BufferedReader | None, str]:
    """The file, open, if it is fit for use; else what is wrong with it, or nothing if it is missing."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None, ""
    record, status = read_json(record_of(path)), os.fstat(file.fileno())
    if not record:
        damage = "has no record of its digest"
    elif status.st_size > SMALL and record.get("stamp") == _stamp(status):
        damage = ""
    else:
        same = hashlib.file_digest(file, "sha256").hexdigest() == record.get("sha256")
        damage = "" if same else "is damaged (another SHA-256)"
        if same and status.st_size > SMALL:  # a copy, which need not be read whole again
            with contextlib.suppress(RunError):
                _write_record(path, record["sha256"], status)
    file.seek(0)
    if not damage and file.read(len(head)) != head:
        damage = "holds something else"
    if damage:
        file.close()
        return None, damage
    file.seek(0)
    with contextlib.suppress(OSError):
        os.utime(record_of(path))  # the time of the last use
    return file, ""


def record_of(path: Path) -> Path:
    """The record of a file."""
    return path.with_suffix(".json")


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns]


def _write_record(path: Path, sha256: str, status: os.stat_result) -> None:
    write_atomically(record_of(path), json.dumps({"sha256": sha256, "stamp": _stamp(status)}))


def remove(path: Path) -> bool:
    """Removes a file, its record and its lock; False if a process is making it. What has mapped it keeps it."""
    lock = path.with_suffix(".lock")
    try:
        with held(lock, f"{path} is being made", wait=False):
            for entry in (path, record_of(path), lock):
                entry.unlink(missing_ok=True)
    except TimeoutError:
        return False
    return True


COMPILE_SECONDS = 120
FLAGS = ("-std=c11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
         "-funroll-loops", "-shared", "-fPIC")  # fmt: skip
# Not -ffast-math: sums keep their order, and NaN stays visible, so that a run that diverges is found out.
GCC = "Free Software Foundation"  # what GCC's `--version` says, and clang's does not
# For some processors (AMD Zen 3, among others) GCC keeps products apart from sums where a sum runs along a loop,
# but not in every copy of the same loop. Then units of two widths have two roundings, and threads change bits.
GCC_FLAGS = ("--param=avoid-fma-max-bits=0",)


def compiler_of_machine() -> list[str] | None:
    """The command of the C compiler: `CC`, else gcc, cc or clang, else that of the package ziglang."""
    for command in (os.environ.get("CC", ""), "gcc", "cc", "clang"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    return [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else None


def version_of(compiler: Sequence[str]) -> str:
    """What a compiler says of itself."""
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout


def command_of(compiler: Sequence[str], version: str) -> list[str]:
    """The compiler with its flags."""
    return [*compiler, *FLAGS, *(GCC_FLAGS if GCC in version else ())]


def library_of(what: str, name: str, sources: Sequence[Path], defines: Sequence[str] = ()) -> ctypes.CDLL | None:
    """The library that the machine's compiler makes of sources, from the cache or freshly compiled; None where there is
    no compiler, or if it fails, which a line of the log says.

    Args:
        what: for messages, such as `the layers' kernels`.
        name: of its file, which also has a hash of all that it depends on.
        sources: C files, and the headers that they read.
        defines: macros, such as `REAL=float`.
    """
    compiler = compiler_of_machine()
    if compiler is None:
        return None
    try:
        version = version_of(compiler)
        command = [*command_of(compiler, version), *(f"-D{define}" for define in defines)]
        parts = (*(source.read_text(encoding="utf-8") for source in sources), *command, version, _processor())
        file = f"{name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
        files = [str(source) for source in sources if source.suffix == ".c"]

        def compiled() -> list[bytes]:
            with tempfile.TemporaryDirectory() as folder:
                words = [*command, *files, "-o", f"{folder}/{file}"]
                done = subprocess.run(words, capture_output=True, text=True, timeout=COMPILE_SECONDS)
                # A signal, for want of memory, say: it is tried again, since other kernels have other bits.
                if done.returncode < 0 or "signal" in done.stderr:
                    done = subprocess.run(words, capture_output=True, text=True, timeout=COMPILE_SECONDS)
                done.check_returncode()
                return [Path(folder, file).read_bytes()]

        try:
            with get(file, compiled)[0] as library:
                return ctypes.CDLL(library.name)
        except (CacheError, OSError) as error:
            log.warning("%s cannot be kept or loaded: every start compiles them (%s)", what, error)
        with tempfile.NamedTemporaryFile(suffix=".so") as loaded:  # once loaded, the file may go
            loaded.write(compiled()[0])
            loaded.flush()
            return ctypes.CDLL(loaded.name)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        log.warning("%s could not be made by %s (%s)", what, shlex.join(compiler), detail)
        return None


def _processor() -> str:
    """The properties of the processor that `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
