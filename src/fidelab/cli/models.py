"""``fidelab models``: embedded and fetched models."""

from __future__ import annotations

from typing import Annotated

import typer

from fidelab.cli.commands import Commands

__all__ = ["app"]

app = Commands(help="List, fetch and locate models.")
Name = Annotated[str, typer.Argument(help="smollm2-135m, a hub id with optional @revision, or a .gguf file.")]


@app.command("list")
def list_models() -> None:
    """The embedded models, and whether they are here."""
    from fidelab.models import listing

    for entry in listing():
        state = (
            f"{entry.size / 2**20:,.0f} MiB in {entry.path}"
            if entry.present
            else "not fetched yet (fidelab models pull)"
        )
        print(f"{entry.name:<20} {state}")


@app.command()
def pull(name: Name) -> None:
    """Fetch a model, so that later runs need no network."""
    from fidelab.models import pull as fetch

    model = fetch(name)
    print(f"{model.name}: {model.parameters / 1e6:,.0f} M parameters in {model.path}")


@app.command()
def path(name: Name, form: Annotated[str, typer.Option(help="hf (safetensors folder) or gguf.")] = "hf") -> None:
    """Print where a model lies, fetching it if need be."""
    from fidelab.models import path as locate

    print(locate(name, form))
