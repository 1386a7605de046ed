"""``fidelab compare`` and ``fidelab run``: the main job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import options
from fidelab.cli.axes import bench_settings
from fidelab.cli.output import command_line, exit_on, failures, note, show_report, show_study

if TYPE_CHECKING:
    from fidelab.config.cross import CrossEngine
    from fidelab.config.schema import Experiment
    from fidelab.config.trust import Trust
    from fidelab.run.runner import Listener


@options.expand_options
def compare(
    context: typer.Context,
    *,
    model: Annotated[
        str | None, typer.Argument(help="smollm2-135m, a hub id with optional @revision, a folder, or a .gguf file.")
    ] = None,
    preset: options.Preset = None,
    reference: options.Reference = None,
    kv: Annotated[
        list[str] | None,
        typer.Option(
            help="Candidate KV format: NAME, K/V, or NAME\\[key=value,…]; may be repeated.",
            autocompletion=options.complete_kv,
            rich_help_panel=options.ARMS,
        ),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            help="Candidate as KEY=VALUE,…: kv, name, preset, engine, model, dtype, python, or an engine's option; "
            "may be repeated.",
            rich_help_panel=options.ARMS,
        ),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="The reference as a server's command line: vllm serve …, python -m sglang.launch_server …, "
            "llama-server …, docker run … IMAGE …, or @FILE.",
            show_default=False,
            rich_help_panel=options.ARMS,
        ),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FLAGS",
            help="Candidate: what it changes in the command of --serve, as '--kv-cache-dtype fp8', NAME=VALUE, or "
            "--no-FLAG; may be repeated.",
            show_default=False,
            rich_help_panel=options.ARMS,
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,…",
            help="A key of --candidate with several values; repeated, all combinations run.",
            rich_help_panel=options.ARMS,
        ),
    ] = None,
    control: Annotated[
        str,
        typer.Option(
            help="The arm that should cost nothing: auto, none, or a KV format; full: also the arms that tell "
            "the format's loss from the kernel's.",
            rich_help_panel=options.ARMS,
        ),
    ] = "auto",
    axes: options.AxesOptions,
    benches: options.Benches = "",
    overrides: options.Set = None,
    scoring: options.ScoringOptions,
    limits: options.MarginOptions,
    force: Annotated[
        bool,
        typer.Option("--force", help="Run what the engine is known to run wrongly, too.", rich_help_panel=options.ARMS),
    ] = False,
    floor: Annotated[
        bool,
        typer.Option(
            help="Capture a quarter again: of the reference, and of candidates with other last bits.",
            rich_help_panel=options.MEASURED,
        ),
    ] = True,
    engine: options.ServableEngineOptions,
    runs: options.CapturedRunsOptions,
    executor: options.ExecutorOptions,
    keep_rows: Annotated[
        bool,
        typer.Option(
            "--keep-rows",
            help="Keep rows over the vocabulary after they are compared, not only what scoring reads of them.",
        ),
    ] = False,
    n_runs: Annotated[
        int, typer.Option("--runs", help="Whole runs with fresh captures; the report says how far they spread.")
    ] = 1,
    show: options.ShowOptions,
    dry_run: options.DryRun = False,
    resume_dir: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="RUN_DIR",
            help="Go on with a stopped run, or with 'latest'; give nothing else.",
            show_default=False,
            callback=options.find_run,
        ),
    ] = None,
    trusted: options.Trusted = None,
) -> None:
    r"""Run a reference and candidates on the real engine and say what each candidate loses.

    [bold]Examples[/bold]

      fidelab compare smollm2-135m --dtype float32 --reference f32 --kv k16v8

      fidelab compare owner/model --kv 'fp8_e4m3\[scale=per-token-head]' --kv k16v8

      fidelab compare ./my-model --kv q8_0 --text notes.txt --json

      fidelab compare smollm2-135m --kv k16v8 --axes all --quick --limit gsm8k=20

      fidelab compare smollm2-135m --engine llamacpp --kv q8_0 --control full

      fidelab compare ./bf16 --engine vllm --candidate model=./awq

      fidelab compare smollm2-135m --vary attention=sdpa,eager --vary kv=bf16,int8

      fidelab compare --serve 'llama-server -m m.gguf -fa on' --change '-ctk q8_0'

      fidelab compare --preset smollm2-cpu --engine vllm --kv fp8_e4m3

      fidelab compare --resume runs/20260101-120000-smollm2-135m
    """
    from fidelab.core.errors import UsageError

    show.check()
    if resume_dir is not None:
        named = ("python", "image", "prefix", "pythonpath", "engine_arg", "text", "prompts", "traffic")
        options.refuse_beside_resume(context, "run", ("as_json", "details", "plot", "markdown", "trusted", *named))
        _go_on(resume_dir, _trust(trusted, engine, axes), show)
        return
    words = (reference or "", control, *(candidate or []), *(vary or []))
    if trusted and serve is None and preset is None and not any("preset=" in word for word in words):
        raise UsageError(
            "--trust is for a run of somebody else that is gone on with: it goes with --resume RUN_DIR, or with the "
            "file of a preset or of --serve"
        )
    secrets: tuple[str, ...] = ()
    if serve is not None:
        arms, changes, secrets = _pasted(serve, change or [], context, engine, trusted or [])
    elif change:
        raise UsageError("--change is a change of a server's command line: give that with --serve COMMAND")
    elif model is None and preset is None:
        ways = "--serve COMMAND, or --preset NAME, or --resume RUN_DIR"
        raise UsageError(f"name a model: fidelab compare MODEL --kv FORMAT (or {ways})")
    else:
        arms = {"model": model, **engine.settings(), **({} if reference is None else {"reference": reference})}
        changes = []
    if not kv and not candidate and not vary and not changes:
        ways = "--kv FORMAT, --candidate KEY=VALUE,…, --vary KEY=A,B,…, or --change FLAGS beside --serve"
        raise UsageError(f"name at least one candidate: {ways}")
    measured = axes.settings()
    if axes.windows is None and axes.protocol != "sliding" and n_runs == 1:
        _until_decided(measured["axes"])
    data: dict[str, Any] = {
        **arms,
        "control": control,
        "candidates": [*changes, *(kv or []), *(candidate or [])],
        "vary": list(vary or []),
        "force": force,
        **measured,
        "benches": bench_settings(benches),
        **scoring.settings(),
        **limits.settings(),
        **runs.settings(),
        **executor.settings(),
        "runs": n_runs,
        **({} if floor else {"floor": 0.0, "twins": 0.0}),
        **({"keep_rows": True} if keep_rows else {}),
    }
    if serve is None:
        data = options.begin_from_preset(preset, context, data, trusted)
    launch(experiment_from(data, "compare", overrides or [], trusted), show, dry_run, secrets)


def _until_decided(axes: Mapping[str, dict[str, Any]]) -> None:
    """Let axes whose size nobody gave ask until all is decided."""
    from fidelab.axes import AXES

    for name, settings in axes.items():
        settings.update(AXES.load(name).until_decided)


def _pasted(
    command: str,
    changes: Sequence[str],
    context: typer.Context,
    flags: options.ServableEngineOptions,
    trusted: Sequence[Path],
) -> tuple[dict[str, Any], list[dict[str, Any]], tuple[str, ...]]:
    """The arms of a pasted command: settings, candidates, and secrets that the record must not hold.

    What ``flags`` say of the engine goes before the command's own words.

    Raises:
        UsageError: it cannot be read, or a flag says what the command itself says.
        ConfigError: it stands in a file that asks for what a file may not do unasked.
    """
    from fidelab.config.serve import read_change, read_served
    from fidelab.config.trust import Trust, check_pasted
    from fidelab.core.errors import UsageError
    from fidelab.engines import ENGINES

    for name, flag in options.given_flags(context).items():
        if name in ("model", "engine", "reference", "preset"):
            raise UsageError(f"the command of --serve says what the reference is: leave out {flag}")

    def controlled(name: str) -> Mapping[str, str]:
        return dict(getattr(ENGINES.load(name), "controlled", {}))

    served = read_served(command, controlled)
    if served.file is not None:
        check_pasted(served.settings(), served.file, Trust(trusted))
    own, given = served.settings(), flags.settings()
    flagged = {key: value for key, value in given.items() if value not in (None, "auto")}
    data = {
        **own,
        **flagged,
        "engine": {**given["engine"], "image": given["engine"]["image"] or served.image, "name": served.engine},
        "engine_args": {**own["engine_args"], **given["engine_args"]},
        "env": {**own["env"], **given["env"]},
    }
    return data, [read_change(text, served, controlled) for text in changes], served.secrets


@options.expand_options
def run(
    experiment: Annotated[Path, typer.Argument(help="Experiment file (YAML), or the name of a bundled one.")],
    overrides: options.Overrides = None,
    *,
    show: options.ShowOptions,
    dry_run: options.DryRun = False,
    trusted: options.Trusted = None,
) -> None:
    """Run an experiment file; a run's config.resolved.yaml repeats that run.

    [bold]Examples[/bold]

      fidelab run experiment.yaml

      fidelab run runs/20260101-120000-smollm2-135m/config.resolved.yaml

      fidelab run cross-engine --set threads=2
    """
    from fidelab.config.profiles import find_experiment
    from fidelab.config.schema import Experiment
    from fidelab.config.trust import load_trusted
    from fidelab.core.errors import UsageError

    show.check()
    settings = load_trusted(find_experiment(experiment), overrides or [], trusted or [], _settings)
    if isinstance(settings, Experiment):
        launch(settings, show, dry_run)
    elif show.details or show.plot or show.markdown:
        raise UsageError("--details, --plot and --markdown are for an experiment on one engine")
    elif dry_run:
        from fidelab.cli.dry_run import show_cross_plan

        show_cross_plan(settings, show.as_json)
    else:
        _run_cross_engine(settings, show.as_json)


def _settings(data: dict[str, Any], where: str) -> Experiment | CrossEngine:
    """An experiment of either kind.

    Raises:
        ConfigError: of no kind, or one that is not what it should be.
    """
    from fidelab.config.cross import KIND, validate_cross
    from fidelab.config.experiment import validate
    from fidelab.core.errors import ConfigError

    if "kind" not in data:
        return validate(data, where)
    if data["kind"] != KIND:
        raise ConfigError(f"{where}: kind: {data['kind']!r} cannot be run; write {KIND}, or leave it away")
    return validate_cross(data, where)


def experiment_from(
    data: dict[str, Any], where: str, overrides: Sequence[str] = (), trusted: Sequence[Path] | None = None
) -> Experiment:
    """Flags → experiment, with the messages of a settings file."""
    from fidelab.config.experiment import validate
    from fidelab.config.load import apply_overrides
    from fidelab.config.trust import Trust

    apply_overrides(data, overrides)
    return validate(data, where, Trust(trusted or ()))


def launch(
    experiment: Experiment, show: options.ShowOptions, dry_run: bool = False, secrets: Sequence[str] = ()
) -> None:
    """Run an experiment from flags: report on standard output, exit with 1 where something failed.

    ``secrets``: what stands in the flags and is kept out of the record.
    """
    from fidelab.run.repeat import execute_all

    if dry_run:
        from fidelab.cli.dry_run import show_plan

        show_plan(experiment, show.as_json)
        if experiment.runs > 1:
            note(f"fidelab: {experiment.runs} runs of this plan")
        for words, reason in (experiment.serve.ignored if experiment.serve else {}).items():
            note(f"fidelab: of the pasted command, in no arm: {words} ({reason})")
        return
    command = command_line()
    for secret in secrets:
        command = command.replace(secret, "…")
    report, folder = execute_all(experiment, command=command, watch=_watch_run)
    show_report(report, folder=folder.path, **vars(show))
    exit_on(failures(report))


def _trust(trusted: Sequence[Path] | None, engine: options.ServableEngineOptions, axes: options.AxesOptions) -> Trust:
    """What is allowed to the run that is gone on with: the flags say what it may ask for."""
    from fidelab.config.trust import Trust

    settings = engine.settings()
    words = {(key, value) for key in ("python", "image", "prefix") if (value := settings["engine"][key]) is not None}
    words |= {("pythonpath", folder) for folder in settings["engine"]["pythonpath"]}
    words |= set(settings["engine_args"].items())
    words |= {(f"env.{name}", value) for name, value in settings["env"].items()}
    words |= {(key, value) for key in ("text", "prompts") if (value := getattr(axes, key)) != "default"}
    words |= {("traffic", axes.traffic)} if axes.traffic is not None else set()
    return Trust(trusted or (), words, exact=True)


def _go_on(run_dir: Path, trust: Trust, show: options.ShowOptions) -> None:
    from fidelab.run.repeat import resume_all

    report, folder = resume_all(run_dir, watch=_watch_run, trust=trust)
    show_report(report, folder=folder.path, **vars(show))
    exit_on(failures(report))


def _watch_run(number: int, runs: int) -> Listener:
    from fidelab.cli.progress import watcher

    if runs > 1:
        note(f"fidelab: run {number} of {runs}")
    return watcher()


# ----------------------------------------------------------------------------------------------- across engines


def _run_cross_engine(cross: CrossEngine, as_json: bool) -> None:
    """Run a cross-engine experiment and print it; exit with 1 where an engine failed.

    What an engine does not support is a finding; what failed is a fault.
    """
    from fidelab.studies.cross_engine import run_cross

    study, folder = run_cross(cross, command=command_line(), watch=_watch)
    show_study(study, folder.path, as_json)
    exit_on(study.faults)


def _watch(what: str) -> Listener:
    from fidelab.cli.progress import watcher

    note(f"fidelab: {what}")
    return watcher()
