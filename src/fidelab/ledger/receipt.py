"""Receipts: results of a run as JSON lines that another machine verifies.  See docs/sharing.md#verifiable-results.

A line is canonical JSON (keys sorted, no blanks).  ``hash`` is the SHA-256 of the line without it, ``previous`` the
hash of the line before, so that one altered digit breaks the chain.  A recomputed chain is detected by computing the
figures again from the captures, whose hashes the receipt holds.

Plots, which show words of texts and models, are left out, and of absolute paths all but the last part.
``python -m fidelab.ledger.receipt`` prints the JSON Schema of a line.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final, Literal

from pydantic import AwareDatetime, Field, TypeAdapter, ValidationError

from fidelab.captures.manifest import load_manifest
from fidelab.core import canonical_json, read_file, strict_json
from fidelab.core.errors import CaptureError, FidelabError, InputError, MissingPackageError, OutputError, UsageError
from fidelab.metrics.composite import Band, kl_band
from fidelab.metrics.divergence import kld_score
from fidelab.results.decision_record import Recommendation
from fidelab.results.measurement import Measurement, walk
from fidelab.results.record import ArmRecord, Attribution, Borrowed, Comparison, Report, write_atomically
from fidelab.results.store import CONFIG, OUTCOMES, RUNS, RunFolder
from fidelab.results.table import arms
from fidelab.results.values import Count, FreeDict, Record

SCHEMA: Final = "fidelab.receipt/0"

_FAMILY = SCHEMA.partition("/")[0]
_MOST_BYTES = 256 << 20
_TOLERANCE = 1e-6  # relative: what another machine's libraries may round differently
_FOLDERS = re.compile(r"(?<![\w.~/:\\-])~?/(?:[^\s/:;,'\"]+/)+(?=[^\s/])")  # of an absolute path, up to its last part
_MOST_FAULTS = 20

Recompute = Callable[[RunFolder, Mapping[str, Any] | None], Report]
"""A run's report from its captures, under the limits that are given; raises FidelabError."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Line(Record):
    n: Count
    """Number of the line, from 0."""
    previous: Sha256 | None
    """``hash`` of the line before; null in the first one."""
    hash: Sha256
    """SHA-256 of this line's canonical JSON without this field."""


class HeadLine(_Line):
    """The first line: what a report says besides its arms."""

    kind: Literal["head"] = "head"
    """Kind of the line."""
    schema_name: Literal["fidelab.receipt/0"] = Field(default=SCHEMA, alias="schema")
    """Name and version of this schema."""
    run_id: str
    """Name of the run's folder."""
    created: AwareDatetime
    """When the run was started."""
    fidelab_version: str
    """Version that made the report."""
    command: str
    """The command that repeats the run."""
    environment: FreeDict
    """As in the report."""
    settings: FreeDict
    """As in the report."""
    comparability_key: FreeDict
    """As in the report."""
    comparisons: tuple[Comparison, ...]
    """As in the report."""
    attribution: tuple[Attribution, ...]
    """As in the report."""
    floor: dict[str, Measurement]
    """As in the report, without plots."""
    borrowed: Borrowed | None
    """As in the report."""
    recommendation: Recommendation | None
    """As in the report."""


_HEAD = HeadLine.model_fields.keys() - _Line.model_fields.keys() - {"kind", "schema_name"}
"""Fields that a head has of the report."""


class ArmLine(_Line):
    """One arm."""

    kind: Literal["arm"] = "arm"
    """Kind of the line."""
    role: Literal["reference", "control", "candidate", "truth"]
    """Its part in the comparison."""
    arm: ArmRecord
    """As in the report, without plots."""


class CapturedFile(Record):
    """One file of a capture."""

    name: str
    """File name."""
    sha256: Sha256
    """Of its content."""
    bytes: Count
    """Its size."""


