"""A deterministic engine with known distributions: analytic oracles for every axis, and misbehaviour on demand.

KV names are the behaviours; K decides.

- ``exact``: the reference.
- ``tilt[q=0.6]``, ``decay[b=0.6]``: another distribution, at a divergence with a closed form (below).
  ``tilt[q=0.6,every=3]``: only in windows whose ids add up to a multiple of m; a tenth of q - 0.5 in the others.
  ``tilt[q=0.6,from=4096]``: only at positions from there on; ``tilt[q=0.6,has=126]``: only in windows with that id;
  a tenth of q - 0.5 elsewhere.  ``decay`` takes both, too.
  ``tilt[q=0.6,bytes=8]``: with a cache of so many bytes per token, 16 by default.
- ``fork[at=5,every=1]``: every m-th prompt leaves the reference's path at index n; ``short[at=5,every=1]`` stops there.
- ``nan-row[item=0,row=0]``: one row of one window is NaN.  ``small-vocab[cut=16,q=0.5]``: the last ids are
  missing, after a tilt.
- ``masked``: the last id is impossible, which it is not in the reference.  ``missing``: no token is generated.
- ``forget[every=1]``: every m-th prompt finds no rule in ``answers``.
- ``garbage``: other tokens and another distribution.  ``silent``: accepted and ignored.  ``refused``: not supported.

Engine options: ``family`` (two-level, geometric), ``vocab`` (at least 256: the tokenizer's ids are bytes), ``delay``
(seconds per item), ``crash`` / ``hang`` (``n`` or ``LABEL:n``: at item n of all arms, or of one), ``mask`` (on: the
last id is impossible in every arm), ``estimator`` (hidden, logprobs), ``margin`` (nats between the generated token and
the next best one, which is what a fork takes), ``answers`` (a JSON file of ``[text, answer]`` pairs: a prompt is
answered by the first pair whose text it contains, and the answer ends with id 0), ``noise`` (the only random
part: independent Gaussian noise with this standard deviation in nats on every logit of the rows of Prefill, Served and
Forced, from the operating system's randomness, so new in each process; generated text does not change).
``bend`` (``x`` or ``LABEL:x``: family two-level gives its first half log-odds that are x nats higher, in all arms or in
those of one KV label: a fault of the path, alone or together with a format).
``predicts`` (on: in the rows of Prefill the actual next token and id 0 change places, so that family geometric predicts
the text; no divergence changes).
``parts`` (``WAY:n`` or ``LABEL:WAY:n``: from position n on this serving mode gives another distribution, in all arms or
in those of one KV label) and ``lacks`` (a serving mode whose counts prove nothing).
Times are computed, not measured: 1,024 tok/s of prefill, 64 tok/s of decode per sequence, whatever the batch.

Families over V tokens (parameters of the reference in brackets):

- ``two-level`` [p = 0.5]: probability p spread evenly over the first V/2 ids, 1 - p over the rest.
  ``tilt[q]``: the same with q.  KL = p ln(p/q) + (1-p) ln((1-p)/(1-q)).
- ``geometric`` [a = 0.5]: P(x) ∝ exp(-a x), x = 0 … V-1.  ``decay[b]``: Q(x) ∝ exp(-b x).
  KL = ln(Z_b / Z_a) + (b - a) E_P[x].
"""

from __future__ import annotations

import bisect
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.requests import WAYS, Forced, Generate, Prefill, Request, Served, Timed
from fidelab.core import Arm, Estimator, KVSpec
from fidelab.core.errors import UsageError
from fidelab.core.runtime import RuntimeInfo
from fidelab.engines.base import Answer, Engine, Sink, Support, add_sequence
from fidelab.engines.harmless import Everything, Harmless
from fidelab.engines.timing import groups

Floats = NDArray[np.float64]


def _number(kind: type[float] | type[int], low: float, high: float = math.inf) -> Callable[[str], bool]:
    """Whether a text is a number of this kind, at least ``low`` and below ``high``."""
    return lambda text: low <= kind(text) < high


_ABOVE_0 = math.ulp(0.0)  # the smallest float above 0
_share, _positive, _duration = _number(float, _ABOVE_0, 1.0), _number(float, _ABOVE_0), _number(float, 0.0)
_index, _count = _number(int, 0), _number(int, 1)


def _place(text: str) -> bool:
    return int(text.rpartition(":")[2]) >= 0


def _one_of(*names: str) -> Callable[[str], bool]:
    return lambda text: text in names


