"""Turn captures into the axis scores of each arm: pairing, proof of engagement, failures."""

from __future__ import annotations

import json
import logging
import os
import re
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fidelab.axes.base import Axis, AxisScore, part_name, parts_of
from fidelab.captures.manifest import key_digest, load_manifest
from fidelab.captures.pair import Pair, comparability_key
from fidelab.captures.reader import Capture, key_name
from fidelab.captures.store import Readers, drop_rows
from fidelab.config.schema import Experiment
from fidelab.core import Arm, Estimator, Status, usable_cores
from fidelab.core.errors import CaptureError, FidelabError, MismatchError
from fidelab.core.runtime import invalid_runtime_fields
from fidelab.core.serial import from_json, to_json
from fidelab.engines import ENGINES
from fidelab.engines.base import one_line
from fidelab.metrics.unmoved import Unmoved
from fidelab.results.measurement import DECIDING, Measurement
from fidelab.results.record import NO_REFERENCE, RuntimeRecord, Timing
from fidelab.run import tiles
from fidelab.run.build import FLOOR, TWIN, base_of
from fidelab.run.cluster import Cluster, Lost, Needs
from fidelab.run.resolve import load_axis
from fidelab.run.tiles import Asked, Figures, compare_here, compare_in_process, is_comparable, operations

UNTRUSTED_DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of reading an invalid answer: another process wrote it, perhaps from a server."""

_LOGGER = logging.getLogger(__name__)
_BYTES_TOLERANCE = 1e-3
_MAX_EQUAL_SHARE = 0.01  # share of changed numbers from which on equal rows are not an accident
_FIRST_DECODED = 2  # the first token reads its own value alone, whatever its key
_BLOCK = "32"  # tokens of a block of formats with axis=channel, unless group= is given
_REFUTED = "refuted: "
_QUESTIONS = ("received", "stored", "named")  # of the proof of engagement, in the order of reasons
_CAPTURE_SUFFIX = re.compile(r"-[0-9a-f]{12}-r\d+$")  # ends a name that captures.manifest.capture_folder gave


@dataclass(frozen=True)
class ArmResult:
    """Result of one arm: its captures by axis, or the reason why there are none.

    ``role``: as in :class:`~fidelab.run.build.Plan`.  ``benches``: the result of each bench, a
    :class:`~fidelab.results.measurement.Measurement` as plain data.
    """

    role: str
    arm: Arm
    status: Status
    reason: str | None = None
    ran: Mapping[str, Any] | None = None
    captures: Mapping[str, Path] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    timing: Mapping[str, float | None] = field(default_factory=dict)
    benches: Mapping[str, Any] = field(default_factory=dict)

    def record(self, base: Path) -> dict[str, Any]:
        """Return plain data. Capture paths are relative to ``base``, so that runs and captures can move together."""
        captures = {axis: Path(os.path.relpath(path, base)) for axis, path in self.captures.items()}
        plain: dict[str, Any] = to_json(replace(self, captures=captures))
        return plain

    @classmethod
    def from_record(cls, record: Any, base: Path) -> ArmResult:
        """Build a result from the data of :meth:`record`.

        Raises:
            ValueError: If it is not such a record.
        """
        found = from_json(cls, record)
        if found.ran is not None:
            RuntimeRecord.model_validate(dict(found.ran))
            if fault := next(invalid_runtime_fields(found.ran), None):
                raise ValueError(f"{fault} of what ran is not what it should be")
        Timing.model_validate(dict(found.timing))
        for bench in found.benches.values():
            Measurement.model_validate(bench)
        return replace(found, captures={axis: (base / path).resolve() for axis, path in found.captures.items()})

    def check_captures(self) -> None:
        """Open every capture, and refuse those that are not this arm's.

        Raises:
            CaptureError: If a capture is missing or damaged.
            MismatchError: If a capture belongs to another arm or axis, or was moved here. The message names it.
        """
        for axis, folder in self.captures.items():
            capture = Capture(folder)
            theirs = from_json(Arm, capture.manifest["asked"])
            if capture.axis != axis or theirs.fingerprint() != self.arm.fingerprint():
                raise MismatchError(
                    f"capture {folder} holds axis {capture.axis} of {theirs.name} ({theirs.kv.label} on "
                    f"{theirs.engine}), not {axis} of {self.role}"
                )
            if _CAPTURE_SUFFIX.search(folder.name) and folder.name != key_name(capture):
                raise MismatchError(f"capture {folder} holds what belongs into {key_name(capture)}, not {self.role}")


def drop_compared_rows(axes: Mapping[str, Axis], results: Sequence[ArmResult], readers: Readers) -> None:
    """Replace rows of log-probabilities by figures where an arm kept them while it answered.

    It keeps them for a twin, where another run read them, and where a part could not be compared.  Axes that read more
    of rows than figures keep them still, and so do rows that cannot be compared, and arms that another run reads.
    """
    for result, base in _compared(results):
        with _exclusive(readers, result) as alone:
            if alone:
                _drop(axes, result, base, (Estimator.LOGPROBS,))


def drop_reference_rows(
    axes: Mapping[str, Axis], results: Sequence[ArmResult], roles: Sequence[str], readers: Readers
) -> None:
    """Drop the rows of arms that others are compared with, such as the reference, once all ``roles`` were compared.

    Rows stay where an arm of them failed: it may be asked again.
    """
    by_role = {result.role: result for result in results}
    for base in results:
        others = [by_role.get(role) for role in roles if base_of(role) == base.role]
        done = [other for other in others if other is not None and other.status is Status.OK]
        if not base_of(base.role) and len(done) == len(others):
            captures = {name: folder for name, folder in base.captures.items() if _were_compared(name, folder, done)}
            itself = replace(base, captures=captures)
            with _exclusive(readers, itself) as alone:
                if alone:
                    _drop(axes, itself, itself, (Estimator.LOGPROBS,))


def _exclusive(readers: Readers, result: ArmResult) -> AbstractContextManager[bool]:
    """Whether no other run reads this arm's captures."""
    folder = next(iter(result.captures.values()), None)
    return nullcontext(False) if folder is None else readers.alone(folder.parent)


