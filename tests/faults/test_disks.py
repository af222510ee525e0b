"""Disks that are full, gone or read-only: a run ends and a sweep pauses with one line; the same command goes on."""

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from distributed.launch.elastic import FINAL, LAUNCHER
from metalearn.app.process import BAD_CONFIG, DISK, FAILED, ending_of, exit_code_of_process
from metalearn.errors import DataError, DiskError, RunError
from metalearn.storage.cache import CacheError
from metalearn.storage.files import unwritten, writing
from tests.runs import ROOT, Program, assert_same_bytes, metrics, slow, train_in, until
from tests.sweeps.programs import FIXED, PLOTS, completed, params, rows, sweep

pytestmark = pytest.mark.thorough

TINY = (
    "experiment=maml_sinusoid", "trainer.steps=12", "trainer.meta_batch_size=4", "trainer.val_every=6",
    "trainer.val_tasks=8", "trainer.test_tasks=8", "checkpoint.every=4", "logger.every=2",
)  # fmt: skip

FULL_FOR = f"""
import errno, os, runpy, sys
name = sys.argv[1]
def full(event, arguments):
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR) and name in str(arguments[0]).rpartition("/")[2]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))
sys.addaudithook(full)
sys.argv = ["train.py", *sys.argv[2:]]
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""
"""The program on a disk that has no room for files of one name. No mount is needed for it."""


def assert_one_line(text: str, begin: str, *parts: str) -> str:
    """The text has one line with this beginning, which of a run's error tells how much is free, and no traceback."""
    lines = [line for line in text.splitlines() if line.startswith(begin)]
    assert len(lines) == 1 and "Traceback" not in text and "Error executing" not in text, text
    room = ["free in "] if begin == "error: " else []
    assert all(part in lines[0] for part in (*room, "the same command", *parts)), lines
    return lines[0]


# Single runs


FILES = ("config.yaml", "train.log", "events.out", "state.pt", "meta.json", "test.csv", "result.json",
         "learning_curve", "report.html")  # fmt: skip


@pytest.mark.parametrize("names", [("metrics.jsonl",), pytest.param(FILES, marks=slow)])
def test_a_full_disk_is_named_and_the_bits_stay(tmp_path: Path, names: tuple[str, ...]) -> None:
    drawn = str("learning_curve" in names).lower()
    own = (*TINY, f"logger.plots={drawn}", f"logger.report={drawn}")
    train_in(tmp_path / "whole", *own)
    run = tmp_path / "run"
    for name in names:
        command = [sys.executable, "-c", FULL_FOR, name, f"hydra.run.dir={run}", *own]
        outcome = Program(command, tmp_path).wait()
        assert outcome.code == 1, (name, outcome.text)
        assert_one_line(outcome.text, "error: ", "No space left on device", "make room")
    train_in(run, *own)
    assert_same_bytes(run, tmp_path / "whole")
    assert drawn == "false" or ((run / "plots/learning_curve.png").exists() and (run / "report.html").exists())
    kept = ("step", "split", "loss", "mse")
    lines = [[{key: line.get(key) for key in kept} for line in metrics(tmp_path / name)] for name in ("run", "whole")]
    assert lines[0] == lines[1]


def test_a_run_whose_folder_is_removed_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    endless = [sys.executable, str(ROOT / "train.py"), f"hydra.run.dir={run}", *TINY, "trainer.steps=100000"]
    program = Program(endless, tmp_path)
    until(lambda: (run / "checkpoints/last").exists(), "a checkpoint")
    run.rename(tmp_path / "elsewhere")
    outcome = program.wait()
    assert outcome.code == 1
    assert_one_line(outcome.text, "error: ", str(run))


def test_only_a_launcher_and_a_sweep_hear_that_it_was_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run() -> int:
        with writing(tmp_path):
            (tmp_path / "gone/file").touch()
        return 0

    assert exit_code_of_process(run) == FAILED and ending_of(run)[0] == DISK
    monkeypatch.setenv(LAUNCHER, "1")
    assert exit_code_of_process(run) == DISK and DISK in FINAL
    for number, kind in ((errno.EROFS, DiskError), (errno.EFBIG, RunError), (errno.EACCES, RunError)):
        assert type(unwritten(tmp_path, OSError(number, os.strerror(number)))) is kind


# Sweeps

SPACE = ("algorithm.inner_lr=tag(log,interval(1e-3,1e-1))", "trainer.steps=choice(40,60)")
SEARCH = ("hydra/sweeper=async", "hydra.sweeper.sampler=random", "hydra.sweeper.n_trials=3")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "sweep"
    completed(folder, *SPACE, *SEARCH)
    return folder


