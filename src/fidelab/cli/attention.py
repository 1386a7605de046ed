"""``fidelab diagnose attention``: run ``k16v8 audit`` on a model's own q, k and v."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli import options
from fidelab.cli.axes import counts
from fidelab.core.errors import UnknownNameError, UsageError
from fidelab.core.scratch import scratch

if TYPE_CHECKING:
    from torch import Tensor

_COMPUTE = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_DEFAULT_TOKENS = 4096  # default tokens of the window: plain attention needs memory for their square


def attention(
    model: options.FloatModel,
    layers: Annotated[
        str | None, typer.Option(metavar="N[,N…]", help="Layers. \\[default: the first, the middle and the last]")
    ] = None,
    implementation: Annotated[
        str | None,
        typer.Option(help="Names of k16v8 audit or module:function, comma-separated. \\[default: all but eager]"),
    ] = None,
    text: Annotated[
        str, typer.Option(help="Text: 'default', 'domains', 'agents', 'wikitext-2', or a UTF-8 file.")
    ] = "default",
    n_ctx: Annotated[
        int | None, typer.Option(min=8, help="Tokens per window. \\[default: the largest length, up to 4096]")
    ] = None,
    lengths: Annotated[str, typer.Option(metavar="N[,N…]", help="KV lengths.")] = "128,1024,4096,16384",
    dtype: Annotated[str, typer.Option(help="Type of q, k and v: bf16, f16 or f32.")] = "bf16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: options.Json = False,
) -> None:
    """Measure the error of attention implementations against float64 on a model's q, k and v.

    Needs the package k16v8. Without a model, use its command: k16v8 audit. Exit code 1 means that an error exceeds its
    tolerance.

    [bold]Example[/bold]

      fidelab diagnose attention smollm2-135m --lengths 128,1024
    """
    from safetensors.torch import save_file

    from fidelab.engines.k16v8 import missing, run_command

    if lacking := missing():
        raise UsageError(f"fidelab diagnose attention {lacking}")
    if dtype not in _COMPUTE:
        raise UnknownNameError("type", dtype, _COMPUTE)
    chosen = () if layers is None else counts("--layers", layers, least=0)
    longest = max(counts("--lengths", lengths))
    tensors = captured_tensors(model, chosen, text, n_ctx, longest, dtype, device)
    words = ["audit", "--lengths", lengths, "--dtype", dtype, "--device", device]
    words += [] if implementation is None else ["--implementation", implementation]
    with scratch("attention") as room:
        path = room / "qkv.safetensors"
        save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata={"model": model})
        raise typer.Exit(run_command([*words, *(["--json"] if as_json else []), "--tensors", str(path)]))


def captured_tensors(
    model: str, layers: Sequence[int], text: str, n_ctx: int | None, longest: int, dtype: str, device: str
) -> dict[str, Tensor]:
    """Return q, k and v of some layers over one window of a text.

    By default the layers are the first, the middle and the last.  Names are ``layer <number>.q`` and so on.  ``n_ctx``:
    tokens of the window; by default ``longest``, limited to 4,096 and to the model's positions.  ``dtype``: bf16, f16
    or f32.  No files are left.

    Raises:
        FidelabError: If the model, its layers or the text do not allow it, or the engine gave no answer.
    """
    import torch

    from fidelab.captures.container import BFloat16
    from fidelab.cli.compare import study_experiment
    from fidelab.cli.progress import watcher
    from fidelab.models import resolve
    from fidelab.studies.layers import capture_qkv

    resolved = resolve(model)
    if not layers:
        if resolved.layers is None:
            raise UsageError(f"{model} does not say how many layers it has; name some with --layers")
        layers = sorted({0, resolved.layers // 2, resolved.layers - 1})
    tokens = n_ctx or min(longest, _DEFAULT_TOKENS, resolved.max_positions or _DEFAULT_TOKENS)
    with scratch("attention") as room:
        same = {"kv": dtype}  # of both arms: nothing is rounded
        settings = {"reference": same, "candidates": [same], "text": text, "dtype": _COMPUTE[dtype], "device": device}
        kld = {"windows": 1, "n_ctx": tokens, "protocol": "full"}
        experiment = study_experiment("attention", model, kld, settings, {"output_dir": str(room)})
        digits = len(str(max(layers)))  # pads numbers, so that names sort in their order
        tensors = {}
        for name, array in capture_qkv(experiment, layers, listener=watcher()).items():
            layer, _, part = name.partition(".")
            if isinstance(array, BFloat16):  # copied, since the mapped file is removed
                tensor = torch.from_numpy(array.bits.copy()).view(torch.bfloat16)
            else:
                tensor = torch.from_numpy(array.copy())
            tensors[f"layer {layer:0>{digits}}.{part}"] = tensor
    return tensors
