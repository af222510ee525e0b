"""A worker whose link is cut: every rank is in a network of its own, as on several hosts, joined by a switch."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.endless import ENDLESS, RUN
from tests.links import Switch, address_of
from tests.runs import ROOT, Outcome, Program, Start, assert_same_bytes, metrics, slow, until, why_not_isolable

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

INTO_A_LINK = """
import os, sys
from tests.links import enter_link
enter_link(int(os.environ["RANK"]), int(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
"""

CUT = ("--user", "--net", "--preserve-credentials", "ip", "link", "set", "link0", "down")


def run_with_a_cut(folder: Path, ranks: int, overrides: Sequence[str], seconds: float) -> tuple[list[Outcome], float]:
    """Runs `ranks` ranks and cuts the link of the last one at step 3; returns what they say, and the seconds from the
    cut to the end of rank zero."""
    reason = why_not_isolable() or (None if os.access("/dev/net/tun", os.W_OK) else "/dev/net/tun cannot be opened")
    if reason is not None:
        pytest.skip(f"no links here: {reason}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address_of(0)}
    with Switch(ranks, latency=0.0005, rate=1e8) as switch:
        programs = [
            Program(
                [sys.executable, "-c", INTO_A_LINK, str(channel),
                 sys.executable, str(ROOT / "train.py"), *overrides, "launch.interface=link0"],
                folder, world | {"RANK": str(rank), "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}, [channel],
            )
            for rank, channel in enumerate(switch.channels)
        ]  # fmt: skip
        try:
            until(lambda: len(metrics(folder / RUN)) >= 3, "step 3")
            subprocess.run(["nsenter", f"--target={programs[-1].process.pid}", *CUT], check=True)
            began = time.monotonic()
            outcomes = [programs[0].wait(seconds)]
            took = time.monotonic() - began
            outcomes += [program.wait(seconds) for program in programs[1:]]
        finally:
            for program in programs:
                program.kill()
    print(f"rank zero ended {took:.1f} s after the cut")
    return outcomes, took


@slow
def test_the_others_go_on_without_a_worker_whose_link_is_cut(start: Start, tmp_path: Path) -> None:
    few = (*ENDLESS, "trainer.steps=100", "trainer.test_tasks=8", "strategy.timeout=6")
    assert start(*few, "run=alone").wait().code == 0
    outcomes, _ = run_with_a_cut(tmp_path, 3, (*few, "strategy=rpc"), 120)
    assert outcomes[0].code == 0 and outcomes[1].code == 0 and outcomes[2].code != 0, outcomes
    assert "worker2 does not answer any more; the other workers compute its chunks" in outcomes[0].text
    assert_same_bytes(tmp_path / RUN, tmp_path / RUN.with_name("alone"))


@slow
def test_a_worker_whose_link_is_cut_is_named(tmp_path: Path) -> None:
    outcomes, took = run_with_a_cut(tmp_path, 2, (*ENDLESS, "strategy=ddp", "strategy.timeout=6"), 60)
    assert took < 6 + 15
    assert [outcome.code for outcome in outcomes] == [1, 1], outcomes
    assert "error: worker1 did not answer within 6 s" in outcomes[0].text, outcomes[0].text
