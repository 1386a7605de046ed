"""Choose the kernels for a cache by name. They are refused with a reason, never replaced silently."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, cast

import torch
from torch import Tensor

from k16v8.errors import NotSupportedError, UnknownNameError
from k16v8.kernels import checks, prefill, torch_path, torch_weights
from k16v8.kernels.cache import PagedCache, Scaling, storage
from k16v8.kernels.reference import Attention
from k16v8.kernels.weights import LAYOUTS, QuantizedWeight

__all__ = [
    "HEAD_DIMS",
    "IMPLEMENTATIONS",
    "PAGE_STEP",
    "Kernels",
    "WeightKernels",
    "choose",
    "choose_weights",
    "load_triton",
]

Implementation = Literal["torch", "triton", "interpreter", "flashinfer"]
IMPLEMENTATIONS = ("torch", "triton", "interpreter", "flashinfer")
HEAD_DIMS = (64, 80, 96, 128, 256)  # what the gates cover
PAGE_STEP = 16  # pages have a multiple of so many tokens
_CAPABILITY = (8, 0)  # of NVIDIA GPUs: products of bfloat16; below 8.9 FP8 is converted by integer operations


@dataclass(frozen=True)
class Kernels:
    """Operations of one implementation. Every call is checked before its launch (:mod:`k16v8.kernels.checks`).

    ``name`` is for the record of a run, for example ``triton[k=bf16,v=fp8_e4m3/per-token-head]``.
    """

    name: str
    implementation: Implementation

    def write(
        self,
        key: Tensor,
        value: Tensor,
        cache: PagedCache,
        slots: Tensor,
        *,
        saturated: Tensor | None = None,
        validate: bool = False,
    ) -> None:
        """As :func:`k16v8.kernels.torch_path.write`.  ``validate`` checks the slots, which waits for the device."""
        checks.check_write(key, value, cache, slots, saturated=saturated, validate=validate)
        self._operation("write")(key, value, cache, slots, saturated=saturated)

    def plan(
        self,
        batch: int,
        heads: int,
        cache: PagedCache,
        attention: Attention | None = None,
        *,
        queries: int = 1,
        dtype: torch.dtype | None = None,
        split_tokens: int = 0,
        buffer: Tensor | None = None,
    ) -> Any:
        """Allocate buffers for :meth:`decode`, once per shape; ``None`` if the implementation needs none.

        ``queries``: of each sequence, at most.  The others: see :func:`k16v8.kernels.decode.plan_decode`.
        """
        if self.implementation == "torch":
            return None
        plan_decode = self._module("decode").plan_decode
        given = {"dtype": dtype, "split_tokens": split_tokens, "buffer": buffer}
        return plan_decode(batch, heads, cache, attention, queries=queries, **given)

    def decode(
        self,
        q: Tensor,
        cache: PagedCache,
        attention: Attention | None = None,
        *,
        query_starts: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        plan: Any = None,
        work: Tensor | None = None,
        validate: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """:func:`k16v8.kernels.torch_path.decode`; with ``out``, ``lse`` and ``plan`` Triton allocates nothing.

        ``work``: of ``plan.schedule``, where several layers have one step.
        """
        checks.check_decode(q, cache, attention, {"out": out, "lse": lse}, query_starts, validate=validate)
        given = {"plan": plan, "work": work, "query_starts": query_starts}  # the torch path has neither plan nor list
        held = {name: x for name, x in given.items() if x is not None}
        return cast("tuple[Tensor, Tensor]", self._operation("decode")(q, cache, attention, out=out, lse=lse, **held))

    def extend(
        self,
        q: Tensor,
        query_starts: Tensor,
        cache: PagedCache,
        attention: Attention | None = None,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        validate: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """:func:`k16v8.kernels.torch_path.extend`; with ``out`` and ``lse`` Triton allocates nothing."""
        checks.check_extend(q, query_starts, cache, attention, {"out": out, "lse": lse}, validate=validate)
        return cast(
            "tuple[Tensor, Tensor]",
            self._operation("extend")(q, query_starts, cache, attention, out=out, lse=lse),
        )

    def gather(self, cache: PagedCache, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """:func:`k16v8.kernels.prefill.gather`: tokens of the cache as numbers ``[n, kv_heads, …]``."""
        checks.check_cache(cache)
        if self.implementation == "torch":
            prefill.gather(cache, slots, keys, values)
        else:
            self._operation("gather")(cache, slots, keys, values)

    def _operation(self, name: str) -> Any:
        return getattr(self._module(name), name)

    def _module(self, name: str) -> Any:
        if self.implementation == "flashinfer" and name == "decode":
            name = "decode_flashinfer"
        return torch_path if self.implementation == "torch" else import_module(f"k16v8.kernels.{name}")


def choose(
    implementation: str,
    *,
    k_format: str,
    v_format: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page: int,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    k_scaling: Scaling = "none",
    v_scaling: Scaling = "none",
) -> Kernels:
    """Return the kernels of ``implementation`` for one shape; ``dtype``: of queries.

    ``torch``; ``triton``, compiled, or ``interpreter``; ``flashinfer``: Triton with FlashInfer's decode kernel, which
    never ran on a device here and is taken only where it is named.

    Raises:
        NotSupportedError: If this implementation cannot do it here. The message gives the reason.
        UnknownNameError: If the implementation or the format does not exist.
    """
    if implementation not in IMPLEMENTATIONS:
        raise UnknownNameError("kernel implementation", implementation, IMPLEMENTATIONS)
    stored = (storage(k_format), storage(v_format))
    dims = (head_dim, head_dim if v_dim is None else v_dim)
    name = f"{implementation}[k={_side(k_format, k_scaling)},v={_side(v_format, v_scaling)}]"
    if reason := _refusal(stored[0].name, stored[1].name, heads, kv_heads, dims, dtype):
        raise NotSupportedError(f"{name}: {reason}")
    if implementation != "torch":
        if reason := _triton_refusal(implementation, k_format, v_format, heads // kv_heads, dims, page, dtype, device):
            raise NotSupportedError(f"{name}: {reason}")
        load_triton(interpret=implementation == "interpreter")  # before anything of Triton is imported
    return Kernels(name, cast("Implementation", implementation))


def _side(name: str, scaling: Scaling) -> str:
    if storage(name).integer:
        scaling = "per-token-head"
    return name if scaling == "none" else f"{name}/{scaling}"


def _refusal(
    k_format: str, v_format: str, heads: int, kv_heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> str | None:
    if kv_heads < 1 or heads % kv_heads:
        return f"{heads} query heads are no multiple of {kv_heads} KV heads"
    for name, dim in zip((k_format, v_format), dims, strict=True):
        if dim % storage(name).per_byte:
            return f"{name} packs {storage(name).per_byte} values into a byte; head dimension {dim} is not a multiple"
    if not storage(k_format).quantized and storage(k_format).dtype != dtype:
        return f"keys are {k_format} and queries {str(dtype).removeprefix('torch.')}: both must be of one type"
    return None


def _triton_refusal(
    implementation: str,
    k_format: str,
    v_format: str,
    ratio: int,
    dims: tuple[int, int],
    page: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> str | None:
    if "f32" in (k_format, v_format) or dtype == torch.float32:
        return "the Triton kernels are for 16-bit queries; use the torch implementation for float32"
    for dim in dims:
        if dim not in HEAD_DIMS:
            return f"head dimension {dim}; the gates cover {', '.join(map(str, HEAD_DIMS))}"
    if page < 1 or page % PAGE_STEP:
        return f"page size {page}; pages have a multiple of {PAGE_STEP} tokens"
    if ratio > checks.MAX_ROWS:
        return f"{ratio} query heads per KV head; the gates cover 1 to {checks.MAX_ROWS}"
    return _device_refusal(implementation, device)


def _device_refusal(implementation: str, device: torch.device | str) -> str | None:
    kind = torch.device(device).type
    if implementation == "interpreter" and kind != "cpu":
        return f"the interpreter runs on the CPU, the tensors lie on {kind}"
    if implementation in ("triton", "flashinfer") and kind != "cuda":
        return f"compiled kernels need a GPU, the tensors lie on {kind}; choose torch, or interpreter to test them"
    if kind == "cuda" and torch.cuda.is_available() and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < _CAPABILITY:
            least, has = (".".join(map(str, numbers)) for numbers in (_CAPABILITY, capability))
            name = torch.cuda.get_device_name(device)
            return f"compiled kernels need compute capability {least}, {name} has {has}; choose torch"
    return None


@dataclass(frozen=True)
class WeightKernels:
    """Products with 4-bit weights of one implementation. Every call is checked before its launch.

    ``name`` is for the record of a run, for example ``triton[awq]``.
    """

    name: str
    implementation: Implementation

    def plan(self, rows: int, weight: QuantizedWeight, *, splits: int | None = None) -> Any:
        """Allocate buffers for :meth:`matmul` of at most ``rows`` rows; ``None`` if the implementation needs none."""
        if self.implementation == "torch":
            return None
        from k16v8.kernels.matmul import plan_matmul

        return plan_matmul(rows, weight, splits=splits)

    def plan_experts(self, experts: Tensor, weight: QuantizedWeight) -> Any:
        """Tables for :meth:`expert_matmul`, which all products of one layer share; ``None`` where there are none."""
        if self.implementation == "torch":
            return None
        from k16v8.kernels.matmul import plan_experts

        return plan_experts(experts, weight)

    def matmul(self, x: Tensor, weight: QuantizedWeight, *, out: Tensor | None = None, plan: Any = None) -> Tensor:
        """:func:`k16v8.kernels.torch_weights.matmul`; with ``out`` and ``plan`` Triton allocates nothing."""
        checks.check_matmul(x, weight, out)
        held = {} if plan is None else {"plan": plan}  # the torch path has none
        return cast("Tensor", self._operation("matmul")(x, weight, out=out, **held))

    def expert_matmul(
        self,
        x: Tensor,
        weight: QuantizedWeight,
        experts: Tensor,
        routing: Tensor | None = None,
        *,
        out: Tensor | None = None,
        plan: Any = None,
    ) -> Tensor:
        """:func:`k16v8.kernels.torch_weights.expert_matmul`; Triton launches one kernel for all experts.

        With ``out`` and ``plan`` it allocates nothing.
        """
        checks.check_expert_matmul(x, weight, experts, routing, out)
        held = {} if plan is None else {"plan": plan}  # the torch path has none
        return cast("Tensor", self._operation("expert_matmul")(x, weight, experts, routing, out=out, **held))

    def _operation(self, name: str) -> Any:
        module = torch_weights if self.implementation == "torch" else import_module("k16v8.kernels.matmul")
        return getattr(module, name)


def choose_weights(
    implementation: str, *, layout: str, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> WeightKernels:
    """Return the products of ``implementation``; ``dtype``: of activations.  ``flashinfer`` uses Triton's.

    Raises:
        NotSupportedError: If this implementation cannot do it here. The message gives the reason.
        UnknownNameError: If the implementation or the layout does not exist.
    """
    for kind, given, known in (
        ("kernel implementation", implementation, IMPLEMENTATIONS),
        ("layout of 4-bit weights", layout, LAYOUTS),
    ):
        if given not in known:
            raise UnknownNameError(kind, given, known)
    implementation = "triton" if implementation == "flashinfer" else implementation
    name = f"{implementation}[{layout}]"
    if implementation != "torch":
        reason = _device_refusal(implementation, device)
        if dtype not in (torch.bfloat16, torch.float16):
            reason = "the Triton kernels are for 16-bit activations; use the torch implementation for others"
        if reason:
            raise NotSupportedError(f"{name}: {reason}")
        load_triton(interpret=implementation == "interpreter")
    return WeightKernels(name, cast("Implementation", implementation))


def load_triton(*, interpret: bool) -> None:
    """Import the Triton kernels, compiled or interpreted. A process has one of the two for its whole life.

    Raises:
        NotSupportedError: If Triton is missing, or the process has it in the other way.
    """
    if interpret:  # read when Triton is imported, by functions of its own, too
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
        import triton.language as tl
    except ImportError as error:
        raise NotSupportedError("Triton is not installed; do: pip install 'k16v8[triton]'") from error
    if isinstance(tl.cdiv, triton.runtime.JITFunction) == interpret:
        raise NotSupportedError(
            "Triton was imported for compiling; start a process with TRITON_INTERPRET=1 for its interpreter"
            if interpret
            else "TRITON_INTERPRET is set: this process has Triton's interpreter; start another without it"
        )
