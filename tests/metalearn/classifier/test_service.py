"""The service of docs/how-to/classify.md, asked by eight threads at once."""

import io
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from metalearn.classifier.classifier import PictureClassifier
from tests import drawn_pictures
from tests.docs.blocks import blocks
from tests.runs import slow

pytestmark = pytest.mark.thorough

THINGS = ("fish", "ring", "star")


@pytest.mark.parametrize("requests", [40, pytest.param(1000, marks=slow)])
def test_every_answer_of_the_service_is_that_of_the_classifier(
    requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("METALEARN_CACHE", str(tmp_path / "cache"))
    generator = np.random.default_rng(0)
    images = [drawn_pictures.drawn(thing, generator) for thing in THINGS for _ in range(6)]
    labels = np.repeat(THINGS, 6).tolist()
    known, new = images[::2], images[1::2]
    classifier = PictureClassifier(head="class means").fit(known, labels[::2])
    classifier.save("classifier")
    expected = [(answer.label, answer.probability) for answer in classifier.answers(new)]
    [code] = [block.code for block in blocks("docs/how-to/classify.md") if "ThreadingHTTPServer" in block.code]
    service: dict[str, Any] = {"__name__": "service"}
    began = time.perf_counter()
    exec(compile(code, "classify.md", "exec"), service)
    cold = time.perf_counter() - began
    service["Service"].log_message = lambda *_: None
    cached = sorted((tmp_path / "cache").glob("features-*"))
    server = service["ThreadingHTTPServer"](("127.0.0.1", 0), service["Service"])
    Thread(target=server.serve_forever, daemon=True).start()

    def ask(body: bytes) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", body, timeout=120) as answer:
            return dict(json.load(answer))

    bodies = []
    for image in new:
        file = io.BytesIO()
        image.save(file, "PNG")
        bodies.append(file.getvalue())
    try:
        began = time.perf_counter()
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, [bodies[i % len(new)] for i in range(requests)]))
        print(f"{requests / (time.perf_counter() - began):.1f} pictures a second; ready after {cold:.2f} s")
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(b"no picture")
    finally:
        server.shutdown()
        server.server_close()
    assert [(one["label"], one["probability"]) for one in found] == [expected[i % len(new)] for i in range(requests)]
    assert cached and cached == sorted((tmp_path / "cache").glob("features-*"))
