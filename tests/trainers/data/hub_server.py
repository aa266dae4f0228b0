"""A server that speaks the hub's protocol, as far as `datasets` and `huggingface_hub` read datasets by it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_ROUTE = re.compile(
    r"/(?:api/datasets/(?P<api>[^/]+/[^/]+)"
    r"(?:/(?P<what>revision|tree|paths-info)/(?P<of>[^/]+)(?P<below>/.*)?)?"
    r"|datasets/(?P<files>[^/]+/[^/]+)/resolve/(?P<at>[^/]+)/(?P<path>.+))"
)


class Hub(ThreadingHTTPServer):
    """Datasets by owner and name, with their earlier commits."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.newest: dict[str, str] = {}
        self.commits: dict[tuple[str, str], Mapping[str, bytes]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def push(self, name: str, files: Mapping[str, bytes]) -> str:
        """Makes these the dataset's files, contents by path, and returns the commit."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[name, commit] = files
        self.newest[name] = commit
        return commit


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *arguments: Any) -> None:
        """Leaves the test's output alone."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        match = _ROUTE.fullmatch(unquote(urlsplit(self.path).path))
        name = match and (match["api"] or match["files"])
        if match is None or name not in self.server.newest:
            self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
            return
        wanted = match["of"] or match["at"] or "main"
        commit = self.server.newest[name] if wanted == "main" else wanted
        files = self.server.commits.get((name, commit))
        if files is None:
            self._send(404, b'{"error": "Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"})
        elif match["files"]:
            self._send_file(files.get(match["path"]), commit)
        elif match["what"] in (None, "revision"):
            siblings = [{"rfilename": path} for path in files]
            self._send_json(
                {"_id": name, "id": name, "sha": commit, "private": False, "tags": [], "siblings": siblings}
            )
        elif match["what"] == "tree":
            below = (match["below"] or "").strip("/")
            self._send_json([_entry(path, files) for path in _tree(files, below)])
        else:
            paths = parse_qs(body.decode())["paths"] if b"=" in body else json.loads(body)["paths"]
            self._send_json([_entry(path, files) for path in paths if path in _tree(files, "")])

    def _send_file(self, content: bytes | None, commit: str) -> None:
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, end = int(span[1]), min(int(span[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
            self._send(206, content[begin : end + 1], headers)
        else:
            self._send(200, content, headers)

    def _send_json(self, document: Any) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _tree(files: Mapping[str, bytes], below: str) -> list[str]:
    folders = {"/".join(path.split("/")[:depth]) for path in files for depth in range(1, path.count("/") + 1)}
    return sorted(path for path in (*folders, *files) if not below or path.startswith(f"{below}/"))


def _entry(path: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    if path not in files:
        return {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
    content = files[path]
    return {"type": "file", "path": path, "oid": hashlib.sha1(content).hexdigest(), "size": len(content)}
