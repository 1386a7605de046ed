"""What tests of formats share: a format by its name, and tensors that are the same every time."""

from __future__ import annotations

import torch
from torch import Tensor

from fidelab.core import KVSpec
from fidelab.formats import create
from fidelab.formats.base import Format


def make(text: str) -> Format:
    """The format that keys have in a cache of this name."""
    return create(KVSpec.parse(text).k)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
