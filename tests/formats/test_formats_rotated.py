"""Formats behind a Hadamard rotation: against the matrix itself, ggml's quantizer, and the error bound."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor

from fidelab.core import FormatSpec, KVSpec
from fidelab.core.errors import NotSupportedError, UsageError
from fidelab.engines.hf.kernels import options_of
from fidelab.formats import create
from fidelab.formats.known import canonical, names_of
from fidelab.formats.weights import weight_format
from tests.formats.samples import make, normal

TEXTS = [
    "q8_0[rotate=hadamard]",
    "q4_0[rotate=hadamard,seed=3]",
    "int4[group=32,rotate=hadamard-64]",
    "fp8_e4m3[rotate=hadamard,scale=per-token-head]",
    "fp8_e4m3[rotate=hadamard,scale=per-tensor]",
    "nvfp4[rotate=hadamard,seed=7]",
    "mxfp4[rotate=hadamard]",
    "iq4_nl[rotate=hadamard]",
]


def matrix(text: str, dim: int) -> Tensor:
    """R, read off from what float32 behind the rotation stores of the unit vectors."""
    (parts,) = make(text).encode(torch.eye(dim)[None, None])
    return parts[0, 0].T.double()


@pytest.mark.parametrize(
    ("kind", "dim", "size"),
    [("hadamard", 128, 128), ("hadamard", 80, 16), ("hadamard", 96, 32), ("hadamard-64", 192, 64)],
)
def test_a_rotation_is_sylvesters_matrix_in_blocks(kind: str, dim: int, size: int) -> None:
    expected = np.kron(np.eye(dim // size), hadamard(size) / size**0.5)
    np.testing.assert_allclose(matrix(f"f32[rotate={kind}]", dim).numpy(), expected, rtol=1e-7)


def test_random_signs_keep_it_orthogonal_and_depend_on_the_seed() -> None:
    first, second = (matrix(f"f32[rotate=hadamard,seed={seed}]", 64) for seed in (1, 2))
    assert torch.allclose(first @ first.T, torch.eye(64, dtype=torch.float64), atol=1e-6)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_rotated_blocks_are_the_bytes_that_ggmls_quantizer_makes_of_the_rotated_row(name: str) -> None:
    x = normal(1, 2, 50, 128)
    (parts,) = make(f"{name}[rotate=hadamard]").encode(x)
    turned = (x.double().numpy() @ (hadamard(128) * 128**-0.5)).astype(np.float32)
    expected = gguf.quants.quantize(turned, gguf.GGMLQuantizationType[name.upper()])
    np.testing.assert_array_equal(parts.numpy(), expected)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dim", [64, 128])
def test_no_error_exceeds_the_bound(text: str, dim: int) -> None:
    x = normal(2, 2, 40, dim)
    x[..., 3] *= 300
    fmt = make(text)
    scale = fmt.fit(x)
    error = (fmt.decode(fmt.encode(x, scale), dim, torch.float32, scale) - x).abs()
    assert bool((error <= fmt.error_bound(x, scale)).all())


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_those_of_the_parts(text: str) -> None:
    fmt = make(text)
    x = normal(1, 1, 1, 64)
    assert sum(part.nbytes for part in fmt.encode(x, fmt.fit(x))) == fmt.token_bytes(64)


def test_a_rotation_spreads_an_outlier() -> None:
    x = normal(1, 1, 200, 64)
    x[..., 5] *= 50

    def error(text: str) -> float:
        fmt = make(text)
        return float((fmt.decode(fmt.encode(x), 64, torch.float32) - x).norm())

    assert error("q4_0[rotate=hadamard]") < error("q4_0")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_definition_names_the_rotated_format_and_not_the_plain_one(text: str, dtype: torch.dtype) -> None:
    spec = KVSpec.parse(text).k
    fmt, x = create(spec), normal(1, 2, 30, 64).to(dtype)
    scale = fmt.fit(x)
    parts = fmt.encode(x, scale)
    assert names_of(parts, 64, fmt.decode(parts, 64, dtype, scale), scale, asked=spec) == [canonical(spec, 64)]
    plain = create(spec.without("rotate", "seed"))
    found = names_of(parts, 64, plain.decode(parts, 64, dtype, scale), scale, asked=spec)
    assert found == [canonical(spec.without("rotate", "seed"), 64)]


def test_rotate_none_is_the_format_itself_and_weights_and_kernels_without_a_rotation_refuse_one() -> None:
    assert make("q8_0[rotate=none]") == make("q8_0")
    assert canonical(FormatSpec("q8_0", (("rotate", "none"),)), 64) == "q8_0"
    with pytest.raises(UsageError, match="not of weights"):
        weight_format(KVSpec.parse("int4[rotate=hadamard]").k)
    with pytest.raises(NotSupportedError, match="no rotation"):
        options_of(KVSpec.parse("fp8_e4m3[rotate=hadamard]"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("q8_0[rotate=fourier]", "takes none, hadamard or hadamard-64, not 'fourier'"),
        ("q8_0[seed=3]", "add rotate=hadamard"),
        ("q8_0[rotate=hadamard,seed=x]", "not 'x'"),
    ],
)
def test_what_is_not_a_rotation_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make(text)


@pytest.mark.parametrize(("kind", "dim"), [("hadamard", 20), ("hadamard-64", 80)])
def test_head_dimensions_without_such_blocks_are_refused(kind: str, dim: int) -> None:
    with pytest.raises(NotSupportedError, match=f"head dimension {dim}"):
        make(f"q8_0[rotate={kind}]").encode(normal(1, 1, 1, dim))


@pytest.mark.parametrize("text", ["int2[rotate=hadamard]", "int4[rotate=hadamard]", "uint3[rotate=hadamard,seed=3]"])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_values_that_cancel_in_a_rotation_are_read_as_zeros(text: str, dim: int) -> None:
    """Codes of few levels cancel often; a rotation that rounds each of its numbers would leave 1e-17 instead."""
    fmt, spec = make(text), KVSpec.parse(text).k
    for seed in range(5):
        x = normal(1, 2, 64, dim, seed=seed)
        parts = fmt.encode(x)
        decoded = fmt.decode(parts, dim, torch.float32)
        assert names_of(parts, dim, decoded, asked=spec) == [canonical(spec, dim)]
