"""``fidelab reproduce``: run published protocols in stages, and compare expected figures with measured ones."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import completion, options
from fidelab.cli.commands import Commands
from fidelab.cli.output import command_line, exit_on, note, open_console, print_json, show_study

if TYPE_CHECKING:
    from fidelab.config.profiles import Profile, ResolvedProfile

app = Commands(default="run", help="Repeat published measurements and compare the figures. NAME alone means run NAME.")

Name = Annotated[
    str, typer.Argument(help="Profile name or file.", show_default=False, autocompletion=completion.profile)
]
VariantName = Annotated[
    str | None,
    typer.Option("--variant", help="Variant of the profile, e.g. tiny (runs on two cores).", show_default=False),
]
Parameters = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Change a parameter of the profile. Repeatable."),
]


@app.command("list")
def list_profiles(as_json: options.Json = False) -> None:
    """List the profiles that come with fidelab."""
    from fidelab.config.profiles import load_profile, names
    from fidelab.report.text import print_table

    profiles = {name: load_profile(name) for name in names()}
    if as_json:
        rows = [{"name": name, **p.model_dump(mode="json", exclude_defaults=True)} for name, p in profiles.items()]
        print_json({"profiles": rows})
        return
    cells = [(name, p.purpose, f"{p.needs.hours or 0:g}", ", ".join(p.variants)) for name, p in profiles.items()]
    print_table(open_console(), ("profile", "what", "hours", "variants"), cells, words=range(4))


@app.command()
def show(name: Name, variant: VariantName = None, trusted: options.Trusted = None) -> None:
    """Print a profile as YAML, or the settings of one variant.

    [bold]Examples[/bold]

      fidelab reproduce show decode

      fidelab reproduce show decode --variant tiny
    """
    import yaml

    from fidelab.config.profiles import load_profile, resolve

    profile = load_profile(name, trusted or [])
    settings: Profile | ResolvedProfile = profile if variant is None else resolve(name, profile, variant)
    written = settings.model_dump(mode="json", exclude_defaults=True)
    print(yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=120), end="")


@app.command("run")
def run_one(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            help="Profile name or file; not with --resume.", show_default=False, autocompletion=completion.profile
        ),
    ] = None,
    variant: VariantName = None,
    parameters: Parameters = None,
    stages: Annotated[
        list[str] | None, typer.Option("--stage", metavar="NAME", help="Run only this stage. Repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print stages, commands, time and disk space without running.")
    ] = False,
    output_dir: Annotated[
        Path, typer.Option(help="Folder for runs. Profiles go into its subfolder profiles.")
    ] = options.RunsOptions.output_dir,
    as_json: options.Json = False,
    markdown: options.Markdown = False,
    resume_dir: Annotated[
        Path | None,
        typer.Option("--resume", metavar="PROFILE_DIR", help="Resume a stopped profile.", show_default=False),
    ] = None,
    trusted: options.Trusted = None,
) -> None:
    """Run a profile's stages and compare the published figures with the measured ones.

    A stage that cannot run on this machine is skipped, and skips.json gives the reason. If a stage fails, the others
    still run and the exit code is 1.

    [bold]Examples[/bold]

      fidelab reproduce decode --variant tiny

      fidelab reproduce cross-engine --dry-run

      fidelab reproduce decode --set gsm8k=test.jsonl --stage accuracy

      fidelab reproduce --resume runs/profiles/20260101-120000-decode-tiny
    """
    from fidelab.config.profiles import load_profile, resolve
    from fidelab.studies.profiles import plan_profile, resume_profile, run_profile

    def watch(text: str) -> None:
        note(f"fidelab: stage {text}")

    if resume_dir is not None:
        study, folder = resume_profile(resume_dir, trusted=trusted or [], watch=watch), resume_dir.absolute()
    else:
        assert name is not None  # rules.py
        resolved = resolve(name, load_profile(name, trusted or []), variant, parameters or [])
        check_stages(resolved, context.find_root().command)
        if dry_run:
            plan = plan_profile(resolved, output_dir, only=stages or [], command=command_line())
            show_study(plan, None, as_json, markdown)
            return
        study, folder = run_profile(resolved, output_dir, only=stages or [], command=command_line(), watch=watch)
    show_study(study, folder, as_json, markdown)
    ran = any(row.measured for row in study.rows if row.at["part"] == "stage")
    exit_on(study.faults, [] if study.faults or ran else ["no stage could be run here"])


@app.command("llama.cpp-pr")
@options.expand_options
def llamacpp_pull_request(
    *,
    new: Annotated[Path, typer.Argument(help="GGUF file in the new format.", show_default=False)],
    base: Annotated[Path, typer.Option(help="GGUF file of the same model in Q8_0.", show_default=False)],
    neighbours: Annotated[
        list[str],
        typer.Option(
            metavar="FILE,…",
            help="GGUF files of the formats around it in size, or a pattern. Repeatable.",
            show_default=False,
        ),
    ],
    programs: options.Programs = None,
    url: Annotated[str, typer.Option(help="Address at which others find the new file.", show_default=False)] = "",
    texts: options.TextOptions,
    windows: options.Windows = None,
    n_ctx: options.Contexts = "512",
    threads: options.Threads = None,
    runs: options.RunsOptions,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Measure what llama.cpp asks of a new quantization, and print it as Markdown to paste.

    Perplexity and KLD against Q8_0 and the neighbours, and speed on processors alone, with your own llama-perplexity
    and llama-bench: those in PATH, or of --bin. The same text is written to llama.cpp-pr.md in the run folder.

    [bold]Examples[/bold]

      fidelab reproduce llama.cpp-pr new.gguf --base Q8_0.gguf --neighbours a.gguf
    """
    from fidelab.cli.axes import axis_settings
    from fidelab.cli.progress import watcher
    from fidelab.config.flags import read_flags
    from fidelab.core.errors import UsageError
    from fidelab.engines.llamacpp.perplexity import PerplexityTool
    from fidelab.studies.llamacpp_pr import as_markdown, plan_pull_request, pull_request, starts

    others = [file for each in neighbours for file in each.split(",") if file]
    if not others:
        raise UsageError("llama.cpp asks for the formats around the new one: name at least one neighbour")
    data = {
        "model": str(base),
        "engine": {"name": PerplexityTool.engine, "bin": str(programs or _programs_in_path())},
        "candidates": [f"model={file}" for file in (new, *others)],
        "axes": axis_settings("kld", {"kld": {"windows": windows, "n_ctx": n_ctx}}, [], False),
        "text": texts.text,
        "threads": threads,
        "speed": False,
        **runs.settings(),
    }
    experiment, _ = read_flags(data, "reproduce llama.cpp-pr")
    if dry_run:
        from fidelab.cli.dry_run import show_plan

        plan, _ = plan_pull_request(experiment)
        show_plan(experiment, as_json)
        note(f"fidelab: then {starts(plan)} starts of llama-bench on the processor")
        return
    for line in experiment.left_out:
        note(f"fidelab: {line}")
    found, folder = pull_request(
        experiment, command=command_line(), url=url, listener=watcher(), watch=lambda line: note(f"fidelab: {line}")
    )
    print(found.to_json() if as_json else as_markdown(found), end="")
    note(f"fidelab: written to {folder.path / 'llama.cpp-pr.md'}")
    exit_on(found.faults)


