"""Check on layers of a Transformers model, while it answers, that a format reached attention.

The first prefill and the first decode step of a process are observed in every layer that has the format.  Later ones
are observed in sentinel layers: three, drawn again for each.  Of the forwards of a request, prefills and decode steps
apart, the first is observed, then one of the next two, one of the next four, and so on.  The draws come from the seed
of the request, which the parent process derives from the key of the capture.  The check answers three questions:

- ``stored``: does the cache hold the format's encoding of the keys and values that were written?
- ``received``: did attention get what the cache decodes to, bit by bit?  The arguments of the attention function are
  compared, outside the cache.  Where kernels read the encoded parts themselves (k16v8's), their output is compared
  with attention over the decoded parts and over the keys and values that were written.
- ``named``: in which format are the parts?  Decoders and names are those of :mod:`fidelab.formats.known`.

Each answer is ``shown``, ``open: why`` or ``refuted: why``; a refutation is final.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from fidelab.core import FormatSpec, KVSpec
from fidelab.core.runtime import Observed
from fidelab.core.serial import to_json
from fidelab.engines.hf import exceptions
from fidelab.formats import create
from fidelab.formats.base import Format, Parts
from fidelab.formats.known import KNOWN, canonical, encodes_like, equal_bits, names_of, values_of

_QUESTIONS = ("received", "stored", "named")
_WORDS = ("keys", "values")
_About = Mapping[str, Any]
_SENTINELS = 3  # layers that are observed where not all are
_POSITIONS = 256  # of a layer, that are compared: where there are more, drawn ones and the last
_QUERIES = 256  # the first ones, that attention is computed again for
_ERROR = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}  # of attention's output, relative
_RECOMPUTED_KEYS = "attention makes keys and values of its own from what the cache hands over"
_PART = "no forward through an empty cache was observed, so what the kernels read is unknown"


@dataclass
class _Evidence:
    """Observations of one forward.  ``formats``: for K and V the name found in each layer, ``None`` if unknown."""

    layers: list[int] = field(default_factory=list)
    formats: tuple[list[str | None], list[str | None]] = field(default_factory=lambda: ([], []))
    opened: dict[str, str] = field(default_factory=dict)
    changed: list[int] = field(default_factory=lambda: [0, 0])
    numbers: list[int] = field(default_factory=lambda: [0, 0])
    received: set[int] = field(default_factory=set)  # layers whose attention was seen


@dataclass(frozen=True)
class _Called:
    """One call of an attention function: ``query`` [B, heads, Q, D], ``out`` [B, Q, heads, Dv], named arguments."""

    query: Tensor
    out: Tensor
    about: _About

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
        """Compute causal attention by its definition, of a sequence's first tokens over themselves, in float32.

        ``query``: ``[T, heads, D]``, ``keys``: ``[T, kv_heads, D]``, ``values``: ``[T, kv_heads, Dv]`` → ``[T, heads,
        Dv]``.  ``window``: a query sees so many tokens, itself included; 0 for all.  The scale of the logits, the
        soft-cap and the sinks (a logit of each head that takes part in the sum alone) are those of this call.
        """
        scale, softcap, sinks = (self.about.get(name) for name in ("scaling", "softcap", "s_aux"))
        keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (keys, values))
        logits = torch.einsum("qhd,thd->hqt", query, keys) * (query.shape[2] ** -0.5 if scale is None else scale)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        at = torch.arange(len(query), device=query.device)
        hidden = at > at[:, None]
        if window:
            hidden = hidden | (at <= at[:, None] - window)
        terms = logits = logits.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            terms = torch.cat((logits, sinks.float()[:, None, None].expand(-1, len(query), 1)), dim=-1)
        weights = torch.exp(logits - torch.logsumexp(terms, dim=-1, keepdim=True))
        return torch.einsum("hqt,thd->qhd", weights, values)


@dataclass
class _Forwards:
    """Prefills or decode steps: how many were observed, and which one of the request is next.

    Attributes:
        seen, total: of the process.
        index: forwards of the request so far.
        start: the first forward of the span from which one is drawn; ``drawn``: that one.
    """

    seen: int = 0
    total: int = 0
    index: int = 0
    start: int = 0
    drawn: int = 0

    def begin(self) -> None:
        self.index = self.start = self.drawn = 0

    def is_next_observed(self, draw: random.Random) -> bool:
        """Count one forward, and return whether it is the drawn one of its span of 1, 2, 4, … forwards."""
        at, self.index = self.index, self.index + 1
        self.total += 1
        while at > 2 * self.start:
            self.start = 2 * self.start + 1
            self.drawn = self.start + draw.randrange(self.start + 1)
        self.seen += at == self.drawn
        return at == self.drawn


class Proof:
    """Evidence for the formats of an arm.

    Args:
        kv: the requested formats.
        k, v: encoders of keys and values.
        seed: layers and positions are drawn from it until :meth:`begin` sets another one.
    """

    def __init__(self, kv: KVSpec, k: Format, v: Format, seed: int = 0) -> None:
        self._asked: tuple[FormatSpec, FormatSpec] = (kv.k, kv.v)
        self._formats = (k, v)
        self._draw = random.Random(seed)
        self._observing = True
        self._forwards = {"prefills": _Forwards(), "steps": _Forwards()}
        self._seen = _Evidence()  # the forward that left the fewest questions open
        self._names: tuple[dict[str | None, None], dict[str | None, None]] = ({}, {})  # of all forwards
        self._changed, self._numbers = [0, 0], [0, 0]
        self._layers: set[int] = set()
        self._of_layers = 0
        self._refuted: dict[str, str] = {}
        for name in {kv.k.name, kv.v.name} & KNOWN:
            encoded_as = encodes_like(create(FormatSpec(name)).encode)
            if encoded_as != name:
                self.refute("named", f"{name} encodes a known vector as {encoded_as or 'no known format'} does")

    # ------------------------------------------------------------------------------------------- answers

    def observed_format(self, side: int) -> str | None:
        """Return the observed format of keys (0) or values (1); ``None`` if none is proven."""
        names = self._names[side]
        if not names or None in names or {"stored", "received"} & self._refuted.keys():
            return None
        other = [name for name in names if name != str(self._asked[side])]
        return other[0] if other else str(self._asked[side])

    def record(self) -> dict[str, Any]:
        """Return ``proof`` and its evidence. ``k_changed``: share of the keys that differ between write and read."""
        shares = [n / of if of else None for n, of in zip(self._changed, self._numbers, strict=True)]
        counts = {kind: (forwards.seen, forwards.total) for kind, forwards in self._forwards.items()}
        return {
            "proof": {question: self._answer(question) for question in _QUESTIONS},
            "observed": to_json(Observed((len(self._layers), self._of_layers), **counts)),
            "k_changed": shares[0],
            "v_changed": shares[1],
        }

    def _answer(self, question: str) -> str:
        if question in self._refuted:
            return f"refuted: {self._refuted[question]}"
        if not self._seen.layers:
            return "open: no layer was seen at work"
        why = self._seen.opened.get(question)
        return f"open: {why}" if why else "shown"

    def unseen(self) -> list[tuple[int, int]]:
        """Return (layer, side) of the sentinels whose attention got no tensors comparable with the cache's."""
        if self._seen.opened.get("received") != _RECOMPUTED_KEYS:
            return []
        return [(layer, side) for layer in self._drawn(self._seen.layers) for side in (0, 1)]

    def refute(self, question: str, why: str) -> None:
        """Record a contradiction. The first one for a question is kept."""
        self._refuted.setdefault(question, why)

    # ---------------------------------------------------------------------------------------- observation

    def begin(self, seed: int, *, observing: bool = True) -> None:
        """Begin a request.  ``observing``: its forwards are counted, and drawn ones are observed."""
        self._draw, self._observing = random.Random(seed), observing
        for forwards in self._forwards.values():
            forwards.begin()

    @contextmanager
    def forward(self, cache: Any, tokens: int) -> Iterator[None]:
        """One forward of ``tokens`` new positions of each sequence through this cache, observed if drawn."""
        if not self._observing:
            yield
            return
        forwards = self._forwards["steps" if tokens == 1 and cache.get_seq_length() else "prefills"]
        is_first = not forwards.seen
        if forwards.is_next_observed(self._draw):
            with self.watch(cache, every_layer=is_first):
                yield
        else:
            yield

    def _drawn(self, layers: list[int]) -> list[int]:
        """Sentinels among these layers."""
        return sorted(self._draw.sample(layers, min(_SENTINELS, len(layers))))

    @contextmanager
    def watch(self, cache: Any, *, every_layer: bool = True) -> Iterator[None]:
        """Observe all layers with the format, or sentinels, during one forward through this cache."""
        encoded = _encoded(cache)
        self._of_layers = len(encoded)
        sentinels = {number: cache.layers[number] for number in (encoded if every_layer else self._drawn(encoded))}
        evidence = _Evidence()
        inputs: dict[int, tuple[Tensor, Tensor]] = {}
        outputs: dict[int, tuple[Tensor, Tensor]] = {}

        def updated(key: Tensor, value: Tensor, layer: int, update: Callable[[], Any]) -> Any:
            out = update()
            if layer in sentinels:
                inputs[layer], outputs[layer] = (key, value), out
                if not _handed(out[0]):
                    self._look(evidence, layer, sentinels[layer], inputs[layer], out)
            return out

        def attended(
            layer: int | None, query: Tensor, sides: tuple[Tensor, Tensor], call: partial[Any], about: _About
        ) -> Any:
            if layer not in outputs:
                return call()
            written, from_cache = inputs[layer], outputs.pop(layer)
            if _handed(sides[0]):
                out = call()
                self._look_paged(evidence, layer, sentinels[layer], written, _Called(query, out[0], about))
                return out
            self._compare(evidence, layer, written, from_cache, sides)
            if foreign := _foreign(call):
                evidence.opened.setdefault(
                    "received", f"attention is computed by {foreign}, which is not Transformers'"
                )
            return call()

        with tapped(cache, updated, attended):
            yield
        if set(evidence.layers) - evidence.received:
            evidence.opened.setdefault("received", _RECOMPUTED_KEYS)
        if evidence.layers and (not self._seen.layers or len(evidence.opened) <= len(self._seen.opened)):
            self._seen = evidence
        self._layers.update(evidence.layers)
        for side in (0, 1):
            self._names[side].update(dict.fromkeys(evidence.formats[side]))
            self._changed[side] += evidence.changed[side]
            self._numbers[side] += evidence.numbers[side]

    @contextmanager
    def poisoned(self, cache: Any, layer: int, side: int) -> Iterator[None]:
        """Replace the keys (0) or values (1) that the cache returns for a layer by NaN."""

        def updated(_key: Tensor, _value: Tensor, at: int, update: Callable[[], Any]) -> Any:
            out = [*update()]
            if at == layer:
                out[side] = torch.full_like(out[side], float("nan"))
            return tuple(out)

        with tapped(cache, updated, lambda _layer, _query, _sides, call, _about: call()):
            yield

    # ----------------------------------------------------------------------------------------- comparison

    def _look(self, evidence: _Evidence, layer: int, storage: Any, inputs: Any, outputs: Any) -> None:
        """Compare stored parts with the tensors that were written and those that the cache returns."""
        for side, (written, out) in enumerate(zip(inputs, outputs, strict=True)):
            store = (storage.k, storage.v)[side]
            parts, scale = store.parts, store.scale
            if scale is not None and written.shape[2] == out.shape[2]:
                fitted = self._formats[side].fit(written, store.padding_mask)
                if fitted is None or not equal_bits(fitted, scale):
                    finding = f"layer {layer} has a scale other than {self._asked[side]} fits to its {_WORDS[side]}"
                    self.refute("stored", finding)
            if store.format.has_exceptions:
                fresh, (begin, end) = out.shape[2] - written.shape[2], store.span
                if begin == end:
                    return  # nothing is encoded yet
                written, out = written[:, :, max(0, begin - fresh) : max(0, end - fresh)], out[:, :, begin:end]
                if store.format.token_block == 1:
                    parts, out, written = self._sample_positions(parts, out, written)
                else:
                    written = written[:, :, written.shape[2] % store.format.token_block :]
            else:
                parts, out, written = self._sample_positions(parts, out, written)
            names = names_of(parts, written.shape[-1], out, scale, asked=self._asked[side])
            decodes = bool(names)
            if self._asked[side].name not in KNOWN:
                decodes = equal_bits(self._formats[side].decode(parts, written.shape[-1], out.dtype, scale), out)
            if not decodes:
                fresh = out[:, :, -written.shape[2] :]
                what = "untouched" if equal_bits(fresh, written) else "other"
                self.refute("received", f"layer {layer} is handed {what} {_WORDS[side]}, not those that are stored")
                names = names_of(
                    tuple(p[:, :, -written.shape[2] :] for p in parts),
                    written.shape[-1],
                    written,
                    scale,
                    exact=False,
                    asked=self._asked[side],
                )
            self._note(evidence, side, layer, (parts, written, scale), names, out)
        evidence.layers.append(layer)

    def _sample_positions(self, parts: Parts, out: Tensor, written: Tensor) -> tuple[Parts, Tensor, Tensor]:
        """The positions that are compared, in order: all that the parts hold, or drawn ones and the last."""
        tokens = min(out.shape[2], *(part.shape[2] for part in parts))
        parts, out = tuple(part[:, :, -tokens:] for part in parts), out[:, :, -tokens:]
        written = written[:, :, -tokens:]
        if tokens <= _POSITIONS:
            return parts, out, written
        drawn = [*sorted(self._draw.sample(range(tokens - 1), _POSITIONS - 1)), tokens - 1]
        at = torch.tensor(drawn, device=out.device)
        before = tokens - written.shape[2]
        parts = tuple(part.index_select(2, at) for part in parts)
        return parts, out.index_select(2, at), written.index_select(2, at[at >= before] - before)

    def _note(
        self,
        evidence: _Evidence,
        side: int,
        layer: int,
        stored: tuple[Parts, Tensor, Tensor | None],
        names: list[str],
        out: Tensor,
    ) -> None:
        """Record the format's name, whether it was stored, and the share of ``out`` that differs from the input."""
        parts, written, scale = stored
        asked, fresh = self._asked[side], written.shape[2]
        if asked.name not in KNOWN:
            evidence.formats[side].append(str(asked))
            evidence.opened.setdefault("named", f"fidelab knows no other definition of {asked.name}")
            evidence.opened.setdefault("stored", f"fidelab knows no other definition of {asked.name}")
        else:
            same = canonical(asked, written.shape[-1]) in names
            evidence.formats[side].append(str(asked) if same else next(iter(names), None))
            if not same:
                finding = f"{_WORDS[side]} of layer {layer} are {names[0] if names else 'in no known format'}"
                self.refute("named", f"{finding}, not {asked}")
            encoded = self._formats[side].encode(written, scale) if fresh else ()
            if encoded and not (
                len(encoded) == len(parts)
                and all(equal_bits(new, part[:, :, -new.shape[2] :]) for new, part in zip(encoded, parts, strict=True))
            ):
                self.refute("stored", f"layer {layer} does not store what {asked} makes of its {_WORDS[side]}")
        evidence.changed[side] += int((out[:, :, out.shape[2] - fresh :] != written).sum())
        evidence.numbers[side] += written.numel()

    def _compare(self, evidence: _Evidence, layer: int, inputs: Any, outputs: Any, received: Any) -> None:
        """Compare the arguments of attention with the tensors that the cache returned."""
        for side, (written, out, tensor) in enumerate(zip(inputs, outputs, received, strict=True)):
            if tensor.shape != out.shape:
                evidence.opened["received"] = _RECOMPUTED_KEYS
            elif tensor is not out and not equal_bits(tensor, out):
                what = "untouched" if equal_bits(tensor[:, :, -written.shape[2] :], written) else "other"
                self.refute("received", f"attention of layer {layer} got {what} {_WORDS[side]}, not the cache's")
        evidence.received.add(layer)

    def _look_paged(self, evidence: _Evidence, layer: int, storage: Any, inputs: Any, called: _Called) -> None:
        """Compare stored pages with the written tensors, and the kernels' output with attention over both."""
        row = _whole_row(storage.step.mask)
        if row is None:
            return
        pages, length = storage.held, int(storage.held.lengths[row])
        fresh = [x[row : row + 1, :, -length:] for x in inputs]
        decoded, certain = [], True
        for side, written in enumerate(fresh):
            parts = _of_row(pages, side, row, length)
            new = tuple(part[:, :, -written.shape[2] :] for part in parts)
            names = names_of(new, written.shape[-1], written, exact=False)
            certain &= bool(names)
            values = values_of(names[0], parts, written.shape[-1]) if names else written.float()
            decoded.append(values)
            self._note(evidence, side, layer, (parts, written, None), names, values.to(written.dtype))
        evidence.layers.append(layer)
        evidence.received.add(layer)
        if not (length == inputs[0].shape[2] == called.query.shape[2]) or not certain:
            evidence.opened.setdefault("received", _PART)
            return
        many = min(length, _QUERIES)
        rows = called.query[row, :, :many].transpose(0, 1).float()
        kernel = called.out[row, :many].float()

        def over(keys: Tensor, values: Tensor) -> Tensor:
            k, v = (x[0, :, :many].transpose(0, 1).float() for x in (keys, values))
            return called.attend(rows, k, v, storage.window)

        reference = over(*decoded)
        error = float((kernel - reference).norm() / reference.norm())
        if not error <= _ERROR[called.query.dtype]:
            self.refute("received", f"attention of layer {layer} is off by {error:.2g} from attention over its pages")
        for side, untouched in enumerate((over(fresh[0], decoded[1]), over(decoded[0], fresh[1]))):
            self._reached(evidence, side, layer, kernel - untouched, reference - untouched)

    def _reached(self, evidence: _Evidence, side: int, layer: int, moved: Tensor, due: Tensor) -> None:
        """The share ``c`` of the shift that is ``due`` to the format which the output shows: 1 where it was read.

        Rounding of the output is not part of ``due``, so that it leaves ``c`` an error of ``|moved - c due| /
        (|due| sqrt(n))``; where that is large, the question stays open.
        """
        size = float(due.norm())
        if not size:
            return  # this format changes nothing
        share = float((moved * due).sum()) / size**2
        error = float((moved - share * due).norm()) / size / moved.numel() ** 0.5
        if not error < 0.1:
            evidence.opened.setdefault("received", f"rounding hides what the kernels read as {_WORDS[side]}")
        elif share < 0.5:
            self.refute("received", f"attention of layer {layer} read untouched {_WORDS[side]}, not its pages")


