"""``fidelab setup formats``: formats of the KV cache and of weights, what they cost in bytes and lose in precision."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import options
from fidelab.cli.output import open_console, waiting
from fidelab.core import KVSpec, engine_name
from fidelab.doctor.text import by_reason
from fidelab.engines.k16v8 import K16V8, is_pair, meaning

if TYPE_CHECKING:
    from torch import Tensor

    from fidelab.environments.listing import Installed


@dataclass(frozen=True)
class _Geometry:
    """The cache of a model."""

    model: str
    layers: int
    kv_heads: int
    head_dim: int


_EMBEDDED = _Geometry("smollm2-135m", 30, 3, 64)  # written down: the table needs no model on this machine
_TOKENS = 2048  # of one head, measured
_WEIGHT = (512, 2048)  # outputs and inputs of the matrix that weight formats are measured on


def formats(
    model: Annotated[
        str | None,
        typer.Option(help="Model whose cache size is shown. \\[default: smollm2-135m]", show_default=False),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Only the formats that this engine stores, and how.", show_default=False)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List KV cache and weight formats with their size, error and engines.

    Errors are relative L2 norms on normally distributed values, over all tokens and for the worst token. Weight formats
    are those of --candidate weights=… on engine hf, rounded to nearest without calibration.

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
    weights = _weight_rows() if name in (None, "hf") else []
    if as_json:
        print(json.dumps({"geometry": asdict(geometry), "formats": rows, "weights": weights}, indent=2))
        return
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("format", no_wrap=True)
    for heading in ("bits/value", "bytes/token", "typical error", "worst error"):
        table.add_column(heading, justify="right")
    table.add_column("engines" if name is None else "stored", overflow="fold")
    for row in rows:
        known = row["bits_per_value"] is not None
        if not known and not row["engines"]:
            continue  # below, with the reason
        numbers = (
            [
                f"{row['bits_per_value']:.2f}",
                f"{row['bytes_per_token']:,}",
                f"{row['typical_error']:.3%}",
                f"{row['worst_error']:.3%}",
            ]
            if known
            else ["–"] * 4
        )
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
            "* emulated: true errors, bytes as if packed; more is stored.\n"
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
    if not weights:
        return
    rounded = Table(box=box.SIMPLE_HEAD, title="Weights, on engine hf: --candidate weights=NAME", title_justify="left")
    rounded.add_column("format", no_wrap=True)
    for heading in ("bits/weight", "typical error"):
        rounded.add_column(heading, justify="right")
    for row in weights:
        if row["reason"] is None:
            rounded.add_row(row["name"], f"{row['bits_per_weight']:.2f}", f"{row['typical_error']:.3%}")
    console.print(rounded)
    for why, names in by_reason({row["name"]: row["reason"] for row in weights if row["reason"]}).items():
        console.print(Padding(Text(f"{', '.join(names)}: {why}"), (0, 0, 0, 2)))


def _weight_rows() -> list[dict[str, Any]]:
    """Bits and errors of the formats of weights, all scales counted; ``reason``: why one is unavailable here."""
    import torch

    from fidelab.core import FormatSpec
    from fidelab.core.errors import NotSupportedError
    from fidelab.formats import FORMATS, K_QUANTS
    from fidelab.formats.weights import weight_format

    weight = torch.randn(_WEIGHT, generator=torch.Generator().manual_seed(0)) / 32
    rows: list[dict[str, Any]] = []
    for name in (*FORMATS.names(), *K_QUANTS):
        try:
            fmt, out = weight_format(FormatSpec(name)), weight.clone()
        except NotSupportedError as refused:
            rows.append({"name": name, "bits_per_weight": None, "typical_error": None, "reason": str(refused)})
            continue
        fmt.round_(out)
        error = ((out - weight).double().norm() / weight.double().norm()).item()
        bits = 8 * fmt.nbytes(_WEIGHT) / weight.numel()
        rows.append({"name": name, "bits_per_weight": bits, "typical_error": error, "reason": None})
    return rows


def _geometry(name: str | None) -> _Geometry:
    if name is None:
        return _EMBEDDED
    from fidelab.core.errors import InputError
    from fidelab.models import resolve

    model = resolve(name)
    if model.layers is None or model.kv_heads is None or model.head_dim is None:
        raise InputError(f"{name} does not say how many layers, KV heads or values per head it has")
    return _Geometry(model.name, model.layers, model.kv_heads, model.head_dim)


def _rows(geometry: _Geometry, places: Mapping[str, Installed]) -> list[dict[str, Any]]:
    """Return fidelab's formats, then those that engines define; ``stored``: engine → native, plug-in or emulated."""
    from fidelab.formats import FORMATS

    names = dict.fromkeys([*FORMATS.names(), K16V8, *(name for place in places.values() for name in place.kv_names)])
    rows = []
    for name in names:
        numbers = _numbers(name, geometry)
        engines = [e for e, place in places.items() if name in place.kv_names and name not in place.refused]
        refused = {e: place.refused[name] for e, place in places.items() if name in place.refused}
        stored = {e: _stored(e, name, numbers["emulated"]) for e in engines}
        rows.append({"name": name, **numbers, "engines": engines, "stored": stored, "refused": refused})
    return rows


def _stored(engine: str, name: str, emulated: bool) -> str:
    """Return how an engine keeps a format: in its own cache, in that of a plug-in, or wider than its bits."""
    if engine == "hf":
        return "native" if name in ("f32", "f16", "bf16") else "emulated" if emulated else "plug-in"
    pair = engine in ("vllm", "sglang") and is_pair(meaning(KVSpec.parse(name), "bf16"))
    return "plug-in" if pair else "native"


def _numbers(name: str, geometry: _Geometry) -> dict[str, Any]:
    """Bytes and errors of a format by fidelab's definition; ``None`` where it has none."""
    import torch

    from fidelab.formats import FORMATS, create

    kv, dim = meaning(KVSpec.parse(name), "bf16"), geometry.head_dim
    if not {kv.k.name, kv.v.name} <= set(FORMATS.names()):
        keys = ("bits_per_value", "bytes_per_token", "stored_bytes_per_token", "typical_error", "worst_error")
        return {**dict.fromkeys(keys), "emulated": False}
    content = torch.randn(1, 1, _TOKENS, dim, generator=torch.Generator().manual_seed(0))
    sides = [create(spec) for spec in ((kv.k,) if kv.same else (kv.k, kv.v))]
    out = []
    for fmt in sides:
        scale = fmt.fit(content)
        out.append(fmt.decode(fmt.encode(content, scale), dim, torch.float32, scale))
    typical, worst = _errors(torch.cat([content] * len(out), -1), torch.cat(out, -1))
    pairs, tokens = 2 // len(sides), geometry.layers * geometry.kv_heads
    packed = pairs * sum(fmt.packed_token_bytes(dim) for fmt in sides)
    return {
        "bits_per_value": 8 * packed / (2 * dim),
        "bytes_per_token": tokens * packed,
        "stored_bytes_per_token": tokens * pairs * sum(fmt.token_bytes(dim) for fmt in sides),
        "typical_error": typical,
        "worst_error": worst,
        "emulated": any(fmt.emulated for fmt in sides),
    }


def _errors(content: Tensor, out: Tensor) -> tuple[float, float]:
    """Relative L2 error of all values, and of the worst token."""
    error = (out - content).double()
    typical = error.norm() / content.double().norm()
    worst = (error.norm(dim=-1) / content.double().norm(dim=-1)).max()
    return typical.item(), worst.item()
