"""The plan of each layer against layers of real vLLM, of real depth (``scripts/cache-layers`` records them)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fidelab.core import Arm, KVSpec
from fidelab.core.errors import NotSupportedError
from fidelab.core.sequence import KVLayer
from fidelab.engines.cache_formats import NATIVE_FORMAT, exact_layers
from fidelab.engines.vllm.cache_formats import CACHE_FORMATS, format_of
from fidelab.engines.vllm.launch import Backend
from fidelab.engines.vllm.read_back import _expected, exact_remark, resolved, stored_as

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "cache_layers.json").read_text("utf-8"))
GOOD, OPEN = Backend("cuda", "ANY"), {"read_back": {"matches": None}}
FORMATS = ("fp8_e4m3", "turboquant_4bit_nc", "ultraquant_4bit", "int8_per_token_head")
PLANS = ("{}", "{}[skip-layers=0,3]", "{}[skip-layers=sliding_window]")


def layers_of(shape: str) -> list[KVLayer]:
    """As a plan knows them, before anything runs."""
    return [
        KVLayer(
            *(row["heads"], row["k_dim"], 0 if row["latent"] else row["v_dim"]),
            *(row["window"], row["latent"], row["number"]),
        )
        for row in RECORDED[shape]["layers"]
    ]


def described(shape: str, kv: KVSpec) -> tuple[list[dict[str, Any]], list[str]]:
    """The layers with a format in place of vLLM's ``auto``, by vLLM's own rule, and vLLM's list of skipped ones."""
    said, one = RECORDED[shape], format_of(kv)
    assert one is not None
    words = [*map(str, kv.skipped)]
    if one.keeps and not said["hybrid"]:
        ends = min(2, said["total"] // 2)
        words += [str(n) for n in (*range(ends), *range(said["total"] - ends, said["total"]))]
    rows = []
    for row, layer in zip(said["layers"], layers_of(shape), strict=True):
        exact = str(row["number"]) in words or (row["windowed"] and "sliding_window" in words)
        held = NATIVE_FORMAT if exact else one
        size = row["heads"] * sum(held.head_bytes(layer, 2))
        name = "auto" if exact else kv.k.name
        rows.append(row | {"index": None, "kv_cache_dtype": name, "bytes_per_token": size, "dtype": "uint8"})
    return rows, sorted({*words})


def arm(kv: KVSpec) -> Arm:
    return Arm(kv.label, "vllm", "m", "m", "0" * 8, kv, "bfloat16", "cuda", 1)


def test_at_least_twelve_shapes_are_recorded_of_all_kinds() -> None:
    assert len(RECORDED) >= 12
    layers = {name: layers_of(name) for name in RECORDED}
    assert any(layer.latent for of in layers.values() for layer in of)
    assert any(said["hybrid"] and len(said["layers"]) < said["total"] for said in RECORDED.values())
    assert any({layer.window is None for layer in of} == {True, False} for of in layers.values())
    assert any(all(layer.window for layer in of) for of in layers.values())
    assert any(all(layer.heads == 1 and not layer.latent for layer in of) for of in layers.values())


@pytest.mark.parametrize("shape", RECORDED)
def test_every_layer_with_a_cache_is_there_once_by_its_number(shape: str) -> None:
    said = RECORDED[shape]
    numbers = [row["number"] for row in said["layers"]]
    assert numbers == sorted({*numbers})
    kinds = said["config"].get("layer_types", ["full_attention"] * said["total"])
    assert numbers == [
        number for number, kind in enumerate(kinds) if kind.endswith("attention") and "linear" not in kind
    ]


@pytest.mark.parametrize("shape", RECORDED)
def test_vllms_own_pages_hold_the_bytes_that_the_table_predicts(shape: str) -> None:
    for row, layer in zip(RECORDED[shape]["layers"], layers_of(shape), strict=True):
        wide = 2 if row["dtype"] == "bfloat16" else 4
        assert row["bytes_per_token"] == row["heads"] * sum(CACHE_FORMATS["auto"].head_bytes(layer, wide)), row


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", RECORDED)
def test_what_follows_the_plan_is_shown_and_what_does_not_is_refuted(shape: str, name: str, plan: str) -> None:
    kv, layers, said = KVSpec.parse(plan.format(name)), layers_of(shape), RECORDED[shape]
    one = format_of(kv)
    assert one is not None
    if any(layer.latent for layer in layers) and one.latent is None:
        with pytest.raises(NotSupportedError, match="does not hold latents"):
            one.head_bytes(layers[0], 2)
        return
    windows = [layer for layer in layers if layer.window]
    if kv.skip_kinds and not windows:
        rows, words = described(shape, kv)
        asked = resolved(arm(kv), SimpleNamespace(kv_cache_dtype_skip_layers=words))
        assert stored_as(asked, GOOD, OPEN, rows) == "uint8 in all layers, of which none has a sliding window"
        return
    rows, words = described(shape, kv)
    asked = resolved(arm(kv), SimpleNamespace(kv_cache_dtype_skip_layers=words))
    exact = exact_layers(one, kv, layers, said["total"], hybrid=said["hybrid"])
    assert exact == {row["number"] for row in rows if row["kv_cache_dtype"] == "auto"}
    assert _expected(asked, rows) == sum(row["bytes_per_token"] for row in rows)
    remark = exact_remark(asked, rows)
    assert bool(remark) is (0 < len(exact) < len(rows))
    if len(exact) < len(rows):
        assert stored_as(asked, GOOD, OPEN, rows) == name
        if remark:
            assert remark[0].startswith(f"{len(exact)} of {len(rows)} layers are 16 bit")
        # one layer against the plan
        wrong = [dict(row) for row in rows]
        at = next(n for n, row in enumerate(rows) if row["kv_cache_dtype"] == name)
        wrong[at]["kv_cache_dtype"] = "auto"
        assert stored_as(asked, GOOD, OPEN, wrong) != name or len(rows) == 1
