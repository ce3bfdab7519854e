"""A Hugging Face Hub on 127.0.0.1 with what huggingface_hub asks of one: repo info, trees, files, errors."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class FakeHub:
    """``repos``: name → file → content. ``gated`` repos show their files but give none away."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    down: bool = False
    """Answer everything with status 503."""
    endpoint: str = ""
    requests: list[str] = field(default_factory=list)

    def sha(self, repo: str) -> str:
        return hashlib.sha1(json.dumps(sorted(self.repos[repo])).encode()).hexdigest()

    def revisions(self, repo: str) -> Mapping[str, str]:
        return {"main": self.sha(repo), "v1": self.sha(repo), self.sha(repo): self.sha(repo)}


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.down:
            return self._send(503)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, rest = "/".join(parts[2:4]), parts[4:]
        else:
            repo, rest = "/".join(parts[:2]), parts[2:]
        if repo not in self.hub.repos:
            return self._send(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        revision = rest[1] if len(rest) > 1 else "main"
        commit = self.hub.revisions(repo).get(revision)
        if commit is None:
            return self._send(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
        files = self.hub.repos[repo]
        if not rest or rest[0] == "revision":
            siblings = [{"rfilename": f} for f in files]
            return self._json({"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "private": False})
        if rest[0] == "tree":
            return self._json([{"type": "file", "path": f, "size": len(c), "oid": _etag(c)} for f, c in files.items()])
        return self._file(repo, commit, "/".join(rest[2:]))

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), Content_Type="application/json")

    def _file(self, repo: str, commit: str, name: str) -> None:
        if repo in self.hub.gated:
            return self._send(403, X_Error_Code="GatedRepo", X_Error_Message="Access to this model is restricted")
        content = self.hub.repos[repo].get(name)
        if content is None:
            return self._send(
                404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found", X_Repo_Commit=commit
            )
        self._send(200, content, ETag=f'"{_etag(content)}"', X_Repo_Commit=commit)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """The hub on a free port; ``hub.endpoint`` is its address."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
