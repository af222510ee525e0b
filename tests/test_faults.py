"""Faults of the real program: open ports, workers that die or hang, faulty functions of the user."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distributed.doctor import Check, Report, measured, worst
from distributed.engine.listening import listeners
from tests.runs import ROOT, Program, Start, alive, metrics, ranks_of, slow, until

pytestmark = pytest.mark.thorough

ENDLESS = (
    "trainer.steps=100000", "trainer.meta_batch_size=6", "trainer.task_chunk=2", "trainer.val_every=100000",
    "trainer.val_tasks=4", "checkpoint.every=2", "logger.every=1", "logger.tensorboard=false",
    "logger.report=false", "model.filters=16",
)  # fmt: skip

RUN = Path("outputs/maml_glyphs/seed0")


def started(program: Program, folder: Path, steps: int = 3) -> list[int]:
    """Waits until the run has made some steps; returns the processes of its ranks."""
    until(lambda: len(metrics(folder / RUN)) >= steps, f"step {steps}")
    return ranks_of(program)


def test_a_run_by_our_launcher_listens_on_loopback_only(start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, "workers=2")
    ranks = started(program, tmp_path)
    by_process = {pid: listeners(pid) for pid in [program.process.pid, *ranks]}
    assert all(by_process[rank] for rank in ranks), "RPC listens somewhere"
    assert all(listener.closed for addresses in by_process.values() for listener in addresses), by_process
    assert "listening: worker0 on 127.0.0.1" in program.said() and "(all loopback" in program.said()


def test_under_torchrun_only_its_own_store_is_open_and_the_log_names_it(start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, torchrun=2)
    ranks = started(program, tmp_path)
    assert all(listener.closed for rank in ranks for listener in listeners(rank))
    open_ones = [listener for listener in listeners(program.process.pid) if not listener.closed]
    output = program.said()
    assert open_ones and "Open to other hosts: torchrun" in output and "python train.py workers=2" in output
    assert "and every user of this host, can run code here" in output


def test_a_stopped_worker_ends_the_run_within_the_time_limit(start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, "workers=2", "strategy.timeout=4", "strategy.max_lost=0")
    ranks = started(program, tmp_path)
    os.kill(ranks[1], signal.SIGSTOP)
    began = time.monotonic()
    outcome = program.wait(30)
    assert time.monotonic() - began < 4 + 15
    assert outcome.code == 1 and "worker1 did not answer within 4 s" in outcome.text, outcome.text
    assert "type strategy.timeout=SECONDS" in outcome.text
    assert not any(map(alive, ranks))


FEW = (*ENDLESS, "trainer.val_every=50", "trainer.test_tasks=8")


def text_of_equal_runs(program: Program, alone: Program, folder: Path, seconds: float) -> str:
    """What a run says, which ends well, with the parameters and the test of the run `alone` of one process."""
    outcome = program.wait(seconds)
    assert outcome.code == 0 and alone.wait(seconds).code == 0, outcome.text
    for name in ("checkpoints/last/params.safetensors", "test.csv"):
        assert (folder / RUN / name).read_bytes() == (folder / RUN.parent / "alone" / name).read_bytes()
    return outcome.text


def test_a_new_process_joins_for_a_lost_worker_or_the_others_go_on(start: Start, tmp_path: Path) -> None:
    alone = start(*FEW, "trainer.steps=300", "workers=1", "run=alone")
    program = start(*FEW, "trainer.steps=300", "workers=3", "launch.max_restarts=1")
    ranks = started(program, tmp_path)
    os.kill(ranks[1], signal.SIGKILL)
    until(lambda: "worker1 is a new process" in program.said(), "the new process", seconds=60)
    os.kill(ranks[2], signal.SIGKILL)
    text = text_of_equal_runs(program, alone, tmp_path, 90)
    assert "worker1 was killed by SIGKILL; the others go on, and a new process joins in its place" in text
    assert "worker2 was killed by SIGKILL; the others go on" in text
    assert text.count("the other workers compute its chunks from now on") == 2
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


TOGETHER = {
    "ddp-maml": ("strategy=ddp",),
    "ddp-supervised": ("strategy=ddp", "experiment=supervised_glyphs", "trainer.meta_batch_size=20"),
    "split": ("strategy=split", "experiment=supervised_glyphs", "trainer.meta_batch_size=20"),
}


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("ddp-maml", signal.SIGKILL),
        ("ddp-supervised", signal.SIGSTOP),
        ("split", signal.SIGKILL),
        pytest.param("ddp-supervised", signal.SIGKILL, marks=slow),
        pytest.param("ddp-maml", signal.SIGSTOP, marks=slow),
        pytest.param("split", signal.SIGSTOP, marks=slow),
    ],
)
def test_a_lost_worker_is_named(how: str, fault: signal.Signals, start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, *TOGETHER[how], "workers=2", "strategy.timeout=5", "hydra.run.dir=" + str(RUN))
    ranks = started(program, tmp_path)
    os.kill(ranks[1], fault)
    began = time.monotonic()
    outcome = program.wait(30)
    assert time.monotonic() - began < (15 if fault == signal.SIGKILL else 5 + 15)
    assert outcome.code == 1, outcome.text
    message = "worker1 does not answer" if fault == signal.SIGKILL else "worker1 did not answer within 5 s"
    assert f"error: {message}" in outcome.text, outcome.text
    assert not any(map(alive, ranks))


@pytest.mark.parametrize("how", [pytest.param("ddp-supervised", marks=slow), "split"])
def test_a_stopped_run_has_saved(how: str, start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, *TOGETHER[how], "workers=2", "hydra.run.dir=" + str(RUN))
    ranks = started(program, tmp_path)
    program.process.terminate()
    outcome = program.wait(60)
    assert outcome.code == 143, outcome.text
    last = metrics(tmp_path / RUN)[-1]["step"]
    assert (tmp_path / RUN / f"checkpoints/step_{last:06d}/manifest.json").exists()
    assert not any(map(alive, ranks))


@pytest.mark.parametrize("how", TOGETHER)
def test_what_is_not_finite_is_not_applied(how: str, start: Start, tmp_path: Path) -> None:
    bad = ["optimizer.lr=1e30", "trainer.steps=50", "launch.max_restarts=2"]
    outcome = start(*ENDLESS, *TOGETHER[how], *bad, "workers=2", "hydra.run.dir=" + str(RUN)).wait(60)
    assert outcome.code == 3 and "is not finite" in outcome.text, outcome.text
    assert "The step is not applied, and the last checkpoint stands" in outcome.text and "restart" not in outcome.text
    worker = "worker1" if how == "split" else "worker0"  # samples end at the last shard
    assert outcome.text.count(f"on {worker}: ") == 1, outcome.text


@pytest.mark.parametrize("torchrun", [None, 2], ids=["launcher", "torchrun"])
@pytest.mark.parametrize("who", ["rank zero", "its parent"])
def test_nobody_is_orphaned(who: str, torchrun: int | None, start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, *([] if torchrun else ["workers=2"]), torchrun=torchrun)
    ranks = started(program, tmp_path)
    assert len(ranks) == 2
    os.kill(ranks[0] if who == "rank zero" else program.process.pid, signal.SIGKILL)
    until(lambda: not any(map(alive, ranks)), "the end of all ranks", seconds=5)
    assert program.wait(30).code != 0


@pytest.mark.parametrize("torchrun", [None, 2], ids=["launcher", "torchrun"])
def test_nobody_is_orphaned_while_it_starts(torchrun: int | None, start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, *([] if torchrun else ["workers=2"]), torchrun=torchrun)
    until(lambda: len(ranks_of(program)) == 2, "both ranks")
    ranks = ranks_of(program)
    os.kill(program.process.pid, signal.SIGKILL)
    until(lambda: not any(map(alive, ranks)), "the end of all ranks", seconds=5)


@slow
@pytest.mark.parametrize("workers", ["workers=2 strategy=rpc", "workers=3 strategy=ddp"])
def test_a_stopped_rank_zero_ends_the_run(workers: str, start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, *workers.split(), "strategy.timeout=8")
    ranks = started(program, tmp_path)
    os.kill(ranks[0], signal.SIGSTOP)
    outcome = program.wait(8 + 15)
    assert outcome.code == 1 and "worker0 did not answer within 8 s" in outcome.text, outcome.text
    assert "Traceback" not in outcome.text and "SIGTERM" not in outcome.text, outcome.text
    assert not any(map(alive, ranks))


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
    assert json.loads((tmp_path / RUN / "result.json").read_text())["steps"] == 60


OWN = [
    ("partitioner", "deal_twice", "it gave out [1] twice"),
    ("partitioner", "deal_to_nobody", "worker=7: the world has the workers 0 to 1"),
    ("reducer", "fail_at_the_third_call", "failed with ArithmeticError: cannot reduce this"),
    ("reducer", "lose_a_parameter", "must return a dict with a tensor of shape"),
]


@pytest.mark.parametrize(("group", "name", "message"), OWN, ids=[name for _, name, _ in OWN])
def test_faulty_functions_of_ones_own_end_the_run(
    group: str, name: str, message: str, start: Start, tmp_path: Path
) -> None:
    own = [f"{group}=function", f"{group}.name=tests.own_functions.{name}"]
    outcome = start(*ENDLESS, "workers=2", *own, PYTHONPATH=str(ROOT)).wait(60)
    assert outcome.code == 1 and message in outcome.text, outcome.text
    saved = list((tmp_path / RUN / "checkpoints").glob("step_*/manifest.json"))
    assert bool(saved) == (name == "fail_at_the_third_call")


def test_missing_functions_are_reported_before_anything_starts(start: Start, tmp_path: Path) -> None:
    outcome = start(*ENDLESS, "workers=2", "reducer=function", "reducer.name=nowhere.mean").wait(60)
    assert outcome.code == 2 and "reducer.name=nowhere.mean" in outcome.text, outcome.text
    assert list(tmp_path.glob("outputs")) == []


# The doctor


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, str(ROOT / "scripts/doctor.py"), *arguments]
    return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120)


def test_the_doctor_checks_two_workers() -> None:
    done = doctor("--workers", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    expected = {
        "send/recv", "broadcast", "scatter", "gather", "reduce", "all_reduce", "all_gather", "reduce_scatter",
        "all_to_all", "RPC round trip", "remote call", "RRef fetch", "distributed backward", "parameters in rpc.RRef",
    }  # fmt: skip
    assert set(checks) == expected and report["ok"]
    assert all(check["ok"] is not False for check in checks.values())
    assert checks["all_reduce"]["latency"] > 0 and checks["all_reduce"]["bandwidth"] > 0
    assert "torch detaches them" in checks["parameters in rpc.RRef"]["note"]
    assert set(report["workers"]) == {"worker0", "worker1"} and report["workers"]["worker0"]["threads"] == 1
    assert all(address.startswith("127.0.0.1:") for addresses in report["listening"].values() for address in addresses)


def test_the_doctor_alone_prints_a_table() -> None:
    done = doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout and "RPC round trip" in done.stdout


def test_failed_checks_are_reported() -> None:
    def fails(count: int) -> bool:
        raise RuntimeError("broken cable\nand more")

    def lacks(count: int) -> bool:
        raise RuntimeError("ProcessGroup gloo does not support reduce_scatter")

    assert measured("a", lambda count: count == 1, "gloo")[:2] == ("a", False)
    assert measured("b", fails, "gloo") == Check("b", False, note="RuntimeError: broken cable")
    assert measured("c", lacks, "gloo") == Check("c", None, note="gloo does not have it")
    good = Check("d", True, 0.1, 1.0)
    assert worst([good, good._replace(latency=0.2)]).latency == 0.2
    bad = good._replace(ok=False)
    assert worst([good, bad, good]) == bad
    assert not Report([good, bad], {}, {}, "").ok and Report([good], {}, {}, "").ok
