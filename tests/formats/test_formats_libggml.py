"""Block formats against llama.cpp's own quantizers, where its library is at hand (package llama-cpp-python)."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fidelab.core import FormatSpec
from fidelab.formats import create


def library() -> Path | None:
    """libggml-base, beside the installed package."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted((Path(spec.origin).parent / "lib").glob("libggml-base.so*"))), None)


LIBRARY = library()
EXACT = ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"]
pytestmark = pytest.mark.llamacpp


def quantized(name: str, x: NDArray[np.float32], size: int) -> NDArray[np.uint8]:
    """Rows ``[n, size]`` as ``quantize_row_<name>_ref`` writes them."""
    quantize = getattr(ctypes.CDLL(str(LIBRARY)), f"quantize_row_{name}_ref")
    quantize.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    quantize.restype = None
    out = np.zeros((len(x), size), dtype=np.uint8)
    flat = np.ascontiguousarray(x)
    quantize(flat.ctypes.data, out.ctypes.data, flat.size)
    return out


def content(spread: float) -> NDArray[np.float32]:
    rng = np.random.default_rng(3)
    return (rng.standard_normal((4000, 128)) * 10.0 ** rng.uniform(-spread, spread, (4000, 1))).astype(np.float32)


def encoded(name: str, x: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.asarray(create(FormatSpec(name)).encode(torch.from_numpy(x)[None, None])[0][0, 0].numpy())


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_encoded_bytes_are_llama_cpps(name: str, spread: float) -> None:
    ours = encoded(name, content(spread))
    np.testing.assert_array_equal(ours, quantized(name, content(spread), ours.shape[-1]))


@pytest.mark.parametrize("name", EXACT)
def test_zeros_are_encoded_as_llama_cpp_does(name: str) -> None:
    ours = encoded(name, np.zeros((3, 64), dtype=np.float32))
    np.testing.assert_array_equal(ours, quantized(name, np.zeros((3, 64), dtype=np.float32), ours.shape[-1]))


@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_iq4_nl_has_llama_cpps_codes_and_its_fitted_scale_but_for_the_order_of_the_sum(spread: float) -> None:
    ours = encoded("iq4_nl", content(spread))
    theirs = quantized("iq4_nl", content(spread), ours.shape[-1])
    blocks = (ours.reshape(-1, 18), theirs.reshape(-1, 18))
    np.testing.assert_array_equal(blocks[0][:, 2:], blocks[1][:, 2:])
    steps = [block[:, :2].copy().view(np.int16)[:, 0].astype(np.int64) for block in blocks]
    apart = np.abs(steps[0] - steps[1])
    assert apart.max() <= 1
    assert (apart > 0).mean() < 1e-3
