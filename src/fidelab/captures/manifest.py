"""The manifest of a capture: what was asked, what ran, versions, hashes.  Standard library only.

A capture folder holds ``manifest.json`` (written last, with a checksum over itself), ``probe.json.gz`` (the token
ids that were asked) and ``part-*.safetensors``.  Language-model heads and vocabularies lie once beside the
captures, under their hashes, in ``heads/`` and ``vocabularies/``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fidelab.captures.requests import Request, request_hash
from fidelab.core import Arm, canonical_json, digest, slug
from fidelab.errors import CaptureError

__all__ = ["MANIFEST", "PROBE", "SCHEMA", "capture_folder", "capture_key", "dump_manifest", "load_manifest"]

SCHEMA = "fidelab.capture/0"
MANIFEST = "manifest.json"
PROBE = "probe.json.gz"


def capture_key(arm: Arm, request: Request, engine_versions: Mapping[str, str], replicate: int) -> dict[str, Any]:
    """The key of a capture; captures with equal keys have equal content."""
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
    """Where the capture of this key lies: ``<store>/<arm>/<request>``, readable and unique."""
    arm_folder = f"{slug(arm.model)}-{slug(arm.engine)}-{slug(arm.kv.label)}-{arm.fingerprint()[:10]}"
    return store / arm_folder / f"{request.axis}-{digest(canonical_json(key))[:12]}-r{key['replicate']}"


def dump_manifest(manifest: Mapping[str, Any]) -> str:
    """JSON text with ``checksum``, the SHA-256 of the canonical JSON of all the rest."""
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    return json.dumps({**body, "checksum": digest(canonical_json(body))}, indent=1, sort_keys=True)


def load_manifest(folder: Path) -> dict[str, Any]:
    """Read and check a manifest.

    Raises:
        CaptureError: there is none, it was edited or cut, or it has another schema; names the capture.
    """
    path = folder / MANIFEST
    if not path.is_file():
        what = "is not a capture: it has no manifest.json" if folder.is_dir() else "does not exist"
        raise CaptureError(f"capture {folder} {what}")
    try:
        manifest = json.loads(path.read_text("utf-8"))
        body = {key: value for key, value in manifest.items() if key != "checksum"}
        good = manifest["checksum"] == digest(canonical_json(body))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
        manifest = {}
    if not good:
        raise CaptureError(
            f"capture {folder}: manifest.json was edited or truncated; delete the folder and capture again"
        )
    if manifest.get("schema") != SCHEMA:
        raise CaptureError(f"capture {folder} has schema {manifest.get('schema')!r}; this version reads {SCHEMA!r}")
    return dict(manifest)
