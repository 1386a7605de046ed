"""Decoding with whole models: random weights, the Transformers plug-in, one cache format after another.

A cache is filled with N(0, 1) directly, since a prefill of long batches takes minutes and its content does not matter
for speed.  Two figures: single steps as ``generate`` does them, Python between kernels included; and on a GPU one step
at the full depth replayed from a CUDA graph, as serving engines do, which is what the ceilings are about.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from k16v8.bench.ceilings import above_ceiling, decode_ceiling, kv_bytes_per_token, kv_share
from k16v8.bench.run import RESERVE, check_device
from k16v8.bench.shapes import FORMATS, Geometry, formats
from k16v8.bench.timing import free_bytes, measure
from k16v8.errors import one_line
from k16v8.kernels.cache import storage
from k16v8.kernels.reference import Attention

__all__ = [
    *("Decoding", "Step", "build_model", "decode_with_models", "fill"),
    *("judge_decoding", "kv_per_token", "measure_decoding", "read_bytes"),
]

PAGE = 64
_WARM = 2  # steps that are not timed


@dataclass(frozen=True)
class Decoding:
    """One model, length and pair of formats; ``stepped``, ``replayed``: seconds of a step, ``None`` if unmeasured.

    ``weights``: bytes that a step reads (the embedding table, of which it reads a row per sequence, left out);
    ``kv_per_token``: bytes really held for each place of a token.
    """

    geometry: str
    formats: str
    batch: int
    tokens: int
    status: Literal["measured", "not_supported", "no_memory", "failed"]
    reason: str = ""
    kernels: tuple[str, ...] = ()
    stepped: float | None = None
    replayed: float | None = None
    replay_reason: str = ""
    weights: int = 0
    kv_per_token: float = 0.0


def build_model(geometry: Geometry, device: torch.device, positions: int) -> Any:
    """A causal language model of these sizes in bfloat16, its weights random, its attention ``k16v8``."""
    import transformers

    from k16v8.plugins.transformers.attention import register_attention

    register_attention()
    kinds = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "mistral": "MistralConfig"}
    windowless = {"sliding_window": None} if geometry.family == "mistral" else {}
    config = getattr(transformers, kinds[geometry.family])(
        num_hidden_layers=geometry.layers,
        num_attention_heads=geometry.heads,
        num_key_value_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        hidden_size=geometry.hidden,
        intermediate_size=geometry.intermediate,
        vocab_size=geometry.vocab,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **windowless,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="k16v8")
    return model.eval()


def read_bytes(model: Any) -> int:
    """Bytes of weights that one step reads: all but the embedding table, which is apart from the head."""
    table = model.get_input_embeddings().weight
    return sum(x.nbytes for x in model.parameters() if x is not table)


def kv_per_token(geometry: Geometry, pair: str) -> float:
    """Bytes that a cache of these formats takes per token."""
    k_bytes, v_bytes = (storage(name).dtype.itemsize for name in formats(pair))
    return kv_bytes_per_token(geometry.layers, geometry.kv_heads, geometry.head_dim, k_bytes, v_bytes)


def fill(model: Any, pair: str, batch: int, tokens: int, *, seed: int = 0, implementation: str | None = None) -> Any:
    """A paged cache that holds ``tokens`` random tokens of each of ``batch`` sequences."""
    from k16v8.plugins.transformers.cache import PagedKVCache

    k_format, v_format = formats(pair)
    held = PagedKVCache(model.config, page=PAGE, implementation=implementation, k_format=k_format, v_format=v_format)
    config, device = model.config, model.device
    random = torch.Generator(device).manual_seed(seed)
    shape = (batch, tokens, config.num_key_value_heads, config.head_dim)
    query = torch.zeros(batch, config.num_attention_heads, 1, config.head_dim, dtype=model.dtype, device=device)
    for layer in held.paged:
        key, value = (
            torch.empty(shape, dtype=model.dtype, device=device).normal_(generator=random).transpose(1, 2) for _ in "kv"
        )
        layer.update(key, value)
        layer.attend(query, None, Attention())  # writes what was handed in, and asks for its last token alone
    return held


def decode_with_models(
    geometries: Sequence[Geometry],
    lengths: Sequence[int],
    batch: int,
    device: torch.device,
    found: list[dict[str, Any]],
    save: Callable[[], None],
    *,
    implementation: str | None = None,
    seconds: float = 1.0,
    until: float = float("inf"),
) -> int:
    """Measure what ``found`` does not have yet: every model × length × pair of formats.  Returns what time left out.

    Raises:
        EngineError: the device is unusable after a failure; ``found`` has it, a new process can go on.
    """
    left = 0
    for one in geometries:
        asked = [(one.name, pair, batch, tokens) for tokens in lengths for pair in FORMATS]
        known = {(was["geometry"], was["formats"], was["batch"], was["tokens"]) for was in found}
        asked = [key for key in asked if key not in known]
        model = reason = None
        for key in asked:
            if time.monotonic() > until:
                left += 1
                continue
            if model is None and reason is None:
                model, reason = _built(one, device, max(lengths))
            if model is None:
                done = Decoding(*key, *(reason or ("failed", "")))
            else:
                done = measure_decoding(
                    model, one, key[1], batch, key[3], seconds=seconds, implementation=implementation
                )
            found.append(asdict(done))
            save()
            if done.status in ("failed", "no_memory"):
                check_device(device, f"{done.geometry} {done.formats} T{done.tokens}: {done.reason}")
        model = None
        gc.collect()  # modules refer to each other: the next model needs this one's memory
    return left


def _built(geometry: Geometry, device: torch.device, positions: int) -> tuple[Any, Any]:
    """The model; or ``None``, and status and reason."""
    needed, free = 2 * geometry.parameters + RESERVE[device.type], free_bytes(device)
    if needed > free:
        return None, ("no_memory", f"the weights need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    try:
        return build_model(geometry, device, positions), None
    except Exception as error:  # another version of Transformers may lack what the plug-in needs
        return None, ("failed", f"{type(error).__name__}: {one_line(error)}")


class Step:
    """One decode step: ``next()`` appends a token; ``again()`` repeats the step after ``depth`` tokens in place.

    The second form makes no decision on the host, so that a CUDA graph can hold it: where tokens go is settled before.
    """

    def __init__(self, model: Any, held: Any) -> None:
        self._model, self._held = model, held
        self._ids = torch.zeros(held_batch(held), 1, dtype=torch.long, device=model.device)
        self._depth = 0

    @torch.no_grad()
    def next(self) -> Tensor:
        """The logits ``[B, 1, V]``."""
        logits: Tensor = self._model(input_ids=self._ids, cache=self._held, use_cache=True).logits
        return logits

    def settle(self) -> None:
        """Give the next token its place, for :meth:`again`."""
        layer = self._held.paged[0]
        self._depth = layer.seen
        for pages in layer.pages.values():
            pages.step(self._depth, len(self._ids), 1, None)

    def again(self) -> Tensor:
        """The logits ``[B, 1, V]`` of the settled token."""
        for layer in self._held.paged:
            layer.seen = self._depth
        return self.next()


def held_batch(held: Any) -> int:
    """Sequences in a paged cache."""
    return int(held.storage()[0].lengths.shape[0])


def measure_decoding(
    model: Any,
    geometry: Geometry,
    pair: str,
    batch: int,
    tokens: int,
    *,
    seconds: float = 1.0,
    implementation: str | None = None,
) -> Decoding:
    """Time decoding at the end of ``tokens`` tokens; whatever it raises is a result."""
    asked = (geometry.name, pair, batch, tokens)
    device = model.device
    needed = int(kv_per_token(geometry, pair) * batch * tokens * (1 + 2 / geometry.layers)) + RESERVE[device.type]
    free = free_bytes(device)
    if needed > free:
        return Decoding(*asked, "no_memory", f"needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    try:
        return _measured(model, asked, seconds, implementation)
    except Exception as error:  # a model, a kernel or the device may raise what it likes
        status: Any = "no_memory" if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) else "failed"
        return Decoding(*asked, status, f"{type(error).__name__}: {one_line(error)}")
    finally:
        gc.collect()


def _measured(model: Any, asked: tuple[str, str, int, int], seconds: float, implementation: str | None) -> Decoding:
    _, pair, batch, tokens = asked
    held = fill(model, pair, batch, tokens - PAGE + 1, implementation=implementation)  # the last page has room
    step = Step(model, held)
    for _ in range(_WARM):
        logits = step.next()
    if not bool(logits.isfinite().all()):
        raise FloatingPointError("the logits are not finite")
    stepped = _stepped(step, model.device, PAGE - 3 - _WARM)
    per_token = held.bytes_per_token()
    replayed, reason = None, "CUDA graphs are for GPUs"
    if model.device.type == "cuda":
        step.settle()
        times, _ = measure([step.again], model.device, seconds)
        replayed, reason = (times.median, "") if times.graph else (None, times.clock)
    weights = read_bytes(model)
    return Decoding(*asked, "measured", "", held.kernels, stepped, replayed, reason, weights, per_token)


def _stepped(step: Step, device: torch.device, steps: int) -> float:
    """Median seconds of a single step, each waited for."""
    found = []
    for _ in range(steps):
        began = time.perf_counter()
        step.next()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def judge_decoding(found: list[dict[str, Any]]) -> None:
    """Add rates, and per model and length the speed-up over 16/16, its ceiling and the cache's share of the bytes."""
    for one in found:
        if one["status"] != "measured":
            continue
        same = ("geometry", "batch", "tokens")
        alike = [w for w in found if w["status"] == "measured" and all(w[key] == one[key] for key in same)]
        wide = next((w for w in alike if w["formats"] == "16/16"), None)
        weights, tokens, batch = one["weights"], one["tokens"], one["batch"]
        one["kv_share"] = kv_share(weights, one["kv_per_token"], tokens, batch)
        one["ceiling"] = wide and decode_ceiling(weights, wide["kv_per_token"], one["kv_per_token"], tokens, batch)
        for how in ("stepped", "replayed"):
            seconds = one[how]
            one[f"{how}_tokens_per_second"] = seconds and batch / seconds
            speedup = wide[how] / seconds if wide and wide[how] and seconds else None
            one[f"{how}_speedup"] = speedup
            one[f"{how}_above_ceiling"] = speedup and above_ceiling(speedup, one["ceiling"])
