"""``fidelab setup formats``: formats of the KV cache, their size in bytes, and the engines that have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import completion, options
from fidelab.cli.output import open_console, waiting
from fidelab.core import KVSpec
from fidelab.core.errors import UsageError
from fidelab.doctor.text import by_reason
from fidelab.engines import ENGINES, engine_name

if TYPE_CHECKING:
    from fidelab.environments.listing import InstalledEngine


@dataclass(frozen=True)
class _Geometry:
    """Shape of a model's cache."""

    model: str
    layers: int
    kv_heads: int
    head_dim: int


_SIZES = ("bits_per_value", "k_bits", "v_bits", "bytes_per_token", "stored_bytes_per_token")
_EMBEDDED = _Geometry("smollm2-135m", 30, 3, 64)  # constants, so that the table needs no model on this machine


def formats(
    model: Annotated[
        str | None, typer.Option(help="Model whose cache size is shown. \\[default: smollm2-135m]")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Only the formats that this engine stores, and how.", autocompletion=completion.engine),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List KV cache formats with their size and engines.

    [bold]Examples[/bold]

      fidelab setup formats --model Qwen/Qwen2.5-7B-Instruct

      fidelab setup formats --engine llama.cpp
    """
    from fidelab.engines.base import engine_class
    from fidelab.environments.listing import chosen, listing

    geometry, name = _geometry(model), engine and engine_name(engine)
    if name is not None:
        ENGINES.load(name)
    with waiting("asking the engines"):
        places = chosen(listing() if name is None else listing([name]))
    rows = _rows(geometry, places)
    if name is not None:
        rows = [row for row in rows if name in row["stored"] or name in row["refused"]]
    if as_json:
        print(json.dumps({"geometry": asdict(geometry), "formats": rows}, indent=2))
        return
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("format", no_wrap=True)
    for heading in ("bits/value", "bytes/token"):
        table.add_column(heading, justify="right")
    table.add_column("engines" if name is None else "stored", overflow="fold")
    for row in rows:
        known = row["bits_per_value"] is not None
        if not row["stored"] and (name is not None or not known):
            continue  # below, with the reason
        numbers = ["–"] * 2
        if known:
            sides = dict.fromkeys(f"{row[side]:.2f}" for side in ("k_bits", "v_bits"))  # one where both are the same
            numbers = ["/".join(sides), f"{row['bytes_per_token']:,}"]
        if name is None:
            engines = [*row["engines"], *(f"({refused})" for refused in row["refused"])]
        else:
            engines = [*row["stored"].values()]
        marks = f"{'*' if row['emulated'] else ''}{'†' if row['keeps'] else ''}"
        table.add_row(f"{row['name']}{marks}", *numbers, Text(", ".join(engines)))
    console = open_console()
    console.print(table)
    notes = [
        f"{geometry.model}: {geometry.layers} layers, {geometry.kv_heads} KV heads, head dimension "
        f"{geometry.head_dim}; keys and values counted, default options. Two widths: keys/values."
    ]
    shown = [row for row in rows if row["stored"] or (name is None and row["refused"])]
    if any(row["emulated"] for row in shown):
        notes.append("*: emulated: bytes as if packed; more is stored.")
    if any(row["keeps"] for row in shown):
        notes.append("†: the engine leaves the first and the last two layers in 16 bits, unless the model is a hybrid.")
    if any(row["bits_per_value"] is None for row in shown):
        notes.append("–: unknown.")
    notes.append(
        "(engine): cannot run it here, or not with a model in bfloat16."
        if name is None
        else "native: the engine's own cache. plug-in: the cache of fidelab (hf) or of package k16v8."
    )
    notes += [
        f"{engine_class(engine).title} {' and '.join(said)}" for engine, said in _other_versions(places).items() if said
    ]
    for note in notes:
        console.print(Text(note))
    for place in places.values():
        if place.problem is not None:
            console.print(Padding(Text(f"{place.engine}: {place.problem}; {place.remedy}"), (0, 0, 0, 2)))
        for why, names in by_reason(place.refused).items():
            console.print(Padding(Text(f"({place.engine}) {', '.join(names)}: {why}"), (0, 0, 0, 2)))


def _other_versions(places: Mapping[str, InstalledEngine]) -> dict[str, list[str]]:
    """Return the formats of other versions of the engines that the installed one lacks."""
    from fidelab.engines.base import engine_class

    found: dict[str, list[str]] = {}
    for engine, place in places.items():
        by_version: dict[str, list[str]] = {}
        for row in engine_class(engine).cache_formats.values():
            if row.since and row.name not in place.kv_names:
                by_version.setdefault(row.since, []).append(row.name)
        found[engine] = [f"has from {since} on: {', '.join(names)}" for since, names in by_version.items()]
    return found


def _geometry(name: str | None) -> _Geometry:
    if name is None:
        return _EMBEDDED
    from fidelab.core.errors import InputError
    from fidelab.models import resolve

    model = resolve(name)
    if model.layers is None or model.kv_heads is None or model.head_dim is None:
        raise InputError(f"{name} does not say how many layers, KV heads or values per head it has")
    return _Geometry(model.name, model.layers, model.kv_heads, model.head_dim)


def _rows(geometry: _Geometry, places: Mapping[str, InstalledEngine]) -> list[dict[str, Any]]:
    """Return fidelab's formats, then those that engines define; a name that means different bytes has several rows.

    ``stored``: engine → native, plug-in or emulated; ``own``: defined by fidelab.
    """
    from fidelab.engines.base import engine_class
    from fidelab.engines.k16v8 import K16V8, meaning
    from fidelab.formats import FORMATS

    names = dict.fromkeys([*FORMATS.names(), K16V8, *(name for place in places.values() for name in place.kv_names)])
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name in names:
        kv = meaning(KVSpec.parse(name), "bf16")
        own = {kv.k.name, kv.v.name} <= {*FORMATS.names()}
        asked: list[str | None] = [engine for engine, place in places.items() if name in place.kv_names]
        for engine in [*([None] if own else []), *asked]:
            numbers = _numbers(name, geometry, engine)
            row = rows.setdefault(
                (name, numbers["k_bits"], numbers["v_bits"], numbers["bytes_per_token"]),
                {"name": name, **numbers, "own": False, "engines": [], "stored": {}, "refused": {}},
            )
            if engine is None:
                row["own"] = True
            elif (why := places[engine].refused.get(name) or numbers["refused"]) is not None:
                row["refused"][engine] = why
            else:
                row["engines"].append(engine)
                row["stored"][engine] = engine_class(engine).stores(kv, emulated=numbers["emulated"])
    return list(rows.values())


def _numbers(name: str, geometry: _Geometry, engine: str | None) -> dict[str, Any]:
    """Return what an engine's format takes in a model, or what fidelab's takes; ``None`` for what is not known."""
    from fidelab.engines.base import engine_class
    from fidelab.engines.k16v8 import meaning
    from fidelab.formats import FORMATS, create
    from fidelab.physics.shapes import Geometry
    from fidelab.physics.traffic import Model

    kv, dim = KVSpec.parse(name), geometry.head_dim
    found = None if engine is None else engine_class(engine).cache_format(kv)
    shape = Geometry.of_sizes(geometry.layers, geometry.kv_heads, dim, 1)
    facts = {"keeps": "", "scales": "", "needs": "", "proof": "", "refused": None, "emulated": False}
    if found is not None:
        facts |= {"keeps": found.keeps, "scales": found.scales, "needs": found.needs, "proof": found.proof}
        facts["refused"] = engine_class(engine or "").refuses_heads(kv, [dim], [dim])
        bits = [8 * side.head_bytes(dim, 2) / dim for side in (found.k, found.v)]
    else:
        spelled = meaning(kv, "bf16")
        if not {spelled.k.name, spelled.v.name} <= {*FORMATS.names()}:
            return {**dict.fromkeys(_SIZES), **facts}
        sides = [create(spelled.k), create(spelled.v)]
        bits = [8 * fmt.packed_token_bytes(dim) / dim for fmt in sides]
        facts["emulated"] = any(fmt.emulated for fmt in sides)
    try:
        sequence = Model(shape, engine=engine).sequence(kv)
    except UsageError as error:
        return {**dict.fromkeys(_SIZES), **facts, "refused": facts["refused"] or str(error)}
    stored, packed = sequence.token_bytes(), sequence.token_bytes(packed=True)
    sizes = (sum(bits) / 2, *bits, round(packed), round(stored))
    return {**dict(zip(_SIZES, sizes, strict=True)), **facts}
