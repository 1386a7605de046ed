"""Engine hf, proof of engagement: a format that runs in some layers, forwards, positions or sides alone is refuted."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fidelab.captures.manifest import capture_key, seed_of
from fidelab.captures.requests import Forced, Generate, Prefill, Request
from fidelab.core import Status
from fidelab.core.runtime import RuntimeInfo
from fidelab.engines.hf import proof
from fidelab.engines.hf.cache import EncodedCache
from fidelab.results.engagement import engaged
from fidelab.results.outcomes import ArmResult
from tests.engines import tiny
from tests.engines.conftest import Checkpoint
from tests.engines.tiny import Answers
from tests.run.harness import Done, cli

LAYERS = 9
WINDOWS = Prefill("kld", tuple(tiny.tokens(40, seed=n) for n in range(8)), 0, 38, ((0,) * 39,) * 8)
PROMPTS = tuple(tiny.tokens(9, seed=n) for n in range(2))
GENERATE = Generate("trajectory", PROMPTS, 12, ())
FORCED = Forced("forced", PROMPTS, tuple(tiny.tokens(12, seed=n) for n in range(2, 4)))

Exact = Callable[[int, int, int, int, Tensor, Tensor], Tensor]


def cheat(caches: Any, exact: Exact) -> None:
    """Have ``exact(side, layer, forward, read, written, decoded)`` choose what attention gets.

    ``forward``: counted from 1 on since this call.  ``read``: positions that the first forward of the sequence wrote.
    ``written``, ``decoded`` ``[batch, heads, tokens, width]``: all positions as they came, and as the cache has them.
    """
    update, forwards = caches.update, [0]

    def cheating(self: Any, key: Any, value: Any, layer: int, *args: Any, **more: Any) -> Any:
        forwards[0] += layer == 0
        out = [*update(self, key, value, layer, *args, **more)]
        kept = self.__dict__.setdefault("kept", {})
        for side, new in enumerate((key, value)):
            before = kept.get((side, layer))
            read, written = (new.shape[2], new) if before is None else (before[0], torch.cat((before[1], new), dim=2))
            kept[side, layer] = read, written
            out[side] = exact(side, layer, forwards[0], read, written, out[side])
        return tuple(out)

    caches.update = cheating


def in_the_first_the_middle_and_the_last_layer(
    side: int, layer: int, forward: int, read: int, written: Any, decoded: Any
) -> Any:
    return decoded if layer in (0, 4, 8) else written


def in_the_first_two_forwards(side: int, layer: int, forward: int, read: int, written: Any, decoded: Any) -> Any:
    return decoded if forward <= 2 else written


def in_prefill(side: int, layer: int, forward: int, read: int, written: Any, decoded: Any) -> Any:
    return torch.cat((decoded[:, :, :read], written[:, :, read:]), dim=2)


def behind_the_first_24_positions(side: int, layer: int, forward: int, read: int, written: Any, decoded: Any) -> Any:
    return torch.cat((written[:, :, :24], decoded[:, :, 24:]), dim=2) if written.shape[2] > 24 else decoded


def in_keys(side: int, layer: int, forward: int, read: int, written: Any, decoded: Any) -> Any:
    return decoded if side == 0 else written


def in_values(side: int, layer: int, forward: int, read: int, written: Any, decoded: Any) -> Any:
    return decoded if side == 1 else written


def scaled_in_layer_6(side: int, layer: int, forward: int, read: int, written: Any, decoded: Any) -> Any:
    return decoded * 1.0625 if layer == 6 else decoded


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with nine layers."""
    import transformers

    config = tiny.KINDS["llama"].config()
    config.num_hidden_layers = LAYERS
    built = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return tiny.save(tiny.randomised(built), tmp_path_factory.mktemp("deep") / "llama")


def ran_with(path: Path, exact: Exact | None, request: Request, kv: str = "int8", seed: int = 0) -> RuntimeInfo:
    """What is said to have run where the cache hands over what ``exact`` chooses."""
    engine = tiny.opened(path, kv)
    engine.seed = seed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EncodedCache, "update", EncodedCache.update)
        if exact is not None:
            cheat(EncodedCache, exact)
        engine.answer(request, Answers())
    return engine.runtime_info()


def judged(path: Path, ran: RuntimeInfo, kv: str = "int8") -> tuple[Status, str | None]:
    return engaged(ArmResult("candidate:x", tiny.arm(path, kv), Status.OK, ran=ran.record()))


def test_every_layer_with_an_encoded_cache_is_observed_in_the_first_prefill(deep: Path, checkpoint: Checkpoint) -> None:
    one = Prefill("kld", WINDOWS.windows[:1], 0, 38, ((0,) * 39,))
    assert ran_with(deep, None, one).more["observed"] == {"layers": [9, 9], "prefills": [1, 1], "steps": [0, 0]}
    assert ran_with(deep, None, WINDOWS, "int8[skip-layers=0,3]").more["observed"]["layers"] == [7, 7]
    assert ran_with(checkpoint("qwen3_next"), None, WINDOWS).more["observed"]["layers"] == [1, 1]