def _programs_in_path() -> Path:
    """Return the folder of the ``llama-perplexity`` that a shell would start.

    Raises:
        UsageError: If there is none.
    """
    import shutil

    from fidelab.core.errors import UsageError
    from fidelab.engines.llamacpp.perplexity import PROGRAM

    found = shutil.which(PROGRAM)
    if found is None:
        raise UsageError(
            f"no {PROGRAM} in PATH: write --bin FOLDER, the folder of llama.cpp's programs, such as build/bin"
        )
    return Path(found).parent


def check_stages(resolved: ResolvedProfile, root: Any) -> None:
    """Refuse experiments and commands of ``root`` that cannot be read, before anything runs.

    Raises:
        ConfigError: If an experiment has an invalid key or value, a command has invalid words, or a computation has
            invalid arguments.
        UnknownNameError: If the function of a computation does not exist.
    """
    from fidelab.config.experiment import read_settings
    from fidelab.core.errors import ConfigError
    from fidelab.studies.arithmetic import check_computation

    for stage in resolved.stages:
        where, words = f"{resolved.name}: stage {stage.name}", [str(word) for word in stage.command or ()]
        if stage.experiment is not None:
            read_settings(stage.experiment, where)
        for figure, entry in (stage.compute or {}).items():
            check_computation(entry.function, entry.of, f"{where}: {figure}")
        if words[:1] in ([], ["k16v8"]):  # no command, or one of another package
            continue
        command, left = root, words
        try:
            context = command.make_context("fidelab", left)
            while hasattr(command, "resolve_command"):  # a group
                _, command, left = command.resolve_command(context, [*context._protected_args, *context.args])
                context = command.make_context(command.name, left, parent=context)
        except Exception as error:
            said = error.format_message() if hasattr(error, "format_message") else str(error)
            raise ConfigError(f"{where}: fidelab {shlex.join(words)}: {said}") from None
