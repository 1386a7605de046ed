"""``fidelab bisect``: the layer at which a candidate parts from its reference."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from fidelab.cli import options
from fidelab.cli.compare import experiment_from
from fidelab.cli.output import command_line, exit_on, open_console

_ROWS = "full"  # every row but the first


class _EngineOptions(options.EngineOptions):
    engine: Annotated[
        str, typer.Option(help="Engine that runs both arms; hf, vllm and sglang tell what passes their layers.")
    ] = options.EngineOptions.engine


@options.expand_options
def bisect(
    *,
    model: Annotated[str, typer.Argument(help="smollm2-135m, a hub id with optional @revision, a folder.")],
    reference: options.Reference = None,
    kv: Annotated[
        list[str] | None,
        typer.Option(
            help="The candidate's KV format: NAME, K/V, or NAME\\[key=value,…].",
            show_default=False,
            autocompletion=options.complete_kv,
        ),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            help="The candidate as KEY=VALUE,…: kv, name, engine, model, dtype, python, or an engine's option.",
            show_default=False,
        ),
    ] = None,
    text: options.TextOptions,
    windows: Annotated[int, typer.Option(help="Windows of text that both arms read.")] = 2,
    n_ctx: Annotated[int, typer.Option(help="Tokens per window.")] = 256,
    floor: Annotated[
        bool, typer.Option(help="Capture the reference again, and the candidate with other last bits.")
    ] = True,
    engine: _EngineOptions,
    runs: options.CapturedRunsOptions,
    as_json: options.Json = False,
) -> None:
    r"""Find the layer at which a candidate parts from its reference, by the states behind every layer.

    Errors are relative to the norm of each row's state. A layer stands out where it adds more than three times what
    the others add, at least as much as reaches it, and more than three times the floor. In 16-bit types what is smaller
    than rounding cannot be seen: --dtype float32 --reference f32 shows the format alone.

    [bold]Examples[/bold]

      fidelab bisect smollm2-135m --dtype float32 --reference f32 --kv int8

      fidelab bisect ./model --reference attention=eager --candidate attention=sdpa

      fidelab bisect ./bf16 --candidate model=./other

      fidelab bisect ./model --engine vllm --reference engine=hf --kv fp8_e4m3
    """
    from fidelab.cli.progress import watcher
    from fidelab.errors import UsageError
    from fidelab.report.layer_diff import render_bisect
    from fidelab.runs.layer_diff import bisect as run_bisect

    candidates = [*(kv or []), *(candidate or [])]
    if len(candidates) != 1:
        raise UsageError(
            f"a bisect is between two arms: name one candidate (--kv FORMAT or --candidate KEY=VALUE,…), "
            f"not {len(candidates)}"
        )
    data: dict[str, Any] = {
        "model": model,
        **engine.settings(),
        **({} if reference is None else {"reference": reference}),
        "control": "none",
        "candidates": candidates,
        "axes": {"kld": {"windows": windows, "n_ctx": n_ctx, "protocol": _ROWS}},
        **text.settings(),
        "floor": 1.0 if floor else 0.0,
        "twins": 1.0 if floor else 0.0,
        **runs.settings(),
    }
    experiment = experiment_from(data, "bisect")
    report, folder = run_bisect(experiment, command=command_line(), listener=watcher())
    if as_json:
        sys.stdout.write(report.to_json())
    else:
        render_bisect(report, open_console(), folder=folder.path)
    # a layer that stands out is a finding, that there is nothing to compare is a fault
    arms = (report.reference, report.candidate)
    exit_on([f"{arm.name} failed: {arm.reason}" for arm in arms if arm.status not in ("ok", "identical")])
