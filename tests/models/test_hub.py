"""The hub, imitated by a small server on the loopback: what it answers becomes a model or one clear line."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeFolder

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
REPO = "owner/tiny"
OFFLINE = "http://127.0.0.1:9"


@dataclass
class Hub:
    """What the server serves, and what it was asked.

    ``files``: per commit, name → content; ``sent``: bytes of each that were asked for.  A GET of ``cut_on`` sends half
    the bytes and hangs up; of ``stall_on`` it sends them, sets ``stalled`` and waits.
    """

    endpoint: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    sent: dict[str, int] = field(default_factory=dict)
    stall_on: str | None = None
    cut_on: str | None = None
    stalled: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = self.path.partition("?")[0].strip("/")
            hub.asked.append(f"{self.command} {path}")
            if "owner" in path:
                hub.tokens.add(self.headers.get("Authorization", ""))
            match path.split("/"):
                case ["api", _, _, "gated", *_]:
                    self._refuse(403, "GatedRepo")
                case ["api", _, _, "tiny" | "wikitext" as name, "revision", revision] if revision in COMMITS:
                    self._json({"id": f"owner/{name}", "sha": COMMITS[revision], "siblings": []})
                case ["api", _, _, "tiny", "revision", _]:
                    self._refuse(404, "RevisionNotFound")
                case ["api", _, _, _, "tree", commit]:
                    self._json([_entry(name, data) for name, data in hub.files[commit].items()])
                case [_, _, "resolve", commit, *names] | [_, _, _, "resolve", commit, *names]:
                    self._file(commit, "/".join(names), body)
                case _:
                    self._refuse(404, "RepoNotFound")

        def _json(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _file(self, commit: str, name: str, body: bool) -> None:
            data = hub.files[commit].get(name)
            if data is None:
                self._refuse(404, "EntryNotFound")
                return
            first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            start, whole = int(first), len(data)
            data = data[: int(last) + 1] if last else data
            self.send_response(206 if start or last else 200)
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("Content-Length", str(len(data) - start))
            if start or last:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{whole}")
            self.end_headers()
            if not body:
                return
            hub.sent[name] = hub.sent.get(name, 0) + len(data) - start
            if name in (hub.stall_on, hub.cut_on):
                self.wfile.write(data[start : len(data) // 2])
                self.wfile.flush()
                if name == hub.stall_on:
                    hub.stalled.set()
                    hub.release.wait(60)
                self.close_connection = True
            else:
                self.wfile.write(data[start:])

    return Handler


def _entry(name: str, data: bytes) -> dict[str, Any]:
    sha = hashlib.sha256(data).hexdigest()
    lfs = {"oid": sha, "size": len(data), "pointerSize": 100}
    return {"type": "file", "path": name, "size": len(data), "oid": sha[:40], "lfs": lfs}


@pytest.fixture
def hub(tmp_path: Path, make_folder: MakeFolder) -> Iterator[Hub]:
    """A server with one repository in two revisions; the older has half as many positions."""
    hub = Hub()
    for revision, positions in (("main", 64), ("v1", 32)):
        folder = make_folder(tmp_path / "served" / revision, max_position_embeddings=positions)
        served = {path.name: path.read_bytes() for path in folder.iterdir()}
        hub.files[COMMITS[revision]] = {**served, "modeling.py": b"raise SystemExit", "pytorch_model.bin": b"x"}
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    yield hub
    hub.release.set()
    server.shutdown()
    server.server_close()


SCRIPT = """
import json, sys
from fidelab.core.errors import FidelabError
from fidelab.inputs.texts import load_text
from fidelab.models import resolve
try:
    if sys.argv[1] == "wikitext-2":
        print(json.dumps({"text": load_text("wikitext-2").content}))
    else:
        m = resolve(sys.argv[1])
        files = sorted(p.name for p in m.path.iterdir())
        print(json.dumps({"revision": m.revision, "positions": m.max_positions, "files": files}))
