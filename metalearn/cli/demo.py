"""Shows a classifier that `metalearn fit` has made in the browser: a local page on which one drops pictures.

It listens on this machine alone, and ends with Ctrl-C. No picture is kept.

  metalearn demo classifier
  metalearn demo classifier --port 8000
"""

import json
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from metalearn.app.process import OK
from metalearn.cli.arguments import whole
from metalearn.cli.fit import classifier_parser, ended, loaded
from metalearn.cli.predict import NONE
from metalearn.errors import ConfigError, printable
from metalearn.reporting.page import page

if TYPE_CHECKING:
    from metalearn.classifier.classifier import PictureClassifier

_HEADERS = {"X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}

_CLASSES_SHOWN = 5
_MOST_BYTES = 2**26  # of a picture's file


@ended
def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = classifier_parser("demo", __doc__)
    parser.add_argument("--port", type=whole(0), default=0, help="the port (default: 0, any that is free)")
    options = parser.parse_args(arguments)
    if options.port > 65535:
        raise ConfigError(f"--port={options.port}: must be at most 65535; type --port 0 for any that is free")
    classifier = loaded(options)
    with served(classifier, options.classifier.resolve().name, options.port) as server:
        print(f"http://127.0.0.1:{server.server_port}/  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return OK
    return OK


def served(classifier: "PictureClassifier", name: str, port: int) -> ThreadingHTTPServer:
    """A server of the page on this machine alone, which waits for `serve_forever`.

    Raises:
        ConfigError: the port is taken.
    """
    content = page("demo.html", title=name, classes=classifier.classes_).encode()
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        timeout = 30.0  # seconds for a part of a request

        def handle(self) -> None:
            with suppress(ConnectionError, TimeoutError):  # the client has left, or waits in the middle of a request
                super().handle()

        def do_GET(self) -> None:
            if self.path == "/" and self.is_ours():
                self.reply(200, content, "text/html; charset=utf-8")
            else:
                self.say(404, error="there is no such page")

        def do_POST(self) -> None:
            if not self.is_ours() or "X-Picture" not in self.headers:  # pages of others may not send this header
                self.say(403, error="this is for the page of metalearn demo alone")
                return
            if self.path != "/predict":
                self.say(404, error="there is no such page")
                return
            length = self.headers.get("Content-Length", "")
            if re.fullmatch("[0-9]{1,9}", length) is None or int(length) > _MOST_BYTES:
                self.say(413, error=f"a picture needs a Content-Length of at most {_MOST_BYTES} bytes")
                return
            picture = self.rfile.read(int(length))
            if len(picture) < int(length):  # the client has left
                return
            try:
                with one_at_a_time:
                    (answer,) = classifier.answers([picture])
            except ValueError as error:
                self.say(400, error=printable(str(error).removeprefix("X[0]: ")))
                return
            pairs = zip(map(str, classifier.classes_), answer.probabilities.tolist(), strict=True)
            ranked = sorted(pairs, key=lambda pair: pair[1], reverse=True)
            label = NONE if answer.label is None else str(answer.label)
            self.say(200, label=label, probabilities=ranked[:_CLASSES_SHOWN])

        def is_ours(self) -> bool:
            """Whether the browser means this machine: the name of another could have been pointed here."""
            port = self.connection.getsockname()[1]
            return self.headers.get("Host") in (f"127.0.0.1:{port}", f"localhost:{port}")

        def say(self, code: int, **values: Any) -> None:
            self.reply(code, json.dumps(values).encode(), "application/json")

        def reply(self, code: int, body: bytes, kind: str) -> None:
            self.send_response(code)
            for header, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
                self.send_header(header, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing for each request."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ConfigError(
            f"--port={port}: cannot be opened: {error.strerror}; type --port 0 for any that is free"
        ) from error
