"""The cache: what is damaged is made again, several processes make a file once, and a folder that refuses is named."""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from metalearn.errors import DataError
from metalearn.nn import backends
from metalearn.storage import cache
from metalearn.tasks.common.stored import cached_array
from tests.kernels import require_kernels
from tests.runs import ROOT, until

PICTURES = np.arange(6, dtype=np.uint8).reshape(2, 3)
LOAD = "import torch; from metalearn.nn import backends; print(backends.compiled(torch.float32).lanes)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder. The one in the user's cache folder is empty too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("METALEARN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


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


@pytest.mark.thorough
def test_a_damaged_library_is_made_again(own_cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as compiling:
        compiling.setenv("METALEARN_CACHE", str(own_cache))
        backends.compiled.cache_clear()
        require_kernels()
    backends.compiled.cache_clear()
    (source,) = own_cache.glob("kernels-float-*.so")
    for path in own_cache.glob(f"{source.stem}.*"):
        (folder / path.name).write_bytes(path.read_bytes())
    library, whole = folder / source.name, source.read_bytes()
    library.write_bytes(whole[:4000] + bytes(len(whole) - 4000))
    run = subprocess.run([sys.executable, "-c", LOAD], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run
    assert "is damaged" in run.stderr and library.stat().st_size == len(whole)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "a flipped bit": lambda array, record: flip(array),
    "a file that is cut off": lambda array, record: array.write_bytes(array.read_bytes()[:-1]),
    "no record": lambda array, record: record.unlink(),
    "a record that is no JSON": lambda array, record: record.write_text("["),
    "another record": lambda array, record: record.write_text('{"sha256": "", "stamp": []}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_array_is_made_again(damage: str, folder: Path, told: pytest.LogCaptureFixture) -> None:
    is_made()
    DAMAGES[damage](folder / "pictures.npy", folder / "pictures.json")
    assert is_made() and not is_made()
    assert str(folder / "pictures.npy") in told.text and "it is made again" in told.text


def test_a_large_array_is_read_whole_only_after_a_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SMALL", 100)
    is_made()
    array, record = folder / "pictures.npy", folder / "pictures.json"
    right = record.read_text()
    record.write_text(right.replace('"sha256": "', '"sha256": "0'))
    assert not is_made()  # the digest is not computed
    record.write_text(right)
    os.utime(array, ns=(1, 1))
    assert not is_made()
    noted = record.read_text()
    assert noted != right and json.loads(noted)["stamp"][1] == 1  # so the next start does not read it whole
    flip(array)
    assert is_made()


def test_what_is_written_is_whole_or_not_there(folder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(DataError, match="METALEARN_CACHE="):
            is_made()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in folder.iterdir()] == ["pictures.lock"]


def test_a_file_that_another_process_makes_is_waited_for(folder: Path, told: pytest.LogCaptureFixture) -> None:
    """And made here if that process is killed."""
    program = "import time; from metalearn.storage import cache; cache.get('pictures.npy', lambda: time.sleep(100))"
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as other:
        until(
            lambda: (folder / "pictures.lock").exists() and (folder / "pictures.lock").read_text(), "the lock", by=other
        )
        signal.signal(signal.SIGALRM, lambda *_: other.kill())
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        assert is_made()
    assert f"pictures.npy is being made by process {other.pid} on " in told.text


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("METALEARN_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=f"{tmp_path}/file.*METALEARN_CACHE="):
        is_made()


def test_an_empty_name_of_the_folder_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALEARN_CACHE", "")
    monkeypatch.chdir(tmp_path)
    assert is_made() and not is_made()
    assert (tmp_path / "own" / "metalearn" / "pictures.npy").exists() and not list(tmp_path.glob("*.npy"))


def test_a_compiler_that_a_signal_ends_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "one.c").write_text("int one(void) { return 1; }")
    compiler = cache.compiler_of_machine()
    if compiler is None:
        pytest.skip("there is no compiler")
    script = tmp_path / "cc"
    script.write_text(
        f"#!/bin/sh\n[ $1 = --version ] || [ -e {tmp_path}/killed ] || {{ touch {tmp_path}/killed; kill -KILL $$; }}\n"
        f'exec {" ".join(compiler)} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    library = cache.library_of("the number", "one", [tmp_path / "one.c"])
    assert library is not None and library.one() == 1 and (tmp_path / "killed").exists(), told.text
