"""Gain of speculation, forecast from the captures of a draft model.  See docs/metrics.md#acceptance."""

from __future__ import annotations

from collections.abc import Iterable

from fidelab.axes.drafts import COUNTED, SPECULATION, drafted_by, in_words
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.core.errors import FidelabError
from fidelab.engines import ENGINES
from fidelab.results.measurement import Flag, Measurement
from fidelab.run.pairing import ArmResult

_ROWS = "forced.kl"  # the captures with rows along the reference's text


def with_forecast(found: Measurement, arm: ArmResult, reference: ArmResult, others: Iterable[ArmResult]) -> Measurement:
    """An arm's greedy text with the forecast for its draft model, where another arm of the run is that model.

    ``found``: what axis trajectory found on ``arm``.  Axis forced has the rows of both models along the reference's
    text.  Without such an arm, or such rows, a sentence says what gives a forecast.
    """
    speculation = ENGINES.load(arm.arm.engine).speculation(dict(arm.arm.options)) if arm.arm.draft else None
    if speculation is None or not found.measured:
        return found
    ran = (arm.ran or {}).get(SPECULATION) or {}
    tokens = speculation.tokens or ran.get("tokens")
    same = [other for other in (reference, *others) if other.arm.path == arm.arm.draft and not _speculates(other)]
    rows = next((other.captures[_ROWS] for other in same if _ROWS in other.captures), None)
    if rows is None or _ROWS not in reference.captures or not tokens:
        arms = f"--candidate model={speculation.draft} --axes trajectory,forced"
        hint = f"a forecast takes the draft model as an arm beside it: {arms}"
        return found.model_copy(update={"flags": (*found.flags, Flag(kind=COUNTED, text=hint))})
    try:
        forecast = drafted_by(Pair.match(Capture(reference.captures[_ROWS]), Capture(rows)), int(tokens))
    except FidelabError as error:
        return found.model_copy(update={"flags": (*found.flags, Flag(kind=COUNTED, text=f"no forecast: {error}"))})
    metrics = (*found.metrics, *forecast)
    said = Flag(kind=COUNTED, text=in_words(speculation.method, metrics))
    flags = tuple(said if flag.kind == COUNTED else flag for flag in found.flags)
    return found.model_copy(update={"metrics": metrics, "flags": flags})


def _speculates(result: ArmResult) -> bool:
    return ENGINES.load(result.arm.engine).speculation(dict(result.arm.options)) is not None
