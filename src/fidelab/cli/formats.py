"""``fidelab formats``: the KV formats, what they cost in bytes and lose in precision."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import options
from fidelab.cli.output import open_console

if TYPE_CHECKING:
    from torch import Tensor

    from fidelab.engines.base import Engine

__all__ = ["formats"]

_MODEL = "smollm2-135m"
_GEOMETRY = (30, 3, 64)  # its layers, KV heads and head dimension: the table needs no model on this machine
_TOKENS = 2048  # of one head, measured


def formats(
    model: Annotated[
        str | None,
        typer.Option(help="The model whose cache is counted. \\[default: smollm2-135m]", show_default=False),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List the KV formats: bytes, error and the engines that have them.

    Errors are L2 norms relative to that of the values, normally distributed: over all, and in the worst token.

    [bold]Example[/bold]

      fidelab formats --model Qwen/Qwen2.5-7B-Instruct
    """
    name, (layers, heads, dim) = _geometry(model)
    rows = _rows(layers, heads, dim)
    if as_json:
        geometry = {"model": name, "layers": layers, "kv_heads": heads, "head_dim": dim}
        print(json.dumps({"geometry": geometry, "formats": rows}, indent=2))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("format", no_wrap=True)
    for heading in ("bits/value", "bytes/token", "typical error", "worst error"):
        table.add_column(heading, justify="right")
    table.add_column("engines", overflow="fold")
    for row in rows:
        mark = "*" if row["emulated"] else ""
        table.add_row(
            f"{row['name']}{mark}",
            f"{row['bits_per_value']:.2f}",
            f"{row['bytes_per_token']:,}",
            f"{row['typical_error']:.3%}",
            f"{row['worst_error']:.3%}",
            Text(", ".join(row["engines"])),
        )
    console = open_console()
    console.print(table)
    console.print(
        Text(
            f"{name}: {layers} layers, {heads} KV heads, head dimension {dim}; K and V counted, default options.\n"
            "* emulated: the error is the true one, the bytes are those of ideal packing; we store more."
        )
    )


def _geometry(model: str | None) -> tuple[str, tuple[int, int, int]]:
    """Name; layers, KV heads, head dimension."""
    if model is None:
        return _MODEL, _GEOMETRY
    from fidelab.errors import InputError
    from fidelab.models import resolve

    resolved = resolve(model)
    if resolved.layers is None or resolved.kv_heads is None or resolved.head_dim is None:
        raise InputError(f"{model} does not say how many layers, KV heads or values per head it has")
    return resolved.name, (resolved.layers, resolved.kv_heads, resolved.head_dim)


def _names(engine: type[Engine]) -> set[str]:
    """The formats of an engine that is importable here; none for servers."""
    from fidelab.errors import EngineError

    try:
        return set() if engine.served else set(engine.kv_names())
    except EngineError:  # it lives in an environment of its own: fidelab doctor asks there
        return set()


def _rows(layers: int, heads: int, dim: int) -> list[dict[str, Any]]:
    import torch

    from fidelab.core import FormatSpec
    from fidelab.engines import ENGINES
    from fidelab.formats import FORMATS, create

    engines = {engine: _names(ENGINES.load(engine)) for engine in ENGINES.names()}
    content = torch.randn(1, 1, _TOKENS, dim, generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, Any]] = []
    for name in FORMATS.names():
        fmt = create(FormatSpec(name))
        scale = fmt.fit(content)
        typical, worst = _errors(content, fmt.decode(fmt.encode(content, scale), dim, torch.float32, scale))
        packed = fmt.packed_token_bytes(dim)
        rows.append(
            {
                "name": name,
                "bits_per_value": 8 * packed / dim,
                "bytes_per_token": 2 * layers * heads * packed,
                "stored_bytes_per_token": 2 * layers * heads * fmt.token_bytes(dim),
                "typical_error": typical,
                "worst_error": worst,
                "emulated": fmt.emulated,
                "engines": [engine for engine, names in engines.items() if name in names],
            }
        )
    return rows


def _errors(content: Tensor, out: Tensor) -> tuple[float, float]:
    """Relative L2 error of all values, and of the worst token."""
    error = (out - content).double()
    typical = error.norm() / content.double().norm()
    worst = (error.norm(dim=-1) / content.double().norm(dim=-1)).max()
    return typical.item(), worst.item()