def _were_compared(name: str, base: Path, readers: Sequence[ArmResult]) -> bool:
    """Whether all captures of this name hold what compares them with the base's."""
    try:
        own = key_digest(load_manifest(base)["key"])
        theirs = [Capture(reader.captures[name], verify=False) for reader in readers if name in reader.captures]
    except CaptureError:
        return False
    return {capture.against for capture in theirs} == {own} and not any(capture.has_rows() for capture in theirs)


def drop_rows_on_cluster(
    cluster: Cluster,
    axes: Mapping[str, Mapping[str, Any]],
    results: Sequence[ArmResult],
    folder: Path,
    readers: Readers,
) -> None:
    """Drop rows on a cluster where all arms have answered, hidden states included. Its nodes compare the rows.

    ``axes``: their settings by name.  ``folder``: folder that all nodes see. Rows that a node did not compare are left
    to scoring.
    """
    pairs = _compared(results)
    for twins in (True, False):
        running = []
        with ExitStack() as held:
            for result, base in pairs:
                if _is_twin(result) == twins and held.enter_context(_exclusive(readers, result)):
                    arms = {"result": result.record(folder), "base": base.record(folder)}
                    ticket = json.dumps({"axes": axes, "folder": str(folder), **arms})
                    running.append(cluster.submit(ticket, Needs(cpus=1, gpus=0), _drop_here))
            for handle in running:
                try:
                    handle.result()
                except (Lost, *UNTRUSTED_DATA_ERRORS) as error:
                    _LOGGER.debug("rows are compared here: %s", error)