class CaptureLine(_Line):
    """One capture from which figures were computed."""

    kind: Literal["capture"] = "capture"
    """Kind of the line."""
    role: str
    """Whose it is: ``reference``, ``candidate:NAME``, ``floor``, …"""
    part: str
    """The axis, or a part of one."""
    items: Count
    """Windows, prompts or questions."""
    manifest: Sha256
    """Checksum of its manifest: what was asked, what ran, versions."""
    files: tuple[CapturedFile, ...]
    """Its files."""


class EndLine(_Line):
    """The last line; its hash covers the whole receipt."""

    kind: Literal["end"] = "end"
    """Kind of the line."""
    lines: Count
    """Lines before this one."""


AnyLine = Annotated[HeadLine | ArmLine | CaptureLine | EndLine, Field(discriminator="kind")]
_LINE: TypeAdapter[HeadLine | ArmLine | CaptureLine | EndLine] = TypeAdapter(AnyLine)


@dataclass(frozen=True)
class Receipt:
    """A receipt that was read.

    ``faults``: what is wrong with its lines; lines that are none are left out.  ``head``: ``None`` where it is one.
    """

    path: Path
    head: HeadLine | None
    lines: tuple[HeadLine | ArmLine | CaptureLine | EndLine, ...]
    faults: tuple[str, ...]

    @property
    def hash(self) -> str | None:
        """Hash of its last line; ``None`` where that was cut off."""
        return self.lines[-1].hash if self.lines and isinstance(self.lines[-1], EndLine) else None

    def report(self) -> Report:
        """The report that it was written from, without plots.

        Raises:
            InputError: it is damaged, or its figures contradict each other.
        """
        faults = [*self.faults] if self.head is None else [*self.faults, *_inconsistent(self, self.head)]
        if faults or self.head is None:
            raise InputError(
                f"{self.path}: {next(iter(faults), 'it is not a receipt')}; see fidelab share verify {self.path}"
            )
        found: dict[str, list[ArmRecord]] = {}
        for line in self.lines:
            if isinstance(line, ArmLine):
                found.setdefault(line.role, []).append(line.arm)
        head = {name: getattr(self.head, name) for name in _HEAD}
        controls = found.get("control", [])
        return Report(
            **head,
            reference=found["reference"][0],
            control=next(iter(controls), None),
            controls=tuple(controls[1:]),
            candidates=tuple(found.get("candidate", ())),
            truth=next(iter(found.get("truth", ())), None),
        )


@dataclass(frozen=True)
class Verified:
    """Result of writing a receipt.

    ``recomputed``: how many numbers were computed again from the captures; ``None``, with the reason in ``remarks``,
    where that could not be done.
    """

    receipt: Receipt
    faults: tuple[str, ...]
    recomputed: int | None = None
    remarks: tuple[str, ...] = field(default_factory=tuple)

    @property
    def verdict(self) -> Literal["verified", "consistent", "wrong"]:
        """``consistent``: whoever can write a receipt can write one whose figures agree with each other."""
        return "wrong" if self.faults else "consistent" if self.recomputed is None else "verified"


# ----------------------------------------------------------------------------------------------------- publishing


def publish(run: RunFolder, path: Path) -> Path:
    """Write the receipt of a finished run.

    Raises:
        UsageError: the file exists: receipts are never replaced.
        InputError: the run has no report.
        CaptureError: a capture is gone, damaged, or edited.
        OutputError: the file cannot be written.
    """
    if path.exists():
        raise UsageError(f"{path} exists, and receipts are not replaced: name another file")
    lines = _chained(_bodies(run.read_report(), _captures(run)))
    try:
        return write_atomically(path, "".join(f"{line}\n" for line in lines))
    except UnicodeEncodeError as error:
        raise OutputError(f"{path}: cannot write: {error.reason}") from None


