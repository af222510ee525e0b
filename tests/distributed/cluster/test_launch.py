"""The launcher and ranks that hang, die or are stopped. The ranks are small programs without torch."""

import atexit
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from distributed.cluster import launch as launcher
from distributed.cluster.launch import LaunchConfig, launch
from distributed.cluster.processes import Fork
from distributed.cluster.store import MET_FD
from tests.runs import until

pytestmark = pytest.mark.thorough


def ranks(first: str, second: str) -> list[str]:
    """A program of two ranks, each of which runs its own lines."""
    return [sys.executable, "-c", f"import os, signal, time\nexec({(first, second)!r}[int(os.environ['RANK'])])"]


@pytest.mark.parametrize(("workers", "first", "last"), [(2, "worker0", "worker1"), (10, "worker00", "worker09")])
def test_who_hangs_after_the_first_rank_has_ended_is_killed(
    workers: int, first: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are named as they name themselves."""
    monkeypatch.setattr(launcher, "LEAVE_SECONDS", 0.5)
    said: list[str] = []
    program = f"import os, time\nif os.environ['RANK'] == '{workers - 1}': time.sleep(1e9)"
    assert launch([sys.executable, "-c", program], LaunchConfig(workers), say=said.append) == 0
    assert said == [f"{last} did not end within 0.5 s after {first}, and is killed"]


def test_a_silent_rank_zero_has_failed_after_anothers_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "SIGN_SECONDS", 0.2)
    met, ended = tmp_path / "met", tmp_path / "ended"
    note = f"note = int(os.environ[{MET_FD!r}]); os.write(note, b'1'); open({str(met)!r}, 'w')\n"
    second = f"while not os.path.exists({str(met)!r}): time.sleep(0.01)\nopen({str(ended)!r}, 'w'); os._exit(1)"
    said: list[str] = []
    config = LaunchConfig(2, goes_on=True, timeout=0.5)
    assert launch(ranks(note + "os.kill(os.getpid(), signal.SIGSTOP)", second), config, say=said.append) == 1
    assert said == ["worker0 did not answer within 0.5 s, and is killed"]

    met.unlink()
    ended.unlink()
    signs = (
        f"while not os.path.exists({str(ended)!r}): time.sleep(0.01)\n" + "time.sleep(0.1); os.write(note, b'1')\n" * 15
    )
    said.clear()
    assert launch(ranks(note + signs, second), config, say=said.append) == 0
    assert said == ["worker1 ended with exit code 1; the others go on"]


def test_a_fork_whose_output_is_gone_ends_with_its_code() -> None:
    """And runs nothing of what has forked it."""

    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    def run() -> int:
        sys.stdout = Gone()
        return 3

    fork = Fork(run, dict(os.environ))
    assert os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1]) == 3


def test_a_signal_while_a_fork_is_reaped_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = Fork(lambda: 3, dict(os.environ))
    reap = os.waitpid

    def interrupted(pid: int, options: int) -> tuple[int, int]:
        found = reap(pid, 0)
        monkeypatch.setattr(os, "waitpid", reap)
        fork.send_signal(signal.SIGTERM)
        return found

    monkeypatch.setattr(os, "waitpid", interrupted)
    assert fork.poll() == 3


def test_a_fork_runs_its_own_exit_handlers_alone(tmp_path: Path) -> None:
    mine, its = tmp_path / "mine", tmp_path / "its"
    atexit.register(mine.touch)
    try:

        def run() -> int:
            atexit.register(its.touch)
            return 3

        fork = Fork(run, dict(os.environ))
        assert os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1]) == 3
    finally:
        atexit.unregister(mine.touch)
    assert its.exists() and not mine.exists()


def test_a_lost_rank_is_no_request_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "REPORT_SECONDS", 0.5)
    asked, said = tmp_path / "asked", []
    first = f"signal.signal(signal.SIGTERM, lambda *_: open({str(asked)!r}, 'w')); time.sleep(1e9)"
    second = "time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)"
    assert launch(ranks(first, second), LaunchConfig(2), say=said.append) == 1
    assert said == [
        "worker1 was killed by SIGKILL",
        "worker0 did not end within 0.5 s after that, and is killed",
    ]
    assert not asked.exists()


def test_a_second_signal_kills_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signals wait for the ranks: one that is still starting would die of the first signal, and the second signal
    would then find no launcher, but pytest."""
    monkeypatch.setattr(launcher, "SAME_REQUEST_SECONDS", 0.1)
    ready = [tmp_path / "0", tmp_path / "1"]
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); open({!r}, 'w'); time.sleep(1e9)"

    def stop_twice() -> None:
        until(lambda: all(path.exists() for path in ready), "both ranks")
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)

    stopping = threading.Thread(target=stop_twice)
    stopping.start()
    said: list[str] = []
    code = launch(ranks(*(stubborn.format(str(path)) for path in ready)), LaunchConfig(2), say=said.append)
    stopping.join()
    assert (code, said) == (128 + signal.SIGTERM, [])
