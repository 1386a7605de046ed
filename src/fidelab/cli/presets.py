"""``fidelab presets``: arms by name."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli import options
from fidelab.cli.commands import Commands
from fidelab.cli.launch import Name, PresetOptions, faults_of, show_findings
from fidelab.cli.output import exit_on, note, open_console

if TYPE_CHECKING:
    from fidelab.config.schema import Preset
    from fidelab.environments.servers import Served

_LOG = "; --log names what it printed"

app = Commands(help="List, show and check presets: arms by name, for compare, bench and launch.")


@app.command("list")
def list_presets(as_json: options.Json = False) -> None:
    """The presets that come with fidelab, and your own (~/.config/fidelab/presets)."""
    from fidelab.config.presets import listing, load_preset, own_folder
    from fidelab.core.errors import ConfigError

    rows, broken = [], []
    for found in listing().values():
        try:
            preset = load_preset(found)
        except ConfigError as error:
            broken.append(str(error))
            continue
        kv = preset.kv.label if preset.kv else "native"
        whose = "yours" if found.path.parent == own_folder() else ""
        fields = (found.name, preset.engine_name, preset.model, kv, preset.about, whose)
        rows.append(dict(zip(("name", "engine", "model", "kv", "about", "whose"), fields, strict=True)))
    if as_json:
        print(json.dumps({"presets": rows, "broken": broken}, indent=2))
    else:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD)
        for heading in ("preset", "engine", "KV", "what"):
            table.add_column(heading, overflow="fold")
        for row in rows:
            what = f"{row['about'] or row['model']}{' (yours)' if row['whose'] else ''}"
            table.add_row(*map(Text, (row["name"], row["engine"], row["kv"], what)))
        open_console().print(table)
    for line in broken:
        note(f"fidelab: {line}")
    if broken:
        raise typer.Exit(1)


@app.command()
@options.expand_options
def show(*, name: Name, preset: PresetOptions, trusted: options.Trusted = None) -> None:
    """Print a preset as YAML, and the command of its engine's own server."""
    import shlex

    import yaml

    from fidelab.core.errors import FidelabError
    from fidelab.run.launch import arm_of, server_command

    chosen = preset.preset(name, trusted or [])
    written = chosen.model_dump(mode="json", exclude_defaults=True)
    print(yaml.safe_dump(written, sort_keys=False, allow_unicode=True), end="")
    try:
        arm = arm_of(chosen, device=preset.device, threads=preset.threads)
        print(f"# {server_command(arm, '127.0.0.1', 8000)}")
    except FidelabError as error:  # the preset itself is there to be read all the same
        print(f"# no command: {shlex.quote(str(error))}")


@app.command("check")
@options.expand_options
def check_preset(
    *,
    name: Name,
    preset: PresetOptions,
    base_url: Annotated[
        str | None,
        typer.Option(
            help="A running server, http://host:port. \\[default: the one of this preset that fidelab started]",
            show_default=False,
        ),
    ] = None,
    log: Annotated[Path | None, typer.Option(help="What that server printed, where you have it.")] = None,
    as_json: options.Json = False,
    trusted: options.Trusted = None,
) -> None:
    r"""Compare a running server's settings with a preset; without a server, ask the engine whether it can run it.

    The exit code is 1 where a setting differs, and 3 where a server does not tell the type of its cache.

    [bold]Examples[/bold]

      fidelab presets check smollm2-cpu

      fidelab presets check ./preset.yaml --base-url http://127.0.0.1:8000
    """
    from fidelab.core.errors import InputError
    from fidelab.engines.server_settings import KV
    from fidelab.environments.servers import records, written_log
    from fidelab.run.launch import arm_of, check, check_server

    chosen = preset.preset(name, trusted or [])
    arm = arm_of(chosen, device=preset.device, threads=preset.threads)
    if log is not None and not log.is_file():
        raise InputError(f"--log {log}: there is no such file")
    server = next((one for one in records() if _is_of(one, chosen)), None) if base_url is None else None
    if base_url is None and server is None:
        check(chosen, arm)
        print(json.dumps({"preset": arm.name, "findings": []}) if as_json else f"{arm.name} can run here; no server "
              f"of it runs: fidelab launch {name}")  # fmt: skip
        return
    url = base_url or (server.url if server else "")
    printed = written_log(str(log or (server.log if server else "")))
    found = check_server(arm, url, printed)
    faults = faults_of(found)
    untold = [] if found[0].effective is not None else [f"{KV}: the server does not tell it{'' if printed else _LOG}"]
    if as_json:
        print(json.dumps({"preset": arm.name, "url": url, "findings": [asdict(x) for x in found]}, indent=2))
    else:
        show_findings(found)
    exit_on(faults, untold)


def _is_of(server: Served, preset: Preset) -> bool:
    """Whether a running server was started from this preset, perhaps with other values."""
    return server.arm.get("name") == preset.name and server.arm.get("engine") == preset.engine_name