def assert_same(folder: Path, undisturbed: Path) -> None:
    keys = ("number", "outcome", "val.mse", "algorithm.inner_lr", "trainer.steps")
    both = [[[row[key] for key in keys] for row in rows(where)] for where in (folder, undisturbed)]
    assert both[0] == both[1] and params(folder) == params(undisturbed)


@slow
def test_a_trial_whose_folder_is_removed_is_not_blamed(tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "sweep"
    program = sweep(folder, *SPACE, *SEARCH, "hydra.sweeper.max_retries=0")
    until(lambda: (folder / "trial_0001/checkpoints/last").exists(), "a checkpoint of the second trial")
    (folder / "trial_0001").rename(tmp_path / "elsewhere")
    outcome = program.wait()
    assert outcome.code == 1, outcome.text
    assert_one_line(outcome.text, "paused: trial 1: ", "trial_0001")
    completed(folder, *SPACE, *SEARCH, "hydra.sweeper.max_retries=0")
    assert_same(folder, undisturbed)


def test_a_failing_disk_is_blamed_not_the_data() -> None:
    def reading(number: int) -> int:
        try:
            raise CacheError("the cache cannot be used") from OSError(number, os.strerror(number))
        except CacheError as error:
            raise DataError("a picture cannot be read") from error

    codes = [ending_of(lambda number=number: reading(number))[0] for number in (errno.EIO, errno.ENOENT)]
    assert codes == [DISK, BAD_CONFIG]


class Disk(NamedTuple):
    """A small file system. `mend` takes away what was done to it, and gives it more space."""

    folder: Path
    image: Path

    def mount(self, *arguments: str) -> None:
        """Skips the test where this user may not mount."""
        self.folder.mkdir(exist_ok=True)
        done = subprocess.run(["mount", *arguments, str(self.folder)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this user cannot mount a small disk: {done.stderr.strip()}")

    def small(self, options: str) -> None:
        self.mount("-t", "tmpfs", "-o", options, "none")

    def ext4(self) -> None:
        with self.image.open("wb") as file:
            file.truncate(16 * 2**20)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(self.image)], check=True)
        self.mount("-o", "loop", str(self.image))

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], capture_output=True)

    def mend(self, fault: str) -> None:
        if fault.startswith(("size", "nr_inodes")):
            self.mount("-o", "remount,size=50m,nr_inodes=0", "none")
        elif fault in ("read-only", "unmounted"):
            self.unmount()
            self.mount("-o", "loop", str(self.image))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "disk", tmp_path / "image")
    yield made
    made.unmount()


def when(folder: Path, moment: str) -> Callable[[], bool]:
    """Whether a sweep has come so far: to a file in its folder."""
    return lambda: (folder / moment).exists()


FAULTS = [("size=120k", ""), ("size=280k", ""), ("read-only", "trial_0001/metrics.jsonl")]
"""What is done to the disk; and at which file, or with which override."""


@slow
@pytest.mark.parametrize(("fault", "more"), FAULTS, ids=[" ".join(case).strip() for case in FAULTS])
def test_a_sweep_on_a_failing_disk_completes_once_mended(
    disk: Disk, undisturbed: Path, fault: str, more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = disk.folder / "sweep"
    own = ("hydra.sweeper.max_retries=0", f"hydra.sweeper.plots={more == PLOTS}", f"hydra.sweep.dir={folder}")
    command = [sys.executable, str(ROOT / "train.py"), "-m", *FIXED, *SPACE, *SEARCH, *own]
    disk.small(fault) if fault.startswith("size") else disk.ext4()
    began = time.monotonic()
    program = Program(command, disk.folder.parent)  # its output goes elsewhere
    if not fault.startswith("size"):
        until(when(folder, more), more)
        what, _, target = fault.partition(" ")
        if what == "read-only":
            disk.mount("-o", "remount,abort", str(disk.image))
        elif what == "unmounted":
            disk.unmount()
        elif (disk.folder / target).is_dir():
            shutil.rmtree(disk.folder / target, ignore_errors=True)
        else:
            (disk.folder / target).unlink()
    outcome = program.wait()
    assert outcome.code == 1, outcome.text
    line = assert_one_line(outcome.text, "paused: ", str(disk.folder))
    disk.mend(fault)
    again = Program(command, disk.folder.parent).wait()
    assert again.code == 0, again.text
    assert_same(folder, undisturbed)
    assert more != PLOTS or (folder / "plots/history.png").exists()
    with capsys.disabled():
        where = line.replace(str(disk.folder), "DISK").partition("; ")[0]
        print(f"\n{fault:30} {more:28} {len(rows(folder))} of 3 trials, {time.monotonic() - began:3.0f} s; {where}")
