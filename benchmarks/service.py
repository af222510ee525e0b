"""The service of docs/how-to/classify.md: how soon it answers, and how many pictures a second.

    python benchmarks/service.py --requests 1000

It fits a classifier of the twelve drawn classes, starts the service in a process of its own, and posts PNG files to it.
"""

import argparse
import io
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from metalearn.classifier.classifier import PictureClassifier
from metalearn.cli.arguments import whole
from metalearn.reporting.provenance import ROOT, made_with
from tests import drawn_pictures

THREADS = (1, 8)

_START_SECONDS, _ANSWER_SECONDS = 120.0, 60.0


def files(count: int) -> list[bytes]:
    generator, found = np.random.default_rng(1), []
    for number in range(count):
        file = io.BytesIO()
        drawn_pictures.drawn([*drawn_pictures.THINGS][number % 12], generator).save(file, "PNG")
        found.append(file.getvalue())
    return found


def ask(port: int, body: bytes) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}", body, timeout=_ANSWER_SECONDS) as answer:
        return bytes(answer.read())


def until_first_answer(port: int, body: bytes) -> None:
    began = time.monotonic()
    while True:
        try:
            ask(port, body)
            return
        except urllib.error.URLError:
            if time.monotonic() - began > _START_SECONDS:
                raise SystemExit(f"the service has not answered within {_START_SECONDS:g} s") from None
            time.sleep(0.01)


def measure(folder: Path, bodies: Sequence[bytes], requests: int) -> tuple[float, dict[int, float]]:
    """Seconds from the start of the process to its first answer; and pictures a second by threads that ask."""
    page = (ROOT / "docs/how-to/classify.md").read_text(encoding="utf-8")
    [code] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ThreadingHTTPServer" in block]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    quiet = "    def log_message(self, *_): pass\n\n    def do_POST"
    code = code.replace("8000", str(port)).replace("    def do_POST", quiet)
    began = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    service = subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=environment)
    try:
        until_first_answer(port, bodies[0])
        cold, speeds = time.perf_counter() - began, {}
        for threads in THREADS:
            with ThreadPoolExecutor(threads) as pool:
                began = time.perf_counter()
                list(pool.map(lambda i: ask(port, bodies[i % len(bodies)]), range(requests)))
                speeds[threads] = requests / (time.perf_counter() - began)
        return cold, speeds
    finally:
        service.terminate()
        service.wait(timeout=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=whole(1), default=200, help="by each number of threads (default: 200)")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as home:
        paths = sorted(drawn_pictures.put(Path(home) / "pictures").glob("*/*.png"))
        PictureClassifier().fit(paths, [path.parent.name for path in paths]).save(Path(home) / "classifier")
        cold, speeds = measure(Path(home), files(24), options.requests)
    print(f"first answer after {cold:.1f} s")
    for threads, speed in speeds.items():
        print(f"{speed:.0f} pictures a second, asked by {threads} at a time")
    origin = made_with()
    print(f"{origin['date']}, {origin['hardware']}, {origin['versions']}; load {load:.1f} at the start.")


if __name__ == "__main__":
    main()
