"""Checkpoints of the tiny models, saved once; and what an engine process may change in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.engines import tiny

Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The folder of one kind of model."""
    return cache(lambda kind: tiny.save(tiny.model(kind), tmp_path_factory.mktemp("models") / kind))


@pytest.fixture(autouse=True)
def _same_torch_afterwards() -> Iterator[None]:
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)
