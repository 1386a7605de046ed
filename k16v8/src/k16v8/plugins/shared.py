"""Common parts of the plug-ins for vLLM and SGLang: the switch, versions, bytes, views of pages, what pages hold.

``K16V8`` in the environment switches them on and names the formats of keys and values:

- ``1``: keys in the model's 16-bit type, values ``fp8_e4m3`` with scale 1.0, saturating; ``per-token-head``: the same
  with one float16 scale next to each head's value vector;
- ``K/V``, as ``bf16/int8``, ``int8/int4`` or ``fp8_e4m3[scale=per-token-head]/int4``: a format for each side, of
  ``native`` (the model's 16-bit type), ``bf16``, ``f16``, ``fp8_e4m3``, ``fp8_e4m3fnuz``, ``int8`` and ``int4``; one
  name alone is that of both sides.  Integers have one float16 scale for each token and head;
- ``skip-layers=0,4-29`` in the brackets of either side: layers that keep the model's 16-bit type;
- ``0``: off.

``K16V8_KERNELS=flashinfer`` takes the decode kernel of FlashInfer on data-centre Blackwell; it never ran on one.
Unset or ``triton``: the Triton kernels.

``K16V8_COUNT=1`` counts for each layer the written numbers that lie beyond their format's range.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from k16v8.errors import UsageError, one_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from k16v8.kernels.cache import PagedCache
    from k16v8.kernels.dispatch import Kernels
    from k16v8.kernels.prefill import PrefillBatch, Route
    from k16v8.kernels.reference import Attention

Version = tuple[int, ...]
SWITCH = "K16V8"  # environment variable
COUNT_SWITCH = "K16V8_COUNT"  # environment variable
KERNELS_SWITCH = "K16V8_KERNELS"  # environment variable
LABEL = "k16v8"  # of the attention backends, in logs and records
NATIVE = "native"  # the model's own 16-bit type
_SCALE_BYTES = 2
_BITS = {NATIVE: 16, "bf16": 16, "f16": 16, "fp8_e4m3": 8, "fp8_e4m3fnuz": 8, "int8": 8, "int4": 4}
_INTEGERS = ("int8", "int4")
_16_BIT = {"torch.bfloat16": "bf16", "torch.float16": "f16"}  # types, and the kernels' names of them
_STORAGE_TYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e4m3fnuz": "float8_e4m3fnuz"}  # names of torch, else of k16v8
_SIDE = re.compile(r"([a-z0-9_]+)(?:\[([^\[\]]*)\])?")
_LAYERS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


@dataclass(frozen=True)
class Side:
    """Storage of keys, or of values.

    ``name``: ``native``, or a format of :mod:`k16v8.kernels.cache`; ``scaled``: with a float16 scale for each token and
    head.
    """

    name: str
    scaled: bool = False

    def code_bytes(self, dim: int) -> int:
        """Bytes of one vector without its scale."""
        return _BITS[self.name] * dim // 8

    def dim(self, code_bytes: int) -> int:
        """The inverse of :meth:`code_bytes`."""
        return 8 * code_bytes // _BITS[self.name]

    @property
    def scale_bytes(self) -> int:
        """Bytes of a vector's scale."""
        return _SCALE_BYTES * self.scaled

    def kernel_name(self, native: str) -> str:
        """The kernels' name of the format in a model of type ``native`` (``torch.bfloat16``, ``torch.float16``)."""
        return _16_BIT[native] if self.name == NATIVE else self.name

    def __str__(self) -> str:
        return f"{self.name}[scale=per-token-head]" if self.scaled and self.name not in _INTEGERS else self.name


