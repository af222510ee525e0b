"""`metalearn cache`: what it shows, what it removes, and what it never touches."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from metalearn.storage import cache
from tests.runs import ROOT, said_by, until

DAY = 24 * 3600.0
OLD, NEW, LARGE = "omniglot-v1-28.npy", "cifar100-v1.npy", "image_folder-large.npy"
LEFTOVERS = (".omniglot-v1-28.npy.0123abcd.tmp", ".kernels-float-0123456789abcdef.so.w_3xyz89.tmp")
NOT_OURS = ("notes.txt", "data.npy", "kernels-float-0123456789abcdef.so", ".draft.tmp", "link.npy")


def record(name: str) -> str:
    return cache.record_of(Path(name)).name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with files of all kinds; those whose names say so were last used 40 days ago."""
    monkeypatch.setenv("METALEARN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    for name, size in ((OLD, 1000), (NEW, 1000), (LARGE, 2_000_000)):
        cache.get(name, partial(list, [bytes(size)]))[0].close()
    folder = tmp_path / "cache"
    for name in (*LEFTOVERS, *NOT_OURS[:-1]):
        (folder / name).write_text("content")
    (folder / "link.npy").symlink_to(tmp_path)
    past = time.time() - 40 * DAY
    for name in (OLD, record(OLD), record(LARGE), *LEFTOVERS, *NOT_OURS[:-1]):
        os.utime(folder / name, (past, past))
    return folder


def script(*arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "metalearn", "cache", *arguments]
    run = said_by(command)
    assert run.returncode == code, run
    return run.stdout + run.stderr


def removed(folder: Path, *arguments: str) -> set[str]:
    """The names of the files that the script removes; it shows the same ones before."""
    before = {path.name for path in folder.iterdir()}
    shown = script("--clean", *arguments)
    assert {path.name for path in folder.iterdir()} == before and "nothing is removed without --yes" in shown
    script("--clean", *arguments, "--yes")
    gone = before - {path.name for path in folder.iterdir()}
    assert all(name in shown for name in gone if not name.endswith((".json", ".lock")))
    return gone


def whole(name: str) -> set[str]:
    return {name, record(name), f"{Path(name).stem}.lock"}


def test_it_shows_kind_size_age_and_last_use(folder: Path) -> None:
    lines = {line.split()[-1]: line.split() for line in script().splitlines() if " days old" in line}
    assert lines.keys() == {OLD, NEW, LARGE, *LEFTOVERS}
    assert [lines[LARGE][i] for i in (0, 1, 2, 3, 7)] == ["image_folder", "2.0", "MB", "0.0", "40.0"]
    assert lines[LEFTOVERS[0]][0] == "leftover"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ((), set()),
        (("--older-than", "30"), {*whole(OLD), *whole(LARGE)}),
        (("--older-than", "50"), set()),
    ],
)
def test_it_removes_matching_files_and_leftovers_only(
    arguments: tuple[str, ...], names: set[str], folder: Path
) -> None:
    assert removed(folder, *arguments) == names | set(LEFTOVERS)


@pytest.fixture
def making(folder: Path) -> Iterator[None]:
    """Another process makes the old file again."""
    program = (
        f"import time; from metalearn.storage import cache; cache.get({OLD!r}, lambda: time.sleep(100), head=b'other')"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as other:
        until(lambda: str(other.pid) in (folder / "omniglot-v1-28.lock").read_text(), "the lock", by=other)
        yield
        other.kill()


def test_it_leaves_what_is_being_made(folder: Path, making: None) -> None:
    assert "is being made: stays" in script("--clean", "--older-than", "30", "--yes")
    assert (folder / OLD).exists()


@pytest.mark.parametrize("wrong", [["--yes"], ["--older-than", "30"], ["--clean", "--older-than", "-1"]])
def test_wrong_arguments_remove_nothing(wrong: list[str], folder: Path) -> None:
    before = sorted(folder.iterdir())
    script(*wrong, code=2)
    assert sorted(folder.iterdir()) == before
