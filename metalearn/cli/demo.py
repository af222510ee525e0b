"""Shows a classifier that `metalearn fit` has made in the browser: a local page on which one drops pictures.

It listens on this machine alone, and ends with Ctrl-C. No picture is kept.

  metalearn demo classifier
  metalearn demo classifier --port 8000
"""

import json
import re
import threading
import urllib.parse
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metalearn.app.process import OK
from metalearn.cli.arguments import command_parser, whole
from metalearn.cli.fit import classifier_parser, ended, loaded
from metalearn.cli.predict import NONE
from metalearn.errors import ConfigError, printable
from metalearn.reporting.page import page
from metalearn.storage.files import is_folder

if TYPE_CHECKING:
    from metalearn.classifier.classifier import PictureClassifier

_CLASSES_SHOWN = 5
_MOST_BYTES = 2**26  # of a picture's file
_HEADERS = {"X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
REPORT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


# A server of pages for this machine alone


class LocalHandler(BaseHTTPRequestHandler):
    """A handler that answers who asks for this machine by its own name, and says nothing for each request."""

    timeout = 30.0  # seconds for a part of a request

    def handle(self) -> None:
        """Answers a client; that it leaves, or waits in the middle of a request, is no error."""
        with suppress(ConnectionError, TimeoutError):
            super().handle()

    def is_ours(self) -> bool:
        """Whether the browser means this machine: the name of another could have been pointed here."""
        port = self.connection.getsockname()[1]
        names = ("127.0.0.1", "localhost")
        return self.headers.get("Host") in (*(f"{name}:{port}" for name in names), *(names if port == 80 else ()))

    def say(self, code: int, **values: Any) -> None:
        """Replies with an object of JSON."""
        self.reply(code, json.dumps(values).encode(), "application/json")

    def reply(self, code: int, body: bytes, kind: str, **headers: str) -> None:
        """Replies with a body of this MIME type, and further headers, with _ for -."""
        self.send_response(code)
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        for header, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body)), **more}.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing for each request."""


def opened(handler: type[LocalHandler], port: int) -> ThreadingHTTPServer:
    """A server that waits for `serve`. Raises ConfigError if there is no such port, or it is taken."""
    if port > 65535:
        raise ConfigError(f"--port={port}: must be at most 65535; type --port 0 for any that is free")
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        raise ConfigError(
            f"--port={port}: cannot be opened: {error.strerror}; type --port 0 for any that is free"
        ) from error


def serve(server: ThreadingHTTPServer) -> int:
    """Prints the address, and serves until Ctrl-C; returns the exit code."""
    with server:
        print(f"http://127.0.0.1:{server.server_port}/  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return OK
    return OK


# The commands


@ended
def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = classifier_parser("demo", __doc__)
    parser.add_argument("--port", type=whole(0), default=0, help="the port (default: 0, any that is free)")
    options = parser.parse_args(arguments)
    classifier = loaded(options)
    return serve(served(classifier, options.classifier.resolve().name, options.port))


def served(classifier: "PictureClassifier", name: str, port: int) -> ThreadingHTTPServer:
    """A server of the page, which waits for `serve`. Raises ConfigError for a port that cannot be had."""
    content = page("demo.html", title=name, classes=classifier.classes_).encode()
    one_at_a_time = threading.Lock()

    class Handler(LocalHandler):
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

    return opened(Handler, port)


@ended
def watch(arguments: Sequence[str]) -> int:
    """Shows the runs below a folder in the browser, as they go: a local page that renews itself, with all curves, what
    is running, and how long it may still take.

    It listens on this machine alone, writes nothing, and ends with Ctrl-C. Runs may begin later.

      metalearn watch outputs
      metalearn watch outputs --port 8000
    """
    parser = command_parser("watch", watch.__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder that holds the folders of runs")
    parser.add_argument("--port", type=whole(0), default=0, help="the port (default: 0, any that is free)")
    parser.add_argument("--every", type=whole(1), default=5, help="seconds until the page is renewed (default: 5)")
    options = parser.parse_args(arguments)
    if not is_folder(options.folder):
        raise ConfigError(f"{options.folder}: is no folder; type the one that holds the folders of runs")
    return serve(watched(options.folder, options.port, options.every))


def watched(folder: Path, port: int, every: int) -> ThreadingHTTPServer:
    """A server of the index of a folder and its reports, which waits for `serve`. Raises ConfigError as `served`."""
    from metalearn.reporting.index import index_page, report_at, runs_below  # imports torch, which demo sets up first

    one_at_a_time = threading.Lock()  # matplotlib draws in one thread only

    class IndexHandler(LocalHandler):
        def do_GET(self) -> None:
            address = urllib.parse.urlsplit(self.path).path
            if not self.is_ours():
                self.say(404, error="there is no such page")
                return
            try:
                with one_at_a_time:
                    runs = runs_below(folder)
                    content = index_page(folder, runs, every).encode() if address == "/" else None
                    content = content or report_at(folder, runs, address)
            except Exception as error:  # whatever is damaged, or gone meanwhile: the next request is answered
                self.say(500, error=printable(f"{type(error).__name__}: {error}"))
                return
            if content is None:
                self.say(404, error="there is no such page")
            else:
                # Scripts for the index alone: a report may come from elsewhere.
                more = {} if address == "/" else {"Content_Security_Policy": REPORT_POLICY}
                self.reply(200, content, "text/html; charset=utf-8", **more)

    return opened(IndexHandler, port)