def _drop_here(ticket: str) -> str:
    """Node's part of :func:`drop_rows_on_cluster`."""
    asked = json.loads(ticket)
    result, base = (ArmResult.from_record(asked[name], Path(asked["folder"])) for name in ("result", "base"))
    axes = {name: load_axis(name, values) for name, values in asked["axes"].items()}
    _drop(axes, result, base, (Estimator.LOGPROBS, Estimator.HIDDEN))
    return ""


def _compared(results: Sequence[ArmResult]) -> list[tuple[ArmResult, ArmResult]]:
    """Arms with those that they are compared with; twins first, since they need the rows of other arms."""
    by_role = {result.role: result for result in results}
    pairs = [(result, by_role[base]) for result in results if (base := base_of(result.role)) in by_role]
    return sorted(pairs, key=lambda pair: not _is_twin(pair[0]))


def _is_twin(result: ArmResult) -> bool:
    return result.role.partition(":")[0] == TWIN


def _drop(axes: Mapping[str, Axis], result: ArmResult, base: ArmResult, estimators: Collection[Estimator]) -> None:
    for name, axis in axes.items():
        theirs = parts_of(name, base.captures)
        for part, folder in parts_of(name, result.captures).items():
            if part not in theirs:
                continue
            try:
                ref, test = Capture(theirs[part]), Capture(folder)
                if not {ref.estimator, test.estimator} & {*estimators} or not ref.has_rows():
                    continue
                if test.against and not test.has_rows():
                    continue
                pair = Pair.match(ref, test, subset=_is_part(result))
                if (figures := axis.figures(pair)) is not None:
                    drop_rows(pair, figures)
            except (FidelabError, *UNTRUSTED_DATA_ERRORS) as error:  # scoring meets it again, and says it
                _LOGGER.debug("%s, %s keeps its rows: %s", result.role, part_name(name, part), error)


@dataclass(frozen=True)
class Measured:
    """Axis scores of one arm, or reasons for missing ones.  ``broken``: axis → only this arm gave no usable item."""

    result: ArmResult
    status: Status
    reason: str | None
    scores: Mapping[str, AxisScore]
    failures: Mapping[str, tuple[Status, str]]
    broken: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def deciding(self) -> AxisScore | None:
        """The score by which the arm is judged."""
        return self.scores.get(DECIDING)