_Checks = Mapping[str, Callable[[str], bool]]
_KV: Mapping[str, _Checks] = {
    "exact": {},
    "tilt": {"q": _share, "every": _count, "from": _index, "has": _index, "bytes": _count},
    "decay": {"b": _positive, "from": _index, "has": _index, "bytes": _count},
    "fork": {"at": _index, "every": _count},
    "short": {"at": _index, "every": _count},
    "nan-row": {"item": _index, "row": _index},
    "small-vocab": {"cut": lambda text: 1 <= int(text) <= 64, "q": _share},
    "masked": {},
    "missing": {},
    "forget": {"every": _count},
    "garbage": {},
    "silent": {},
    "refused": {},
}
_OPTIONS: _Checks = {
    "family": _one_of("two-level", "geometric"),
    "vocab": lambda text: 256 <= int(text) <= 1 << 18,
    "delay": _duration,
    "crash": _place,
    "hang": _place,
    "estimator": _one_of("hidden", "logprobs"),
    "mask": _one_of("on", "off"),
    "margin": _positive,
    "noise": _positive,
    "answers": lambda text: Path(text).is_file(),
    "bend": lambda text: math.isfinite(float(text.rpartition(":")[2])),
    "parts": lambda text: text.split(":")[-2] in WAYS and int(text.rpartition(":")[2]) >= 0,
    "lacks": _one_of(*WAYS),
    "predicts": _one_of("on", "off"),
}
_PREFILL, _DECODE = 2.0**-10, 2.0**-6  # seconds per token
_MARGIN = math.log(4.0)  # nats: half the mass on the generated token, an eighth on the next one


