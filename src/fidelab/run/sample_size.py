"""Sample size: how many windows or prompts a given precision needs, with a finished run as the pilot.

Scores are computed again from the run's captures, and nothing is written.  The result rests on three assumptions: more
windows are like the pilot's, a resampling cluster (document, block of windows, prompt) spans as many windows as in the
pilot, and time and disk grow in proportion.  Half-widths are Student's t on the linearised standard error, for the
pilot and the plan alike, and widened for a mean KL as its interval is.  The intervals of a report differ a little;
those of shares from few clusters differ more, because they need no spread to be wide.

Or, given margins: how many it takes to certify losses below them with probability 0.8, if they are what was measured.

With several contexts, an arm's figures are those of its worst context; windows are counted at the shortest context,
and those of the longer ones grow with them.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fidelab.axes import AXES
from fidelab.axes.base import Axis, AxisScore, SampleSize, part_name, parts_of
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill, Tokens
from fidelab.config.experiment import load
from fidelab.config.load import validate_as
from fidelab.config.schema import Experiment, Limits
from fidelab.core import Status
from fidelab.core.errors import FidelabError, InputError, UnknownNameError, UsageError
from fidelab.inputs.corpus import make_windows
from fidelab.inputs.prompts import load_prompts
from fidelab.inputs.texts import load_text
from fidelab.inputs.tokens import Tokenizer
from fidelab.metrics.equivalence import CLAIM_NAMES, MIN_CLUSTERS, POWER, Claim, Loss, certify
from fidelab.metrics.intervals import MIN_STUDENTIZED_CLUSTERS
from fidelab.metrics.sample_size import (
    ClusterSpread,
    agreement_reach,
    clusters_for,
    clusters_to_agree,
    clusters_to_certify,
    half_width,
    paired_spread,
    ratio_spread,
)
from fidelab.models import resolve
from fidelab.results.record import ArmRecord, Report
from fidelab.results.store import EVENTS, RunFolder
from fidelab.run.conduct import read_outcomes
from fidelab.run.scoring import losses_of

_LEAST = 1e-12  # of a precision: below it, counts of clusters have no meaning


@dataclass(frozen=True)
class Precision:
    """A wanted half-width: in the axis' own unit, or as a share of each candidate's own estimate."""

    value: float
    relative: bool

    @classmethod
    def parse(cls, text: str) -> Precision:
        """``0.001``, or ``5%``.

        Raises:
            UsageError: not a number above 0.
        """
        body = text.strip()
        relative = body.endswith("%")
        try:
            value = float(body.removesuffix("%")) / (100 if relative else 1)
        except ValueError:
            value = math.nan
        if not _LEAST <= value < math.inf:
            raise UsageError(f"--precision {text!r}: write a number above 0, such as 0.001, or a percentage such as 5%")
        return cls(value, relative)

    def of(self, estimate: float) -> float:
        """The half-width that is wanted of this estimate; 0 where it is a share of nothing."""
        return self.value * abs(estimate) if self.relative else self.value


@dataclass(frozen=True)
class SizeLine:
    """One estimate: where it stands, and what the wanted precision takes.

    ``quantity``: the candidate's ``mean`` (trajectory: its score) or its paired ``excess`` over the control; or the key
    of a certificate's claim, whose losses are nats or shares, with ``half_width`` the loss that the pilot would find
    and ``precision`` the margin.
    ``status``: ``needed`` (more than the pilot, and six clusters at least), ``enough`` (the pilot does), ``exact``
    (identical output: nothing to measure) or ``failed``; ``reason`` says why, also where a pilot has too few clusters.
    ``*_upper``: with the upper bound of the pilot's spread.
    """

    arm: str
    quantity: str
    status: Literal["needed", "enough", "exact", "failed"]
    reason: str | None = None
    estimate: float | None = None
    half_width: float | None = None
    precision: float | None = None
    clusters: int | None = None
    clusters_needed: int | None = None
    clusters_upper: int | None = None
    items_needed: int | None = None
    items_upper: int | None = None


@dataclass(frozen=True)
class Supply:
    """Items that the run's own text or prompt set holds."""

    name: str
    holds: int


