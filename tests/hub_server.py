"""A hub on this machine, which answers as the Hugging Face Hub does to its library: for tests of what is downloaded.

Small files come from the hub itself and large ones by a redirect from a "CDN": another host name of the same server,
as the real one is another host. A connection can be cut or held in the middle of a file, and every request is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_test_token"  # opens what is gated
_LARGE = (".safetensors", ".bin", ".gguf")
_API = re.compile(r"/api/models/([^/]+/[^/]+?)(?:/revision/([^/]+))?")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_CDN = re.compile(r"/cdn/([0-9a-f]{64})")


@dataclass
class Repository:
    """Files by name. `sizes` claims another length for a file than it has: only its beginning can then be read."""

    files: dict[str, bytes]
    gated: bool = False
    moved_to: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        return hashlib.sha1(b"".join(name.encode() + data for name, data in sorted(self.files.items()))).hexdigest()

    def size(self, name: str) -> int:
        return self.sizes.get(name, len(self.files[name]))


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None
    authorized: bool


class Hub:
    """The server's state, which tests set and read while it runs."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.connections = 0
        self.cuts: list[int] = []  # the next downloads from the CDN end after so many bytes, with the connection
        self.hold_after: int | None = None  # downloads from the CDN stop there until `released`
        self.released = threading.Event()
        self.fails_with: int | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.address = f"http://127.0.0.1:{self.port}"

    def add(self, name: str, folder: Path, **settings: Any) -> Repository:
        """Publish a folder's files, at the names that they have in it."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repositories[name] = Repository(files, **settings)
        return self.repositories[name]

    def forget(self) -> None:
        """Begin anew: no repositories, no requests, no faults."""
        self.repositories.clear()
        self.requests.clear()
        self.connections, self.cuts, self.hold_after, self.fails_with = 0, [], None, None
        self.released.clear()

    def downloads(self) -> list[Request]:
        """The requests for data from the CDN."""
        return [request for request in self.requests if request.path.startswith("/cdn/")]

    def fetched(self) -> set[str]:
        """The names of all files of which anything was asked for."""
        found = (_RESOLVE.fullmatch(request.path) for request in self.requests)
        return {match[3] for match in found if match}

    @contextmanager
    def running(self) -> Iterator[Hub]:
        """Serve until the block ends."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self.released.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def environment(self, home: Path) -> dict[str, str]:
        """The environment of a process that uses this hub and keeps all that it writes in `home`."""
        return {
            "HOME": str(home),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),  # compiled kernels
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_DATA_HOME": str(home / "data"),
            "HF_HOME": str(home / "hf"),
            "HF_ENDPOINT": self.address,
            "HF_TOKEN": "",
            "HF_HUB_OFFLINE": "",
            "HF_HUB_CACHE": str(home / "hf" / "hub"),
            "TINYLLM_MODEL": "",
        }


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # headers and body go out apart, and would wait for each other

        def setup(self) -> None:
            super().setup()
            hub.connections += 1

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def log_message(self, *arguments: Any) -> None:
            """Say nothing: `hub.requests` has it all."""

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            authorization = self.headers.get("Authorization", "")
            hub.requests.append(Request(self.command, path, self.headers.get("Range"), bool(authorization)))
            self.authorized = authorization == f"Bearer {TOKEN}"
            if hub.fails_with is not None:
                self._send(hub.fails_with)
            elif match := _API.fullmatch(path):
                self._describe(match[1], match[2] or "main")
            elif match := _RESOLVE.fullmatch(path):
                self._resolve(*match.groups())
            elif match := _CDN.fullmatch(path):
                self._deliver(match[1])
            else:
                self._refuse(404, "")

        def _describe(self, name: str, revision: str) -> None:
            repository = self._repository(name, revision)
            if repository is None:
                return
            siblings: list[dict[str, Any]] = []
            for file, data in repository.files.items():
                entry: dict[str, Any] = {"rfilename": file, "size": repository.size(file), "blobId": _git_sum(data)}
                if file.endswith(_LARGE):
                    entry["lfs"] = {"sha256": _sha256(data), "size": repository.size(file), "pointerSize": 130}
                siblings.append(entry)
            body = {"id": name, "modelId": name, "sha": repository.commit, "private": False, "siblings": siblings}
            self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def _resolve(self, name: str, revision: str, file: str) -> None:
            repository = self._repository(name, revision)
            if repository is None:
                return
            if repository.gated and not self.authorized:
                self._refuse(401, "GatedRepo")
                return
            if file not in repository.files:
                self._refuse(404, "EntryNotFound", {"X-Repo-Commit": repository.commit})
                return
            data = repository.files[file]
            headers = {"X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
            if file.endswith(_LARGE):
                headers |= {
                    "X-Linked-Etag": f'"{_sha256(data)}"',
                    "X-Linked-Size": str(repository.size(file)),
                    "Location": f"http://localhost:{hub.port}/cdn/{_sha256(data)}",
                }
                self._send(302, headers=headers)
            else:
                self._send_range(data, {**headers, "ETag": f'"{_git_sum(data)}"'})

        def _repository(self, name: str, revision: str) -> Repository | None:
            """Find a repository at a revision, or answer that there is none, or where it is now."""
            repository = hub.repositories.get(name)
            if repository is None:
                self._refuse(401, "RepoNotFound")
            elif repository.moved_to is not None:
                self._send(307, headers={"Location": self.path.replace(name, repository.moved_to)})
            elif revision not in ("main", repository.commit):
                self._refuse(404, "RevisionNotFound")
            else:
                return repository
            return None

        def _deliver(self, sha256: str) -> None:
            contents = (data for repository in hub.repositories.values() for data in repository.files.values())
            data = next((data for data in contents if _sha256(data) == sha256), None)
            if data is None:
                self._refuse(404, "")
            else:
                self._send_range(data, {"ETag": f'"{sha256}"'}, is_download=True)

        def _send_range(self, data: bytes, headers: dict[str, str], *, is_download: bool = False) -> None:
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if wanted is None:
                self._send(200, data, headers, is_download=is_download)
                return
            start, end = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
            headers = {**headers, "Content-Range": f"bytes {start}-{end}/{len(data)}"}
            is_header = bool(wanted[2])
            self._send(206, data[start : end + 1], headers, is_download=is_download and not is_header)

        def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
            self._send(status, json.dumps({"error": code}).encode(), {"X-Error-Code": code, **(headers or {})})

        def _send(
            self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, *, is_download: bool = False
        ) -> None:
            self.send_response(HTTPStatus(status))
            for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if is_download and hub.cuts:
                self.wfile.write(body[: hub.cuts.pop(0)])
                self.close_connection = True
            elif is_download and hub.hold_after is not None:
                self._send_held(body, hub.hold_after)
            else:
                self.wfile.write(body)

        def _send_held(self, body: bytes, count: int) -> None:
            self.wfile.write(body[:count])
            self.wfile.flush()
            hub.released.wait()
            self.close_connection = True

    return Handler


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_sum(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