@dataclass(frozen=True)
class Formats:
    """The formats of keys and values, and the layers that keep the model's own type for both."""

    k: Side
    v: Side
    skip_layers: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Formats:
        """Parse the value of the switch, except for ``0``.

        Raises:
            UsageError: If the value is invalid.
        """
        if text in _WORDS:
            return _WORDS[text]
        sides = [_side(part) for part in text.split("/")]
        if len(sides) > 2 or None in sides:
            raise UsageError(
                f"write 1, per-token-head, 0 for off, or K/V of {', '.join(_BITS)}, as in bf16/int8 or "
                "fp8_e4m3[scale=per-token-head]/int4[skip-layers=0,4-29]"
            )
        (k, k_skip), (v, v_skip) = (side for side in (sides[0], sides[-1]) if side is not None)
        return cls(k, v, tuple(sorted({*k_skip, *v_skip})))

    def in_layer(self, layer: int) -> Formats:
        """Return the formats of one layer."""
        return UNCHANGED if layer in self.skip_layers else replace(self, skip_layers=())

    def content_bytes(self, head_dim: int, v_dim: int) -> int:
        """Return the bytes of one head of one token, in a layer that is not skipped."""
        scales = self.k.scale_bytes + self.v.scale_bytes
        return self.k.code_bytes(head_dim) + self.v.code_bytes(v_dim) + scales

    def refusal(self, dtype: torch.dtype, head_dim: int, v_dim: int, layers: int) -> str:
        """Reason why a model cannot have them, with what to do; empty if it can.  ``layers``: its number of layers."""
        native = _16_BIT.get(str(dtype))
        if native is None:
            return f"is for models in 16 bits, this one computes in {dtype}: pass --dtype bfloat16"
        for side, dim in ((self.k, head_dim), (self.v, v_dim)):
            if side.name in _16_BIT.values() and side.name != native:
                return f"copies {side.name} as it is, the model computes in {native}: write {native} or native"
            if _BITS[side.name] * dim % 8:
                return f"packs two {side.name} into a byte, which a head dimension of {dim} is not a multiple of"
        if self.content_bytes(head_dim, v_dim) % 2:
            return f"takes {self.content_bytes(head_dim, v_dim)} bytes for a head's token, which pages cannot align"
        if beyond := [layer for layer in self.skip_layers if layer >= layers]:
            return f"cannot skip layer {beyond[0]}: the model has layers 0-{layers - 1}"
        if len(self.skip_layers) == layers:
            return "has no layer left: skip-layers names all of them"
        return ""

    def __str__(self) -> str:
        pair = str(self.k) if self.k == self.v else f"{self.k}/{self.v}"
        return f"{pair} but layers {','.join(map(str, self.skip_layers))}" if self.skip_layers else pair


UNCHANGED = Formats(Side(NATIVE), Side(NATIVE))
DEFAULT = Formats(Side(NATIVE), Side("fp8_e4m3"))
_WORDS = {
    "1": DEFAULT,
    "per-token-head": Formats(Side(NATIVE), Side("fp8_e4m3", scaled=True)),
}


def _side(text: str) -> tuple[Side, list[int]] | None:
    """One side of a pair and the layers to skip; ``None``: it means nothing."""
    found = _SIDE.fullmatch(text.strip())
    if found is None or found[1] not in _BITS:
        return None
    scaled, layers, key = found[1] in _INTEGERS, list[int](), ""
    for piece in filter(None, (found[2] or "").split(",")):
        head, equal, value = piece.rpartition("=")
        key = head.strip() if equal else key
        if key == "skip-layers" and (ends := _LAYERS.fullmatch(value.strip())):
            layers += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
        elif key == "scale" and value.strip() in ("none", "per-token-head") and found[1].startswith("fp8"):
            scaled = value.strip() != "none"
        else:
            return None
    return Side(found[1], scaled), layers


def switched() -> Formats | None:
    """Return the settings that the environment requests; ``None`` if there are none.

    Raises:
        UsageError: If the value of the variable is invalid.
    """
    text = os.environ.get(SWITCH, "").strip()
    if text in ("", "0"):
        return None
    try:
        return Formats.parse(text)
    except UsageError as error:
        raise UsageError(f"{SWITCH}={text}: {error}") from None


def counters(layers: int, device: torch.device | str) -> Tensor | None:
    """Return zeros, int32 ``[layers, 2]``: what writing adds to for keys and values; ``None`` where nothing is counted.

    A server makes them before it captures a graph.

    Raises:
        UsageError: If the value of the variable is invalid.
    """
    if not _counting():
        return None
    import torch

    return torch.zeros(layers, 2, dtype=torch.int32, device=device)


