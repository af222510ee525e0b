"""C sources, compiled once for this processor by the compiler of this machine; the cache keeps the libraries."""

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from metalearn.storage import cache

log = logging.getLogger("metalearn")

FLAGS = ("-std=c11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
         "-funroll-loops", "-shared", "-fPIC")  # fmt: skip
# Not -ffast-math: sums keep their order, and NaN stays visible, so that a run that diverges is found out.
GCC = "Free Software Foundation"
"""What GCC's `--version` says, and clang's does not."""

GCC_FLAGS = ("--param=avoid-fma-max-bits=0",)
"""For some processors (AMD Zen 3, among others) GCC keeps products apart from sums where a sum runs along a loop,
but not in every copy of the same loop. Then units of two widths have two roundings, and threads change bits."""

COMPILE_SECONDS = 120


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
    """The library that the machine's compiler makes of sources, from the cache or freshly compiled.

    Args:
        what: for messages, such as `the layers' kernels`.
        name: of its file, which also has a hash of all that it depends on.
        sources: C files, and the headers that they read.
        defines: macros, such as `REAL=float`.

    Returns:
        None where there is no compiler, or if it fails, which a line of the log says.
    """
    compiler = compiler_of_machine()
    if compiler is None:
        return None
    try:
        return _made(compiler, what, name, sources, defines)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        log.warning("%s could not be made by %s (%s)", what, shlex.join(compiler), detail)
        return None


def _made(
    compiler: Sequence[str], what: str, name: str, sources: Sequence[Path], defines: Sequence[str]
) -> ctypes.CDLL:
    version = version_of(compiler)
    command = [*command_of(compiler, version), *(f"-D{define}" for define in defines)]
    parts = (*(source.read_text(encoding="utf-8") for source in sources), *command, version, _processor())
    file = f"{name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"

    def make() -> list[bytes]:
        with tempfile.TemporaryDirectory() as folder:
            return [_compile(command, sources, Path(folder) / file).read_bytes()]

    try:
        with cache.get(file, make).file as library:
            return ctypes.CDLL(library.name)
    except (cache.CacheError, OSError) as error:
        log.warning("%s cannot be kept or loaded: every start compiles them (%s)", what, error)
    with tempfile.TemporaryDirectory() as folder:  # once loaded, the file may go
        return ctypes.CDLL(str(_compile(command, sources, Path(folder) / file)))


def _compile(command: Sequence[str], sources: Sequence[Path], to: Path) -> Path:
    files = [str(source) for source in sources if source.suffix == ".c"]
    subprocess.run(
        [*command, *files, "-o", str(to)], capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS
    )
    return to


def _processor() -> str:
    """The properties of the processor that `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
