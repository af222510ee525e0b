"""`metalearn watch`: the index as a page of this machine, as runs go on."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from metalearn.cli.demo import watched
from metalearn.cli.main import main
from tests.metalearn.reporting.test_index import put
from tests.runs import Program, until

VALIDATED = '{"step": 2, "split": "val", "mse": 2.5, "loss": 2.5, "ci95": 0.1, "tasks": 4, "elapsed_seconds": 6.0}\n'


@pytest.fixture
def address(tmp_path: Path) -> Iterator[tuple[str, int]]:
    with watched(tmp_path, 0, 3) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield "127.0.0.1", server.server_port
        server.shutdown()
        thread.join()


def asked(address: tuple[str, int], path: str, **headers: str) -> tuple[int, str, str]:
    """The code, the policy and the body of an answer."""
    connection = http.client.HTTPConnection(*address, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Security-Policy") or "", answer.read().decode()


def test_a_run_is_shown_as_it_goes_on(address: tuple[str, int], tmp_path: Path) -> None:
    assert "0 run" in asked(address, "/")[2]  # it may begin later
    run = put(tmp_path / "x/one", "seed=1", lines=VALIDATED + '{"step": 3, "spl')
    (run / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}")
    results = {"trials": {"total": 4, "completed": 1, "failed": 1}}
    (tmp_path / "x/optimization_results.yaml").write_text(json.dumps(results))
    code, policy, page = asked(address, "/?again")
    assert (code, policy) == (200, "") and "running, step 2 of 5, about 9 s left" in page
    assert "x: 2 of 4 trials have ended" in page and page.count("<svg") == 1 and "renews itself every 3 seconds" in page
    assert "script-src 'unsafe-inline'; connect-src 'self'" in page
    (link,) = re.findall(r'<a href="\.(/[^"]*)"', page)
    code, policy, report = asked(address, link)
    assert code == 200 and "script" not in policy and "mse 2.5000 &#177; 0.1000 (4 tasks), after step 2" in report
    with (run / "metrics.jsonl").open("a") as file:
        file.write('it": "train"}\n')
    assert "running, step 3 of 5, about 6 s left" in asked(address, "/")[2]
    (run / "result.json").write_text(json.dumps({"status": "completed", "seconds": 7, "steps": 5}))
    (run / "report.html").write_bytes(b"<!DOCTYPE html>\xff")
    page = asked(address, "/")[2]
    assert ">completed</td>" in page and 'href="./x/one/report.html"' in page
    assert not (tmp_path / "index.html").exists() and not (tmp_path / "index-reports").exists()


def test_other_pages_and_other_names_are_not_answered(address: tuple[str, int], tmp_path: Path) -> None:
    put(tmp_path / "x/one", "seed=1", lines=VALIDATED)
    (tmp_path / "x/report.html").write_text("of no run")
    report = "/index-reports/../x/one/report.html"
    for path in ("/x/one/metrics.jsonl", "/x/report.html", "/../x", report, "/%2e"):
        assert asked(address, path)[0] == 404, path
    assert asked(address, "/", Host=f"evil.example:{address[1]}")[0] == 404
    (tmp_path / "x/one/metrics.jsonl").write_text("no JSON\n")
    assert "damaged: metrics.jsonl: has a line that is no JSON" in asked(address, "/")[2]


def test_it_ends_with_ctrl_c_and_refuses_what_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = Program([sys.executable, "-m", "metalearn", "watch", "."], tmp_path)
    until(lambda: "http://127.0.0.1:" in program.said(), "the address")
    os.kill(program.process.pid, signal.SIGINT)
    outcome = program.wait(60)
    assert outcome.code == 0 and outcome.text.count("\n") == 1, outcome.text
    assert main(["watch", str(tmp_path / "none")]) == 2 and "none: is no folder" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--port", "65536"]) == 2 and "at most 65535" in capsys.readouterr().err
