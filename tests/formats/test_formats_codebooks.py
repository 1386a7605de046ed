"""Asymmetric integers and Lloyd-Max codebooks against brute force and published constants; exceptions as options."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from fidelab.core.errors import NotSupportedError, UsageError
from fidelab.formats.base import Format
from fidelab.formats.lloyd import levels
from tests.formats.samples import make, normal


def decoded(fmt: Format, x: Tensor) -> Tensor:
    scale = fmt.fit(x)
    return fmt.decode(fmt.encode(x, scale), x.shape[-1], torch.float32, scale)


def brute(values: list[float], bits: int) -> list[float]:
    """One group of asymmetric integers, number by number."""
    least = np.float16(min(values))
    step = np.float16((np.float32(max(values)) - np.float32(least)) / np.float32(2**bits - 1))
    codes = [
        min(max(round(float((np.float32(v) - np.float32(least)) / np.float32(step))), 0), 2**bits - 1) for v in values
    ]
    return [float(np.float32(q) * np.float32(step) + np.float32(least)) for q in codes]


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_group_along_the_head_is_what_brute_force_makes_of_it(bits: int) -> None:
    x = normal(1, 2, 3, 40) + 5
    out = decoded(make(f"uint{bits}[group=16]"), x)
    for row, found in zip(x.reshape(-1, 40).tolist(), out.reshape(-1, 40).tolist(), strict=True):
        due = [value for start in range(0, 40, 16) for value in brute(row[start : start + 16], bits)]
        assert found == pytest.approx(due, abs=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_group_along_the_tokens_is_what_brute_force_makes_of_each_channel(bits: int) -> None:
    x = normal(1, 2, 32, 8)
    x[..., 3] *= 1000  # an outlier channel costs the others nothing
    out = decoded(make(f"uint{bits}[axis=channel,group=16]"), x)
    for head in range(2):
        for channel in range(8):
            column = x[0, head, :, channel].tolist()
            due = brute(column[:16], bits) + brute(column[16:], bits)
            assert out[0, head, :, channel].tolist() == pytest.approx(due, rel=1e-5, abs=1e-6)


def test_bytes_of_channel_groups_are_those_of_the_parts() -> None:
    fmt, x = make("uint2[axis=channel,group=32]"), normal(1, 2, 96, 64)
    parts = fmt.encode(x)
    assert fmt.token_block == 32
    assert 96 * 2 * fmt.token_bytes(64) == sum(part.nbytes for part in parts)
    with pytest.raises(NotSupportedError, match="do not spread evenly over 128 tokens"):
        make("uint2[axis=channel,group=128]").token_bytes(40)


@pytest.mark.parametrize(("bits", "distortion"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_levels_have_the_distortion_of_the_optimal_quantizer(bits: int, distortion: float) -> None:
    """Max, 1960, table I; integrated over each interval, not sampled."""
    table = levels(bits)
    grid = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    code = torch.bucketize(grid, (table[1:] + table[:-1]) / 2)
    density = torch.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi)
    found = float(torch.trapezoid((grid - table[code]) ** 2 * density, grid))
    assert found == pytest.approx(distortion, rel=1e-3)
    assert torch.equal(table, -table.flip(0))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_each_level_is_the_mean_of_a_normal_variable_between_the_adjacent_midpoints(bits: int) -> None:
    table = levels(bits).tolist()
    edges = [-math.inf, *((one + other) / 2 for one, other in pairwise(table)), math.inf]
    density = [math.exp(-(edge**2) / 2) / math.sqrt(2 * math.pi) for edge in edges]
    above = [math.erfc(edge / math.sqrt(2)) / 2 for edge in edges]
    means = [(density[i] - density[i + 1]) / (above[i] - above[i + 1]) for i in range(len(table))]
    assert table == pytest.approx(means, abs=1e-13)


def test_one_bit_is_the_mean_of_half_a_normal_variable() -> None:
    assert levels(1).tolist() == pytest.approx([-math.sqrt(2 / math.pi), math.sqrt(2 / math.pi)], abs=1e-12)


def test_a_rotation_brings_outlier_channels_to_the_distortion_of_a_gaussian() -> None:
    x = normal(1, 1, 4096, 64)
    x[..., 5] *= 30

    def distortion(text: str) -> float:
        return float(((decoded(make(text), x) - x).square().sum(-1) / x.square().sum(-1)).mean())

    assert distortion("lloyd4[rotate=hadamard,seed=1]") < 0.013 < 0.05 < distortion("lloyd4")


def test_the_norm_of_a_token_is_its_own_and_a_scale_per_head_its_largest_magnitude() -> None:
    x = normal(1, 1, 4, 64) * torch.tensor([1e-3, 1.0, 1e3, 0.0])[None, None, :, None]
    fmt = make("lloyd4")
    error = (decoded(fmt, x) - x).norm(dim=-1) / x.norm(dim=-1).clamp_min(1e-30)
    assert (error < 0.2).all()
    assert (decoded(fmt, x)[0, 0, 3] == 0).all()
    x = normal(2, 3, 5, 8)
    fmt = make("fp8_e4m3[scale=per-head]")
    scale = fmt.fit(x)
    assert scale is not None
    assert torch.equal(scale, x.abs().amax((2, 3), keepdim=True) / 448)
    assert fmt.sequence_bytes(3, 8) == 12


@pytest.mark.parametrize(
    ("text", "encoded"),
    [
        ("int4[tail=8]", [0, 0, 1, 12]),
        ("int4[sinks=4,tail=8]", [0, 0, 0, 8]),
        ("int4[sinks=4]", [0, 4, 5, 16]),
        ("uint2[axis=channel,group=8]", [0, 8, 8, 16]),
        ("uint2[axis=channel,group=8,tail=4,sinks=2]", [0, 0, 0, 8]),
    ],
)
def test_so_many_tokens_are_encoded_between_the_exceptions(text: str, encoded: list[int]) -> None:
    fmt = make(text)
    assert fmt.has_exceptions
    assert [fmt.encoded_tokens(n) for n in (0, 8, 9, 20)] == encoded


def test_a_rotation_lies_within_the_exceptions() -> None:
    x = normal(1, 2, 8, 64)
    assert torch.equal(decoded(make("int4[rotate=hadamard,tail=8]"), x), decoded(make("int4[rotate=hadamard]"), x))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int4[tail=0]", "option tail of int4 takes a positive number, not '0'"),
        ("int4[tail=-3]", "option tail of int4 takes a positive number, not '-3'"),
        ("q8_0[sinks=many]", "option sinks of q8_0 takes a positive number, not 'many'"),
        ("uint4[axis=token]", "option axis of uint4 takes head or channel, not 'token'"),
        ("uint4[group=12]", "option group of uint4 takes a positive multiple of 8, not '12'"),
        ("lloyd4[group=32]", "lloyd4 has no option 'group'; it takes none"),
        ("int4[tails=3]", "int4 has no option 'tails'"),
    ],
)
def test_bad_options_are_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        make(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
