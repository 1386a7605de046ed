"""Faults of a cache, planted into real vLLM and SGLang through their own plug-in points: what axis ``paths`` must name.

``FAULT`` says which, so that one arm of a run has it and the others have none:

- ``stale``: the first block of a prefix hit holds what another text left there;
- ``scale``: what a hit finds is read as twice as large;
- ``position``: the tokens behind a hit are computed as if they stood one further on;
- ``format``: steps that decode read what the cache holds rounded to a coarser type.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FAULTS = ("stale", "scale", "position", "format")
_GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}


def shim(engine: str, folder: Path) -> Path:
    """A folder for ``--pythonpath`` by which the engine loads this module's function of its name."""
    about = folder / "planted-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[{_GROUPS[engine]}]\nplanted = tests.real.faults:{engine}\n")
    return folder


def vllm() -> None:
    """Called by vLLM in each of its processes."""
    fault = os.environ.get("FAULT")
    if not fault:
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from fidelab.engines.vllm.capture import _attention

    update, forward = GPUModelRunner._update_states, GPUModelRunner._model_forward

    def update_states(runner: Any, output: Any) -> Any:
        done = update(runner, output)
        hits = [new for new in output.scheduled_new_reqs if new.num_computed_tokens]
        runner.is_hit = bool(hits)
        for layer in _attention(runner).values():
            cache = layer.kv_cache
            axis = list(cache.shape).index(runner.kv_cache_config.num_blocks)
            for new in hits:
                size = runner.cache_config.block_size
                _spoil(fault, cache, axis, new.block_ids[0], new.num_computed_tokens // size)
            if fault == "format" and output.num_scheduled_tokens and max(output.num_scheduled_tokens.values()) == 1:
                held = [runner.requests[name].block_ids[0] for name in output.num_scheduled_tokens]
                _coarsen(cache, axis, sorted({block for blocks in held for block in blocks}))
        return done

    def model_forward(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if fault == "position" and runner.is_hit:
            kwargs["positions"] = kwargs["positions"] + 1
        return forward(runner, *args, **kwargs)

    GPUModelRunner._update_states, GPUModelRunner._model_forward = update_states, model_forward


def sglang() -> None:
    """Called by SGLang in each of its processes."""
    fault = os.environ.get("FAULT")
    if not fault:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    seen: set[str] = set()

    def forward(original: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        pool = runner.token_to_kv_pool
        caches = [buffer for kind in "kv" for buffer in getattr(pool, f"{kind}_buffer")]
        places = runner.req_to_token_pool.req_to_token
        if batch.forward_mode.is_extend():
            for index, rid in enumerate(batch.rids or ()):
                prefix = int(batch.extend_prefix_lens_cpu[index])
                if prefix and rid not in seen:  # a hit, and no later chunk
                    own = places[batch.req_pool_indices[index], : prefix + 16].tolist()
                    for cache in caches:
                        _spoil(fault, cache, 0, [own[0], own[-1]] if fault == "stale" else own, prefix)
                    if fault == "position":
                        batch.positions = batch.positions + 1
                seen.add(rid)
        elif fault == "format":
            for index in range(len(batch.rids or ())):
                own = places[batch.req_pool_indices[index], : int(batch.seq_lens_cpu[index])].tolist()
                for cache in caches:
                    _coarsen(cache, 0, own)
        return original(runner, batch, *args, **kwargs)

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", forward, HookType.AROUND)


def _spoil(fault: str, cache: Any, axis: int, blocks: Sequence[int], n_hit: int) -> None:
    """Do to the first ``n_hit`` blocks of a hit what the fault does."""
    held = cache.movedim(axis, 0)
    if fault == "stale":
        held[blocks[0]] = held[blocks[-1]]
    elif fault == "scale":
        for block in blocks[:n_hit]:
            held[block] = _stored(2 * _numbers(held[block]), held.dtype)


def _coarsen(cache: Any, axis: int, blocks: Sequence[int]) -> None:
    import torch

    held = cache.movedim(axis, 0)
    held[blocks] = _stored(_numbers(held[blocks]).to(torch.float8_e5m2).float(), held.dtype)


def _numbers(held: Any) -> Any:
    """What the cache holds, as e4m3 where its type is of one byte."""
    import torch

    return (held.view(torch.float8_e4m3fn) if held.element_size() == 1 else held).float()


def _stored(numbers: Any, dtype: Any) -> Any:
    import torch

    if dtype.itemsize > 1:
        return numbers.to(dtype)
    return numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(dtype)
