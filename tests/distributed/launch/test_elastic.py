"""The launcher and ranks that hang, die or are stopped: small programs, and forks of this process."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed.launch import elastic
from distributed.launch.elastic import LaunchConfig, launch
from tests.runs import ROOT, until

pytestmark = pytest.mark.thorough


def ranks(first: str, second: str) -> list[str]:
    """A program of two ranks, each of which runs its own lines; `life` counts its starts."""
    lines = (first, second)
    start = "import os, signal, sys, time\nlife = int(os.environ['TORCHELASTIC_RESTART_COUNT'])"
    return [sys.executable, "-c", f"{start}\nexec({lines!r}[int(os.environ['RANK'])])"]


NOTE_END = (
    "from distributed.launch import meeting; from datetime import timedelta; "
    "meeting.process_store(0, 2, timedelta(seconds=9)); meeting.note_end({}); open(os.environ['NOTED'], 'w')"
)


def to(folder: Path) -> Callable[[str], None]:
    """Appends lines to a file: the agent may be a fork of this process."""

    def append(line: str) -> None:
        with (folder / "said").open("a") as file:
            file.write(f"{line}\n")

    return append


def said(folder: Path) -> list[str]:
    return (folder / "said").read_text().splitlines() if (folder / "said").exists() else []


NOTED = "while not os.path.exists(os.environ['NOTED']): time.sleep(0.05)\n"
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
ENDS = {
    "killed, and well after that": ("", f"life or {DIES}", 0, ["worker1 was killed by SIGKILL", "restart 1 of 2"]),
    "always killed": (
        "time.sleep(9)", DIES, 1,
        ["worker1 was killed by SIGKILL", "restart 1 of 2", "worker1 was killed by SIGKILL", "restart 2 of 2",
         "worker1 was killed by SIGKILL"],
    ),
    "another exit code": ("", "life or sys.exit(5)", 0, ["worker1 ended with exit code 5", "restart 1 of 2"]),
    "a run that has diverged": ("sys.exit(3)", "time.sleep(9)", 3, []),
    "a bad config on another rank": ("time.sleep(9)", "sys.exit(2)", 2, ["worker1 ended with exit code 2"]),
    "lost after the end": (NOTE_END.format(0), NOTED + DIES, 0, ["worker1 was killed by SIGKILL"]),
    "lost after a failure": (NOTE_END.format(1) + "; time.sleep(20)", NOTED + DIES, 1,
                             ["worker1 was killed by SIGKILL"]),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_what_is_started_again(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, code, expected = ENDS[end]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("NOTED", str(tmp_path / "noted"))
    assert launch(ranks(first, second), LaunchConfig(2), max_restarts=2, say=to(tmp_path)) == code
    assert said(tmp_path) == expected


def test_forks_are_started_again_and_end_with_their_code(tmp_path: Path) -> None:
    def run() -> int:
        life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        (tmp_path / f"{os.environ['RANK']} {life}").touch()
        if os.environ["RANK"] == "1" and life == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0 if life else 5

    assert launch(run, LaunchConfig(2), max_restarts=1, say=to(tmp_path)) == 0
    assert said(tmp_path)[-1] == "restart 1 of 1" and {path.name for path in tmp_path.iterdir()} >= {"0 1", "1 1"}


def test_a_single_rank_that_has_failed_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    fails = "from distributed.launch import meeting; meeting.note_end(1); sys.exit(1)"
    assert launch(ranks(fails, ""), LaunchConfig(1), max_restarts=2, say=to(tmp_path)) == 1
    assert said(tmp_path) == []


def stopped(tmp_path: Path, signals: list[int], apart: float, first: str) -> tuple[int, list[str]]:
    """Ends a launch of two ranks by signals. Both note first that they run."""
    ready = [tmp_path / "0", tmp_path / "1"]
    notes = [f"open({str(path)!r}, 'w'); time.sleep(1e9)" for path in ready]

    def stop() -> None:
        until(lambda: all(path.exists() for path in ready), "both ranks")
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(apart)

    stopping = threading.Thread(target=stop)
    stopping.start()
    command = ranks(f"{first}; {notes[0]}", notes[1])
    code = launch(command, LaunchConfig(2, isolate=False), max_restarts=3, say=to(tmp_path))
    stopping.join()
    return code, said(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_stops_the_ranks_once(number: int, tmp_path: Path) -> None:
    """One that announces the end of the job counts as SIGTERM, and its earlier handler is called in the end."""
    requeued: list[int] = []
    earlier = signal.signal(signal.SIGUSR1, lambda number, _: requeued.append(number))
    asked = tmp_path / "asked"
    # It stays for a while, so that the second signal finds the launcher, and not this process.
    handler = f"lambda number, _: (open({str(asked)!r}, 'a').write(f'{{number}} '), time.sleep(1), sys.exit(0))"
    first = f"signal.signal(signal.SIGTERM, {handler}); signal.signal(signal.SIGINT, {handler})"
    try:
        outcome = stopped(tmp_path, [number, number], 0.2, first)
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    passed = signal.SIGTERM if number == signal.SIGUSR1 else number
    assert outcome == (128 + passed, [])
    assert asked.read_text() == f"{passed:d} "
    assert requeued == ([number] if number == signal.SIGUSR1 else [])


@pytest.mark.parametrize(("nth", "where"), [(1, "after_in_parent"), (2, "after_in_parent"), (2, "after_in_child")])
def test_a_signal_at_a_fork_of_the_launcher_is_kept(nth: int, where: str, tmp_path: Path) -> None:
    """Python ignores what functions called at a fork raise. The first fork makes the network, the second one starts the
    agent; Ctrl-C comes to both processes."""
    program = f"""