class Scorer:
    """Pairs every arm's captures with the reference's and scores the pairs.

    ``reference``: role of the arm that all others are compared with.  Captures that must not be compared
    are a failure of that arm on that axis.  ``figures``: of pairs that an earlier look compared; those of this one are
    added.
    """

    def __init__(
        self,
        experiment: Experiment,
        results: Sequence[ArmResult],
        unavailable: Mapping[str, str],
        *,
        reference: str = "reference",
        figures: Figures | None = None,
    ) -> None:
        self.experiment = experiment
        self._role = reference
        self.unavailable = unavailable
        self.by_role = {result.role: result for result in results}
        self.axes: dict[str, Axis] = {name: load_axis(name, values) for name, values in experiment.axes.items()}
        captures = self.by_role[reference].captures
        self._reference: dict[str, dict[str, Capture]] = {
            name: {part: Capture(folder) for part, folder in parts_of(name, captures).items()} for name in self.axes
        }
        self._figures: Figures = {} if figures is None else figures

    def comparability(self) -> dict[str, Any]:
        return {
            part_name(name, part): comparability_key(capture)
            for name, captures in self._reference.items()
            for part, capture in captures.items()
            if not self.axes[name].look(part)  # how many follow is a matter of the arms
        }

    def compare_ahead(self, results: Sequence[ArmResult]) -> None:
        """Compare the rows of hidden states of all arms at once."""
        asked: dict[bool, list[Asked]] = {True: [], False: []}  # whether they are worth a process of their own
        for name, captures in self._reference.items():
            for part, ref in captures.items():
                tests = []
                for result in results:
                    folder = parts_of(name, result.captures).get(part)
                    if folder is None or name in self.unavailable or engaged(result)[0] is not Status.OK:
                        continue
                    if (ref.folder, folder) in self._figures:
                        continue
                    try:
                        test = Capture(folder, verify=False)
                        pair = Pair.match(ref, test, subset=_is_part(result))
                        if is_comparable(ref, test) and next(iter(self.axes[name].compared(pair)), None):
                            tests.append((folder, _is_part(result)))
                    except (FidelabError, OSError, *UNTRUSTED_DATA_ERRORS) as error:  # scoring says it
                        _LOGGER.debug("%s, %s is not compared ahead: %s", result.role, part_name(name, part), error)
                if tests:
                    many = operations(ref) >= tiles.MIN_OPERATIONS
                    asked[many].append(Asked(name, self.experiment.axes[name], ref.folder, tests))
        if asked[True]:
            self._figures |= compare_in_process(asked[True], self.experiment.threads or usable_cores())
        for one in asked[False]:
            try:
                self._figures |= compare_here(one)
            except (FidelabError, OSError, *UNTRUSTED_DATA_ERRORS) as error:  # as above
                _LOGGER.debug("%s is not compared ahead: %s", one.axis, error)

    def measure(self, result: ArmResult) -> Measured:
        scores: dict[str, AxisScore] = {}
        failures: dict[str, tuple[Status, str]] = {}
        status, reason = engaged(result)
        for name, axis in self.axes.items():
            if status in (Status.NOT_SUPPORTED, Status.NOT_ENGAGED):
                failures[name] = (status, reason or "")
                continue
            if name in self.unavailable:
                failures[name] = (Status.NOT_MEASURABLE, self.unavailable[name])
                continue
            if _is_part(result) and not (parts_of(name, result.captures) or _of_axis(name, result.failures)):
                continue  # this axis is not repeated
            try:
                scores[name] = self._score(axis, name, result)
            except FidelabError as error:
                failures[name] = (Status.FAILED, str(error))
            except UNTRUSTED_DATA_ERRORS as error:
                _LOGGER.debug("%s, %s", result.arm.name, name, exc_info=True)
                failures[name] = (Status.FAILED, f"its answers cannot be scored ({one_line(error)})")
        if status is Status.OK and (unmoved := self._unmoved(result, scores)):
            status, reason = Status.NOT_ENGAGED, unmoved
            failures |= dict.fromkeys(scores, (status, unmoved))
            scores = {}
        faults = [text for kind, text in failures.values() if kind is not Status.NOT_MEASURABLE]
        if status is Status.OK and faults:
            status, reason = Status.FAILED, "; ".join(dict.fromkeys(faults))
        elif status is Status.OK and scores and all(score.identical for score in scores.values()):
            status = Status.IDENTICAL
        return Measured(result, status, reason, scores, failures, self._broken(result, scores))

    def _unmoved(self, result: ArmResult, scores: Mapping[str, AxisScore]) -> str | None:
        """Why distributions equal to the reference's refute engagement (lossy formats change them), or ``None``."""
        rows = [score for name, score in scores.items() if self.axes[name].distributions]
        reference = self.by_role[self._role]
        if not rows or result.arm.kv.content() == reference.arm.kv.content():
            return None
        two = (result, reference)
        where = "everywhere" if all(score.identical for score in rows) and not all(map(_lossless, two)) else None
        if where is None and any(map(_is_lossy, two)):
            first = max(map(_exact_tokens, two))
            where = next(filter(None, (_unmoved_part(score, first) for score in rows)), None)
        if where is None:
            return None
        pair = f"{result.arm.kv.label} and {reference.arm.kv.label}"
        return f"{pair} keep different numbers, but their KL is exactly 0 {where}: one of them did not reach attention"

    def _broken(self, result: ArmResult, scores: Mapping[str, AxisScore]) -> dict[str, tuple[str, ...]]:
        """No usable item, such as no token at all, where the reference has usable output."""
        broken: dict[str, tuple[str, ...]] = {}
        for name, score in scores.items():
            if name == DECIDING or score.usable.any() or score.not_measurable:
                continue
            reference = [item for capture in self._reference[name].values() for item in capture.items]
            captures = [Capture(path) for path in parts_of(name, result.captures).values()]
            reasons = [str(item["failed"]) for capture in captures for item in capture.items if item["failed"]]
            if reasons and any(item["failed"] is None for item in reference):
                broken[name] = (f"{name}: no item was usable, first {reasons[0]}",)
        return broken

    def _score(self, axis: Axis, name: str, result: ArmResult) -> AxisScore:
        reference = self._reference[name]
        shared = {part for part in reference if part not in axis.reference_only and not axis.look(part)}
        if not shared:
            first = self.by_role[self._role]
            why = _of_axis(name, first.failures) or first.reason or "no capture"
            raise FidelabError(f"{NO_REFERENCE}: {why}")
        partial = _is_part(result)
        parts = parts_of(name, result.captures)
        failed = parts_of(name, result.failures)
        theirs = parts_of(name, self.by_role[self._role].failures)
        reasons = {part: f"{NO_REFERENCE}: {why}" for part, why in theirs.items()} | failed
        lost = {part: cell for part, why in reasons.items() if (cell := axis.failed_part_cell(part, why)) is not None}
        answered = parts.keys() >= (set() if partial else shared - lost.keys())
        if failed.keys() - lost.keys() or not (parts and answered):
            raise FidelabError(_of_axis(name, result.failures) or result.reason or "no capture")
        pairs = {
            part: replace(
                Pair.match(capture, Capture(parts[part]), subset=partial),
                figures=self._figures.get((capture.folder, parts[part]), {}),
            )
            for part, capture in reference.items()
            if part in parts
        }
        try:
            score = axis.score_parts(pairs, self.experiment.seed)
            return score.with_measurement(cells=(*score.found.cells, *lost.values())) if lost else score
        except FidelabError:
            raise
        except (*UNTRUSTED_DATA_ERRORS, RuntimeError, MemoryError) as error:
            # Only the axis knows what the settings and notes of its requests hold, and a capture may be anybody's.
            place, folder = traceback.extract_tb(error.__traceback__)[-1], next(iter(parts.values()))
            raise CaptureError(
                f"{name} cannot be scored from {folder} against {self.by_role[self._role].arm.name}: "
                f"the saved outputs do not hold what this test asks ({type(error).__name__}: {str(error)[:200]}; "
                f"{Path(place.filename).name}, line {place.lineno})"
            ) from error


