"""What the K16/V8 plug-ins of vLLM and SGLang share: the switch, versions, bytes, views of pages, what pages hold.

``K16V8`` in the environment switches them on: ``1`` for values with scale 1.0, saturating, ``per-token-head`` for one
float16 scale beside each head's value vector, ``0`` for off.  ``FIDELAB_K16V8``, its former name, is read where
``K16V8`` is not set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from k16v8.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from k16v8.kernels.cache import PagedCache
    from k16v8.kernels.dispatch import Kernels

__all__ = [
    "KEY_BYTES",
    "LABEL",
    "SCALE_BYTES",
    "SWITCH",
    "VALUE_BYTES",
    "Pages",
    "Scaling",
    "content_bytes",
    "read_back",
    "switched",
    "version_refusal",
]

Scaling = Literal["none", "per-token-head"]
Version = tuple[int, ...]
SWITCH = "K16V8"  # environment variable
_FORMER_SWITCH = "FIDELAB_K16V8"
LABEL = "k16v8"  # of the attention backends, in logs and records
_SCALINGS: dict[str, Scaling] = {"1": "none", "per-token-head": "per-token-head"}
KEY_BYTES, VALUE_BYTES, SCALE_BYTES = 2, 1, 2
_KEYS = {"torch.bfloat16": "bf16", "torch.float16": "f16"}  # types of keys, and the kernels' names of them
_VALUES = "fp8_e4m3"


def switched() -> Scaling | None:
    """What the environment asks for; ``None``: nothing.

    Raises:
        UsageError: the variable has a value that means nothing.
    """
    name = SWITCH if SWITCH in os.environ else _FORMER_SWITCH
    text = os.environ.get(name, "")
    if text in ("", "0"):
        return None
    if text not in _SCALINGS:
        raise UsageError(f"{name}={text}: write 1, per-token-head, or 0 for off")
    return _SCALINGS[text]


def version_refusal(packages: Sequence[str], versions: tuple[Version, Version], what: str) -> str:
    """Why a plug-in does not run in the installed engine; empty where it does.

    ``packages``: the engine's distributions, of which the first one that is installed counts.  ``versions``: from the
    first to before the second.  ``what`` the plug-in uses that may change with any version, as a clause.
    """
    found = next(filter(None, map(_installed, packages)), "no version")
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[: len(versions[0])])
    if versions[0] <= numbers < versions[1]:
        return ""
    first, end = (".".join(map(str, numbers)) for numbers in versions)
    return f"k16v8 {what}: it runs in {first} to before {end}, not in {found}"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


class Pages(NamedTuple):
    """Typed views of a layer's cache: ``[blocks, tokens, heads, …]``, the last dimension without gaps."""

    keys: Tensor  # [blocks, tokens, heads, D], the model's 16-bit type
    values: Tensor  # [blocks, tokens, heads, Dv], uint8: codes of e4m3
    scales: Tensor | None  # [blocks, tokens, heads], float16

    def paged(self, table: Tensor, lengths: Tensor) -> PagedCache:
        """The layer's cache for the kernels; ``table``: int32 ``[B, max_blocks]``, ``lengths``: int32 ``[B]``."""
        from k16v8.kernels.cache import PagedCache

        keys, values, scales = self
        return PagedCache(keys, values, table, lengths, _KEYS[str(keys.dtype)], _VALUES, v_scale=scales)

    def kernels(self, heads: int, dtype: torch.dtype, device: torch.device | str) -> Kernels:
        """The kernels for these pages: the torch path on CPUs, Triton on GPUs.  ``heads``, ``dtype``: of queries.

        Raises:
            NotSupportedError: there are none for this shape.
        """
        import torch

        from k16v8.kernels import dispatch

        return dispatch.choose(
            "torch" if torch.device(device).type == "cpu" else "triton",
            k_format=_KEYS[str(self.keys.dtype)],
            v_format=_VALUES,
            heads=heads,
            kv_heads=self.keys.shape[2],
            head_dim=self.keys.shape[3],
            v_dim=self.values.shape[3],
            page=self.keys.shape[1],
            dtype=dtype,
            device=device,
            v_scaling="none" if self.scales is None else "per-token-head",
        )


def content_bytes(head_dim: int, v_dim: int, scaling: Scaling) -> int:
    """Bytes of one head of one token."""
    return KEY_BYTES * head_dim + VALUE_BYTES * v_dim + (SCALE_BYTES if scaling == "per-token-head" else 0)


def read_back(found: Pages, blocks: list[int], key: Tensor, value: Tensor) -> dict[str, Any]:
    """Compare what a request's first tokens were given with what its blocks hold, and where.

    ``key``: ``[n, heads · D]``, ``value``: ``[n, heads · Dv]``.  Keys must be equal bit by bit, values what e4m3 makes
    of them.  ``matches``: the share of both that is; ``disjoint``: no byte belongs to two of keys, values and scales.
    """
    import torch

    n, heads = len(key), found.keys.shape[2]
    keys, codes = (x[blocks].flatten(0, 1)[:n] for x in (found.keys, found.values))
    same = keys.contiguous().view(torch.int16) == key.view(n, heads, -1).to(keys.dtype).contiguous().view(torch.int16)
    given = value.view(n, heads, -1).float()
    if found.scales is not None:
        given = given / found.scales[blocks].flatten(0, 1)[:n].float().unsqueeze(-1)
    near = given.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    both = torch.cat((same.flatten(), (codes == near).flatten()))
    held = [byte for x in found if x is not None for byte in _addresses(x[blocks[0]])]
    return {
        "stored": str(keys.dtype).removeprefix("torch."),
        "v_stored": "float8_e4m3fn",
        "matches": float(both.float().mean()),
        "disjoint": len({*held}) == len(held),
        "saturated": int((given.abs() > 448).sum()),
    }


def _addresses(x: Tensor) -> list[int]:
    """Of every byte, counted from the start of the storage."""
    import torch

    size = x.element_size()
    places = torch.tensor(x.storage_offset())
    for length, stride in zip(x.shape, x.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(length) * stride
    return (places.flatten().unsqueeze(-1) * size + torch.arange(size)).flatten().tolist()
