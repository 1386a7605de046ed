"""``fidelab engines``: where the engines are, and environments for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import options
from fidelab.cli.commands import Commands
from fidelab.cli.output import note, open_console, waiting

if TYPE_CHECKING:
    from fidelab.environments.listing import Installed
    from fidelab.environments.recipes import Recipe

app = Commands(help="List, install and remove the engines' environments.")
Name = Annotated[str, typer.Argument(help="vllm, sglang, llamacpp, or llm-compressor (for fidelab quantize).")]


class _EnvironmentOptions(options.Options):
    """The environment of an engine."""

    cuda: Annotated[bool, typer.Option("--cuda", help="For NVIDIA GPUs.")] = False
    rocm: Annotated[bool, typer.Option("--rocm", help="For AMD GPUs.")] = False
    cpu: Annotated[bool, typer.Option("--cpu", help="For CPUs.")] = False
    path: Annotated[
        Path | None,
        typer.Option(help="The environment's folder. \\[default: in fidelab's cache]", show_default=False),
    ] = None

    def variant(self) -> str | None:
        """The processor that was named.

        Raises:
            UsageError: several were.
        """
        from fidelab.core.errors import UsageError

        chosen = [name for name in ("cuda", "rocm", "cpu") if getattr(self, name)]
        if len(chosen) > 1:
            raise UsageError(f"--{' and --'.join(chosen)} exclude each other")
        return chosen[0] if chosen else None


@app.command("list")
def list_engines(
    image: Annotated[
        str | None, typer.Option(help="List the engines in this container image instead.", show_default=False)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Every engine: where it is, its version and whether that is changed, its device, and how many KV formats run."""
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
            cells = [place.engine, place.name, f"{shown}{build}", _device(place), _formats(place)]
        else:
            cells = [place.engine, place.problem if place.environment is None else place.name, "", "", ""]
        table.add_row(*map(Text, cells))
    console = open_console()
    console.print(table)
    for place in places:
        if place.problem is not None:
            why = "" if place.environment is None else f"{place.problem}; "
            console.print(Text(f"{place.name}: {why}{place.remedy}"), soft_wrap=True)
        if place.update is not None:
            console.print(Text(f"{place.name}: installed from another recipe; {place.update}"), soft_wrap=True)
    if any(place.refused for place in places):
        console.print(Text("fidelab formats says which KV formats cannot run here, and why"))


@app.command("install")
@options.expand_options
def install_engine(
    *,
    name: Name,
    environment: _EnvironmentOptions,
    python: Annotated[
        str | None,
        typer.Option(help="The Python to make it with. \\[default: the one that runs fidelab]", show_default=False),
    ] = None,
    reinstall: Annotated[
        bool, typer.Option("--reinstall", help="Make it again in any case; the old one stays until the new one runs.")
    ] = False,
) -> None:
    """Make an environment for an engine, with the versions that fidelab is tested with, and try the engine out.

    Without --cuda, --rocm or --cpu it is for what this machine has.
    The trial prefills and decodes with the engine's native KV format. Where that does not run, nothing is installed.
    Other formats are tried when a run first asks for them, or all at once by fidelab doctor --trial.
    An environment that is there stays, unless its recipe has changed.

    [bold]Example[/bold]

      fidelab engines install vllm --cpu
    """
    from fidelab.cli.progress import watch_installation
    from fidelab.environments.environment import engines_dir, interpreter
    from fidelab.environments.install import install
    from fidelab.environments.recipes import machine_variant, recipe

    chosen = recipe(name, environment.variant() or machine_variant())
    maker = interpreter(python) if python else sys.executable
    folder = environment.path or engines_dir() / chosen.name
    with watch_installation() as shown:
        installed = install(chosen, folder, shown.say, python=maker, again=reinstall, watch=shown.begin)
    if environment.path is not None:
        note(f"runs use it with --python {installed.python}")
    print(installed.python)


@app.command("remove")
@options.expand_options
def remove_engine(*, name: Name, environment: _EnvironmentOptions) -> None:
    """Remove an environment that fidelab made."""
    from fidelab.environments.environment import engines_dir
    from fidelab.environments.install import remove
    from fidelab.environments.recipes import recipe

    path, variant = environment.path, environment.variant()
    if path is None:
        path = engines_dir() / (recipe(name, variant) if variant else _only(name)).name
    remove(path.expanduser().absolute())
    print(f"removed {path}")


def _only(engine: str) -> Recipe:
    """The recipe of the only installed environment of this engine; of this machine's variant where there is none.

    Raises:
        UsageError: several are installed.
    """
    from fidelab.core.errors import UsageError
    from fidelab.environments.environment import engines_dir
    from fidelab.environments.recipes import RECIPES, machine_variant, recipe

    recipes = [entry for entry in RECIPES.values() if entry.engine == engine and (engines_dir() / entry.name).exists()]
    if len(recipes) > 1:
        raise UsageError(f"there are several: {', '.join(f'--{entry.variant}' for entry in recipes)}; name one")
    return recipes[0] if recipes else recipe(engine, machine_variant())


def _device(place: Installed) -> str:
    return place.about.device.replace("hip", "rocm") if place.about else ""


def _formats(place: Installed) -> str:
    total = len(place.kv_names)
    return f"{total - len(place.refused)} of {total}" if place.refused else str(total or "")


def _record(place: Installed) -> dict[str, Any]:
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
