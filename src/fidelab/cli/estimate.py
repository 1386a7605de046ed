"""``fidelab estimate``: the possible gain of a format, from a model's shape, a device's rates and measured losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import completion, options
from fidelab.cli.commands import Commands
from fidelab.cli.output import open_console, print_json, say
from fidelab.core.errors import UsageError

if TYPE_CHECKING:
    from fidelab.core import KVSpec
    from fidelab.physics.shapes import Geometry

_KV = ("bf16", "k16v8", "fp8_e4m3", "q8_0", "int4")


app = Commands(
    default="model",
    help="Estimate the size and speed of formats from a model's shape. MODEL alone means model MODEL.",
)


def _step_seconds(text: str) -> float:
    """Return the seconds of a decode step, whose unit has to be written: a bare 10 is meant as milliseconds."""
    from fidelab.core.amounts import parse_seconds

    if text.strip()[-1:].isdigit():
        raise UsageError(f"--step-time {text.strip()!r}: write a time above 0 with its unit, such as 10ms")
    try:
        return parse_seconds(text)
    except ValueError:
        raise UsageError(f"--step-time {text.strip()!r}: write a time above 0 with its unit, such as 10ms") from None


@app.command()
def model(
    name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Model folder, config.json, GGUF file, hub id or name.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Instead of MODEL: number of layers.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads per layer.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Head dimension.")] = None,
    params: Annotated[float | None, typer.Option(help="Number of parameters, e.g. 7.6e9.")] = None,
    kv: Annotated[
        list[str] | None,
        typer.Option(autocompletion=completion.kv_format, help=f"KV formats. \\[default: {', '.join(_KV[1:])}]"),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Reference format of the speed-ups. \\[default: bf16, or the engine's auto]")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Engine whose formats are meant, e.g. vllm.", autocompletion=completion.engine)
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option(help="Devices of the table, e.g. H100, 4090 or 'M3 Max 64GB'.")
    ] = None,
    context: Annotated[str, typer.Option(help="Lengths in tokens per sequence (k is 1,024).")] = "2k,8k,32k",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8,32",
    weight_bits: Annotated[
        float | None, typer.Option(help="Bits per weight, scales included. \\[default: 16; of a GGUF file, its own]")
    ] = None,
    tp: options.Sharing = 1,
    memory: options.Memory = None,
    overhead: options.Overhead = None,
    step_time: Annotated[
        str | None,
        typer.Option(
            help="Time of a decode step, e.g. 10ms, in which a link has to carry what does not fit. "
            "\\[default: the device's shortest]"
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Estimate a model's KV cache size and maximum speed-up for each format.

    The configuration is read, and of weights that are here those of keys. All rates are upper bounds (roofline).

    [bold]Examples[/bold]

      fidelab estimate smollm2-135m --device H100

      fidelab estimate ./Qwen3-8B --device H200 --context 8k,32k --kv q8_0

      fidelab estimate --layers 28 --kv-heads 4 --head-dim 128 --params 7.6e9
    """
    from fidelab.cli.axes import counts
    from fidelab.core import KVSpec
    from fidelab.core.amounts import parse_bytes
    from fidelab.engines.base import engine_class
    from fidelab.physics.devices import find_device
    from fidelab.physics.overview import overview
    from fidelab.physics.traffic import Model

    sizes = {"layers": layers, "kv-heads": kv_heads, "head-dim": head_dim, "params": params}
    geometry, native = _geometry(name, sizes)
    geometry = geometry.cached(by_transformers=engine is not None and engine_class(engine).emulates)
    devices = [find_device(one) for one in device or ()]
    # by default those that this model's caches can have
    latent = any(layer.latent for layer in geometry.kv)
    shown = kv or [name for name in _KV[1:] if not (name == "k16v8" and latent) and _exists(name, engine)]
    if reference is None:
        reference = next((name for name in (_KV[0], "auto") if _exists(name, engine)), _KV[0])
    room = None if memory is None else parse_bytes(memory)
    step = None if step_time is None else _step_seconds(step_time)
    if not devices and (
        unused := next((key for key, value in (("memory", memory), ("step-time", step_time)) if value), "")
    ):
        raise UsageError(f"--{unused} needs a device: add --device, e.g. --device 4090")
    found = overview(
        Model(geometry, weight_bits, tp, native, parse_bytes(overhead) if overhead else 0.0, engine),
        KVSpec.parse(reference),
        [KVSpec.parse(one) for one in shown],
        sorted({*counts("--context", context)}),
        sorted({*counts("--batch", batch)}),
        devices,
        room,
        step,
    )
    if name is not None and (text := _fragile_keys(name, [KVSpec.parse(one) for one in shown])):
        found = {**found, "model": {**found["model"], "notes": [*found["model"].get("notes", ()), text]}}
    refused = _refusals(geometry, [KVSpec.parse(one) for one in shown])
    if as_json:
        print_json({**found, "not_supported": refused} if refused else found)
    else:
        _show(found)
        for text in refused:
            say(text)
        say()
        say(f"Measure what a format costs: {_measured_by(name, engine, shown)}")


