"""``fidelab sensitivity``: which weights, or which keys and values, cost most in few bits; a plan within a budget."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from fidelab.cli import options
from fidelab.cli.compare import experiment_from
from fidelab.cli.output import command_line, exit_on, note, open_console

if TYPE_CHECKING:
    from fidelab.config.schema import Experiment
    from fidelab.results.sensitivity_record import WeightPlan

_YAML = (".yaml", ".yml")
_Model = Annotated[
    str, typer.Argument(help="A model whose weights are floating-point: name, hub id or folder.", show_default=False)
]
_NCtx = Annotated[int, typer.Option(min=8, help="Tokens of a window.")]


@options.expand_options
def sensitivity(
    *,
    model: _Model,
    weights: Annotated[
        list[str] | None,
        typer.Option(help="A format of weights, such as int4\\[group=64]; repeat it.", show_default=False),
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(help="Widths of keys and values instead: 8,7,6,5,4,3,2.", show_default=False),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="What is rounded at a time: module (default), layer or kind of weights; of the cache all layers "
            "(default: cache), and also each layer or head.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[int, typer.Option(help="With --bits: values that share a scale.")] = 32,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Make a plan: bytes of the layers' weights, as 80MB, 4.5bpw, or a format for its size; with --bits "
            "bits per value of the cache: 5bpv."
        ),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write the plan's --tensor-type arguments for llama-quantize to this file.")
    ] = None,
    text: options.TextOptions,
    windows: Annotated[int, typer.Option(help="Windows of text; with a budget, every second is kept to test it.")] = 8,
    n_ctx: _NCtx = 512,
    engine: options.EngineOptions,
    runs: options.CapturedRunsOptions,
    as_json: options.Json = False,
) -> None:
    r"""Round one group of weights, or keys and values, and say what it costs; with a budget, choose formats.

    The model is loaded once. Repeating the command goes on where it was stopped. The plan is chosen on one half of the
    windows and measured on the other, beside the best single format that fits the same budget.

    [bold]Examples[/bold]

      fidelab sensitivity smollm2-135m --weights 'int4\[group=64]' --by layer

      fidelab sensitivity ./model --bits 8,7,6,5,4,3,2 --by layer

      fidelab sensitivity ./model --weights q4_k --weights q6_k --weights q8_0 --budget 5bpw --export types.txt
    """
    from fidelab.cli.progress import watcher
    from fidelab.core import Status
    from fidelab.errors import UsageError
    from fidelab.report.sensitivity import render_sensitivity, write_sensitivity_html
    from fidelab.runs.sensitivity import sensitivity as measure

    if (weights is None) == (bits is None):
        raise UsageError("name formats of weights, --weights int4, or widths of keys and values, --bits 8,7,6,5,4,3,2")
    kinds = ("module", "layer", "kind") if bits is None else ("cache", "layer", "head")
    by = kinds[0] if by is None else by
    if by not in kinds:
        raise UsageError(f"--by {by}: write {kinds[0]}, {kinds[1]} or {kinds[2]}")
    if bits is not None and export is not None:
        raise UsageError("--export writes plans of weights; a plan of keys and values stands in the report")
    if by != "module" and export is not None and export.suffix in _YAML:
        raise UsageError("--export: a recipe names single matrices: leave out --by")
    if export is not None and budget is None:
        raise UsageError("--export writes a plan: give it a --budget")
    data: dict[str, Any] = {
        "model": model,
        **engine.settings(),
        "control": "none",
        "candidates": [f"weights={weights[0]}" if weights else f"int8[group={group}]"],  # asked about in time, not run
        "axes": {"kld": {"windows": windows, "n_ctx": n_ctx}},
        **text.settings(),
        "floor": 0.0,
        "twins": 0.0,
        **runs.settings(),
    }
    experiment = experiment_from(data, "sensitivity")
    if bits is not None:
        _keys_and_values(experiment, bits, by, group, budget, as_json)
        return
    assert weights is not None
    report, folder = measure(
        experiment,
        weights,
        by=cast("Literal['module', 'layer', 'kind']", by),
        budget=budget,
        exports=None if export is None else "recipe" if export.suffix in _YAML else "llama-quantize",
        command=command_line(),
        listener=watcher(),
        say=lambda text: note(f"fidelab: {text}"),
    )
    write_sensitivity_html(report, folder.html)
    if as_json:
        sys.stdout.write(report.to_json())
    else:
        render_sensitivity(report, open_console(), folder=folder.path)
    if export is not None and report.plan is not None:
        _export(report.plan, export)
    exit_on([f"{cell.group} in {cell.format}: {cell.reason}" for cell in report.cells if cell.status is not Status.OK])


@options.expand_options
def calibrate(
    *,
    model: _Model,
    out: options.NewFolder,
    windows: Annotated[int, typer.Option(min=1, help="Windows of the prompts.")] = 16,
    n_ctx: _NCtx = 512,
    prompts: options.Prompts = "default",
    runs: options.CapturedRunsOptions,
    as_json: options.Json = False,
) -> None:
    """Write a copy of a model with static scales for an FP8 KV cache, which vLLM reads with the weights.

    The model runs once over windows of prompts; a layer's scale of keys, and of values, is their largest magnitude
    there over 448. What the scales cost is measured like any format: compare the copy with --kv fp8_e4m3.

    [bold]Examples[/bold]

      fidelab calibrate smollm2-135m -o ./smollm2-kv8

      fidelab compare ./smollm2-kv8 --engine vllm --kv fp8_e4m3
    """
    from fidelab.cli.progress import watcher
    from fidelab.runs.kv_sensitivity import calibrate as write

    data: dict[str, Any] = {
        "model": model,
        "control": "none",
        "candidates": ["fp8_e4m3"],  # asked about in time, not run
        "axes": {"kld": {"windows": 1, "n_ctx": n_ctx}},
        "prompts": prompts,
        "floor": 0.0,
        "twins": 0.0,
        **runs.settings(),
    }
    rows = write(experiment_from(data, "calibrate"), out, windows=windows, n_ctx=n_ctx, listener=watcher())
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return
    from fidelab.report.text import simple_table

    console, table = open_console(), simple_table()
    for heading in ("layer", "largest K", "largest V", "scale of K", "scale of V"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(str(int(row["layer"])), *(f"{row[k]:.4g}" for k in ("k_amax", "v_amax", "k_scale", "v_scale")))
    console.print(table)
    note(f"fidelab: {out} written; scales lie in model-kv-scales.safetensors")


_PER_VALUE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:bpv|bits?)?", re.IGNORECASE)


def _keys_and_values(experiment: Experiment, bits: str, by: str, group: int, budget: str | None, as_json: bool) -> None:
    from fidelab.cli.progress import watcher
    from fidelab.core import Status
    from fidelab.errors import UsageError
    from fidelab.report.sensitivity import render_kv_sensitivity, write_kv_sensitivity_html
    from fidelab.runs.kv_sensitivity import Place, kv_sensitivity

    words = [word.strip() for word in bits.split(",")]
    if wrong := next((word for word in words if not (word.isdecimal() and len(word) < 4)), None):
        raise UsageError(f"--bits: {wrong!r} is no width; write 8,7,6,5,4,3,2")
    limit = None if budget is None else _PER_VALUE.fullmatch(budget.strip())
    if budget is not None and limit is None:
        raise UsageError(f"--budget {budget}: with --bits write bits per value of the cache, such as 5bpv")
    report, folder = kv_sensitivity(
        experiment,
        [int(word) for word in words],
        by=cast("Place", by),
        group=group,
        budget=None if limit is None else float(limit[1]),
        command=command_line(),
        listener=watcher(),
        say=lambda text: note(f"fidelab: {text}"),
    )
    write_kv_sensitivity_html(report, folder.html)
    if as_json:
        sys.stdout.write(report.to_json())
    else:
        render_kv_sensitivity(report, open_console(), folder=folder.path)
    exit_on([f"{c.side} of {c.place} in {c.format}: {c.reason}" for c in report.cells if c.status is not Status.OK])


def _export(plan: WeightPlan, file: Path) -> None:
    import yaml

    from fidelab.errors import OutputError, UsageError
    from fidelab.runs.sensitivity import recipe_of

    if file.suffix in _YAML:
        recipe = recipe_of(plan)
        text = None if recipe is None else yaml.safe_dump(recipe, sort_keys=False)
        how = f"fidelab quantize MODEL --recipe {file}; method: gptq with calibration: costs less"
    else:
        text = "\n".join(plan.tensor_types) + "\n" if plan.tensor_types else None
        how = f"llama-quantize $(cat {file}) MODEL.gguf OUT.gguf COPY"
    if text is None:
        raise UsageError("nothing is exported: the plan keeps everything native, or has weights of unknown names")
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror or error}") from error
    note(f"fidelab: {how}")
