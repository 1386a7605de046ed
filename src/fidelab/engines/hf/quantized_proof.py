"""Check on layers of Transformers' ``QuantizedCache``, while a model answers, that its format reached attention.

Codes are unpacked here, without the package that packed them:

- ``stored``: the codes are those of the numbers that were quantized, with scales of their own range, and take the bytes
  of the format.  A code may be off by one step, and by the rounding of its zero point.
- ``received``: attention got what the codes stand for, then the tokens that wait to be quantized, then its own.  The
  first forward of a sequence reads nothing quantized.  If no other forward ran, this is refuted.
- ``named``: the class of the layers and their number of bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from fidelab.core import FormatSpec, KVSpec
from fidelab.engines.hf.cache_formats import Quantized
from fidelab.engines.hf.origin import foreign_quantized_code
from fidelab.engines.hf.proof import WORDS, Evidence, Proof
from fidelab.engines.hf.quantized import Content, TransformersCache, content_of, shape_of, side_bytes, sides_of
from fidelab.formats.base import Format

_CLASSES = {"quanto": "QuantoQuantizedLayer", "hqq": "HQQQuantizedLayer", "fp8": "Fp8QuantizedLayer"}
_FP8 = torch.float8_e4m3fn
_SCALE_ERROR = 0.02  # of a scale: bfloat16 rounds by 0.004, and some ranges are differences of rounded numbers
_FLAT = 1e-3  # a range below this has a scale of the back end's choice
_ODD_CODES = 1e-3  # share of codes beyond one step: halves that are rounded the other way


class QuantizedProof(Proof):
    """Evidence that Transformers' quantized cache was stored and read."""

    def __init__(self, kv: KVSpec, spec: Quantized, seed: int = 0) -> None:
        self._spec = spec
        self._read = {"quantized": 0, "own": 0}  # positions, by what their attention read of earlier tokens
        self._tokens = [0, 0]  # that those in "quantized" read: quantized ones, and all
        none = cast(Format, None)  # no format of fidelab encodes
        super().__init__(kv, none, none, seed)

    def _check_encoder(self, spec: FormatSpec, encoder: Format) -> None:
        """Transformers' encoders have no table of known vectors."""

    @staticmethod
    def _stores_of(storage: Any) -> tuple[None, None]:
        return None, None

    # ------------------------------------------------------------------------------------------- answers

    def record(self) -> dict[str, Any]:
        """Return the record of the base with what was read.

        ``positions_read``: how many positions read quantized tokens, and how many were in a first forward.
        ``quantized_share``: of the tokens that the former read; the others waited in the compute type.
        """
        share = self._tokens[0] / self._tokens[1] if self._tokens[1] else None
        return {**super().record(), "positions_read": dict(self._read), "quantized_share": share}

    def _answer(self, question: str) -> str:
        if question == "received" and not self._refuted and self._read["own"] and not self._read["quantized"]:
            return (
                "refuted: no position of this run read a quantized token: the first forward of a sequence reads its "
                f"own keys and values, and all {self._read['own']:,} positions were in one"
            )
        return super()._answer(question)

    def observed_format(self, side: int) -> str | None:
        """Return the format of keys (0) or values (1) by what the layers hold; ``None`` if it is refuted."""
        return None if {"stored", "named"} & self._refuted.keys() else super().observed_format(side)

    # ---------------------------------------------------------------------------------------- observation

    @contextmanager
    def forward(self, cache: Any, tokens: int) -> Iterator[None]:
        if self._observing:
            past = cache.get_seq_length()
            self._read["quantized" if past else "own"] += tokens
            if past:
                every = tokens * past + tokens * (tokens + 1) // 2
                self._tokens[0] += every if self._spec.backend == "fp8" else tokens * cache.quantized_tokens
                self._tokens[1] += every
        with super().forward(cache, tokens):
            yield

    def end(self, cache: Any) -> None:
        self._written = None
        if not self._observing or cache is None or not cache.kv_layers:
            return
        self._look_at_code(cache)
        for number in self._drawn([*range(len(cache.layers))]):
            self._look_at_bytes(number, cache)

    def _look_at_bytes(self, number: int, cache: TransformersCache) -> None:
        layer = cache.layers[number]
        held, expected = sum(side_bytes(*side) for side in sides_of(layer)), cache.expected_of(layer)
        if held != expected:
            finding = f"layer {number} holds its keys and values in {held:,} bytes, {self._asked[0]} takes {expected:,}"
            self.refute("stored", finding)

    def _look_at_code(self, cache: Any) -> None:
        if self._foreign is None:
            self._foreign = foreign_quantized_code(cache)

    # ----------------------------------------------------------------------------------------- comparison

    def _before(self, storage: Any) -> Any:
        """Return both sides as they are held, with their content; ``None`` before the first write."""
        if not storage.is_initialized:
            return None
        return [(held, self._content(storage, held, rest), rest) for held, rest in sides_of(storage)]

    def _content(self, layer: Any, held: Any, rest: Tensor) -> Content:
        return content_of(held, self._spec, shape_of(layer, held, rest), rest.dtype)

    def _look_updated(
        self, evidence: Evidence, layer: int, storage: Any, before: Any, inputs: Any, outputs: Any
    ) -> None:
        spec, kind = self._spec, type(storage).__name__
        if kind != _CLASSES[spec.backend] or getattr(storage, "nbits", spec.bits) != spec.bits:
            bits = getattr(storage, "nbits", 8)
            self.refute("named", f"layer {layer} is a {kind} of {bits} bits, not {self._asked[0]}")
        for side, (held, rest) in enumerate(sides_of(storage)):
            written, out = inputs[side], outputs[side]
            content = self._content(storage, held, rest)
            past = None if before is None else before[side]
            self._check_read(layer, side, past, content, written, out)
            if past is None or held is not past[0]:  # quantized by this update
                self._check_stored(evidence, layer, side, content, written if spec.backend == "fp8" else out)
            evidence.formats[side].append(str(self._asked[side]))
        evidence.layers.append(layer)

    def _check_read(self, layer: int, side: int, past: Any, content: Content, written: Tensor, out: Tensor) -> None:
        """Compare what an update returns with what the layer held before it."""
        if past is None:
            if not _same(out, written):
                self.refute("received", f"layer {layer} changes the {WORDS[side]} of a first forward")
            return
        if self._spec.backend == "fp8":
            expected, slack = content.values(), content.rounding()
        else:
            _, old, rest = past
            parts = [rest.float(), written.float()] if rest.ndim == 4 else [written.float()]
            expected = torch.cat([old.values(), *parts], dim=2)
            slack = torch.cat([old.rounding(), *(torch.zeros_like(x) for x in parts)], dim=2)
        if expected.shape != out.shape:
            self.refute("received", f"layer {layer} is handed {WORDS[side]} of {out.shape[2]} tokens")
        elif bool(((out.float() - expected).abs() > slack).any()):
            self.refute("received", f"layer {layer} is handed other {WORDS[side]} than its codes stand for")

    def _check_stored(self, evidence: Evidence, layer: int, side: int, content: Content, source: Tensor) -> None:
        """Compare new codes and scales with the numbers that were quantized."""
        if self._spec.backend == "fp8":
            values, codes = content.values()[:, :, -source.shape[2] :], content.codes.reshape(content.shape)
            due = (source.float() / content.scale).to(_FP8).float()
            wrong = not _same(codes[:, :, -source.shape[2] :], due)
        else:
            values, wrong = content.values(), not self._quantizes(content, source)
        if wrong:
            self.refute("stored", f"layer {layer} does not store what {self._asked[side]} makes of its {WORDS[side]}")
        evidence.changed[side] += int((values.to(source.dtype) != source).sum())
        evidence.numbers[side] += source.numel()

    def _quantizes(self, content: Content, source: Tensor) -> bool:
        """Whether codes and scales are those of groups between their least and their largest number."""
        x, most = content.grouped(source), (1 << self._spec.bits) - 1
        span = x.amax(1, keepdim=True) - x.amin(1, keepdim=True)
        wide = span > _FLAT
        eps = torch.finfo(content.dtype).eps
        slack = _SCALE_ERROR * span + 2 * eps * x.abs().amax(1, keepdim=True)
        if bool(((content.scale * most - span).abs() > slack)[wide].any()):
            return False
        zero = content.offset / content.scale
        due = torch.round(x / content.scale + zero).clamp(0, most)
        odd = ((due - content.codes).abs() > 1 + 2 * eps * zero.abs()) & wide
        return float(odd.float().mean()) <= _ODD_CODES


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, with NaN in the same places."""
    return a is b or torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30))