def test_one_forward_of_1_2_4_and_so_on_is_observed(deep: Path) -> None:
    assert ran_with(deep, None, WINDOWS).more["observed"]["prefills"] in ([3, 8], [4, 8])
    observed = ran_with(deep, None, FORCED).more["observed"]
    assert observed["prefills"] == [2, 2] or observed["prefills"] == [1, 2]
    assert observed["steps"][1] == 22
    assert observed["steps"][0] in (4, 5)


def watched(path: Path, seed: int) -> list[tuple[int, ...]]:
    """The layers that were observed in each observed forward."""
    seen: list[tuple[int, ...]] = []
    look = proof.Proof._look

    def looking(self: Any, evidence: Any, *args: Any) -> None:
        look(self, evidence, *args)
        if len(evidence.layers) == 1:
            seen.append(())
        seen[-1] = tuple(evidence.layers)

    engine = tiny.opened(path, "int8")
    engine.seed = seed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof.Proof, "_look", looking)
        engine.answer(WINDOWS, Answers())
    return seen


def test_later_forwards_are_observed_in_three_layers_that_the_seed_draws(deep: Path) -> None:
    first, *later = watched(deep, seed=1)
    assert first == tuple(range(LAYERS))
    assert {len(layers) for layers in later} == {3}
    assert watched(deep, seed=1) == [first, *later]
    assert watched(deep, seed=2) != [first, *later]
    keys = [capture_key(tiny.arm(deep, "int8"), WINDOWS, {}, replicate) for replicate in (0, 1)]  # whose seed it is
    assert seed_of(keys[0]) == seed_of(dict(reversed(keys[0].items()))) != seed_of(keys[1])


