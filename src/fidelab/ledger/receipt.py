"""Receipts: a run's report and the hashes of its captures, for another machine to verify.

See docs/sharing.md#verifiable-results.  A receipt is canonical JSON (keys sorted, no blanks).  Its ``sha256`` is the
hash of the same text without this field, so an altered digit is found. A forged hash is found by computing the figures
again from the captures.

Plots, which show words of texts and models, are left out. Absolute paths are reduced to their last part.
``python -m fidelab.ledger.receipt`` prints the JSON Schema.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError

from fidelab.captures.manifest import load_manifest
from fidelab.core import canonical_json, read_file, strict_json
from fidelab.core.errors import CaptureError, FidelabError, InputError, MissingPackageError, OutputError, UsageError
from fidelab.metrics.composite import Band, kl_band
from fidelab.metrics.divergence import kld_score
from fidelab.results.measurement import walk
from fidelab.results.record import ArmRecord, Report, write_atomically
from fidelab.results.store import CONFIG, OUTCOMES, RUNS, RunFolder
from fidelab.results.table import arms
from fidelab.results.values import Record

SCHEMA: Final = "fidelab.receipt/0"

_MAX_RECEIPT_BYTES = 128 << 20
_TOLERANCE = 1e-6  # relative: what another machine's libraries may round differently
_FOLDERS = re.compile(r"(?<![\w.~/:\\-])~?/(?:[^\s/:;,'\"]+/)+(?=[^\s/])")  # of an absolute path, up to its last part
_MAX_LISTED_FAULTS = 20

Recompute = Callable[[RunFolder, Mapping[str, Any] | None], Report]
"""A run's report from its captures, under the limits that are given; raises FidelabError."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Receipt(Record):
    """A run's figures, and the hashes of what they were computed from."""

    schema_name: Literal["fidelab.receipt/0"] = Field(default=SCHEMA, alias="schema")
    """Name and version of this schema."""
    report: Report
    """The report, without plots."""
    captures: dict[str, dict[str, Sha256]]
    """Role (``reference``, ``candidate:NAME``, ``floor``, …) → part of an axis → checksum of the capture's manifest,
    which has the checksums of its files."""
    sha256: Sha256
    """SHA-256 of the receipt's canonical JSON without this field."""


@dataclass(frozen=True)
class Verified:
    """Result of checking a receipt.

    ``faults``: faults of the receipt. ``recomputed``: number of figures computed again from the captures; ``None``,
    with the reason in ``remark``, if that was not possible.
    """

    path: Path
    receipt: Receipt
    faults: tuple[str, ...]
    recomputed: int | None = None
    remark: str = ""

    @property
    def verdict(self) -> Literal["verified", "consistent", "wrong"]:
        """``consistent``: whoever can write a receipt can write one whose figures agree with each other."""
        return "wrong" if self.faults else "consistent" if self.recomputed is None else "verified"


# ----------------------------------------------------------------------------------------------------- publishing


def publish(run: RunFolder, path: Path) -> Path:
    """Write the receipt of a finished run.

    Raises:
        UsageError: If the file exists. Receipts are never replaced.
        InputError: If the run has no report.
        CaptureError: If a capture is missing, damaged, or edited.
        OutputError: If the file cannot be written.
    """
    if path.exists():
        raise UsageError(f"{path} exists, and receipts are not replaced: name another file")
    body = {"schema": SCHEMA, "report": _published(run.read_report()), "captures": _captures(run)}
    try:
        return write_atomically(path, f"{canonical_json({**body, 'sha256': _hash(body)})}\n")
    except UnicodeEncodeError as error:
        raise OutputError(f"{path}: cannot write: {error.reason}") from None


def _published(report: Report) -> Any:
    plain = report.model_dump(mode="json", by_alias=True)
    measured = [*plain["floor"].values()]
    for arm in (*plain["candidates"], *plain["controls"], plain["reference"], plain["control"], plain["truth"]):
        measured += [] if arm is None else [*arm["axes"].values(), *arm["benches"].values()]
    for found in measured:
        found["plots"] = []
    return public(plain)


def _captures(run: RunFolder) -> dict[str, dict[str, str]]:
    """The checksums of a run's captures; none for runs without outcomes, such as imported ones."""
    if not (run.path / OUTCOMES).is_file():
        return {}
    try:
        listed = {arm["role"]: dict(arm["captures"]) for arm in run.read_outcomes()["arms"]}
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{run.path / OUTCOMES} is damaged ({type(error).__name__}: {error})") from None
    return {
        role: {part: load_manifest((run.path / path).resolve())["checksum"] for part, path in parts.items()}
        for role, parts in listed.items()
    }


def public(value: Any) -> Any:
    """Replace absolute paths in plain data by their last parts: receipts are published, and folders are private."""
    match value:
        case dict():
            return {key: public(item) for key, item in value.items()}
        case list() | tuple():
            return [public(item) for item in value]
        case str():
            return _FOLDERS.sub("", value)
        case _:
            return value


def _hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(body).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------ verifying


