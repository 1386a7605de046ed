"""An evaluation as a measurement: accuracies by kind, serving checks, failed questions, and what a baseline answered.

See docs/metrics/speed.md#serving-checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fidelab.bench.eval.measure import RETRIEVAL, TOOLS, Evaluated, QuestionResult
from fidelab.bench.eval.settings import EvalSettings
from fidelab.core import Status, canonical_json, digest
from fidelab.core.errors import MismatchError
from fidelab.engines.openai.http import split_url
from fidelab.inputs.questions.question import KINDS, Question
from fidelab.metrics.intervals import mcnemar_exact, wilson_interval
from fidelab.results.measurement import Cell, Definition, Flag, Measurement, Metric
from fidelab.results.plots import TablePlot
from fidelab.results.record import Report

EVAL = "eval"
"""Name of the measurement among the benches of a record."""
TITLE = "Is the model on this server sane?"

MIN_ACCURACY = 0.5
"""Share of right answers of a kind that its interval must reach.

The questions are made so that a model of several billion parameters can answer nearly all of them.  This limit follows
from no measurement: name others by a policy, or compare with a baseline.
"""
_SHOWN_BELOW = 0.75  # share found in shorter texts, from which a loss in longer ones is one of length
_SHOWN_P = 0.05  # two-sided p of McNemar's test below which a loss is shown

ACCURACY = Definition("accuracy", "share", "higher", "Share of right answers, with Wilson's interval.")
_RIGHT = Definition("right", "count", None, "Right answers.", exact=True)
_ASKED = Definition("asked", "count", None, "Questions that were answered.", exact=True)
_TOKENS = Definition("generated_tokens", "tokens", None, "Generated tokens as the server counts them.", exact=True)
_SECONDS = Definition("seconds", "s", None, "Time of all requests.", limit="none")
_LOST = Definition("lost", "count", None, "Questions that the baseline answers right, and this run wrong.", exact=True)
_GAINED = Definition("gained", "count", None, "Questions that this run alone answers right.", exact=True)
_P = Definition("mcnemar_p", "p", None, "McNemar's exact test of questions lost against gained.", name="McNemar p")

_STATES: Mapping[str, bool | None] = {"right": True, "wrong": False}


@dataclass(frozen=True)
class Change:
    """Answers against those of a baseline, question by question.

    Attributes:
        lost, gained: ids of questions that one side alone answers right.
        both: questions that both sides answered.
        broken: checks that passed in the baseline and fail now.
        p: McNemar's exact p.
    """

    lost: tuple[str, ...]
    gained: tuple[str, ...]
    both: int
    broken: tuple[str, ...]

    @property
    def p(self) -> float:
        """Two-sided p of McNemar's exact test."""
        return mcnemar_exact(len(self.lost), len(self.gained))

    @property
    def sentence(self) -> str:
        """The change in words."""
        if not self.lost and not self.gained and not self.broken:
            return f"unchanged: all {self.both} answers are right or wrong as in the baseline"
        counts = f"lost {len(self.lost)}, gained {len(self.gained)} of {self.both} (p = {self.p:.2g})"
        broken = f"; {', '.join(self.broken)} passed in the baseline" if self.broken else ""
        return counts + broken


def measurement(evaluated: Evaluated, settings: EvalSettings, change: Change | None = None) -> Measurement:
    """Return the measurement of an evaluation."""
    counted = [one for one in evaluated.questions if one.state in _STATES]
    right = sum(one.state == "right" for one in counted)
    kinds = [kind for kind in KINDS if evaluated.of(kind)]
    metrics = [
        *([_share(counted, headline=True)] if counted else []),
        *(metric for kind in kinds for metric in _kind_metrics(evaluated.of(kind), {"kind": kind})),
        _TOKENS(evaluated.tokens),
        _SECONDS(evaluated.seconds, caveat="one run"),
    ]
    if change is not None:
        metrics += [_LOST(len(change.lost)), _GAINED(len(change.gained)), _P(change.p)]
    passed = sum(check.state == "passed" for check in evaluated.checks)
    tested = sum(check.state in ("passed", "failed") for check in evaluated.checks)
    summary = [f"{right} of {len(counted)} questions right"] if counted else []
    summary += [f"{passed} of {tested} serving checks passed"] if tested else []
    reached = bool(counted or tested)
    reasons = (*evaluated.notes, *(one.fault for one in evaluated.questions), "nothing was answered")
    return Measurement(
        status=Status.OK if reached else Status.FAILED,
        reason=None if reached else next(filter(None, reasons)),
        title=TITLE,
        metrics=tuple(metrics),
        cells=tuple(_cells(evaluated, kinds)),
        plots=tuple(_tables(evaluated)),
        n_items=len(counted),
        n_clusters=len(counted),
        cluster="question",
        summary="; ".join([*summary, *([change.sentence] if change else [])]),
        flags=tuple(_flags(evaluated)),
        fails=tuple(serving_faults(evaluated)),
        downgrades=tuple(kind_faults(evaluated)),
        facts={
            "target": split_url(settings.base_url)[0],
            "model": evaluated.server.model,
            "parallel": settings.parallel,
            "time_limit": settings.time_limit,
            "checks": {check.name: check.state for check in evaluated.checks},
            "questions": {
                one.question.id: {"right": _STATES.get(one.state), "digest": _digest(one.question)}
                for one in evaluated.questions
            },
        },
    )