def _measured_by(name: str | None, engine: str | None, formats: Sequence[str]) -> str:
    """Return the command that measures the loss of an estimated format."""
    from fidelab.core import shell_line

    chosen = next((one for one in ("q8_0", "fp8_e4m3") if one in formats), formats[0])
    return shell_line("fidelab", "compare", name or "MODEL", *(("--engine", engine) if engine else ()), "--kv", chosen)


def _exists(name: str, engine: str | None) -> bool:
    """Whether an engine has a format of this name; ``None``: fidelab's own, which all of the default ones are."""
    from fidelab.core import KVSpec
    from fidelab.engines.format_names import format_for

    if engine is None:
        return True
    try:
        format_for(KVSpec.parse(name), engine)
    except UsageError:
        return False
    return True


def _fragile_keys(name: str, specs: Sequence[KVSpec]) -> str:
    """Say where 8-bit keys will fail, where the model's weights are here; empty without such formats or weights."""
    from fidelab.models import embedded
    from fidelab.models.key_sizes import fragile_keys, key_sizes, narrow
    from fidelab.models.local import local_model

    if not any(narrow(spec.k.name) for spec in specs if spec.label != "k16v8"):
        return ""
    weights = embedded.gguf_file(name) if name in embedded.NAMES else local_model(name)
    if weights is None or (weights.is_file() and weights.suffix != ".gguf"):
        return ""
    if weights.is_dir() and not any(weights.glob("*.safetensors")):
        return ""
    return fragile_keys(key_sizes(weights))


def _refusals(geometry: Geometry, specs: Sequence[KVSpec]) -> list[str]:
    """Return a line for each format that no cache of an engine can hold for heads of these sizes."""
    from fidelab.engines.base import engines

    plain = [layer for layer in geometry.kv if not layer.latent]
    keys, values = {layer.k_dim for layer in plain}, {layer.v_dim for layer in plain}
    return [
        f"{spec.label} on engine {engine.name}: not supported: {reason}"
        for spec in specs
        for engine in engines()
        if (reason := engine.refuses_heads(spec, keys, values))
    ]


def _geometry(name: str | None, sizes: Mapping[str, float | None]) -> tuple[Geometry, str]:
    """Return the shape and the model's own 16-bit type."""
    from fidelab.physics.shapes import Geometry

    given = {key: value for key, value in sizes.items() if value is not None}
    if name is None:
        if missing := [f"--{key}" for key in sizes if key not in given]:
            raise UsageError(f"name a model, or give its sizes; missing: {', '.join(missing)}")
        n, heads, dim = (int(given[key]) for key in ("layers", "kv-heads", "head-dim"))
        return Geometry.of_sizes(n, heads, dim, given["params"]), "bf16"
    if given:
        raise UsageError(f"{name} has fixed sizes: leave out --{next(iter(given))}")
    from fidelab.physics.geometry import named_geometry

    return named_geometry(name)


