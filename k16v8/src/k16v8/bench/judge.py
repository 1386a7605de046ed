"""Judgement of measured seconds: ratios to the best 16-bit kernel, rooflines, and whether goals are met.

The best 16-bit kernel is the fastest one whose output passed, ours among them: against a slow rival alone, a format
would be credited with what is the kernel's.  A cell does not decide a goal if none of the rivals of the device
(:data:`~k16v8.bench.contenders.REQUIRED`) was measured, or if a kernel was not replayed from a graph, since
Python's time would count as the kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from k16v8.bench.contenders import FLASH, REQUIRED
from k16v8.bench.shapes import GEOMETRIES, GOAL_TOKENS, Cell, WeightCell

_ALLOWANCE = 0.02  # by which a measured speed-up may exceed its ceiling before it is flagged
Verdict = Literal["met", "missed", "unmeasured"]
Entry = dict[str, Any]  # a cell of the record


@dataclass(frozen=True)
class Goal:
    """``found``: the worst figure over the cells that it is about, in ``where``."""

    name: str
    wanted: float
    verdict: Verdict
    found: float | None = None
    where: str = ""
    reason: str = ""


def best(results: Iterable[dict[str, Any]], formats: str, *roles: str) -> dict[str, Any] | None:
    """Return the fastest measured result of these formats and roles (by default all but naive ones)."""
    chosen = [
        one
        for one in results
        if one["status"] == "measured" and one["formats"] == formats and one["role"] in (roles or ("ours", "rival"))
    ]
    return min(chosen, key=lambda one: one["seconds"], default=None)


def judge(record: dict[str, Any]) -> None:
    """Add the best kernels to every cell, the rates to every measured result, and the goals to the record."""
    for entry in record["cells"]:
        cell = _cell(entry)
        products = isinstance(cell, WeightCell)
        wide = best(entry["results"], "bf16" if products else "16/16")
        narrow = best(entry["results"], "8/8", "rival")
        entry["best_16"] = wide and wide["name"]
        entry["best_fp8"] = narrow and narrow["name"]
        rival = best(entry["results"], "bf16" if products else "16/16", "rival")
        for one in entry["results"]:
            if one["status"] == "measured":
                _rate(one, cell, wide, record["runs"][one["run"]])
                # What the device is seen to read: a copy also writes, and kernels have read faster than it.
                rate = rival and rival["moved_bytes"] / rival["seconds"]
                one["of_best_rival"] = rate and one["bytes_per_second"] / rate
    record["goals"] = [vars(goal) for goal in judge_goals(record)]


def _cell(entry: Entry) -> Cell | WeightCell:
    heads, kv_heads, dim = entry["shape"]
    if entry["kind"] in ("linear", "experts"):
        return WeightCell(entry["kind"], (heads, kv_heads, dim), entry["batch"], entry["experts"], entry["top"])
    return Cell(entry["kind"], (heads, kv_heads, dim), entry["batch"], entry["tokens"], entry["queries"], entry["page"])


def _rate(one: dict[str, Any], cell: Cell | WeightCell, wide: dict[str, Any] | None, run: dict[str, Any]) -> None:
    one["bytes_per_second"] = one["moved_bytes"] / one["seconds"]
    one["operations_per_second"] = cell.operations / one["seconds"]
    one["speedup"] = wide and wide["seconds"] / one["seconds"]
    if isinstance(cell, WeightCell):  # the seconds in which the device reads that many bytes
        one["floor"] = one["moved_bytes"] / run["read_bandwidth"]
    if cell.kind != "extend":  # which is bound by arithmetic: bytes do not bound it
        every = cell.held_bytes("bf16" if isinstance(cell, WeightCell) else "16/16")
        one["ceiling"] = every / cell.held_bytes(one["formats"])
        one["above_ceiling"] = wide and one["speedup"] > one["ceiling"] * (1 + _ALLOWANCE)


Figure = Callable[[Entry], float | None]


def _speedup(formats: str) -> Figure:
    """Speedup of k16v8's kernel over the best 16-bit one; ``None`` where no other 16-bit kernel was measured."""

    def of(entry: Entry) -> float | None:
        mine = best(entry["results"], formats, "ours")
        rival, wide = best(entry["results"], "16/16", "rival"), best(entry["results"], "16/16")
        return wide["seconds"] / mine["seconds"] if mine and rival and wide else None

    return of


