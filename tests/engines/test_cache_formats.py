"""The table of cache formats against what engines say of themselves (``scripts/cache-formats`` records it)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fidelab.core import FormatSpec, KVSpec
from fidelab.core.errors import NotSupportedError, UnknownNameError, UsageError
from fidelab.core.meant import ELSEWHERE
from fidelab.core.sequence import KVLayer
from fidelab.engines.base import engine_class, engines
from fidelab.engines.cache_formats import CacheFormat, Codes, exact_layers
from fidelab.engines.format_names import format_for, names_of, unknown_format
from fidelab.formats import FORMATS, create

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "cache_formats.json").read_text("utf-8"))
ENGINE = {"vllm": "vllm", "vllm next": "vllm", "sglang": "sglang"}
SIZES = [
    (source, name, *map(int, shape.split("x")), size)
    for source, said in RECORDED.items()
    for name, sizes in said["bytes"].items()
    for shape, size in sizes.items()
]


def row(engine: str, name: str) -> CacheFormat:
    return engine_class(engine).cache_formats[name]


@pytest.mark.parametrize("source", RECORDED)
def test_every_name_that_an_engine_takes_has_a_row(source: str) -> None:
    assert set(RECORDED[source]["names"]) <= {*engine_class(ENGINE[source]).cache_formats}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_row_that_the_engine_does_not_take_says_from_which_version_on_or_what_is_in_its_place(engine: str) -> None:
    beyond = {*engine_class(engine).cache_formats} - {*RECORDED[engine]["names"]}
    assert beyond
    assert all(row(engine, name).since or row(engine, name).instead for name in beyond)
    later = {name for name in beyond if row(engine, name).since}
    assert later <= {*RECORDED.get(f"{engine} next", {}).get("names", ())}


@pytest.mark.parametrize(("source", "name", "heads", "dim", "size"), SIZES)
def test_predicted_bytes_are_those_of_the_engines_own_function(
    source: str, name: str, heads: int, dim: int, size: int
) -> None:
    assert heads * sum(row(ENGINE[source], name).head_bytes(KVLayer(heads, dim, dim), 2)) == size


@pytest.mark.parametrize(("name", "sizes"), RECORDED["vllm"]["latents"].items())
def test_predicted_bytes_of_latents_are_those_of_vllms_own_function(name: str, sizes: dict[str, int]) -> None:
    for dim, size in sizes.items():
        assert row("vllm", name).head_bytes(KVLayer(1, int(dim) - 64, 64, latent=True), 2) == (size,)


@pytest.mark.parametrize("case", RECORDED["vllm"]["kept"])
def test_the_layers_that_vllm_itself_leaves_in_16_bits_are_known(case: str) -> None:
    layers, _, hybrid = case.partition(" ")
    found = row("vllm", "turboquant_4bit_nc").kept(int(layers), hybrid=bool(hybrid))
    assert sorted(found) == RECORDED["vllm"]["kept"][case]
    assert not row("vllm", "fp8").kept(int(layers))


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_a_row_that_means_a_format_of_fidelab_takes_the_same_bytes(dim: int) -> None:
    rows = [one for cls in engines() for one in cls.cache_formats.values() if one.means]
    assert {one.means for one in rows} >= {"q8_0", "q5_1", "iq4_nl", "f16", "fp8_e4m3", "fp8_e5m2"}
    for one in rows:
        assert one.k.head_bytes(dim, 2) == create(FormatSpec(one.means)).token_bytes(dim), one.name


def test_a_slot_is_rounded_up_for_keys_and_values_together_and_a_block_must_divide_the_head() -> None:
    packed = CacheFormat("x", Codes(3, scale=2), Codes(3, scale=4), align=8)
    assert packed.head_bytes(KVLayer(1, 64, 64), 2) == (56,)  # 24 + 2 + 24 + 4 = 54
    with pytest.raises(NotSupportedError, match=r"^heads of 80 are no multiple of q8_0's block of 32$"):
        row("llamacpp", "q8_0").head_bytes(KVLayer(1, 80, 80), 2)
    with pytest.raises(NotSupportedError, match="does not hold latents"):
        row("vllm", "turboquant_4bit_nc").head_bytes(KVLayer(1, 512, 64, latent=True), 2)
    with pytest.raises(NotSupportedError, match="a format of latents, which this model does not cache"):
        row("vllm", "fp8_ds_mla").head_bytes(KVLayer(1, 128, 128), 2)


def test_layers_are_exact_by_number_by_kind_and_by_the_engines_own_rule() -> None:
    layers = [KVLayer(1, 64, 64, 512 if n % 2 else None, number=n) for n in range(6)]
    packed, plain = row("vllm", "turboquant_4bit_nc"), row("vllm", "fp8")
    asked = KVSpec.parse("fp8[skip-layers=sliding_window,2]")
    assert exact_layers(plain, asked, layers, 6, hybrid=False) == {1, 2, 3, 5}
    assert exact_layers(packed, KVSpec.parse("turboquant_4bit_nc"), layers, 6, hybrid=False) == {0, 1, 4, 5}
    assert exact_layers(packed, KVSpec.parse("turboquant_4bit_nc"), layers, 6, hybrid=True) == set()


@pytest.mark.parametrize(
    ("name", "engine", "said"),
    [
        ("fp8_e4m3fn", "", "the same format is called fp8_e4m3 here"),
        ("float8_e4m3fn", "vllm", "the same format is called fp8_e4m3 here"),
        ("fp16", "vllm", "the same format is called float16 here"),
        ("fp16", "sglang", "the same format is called f16 here"),  # and not auto, which is any model's type
        ("fp8", "llamacpp", "engines sglang and vllm have fp8_e4m3: pass --engine sglang"),
        ("q8", "llamacpp", "the same format is called q8_0 here"),
        ("Q8_0", "llamacpp", "the same format is called q8_0 here"),
        ("octave_k3v4", "vllm", "vLLM has it from 0.33 on, and 0.32.0 is installed"),
        ("fp4_e2m1", "sglang", "SGLang no longer has it: write nvfp4 or fp4_mx_block16"),
        ("fp4_e2m1", "", "SGLang no longer has it"),
        ("turboquant_4bit_nc", "sglang", "engine vllm has it: pass --engine vllm"),
        ("turboquant_4bit_nc", "", "engine vllm has it: pass --engine vllm"),
        ("tq3", "", "engine vllm has turboquant_3bit_nc: pass --engine vllm"),
        ("int2", "vllm", "engine hf has it: pass --engine hf"),
        ("policy-8", "vllm", "for LMDeploy's --quant-policy: uint8"),
        ("4bit", "", "for mlx-lm's --kv-bits"),
        ("cq6", "", "for ExLlamaV3's -cq"),
    ],
)
def test_an_unknown_name_is_told_by_what_it_is_elsewhere(name: str, engine: str, said: str) -> None:
    known = names_of(engine_class(engine)) if engine else FORMATS.names()
    text = str(unknown_format(name, [each for each in known if each != name], engine, "0.32.0"))
    assert text.startswith(f"unknown KV format{f' of engine {engine}' if engine else ''} {name!r}: {said}"), text
    assert "did you mean" not in text


def test_a_typo_is_told_by_the_nearest_name() -> None:
    assert "did you mean 'fp8_e4m3'" in str(unknown_format("fp8_e4m", FORMATS.names()))


def test_a_format_is_fidelabs_the_engines_that_is_named_or_that_of_all_who_have_it() -> None:
    assert format_for(KVSpec.parse("q8_0")) is None
    assert format_for(KVSpec.parse("k16v8")) is None
    found = format_for(KVSpec.parse("q8_0"), "llamacpp")
    assert found is not None
    assert found[0] == "llamacpp"
    assert (format_for(KVSpec.parse("turboquant_k8v4")) or ("",))[0] == "vllm"
    with pytest.raises(UnknownNameError, match="engine vllm has it"):
        format_for(KVSpec.parse("turboquant_k8v4"), "hf")
    with pytest.raises(UsageError, match="take no options"):
        format_for(KVSpec.parse("fp8[scale=1]"), "vllm")


def test_a_tools_names_are_patterns_that_its_own_users_words_match_and_no_format_of_an_engine_does() -> None:
    names = {name for cls in engines() for name in names_of(cls)} | {*FORMATS.names()}
    for tool in ELSEWHERE:
        assert not [name for name in names if re.fullmatch(tool.names, name)], tool.tool
