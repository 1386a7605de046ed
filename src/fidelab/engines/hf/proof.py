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
import weakref
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
from fidelab.engines.hf.cache import EncodedStore
from fidelab.engines.hf.definition import Question, Shifts, Side, bias_of, read_output, unheeded
from fidelab.engines.hf.origin import foreign_code
from fidelab.formats import create
from fidelab.formats.base import Format, Parts
from fidelab.formats.known import (
    KNOWN,
    canonical,
    encodes_like,
    equal_bits,
    known_vectors,
    names_of,
    spelled,
    values_of,
)

_QUESTIONS = ("received", "stored", "named")
WORDS = ("keys", "values")
_About = Mapping[str, Any]
_SENTINELS = 3  # layers that are observed where not all are
_POSITIONS = 256  # of a layer, that are compared: where there are more, drawn ones and the last
_QUERIES = 32  # drawn ones, that attention is computed again for: 6% of a layer's attention over 512 tokens
_ROWS = 8  # sequences of a batch that they are drawn from
_PLACES = 2  # tokens of a head that are encoded alone
_KEPT_TOKENS = 4096  # up to which all layers are kept as written until a decode step was seen: 0.5 GiB of an 8B model
_RECOMPUTED_KEYS = "attention makes keys and values of its own from what the cache hands over"
_UNREAD = "attention's output cannot be computed again"
_PART = "no forward through an empty cache was observed, so what the kernels read is unknown"


@dataclass
class Evidence:
    """Observations of one forward.  ``formats``: for K and V the name found in each layer, ``None`` if unknown."""

    layers: list[int] = field(default_factory=list)
    formats: tuple[list[str | None], list[str | None]] = field(default_factory=lambda: ([], []))
    opened: dict[str, str] = field(default_factory=dict)
    changed: list[int] = field(default_factory=lambda: [0, 0])
    numbers: list[int] = field(default_factory=lambda: [0, 0])
    received: set[int] = field(default_factory=set)  # layers whose attention was seen


@dataclass(frozen=True)
class _Called:
    """One call of an attention function.

    ``query`` ``[B, heads, Q, D]``, ``out`` ``[B, Q, heads, Dv]``, ``mask`` as it was given, ``about``: named arguments.
    ``more``: whether there were unnamed ones besides.  ``causal``: whether the layer's queries see no later token.
    """

    query: Tensor
    out: Any
    mask: Any
    about: _About
    more: bool = False
    causal: bool = True

    def is_readable(self) -> bool:
        """Whether the output has one row for each query and head."""
        out, query = self.out, self.query
        return isinstance(out, Tensor) and out.ndim == 4 and out.shape[:3] == query.transpose(1, 2).shape[:3]


