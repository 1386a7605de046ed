"""``fidelab compare`` and ``fidelab run``: the main job."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli.axes import Axes, Limit, Quick, Set, axis_settings
from fidelab.cli.benches import Benches, bench_settings
from fidelab.cli.output import gate, parse_pairs, show_report

if TYPE_CHECKING:
    from fidelab.config.schema import Experiment

__all__ = ["engine_args", "engine_settings", "experiment_from", "launch", "register"]

_WITH_RESUME = ("resume_dir", "fail_under", "as_json", "plot")

# Flags that several commands share, with their help.
Engine = Annotated[str, typer.Option(help="Engine that runs all arms.")]
Python = Annotated[
    str | None,
    typer.Option("--python", help="Interpreter of the engine's environment; found by itself.", show_default=False),
]
Prefix = Annotated[
    str | None,
    typer.Option(help="Command before that interpreter: 'docker run …', 'ssh host', 'srun …'.", show_default=False),
]
PythonPath = Annotated[
    list[str] | None,
    typer.Option("--pythonpath", help="Folder of modules that go before the engine's own; may be repeated."),
]
BaseURL = Annotated[
    str | None, typer.Option("--base-url", help="Engine openai: the server, http://host:port/v1.", show_default=False)
]
Served = Annotated[
    str | None,
    typer.Option("--model", help="Engine openai: what the server calls the model.", show_default=False),
]
TextFile = Annotated[str, typer.Option("--text", help="Evaluation text: 'default', 'wikitext-2', or a UTF-8 file.")]
Windows = Annotated[
    int | None, typer.Option(help="KLD: windows of the shortest context. \\[default: 32]", show_default=False)
]
NCtx = Annotated[
    str | None,
    typer.Option(
        "--n-ctx",
        metavar="N[,N…]",
        help="KLD: tokens per window, one context or several. \\[default: 512,2048]",
        show_default=False,
    ),
]
Protocol = Annotated[
    str | None, typer.Option(help="KLD: rows scored: half, full or sliding. \\[default: half]", show_default=False)
]
Stride = Annotated[
    int | None, typer.Option(help="KLD, sliding: tokens between windows. \\[default: n-ctx / 4]", show_default=False)
]
Prompts = Annotated[str, typer.Option(help="Prompts: 'default', a .jsonl or a .txt file.")]
NPredict = Annotated[
    int | None, typer.Option("--n-predict", help="Trajectory: tokens per prompt. \\[default: 64]", show_default=False)
]
Template = Annotated[str | None, typer.Option(help="Trajectory: chat or raw. \\[default: chat]", show_default=False)]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:0 … or auto.")]
Dtype = Annotated[str, typer.Option(help="Compute type: auto, float32, bfloat16, float16.")]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads of a worker. \\[default: all usable cores]", show_default=False)
]
EngineArg = Annotated[list[str] | None, typer.Option("--engine-arg", help="Engine option K=V; may be repeated.")]
Deadline = Annotated[
    float | None, typer.Option(help="Seconds for one arm, model load included. \\[default: 14400]", show_default=False)
]
Seed = Annotated[int, typer.Option(help="Seed of the bootstrap.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Plot = Annotated[bool, typer.Option("--plot", help="Draw cost against size in characters.")]
FailUnder = Annotated[
    float | None,
    typer.Option(help="Exit with 1 unless the lower bound of every KLD score reaches this.", show_default=False),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print jobs, tokens, disk and time; run nothing.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("compare")(compare)
    app.command("run")(run)


def compare(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="smollm2-135m, a hub id with optional @revision, a folder, or a .gguf file.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="KV format of the reference, or KEY=VALUE,… as for --candidate. \\[default: the engine's native one]",
            show_default=False,
        ),
    ] = None,
    kv: Annotated[
        list[str] | None,
        typer.Option("--kv", help="Candidate KV format: NAME, K/V, or NAME\\[key=value,…]; may be repeated."),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            "--candidate",
            help="Candidate as KEY=VALUE,…: kv, name, engine, model, dtype, python, or an engine's option; "
            "may be repeated.",
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="KEY=A,B,…",
            help="Isolation matrix: a key of --candidate with several values; repeated, all combinations run, and the "
            "report names the key that moves KLD and the onset of degeneration.",
        ),
    ] = None,
    engine: Engine = "hf",
    python: Python = None,
    prefix: Prefix = None,
    pythonpath: PythonPath = None,
    base_url: BaseURL = None,
    served: Served = None,
    control: Annotated[
        str,
        typer.Option(
            help="The arm that should cost nothing: auto, none, or a KV format; full: also the arms that tell "
            "the format's loss from the kernel's."
        ),
    ] = "auto",
    axes: Axes = "core",
    benches: Benches = "",
    quick: Quick = False,
    text: TextFile = "default",
    windows: Windows = None,
    n_ctx: NCtx = None,
    protocol: Protocol = None,
    stride: Stride = None,
    prompts: Prompts = "default",
    n_predict: NPredict = None,
    limit: Limit = None,
    template: Template = None,
    overrides: Set = None,
    seed: Seed = 42,
    bands: Annotated[str, typer.Option(help="Band table of the composite: fidelab or refract.")] = "fidelab",
    force: Annotated[bool, typer.Option("--force", help="Run what the engine is known to run wrongly, too.")] = False,
    floor: Annotated[
        bool,
        typer.Option(
            "--floor/--no-floor",
            help="Capture a quarter again: of the reference, and of candidates with other last bits.",
        ),
    ] = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    engine_arg: EngineArg = None,
    deadline: Deadline = None,
    output_dir: Annotated[
        Path, typer.Option(help="Where runs are written; captures lie in its folder 'captures'.")
    ] = Path("runs"),
    fail_under: FailUnder = None,
    as_json: Json = False,
    plot: Plot = False,
    dry_run: DryRun = False,
    resume_dir: Annotated[
        Path | None,
        typer.Option(
            "--resume", metavar="RUN_DIR", help="Go on with a stopped run; give nothing else.", show_default=False
        ),
    ] = None,
) -> None:
    r"""Run a reference and candidates on the real engine and say what each candidate loses.

    [bold]Examples[/bold]

      fidelab compare smollm2-135m --dtype float32 --reference f32 --kv k16v8

      fidelab compare owner/model --kv 'fp8_e4m3\[scale=per-token-head]' --kv k16v8

      fidelab compare ./my-model --kv q8_0 --text notes.txt --fail-under 99.5 --json

      fidelab compare smollm2-135m --kv k16v8 --axes all --quick --limit gsm8k=20

      fidelab compare smollm2-135m --engine llamacpp --kv q8_0 --control full

      fidelab compare ./bf16 --engine vllm --candidate model=./awq

      fidelab compare smollm2-135m --vary attention=sdpa,eager --vary kv=bf16,int8

      fidelab compare --resume runs/20260101-120000-smollm2-135m
    """
    from fidelab.errors import UsageError

    if resume_dir is not None:
        _refuse_others(context)
        _go_on(resume_dir, fail_under, as_json, plot)
        return
    if model is None:
        raise UsageError("name a model: fidelab compare MODEL --kv FORMAT (or --resume RUN_DIR)")
    if not kv and not candidate and not vary:
        raise UsageError("name at least one candidate: --kv FORMAT, --candidate KEY=VALUE,…, or --vary KEY=A,B,…")
    given = {
        "kld": {"windows": windows, "n_ctx": n_ctx, "protocol": protocol, "stride": stride},
        "trajectory": {"n_predict": n_predict, "template": template},
    }
    data: dict[str, Any] = {
        "model": model,
        "engine": engine_settings(engine, python, prefix, pythonpath),
        "engine_args": engine_args(engine_arg, base_url, served),
        **({} if reference is None else {"reference": reference}),
        "control": control,
        "candidates": [*(kv or []), *(candidate or [])],
        "vary": list(vary or []),
        "force": force,
        "axes": axis_settings(axes, given, limit or [], quick),
        "benches": bench_settings(benches),
        "text": text,
        "prompts": prompts,
        "seed": seed,
        "bands": bands,
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "output_dir": str(output_dir),
        "fail_under": fail_under,
        **({} if floor else {"floor": 0.0, "twins": 0.0}),
        **({} if deadline is None else {"deadline": deadline}),
    }
    launch(experiment_from(data, "compare", overrides or []), as_json, dry_run, plot)


def run(
    experiment: Annotated[Path, typer.Argument(help="Experiment file (YAML), or the name of a bundled profile.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting: a.b=value; may be repeated.")
    ] = None,
    as_json: Json = False,
    plot: Plot = False,
    dry_run: DryRun = False,
) -> None:
    """Run an experiment file or a profile; a run's config.resolved.yaml repeats that run.

    [bold]Examples[/bold]

      fidelab run experiment.yaml

      fidelab run runs/20260101-120000-smollm2-135m/config.resolved.yaml

      fidelab run cross-engine --set threads=2
    """
    from fidelab.cli.cross import run_cross_engine
    from fidelab.config.cross import KIND
    from fidelab.config.load import read_yaml, validate
    from fidelab.config.profiles import find_experiment
    from fidelab.errors import ConfigError, UsageError

    path = find_experiment(experiment)
    data = read_yaml(path, overrides or [])
    if "kind" not in data:
        launch(validate(data, str(path)), as_json, dry_run, plot)
    elif data["kind"] != KIND:
        raise ConfigError(f"{path}: kind: {data['kind']!r} cannot be run; write {KIND}, or leave it away")
    elif dry_run or plot:
        raise UsageError(f"{'--dry-run' if dry_run else '--plot'} is for an experiment on one engine")
    else:
        run_cross_engine(data, str(path), as_json=as_json)


def engine_settings(
    name: str, python: str | None, prefix: str | None, pythonpath: Sequence[str] | None
) -> dict[str, Any]:
    """Flags → the experiment's ``engine``."""
    return {"name": name, "python": python, "prefix": prefix, "pythonpath": [*(pythonpath or [])]}