def _show(found: Mapping[str, Any]) -> None:
    from fidelab.report.text import print_line, print_table
    from fidelab.results.numbers import (
        format_amount,
        format_count,
        format_gib,
        format_ratio,
        format_share,
        format_tokens,
        one_line,
    )

    console = open_console()
    line = partial(print_line, console)
    shape, cells = found["model"], found["cells"]

    def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        line("")
        line(title)
        print_table(console, headings, rows, overflow="ellipsis", no_wrap=True)

    kept = "; ".join(
        f"{kind['layers']} × {kind['heads']} KV heads of "
        + (f"{kind['k_dim']}" if kind["k_dim"] == kind["v_dim"] else f"{kind['k_dim']} and {kind['v_dim']}")
        + (" (latents)" if kind.get("latent") else "")
        + (f", window {kind['window']:,}" if kind["window"] else "")
        for kind in shape["kv_layers"]
    )
    line(f"{one_line(shape['name'])}: {shape['layers']} layers, cache: {kept or 'none'}")
    over = f", over {shape['tp']} devices" if shape["tp"] > 1 else ""
    bits = f"at {shape['weight_bits']:g} bits"
    if shape.get("weights_as_stored"):
        bits = f"as stored ({shape['weight_bits']:.3g} bits per weight)"
    line(
        f"{shape['parameters'] / 1e9:.3f} G parameters, {format_gib(shape['weight_bytes'])} GiB {bits}{over}; "
        f"one token's step reads {shape['read_parameters'] / 1e9:.3f} G of them"
    )
    for note in shape.get("notes", ()):
        line(note)
    if shape["experts"]:
        experts = {cell["batch"]: cell["touched_experts"] for cell in cells}
        said = ", ".join(f"{n:.1f} at B = {batch}" for batch, n in experts.items())
        line(f"experts read per layer, of {shape['experts']}, if tokens choose evenly: {said}")
    if shape["state_bytes_per_sequence"]:
        line(f"recurrent state: {format_gib(shape['state_bytes_per_sequence'])} GiB per sequence, whatever its length")
    per = " per device" if shape["tp"] > 1 else ""
    per += f", engine {shape['engine']}" if "engine" in shape else ""
    first = found["formats"][0]["bytes"]
    at = f"{format_tokens(first['tokens'])} × {first['batch']}"
    windowed = any(entry["bytes"]["capped"] != entry["bytes"]["reserved"] for entry in found["formats"])
    table(
        f"KV cache{per}" + (" (window-capped; in brackets as reserved for all tokens)" if windowed else ""),
        ["format", "bytes/token", f"GiB at {at}", "speed-up at most"],
        [
            [
                entry["kv"],
                format_count(entry["bytes_per_token"]),
                format_gib(entry["bytes"]["capped"])
                + (f" ({format_gib(entry['bytes']['reserved'])})" if windowed else ""),
                format_ratio(entry["limit"]),
            ]
            for entry in found["formats"]
        ],
    )
    for entry in found["formats"]:
        if exact := entry["exact_layers"]:
            verb = "is" if len(exact) == 1 else "are"
            numbers = ", ".join(map(str, exact))
            line(f"{entry['kv']}: {len(exact)} of {shape['layers']} layers {verb} 16 bit: {numbers}")
    reference = found["formats"][0]["kv"]
    batches = list(dict.fromkeys(cell["batch"] for cell in cells))

    def grid(title: str, write: Callable[[Any], str], *keys: str) -> None:
        """Print a table of tokens × batch, with the values below ``keys`` in each cell."""
        rows: dict[int, list[str]] = {}
        for cell in cells:
            rows.setdefault(cell["tokens"], []).append(write(reduce(getitem, keys, cell)))
        headings = ["tokens", *(f"B = {batch}" for batch in batches)]
        table(title, headings, [[format_tokens(tokens), *row] for tokens, row in rows.items()])

    grid(f"share of the cache in the bytes of a decode step, {reference}", format_share, "kv_share", reference)
    for entry in found["formats"][1:]:
        grid(f"decode ceiling of {entry['kv']} over {reference}", format_ratio, "ceiling", entry["kv"])
    for entry in found["devices"]:
        name = entry["device"]
        unchecked = "" if entry["verified"] else "; published figures, unverified"
        line("")
        copied = "" if (rate := entry["copied_bytes_per_s"]) is None else f" (copies reach {rate / 1e9:,.0f})"
        line(
            f"{name}: {format_gib(entry['memory_bytes'])} GiB, {entry['bandwidth_bytes_per_s'] / 1e9:,.0f} GB/s{copied}"
            f"{unchecked}" + ("" if entry["weights_fit"] else "; the weights alone do not fit")
        )
        contexts = list(entry["formats"][0]["largest_batch"])
        table(
            f"what fits on {name}",
            ["format", *(f"tokens at B = {b}" for b in batches), *(f"B at {format_tokens(int(t))}" for t in contexts)],
            [
                [
                    row["kv"],
                    *("no limit" if n is None else f"{n:,}" for n in row["longest_in_memory"].values()),
                    *("no limit" if n is None else f"{n:,}" for n in row["largest_batch"].values()),
                ]
                for row in entry["formats"]
            ],
        )
        if (most := found["model"]["max_positions"]) is not None and any(
            n is None or n > most for row in entry["formats"] for n in row["longest_in_memory"].values()
        ):
            line(f"the memory holds more than the model's own limit of {most:,} tokens")
        title = f"tokens/s of all sequences at most on {name}, {reference} (c: bound by compute)"
        grid(title, _rate, "decode", name, reference)
        prefill = {cell["tokens"]: cell["prefill"][name]["tokens_per_s"] for cell in cells}
        line(
            "prompt tokens/s at most: "
            + ", ".join(f"{format_amount(rate)} at {format_tokens(tokens)}" for tokens, rate in prefill.items())
        )
        for row in entry["formats"]:
            if row["overflow_bytes"] and row["link_shortfall"]:
                said = ", ".join(f"{link} {format_ratio(times)}" for link, times in row["link_shortfall"].items())
                line(
                    f"{row['kv']} at {at}: {format_gib(row['overflow_bytes'])} GiB do not fit; to be read in every "
                    f"step of {1e3 * row['step_seconds']:.3g} ms, a link would have to be faster by: {said}"
                )


