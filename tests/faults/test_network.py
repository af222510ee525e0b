"""Who can connect to a run, and to whom it connects: nobody and nothing outside of this host."""

from pathlib import Path

import pytest

from tests.faults.endless import ENDLESS, started
from tests.listeners import listeners
from tests.runs import Start, slow

pytestmark = pytest.mark.thorough


def test_a_run_by_our_launcher_listens_on_loopback_only(start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, "workers=2")
    ranks = started(program, tmp_path)
    by_process = {pid: listeners(pid) for pid in [program.process.pid, *ranks]}
    assert all(by_process[rank] for rank in ranks), "RPC listens somewhere"
    assert all(listener.closed for addresses in by_process.values() for listener in addresses), by_process
    assert "listening: " in program.said()


@slow
def test_under_torchrun_only_its_store_is_open_and_named(start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, torchrun=2)
    ranks = started(program, tmp_path)
    assert all(listener.closed for rank in ranks for listener in listeners(rank))
    open_ones = [listener for listener in listeners(program.process.pid) if not listener.closed]
    output = program.said()
    assert open_ones and "store is open to other hosts" in output and "workers=N without torchrun" in output
    assert "Every user of this host can connect there and run code here" in output
