"""``fidelab reproduce``: run published protocols in stages, and compare expected figures with measured ones."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import options
from fidelab.cli.commands import Commands
from fidelab.cli.output import command_line, exit_on, note, open_console, print_json, show_study

if TYPE_CHECKING:
    from fidelab.config.profiles import Profile, Resolved

app = Commands(
    default="run",
    help="Repeat published measurements and compare the figures. NAME alone means run NAME.",
)

Name = Annotated[str, typer.Argument(help="Profile name or file.", show_default=False)]
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

    rows: list[dict[str, Any]] = []
    for name in names():
        profile = load_profile(name)
        rows.append(
            {
                "name": name,
                "purpose": profile.purpose,
                "source": profile.source.title,
                "device": profile.needs.device,
                "hours": profile.needs.hours,
                "stages": [stage.name for stage in profile.stages],
                "variants": list(profile.variants),
            }
        )
    if as_json:
        print_json({"profiles": rows})
        return
    from fidelab.report.text import print_table

    cells = [
        (row["name"], row["purpose"], "" if row["hours"] is None else f"{row['hours']:g}", ", ".join(row["variants"]))
        for row in rows
    ]
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
    settings: Profile | Resolved = profile if variant is None else resolve(name, profile, variant)
    written = settings.model_dump(mode="json", exclude_defaults=True)
    print(yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=120), end="")


@app.command("run")
def run_one(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="Profile name or file; not with --resume.", show_default=False)
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
    from fidelab.config.profiles import load_profile, parse_parameters, resolve
    from fidelab.core.errors import UsageError
    from fidelab.studies.profiles import plan_profile, resume_profile, run_profile

    if resume_dir is not None:
        options.refuse_other_options(context, "resume_dir", "profile", ("as_json", "trusted"))
        study, folder = resume_profile(resume_dir, trusted=trusted or [], watch=_watch), resume_dir.absolute()
    elif name is None:
        raise UsageError("name a profile: fidelab reproduce NAME (fidelab reproduce list shows them)")
    else:
        resolved = resolve(name, load_profile(name, trusted or []), variant, parse_parameters(parameters or []))
        check_stages(resolved, context.find_root().command)
        if dry_run:
            show_study(plan_profile(resolved, output_dir, only=stages or [], command=command_line()), None, as_json)
            return
        study, folder = run_profile(resolved, output_dir, only=stages or [], command=command_line(), watch=_watch)
    show_study(study, folder, as_json)
    ran = any(row.measured for row in study.rows if row.at["part"] == "stage")
    exit_on(study.faults, [] if study.faults or ran else ["no stage could be run here"])


def _watch(text: str) -> None:
    note(f"fidelab: stage {text}")


def check_stages(resolved: Resolved, root: Any) -> None:
    """Refuse experiments and commands of ``root`` that cannot be read, before anything runs.

    Raises:
        ConfigError: If an experiment has an invalid key or value, or a command has invalid words.
    """
    from fidelab.config.cross import validate_cross
    from fidelab.config.experiment import validate
    from fidelab.core.errors import ConfigError

    for stage in resolved.stages:
        where = f"{resolved.name}: stage {stage.name}"
        if stage.experiment is not None:
            (validate if "kind" not in stage.experiment else validate_cross)(stage.experiment, where)
            continue
        words = [str(word) for word in stage.command or ()]
        if words[:1] == ["k16v8"]:  # a command of another package
            continue
        command = root
        try:
            context = command.make_context("fidelab", words)
            while hasattr(command, "resolve_command"):  # a group
                _, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
                context = command.make_context(command.name, words, parent=context)
        except Exception as error:
            said = error.format_message() if hasattr(error, "format_message") else str(error)
            raise ConfigError(f"{where}: fidelab {shlex.join(map(str, stage.command or ()))}: {said}") from None
