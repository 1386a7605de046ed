"""Phases of opening: seconds between marks, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from fidelab.core import Arm, KVSpec
from fidelab.engines import base
from fidelab.engines.fake import FakeEngine
from fidelab.engines.llamacpp.adapter import LlamaCppEngine
from tests.engines import tiny
from tests.engines.conftest import Checkpoint
from tests.models.tiny_gguf import write_gguf


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(base, "time", made)
    return made


def test_a_phase_lasts_from_the_last_mark_to_its_own(clock: Clock) -> None:
    engine = FakeEngine()
    for phase, seconds in (("import", 2.0), ("weights", 3.0), ("warm-up", 4.0), ("weights", 5.0)):
        clock.now += seconds
        engine.mark(phase)
    assert engine.phases == {"import": 2.0, "weights": 8.0, "warm-up": 4.0}


def test_seconds_that_an_engine_itself_told_go_to_their_phases(clock: Clock) -> None:
    engine = FakeEngine()
    clock.now += 1.0
    engine.mark("import")
    clock.now += 10.0
    engine.mark("warm-up", **{"import": 6.0, "weights": 3.0})
    assert list(engine.phases.items()) == [("import", 7.0), ("weights", 3.0), ("warm-up", 1.0)]


def test_no_phase_is_negative_where_an_engine_tells_more_than_there_was(clock: Clock) -> None:
    engine = FakeEngine()
    clock.now += 1.0
    engine.mark("warm-up", weights=2.0)
    assert engine.phases == {"weights": 2.0, "warm-up": 0.0}


def test_hf_tells_import_and_weights_apart(checkpoint: Checkpoint) -> None:
    engine = tiny.opened(checkpoint("llama"))
    assert list(engine.phases) == ["import", "weights"]
    assert all(seconds > 0 for seconds in engine.phases.values())


@pytest.mark.llamacpp
def test_llama_cpp_tells_import_and_weights_apart(tmp_path: Path) -> None:
    engine, file = LlamaCppEngine(), write_gguf(tmp_path / "tiny.gguf")
    engine.open(Arm("f16", "llamacpp", "tiny", str(file), "0" * 8, KVSpec.parse("f16"), "bfloat16", "cpu", 1))
    assert list(engine.phases) == ["import", "weights"]
