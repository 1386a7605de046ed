"""Code that runs in vLLM's workers: capture of hidden states, forced tokens, and reading the cache back.

Two extension points of vLLM are used.  The entry point ``vllm.general_plugins`` (:func:`register`) is loaded by every
vLLM of the environment and does nothing unless ``FIDELAB_CAPTURE`` is set; it refuses models with parameters that no
checkpoint tensor filled.  ``worker_extension_cls`` (:class:`FidelabWorker`) adds methods to each worker, which are
called by name.

Requests carry their instructions as ``SamplingParams.extra_args["fidelab"]``::

    key     the name of the request's files under the capture folder
    first   rows from this position on are kept (the row of position i predicts token i + 1)
    last    the last such position; no end where it is absent
    picked  only these positions are kept, where they are given
    live    number of first rows whose live logits are kept as well
    force   token ids that replace the sampled ones, in order
    layers  keep the residual stream after every layer instead of rows, from ``first`` to ``last``
    counted whether its steps are counted, see :meth:`FidelabWorker.fidelab_counted`

A step of a speculating engine computes rows for the drafted tokens, too.  Rows are kept when it is known which of
these were accepted, and then those alone that a decoding without drafts would compute: up to the last accepted one.
States of a draft model are never captured.  Where tokens are forced, all drafts are rejected.

Captured data goes to files, since the workers may be other processes: see :mod:`fidelab.engines.capture_files`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fidelab.engines.base import dtype_name
from fidelab.engines.capture_files import CaptureWriter
from fidelab.engines.k16v8 import read_back_layers
from fidelab.engines.layer_states import LayerStates, layer_list, stream_of
from fidelab.engines.vllm.runners import KEY, Step, kernel_block_ids, kernel_block_size, wrap_runner
from fidelab.engines.written import watched

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FOLDER = "FIDELAB_CAPTURE"  # environment variable: the workers' output folder; unset: capture is off
_CHECKED_ATTRIBUTE = "_fidelab_checked"  # a model whose parameters were all filled
_EXACT = 0.999  # share of equal numbers that identifies a rounding mode


def register() -> None:
    """Make loading fail for a model with parameters that no checkpoint tensor filled."""
    if not os.environ.get(FOLDER):
        return
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    original = DefaultModelLoader.load_weights
    if getattr(original, KEY, False):
        return

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        with watched(model) as ledger:
            inner = model.load_weights

            def checked(weights: Any) -> Any:
                loaded = inner(weights)
                unfilled = sorted({*ledger.untouched()} - _generated_parameters(model))
                if unfilled:
                    n = len(unfilled)
                    raise ValueError(f"{n} parameters were filled by no checkpoint tensor, first {unfilled[0]}")
                return loaded

            object.__setattr__(model, "load_weights", checked)
            try:
                original(self, model, model_config)
            finally:
                object.__delattr__(model, "load_weights")
        object.__setattr__(model, _CHECKED_ATTRIBUTE, True)

    setattr(load_weights, KEY, True)
    DefaultModelLoader.load_weights = load_weights


def _generated_parameters(model: Any) -> set[str]:
    """Parameters that a checkpoint need not have: scales of the cache, and weights quantized at load time."""
    names = set()
    for module_name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        online = getattr(method, "uses_meta_device", False)
        cache = any("KVCacheMethod" in cls.__name__ for cls in type(method).__mro__)
        if online or cache:
            names |= {f"{module_name}.{name}" if module_name else name for name, _ in module.named_parameters()}
    return names


class FidelabWorker:
    """Methods of a vLLM worker for ``collective_rpc``; they return plain data, one answer per rank."""

    model_runner: Any  # the worker's own, like its rank
    rank: int

    def fidelab_install(self, logprobs: bool) -> None:
        """Install the capture in this worker's model runner.

        ``logprobs``: keep log-probabilities instead of states.
        """
        files = CaptureWriter(Path(os.environ[FOLDER]), lambda: self.rank == 0, logprobs=logprobs)
        self._fidelab = _Hook(self.model_runner, files)

    def fidelab_model(self) -> dict[str, Any]:
        """The loaded model; ``unfilled``: number of parameters that no tensor filled; ``None`` if unknown."""
        import torch

        model = self.model_runner.get_model()
        processor = _find_module(model, "logits_processor")
        return {
            "runner": self._fidelab.wrapped.version,
            "architecture": type(model).__name__,
            "unfilled": 0 if getattr(model, _CHECKED_ATTRIBUTE, False) else None,
            "threads": torch.get_num_threads(),
            "vocabulary": processor.org_vocab_size,
            "softcap": processor.soft_cap,
            "scale": processor.scale,
        }

    def fidelab_head(self) -> dict[str, Any]:
        """Write this rank's rows of the head, without padding: ``head-RANK.weight`` and perhaps ``.bias``."""
        head = _head(self.model_runner.get_model())
        shard = getattr(head, "shard_indices", None)
        rows = None if shard is None else shard.org_vocab_end_index - shard.org_vocab_start_index
        return self._fidelab.files.head(self.rank, head, rows)

    def fidelab_cache(self) -> dict[str, Any]:
        """Return the cache of this rank, from its tensors; ``read_back``: result of the last :meth:`fidelab_watch`."""
        runner = self.model_runner
        layers = _cache_layers(runner)
        draft = self._fidelab.wrapped.draft_layers()
        return {
            "layers": [layer for layer in layers if layer["name"] not in draft],
            "draft_layers": [layer for layer in layers if layer["name"] in draft],
            "states": _states(runner),
            "blocks": runner.kv_cache_config.num_blocks,
            "read_back": self._fidelab.read_back,
        }

    def fidelab_layers(self, on: bool) -> None:
        """Put hooks on the decoder layers, for requests with ``layers`` that run alone, or remove them."""
        self._fidelab.hook_layers(on)

    def fidelab_counted(self) -> dict[str, dict[str, Any]]:
        """Return counts of the requests marked ``counted`` since the last call, by key.

        ``steps``: (tokens in the cache before, tokens, sequences) of each forward that it took part in; ``blocks``: the
        blocks of the cache that it had in the last of them.
        """
        counted, self._fidelab.counted = self._fidelab.counted, {}
        return counted

    def fidelab_watch(self) -> None:
        """Compare keys and values of a layer (all layers for a pair) with the cache, in the next request with rows."""
        self._fidelab.watch()


