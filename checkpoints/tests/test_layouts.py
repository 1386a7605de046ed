"""What packed words and quantized modules mean, against their definitions and another implementation's bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from checkpoints.tests.packing import packed
from fidelab.core.errors import InputError
from fidelab_checkpoints.layouts import (
    Awq,
    BlockFp8,
    Gptq,
    GptqV2,
    Layout,
    Mxfp4,
    Nvfp4,
    PackQuantized,
    QuantizedLinear,
    ScaledWeight,
    Settings,
    StoredArray,
    method_of,
    pack_words,
    quantized_modules,
    unpack_words,
)

N, K = 32, 128
RNG = np.random.default_rng(18)


def _linear(bits: int = 4, group: int = 32, *, zeros: bool = True, index: bool = False) -> QuantizedLinear:
    groups = K // group
    return QuantizedLinear(
        codes=RNG.integers(0, 1 << bits, (N, K)).astype(np.uint8),
        scales=RNG.uniform(0.01, 1, (N, groups)).astype(np.float16).astype(np.float32),
        zeros=RNG.integers(0, 1 << bits, (N, groups)).astype(np.uint8) if zeros else None,
        group_index=RNG.permutation(np.repeat(np.arange(groups), group)).astype(np.int32) if index else None,
        group_size=group,
        bits=bits,
    )


def _same(a: QuantizedLinear, b: QuantizedLinear) -> bool:
    zeros = a.zeros is b.zeros if a.zeros is None or b.zeros is None else np.array_equal(a.zeros, b.zeros)
    index = np.array_equal(a.groups, b.groups)
    return zeros and index and np.array_equal(a.codes, b.codes) and np.array_equal(a.scales, b.scales)


def _by_definition(linear: QuantizedLinear) -> NDArray[np.float32]:
    weight = np.empty(linear.shape, np.float32)
    for n in range(N):
        for k in range(K):
            g = k // linear.group_size if linear.group_index is None else linear.group_index[k]
            zero = linear.midpoint if linear.zeros is None else int(linear.zeros[n, g])
            weight[n, k] = np.float32(int(linear.codes[n, k]) - zero) * linear.scales[n, g]
    return weight


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("axis", [0, 1])
def test_fields_follow_one_another_in_the_words_lowest_bits_first(bits: int, axis: int) -> None:
    fields = RNG.integers(0, 1 << bits, (5, 37) if axis else (37, 5)).astype(np.uint8)
    words = pack_words(fields, bits, axis)
    lines = zip(np.moveaxis(fields, axis, 1), np.moveaxis(words, axis, 1), strict=True)
    for values, line in lines:
        stream = sum(int(value) << (bits * place) for place, value in enumerate(values))
        assert stream == sum(int(word) << (32 * place) for place, word in enumerate(line.view(np.uint32)))
    assert np.array_equal(unpack_words(words, bits, axis, count=37), fields)


@pytest.mark.parametrize("layout", [Gptq(), GptqV2()])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("index", [False, True])
def test_gptq_gives_back_what_was_packed(layout: Layout, bits: int, index: bool) -> None:
    linear = _linear(bits, index=index)
    back = layout.unpack(packed(layout, linear), Settings())
    assert _same(back, linear)
    assert back.bits == bits
    assert back.group_size == 32


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_version_1_stores_zero_points_minus_one(bits: int) -> None:
    linear = _linear(bits)
    assert linear.zeros is not None
    linear.zeros[:] = np.maximum(linear.zeros, 1)
    stored = packed(Gptq(), linear)["qzeros"].values
    assert np.array_equal(unpack_words(stored, bits, axis=1), linear.zeros.T - 1)


def test_awq_keeps_columns_in_its_order() -> None:
    """Columns 0 … 7 with codes 0 … 7: AutoAWQ's word has 0, 2, 4, 6, 1, 3, 5, 7 from its lowest half byte."""
    codes = np.arange(8, dtype=np.uint8)[:, None]  # [N, K] of one input
    linear = QuantizedLinear(codes, np.ones((8, 1), np.float32), None, None, 1, 4)
    stored = Awq().pack(linear)
    assert stored["qweight"].values.view(np.uint32).tolist() == [[0x75316420]]
    assert stored["qzeros"].values.view(np.uint32).tolist() == [[0x88888888]]
    assert _same(Awq().unpack(Awq().pack(other := _linear()), Settings()), other)


