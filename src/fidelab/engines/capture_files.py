"""Files that the captures inside vLLM's workers and SGLang's schedulers write, and that the adapters read and remove.

The captures run in processes of the engine.  ``KEY.rows`` holds the rows of a request one after another, in the type of
the states or as float16 log-probabilities.  ``KEY.live`` holds live logits (float32 [n, V]), ``KEY.nan`` the index of
the first generated token whose logits held NaN, ``KEY.states`` the residual stream ([1 + layers, n, d]).
``head-RANK.weight`` and ``head-RANK.bias`` are a rank's rows of the head, ``head-RANK.done`` says that they are whole:
the first rank of SGLang answers while others may still write.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.container import Array, BFloat16
from fidelab.core.errors import EngineError
from fidelab.engines.base import dtype_name, raw_bytes

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 256  # rows of log-probabilities at a time
_HEAD_SECONDS = 120.0  # a head of some GB is written in seconds; a rank on a busy machine may be late by more
_POLL_SECONDS = 0.02
_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


class CaptureWriter:
    """Writes the files of one process.

    Args:
        folder: the capture folder.
        writes: whether this rank writes; under tensor parallelism all ranks hold the same states.
        logprobs: whether rows are log-probabilities instead of states.
    """

    def __init__(self, folder: Path, writes: Callable[[], bool], *, logprobs: bool) -> None:
        self._folder, self._writes, self._logprobs = folder, writes, logprobs
        self._next: dict[str, int] = {}  # key → position whose row comes next
        self._parts: dict[str, list[Tensor]] = {}  # key → states, by forward

    def begin(self, key: str) -> None:
        """Forget an earlier request of this key."""
        self._next.pop(key, None)
        self._parts.pop(key, None)

    def fresh(
        self,
        key: str,
        start: int,
        states: Tensor,
        first: int,
        last: int | None = None,
        picked: Sequence[int] | None = None,
    ) -> tuple[int, Tensor]:
        """Return the rows from ``first`` to ``last`` among states from position ``start`` on, and their first position.

        ``picked``: only these positions, rising; the number of the first row among them then takes the place of its
        position.  A preempted request computes rows again.  Rows that were returned before are left out.
        """
        if picked:
            begin = self._next.get(key, 0)
            end = bisect.bisect_left(picked, start + len(states))
            if begin >= end or picked[begin] < start:
                return begin, states[:0]
            self._next[key] = end
            return begin, states[[position - start for position in picked[begin:end]]]
        position = self._next.get(key, first)
        end = start + len(states) if last is None else min(start + len(states), last + 1)
        if not start <= position < end:
            return position, states[:0]
        self._next[key] = end
        return position, states[position - start : end - start]

    def rows(self, key: str, rows: Tensor, logits: Callable[[Tensor], Tensor | None]) -> None:
        """Append rows; ``logits``: the model's own for some states, ``None`` on ranks that do not get them."""
        if not self._logprobs:
            self.append(f"{key}.rows", rows)
            return
        for at in range(0, len(rows), _CHUNK):
            found = logits(rows[at : at + _CHUNK])
            self.append(f"{key}.rows", None if found is None else found.double().log_softmax(dim=-1).half())

    def append(self, name: str, tensor: Tensor | None) -> None:
        """Append the bytes of a tensor to a file."""
        if tensor is not None and len(tensor) and self._writes():
            with (self._folder / name).open("ab") as file:
                file.write(raw_bytes(tensor))

    def states(self, key: str, part: Tensor, *, complete: bool) -> None:
        """Keep a part of the residual stream ``[1 + layers, n, d]``; write all parts once they are complete."""
        import torch

        self._parts.setdefault(key, []).append(part)
        if complete:
            whole = torch.cat(self._parts.pop(key), dim=1)
            if self._writes():
                write_states(self._folder / f"{key}.states", whole)

    def nan(self, key: str, token: int) -> None:
        """Note the first generated token whose logits held NaN."""
        path = self._folder / f"{key}.nan"
        if self._writes() and not path.exists():
            path.write_text(str(token))

    def head(self, rank: int, head: Any, rows: int | None = None) -> dict[str, Any]:
        """Write the first ``rows`` rows of a rank's head; return its shape and type, or ``why`` there are none."""
        weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
        if weight is None or not weight.is_floating_point() or weight.ndim != 2 or weight.element_size() < 2:
            return {"why": f"the head is a {type(head).__name__} without a plain weight"}
        for part, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None:
                path = self._folder / f"head-{rank}.{part}"
                path.write_bytes(raw_bytes(tensor[:rows].to(weight.dtype)))
        (self._folder / f"head-{rank}.done").touch()
        return {"rows": len(weight[:rows]), "width": weight.shape[1], "dtype": dtype_name(weight.dtype)}


def typed(rows: NDArray[Any], dtype: str) -> Array:
    """Return rows as an array of a compute type; those of bfloat16, which numpy lacks, are bits."""
    return BFloat16(rows) if dtype == "bfloat16" else rows


def read_rows(path: Path, dtype: str, width: int) -> NDArray[Any] | None:
    """Read rows ``[n, width]``, of bfloat16 as bits, and remove the file; ``None`` if none were written."""
    if not path.exists():
        return None
    rows = np.fromfile(path, dtype=_NUMPY[dtype]).reshape(-1, width)
    path.unlink()
    return rows


def read_nan(path: Path) -> int | None:
    """Read the index that :meth:`CaptureWriter.nan` wrote, and remove the file; ``None`` without one."""
    if not path.exists():
        return None
    token = int(path.read_text())
    path.unlink()
    return token


def read_head(folder: Path, shards: Sequence[Mapping[str, Any]], vocabulary: int) -> dict[str, Array]:
    """Return the weight ``[V, d]`` and perhaps the bias ``[V]`` of all ranks' shards. The files are removed.

    Raises:
        EngineError: If a rank has not written its shard after a while.
    """
    until = time.monotonic() + _HEAD_SECONDS
    for rank in range(len(shards)):
        done = folder / f"head-{rank}.done"
        while not done.exists():
            if time.monotonic() > until:
                raise EngineError(f"rank {rank} of {len(shards)} wrote no head within {_HEAD_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        done.unlink()
    arrays: dict[str, Array] = {}
    dtype, width = shards[0]["dtype"], shards[0]["width"]
    for part, tail in (("weight", (width,)), ("bias", ())):
        paths = [folder / f"head-{rank}.{part}" for rank in range(len(shards))]
        if not paths[0].exists():
            continue
        parts = [
            np.memmap(path, dtype=_NUMPY[dtype], mode="c", shape=(shard["rows"], *tail))
            for path, shard in zip(paths, shards, strict=True)
        ]
        arrays[part] = typed((parts[0] if len(parts) == 1 else np.concatenate(parts))[:vocabulary], dtype)
        for path in paths:
            path.unlink()  # the mapping stays
    return arrays


def write_states(path: Path, states: Tensor) -> None:
    """Write one array as an ``.npy`` file. bfloat16, which numpy lacks, is written as its bits."""
    import torch

    bits = states.view(torch.int16) if states.dtype == torch.bfloat16 else states
    with path.open("wb") as file:
        np.save(file, bits.cpu().numpy())


def read_states(path: Path) -> Array:
    """Read the array that :func:`write_states` wrote, and remove the file."""
    with path.open("rb") as file:
        states = np.load(file)
    path.unlink()
    return BFloat16(states.view(np.uint16)) if states.dtype == np.int16 else states