def _bodies(report: Report, captures: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The lines without numbers and hashes."""
    plain = report.model_dump(mode="json", by_alias=True)
    head = {name: plain[name] for name in _HEAD}
    head["floor"] = {name: {**found, "plots": []} for name, found in head["floor"].items()}
    yield {"kind": "head", "schema": SCHEMA, **public(head)}
    for role, arm in arms(report):
        body = arm.model_dump(mode="json", by_alias=True)
        for group in ("axes", "benches"):
            body[group] = {name: {**found, "plots": []} for name, found in body[group].items()}
        yield {"kind": "arm", "role": role, "arm": public(body)}
    yield from captures


def _captures(run: RunFolder) -> list[Mapping[str, Any]]:
    """The lines of all captures of a run; none for runs without outcomes, such as imported ones."""
    if not (run.path / OUTCOMES).is_file():
        return []
    try:
        listed = [
            (arm["role"], part, run.path / path)
            for arm in run.read_outcomes()["arms"]
            for part, path in arm["captures"].items()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{run.path / OUTCOMES} is damaged ({type(error).__name__}: {error})") from None
    lines = list[Mapping[str, Any]]()
    for role, part, folder in listed:
        manifest = load_manifest(folder.resolve())
        files = [{key: file[key] for key in ("name", "sha256", "bytes")} for file in manifest["files"]]
        line = {"role": role, "part": part, "items": len(manifest["items"]), "files": files}
        lines.append({"kind": "capture", "manifest": manifest["checksum"], **line})
    return lines


def public(value: Any) -> Any:
    """Plain data in which absolute paths are their last parts: receipts are published, and folders are private."""
    match value:
        case dict():
            return {key: public(item) for key, item in value.items()}
        case list() | tuple():
            return [public(item) for item in value]
        case str():
            return _FOLDERS.sub("", value)
        case _:
            return value


def _chained(bodies: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    """The lines as text, each with its number and hashes, and the last one."""
    previous, n = None, 0
    for n, body in enumerate(bodies):
        previous, text = _hashed({"n": n, "previous": previous, **body})
        yield text
    yield _hashed({"n": n + 1, "previous": previous, "kind": "end", "lines": n + 1})[1]


def _hashed(line: dict[str, Any]) -> tuple[str, str]:
    """The hash of a line, and the line with it."""
    found = hashlib.sha256(canonical_json(line).encode()).hexdigest()
    return found, canonical_json({**line, "hash": found})


# ------------------------------------------------------------------------------------------------------ verifying


def verify(path: Path, recompute: Recompute, run: Path | None = None) -> Verified:
    """Check a receipt: its chain, its schema, whether its figures agree with each other and with the captures.

    Args:
        run: the run's folder, from whose captures everything is computed again; ``None``: that of its name in
            ``runs``, where there is one.
        recompute: how that is done.

    Raises:
        InputError: the file cannot be read, or does not begin with a receipt's first line; the folder is not a run.
    """
    receipt = read_receipt(path)
    if receipt.head is None:
        return Verified(receipt, receipt.faults)
    if run is None and ((RUNS / receipt.head.run_id) / CONFIG).is_file():
        run = RUNS / receipt.head.run_id
    faults = [*receipt.faults, *_inconsistent(receipt, receipt.head)]
    remarks = list[str]()
    recomputed: int | None = None
    if run is None:
        remarks.append("its run is not available: figures were compared with each other, not computed again")
    else:
        folder = RunFolder.open(run.absolute())
        if not any(isinstance(line, CaptureLine) for line in receipt.lines):
            remarks.append("it names no captures: figures were compared with each other, not computed again")
        else:
            recomputed, found = _recomputed(receipt, receipt.head, folder, recompute)
            faults += found
    more = [f"and {len(faults) - _MOST_FAULTS} more"] if len(faults) > _MOST_FAULTS else []
    return Verified(receipt, (*faults[:_MOST_FAULTS], *more), recomputed, tuple(remarks))


def read_receipt(path: Path) -> Receipt:
    """The lines of a receipt that are lines, and what is wrong with it; captures are not looked at.

    Raises:
        InputError: unreadable, or its first line is none of a receipt.
    """
    try:
        texts = read_file(path, _MOST_BYTES).decode("utf-8").split("\n")
    except OSError as error:
        raise InputError(f"{path}: cannot read the receipt: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}): no receipt") from None
    if texts == [""]:
        raise InputError(f"{path}: is not a receipt: it is empty")
    faults = [] if texts[-1] == "" else ["its last line does not end: it was cut off"]
    lines: list[HeadLine | ArmLine | CaptureLine | EndLine] = []
    previous: str | None = None
    why = ""
    for n, text in enumerate(texts[:-1] if texts[-1] == "" else texts):
        try:
            plain = strict_json(text)
        except ValueError as error:
            plain, why = None, str(error)
        if n == 0 and not (isinstance(plain, dict) and str(plain.get("schema")).startswith(_FAMILY)):
            raise InputError(f"{path}: is not a receipt: its first line does not name schema {SCHEMA}")
        if isinstance(plain, dict):
            bare = {key: value for key, value in plain.items() if key != "hash"}
            if canonical_json(plain) != text or _hashed(bare)[0] != plain.get("hash"):
                faults.append(f"line {n + 1} ({_title(plain)}) was altered: its hash is not that of its content")
            try:
                line = _LINE.validate_json(text, strict=True)
            except ValidationError as error:
                fault = error.errors(include_url=False)[0]
                plain, why = None, f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        else:
            plain, why = None, why if plain is None else "no object"
        if plain is None:
            faults.append(f"line {n + 1} is none of schema {SCHEMA}: {' '.join(why.split())[:200]}")
            previous = None
            continue
        where = f"line {n + 1} ({_title(plain)})"
        if line.n != n or line.previous != previous:
            faults.append(f"{where} does not follow the line before: one was added, removed, moved or altered")
        previous = line.hash
        lines.append(line)
    head = lines[0] if lines and isinstance(lines[0], HeadLine) else None
    if head is None and not faults:
        faults.append("its first line is none of kind 'head'")
    last = lines[-1] if lines else None
    if not isinstance(last, EndLine) or last.lines != last.n:
        faults.append("it has no last line of kind 'end' that counts the others: it was cut off")
    if sum(isinstance(line, HeadLine | EndLine) for line in lines) > 2:
        faults.append("it has several heads or ends")
    return Receipt(path, head, tuple(lines), tuple(faults))


def _title(line: Mapping[str, Any]) -> str:
    """Key of a line, by which it is found; accepts any content."""
    match line:
        case {"kind": "arm", "role": role, "arm": {"name": name}}:
            return f"arm {name} as {role}"
        case {"kind": "capture", "part": part, "role": role}:
            return f"capture {part} of {role}"
        case _:
            return str(line.get("kind"))


def _inconsistent(receipt: Receipt, head: HeadLine) -> Iterator[str]:
    """Figures that follow from others in the receipt, and do not."""
    records = [(line.role, line.arm) for line in receipt.lines if isinstance(line, ArmLine)]
    roles = [role for role, _ in records]
    if roles.count("reference") != 1:
        yield f"it has {roles.count('reference')} references, not one"
    names = [arm.name for role, arm in records if role == "candidate"]
    if len({*names}) < len(names):
        yield "two candidates have one name"
    for comparison in head.comparisons:
        if not {comparison.better, comparison.worse} <= {*names}:
            yield f"a comparison names {comparison.better} and {comparison.worse}, and one of them is not a candidate"
    advice = head.recommendation
    if advice is not None and advice.arm is not None and advice.arm not in names:
        yield f"it recommends {advice.arm}, which is not a candidate"
    for _, arm in records:
        yield from (f"arm {arm.name}: {fault}" for fault in _faults_of(arm))


def _faults_of(arm: ArmRecord) -> Iterator[str]:
    for group, _, metric in walk({**arm.axes, **arm.benches}):
        if metric.repeats and metric.aggregate == "median" and not _close(metric.value, median(metric.repeats)):
            yield f"{group}, {metric.name}: {metric.value} is not the median of its repeats"
    kld = arm.deciding
    mean = kld.metric("mean", {}) if kld is not None else None
    if kld is not None and mean is not None and mean.value is not None and not mean.bound:
        score = kld.value("score", {})
        if score is not None and not _close(score, kld_score(mean.value)):
            yield f"kld, score: {score} is not 100 · exp(−{mean.value})"
        upper = mean.interval and mean.interval[1]
        band = arm.verdict.band if arm.verdict else None
        order = [entry.value for entry in Band]
        if upper is not None and band is not None and order.index(band) < order.index(kl_band(upper).value):
            yield f"verdict: {band} is better than a mean KL of up to {upper:.3g} nats allows"
    whole = arm.composite
    if whole is not None and whole.value is not None:
        scores = [arm.axes[name].value("score") if name in arm.axes else None for name in whole.axes]
        known = [score for score in scores if score]
        if len(known) == len(scores) > 0 and not _close(whole.value, len(known) / sum(1 / score for score in known)):
            yield f"composite: {whole.value} is not the harmonic mean of {', '.join(whole.axes)}"


def _close(a: float | None, b: float) -> bool:
    return a is not None and math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=1e-12)


def _recomputed(
    receipt: Receipt, head: HeadLine, folder: RunFolder, recompute: Recompute
) -> tuple[int | None, list[str]]:
    """Count of numbers that agree with those recomputed from a run's captures, and the differences."""
    said = head.settings.get("limits")
    limits = said if isinstance(said, dict) else None
    try:
        captures = _captures(folder)
        report = recompute(folder, limits)
    except CaptureError as error:
        return None, [f"its figures cannot be computed again: {error}"]
    except MissingPackageError:
        raise  # says nothing about the run
    except FidelabError as error:
        return None, [f"{folder.path} cannot be scored: {error}"]
    bodies = [strict_json(text) for text in _chained(_bodies(report, captures))]
    keys = [_title(body) for body in bodies]
    theirs = {
        _title(body): body for body in (json.loads(line.model_dump_json(by_alias=True)) for line in receipt.lines)
    }
    faults = [f"{key} is not in the receipt" for key in keys if key not in theirs]
    faults += [f"{key} is in the receipt, and not in the run" for key in theirs if key not in keys]
    counts = [0]
    for key, body in zip(keys, bodies, strict=True):
        if key in theirs:
            faults += [f"{key}{fault}" for fault in _differences("", theirs[key], body, counts)]
    return counts[0], faults


_UNSTABLE = {"n", "previous", "hash", "lines", "fidelab_version"}


def _differences(place: str, receipt: Any, run: Any, counts: list[int]) -> Iterator[str]:
    """Paths at which two plain values differ by more than rounding; ``counts[0]`` counts the numbers compared."""
    if isinstance(receipt, dict) and isinstance(run, dict):
        for name in receipt.keys() | run.keys() if place else (receipt.keys() | run.keys()) - _UNSTABLE:
            if name in receipt and name in run:
                yield from _differences(f"{place}, {name}", receipt[name], run[name], counts)
            elif receipt.get(name) is not None or run.get(name) is not None:
                yield f"{place}, {name}: is in {'the receipt' if name in receipt else 'the run'} alone"
    elif isinstance(receipt, list) and isinstance(run, list) and len(receipt) == len(run):
        for n, (a, b) in enumerate(zip(receipt, run, strict=True)):
            name = a.get("name") if isinstance(a, dict) else None
            yield from _differences(f"{place}, {name or n + 1}", a, b, counts)
    elif _number(receipt) and _number(run):
        counts[0] += 1
        if not _close(receipt, run):
            yield f"{place}: the receipt says {receipt}, the captures give {run}"
    elif receipt != run:
        yield f"{place}: the receipt says {_short(receipt)}, the run {_short(run)}"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = canonical_json(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def json_schema() -> dict[str, Any]:
    """JSON Schema of one line."""
    schema = _LINE.json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA, "title": SCHEMA, **schema}


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