def _counting() -> bool:
    text = os.environ.get(COUNT_SWITCH, "").strip() or "0"
    if text not in ("0", "1"):
        raise UsageError(f"{COUNT_SWITCH}={text}: write 1, or 0 for off")
    return text == "1"


@dataclass(frozen=True)
class Engine:
    """An engine, and what a plug-in uses of it that may change with any version.

    ``packages``: its distributions, of which the first one that is installed counts.  ``tested``: from the first to
    before the second version.  ``names``: of each module, what must be there, with dots for what lies in a class.
    """

    title: str
    packages: tuple[str, ...]
    tested: tuple[Version, Version]
    names: Mapping[str, tuple[str, ...]]

    def refusal(self) -> str:
        """Reason why the plug-in does not run in the installed version; empty if it does.

        Versions that were tested are not looked at further.  In others every name must be there, which imports them.
        """
        found = self._installed_package()
        if not found:
            return f"k16v8 runs in {self.title}, which is not installed"
        if self._is_tested(found) or not (missing := _missing(self.names)):
            return ""
        return f"k16v8 uses names of {self.title} that {found} lacks: {missing}; {self._advice()}"

    def warning(self) -> str:
        """Message about a version that was not tested; empty if it was."""
        found = self._installed_package()
        return "" if self._is_tested(found) else f"k16v8 was not tested with {self.title} {found}; {self._advice()}"

    def _installed_package(self) -> str:
        return next(filter(None, map(_installed, self.packages)), "")

    def _is_tested(self, found: str) -> bool:
        numbers = tuple(int(number) for number in re.findall(r"\d+", found)[: len(self.tested[0])])
        return self.tested[0] <= numbers < self.tested[1]

    def _advice(self) -> str:
        first, end = (".".join(map(str, numbers)) for numbers in self.tested)
        return f"tested are {first} to before {end}"


def _missing(names: Mapping[str, tuple[str, ...]]) -> str:
    """The first name that is not there, empty where all are; of a module that cannot be imported, with the reason."""
    for module, inside in names.items():
        try:
            held = import_module(module)
        except Exception as error:  # an engine's modules raise what they like
            return f"{module} ({one_line(error)})"
        for dotted in inside:
            at: Any = held
            for part in dotted.split("."):
                if not hasattr(at, part) and part not in getattr(at, "__dataclass_fields__", ()):
                    return f"{module}.{dotted}"
                at = getattr(at, part, None)
    return ""


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


_PLANS: dict[tuple[object, ...], Any] = {}
_MAX_PLANS = 1024  # for FlashInfer tables of SGLang grow with their sequences
_BUFFERS: dict[torch.device, Tensor] = {}


def decode_buffer(device: torch.device) -> Tensor:
    """The memory of all decode plans of a GPU, which do not run at the same time.

    It is made before a graph is captured: what is allocated during a capture belongs to the graph.
    """
    if device not in _BUFFERS:
        import torch

        from k16v8.kernels.decode import BUFFER

        _BUFFERS[device] = torch.zeros(BUFFER, dtype=torch.float32, device=device)
    return _BUFFERS[device]