@dataclass(frozen=True)
class Advice:
    """Run to do next.  ``items`` and ``upper`` are the largest of any line.

    ``seconds``, ``disk_bytes``: of capturing so many items with all arms of the pilot, by proportion.  ``supply`` and
    ``seconds`` are ``None`` where they cannot be known (model or text are gone; the pilot took its captures over),
    ``command`` if the pilot's command cannot be repeated.
    """

    items: int
    upper: int
    flag: str
    command: str | None
    supply: Supply | None
    seconds: float | None
    disk_bytes: int

    @property
    def short(self) -> bool:
        """The run's own text or prompts do not suffice."""
        return self.supply is not None and self.supply.holds < self.items


@dataclass(frozen=True)
class SizePlan:
    """The answer: every estimate of the pilot, and what to run; ``advice`` is ``None`` where the pilot does.

    ``items``: the word for what is counted; ``source``: what more of them are cut from, ``text`` or ``prompts``;
    ``asked``: ``None`` where certificates are planned.
    """

    run_id: str
    axis: str
    unit: str
    items: str
    source: str
    items_now: int
    asked: Precision | None
    lines: tuple[SizeLine, ...]
    advice: Advice | None


def plan_size(
    run_dir: Path, precision: str | None = None, axis: str = "kld", *, limits: Mapping[str, Any] | None = None
) -> SizePlan:
    """Items that a 95% interval of ± ``precision`` needs, or a certificate, by what the run in ``run_dir`` found.

    Args:
        precision: half-width in the axis' own unit (kld: nats, trajectory: points of the score), or ``5%`` of each
            candidate's estimate; its excess over the control is held to the same half-width.
        limits: instead, the margins of certificates (``margin``, ``max_kld``, ``max_flips``) as an experiment has
            them.

    Raises:
        UsageError: a precision or a margin that cannot be, both or neither, or an axis that the run does not have.
        InputError: no finished run, or one from which nothing can be planned; says why.
        CaptureError: a capture is gone or damaged; names it.
    """
    if (precision is None) == (not limits):
        raise UsageError("give either --precision P, or margins of a non-inferiority test: --margin 1%, --max-kld 0.01")
    asked = None if precision is None else Precision.parse(precision)
    folder = RunFolder.open(run_dir.absolute())
    report, experiment = folder.read_report(run_dir), load(folder.config)
    if axis not in experiment.axes:
        raise UnknownNameError("axis of this run", axis, experiment.axes)
    samples = {name: AXES.load(name).sample for name in experiment.axes}
    if samples[axis] is None:
        known = ", ".join(name for name, sample in samples.items() if sample is not None)
        raise UsageError(f"axis {axis} cannot be planned; of this run's axes, plan knows {known or 'none'}")
    pilot = _Pilot(folder, experiment, axis, samples[axis])
    if asked is None:
        lines = tuple(_claims(report, pilot, validate_as(Limits, dict(limits or {}), "limits")))
    else:
        lines = tuple(_lines(report, pilot, asked))
    if all(line.status == "failed" for line in lines):
        raise InputError(f"{run_dir}: nothing to plan from: {lines[0].arm}: {lines[0].reason}")
    more = [line for line in lines if line.status == "needed"]
    advice = _advice(folder, pilot, more, report.command) if more else None
    sample = pilot.sample
    return SizePlan(report.run_id, axis, pilot.unit, sample.items, sample.source, pilot.n_items, asked, lines, advice)


# ---------------------------------------------------------------------------------------------- the pilot


