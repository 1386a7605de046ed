"""``fidelab diagnose``: locate a loss in layers, groups of weights, keys and values, or attention."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fidelab.cli import options, values
from fidelab.cli.attention import attention
from fidelab.cli.commands import Commands
from fidelab.cli.compare import study_experiment
from fidelab.cli.output import command_line, exit_on, note, show_study
from fidelab.engines import DEFAULT, engine_name

if TYPE_CHECKING:
    from fidelab.studies.cache import Place
    from fidelab.studies.weights import By

_PER_VALUE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:bpv|bits?)", re.IGNORECASE)


class _PlannedEngineOptions(options.EngineOptions):
    engine: Annotated[str, typer.Option(help="Engine: hf. With --kv: the one that the plan is for, hf or vllm.")] = (
        options.EngineOptions.engine
    )


app = Commands(help="Find the source of a loss: layers, weights, keys and values, or attention.")
app.command("attention")(attention)


@app.command()
@options.expand_options
def sensitivity(
    *,
    model: options.FloatModel,
    weights: Annotated[
        list[str] | None, typer.Option(help="A format of weights, such as int4\\[group=64]; repeat it.")
    ] = None,
    bits: Annotated[str | None, typer.Option(help="Bit widths of keys and values instead: 8,7,6,5,4,3,2.")] = None,
    kv: Annotated[
        list[str] | None, typer.Option(help="KV format to plan with, e.g. q8_0 or fp8_e4m3. Repeatable.")
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="Unit to round: module (default), layer or kind for weights; cache (default), layer or head for "
            "--bits and --kv."
        ),
    ] = None,
    group: Annotated[int, typer.Option(help="With --bits: values per scale.")] = 32,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Size of the plan: 80MB, 4.5bpw or a weight format; with --bits and --kv, bits per cache value (5bpv)."
        ),
    ] = None,
    export: Annotated[Path | None, typer.Option(help="With --kv: write the plan as an engine reads it.")] = None,
    export_format: Annotated[
        str | None,
        typer.Option(
            help="Form of --export: vllm (.json), vllm-args (.args), modelopt (hf_quant_config.json), ik_llama, "
            "llamacpp, tensorrt-llm or fidelab (.kv).",
        ),
    ] = None,
    text: options.TextOptions,
    windows: Annotated[
        int, typer.Option(help="Number of text windows. With a budget, every second one tests the plan.")
    ] = 8,
    n_ctx: options.WindowTokens = 512,
    engine: _PlannedEngineOptions,
    runs: options.CapturedRunsOptions,
    as_json: options.Json = False,
) -> None:
    r"""Measure the cost of rounding each group of weights, or keys and values. With a budget, choose formats.

    The model is loaded once. Repeating the command resumes it. The plan is chosen on one half of the windows and tested
    on the other, against the best single format within the same budget.

    [bold]Examples[/bold]

      fidelab diagnose sensitivity ./model --weights 'int4\[group=64]' --by layer

      fidelab diagnose sensitivity ./model --bits 8,7,6,5,4,3,2 --by layer

      fidelab diagnose sensitivity ./model --weights q4_k --budget 5bpw

      fidelab diagnose sensitivity M --kv q8_0 --kv q4_0 --by layer --budget 6bits
    """
    from fidelab.cli.progress import watcher
    from fidelab.core.errors import UsageError
    from fidelab.studies.recipes import form_of

    cached = bits is not None or bool(kv)
    form = "" if export is None else form_of(export, export_format)
    kinds = ("cache", "layer", "head") if cached else ("module", "layer", "kind")
    by = kinds[0] if by is None else by
    if by not in kinds:
        raise UsageError(f"--by {by}: write {kinds[0]}, {kinds[1]} or {kinds[2]}")
    own = engine.settings()
    if kv and engine_name(engine.engine) != DEFAULT:  # Transformers rounds, also for a plan of another engine
        own |= {"engine": {"name": DEFAULT}, "engine_args": {}, "env": {}}
    experiment = study_experiment(
        "sensitivity",
        model,
        {"windows": windows, "n_ctx": n_ctx},
        # only to estimate the time; nothing is run
        {"candidates": [f"weights={weights[0]}" if weights else f"int8[group={group}]"]},
        own,
        text.settings(),
        runs.settings(),
    )
    watched: dict[str, Any] = {
        "command": command_line(),
        "listener": watcher(),
        "say": lambda line: note(f"fidelab: {line}"),
    }
    if cached:
        from fidelab.studies.cache import kv_sensitivity

        study, folder = kv_sensitivity(
            experiment,
            _widths(bits) if bits is not None else (),
            formats=kv or (),
            engine=engine_name(engine.engine),
            by=cast("Place", by),
            group=group,
            budget=_per_value(budget),
            **watched,
        )
    else:
        from fidelab.studies.weights import sensitivity as measure

        study, folder = measure(experiment, weights or [], by=cast("By", by), budget=budget, **watched)
    show_study(study, folder.path, as_json)
    exit_on(study.faults)
    if export is not None and study.plan is not None:
        from fidelab.studies.recipes import export_plan

        export_plan(study.plan, export, form)
        note(f"fidelab: {export} holds the plan ({form})")


def _widths(bits: str) -> list[int]:
    from fidelab.core.errors import UsageError

    words = [word.strip() for word in bits.split(",")]
    if wrong := next((word for word in words if not (word.isdecimal() and len(word) < 4)), None):
        raise UsageError(f"--bits: {wrong!r} is not a width; write 8,7,6,5,4,3,2")
    return [int(word) for word in words]


def _per_value(budget: str | None) -> float | None:
    from fidelab.core.errors import UsageError

    if budget is None:
        return None
    if match := _PER_VALUE.fullmatch(budget.strip()):
        return float(match[1])
    raise UsageError(f"--budget {budget}: with --bits and --kv write bits per value of the cache, such as 5bpv")


class _EngineOptions(options.EngineOptions):
    engine: Annotated[str, typer.Option(help="Engine of both configurations: hf, vllm or sglang.")] = (
        options.EngineOptions.engine
    )


@app.command("layers")
@options.expand_options
def layers(
    *,
    model: Annotated[str, typer.Argument(help="smollm2-135m, hub id (optional @revision) or folder.")],
    reference: options.Reference = None,
    kv: Annotated[
        list[str] | None, typer.Option(help="KV format of the candidate: NAME, K/V or NAME\\[key=value,…].")
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            help="The candidate as KEY=VALUE,…: kv, name, engine, model, dtype, python, or an engine's option."
        ),
    ] = None,
    text: options.TextOptions,
    windows: Annotated[int, typer.Option(help="Number of text windows.")] = 2,
    n_ctx: Annotated[int, typer.Option(parser=values.tokens, metavar="N", help="Tokens per window.")] = 256,
    floor: Annotated[
        bool, typer.Option(help="Repeat the reference, and the candidate with changed last bits, to measure noise.")
    ] = True,
    engine: _EngineOptions,
    runs: options.CapturedRunsOptions,
    as_json: options.Json = False,
) -> None:
    r"""Find the first layer whose hidden states diverge from the reference.

    Errors are relative to the norm of each hidden state. A layer stands out if it adds more than three times the error
    of the others, at least its input error, and more than three times the run-to-run noise. 16-bit types hide errors
    below their rounding; --dtype float32 --reference f32 shows the format alone.

    [bold]Examples[/bold]

      fidelab diagnose layers smollm2-135m --kv q8_0

      fidelab diagnose layers ./model --candidate attention=sdpa

      fidelab diagnose layers ./bf16 --candidate model=./other

      fidelab diagnose layers ./model --engine vllm --reference engine=hf --kv fp8
    """
    from fidelab.cli.progress import watcher
    from fidelab.core.errors import UsageError
    from fidelab.studies.layers import compare_layers

    candidates = [*(kv or []), *(candidate or [])]
    if len(candidates) != 1:
        raise UsageError(f"name one candidate (--kv FORMAT or --candidate KEY=VALUE,…), not {len(candidates)}")
    noise = 1.0 if floor else 0.0
    experiment = study_experiment(
        "layers",
        model,
        {"windows": windows, "n_ctx": n_ctx, "protocol": "full"},
        {"candidates": candidates, "floor": noise, "twins": noise},
        {} if reference is None else {"reference": reference},
        engine.settings(),
        text.settings(),
        runs.settings(),
    )
    study, folder = compare_layers(experiment, command=command_line(), listener=watcher())
    show_study(study, folder.path, as_json)
    exit_on(study.faults)  # a layer that stands out is a finding; nothing to compare is a fault
