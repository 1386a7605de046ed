"""A record of ``k16v8 bench`` as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from k16v8.cli.common import table

_K16V8_COLUMNS = ("16/16", "16/8", "8/8")
_PRODUCTS = ("linear", "experts")
_SPREAD = 0.1  # of repeats, from the 10th to the 90th percentile, above which a time is marked


def render(record: dict[str, Any]) -> Iterator[str]:
    """One table per geometry, the goals, and what was not measured and why."""
    from k16v8.bench.shapes import GEOMETRIES

    run = record["runs"][-1]
    yield (
        f"{record['device']['name']}: copies {run['copy_bandwidth'] / 1e9:,.0f} GB/s (read and written), "
        f"reads {run['read_bandwidth'] / 1e9:,.0f} GB/s"
    )
    shown: dict[tuple[int, int, int], str] = {}
    for name in record["geometries"]:
        shape = GEOMETRIES[name].shape
        if shape in shown:
            yield f"{name}: the attention of {shown[shape]}, and its figures\n"
            continue
        shown[shape] = name
        title = "{}: {} heads, {} of K and V, dimension {}".format(name, *shape)
        for kind in ("decode", "extend"):
            asked = [one for one in record["cells"] if one["shape"] == [*shape] and one["kind"] == kind]
            if asked:
                yield _cells(f"{title}; {kind}", sorted(asked, key=lambda one: (one["batch"], one["tokens"])))
    weighed = [one for one in record["cells"] if one["kind"] in _PRODUCTS]
    for kind, title in (
        ("linear", "linear layers with 4-bit weights"),
        ("experts", "experts with 4-bit weights, all in one launch"),
    ):
        if products := [one for one in weighed if one["kind"] == kind]:
            yield _products(title, products)
    if weighed:
        yield (
            "µs, speed-up over 16-bit weights, share of the floor: the time in which the device reads those bytes; "
            "^: more than 2% above what bytes allow; ~: repeats spread over more than 10%"
        )
    if len(weighed) < len(record["cells"]):
        yield (
            "µs, speed-up over the best 16-bit kernel, bytes per second over the best rival's (extend: TFLOP/s); "
            "^: more than 2% above what bytes allow (16/8: 1.333, 8/8: 2); ~: repeats spread over more than 10%"
        )
    if record["cells"]:
        measured = [one for cell in record["cells"] for one in cell["results"] if one["status"] == "measured"]
        if measured:
            launched = [one["launch"] for one in measured if one["role"] == "ours" and one.get("launch")]
            if launched:
                yield f"our decode: {_launches(launched)}"
            caches, worst = [one["caches"] for one in measured], max(one["error"] for one in measured)
            yield (
                f"inputs lie in {min(caches)} to {max(caches)} places in turn, twice the last cache and more; "
                f"largest error of what was measured: {worst:.2g} (relative L2; most is 0.0035)"
            )
    yield from _missing(record)
    for goal in record["goals"] if len(weighed) < len(record["cells"]) or not record["cells"] else ():
        found = f"{goal['found']:.3g} at {goal['where']}" if goal["found"] is not None else goal["reason"]
        yield f"goal {goal['verdict']}: {goal['name']} ≥ {goal['wanted']:g} ({found})"
    if record["left_out"]:
        yield f"{record['left_out']} measurements were left out for lack of time; resume with --resume"


def _cells(title: str, found: list[dict[str, Any]]) -> str:
    columns = ("B", "T", "best 16-bit", *(f"k16v8 {pair}" for pair in _K16V8_COLUMNS), "best FP8 of others")
    naive = list(dict.fromkeys(one["name"] for cell in found for one in cell["results"] if one["role"] == "naive"))
    rows = []
    for cell in found:
        results = {(one["name"], one["formats"]): one for one in cell["results"]}
        extend = cell["kind"] == "extend"
        row = [f"{cell['batch']}", f"{cell['tokens']:,}" if not extend else f"{cell['queries']} of {cell['tokens']:,}"]
        wide, narrow = results.get((cell["best_16"], "16/16")), results.get((cell["best_fp8"], "8/8"))
        row.append(f"{wide['name']} {_micro(wide)}" if wide else "–")
        row += [_figures(results.get(("k16v8", pair)), extend) for pair in _K16V8_COLUMNS]
        row.append(f"{narrow['name']} {_figures(narrow, extend)}" if narrow else "–")
        row += [_figures(results.get((name, "16/8")), extend) for name in naive]
        rows.append(row)
    return table((*columns, *naive), rows, title)


def _products(title: str, found: list[dict[str, Any]]) -> str:
    """A line per cell, a column per contender that was measured at one of them."""
    who = {
        (one["name"], one["formats"]): None for cell in found for one in cell["results"] if one["status"] == "measured"
    }
    rows = []
    for cell in found:
        inputs, outputs, group = cell["shape"]
        results = {(one["name"], one["formats"]): one for one in cell["results"]}
        of = f"{cell['top']} of {cell['experts']}, " if cell["kind"] == "experts" else ""
        row = [f"{of}{inputs:,} x {outputs:,}", f"{group}", f"{cell['batch']:,}"]
        for name in who:
            one = results.get(name)
            shown = "–" if one is None else one["status"].replace("_", " ")
            if one is not None and one["status"] == "measured":
                speedup = (
                    "" if one["speedup"] is None else f" {one['speedup']:.2f}×{'^' if one['above_ceiling'] else ''}"
                )
                shown = f"{_micro(one)}{speedup} {100 * one['floor'] / one['seconds']:.0f}%"
            row.append(shown)
        rows.append(row)
    return table(("layer", "group", "rows", *(" ".join(name) for name in who)), rows, title)


def _micro(one: dict[str, Any]) -> str:
    spread = (one["p90"] - one["p10"]) / one["seconds"]
    return f"{1e6 * one['seconds']:,.1f}{'~' if spread > _SPREAD else ''}"


def _figures(one: dict[str, Any] | None, extend: bool) -> str:
    if one is None:
        return "–"
    if one["status"] != "measured":
        return f"{one['status']}".replace("_", " ")
    of_rival = "" if one["of_best_rival"] is None else f"{100 * one['of_best_rival']:.0f}%"
    rate = f"{one['operations_per_second'] / 1e12:.3g}" if extend else of_rival
    speedup = "" if one["speedup"] is None else f" {one['speedup']:.2f}×{'^' if one.get('above_ceiling') else ''}"
    return f"{_micro(one)}{speedup} {rate}".rstrip()


def _missing(record: dict[str, Any]) -> Iterator[str]:
    """Each reason once, with the cells that it is about where it is not all of them."""
    where: dict[tuple[str, str, str], list[str]] = {}
    every: dict[str, int] = {}
    for cell in record["cells"]:
        for one in cell["results"]:
            who = f"{one['name']} {one['formats']}"
            every[who] = every.get(who, 0) + 1
            if one["status"] != "measured":
                where.setdefault((who, one["status"], one["reason"]), []).append(cell["key"])
    for (who, status, reason), keys in where.items():
        place = "" if not keys or len(keys) == every.get(who) else f" at {', '.join(keys)}"
        yield f"{who} {status.replace('_', ' ')}{place}: {reason}"


def _launches(launched: list[dict[str, int]]) -> str:
    """How decode was launched, over all its cells."""

    def of(name: str) -> str:
        found = sorted({one[name] for one in launched})
        return f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"

    return (
        f"tiles of {of('tokens')} tokens, {of('warps')} warps, {of('stages')} stages; splits of {of('split')} tokens, "
        f"{of('programs')} programs on {of('slots')} slots in {of('rounds')} rounds"
    )


def render_model(record: dict[str, Any]) -> Iterator[str]:
    """One table of a record of :func:`k16v8.bench.model.bench_model`, its ratios, and what was not measured and why."""
    weights = record["weight_bytes"] / 1e9
    device = record["device"]["name"]
    yield f"{record['model']} with random weights, {record['layers']} layers, {weights:.3g} GB; {device}"
    headings = ("tokens", "batch", "contender", "K/V", "ms", "tokens/s", "GB/s", "cache GB", "error")
    rows = [_model_row(cell, one) for cell in record["cells"] for one in cell["results"]]
    yield table(headings, rows)
    for cell in record["cells"]:
        if cell["batch"] < cell["asked_batch"]:
            asked, batch = cell["asked_batch"], cell["batch"]
            yield f"{cell['tokens']:,} tokens: a batch of {asked} does not fit; {batch} were measured"
        for name, ratio in cell.get("ratios", {}).items():
            yield f"{cell['tokens']:,} tokens, {name}: {ratio:.3f}×"
        for one in cell["results"]:
            if one["status"] != "measured":
                yield f"{cell['tokens']:,} tokens, {one['name']} {one['formats']}: {one['status']} ({one['reason']})"
    launched = [one["launch"] for cell in record["cells"] for one in cell["results"] if one["launch"]]
    if launched:
        yield f"our decode: {_launches(launched)}"
    if record["left_out"]:
        yield f"{record['left_out']} measurements were left out: time was over"


def _model_row(cell: dict[str, Any], one: dict[str, Any]) -> tuple[str, ...]:
    fixed = (f"{cell['tokens']:,}", str(cell["batch"]), one["name"], one["formats"])
    if one["status"] != "measured":
        return *fixed, one["status"], "", "", "", ""
    spread = "~" if one["p90"] - one["p10"] > _SPREAD * one["seconds"] else ""
    rates = (f"{one['tokens_per_second']:,.0f}", f"{one['bytes_per_second'] / 1e9:,.0f}")
    error = "" if one["error"] is None else f"{one['error']:.2g}"
    return *fixed, f"{1e3 * one['seconds']:.3f}{spread}", *rates, f"{one['cache_bytes'] / 1e9:.2f}", error


def render_engine(record: dict[str, Any]) -> Iterator[str]:
    """Two tables of a record of :func:`k16v8.bench.engine.bench_engine`: arms, steps; ratios, and why some lack."""
    weights = record["weight_bytes"] / 1e9
    yield (
        f"{record['model']} with random weights, {record['layers']} layers, {weights:.3g} GB, in vLLM "
        f"{record['versions']['vllm']}; {record['device']['name']}"
    )
    arms = record["arms"]
    started = [one for one in arms if one["cache_tokens"] is not None]
    rows = [
        (one["formats"], one["backend"], f"{one['start_seconds']:.1f}", f"{one['cache_tokens']:,}", str(one["block"]))
        for one in started
    ]
    if rows:
        yield table(("K/V", "backend", "start s", "cache tokens", "block"), rows)
    timed = [(arm, one) for arm in arms for one in arm["contexts"] if one["seconds"] is not None]
    rows_of_steps = [
        (
            f"{one['tokens']:,}",
            str(one["batch"]),
            arm["formats"],
            f"{1e3 * one['seconds']:.3f}",
            f"{1e3 * min(one['step_seconds']):.3f} to {1e3 * max(one['step_seconds']):.3f}",
            f"{one['tokens_per_second']:,.0f}",
            f"{one['fill_seconds']:.1f}",
            f"{100 * one['cached']:.0f}%",
        )
        for arm, one in sorted(timed, key=lambda pair: pair[1]["tokens"])
    ]
    if rows_of_steps:
        headings = ("tokens", "batch", "K/V", "ms", "of repeats", "tokens/s", "fill s", "cached")
        yield table(headings, rows_of_steps)
    for arm in arms:
        if arm["status"] != "measured":
            yield f"{arm['formats']}: {arm['status'].replace('_', ' ')} ({arm['reason']})"
        for one in arm["contexts"]:
            where = f"{one['tokens']:,} tokens, {arm['formats']}"
            if one["status"] != "measured":
                yield f"{where}: {one['status'].replace('_', ' ')} ({one['reason']})"
            elif one["batch"] < one["asked_batch"]:
                yield f"{where}: a batch of {one['asked_batch']} does not fit; {one['batch']} were measured"
    for tokens, found in record["ratios"].get("speed", {}).items():
        for name, ratio in found.items():
            yield f"{int(tokens):,} tokens, {name}: {ratio:.3f}×"
    for name, ratio in record["ratios"].get("capacity", {}).items():
        yield f"tokens in the cache, {name}: {ratio:.3f}×"
    if record["left_out"]:
        yield f"{record['left_out']} measurements were left out: time was over"