class _Pilot:
    """One axis of a finished run, scored again in memory."""

    def __init__(self, folder: RunFolder, experiment: Experiment, axis: str, sample: SampleSize) -> None:
        self.experiment, self.axis, self.sample = experiment, axis, sample
        self.results = {result.role: result for result in read_outcomes(folder)[0]}
        cls: type[Axis] = AXES.load(axis)
        self.unit = cls.excess.unit
        self._scorer = cls(cls.Settings.model_validate(experiment.axes[axis]))
        self._reference = self._captures("reference")

    @property
    def reference(self) -> Capture:
        """The reference's answers; of several contexts, to the shortest."""
        return min(self._reference.values(), key=lambda capture: len(capture.request.items()[0]))

    @property
    def items(self) -> list[Tokens]:
        """Windows or prompts; windows of a context are in several captures."""
        asked, first = self.reference.request.items(), len(self.reference.request.items()[0])
        if not isinstance(self.reference.request, Prefill):
            return [*asked]
        every = [capture.request.items() for capture in self._reference.values()]
        return [window for windows in every if len(windows[0]) == first for window in windows]

    @property
    def n_items(self) -> int:
        """Number of items."""
        return len(self.items)

    def score(self, role: str) -> AxisScore:
        """The arm of this role against the reference."""
        captures = self._captures(role)
        pairs = {part: Pair.match(ref, captures[part]) for part, ref in self._reference.items() if part in captures}
        if pairs.keys() != self._reference.keys():
            raise InputError(f"the run's {role} has no answer on part of axis {self.axis}")
        return self._scorer.score_parts(pairs, self.experiment.seed)

    def _captures(self, role: str) -> dict[str, Capture]:
        result = self.results.get(role)
        found = {} if result is None else parts_of(self.axis, result.captures)
        if result is None or not found:
            why = None if result is None else result.failures.get(self.axis) or result.reason
            raise InputError(f"the run's {role} has no answer on axis {self.axis}: {why or 'no capture'}")
        return {part: Capture(path) for part, path in found.items()}


def _why_not(arm: ArmRecord, axis: str) -> str | None:
    """Reason why an arm has nothing to plan from on this axis."""
    found = arm.axes.get(axis)
    if arm.status in (Status.NOT_ENGAGED, Status.NOT_SUPPORTED):
        return arm.reason
    if found is None:
        return arm.reason or "no figures on this axis"
    return None if found.measured else found.reason


def _lines(report: Report, pilot: _Pilot, asked: Precision) -> Iterator[SizeLine]:
    control = None
    if report.control is not None and _why_not(report.control, pilot.axis) is None:
        control = pilot.score("control")
    for arm in report.candidates:
        reason = _why_not(arm, pilot.axis)
        if reason is not None:
            yield SizeLine(arm.name, "mean", "failed", reason)
            continue
        score = pilot.score(f"candidate:{arm.name}")
        # equal tokens alone do not show equal output: a few prompts more may differ
        if score.identical and _same_distributions(arm):
            yield SizeLine(arm.name, "mean", "exact")
        else:
            yield from _candidate(arm.name, score, control, asked, pilot.n_items)


def _claims(report: Report, pilot: _Pilot, limits: Limits) -> Iterator[SizeLine]:
    """The claims of all candidates' certificates."""
    for arm in report.candidates:
        reason = _why_not(arm, pilot.axis)
        losses = [] if reason else losses_of(pilot.axis, pilot.score(f"candidate:{arm.name}"), limits)
        if not losses:
            yield SizeLine(arm.name, "certificate", "failed", reason or "has no non-inferiority test on this axis")
            continue
        one = certify(losses, seed=pilot.experiment.seed)
        if one.state == "exceeded":
            [shown, *_] = (claim for claim in one.claims if claim.state == "exceeded")
            reason = f"{CLAIM_NAMES[shown.key]} at or beyond the margin is shown: no sample size confirms it"
            said = (shown.estimate, shown.detectable, shown.margin, shown.clusters)
            yield SizeLine(arm.name, shown.key, "failed", reason, *said)
            continue
        for claim, loss in zip(one.claims, losses, strict=True):
            yield _claim(arm.name, claim, loss, pilot.n_items)


