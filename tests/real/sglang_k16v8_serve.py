"""Runs in SGLang's environment: SGLang's server with the plug-in, as a user would start it, and with notes.

python -m tests.real.sglang_k16v8_serve FOLDER [flags of sglang.launch_server]    (K16V8 as in the environment)

SGLang's scheduler is a process of its own that imports this file again.  There it is given a fixed amount of memory for
its cache (``FOLDER/tokens.json``: how many tokens that is), and every forward of the backend is compared with the
definition (``FOLDER/steps.jsonl``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k16v8.plugins.shared import SWITCH
from tests.real.k16v8 import LAYERS, compared

FOLDER = Path(sys.argv[1])
SWITCHES = ("0", "1", "per-token-head", "int8/int4[skip-layers=0]")
MEMORY = 64 << 20  # bytes of the cache


def main() -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(sys.argv[2:]))


def fixed(_original: Callable[..., int], configurator: Any, *_args: Any) -> int:
    """So many bytes; how many tokens SGLang would have there with the switch in each position is written down."""
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    def tokens(switch: str) -> int:
        os.environ[SWITCH] = switch
        sizes = create_memory_pool_configurator(configurator).calculate_pool_sizes(MEMORY, configurator.page_size)
        return int(sizes.max_total_num_tokens)

    was = os.environ[SWITCH]
    (FOLDER / "tokens.json").write_text(json.dumps({name: tokens(name) for name in SWITCHES}))
    os.environ[SWITCH] = was
    return MEMORY


def checked(forward: Callable[..., Any], own: Any, q: Any, k: Any, v: Any, layer: Any, *rest: Any, **more: Any) -> Any:
    """How many tokens each sequence had in this forward, and how far two of the layers are from the definition."""
    import torch

    from k16v8.kernels import reference

    result = forward(own, q, k, v, layer, *rest, **more)
    if layer.layer_id not in LAYERS:
        return result
    step, queries = own._step, q.reshape(len(q), layer.tp_q_head_num, -1)
    starts = torch.arange(len(step.lengths) + 1) if step.starts is None else step.starts
    cache = own.token_to_kv_pool.paged(layer.layer_id, step.table, step.lengths)
    wanted, _ = reference.extend(queries, starts, cache, own._attention[layer.layer_id], dtype=torch.float64)
    with (FOLDER / "steps.jsonl").open("a") as file:
        file.write(f"{json.dumps(compared(starts, result, wanted))}\n")
    return result


if __name__ == "__main__":
    main()
else:  # a scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in (
        ("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes", fixed),
        ("k16v8.plugins.sglang.backend.K16V8Backend.forward_extend", checked),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)
