"""The cache against other users, damage, locks that others hold, and file systems that refuse."""

import contextlib
import io
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from getpass import getuser
from pathlib import Path

import numpy as np
import pytest
import torch

from metalearn.errors import DataError
from metalearn.nn import native
from metalearn.storage import cache, locks
from metalearn.tasks.common.cache import cached_array
from tests.kernels import require_kernels
from tests.runs import ROOT, slow, until

NOBODY = 54321
PICTURES = np.arange(6, dtype=np.uint8).reshape(2, 3)
LOAD = "import torch; from metalearn.nn import native; print(native.compiled(torch.float32).lanes)"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes the place of another user, which only root can")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that others can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(autouse=True)
def folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder. The one in the user's cache folder is empty too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "own"))
    monkeypatch.setenv("METALEARN_CACHE", str(place / "cache"))
    (place / "cache").mkdir(mode=0o755)
    return place / "cache"


@pytest.fixture
def library(own_cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The compiled library in the cache folder, not loaded yet."""
    with monkeypatch.context() as compiling:
        compiling.setenv("METALEARN_CACHE", str(own_cache))
        native.compiled.cache_clear()
        require_kernels()
    native.compiled.cache_clear()
    (source,) = own_cache.glob("kernels-float-*.so")
    for path in own_cache.glob(f"{source.stem}.*"):
        (folder / path.name).write_bytes(path.read_bytes())
    yield folder / source.name
    native.compiled.cache_clear()


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The messages. An earlier test in this process may have sent them elsewhere."""
    monkeypatch.setattr(logging.getLogger("metalearn"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("metalearn"), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


def is_made() -> bool:
    """Reads the array `pictures`; returns whether it had to be made."""
    made = []

    def make() -> np.ndarray:
        made.append(1)
        return PICTURES

    assert np.array_equal(cached_array("pictures", PICTURES.shape, make, title="Pictures"), PICTURES)
    return bool(made)


def as_nobody(*command: str | Path, **extra: str) -> "subprocess.CompletedProcess[str]":
    """Runs a command as another user of this host."""
    change = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return subprocess.run(
        [*change, *map(str, command)], cwd=ROOT, env=os.environ | extra, capture_output=True, text=True, timeout=100
    )


def python_as_nobody(program: str, **extra: str) -> "subprocess.CompletedProcess[str]":
    if as_nobody(sys.executable, "-c", "import metalearn.storage.cache").returncode:
        pytest.skip("other users cannot read this checkout or its Python")
    return as_nobody(sys.executable, "-c", program, **extra)


def hostile_library(place: Path) -> Path:
    """A library that makes a file `ran` beside itself when it is loaded."""
    code = f'#include <fcntl.h>\n__attribute__((constructor)) void run(void) {{ creat("{place}/ran", 0600); }}\n'
    (place / "hostile.c").write_text(code)
    subprocess.run(["gcc", "-shared", "-fPIC", place / "hostile.c", "-o", place / "hostile.so"], check=True)
    return place / "hostile.so"


# Other users


@as_root
@pytest.mark.parametrize(
    "folder_mode",
    [pytest.param(0o775, id="folder of a group"), pytest.param(0o755, id="folder of this user", marks=slow)],
)
def test_a_library_of_another_user_does_not_run(
    folder_mode: int, library: Path, place: Path, told: pytest.LogCaptureFixture
) -> None:
    hostile, folder = hostile_library(place), library.parent
    folder.chmod(0o775)
    os.chown(folder, 0, NOBODY)
    assert not as_nobody("cp", "--remove-destination", hostile, library).returncode
    folder.chmod(folder_mode)
    assert library.stat().st_uid == NOBODY
    assert native.compiled(torch.float32) is not None
    assert not (place / "ran").exists()
    if folder_mode == 0o755:
        assert f"{library} belongs to user {NOBODY}: it is made again" in told.text
        assert library.stat().st_uid == 0
    else:
        assert f"the cache {folder} is not used, since it can be written by others (mode 775)" in told.text
        assert library.stat().st_uid == NOBODY


@as_root
@pytest.mark.parametrize("change", ["owner", "mode", "owner of the folder", "mode of the folder"])
def test_an_array_that_another_user_can_have_written_is_not_used(
    change: str, folder: Path, place: Path, told: pytest.LogCaptureFixture
) -> None:
    assert is_made() and not is_made()
    target = folder if change.endswith("folder") else folder / "pictures.npy"
    if change.startswith("owner"):
        os.chown(target, NOBODY, 0)
    else:
        target.chmod(target.stat().st_mode | 0o020)
    assert is_made() and not is_made()
    assert str(target) in told.text and ("belongs to user" in told.text) == change.startswith("owner")
    kept = (place / "own" / "metalearn" if target is folder else folder) / "pictures.npy"
    assert (kept.stat().st_uid, kept.stat().st_mode & 0o777) == (0, 0o600)
    assert kept.with_suffix(".lock").stat().st_mode & 0o777 == 0o600


def test_no_umask_lets_others_read_or_write(folder: Path) -> None:
    folder.rmdir()
    before = os.umask(0)
    try:
        assert is_made()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes == {"cache": 0o700} | dict.fromkeys(("pictures.npy", "pictures.json", "pictures.lock"), 0o600)


@as_root
@pytest.mark.parametrize(("owner", "why"), [(0, "belongs to user 0"), (NOBODY, "cannot be written")])
def test_a_folder_that_is_not_the_users_to_write_is_not_used(owner: int, why: str, folder: Path, place: Path) -> None:
    cache.get("x.npy", lambda: [b"other"]).file.close()
    os.chown(folder, owner, -1)
    folder.chmod(0o555)
    (place / "own").mkdir()
    os.chown(place / "own", NOBODY, NOBODY)
    program = "from metalearn.storage import cache; print(*cache.get('x.npy', lambda: [b'x'])[1:])"
    own = place / "own" / "metalearn" / "x.npy"
    for made in (True, False):
        run = python_as_nobody(program)
        assert run.stdout == f"{own} {made}\n", run.stderr
        assert f"the cache {folder} is not used, since it {why}. {own.parent} is used instead" in run.stderr


@as_root
def test_a_user_is_known_in_the_namespace_of_an_isolated_run(folder: Path) -> None:
    """There, users may have other numbers."""
    os.chown(folder, NOBODY, NOBODY)
    program = f"""
import importlib.util, os, time
from metalearn.storage import cache
module = importlib.util.spec_from_file_location("isolation", "{ROOT}/distributed/cluster/isolation.py")
isolation = importlib.util.module_from_spec(module)
module.loader.exec_module(isolation)  # alone: torch would start threads
try:
    network, _ = isolation.new_network("127.0.0.1", 0)
except isolation.CannotIsolateError as error:
    raise SystemExit(f"cannot: {{error}}")
get = lambda: print(*cache.get("x.npy", lambda: [b"x"])[1:])
get()
while len(os.listdir("/proc/self/task")) > 1:  # the kernel lets no process enter whose thread is still about to end
    time.sleep(0.01)
network.enter()
get()
"""
    run = python_as_nobody(program, XDG_CACHE_HOME="/proc")
    if "cannot: " in run.stderr:
        pytest.skip(run.stderr)
    assert run.stdout.splitlines() == [f"{folder / 'x.npy'} True", f"{folder / 'x.npy'} False"], run


# Damage


@pytest.mark.thorough
@pytest.mark.parametrize("damage", ["zeroed", pytest.param("cut short", marks=slow)])
def test_a_damaged_library_is_made_again(damage: str, library: Path) -> None:
    whole = library.read_bytes()
    library.write_bytes(whole[:6000] if damage == "cut short" else whole[:4000] + bytes(len(whole) - 4000))
    run = subprocess.run([sys.executable, "-c", LOAD], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run
    assert "is damaged" in run.stderr and library.stat().st_size == len(whole)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_array_is_made_again(folder: Path, told: pytest.LogCaptureFixture) -> None:
    is_made()
    array, record = folder / "pictures.npy", folder / "pictures.json"
    whole = array.read_bytes()
    for damage in (
        lambda: flip(array),
        lambda: array.write_bytes(whole[:-1]),
        lambda: array.write_bytes(bytes(len(whole))),
        record.unlink,
        lambda: record.write_text("[" * 5000),
        lambda: record.write_text('{"sha256": "", "stamp": []}'),
    ):
        damage()
        told.clear()
        assert is_made() and not is_made()
        assert f"{array} " in told.text and "it is made again" in told.text


def test_a_large_array_is_read_whole_only_after_a_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "SMALL", 100)
    is_made()
    array, record = folder / "pictures.npy", folder / "pictures.json"
    right = record.read_text()
    record.write_text(right.replace('"sha256": "', '"sha256": "0'))
    assert not is_made()  # the digest is not computed
    record.write_text(right)
    array.touch()
    assert not is_made() and record.read_text() != right  # it is computed once, and noted
    times = array.stat()
    flip(array)
    os.utime(array, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert is_made()
    assert "another SHA-256" in told.text


def test_what_is_written_is_whole_or_not_there(folder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(DataError) as caught:
            is_made()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{folder / 'pictures.npy'} cannot be written" in str(caught.value)
    assert [path.name for path in folder.iterdir()] == ["pictures.lock"]


def test_leftovers_of_killed_processes_are_removed(folder: Path) -> None:
    """When the file is made again; those of other files stay."""
    names = (".pictures.npy.0123abcd.tmp", ".pictures.json.w_3xyz89.tmp")
    others = (".pictures-of-me.npy.0123abcd.tmp", ".draft.tmp")
    for name in (*names, *others):
        (folder / name).write_text("unfinished")
    is_made()
    assert {path.name for path in folder.iterdir()} == {"pictures.npy", "pictures.json", "pictures.lock", *others}


# Locks


def maker(seconds: float) -> "subprocess.Popen[bytes]":
    """A process that takes so long to make the array `pictures`, and shows that it lives ten times a second."""
    whole = io.BytesIO()
    np.save(whole, PICTURES)
    lines = (
        "import time",
        "from metalearn.storage import cache, locks",
        "locks._SIGN_SECONDS = 0.1",
        f"make = lambda: time.sleep({seconds}) or [{whole.getvalue()!r}]",
        "cache.get('pictures.npy', make)",
    )
    return subprocess.Popen([sys.executable, "-c", "\n".join(lines)], cwd=ROOT)


@pytest.mark.parametrize("stops", [False, True])
def test_a_wait_is_told_and_ends_when_the_other_process_shows_no_life(
    stops: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locks, "SILENT_SECONDS", 1.5)
    lock = folder / "pictures.lock"
    with maker(100 if stops else 3) as other:
        try:
            until(lambda: lock.exists() and lock.read_text(), "the lock", by=other)
            if stops:
                other.send_signal(signal.SIGSTOP)
            with pytest.raises(DataError) if stops else contextlib.nullcontext() as caught:
                assert not is_made()
        finally:
            other.kill()
    assert f"{folder / 'pictures.npy'} is being made by process {other.pid} of {getuser()}" in told.text
    if caught is not None:
        assert f"{lock} is held by process {other.pid} of {getuser()}" in str(caught.value)
        assert "METALEARN_CACHE=" in str(caught.value)


@slow
@pytest.mark.thorough
def test_a_file_system_without_locks_is_named(folder: Path, place: Path) -> None:
    """`flock` fails as it does on such a file system."""
    (place / "flock.c").write_text("#include <errno.h>\nint flock(int f, int o) { errno = ENOLCK; return -1; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", place / "flock.c", "-o", place / "flock.so"], check=True)
    lines = (
        "from pathlib import Path",
        "from metalearn.storage import cache",
        "from metalearn.errors import ConfigError",
        "from metalearn.runs import folder",
        f"Path('{folder}/.x.npy.0123abcd.tmp').touch()",  # another process may be writing it
        "print(cache.get('x.npy', lambda: [b'x']).file.read())",
        f"try: folder.lock(Path('{place}')); print('held')",
        "except ConfigError as error: print(error)",
    )
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ROOT, env=os.environ | {"LD_PRELOAD": str(place / "flock.so")}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    content, of_run = run.stdout.splitlines()
    assert (folder / ".x.npy.0123abcd.tmp").exists()
    assert content == "b'x'" and f"{folder / 'x.lock'}: its file system has no locks" in run.stderr
    assert of_run == "held" and f"{place}/.lock: this file system has no locks" in " ".join(run.stderr.split())


# The folder


def test_an_empty_name_of_the_folder_is_none(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALEARN_CACHE", "")
    monkeypatch.chdir(place)
    assert is_made() and not is_made()
    assert (place / "own" / "metalearn" / "pictures.npy").exists() and not list(place.glob("*.npy"))
