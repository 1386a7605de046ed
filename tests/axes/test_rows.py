"""Rows of one item against those of many captures."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from fidelab.axes import rows
from fidelab.axes.rows import compare_item, compare_many
from fidelab.captures.container import Array, BFloat16, to_float32
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill
from fidelab.captures.writer import store_head
from fidelab.errors import CaptureError
from fidelab.metrics.divergence import RowComparison
from tests.captures.sample import named, writer

N, WIDTH = 40, 16
VOCABULARY = [f"<{n}>" for n in range(96)]
WINDOWS = Prefill("kld", (tuple(range(N + 1)),) * 2, 0, N - 1, ((0,) * N, (1,) * N))
TARGETS = np.arange(1, N + 1)


def stored(values: np.ndarray, kind: str) -> Array:
    bits = values.astype(np.float32).view(np.uint32)
    return BFloat16((bits >> 16).astype(np.uint16)) if kind == "bf16" else values.astype(np.float32)


def captured(store: Path, name: str, noise: float, kind: str, *, missing: int | None = None, seed: int = 0) -> Capture:
    """A capture of hidden states; those of each name but the reference's are disturbed in their own way."""
    shared, own = np.random.default_rng(seed), np.random.default_rng([*name.encode()])
    out = writer(store, named(name), WINDOWS, VOCABULARY)
    head = stored(shared.standard_normal((len(VOCABULARY), WIDTH)), kind)
    for item in range(2):
        states = shared.standard_normal((N, WIDTH)) + noise * own.standard_normal((N, WIDTH))
        out.add(item, {"hidden": stored(states, kind)} if item != missing else {"hidden": stored(states[1:], kind)})
    out.head(store_head(store, {"weight": head}, None, 1.0))
    return Capture(out.finish("hidden", {"device": "cpu"}, {"tokens": N}))


@pytest.mark.parametrize("kind", ["bf16", "f32"])
@pytest.mark.parametrize("chunk", [7, 32, 256])
def test_rows_against_many_captures_are_those_of_each_pair(
    kind: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "CHUNK", chunk)
    ref = captured(tmp_path, "bf16", 0.0, kind)
    tests = [captured(tmp_path, name, 0.1, kind) for name in ("int8", "int4", "q8_0")]
    for item in range(2):
        for test, found in zip(tests, compare_many(ref, tests, item, TARGETS), strict=True):
            pair = compare_item(Pair.match(ref, test), item, item, TARGETS)
            assert pair.kl.mean() > 1e-3
            for field in fields(RowComparison)[:-5]:  # without the other divergences
                np.testing.assert_allclose(getattr(found, field.name), getattr(pair, field.name), rtol=1e-4, atol=1e-6)


def test_a_capture_without_its_rows_fails_alone(tmp_path: Path) -> None:
    ref = captured(tmp_path, "bf16", 0.0, "f32")
    tests = [captured(tmp_path, "int8", 0.1, "f32", missing=1), captured(tmp_path, "int4", 0.1, "f32")]
    broken, whole = compare_many(ref, tests, 1, TARGETS)
    assert broken.failed.all()
    assert len(broken) == len(whole) == N
    assert not whole.failed.any()


def test_a_capture_of_another_head_is_refused(tmp_path: Path) -> None:
    ref = captured(tmp_path, "bf16", 0.0, "f32")
    with pytest.raises(CaptureError, match="of the reference's head"):
        compare_many(ref, [captured(tmp_path, "int8", 0.0, "f32", seed=1)], 0, TARGETS)


@pytest.mark.parametrize("columns", [16, 640])
def test_the_product_for_bfloat16_loses_nothing_of_its_factors(columns: int) -> None:
    rng = np.random.default_rng(0)
    states, weight = (
        to_float32(stored(rng.standard_normal((each, columns)), "bf16")).astype(np.float32) for each in (64, 3000)
    )
    exact = states.astype(np.float64) @ weight.T.astype(np.float64)
    found = rows._bfloat16_product(states, weight.T)
    assert np.abs(found - exact).max() <= 2 * np.abs(states @ weight.T - exact).max()