def _claim(arm: str, claim: Claim, loss: Loss, n: int) -> SizeLine:
    said = (claim.estimate, claim.detectable, claim.margin, claim.clusters)
    if claim.state == "holds":
        return SizeLine(arm, claim.key, "enough", None, *said)
    if claim.estimate is not None and claim.estimate >= claim.margin:
        reason = f"{CLAIM_NAMES[claim.key]}: the loss is not below the margin: more data would not confirm it"
        return SizeLine(arm, claim.key, "failed", reason, *said)
    if claim.estimate is None or loss.spread is None or claim.detectable is None:
        reason = "a single cluster says nothing about spread: make a pilot with more windows or prompts"
        return SizeLine(arm, claim.key, "failed", f"{CLAIM_NAMES[claim.key]}: {reason}", *said)
    note = None
    if claim.clusters_needed is None:  # no cluster differs: the exact bound is nearly as 1 over their number
        note = f"{CLAIM_NAMES[claim.key]}: no cluster differs yet; the figure holds if none does"
        upper = needed = max(math.ceil(claim.clusters * claim.detectable / claim.margin), MIN_CLUSTERS)
    else:
        needed = claim.clusters_needed
        room = claim.margin - max(claim.estimate, 0.0)
        upper = clusters_to_certify(loss.spread.upper_sd(), room, loss.level, POWER, cost=loss.cautious)
    needed = max(needed, claim.clusters + 1)
    upper = max(upper, needed)
    items = (math.ceil(clusters * n / claim.clusters) for clusters in (needed, upper))
    return SizeLine(arm, claim.key, "needed", note, *said, needed, upper, *items)


def _same_distributions(arm: ArmRecord) -> bool:
    identical = (axis for axis, found in arm.axes.items() if found.status is Status.IDENTICAL)
    return any(AXES.load(axis).distributions for axis in identical)


def _candidate(name: str, score: AxisScore, control: AxisScore | None, asked: Precision, n: int) -> Iterator[SizeLine]:
    spread = ratio_spread(score.items(), score.scale)
    agree = spread is not None and score.proportion and spread.estimate / score.scale in score.bounds
    precision = 0.0 if spread is None else asked.of(spread.estimate)
    cost = score.bounds == (0.0, math.inf)
    yield _line(name, "mean", spread, precision, n, score.scale if agree else None, cost=cost)
    control = None if control is None else control.at(score.part)
    if spread is None or precision == 0 or control is None:
        return
    paired = paired_spread(score.items(control.usable), control.items(score.usable), score.scale)
    tied = paired is not None and score.proportion and paired.sd == 0
    # a share of the candidate's own estimate, not of the excess: an excess of nearly 0 would ask for millions
    yield _line(name, "excess", paired, precision, n, score.scale if tied else None)


def _line(
    arm: str,
    quantity: Literal["mean", "excess"],
    spread: ClusterSpread | None,
    precision: float,
    n: int,
    agree: float | None,
    *,
    cost: bool = False,
) -> SizeLine:
    """``agree``: the scale of a share whose clusters all agree; ``n``: the pilot's items; ``cost``: never negative."""
    if spread is None:
        reason = (
            "the pilot has a single cluster (document, block of windows, prompt), and one says nothing about spread"
        )
        return SizeLine(arm, quantity, "failed", f"{reason}: make a pilot with more windows or prompts")
    if precision == 0:
        return SizeLine(arm, quantity, "failed", "a percentage of an estimate of 0 is 0: give --precision as a number")
    if agree is None:
        reach = half_width(spread.sd, spread.clusters, cost=cost)
        clusters, upper = (clusters_for(sd, precision, cost=cost) for sd in (spread.sd, spread.upper_sd()))
    else:
        reach = agree * agreement_reach(spread.clusters)
        clusters = upper = clusters_to_agree(precision / agree)
    per_cluster = n / spread.clusters
    few = ""
    if spread.clusters < MIN_STUDENTIZED_CLUSTERS:
        clusters, upper = max(clusters, MIN_STUDENTIZED_CLUSTERS), max(upper, MIN_STUDENTIZED_CLUSTERS)
        few = (
            f"{spread.clusters} clusters do not tell how far clusters differ: nothing from fewer than "
            f"{MIN_STUDENTIZED_CLUSTERS} is called precise"
        )
    return SizeLine(
        arm,
        quantity,
        "enough" if reach <= precision and not few else "needed",
        few or None,
        spread.estimate,
        reach,
        precision,
        spread.clusters,
        clusters,
        upper,
        math.ceil(clusters * per_cluster),
        math.ceil(upper * per_cluster),
    )


# ------------------------------------------------------------------------------------------------ advice


