"""References on the hub, imitated by a server on the loopback that takes uploads as the hub does."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from checkpoints.tests.test_files import hub_environment
from tests.models.test_hub import Hub, _handler
from tests.run.harness import Done, compare
from tests.run.test_borrowed import HIDDEN, KV, figures

PLACE = "hf://owner/pack"


@dataclass
class Store(Hub):
    """A hub with one repository.

    ``commits``: their ids in order; the content of each is in ``files``.  ``blobs``: what was uploaded, by SHA-256.
    ``cut_uploads``: uploads end half-way.
    """

    commits: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    received: list[str] = field(default_factory=list)
    cut_uploads: bool = False

    def commit(self, lines: list[dict[str, Any]]) -> str:
        """Apply a commit as ``huggingface_hub`` sends it; returns its id."""
        files = dict(self.files[self.commits[-1]]) if self.commits else {}
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.blobs[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        self.commits.append(f"{len(self.commits):040x}")
        self.files[self.commits[-1]] = files
        return self.commits[-1]


def _with_uploads(hub: Store) -> type[BaseHTTPRequestHandler]:
    downloads: Any = _handler(hub)

    class Handler(downloads):  # type: ignore[misc]
        path: str

        def _answer(self, body: bool) -> None:
            match self.path.partition("?")[0].strip("/").split("/"):
                case ["api", "datasets", "owner", "pack"] | ["api", "datasets", "owner", "pack", "revision", _]:
                    self._json({"id": "owner/pack", "sha": (hub.commits or ["f" * 40])[-1], "siblings": []})
                case ["api", "datasets", "owner", "missing", *_]:
                    self._refuse(404, "RepoNotFound")
                case ["api", "datasets", "owner", "pack", "tree", "main"]:
                    self.path = self.path.replace("/tree/main", f"/tree/{(hub.commits or ['f' * 40])[-1]}")
                    hub.files.setdefault("f" * 40, {})
                    super()._answer(body)
                case _:
                    super()._answer(body)

        def do_POST(self) -> None:  # noqa: N802
            if self.headers.get("Authorization") != "Bearer hf_writer":
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self._refuse(401, "")
                return
            data = self._body()
            match self.path.partition("?")[0].strip("/").split("/"):
                case ["api", "repos", "create"]:
                    self._json({"url": f"{hub.endpoint}/datasets/owner/pack"})
                case ["api", "datasets", "owner", "pack", "preupload", "main"]:
                    names = [file["path"] for file in json.loads(data)["files"]]
                    mode = {True: "lfs", False: "regular"}
                    listed = [(name, mode[name.endswith(".safetensors")]) for name in names]
                    self._json({"files": [{"path": n, "uploadMode": how, "shouldIgnore": False} for n, how in listed]})
                case ["datasets", "owner", "pack.git", "info", "lfs", "objects", "batch"]:
                    self._json({"transfer": "basic", "objects": [_wanted(hub, o) for o in json.loads(data)["objects"]]})
                case ["api", "datasets", "owner", "pack", "commit", "main"]:
                    oid = hub.commit([json.loads(line) for line in data.decode().splitlines()])
                    url = f"{hub.endpoint}/datasets/owner/pack/commit/{oid}"
                    self._json({"success": True, "commitOid": oid, "commitUrl": url})
                case _:
                    self._refuse(404, "RepoNotFound")

        def do_PUT(self) -> None:  # noqa: N802
            data = self._body()
            if hub.cut_uploads:
                self._refuse(400, "")
                return
            hub.received.append(self.path)
            hub.blobs[hashlib.sha256(data).hexdigest()] = data
            self._refuse(200, "")

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return bytes(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

    return Handler


def _wanted(hub: Store, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer of the large-file store on one object; one that it has is not to be sent again."""
    known = asked["oid"] in hub.blobs
    return {**asked, **({} if known else {"actions": {"upload": {"href": f"{hub.endpoint}/blob/{asked['oid']}"}}})}


