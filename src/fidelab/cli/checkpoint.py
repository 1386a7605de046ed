"""``fidelab checkpoint``: quantized checkpoints as files, audited, converted, quantized and calibrated."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from fidelab.cli import options
from fidelab.cli.commands import Commands
from fidelab.cli.compare import study_experiment
from fidelab.cli.output import exit_on, note, open_console, say, say_fact, show_report, waiting
from fidelab.core import shell_line
from fidelab.environments.checkpoints import checkpoints

_MARGIN = 13  # width of the margin before the text of a finding
_MAX_NAMES = 8  # tensors listed for each finding

app = Commands(help="Audit, convert, quantize and calibrate checkpoint files.")


@app.command()
def audit(
    checkpoint: Annotated[str, typer.Argument(help="Folder with config.json and *.safetensors, .gguf file or hub id.")],
    base: Annotated[str | None, typer.Option(metavar="ORIGINAL", help="Original checkpoint, to compare with.")] = None,
    tp: Annotated[int, typer.Option(help="Tensor parallel size to check.")] = 1,
    as_json: options.Json = False,
) -> None:
    """Check a checkpoint for faults that break it at run time, such as bad scales or packing.

    Every tensor is read once. The model is not run, and no GPU is needed. Tensors on the hub are read by ranges and not
    stored. Exit code 1 means that the verdict is broken.

    [bold]Examples[/bold]

      fidelab checkpoint audit ./Qwen3-30B-A3B-AWQ --base Qwen/Qwen3-30B-A3B --tp 2

      fidelab checkpoint audit smollm2-135m
    """
    with waiting(f"reading {checkpoint}") as say:

        def tell(done: int, total: int) -> None:
            say(f"read {done / 1e9:,.1f} of {total / 1e9:,.1f} GB")

        outcome = checkpoints.audit(checkpoint, base, tp, tell)
    if as_json:
        sys.stdout.write(json.dumps(outcome.as_json(), indent=2, ensure_ascii=False) + "\n")
    else:
        _show(outcome)
    if outcome.verdict == "broken":
        count = sum(finding.severity == "broken" for finding in outcome.findings)
        exit_on([f"{checkpoint} is broken: {count} finding{'s' if count > 1 else ''}"])


def _show(outcome: checkpoints.Audit) -> None:
    method = outcome.method or "not quantized"
    say(
        f"{outcome.checkpoint}: {method}, {outcome.quantized:,} of {outcome.modules:,} modules quantized, "
        f"{outcome.tensors:,} tensors, {outcome.nbytes / 1e6:,.1f} MB"
    )
    for finding in outcome.findings:
        print()
        known = checkpoints.RULES[finding.rule]
        _paragraph(str(finding.severity), f"{known.title} ({finding.rule}): {finding.text}.")
        _paragraph("run time", f"{known.symptom}.")
        _paragraph("to do", f"{known.command}.")
        if len(finding.tensors) > 2:
            more = len(finding.tensors) - _MAX_NAMES
            names = [*finding.tensors[:_MAX_NAMES], *([f"and {more:,} more (--json has all)"] if more > 0 else [])]
            for place, name in enumerate(names):
                _paragraph("tensors" if place == 0 else "", name)
    reasons: dict[str, list[str]] = {}
    for what, why in outcome.unchecked.items():
        reasons.setdefault(why, []).append(what)
    files = f"{outcome.files:,} file{'' if outcome.files == 1 else 's'}"
    print()
    _paragraph("checked", f"{len(outcome.rules)} rules, {outcome.tensors:,} tensors, {files}")
    if reasons:
        said = "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())
        _paragraph("not checked", said)
    say(f"verdict: {outcome.verdict}")


def _paragraph(label: str, text: str) -> None:
    """Print a label in the margin, and next to it a text wrapped to the terminal."""
    say_fact(label, text, _MARGIN)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Folder with config.json and *.safetensors, or hub id.")],
    target: Annotated[Path, typer.Argument(help="Output folder. It must not exist.")],
    to: Annotated[str, typer.Option("--to", help="awq or safetensors (dense).")],
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Round weights that the target cannot hold and report the added error.")
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="Type of scales, norms and other 16-bit tensors: keep, float16, bfloat16 or float32.")
    ] = "keep",
    as_json: options.Json = False,
) -> None:
    """Convert a quantized checkpoint to AWQ or dense weights without changing a weight.

    Codes, scales and zero points are rearranged, not recomputed. Weights that the target cannot hold need --lossy. Both
    checkpoints are then dequantized and compared tensor by tensor. The result is printed and saved as certificate.json
    next to the weights.

    [bold]Examples[/bold]

      fidelab checkpoint convert ./model-gptq ./model-awq --to awq

      fidelab checkpoint convert ./model-awq ./model-dense --to safetensors
    """
    with waiting(f"converting {source}"):
        certificate = checkpoints.convert(source, target, to, lossy=lossy, dtype=dtype)
    if as_json:
        print(json.dumps(certificate.record(), indent=1))
        return
    say(certificate.line())
    for text in certificate.notes:
        note(f"fidelab: {text}")
    note(f"fidelab: {target} written; every tensor is in {target / checkpoints.CERTIFICATE}")


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="Folder with safetensors, hub id or embedded model.")],
    recipe: Annotated[Path, typer.Option(metavar="FILE", help="Recipe (YAML).")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Output folder. It must not exist. \\[default: by model and recipe]"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print which modules are quantized and kept, without the tool.")
    ] = False,
    python: options.Python = None,
    as_json: options.Json = False,
) -> None:
    """Quantize a model by a recipe, audit the result, and compare it with the original.

    The recipe is checked against the checkpoint's names and shapes first. Quantizing needs its own environment: fidelab
    setup install llm-compressor.

    [bold]Examples[/bold]

      fidelab checkpoint quantize ./model --recipe w4a16.yaml --dry-run

      fidelab checkpoint quantize ./model --recipe w4a16.yaml -o ./model-w4a16
    """
    from fidelab.studies.quantize import plan_quantization
    from fidelab.studies.quantize import quantize as run

    if dry_run:
        _show_plan(plan_quantization(model, recipe), as_json)
        return

    target = output or Path(f"{Path(model).name}-{recipe.stem}")
    with waiting(f"quantizing {model}") as say:

        def tell(text: str) -> None:
            say(text)
            note(f"fidelab: {text}")

        try:
            outcome = run(model, recipe, target, resume=resume, python=python, say=tell)
        except KeyboardInterrupt:
            note("fidelab: stopped; continue by the same command with --resume")
            raise
    idle = outcome.experts.get("without_tokens", {})
    if idle:
        count = sum(map(len, idle.values()))
        note(f"fidelab: {count} experts of {len(idle)} layers got no token of the calibration data from their router")
    summary = f"{len(outcome.plan.quantized)} modules quantized, {len(outcome.plan.kept)} kept"
    note(f"fidelab: {outcome.output}: {summary}, audit: {outcome.verdict}")
    if outcome.report is not None:
        show_report(outcome.report, as_json=as_json)
    if outcome.verdict == "broken":
        exit_on([f"{outcome.output} is broken: {shell_line('fidelab', 'checkpoint', 'audit', outcome.output)}"])


def _show_plan(planned: checkpoints.Plan, as_json: bool) -> None:
    """Print the modules that a recipe quantizes, and how many it keeps for each reason."""
    if as_json:
        print(json.dumps({"quantized": planned.quantized, "kept": dict(planned.kept)}, indent=1))
        return
    reasons = Counter(planned.kept.values())
    say(f"{len(planned.quantized):,} modules quantized, {planned.weights:,} weights, like {planned.quantized[0]}")
    kept = ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())
    say(f"{len(planned.kept):,} modules kept" + (f": {kept}" if kept else ""))


@app.command()
@options.expand_options
def calibrate(
    *,
    model: options.FloatModel,
    out: options.NewFolder,
    windows: Annotated[int, typer.Option(min=1, help="Number of windows of prompts.")] = 16,
    n_ctx: options.WindowTokens = 512,
    prompts: options.Prompts = "default",
    runs: options.CapturedRunsOptions,
    as_json: options.Json = False,
) -> None:
    """Write a copy of a model with static scales for vLLM's FP8 KV cache.

    The model runs once over windows of prompts. Each scale is the largest magnitude of a layer's keys or values,
    divided by 448. To measure the cost of the scales, compare the copy with --kv fp8_e4m3.

    [bold]Examples[/bold]

      fidelab checkpoint calibrate smollm2-135m -o ./smollm2-kv8

      fidelab compare ./smollm2-kv8 --engine vllm --kv fp8_e4m3
    """
    from fidelab.cli.progress import watcher
    from fidelab.studies.cache import calibrate as write

    experiment = study_experiment(
        "calibrate",
        model,
        {"windows": 1, "n_ctx": n_ctx},
        {"candidates": ["fp8_e4m3"], "prompts": prompts},  # only to estimate the time; nothing is run
        runs.settings(),
    )
    rows = write(experiment, out, windows=windows, n_ctx=n_ctx, listener=watcher())
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return
    from fidelab.report.text import print_table

    headings = ("layer", "largest K", "largest V", "scale of K", "scale of V")
    cells = [[f"{row[k]:.4g}" for k in ("k_amax", "v_amax", "k_scale", "v_scale")] for row in rows]
    numbered = ((str(int(row["layer"])), *each) for row, each in zip(rows, cells, strict=True))
    print_table(open_console(), headings, numbered, words=())
    note(f"fidelab: {out} written; scales lie in model-kv-scales.safetensors")


@app.command()
def make_fragile(
    model: options.Model,
    out: options.NewFolder,
    pairs: Annotated[int, typer.Option(help="RoPE pairs per head of K that become outliers.")] = 2,
    factor: Annotated[int, typer.Option(help="Factor of these rows, a power of two.")] = 4096,
) -> None:
    """Write an equivalent copy whose keys overflow FP8 without scales.

    Rows of K are multiplied by a factor and rows of Q divided by it, so attention scores stay the same. The copy shows
    what a KV format does to a model with outliers in K.
    """
    from fidelab.models import path as locate

    made = checkpoints.make_fragile(locate(model), out, pairs=pairs, factor=factor)
    channels = ", ".join(map(str, made.channels))
    say(f"{made.folder}: channels {channels} of every head of K times {factor} in {made.layers} layers, of Q divided")