def engine_args(pairs: Sequence[str] | None, base_url: str | None, served: str | None) -> dict[str, str]:
    """``--engine-arg`` and the options that have flags of their own."""
    given = {"base-url": base_url, "model": served}
    return {
        **parse_pairs(list(pairs or []), "--engine-arg"),
        **{key: value for key, value in given.items() if value is not None},
    }


def experiment_from(data: dict[str, Any], where: str, overrides: Sequence[str] = ()) -> Experiment:
    """Flags → experiment, with the messages of a settings file."""
    from fidelab.config.load import apply_overrides, validate

    apply_overrides(data, overrides)
    return validate(data, where)


def launch(experiment: Experiment, as_json: bool, dry_run: bool = False, plot: bool = False) -> None:
    """Run an experiment from flags: report on standard output, gate, exit code."""
    from fidelab.cli.progress import watcher
    from fidelab.runs.conduct import execute

    if dry_run:
        from fidelab.cli.dry_run import show_plan

        show_plan(experiment, as_json)
        return
    command = shlex.join(["fidelab", *sys.argv[1:]])
    report, folder = execute(experiment, command=command, listener=watcher())
    show_report(report, as_json=as_json, folder=folder.path, plot=plot)
    gate(report, experiment.fail_under)


def _refuse_others(context: typer.Context) -> None:
    """``--resume`` takes the run's own settings; a flag that would be ignored is an error."""
    from fidelab.errors import UsageError

    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if (
            name not in ("resume_dir", "fail_under", "as_json", "plot")
            and source is not None
            and source.name == "COMMANDLINE"
        ):
            said = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.opts[0].upper()
            raise UsageError(f"--resume takes the run's own settings: leave out {said}")


def _go_on(run_dir: Path, fail_under: float | None, as_json: bool, plot: bool) -> None:
    from fidelab.cli.progress import watcher
    from fidelab.config.load import load
    from fidelab.runs.conduct import resume

    report, folder = resume(run_dir, listener=watcher())
    show_report(report, as_json=as_json, folder=folder.path, plot=plot)
    gate(report, fail_under if fail_under is not None else load(folder.config).fail_under)
