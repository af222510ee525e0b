"""Tasks that are drawn ahead of the step, in a thread or in forks, which may fail or be killed."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from metalearn.training import on_device
from metalearn.training.on_device import Ahead, processes_for
from tests.runs import ROOT, alive, until


def made(step: int) -> list[Tensor]:
    """Tasks of a step, with a missing value, and the process that has drawn them."""
    return [torch.tensor([step, float("nan")]), torch.arange(step)]


@pytest.fixture
def drawing() -> Iterator[Callable[..., Ahead]]:
    """Makes what draws; it is stopped at the end."""
    started: list[Ahead] = []

    def start(how: Callable[[int], list[Tensor]], last: int = 9, **options: Any) -> Ahead:
        started.append(Ahead(how, 1, last, **(options or {"processes": 2})))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def forks_of(drawing: Ahead) -> list[int]:
    assert isinstance(drawing._pool, ProcessPoolExecutor)
    return list(drawing._pool._processes)


def ended(forks: list[int]) -> None:
    """Fails unless they end soon."""
    until(lambda: not any(map(alive, forks)), "the end of the forks", 20)


@pytest.mark.parametrize("options", [{"processes": 2}, {"thread": True}, {"processes": 0}])
def test_the_tasks_of_every_step_are_drawn(drawing: Callable[..., Ahead], options: dict[str, Any]) -> None:
    def by_whom(step: int) -> list[Tensor]:
        return [*made(step), torch.tensor([os.getpid(), threading.get_ident()])]

    ahead, here = drawing(by_whom, **options), torch.tensor([os.getpid(), threading.get_ident()])
    for step in range(1, 10):
        *tasks, whom = ahead.of(step)
        assert [value.numpy().tobytes() for value in tasks] == [value.numpy().tobytes() for value in made(step)]
        assert (whom[0] != here[0]) == bool(options.get("processes"))
        assert whom.equal(here) == (options == {"processes": 0})


def test_an_error_of_a_task_reaches_the_run(drawing: Callable[..., Ahead]) -> None:
    class TwoPartsError(Exception):
        def __init__(self, one: int, two: int) -> None:  # no pickle holds it
            super().__init__(f"step {one} of {two}")

    def fails(step: int) -> list[Tensor]:
        if step == 3:
            raise TwoPartsError(step, 9)
        return made(step)

    for options in ({"processes": 2}, {"thread": True}):
        ahead = drawing(fails, **options)
        for step in (1, 2):
            ahead.of(step)
        with pytest.raises(TwoPartsError, match="step 3 of 9"):
            ahead.of(3)


def test_a_file_that_a_source_misses_does_not_end_the_forks(drawing: Callable[..., Ahead]) -> None:
    starter = os.getpid()

    def misses(step: int) -> list[Tensor]:
        if step == 2 and os.getpid() != starter:
            raise FileNotFoundError("a file of the source")
        return [*made(step), torch.tensor(os.getpid())]

    ahead = drawing(misses)
    drawn_by = [int(ahead.of(step)[2]) for step in range(1, 6)]
    assert drawn_by[1] == starter and starter not in drawn_by[2:] and ahead._pool is not None


def test_without_its_forks_the_run_draws_the_tasks(
    drawing: Callable[..., Ahead], caplog: pytest.LogCaptureFixture
) -> None:
    ahead = drawing(made, last=10_000)
    ahead.of(1)
    for number in forks_of(ahead):
        os.kill(number, signal.SIGKILL)
    for step in range(2, 30):
        assert ahead.of(step)[1].tolist() == list(range(step))
    assert caplog.text.count("so the run draws them") == 1 and ahead._pool is None


def test_a_fork_that_hangs_does_not_hold_up_the_run(
    drawing: Callable[..., Ahead], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "PATIENCE", 0.5)
    ahead = drawing(made, last=10_000)
    ahead.of(1)
    forks = forks_of(ahead)
    for number in forks:
        os.kill(number, signal.SIGSTOP)
    for step in range(2, 30):
        assert ahead.of(step)[1].tolist() == list(range(step))
    assert "none came within 0.5 s" in caplog.text and ahead._pool is None
    ended(forks)


def test_without_a_place_for_locks_the_run_draws_the_tasks(
    drawing: Callable[..., Ahead], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("multiprocessing.context.BaseContext.Lock", full)
    ahead = drawing(made)
    assert [ahead.of(step)[1].tolist() for step in (1, 2)] == [[0], [0, 1]]
    assert "so the run draws them: [Errno 28] No space left on device" in caplog.text


def test_a_fork_ignores_stop_signals_and_ends_with_its_run(
    drawing: Callable[..., Ahead],
) -> None:
    ahead = drawing(made)
    ahead.of(1)
    forks = forks_of(ahead)
    for number in forks:
        for what in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(number, what)
    assert ahead.of(2)[1].tolist() == [0, 1] and ahead._pool is not None
    ahead.stop()
    ended(forks)


def test_forks_end_with_a_run_that_is_killed() -> None:
    program = (
        "import time\n"
        "from metalearn.training.on_device import Ahead\n"
        "from tests.metalearn.training.test_ahead import forks_of, made\n"
        "ahead = Ahead(made, 1, 9, processes=2)\n"
        "ahead.of(1)\n"
        "print(*forks_of(ahead), flush=True)\n"
        "time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            forks = [int(number) for number in run.stdout.readline().split()]
            assert len(forks) == 2 and all(map(alive, forks))
        finally:
            run.kill()
    ended(forks)


def test_only_tasks_of_a_prior_are_drawn_ahead_unasked() -> None:
    cores = len(os.sched_getaffinity(0))
    assert processes_for("auto", pure=False) == 0 and processes_for(3, pure=False) == 3
    assert processes_for("auto", pure=True) == min(16, cores - 1)