def _is_part(result: ArmResult) -> bool:
    """Whether the arm answers only some of the items, as a repeat or a twin does."""
    return result.role.partition(":")[0] in (FLOOR, TWIN)


def _of_axis(name: str, failures: Mapping[str, str]) -> str | None:
    """Reason why the captures of an axis, or of one of its parts, are missing."""
    return next(iter(parts_of(name, failures).values()), None)


def _lossless(result: ArmResult) -> bool:
    """Whether this arm's formats are lossless: by definition, or where that is undecided, by the runtime info."""
    arm, ran = result.arm, result.ran or {}
    lossless = ENGINES.load(arm.engine).lossless(arm) if arm.engine in ENGINES.names() else None
    return ran.get("k_changed") == 0 == ran.get("v_changed") if lossless is None else bool(lossless)


def _is_lossy(result: ArmResult) -> bool:
    """Whether this arm's formats change so many numbers that every row has to differ."""
    arm, ran = result.arm, result.ran or {}
    if arm.engine not in ENGINES.names() or ENGINES.load(arm.engine).lossless(arm) is not False:
        return False
    shares = [share for side in "kv" if (share := ran.get(f"{side}_changed")) is not None]
    return not shares or max(shares) >= _MAX_EQUAL_SHARE


def _exact_tokens(result: ArmResult) -> int:
    """An upper bound of the first tokens of a sequence after which the format has changed nothing that a row reads.

    Tokens that options keep as they are, and those that read nothing but themselves.
    """
    sides = (dict(spec.options) for spec in (result.arm.kv.k, result.arm.kv.v))
    return _FIRST_DECODED + max(
        sum(_unquantized_tokens(side, name) for name in ("sinks", "tail", "group")) for side in sides
    )


