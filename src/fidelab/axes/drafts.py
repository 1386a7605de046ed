"""Effect of speculative decoding on greedy text, and the acceptance rate of its drafts as the engine counts it.

See docs/metrics/speed.md#acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.core import Arm
from fidelab.core.serial import from_json
from fidelab.metrics.agreement import NEAR_TIE
from fidelab.results.measurement import Flag, Metric
from fidelab.results.speculation import acceptance

COUNTED = "drafts"  # kind of the sentence about drafts
SPECULATION = "speculation"  # in the facts of an answer; kind of the sentence about the text
_MAX_NAMED_TEXTS = 3  # changed texts that the sentence names


def speculated(pair: Pair, forks: Sequence[tuple[int, int, float]]) -> tuple[tuple[Metric, ...], tuple[Flag, ...]]:
    """Return the metrics and sentences of an arm with speculative decoding; empty for other arms.

    ``forks``: for each text that diverges from the reference's, the item, the index, and by how much the reference
    preferred its own token (nats; NaN if one side ends there or the value is not known).
    """
    facts = pair.test.manifest["facts"].get(SPECULATION)
    if facts is None:
        return (), ()
    drafts, drafted, accepted = (int(facts[name]) for name in ("drafts", "drafted", "accepted"))
    metrics = acceptance(drafts, drafted, accepted)
    text = f"speculation ({facts['method']}) drafted no token"
    if metrics:
        length, rate = (metric.value for metric in metrics)
        accepted_share = f"{rate:.0%} of the drafted tokens accepted"
        text = f"speculation ({facts['method']}): {length:.2f} tokens per verification, {accepted_share}"
    return metrics, (Flag(kind=COUNTED, text=text), _text(pair, forks))


def _text(pair: Pair, forks: Sequence[tuple[int, int, float]]) -> Flag:
    """Whether the text is the reference's, up to near ties."""
    count = len(pair.items)
    if not forks:
        return Flag(kind=SPECULATION, text=f"the text is the reference's, token for token, on all {count} prompts")
    ties = [margin for _, _, margin in forks if margin < NEAR_TIE]
    real = sorted((fork for fork in forks if not fork[2] < NEAR_TIE), key=lambda fork: (math.isnan(fork[2]), -fork[2]))
    if not real:
        few = f"{len(ties)} of {count} texts part at near ties (the reference's margin is {max(ties):.2g} nats at most)"
        return Flag(kind=SPECULATION, text=f"{few}, the others are the reference's")
    only = _but_for_speculation(pair.ref) == _but_for_speculation(pair.test)
    who = "speculation changed the text" if only else "the text changes"
    places = "; ".join(
        f"at prompt {item}, token {at}, where "
        + ("one side ends" if math.isnan(margin) else f"the reference preferred its token by {margin:.2g} nats")
        for item, at, margin in real[:_MAX_NAMED_TEXTS]
    )
    more = f"; and in {len(real) - _MAX_NAMED_TEXTS} more texts" if len(real) > _MAX_NAMED_TEXTS else ""
    why = "" if only else "; more than speculation differs: the same configuration without it tells which it was"
    return Flag(kind=SPECULATION, text=f"{who} {places}{more}{why}")


def _but_for_speculation(capture: Capture) -> str:
    """Settings of an arm without the options of speculation."""
    arm = from_json(Arm, capture.manifest["asked"])
    own = (capture.manifest["facts"].get(SPECULATION) or {}).get("options", ())
    return replace(arm, options=tuple((key, value) for key, value in arm.options if key not in own)).fingerprint()