def _rate(entry: Mapping[str, Any]) -> str:
    from fidelab.results.numbers import format_amount

    return format_amount(entry["tokens_per_s"]) + (" c" if entry["bound"] == "compute" else "")


@app.command()
def fit(
    file: Annotated[Path, typer.Argument(help="CSV file, JSON list of objects, or report.json with bench decode.")],
    y: Annotated[str, typer.Option("--y", help="Column to fit: speed-up, tokens/s, or with --time a time.")],
    x: Annotated[str, typer.Option("--x", help="Column of batch sizes.")] = "batch",
    length: Annotated[str | None, typer.Option(help="Column of tokens per sequence, for the affine time.")] = None,
    time: Annotated[bool, typer.Option("--time", help="--y is the time of a step, in ms.")] = False,
    cluster: Annotated[str | None, typer.Option(help="Column of models or machines; intervals resample these.")] = None,
    as_json: options.Json = False,
) -> None:
    """Fit a Hill curve and an affine step time to measured figures and compare them.

    [bold]Examples[/bold]

      fidelab estimate fit ablation.csv --y speedup_vs_p0 --cluster model

      fidelab estimate fit steps.json --y latency_ms --time --length context
    """
    from fidelab.physics.fits import compare_fits, read_points
    from fidelab.report.text import print_line, print_table

    found = compare_fits(read_points(file), y=y, x=x, context=length, is_time=time, cluster=cluster)
    if as_json:
        print_json(found)
        return
    console = open_console()
    for name, one in found["fits"].items():
        print_line(console, f"{name}: R² of the rate {one['r2']:.4f}, {found['n']} points, 95% intervals")
        rows = ((key, *(f"{value:.5g}" for value in values)) for key, values in one["parameters"].items())
        print_table(console, ("", "estimate", "from", "to"), rows)


@app.command()
def explain(
    output: options.PageFile = Path("explain.html"),
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="Models to show first.")] = None,
) -> None:
    """Write an interactive page that explains decoding: cache, bandwidth and saturation.

    One self-contained file with sliders. Its figures are those of fidelab estimate.

    [bold]Examples[/bold]

      fidelab estimate explain -o explain.html

      fidelab estimate explain ./Qwen3-8B
    """
    import fidelab
    from fidelab.physics.explainer import explainer
    from fidelab.physics.geometry import named_geometry
    from fidelab.report.explainer import write_explainer

    shapes = [named_geometry(name)[0] for name in models or ()]
    print(write_explainer(explainer(_KV, shapes), fidelab.__version__, output))


@app.command("devices")
def list_devices(as_json: options.Json = False) -> None:
    """List the device table with published and measured figures.

    [bold]Example[/bold]

      fidelab estimate devices
    """
    from fidelab.physics.devices import devices

    table = devices()
    if as_json:
        rows = {name: {**vars(row), "verified": row.verified or None} for name, row in table.items()}
        print_json({"devices": rows})
        return
    from fidelab.report.text import print_table
    from fidelab.results.numbers import ABSENT, format_gib, one_line

    lines = []
    for name, row in table.items():
        copied = ABSENT if row.sustained is None else f"{row.sustained / 1e9:,.1f}"
        bf16 = f"{row.compute['bf16'] / 1e12:,.4g}" if "bf16" in row.compute else ABSENT
        figures = (f"{row.memory / 1e9:,.0f}", format_gib(row.usable), f"{row.peak_bandwidth / 1e9:,.4g}", copied, bf16)
        lines.append((one_line(name), *figures, "measured" if row.verified else ABSENT, one_line(row.source) or ABSENT))
    headings = ("device", "GB", "usable GiB", "peak GB/s", "copied GB/s", "bf16 TFLOP/s", "checked", "source")
    print_table(open_console(), headings, lines, words=(0, 6, 7))
