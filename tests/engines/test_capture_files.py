"""The head of a model over several ranks, each of which writes its own rows."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fidelab.captures.container import to_float32
from fidelab.core.errors import EngineError
from fidelab.engines import capture_files
from fidelab.engines.capture_files import CaptureWriter, read_head

VOCABULARY, PADDED, WIDTH, RANKS = 7, 8, 3, 2


def shards() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, PADDED // RANKS) for _ in range(RANKS)]


def written(folder: Path, rank: int, head: nn.Module) -> dict[str, Any]:
    return CaptureWriter(folder, lambda: rank == 0, logprobs=False).head(rank, head)


def test_the_head_is_that_of_all_ranks_without_padding(tmp_path: Path) -> None:
    parts = shards()
    about = [written(tmp_path, rank, part) for rank, part in enumerate(parts)]
    found = read_head(tmp_path, about, VOCABULARY)
    np.testing.assert_array_equal(
        to_float32(found["weight"]), torch.cat([part.weight for part in parts])[:VOCABULARY].detach().numpy()
    )
    np.testing.assert_array_equal(
        to_float32(found["bias"]), torch.cat([part.bias for part in parts])[:VOCABULARY].detach().numpy()
    )
    assert [*tmp_path.iterdir()] == []


def test_a_rank_that_writes_after_the_first_has_answered_is_waited_for(tmp_path: Path) -> None:
    parts = shards()
    about = written(tmp_path, 0, parts[0])
    weight = tmp_path / "head-1.weight"

    def late() -> None:
        time.sleep(0.2)
        weight.write_bytes(b"\0" * 4)  # a file that is there, and not yet whole
        time.sleep(0.2)
        written(tmp_path, 1, parts[1])

    writer = threading.Thread(target=late)
    writer.start()
    try:
        found = read_head(tmp_path, [about] * RANKS, VOCABULARY)
    finally:
        writer.join()
    np.testing.assert_array_equal(to_float32(found["weight"])[PADDED // RANKS], parts[1].weight[0].detach().numpy())


def test_a_rank_that_writes_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_files, "_HEAD_SECONDS", 0.1)
    about = written(tmp_path, 0, shards()[0])
    with pytest.raises(EngineError, match="rank 1 of 2 wrote no head"):
        read_head(tmp_path, [about] * RANKS, VOCABULARY)