class FakeEngine(Engine):
    """See the module's docstring."""

    name: ClassVar[str] = "fake"
    harmless: ClassVar[Mapping[str, Harmless]] = Everything(
        "the stand-in for tests loads no code, and refuses options that it does not know"
    )
    native_kv: ClassVar[str] = "exact"
    preload: ClassVar[tuple[str, ...]] = ("fidelab.engines.fake",)
    start_seconds: ClassVar[float] = 0.5
    estimator: ClassVar[Estimator] = Estimator.LOGPROBS
    kinds: ClassVar[frozenset[str]] = Engine.kinds | {"served"}
    ways: ClassVar[frozenset[str]] = frozenset(WAYS)

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"fake": "1"}

    @classmethod
    def kv_names(cls) -> Sequence[str]:
        return list(_KV)

    @classmethod
    def check_kv(cls, kv: KVSpec) -> None:
        for side in (kv.k, kv.v):
            _check(f"KV format {kv.label!r}: {side.name}", dict(side.options), _KV[side.name])

    @classmethod
    def supports(cls, arm: Arm) -> Support:
        options = dict(arm.options)
        _check("engine fake", options, _OPTIONS)
        if options.get("mask") == "on" and options.get("estimator") == "hidden":
            raise UsageError("engine fake: no hidden state gives the logit -inf; give mask=on or estimator=hidden")
        if "bend" in options and options.get("family", "two-level") != "two-level":
            raise UsageError("engine fake: bend applies only to family two-level")
        if arm.kv.k.name == "refused":
            return Support(False, "the fake engine refuses this format, as it was asked to")
        return Support(True)

    @classmethod
    def lossless(cls, arm: Arm) -> bool | None:
        family = dict(arm.options).get("family", "two-level")
        return (family, arm.kv.k.name) not in (("two-level", "tilt"), ("geometric", "decay"))

    def open(self, arm: Arm) -> None:
        self.mark("import")
        self.mark("weights")
        self._arm = arm
        options = dict(arm.options)
        self._family = options.get("family", "two-level")
        self._vocab = int(options.get("vocab", "256"))
        self._delay = float(options.get("delay", "0"))
        self._crash = _first(options.get("crash"), arm)
        self._hang = _first(options.get("hang"), arm)
        self._estimator = Estimator(options.get("estimator", "logprobs"))
        self._mask = options.get("mask") == "on"
        self._margin = float(options.get("margin", _MARGIN))
        self._noise = float(options.get("noise", "0"))
        self._bend = float(_for(options.get("bend", "0"), arm) or 0)
        way, _, place = (_for_way(options.get("parts", ""), arm) or "").rpartition(":")
        self._parts = (way, int(place or 0))
        self._lacks = options.get("lacks", "")
        self._predicts = options.get("predicts") == "on"
        self._random = np.random.default_rng(int.from_bytes(os.urandom(16)))
        self._answers: list[tuple[str, str]] = []
        if "answers" in options:
            self._answers = json.loads(Path(options["answers"]).read_text("utf-8"))
        self._kv = arm.kv.k.name
        self._knobs = {key: float(value) for key, value in arm.kv.k.options}

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def answer(self, request: Request, sink: Sink) -> Answer:
        facts = {}
        if isinstance(request, Prefill | Forced | Served):
            logits = self._logits()
            every = int(self._knobs["every"]) if self._kv == "tilt" and "every" in self._knobs else 1
            planted = self._kv in ("tilt", "decay") and {"every", "from", "has"} & self._knobs.keys()
            changed = self._knobs.get("q" if self._kv == "tilt" else "b", 0.6)
            gentle = self._logits(0.5 + 0.1 * (changed - 0.5)) if planted else logits
            if isinstance(request, Served):
                facts = self._counts(request)
            for item, tokens in enumerate(request.items()):
                self._misbehave(item)
                own = request.rows_of(item) if isinstance(request, Prefill) else ()
                n = len(own) or (len(request.continuations[item]) if isinstance(request, Forced) else request.n_rows)
                here = gentle if sum(tokens) % every else logits
                if planted and "has" in self._knobs and int(self._knobs["has"]) not in tokens:
                    here = gentle
                rows = self._noisy(np.broadcast_to(here, (n, len(logits))))
                if start := int(self._knobs.get("from", 0)):
                    rows[: bisect.bisect_left(own, start)] = gentle
                if self._predicts and isinstance(request, Prefill):
                    for row, target in enumerate(tokens[i + 1] for i in own if i + 1 < len(tokens)):
                        rows[row, [0, target]] = rows[row, [target, 0]]
                if self._kv == "nan-row" and item == int(self._knobs.get("item", 0)):
                    rows[int(self._knobs.get("row", 0)) % n] = np.nan
                if isinstance(request, Served) and request.way == self._parts[0]:
                    rows[max(0, self._parts[1] - request.first) :] = logits[::-1]
                sink.add(item, self._stored(rows))
                sink.progress(len(tokens))
        elif isinstance(request, Generate):
            for item, prompt in enumerate(request.prompts):
                self._misbehave(item)
                ids = self._trajectory(prompt, item, request.max_tokens)
                stored = self._stored(self._generated_rows(ids)) if request.rows else {}
                add_sequence(sink, item, ids, stored)
                sink.progress(len(prompt) + len(ids), decoded=len(ids))
        elif isinstance(request, Timed):
            for item, group in enumerate(groups(request)):
                self._misbehave(item)
                n_read = sum(map(len, group))
                sink.add(item, {"seconds": _PREFILL * n_read + _DECODE * np.arange(1 + request.n, dtype=np.float64)})
                sink.progress(n_read + request.n * len(group), decoded=request.n * len(group))
        with_rows = request.rows if isinstance(request, Generate) else not isinstance(request, Timed)
        if self._estimator is Estimator.HIDDEN and with_rows:
            return Answer(Estimator.HIDDEN, head={"weight": np.eye(self._width, dtype=np.float32)}, facts=facts)
        return Answer(self._estimator, facts=facts)

    def _counts(self, request: Served) -> dict[str, Any]:
        if request.way == self._lacks:
            return {"not_engaged": f"the fake engine counts no {request.way}, as it was asked to"}
        return {"engaged": {"windows": len(request.windows)}}

    def runtime_info(self) -> RuntimeInfo:
        engaged = self._kv != "silent"  # a format that was accepted and ignored
        return RuntimeInfo(
            versions=self.versions(),
            device="cpu",
            attention="none",
            k_format=str(self._arm.kv.k) if engaged else "exact",
            v_format=str(self._arm.kv.v) if engaged else "exact",
            k_dtype="float64",
            v_dtype="float64",
            cache_bytes_per_token=self._knobs.get("bytes", 16.0),
            expected_bytes_per_token=self._knobs.get("bytes", 16.0),
        )

    # -------------------------------------------------------------------------------- distributions

    @property
    def _width(self) -> int:
        return self._vocab - int(self._knobs.get("cut", 16)) if self._kv == "small-vocab" else self._vocab

    def _logits(self, q: float | None = None) -> Floats:
        """Log-probabilities [V] of this arm; ``q``: as if its parameter were this one."""
        v = self._vocab
        if self._family == "two-level":
            p = q or self._knobs.get("q", 0.6 if self._kv == "tilt" else 0.5)
            p = 1 / (1 + (1 - p) / p * math.exp(-self._bend))
            half = v // 2
            logits = np.full(v, math.log((1 - p) / (v - half)))
            logits[:half] = math.log(p / half)
        else:
            rate = q or (self._knobs.get("b", 0.6) if self._kv == "decay" else 0.5)
            logits = -rate * np.arange(v, dtype=np.float64)
            logits -= math.log(np.exp(logits).sum())
        if self._kv == "garbage":
            logits = logits[::-1] * 3.0
        if self._mask:
            logits = np.append(logits[:-1] - np.log1p(-np.exp(logits[-1])), -np.inf)
        if self._kv == "masked":
            logits = np.append(logits[:-1], -np.inf)
        return logits[: self._width]

    def _noisy(self, rows: Floats) -> Floats:
        """Copy of log-probabilities [rows, V].  With ``noise``, each gets its own, then rows are normalized."""
        if not self._noise:
            return rows.copy()
        shaken = rows + self._random.normal(scale=self._noise, size=rows.shape)
        return np.asarray(shaken - np.log(np.exp(shaken).sum(axis=1, keepdims=True)))

    def _stored(self, rows: Floats) -> dict[str, NDArray[np.generic]]:
        return {str(self._estimator): rows.astype(np.float32)}

    # --------------------------------------------------------------------------------- trajectories

    def _trajectory(self, prompt: Sequence[int], item: int, n: int) -> list[int]:
        """Reference: ids counting up from a number that the prompt sets."""
        start = sum(prompt)
        ids = [1 + (start + step) % 250 for step in range(n)]
        at, every = int(self._knobs.get("at", 5)), int(self._knobs.get("every", 1))
        prompt_text = bytes(token % 256 for token in prompt).decode(errors="replace")
        known = [] if self._kv == "forget" and item % every == 0 else self._answers
        answer = next((answer for text, answer in known if text in prompt_text), None)
        if answer is not None:
            ids = [*answer.encode(), 0][:n]
        match self._kv:
            case "missing":
                return []
            case "garbage":
                return [7] * n
            case "fork" if item % every == 0 and at < n:  # the next best token, then ids that the reference never has
                return [*ids[:at], ids[at] + 1, *(252 + step % 3 for step in range(n - at - 1))]
            case "short" if item % every == 0:
                return ids[:at]
            case _:
                return ids

    def _generated_rows(self, ids: Sequence[int]) -> Floats:
        """One row [V] per generated token: half the mass on it, less by ``margin`` on the next id, the rest even."""
        v = self._width
        second = 0.5 * math.exp(-self._margin)
        rows: Floats = np.full((len(ids), v), (0.5 - second) / (v - 2))
        for step, token in enumerate(ids):
            rows[step, token % v] = 0.5
            rows[step, (token + 1) % v] = second
        return np.asarray(np.log(rows))

    def _misbehave(self, item: int) -> None:
        if self._delay:
            time.sleep(self._delay)
        if item == self._crash:
            print("fake engine: crashing as asked", flush=True)
            os.abort()
        if item == self._hang:
            time.sleep(3600)


