"""Packs of references: the files of a reference arm that scoring needs, for others to borrow.

A pack is a folder: ``manifest.json``, a capture per axis in ``captures/``, and the output head and the vocabulary, each
once.  See docs/sharing.md#references.  A pack may come from an untrusted source: sizes, names and hashes are checked
before anything of it is used.  ``python -m fidelab.references.pack`` prints the manifest's JSON Schema.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AwareDatetime, Field, ValidationError

from fidelab.captures.container import TensorFile
from fidelab.captures.manifest import capture_folder
from fidelab.captures.reader import Capture, check_answers, is_complete
from fidelab.captures.requests import Request
from fidelab.captures.store import copy_capture
from fidelab.core import Arm, Vocabulary, digest, read_file, sha256_of, strict_json
from fidelab.core.errors import CaptureError, InputError, MismatchError
from fidelab.core.serial import from_json, to_json
from fidelab.results.measurement import Measurement
from fidelab.results.record import Borrowed, MachineDifference
from fidelab.results.values import Count, Document, FreeDict, Record

SCHEMA: Final = "fidelab.reference/0"
MANIFEST = "manifest.json"
FOLDERS = ("captures", "heads", "vocabularies")

_NAME = r"^(captures/[\w.+-]{1,80}/(manifest\.json|probe\.json\.gz|part-\d{5}\.safetensors)"
_NAME += r"|heads/[0-9a-f]{24}\.safetensors|vocabularies/[0-9a-f]{24}\.json\.gz)$"
_MAX_MANIFEST = 16 << 20  # bytes
_MAX_PACK_BYTES = 1 << 40  # of all files
_SAMPLE = "The naïve café's 1,234.5 %-sum:\n\n\tdef f(x): return x**2  # 東京 🙂 don't"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class PackedFile(Record):
    """One file of a pack."""

    name: Annotated[str, Field(pattern=_NAME)]
    """Its path in the pack."""
    bytes: Count
    """Its size."""
    sha256: Sha256
    """Of its content."""


class PackedTokenizer(Record):
    """The tokenizer that the windows were made with."""

    size: Count
    """Tokens."""
    sha256: Sha256
    """Of the strings of all tokens, in order."""
    sample_sha256: Sha256
    """Of the ids that a fixed text becomes."""


class ReferenceManifest(Document):
    """Content of a pack."""

    schema_name: Literal["fidelab.reference/0"] = Field(default=SCHEMA, alias="schema")
    """Name and version of this schema."""
    created: AwareDatetime
    """When the run was started that made the reference."""
    fidelab_version: str
    """Version that packed it."""
    model: str
    """The model as the user knew it."""
    checkpoint_sha256: str
    """Hash of the checkpoint's content, as it was fetched."""
    weights_sha256: str
    """Hash of the weights that the engine loaded."""
    engine: str
    """Engine that ran it."""
    versions: dict[str, str]
    """Package → version, and what else the numbers may depend on."""
    kv: str
    """KV format."""
    dtype: str
    """Compute type."""
    machine: str
    """Processor and GPUs."""
    weights: str
    """``dequantized from`` or ``quantized as``, and the formats below 16 bits of the checkpoint; empty: none."""
    tokenizer: PackedTokenizer
    """The tokenizer."""
    axes: dict[str, FreeDict]
    """Test → settings."""
    captures: dict[str, str]
    """Part of a test → name of its folder in ``captures``."""
    noise: dict[str, Measurement]
    """Test → the reference against a replicate of itself; empty where that was not measured."""
    difference: MachineDifference | None
    """Distance of the reference from itself on another machine; null if not measured."""
    files: tuple[PackedFile, ...]
    """All other files of the pack."""


