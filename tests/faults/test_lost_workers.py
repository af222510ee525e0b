"""Workers that die or do not answer, and launchers that are killed: the run goes on, or ends and says why."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults.endless import ENDLESS, RUN, TOGETHER, paused_alike, started
from tests.runs import Program, Start, alive, assert_same_bytes, ranks_of, result_of, slow, until

pytestmark = pytest.mark.thorough


def seconds_since(began: float) -> float:
    """How long a run took to end after the fault; `pytest -s` shows it, for docs/explanation/reliability.md."""
    seconds = time.monotonic() - began
    print(f"ended {seconds:.1f} s after the fault")
    return seconds


@slow
def test_a_stopped_worker_ends_the_run_within_the_time_limit(start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, "workers=2", "strategy.timeout=4", "strategy.max_lost=0")
    ranks = started(program, tmp_path)
    os.kill(ranks[1], signal.SIGSTOP)
    began = time.monotonic()
    outcome = program.wait(30)
    assert seconds_since(began) < 4 + 15
    assert outcome.code == 1 and "worker1 did not answer within 4 s" in outcome.text, outcome.text
    assert "type strategy.timeout=SECONDS" in outcome.text
    assert not any(map(alive, ranks))


FEW = (*ENDLESS, "trainer.val_every=50", "trainer.test_tasks=8")


def text_of_equal_runs(program: Program, alone: Program, folder: Path, seconds: float) -> str:
    """What a run says, which ends well, with the parameters and the test of the run `alone` of one process."""
    outcome = program.wait(seconds)
    assert outcome.code == 0 and alone.wait(seconds).code == 0, outcome.text
    assert_same_bytes(folder / RUN, folder / RUN.parent / "alone")
    return outcome.text


def test_a_process_joins_for_a_lost_worker_or_the_others_go_on(start: Start, tmp_path: Path) -> None:
    """Two of three are lost and one process comes, so worker3 gets another rank."""
    program = start(*ENDLESS, "workers=4", "launch.max_restarts=1")
    ranks = started(program, tmp_path)
    os.kill(ranks[1], signal.SIGKILL)
    until(lambda: "worker1 was killed" in program.said(), "the first loss")
    os.kill(ranks[2], signal.SIGKILL)  # the new process needs seconds to come
    until(lambda: "3 workers compute from now on" in program.said(), "the new process", seconds=60)
    # The launcher says so once rank zero has given its next sign of life, which may come after the new process.
    until(lambda: "worker2 was killed" in program.said(), "the second loss")
    text = paused_alike(program, tmp_path)
    assert "worker1 was killed by SIGKILL; the others go on, and a new process joins in its place" in text
    assert "worker2 was killed by SIGKILL; the others go on\n" in text
    assert "worker3 is worker1 from now on\nworker2 is a new process" in text
    assert not any(map(alive, ranks))


@slow
def test_the_others_go_on_without_a_worker_that_does_not_answer(start: Start, tmp_path: Path) -> None:
    alone = start(*FEW, "trainer.steps=150", "workers=1", "run=alone")
    program = start(*FEW, "trainer.steps=150", "workers=3", "strategy.timeout=4")
    ranks = started(program, tmp_path)
    os.kill(ranks[1], signal.SIGSTOP)
    text = text_of_equal_runs(program, alone, tmp_path, 90)
    assert text.count("worker1 does not answer any more; the other workers compute its chunks") == 1
    assert not any(map(alive, ranks))


@slow
@pytest.mark.timeout(600)
def test_twenty_kills_of_workers_at_random_moments_stop_nothing(start: Start, tmp_path: Path) -> None:
    alone = start(*FEW, "trainer.steps=3000", "workers=1", "run=alone")
    program = start(*FEW, "trainer.steps=3000", "workers=4", "launch.max_restarts=100", "strategy.timeout=20")
    first, *_ = started(program, tmp_path)
    draw = random.Random(0)
    for _ in range(20):
        time.sleep(draw.uniform(0, 4))
        workers = [pid for pid in ranks_of(program) if pid != first]
        os.kill(draw.choice(workers), signal.SIGKILL)
    text = text_of_equal_runs(program, alone, tmp_path, 300)
    assert text.count("was killed by SIGKILL; the others go on") == 20
    assert "is a new process" in text and "restart 20 of 100" in text


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("ddp-supervised", signal.SIGSTOP),
        pytest.param("rpc_autograd", signal.SIGKILL, marks=slow),
        pytest.param("ddp-maml", signal.SIGKILL, marks=slow),
        pytest.param("split", signal.SIGKILL, marks=slow),
        pytest.param("ddp-supervised", signal.SIGKILL, marks=slow),
        pytest.param("ddp-maml", signal.SIGSTOP, marks=slow),
        pytest.param("split", signal.SIGSTOP, marks=slow),
        pytest.param("rpc_autograd", signal.SIGSTOP, marks=slow),
    ],
)
def test_a_lost_worker_is_named(how: str, fault: signal.Signals, start: Start, tmp_path: Path) -> None:
    strategy = TOGETHER.get(how, [f"strategy={how}"])
    workers = 3 if how == "split" else 2  # of three shards the last one waits for that in the middle
    seconds = 60 if fault == signal.SIGKILL else 5  # a dead worker is noticed long before
    program = start(
        *ENDLESS, *strategy, f"workers={workers}", f"strategy.timeout={seconds}", "hydra.run.dir=" + str(RUN)
    )
    ranks = started(program, tmp_path)
    if fault == signal.SIGKILL:
        os.kill(ranks[1], signal.SIGSTOP)
        time.sleep(1)  # so all others wait for it when it dies
    os.kill(ranks[1], fault)
    began = time.monotonic()
    outcome = program.wait(90)
    assert seconds_since(began) < (15 if fault == signal.SIGKILL else 5 + 15)
    assert outcome.code == 1, outcome.text
    message = "worker1 does not answer" if fault == signal.SIGKILL else "worker1 did not answer within 5 s"
    assert f"error: {message}" in outcome.text, outcome.text
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
    program = start(*ENDLESS, *([] if torchrun else ["workers=2"]), torchrun=torchrun)
    ranks = started(program, tmp_path)
    assert len(ranks) == 2
    began = time.monotonic()
    os.kill(ranks[0] if who == "rank zero" else program.process.pid, signal.SIGKILL)
    until(lambda: not any(map(alive, ranks)), "the end of all ranks", seconds=5)
    seconds_since(began)
    assert program.wait(30).code != 0


@pytest.mark.parametrize("torchrun", [None, 2], ids=["launcher", "torchrun"])
def test_nobody_is_orphaned_while_it_starts(torchrun: int | None, start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, *([] if torchrun else ["workers=2"]), torchrun=torchrun)
    until(lambda: len(ranks_of(program)) == 2, "both ranks")
    ranks = ranks_of(program)
    os.kill(program.process.pid, signal.SIGKILL)
    until(lambda: not any(map(alive, ranks)), "the end of all ranks", seconds=5)


@pytest.mark.parametrize(
    "how", ["rpc", *(pytest.param(how, marks=slow) for how in ("ddp-maml", "split", "rpc_autograd"))]
)
def test_a_stopped_rank_zero_ends_the_run(how: str, start: Start, tmp_path: Path) -> None:
    strategy = TOGETHER.get(how, [f"strategy={how}"])
    program = start(*ENDLESS, *strategy, "workers=3", "strategy.timeout=8", f"hydra.run.dir={RUN}")
    ranks = started(program, tmp_path)
    os.kill(ranks[0], signal.SIGSTOP)
    outcome = program.wait(8 + 15)
    assert outcome.code == 1 and "worker0 did not answer within 8 s" in outcome.text, outcome.text
    assert "Traceback" not in outcome.text and "SIGTERM" not in outcome.text, outcome.text
    assert "the others go on" not in outcome.text and not any(map(alive, ranks)), outcome.text


@slow
def test_a_worker_that_dies_before_the_meeting_ends_the_run(start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, "workers=2")
    until(lambda: len(ranks_of(program)) == 2, "both ranks")
    ranks = ranks_of(program)
    os.kill(ranks[1], signal.SIGKILL)
    outcome = program.wait(15)
    assert outcome.code == 1 and "worker1 was killed by SIGKILL" in outcome.text, outcome.text
    assert "SIGTERM" not in outcome.text and not any(map(alive, ranks)), outcome.text


@slow
@pytest.mark.parametrize("rank", [pytest.param(0, marks=slow), 1])
def test_torchrun_restarts_a_failed_run_which_resumes(rank: int, start: Start, tmp_path: Path) -> None:
    short = [*ENDLESS, "trainer.steps=60", "trainer.test_tasks=4"]
    program = start(*short, torchrun=2, torchrun_arguments=["--max-restarts=1"])
    os.kill(started(program, tmp_path)[rank], signal.SIGKILL)
    outcome = program.wait()
    assert outcome.code == 0, outcome.text
    assert "going on after step" in outcome.text
    assert result_of(tmp_path / RUN)["steps"] == 60
