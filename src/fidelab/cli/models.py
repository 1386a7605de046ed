"""``fidelab models``: embedded and fetched models."""

from __future__ import annotations

from typing import Annotated

import typer

from fidelab.cli import options
from fidelab.cli.commands import Commands

app = Commands(help="List, fetch, locate and clean up models.")
Name = Annotated[str, typer.Argument(help="smollm2-135m, a hub id with optional @revision, or a .gguf file.")]


@app.command("list")
def list_models() -> None:
    """The embedded models, and what was made from GGUF files."""
    from fidelab.models import listing

    for entry in listing():
        state = "not fetched yet (fidelab models pull)"
        if entry.present:
            state = " ".join(filter(None, (f"{entry.size / 2**20:,.1f} MiB", entry.what, f"in {entry.path}")))
        gone = entry.origin is not None and not entry.origin.exists()
        print(f"{entry.name:<20} {state}{'; its GGUF file is gone (fidelab models gc)' if gone else ''}")


@app.command()
def gc(
    older_than: Annotated[
        float | None,
        typer.Option(
            help="Also converted weights older than this many days (0: all); an engine that needs them again "
            "has them made again.",
            show_default=False,
        ),
    ] = None,
    dry_run: options.WouldRemove = False,
) -> None:
    """Remove what killed conversions left, and what was made from GGUF files that are gone; never a GGUF file."""
    from fidelab.models import collect_garbage

    removed = collect_garbage(older_than_days=older_than, dry_run=dry_run)
    for path, size in removed:
        print(f"{'would remove' if dry_run else 'removed'} {path} ({size / 2**20:.1f} MiB)")
    print(f"{sum(size for _, size in removed) / 2**20:.1f} MiB in {len(removed)} places")


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


@app.command()
def make_fragile(
    name: Name,
    out: options.NewFolder,
    pairs: Annotated[int, typer.Option(help="RoPE pairs of every head of K that become outliers.")] = 2,
    factor: Annotated[int, typer.Option(help="What their rows are multiplied by: a power of two.")] = 4096,
) -> None:
    """Write a copy that computes the same, with keys that FP8 without scales cannot hold.

    Rows of K are multiplied by the factor and those of Q divided by it, which changes no score of attention. The copy
    shows what a KV format does to a model with outliers in K.
    """
    from fidelab.checkpoints.fragile import make_fragile as write
    from fidelab.models import path as locate

    made = write(locate(name), out, pairs=pairs, factor=factor)
    channels = ", ".join(map(str, made.channels))
    print(f"{made.folder}: channels {channels} of every head of K times {factor} in {made.layers} layers, of Q divided")
