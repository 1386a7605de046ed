"""Bytes per token, shares and ceilings of published models, worked out by hand."""

from __future__ import annotations

import pytest

from k16v8.bench.ceilings import above_ceiling, decode_ceiling, kv_bytes_per_token, kv_share

QWEN, LLAMA, MISTRAL = 2 * 7.616e9, 2 * 8.030e9, 2 * 7.248e9  # bytes of 16-bit weights
K = 1024


@pytest.mark.parametrize(
    ("layers", "kv_heads", "wide", "k16v8"), [(28, 4, 57_344, 43_008), (32, 8, 131_072, 98_304)], ids=["qwen", "llama"]
)
def test_bytes_per_token_are_those_of_the_models(layers: int, kv_heads: int, wide: int, k16v8: int) -> None:
    assert kv_bytes_per_token(layers, kv_heads, 128, 2, 2) == wide
    assert kv_bytes_per_token(layers, kv_heads, 128, 2, 1) == k16v8


def test_values_may_be_narrower_than_keys() -> None:
    assert kv_bytes_per_token(1, 2, 192, 2, 1, v_dim=128) == 2 * (192 * 2 + 128)


@pytest.mark.parametrize(
    ("weights", "per_token", "tokens", "percent"),
    [
        (QWEN, 57_344, 2 * K, 0.77),
        (QWEN, 57_344, 8 * K, 2.99),
        (MISTRAL, 131_072, 8 * K, 6.90),
        (LLAMA, 131_072, 8 * K, 6.27),
    ],
)
def test_the_caches_share_of_a_step_at_batch_1(weights: float, per_token: int, tokens: int, percent: float) -> None:
    assert round(100 * kv_share(weights, per_token, tokens), 2) == percent


@pytest.mark.parametrize(("tokens", "ceiling"), [(2 * K, 1.05), (8 * K, 1.14), (32 * K, 1.25)])
def test_the_decode_ceiling_of_k16v8_at_batch_32(tokens: int, ceiling: float) -> None:
    assert round(decode_ceiling(QWEN, 57_344, 43_008, tokens, 32), 2) == ceiling


def test_without_weights_the_ceiling_is_the_ratio_of_bytes() -> None:
    assert decode_ceiling(0, 4, 3) == pytest.approx(4 / 3)
    assert decode_ceiling(0, 4, 2, 32 * K, 32) == 2
    assert decode_ceiling(1e30, 4, 3) == pytest.approx(1)


def test_what_is_more_than_2_percent_above_a_ceiling_is_flagged() -> None:
    ceiling = decode_ceiling(QWEN, 57_344, 43_008, 32 * K, 32)
    assert above_ceiling(1.38, ceiling)  # a published figure
    assert not above_ceiling(1.019 * ceiling, ceiling)
    assert above_ceiling(1.021 * ceiling, ceiling)


@pytest.mark.parametrize(("weights", "per_token"), [(0, 0), (-1, 2), (1, -2)])
def test_a_step_that_reads_nothing_is_refused(weights: float, per_token: float) -> None:
    with pytest.raises(ValueError, match="positive number of bytes"):
        kv_share(weights, per_token, 1)
