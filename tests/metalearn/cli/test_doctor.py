"""The doctor: it checks every way to send between workers against known answers."""

import json
import subprocess
import sys

import pytest

from distributed.doctor import Check, Report, measured, worst
from tests.runs import said_by, slow

pytestmark = pytest.mark.thorough


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return said_by([sys.executable, "-m", "metalearn", "doctor", *arguments])


@slow
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
    assert report["listening"].startswith("listening: ")


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
    assert not Report([good, bad], {}, "").ok and Report([good], {}, "").ok