def decode_step(
    kernels: Kernels,
    q: Tensor,
    cache: PagedCache,
    attention: Attention,
    out: Tensor,
    lists: dict[object, Tensor],
    queries: int = 1,
    starts: Tensor | None = None,
) -> None:
    """Decode one layer of a step: ``q`` ``[N, heads, D]`` into ``out`` ``[N, heads, Dv]``.

    The plan of a shape is made once, in :func:`decode_buffer`; ``lists`` keeps the step's work lists for its layers.

    ``queries``: of a sequence, at most; ``starts``: int32 ``[B + 1]``, of each sequence's, where that is more than 1.
    """
    if kernels.implementation == "torch":
        kernels.decode(q, cache, attention, query_starts=starts, out=out)
        return
    import torch

    device, heads, batch = cache.k_cache.device, q.shape[1], len(cache.lengths)
    kind = q.dtype, cache.k_format, cache.v_format, cache.k_scale is None, cache.v_scale is None
    options = attention.window, attention.softcap, attention.sinks is None
    longest = cache.max_length if kernels.implementation == "flashinfer" else 0
    shape = batch, queries, *q.shape[1:], cache.kv_heads, cache.v_dim, longest
    key = kernels.implementation, device, *shape, *kind, *options
    if key not in _PLANS:
        if len(_PLANS) == _MAX_PLANS:
            _PLANS.clear()
        buffer = decode_buffer(device)
        _PLANS[key] = kernels.plan(batch, heads, cache, attention, queries=queries, dtype=q.dtype, buffer=buffer)
    plan, work = _PLANS[key], None
    if kernels.implementation == "triton":
        # a graph writes its list itself: a replay has other lengths
        here = plan, torch.cuda.is_current_stream_capturing()
        if here not in lists:
            lists[here] = plan.schedule(cache, attention)
        work = lists[here]
    kernels.decode(q, cache, attention, query_starts=starts, out=out, plan=plan, work=work)


def decode_queries(ratio: int, drafts: int) -> int:
    """Return how many queries of a sequence the decode kernels take: one more than ``drafts``, else one.

    ``ratio``: query heads of a KV head.
    """
    from k16v8.kernels.checks import MAX_ROWS

    return 1 + drafts if ratio * (1 + drafts) <= MAX_ROWS and _selected_kernels() == "triton" else 1


def _selected_kernels() -> str:
    named = os.environ.get(KERNELS_SWITCH, "").strip() or "triton"
    if named not in ("triton", "flashinfer"):
        raise UsageError(f"{KERNELS_SWITCH}={named}: write triton or flashinfer")
    return named


_WORKSPACES: dict[torch.device, Tensor] = {}


def prefill_workspace(device: torch.device) -> Tensor:
    """The memory in which long prompts' contexts lie as numbers of 16 bits: one for all layers of a device."""
    if device not in _WORKSPACES:
        import torch

        from k16v8.kernels.prefill import WORKSPACE

        _WORKSPACES[device] = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
    return _WORKSPACES[device]


def reserve(device: torch.device, step: tuple[int, int, int, int] | None = None) -> None:
    """Make the buffers of a GPU, and take for a moment what a prompt takes besides.

    ``step``: queries, query heads, head dimensions of keys and values.

    An engine that measures its memory while this runs leaves room for both.
    """
    import torch

    from k16v8.kernels.prefill import Libraries, installed, scratch_bytes

    decode_buffer(device)
    if installed() != Libraries():
        prefill_workspace(device)
        torch.empty(scratch_bytes(*step) if step else 0, dtype=torch.uint8, device=device)


def attend_prompts(
    kernels: Kernels,
    q: Tensor,
    starts: Tensor,
    cache: PagedCache,
    attention: Attention,
    out: Tensor,
    batch: PrefillBatch | None,
) -> None:
    """The last tokens of each sequence over the whole of it: ``q`` ``[N, heads, D]`` into ``out`` ``[N, heads, Dv]``.

    ``starts``: int32 ``[B + 1]``, of each sequence's queries; ``batch``: the same on the host, ``None`` where lengths
    are not known there: the kernel that reads the cache in place needs none.
    """
    from k16v8.kernels.prefill import installed, library_attention, prefill

    route = prompt_route(kernels, q, cache, attention, batch)
    if batch is None or route == "extend":
        kernels.extend(q, starts, cache, attention, out=out)
        return
    attend = library_attention(route, installed())
    workspace = prefill_workspace(q.device)
    prefill(q, batch, cache, attention, attend, gather=kernels.gather, workspace=workspace, out=out)


def prompt_route(
    kernels: Kernels, q: Tensor, cache: PagedCache, attention: Attention, batch: PrefillBatch | None
) -> Route:
    """:func:`k16v8.kernels.prefill.prefill_route` of a batch here; ``extend`` where its lengths are not known."""
    from k16v8.kernels.prefill import capacity, installed, prefill_route

    if batch is None or kernels.implementation != "triton":
        return "extend"
    return prefill_route(
        _architecture(q.device),
        installed(),
        max_queries=batch.max_queries,
        cache=cache,
        dtype=q.dtype,
        window=attention.window,
        capacity=capacity(cache),
    )


