"""A server of pages for a browser on this machine alone, and what its handlers share."""

import json
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from metalearn.app.process import OK
from metalearn.errors import ConfigError

_HEADERS = {"X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


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