class _Hook:
    """Runs after the sampling of each step, when states, logits, requests and positions are available."""

    def __init__(self, runner: Any, files: CaptureWriter) -> None:
        self._runner = runner
        self.files = files
        self._given: dict[str, tuple[Tensor, Tensor]] = {}  # keys and values of watched layers
        self.read_back: dict[str, Any] = {}
        self._layers: LayerStates | None = None
        self.counted: dict[str, dict[str, Any]] = {}
        self.wrapped = wrap_runner(runner, self.after)

    def after(self, step: Step) -> None:
        """Replace sampled tokens by forced ones, and keep the rows of the sampled tokens."""
        for share in step.shares:
            if forced := share.asked.get("force"):
                step.force(share, forced[min(share.generated, len(forced) - 1)])
        self._keep(step)

    def hook_layers(self, on: bool) -> None:
        if self._layers is not None:
            self._layers.remove()
        self._layers = None
        if on:
            model, config = self._runner.get_model(), self._runner.model_config
            self._layers = LayerStates(layer_list(_language(model), config.get_total_num_hidden_layers()), stream_of)

    def watch(self) -> None:
        attention, draft = _attention(self._runner), self.wrapped.draft_layers()
        layers = {name: layer for name, layer in attention.items() if _writes(layer) and name not in draft}
        self._given.clear()
        self.read_back = {}
        self._handles = [self._noting(name, layer) for name, layer in layers.items()]

    def _noting(self, name: str, layer: Any) -> Any:
        """Note the inputs of a layer's cache, until ``remove()`` of the returned handle.

        Where the cache is written apart from attention, the write itself is watched: it is never compiled, as modules
        and their hooks are with ``enforce-eager=no``.
        """
        if getattr(getattr(layer, "attn_backend", None), "forward_includes_kv_cache_update", True):
            return layer.register_forward_pre_hook(self._note(name), with_kwargs=True)

        def note(key: Tensor, value: Tensor, slots: Tensor) -> None:
            real = slots >= 0  # the rest pads the step to the size of a graph
            self._given[name] = (key[: len(slots)][real].clone(), value[: len(slots)][real].clone())

        return _WatchedWrite(layer.impl, note)

    def _note(self, name: str) -> Callable[..., None]:
        def note(_module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            tensors = [*args, *kwargs.values()][1:3]
            if len(tensors) == 2 and all(x is not None and x.ndim >= 2 for x in tensors):
                self._given[name] = (tensors[0].detach().clone(), tensors[1].detach().clone())

        return note

    # ------------------------------------------------------------------------------------------- rows

    def _keep(self, step: Step) -> None:
        """Keep the rows of one step."""
        for share, n_rejected in zip(step.shares, step.rejected(), strict=True):
            asked = share.asked
            if not asked:
                continue
            states = step.states[share.offset : share.offset + share.tokens - n_rejected]
            if asked.get("counted"):
                counts = self.counted.setdefault(asked["key"], {"steps": []})
                counts["steps"].append((share.start, len(states), len(step.shares)))
                counts["blocks"] = self.wrapped.block_ids(share.request, 0)
            if "layers" in asked:
                self._states(asked, share.start, slice(share.offset, share.offset + share.tokens))
            elif "first" in asked:
                key, picked = asked["key"], asked.get("picked")
                position, rows = self.files.fresh(key, share.start, states, asked["first"], asked.get("last"), picked)
                live = rows[: max((0 if picked else asked["first"]) + asked.get("live", 0) - position, 0)]
                if len(live):
                    self.files.append(f"{asked['key']}.live", self._logits(live))
                self.files.rows(asked["key"], rows, self._logits)
            if self._given:
                self._compare(share.request)
            last = share.start + len(states) >= share.known
            broken = step.broken[share.logits.start : share.logits.stop - n_rejected]
            if last and any(broken):
                self.files.nan(asked["key"], share.generated + [*broken].index(True))

    def _states(self, asked: Mapping[str, Any], start: int, tokens: slice) -> None:
        """Keep the states of this step's tokens, from position ``start`` on; write them after the last one."""
        assert self._layers is not None
        seen = self._layers.take()[:, tokens]
        first, end = asked["first"], asked["last"] + 1
        part = seen[:, max(0, first - start) : max(0, end - start)]
        self.files.states(asked["key"], part, complete=start + seen.shape[1] >= end)

    def _logits(self, states: Tensor) -> Tensor | None:
        """vLLM's own logits, without padding; all ranks compute them, and ``None`` is returned on some."""
        logits = self._runner.model.compute_logits(states)
        return None if logits is None else logits.float()

    # ------------------------------------------------------------------------------------- read back

    def _compare(self, request: str) -> None:
        """Compare the recorded keys and values with the blocks of the request, in any layout.

        Layouts differ by backend, so the numbers are compared as sorted lists: the blocks must hold the written
        numbers, rounded to the format, and nothing else (a fresh cache holds zeros).  k16v8's backend compares its own
        pages.  Every layer is compared, and the worst one kept.
        """
        for handle in self._handles:
            handle.remove()
        runner, found = self._runner, dict[int, dict[str, Any]]()
        compared: list[dict[str, Any]] = []
        given, self._given = self._given, {}
        for name, (key, value) in given.items():
            layer = runner.compilation_config.static_forward_context[name]
            config = runner.kv_cache_config
            group = next(i for i, g in enumerate(config.kv_cache_groups) if name in g.layer_names)
            of_manager, of_kernel = (
                config.kv_cache_groups[group].kv_cache_spec.block_size,
                kernel_block_size(runner, group),
            )
            blocks = kernel_block_ids(self.wrapped.block_ids(request, group), of_manager, of_kernel)
            if hasattr(layer.impl, "read_back"):
                found[layer.impl.layer] = layer.impl.read_back(blocks, key, value)
                skipped = layer.impl.formats.skip_layers
                self.read_back = read_back_layers(found, skipped)
            else:
                from vllm.platforms import current_platform

                axis = list(layer.kv_cache.shape).index(config.num_blocks * (of_manager // of_kernel))
                held = layer.kv_cache.movedim(axis, 0)[blocks]
                numbers = key.reshape(-1), value.reshape(-1)
                compared.append(_compared(held, *numbers, layer, current_platform.fp8_dtype()) | {"layer": name})
                self.read_back = min(compared, key=_matches) | {"layers": len(compared)}


class _WatchedWrite:
    """An attention implementation's write to the cache, which also passes keys, values and slots to ``note``."""

    def __init__(self, implementation: Any, note: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        self._implementation = implementation
        write = implementation.do_kv_cache_update

        def noted(
            layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor, *more: Any, **named: Any
        ) -> Any:
            note(key, value, slots)
            return write(layer, key, value, cache, slots, *more, **named)

        implementation.do_kv_cache_update = noted

    def remove(self) -> None:
        del self._implementation.do_kv_cache_update


def _matches(compared: Mapping[str, Any]) -> float:
    """Sort key: share of written numbers that a layer holds; an unreadable layer ranks just below a full match."""
    matches = compared["matches"]
    return 1.0 - 1e-6 if matches is None else float(matches)


def _compared(held: Tensor, key: Tensor, value: Tensor, layer: Any, e4m3: torch.dtype) -> dict[str, Any]:
    """Compare the numbers in the blocks with keys and values; ``e4m3``: the platform's, which gfx942 has of its own.

    ``stored``: the type in which the blocks are read; ``matches``: share of the numbers that agree within one step;
    ``rounding``: ``nearest`` or ``toward zero`` (as the x86 kernels truncate to e4m3), where one of them is exact.
    """
    import torch

    fp8 = {"fp8": e4m3, "fp8_e4m3": e4m3, "fp8_e5m2": torch.float8_e5m2}
    scales, name = (layer._k_scale_float, layer._v_scale_float), str(layer.kv_cache_dtype)
    if held.dtype.is_floating_point and held.element_size() > 1:
        dtype, scales = held.dtype, (1.0, 1.0)
    elif name in fp8 and held.element_size() == 1:
        dtype = fp8[name]
        held = held.view(dtype)
    else:
        return {"stored": dtype_name(held.dtype), "matches": None}
    top = torch.finfo(dtype).max
    expected = torch.cat([(x.float() / scale).clamp(-top, top) for x, scale in zip((key, value), scales, strict=True)])
    stored = held.float().reshape(-1)
    stored = stored[stored != 0]  # slots that were never written hold zeros, too
    if len(stored) > len(expected):
        return {"stored": dtype_name(dtype), "matches": 0.0}
    stored = torch.cat((stored, stored.new_zeros(len(expected) - len(stored)))).sort().values
    near = expected.to(dtype)
    ways = {"nearest": near.float(), "toward zero": _toward_zero(near, expected)}
    exact = {way: float((x.sort().values == stored).float().mean()) for way, x in ways.items()}
    best = max(exact, key=lambda way: exact[way])
    step = torch.finfo(dtype).eps * stored.abs() + torch.finfo(dtype).smallest_normal
    close = (ways["nearest"].sort().values - stored).abs() <= step
    return {
        "stored": dtype_name(dtype),
        "matches": float(close.float().mean()),
        "rounding": best if exact[best] > _EXACT else None,
    }


def _toward_zero(near: Tensor, values: Tensor) -> Tensor:
    """``values`` rounded toward zero: where the nearest number is larger in magnitude, the one below it."""
    import torch

    bits = near.view(
        torch.uint8 if near.element_size() == 1 else torch.int16 if near.element_size() == 2 else torch.int32
    )
    beyond = near.float().abs() > values.abs()
    return torch.where(beyond, bits - 1, bits).view(near.dtype).float()


def _cache_layers(runner: Any) -> list[dict[str, Any]]:
    """Each layer that owns keys and values: type, bytes per token, heads, sizes, scales."""
    blocks = runner.kv_cache_config.num_blocks
    groups = runner.kv_cache_config.kv_cache_groups
    sizes = {name: g.kv_cache_spec.block_size for g in groups for name in g.layer_names}
    windows = {name: _window(g.kv_cache_spec, name) for g in groups for name in g.layer_names}
    kernel_sizes = {name: kernel_block_size(runner, i) for i, g in enumerate(groups) for name in g.layer_names}
    builders = _builders(runner)
    layers, addresses = [], set()
    for name, layer in _attention(runner).items():
        if not _writes(layer):
            continue
        cache = layer.kv_cache
        # Groups of layers (with a window, and without) have blocks of their own in one allocation.
        again = cache.data_ptr() in addresses
        addresses.add(cache.data_ptr())
        latent = not hasattr(layer, "num_kv_heads") or hasattr(layer, "kv_lora_rank")
        layers.append(
            {
                "name": name,
                "dtype": dtype_name(cache.dtype),
                "bytes": 0 if again else cache.numel() * cache.element_size(),
                "bytes_per_token": cache.numel() * cache.element_size() / (blocks * sizes[name]),
                "block_size": sizes[name],
                "window": windows[name],
                "windowed": getattr(layer, "sliding_window", None) is not None,
                "latent": latent,
                "kernel_block_size": kernel_sizes[name],
                "values_per_token": (
                    layer.head_size
                    if latent
                    else layer.num_kv_heads * (layer.head_size + getattr(layer, "head_size_v", layer.head_size))
                ),
                "heads": 1 if latent else layer.num_kv_heads,
                "kv_cache_dtype": str(layer.kv_cache_dtype),
                "k_scale": float(getattr(layer, "_k_scale_float", 1.0)),
                "v_scale": float(getattr(layer, "_v_scale_float", 1.0)),
                "scales": int(getattr(getattr(layer, "_k_scale", None), "numel", lambda: 1)()),
                "dynamic": bool(getattr(layer, "calculate_kv_scales", False)),
                "backend": layer.attn_backend.get_name() if hasattr(layer, "attn_backend") else None,
                "label": getattr(layer.impl, "label", None),
                "kernels": getattr(getattr(layer.impl, "kernels", None), "name", None),
                "index": getattr(layer.impl, "layer", None),
                "number": next((int(part) for part in name.split(".") if part.isdecimal()), None),
                "k_dim": layer.head_size,
                "v_dim": getattr(layer, "head_size_v", layer.head_size),
                "quantizes_queries": quantizes_queries(layer, builders.get(name)),
                "flash_attention": getattr(layer.impl, "vllm_flash_attn_version", None),
            }
        )
    return layers


def quantizes_queries(layer: Any, builder: Any = None) -> bool:
    """Return whether queries are rounded to FP8 before they meet the cache.

    vLLM's attention layer rounds them where it has a ``query_quant`` and its implementation says
    ``supports_quant_query_input``.  FlashInfer's implementation rounds them itself, to the types of its metadata
    ``builder``.
    """
    by_layer = getattr(layer, "query_quant", None) is not None and layer.impl.supports_quant_query_input
    types = (getattr(builder, f"q_data_type_{phase}", None) for phase in ("prefill", "decode"))
    return bool(by_layer) or any(getattr(kind, "itemsize", 2) == 1 for kind in types)


def _window(spec: Any, name: str) -> int | None:
    """Tokens that a layer holds at most; ``None`` where vLLM keeps all, as it also does without its hybrid manager."""
    own = getattr(spec, "kv_cache_specs", {}).get(name, spec)
    return int(own.sliding_window) if type(own).__name__ == "SlidingWindowSpec" else None


def _builders(runner: Any) -> dict[str, Any]:
    """Layer name → the object that makes its kernel's metadata."""
    groups = (group for groups in getattr(runner, "attn_groups", ()) for group in groups)
    return {name: group.get_metadata_builder() for group in groups for name in group.layer_names}


def _writes(layer: Any) -> bool:
    """Whether a layer writes its own keys and values and does not share another layer's."""
    return getattr(layer, "kv_sharing_target_layer_name", None) is None


def _states(runner: Any) -> list[dict[str, Any]]:
    """Type and bytes for one sequence of each recurrent or convolution state; the pool holds one in a block."""
    layers = runner.compilation_config.static_forward_context.values()
    held = (layer.kv_cache for layer in layers if isinstance(getattr(layer, "kv_cache", None), tuple))
    return [
        {"dtype": dtype_name(state.dtype), "bytes": state[0].numel() * state.element_size()}
        for states in held
        for state in states
        if state.ndim > 1
    ]


def _attention(runner: Any) -> dict[str, Any]:
    """Layers with keys and values, by name."""
    layers = runner.compilation_config.static_forward_context
    return {
        name: layer
        for name, layer in layers.items()
        if hasattr(layer, "kv_cache_dtype") and getattr(getattr(layer, "kv_cache", None), "ndim", 0) > 1
    }


def _language(model: Any) -> Any:
    """The language model of a model for images and text."""
    return model.get_language_model() if hasattr(model, "get_language_model") else model


def _head(model: Any) -> Any:
    return _find_module(model, "lm_head") or _find_module(getattr(_language(model), "model", None), "embed_tokens")


def _find_module(model: Any, name: str) -> Any:
    """Module of the model or of its language model; ``None`` if neither has it."""
    return getattr(model, name, None) or getattr(_language(model), name, None) if model is not None else None