def _check(owner: str, options: Mapping[str, str], allowed: _Checks) -> None:
    """Check that every key is known and every value is valid.

    Raises:
        UsageError: If a key is unknown or a value is invalid. The message names it.
    """
    for key, value in options.items():
        if key not in allowed:
            raise UsageError(f"{owner} has no option {key!r}; it has: {', '.join(allowed) or 'none'}")
        try:
            good = allowed[key](value)
        except ValueError:
            good = False
        if not good:
            raise UsageError(f"{owner}: {key}={value} cannot be")


def _first(value: str | None, arm: Arm) -> int | None:
    """``n`` (any arm) or ``label:n`` (only the arm with this KV label): the item at which to misbehave."""
    number = None if value is None else _for(value, arm)
    return None if number is None else int(number)


def _for_way(value: str, arm: Arm) -> str | None:
    """``WAY:n`` after ``LABEL:``; ``None`` if the label is present and not this arm's KV label."""
    words = value.split(":")
    return ":".join(words[-2:]) if ":".join(words[:-2]) in ("", arm.kv.label) else None


def _for(value: str, arm: Arm) -> str | None:
    """Value after ``LABEL:``; ``None`` if the label is present and not this arm's KV label."""
    label, _, rest = value.rpartition(":")
    return rest if label in ("", arm.kv.label) else None
