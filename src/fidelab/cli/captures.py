"""``fidelab captures``: what lies in a folder of captures, and cleaning it up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fidelab.cli import options
from fidelab.cli.commands import Commands

app = Commands(help="List captures and clean them up.")
Store = Annotated[Path, typer.Option("--captures-dir", help="Folder of captures.")]


@app.command("list")
def list_captures(captures_dir: Store = Path("runs/captures")) -> None:
    """One line per capture: axis, arm, items, size, age."""
    from fidelab.captures.store import entries

    for entry in entries(captures_dir):
        print(f"{entry.size / 2**20:>9.1f} MiB  {entry.created or '–':<20}  {entry.title:<40}  {entry.folder}")


@app.command()
def gc(
    captures_dir: Store = Path("runs/captures"),
    older_than: Annotated[
        float | None, typer.Option(help="Also captures older than this many days.", show_default=False)
    ] = None,
    dry_run: options.WouldRemove = False,
) -> None:
    """Remove what killed writers left, damaged captures, and heads and vocabularies that nothing needs."""
    from fidelab.captures.store import collect_garbage

    removed = collect_garbage(captures_dir, older_than_days=older_than, dry_run=dry_run)
    for path, size in removed:
        print(f"{'would remove' if dry_run else 'removed'} {path} ({size / 2**20:.1f} MiB)")
    print(f"{sum(size for _, size in removed) / 2**20:.1f} MiB in {len(removed)} places")


@app.command()
def export(
    capture: Annotated[Path, typer.Argument(metavar="CAPTURE", help="A folder below captures, of axis kld.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
) -> None:
    """Write a capture as llama-perplexity reads one with --kl-divergence-base.

    llama-perplexity then compares any GGUF with it: llama-perplexity -m MODEL -c N_CTX --kl-divergence
    --kl-divergence-base FILE. The windows have to be those of the second half, from the text's start.

    [bold]Example[/bold]

      fidelab captures export runs/captures/f16/kld-1a2b-r0 f16.kld
    """
    from fidelab.imports.dump_folder import export_base

    export_base(capture, file)
