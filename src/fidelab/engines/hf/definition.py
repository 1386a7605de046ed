"""Attention by its definition, over what a cache decodes to, and what the output of a kernel says about what it read.

The output of an attention function is compared head by head, for drawn queries.  Two things are asked of each head:

- Is the output that of attention over the decoded cache, up to the rounding of the compute type?
- Where the keys and values are known as they were written, did it read those?  With ``D`` the definition, ``K`` the
  same over written keys and ``V`` over written values, the output is ``D + a (K - D) + b (V - D)`` by least squares.
  ``a`` and ``b`` are 0 where decoded content was read and 1 where written content was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

_ERROR = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}  # of a head's output, relative
_OTHER_ERROR = 1e-2  # of types that are not listed
# A kernel may round logits and weights to the compute type.  Its error is then that of a definition which rounds so,
# of the head where it is largest, up to this factor: sums have another order, and roundings are in other places.  Over
# 60 runs of a model with sinks in bfloat16 the largest error was 0.44 of this bound.
_ROUNDINGS = 4.0
_UNTOUCHED = 0.5  # shares above are of content that was not encoded: honest ones are 0, the others 1
_CERTAIN = 6.0  # standard errors: some ten thousand heads are looked at in a run
_EXPLAINED = 0.25  # of the distance, by reading written content: rounding alone explains less
_APART = 0.98  # squared cosine above which shifts by keys and by values cannot be told apart
# Of the smaller shift: a shorter distance leaves no share above ½.  The least sine between shifts is sqrt(1 - 0.98).
_CLEAR = 0.05
# Queries from which it is told what was read.  Where a query heeds two tokens, every error of its weights moves its
# output along one line, as reading other keys would: one query in 3,000 of an honest run looked so.
_CLUSTERS = 16
_KEPT = 32  # queries of earlier decode steps
_SHARE_ERROR = 0.1  # of a share, up to which it shows what was read
# Arguments that do not change what attention computes, or that the definition heeds.
_HEEDED = frozenset(
    (
        *("attention_mask", "dropout", "scaling", "softcap", "s_aux", "sinks", "sliding_window", "is_causal"),
        "position_bias",
        *("position_ids", "cache_position", "position_embeddings", "use_cache", "output_attentions", "past_key_values"),
        *("output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep", "num_logits_to_keep"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "target_dtype", "deterministic"),
        *("implementation", "layer_idx", "use_top_left_mask", "past_key_value", "token_type_ids", "input_ids"),
    )
)


Shifts = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Side:
    """Keys or values of one sequence.

    Attributes:
        decoded: ``[T, kv_heads, D]`` float32, from the parts in the cache.
        written: the same as it was before encoding; ``None`` if not known.
        encoded: ``[n, T]`` bool, the tokens that each query reads encoded; ``None`` for all.
        exact: what it reads of the others, as ``decoded``.
    """

    decoded: Tensor
    written: Tensor | None = None
    encoded: Tensor | None = None
    exact: Tensor | None = None

    def untouched(self) -> Side:
        """Return the side as a cache without a format would hold it."""
        return self if self.written is None else Side(self.written)


@dataclass(frozen=True)
class Question:
    """Drawn queries of one sequence, with everything that attention over its cache takes.

    Attributes:
        query: ``[n, heads, D]``.
        bias: ``[heads or 1, n, T]`` float32, added to the logits: ``-inf`` where a token is hidden.
        scale, softcap: of the logits.
        sinks: ``[heads, n]`` float32, logits that take part in the sum alone.
        out: ``[n, heads, Dv]``, the kernel's output.
    """

    query: Tensor
    bias: Tensor
    keys: Side
    values: Side
    out: Tensor
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def attend(self, keys: Side, values: Side, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return attention over these keys and values, ``[n, heads, Dv]`` float32.

        ``dtype``: that of logits, weights and output.
        """
        logits = self._logits(keys, dtype) * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        terms = logits = logits.to(dtype).float() + self.bias
        if self.sinks is not None:
            terms = torch.cat((logits, self.sinks[..., None]), dim=-1)
        weights = torch.exp(logits - torch.logsumexp(terms, dim=-1, keepdim=True)).to(dtype).float()
        return self._mean(weights, values).to(dtype).float()

    def _logits(self, keys: Side, dtype: torch.dtype) -> Tensor:
        """``[heads, n, T]``."""

        def products(content: Tensor) -> Tensor:
            n, heads, dim = self.query.shape
            query = self.query.float().view(n, content.shape[1], heads // content.shape[1], dim)
            found: Tensor = torch.einsum("nkrd,tkd->krnt", query, content).flatten(0, 1)
            return found.to(dtype).float()

        if keys.encoded is None or keys.exact is None:
            return products(keys.decoded)
        return torch.where(keys.encoded, products(keys.decoded), products(keys.exact))

    @staticmethod
    def _mean(weights: Tensor, values: Side) -> Tensor:
        """``[n, heads, Dv]`` of weights ``[heads, n, T]``."""

        def sums(some: Tensor, content: Tensor) -> Tensor:
            heads, n, tokens = some.shape
            grouped = some.view(content.shape[1], heads // content.shape[1], n, tokens)
            found: Tensor = torch.einsum("krnt,tkd->nkrd", grouped, content).flatten(1, 2)
            return found

        if values.encoded is None or values.exact is None:
            return sums(weights, values.decoded)
        return sums(weights * values.encoded, values.decoded) + sums(weights * ~values.encoded, values.exact)


@dataclass(frozen=True)
class Reading:
    """Findings from the outputs of one layer.

    Attributes:
        off: head and relative error of the head that is off the most; ``None`` if all agree with the definition.
        untouched: for keys and values a head that read them as they were written; ``None`` if none did.
        hidden: for keys and values, whether rounding hides what was read.
        few: the queries, to be handed to the next comparison of this layer, where they were too few to tell what was
            read: distances of outputs, shifts by keys and by values, ``[n, heads, Dv]`` each; ``None`` if not needed.
    """

    off: tuple[int, float] | None = None
    untouched: tuple[int | None, int | None] = (None, None)
    hidden: tuple[bool, bool] = (False, False)
    few: Shifts | None = None


def read_output(questions: list[Question], dtype: torch.dtype, earlier: Shifts | None = None) -> Reading:
    """Compare a kernel's outputs for all questions of one layer with the definition, head by head.

    ``dtype``: the compute type.  ``earlier``: ``few`` of earlier decode steps.  Functions that ignore a soft-cap or
    sinks which the model hands them are compared without it, where that agrees.
    """
    kernel = torch.cat([one.out.float() for one in questions])
    best: tuple[float, list[Question], Tensor, Tensor] | None = None
    for variant in _variants(questions):
        reference = torch.cat([one.attend(one.keys, one.values) for one in variant])
        errors = _errors(kernel, reference)
        if best is None or float(errors.max()) < best[0]:
            best = float(errors.max()), variant, reference, errors
        if best[0] <= _ERROR.get(dtype, _OTHER_ERROR):
            break
    assert best is not None
    _, questions, reference, errors = best
    off = _off(questions, reference, errors, dtype)
    if any(side.written is None for one in questions for side in (one.keys, one.values)):
        return Reading(off, few=earlier)
    found = (
        kernel - reference,
        torch.cat([one.attend(one.keys.untouched(), one.values) for one in questions]) - reference,
        torch.cat([one.attend(one.keys, one.values.untouched()) for one in questions]) - reference,
    )
    whole = _regression(found[0].flatten(0, 1), [shift.flatten(0, 1) for shift in found[1:]])  # each head of a query
    hidden = whole[0].hidden, whole[1].hidden
    if len(kernel) >= _CLUSTERS:
        return Reading(off, _untouched_heads(found), hidden, earlier)
    if earlier is not None:
        found = torch.cat((earlier[0], found[0])), torch.cat((earlier[1], found[1])), torch.cat((earlier[2], found[2]))
    untouched = _untouched_heads(found) if len(found[0]) >= _CLUSTERS else (None, None)
    return Reading(off, untouched, hidden, (found[0][-_KEPT:], found[1][-_KEPT:], found[2][-_KEPT:]))


def _variants(questions: list[Question]) -> list[list[Question]]:
    softcap, sinks = questions[0].softcap, questions[0].sinks is not None
    found = [questions]
    if softcap:
        found.append([replace(one, softcap=None) for one in questions])
    if sinks:
        found.append([replace(one, sinks=None) for one in questions])
    if softcap and sinks:
        found.append([replace(one, softcap=None, sinks=None) for one in questions])
    return found


def _errors(kernel: Tensor, reference: Tensor) -> Tensor:
    """Relative error of each head, ``[heads]``; infinite where numbers are not finite or differ from zeros."""
    distance, size = ((x.square().sum((0, 2))).sqrt() for x in (kernel - reference, reference))
    return torch.where(distance == 0, 0.0, distance / size).nan_to_num(nan=float("inf"))


def _off(questions: list[Question], reference: Tensor, errors: Tensor, dtype: torch.dtype) -> tuple[int, float] | None:
    bound = torch.full_like(errors, _ERROR.get(dtype, _OTHER_ERROR))
    if bool((errors > bound).any()) and dtype != torch.float32:
        rounded = torch.cat([one.attend(one.keys, one.values, dtype) for one in questions])
        bound = bound.clamp_min(_ROUNDINGS * float(_errors(rounded, reference).max()))
    beyond = torch.where(errors > bound, errors, -1.0)
    head = int(beyond.argmax())
    return (head, float(errors[head])) if float(beyond[head]) > 0 else None


def _untouched_heads(found: Shifts) -> tuple[int | None, int | None]:
    """The first head that read written keys, and the first that read written values."""
    moved, *shifts = found
    sizes = torch.stack([x.square().sum((0, 2)).sqrt() for x in found])  # [3, heads]
    least = torch.where(sizes[1:] == 0, float("inf"), sizes[1:]).amin(0)
    clear = (sizes[0] < _CLEAR * least).tolist()
    heads = [
        (_Share(), _Share()) if clear[head] else _regression(moved[:, head], [shift[:, head] for shift in shifts])
        for head in range(moved.shape[1])
    ]
    keys, values = (next((head for head, one in enumerate(heads) if one[side].untouched), None) for side in (0, 1))
    return keys, values


@dataclass(frozen=True)
class _Share:
    """The share of a side that was read as it was written, with its standard error; no error where it has no effect."""

    value: float = 0.0
    error: float | None = None
    explained: float = 0.0

    @property
    def untouched(self) -> bool:
        known = self.error is not None and self.value - _CERTAIN * self.error > _UNTOUCHED
        return known and self.value < 2 and self.explained > _EXPLAINED

    @property
    def hidden(self) -> bool:
        return self.error is not None and not self.error < _SHARE_ERROR


def _regression(moved: Tensor, shifts: list[Tensor]) -> tuple[_Share, _Share]:
    """Least squares of ``moved`` ``[n, D]`` by the shifts of keys and values, by query: their shares.

    The standard error takes queries as clusters; where there are few, all of the residual counts as error.
    """
    products = torch.tensor([[float((a * b).sum()) for b in shifts] for a in shifts], dtype=torch.float64)
    sides = [side for side in (0, 1) if float(products[side, side]) > 0]
    shares = [_Share(), _Share()]
    if len(sides) == 2:
        cosine = float(products[0, 1]) ** 2 / (float(products[0, 0]) * float(products[1, 1]))
        if cosine > _APART:  # each by itself, and neither is certain
            sides = sides[: 1 + (float(products[1, 1]) > float(products[0, 0]))][-1:]
    if not sides or not bool(moved.isfinite().all()):
        return shares[0], shares[1]
    due = torch.stack([shifts[side] for side in sides]).double()  # [sides, n, D]
    inverse = torch.linalg.inv(products[sides][:, sides]).to(due.device)
    values = inverse @ torch.einsum("snd,nd->s", due, moved.double())
    rest = moved.double() - torch.einsum("s,snd->nd", values, due)
    if len(moved) >= _CLUSTERS:
        scores = inverse @ torch.einsum("snd,nd->sn", due, rest)
        errors = scores.square().sum(1).sqrt()
    else:
        errors = (rest.square().sum() * inverse.diagonal()).sqrt()
    total = float(moved.double().square().sum())
    explained = 1 - float(rest.square().sum()) / total if total else 0.0
    for place, side in enumerate(sides):
        shares[side] = _Share(float(values[place]), float(errors[place]), explained)
    return shares[0], shares[1]


# ------------------------------------------------------------------------------------------------ arguments


def unheeded(about: Mapping[str, Any]) -> str | None:
    """Return the name of an argument of attention that the definition does not know; ``None`` if there is none."""
    given = (name for name, value in about.items() if value is not None and value is not False)
    return next((name for name in sorted(given) if name not in _HEEDED), None)


def bias_of(
    mask: Any, row: int, at: Tensor, queries: int, tokens: int, window: int | None, *, causal: bool = True
) -> Tensor | None:
    """Return what a mask adds to the logits of drawn queries, ``[heads or 1, n, tokens]`` float32.

    ``None`` if the mask is of a kind that is not known.

    Args:
        mask: as attention got it: ``[batch or 1, heads or 1, queries or 1, tokens or more]``, bool or added to logits;
            ``[batch, tokens]``, the padding; ``None``.
        row: sequence of the batch.
        at: ``[n]``, drawn ones of ``queries`` queries, which are the last of ``tokens`` tokens.
        window: tokens that a query sees, itself included, where the mask does not say so.
        causal: whether a query sees no later token, where the mask does not say so.
    """
    if isinstance(mask, Tensor) and mask.ndim == 4:
        if mask.shape[3] < tokens or mask.shape[2] not in (1, queries):
            return None
        lines = mask[row if mask.shape[0] > 1 else 0][..., :tokens]
        lines = lines if lines.shape[1] == 1 else lines.index_select(1, at)
        if lines.dtype == torch.bool:
            return torch.zeros_like(lines, dtype=torch.float32).masked_fill(~lines, float("-inf"))
        hidden = lines <= torch.finfo(lines.dtype).min / 2  # masks hide by the smallest number of their type
        return lines.float().masked_fill(hidden, float("-inf"))
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= tokens):
        return None
    places = torch.arange(tokens, device=at.device)
    own = (tokens - queries + at)[:, None]
    hidden = (places > own) if causal else torch.zeros(len(at), tokens, dtype=torch.bool, device=at.device)
    if window:
        hidden = hidden | (places <= own - window)
    if mask is not None:
        hidden = hidden | ~mask[row, :tokens].bool()
    return torch.zeros(1, len(at), tokens, device=at.device).masked_fill(hidden[None], float("-inf"))
