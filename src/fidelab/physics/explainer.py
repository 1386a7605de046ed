"""Data of the page of ``fidelab estimate explain``: shapes of models, devices, and curves of saturation.

The page's script repeats a few lines of :mod:`fidelab.physics.traffic` on these numbers (a browser has no Python);
``tests/browser/test_explain.py`` holds its results against that module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fidelab.core import KVSpec
from fidelab.core.errors import UsageError
from fidelab.core.sequence import KVLayer
from fidelab.physics.devices import devices
from fidelab.physics.shapes import Geometry
from fidelab.physics.traffic import Model

WEIGHT_BITS = (16.0, 8.0, 4.25)
_QUARTERS = (4, 5, 6, 7)  # of each power of two, where sliders stop
_BATCHES = (1, 2, 3, *(n * 2**power for power in range(8) for n in _QUARTERS), 2**10)
_CONTEXTS = (*(n * 2**power for power in range(5, 18) for n in _QUARTERS), 2**20)

PUBLISHED_HILL: dict[str, Any] = {
    "smax": 3.75,
    "b_half": 5.1,
    "gamma": 1.32,
    "r2": 0.80,
    "about": "speed-up of a fused INT4 decode kernel over 16-bit attention on H100: 767 points of 14 models, B ≥ 4, "
    "which are not public",
    "source": "github.com/mcgrof/knlp, docs/paper_memory_decode.html",
}


def _dense(name: str, shape: tuple[int, int, int], query_heads: int, read: int, idle: int, longest: int) -> Geometry:
    """A model whose layers are alike: ``shape`` is layers, KV heads and the size of a head."""
    layers, heads, dim = shape
    kv = (KVLayer(heads, dim, dim),) * layers
    return Geometry(name, layers, kv, read + idle, idle_parameters=idle, query_heads=query_heads, max_positions=longest)


# Sizes as the models' configuration files have them; the test builds each with Transformers and compares.
KNOWN_MODELS = (
    _dense("Llama-3.1-8B", (32, 8, 128), 32, 7_504_924_672, 525_336_576, 131_072),
    _dense("Qwen2.5-7B", (28, 4, 128), 28, 7_070_619_136, 544_997_376, 32_768),
    _dense("SmolLM2-135M", (30, 3, 64), 9, 134_515_008, 0, 8_192),
    _dense("Qwen3-32B", (64, 8, 128), 64, 31_984_210_944, 777_912_320, 40_960),
    _dense("Llama-3.1-70B", (80, 8, 128), 64, 69_503_033_344, 1_050_673_152, 131_072),
    Geometry(
        "gpt-oss-20b",
        24,
        (KVLayer(8, 64, 64, 128), KVLayer(8, 64, 64)) * 12,
        20_914_757_184,
        idle_parameters=579_133_440,
        expert_parameters=19_116_933_120,
        experts=32,
        active_experts=4,
        query_heads=64,
        max_positions=131_072,
    ),
    Geometry(
        "DeepSeek-V3",
        61,
        (KVLayer(1, 512, 64, latent=True),) * 61,
        671_026_404_352,
        idle_parameters=926_679_040,
        expert_parameters=653_908_770_816,
        experts=256,
        active_experts=8,
        query_heads=128,
        max_positions=163_840,
    ),
)


def explainer(formats: Sequence[str], models: Sequence[Geometry] = ()) -> dict[str, Any]:
    """Return the content of the page as plain data.

    Args:
        formats: cache formats; speed-ups are relative to the first, which every model can use.
        models: models shown before the known ones.

    Raises:
        InputError: If the user's device table is wrong.
    """
    return {
        "models": [_model(Model(geometry), formats) for geometry in (*models, *KNOWN_MODELS)],
        "formats": list(formats),
        "devices": [
            {
                "name": device.name,
                "memory": device.usable,
                "bandwidth": device.bandwidth,
                "flops": device.compute.get("bf16"),
                "verified": device.verified,
            }
            for device in devices().values()
        ],
        "weight_bits": list(WEIGHT_BITS),
        "contexts": list(_CONTEXTS),
        "batches": list(_BATCHES),
        "published": PUBLISHED_HILL,
    }


def _model(model: Model, labels: Sequence[str]) -> dict[str, Any]:
    """A model's bytes and operations as sums over kinds of layers: ``[per token, window, layers]``."""
    geometry = model.geometry
    formats: dict[str, Any] = {}
    for label in labels:
        try:
            stores = model.sequence(KVSpec.parse(label)).stores
        except UsageError:  # latents have one format for keys and values
            continue
        # the page offers formats without exceptions and without scales of a sequence
        formats[label] = [[round(store.token_bytes(packed=True)), store.window, 1] for store in stores]
    heads = [
        (2 * (geometry.query_heads or layer.heads) * (layer.k_dim + layer.v_dim), layer.window) for layer in geometry.kv
    ]
    return {
        "name": geometry.name,
        "layers": geometry.layers,
        "parameters": geometry.parameters,
        "dense_parameters": geometry.parameters - geometry.idle_parameters - geometry.expert_parameters,
        "expert_parameters": geometry.expert_parameters,
        "active_parameters": geometry.active_parameters,
        "experts": geometry.experts,
        "active_experts": geometry.active_experts,
        "state_bytes": geometry.state_bytes,
        "max_positions": geometry.max_positions,
        "attention": [[flops, window, heads.count((flops, window))] for flops, window in dict.fromkeys(heads)],
        "formats": formats,
    }
