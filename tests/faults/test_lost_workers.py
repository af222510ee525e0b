"""Ranks that die or do not answer, and launchers that are killed: the run starts again, or ends and says why."""

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.endless import ENDLESS, RUN, TOGETHER, started
from tests.runs import ROOT, Program, Start, alive, assert_same_bytes, metrics, ranks_of, result_of, slow, until

pytestmark = pytest.mark.thorough

ONCE = (*ENDLESS, "launch.max_restarts=0")
"""A run whose first lost rank ends it."""

FEW = (*ENDLESS, "trainer.steps=60", "trainer.val_every=50", "trainer.test_tasks=8", f"hydra.run.dir={RUN}")


def seconds_since(began: float) -> float:
    """How long a run took to end after the fault; `pytest -s` shows it, for docs/explanation/reliability.md."""
    seconds = time.monotonic() - began
    print(f"ended {seconds:.1f} s after the fault")
    return seconds


def strategy_of(how: str) -> Sequence[str]:
    return TOGETHER.get(how, [f"strategy={how}"])


LOST = [("rpc", 1, None), ("ddp-maml", 0, None)]
LOST += [
    pytest.param(how, rank, torchrun, marks=slow)
    for how in ("rpc", "rpc_autograd", "split", "ddp-maml", "ddp-supervised")
    for rank in (0, 1)
    for torchrun in (None, 2)
    if (how, rank, torchrun) not in LOST
]  # type: ignore[misc]


@pytest.mark.parametrize(("how", "rank", "torchrun"), LOST)
def test_a_lost_rank_is_a_restart(how: str, rank: int, torchrun: int | None, start: Start, tmp_path: Path) -> None:
    """And the run ends with the bits of an undisturbed one: at a step that is drawn, rank 0 or 1 is killed."""
    alone = tmp_path / "alone"
    alone.mkdir()
    command = (*FEW, *strategy_of(how))
    undisturbed = Program([sys.executable, str(ROOT / "train.py"), *command, "workers=2"], alone)
    own = ["--max-restarts=3"] if torchrun else []
    program = start(*command, *([] if torchrun else ["workers=2"]), torchrun=torchrun, torchrun_arguments=own)
    step = random.Random(how + str(rank)).randint(3, 40)
    ranks = started(program, tmp_path, step)
    began = time.monotonic()
    os.kill(ranks[rank], signal.SIGKILL)
    until(lambda: program.said().count("tasks a chunk") + program.said().count("samples a chunk") > 1, "the restart")
    print(f"{how}, rank {rank}: {time.monotonic() - began:.1f} s until all is built again")
    outcome = program.wait()
    assert outcome.code == 0 and undisturbed.wait().code == 0, outcome.text
    assert_same_bytes(tmp_path / RUN, alone / RUN)
    assert "going on after step" in outcome.text or (rank == 0 and step < 4), outcome.text
    assert torchrun or f"worker{rank} was killed by SIGKILL\nrestart 1 of 3" in outcome.text, outcome.text
    assert "Traceback" not in outcome.text and not any(map(alive, ranks)), outcome.text


@slow
@pytest.mark.timeout(900)
def test_twenty_kills_at_random_moments_leave_the_bits(start: Start, tmp_path: Path) -> None:
    """Of any rank, also while it starts."""
    steps = "trainer.steps=1500"
    alone = tmp_path / "alone"
    alone.mkdir()
    undisturbed = Program([sys.executable, str(ROOT / "train.py"), *FEW, steps, "workers=1"], alone)
    program = start(*FEW, steps, "workers=3", "launch.max_restarts=100", "strategy.timeout=20")
    draw = random.Random(0)
    for _ in range(20):
        time.sleep(draw.uniform(0, 8))
        until(lambda: ranks_of(program), "the ranks")
        os.kill(draw.choice(ranks_of(program)), signal.SIGKILL)
    outcome = program.wait(600)
    assert outcome.code == 0 and undisturbed.wait(600).code == 0, outcome.text
    assert_same_bytes(tmp_path / RUN, alone / RUN)


