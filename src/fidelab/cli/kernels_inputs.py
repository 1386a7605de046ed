"""Where ``fidelab kernels audit`` gets a model's q, k and v: from a file, or from the model itself."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fidelab.captures.container import Array

__all__ = ["captured_tensors", "read_tensors"]

_COMPUTE = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_LONGEST = 4096  # tokens of the window unless told: attention without kernels takes their square


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All q, k and v of a safetensors file.

    Raises:
        InputError: no such file, or no complete one.
    """
    from fidelab.captures.container import TensorFile
    from fidelab.errors import CaptureError, InputError

    if not path.is_file():
        raise InputError(f"--tensors {path}: no such file")
    try:
        file = TensorFile(path)
        arrays = {name: file.get(name) for name in file.names() if name.rpartition(".")[2] in ("q", "k", "v")}
    except (CaptureError, KeyError, ValueError) as error:
        raise InputError(f"--tensors {path}: no complete safetensors file of 16- or 32-bit floats") from error
    return _as_torch(arrays)


def captured_tensors(
    model: str, layers: Sequence[int], text: str, n_ctx: int | None, longest: int, dtype: str, device: str
) -> dict[str, Tensor]:
    """q, k and v of some layers (by default the first, the middle and the last) over one window of a text.

    Names are ``layer <number>.q`` and so on.  ``n_ctx``: tokens of the window; by default ``longest``, 4,096 at most,
    or as many as the model takes.  ``dtype``: bf16, f16 or f32.  Nothing is left on disk.

    Raises:
        FidelabError: the model, its layers or the text do not allow it; or the engine came to no answer.
    """
    from fidelab.cli.compare import experiment_from
    from fidelab.cli.progress import watcher
    from fidelab.errors import UsageError
    from fidelab.models import resolve
    from fidelab.runs.layer_diff import capture_qkv

    found = resolve(model)
    if not layers:
        if found.layers is None:
            raise UsageError(f"{model} does not say how many layers it has; name some with --layers")
        layers = sorted({0, found.layers // 2, found.layers - 1})
    tokens = n_ctx or min(longest, _LONGEST, found.max_positions or _LONGEST)
    with tempfile.TemporaryDirectory() as scratch:
        data = {
            "model": model,
            "reference": {"kv": dtype},  # nothing on the way is rounded
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
        arrays = capture_qkv(experiment_from(data, "audit"), layers, listener=watcher())
        tensors = _as_torch(arrays)
    digits = len(str(max(layers)))  # so that names sort as numbers do
    parts = {name: name.partition(".") for name in tensors}
    return {f"layer {parts[name][0]:0>{digits}}.{parts[name][2]}": x for name, x in tensors.items()}


def _as_torch(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    """Copies: the file behind them may go."""
    import torch

    from fidelab.captures.container import BFloat16

    return {
        name: torch.from_numpy(array.bits.copy()).view(torch.bfloat16)
        if isinstance(array, BFloat16)
        else torch.from_numpy(array.copy())
        for name, array in arrays.items()
    }
