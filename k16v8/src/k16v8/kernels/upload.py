"""Copy numbers that the host knows to the device, in one asynchronous copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNED = 4  # numbers: 16 bytes, at which libraries may read several at once


def upload(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Return each list as an int32 tensor on ``device``.

    To a GPU they go through pinned memory, all in one asynchronous copy; torch keeps that memory until the copy is
    done.  The tensors share memory and begin at multiples of 16 bytes.
    """
    packed: list[int] = []
    starts = []
    for numbers in lists:
        packed += [0] * (-len(packed) % _ALIGNED)
        starts.append(len(packed))
        packed += numbers
    on_gpu = device.type == "cuda"
    held = torch.tensor(packed, dtype=torch.int32, pin_memory=on_gpu)
    if on_gpu:
        held = held.to(device, non_blocking=True)
    return [held[start : start + len(numbers)] for start, numbers in zip(starts, lists, strict=True)]
