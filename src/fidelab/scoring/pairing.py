"""Turn captures into the axis scores of each arm: pairing, proof of engagement, failures."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fidelab.axes.base import Axis, AxisScore, load_axis, part_name, parts_of
from fidelab.captures.pair import Pair, comparability_key
from fidelab.captures.reader import Capture
from fidelab.config.schema import Experiment
from fidelab.core import Status, usable_cores
from fidelab.core.errors import UNTRUSTED_DATA_ERRORS, CaptureError, FidelabError
from fidelab.core.roles import is_partial
from fidelab.engines import ENGINES
from fidelab.engines.base import one_line
from fidelab.metrics.unmoved import EqualRows
from fidelab.results.engagement import engaged
from fidelab.results.measurement import DECIDING
from fidelab.results.outcomes import ArmResult
from fidelab.results.record import NO_REFERENCE
from fidelab.scoring import tiles
from fidelab.scoring.tiles import Figures, TileJob, compare_here, compare_in_process, is_comparable, operations

_LOGGER = logging.getLogger(__name__)
_MAX_EQUAL_SHARE = 0.01  # share of changed numbers from which on equal rows are not an accident
_FIRST_DECODED = 2  # the first token reads its own value alone, whatever its key
_BLOCK = "32"  # tokens of a block of formats with axis=channel, unless group= is given


@dataclass(frozen=True)
class ArmScores:
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

    def not_compared(self, results: Sequence[ArmResult]) -> dict[bool, list[TileJob]]:
        """Return the rows of hidden states that have no figures yet, by whether torch is worth its start for them."""
        asked: dict[bool, list[TileJob]] = {True: [], False: []}
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
                        pair = Pair.match(ref, test, subset=is_partial(result.role))
                        if is_comparable(ref, test) and next(iter(self.axes[name].compared(pair)), None):
                            tests.append((folder, is_partial(result.role)))
                    except (FidelabError, OSError, *UNTRUSTED_DATA_ERRORS) as error:  # scoring says it
                        _LOGGER.debug("%s, %s is not compared ahead: %s", result.role, part_name(name, part), error)
                if tests:
                    many = operations(ref) >= tiles.MIN_OPERATIONS
                    asked[many].append(TileJob(name, self.experiment.axes[name], ref.folder, tests))
        return asked

    def compare_ahead(self, results: Sequence[ArmResult]) -> None:
        """Compare the rows of hidden states of all arms at once."""
        asked = self.not_compared(results)
        if asked[True]:
            self._figures |= compare_in_process(asked[True], self.experiment.threads or usable_cores())
        for one in asked[False]:
            try:
                self._figures |= compare_here(one)
            except (FidelabError, OSError, *UNTRUSTED_DATA_ERRORS) as error:  # as above
                _LOGGER.debug("%s is not compared ahead: %s", one.axis, error)

    def measure(self, result: ArmResult) -> ArmScores:
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
            if is_partial(result.role) and not (parts_of(name, result.captures) or _of_axis(name, result.failures)):
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
        # No usable item, such as no token at all, where the reference has usable output
        broken: dict[str, tuple[str, ...]] = {}
        for name, score in scores.items():
            if name == DECIDING or score.usable.any() or score.not_measurable:
                continue
            reference = [item for capture in self._reference[name].values() for item in capture.items]
            captures = [Capture(path) for path in parts_of(name, result.captures).values()]
            reasons = [str(item["failed"]) for capture in captures for item in capture.items if item["failed"]]
            if reasons and any(item["failed"] is None for item in reference):
                broken[name] = (f"{name}: no item was usable, first {reasons[0]}",)
        return ArmScores(result, status, reason, scores, failures, broken)

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

    def _score(self, axis: Axis, name: str, result: ArmResult) -> AxisScore:
        reference = self._reference[name]
        shared = {part for part in reference if part not in axis.reference_only and not axis.look(part)}
        if not shared:
            first = self.by_role[self._role]
            why = _of_axis(name, first.failures) or first.reason or "no capture"
            raise FidelabError(f"{NO_REFERENCE}: {why}")
        partial = is_partial(result.role)
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
        return EqualRows(kl, window, position, n_ctx, first).first()
    if first > _FIRST_DECODED:  # how long the prompts are is not known here
        return None
    nothing = np.zeros(len(score.num), dtype=np.int64)
    return EqualRows(score.num, score.clusters, nothing + first, nothing, first, score.found.cluster or "item").first()
