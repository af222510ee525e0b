"""Workers join a run under way and leave it, on purpose or not; the result keeps its bits."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distributed.launch.meeting import TOKEN, _post
from tests.faults.endless import ENDLESS, RUN, paused_alike, started
from tests.runs import ROOT, Outcome, Program, Start, alive, metrics, ranks_of, said_by, slow, until

pytestmark = pytest.mark.thorough


def command(name: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return said_by([sys.executable, "-m", "metalearn", name, *arguments], folder)


def world(folder: Path) -> dict[str, Any]:
    """world.json of the run, when it is there."""
    path = folder / RUN / "world.json"
    until(path.exists, "world.json")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def workers_of(folder: Path) -> int:
    """How many workers have computed the last step."""
    return sum(name.endswith("/compute_seconds") for name in metrics(folder / RUN)[-1])


@pytest.fixture
def joining(tmp_path: Path) -> Iterator[Program]:
    """Two processes that join the run as soon as it is under way."""
    world(tmp_path)
    program = Program([sys.executable, "-m", "metalearn", "join", str(RUN), "--workers", "2"], tmp_path)
    yield program
    program.kill()


@pytest.fixture
def run(start: Start) -> Program:
    return start(*ENDLESS, "workers=2")


def test_workers_join_and_leave_on_purpose(run: Program, joining: Program, tmp_path: Path) -> None:
    until(lambda: "worker3 has joined" in joining.said(), "worker3")
    until(lambda: workers_of(tmp_path) == 4, "a step of four workers")
    left = command("leave", str(RUN), "worker1", folder=tmp_path)
    assert (left.returncode, left.stdout) == (0, "worker1 leaves; the others compute its chunks from now on\n")
    unknown = command("leave", str(RUN), "worker0", folder=tmp_path)
    assert unknown.returncode == 2 and not unknown.stdout
    assert "those that could: worker2, worker3" in unknown.stderr
    joining.process.send_signal(signal.SIGTERM)
    assert joining.process.wait(60) == 0
    until(lambda: all(f"worker{rank} leaves" in run.said() for rank in (1, 2, 3)), "the leave of three workers")
    text = paused_alike(run, tmp_path)
    assert "does not answer" not in text
    assert "4 workers compute from now on" in text


@slow
@pytest.mark.parametrize("launcher", ["ends the run", "stopped"])
def test_joining_a_silent_rank_zero_ends_with_one_line(
    launcher: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    run = start(*ENDLESS, "workers=2", "strategy.timeout=8")
    ranks = started(run, tmp_path)
    if launcher == "stopped":
        run.process.send_signal(signal.SIGSTOP)
    os.kill(ranks[0], signal.SIGSTOP)
    began = time.monotonic()
    code, text = Program([sys.executable, "-m", "metalearn", "join", str(RUN)], tmp_path).wait(8 + 60)
    print(f"{launcher}: ended {time.monotonic() - began:.1f} s after its start\n{text}")
    command, error = text.splitlines()
    assert code == 1 and command.startswith("1 more of: "), text
    assert re.fullmatch("error: worker1: .*rank 0 has (stopped|ended).*", error), text


def copied(folder: Path, *changed: str) -> Path:
    """A checkout beside this one, with other line endings, and these files changed; returns its folder."""
    for name in ("distributed", "metalearn", "conf", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", folder)
    for path in (folder / "distributed").rglob("*.py"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    for name in changed:
        with (folder / name).open("a") as file:
            file.write("# changed\n")
    return folder


@slow
def test_a_process_of_another_version_is_refused(start: Start, tmp_path: Path) -> None:
    run = start(*ENDLESS, "workers=2")

    def joined(path: Path, **extra: str) -> Program:
        return Program(
            [sys.executable, "-m", "metalearn", "join", str(RUN)], tmp_path, {"PYTHONPATH": str(path), **extra}
        )

    world(tmp_path)
    other = joined(copied(tmp_path / "other", "metalearn/tasks/glyphs.py"), METALEARN_KERNELS="torch")
    same = joined(copied(tmp_path / "same"))
    until(lambda: "worker2 has joined" in same.said(), "the equal process")
    refused = other.wait()
    line = next(line for line in refused.text.splitlines() if line.startswith("error: "))
    assert refused.code == 2 and refused.text.count("error: ") == 1, refused.text
    assert re.search(
        r"differs from rank 0: code=\w{16} instead of \w{16}, kernels=torch on cpu instead of C, ", line
    ), line
    assert "torch=" not in line and "data=" not in line and "start the run with launch.mixed=true" in line
    assert line.partition("; bring")[0].removeprefix("error: ") + "; it is refused" in run.said()
    assert run.said().count("compute from now on") == 1, "the equal process alone"
    run.process.terminate()
    assert run.wait(30).code == 143
    same.wait(60)


@slow
def test_hosts_with_other_kernels_need_mixed(start: Start, tmp_path: Path) -> None:
    def run(*more: str) -> list[Outcome]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        short = ("trainer.steps=2", "trainer.test_tasks=4")
        shared = [*ENDLESS, *short, "workers=2", "launch.nnodes=2", "launch.interface=lo", *more]
        shared.append(f"launch.master_port={port}")
        hosts = [start(*shared, "launch.node_rank=0"), start(*shared, "launch.node_rank=1", METALEARN_KERNELS="torch")]
        return [host.wait() for host in hosts]

    for strategy in ("rpc", "ddp"):
        for code, text in run(f"strategy={strategy}", f"run={strategy}"):
            assert code == 2 and text.count("error: ") == 1, text
            assert "error: rank 1 on " in text and "differs from rank 0: kernels=torch on cpu instead of C, " in text
    mixed = run("launch.mixed=true")
    assert [code for code, _ in mixed] == [0, 0], mixed
    assert "kernels=torch on cpu instead of C, " in mixed[0].text


def posted(folder: Path, token: str, content: dict[str, Any]) -> None:
    """Posts a request to the run, signed with a token."""
    place = world(folder)
    store = dist.TCPStore(place["address"], place["port"], is_master=False, timeout=timedelta(seconds=10))
    before = os.environ.get(TOKEN)
    os.environ[TOKEN] = token
    try:
        _post(store, store.get("call").decode(), content)
    finally:
        os.environ.pop(TOKEN)
        if before is not None:
            os.environ[TOKEN] = before


@slow
def test_a_process_without_the_token_is_ignored(start: Start, tmp_path: Path) -> None:
    # The ghost says nothing of its code; `mixed` admits it nevertheless.
    run = start(*ENDLESS, "workers=2", "launch.isolate=false", "launch.mixed=true")
    ghost = {"process": "ghost", "number": "1", "rank": None, "host": "nowhere"}
    place = world(tmp_path)
    posted(tmp_path, "guessed", ghost)
    posted(tmp_path, place["token"], {"process": "no more"})
    posted(tmp_path, place["token"], ghost | {"rank": ["no number"]})
    posted(tmp_path, place["token"], {"leave": "worker1"})
    until(lambda: run.said().count("is not signed with its token, or cannot be read") == 4, "four refusals")
    assert "compute from now on" not in run.said()
    posted(tmp_path, place["token"], ghost)
    before = len(metrics(tmp_path / RUN))
    until(lambda: len(metrics(tmp_path / RUN)) > before + 10, "more steps")
    text = paused_alike(run, tmp_path)
    assert "does not answer" not in text and "worker2" not in text


def test_only_ones_own_run_under_way_is_joined(tmp_path: Path) -> None:
    folder = tmp_path / RUN
    folder.mkdir(parents=True)

    def refusal(name: str = "join", *more: str) -> str:
        refused = command(name, str(RUN), *more, folder=tmp_path)
        assert refused.returncode == 2 and not refused.stdout, refused.stdout
        assert refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1, refused.stderr
        return refused.stderr

    assert "no run is under way here" in refusal() and "no run is under way here" in refusal("leave", "worker1")
    path = folder / "world.json"
    own = subprocess.Popen([sys.executable, "-c", ""])
    own.wait()
    place = {
        "address": "127.0.0.1", "port": 1, "interface": "lo", "token": "", "workers": 2, "host": os.uname().nodename,
        "pid": own.pid, "born": 1, "arguments": [], "folder": str(tmp_path),
    }  # fmt: skip
    path.write_text(json.dumps(place))
    assert f"its rank zero, process {own.pid}, has ended" in refusal()


@slow
def test_short_lived_workers_do_not_stop_a_run(start: Start, tmp_path: Path) -> None:
    """As on spot instances: every worker but the first is killed 5 to 20 seconds after it has come."""
    program = start(*ENDLESS, "workers=4", "launch.max_restarts=1000", "strategy.timeout=20")
    until(lambda: len(metrics(tmp_path / RUN)) > 2, "step 3")
    first, *_ = ranks_of(program)
    draw = random.Random(0)
    ends: dict[int, float] = {}
    killed: set[int] = set()  # one that is slow to die is killed once
    # The launcher reports no end after that of the first rank.
    while len(killed) < 20 and program.process.poll() is None:
        now = time.monotonic()
        for pid in ranks_of(program):
            due = pid != first and ends.setdefault(pid, now + draw.uniform(5, 20)) < now
            if due and pid not in killed and alive(pid):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.1)
    until(lambda: program.said().count("was killed by SIGKILL") == len(killed), "a line about each of them")
    text = paused_alike(program, tmp_path)
    assert len(killed) >= 20 and text.count("was killed by SIGKILL; the others go on") == len(killed)
    print(f"{len(killed)} kills, {text.count('compute from now on')} times joined")


@slow
def test_another_host_replaces_its_workers_and_takes_them_back(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = [*ENDLESS, "workers=4", "launch.nnodes=2", "launch.interface=lo"]
    shared += [f"launch.master_port={port}", "launch.max_restarts=1"]
    first, second = (start(*shared, f"launch.node_rank={node}") for node in (0, 1))
    until(lambda: len(metrics(tmp_path / RUN)) > 2, "step 3")
    os.kill(ranks_of(second)[0], signal.SIGKILL)
    until(lambda: "worker2 is a new process" in first.said(), "the new process")
    joined = len(metrics(tmp_path / RUN))
    until(lambda: len(metrics(tmp_path / RUN)) > joined + 3, "some steps with it")  # a signal before just ends it
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(60) == 0
    until(lambda: all(f"worker{rank} leaves" in first.said() for rank in (2, 3)), "word of those that left")
    paused_alike(first, tmp_path)
    assert "worker2 was killed by SIGKILL; the others go on, and a new process joins in its place" in second.said()