import os, signal, sys, time
from distributed.launch.elastic import LaunchConfig, launch
forks = []
os.register_at_fork(before=lambda: forks.append(1))
os.register_at_fork({where}=lambda: len(forks) == {nth} and os.kill(os.getpid(), signal.SIGINT))
try:
    code = launch([sys.executable, "-c", "import time; time.sleep(20)"], LaunchConfig(2, isolate=True))
except KeyboardInterrupt:
    code = 130
sys.exit(code)
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    outcome = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    if "CannotIsolateError" in outcome.stderr:
        pytest.skip(outcome.stderr.strip().splitlines()[-1])
    assert outcome.returncode == 130 and "Traceback" not in outcome.stderr, outcome.stderr  # torch may warn of sockets


def test_a_second_request_kills_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "SAME_REQUEST_SECONDS", 0.1)
    first = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    began = time.monotonic()
    assert stopped(tmp_path, [signal.SIGTERM] * 2, 0.5, first) == (128 + signal.SIGTERM, [])
    assert time.monotonic() - began < 25, "torch's agent would wait for 30 s"


def test_two_hosts_start_again_together(tmp_path: Path) -> None:
    """A rank of the second host dies in its first life; the first host's rank then fails, or its agent sees the other
    one wait."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    program = f"""
import os, signal, sys, time
from distributed.launch.elastic import LaunchConfig, launch
rank = (
    "import os, pathlib, signal, time\\n"
    "mine, other = (pathlib.Path({str(tmp_path)!r}, f'{{os.environ[\\"TORCHELASTIC_RESTART_COUNT\\"]}} {{r}}')"
    " for r in (os.environ['RANK'], '01'[os.environ['RANK'] == '0']))\\n"
    "mine.touch()\\n"
    "second = os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\\n"
    "time.sleep(1)\\n"
    "if second: os.kill(os.getpid(), signal.SIGKILL)\\n"
    "time.sleep(2)\\n"
)
config = LaunchConfig(1, 2, int(sys.argv[1]), "127.0.0.1", {port}, timeout=30)
sys.exit(launch([sys.executable, "-c", rank], config, max_restarts=2, say=lambda line: print(line, flush=True)))
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    commands = [[sys.executable, "-c", program, str(number)] for number in (0, 1)]
    hosts = [subprocess.Popen(command, cwd=ROOT, **pipes) for command in commands]
    try:
        texts = [host.communicate(timeout=120)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], texts
    assert "worker1 was killed by SIGKILL\nrestart 1 of 2" in texts[1]
    assert "another host starts its ranks again" in texts[0]
