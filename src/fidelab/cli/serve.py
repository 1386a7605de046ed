"""``fidelab serve``: start, check and stop servers of presets; list presets by name."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import options
from fidelab.cli.commands import Commands
from fidelab.cli.output import exit_on, flush_output, note, open_console, say
from fidelab.core import shell_line
from fidelab.core.waiting import wait_for
from fidelab.engines import engine_name

if TYPE_CHECKING:
    from fidelab.config.schema import Preset
    from fidelab.engines.server_settings import Finding
    from fidelab.environments.launch import RunningServer

_LOG = "; --log names its output"

app = Commands(help="Start, check and stop servers from presets.")


Name = Annotated[str, typer.Argument(help="Preset name or file.")]


class PresetOptions(options.Options, panel="Preset"):
    """Options for a preset, with other values for some of its fields."""

    engine: Annotated[str | None, typer.Option(help="Engine, if NAME exists for several: NAME-vllm, …")] = None
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a value, e.g. kv=fp8_e4m3, or a server option with serve.KEY=VALUE. Repeatable.",
        ),
    ] = None
    python: options.Python = None
    pythonpath: options.PythonPath = None
    device: options.Device = "auto"
    threads: options.Threads = None

    def preset(self, name: str, trusted: Sequence[Path]) -> Preset:
        """Return the preset with these values.

        Raises:
            ConfigError: If the preset is invalid, or its file asks for an action that needs permission.
            UsageError: If a value is invalid.
        """
        from fidelab.config.arms import arm_fields
        from fidelab.config.load import read_yaml
        from fidelab.config.presets import find_preset, load_preset
        from fidelab.config.schema import merged_fields
        from fidelab.config.trust import Trust, check_trust
        from fidelab.core.errors import UsageError

        engine = None if self.engine is None else engine_name(self.engine)
        found = find_preset(name, engine)
        changes: dict[str, Any] = {}
        for text in self.changes or []:
            try:
                fields = arm_fields(text)
            except ValueError as error:
                raise UsageError(f"--set {text!r}: {error}") from None
            if "=" not in text or not {"preset", "engine"}.isdisjoint(fields):
                raise UsageError(f"--set {text!r}: write KEY=VALUE, and another engine by --engine")
            changes = merged_fields(changes, fields)
        # Changed options go where the preset has them: options of its server, and ``serve.KEY``, to the server
        own, to_server = load_preset(found), dict[str, Any]()
        options_left = dict(changes.get("engine_args", {}))
        for key in list(options_left):
            if key.startswith(options.SERVE) or key in own.serve:
                to_server[key.removeprefix(options.SERVE)] = options_left.pop(key)
        moved = {"engine_args": options_left, **({"serve": to_server} if to_server else {})}
        preset = load_preset(found, {**changes, **moved})
        if engine not in (None, preset.engine_name):
            raise UsageError(f"--engine {self.engine}: preset {preset.name} is of engine {preset.engine_name}")
        given = {"python": self.python, "pythonpath": self.pythonpath}
        place = {key: value for key, value in given.items() if value}
        if place:
            folders = {"pythonpath": tuple(place["pythonpath"])} if "pythonpath" in place else {}
            preset = preset.model_copy(update={"engine": preset.engine.model_copy(update={**place, **folders})})
        if not found.own:
            words = {(key, str(value)) for key, value in place.items() if isinstance(value, str)}
            words |= {("pythonpath", folder) for folder in self.pythonpath or []}
            words |= {(f"env.{key}", value) for key, value in changes.get("env", {}).items()}
            words |= {(key.removeprefix(options.SERVE), value) for key, value in changes.get("engine_args", {}).items()}
            check_trust(preset, read_yaml(found.path), found.path, Trust(trusted, words))
        return preset


@app.command()
@options.expand_options
def start(
    *,
    name: Name,
    preset: PresetOptions,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port. \\[default: a free one]", min=1)] = None,
    timeout: Annotated[
        float, typer.Option(help="Time limit for the start in seconds. A first start may compile.")
    ] = 1800.0,
    force: Annotated[bool, typer.Option("--force", help="Start even if a known engine bug applies.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command without starting.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Keep it running until fidelab serve stop.")] = False,
    as_json: options.Json = False,
    trusted: options.Trusted = None,
) -> None:
    r"""Start the server of a preset and check its settings.

    By default it listens on this machine only. Once it answers, its settings (KV type, context, attention backend, pool
    size, speculation and others in the preset) are compared with the preset. If they differ, it is stopped and the exit
    code is 1. Ctrl-C stops it.

    [bold]Examples[/bold]

      fidelab serve start smollm2-cpu

      fidelab serve start smollm2-cpu --engine vllm --set kv=fp8_e4m3 --detach

      fidelab serve start ./preset.yaml --port 8000 --dry-run
    """
    from fidelab.environments.launch import arm_of, check, check_servable, launch, plan
    from fidelab.environments.servers import died

    chosen = preset.preset(name, trusted or [])
    arm = arm_of(chosen, device=preset.device, threads=preset.threads)
    check_servable(chosen, arm)
    environment = None if dry_run or force else check(chosen, arm)
    planned = plan(chosen, arm, host, port, environment, dry_run=dry_run)
    if dry_run:
        about = {"preset": arm.name, "url": planned.url, "shown": planned.shown, "command": list(planned.command)}
        about |= {"missing": planned.missing} if planned.missing else {}
        here = f"not here: {planned.missing}" if planned.missing else f"here: {shlex.join(planned.command)}"
        print(json.dumps(about, indent=2) if as_json else f"{planned.shown}\n# {here}")
        return
    with launch(planned, timeout, note) as launched:
        faults = faults_of(launched.findings)
        if as_json:
            record = {
                "server": asdict(launched.server),
                "seconds": launched.seconds,
                "first_start": not launched.earlier,
                "findings": [asdict(one) for one in launched.findings],
                "differences": list(faults),
            }
            print(json.dumps(record, indent=2), flush=True)
        else:
            _show(launched, detach and not faults)
        if faults:
            note(f"fidelab: {arm.name} does not run as declared ({'; '.join(faults)}); it was ended")
            raise typer.Exit(1)
        if not detach:  # wait until the server ends, which is a fault
            note("Ctrl-C ends it")
            code = wait_for(launched.process)
            launched.server.forget()
            note(f"fidelab: {died(launched.server, code, note)}")
            raise typer.Exit(1)


@app.command()
def stop(
    name: Annotated[str | None, typer.Argument(help="Preset name of the server. \\[default: the only one]")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop all servers started by fidelab.")] = False,
) -> None:
    """Stop servers started by fidelab serve start."""
    from fidelab.core.errors import UnknownNameError, UsageError
    from fidelab.environments.servers import end, records

    running = records()
    if name is not None:
        running = [server for server in running if server.name == name]
        if not running:
            raise UnknownNameError("running server", name, [server.name for server in records()])
    elif len(running) > 1 and not everything:
        raise UsageError(f"several servers run: name one of {', '.join(s.name for s in running)}, or pass --all")
    for server in running:
        say(f"{server.name} {'ended' if end(server) else 'had ended before'} (process {server.pid}, {server.url})")
    if not running:
        say("no server runs that fidelab started")


@app.command("presets")
def list_presets(as_json: options.Json = False) -> None:
    """List bundled presets and your own (~/.config/fidelab/presets)."""
    from fidelab.config.presets import listing, load_preset, user_folder
    from fidelab.core.errors import ConfigError

    rows, broken = [], []
    for found in listing().values():
        try:
            preset = load_preset(found)
        except ConfigError as error:
            broken.append(str(error))
            continue
        kv = preset.kv.label if preset.kv else "native"
        whose = "yours" if found.path.parent == user_folder() else ""
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
    """Print a preset as YAML and its server command."""
    import yaml

    from fidelab.core.errors import FidelabError
    from fidelab.environments.launch import arm_of, server_command

    chosen = preset.preset(name, trusted or [])
    written = chosen.model_dump(mode="json", exclude_defaults=True)
    print(yaml.safe_dump(written, sort_keys=False, allow_unicode=True), end="")
    try:
        arm = arm_of(chosen, device=preset.device, threads=preset.threads)
        print(f"# {server_command(arm, '127.0.0.1', 8000)}")
    except FidelabError as error:  # the preset itself can still be read
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
            help="URL of a running server, http://host:port. \\[default: the one of this preset that fidelab started]"
        ),
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Log file of the server.")] = None,
    as_json: options.Json = False,
    trusted: options.Trusted = None,
) -> None:
    r"""Compare a running server's settings with a preset. Without a server, check whether the engine supports it.

    Exit code 1 means that a setting differs, 3 that the server does not report its KV cache type.

    [bold]Examples[/bold]

      fidelab serve check smollm2-cpu

      fidelab serve check ./preset.yaml --base-url http://127.0.0.1:8000
    """
    from fidelab.core.errors import InputError
    from fidelab.engines.server_settings import KV
    from fidelab.environments.launch import arm_of, check, check_server
    from fidelab.environments.servers import records, written_log

    chosen = preset.preset(name, trusted or [])
    arm = arm_of(chosen, device=preset.device, threads=preset.threads)
    if log is not None and not log.is_file():
        raise InputError(f"--log {log}: there is no such file")
    here = records() if base_url is None else []
    named = (chosen.name, chosen.engine_name)  # of a preset, perhaps started with other values
    server = next((one for one in here if (one.arm.get("name"), one.arm.get("engine")) == named), None)
    if base_url is None and server is None:
        check(chosen, arm)
        told = f"{arm.name} can run here; it has no running server: {shell_line('fidelab', 'serve', 'start', name)}"
        print(json.dumps({"preset": arm.name, "findings": []}) if as_json else told)
        return
    url = base_url or (server.url if server else "")
    printed = written_log(str(log or (server.log if server else "")))
    found = check_server(arm, url, printed)
    faults = faults_of(found)
    untold = [] if found[0].effective is not None else [f"{KV}: the server does not report it{'' if printed else _LOG}"]
    if as_json:
        print(json.dumps({"preset": arm.name, "url": url, "findings": [asdict(x) for x in found]}, indent=2))
    else:
        show_findings(found)
    exit_on(faults, untold)


# ------------------------------------------------------------------------------------------------------- output


def faults_of(found: Sequence[Finding]) -> list[str]:
    """Return the differences as text."""
    return [f"{one.what}: declared {one.declared or 'none'}, runs {one.effective}" for one in found if one.differs]


def show_findings(found: Sequence[Finding]) -> None:
    """Print declared and effective settings as a table."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "declared", "runs", ""):
        table.add_column(heading, overflow="fold")
    for one in found:
        more = "" if one.effective and one.more.replace(",", "").startswith(f"{one.effective} ") else one.more
        runs = ", ".join(filter(None, (one.effective, more))) or "not reported"
        mark = "differs" if one.differs else "" if one.declared is None or one.effective is None else "as declared"
        table.add_row(*map(Text, (one.what, one.declared or "–", runs, mark)))
    open_console().print(table)


def _show(launched: RunningServer, detached: bool) -> None:
    server = launched.server
    show_findings(launched.findings)
    which = "first start" if not launched.earlier else f"start {len(launched.earlier) + 1} of this command"
    say(f"{server.name} answers at {server.url}/v1 after {launched.seconds:.1f} s ({which}); log: {server.log}")
    if detached:
        stop = shell_line("fidelab", "serve", "stop", server.name)
        say(f"it still runs as process {server.pid}; end it with: {stop}")
    flush_output()
