"""A stand-in for Hugging Face's hub, on loopback."""

import base64
import hashlib
import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

needs_hub = pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub") is None, reason="huggingface_hub is not installed (extra hub)"
)


class Hub(BaseHTTPRequestHandler):
    """The calls of a hub that an upload and a download take. It keeps the files in memory."""

    protocol_version = "HTTP/1.1"
    files: ClassVar[dict[str, bytes]]
    private: ClassVar[list[bool]]
    silent: ClassVar[threading.Event | None]
    """If it is there, no call is answered until it is set."""
    COMMIT = "a" * 40

    def log_message(self, *arguments: Any) -> None:
        pass

    def answer(self, content: Any, code: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(body)), "Content-Type": "application/json"} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        if self.silent is not None:
            self.silent.wait(60)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(body)  # versions of the package differ in how they say it
            self.private.append(asked.get("private", False) or asked.get("visibility") == "private")
            return self.answer({"url": f"http://{self.headers['Host']}/me/animals", "name": "me/animals"})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/models/me/animals/preupload/main":
            asked = json.loads(body)["files"]
            return self.answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]}
            )
        if path == "/api/models/me/animals/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            address = f"http://{self.headers['Host']}/me/animals/commit/{self.COMMIT}"
            return self.answer({"success": True, "commitOid": self.COMMIT, "commitUrl": address, "hookOutput": ""})
        return self.answer({"error": "not found"}, 404)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        resolve = f"/me/animals/resolve/{self.COMMIT}/"
        if path in ("/api/models/me/animals", "/api/models/me/animals/revision/main"):
            siblings = [
                {"rfilename": name, "size": len(content), "blobId": "b" * 40} for name, content in self.files.items()
            ]
            about = {"_id": "1", "id": "me/animals", "modelId": "me/animals", "sha": self.COMMIT, "private": False,
                     "tags": [], "downloads": 0, "likes": 0, "siblings": siblings}  # fmt: skip
            return self.answer(about)
        if path == f"/api/models/me/animals/tree/{self.COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": "b" * 40}
                for name, content in self.files.items()
            ]
            return self.answer(tree)
        name = path.removeprefix(resolve)
        if path.startswith(resolve) and name in self.files:
            return self.answer(
                self.files[name], ETag=f'"{hashlib.sha1(self.files[name]).hexdigest()}"', X_Repo_Commit=self.COMMIT
            )
        return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    Hub.files, Hub.private, Hub.silent = {}, [], None
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_stand_in")
    if importlib.util.find_spec("huggingface_hub") is not None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield Hub
    server.shutdown()
    server.server_close()
    thread.join()