@pytest.mark.parametrize(("zeros", "index"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_pack_quantized_gives_back_what_was_packed(bits: int, zeros: bool, index: bool) -> None:
    linear = _linear(bits, zeros=zeros, index=index)
    stored = packed(PackQuantized(), linear)
    assert ("weight_zero_point" in stored, "weight_g_idx" in stored) == (zeros, index)
    assert _same(PackQuantized().unpack(stored, Settings()), linear)


def test_pack_quantized_with_a_last_group_that_is_not_full() -> None:
    linear = _linear(group=32)
    short = QuantizedLinear(linear.codes[:, :100], linear.scales, linear.zeros, None, 32, 4)
    back = PackQuantized().unpack(packed(PackQuantized(), short), Settings((32,)))
    assert np.array_equal(back.dequantize(), linear.dequantize()[:, :100])


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_dequantized_weights_are_those_of_the_definition(zeros: bool, index: bool) -> None:
    linear = _linear(zeros=zeros, index=index)
    assert np.array_equal(linear.dequantize(), _by_definition(linear))
    assert np.array_equal(linear.rows(3, 9).dequantize(), _by_definition(linear)[3:9])


@pytest.mark.parametrize("zeros", [False, True])
def test_scales_become_positive_and_no_weight_changes(zeros: bool) -> None:
    linear = _linear(zeros=zeros)
    linear.scales[::3, ::2] *= -1
    linear.scales[1, 1] = -0.0
    positive = linear.with_positive_scales()
    assert not np.signbit(positive.scales).any()
    assert np.array_equal(positive.dequantize(), linear.dequantize())


def test_groups_out_of_order_are_put_in_order_where_runs_allow_it() -> None:
    linear = _linear(group=64)
    assert linear.zeros is not None
    shuffled = replace(
        linear, scales=linear.scales[:, ::-1], zeros=linear.zeros[:, ::-1], group_index=1 - linear.groups
    )
    for size in (64, 32):
        ordered = shuffled.regrouped(size)
        assert ordered is not None
        assert ordered.group_index is None
        assert np.array_equal(ordered.dequantize(), linear.dequantize())
    assert _linear(index=True).regrouped(32) is None
    assert linear.regrouped(128) is None


def _float8(values: NDArray[Any]) -> NDArray[np.uint8]:
    import torch

    return torch.from_numpy(np.asarray(values, np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


@pytest.mark.parametrize("shape", [(1,), (N, 1), (N, K // 32)])
def test_float8_weights_are_torchs_times_their_scale(shape: tuple[int, ...]) -> None:
    import torch

    codes, scale = _float8(RNG.normal(size=(N, K))), RNG.uniform(0.1, 1, shape).astype(np.float32)
    stored = {"weight": StoredArray(codes, "F8_E4M3"), "weight_scale": StoredArray(scale, "F32")}
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    spread = np.repeat(scale, 32, axis=1) if shape == (N, K // 32) else scale
    assert np.array_equal(ScaledWeight().unpack(stored, Settings()).dequantize(), expected * spread)


def test_blocks_of_float8_share_a_scale_also_where_the_last_is_not_full() -> None:
    codes, scale = _float8(RNG.normal(size=(20, 24))), RNG.uniform(0.1, 1, (2, 2)).astype(np.float32)
    stored = {"weight": StoredArray(codes, "F8_E4M3"), "weight_scale_inv": StoredArray(scale, "F32")}
    weight = BlockFp8().unpack(stored, Settings((), (16, 16))).dequantize()
    alone = {"weight": StoredArray(codes, "F8_E4M3"), "weight_scale": StoredArray(np.ones(1, np.float32), "F32")}
    plain = ScaledWeight().unpack(alone, Settings()).dequantize()
    for n in range(20):
        for k in range(24):
            assert weight[n, k] == plain[n, k] * scale[n // 16, k // 16]


def test_int8_weights_are_signed_and_their_zero_points_too() -> None:
    codes, zeros = RNG.integers(-128, 128, (N, K)).astype(np.int8), RNG.integers(-128, 128, (N, 1)).astype(np.int8)
    scale = RNG.uniform(0.1, 1, (N, 1)).astype(np.float32)
    stored = {
        "weight": StoredArray(codes, "I8"),
        "weight_scale": StoredArray(scale, "F32"),
        "weight_zero_point": StoredArray(zeros, "I8"),
    }
    expected = (codes.astype(np.float32) - zeros) * scale
    assert np.array_equal(ScaledWeight().unpack(stored, Settings()).dequantize(), expected)


def test_four_bit_floats_have_their_sixteen_values_the_lower_half_first() -> None:
    packed = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], np.uint8)
    scales = StoredArray(_float8(np.array([[2.0]])), "F8_E4M3")
    stored = {
        "weight_packed": StoredArray(packed, "U8"),
        "weight_scale": scales,
        "weight_global_scale": StoredArray(np.array([4], np.float32), "F32"),
    }
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = np.array([[*positive, *(-value for value in positive)]], np.float32)
    assert np.array_equal(Nvfp4().unpack(stored, Settings()).dequantize(), expected * 0.5)
    exponents = {"weight_packed": stored["weight_packed"], "weight_scale": StoredArray(np.array([[126]], "u1"), "U8")}
    assert np.array_equal(Mxfp4().unpack(exponents, Settings()).dequantize(), expected * 0.5)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, "gptq_v2"),
        ({"quant_method": "awq", "version": "gemm"}, "awq"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, "gptq"),
        ({"quant_method": "auto-round", "packing_format": "auto_round"}, "gptq_v2"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, "awq"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
    ],
)
def test_methods_by_their_configuration(config: dict[str, str], method: str) -> None:
    assert method_of(config) == method


@pytest.mark.parametrize(
    "config", [{"quant_method": "bitsandbytes"}, {"quant_method": "gptq", "checkpoint_format": "marlin"}, {}]
)
def test_an_unknown_method_is_refused_by_its_name(config: dict[str, str]) -> None:
    with pytest.raises(InputError, match="quantization_config has the") as refused:
        method_of(config)
    assert "\n" not in str(refused.value)


class Header:
    dtype, shape = "I32", (4, 4)


def test_a_module_without_its_zero_points_or_of_shapes_that_do_not_belong_together_is_refused_by_its_name() -> None:
    names = {f"model.a.{part}": Header() for part in ("qweight", "qzeros", "scales")}
    module = quantized_modules(names, {"quant_method": "awq"})["model.a"]
    stored = Awq().pack(_linear())
    stored["scales"] = StoredArray(stored["scales"].values[:, :8], "F16")
    with pytest.raises(InputError, match=r"module model\.a is not what awq stores \(weights"):
        module.unpack(stored)
    del names["model.a.qzeros"]
    with pytest.raises(InputError, match=r"module model\.a has qweight, but lacks qzeros"):
        quantized_modules(names, {"quant_method": "gptq"})
