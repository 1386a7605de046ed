"""Plug-ins: what we put into other people's engines (formats and kernels behind the engine's own hooks)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k16v8.plugins.transformers.attention import register_attention
    from k16v8.plugins.transformers.cache import K16V8Cache

__all__ = ["K16V8Cache", "register_attention"]

_WHERE = {"K16V8Cache": "paged_cache", "register_attention": "paged_attention"}


def __getattr__(name: str) -> Any:
    """Torch and Transformers are imported by those who ask for a name, not by ``import fidelab.plugins``."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
