"""Speculative decoding: whether its speed-up and quantization's multiply.  See docs/metrics/speed.md#speculation.

With S the output rate over that of the plain arm, ρ = S_both / (S_quantized · S_speculative)
= r_both · r_plain / (r_quantized · r_speculative).  Repeats of a rate are averaged as logarithms (geometric mean).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fidelab.metrics.change import welch_reach

CompositionKind = Literal["sub-multiplicative", "multiplicative", "super-multiplicative", "cannot tell"]

ARMS = ("plain", "quantized", "speculative", "both")
_SUB, _SUPER = 0.9, 1.1  # below and above: the speed-ups do not multiply


@dataclass(frozen=True)
class Composed:
    """ρ, its 95% interval (``None`` where an arm was measured once), and the rates (tok/s) of :data:`ARMS`.

    See docs/metrics/speed.md#speculation.
    """

    rho: float
    interval: tuple[float, float] | None
    rates: tuple[float, float, float, float]

    @property
    def kind(self) -> CompositionKind:
        """Kind on which both ends of the interval agree; ``cannot tell`` if they differ or there is no interval."""
        if self.interval is None:
            return "cannot tell"
        low, high = map(_kind, self.interval)
        return low if low == high else "cannot tell"


def compose(
    plain: Sequence[float], quantized: Sequence[float], speculative: Sequence[float], both: Sequence[float]
) -> Composed:
    """Compute ρ from the repeats of each arm's output rate (tok/s). The numbers of repeats may differ.

    The interval: log ρ is a sum of four independent means, whose variance is Σ sᵢ²/nᵢ; Student's t with the degrees of
    freedom of Welch and Satterthwaite, (Σ sᵢ²/nᵢ)² / Σ (sᵢ²/nᵢ)²/(nᵢ − 1).  A bootstrap of three to five repeats would
    be less reliable.  Repeats that agree to the last bit have an interval of width zero.  See
    docs/metrics/speed.md#speculation.

    Raises:
        ValueError: If an arm has no rate, or a rate is not positive and finite.
    """
    logs = []
    for arm, rates in zip(ARMS, (plain, quantized, speculative, both), strict=True):
        if not len(rates) or not all(rate > 0 and math.isfinite(rate) for rate in rates):
            raise ValueError(f"the rates of {arm} are positive and finite, not {list(rates)}")
        logs.append(np.log(np.asarray(rates, dtype=np.float64)))
    a, b, c, d = (float(values.mean()) for values in logs)
    center, rates = a - b - c + d, (math.exp(a), math.exp(b), math.exp(c), math.exp(d))
    if min(map(len, logs)) < 2:
        return Composed(math.exp(center), None, rates)
    reach = welch_reach(logs)
    return Composed(math.exp(center), (math.exp(center - reach), math.exp(center + reach)), rates)


def _kind(rho: float) -> CompositionKind:
    return "sub-multiplicative" if rho < _SUB else "super-multiplicative" if rho > _SUPER else "multiplicative"