def agent(number: int, port: int, folder: Path) -> Program:
    """torchrun for a world of one or two hosts; both are this one."""
    elastic = [
        "--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=9", "--rdzv_backend=c10d", "--rdzv_id=run",
        f"--rdzv_endpoint=127.0.0.1:{port}", f"--rdzv_conf=is_host={1 - number}", "--local_addr=127.0.0.1",
    ]  # fmt: skip
    command = [*FEW, "trainer.steps=100000", "launch.interface=lo"]
    program = [sys.executable, "-m", "torch.distributed.run", *elastic, str(ROOT / "train.py"), *command]
    # With the agents' own store torch 2.14.1 gives a host that joins no address of it.
    return Program(program, folder, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


@slow
@pytest.mark.timeout(600)
def test_a_host_joins_leaves_and_returns(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    agents = [agent(0, port, tmp_path)]
    try:
        started(agents[0], tmp_path)
        for meetings in (1, 2):
            agents.append(agent(1, port, tmp_path))
            until(lambda count=meetings: agents[0].said().count("2 workers") >= count, "a world of two")
            done = metrics(tmp_path / RUN)[-1]["step"]
            until(lambda done=done: metrics(tmp_path / RUN)[-1]["step"] > done + 3, "steps of two")
            os.kill(agents[-1].process.pid, signal.SIGTERM)
            until(lambda count=meetings: agents[0].said().count("1 workers") > count, "a world of one")
        (tmp_path / RUN / "stop").touch()
        outcome = agents[0].wait()
    finally:
        for program in agents:
            program.kill()
    assert outcome.code == 0, outcome.text
    steps = result_of(tmp_path / RUN)["steps"]
    alone = tmp_path / "alone"
    alone.mkdir()
    command = [*FEW, "trainer.steps=100000", "workers=1", f"pause_after={steps}"]
    assert Program([sys.executable, str(ROOT / "train.py"), *command], alone).wait().code == 0
    params = [(run / RUN / "checkpoints/last/params.safetensors").read_bytes() for run in (tmp_path, alone)]
    assert params[0] == params[1]


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("ddp-supervised", signal.SIGKILL),
        pytest.param("rpc_autograd", signal.SIGKILL, marks=slow),
        pytest.param("ddp-maml", signal.SIGKILL, marks=slow),
        pytest.param("split", signal.SIGKILL, marks=slow),
        pytest.param("rpc", signal.SIGSTOP, marks=slow),
        pytest.param("ddp-supervised", signal.SIGSTOP, marks=slow),
        pytest.param("ddp-maml", signal.SIGSTOP, marks=slow),
        pytest.param("split", signal.SIGSTOP, marks=slow),
        pytest.param("rpc_autograd", signal.SIGSTOP, marks=slow),
    ],
)
def test_a_lost_worker_is_named(how: str, fault: signal.Signals, start: Start, tmp_path: Path) -> None:
    """torch's agent gives a stopped process 30 s to end. It sees a killed one only after rank zero has ended."""
    workers = 3 if how == "split" else 2  # of three shards the last one waits for that in the middle
    seconds = 60 if fault == signal.SIGKILL else 5  # a dead worker is noticed long before
    own = (f"workers={workers}", f"strategy.timeout={seconds}", f"hydra.run.dir={RUN}")
    program = start(*ONCE, *strategy_of(how), *own)
    ranks = started(program, tmp_path)
    agent = int(Path(f"/proc/{ranks[0]}/stat").read_text().split(") ")[1].split()[1])
    if fault == signal.SIGKILL:
        os.kill(agent, signal.SIGSTOP)
    os.kill(ranks[1], fault)
    began = time.monotonic()
    if fault == signal.SIGKILL:
        until(lambda: not alive(ranks[0]), "the end of rank zero", seconds=15)
        os.kill(agent, signal.SIGCONT)
    outcome = program.wait(90)
    assert seconds_since(began) < (15 if fault == signal.SIGKILL else 5 + 15 + 30)
    assert outcome.code == 1, outcome.text
    message = "worker1 was killed by SIGKILL" if fault == signal.SIGKILL else "worker1 did not answer within 5 s"
    assert message in outcome.text, outcome.text
    assert fault == signal.SIGKILL or "type strategy.timeout=SECONDS" in outcome.text
    assert not any(map(alive, ranks))


@pytest.mark.parametrize(
    ("who", "torchrun"),
    [
        ("rank zero", None),
        ("its parent", None),
        pytest.param("its parent", 2, marks=slow),
        pytest.param("rank zero", 2, marks=slow),
    ],
    ids=["rank zero-launcher", "its parent-launcher", "its parent-torchrun", "rank zero-torchrun"],
)
def test_nobody_is_orphaned(who: str, torchrun: int | None, start: Start, tmp_path: Path) -> None:
    program = start(*ONCE, *([] if torchrun else ["workers=2"]), torchrun=torchrun)
    ranks = started(program, tmp_path)
    assert len(ranks) == 2
    began = time.monotonic()
    os.kill(ranks[0] if who == "rank zero" else program.process.pid, signal.SIGKILL)
    until(lambda: not any(map(alive, ranks)), "the end of all ranks", seconds=10)
    seconds_since(began)
    assert program.wait(30).code != 0


@pytest.mark.parametrize("torchrun", [None, 2], ids=["launcher", "torchrun"])
def test_nobody_is_orphaned_while_it_starts(torchrun: int | None, start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, *([] if torchrun else ["workers=2"]), torchrun=torchrun)
    until(lambda: len(ranks_of(program)) == 2, "both ranks")
    ranks = ranks_of(program)
    os.kill(program.process.pid, signal.SIGKILL)
    until(lambda: not any(map(alive, ranks)), "the end of all ranks", seconds=5)


@slow
@pytest.mark.parametrize("how", ["rpc", "ddp-maml", "split", "rpc_autograd"])
def test_a_stopped_rank_zero_ends_the_run(how: str, start: Start, tmp_path: Path) -> None:
    program = start(*ONCE, *strategy_of(how), "workers=3", "strategy.timeout=8", f"hydra.run.dir={RUN}")
    ranks = started(program, tmp_path)
    os.kill(ranks[0], signal.SIGSTOP)
    outcome = program.wait(8 + 15 + 30)
    assert outcome.code == 1 and "worker0 did not answer within 8 s" in outcome.text, outcome.text
    assert "Traceback" not in outcome.text and not any(map(alive, ranks)), outcome.text


@slow
def test_a_worker_that_dies_before_the_meeting_is_named(start: Start, tmp_path: Path) -> None:
    program = start(*ONCE, "workers=2")
    until(lambda: len(ranks_of(program)) == 2, "both ranks")
    ranks = ranks_of(program)
    os.kill(ranks[1], signal.SIGKILL)
    outcome = program.wait(40)
    assert outcome.code == 1 and "worker1 was killed by SIGKILL" in outcome.text, outcome.text
    assert not any(map(alive, ranks)), outcome.text
