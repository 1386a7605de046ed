"""``fidelab setup formats``: formats of the KV cache, their size in bytes, and the engines that have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import options
from fidelab.cli.output import open_console, waiting
from fidelab.core import KVSpec
from fidelab.doctor.text import by_reason
from fidelab.engines import engine_name
from fidelab.engines.k16v8 import K16V8, meaning

if TYPE_CHECKING:
    from fidelab.environments.listing import InstalledEngine


@dataclass(frozen=True)
class _Geometry:
    """Shape of a model's cache."""

    model: str
    layers: int
    kv_heads: int
    head_dim: int


_EMBEDDED = _Geometry("smollm2-135m", 30, 3, 64)  # constants, so that the table needs no model on this machine


def formats(
    model: Annotated[
        str | None, typer.Option(help="Model whose cache size is shown. \\[default: smollm2-135m]")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Only the formats that this engine stores, and how.")] = None,
    as_json: options.Json = False,
) -> None:
    """List KV cache formats with their size and engines.

    [bold]Examples[/bold]

      fidelab setup formats --model Qwen/Qwen2.5-7B-Instruct

      fidelab setup formats --engine llama.cpp
    """
    from fidelab.engines import ENGINES
    from fidelab.environments.listing import chosen, listing

    geometry, name = _geometry(model), engine and engine_name(engine)
    if name is not None:
        ENGINES.load(name)
    with waiting("asking the engines"):
        places = chosen(listing() if name is None else listing([name]))
    rows = _rows(geometry, places)
    if name is not None:
        rows = [row for row in rows if row["stored"] or row["refused"]]
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
        if not known and not row["engines"]:
            continue  # below, with the reason
        numbers = [f"{row['bits_per_value']:.2f}", f"{row['bytes_per_token']:,}"] if known else ["–"] * 2
        if name is None:
            engines = [*row["engines"], *(f"({refused})" for refused in row["refused"])]
        elif not row["stored"]:
            continue  # below, with the reason
        else:
            engines = [*row["stored"].values()]
        table.add_row(f"{row['name']}{'*' if row['emulated'] else ''}", *numbers, Text(", ".join(engines)))
    console = open_console()
    console.print(table)
    console.print(
        Text(
            f"{geometry.model}: {geometry.layers} layers, {geometry.kv_heads} KV heads, head dimension "
            f"{geometry.head_dim}; K and V counted, default options.\n"
            "* emulated: bytes as if packed; more is stored.\n"
            "int8 and int4 have one scale per token and head on vllm and sglang, one per 32 values on hf.\n"
            "–: the engine's own format, not defined by fidelab.\n"
            + (
                "(engine): cannot run it here, or not with a model in bfloat16."
                if name is None
                else "native: the engine's own cache.  plug-in: the cache of fidelab (hf) or of package k16v8."
            )
        )
    )
    for place in places.values():
        if place.problem is not None:
            console.print(Padding(Text(f"{place.engine}: {place.problem}; {place.remedy}"), (0, 0, 0, 2)))
        for why, names in by_reason(place.refused).items():
            console.print(Padding(Text(f"({place.engine}) {', '.join(names)}: {why}"), (0, 0, 0, 2)))


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
    """Return fidelab's formats, then those that engines define; ``stored``: engine → native, plug-in or emulated."""
    from fidelab.engines.base import engine_class
    from fidelab.formats import FORMATS

    names = dict.fromkeys([*FORMATS.names(), K16V8, *(name for place in places.values() for name in place.kv_names)])
    rows = []
    for name in names:
        numbers = _numbers(name, geometry)
        engines = [e for e, place in places.items() if name in place.kv_names and name not in place.refused]
        refused = {e: place.refused[name] for e, place in places.items() if name in place.refused}
        kv = meaning(KVSpec.parse(name), "bf16")
        stored = {e: engine_class(e).stores(kv, emulated=numbers["emulated"]) for e in engines}
        rows.append({"name": name, **numbers, "engines": engines, "stored": stored, "refused": refused})
    return rows


def _numbers(name: str, geometry: _Geometry) -> dict[str, Any]:
    """Return the bytes of a format by fidelab's definition; ``None`` if it has none."""
    from fidelab.formats import FORMATS, create

    kv, dim = meaning(KVSpec.parse(name), "bf16"), geometry.head_dim
    if not {kv.k.name, kv.v.name} <= set(FORMATS.names()):
        keys = ("bits_per_value", "bytes_per_token", "stored_bytes_per_token")
        return {**dict.fromkeys(keys), "emulated": False}
    sides = [create(spec) for spec in ((kv.k,) if kv.same else (kv.k, kv.v))]
    pairs, tokens = 2 // len(sides), geometry.layers * geometry.kv_heads
    packed = pairs * sum(fmt.packed_token_bytes(dim) for fmt in sides)
    return {
        "bits_per_value": 8 * packed / (2 * dim),
        "bytes_per_token": tokens * packed,
        "stored_bytes_per_token": tokens * pairs * sum(fmt.token_bytes(dim) for fmt in sides),
        "emulated": any(fmt.emulated for fmt in sides),
    }