@dataclass(frozen=True)
class Pack:
    """A pack whose manifest was read.  ``place``: its name in messages and reports."""

    folder: Path
    place: str
    manifest: ReferenceManifest
    sha256: str

    @cached_property
    def captures(self) -> dict[str, Capture]:
        """Return the checked captures by part."""
        return {part: Capture(self.folder / "captures" / name) for part, name in self.manifest.captures.items()}

    @property
    def arm(self) -> Arm:
        """The reference arm, marked as borrowed by its name."""
        capture = next(iter(self.captures.values()))
        arm: Arm = from_json(Arm, capture.manifest["asked"])
        return replace(arm, name=f"{arm.name} (borrowed)")

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the arm's captures once installed. No run of this machine reuses them."""
        return {**self.manifest.versions, "borrowed": self.sha256}

    def requests(self, axis: str) -> dict[str, Request]:
        """Part of an axis, without the axis name → request to the reference."""
        parts = {part: capture.request for part, capture in self.captures.items() if part.partition(".")[0] == axis}
        return {part.partition(".")[2]: request for part, request in parts.items()}

    def borrowed(self) -> Borrowed:
        """Return the description for reports."""
        own = self.manifest
        return Borrowed(
            place=self.place if self.place.startswith("hf://") else Path(self.place).name,
            sha256=self.sha256,
            machine=own.machine,
            weights=own.weights,
            difference=own.difference,
        )

    def check(self) -> None:
        """Compare all files with the manifest, and the captures with each other.

        Raises:
            CaptureError: If a file is missing, truncated or edited, or the captures are not of one reference.
        """
        for file in self.manifest.files:
            path = self.folder / file.name
            if not path.is_file() or path.stat().st_size != file.bytes:
                raise CaptureError(f"{self.place}: {file.name} is missing or truncated; fetch the pack again")
            if sha256_of(path) != file.sha256:
                raise CaptureError(f"{self.place}: {file.name} was edited (checksum differs); fetch the pack again")
        own = self.manifest
        arms = set()
        for part, capture in self.captures.items():
            check_answers(capture)
            key, arm = capture.manifest["key"], from_json(Arm, capture.manifest["asked"])
            arms.add(arm.fingerprint())
            what = {
                "test": (capture.axis, part),
                "configuration": (key["arm"], arm.fingerprint()),
                "weights": (arm.weights, own.weights_sha256),
                "engine": (arm.engine, own.engine),
                "versions": (key.get("versions"), own.versions),
                "vocabulary": (capture.vocabulary, Vocabulary(own.tokenizer.size, own.tokenizer.sha256)),
                "compute type": (arm.dtype, own.dtype),
            }
            if wrong := next((name for name, (a, b) in what.items() if a != b), None):
                raise CaptureError(f"{self.place}: {part} has another {wrong} than the manifest; fetch the pack again")
            if capture.head is not None:
                weight = TensorFile(capture.head.path).get("weight")
                _, width = (weight if not hasattr(weight, "bits") else weight.bits).shape
                widths = {capture.array_shape(i, "hidden")[1] for i in range(len(capture.items)) if capture.names(i)}
                if widths - {width}:
                    raise CaptureError(
                        f"{self.place}: the output head does not fit the states of {part}; fetch the pack again"
                    )
        if len(arms) != 1:
            raise CaptureError(
                f"{self.place}: its captures are of {len(arms)} configurations, not one; fetch the pack again"
            )

    def check_tokenizer(self, vocabulary: Vocabulary, pieces: list[str], sample: str) -> None:
        """Refuse a model that reads the windows' token ids as other text.

        ``sample``: result of :func:`sample_digest` for the model's tokenizer.

        Raises:
            MismatchError: If a token differs. The message names the first one, or says that texts are split in another
                way.
        """
        own = self.manifest.tokenizer
        if vocabulary != Vocabulary(own.size, own.sha256):
            theirs = next(iter(self.captures.values())).pieces()
            for token, (a, b) in enumerate(zip(theirs, pieces, strict=False)):
                if a != b:
                    what = f"token {token} is {b!r}, in the reference {a!r}"
                    raise MismatchError(f"{self.place}: the model has another vocabulary: {what}; name another pack")
        if sample != own.sample_sha256:
            raise MismatchError(f"{self.place}: the model's tokenizer splits text differently; name another pack")

    def install(self, store: Path) -> None:
        """Put the captures in a store, under keys that name this pack. Existing captures stay."""
        arm, asked = self.arm, to_json(self.arm)
        for capture in self.captures.values():
            key = {**capture.manifest["key"], "versions": dict(sorted(self.versions.items()))}
            folder = capture_folder(store, arm, capture.request, key)
            if not is_complete(folder, key, ""):
                copy_capture(capture, folder, key, asked)


def sample_digest(encode: Any) -> str:
    """Return the SHA-256 of the ids that a tokenizer's ``encode`` makes of a fixed text."""
    return digest(json.dumps([int(token) for token in encode(_SAMPLE)]))


