"""A stand-in of the Hugging Face Hub on loopback: its listing, its files by revision, its refusals."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

_LISTING = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)(?:/revision/(?P<revision>.+))?")
_FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class StandInHub:
    """What it has, and what it was asked for."""

    def __init__(self) -> None:
        self.url = ""
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        """By name and commit."""
        self.commits: dict[tuple[str, str], str] = {}
        """By name and branch or tag."""
        self.gated: set[str] = set()
        self.claimed_bytes: dict[str, int] = {}
        """Sizes of files that the listing exaggerates."""
        self.breaks_off: set[str] = set()
        """Files of which only the half is sent, this once."""
        self.status = 0
        """What everything is answered with; 0 answers."""
        self.asked: list[str] = []
        """Files that were sent, in order."""

    def add(self, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        """A commit of these files; its hash."""
        described = json.dumps([name, {key: hashlib.sha1(value).hexdigest() for key, value in files.items()}])
        commit = hashlib.sha1(described.encode()).hexdigest()
        self.files[name, commit], self.commits[name, revision] = files, commit
        return commit

    def commit_of(self, name: str, revision: str) -> str | None:
        commit = self.commits.get((name, revision), revision)
        return commit if (name, commit) in self.files else None

    def knows(self, name: str) -> bool:
        return any(known == name for known, _ in self.files)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StandInHub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(self.path.partition("?")[0])
        match = _LISTING.fullmatch(path) or _FILE.fullmatch(path)
        if self.hub.status:
            return self._refuse(self.hub.status, "")
        if match is None:
            return self._refuse(404, "")
        name, revision = match["name"], match["revision"] or "main"
        if not self.hub.knows(name):
            # The real one doesn't tell strangers which names are private.
            return self._refuse(401, "RepoNotFound")
        commit = self.hub.commit_of(name, revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        files = self.hub.files[name, commit]
        if match.re is _LISTING:
            return self._list(name, commit, files)
        if name in self.hub.gated and self.headers.get("Authorization") != "Bearer hf_accepted":
            return self._refuse(403, "GatedRepo")
        content = files.get(match["file"])
        if content is None:
            return self._refuse(404, "EntryNotFound", commit)
        return self._send(match["file"], content, commit)

    def _list(self, name: str, commit: str, files: dict[str, bytes]) -> None:
        siblings = [
            {"rfilename": key, "size": self.hub.claimed_bytes.get(key, len(value)), "blobId": _etag(value)}
            for key, value in files.items()
        ]
        body = json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": False}).encode()
        self._head(200, len(body), {"Content-Type": "application/json"})
        self.wfile.write(body)

    def _send(self, name: str, content: bytes, commit: str) -> None:
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        rest = content[begin:]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(content)}"', "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self._head(206 if begin else 200, len(rest), headers)
        if self.command == "GET":
            self.hub.asked.append(name)
            if name in self.hub.breaks_off:
                self.wfile.write(rest[: len(rest) // 2])
                self.close_connection = True
                return
            self.wfile.write(rest)

    def _refuse(self, status: int, code: str, commit: str = "") -> None:
        headers = {"X-Error-Code": code} if code else {}
        self._head(status, 0, headers | ({"X-Repo-Commit": commit} if commit else {}))

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(key, value)
        self.end_headers()


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def stand_in_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """One that the environment points to, with `home` as HF_HOME."""
    hub = StandInHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
