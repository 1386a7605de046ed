"""f32, f16 and bf16."""

from __future__ import annotations

import pytest
import torch

from fidelab.core import FormatSpec
from fidelab.formats import create
from fidelab.formats.base import Parts
from tests.formats.samples import normal


def encode(name: str, *values: float, dtype: torch.dtype = torch.float32) -> Parts:
    return create(FormatSpec(name)).encode(torch.tensor(values, dtype=dtype).view(1, 1, 1, -1))


@pytest.mark.parametrize(("name", "dtype"), [("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_the_one_part_has_the_formats_type(name: str, dtype: torch.dtype) -> None:
    (part,) = encode(name, 1.0, 2.0)
    assert part.dtype == dtype


@pytest.mark.parametrize(
    ("stored", "values"),
    [
        (encode("f16", 65519.0, 65520.0, -1e30, 3.4e38), [65504.0, 65504.0, -65504.0, 65504.0]),
        (encode("f16", 65536.0, -1e30, dtype=torch.bfloat16), [65504.0, -65504.0]),
        (encode("bf16", 3.4e38, -3.4e38), [torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).min]),
    ],
    ids=["f16", "f16 of bfloat16", "bf16"],
)
def test_finite_values_saturate(stored: tuple[torch.Tensor, ...], values: list[float]) -> None:
    (part,) = stored
    assert part.flatten().tolist() == values


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_infinities_stay(name: str) -> None:
    (part,) = encode(name, float("inf"), float("-inf"))
    assert part.flatten().tolist() == [float("inf"), float("-inf")]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("f16", 1 + 2**-11, 1.0),
        ("f16", 1 + 3 * 2**-11, 1 + 2**-9),
        ("f16", 2**-25, 0.0),
        ("bf16", 1 + 2**-8, 1.0),
        ("bf16", 1 + 3 * 2**-8, 1 + 2**-6),
    ],
)
def test_ties_go_to_even(name: str, value: float, expected: float) -> None:
    assert encode(name, value)[0].item() == expected


def test_f32_changes_nothing() -> None:
    x = normal(1, 2, 3, 64)
    fmt = create(FormatSpec("f32"))
    assert torch.equal(fmt.decode(fmt.encode(x), 64, torch.float32), x)
    assert fmt.error_bound(x).max() == 0
