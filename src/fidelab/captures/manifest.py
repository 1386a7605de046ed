"""The manifest of a capture: the request, the runtime facts, versions and hashes.  Standard library only.

A capture folder holds ``manifest.json`` (written last, with a checksum over itself), ``probe.json.gz`` (the token ids
of the request) and ``part-*.safetensors``.  Language-model heads and vocabularies are stored once, named by their
hashes, in ``heads/`` and ``vocabularies/`` next to the captures.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fidelab.captures.requests import KINDS, Request, request_hash
from fidelab.core import Arm, Estimator, canonical_json, digest, read_file, slug, strict_json
from fidelab.core.errors import CaptureError, OtherSchemaError
from fidelab.core.runtime import invalid_runtime_fields
from fidelab.core.serial import fits

SCHEMA = "fidelab.capture/0"
MANIFEST = "manifest.json"
PARTIAL = ".partial-"
"""Name prefix of folders that are being written."""
PROBE = "probe.json.gz"
FIGURES = "figures."
"""Name prefix of arrays that replace rows: figures against one other capture."""
_MAX_MANIFEST_BYTES = 64 << 20  # bytes of a manifest
_FAMILY = SCHEMA.partition("/")[0]
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_VOCABULARY = 1 << 24  # entries of a vocabulary
_sound: set[bytes] = set()  # SHA-256 of the files that were checked: a run reads each of its manifests many times


def capture_key(arm: Arm, request: Request, engine_versions: Mapping[str, str], replicate: int) -> dict[str, Any]:
    """Return the key of a capture; captures with equal keys have equal content."""
    return {
        "arm": arm.fingerprint(),
        "probe": request_hash(request),
        "weights": arm.weights,
        "engine": arm.engine,
        "versions": dict(sorted(engine_versions.items())),
        "device": arm.device,
        "threads": arm.threads,
        "replicate": replicate,
    }


def capture_folder(store: Path, arm: Arm, request: Request, key: Mapping[str, Any]) -> Path:
    """Return the path of the capture with this key: ``<store>/<arm>/<request>``, readable and unique."""
    arm_folder = f"{slug(arm.model)}-{slug(arm.engine)}-{slug(arm.kv.label)}-{arm.fingerprint()[:10]}"
    return store / arm_folder / f"{request.axis}-{key_digest(key)[:12]}-r{key['replicate']}"


def seed_of(key: Mapping[str, Any]) -> int:
    """Return the seed of the proof of engagement, 0 … 2^32-1, which is always the same for one capture."""
    return int(key_digest(key)[:8], 16)


def key_digest(key: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a capture's key."""
    return digest(canonical_json(key))


def dump_manifest(manifest: Mapping[str, Any]) -> str:
    """Return the manifest as JSON text with ``checksum``, the SHA-256 of the canonical JSON of all other fields."""
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    return json.dumps({**body, "checksum": digest(canonical_json(body))}, indent=1, sort_keys=True)


def load_manifest(folder: Path) -> dict[str, Any]:
    """Read and check a manifest, which may come from anybody.

    Raises:
        OtherSchemaError: If it was written by another version of fidelab.
        CaptureError: If it is missing, was edited or truncated, or has an invalid field.  The message names the
            capture.
    """
    path = folder / MANIFEST
    if not path.is_file():
        what = "is not a capture: it has no manifest.json" if folder.is_dir() else "does not exist"
        raise CaptureError(f"capture {folder} {what}")
    try:
        raw = read_file(path, _MAX_MANIFEST_BYTES)
        if (content := hashlib.sha256(raw).digest()) in _sound:
            return dict(json.loads(raw))
        manifest = strict_json(raw)
        schema = manifest["schema"]
        if schema != SCHEMA and str(schema).partition("/")[0] == _FAMILY:
            raise OtherSchemaError(f"capture {folder} has schema {schema!r:.60}; this version reads {SCHEMA!r}")
        body = {key: value for key, value in manifest.items() if key != "checksum"}
        good = schema == SCHEMA and manifest["checksum"] == digest(canonical_json(body))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise CaptureError(
            f"capture {folder}: manifest.json was edited or truncated; delete the folder and capture again"
        )
    if fault := next(_faults(manifest), None):
        raise CaptureError(f"capture {folder}: manifest.json lacks or misstates {fault!r}; capture again")
    _sound.add(content)
    return dict(manifest)


def _faults(manifest: Mapping[str, Any]) -> Iterator[str]:
    """The fields of a manifest that are missing or not what :class:`~fidelab.captures.writer.CaptureWriter` writes."""
    for field in ("key", "asked", "settings", "vocabulary", "ran", "facts"):
        if not isinstance(manifest.get(field), dict):
            yield field
    if not (isinstance(manifest.get("axis"), str) and manifest["axis"]):
        yield "axis"
    if manifest.get("kind") not in [*KINDS]:  # a list, since the value may have no hash
        yield "kind"
    if not isinstance(manifest.get("against", ""), str):
        yield "against"
    if manifest.get("estimator") not in [str(estimator) for estimator in Estimator]:
        yield "estimator"
    key, vocabulary, ran = manifest["key"], manifest["vocabulary"], manifest["ran"]
    if not (isinstance(key.get("arm"), str) and _is_sha256(key.get("probe")) and _is_count(key.get("replicate"))):
        yield "key"
    if not (
        vocabulary.keys() == {"size", "sha256"}
        and _is_count(vocabulary["size"], _MAX_VOCABULARY)
        and _is_sha256(vocabulary["sha256"])
    ):
        yield "vocabulary"
    if not fits(manifest["asked"], Arm):
        yield "asked"
    try:
        time.strptime(manifest["created"], "%Y-%m-%dT%H:%M:%SZ")
    except (KeyError, TypeError, ValueError):
        yield "created"
    yield from (f"ran.{field}" for field in invalid_runtime_fields(ran))
    files, items, head = manifest.get("files"), manifest.get("items"), manifest.get("head", "")
    if not (isinstance(files, list) and all(_is_file(file) and isinstance(file.get("name"), str) for file in files)):
        yield "files"
    elif not (isinstance(items, list) and all(_is_item(item, len(files) - 1) for item in items)):
        yield "items"
    if head is not None and not (
        _is_file(head)
        and isinstance(head.get("file"), str)
        and (head.get("softcap", "") is None or _is_number(head.get("softcap")))
        and _is_number(head.get("scale"))
    ):
        yield "head"


def _is_item(item: Any, n_parts: int) -> bool:
    return (
        isinstance(item, dict)
        and isinstance(item.get("hash"), str)
        and isinstance(item.get("failed", 0), str | None)
        and (_is_count(item["parts"], n_parts) and item["parts"] > 0 if "parts" in item else item["failed"] is not None)
    )


def _is_file(record: Any) -> bool:
    return isinstance(record, dict) and _is_count(record.get("bytes")) and _is_sha256(record.get("sha256"))


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _is_count(value: Any, most: int = 1 << 62) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
