"""One record of everything that follows from a model's shape: bytes, shares, speed-up limits, rooflines, what fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fidelab.core import KVSpec
from fidelab.physics.devices import Device
from fidelab.physics.traffic import Model


def overview(
    model: Model,
    reference: KVSpec,
    specs: Sequence[KVSpec],
    contexts: Sequence[int],
    batches: Sequence[int],
    devices: Sequence[Device] = (),
    memory: float | None = None,
    step_seconds: float | None = None,
) -> dict[str, Any]:
    """Return the record that ``fidelab estimate MODEL --json`` prints, as plain data.

    Args:
        reference: baseline format of the speed-ups; ``specs``: the other formats.
        contexts, batches: tokens per sequence, sequences; every combination is a cell.
        memory: bytes of each device, instead of the table's.
        step_seconds: time in which a link has to carry what does not fit; ``None``: the least time of a decode step.

    Raises:
        UsageError: If a format is unknown, or this model's cache cannot have it.
    """
    geometry, everything = model.geometry, [reference, *(spec for spec in specs if spec != reference)]
    longest, largest = max(contexts), max(batches)
    return {
        "model": {
            "name": geometry.name,
            "layers": geometry.layers,
            "kv_layers": [
                {"layers": n, "heads": layer.heads, "k_dim": layer.k_dim, "v_dim": layer.v_dim, "window": layer.window}
                | ({"latent": True} if layer.latent else {})
                for layer, n in Counter(geometry.kv).items()
            ],
            "parameters": geometry.parameters,
            "read_parameters": geometry.read_parameters(1),
            "active_parameters": geometry.active_parameters,
            "experts": geometry.experts,
            "active_experts": geometry.active_experts,
            "state_bytes_per_sequence": geometry.state_bytes,
            "weight_bytes": model.weight_bytes,
            "weight_bits": model.bits_per_weight,
            **({"weights_as_stored": True} if model.stored is not None else {}),
            "tp": model.tp,
            "overhead_bytes": model.overhead_bytes,
            "max_positions": geometry.max_positions,
            **({"engine": model.engine} if model.engine else {}),
            **({"notes": list(geometry.notes)} if geometry.notes else {}),
        },
        "formats": [
            {
                "kv": spec.label,
                "bytes_per_token": model.token_bytes(spec),
                "limit": model.limit(spec, reference),
                "exact_layers": sorted(model.exact_layers(spec)),
                "bytes": {"tokens": longest, "batch": largest, "capped": model.cache_bytes(spec, longest, largest)}
                | {"reserved": model.cache_bytes(spec, longest, largest, capped=False)},
            }
            for spec in everything
        ],
        "cells": [
            _cell(model, reference, everything, tokens, batch, devices) for tokens in contexts for batch in batches
        ],
        "devices": [
            _check_memory(model, everything, contexts, batches, device, memory, step_seconds) for device in devices
        ],
    }


def _cell(
    model: Model,
    reference: KVSpec,
    specs: Sequence[KVSpec],
    tokens: int,
    batch: int,
    devices: Sequence[Device],
) -> dict[str, Any]:
    ceilings = {spec.label: model.ceiling(spec, reference, tokens, batch) for spec in specs[1:]}
    rates = {
        device.name: {spec.label: model.decode_rate(spec, tokens, batch, device) for spec in specs}
        for device in devices
    }
    return {
        "tokens": tokens,
        "batch": batch,
        "kv_share": {spec.label: model.kv_share(spec, tokens, batch) for spec in specs},
        "ceiling": ceilings,
        "decode": {name: {label: _bound(*rate) for label, rate in found.items()} for name, found in rates.items()},
        "prefill": {device.name: _bound(*model.prefill_rate(tokens, device)) for device in devices},
        "touched_experts": model.geometry.touched_experts(batch),
    }


def _bound(rate: float, by: str) -> dict[str, Any]:
    return {"tokens_per_s": rate, "bound": by}


def _check_memory(
    model: Model,
    specs: Sequence[KVSpec],
    contexts: Sequence[int],
    batches: Sequence[int],
    device: Device,
    memory: float | None,
    step_seconds: float | None,
) -> dict[str, Any]:
    room = device.usable if memory is None else memory
    rows: list[dict[str, Any]] = []
    for spec in specs:
        needed = model.cache_bytes(spec, max(contexts), max(batches))
        beyond = max(0.0, model.device_bytes(spec, max(contexts), max(batches)) - room)
        step = step_seconds or model.step_seconds(spec, max(contexts), max(batches), device)[0]
        required = min(needed, beyond) / step  # bytes per second of a link to what does not fit
        rows.append(
            {
                "kv": spec.label,
                "longest_in_memory": {str(batch): model.longest_context(spec, batch, room) for batch in batches},
                "largest_batch": {str(tokens): model.largest_batch(spec, tokens, room) for tokens in contexts},
                "overflow_bytes": beyond,
                "step_seconds": step,
                "link_shortfall": {name: required / rate for name, rate in device.links.items()},
            }
        )
    return {
        "device": device.name,
        "memory_bytes": room,
        "bandwidth_bytes_per_s": device.bandwidth,
        "copied_bytes_per_s": device.sustained,
        "verified": device.verified or None,
        "weights_fit": model.weight_bytes / model.tp + model.overhead_bytes <= room,
        "formats": rows,
    }
