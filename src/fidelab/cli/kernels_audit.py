"""``fidelab kernels audit --model``: a model's own q, k and v for ``k16v8 audit``, which takes them from a file."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fidelab.core.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

_COMPUTE = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_LONGEST = 4096  # tokens of the window unless told: attention without kernels takes their square
_FEWEST = 8  # tokens of a window
_INSTEAD = {  # flags of the audit that name another source of q, k and v
    "--tensors": "--model and --tensors both say where q, k and v come from; give one of them",
    "--head-dim": "--head-dim is for random inputs: leave it out, or --model",
    "--seed": "--seed is for random inputs: leave it out, or --model",
    "--self-test": "--self-test has implementations and inputs of its own; leave the others out",
}


@contextmanager
def with_tensors(words: Sequence[str]) -> Iterator[list[str]]:
    """The words of an audit, with ``--model`` and its flags replaced by a file of captured tensors.

    The file is there for as long as the context is.

    Raises:
        FidelabError: the flags, the model, its layers or the text do not allow it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--model", "--layers", "--text", "--n-ctx"):
        parser.add_argument(flag)
    shared = {"--lengths": "128,1024,4096,16384", "--dtype": "bf16", "--device": "cpu"}  # as the audit's own
    for flag, default in shared.items():
        parser.add_argument(flag, default=default)
    try:
        options, others = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    if options.model is None:
        own = {"--layers": options.layers, "--text": options.text, "--n-ctx": options.n_ctx}
        if lost := [flag for flag, value in own.items() if value is not None]:
            raise UsageError(f"{lost[0]} is for q, k and v of a model: name one with --model")
        yield list(words)
        return
    for word in others:
        if (flag := word.partition("=")[0]) in _INSTEAD:
            raise UsageError(_INSTEAD[flag])
    if options.dtype not in _COMPUTE:
        raise UnknownNameError("type", options.dtype, _COMPUTE)
    layers = () if options.layers is None else _numbers("--layers", options.layers)
    lengths = _numbers("--lengths", options.lengths)
    n_ctx = None if options.n_ctx is None else _numbers("--n-ctx", options.n_ctx)[0]
    if n_ctx is not None and n_ctx < _FEWEST:
        raise UsageError(f"--n-ctx {n_ctx}: a window has {_FEWEST} tokens or more")
    tensors = captured_tensors(
        options.model, layers, options.text or "default", n_ctx, max(lengths), options.dtype, options.device
    )
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "qkv.safetensors"
        save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata={"model": options.model})
        passed = [word for flag in shared for word in (flag, getattr(options, flag.removeprefix("--")))]
        yield [*others, *passed, "--tensors", str(path)]


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise UsageError(f"{flag} {text!r}: write numbers, separated by commas")
    return tuple(map(int, text.split(",")))


def captured_tensors(
    model: str, layers: Sequence[int], text: str, n_ctx: int | None, longest: int, dtype: str, device: str
) -> dict[str, Tensor]:
    """q, k and v of some layers (by default the first, the middle and the last) over one window of a text.

    Names are ``layer <number>.q`` and so on.  ``n_ctx``: tokens of the window; by default ``longest``, 4,096 at most,
    or as many as the model takes.  ``dtype``: bf16, f16 or f32.  Nothing is left on disk.

    Raises:
        FidelabError: the model, its layers or the text do not allow it; or the engine came to no answer.
    """
    import torch

    from fidelab.captures.container import BFloat16
    from fidelab.cli.compare import experiment_from
    from fidelab.cli.progress import watcher
    from fidelab.models import resolve
    from fidelab.studies.layers import capture_qkv

    resolved = resolve(model)
    if not layers:
        if resolved.layers is None:
            raise UsageError(f"{model} does not say how many layers it has; name some with --layers")
        layers = sorted({0, resolved.layers // 2, resolved.layers - 1})
    tokens = n_ctx or min(longest, _LONGEST, resolved.max_positions or _LONGEST)
    with tempfile.TemporaryDirectory() as scratch:
        data = {
            "model": model,
            "reference": {"kv": dtype},  # the same type throughout: nothing is rounded
            "control": "none",
            "candidates": [{"kv": dtype}],
            "axes": {"kld": {"windows": 1, "n_ctx": tokens, "protocol": "full"}},
            "text": text,
            "floor": 0.0,
            "twins": 0.0,
            "dtype": _COMPUTE[dtype],
            "device": device,
            "output_dir": scratch,
        }
        digits = len(str(max(layers)))  # so that names sort as numbers do
        tensors = {}
        for name, array in capture_qkv(experiment_from(data, "audit"), layers, listener=watcher()).items():
            layer, _, part = name.partition(".")
            if isinstance(array, BFloat16):  # copied, since the mapped file is removed
                tensor = torch.from_numpy(array.bits.copy()).view(torch.bfloat16)
            else:
                tensor = torch.from_numpy(array.copy())
            tensors[f"layer {layer:0>{digits}}.{part}"] = tensor
    return tensors
