"""Shows a classifier that `metalearn fit` has made in the browser: a local page on which one drops pictures.

It listens on this machine alone, and ends with Ctrl-C. No picture is kept.

  metalearn demo classifier
  metalearn demo classifier --port 8000
"""

import re
import threading
from collections.abc import Sequence
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING

from metalearn.app.local_server import LocalHandler, opened, serve
from metalearn.cli.arguments import whole
from metalearn.cli.fit import classifier_parser, ended, loaded
from metalearn.cli.predict import NONE
from metalearn.errors import printable
from metalearn.reporting.page import page

if TYPE_CHECKING:
    from metalearn.classifier.classifier import PictureClassifier

_CLASSES_SHOWN = 5
_MOST_BYTES = 2**26  # of a picture's file


@ended
def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = classifier_parser("demo", __doc__)
    parser.add_argument("--port", type=whole(0), default=0, help="the port (default: 0, any that is free)")
    options = parser.parse_args(arguments)
    classifier = loaded(options)
    return serve(served(classifier, options.classifier.resolve().name, options.port))


def served(classifier: "PictureClassifier", name: str, port: int) -> ThreadingHTTPServer:
    """A server of the page on this machine alone, which waits for `serve`. Raises ConfigError if there is no such port,
    or it is taken."""
    content = page("demo.html", title=name, classes=classifier.classes_).encode()
    one_at_a_time = threading.Lock()

    class Handler(LocalHandler):
        def do_GET(self) -> None:  # noqa: N802 (the name is http.server's)
            if self.path == "/" and self.is_ours():
                self.reply(200, content, "text/html; charset=utf-8")
            else:
                self.say(404, error="there is no such page")

        def do_POST(self) -> None:  # noqa: N802 (the name is http.server's)
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
