"""Tasks that are drawn ahead of the step, in forks that are killed, fail, or draw something else."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children

import pytest
import torch
from torch import Tensor

from metalearn.training import ahead as module
from metalearn.training.ahead import ByProcesses, processes_for
from tests.runs import ROOT, alive, until


def made(step: int) -> list[Tensor]:
    """Tasks of a step, with a missing value, and the process that has drawn them."""
    return [torch.tensor([step, float("nan")]), torch.arange(step)]


@pytest.fixture
def drawing() -> Iterator[Callable[..., ByProcesses]]:
    """Makes what draws; it is stopped at the end."""
    started: list[ByProcesses] = []

    def start(how: Callable[[int], list[Tensor]], last: int = 9) -> ByProcesses:
        started.append(ByProcesses(how, 1, last, 2))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def forks_of(drawing: ByProcesses) -> list[int]:
    assert drawing._pool is not None
    return list(drawing._pool._processes)


def ended(forks: list[int]) -> None:
    """Fails unless they end soon."""
    until(lambda: not any(map(alive, forks)), "the end of the forks", 20)


def test_forks_draw_the_tasks_of_every_step(drawing: Callable[..., ByProcesses]) -> None:
    here = os.getpid()

    def by_whom(step: int) -> list[Tensor]:
        return [*made(step), torch.tensor(float(os.getpid() != here) if step > 1 else 0.0)]

    ahead = drawing(by_whom)
    for step in range(1, 10):
        *tasks, elsewhere = ahead.of(step)
        assert [value.numpy().tobytes() for value in tasks] == [value.numpy().tobytes() for value in made(step)]
        assert elsewhere == (step > 1)


def test_an_error_of_a_task_is_that_of_this_process_and_the_next_ones_are_drawn(
    drawing: Callable[..., ByProcesses],
) -> None:
    class OwnError(Exception):
        def __init__(self, one: int, two: int) -> None:  # no pickle holds it
            super().__init__(f"step {one} of {two}")

    def fails(step: int) -> list[Tensor]:
        if step == 3:
            raise OwnError(step, 9)
        return made(step)

    ahead = drawing(fails)
    for step in (1, 2):
        ahead.of(step)
    with pytest.raises(OwnError, match="step 3 of 9"):
        ahead.of(3)
    assert ahead.of(4)[1].tolist() == [0, 1, 2, 3]


def test_without_its_forks_the_run_draws_the_tasks(
    drawing: Callable[..., ByProcesses], caplog: pytest.LogCaptureFixture
) -> None:
    ahead = drawing(made, last=10_000)
    ahead.of(1)
    for number in forks_of(ahead):
        os.kill(number, signal.SIGKILL)
    for step in range(2, 30):
        assert ahead.of(step)[1].tolist() == list(range(step))
    assert caplog.text.count("so the run draws them") == 1 and ahead._pool is None


def test_forks_that_draw_other_tasks_are_not_used(
    drawing: Callable[..., ByProcesses], caplog: pytest.LogCaptureFixture
) -> None:
    ahead = drawing(lambda step: [torch.tensor(float(os.getpid()))])
    assert ahead.of(1)[0] == ahead.of(2)[0] == float(os.getpid())
    assert "so the run draws them: another process draws other tasks for step 1" in caplog.text


def test_forks_that_hang_are_ended(
    drawing: Callable[..., ByProcesses], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.5)
    here = os.getpid()

    def hangs(step: int) -> list[Tensor]:
        if os.getpid() != here:
            time.sleep(300)
        return made(step)

    before, ahead = set(active_children()), drawing(hangs)
    assert ahead.of(1)[1].tolist() == [0] and "so the run draws them: TimeoutError" in caplog.text
    assert ahead.of(2)[1].tolist() == [0, 1]
    until(lambda: not set(active_children()) - before, "the end of the forks", 20)


def test_a_fork_goes_on_at_the_signals_on_which_a_run_saves_and_ends_with_it(
    drawing: Callable[..., ByProcesses],
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
        "from metalearn.training.ahead import ByProcesses\n"
        "from tests.metalearn.training.test_ahead import forks_of, made\n"
        "ahead = ByProcesses(made, 1, 9, 2)\n"
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
