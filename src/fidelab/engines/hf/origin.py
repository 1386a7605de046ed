"""Whose code a cache runs: its classes, methods and formats, compared with those of the packages they come from.

A result that is right in the forwards that are observed may come from code that does something else in the others.  So
the code itself is looked at: every class of the cache must be the package's own object, and every function of it must
have been defined in that package.  Objects of the cache hold no functions of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

from fidelab.core import KVSpec
from fidelab.engines.hf import cache as encoded
from fidelab.engines.hf import quantized
from fidelab.formats.base import Format
from fidelab.formats.known import KNOWN

# Packages whose functions may be found in the classes and modules of a cache.
_PACKAGES = frozenset(("fidelab", "k16v8", "torch", "transformers", *sys.stdlib_module_names))
_LAYERS = "transformers.cache_utils"
_MODULES = ("fidelab.formats", "fidelab.engines.hf.cache", "fidelab.engines.hf.exceptions")


def foreign_code(cache: Any, kv: KVSpec, k: Format, v: Format) -> str | None:
    """Return the first part of a cache that is not the package's own; ``None`` if all are.

    Args:
        cache: the cache of a forward: fidelab's, or k16v8's pages.
        kv: the requested formats, with the layers that keep the compute type.
        k, v: the encoders that were made for the configuration.
    """
    return next(_findings(cache, kv, k, v), None)


def foreign_quantized_code(cache: Any) -> str | None:
    """Return the first part of a cache that is neither Transformers' nor fidelab's; ``None`` if all are."""
    return next(_quantized_findings(cache), None)


def _quantized_findings(cache: Any) -> Iterator[str]:
    if type(cache) is not quantized.TransformersCache:
        yield f"the cache is a {_class(cache)}, not Transformers'"
    yield from _foreign_functions(type(cache))
    yield from _held_functions("the cache", cache)
    for kind in {type(layer) for layer in cache.layers}:
        if kind.__module__ != _LAYERS or kind is not getattr(sys.modules[_LAYERS], kind.__name__, None):
            yield f"a layer is a {kind.__module__}.{kind.__qualname__}, not Transformers'"
        yield from _foreign_functions(kind)
    for number, layer in enumerate(cache.layers):
        yield from _held_functions(f"layer {number}", layer)


def _findings(cache: Any, kv: KVSpec, k: Format, v: Format) -> Iterator[str]:
    paged = sys.modules.get("fidelab.engines.hf.paged")
    own = encoded.EncodedCache, *(() if paged is None else (paged.ArmCache,))
    if type(cache) not in own:
        yield f"the cache is a {_class(cache)}, not fidelab's"
    yield from _foreign_functions(type(cache))
    yield from _held_functions("the cache", cache)
    for name in _own_modules(len(sys.modules)):
        if (module := sys.modules.get(name)) is not None:
            yield from _foreign_globals(module)
    for side, fmt in zip((kv.k, kv.v), (k, v), strict=True):
        if side.name in KNOWN:
            yield from _foreign_functions(type(fmt))
            yield from _held_functions(f"format {side}", fmt)
    yield from _layers(cache, kv, k, v)


@lru_cache(maxsize=1)
def _own_modules(loaded: int) -> list[str]:
    """Return the names of the imported modules that make caches.

    ``loaded``: number of imported modules.  Torch and Transformers import thousands, every forward is looked at, and
    names are sought again only when there are more or fewer.
    """
    return [name for name in [*sys.modules] if name.startswith(_MODULES)]


def _layers(cache: Any, kv: KVSpec, k: Format, v: Format) -> Iterator[str]:
    """Layers that keep keys and values in another way than the configuration asks for."""
    named = sys.modules.get("k16v8.plugins.transformers.cache")
    paged = () if named is None else tuple(named._PAGED.values())
    kinds: set[type[Any]] = set()
    for number, layer in enumerate(cache.layers):
        kind = type(layer)
        kinds.add(kind)
        yield from _held_functions(f"layer {number}", layer)
        if kind in paged:
            if bool(layer.skipped) is not (number in kv.skip_layers):
                yield f"layer {number} keeps keys and values in the type of the model"
        elif kind in encoded.LAYER_KINDS.values():
            if not any(layer is one for one in cache.encoded):
                yield f"layer {number} is not the layer that the cache was made with"
            for store, fmt in ((layer.k, k), (layer.v, v)):
                kinds.add(type(store))
                if type(store) is not encoded.EncodedStore:
                    yield f"layer {number} keeps its content in a {_class(store)}, not fidelab's"
                yield from _held_functions(f"the store of layer {number}", store)
                if type(store.format) is not type(fmt) or store.format != fmt:
                    yield f"layer {number} is encoded by another object than the configuration's"
                yield from _held_functions(f"the format of layer {number}", store.format)
        elif kind in encoded.LAYER_KINDS:
            if not kv.skips(number, getattr(layer, "is_sliding", False)):
                yield f"layer {number} keeps keys and values in the type of the model"
        elif kind.__module__ != _LAYERS or kind is not getattr(sys.modules[kind.__module__], kind.__name__, None):
            yield f"layer {number} is a {_class(layer)}, not fidelab's"
    for kind in kinds:
        yield from _foreign_functions(kind)


def _foreign_functions(kind: type[Any]) -> Iterator[str]:
    """Methods and properties that another package has put into a class or into one of those that it extends."""
    for base in kind.__mro__:
        for name, value in [*vars(base).items()]:
            held = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(held, FunctionType) and not _is_own(held):
                yield f"{base.__name__}.{name} is {_function(held)}"


def _foreign_globals(module: ModuleType) -> Iterator[str]:
    for name, value in [*vars(module).items()]:
        if isinstance(value, FunctionType) and not _is_own(value):
            yield f"{module.__name__}.{name} is {_function(value)}"
        elif isinstance(value, type) and value.__module__ == module.__name__:
            yield from _foreign_functions(value)


def _held_functions(what: str, thing: Any) -> Iterator[str]:
    """Functions in an object's own dictionary, which take precedence over those of its class."""
    for name, value in [*vars(thing).items()]:
        held = getattr(value, "__func__", value)
        if isinstance(held, FunctionType) and not _is_own(held):
            yield f"{what} has a function {name} of its own"


def _is_own(function: FunctionType) -> bool:
    return str(function.__globals__.get("__name__", "")).partition(".")[0] in _PACKAGES


def _function(function: FunctionType) -> str:
    return f"{function.__globals__.get('__name__')}.{function.__qualname__}"


def _class(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