@pytest.mark.parametrize(
    ("exact", "request_", "reason"),
    [
        (in_the_first_the_middle_and_the_last_layer, WINDOWS, "layer 1 is handed untouched keys"),
        (in_the_first_two_forwards, WINDOWS, "is handed untouched keys"),
        (in_prefill, GENERATE, "layer 0 is handed untouched keys"),
        (in_prefill, FORCED, "layer 0 is handed untouched keys"),
        (behind_the_first_24_positions, WINDOWS, "layer 0 is handed other keys"),
        (in_keys, WINDOWS, "layer 0 is handed untouched values"),
        (in_values, WINDOWS, "layer 0 is handed untouched keys"),
        (scaled_in_layer_6, WINDOWS, "layer 6 is handed other keys"),
    ],
)
def test_a_format_that_reaches_attention_in_part_alone_is_not_engaged(
    exact: Exact, request_: Request, reason: str, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_POSITIONS", 16)
    status, said = judged(deep, ran_with(deep, exact, request_))
    assert status is Status.NOT_ENGAGED
    assert f"{reason}, not those that are stored" in (said or "")


def test_without_a_shim_every_request_shows_its_format(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_POSITIONS", 16)
    for request in (WINDOWS, GENERATE, FORCED):
        ran = ran_with(deep, None, request)
        assert judged(deep, ran) == (Status.OK, None)
        assert set(ran.more["proof"].values()) == {"shown"}


def test_a_shim_in_the_caches_methods_is_refuted_although_it_changes_nothing_where_it_is_observed(deep: Path) -> None:
    """What it does in other forwards is unknown."""
    ran = ran_with(deep, lambda *given: given[-1], WINDOWS)
    assert judged(deep, ran) == (
        Status.NOT_ENGAGED,
        "EncodedCache.update is tests.engines.test_hf_observed.cheat.<locals>.cheating",
    )


def test_a_scale_that_one_middle_layer_does_not_fit_to_its_keys_is_not_engaged(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, kv = EncodedCache.__init__, "fp8_e4m3[scale=per-tensor]"

    def misfitted(self: Any, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        store = self.encoded[6].k
        own, store.format = store.format, copy.copy(store.format)
        object.__setattr__(store.format, "fit", lambda x, mask=None: 2 * own.fit(x, mask))

    monkeypatch.setattr(EncodedCache, "__init__", misfitted)
    status, said = judged(deep, ran_with(deep, None, WINDOWS, kv), kv)
    assert (status, said) == (
        Status.NOT_ENGAGED,
        "layer 6 has a scale other than fp8_e4m3[scale=per-tensor] fits to its keys",
    )


@pytest.mark.parametrize("kv", ["int4[sinks=2,tail=6]", "uint4[axis=channel,group=8]", "fp8_e4m3[scale=per-tensor]"])
@pytest.mark.parametrize("request_", [GENERATE, FORCED], ids=lambda request: request.kind)
def test_decode_steps_of_formats_that_keep_tokens_exact_are_shown(
    kv: str, request_: Request, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_POSITIONS", 4)
    ran = ran_with(deep, None, request_, kv)
    assert judged(deep, ran, kv) == (Status.OK, None)
    assert set(ran.more["proof"].values()) == {"shown"}


FOREIGN = """
from transformers import AttentionInterface
from fidelab.engines.hf.cache import EncodedCache, EncodedStore

write, get, make = EncodedStore.write, AttentionInterface.get_interface, EncodedCache.__init__
caches, untouched = [0], []

def counting(self, *args, **more):
    make(self, *args, **more)
    caches[0] += 1

def handing(self, x):
    untouched.append(x)
    return write(self, x)

def interface(self, name, default):
    attention = get(self, name, default)

    def attend(module, query, key, value, *args, **more):
        sides = (key, value) if caches[0] % 2 else untouched[-2:]
        return attention(module, query, *sides, *args, **more)

    return attend

EncodedCache.__init__ = counting
EncodedStore.write = handing
AttentionInterface.get_interface = interface
"""
"""Every other window is computed from the keys and values as they came, by attention of a kind that nobody knows."""


def shim_of(exact: Exact) -> str:
    source = inspect.getsource(cheat) + inspect.getsource(exact)
    return (
        "from __future__ import annotations\nimport torch\nfrom fidelab.engines.hf import proof\n"
        "from fidelab.engines.hf.cache import EncodedCache\nproof._POSITIONS = 16\n"
        f"{source}\ncheat(EncodedCache, {exact.__name__})\n"
    )


Shimmed = Callable[[str, str], Done]


@pytest.fixture(scope="module")
def shimmed(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Shimmed:
    """Runs of int8 on some axes whose engine imports a shim of this source."""

    def run(shim: str, axes: str) -> Done:
        room = tmp_path_factory.mktemp("shimmed")
        (room / "shim").mkdir()
        (room / "shim" / "sitecustomize.py").write_text(shim)
        (room / "text.txt").write_text(" ".join(f"w{token}" for token in tiny.tokens(600)))
        (room / "prompts.txt").write_text("w5 w6 w7 w8 w9\nw10 w11 w12 w13\n")
        return cli(
            *("compare", deep, "--dtype", "float32", "--reference", "f32", "--control", "none", "--kv", "int8"),
            *("--axes", axes, "--text", room / "text.txt", "--windows", 8, "--n-ctx", 40),
            *(("--prompts", room / "prompts.txt", "--n-predict", 12) if "trajectory" in axes else ()),
            *("--no-floor", "--threads", 1),
            *("--pythonpath", room / "shim"),
            cwd=room,
        )

    return cache(run)


def without_verdict(done: Done) -> str:
    """The reason why int8 has none."""
    arm = done.arm("int8")
    assert (done.code, arm["status"], arm["verdict"]["band"]) == (1, "not_engaged", None), done.err
    assert "safe" not in arm["verdict"]["sentence"]
    assert arm["reason"] in arm["verdict"]["sentence"]
    return str(arm["reason"])


@pytest.mark.parametrize(
    ("exact", "axes", "reason"),
    [
        (in_the_first_the_middle_and_the_last_layer, "kld", "layer 1 is handed untouched keys"),
        pytest.param(in_prefill, "kld,trajectory", "is handed untouched keys", marks=pytest.mark.full),
        pytest.param(behind_the_first_24_positions, "kld", "is handed other keys", marks=pytest.mark.full),
        pytest.param(in_keys, "kld", "layer 0 is handed untouched values", marks=pytest.mark.long),
        pytest.param(scaled_in_layer_6, "kld", "layer 6 is handed other keys", marks=pytest.mark.long),
    ],
)
def test_a_shim_that_applies_a_format_in_part_gets_no_verdict(
    exact: Exact, axes: str, reason: str, shimmed: Shimmed
) -> None:
    assert f"{reason}, not those that are stored" in without_verdict(shimmed(shim_of(exact), axes))


@pytest.mark.full
def test_attention_that_reads_untouched_content_in_every_other_window_gets_no_verdict(shimmed: Shimmed) -> None:
    """Its KL is exactly 0 there, and its output shows what it read before the KL does."""
    reason = without_verdict(shimmed(FOREIGN, "kld"))
    assert re.fullmatch(r"attention of layer \d read untouched \w+ in head \d, not those of its decoded cache", reason)


@pytest.mark.full
def test_the_record_says_how_many_layers_and_forwards_were_seen(shimmed: Shimmed) -> None:
    done = shimmed("", "kld,trajectory")
    ran = done.arm("int8")["ran"]
    assert ran["observed"]["layers"] == [LAYERS, LAYERS]
    assert ran["observed"]["prefills"][0] < ran["observed"]["prefills"][1]
    assert 0 < ran["observed"]["steps"][0] < ran["observed"]["steps"][1]
