"""Names of cache formats over all engines: which row a name means, and what to say of a name that none has."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from fidelab.core import KVSpec
from fidelab.core.errors import UnknownNameError, UsageError
from fidelab.core.meant import ELSEWHERE, SAME, bits_peers, weights_format
from fidelab.engines.base import Engine, engine_class, engines
from fidelab.engines.cache_formats import CacheFormat
from fidelab.engines.k16v8 import K16V8, SIDES, meaning
from fidelab.formats import FORMATS


def owners(name: str) -> list[type[Engine]]:
    """Return the engines whose own list has a name, without those that have dropped it."""
    return [cls for cls in engines() if name in cls.cache_formats and not cls.cache_formats[name].instead]


def names_of(cls: type[Engine]) -> list[str]:
    """Return the names of an engine's formats by its table, with the sides of pairs that the package k16v8 adds.

    fidelab's own come first where the engine emulates them.
    """
    own = [name for name, row in cls.cache_formats.items() if not row.instead]
    if cls.emulates:
        return [*FORMATS.names(), K16V8, *own]
    pairs = own and cls.cache_format(KVSpec.parse(K16V8)) is not None
    return list(dict.fromkeys((*own, *SIDES, K16V8) if pairs else own))


def unknown_format(name: str, known: Collection[str], engine: str = "", version: str = "") -> UnknownNameError:
    """Return the error for a format that an engine, or fidelab itself, does not have.

    The message says where the name exists, and what the same format is called here.

    Args:
        known: names that there are.
        engine: empty: fidelab's own formats are meant.
        version: of the engine.
    """
    kind = f"KV format of engine {engine}" if engine else "KV format"
    return UnknownNameError(kind, name, known, _hint(name, known, engine, version))


def _hint(name: str, known: Collection[str], engine: str, version: str) -> str:
    lower = name.lower()
    for cls in [engine_class(engine)] if engine else engines():
        if (row := cls.cache_formats.get(name)) is not None and row.instead:
            return f"{cls.title} no longer has it: write {row.instead}"
    if engine and (row := engine_class(engine).cache_formats.get(name)) is not None and row.since:
        installed = f", and {version} is installed" if version else ""
        return f"{engine_class(engine).title} has it from {row.since} on{installed}"
    same = next((names for names in SAME if lower in names), (name,))
    here = [other for other in same if other in known and other != name]
    # the engine's own name before one that is there as a side of a pair
    if own := sorted(here, key=lambda other: bool(engine) and other not in engine_class(engine).cache_formats):
        return f"the same format is called {own[0]} here"
    peers = [other for other in bits_peers(lower) if other in known and other != name] if engine else []
    near = f"; of as many bits here: {', '.join(peers[:3])}" if peers else ""
    for other in same:
        if there := [cls.name for cls in owners(other) if cls.name != engine]:
            it, one = "it" if other == name else other, len(there) == 1
            which = f"engine{'' if one else 's'} {' and '.join(there)} {'has' if one else 'have'}"
            return f"{which} {it}: pass --engine {there[0]}{near}"
    if engine and lower in FORMATS.names():
        return f"engine hf has it: pass --engine hf{near}"
    if weights_format(lower):
        return "that is a format of weights: --candidate model=FILE"
    if "," in name:
        return "repeat --kv: " + " ".join(f"--kv {part.strip()}" for part in name.split(","))
    for tool in ELSEWHERE:
        if re.fullmatch(tool.names, lower):
            return f"for {tool.tool}'s {tool.option}: {tool.way}"
    return ""


def format_for(kv: KVSpec, engine: str | None = None) -> tuple[str, CacheFormat] | None:
    """Return the engine that a format is of, and its row; ``None`` where fidelab's own definition is meant.

    Args:
        engine: whose names are meant; ``None``: fidelab's own, else those of the engines that have the name.

    Raises:
        UnknownNameError: If no engine, or not this one, has the format.
        UsageError: If several engines mean different things by the name, or the engine refuses the options.
    """
    if engine is not None and not (engine_class(engine).emulates and _is_defined(kv)):
        cls = engine_class(engine)
        if not cls.emulates or {kv.k.name, kv.v.name} <= {*names_of(cls)}:
            cls.check_kv(kv)
        if (row := cls.cache_format(kv)) is None or row.instead:
            raise _first_unknown(kv, names_of(cls), engine)
        return engine, row
    spelled = meaning(kv, "bf16")
    if _is_defined(kv):
        return None
    found = [(cls.name, row) for cls in engines() if (row := cls.cache_format(kv)) is not None and not row.instead]
    if not found or engine is not None:
        raise _first_unknown(spelled, FORMATS.names(), engine or "")
    if len({(row.k, row.v, row.align, row.keeps) for _, row in found}) > 1:
        names = [name for name, _ in found]
        raise UsageError(f"KV format {kv.label!r} differs between engine {' and '.join(names)}: pass --engine")
    engine_class(found[0][0]).check_kv(kv)
    return found[0]


def _is_defined(kv: KVSpec) -> bool:
    """Whether fidelab itself defines both formats."""
    spelled = meaning(kv, "bf16")
    return {spelled.k.name, spelled.v.name} <= {*FORMATS.names()}


def _first_unknown(kv: KVSpec, known: Iterable[str], engine: str) -> UnknownNameError:
    """The error of the first side that is unknown; of the first one where both are known, but not together."""
    names = list(dict.fromkeys(known))
    missing = [side.name for side in (kv.k, kv.v) if side.name not in names]
    return unknown_format(missing[0] if missing else str(kv.k), names, engine)