def faults_of(evaluated: Evaluated) -> list[str]:
    """Return :func:`serving_faults` and :func:`kind_faults`."""
    return [*serving_faults(evaluated), *kind_faults(evaluated)]


def serving_faults(evaluated: Evaluated) -> Iterator[str]:
    """Yield a sentence for each serving check that failed."""
    for check in evaluated.checks:
        if check.state == "failed":
            yield f"{check.name}: {check.detail}"


def kind_faults(evaluated: Evaluated) -> Iterator[str]:
    """Yield a sentence for each kind whose interval lies below the limit."""
    for kind in KINDS:
        results = evaluated.of(kind)
        right, n = _count(results)
        if n and wilson_interval(right, n)[1] < MIN_ACCURACY:
            yield f"{kind}: {right} of {n} right"
        elif (kind == TOOLS and (fault := _miscalled(results))) or (kind == RETRIEVAL and (fault := _beyond(results))):
            yield f"{kind}: {fault}"


def open_of(evaluated: Evaluated) -> Iterator[str]:
    """Yield a sentence for each reason why checks and kinds were not reached, with their names."""
    missed: dict[str, list[str]] = {}
    for check in evaluated.checks:
        if check.state == "not reached":
            missed.setdefault(check.detail, []).append(check.name)
    for kind in KINDS:
        results = evaluated.of(kind)
        left = [one for one in results if one.state == "not reached"]
        if left:
            count = "" if len(left) == len(results) else f" ({len(left)} of {len(results)})"
            missed.setdefault(left[0].fault, []).append(f"{kind}{count}")
    for why, names in missed.items():
        yield f"{why}: {', '.join(names)}"
    tested = [*(one.state for one in evaluated.questions), *(check.state for check in evaluated.checks)]
    if not missed and not {"right", "wrong", "passed", "failed"}.intersection(tested):
        why = next((one.fault for one in evaluated.questions), next(iter(evaluated.notes), "no question"))
        yield f"nothing was tested: {why}"


def answers_of(baseline: Report) -> Measurement:
    """Return the measurement of an earlier evaluation.

    Raises:
        MismatchError: If the run is of another kind.
    """
    arms = (baseline.reference, *baseline.candidates)
    before = next((arm.benches[EVAL] for arm in arms if EVAL in arm.benches), None)
    if before is None:
        raise MismatchError(f"the baseline {baseline.run_id} is not a run of fidelab eval")
    return before


def compare_with(evaluated: Evaluated, baseline: Report) -> Change:
    """Pair the answers with those of an earlier run, by question.

    Raises:
        MismatchError: If the baseline is not an evaluation, or has no question in common.
    """
    before = answers_of(baseline)
    theirs = before.facts.get("questions")
    theirs = theirs if isinstance(theirs, dict) else {}
    sides: dict[str, tuple[bool, bool]] = {}
    for one in evaluated.questions:
        old, now = theirs.get(one.question.id), _STATES.get(one.state)
        if not isinstance(old, dict) or old.get("digest") != _digest(one.question) or now is None:
            continue
        if isinstance(was := old.get("right"), bool):
            sides[one.question.id] = was, now
    if not sides:
        raise MismatchError(f"the baseline {baseline.run_id} has no answered question in common with this run")
    checks = before.facts.get("checks")
    checks = checks if isinstance(checks, dict) else {}
    return Change(
        lost=tuple(name for name, (was, now) in sides.items() if was and not now),
        gained=tuple(name for name, (was, now) in sides.items() if now and not was),
        both=len(sides),
        broken=tuple(
            check.name for check in evaluated.checks if check.state == "failed" and checks.get(check.name) == "passed"
        ),
    )