def _unquantized_tokens(side: Mapping[str, str], option: str) -> int:
    """Tokens that an option of a format leaves as they are; ``group`` those that wait until a block of them is full."""
    if option == "group" and side.get("axis") != "channel":
        return 0
    text = side.get(option, _BLOCK if option == "group" else "")
    return int(text) if text.isdecimal() else 0


def _unmoved_part(score: AxisScore, first: int) -> str | None:
    """Part of the score, from position ``first`` on, whose rows all equal the reference's."""
    if score.bound:
        return None
    if {"kl", "window", "position", "n_ctx"} <= score.positions.keys():
        kl, window, position, n_ctx = (score.positions[name] for name in ("kl", "window", "position", "n_ctx"))
        return Unmoved(kl, window, position, n_ctx, first).first()
    if first > _FIRST_DECODED:  # how long the prompts are is not known here
        return None
    nothing = np.zeros(len(score.num), dtype=np.int64)
    return Unmoved(score.num, score.clusters, nothing + first, nothing, first, score.found.cluster or "item").first()


def _question_rank(question: str) -> int:
    """Rank of a question of the proof: what attention received says more than what was stored, and that than a name."""
    return _QUESTIONS.index(question) if question in _QUESTIONS else len(_QUESTIONS)


def engaged(result: ArmResult) -> tuple[Status, str | None]:
    """Whether there is proof that the requested format ran.  See docs/metrics.md#proof-of-engagement."""
    if result.status is not Status.OK or result.ran is None:
        return result.status, result.reason
    ran, kv = result.ran, result.arm.kv
    proof = ran.get("proof") or {}  # a manifest has its keys in another order
    answers = [str(proof[question]) for question in sorted(proof, key=_question_rank)]
    refuted = next((text.removeprefix(_REFUTED) for text in answers if text.startswith(_REFUTED)), None)
    for side, asked in (("k", kv.k), ("v", kv.v)):
        stored = ran.get(f"{side}_format")
        if stored is None:
            unproven = f"the engine gave no evidence that {side.upper()} was stored as {asked}"
            return Status.NOT_ENGAGED, refuted or unproven
        if stored != str(asked):
            return Status.NOT_ENGAGED, f"asked for {side.upper()} = {asked}, the engine stored {stored}"
    if refuted:
        return Status.NOT_ENGAGED, refuted
    held, expected = ran.get("cache_bytes_per_token"), ran.get("expected_bytes_per_token")
    if held and expected and abs(held - expected) > _BYTES_TOLERANCE * expected:
        return Status.NOT_ENGAGED, f"the cache holds {held:g} bytes per token, the asked format takes {expected:g}"
    return result.status, result.reason


def select_runtime_info(arm: Arm, rans: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Select the runtime info of the captures by which the arm is judged.

    Captures of a run that was stopped and resumed are from several processes, each of which has its own evidence.  So a
    record that contradicts the format takes precedence over the last one, and so does one that shows changed numbers in
    attention (:meth:`Scorer._unmoved`).  A record without evidence contradicts nothing.
    """
    asked = {"k_format": str(arm.kv.k), "v_format": str(arm.kv.v)}

    def refutes(ran: Mapping[str, Any]) -> bool:
        record = {**ran, **{side: ran.get(side) or name for side, name in asked.items()}}
        return engaged(ArmResult("", arm, Status.OK, ran=record))[0] is Status.NOT_ENGAGED

    def changes(ran: Mapping[str, Any]) -> bool:
        return bool(ran.get("k_changed") or ran.get("v_changed"))

    latest = list(reversed(rans))
    return next((ran for tells in (refutes, changes) for ran in latest if tells(ran)), latest[0] if latest else None)
