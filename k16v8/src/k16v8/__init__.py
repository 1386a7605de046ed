"""K16/V8: attention over a paged cache whose keys stay in 16 bits while its values are FP8.

``kernels`` holds the definition of attention, a vectorised torch path and Triton kernels; ``gates`` and ``audit`` check
them and any other implementation; ``bench`` measures; ``plugins`` puts them into Transformers, vLLM, SGLang and
LMCache.

    from k16v8 import K16V8Cache, register_attention

    register_attention()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="k16v8")
    model.generate(..., cache=K16V8Cache(model.config))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k16v8.plugins.transformers.attention import register_attention
    from k16v8.plugins.transformers.cache import K16V8Cache

__version__ = "0.2.0"
__all__ = ["K16V8Cache", "__version__", "register_attention"]

_LAZY_MODULES = {"K16V8Cache": "cache", "register_attention": "attention"}


def __getattr__(name: str) -> Any:
    """Import Torch and Transformers when a name is first used, not on ``import k16v8``."""
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"k16v8.plugins.transformers.{_LAZY_MODULES[name]}"), name)
