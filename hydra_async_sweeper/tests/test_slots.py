"""Slots: processes that are forked for each trial, their GPUs, and what they leave behind."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hydra_async_sweeper.slots import NurseryGoneError, TrialExit, TrialSlots


def work(number: int, overrides: Sequence[str]) -> Any:
    if "fail" in overrides:
        raise ValueError("as it was told")
    if "sleep" in overrides:
        time.sleep(60)
    return {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "pid": os.getpid(), "parent": os.getppid()}


def ended(slots: TrialSlots, count: int) -> dict[int, TrialExit]:
    found: list[TrialExit] = []
    deadline = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < deadline, found
        found += slots.wait(0.5)
    return {one.number: one for one in found}


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[TrialSlots]:
    with closing(TrialSlots(work, tmp_path / "logs", gpus=["3", "5"])) as made:
        yield made


def test_slots_share_out_the_gpus(slots: TrialSlots) -> None:
    for slot in range(4):
        slots.start(10 + slot, [], slot)
    outcomes = {number: one.outcome for number, one in ended(slots, 4).items()}
    assert {number: outcome["gpu"] for number, outcome in outcomes.items()} == {10: "3", 11: "5", 12: "3", 13: "5"}
    assert len({outcome["pid"] for outcome in outcomes.values()}) == 4
    assert len({outcome["parent"] for outcome in outcomes.values()}) == 1  # all are forks of one process


def test_a_trial_that_fails_or_is_killed_takes_no_other_with_it(slots: TrialSlots) -> None:
    slots.start(0, ["sleep"], 0)
    slots.start(1, ["fail"], 1)
    assert ended(slots, 1)[1].code == 1 and "as it was told" in slots.log_of(1).read_text()
    slots.signal(signal.SIGKILL)
    assert ended(slots, 1)[0] == TrialExit(0, -signal.SIGKILL, None)
    slots.start(2, [], 0)
    assert ended(slots, 1)[2].code == 0


def test_a_signal_reaches_a_trial_that_has_just_been_started(slots: TrialSlots) -> None:
    slots.start(0, ["sleep"], 0)
    slots.signal(signal.SIGTERM)  # it may still ignore the signals, as the nursery does
    assert ended(slots, 1)[0] == TrialExit(0, -signal.SIGTERM, None)
    slots.start(0, [], 0)
    assert ended(slots, 1)[0].code == 0


def test_without_the_nursery_the_slots_say_so(slots: TrialSlots) -> None:
    slots.start(0, [], 0)
    os.kill(ended(slots, 1)[0].outcome["parent"], signal.SIGKILL)
    with pytest.raises(NurseryGoneError, match="the same command resumes"):
        for number in range(1, 50):
            slots.start(number, [], 0)
            slots.wait(0.1)