class _Written:
    """Keys and values of the sequences of one cache as they were written, for some of its layers."""

    def __init__(self, cache: Any, layers: set[int]) -> None:
        self._cache = weakref.ref(cache)
        self._layers = layers
        self._sides: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def is_of(self, cache: Any) -> bool:
        return self._cache() is cache

    def add(self, layer: int, key: Tensor, value: Tensor) -> None:
        if layer in self._layers:
            self._sides.setdefault(layer, []).append((key, value))

    def last(self, layer: int, tokens: int) -> tuple[Tensor, Tensor] | None:
        """Return keys and values of the last tokens ``[B, heads, tokens, D]``; ``None`` if they are not known."""
        kept = self._sides.get(layer)
        if kept is None:
            return None
        if len(kept) > 1:
            self._sides[layer] = kept = [(torch.cat([k for k, _ in kept], 2), torch.cat([v for _, v in kept], 2))]
        keys, values = kept[0]
        return None if keys.shape[2] < tokens else (keys[:, :, keys.shape[2] - tokens :], values[:, :, -tokens:])


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
        self._kv = kv
        self._asked: tuple[FormatSpec, FormatSpec] = (kv.k, kv.v)
        self._formats = (k, v)
        self._draw = random.Random(seed)
        self._observing, self._decodes = True, False
        self._forwards = {"prefills": _Forwards(), "steps": _Forwards()}
        self._written: _Written | None = None  # of the cache of the last forward
        self._seen = Evidence()  # the forward that left the fewest questions open
        self._names: tuple[dict[str | None, None], dict[str | None, None]] = ({}, {})  # of all forwards
        self._changed, self._numbers = [0, 0], [0, 0]
        self._layers: set[int] = set()
        self._of_layers = 0
        self._refuted: dict[str, str] = {}
        self._foreign: str | None = None
        self._few: dict[int, Shifts] = {}  # layer → queries of decode steps, until they are enough
        for name in {kv.k.name, kv.v.name} & KNOWN:
            self._check_encoder(FormatSpec(name), create(FormatSpec(name)))
        for side in (0, 1):
            self._check_encoder(self._asked[side], self._formats[side])

    def _check_encoder(self, spec: FormatSpec, encoder: Format) -> None:
        """Compare what an encoder makes of the known vectors with the table, where that lists the format."""
        listed = spelled(spec)
        if listed in known_vectors() and (encoded_as := encodes_like(encoder)) != listed:
            self.refute("named", f"{listed} encodes known vectors as {encoded_as or 'no known format'} does")

    # ------------------------------------------------------------------------------------------- answers

    def observed_format(self, side: int) -> str | None:
        """Return the observed format of keys (0) or values (1); ``None`` if none is proven."""
        names = self._names[side]
        if not names or None in names or {"stored", "received"} & self._refuted.keys():
            return None
        other = [name for name in names if name != str(self._asked[side])]
        if other:
            return other[0]
        return None if self._foreign else str(self._asked[side])

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
        if question == "stored" and self._foreign and not self._refuted:  # what else is seen says more
            return f"refuted: {self._foreign}"
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

    def begin(self, seed: int, *, observing: bool = True, decodes: bool = False) -> None:
        """Begin a request.  ``observing``: its forwards are counted, and drawn ones are observed.  ``decodes``: tokens
        are read one by one after a prompt.
        """
        self._draw, self._observing, self._decodes = random.Random(seed), observing, decodes
        self._written = None
        for forwards in self._forwards.values():
            forwards.begin()

    def end(self, cache: Any) -> None:
        """End a request: look at what its last cache holds, whichever forwards were observed."""
        self._written = None
        if not self._observing or cache is None or not cache.kv_layers:
            return
        self._look_at_code(cache)
        for number in self._drawn(_encoded(cache)):
            if hasattr(cache.layers[number], "held"):
                continue  # pages are compared with the encoder's parts, and kernels have no other way to write them
            for side in (0, 1):
                self._look_at_rest(number, side, (cache.layers[number].k, cache.layers[number].v)[side])

    @contextmanager
    def forward(self, cache: Any, tokens: int) -> Iterator[None]:
        """One forward of ``tokens`` new positions of each sequence through this cache, observed if drawn.

        All forwards go through the same wrappers, so that a cache cannot tell by them whether it is observed.
        """
        if not self._observing:
            yield
            return
        past = cache.get_seq_length()
        forwards = self._forwards["steps" if tokens == 1 and past else "prefills"]
        is_first = not forwards.seen
        observed = forwards.is_next_observed(self._draw)
        if self._written is None or not self._written.is_of(cache):
            self._written = self._begin_written(cache, past + tokens, is_empty=not past)
        with self.watch(cache, every_layer=is_first, observed=observed):
            yield

    def _begin_written(self, cache: Any, tokens: int, *, is_empty: bool) -> _Written | None:
        """Layers whose keys and values are kept as they are written: sentinels, or all until a decode step was seen."""
        if not self._decodes or not is_empty:
            return None
        layers = _encoded(cache)
        every = not self._forwards["steps"].seen and tokens <= _KEPT_TOKENS
        return _Written(cache, set(layers if every else self._drawn(layers)))

    def _drawn(self, layers: list[int]) -> list[int]:
        """Sentinels among these layers."""
        return sorted(self._draw.sample(layers, min(_SENTINELS, len(layers))))

    @contextmanager
    def watch(self, cache: Any, *, every_layer: bool = True, observed: bool = True) -> Iterator[None]:
        """Observe all layers with the format, or sentinels, during one forward through this cache.

        ``observed``: whether it is; else only what is written is kept.
        """
        sentinels: dict[int, Any] = {}
        if observed:
            self._look_at_code(cache)
            encoded = _encoded(cache)
            self._of_layers = len(encoded)
            sentinels = {number: cache.layers[number] for number in (encoded if every_layer else self._drawn(encoded))}
        evidence = Evidence()
        inputs: dict[int, tuple[Tensor, Tensor]] = {}
        outputs: dict[int, tuple[Tensor, Tensor]] = {}
        vectors = self._draw.choice([*sentinels]) if sentinels else None  # the layer whose encoders are checked

        def updated(key: Tensor, value: Tensor, layer: int, update: Callable[[], Any]) -> Any:
            before = self._before(sentinels[layer]) if layer in sentinels else None
            out = update()
            if self._written is not None:
                self._written.add(layer, key, value)
            if layer in sentinels:
                inputs[layer], outputs[layer] = (key, value), out
                if not _handed(out[0]):
                    self._look_updated(evidence, layer, sentinels[layer], before, inputs[layer], out)
                    if layer == vectors:
                        self._check_encoders(sentinels[layer])
            return out

        def attended(
            layer: int | None,
            _query: Tensor,
            sides: tuple[Tensor, Tensor],
            call: partial[Any],
            called: Callable[[Any], _Called],
        ) -> Any:
            if layer not in outputs:
                return call()
            written, from_cache = inputs[layer], outputs.pop(layer)
            if _handed(sides[0]):
                out = call()
                self._look_paged(evidence, layer, sentinels[layer], written, called(out))
                return out
            is_cached = self._compare(evidence, layer, written, from_cache, sides)
            if foreign := _foreign(call):
                evidence.opened.setdefault(
                    "received", f"attention is computed by {foreign}, which is not Transformers'"
                )
            out = call()
            if is_cached:
                self._look_attended(evidence, layer, sentinels[layer], written, from_cache, called(out))
            return out

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

        with tapped(cache, updated, lambda _layer, _query, _sides, call, _called: call()):
            yield

    # ----------------------------------------------------------------------------------------- comparison

    def _before(self, storage: Any) -> Any:
        """Return what a layer held before an update, for :meth:`_look_updated`."""
        return None

    def _look_updated(
        self, evidence: Evidence, layer: int, storage: Any, before: Any, inputs: Any, outputs: Any
    ) -> None:
        """Compare what a layer holds and returns after an update with what was written."""
        self._look(evidence, layer, storage, inputs, outputs)

    def _check_encoders(self, storage: Any) -> None:
        """Compare the encoders of one layer with the tables of known vectors."""
        for side, store in enumerate(self._stores_of(storage)):
            if store is not None:
                self._check_encoder(self._asked[side], store.format)

    @staticmethod
    def _stores_of(storage: Any) -> tuple[EncodedStore | None, EncodedStore | None]:
        """Return the stores of a layer's keys and values; ``None`` where Transformers itself stores them."""
        return storage.k, storage.v

    def _look(self, evidence: Evidence, layer: int, storage: Any, inputs: Any, outputs: Any) -> None:
        """Compare stored parts with the tensors that were written and those that the cache returns."""
        for side, (written, out) in enumerate(zip(inputs, outputs, strict=True)):
            store = (storage.k, storage.v)[side]
            parts, scale = store.parts, store.scale
            if scale is not None and written.shape[2] == out.shape[2]:
                fitted = self._formats[side].fit(written, store.padding_mask)
                if fitted is None or not equal_bits(fitted, scale):
                    finding = f"layer {layer} has a scale other than {self._asked[side]} fits to its {WORDS[side]}"
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
                self.refute("received", f"layer {layer} is handed {what} {WORDS[side]}, not those that are stored")
                new = tuple(p[:, :, -written.shape[2] :] for p in parts)
                near = names_of(new, written.shape[-1], written, scale, exact=False, asked=self._asked[side])
                # The nearest format is a guess: it is believed where it is the one that was asked for.
                names = near if canonical(self._asked[side], written.shape[-1]) in near else []
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
        evidence: Evidence,
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
                finding = f"{WORDS[side]} of layer {layer} are {names[0] if names else 'in no known format'}"
                self.refute("named", f"{finding}, not {asked}")
            encoded = self._formats[side].encode(written, scale) if fresh else ()
            if encoded and not (
                len(encoded) == len(parts)
                and all(equal_bits(new, part[:, :, -new.shape[2] :]) for new, part in zip(encoded, parts, strict=True))
            ):
                self.refute("stored", f"layer {layer} does not store what {asked} makes of its {WORDS[side]}")
            if encoded and self._depends_on_company(side, written, scale, encoded):
                finding = f"layer {layer} encodes one token of its {WORDS[side]} otherwise than several"
                self.refute("stored", finding)
        evidence.changed[side] += int((out[:, :, out.shape[2] - fresh :] != written).sum())
        evidence.numbers[side] += written.numel()

    def _depends_on_company(self, side: int, written: Tensor, scale: Tensor | None, encoded: Parts) -> bool:
        """Whether a token, or a block of them, is encoded otherwise where it comes alone.  Drawn ones are tried.

        A format's scales belong to a token and a head, or were fitted before.
        """
        fmt = self._formats[side]
        size = fmt.token_block
        for _ in range(_PLACES):
            row, head, token = (self._draw.randrange(n) for n in (*written.shape[:2], written.shape[2] // size))
            own = scale
            if own is not None and own.shape[0] > 1:
                own = own[row : row + 1]
            if own is not None and own.shape[1] > 1:
                own = own[:, head : head + 1]
            x = written[row : row + 1, head : head + 1, token * size : (token + 1) * size]
            for alone, part in zip(fmt.encode(x, own), encoded, strict=True):
                lines = alone.shape[2]  # a scale of a block has one line
                if not equal_bits(alone[0, 0], part[row, head, token * lines : (token + 1) * lines]):
                    return True
        return False

    def _look_at_rest(self, layer: int, side: int, store: EncodedStore) -> None:
        """Compare what a store has at the end of a request with the format and its bytes."""
        asked, parts = self._asked[side], store.parts
        if parts is None or not store.positions:
            return
        expected = store.expected_bytes_in(self._formats[side])
        if store.bytes != expected:
            finding = f"layer {layer} holds its {WORDS[side]} in {store.bytes:,} bytes, {asked} takes {expected:,}"
            self.refute("stored", finding)
        if asked.name not in KNOWN or store.format.token_block > 1:
            return
        at = torch.tensor(sorted(self._draw.sample(range(parts[0].shape[2]), min(parts[0].shape[2], _POSITIONS))))
        sample = tuple(part.index_select(2, at.to(part.device)) for part in parts)
        decoded = store.format.decode(sample, store.dim, torch.float32, store.scale)
        if canonical(asked, store.dim) not in names_of(sample, store.dim, decoded, store.scale, asked=asked):
            self.refute("named", f"{WORDS[side]} of layer {layer} are not in {asked} at the end of a request")

    def _look_at_code(self, cache: Any) -> None:
        """Keep the first part of the cache that is not the package's own."""
        if self._foreign is None:
            self._foreign = foreign_code(cache, self._kv, *self._formats)

    def _compare(self, evidence: Evidence, layer: int, inputs: Any, outputs: Any, received: Any) -> bool:
        """Compare the arguments of attention with the tensors that the cache returned.  Returns whether they agree."""
        agree = True
        for side, (written, out, tensor) in enumerate(zip(inputs, outputs, received, strict=True)):
            if tensor.shape != out.shape:
                evidence.opened["received"], agree = _RECOMPUTED_KEYS, False
            elif tensor is not out and not equal_bits(tensor, out):
                agree = False
                what = "untouched" if equal_bits(tensor[:, :, -written.shape[2] :], written) else "other"
                self.refute("received", f"attention of layer {layer} got {what} {WORDS[side]}, not the cache's")
        evidence.received.add(layer)
        return agree

    def _look_attended(
        self, evidence: Evidence, layer: int, storage: Any, inputs: Any, outputs: Any, called: _Called
    ) -> None:
        """Compare attention's output with attention over what the cache decodes to, for drawn sequences and queries."""
        queries, tokens = called.query.shape[2], outputs[0].shape[2]
        if not called.is_readable() or called.more or queries > tokens:
            evidence.opened.setdefault("received", f"{_UNREAD}: its arguments or its output have another form")
            return
        known = self._known(layer, tokens, inputs, outputs)
        rows = self._draw.sample(range(len(called.query)), min(len(called.query), _ROWS))
        questions = []
        for row in rows:
            at = self._drawn_queries(queries, _QUERIES // len(rows), called.query.device)
            window = called.about.get("sliding_window")
            causal = called.causal and called.about.get("is_causal") is not False
            bias = bias_of(called.mask, row, at, queries, tokens, window, causal=causal)
            if (position := called.about.get("position_bias")) is not None and bias is not None:
                more = bias_of(position, row, at, queries, tokens, window)
                bias = None if more is None else bias + more
            if bias is None:
                kind = type(called.mask).__name__
                evidence.opened.setdefault("received", f"{_UNREAD}: its mask is a {kind} of another form")
                return
            seen = (bias > float("-inf")).any(-1).all(0)
            if not bool(seen.any()):
                continue
            at, bias = at[seen], bias[:, seen]
            sides = [
                self._side(store, row, at + tokens - queries, out, None if known is None else known[side])
                for side, (store, out) in enumerate(zip(self._stores_of(storage), outputs, strict=True))
            ]
            questions.append(_question(called, row, at, bias, sides[0], sides[1]))
        self._judge(evidence, layer, questions, called, "its decoded cache")

    def _known(self, layer: int, tokens: int, inputs: Any, outputs: Any) -> tuple[Tensor, Tensor] | None:
        """Keys and values of all tokens as they were written, if they are known."""
        if inputs[0].shape[2] == tokens:
            return inputs[0], inputs[1]
        known = None if self._written is None else self._written.last(layer, tokens)
        shapes = None if known is None else [x.shape for x in known]
        return known if shapes == [out.shape for out in outputs] else None

    @staticmethod
    def _side(store: EncodedStore | None, row: int, places: Tensor, out: Tensor, known: Tensor | None) -> Side:
        """One sequence's keys or values for queries at these places."""
        decoded, written = (None if x is None else x[row].transpose(0, 1).float() for x in (out, known))
        assert decoded is not None
        band = None if store is None else store.band
        if band is None:
            return Side(decoded, written)
        exact = band.exact[row].transpose(0, 1).float()
        return Side(decoded, written, band.encoded(places), exact)

    def _drawn_queries(self, queries: int, most: int, device: torch.device) -> Tensor:
        """Drawn ones of so many queries, in order, the last among them."""
        drawn = self._draw.sample(range(queries - 1), min(queries, max(most, 1)) - 1)
        return torch.tensor(sorted([*drawn, queries - 1]), device=device)

    def _judge(
        self,
        evidence: Evidence,
        layer: int,
        questions: list[Question],
        called: _Called,
        over: str,
        *,
        compared: bool = True,
    ) -> None:
        """Refute what the outputs of a layer contradict.

        ``compared``: whether attention's arguments were.  Else its output must show that it read encoded content.
        """
        if not questions:
            return
        reading = read_output(questions, called.query.dtype, self._few.get(layer))
        if reading.few is not None:
            self._few[layer] = reading.few
        unknown = unheeded(called.about)
        for side, head in enumerate(reading.untouched):
            if head is not None:
                where = f"attention of layer {layer} read untouched {WORDS[side]} in head {head}"
                self.refute("received", f"{where}, not those of {over}")
        if reading.off is not None and unknown is None:
            head, error = reading.off
            finding = f"attention of layer {layer} is off by {error:.2g} in head {head}"
            self.refute("received", f"{finding} from attention over {over}")
        elif reading.off is not None:
            evidence.opened.setdefault("received", f"{_UNREAD}: it takes an argument {unknown}")
        for side, hidden in enumerate(reading.hidden):
            if hidden and not compared:
                evidence.opened.setdefault("received", f"rounding hides what the kernels read as {WORDS[side]}")

    def _look_paged(self, evidence: Evidence, layer: int, storage: Any, inputs: Any, called: _Called) -> None:
        """Compare stored pages with the written tensors, and the kernels' output with attention over both."""
        row = self._whole_row(storage.step.mask, len(called.query))
        if row is None:
            return
        pages, length, queries = storage.held, int(storage.held.lengths[row]), called.query.shape[2]
        total = storage.seen
        known = inputs if total == inputs[0].shape[2] else None
        if known is None and self._written is not None:
            known = self._written.last(layer, length)
        sides, certain = [], True
        for side, new in enumerate(inputs):
            written = new[row : row + 1, :, -length:]
            parts = _of_row(pages, side, row, length)
            fresh = tuple(part[:, :, -written.shape[2] :] for part in parts)
            names = names_of(fresh, written.shape[-1], written, exact=False)
            asked = canonical(self._asked[side], written.shape[-1])
            names = [asked] if asked in names else [name for name in names if name in known_vectors()]
            certain &= bool(names)
            values = values_of(names[0], parts, written.shape[-1]) if names else written.float()
            self._note(evidence, side, layer, (parts, written, None), names, values.to(written.dtype))
            if names:
                exact = None if known is None else known[side][row, :, -length:].transpose(0, 1).float()
                sides.append(Side(values[0].transpose(0, 1).float(), exact))
        evidence.layers.append(layer)
        evidence.received.add(layer)
        if not certain or not called.is_readable() or called.more:
            evidence.opened.setdefault("received", _PART)
            return
        at = self._drawn_queries(queries, _QUERIES, called.query.device)
        # Where a window has dropped pages, queries whose window reaches beyond them are not computed again.
        first = 0 if length == total else max(queries - length + storage.window - 1, 0)
        at = at[at >= first]
        bias = bias_of(None, 0, at, queries, length, storage.window)
        if not len(at) or bias is None:
            return
        question = _question(called, row, at, bias, sides[0], sides[1])
        self._judge(evidence, layer, [question], called, "its pages", compared=False)

    def _whole_row(self, mask: Tensor | None, rows: int) -> int | None:
        """A drawn sequence of the batch without padding."""
        whole = list(range(rows)) if mask is None else mask.all(dim=1).nonzero()[:, 0].tolist()
        return self._draw.choice(whole) if whole else None


def _question(called: _Called, row: int, at: Tensor, bias: Tensor, keys: Side, values: Side) -> Question:
    """The drawn queries ``at`` of a sequence, with the arguments of their call."""
    query = called.query[row].index_select(1, at).transpose(0, 1).float()
    scale, softcap, sinks = (called.about.get(name) for name in ("scaling", "softcap", "s_aux"))
    scale = query.shape[2] ** -0.5 if scale is None else float(scale)
    if sinks is not None:
        sinks = sinks.float()[:, None].expand(-1, len(at))
    elif (each := called.about.get("sinks")) is not None:  # [batch or 1, heads, queries or 1, 1]
        each = each[row if len(each) > 1 else 0, :, :, 0].float()
        sinks = each.expand(-1, len(at)) if each.shape[1] == 1 else each.index_select(1, at)
    return Question(query, bias, keys, values, called.out[row].index_select(0, at), scale, softcap, sinks)


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
            mask = args[0] if args else kwargs.get("attention_mask")

            def called(out: Any) -> _Called:
                out = out[0] if isinstance(out, tuple) else out
                return _Called(query, out, mask, kwargs, len(args) > 1, getattr(module, "is_causal", True))

            return attended(getattr(module, "layer_idx", None), query, (key, value), call, called)

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