def _advice(folder: RunFolder, pilot: _Pilot, lines: Sequence[SizeLine], command: str) -> Advice:
    items = max(line.items_needed or 0 for line in lines)
    factor = items / pilot.n_items
    captures = {role: parts for role, r in pilot.results.items() if (parts := parts_of(pilot.axis, r.captures))}
    asked = {role: {part_name(pilot.axis, part) for part in parts} for role, parts in captures.items()}
    folders = {path for parts in captures.values() for path in parts.values()}
    supply = _supply(pilot)
    short = supply is not None and supply.holds < items
    text = pilot.sample.source == "text" and pilot.experiment.text == "default"
    return Advice(
        items=items,
        upper=max(line.items_upper or 0 for line in lines),
        flag=pilot.sample.flag,
        command=_command(command, pilot, items, "wikitext-2" if short and text else None),
        supply=supply,
        seconds=_seconds(folder, pilot.axis, asked, factor),
        disk_bytes=math.ceil(factor * sum(Capture(path, verify=False).bytes for path in folders)),
    )


def _supply(pilot: _Pilot) -> Supply | None:
    """Size of the run's text or prompt set, if it is still the one of the pilot."""
    experiment, request = pilot.experiment, pilot.reference.request
    if experiment.traffic is not None:
        return None
    asked: dict[str, Any] = dict(request.settings)
    try:
        tokenizer = Tokenizer.load(resolve(pilot.results["reference"].arm.path))
        if isinstance(request, Prefill):
            n_ctx, stride, n = asked["n_ctx"], asked["stride"], pilot.n_items
            text = load_text(experiment.text, tokenizer)
            cut = make_windows(tokenizer, text, n_ctx, n, asked["protocol"], stride, asked["place"])
            same, name = sorted(cut.windows) == sorted(pilot.items), f"text {experiment.text}"
            holds = (cut.text_tokens - n_ctx) // stride + 1
        else:
            prompts = load_prompts(None if experiment.prompts == "default" else Path(experiment.prompts))
            first = tokenizer.chat(prompts[0].messages, "raw" if asked["template"] == "raw" else "chat")
            same, name = first == request.items()[0], f"prompt set {experiment.prompts}"
            holds = len(prompts)
    except (FidelabError, KeyError, OSError):  # the answer stands without it
        return None
    return Supply(name, holds) if same else None


def _seconds(folder: RunFolder, axis: str, roles: Mapping[str, Set[str]], factor: float) -> float | None:
    """Model loads as in the pilot, captures of this axis by proportion; the other axes' captures are kept.

    ``roles``: role → its captures of this axis.
    """
    loads: dict[str, float] = {}
    captured: dict[str, dict[str, float]] = {}
    with contextlib.suppress(OSError, ValueError):  # lines that cannot be read are left out: this is an estimate
        for line in (folder.path / EVENTS).read_text("utf-8").splitlines():
            match json.loads(line):
                case {"event": "opened", "role": str(role), "seconds": float(seconds)}:
                    loads[role] = seconds
                case {"event": "captured", "role": str(role), "axis": str(part), "seconds": float(seconds)} if (
                    part.partition(".")[0] == axis
                ):
                    captured.setdefault(role, {})[part] = seconds
    if not all(role in loads and captured.get(role, {}).keys() == roles[role] for role in roles):
        return None
    return sum(loads[role] + factor * sum(captured[role].values()) for role in roles)


def _command(command: str, pilot: _Pilot, items: int, text: str | None) -> str | None:
    """The run's own command with the new number, and another text; None if it was not a known command."""
    if not command.startswith("fidelab compare "):
        return None
    words = shlex.split(command)
    if {"-f", "--file"} & {*words}:
        setting = f"axes.{pilot.axis}.{pilot.sample.setting}={items}"
        settings = [setting, *([] if text is None else [f"text={text}"])]
        return shlex.join([*words, *(word for setting in settings for word in ("--set", setting))])
    words = _with_flag(words, pilot.sample.flag, str(items))
    return shlex.join(words if text is None else _with_flag(words, "--text", text))


def _with_flag(words: Sequence[str], flag: str, value: str) -> list[str]:
    """The words with ``flag value`` at their end, instead of wherever it was."""
    kept, skip = [], False
    for word in words:
        if not (skip or word == flag or word.startswith(f"{flag}=")):
            kept.append(word)
        skip = word == flag and not skip
    return [*kept, flag, value]