def verify(path: Path, recompute: Recompute, run: Path | None = None) -> Verified:
    """Check a receipt: its hash, and whether its figures agree with each other and with the captures.

    Args:
        run: the run's folder, from whose captures everything is computed again; ``None``: that of its name in
            ``runs``, where there is one.
        recompute: function that computes them.

    Raises:
        InputError: If the file cannot be read or is not a receipt, or the folder is not a run.
    """
    receipt, faults = _read(path)
    name = receipt.report.run_id
    if run is None and (RUNS / name / CONFIG).is_file():
        run = RUNS / name
    recomputed: int | None = None
    remark = ""
    if run is None:
        remark = "its run is not available: figures were compared with each other, not computed again"
    elif not any(receipt.captures.values()):
        remark = "it names no captures: figures were compared with each other, not computed again"
    else:
        recomputed, found = _recomputed(receipt, RunFolder.open(run.absolute()), recompute)
        faults += found
    more = [f"and {len(faults) - _MAX_LISTED_FAULTS} more"] if len(faults) > _MAX_LISTED_FAULTS else []
    return Verified(path, receipt, (*faults[:_MAX_LISTED_FAULTS], *more), recomputed, remark)


def is_receipt(path: Path) -> bool:
    """Whether a file declares itself a receipt. It may be damaged."""
    try:
        plain = strict_json(read_file(path, _MAX_RECEIPT_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(plain, dict) and plain.get("schema") == SCHEMA


def report_of(path: Path) -> Report:
    """Return the report that a receipt was written from, without plots.

    Raises:
        InputError: If it is damaged, or its figures contradict each other.
    """
    receipt, faults = _read(path)
    if faults:
        raise InputError(f"{path}: {faults[0]}; see fidelab share verify {path}")
    return receipt.report


def _read(path: Path) -> tuple[Receipt, list[str]]:
    """A receipt, and what is wrong with it; captures are not looked at."""
    try:
        text = read_file(path, _MAX_RECEIPT_BYTES).decode("utf-8").removesuffix("\n")
        plain = strict_json(text)
        schema = plain.get("schema") if isinstance(plain, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"its schema is {schema!r:.60}, not {SCHEMA}")
        receipt = Receipt.model_validate_json(text, strict=True)
    except OSError as error:
        raise InputError(f"{path}: cannot read the receipt: {error.strerror or error}") from None
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise InputError(f"{path} is a damaged receipt: {where:.300}: {' '.join(fault['msg'].split()):.200}") from None
    except ValueError as error:
        raise InputError(f"{path} is not a receipt: {' '.join(str(error).split()):.200}") from None
    said = plain.pop("sha256")
    sound = canonical_json({**plain, "sha256": said}) == text and _hash(plain) == said
    return receipt, [*([] if sound else ["it was altered: its hash is not that of its content"]), *_faults(receipt)]


def _faults(receipt: Receipt) -> Iterator[str]:
    """Figures that follow from others in the receipt, and do not."""
    report = receipt.report
    names = [arm.name for arm in report.candidates]
    for comparison in report.comparisons:
        if not {comparison.better, comparison.worse} <= {*names}:
            yield f"a comparison names {comparison.better} and {comparison.worse}, and one of them is not a candidate"
    advice = report.recommendation
    if advice is not None and advice.arm is not None and advice.arm not in names:
        yield f"it recommends {advice.arm}, which is not a candidate"
    for _, arm in arms(report):
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


def _recomputed(receipt: Receipt, folder: RunFolder, recompute: Recompute) -> tuple[int | None, list[str]]:
    """Count of numbers that agree with those recomputed from a run's captures, and the differences."""
    limits = receipt.report.settings.get("limits")
    try:
        captures = _captures(folder)
        report = recompute(folder, limits if isinstance(limits, dict) else None)
    except CaptureError as error:
        return None, [f"its figures cannot be computed again: {error}"]
    except MissingPackageError:
        raise  # says nothing about the run
    except FidelabError as error:
        return None, [f"{folder.path} cannot be scored: {error}"]
    said, found = _published(receipt.report), _published(report)
    del said["fidelab_version"], found["fidelab_version"]
    counts = [0]
    faults = [*_differences("", said, found, counts), *_differences("captures", receipt.captures, captures, counts)]
    return counts[0], faults


def _differences(place: str, receipt: Any, run: Any, counts: list[int]) -> Iterator[str]:
    """Paths at which two plain values differ by more than rounding; ``counts[0]`` counts the numbers compared."""
    before = f"{place}, " if place else ""
    if isinstance(receipt, dict) and isinstance(run, dict):
        for name in receipt.keys() | run.keys():
            if name in receipt and name in run:
                yield from _differences(f"{before}{name}", receipt[name], run[name], counts)
            elif receipt.get(name) is not None or run.get(name) is not None:
                yield f"{before}{name}: is only in {'the receipt' if name in receipt else 'the run'}"
    elif isinstance(receipt, list) and isinstance(run, list) and len(receipt) == len(run):
        for n, (a, b) in enumerate(zip(receipt, run, strict=True)):
            name = a.get("name") if isinstance(a, dict) else None
            yield from _differences(f"{before}{name or n + 1}", a, b, counts)
    elif _number(receipt) and _number(run):
        counts[0] += 1
        if not _close(receipt, run):
            yield f"{place}: the receipt says {receipt}, the captures give {run}"
    elif receipt != run:
        yield f"{place}: the receipt says {_shorten(receipt)}, the run {_shorten(run)}"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shorten(value: Any) -> str:
    text = canonical_json(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a receipt."""
    schema = Receipt.model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA, **schema, "title": SCHEMA}


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