def check_listed(place: str, sizes: Mapping[str, int]) -> None:
    """Refuse a listing of files, with their bytes, that is not of a pack.

    Raises:
        InputError: If there is no manifest, or it is too large.
    """
    if not 0 < sizes.get(MANIFEST, 0) <= _MAX_MANIFEST:
        raise InputError(f"{place} is not a packed reference: it has no {MANIFEST} of up to {_MAX_MANIFEST >> 20} MiB")


def read_pack(folder: Path, place: str = "") -> Pack:
    """Read the pack in a folder. Its manifest is checked; its files are checked by :meth:`Pack.check`.

    Raises:
        InputError: If the folder holds no pack, or a pack of another version.
        CaptureError: If its manifest is damaged, or names files that a pack cannot have.
    """
    place, path = place or str(folder), folder / MANIFEST
    if not path.is_file():
        raise InputError(f"{place} is not a packed reference: it has no {MANIFEST}; fidelab share reference makes one")
    try:
        text = read_file(path, _MAX_MANIFEST)
        plain = strict_json(text)
        schema = plain.get("schema") if isinstance(plain, dict) else None
        if schema != SCHEMA:
            raise InputError(f"{place} is not a packed reference of schema {SCHEMA}: its schema is {schema!r:.60}")
        manifest = ReferenceManifest.model_validate_json(text, strict=True)
    except (OSError, ValueError) as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) if isinstance(error, ValidationError) else str(error)
        raise CaptureError(
            f"{place}: {MANIFEST} is damaged or truncated ({where:.120}); fetch the pack again"
        ) from None
    names = {file.name for file in manifest.files}
    lacking = [name for name in manifest.captures.values() if f"captures/{name}/{MANIFEST}" not in names]
    if lacking or not manifest.captures or sum(file.bytes for file in manifest.files) > _MAX_PACK_BYTES:
        raise CaptureError(f"{place}: {MANIFEST} lists captures without files, or files of more than 1 TiB")
    return Pack(folder, place, manifest, hashlib.sha256(text).hexdigest())


def write_pack(
    folder: Path, captures: Mapping[str, Capture], facts: Mapping[str, Any], tokenizer: tuple[list[str], str]
) -> Pack:
    """Write a pack into an empty folder, the manifest last.

    Args:
        captures: part of an axis → the reference's capture.
        facts: fields of the manifest besides those that follow from the captures.
        tokenizer: the strings of the model's tokens, and :func:`sample_digest` of its tokenizer.

    Raises:
        CaptureError: If a capture no longer has rows, is damaged, or has another vocabulary than the tokenizer.
    """
    pieces, sample = tokenizer
    for part, capture in captures.items():
        if digest(*pieces) != capture.vocabulary.sha256:
            raise MismatchError(f"capture {capture.folder} has another vocabulary than the model: it changed since")
        asked = {**capture.manifest["asked"], "model": facts["model"]}
        asked |= {name: Path(asked[name]).name for name in ("path", "draft") if asked.get(name)}
        key = {**capture.manifest["key"], "replicate": 0}
        copy_capture(capture, folder / "captures" / part, key, asked)
    first = next(iter(captures.values())).manifest
    arm: Arm = from_json(Arm, first["asked"])
    vocabulary = next(iter(captures.values())).vocabulary
    files = [path for kind in FOLDERS for path in sorted((folder / kind).rglob("*")) if path.is_file()]
    manifest = ReferenceManifest(
        weights_sha256=arm.weights,
        engine=arm.engine,
        versions=first["key"]["versions"],
        kv=arm.kv.label,
        dtype=arm.dtype,
        tokenizer=PackedTokenizer(size=vocabulary.size, sha256=vocabulary.sha256, sample_sha256=sample),
        captures={part: part for part in captures},
        files=tuple(
            PackedFile(name=path.relative_to(folder).as_posix(), bytes=path.stat().st_size, sha256=sha256_of(path))
            for path in files
        ),
        **facts,
    )
    (folder / MANIFEST).write_text(manifest.to_json(), "utf-8")
    pack = read_pack(folder)
    pack.check()
    return pack


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a manifest."""
    schema = ReferenceManifest.model_json_schema(by_alias=True, mode="serialization")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA}
    return {**head, **schema, "title": SCHEMA}


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
