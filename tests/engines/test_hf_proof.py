"""Engine hf, proof of engagement: formats that never reach attention, or are others than they are called, are seen."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fidelab.captures.requests import Forced, Generate, Layerwise, Prefill, Request
from fidelab.core import FormatSpec, Status
from fidelab.core.runtime import RuntimeInfo
from fidelab.engines.hf.adapter import HFEngine
from fidelab.engines.hf.cache import EncodedStore, _EncodedAttention
from fidelab.formats import FORMATS, create
from fidelab.formats.base import Format, Parts
from fidelab.formats.fp8 import Float8
from fidelab.results.engagement import engaged
from fidelab.results.outcomes import ArmResult
from k16v8.kernels import reference
from k16v8.kernels.cache import dequantize
from k16v8.plugins.transformers import cache as paged_cache
from tests.engines import tiny
from tests.engines.conftest import Checkpoint
from tests.engines.tiny import KINDS, Answers
from tests.run.harness import Done, cli

PREFILL = Prefill("kld", (tiny.tokens(40, seed=1),), 0, 38, ((0,) * 39,))
PROMPTS = (tiny.tokens(9, seed=2), tiny.tokens(21, seed=3), tiny.tokens(12, seed=4))
PROBES: list[Request] = [
    PREFILL,
    Generate("trajectory", PROMPTS, 4, (), batch=3),
    Forced("forced", PROMPTS[:1], (PROMPTS[1],)),
    Layerwise("layers", (PROMPTS[1],), 0, 20, "qkv", (0, 1)),
]
SHOWN = {"stored": "shown", "received": "shown", "named": "shown"}
OWN_KEYS = {"minicpm3", "bloom"}  # their attention takes no keys and values that the cache hands over
FP8 = ["fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz"]


def asked(path: Path, kv: str, request: Request = PREFILL, dtype: str = "float32", **options: str) -> RuntimeInfo:
    engine = tiny.opened(path, kv, dtype, **options)
    engine.answer(request, Answers())
    return engine.runtime_info()


def judged(path: Path, kv: str, ran: RuntimeInfo) -> tuple[Status, str]:
    status, reason = engaged(ArmResult("candidate:x", tiny.arm(path, kv), Status.OK, ran=ran.record()))
    return status, reason or ""


def not_engaged(path: Path, kv: str, dtype: str = "float32", **options: str) -> str:
    """The reason."""
    status, reason = judged(path, kv, asked(path, kv, PREFILL, dtype, **options))
    assert status is Status.NOT_ENGAGED
    return reason


def of_a_push(names: Iterable[str], push: set[str]) -> list[Any]:
    """All names; those that a push leaves out under the marker ``long``."""
    every = list(names)
    assert push <= set(every)
    return [name if name in push else pytest.param(name, marks=pytest.mark.long) for name in every]


PUSH_KINDS = {"llama", "gemma2", "mistral3", "minicpm3", "bloom", "qwen3_next"}
PUSH_FORMATS = {"bf16", "fp8_e4m3", "fp8_e5m2[scale=per-tensor]", "int8", "int4", "mxfp4", "nvfp4", "lloyd3", "q8_0"}
ALL_FORMATS = [*FORMATS.names(), *(f"{FP8[i]}[scale=per-{s}]" for i, s in enumerate(("tensor",) * 2))]


@pytest.mark.parametrize("kind", of_a_push(KINDS, PUSH_KINDS))
def test_all_three_questions_are_answered_for_every_kind_of_cache(kind: str, checkpoint: Checkpoint) -> None:
    kv = "int4[group=8]/fp8_e4m3"
    for request in PROBES[:3]:
        ran = asked(checkpoint(kind), kv, request)
        received = ran.more["proof"].pop("received")
        assert ran.more["proof"] == {"stored": "shown", "named": "shown"}
        assert received.startswith("open: attention makes keys" if kind in OWN_KEYS else "shown")
        assert (ran.k_format, ran.v_format) == ("int4[group=8]", "fp8_e4m3")
        assert min(ran.more["k_changed"], ran.more["v_changed"]) > 0.9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv", of_a_push(ALL_FORMATS, PUSH_FORMATS))
def test_every_format_is_named_and_seen_to_reach_attention(kv: str, dtype: str, checkpoint: Checkpoint) -> None:
    ran = asked(checkpoint("llama"), kv, dtype=dtype)
    assert (ran.k_format, ran.v_format, ran.more["proof"]) == (kv, kv, SHOWN)
    holds = HFEngine.lossless(tiny.arm(checkpoint("llama"), kv, dtype))
    assert (ran.more["k_changed"] == 0) is (holds is not False)


@pytest.mark.parametrize("query", PROBES, ids=lambda query: query.kind)
@pytest.mark.parametrize("dequant", ["fused", "unpack"])
def test_what_our_kernels_read_is_told_from_their_output(query: Request, dequant: str, checkpoint: Checkpoint) -> None:
    for kind, kv in (("llama", "bf16/fp8_e4m3"), ("gemma2", "int8/int4")):
        ran = asked(checkpoint(kind), kv, query, "bfloat16", attention="k16v8", dequant=dequant)
        assert ran.more["proof"] == SHOWN
        assert f"{ran.k_format}/{ran.v_format}" == kv


def untouched(layers: tuple[int, ...], calls: list[int]) -> Callable[[EncodedStore, Tensor], Tensor]:
    """A write that stores codes and hands over what it was given, in these layers of a model with three."""
    write = EncodedStore.write

    def handing(self: EncodedStore, x: Tensor) -> Tensor:
        decoded = write(self, x)
        calls.append(1)
        layer = (len(calls) - 1) // 2 % 3
        return x if layer in layers else decoded

    return handing


@pytest.mark.parametrize("layers", [(0, 1, 2), (1,)])
def test_a_store_that_hands_over_untouched_keys_is_not_engaged(
    layers: tuple[int, ...], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EncodedStore, "write", untouched(layers, []))
    reason = not_engaged(checkpoint("llama"), "int2")
    assert reason == f"layer {layers[0]} is handed untouched keys, not those that are stored"


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize(("side", "word"), [(2, "keys"), (3, "values")])
def test_attention_that_is_given_undecoded_content_in_one_layer_alone_is_not_engaged(
    side: int, word: str, layer: int, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache does what it should; the model calls attention with something else."""
    from transformers.models.llama import modeling_llama

    given: dict[int, Tensor] = {}
    update, interface = _EncodedAttention.update, modeling_llama.ALL_ATTENTION_FUNCTIONS

    def keeping(self: Any, *states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given[0] = states[side - 2]
        return update(self, *states[:2], **kwargs)

    class Interface:
        @staticmethod
        def get_interface(*names: Any) -> Callable[..., Any]:
            attention = interface.get_interface(*names)

            def cheating(*args: Any, **kwargs: Any) -> Any:
                swapped = [*args]
                if args[0].layer_idx == layer:
                    swapped[side] = given[0]
                return attention(*swapped, **kwargs)

            return cheating

    monkeypatch.setattr(_EncodedAttention, "update", keeping)
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Interface)
    reason = not_engaged(checkpoint("llama"), "int8")
    assert reason == f"attention of layer {layer} got untouched {word}, not the cache's"


