"""Code that runs in SGLang's scheduler processes: capture of hidden states, forced tokens, reading the cache back.

SGLang's own extension point is used: the entry point ``sglang.srt.plugins`` (:func:`register`) is loaded by every
SGLang of the environment and does nothing unless ``FIDELAB_CAPTURE`` names a folder; hooks are registered with
``HookRegistry``.
The model runner of a draft worker (EAGLE, NextN, MTP) is left alone: it does not compute the model's answers.

The instructions of request ``RID`` are in ``RID.json`` of the folder, written before the request is sent; requests
without that file pass untouched::

    tokens  tokens of the prompt
    first   rows from this position on are kept (the row of position i predicts token i + 1)
    picked  only these positions are kept, where they are given
    live    number of live rows of logits that are kept with them
    force   token ids that replace the sampled ones, in order
    about   describe model, cache and head as well
    layers  keep the residual stream after every layer, too
    counted whether its steps and its places in the cache are noted
    chunk   tokens of its prompt that are computed at once; 0: the launch's setting
    squeeze whether it finds the cache full, so that unused entries are evicted for it

The last three are for an SGLang that was started with ``FIDELAB_SERVING``.

Answers are files, too, complete before SGLang returns the next token: those of :mod:`fidelab.engines.capture_files`,
``RID.stateless`` (why there are no states), ``RID.steps`` (a line for each forward: tokens in the cache before, tokens
computed, sequences), ``RID.places`` (int64, of its tokens in the cache) and ``about.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fidelab.engines.base import dtype_name, raw_bytes
from fidelab.engines.capture_files import CaptureWriter
from fidelab.engines.k16v8 import read_back_layers
from fidelab.engines.layer_states import LayerStates, layer_list, stream_of
from fidelab.engines.written import watched

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "FIDELAB_CAPTURE"  # environment variable: folder of instructions and answers; unset: capture is off
LOGPROBS = "FIDELAB_LOGPROBS"  # environment variable: keep log-probabilities instead of states
SERVING = "FIDELAB_SERVING"  # environment variable: heed the instructions about the ways of serving
PREFIX = "fidelab-"  # of the requests that may have instructions
_MIN_FREE_TOKENS = 16  # free tokens that a request finds in a cache that is called full
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


def register() -> None:
    """Hook loading, forward and sampling."""
    if not os.environ.get(FOLDER):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    capture = _Capture(Path(os.environ[FOLDER]), bool(os.environ.get(LOGPROBS)))
    for target, hook, kind in (
        ("sglang.srt.managers.scheduler.Scheduler.__init__", capture.start, HookType.AROUND),
        ("sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_only", capture.load, HookType.AROUND),
        (f"{_RUNNER}.forward", capture.forward, HookType.AROUND),
        (f"{_RUNNER}.sample", capture.sample, HookType.AFTER),
    ):
        HookRegistry.register(target, hook, kind)
    if os.environ.get(SERVING):
        arrived = "sglang.srt.managers.scheduler.Scheduler.handle_generate_request"
        HookRegistry.register(arrived, capture.arrived, HookType.BEFORE)


class _Capture:
    """The hooks of one process."""

    def __init__(self, folder: Path, logprobs: bool) -> None:
        self._folder = folder
        self._files = CaptureWriter(folder, _is_first_rank, logprobs=logprobs)
        self._live: dict[str, int] = {}  # request → rows of live logits still wanted
        self._unfilled: list[str] | None = None
        self._scales: list[str] = []
        self._chunk: Any = None
        self._withheld: tuple[Any, Tensor] | None = None  # the allocator of places and those that it is to get back
        self._asked = lru_cache(maxsize=4096)(self._read)

    # ------------------------------------------------------------------------------------------- hooks

    def start(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record an exception while a scheduler starts: SGLang itself only logs it and ends all processes."""
        return self._noted(original, *args, **kwargs)

    def load(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Watch which parameters are written while the checkpoint is loaded."""
        with watched(model) as ledger:
            out = original(model, *args, **kwargs)
        untouched = ledger.untouched()
        # Scales of the cache have a default, which a checkpoint may replace.
        self._unfilled = [name for name in untouched if not _is_scale(name)]
        self._scales = [name for name, _ in model.named_parameters() if _is_scale(name) and name not in untouched]
        return out

    def forward(self, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a forward and capture the rows that its requests ask for."""
        if self._withheld is not None:
            self._give_back(*self._withheld)
        if runner.is_draft_worker or not any(self._requests(batch)):
            return self._noted(original, runner, batch, *args, **kwargs)
        return self._noted(self._captured, original, runner, batch, *args, **kwargs)

    def arrived(self, scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
        """Set the chunks and the free places of the cache as a request has it before it is scheduled."""
        if self._chunk is None:
            self._chunk = (scheduler.chunked_prefill_size,)
        rid = request.rid if isinstance(request.rid, str) else ""
        asked = self._asked(rid) if rid.startswith(PREFIX) else {}
        scheduler.chunked_prefill_size = asked.get("chunk") or self._chunk[0]
        if asked.get("squeeze") and self._withheld is None:
            allocator, page = scheduler.token_to_kv_pool_allocator, scheduler.page_size
            missing = len(request.input_ids) + _MIN_FREE_TOKENS - int(scheduler.tree_cache.evictable_size())
            left = -(-max(_MIN_FREE_TOKENS, missing) // page) + 1  # else it would wait for ever
            self._withheld = allocator, allocator.free_pages[left:]
            allocator.free_pages = allocator.free_pages[:left]

    def _give_back(self, allocator: Any, pages: Tensor) -> None:
        import torch

        self._withheld = None
        allocator.free_pages = torch.cat((allocator.free_pages, pages))

    def sample(self, tokens: Tensor, runner: Any, output: Any, batch: Any) -> None:
        """Put the forced tokens in place of the sampled ones."""
        if runner.is_draft_worker:
            return
        for index, _, instructions in self._requests(batch):
            step = _end(batch, index) - instructions["tokens"]
            force = instructions["force"]
            if 0 <= step < len(force):
                tokens[index] = force[step]

    # -------------------------------------------------------------------------------------------- rows

    def _captured(self, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        about = any(instructions["about"] for _, _, instructions in self._requests(batch))
        stored = _Stored(runner) if about else None
        out, passed = self._passed(lambda: original(runner, batch, *args, **kwargs), runner, batch)
        states, logits = out.logits_output.hidden_states, out.logits_output.next_token_logits
        lengths = batch.extend_seq_lens_cpu if batch.forward_mode.is_extend() else [1] * len(batch.rids)
        if states is None or len(states) != sum(lengths):
            got = "no" if states is None else len(states)
            raise RuntimeError(f"SGLang kept {got} hidden states for {sum(lengths)} tokens")
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        broken = logits.isnan().any(dim=-1).tolist()
        for index, rid, instructions in self._requests(batch):
            end = _end(batch, index)
            rows = states[starts[index] : starts[index] + lengths[index]]
            if instructions["first"] is not None:
                picked = instructions.get("picked")
                _, fresh = self._files.fresh(rid, end - len(rows), rows, instructions["first"], picked=picked)
                self._files.rows(rid, fresh, partial(_live_logits, runner, batch))
            if passed is not None and instructions.get("layers"):
                tokens = slice(starts[index], starts[index] + lengths[index])
                self._states(rid, instructions, end, passed[:, tokens])
            if instructions.get("counted"):
                self._count(runner, batch, index, rid, (end - len(rows), len(rows), len(lengths)))
            if end >= instructions["tokens"]:  # else a chunk of the prompt, after which nothing is sampled
                self._logits(rid, instructions, end, logits[index], broken[index])
        if stored is not None:
            self._about(runner, stored, batch)
        return out

    def _passed(self, run: Callable[[], Any], runner: Any, batch: Any) -> tuple[Any, Tensor | None]:
        """Output of a forward, and the states after the layers if its requests ask for them.

        States that cannot be read are recorded for these requests: an exception would end the scheduler.
        """
        names = [rid for _, rid, instructions in self._requests(batch) if instructions.get("layers")]
        if not names:
            return run(), None
        try:
            layers = LayerStates(layer_list(runner.model, runner.model_config.num_hidden_layers), _stream)
        except RuntimeError as error:
            self._stateless(names, error)
            return run(), None
        try:
            out = run()
        finally:
            layers.remove()
        try:
            return out, layers.take()
        except RuntimeError as error:
            self._stateless(names, error)
            return out, None

    def _stateless(self, names: Sequence[str], error: RuntimeError) -> None:
        for rid in names:
            self._files.begin(rid)
            if _is_first_rank():
                (self._folder / f"{rid}.stateless").write_text(str(error), "utf-8")

    def _states(self, rid: str, asked: Mapping[str, Any], end: int, states: Tensor) -> None:
        """Keep the states of the tokens before position ``end``; write them when the prompt is complete."""
        part = states[:, max(0, asked["first"] - (end - states.shape[1])) :]
        self._files.states(rid, part, complete=end == asked["tokens"])

    def _count(self, runner: Any, batch: Any, index: int, rid: str, step: tuple[int, int, int]) -> None:
        """Note a step of a request, and its places in the cache after it."""
        if _is_first_rank():
            with (self._folder / f"{rid}.steps").open("a") as file:
                file.write("{} {} {}\n".format(*step))
            places = runner.req_to_token_pool.req_to_token[batch.req_pool_indices[index], : step[0] + step[1]]
            (self._folder / f"{rid}.places").write_bytes(raw_bytes(places.long()))

    def _logits(self, rid: str, asked: Mapping[str, Any], end: int, logits: Tensor, broken: bool) -> None:
        if broken:
            self._files.nan(rid, end - asked["tokens"])
        left = self._live.setdefault(rid, asked["live"])
        if left:
            self._live[rid] = left - 1
            self._files.append(f"{rid}.live", logits.float())

    def _requests(self, batch: Any) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        """Index, name and instructions of the requests that have any."""
        for index, rid in enumerate(batch.rids or ()):
            if rid.startswith(PREFIX) and (instructions := self._asked(rid)):
                yield index, rid, instructions

    def _read(self, rid: str) -> Mapping[str, Any]:
        self._files.begin(rid)
        try:
            instructions: Mapping[str, Any] = json.loads((self._folder / f"{rid}.json").read_text("utf-8"))
        except FileNotFoundError:
            return {}
        return instructions

    def _noted(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            (self._folder / "failure.txt").write_text(f"{type(error).__name__}: {text}", "utf-8")
            raise

    # ------------------------------------------------------------------------------------------- about

    def _about(self, runner: Any, stored: _Stored, batch: Any) -> None:
        import torch

        owner = _owner(runner.model)
        head = self._files.head(_rank(), getattr(owner, "lm_head", None))
        if not _is_first_rank():
            return
        processor = getattr(owner, "logits_processor", None)
        about = {
            "architecture": type(runner.model).__name__,
            "compute_dtype": dtype_name(runner.dtype),
            "threads": torch.get_num_threads(),
            "unfilled_parameters": self._unfilled,
            "scale_parameters": len(self._scales),
            "vocabulary": runner.model_config.vocab_size,
            "layers": runner.model_config.num_hidden_layers,
            "softcap": getattr(processor, "final_logit_softcapping", None),
            "scale": getattr(processor, "logit_scale", None),
            "head": head,
            "attention": getattr(runner.attn_backend, "label", None) or type(runner.attn_backend).__name__,
            "page_size": runner.page_size,
            "cache_tokens": runner.max_total_num_tokens,
            "graphs": getattr(runner, "decode_cuda_graph_runner", None) is not None,
            "cache": stored.inspect(batch),
            "states": _states(runner.req_to_token_pool),
        }
        partial = self._folder / "about.json.partial"
        partial.write_text(json.dumps(about), "utf-8")
        partial.rename(self._folder / "about.json")


class _Stored:
    """The cache of a runner, compared with the keys and values of its first attention layer in one forward.

    Of a k16v8 pool, which compares itself, all layers are.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._given: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values by layer
        self._layers = [m for m in runner.model.modules() if type(m).__name__ == "RadixAttention"]
        whole = hasattr(runner.token_to_kv_pool, "read_back")
        watched_layers = self._layers if whole else self._layers[:1]
        self._handles = [layer.register_forward_pre_hook(self._note) for layer in watched_layers]

    def _note(self, module: Any, args: tuple[Any, ...]) -> None:
        if len(args) > 2 and args[1] is not None and args[2] is not None:
            self._given[module.layer_id] = (args[1].detach().clone(), args[2].detach().clone())

    def inspect(self, batch: Any) -> dict[str, Any]:
        """Types, bytes and scales of the cache, and the share of the recorded numbers that it holds."""
        for handle in self._handles:
            handle.remove()
        pools = list(_pools(self._runner.token_to_kv_pool))
        buffers = [(kind, buffer, _slots(pool)) for pool in pools for kind, buffer in _buffers(pool)]
        layer = self._layers[0] if self._layers else None
        return {
            "pool": [type(pool).__name__ for pool in pools],
            "dtype": dtype_name(pools[0].dtype),
            "method": getattr(getattr(pools[0], "quant_method", None), "name", None),
            "stored": {kind: dtype_name(buffer.dtype) for kind, buffer, _ in buffers},
            "bytes_per_token": sum(buffer.nbytes / slots for _, buffer, slots in buffers),
            "bytes": sum(buffer.nbytes for _, buffer, _ in buffers),
            "kv_layers": sum(kind in ("k", "kv") for kind, _, _ in buffers),
            "values_per_token": sum(
                x.tp_k_head_num * x.qk_head_dim + x.tp_v_head_num * x.v_head_dim for x in self._layers
            ),
            "heads": [(x.tp_k_head_num, x.qk_head_dim, x.v_head_dim) for x in self._layers],
            "values_per_scale": _values_per_scale(buffers),
            "layer_scales": sorted({(_scale(x, "k"), _scale(x, "v")) for x in self._layers}),
            "matches": self._matches(pools[0], layer, batch),
            "read_back": self._read_back(pools[0], batch),
        }

    def _read_back(self, pool: Any, batch: Any) -> dict[str, Any]:
        """The comparison that a k16v8 pool makes itself, since it knows its formats."""
        if not self._given or not hasattr(pool, "read_back"):
            return {}
        found = {n: pool.read_back(n, batch.out_cache_loc, *given) for n, given in self._given.items()}
        return read_back_layers(found, pool.formats.skip_layers)

    def _matches(self, pool: Any, layer: Any, batch: Any) -> float | None:
        """Share of the first layer's keys and values that the cache holds in their slots, rounded to its type.

        ``None`` if they are not stored element by element.
        """
        keys, values = (getattr(pool, f"{kind}_buffer", None) for kind in "kv")
        if not self._given or not keys or not values or hasattr(pool, "read_back"):
            return None
        equal = total = 0
        for kind, tensor, buffer in zip("kv", self._given[layer.layer_id], (keys, values), strict=True):
            stored = buffer[layer.layer_id - pool.start_layer]
            if stored.dtype != pool.dtype and stored.element_size() == pool.dtype.itemsize:
                stored = stored.view(pool.dtype)
            if stored.dim() != 3 or stored.dtype != pool.dtype:
                return None
            stored = stored[batch.out_cache_loc].float().flatten()
            expected = (tensor.float() / _scale(layer, kind)).to(pool.dtype).float().flatten()
            if len(stored) != len(expected):
                return None
            equal += int((stored == expected).sum())
            total += len(stored)
        return equal / total


def _owner(model: Any) -> Any:
    """The module with the head and the logits processor: the model or its text part."""
    return next((m for m in model.modules() if hasattr(m, "lm_head") and hasattr(m, "logits_processor")), None)


def _live_logits(runner: Any, batch: Any, states: Tensor) -> Tensor:
    from sglang.srt.layers.logits_processor import LogitsMetadata

    owner = _owner(runner.model)
    metadata = LogitsMetadata(forward_mode=batch.forward_mode)
    logits: Tensor = owner.logits_processor._get_logits(states, owner.lm_head, metadata)
    return logits


def _stream(handed_on: Any, given: Sequence[Any]) -> Tensor:
    """Residual stream, which most of SGLang's models keep with the batch, and others pass on with each layer.

    Raises:
        RuntimeError: If a layer of several ranks passes on an incomplete sum.
    """
    batch = next(x for x in given if hasattr(x, "forward_mode"))
    if (stream := getattr(batch, "residual_stream", None)) is None:
        if _ranks() > 1:
            raise RuntimeError("the layers of this model hand on incomplete sums in several ranks: pass tp=1")
        return stream_of(handed_on, given)
    if isinstance(handed_on, tuple):  # input of the first layer
        return stream_of(handed_on, given)
    state: Tensor = stream.snapshot(handed_on)
    return state


def _pools(pool: Any) -> Iterator[Any]:
    """Plain pools inside a pool of several parts (sliding windows, hybrids)."""
    parts = [part for name in ("full_kv_pool", "swa_kv_pool") if (part := getattr(pool, name, None)) is not None]
    for part in parts:
        yield from _pools(part)
    if not parts:
        yield pool


def _states(pool: Any) -> list[dict[str, Any]]:
    """Type and bytes for one sequence of each kind of recurrent state; layers and slots are the first dimensions."""
    held = getattr(getattr(pool, "mamba_pool", None), "mamba_cache", None)
    states = [*(getattr(held, "conv", None) or ()), getattr(held, "temporal", None)]
    return [
        {"dtype": dtype_name(state.dtype), "bytes": state.nbytes / state.shape[1]}
        for state in states
        if state is not None
    ]


def _buffers(pool: Any) -> Iterator[tuple[str, Tensor]]:
    for kind in ("k", "v", "kv", "k_scale", "v_scale"):
        for buffer in getattr(pool, f"{kind}_buffer", None) or ():
            yield kind, buffer


def _slots(pool: Any) -> int:
    """Tokens that the buffers have room for, the slots for padding included."""
    return int(pool.size + pool.page_size)


def _values_per_scale(buffers: list[tuple[str, Tensor, int]]) -> float | None:
    """Values of a key that share a stored scale; ``None`` if no scales are stored."""
    sizes = {kind: buffer.nbytes for kind, buffer, _ in buffers}
    if not sizes.get("k_scale"):
        return None
    counts = {kind: buffer.numel() for kind, buffer, _ in buffers}
    per_byte = 2 if any(b.dtype.itemsize == 1 and not b.is_floating_point() for k, b, _ in buffers if k == "k") else 1
    return counts["k"] * per_byte / counts["k_scale"]


def _scale(layer: Any, kind: str) -> float:
    value = getattr(layer, f"{kind}_scale_float", None)
    return 1.0 if value is None else float(value)


def _is_scale(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in ("k_scale", "v_scale")


def _end(batch: Any, index: int) -> int:
    """Tokens of the request that are in the cache after this forward."""
    if batch.forward_mode.is_extend():
        return int(batch.extend_prefix_lens_cpu[index] + batch.extend_seq_lens_cpu[index])
    return int(batch.seq_lens_cpu[index])


def _rank() -> int:
    import torch

    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _ranks() -> int:
    import torch

    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _is_first_rank() -> bool:
    return _rank() == 0