@pytest.fixture
def hub() -> Iterator[Store]:
    """The server."""
    store = Store()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _with_uploads(store))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    store.endpoint = f"http://127.0.0.1:{server.server_port}"
    yield store
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run with its own reference."""
    return compare(tmp_path_factory.mktemp("local"), KV, flags=[*HIDDEN, "--control", "none"], windows=12)


def fidelab(endpoint: str, cwd: Path, *words: object, token: str = "hf_writer") -> tuple[int, str, str]:
    """Exit code, output and messages of a command whose hub is at ``endpoint``."""
    done = subprocess.run(
        [sys.executable, "-m", "fidelab", *map(str, words)],
        cwd=cwd,
        env={**hub_environment(endpoint, cwd / "home"), "HF_TOKEN": token, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


def share(hub: Store, local: Done, **how: str) -> tuple[int, str, str]:
    return fidelab(hub.endpoint, local.cwd, "share", "reference", local.folder, "--to", PLACE, **how)


def borrow(endpoint: str, cwd: Path, place: str = PLACE, *words: object) -> tuple[int, str, str]:
    flags = ("--engine", "fake", "--reference", place, "--kv", KV, *HIDDEN)
    return fidelab(endpoint, cwd, "compare", "fake", *flags, *words)


def test_a_reference_is_published_fetched_and_kept_for_when_the_hub_is_away(
    hub: Store, local: Done, tmp_path: Path
) -> None:
    code, out, err = share(hub, local)
    assert code == 0, err
    [commit] = hub.commits
    assert out.strip() == f"{PLACE}@{commit}"
    assert not (local.folder / "reference").exists()

    for endpoint in (hub.endpoint, "http://127.0.0.1:9"):
        code, _, err = borrow(endpoint, tmp_path)
        assert code == 0, err
        done = Done(code, "", err, tmp_path)
        assert figures(done.arm(KV)) == {**figures(local.arm(KV)), "certificates": done.arm(KV)["certificates"]}
        assert done.report["borrowed"]["place"] == f"{PLACE}@{commit}"


def test_an_interrupted_upload_publishes_nothing_and_the_next_one_finishes_it(hub: Store, local: Done) -> None:
    hub.cut_uploads = True
    code, _, err = share(hub, local)
    assert code == 2
    assert err.startswith("fidelab: cannot publish owner/pack on the hub (")
    assert len(err.strip().splitlines()) == 1
    assert not hub.commits
    hub.cut_uploads = False
    assert share(hub, local)[0] == 0
    sent = len(hub.received)
    assert share(hub, local)[0] == 0
    assert len(hub.received) == sent  # what the hub has is not sent again
    assert len(hub.commits) == 2


def test_a_new_pack_takes_the_place_of_the_old_one(hub: Store, local: Done, tmp_path: Path) -> None:
    share(hub, local)
    hub.files[hub.commits[-1]]["captures/old/manifest.json"] = b"{}"
    hub.files[hub.commits[-1]]["README.md"] = b"kept"
    assert share(hub, local)[0] == 0
    assert "captures/old/manifest.json" not in hub.files[hub.commits[-1]]
    assert hub.files[hub.commits[-1]]["README.md"] == b"kept"


def test_who_may_not_write_is_told_so_in_one_line(hub: Store, local: Done) -> None:
    code, _, err = share(hub, local, token="hf_reader")
    assert code == 2
    assert err == "fidelab: the hub does not let you write to owner/pack; set HF_TOKEN to a token that may\n"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("manifest.json", None, "it has no manifest.json"),
        ("captures/kld/part-00000.safetensors", b"short", "missing or truncated there"),
        ("captures/kld/part-00000.safetensors", "flip", "was edited"),
    ],
)
def test_what_is_wrong_on_the_hub_is_one_line(
    name: str, content: bytes | str | None, says: str, hub: Store, local: Done, tmp_path: Path
) -> None:
    assert share(hub, local)[0] == 0
    files = hub.files[hub.commits[-1]]
    if content is None:
        del files[name]
    else:
        files[name] = content if isinstance(content, bytes) else files[name][:-1] + bytes([files[name][-1] ^ 1])
    code, _, err = borrow(hub.endpoint, tmp_path)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_auto_finds_a_reference_on_the_hub_by_its_manifest_alone(hub: Store, local: Done, tmp_path: Path) -> None:
    share(hub, local)
    missing, here = "hf://owner/missing", PLACE
    code, _, err = borrow(hub.endpoint, tmp_path, "auto", "--references", missing, "--references", here, "--dry-run")
    assert code == 0, err
    assert "owner/missing is neither a path here nor a repository on the hub" in err
    assert f"found {PLACE}" in err
