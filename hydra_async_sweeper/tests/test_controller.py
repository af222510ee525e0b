"""The controller with real processes as trials: signals, and disks that are full."""

import errno
import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from by_hand import Work, completed, controller, drawn
from optuna.samplers import BaseSampler, RandomSampler

from hydra_async_sweeper.study import Study
from hydra_async_sweeper.trials import COMPLETED, PausedError, StartedTrial, StudyError

DONE = [(number, COMPLETED, (float(number),)) for number in range(3)]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """A controller gives the signals back to whoever had them."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before


def results(study: Study) -> list[tuple[int, str, tuple[float, ...] | None]]:
    return sorted((trial.number, trial.outcome, trial.values) for trial in study.finished())


def once(folder: Path, first: Work) -> Work:
    """Trial 1 does `first` at its first start."""

    def work(number: int, overrides: Sequence[str]) -> Any:
        mark = folder / "started"
        if number == 1 and not mark.exists():
            mark.touch()
            return first(number, overrides)
        return completed(number)

    return work


@pytest.mark.parametrize("library", ["numpy.float32", "numpy.array", "torch.tensor", "fractions.Fraction"])
def test_a_number_of_another_library_is_a_number(tmp_path: Path, library: str) -> None:
    module, _, name = library.partition(".")
    number = getattr(pytest.importorskip(module), name)(0.5)
    work = lambda *_: {"status": "COMPLETED", "value": {"val": {"mse": number}}}  # noqa: E731
    with controller(tmp_path, work, 1) as (sweep, study):
        assert sweep.run() == 0 and results(study) == [(0, COMPLETED, (0.5,))]


# Signals


def test_a_trial_that_a_signal_has_stopped_alone_is_run_again(tmp_path: Path) -> None:
    stopped = {"status": "COMPLETED", "value": {"status": "stopped", "exit": 143}}
    with controller(tmp_path, once(tmp_path, lambda *_: stopped), max_retries=1) as (sweep, study):
        assert sweep.run() == 0 and results(study) == DONE


def test_a_stop_while_parameters_are_drawn_starts_no_trial(tmp_path: Path) -> None:
    def choose(number: int) -> tuple[BaseSampler, None]:
        os.kill(os.getpid(), signal.SIGTERM)
        return drawn(number)

    with controller(tmp_path, completed, choose=choose) as (sweep, study):
        assert sweep.run() == signal.SIGTERM
        assert study.interrupted() == [0] and study.waiting() == [1, 2]
        assert not list((tmp_path / "logs").iterdir())


def test_a_stop_while_a_trial_starts_stops_it(tmp_path: Path) -> None:
    def overrides_of(trial: StartedTrial) -> list[str]:
        os.kill(os.getpid(), signal.SIGTERM)
        return []

    with controller(tmp_path, lambda *_: time.sleep(60), overrides_of=overrides_of) as (sweep, study):
        began = time.monotonic()
        assert sweep.run() == signal.SIGTERM
        assert time.monotonic() - began < 30 and study.interrupted() == [0]


# Disks


def names_it(number: int, overrides: Sequence[str], status: str = "failed") -> Any:
    value = {"status": status, "exit": os.EX_IOERR, "error": "run/params: No space left on device"}
    return {"status": "COMPLETED", "value": value}


def fills_it(number: int, overrides: Sequence[str]) -> Any:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file takes another byte, as on a full disk
    return names_it(number, overrides)


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (fills_it, ".*logs: cannot be written"),
        (names_it, "run/params: No space left"),
        (partial(names_it, status="diverged"), "run/params: No space left"),
    ],
)
def test_a_full_disk_of_a_trial_pauses_the_sweep(tmp_path: Path, first: Work, reason: str) -> None:
    """No trial is blamed, and the next controller ends with every trial."""
    with (
        controller(tmp_path, once(tmp_path, first)) as (sweep, _),
        pytest.raises(PausedError, match=f"trial 1: {reason}"),
    ):
        sweep.run()
    with controller(tmp_path, completed) as (sweep, study):
        assert study.interrupted() == [1]
        assert sweep.run() == 0 and results(study) == DONE


def test_a_trial_that_fails_by_itself_is_blamed(tmp_path: Path) -> None:
    def missing(number: int, overrides: Sequence[str]) -> Any:
        return (tmp_path / "nothing").read_text()

    with controller(tmp_path, once(tmp_path, missing)) as (sweep, study):
        assert sweep.run() == 0
        assert [outcome for _, outcome, _ in results(study)] == [COMPLETED, "failed", COMPLETED]


def test_half_an_append_is_cut_by_the_next_controller(tmp_path: Path) -> None:
    """A limit on the size of files cuts an append at any byte, as a full disk does."""
    journal, whole = tmp_path / "study.journal", resource.getrlimit(resource.RLIMIT_FSIZE)
    for more in (1, 7, 60):
        with controller(tmp_path, completed) as (sweep, _):
            size = journal.stat().st_size
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + more, whole[1]))
                with pytest.raises(OSError, match="File too large"):
                    sweep.run()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, whole)
            assert journal.stat().st_size == size + more
    with controller(tmp_path, completed) as (sweep, study):
        assert sweep.run() == 0 and results(study) == DONE


def test_a_table_that_cannot_be_written_stops_the_others(tmp_path: Path) -> None:
    def record() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "trials.csv"))

    with controller(tmp_path, completed, record=record) as (sweep, study):
        with pytest.raises(OSError, match="Read-only"):
            sweep.run()
        assert results(study) == DONE[:1]


def test_a_killed_controller_leaves_no_lock(tmp_path: Path) -> None:
    """Optuna's own locks would keep the next one waiting for 30 s."""
    holder = os.fork()
    if holder == 0:
        held = Study(tmp_path / "study.journal", "s", {}, ["minimize"], {})
        (held.path.parent / "held").touch()
        time.sleep(60)
        os._exit(0)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with pytest.raises(StudyError, match="another process"):
        Study(tmp_path / "study.journal", "s", {}, ["minimize"], {})
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    began = time.monotonic()
    study = Study(tmp_path / "study.journal", "s", {}, ["minimize"], {})
    study.enqueue(1)
    study.begin(0, RandomSampler(seed=0))
    study.close()
    assert time.monotonic() - began < 10
