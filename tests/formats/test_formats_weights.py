"""Formats of weights: each against the package or library that defines it, on the same matrix."""

from __future__ import annotations

import importlib.util

import gguf
import numpy as np
import pytest
import torch

from fidelab.core import FormatSpec
from fidelab.core.errors import NotSupportedError, UnknownNameError, UsageError
from fidelab.formats import FORMATS, K_QUANTS, weights
from fidelab.formats.weights import weight_format


def matrix(rows: int = 6, columns: int = 512, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) / 20).to(dtype)


def rounded(text: str, weight: torch.Tensor) -> torch.Tensor:
    out = weight.clone()
    weight_format(FormatSpec.parse(text)).round_(out)
    return out


def needs_ggml() -> None:
    try:
        weights._ggml()
    except NotSupportedError as error:
        pytest.skip(str(error))


def grouped_int(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Symmetric round-to-nearest with a float16 scale for each group, written out value by value."""
    top, out = 2 ** (bits - 1) - 1, weight.clone()
    for row in out:
        for part in row.split(group):
            scale = np.float16(float(part.abs().max()) / top).astype(np.float32)
            codes = np.clip(np.rint(part.numpy() / scale), -top, top)
            part.copy_(torch.from_numpy(codes * scale))
    return out


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("group", "columns"), [(128, 512), (64, 512), (128, 576)])
def test_integers_have_one_scale_for_each_group_of_inputs(bits: int, group: int, columns: int) -> None:
    weight = matrix(3, columns)
    torch.testing.assert_close(
        rounded(f"int{bits}[group={group}]", weight), grouped_int(weight, bits, group), rtol=0, atol=0
    )


def test_integers_have_groups_of_128_unless_told() -> None:
    assert torch.equal(rounded("int4", matrix()), rounded("int4[group=128]", matrix()))
    assert not torch.equal(rounded("int4", matrix()), rounded("int4[group=32]", matrix()))


def test_fp8_has_a_scale_for_each_output_unless_told() -> None:
    weight = matrix()
    exact = (weight.abs().amax(1, keepdim=True) / 448).numpy()
    near = exact.astype(np.float16)
    above = torch.from_numpy(np.where(near < exact, np.nextafter(near, np.float16(1)), near).astype(np.float32))
    assert torch.equal(rounded("fp8_e4m3", weight), (weight / above).to(torch.float8_e4m3fn).float() * above)
    tensor = weight.abs().max() / 448
    torch.testing.assert_close(
        rounded("fp8_e4m3[scale=per-tensor]", weight), (weight / tensor).to(torch.float8_e4m3fn).float() * tensor
    )
    with pytest.raises(UsageError, match="option scale of fp8_e4m3 weights takes per-channel, per-tensor, none"):
        weight_format(FormatSpec.parse("fp8_e4m3[scale=per-token-head]"))


def test_a_scale_of_the_whole_tensor_does_not_depend_on_the_parts_that_are_rounded_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = {text: rounded(text, matrix()) for text in ("nvfp4", "fp8_e4m3[scale=per-tensor]", "int4", "mxfp4")}
    monkeypatch.setattr(weights, "_CHUNK_VALUES", 1024)
    for text, expected in whole.items():
        assert torch.equal(rounded(text, matrix()), expected)


def test_experts_are_rounded_each_by_itself_and_a_transposed_view_along_its_own_rows() -> None:
    experts = torch.stack([matrix(), 100 * matrix()])
    for text in ("nvfp4", "fp8_e4m3[scale=per-tensor]", "int4"):
        assert torch.equal(rounded(text, experts), torch.stack([rounded(text, expert) for expert in experts]))
    stored = matrix().T.contiguous()
    weight_format(FormatSpec.parse("int4")).round_(stored.T)
    assert torch.equal(stored.T, rounded("int4", matrix()))


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4"])
def test_ggmls_blocks_are_those_of_package_gguf(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name.upper()]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(matrix().numpy(), kind), kind)
    np.testing.assert_array_equal(rounded(name, matrix()).numpy(), theirs)
    assert weight_format(FormatSpec(name)).nbytes((6, 512)) == gguf.quants.quantize(matrix().numpy(), kind).nbytes


@pytest.mark.parametrize("name", K_QUANTS)
def test_k_quants_have_the_size_and_the_values_that_package_gguf_reads(name: str) -> None:
    needs_ggml()
    kind = gguf.GGMLQuantizationType[name.upper()]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    weight = matrix()
    out = rounded(name, weight)
    assert weight_format(FormatSpec(name)).nbytes((6, 512)) == 6 * 512 // values * size
    error = float((out - weight).norm() / weight.norm())
    assert error == pytest.approx(
        {"q6_k": 0.019, "q5_k": 0.037, "q4_k": 0.075, "q3_k": 0.16, "q2_k": 0.3}[name], rel=0.3
    )


def test_k_quants_are_read_as_package_gguf_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_ggml()
    seen: list[torch.Tensor] = []
    plain = torch.empty

    def kept(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
        seen.append(plain(*sizes, dtype=dtype))
        return seen[-1]

    monkeypatch.setattr(torch, "empty", kept)
    for name in K_QUANTS:
        out = rounded(name, matrix())
        codes = seen[-1].numpy().reshape(6, -1)
        np.testing.assert_array_equal(
            out.numpy(), gguf.quants.dequantize(codes, gguf.GGMLQuantizationType[name.upper()])
        )


def test_rows_that_super_blocks_do_not_divide_get_the_format_that_llama_quantize_takes() -> None:
    needs_ggml()
    for name, other in {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "q3_k": "iq4_nl", "q2_k": "iq4_nl"}.items():
        fmt = weight_format(FormatSpec(name))
        assert fmt.used(576) == other
        assert fmt.used(512) == name
        assert torch.equal(rounded(name, matrix(2, 576)), rounded(other, matrix(2, 576)))
        assert fmt.nbytes((2, 576)) == weight_format(FormatSpec(other)).nbytes((2, 576))


@pytest.mark.parametrize("name", [*FORMATS.built_in, *K_QUANTS])
def test_every_format_keeps_the_type_and_comes_near(name: str) -> None:
    if name in K_QUANTS:
        needs_ggml()
    weight = matrix(dtype=torch.bfloat16)
    out = rounded(name, weight)
    assert out.dtype == torch.bfloat16
    coarse = name in ("int2", "uint2", "lloyd1")
    assert float((out.float() - weight.float()).norm() / weight.float().norm()) < (0.8 if coarse else 0.35)


def test_bytes_are_those_of_packed_codes_and_scales() -> None:
    def bits(text: str) -> float:
        return weight_format(FormatSpec.parse(text)).nbytes((64, 1024)) * 8 / (64 * 1024)

    assert bits("int4[group=128]") == 4 + 16 / 128
    assert bits("int3[group=128]") == 3 + 16 / 128  # stored in a byte each by the format, which is not counted
    assert bits("int8[group=1024]") == 8 + 16 / 1024
    assert bits("fp8_e4m3") == 8 + 16 / 1024
    assert bits("mxfp4") == 4 + 8 / 32
    assert bits("nvfp4") == 4 + 8 / 16 + 32 / (64 * 1024)
    assert weight_format(FormatSpec("nvfp4")).nbytes((3, 64, 1024)) == 3 * weight_format(FormatSpec("nvfp4")).nbytes(
        (64, 1024)
    )


def test_unknown_formats_and_options_are_refused_with_the_names_that_exist() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown weight format 'q4_kk'; did you mean .*'q4_k'"):
        weight_format(FormatSpec("q4_kk"))
    with pytest.raises(UsageError, match="option group of int4 takes a positive multiple of 8, not '7'"):
        weight_format(FormatSpec.parse("int4[group=7]"))
    with pytest.raises(UsageError, match="q4_k has no option 'group'"):
        weight_format(FormatSpec.parse("q4_k[group=32]"))


def test_a_k_quant_without_ggmls_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("FIDELAB_CACHE", str(tmp_path))
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    weights._ggml.cache_clear()
    try:
        with pytest.raises(NotSupportedError, match="fidelab setup install llamacpp"):
            weight_format(FormatSpec("q4_k"))
    finally:
        weights._ggml.cache_clear()
