"""``fidelab convert``: quantized weights in another layout, with a certificate that none has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fidelab.cli import options


def convert(
    source: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id or embedded model.")],
    target: Annotated[Path, typer.Argument(help="Folder to be made.")],
    to: Annotated[
        str,
        typer.Option("--to", help="awq, gptq, compressed-tensors, safetensors (dense) or gguf.", show_default=False),
    ],
    lossy: Annotated[
        bool,
        typer.Option("--lossy", help="Round weights that the target cannot hold, and report the added error."),
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(help="Type of scales, norms and other 16-bit tensors: keep, float16, bfloat16 or float32."),
    ] = "keep",
    as_json: options.Json = False,
) -> None:
    """Write a quantized checkpoint in another layout without changing a weight.

    Codes, scales and zero points are rearranged, never computed anew. What the target cannot hold is refused unless
    --lossy is given. Both checkpoints are then read again, dequantized and compared tensor by tensor: the result is
    printed, and kept in certificate.json beside the weights.

    [bold]Examples[/bold]

      fidelab convert ./model-gptq ./model-awq --to awq

      fidelab convert ./model-awq ./model-dense --to safetensors
    """
    from fidelab.checkpoints.convert import CERTIFICATE
    from fidelab.checkpoints.convert import convert as write
    from fidelab.cli.output import note, waiting

    with waiting(f"converting {source}"):
        certificate = write(source, target, to, lossy=lossy, dtype=dtype)
    if as_json:
        print(json.dumps(certificate.record(), indent=1))
        return
    print(certificate.line())
    for text in certificate.notes:
        note(f"fidelab: {text}")
    note(f"fidelab: {target} written; every tensor is in {target / CERTIFICATE}")