def _architecture(device: torch.device) -> int | str:
    from k16v8.kernels.launch import target_of

    return target_of(device).arch


@dataclass(frozen=True)
class Pages:
    """Typed views of a layer's cache: ``[blocks, tokens, heads, …]``, with a contiguous last dimension."""

    keys: Tensor  # [blocks, tokens, heads, width(D)], in the type in which the kernels hold their format
    values: Tensor  # [blocks, tokens, heads, width(Dv)]
    k_scales: Tensor | None  # [blocks, tokens, heads], float16; or one float32 of all
    v_scales: Tensor | None
    k_format: str  # names of the kernels
    v_format: str

    @property
    def tensors(self) -> list[Tensor]:
        """Return keys, values, and the scales if there are any."""
        held = (self.keys, self.values, self.k_scales, self.v_scales)
        return [x for x in held if x is not None and x.dim()]

    def on(self, device: torch.device | str) -> Pages:
        """Return these pages with an FP8 type that ``device`` converts itself.

        gfx942 has e4m3fnuz, whose codes are worth half as much.  There e4m3 without scales is e4m3fnuz with a scale
        of 2: the same numbers up to 448, and saturation at 480.
        """
        import torch

        if torch.device(device).type != "cuda" or _architecture(torch.device(device)) != "gfx942":
            return self
        changed: dict[str, Any] = {}
        for side in "kv":
            if getattr(self, f"{side}_format") == "fp8_e4m3" and getattr(self, f"{side}_scales") is None:
                changed[f"{side}_format"] = "fp8_e4m3fnuz"
                changed[f"{side}_scales"] = torch.full((), 2.0, device=self.keys.device)
        return replace(self, **changed)

    def paged(self, table: Tensor, lengths: Tensor) -> PagedCache:
        """The layer's cache for the kernels; ``table``: int32 ``[B, max_blocks]``, ``lengths``: int32 ``[B]``."""
        from k16v8.kernels.cache import PagedCache

        formats = self.k_format, self.v_format
        return PagedCache(self.keys, self.values, table, lengths, *formats, self.k_scales, self.v_scales)

    def kernels(self, heads: int, dtype: torch.dtype, device: torch.device | str) -> Kernels:
        """The kernels for these pages: the torch path on CPUs, Triton on GPUs.  ``heads``, ``dtype``: of queries.

        Raises:
            NotSupportedError: If there are none for this shape.
            UsageError: If the value of ``K16V8_KERNELS`` is invalid.
        """
        import torch

        from k16v8.kernels import dispatch
        from k16v8.kernels.cache import scaling_of, storage

        named = _selected_kernels()
        return dispatch.choose(
            "torch" if torch.device(device).type == "cpu" else named,
            k_format=self.k_format,
            v_format=self.v_format,
            heads=heads,
            kv_heads=self.keys.shape[2],
            head_dim=self.keys.shape[3] * storage(self.k_format).per_byte,
            v_dim=self.values.shape[3] * storage(self.v_format).per_byte,
            page=self.keys.shape[1],
            dtype=dtype,
            device=device,
            k_scaling=scaling_of(self.k_scales),
            v_scaling=scaling_of(self.v_scales),
        )

    def warm_up(
        self, kernels: Kernels, heads: int, dtype: torch.dtype, attention: Attention, device: Any, queries: int = 1
    ) -> None:
        """Compile what steps on these pages, or on others like them, will launch: a server calls it before it serves.

        The pages may lie on ``meta``; ``device``: where those of the server lie; ``queries``: of each sequence, where
        drafts are verified.  The torch path compiles nothing.
        """
        import torch

        if kernels.implementation not in ("triton", "flashinfer"):
            return
        from k16v8.kernels.variants import VARIANTS, warm_up

        by_library = kernels.implementation == "flashinfer"
        names = [name for name in VARIANTS if not by_library or name in ("write", "extend", "gather")]
        numbers = torch.empty(1, dtype=torch.int32, device=self.keys.device)
        cache = self.paged(numbers.view(1, 1), numbers)
        warm_up(cache, heads, dtype, attention, torch.device(device), names, count=_counting())
        if queries > 1:
            warm_up(cache, heads, dtype, attention, torch.device(device), ("decode",), queries=queries)