def _of_rival(entry: Entry) -> float | None:
    mine = best(entry["results"], "16/8", "ours")
    return mine["of_best_rival"] if mine else None


def _of_flash(entry: Entry) -> float | None:
    mine = best(entry["results"], "16/8", "ours")
    flash = best([one for one in entry["results"] if one["name"] in FLASH], "16/16")
    return flash["seconds"] / mine["seconds"] if mine and flash else None


_AT_32, _AT_1 = (
    [Cell("decode", GEOMETRIES[name].shape, batch, GOAL_TOKENS).key for name in ("qwen2.5-7b", "llama-3.1-8b")]
    for batch in (32, 1)
)
GOALS: tuple[tuple[str, float, Figure, list[str] | None], ...] = (
    ("K16/V8 decode, B = 32, T = 32K: speed-up over the best 16-bit kernel", 1.28, _speedup("16/8"), _AT_32),
    # 1.28 of the 1.333 that bytes allow
    ("K16/V8 decode, B = 32, T = 32K: bytes per second over the best rival's", 0.96, _of_rival, _AT_32),
    ("16/16 decode, B = 32, T = 32K: speed-up over the best 16-bit kernel", 0.95, _speedup("16/16"), _AT_32),
    ("K16/V8 decode, B = 1, T = 32K: speed-up over the best 16-bit kernel", 1.0, _speedup("16/8"), _AT_1),
    ("K8/V8 decode, B = 32, T = 32K: speed-up over the best 16-bit kernel", 1.45, _speedup("8/8"), _AT_32),
    ("K16/V8 extend: rate against FlashAttention", 0.6, _of_flash, None),  # every extend cell
)


def judge_goals(record: dict[str, Any]) -> list[Goal]:
    """Judge every goal: met or missed by its worst cell; unmeasured on a CPU, or if a cell has no figure."""
    return [_goal(record, *goal) for goal in GOALS]


def _goal(record: dict[str, Any], name: str, wanted: float, figure: Figure, keys: list[str] | None) -> Goal:
    if record["device"]["type"] != "cuda":
        return Goal(name, wanted, "unmeasured", reason="goals are for GPUs")
    entries = {one["key"]: one for one in record["cells"]}
    required = REQUIRED.get(record["device"].get("capability", ""), {})
    asked = [key for key, one in entries.items() if one["kind"] == "extend"] if keys is None else keys
    for key in asked:
        if key in entries and (reason := _unfair(entries[key], required.get(entries[key]["kind"], ()))):
            return Goal(name, wanted, "unmeasured", reason=f"{key}: {reason}")
    found = {key: figure(entries[key]) if key in entries else None for key in asked}
    lacking = [key for key, value in found.items() if value is None]
    if lacking or not found:
        reason = f"no figure for {', '.join(lacking)}" if lacking else "no cell was measured"
        return Goal(name, wanted, "unmeasured", reason=reason)
    worst, where = min((value, key) for key, value in found.items() if value is not None)
    return Goal(name, wanted, "met" if worst >= wanted else "missed", worst, where)


def _unfair(entry: Entry, required: tuple[str, ...]) -> str:
    """Reason why figures of this cell decide nothing; empty if they decide."""
    results = {one["name"]: one for one in entry["results"] if one["formats"] == "16/16"}
    if required and not any(results.get(name, {}).get("status") == "measured" for name in required):
        reasons = [f"{name} ({one['status']}: {one['reason']})" for name in required if (one := results.get(name))]
        return f"none of its rivals was measured: {', '.join(reasons or required)}"
    loose = [
        f"{one['name']} {one['formats']}"
        for one in entry["results"]
        if one["status"] == "measured" and one["role"] != "naive" and not one.get("graph", False)
    ]
    return f"not replayed from a graph: {', '.join(loose)}" if loose else ""