def decide_change(change: Change) -> tuple[list[str], list[str]]:
    """Return (faults, open points) of a change: a loss that is shown, and one that is neither shown nor ruled out."""
    faults = [f"{name} passed in the baseline and fails now" for name in change.broken]
    open_ = []
    if len(change.lost) > len(change.gained):
        listed = ", ".join(change.lost[:8]) + (", …" if len(change.lost) > 8 else "")
        counts = f"lost {len(change.lost)} of {change.both}, gained {len(change.gained)} (p = {change.p:.2g}): {listed}"
        if change.p < _SHOWN_P:
            faults.append(counts)
        else:
            open_.append(f"{counts}: neither shown nor ruled out to be a loss")
    return faults, open_


# ------------------------------------------------------------------------------------------------- parts


def _count(results: Iterable[QuestionResult]) -> tuple[int, int]:
    """Right answers, and answers."""
    states = [one.state for one in results if one.state in _STATES]
    return states.count("right"), len(states)


def _share(results: Sequence[QuestionResult], **more: Any) -> Metric:
    right, n = _count(results)
    return ACCURACY(right / n, wilson_interval(right, n), **more)


def _kind_metrics(results: Sequence[QuestionResult], at: Mapping[str, str]) -> Iterator[Metric]:
    right, n = _count(results)
    if n:
        yield _RIGHT(right, cell=dict(at))
        yield _ASKED(n, cell=dict(at))
        yield _share(results, cell=dict(at))


def _flags(evaluated: Evaluated) -> Iterator[Flag]:
    """Remarks on the server, and on a model that answers little while serving works."""
    for note in evaluated.notes:
        yield Flag(kind="server", text=note)
    right, n = _count(evaluated.questions)
    # Small models also end in loops
    failed = {check.name for check in evaluated.checks if check.state == "failed"}
    served = evaluated.checks and failed <= {"loops"}
    if n and served and right < MIN_ACCURACY * n:
        yield Flag(
            kind="small",
            text="Most answers are wrong while serving works. Models below about 1B parameters answer few of these "
            "questions. Compare with a run of the same model that is known to be good: --baseline RUN",
        )


def _cells(evaluated: Evaluated, kinds: Iterable[str]) -> Iterator[Cell]:
    """Kinds of which something was not tested."""
    for kind in kinds:
        left = [one for one in evaluated.of(kind) if one.state not in _STATES]
        if not left:
            continue
        n = len(evaluated.of(kind))
        whole = len(left) == n
        why = left[0].fault if whole else f"{n - len(left)} of {n} asked: {left[0].fault}"
        status = Status.NOT_SUPPORTED if left[0].state == "not tested" else Status.NOT_MEASURABLE
        if whole:
            yield Cell(at={"kind": kind}, status=status, reason=why)
        else:
            yield Cell(
                at={"kind": kind}, status=Status.OK, flags=(Flag(kind=left[0].state.replace(" ", "-"), text=why),)
            )


def _miscalled(results: Sequence[QuestionResult]) -> str:
    """A fault of calls, which a right answer to a question without one would hide."""
    right, n = _count(one for one in results if one.question.check.get("call") != "none")
    return f"{right} of {n} calls right" if n and wilson_interval(right, n)[1] < MIN_ACCURACY else ""


def _beyond(results: Sequence[QuestionResult]) -> str:
    """A loss with the length of the text: found in shorter texts, and in longer ones hardly ever."""
    for context in sorted({one.question.context for one in results})[1:]:
        below, beyond = (
            _count(one for one in results if (one.question.context >= context) is longer) for longer in (False, True)
        )
        found_before = below[1] and below[0] >= _SHOWN_BELOW * below[1]
        if found_before and beyond[1] and wilson_interval(*beyond)[1] < MIN_ACCURACY:
            return (
                f"{beyond[0]} of {beyond[1]} found in texts of about {context:,} tokens and more, "
                f"{below[0]} of {below[1]} in shorter ones"
            )
    return ""


def _tables(evaluated: Evaluated) -> Iterator[TablePlot]:
    if evaluated.checks:
        checks = tuple((check.name, str(check.state), check.detail) for check in evaluated.checks)
        yield TablePlot(title="Serving", columns=("check", "result", "seen"), rows=checks)
    wrong = [one for one in evaluated.questions if one.state == "wrong"]
    if wrong:
        rows = tuple((one.question.id, one.fault, one.answer, _asked(one.question)) for one in wrong)
        yield TablePlot(title="Failed questions", columns=("question", "fault", "answered", "asked"), rows=rows)


def _asked(question: Question) -> str:
    """The end of a question, which holds what is asked for."""
    text = " ".join(str(question.messages[-1]["content"]).split())
    return text if len(text) <= 200 else f"… {text[-198:]}"


def _digest(question: Question) -> str:
    """A word for everything that a right answer depends on."""
    parts = [question.messages, question.check, question.tools, question.image]
    return digest(canonical_json(parts))[:12]