# ------------------------------------------------------------------------------------------------- layers


def _encoded(cache: Any) -> list[int]:
    """The numbers of the layers that have the format."""
    encoded = [x for x in (*getattr(cache, "encoded", ()), *getattr(cache, "paged", ())) if not _skipped(x)]
    return [number for number, layer in enumerate(cache.layers) if any(layer is x for x in encoded)]


def _handed(x: object) -> bool:
    """Whether this is the placeholder that a k16v8 cache returns for keys or values, which its attention reads."""
    attention = sys.modules.get("k16v8.plugins.transformers.attention")  # whose objects these are has been imported
    return attention is not None and isinstance(x, attention.Handed)


def _skipped(layer: Any) -> bool:
    return bool(getattr(layer, "skipped", False))


def _foreign(call: partial[Any]) -> str | None:
    """The name of an attention function that comes neither with Transformers nor with engine hf."""
    module = getattr(call.func, "__module__", None) or type(call.func).__module__
    if module.partition(".")[0] == "transformers" or module == exceptions.__name__:
        return None
    return f"{module}.{getattr(call.func, '__qualname__', type(call.func).__qualname__)}"


def _whole_row(mask: Tensor | None) -> int | None:
    """A sequence of the batch without padding."""
    if mask is None:
        return 0
    rows = mask.all(dim=1).nonzero()
    return int(rows[0]) if len(rows) else None


