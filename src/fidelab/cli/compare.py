"""``fidelab compare``: the main job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import completion, options, values
from fidelab.cli.axes import bench_settings
from fidelab.cli.check import check_conditions, exit_on_conditions, read_conditions
from fidelab.cli.defaults import use_defaults
from fidelab.cli.output import command_line, exit_on, failures, note, show_report, show_study
from fidelab.cli.rules import BORROWED, check_flags, given_flags
from fidelab.core.paths import expand

if TYPE_CHECKING:
    from fidelab.config.schema import Experiment
    from fidelab.config.trust import Trust
    from fidelab.results.check import Policy
    from fidelab.results.record import Report
    from fidelab.run.runner import Listener


# The options that ``compare --help`` shows; --help-all shows the others, too.
BRIEF = (
    "model",
    "engine",
    "kv",
    "candidate",
    "serve",
    "change",
    "reference",
    "text",
    "traffic",
    "quick",
    "windows",
    "n_ctx",
    "axes",
    "output_dir",
)


class SourceOptions(options.Options):
    """Options for an experiment that is written elsewhere."""

    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Run an experiment file (YAML) or a bundled one by name. Change its settings with --set.",
        ),
    ] = None
    resume_dir: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="RUN_DIR",
            help="Resume a stopped run (or 'latest'). Cannot be combined with other options.",
            callback=options.unfinished,
            autocompletion=completion.run,
        ),
    ] = None
    trusted: options.Trusted = None


class ArmOptions(options.Options, panel=options.ARMS):
    """Options for the configurations."""

    preset: options.Preset = None
    reference: Annotated[
        str | None,
        typer.Option(
            help="Reference: KV format or KEY=VALUE,…; or a packed one: folder, hf://owner/name or "
            "auto. \\[default: native]",
        ),
    ] = None
    references: Annotated[
        list[str] | None,
        typer.Option(
            "--references",
            metavar="PLACE",
            envvar="FIDELAB_REFERENCES",
            help="Place that --reference auto searches: pack, folder of packs or hf://owner/name. Repeatable.",
        ),
    ] = None
    kv: Annotated[
        list[str] | None,
        typer.Option(
            help="Candidate KV format: NAME, K/V or NAME\\[key=value,…]. Repeatable.",
            autocompletion=completion.kv_format,
        ),
    ] = None
    candidate: Annotated[
        list[str] | None,
        typer.Option(help="Candidate as KEY=VALUE,… (kv, model, engine, …). Repeatable."),
    ] = None
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Reference as a server command (vllm serve …), script, unit or Compose file; or @FILE.",
        ),
    ] = None
    change: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FLAGS",
            help="Candidate as changed flags of --serve, e.g. '--kv-cache-dtype fp8'. Repeatable.",
        ),
    ] = None
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,…",
            help="Key of --candidate with several values. If repeated, all combinations run.",
        ),
    ] = None
    control: Annotated[str, typer.Option(help="Control configuration: auto, none, full or a KV format.")] = "auto"
    force: Annotated[bool, typer.Option("--force", help="Run even if a known engine bug applies.")] = False


class MeasuredOptions(options.Options, panel=options.MEASURED):
    """Options for what is measured besides the axes."""

    benches: options.Benches = ""
    overrides: options.Set = None
    floor: Annotated[
        bool | None,
        typer.Option(
            "--floor/--no-floor",
            help="Re-run a quarter of the data to measure noise. \\[default: unless --quick]",
            show_default=False,
        ),
    ] = None
    speed: Annotated[
        bool | None,
        typer.Option(
            "--speed/--no-speed",
            help="Measure tokens per second next to the loss, in seconds. \\[default: on servers and GPUs]",
        ),
    ] = None
    budget: Annotated[
        float | None,
        typer.Option(
            parser=values.seconds,
            metavar="TIME",
            help="Time limit of the run: 10m, or seconds. Stops reading windows when it would be exceeded.",
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        return {
            "benches": bench_settings(self.benches),
            **({"floor": 0.0, "twins": 0.0} if self.floor is False else {}),
            **({} if self.speed is None else {"speed": self.speed}),
            **({} if self.budget is None else {"budget": self.budget}),
        }


class RunOptions(options.CapturedRunsOptions):
    """Options for the runs and what they keep."""

    keep_rows: Annotated[bool, typer.Option("--keep-rows", help="Keep full logits after scoring.")] = False
    n_runs: Annotated[
        int, typer.Option("--runs", help="Number of independent runs. The report shows their spread.")
    ] = 1

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "runs": self.n_runs, **({"keep_rows": True} if self.keep_rows else {})}


class GateOptions(options.Options, panel=options.SCORING):
    """Options for a decision at the end of the run."""

    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            metavar="CONDITION",
            help="Exit with 1 if a candidate is shown to meet it, e.g. 'kld.mean > 0.01', with 3 if undecided. "
            "Repeatable.",
        ),
    ] = None

    def policy(self) -> Policy | None:
        """Return the conditions as rules; ``None`` where none is given."""
        return read_conditions(self.fail_on) if self.fail_on else None


@options.expand_options
def compare(
    context: typer.Context,
    *,
    model: options.OptionalModel = None,
    source: SourceOptions,
    arms: ArmOptions,
    axes: options.AxesOptions,
    measured: MeasuredOptions,
    scoring: options.ScoringOptions,
    limits: options.MarginOptions,
    capacity: options.CapacityOptions,
    engine: options.ComparedEngineOptions,
    executor: options.ExecutorOptions,
    runs: RunOptions,
    show: options.ShowOptions,
    gate: GateOptions,
    dry_run: options.DryRun = False,
    help_all: options.HelpAll = False,
) -> None:
    r"""Run a reference and candidates on a real engine and report the loss of each candidate.

    [bold]Examples[/bold]

      fidelab compare smollm2-135m --kv q8_0 --kv fp8_e4m3 --quick

      fidelab compare smollm2-135m --engine llama.cpp --kv q8_0 --text notes.txt

      fidelab compare ./bf16 --engine vllm --candidate model=./awq

      fidelab compare --serve 'llama-server -m m.gguf -fa on' --change '-ctk q8_0'

      fidelab compare -f experiment.yaml --set axes.kld.windows=64
    """
    trusted = source.trusted or []
    policy = gate.policy()
    if source.resume_dir is None and source.file is None:
        if arms.serve is not None and "device" not in given_flags(context):
            engine.device = "auto"  # the command says where its server runs
        elif arms.preset is None and (line := use_defaults(context)):
            note(line)
    if source.resume_dir is not None:
        from fidelab.run.repeat import resume_all

        report, folder = resume_all(source.resume_dir, watch=_watch_run, trust=_trust(trusted, engine, axes))
        show_report(report, folder=folder.path, **vars(show))
        exit_on_conditions(report, policy, failures(report))
        return
    if source.file is not None:
        _run_file(source.file, measured.overrides or [], trusted, show, dry_run, runs, policy)
        return
    from fidelab.config.flags import StartingPoint, read_flags
    from fidelab.metrics.equivalence import MIN_CLUSTERS

    own = engine.programs is not None  # llama-perplexity answers one test, and has no early looks
    data = {**engine.settings(), **_configurations(context, model, arms, own=own)}
    data |= _axes(axes, borrowed="reference_from" in data and not own, looks=runs.n_runs == 1 and not own)
    if own and axes.axes is None:
        data["axes"] = {name: values for name, values in data["axes"].items() if name == "kld"}
    if own and axes.quick and axes.windows is None and "kld" in data["axes"]:
        data["axes"]["kld"]["windows"] = MIN_CLUSTERS  # a window is of one document, and no look follows
    if axes.quick and measured.floor is None:  # a first look: repeats cost more starts than the question itself
        measured.floor = False
    if axes.quick:
        data["quick_start"] = "auto"
    for group in (measured, scoring, limits, capacity, runs, executor):
        data |= group.settings()
    begun = StartingPoint(arms.serve, arms.change or [], arms.preset, given_flags(context))
    experiment, secrets = read_flags(data, "compare", overrides=measured.overrides or [], trusted=trusted, begun=begun)
    launch(experiment, show, dry_run, secrets, policy)


_AUTO = "auto"


def _configurations(context: typer.Context, model: str | None, arms: ArmOptions, *, own: bool) -> dict[str, Any]:
    """Return the data of the configurations; ``own``: with own programs, a file of rows may be the reference.

    Raises:
        UsageError: If there is no candidate, or flags ask for other windows than a borrowed reference has.
    """
    given = [*(arms.kv or []), *(arms.candidate or [])]
    data: dict[str, Any] = {"model": model, "vary": list(arms.vary or []), "control": arms.control, "force": arms.force}
    here = arms.reference is None or arms.serve is not None
    place = None if here else _borrowed(str(arms.reference), arms.references, model, own=own)
    check_flags(context, "compare, references known", also=[BORROWED] if place is not None and not own else [])
    if place is not None:
        data["reference_from"] = place
        given = given or ([] if arms.vary else [f"name={Path(model or '').name or 'candidate'}"])
    elif arms.reference not in (None, _AUTO):
        data["reference"] = arms.reference
    return {**data, "candidates": given}


def _axes(axes: options.AxesOptions, *, borrowed: bool, looks: bool) -> dict[str, Any]:
    """Return the data of the axes. Axes without a given size look until everything is decided.

    ``borrowed``: the reference has saved outputs of the default windows.  ``looks``: whether several looks are taken.
    """
    from fidelab.axes import AXES

    data = axes.settings()
    if borrowed and axes.axes is None:
        return {**data, "axes": {"kld": {}}}
    if looks and axes.windows is None:
        for name, settings in data["axes"].items():
            if settings.get("protocol") in ("sliding", "depth"):  # which has no looks, or its own
                continue
            settings.update(AXES.load(name).until_decided)
    return data


def _borrowed(reference: str, places: Sequence[str] | None, model: str | None, *, own: bool) -> str | None:
    """Return the place of a packed reference, or the file of its rows; ``None`` for a reference that runs here."""
    if own:
        return reference if expand(reference).exists() else None
    from fidelab.models import resolve
    from fidelab.references.borrow import HUB, find_for

    place: str | None = reference
    if reference == _AUTO:
        place = find_for(resolve(model or ""), places or [], lambda text: note(f"fidelab: {text}"))
        where = f"found {place}" if place else f"none of {len(places or [])} places has one, it runs here"
        note(f"fidelab: reference of {model}: {where}")
    elif not reference.startswith(HUB) and not expand(reference).is_dir():
        place = None
    return place


def _run_file(
    experiment: Path,
    overrides: Sequence[str],
    trusted: Sequence[Path],
    show: options.ShowOptions,
    dry_run: bool,
    runs: RunOptions,
    policy: Policy | None,
) -> None:
    from fidelab.config.experiment import read_settings
    from fidelab.config.load import read_yaml
    from fidelab.config.profiles import find_experiment
    from fidelab.config.schema import Experiment
    from fidelab.config.trust import load_trusted
    from fidelab.core.errors import UsageError

    path = find_experiment(experiment)
    if runs.output_dir != Path("runs") and "output_dir" not in read_yaml(path):
        overrides = [f"output_dir={json.dumps(str(runs.output_dir))}", *overrides]
    settings = load_trusted(path, overrides, trusted, read_settings)
    if isinstance(settings, Experiment):
        launch(settings, show, dry_run, policy=policy)
    elif policy is not None:
        raise UsageError("--fail-on is for an experiment on one engine: a study across engines has no decision")
    elif show.details:
        raise UsageError("--details is for an experiment on one engine: without it all rows are printed")
    elif dry_run:
        from fidelab.cli.dry_run import show_cross_plan

        show_cross_plan(settings, show.as_json)
    else:
        from fidelab.studies.cross_engine import run_cross

        study, folder = run_cross(settings, command=command_line(), watch=_watch)
        show_study(study, folder.path, show.as_json, show.markdown)
        exit_on(study.faults)  # a feature that an engine does not support is a finding, a failure is a fault


def study_experiment(where: str, model: str, kld: dict[str, Any], *more: dict[str, Any]) -> Experiment:
    """Return an experiment of one axis.

    It has no control and measures no noise unless ``more`` has them.
    """
    data: dict[str, Any] = {"model": model, "control": "none", "axes": {"kld": kld}, "floor": 0.0, "twins": 0.0}
    data["speed"] = False  # a question about the loss alone
    from fidelab.config.flags import read_flags

    for settings in more:
        data |= settings
    return read_flags(data, where)[0]


def launch(
    experiment: Experiment,
    show: options.ShowOptions,
    dry_run: bool = False,
    secrets: Sequence[str] = (),
    policy: Policy | None = None,
) -> Report | None:
    """Run an experiment from flags: print the report, and exit with 1 if something failed.

    ``secrets``: values of flags that are kept out of the record.  ``policy``: limits that decide the exit code, too.
    Returns the report, or ``None`` for a dry run.
    """
    from fidelab.models import reading
    from fidelab.run.repeat import execute_all

    if policy is not None:
        check_conditions(policy, experiment)
    for line in experiment.left_out:
        note(f"fidelab: {line}")
    if dry_run:
        from fidelab.cli.dry_run import show_pasted, show_plan

        show_plan(experiment, show.as_json)
        if experiment.runs > 1:
            note(f"fidelab: {experiment.runs} runs of this plan")
        if experiment.serve is not None:
            show_pasted(experiment.serve)
        return None
    command = command_line()
    for secret in secrets:
        command = command.replace(secret, "…")
    with reading.told(_hashing):
        report, folder = execute_all(experiment, command=command, watch=_watch_run)
    show_report(report, folder=folder.path, **vars(show))
    exit_on_conditions(report, policy, failures(report))
    return report


def _hashing(done: int, total: int) -> None:
    from fidelab.core import format_bytes

    now, whole = format_bytes(done, total)
    note(f"fidelab: hashing weights, once for this machine: {now} of {whole}")


def _trust(trusted: Sequence[Path] | None, engine: options.ComparedEngineOptions, axes: options.AxesOptions) -> Trust:
    """Permissions granted to a resumed run, taken from the flags."""
    from fidelab.config.trust import NAMES_OF, Trust

    settings = engine.settings()
    words = {(key, value) for key in ("python", "image") if (value := settings["engine"][key]) is not None}
    words |= {("pythonpath", folder) for folder in settings["engine"]["pythonpath"]}
    words |= set(settings["engine_args"].items())
    words |= {(f"env.{name}", value) for name, value in settings["env"].items()}
    words |= {(key, value) for key in ("text", "prompts") if (value := getattr(axes, key)) not in NAMES_OF[key]}
    words |= {("traffic", axes.traffic)} if axes.traffic is not None else set()
    return Trust(trusted or (), words, exact=True)


def _watch_run(number: int, runs: int) -> Listener:
    from fidelab.cli.progress import watcher

    if runs > 1:
        note(f"fidelab: run {number} of {runs}")
    return watcher()


# ----------------------------------------------------------------------------------------------- across engines


def _watch(what: str) -> Listener:
    from fidelab.cli.progress import watcher

    note(f"fidelab: {what}")
    return watcher()
