"""Tokens that are kept as they are, in a model: what each query sees, what memory holds, what cannot be had."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from fidelab.core import KVSpec
from fidelab.core.errors import NotSupportedError
from fidelab.engines.hf import exceptions
from fidelab.engines.hf.cache import EncodedCache, EncodedStore
from fidelab.formats import create
from tests.engines import tiny
from tests.present import present

TOKENS = 40
KVS = ["int2[tail=5]", "int2[sinks=3]", "int2[sinks=3,tail=5]", "uint2[axis=channel,group=8]", "int2[tail=5]/bf16"]
KVS += ["uint2[axis=channel,group=8,tail=4,sinks=1]/uint2[tail=6]", "bf16/lloyd2[tail=9]"]

every = pytest.mark.parametrize("kv", KVS)


def encoded(kv: str, kind: str = "llama", padding: Tensor | None = None) -> EncodedCache:
    spec = KVSpec.parse(kv)
    return EncodedCache(tiny.model(kind).config, create(spec.k), create(spec.v), (), padding)


def logits(cache: DynamicCache, sizes: list[int]) -> Tensor:
    """Of one sequence that is read in pieces of these sizes."""
    model = deepcopy(tiny.model("llama"))
    exceptions.register_attention()
    model.set_attn_implementation(exceptions.ATTENTION)
    ids, answers, start = torch.tensor([tiny.tokens(TOKENS, 0)]), [], 0
    for size in sizes:
        places = torch.arange(start, start + size)[None]
        piece = ids[:, start : start + size]
        answers.append(model(input_ids=piece, position_ids=places, cache=cache, use_cache=True).logits)
        start += size
    return torch.cat(answers, dim=1)


def by_hand(kv: str, x: Tensor, at: int) -> Tensor:
    """Keys or values ``[T, D]`` of one head as the query at position ``at`` sees them, token by token."""
    fmt = create(KVSpec.parse(kv).k)
    end = fmt.sinks + max(0, at + 1 - fmt.sinks - fmt.tail) // fmt.token_block * fmt.token_block
    seen = x[: at + 1].clone()
    between = x[fmt.sinks : end]
    if len(between):
        parts = fmt.encode(between[None, None], None)
        seen[fmt.sinks : end] = fmt.decode(parts, x.shape[1], torch.float32)[0, 0]
    return seen


@pytest.mark.parametrize("kv", [kv for kv in KVS if "/" not in kv])
def test_each_query_attends_to_what_it_may_see(kv: str) -> None:
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, TOKENS, 16, generator=random) for heads in (4, 2, 2))
    keys, values = (EncodedStore(create(KVSpec.parse(kv).k)).write(x) for x in (k, v))
    out, _ = exceptions.attend(torch.nn.Module(), q, keys, values, None, scaling=0.3)
    for head in range(4):
        for at in range(TOKENS):
            seen_k, seen_v = by_hand(kv, k[0, head // 2], at), by_hand(kv, v[0, head // 2], at)
            due = torch.softmax(0.3 * seen_k @ q[0, head, at], dim=0) @ seen_v
            torch.testing.assert_close(out[0, at, head], due, rtol=1e-4, atol=1e-5)


@every
def test_it_makes_no_difference_whether_tokens_come_together_or_one_by_one(kv: str) -> None:
    whole, plain = logits(encoded(kv), [TOKENS]), logits(DynamicCache(config=tiny.model("llama").config), [TOKENS])
    for sizes in ([1] * TOKENS, [7, 20, 1, 1, 11]):
        pieces = logits(encoded(kv), sizes)
        # the last bits of a sum may move a code, but few of them
        assert (pieces - whole).norm() < 0.05 * (plain - whole).norm()


def test_a_tail_of_all_tokens_leaves_the_answer_alone_and_a_shorter_one_does_not() -> None:
    plain = logits(DynamicCache(config=tiny.model("llama").config), [TOKENS])
    torch.testing.assert_close(logits(encoded(f"int2[tail={TOKENS}]"), [TOKENS]), plain, rtol=1e-4, atol=1e-4)
    some, none = (logits(encoded(kv), [TOKENS]) for kv in ("int2[tail=20]", "int2"))
    torch.testing.assert_close(some[:, :20], plain[:, :20], rtol=1e-4, atol=1e-4)
    assert (some - plain).norm() < 0.9 * (none - plain).norm()


@every
def test_the_cache_holds_exceptions_in_the_compute_type_and_the_rest_encoded(kv: str) -> None:
    cache = encoded(kv)
    logits(cache, [TOKENS - 1, 1])
    spec = KVSpec.parse(kv)
    due = 0
    for side in (create(spec.k), create(spec.v)):
        for heads, k_size, _, _ in tiny.KINDS["llama"].kv:
            between = side.encoded_tokens(TOKENS) if side.has_exceptions else TOKENS
            due += heads * (between * side.token_bytes(k_size) + (TOKENS - between) * k_size * 4)
    assert cache.bytes() == cache.expected_bytes() == due
    assert cache.get_seq_length() == TOKENS


def test_bytes_per_token_are_those_of_a_token_more_and_exceptions_are_of_the_sequence() -> None:
    cache = encoded("int4[sinks=3,tail=5]/f32")
    logits(cache, [TOKENS])
    (heads, k_size, v_size, _), layers = tiny.KINDS["llama"].kv[0], len(tiny.KINDS["llama"].kv)
    fmt = create(KVSpec.parse("int4").k)
    assert cache.bytes_per_token() == layers * heads * (fmt.token_bytes(k_size) + 4 * v_size)
    keys, values = present(cache.sequence_bytes()).stores
    assert (keys.sinks, keys.tail, keys.exact_token) == (3, 5, layers * heads * k_size * 4)
    assert (values.sinks, values.tail, values.exact_token) == (0, 0, 0)


def test_sequences_of_a_batch_can_be_chosen_and_repeated() -> None:
    cache = encoded("int2[sinks=3,tail=5]")
    logits(cache, [20])
    copy = cache.repeated(3)
    assert copy.bytes() == 3 * cache.bytes()
    assert copy.encoded[0].k.first is not None
    assert copy.encoded[0].k.first.shape[0] == 3


def test_padding_and_sliding_windows_are_refused_in_one_line() -> None:
    with pytest.raises(NotSupportedError, match="sequences cannot be padded"):
        encoded("int2[tail=5]", padding=torch.tensor([[False, True]]))
    with pytest.raises(NotSupportedError, match="layer 0 has a sliding window"):
        encoded("int2[tail=5]", "mistral")


def test_attention_that_loses_the_exceptions_is_an_error() -> None:
    cache = encoded("int2[tail=5]")
    tiny.model("llama")(input_ids=torch.tensor([tiny.tokens(8, 0)]), cache=cache, use_cache=True)
    with pytest.raises(NotSupportedError, match="in which options sinks, tail and axis=channel would be lost"):
        cache.check_bands()
    cache = encoded("int2[tail=5]")
    logits(cache, [8])
    cache.check_bands()
    assert cache.encoded[0].k.band is None


def test_the_proof_of_a_run_is_of_the_encoded_part() -> None:
    from fidelab.engines.hf.proof import Proof

    for kv in ("int4[sinks=2,tail=6]", "uint4[axis=channel,group=8]"):
        spec = KVSpec.parse(kv)
        proof = Proof(spec, create(spec.k), create(spec.v))
        cache = encoded(kv)
        with proof.watch(cache):
            logits(cache, [TOKENS])
        assert proof.observed_format(0) == proof.observed_format(1) == kv
        assert set(proof.record()["proof"].values()) == {"shown"}