def _of_row(pages: Any, side: int, row: int, length: int) -> Parts:
    """Parts ``[1, heads, tokens, width]`` of the tokens that a sequence's pages hold."""
    at = torch.arange(length, device=pages.block_table.device)
    blocks, places = pages.block_table[row].long()[at // pages.page], at % pages.page
    codes, scale = ((pages.k_cache, pages.k_scale), (pages.v_cache, pages.v_scale))[side]
    codes = codes[blocks, places].transpose(0, 1).unsqueeze(0)
    if codes.dtype == torch.int8:
        codes = codes.view(torch.uint8)
    return (codes,) if scale is None else (codes, scale[blocks, places].T[None, ..., None])


@contextmanager
def tapped(cache: Any, updated: Callable[..., Any], attended: Callable[..., Any]) -> Iterator[None]:
    """Route updates of ``cache`` through ``updated`` and calls of attention through ``attended`` meanwhile."""
    get_interface, update, own_update = AttentionInterface.get_interface, cache.update, cache.__dict__.get("update")

    def tapped_update(key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return updated(
            key_states, value_states, layer_idx, lambda: update(key_states, value_states, layer_idx, *args, **kwargs)
        )

    def tapped_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attention = get_interface(self, name, default)

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            call = partial(attention, module, query, key, value, *args, **kwargs)
            return attended(getattr(module, "layer_idx", None), query, (key, value), call, kwargs)

        return attend

    AttentionInterface.get_interface = tapped_interface
    cache.update = tapped_update
    try:
        yield
    finally:
        AttentionInterface.get_interface = get_interface
        if own_update is None:
            del cache.update  # the class has its own
        else:
            cache.update = own_update