def test_an_attention_function_that_is_not_transformers_own_leaves_the_question_open(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AttentionInterface

    get = AttentionInterface.get_interface

    def foreign(self: Any, name: str, default: Any) -> Callable[..., Any]:
        attention = get(self, name, default)

        def somewhere_else(*args: Any, **kwargs: Any) -> Any:
            return attention(*args, **kwargs)

        return somewhere_else

    monkeypatch.setattr(AttentionInterface, "get_interface", foreign)
    received = asked(checkpoint("llama"), "int8").more["proof"]["received"]
    assert received.startswith("open: attention is computed by tests.engines.test_hf_proof.")


def test_a_model_with_attention_of_its_own_that_ignores_the_cache_is_not_engaged(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.bloom.modeling_bloom import BloomAttention

    forward = BloomAttention.forward

    class Ignored:
        def __init__(self, cache: Any) -> None:
            self._cache = cache

        def update(self, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
            self._cache.update(key, value, *args)
            return key, value

        def __getattr__(self, name: str) -> Any:
            return getattr(self._cache, name)

    def ignoring(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(forward).bind(self, *args, **kwargs)
        if bound.arguments["layer_past"] is not None:
            bound.arguments["layer_past"] = Ignored(bound.arguments["layer_past"])
        return forward(*bound.args, **bound.kwargs)

    monkeypatch.setattr(BloomAttention, "forward", ignoring)
    assert not_engaged(checkpoint("bloom"), "int8") == "what the cache hands over in layer 0 does not reach the logits"


@pytest.mark.parametrize(("side", "word"), [(0, "keys"), (1, "values")])
@pytest.mark.parametrize("kv", ["int8", "fp8_e4m3", "int4"])
def test_kernels_that_read_something_else_than_their_pages_are_not_engaged(
    kv: str, side: int, word: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = paged_cache._PagedAttention.attend

    def cheating(self: Any, query: Tensor, mask: Tensor | None, attention: reference.Attention) -> Tensor:
        given = None if self.pending is None else self.pending[side]
        out = attend(self, query, mask, attention)
        if given is None or query.shape[2] != given.shape[2] or len(query) > 1:
            return out
        table, length = self.held.block_table[0].long(), given.shape[2]
        sides = [x[table].flatten(0, 1)[:length] for x in dequantize(self.held)]
        sides[side] = given[0].transpose(0, 1).float()
        rows = query[0].transpose(0, 1).float()
        own, _ = reference.attend(rows, sides[0], sides[1], torch.arange(length), attention)
        return own[None].to(out.dtype)

    monkeypatch.setattr(paged_cache._PagedAttention, "attend", cheating)
    reason = not_engaged(checkpoint("llama"), kv, dtype="bfloat16", attention="k16v8")
    assert f"read untouched {word}" in reason or "is off by" in reason


def test_a_bit_that_changes_after_decoding_is_seen(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    write = EncodedStore.write

    def flipping(self: EncodedStore, x: Tensor) -> Tensor:
        decoded = write(self, x)
        assert self.parts is not None
        self.parts[0][0, 0, -1, 0] ^= 64
        return decoded

    monkeypatch.setattr(EncodedStore, "write", flipping)
    assert not_engaged(checkpoint("llama"), "int8") == "layer 0 is handed other keys, not those that are stored"


def test_codes_that_are_not_those_of_the_keys_are_seen_although_attention_gets_them(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = EncodedStore.write
    monkeypatch.setattr(EncodedStore, "write", lambda self, x: write(self, x.roll(1, dims=-1)))
    assert not_engaged(checkpoint("llama"), "int8") == "layer 0 does not store what int8 makes of its keys"


def test_keys_and_values_that_change_places_are_seen(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    update = _EncodedAttention.update

    def swapped(self: Any, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        values, keys = update(self, value, key, *args, **kwargs)
        return keys, values

    monkeypatch.setattr(_EncodedAttention, "update", swapped)
    assert "not those that are stored" in not_engaged(checkpoint("llama"), "f32/int8")
    assert "not those that are stored" in not_engaged(checkpoint("llama"), "int8")


@pytest.mark.parametrize("stored", FP8)
@pytest.mark.parametrize("kv", FP8)
def test_one_8_bit_float_in_place_of_another_is_named(
    kv: str, stored: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = create(FormatSpec(stored))
    assert isinstance(other, Float8)
    stored_otherwise = type("StoredOtherwise", (Float8,), {"dtype": other.dtype})
    monkeypatch.setitem(FORMATS._table, kv, "tests.engines.test_hf_proof:exchanged")
    monkeypatch.setattr("tests.engines.test_hf_proof.exchanged", lambda spec: stored_otherwise(spec.name))
    ran = asked(checkpoint("llama"), kv)
    assert (ran.k_format, ran.v_format) == (stored, stored)
    assert (judged(checkpoint("llama"), kv, ran)[0] is Status.OK) is (kv == stored)


@pytest.mark.parametrize(
    ("kv", "stored"),
    [("int4", "mxfp4"), ("int8", "int7"), ("q4_0", "iq4_nl"), ("bf16", "f16"), ("int4", "int4[group=8]")],
)
def test_formats_of_like_size_are_told_apart(
    kv: str, stored: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, group = stored.partition("[group=")
    spec = FormatSpec(name, (("group", group.rstrip("]")),) if group else ())
    made = create(spec)
    monkeypatch.setitem(FORMATS._table, kv, "tests.engines.test_hf_proof:exchanged")
    monkeypatch.setattr("tests.engines.test_hf_proof.exchanged", lambda _spec: made)
    assert asked(checkpoint("llama"), kv).k_format.startswith(name)  # type: ignore[union-attr]
    assert f"asked for K = {kv}, the engine stored {name}" in not_engaged(checkpoint("llama"), kv)


exchanged: Any = None


class Halved(Format):
    """A format of somebody else: float16 of half the value."""

    name = "halved"

    def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
        return ((x.float() / 2).to(torch.float16),)

    def decode(self, parts: Parts, dim: int, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        return (parts[0].float() * 2).to(dtype)

    def token_bytes(self, dim: int) -> int:
        return 2 * dim

    def error_bound(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return x.abs().float() * 2**-11 + 2**-24


def halved(_spec: FormatSpec) -> Format:
    return Halved()


def test_a_format_of_another_package_is_engaged_and_not_named_by_us(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMATS._table, "halved", "tests.engines.test_hf_proof:halved")
    ran = asked(checkpoint("llama"), "halved")
    assert ran.more["proof"]["received"] == "shown"
    assert ran.more["proof"]["named"] == "open: fidelab knows no other definition of halved"
    assert judged(checkpoint("llama"), "halved", ran) == (Status.OK, "")
    monkeypatch.setattr(EncodedStore, "write", untouched((2,), []))
    assert "layer 2 is handed untouched keys" in not_engaged(checkpoint("llama"), "halved")


def test_what_was_refuted_in_one_probe_stays_so_in_the_next(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny.opened(checkpoint("llama"), "int8")
    with monkeypatch.context() as patch:
        patch.setattr(EncodedStore, "write", untouched((0, 1, 2), []))
        engine.answer(PREFILL, Answers())
    engine.answer(PREFILL, Answers())
    assert engine.runtime_info().k_format is None


SHIM = """
from transformers import AttentionInterface
from fidelab.formats import fp8
from fidelab.engines.hf.cache import EncodedStore

write, get = EncodedStore.write, AttentionInterface.get_interface
untouched = []

def handing(self, x):
    decoded = write(self, x)
    untouched.append(x if self.format.name == "int4" else decoded)
    return x if self.format.name == "int2" else decoded

def interface(self, name, default):
    attention = get(self, name, default)
    return lambda module, query, key, value, *args, **kwargs: attention(
        module, query, *untouched[-2:], *args, **kwargs
    )

EncodedStore.write = handing
AttentionInterface.get_interface = interface
fp8._TYPES["fp8_e4m3"] = fp8._TYPES["fp8_e5m2"]
"""


HARMLESS = """
from transformers import AttentionInterface

get = AttentionInterface.get_interface

def interface(self, name, default):
    attention = get(self, name, default)
    return lambda *args, **kwargs: attention(*args, **kwargs)

AttentionInterface.get_interface = interface
"""


Shimmed = Callable[..., Done]


@pytest.fixture(scope="module")
def shimmed(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Shimmed:
    """Runs whose engine imports a shim: int2 is stored and untouched keys are handed over, e4m3 is e5m2, and for int4
    an attention function of its own takes the untouched keys instead of those that it is given.  Each set of formats
    runs once."""
    return cache(lambda *kv: shimmed_run(kv, checkpoint("llama"), tmp_path_factory.mktemp("shimmed")))


def shimmed_run(names: tuple[str, ...], model: Path, room: Path, shim: str = SHIM, code: int = 1) -> Done:
    (room / "shim").mkdir()
    (room / "shim" / "sitecustomize.py").write_text(shim)
    (room / "text.txt").write_text(" ".join(f"w{token}" for token in tiny.tokens(400)))
    done = cli(
        *("compare", model, "--dtype", "float32", "--reference", "f32", "--control", "none"),
        *(word for kv in names for word in ("--kv", kv)),
        *("--axes", "kld", "--text", room / "text.txt"),
        *("--windows", 4, "--n-ctx", 32, "--no-floor", "--threads", 1, "--pythonpath", room / "shim"),
        cwd=room,
    )
    assert done.code == code, done.err
    return done


OTHERS = ("fp8_e4m3", "int4", "q8_0")


def without_verdict(done: Done, kv: str, reason: str) -> None:
    arm = done.arm(kv)
    assert (arm["status"], arm["reason"]) == ("not_engaged", reason)
    assert arm["verdict"]["band"] is None
    assert "safe" not in arm["verdict"]["sentence"]


def test_a_shim_that_hands_over_untouched_keys_gets_no_verdict(shimmed: Shimmed) -> None:
    without_verdict(shimmed("int2"), "int2", "layer 0 is handed untouched keys, not those that are stored")


@pytest.mark.full
@pytest.mark.parametrize(
    ("kv", "reason"),
    [
        ("fp8_e4m3", "asked for K = fp8_e4m3, the engine stored fp8_e5m2"),
        # its output shows it before the KL, which is exactly 0, does
        ("int4", "attention of layer 0 is off by 0.25 in head 3 from attention over its decoded cache"),
    ],
)
def test_a_shim_that_keeps_a_format_from_attention_gets_no_verdict(kv: str, reason: str, shimmed: Shimmed) -> None:
    without_verdict(shimmed(*OTHERS), kv, reason)


@pytest.mark.full
def test_a_format_whose_cache_has_methods_of_a_shim_gets_no_verdict_although_it_was_left_alone(
    shimmed: Shimmed,
) -> None:
    """What those methods do in forwards that nobody observes is unknown."""
    without_verdict(shimmed(*OTHERS), "q8_0", "EncodedStore.write is sitecustomize.handing")


@pytest.mark.full
def test_an_arm_that_a_shim_leaves_alone_is_judged_and_names_the_shim(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> None:
    done = shimmed_run(("q8_0",), checkpoint("llama"), tmp_path_factory.mktemp("shimmed"), HARMLESS, code=0)
    arm = done.arm("q8_0")
    assert arm["status"] == "ok"
    assert arm["ran"]["proof"] == SHOWN | {
        "received": "open: attention is computed by sitecustomize.interface.<locals>"
        ".<lambda>, which is not Transformers'"
    }
    assert [shim["folder"] for shim in arm["ran"]["pythonpath"]] == ["shim"]
    assert arm["ran"]["provenance"]["transformers"] == "stock"
