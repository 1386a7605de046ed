"""``fidelab setup formats``: formats of the KV cache and of weights, what they cost in bytes and lose in precision."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import options
from fidelab.cli.output import open_console, waiting
from fidelab.doctor.text import by_reason
from fidelab.engines.k16v8 import K16V8, meaning

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
        typer.Option(help="The model whose cache is counted. \\[default: smollm2-135m]", show_default=False),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List the formats of caches and of weights: bytes, error, where they run, and why one cannot run here.

    Errors are L2 norms relative to that of the values, normally distributed: over all, and in the worst token. Weight
    formats are those of --candidate weights=… on engine hf, rounded to nearest without calibration.

    [bold]Example[/bold]

      fidelab setup formats --model Qwen/Qwen2.5-7B-Instruct
    """
    from fidelab.environments.listing import chosen, listing

    geometry = _geometry(model)
    with waiting("asking the engines"):
        places = chosen(listing())
    rows = _rows(geometry, places)
    weights = _weight_rows()
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
    table.add_column("engines", overflow="fold")
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
        engines = [*row["engines"], *(f"({engine})" for engine in row["refused"])]
        table.add_row(f"{row['name']}{'*' if row['emulated'] else ''}", *numbers, Text(", ".join(engines)))
    console = open_console()
    console.print(table)
    console.print(
        Text(
            f"{geometry.model}: {geometry.layers} layers, {geometry.kv_heads} KV heads, head dimension "
            f"{geometry.head_dim}; K and V counted, default options.\n"
            "* emulated: the error is the true one, the bytes are those of ideal packing; we store more.\n"
            "int8 and int4 have one scale for each token and head on vllm and sglang, one for 32 values on hf.\n"
            "–: the engines' own, which fidelab does not define.  (engine): cannot run it here, or not with a model in "
            "bfloat16."
        )
    )
    for place in places.values():
        if place.problem is not None:
            console.print(Padding(Text(f"{place.engine}: {place.problem}; {place.remedy}"), (0, 0, 0, 2)))
        for why, names in by_reason(place.refused).items():
            console.print(Padding(Text(f"({place.engine}) {', '.join(names)}: {why}"), (0, 0, 0, 2)))
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
    """Bits and errors of the formats of weights, all scales counted; ``reason``: why one is not to be had here."""
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
    """Our formats, then those that engines have besides, of which nothing is known."""
    from fidelab.formats import FORMATS

    names = dict.fromkeys([*FORMATS.names(), K16V8, *(name for place in places.values() for name in place.kv_names)])
    return [
        {
            "name": name,
            **_numbers(name, geometry),
            "engines": [e for e, place in places.items() if name in place.kv_names and name not in place.refused],
            "refused": {e: place.refused[name] for e, place in places.items() if name in place.refused},
        }
        for name in names
    ]


def _numbers(name: str, geometry: _Geometry) -> dict[str, Any]:
    """Bytes and errors of a format by fidelab's definition; ``None`` where it has none."""
    import torch

    from fidelab.core import KVSpec
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