def read_back(
    found: Pages, blocks: list[int], key: Tensor, value: Tensor, counted: Tensor | None = None
) -> dict[str, Any]:
    """Compare what a request's first tokens were given with what its blocks hold, and where.

    ``key``: ``[n, heads · D]``, ``value``: ``[n, heads · Dv]``.  Numbers of 16 bits must be equal bit by bit, codes and
    their scales what the format makes of the numbers.  ``matches``: the share of all that is; ``disjoint``: no byte
    belongs to two of keys, values and scales; ``saturated``: numbers beyond the format's range.  ``counted`` (int32
    ``[2]``): such keys and values of all that was written so far, named so in the result where they are counted.
    """
    import torch

    sides = [
        _compared(held, scales, name, given, blocks)
        for held, scales, name, given in (
            (found.keys, found.k_scales, found.k_format, key),
            (found.values, found.v_scales, found.v_format, value),
        )
    ]
    held = [byte for x in found.tensors for byte in _addresses(x[blocks[0]])]
    stored = [
        str(x.dtype).removeprefix("torch.") if name in _16_BIT.values() else _STORAGE_TYPES.get(name, name)
        for x, name in ((found.keys, found.k_format), (found.values, found.v_format))
    ]
    return {
        "stored": stored[0],
        "v_stored": stored[1],
        "k_format": _requested_format(found.k_format, found.k_scales),
        "v_format": _requested_format(found.v_format, found.v_scales),
        "matches": float(torch.cat([same for same, _ in sides]).float().mean()),
        "disjoint": len({*held}) == len(held),
        "saturated": sum(beyond for _, beyond in sides),
        **({} if counted is None else {"counted": counted.tolist()}),
    }


def _requested_format(name: str, scales: Tensor | None) -> str:
    """The format that a server was asked for; see :meth:`Pages.on`."""
    return name if scales is None or scales.dim() else "fp8_e4m3"


def _compared(held: Tensor, scales: Tensor | None, name: str, given: Tensor, blocks: list[int]) -> tuple[Tensor, int]:
    """Which numbers of one side, and which scales, are what they should be; and how many saturate."""
    import torch

    from k16v8.kernels.cache import FLOAT8, codes_to_values, storage
    from k16v8.kernels.torch_path import token_scale

    n, heads, stored = len(given), held.shape[2], storage(name)
    codes, given = held[blocks].flatten(0, 1)[:n].contiguous(), given.view(n, heads, -1)
    if not stored.quantized:
        exact = given.to(codes.dtype).contiguous()
        return (codes.view(torch.int16) == exact.view(torch.int16)).flatten(), 0
    given, same = given.float(), []
    if scales is not None and not scales.dim():
        given, scales = given / scales, None
    if scales is not None:
        factor = scales[blocks].flatten(0, 1)[:n]
        same.append((factor == token_scale(given, stored)).flatten())
        given = given / factor.float().unsqueeze(-1)
    inside = given.clamp(-stored.top, stored.top)
    if stored.integer:
        same.append((codes_to_values(codes, name) == inside.round()).flatten())
    else:
        same.append((codes == inside.to(FLOAT8[name]).view(torch.uint8)).flatten())
    return torch.cat(same), int((given.abs() > stored.top).sum()) if scales is None else 0


def _addresses(x: Tensor) -> list[int]:
    """Offsets of all bytes, counted from the start of the storage."""
    import torch

    size = x.element_size()
    places = torch.tensor(x.storage_offset())
    for length, stride in zip(x.shape, x.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(length) * stride
    return (places.flatten().unsqueeze(-1) * size + torch.arange(size)).flatten().tolist()
