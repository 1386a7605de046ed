"""Questions of a user, which tests answer them, and which are left untested."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fidelab.core.registry import Registry
from fidelab.results.measurement import DECIDING, DOMAIN
from fidelab.results.record import ArmRecord
from fidelab.results.sizes import reach
from fidelab.results.table import BENCH

KINDS = ("tool calls", "code", "logs", "long document", "tables and JSON", "mathematics", "languages", "chat")
"""Kinds of text that people run models on: those of the text ``agents``."""

_NAMED_KINDS = 3  # more of them are a list that nobody reads, where the answer says what was left out


def coverage(axes: Registry, benches: Registry, asked: Iterable[str] = ()) -> dict[str, str]:
    """Return axis, or ``benches.<bench>`` → what it answers (``retrieval``), for those that answer such a question.

    They are those of fidelab, whether they ran or not, and third-party ones among ``asked``.
    """
    names = set(asked)
    found: dict[str, str] = {}
    for registry, prefix in ((axes, ""), (benches, BENCH)):
        wanted = [name for name in registry.names() if name in registry.built_in or name in names]
        found |= {f"{prefix}{name}": str(registry.load(name).covers) for name in wanted}
    return {name: words for name, words in found.items() if words}


def untested(covers: Mapping[str, str], arms: Sequence[ArmRecord]) -> tuple[str, ...]:
    """Return what no test of these configurations answered: longer contexts, then kinds of text, then other tests."""
    measured = {name for arm in arms for name, axis in arm.axes.items() if axis.measured}
    measured |= {f"{BENCH}{name}" for arm in arms for name, bench in arm.benches.items() if bench.measured}
    answered = {words for name, words in covers.items() if name in measured}
    longest = reach(arms)
    lengths = () if longest is None else (f"more than {longest:,} tokens",)
    klds = [arm.axes[DECIDING] for arm in arms if DECIDING in arm.axes]
    read = {str(metric.cell[DOMAIN]) for kld in klds for metric in kld.metrics if DOMAIN in metric.cell}
    for kld in klds:  # where only lower bounds are known, kinds have no figures
        kinds_read = kld.facts.get("kinds")
        read |= {str(kind) for kind in kinds_read} if isinstance(kinds_read, list) else set()
    missing = [kind for kind in KINDS if kind not in read]
    kinds: tuple[str, ...] = ()
    if klds and not read:
        kinds = ("other kinds of text",)
    elif klds and len(missing) < len(KINDS):  # else the text has kinds of its own
        named = f" ({', '.join(missing)})" if len(missing) <= _NAMED_KINDS else ""
        kinds = (f"other kinds of text{named}",) if missing else ()
    return (*lengths, *kinds, *(words for words in dict.fromkeys(covers.values()) if words not in answered))
