"""Rows of one item against those of many captures."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from fidelab.axes import rows
from fidelab.axes.rows import compare_item, compare_many
from fidelab.captures.container import Array, BFloat16
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill
from fidelab.captures.writer import store_head
from fidelab.core.errors import CaptureError
from fidelab.metrics.divergence import RowComparison
from tests.captures.sample import named, writer

N, WIDTH = 40, 16
VOCABULARY = [f"<{n}>" for n in range(96)]
WINDOWS = Prefill("kld", (tuple(range(N + 1)),) * 2, 0, N - 1, ((0,) * N, (1,) * N))
TARGETS = np.arange(1, N + 1)


def stored(values: np.ndarray, kind: str) -> Array:
    bits = values.astype(np.float32).view(np.uint32)
    return BFloat16((bits >> 16).astype(np.uint16)) if kind == "bf16" else values.astype(np.float32)


def captured(
    store: Path, name: str, noise: float, kind: str, *, missing: int | None = None, seed: int = 0, width: int = WIDTH
) -> Capture:
    """A capture of hidden states; those of each name but the reference's are disturbed in their own way."""
    shared, own = np.random.default_rng(seed), np.random.default_rng([*name.encode()])
    out = writer(store, named(name), WINDOWS, VOCABULARY)
    head = stored(shared.standard_normal((len(VOCABULARY), WIDTH)), kind)
    for item in range(2):
        states = shared.standard_normal((N, width)) + noise * own.standard_normal((N, width))
        out.add(item, {"hidden": stored(states, kind)} if item != missing else {"hidden": stored(states[1:], kind)})
    out.head(store_head(store, {"weight": head}, None, 1.0))
    return Capture(out.finish("hidden", {"device": "cpu"}, {"tokens": N}))


@pytest.mark.parametrize("kind", ["bf16", "f32"])
@pytest.mark.parametrize("by", ["torch", "numpy"])
def test_rows_against_many_captures_are_those_of_each_pair(
    kind: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "numpy":
        monkeypatch.setattr(rows, "_cpu_scorer", rows.NumpyScorer)
        monkeypatch.setattr(rows, "CHUNK", 7)
    ref = captured(tmp_path, "bf16", 0.0, kind)
    tests = [captured(tmp_path, name, 0.1, kind) for name in ("int8", "int4", "q8_0")]
    for item in range(2):
        for test, found in zip(tests, compare_many(ref, [(test, item) for test in tests], item, TARGETS), strict=True):
            pair = compare_item(Pair.match(ref, test), item, item, TARGETS)
            assert pair.kl.mean() > 1e-3
            for field in fields(RowComparison):
                np.testing.assert_allclose(getattr(found, field.name), getattr(pair, field.name), rtol=1e-4, atol=1e-6)


def test_a_capture_without_its_rows_fails_alone(tmp_path: Path) -> None:
    ref = captured(tmp_path, "bf16", 0.0, "f32")
    tests = [captured(tmp_path, "int8", 0.1, "f32", missing=1), captured(tmp_path, "int4", 0.1, "f32")]
    broken, whole = compare_many(ref, [(test, 1) for test in tests], 1, TARGETS)
    assert broken.failed.all()
    assert len(broken) == len(whole) == N
    assert not whole.failed.any()


def test_a_capture_of_another_head_is_compared_by_its_own(tmp_path: Path) -> None:
    ref, test = captured(tmp_path, "bf16", 0.0, "f32"), captured(tmp_path, "int8", 0.0, "f32", seed=1)
    [rows] = compare_many(ref, [(test, 0)], 0, TARGETS)
    np.testing.assert_allclose(rows.kl, compare_item(Pair.match(ref, test), 0, 0, TARGETS).kl, rtol=1e-5)


def test_a_head_of_another_width_is_refused_with_one_line(tmp_path: Path) -> None:
    ref = captured(tmp_path, "bf16", 0.0, "f32")
    other = captured(tmp_path, "int8", 0.0, "f32", width=WIDTH + 1)
    with pytest.raises(CaptureError, match="item 0 are 17 wide, and its head 16; delete it"):
        compare_many(ref, [(other, 0)], 0, TARGETS)
