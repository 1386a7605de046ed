"""A deterministic engine with known distributions: analytic oracles for every axis, and misbehaviour on demand.

KV names are the behaviours: ``exact`` is the reference; ``tilt[q=...]`` and ``decay[b=...]`` move the distribution by
a divergence with a closed form; others break in a stated way.  Engine options: ``family`` (two-level, geometric),
``vocab``, ``delay`` (seconds per item), ``crash`` / ``hang`` (``n`` or ``LABEL:n``: at item n of all arms or of one),
``mask`` (on: the last id is impossible in every arm), ``estimator`` (hidden, logprobs).

Families over V tokens (parameters of the reference in brackets):

- ``two-level`` [p = 0.5]: probability p spread evenly over the first V/2 ids, 1 - p over the rest.
  ``tilt[q]``: the same with q.  KL = p ln(p/q) + (1-p) ln((1-p)/(1-q)).
- ``geometric`` [a = 0.5]: P(x) ∝ exp(-a x), x = 0 … V-1.  ``decay[b]``: Q(x) ∝ exp(-b x).
  KL = ln(Z_b / Z_a) + (b - a) E_P[x].
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fidelab.core import Arm, Estimator, Forced, Generate, KVSpec, Prefill, Probe
from fidelab.engines.base import Answer, Engine, Ran, Sink, Verdict
from fidelab.errors import EngineError, NotSupportedError, UsageError

__all__ = ["FakeEngine"]

_KV = {
    "exact": (),
    "tilt": ("q",),
    "decay": ("b",),
    "nan-row": ("item", "row"),
    "small-vocab": ("cut",),
    "masked": (),
    "missing": (),
    "fork": ("at", "every"),
    "garbage": (),
    "silent": (),
    "refused": (),
}
_OPTIONS = ("family", "vocab", "delay", "crash", "hang", "estimator", "mask")



class FakeEngine(Engine):
    """See the module's docstring."""

    name: ClassVar[str] = "fake"

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"fake": "1"}

    @classmethod
    def kv_names(cls) -> Sequence[str]:
        return list(_KV)

    @classmethod
    def check_kv(cls, kv: KVSpec) -> None:
        for side in (kv.k, kv.v):
            for key, _ in side.options:
                if key not in _KV[side.name]:
                    raise UsageError(f"KV format {kv.label!r}: {side.name} has no option {key!r}")

    @classmethod
    def supports(cls, arm: Arm) -> Verdict:
        for key, _ in arm.options:
            if key not in _OPTIONS:
                raise UsageError(f"engine fake has no option {key!r}; it has: {', '.join(_OPTIONS)}")
        if arm.kv.k.name == "refused":
            return Verdict(False, "the fake engine refuses this format, as it was asked to")
        return Verdict(True)

    def open(self, arm: Arm) -> None:
        self._arm = arm
        options = dict(arm.options)
        self._family = options.get("family", "two-level")
        if self._family not in ("two-level", "geometric"):
            raise EngineError(f"engine fake: family {self._family!r} is not two-level or geometric")
        self._vocab = int(options.get("vocab", "256"))
        self._delay = float(options.get("delay", "0"))
        self._crash = _first(options.get("crash"), arm)
        self._hang = _first(options.get("hang"), arm)
        self._estimator = Estimator(options.get("estimator", "logprobs"))
        self._mask = options.get("mask") == "on"
        self._kv = arm.kv.k.name
        self._knobs = {key: float(value) for key, value in arm.kv.k.options}

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def answer(self, probe: Probe, sink: Sink) -> Answer:
        if isinstance(probe, Prefill | Forced):
            rows = probe.n_rows if isinstance(probe, Prefill) else 0
            for item, tokens in enumerate(probe.items()):
                self._misbehave(item)
                n = rows or len(probe.continuations[item])  # type: ignore[union-attr]
                sink.add(item, self._stored(np.broadcast_to(self._logits(), (n, self._width)).copy(), item))
                sink.progress(len(tokens))
        elif isinstance(probe, Generate):
            for item, prompt in enumerate(probe.prompts):
                self._misbehave(item)
                ids = self._trajectory(probe, item)
                arrays = self._stored(self._generated_rows(ids), -1)
                sink.add(item, {"ids": np.asarray(ids, dtype=np.int32), **arrays})
                if not ids:
                    sink.fail(item, "empty output")
                sink.progress(len(prompt) + len(ids))
        else:
            raise NotSupportedError(f"engine fake does not answer {probe.kind} probes")
        if self._estimator is Estimator.HIDDEN:
            return Answer(Estimator.HIDDEN, head={"weight": np.eye(self._width, dtype=np.float32)})
        return Answer(self._estimator)

    def ran(self) -> Ran:
        engaged = self._kv != "silent"  # a format that was accepted and ignored
        return Ran(
            versions=self.versions(),
            device="cpu",
            attention="none",
            k_format=str(self._arm.kv.k) if engaged else "exact",
            v_format=str(self._arm.kv.v) if engaged else "exact",
            k_dtype="float64",
            v_dtype="float64",
            cache_bytes_per_token=16.0,
            expected_bytes_per_token=16.0,
        )

    # -------------------------------------------------------------------------------- distributions

    @property
    def _width(self) -> int:
        return self._vocab - int(self._knobs.get("cut", 16)) if self._kv == "small-vocab" else self._vocab

    def _logits(self) -> NDArray[np.float64]:
        """Log-probabilities [V] of this arm."""
        v = self._vocab
        if self._family == "two-level":
            p = self._knobs.get("q", 0.6) if self._kv == "tilt" else 0.5
            half = v // 2
            logits = np.where(np.arange(v) < half, np.log(p / half), np.log((1 - p) / (v - half)))
        else:
            rate = self._knobs.get("b", 0.6) if self._kv == "decay" else 0.5
            logits = -rate * np.arange(v)
            logits = logits - np.log(np.exp(logits).sum())
        if self._kv == "garbage":
            logits = logits[::-1] * 3.0
        if self._mask:
            logits = np.append(logits[:-1] - np.log1p(-np.exp(logits[-1])), -np.inf)
        if self._kv == "masked":  # an impossible token, possible in the reference: P > 0 where Q = 0
            logits = np.where(np.arange(v) == v - 1, -np.inf, logits)
        return np.asarray(logits[: self._width])

    def _stored(self, rows: NDArray[np.float64], item: int) -> dict[str, NDArray[np.generic]]:
        if self._kv == "nan-row" and item == int(self._knobs.get("item", 0)):
            rows[int(self._knobs.get("row", 0))] = np.nan
        if self._estimator is Estimator.HIDDEN:
            return {"hidden": rows.astype(np.float32)}
        return {"logprobs": rows.astype(np.float32)}

    # --------------------------------------------------------------------------------- trajectories

    def _trajectory(self, probe: Generate, item: int) -> list[int]:
        """Reference: ids counting up from a number that the prompt sets; ``fork[at=n, every=m]``: every m-th prompt differs from index n on."""
        start = sum(probe.prompts[item])
        ids = [1 + (start + step) % 250 for step in range(probe.max_tokens)]
        if self._kv == "missing":
            return []
        if self._kv == "garbage":
            return [7] * probe.max_tokens
        every = int(self._knobs.get("every", 1))
        if self._kv == "fork" and item % every == 0:
            at = int(self._knobs.get("at", 5))
            ids = [*ids[:at], *(251 + step % 4 for step in range(probe.max_tokens - at))]
        return ids

    def _generated_rows(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """One row per generated token: half the mass on it, a quarter of it on the next id, the rest even."""
        v = self._width
        rows = np.full((len(ids), v), 0.375 / (v - 2))
        for step, token in enumerate(ids):
            rows[step, token % v] = 0.5
            rows[step, (token + 1) % v] = 0.125
        return np.log(rows)

    def _misbehave(self, item: int) -> None:
        if self._delay:
            time.sleep(self._delay)
        if item == self._crash:
            print("fake engine: crashing as asked", flush=True)
            os.abort()
        if item == self._hang:
            time.sleep(3600)


def _first(value: str | None, arm: Arm) -> int | None:
    """``n`` (any arm) or ``label:n`` (only the arm with this KV label): the item at which to misbehave."""
    if value is None:
        return None
    label, _, number = value.rpartition(":")
    return int(number) if label in ("", arm.kv.label) else None