except FidelabError as error:
    print(json.dumps({"error": str(error), "type": type(error).__name__}))
"""


def _start(endpoint: str, name: str, home: Path, **environment: str) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    env |= {"HF_HUB_DISABLE_XET": "1", "FIDELAB_CACHE": str(home / "fidelab")}
    out: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, name], env=env | environment, **out)


def _ask(endpoint: str, name: str, home: Path, **environment: str) -> dict[str, Any]:
    """What a fresh process makes of ``name``."""
    out, _ = _start(endpoint, name, home, **environment).communicate(timeout=120)
    answer: dict[str, Any] = json.loads(out)
    return answer


@pytest.mark.parametrize(("name", "revision", "positions"), [(REPO, "main", 64), (f"{REPO}@v1", "v1", 32)])
def test_a_hub_id_is_fetched_at_its_revision_data_alone_and_then_works_without_the_hub(
    name: str, revision: str, positions: int, hub: Hub, tmp_path: Path
) -> None:
    answer = _ask(hub.endpoint, name, tmp_path, HF_TOKEN="hf_of_this_test")
    assert (answer["revision"], answer["positions"]) == (COMMITS[revision], positions)
    assert answer["files"] == ["config.json", "model.safetensors"]
    assert not [path for path in hub.asked if path.endswith((".py", ".bin"))]
    assert hub.tokens == {"Bearer hf_of_this_test"}
    assert _ask(OFFLINE, name, tmp_path) == answer


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("owner/gated", "owner/gated is gated: accept its terms on its hub page, then set HF_TOKEN"),
        ("owner/missing", "owner/missing is neither a path here nor a repository on the hub"),
        (f"{REPO}@v9", "owner/tiny has no revision 'v9'"),
        ("owner/two--dashes", "is not a hub id: write owner/name"),
    ],
)
def test_refusal_is_one_line_that_says_what_to_do(name: str, says: str, hub: Hub, tmp_path: Path) -> None:
    answer = _ask(hub.endpoint, name, tmp_path)
    assert answer["type"] == "InputError"
    assert says in answer["error"]
    assert "\n" not in answer["error"]


def test_unreachable_hub_is_one_line_that_names_the_other_way(tmp_path: Path) -> None:
    for name, says in ((REPO, f"cannot fetch {REPO} from the hub ("), ("wikitext-2", "wiki.test.raw")):
        answer = _ask(OFFLINE, name, tmp_path)
        assert says in answer["error"]
        assert "\n" not in answer["error"]


def test_killed_download_leaves_nothing_half_made(hub: Hub, tmp_path: Path) -> None:
    hub.stall_on = "model.safetensors"
    child = _start(hub.endpoint, REPO, tmp_path)
    assert hub.stalled.wait(60)
    child.kill()
    child.communicate()
    assert not list(tmp_path.glob("hub/**/*.safetensors"))
    assert "error" in _ask(OFFLINE, REPO, tmp_path)

    hub.stall_on = None
    hub.release.set()
    assert _ask(hub.endpoint, REPO, tmp_path)["positions"] == 64
    assert list(tmp_path.glob("hub/**/*.safetensors"))


@pytest.mark.full
def test_cut_download_is_not_taken_for_a_model(hub: Hub, tmp_path: Path) -> None:
    hub.cut_on = "model.safetensors"
    assert _ask(hub.endpoint, REPO, tmp_path)["error"].startswith(f"cannot fetch {REPO}")
    assert not list(tmp_path.glob("hub/**/*.safetensors"))


def test_wikitext_comes_back_as_its_raw_text(hub: Hub, tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"text": ["", " = One = \n", "", " Körper . \n"]})
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink)
    hub.files[COMMITS["main"]] = {"wikitext-2-raw-v1/test-00000-of-00001.parquet": sink.getvalue().to_pybytes()}
    assert _ask(hub.endpoint, "wikitext-2", tmp_path) == {"text": " \n = One = \n \n Körper . \n"}
