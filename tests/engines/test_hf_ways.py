"""Engine ``hf`` answers windows in every way of serving, and axis ``paths`` names faults that are planted in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fidelab.captures.requests import WAYS, Served
from fidelab.core.errors import NotSupportedError
from fidelab.engines.hf.adapter import HFEngine
from fidelab.engines.hf.cache import EncodedCache
from fidelab.models.tiny import make_tiny
from tests.engines import tiny
from tests.engines.tiny import Answers, hidden, opened
from tests.run.harness import Done, cli

Checkpoint = Callable[..., Path]

WINDOWS = (tuple(tiny.tokens(48)), tuple(reversed(tiny.tokens(48))))
OTHERS = tuple(tuple(tiny.tokens(n)) for n in (5, 11, 3))
COLD = Served("paths.cold", WINDOWS, 0, 46, "cold")
ASKED = {
    "chunked": replace(COLD, way="chunked", size=16),
    "decode": replace(COLD, way="decode", size=8, first=8),
    "prefix": replace(COLD, way="prefix", size=32, first=32),
    "prefix-partial": replace(COLD, way="prefix-partial", size=21, first=21),
    "prefix-other": replace(COLD, way="prefix-other", size=32, first=32, others=OTHERS[:1]),
    "prefix-generated": replace(COLD, way="prefix-generated", size=32, first=32),
    "batch": replace(COLD, way="batch", others=OTHERS),
    "evicted": replace(COLD, way="evicted", others=OTHERS),
}
COUNTS = {  # of the window that shows least
    "chunked": {"forwards": 3, "largest forward": 16},
    "decode": {"forwards": 41, "largest forward": 8, "sequences": 2},
    "prefix": {"forwards": 1, "largest forward": 16, "hit tokens": 32},
    "prefix-partial": {"forwards": 1, "largest forward": 27, "hit tokens": 21},
    "prefix-other": {"forwards": 1, "largest forward": 16, "hit tokens": 32},
    "prefix-generated": {"forwards": 1, "largest forward": 16, "hit tokens": 32},
    "batch": {"forwards": 1, "largest forward": 48, "sequences": 4},
    "evicted": {"forwards": 1, "largest forward": 48, "tokens lost": 48},
}


def test_every_way_of_the_contract_is_answered() -> None:
    assert {"cold", *ASKED} == WAYS.keys() == HFEngine.ways


@pytest.mark.parametrize(("kind", "options"), [("llama", {}), ("llama", {"attention": "k16v8"}), ("mistral", {})])
def test_all_ways_give_the_states_of_a_cold_prefill_and_counts_that_prove_them(
    kind: str, options: dict[str, str], checkpoint: Checkpoint
) -> None:
    engine = opened(checkpoint(kind), **options)
    cold = Answers()
    assert engine.answer(COLD, cold).facts["engaged"] == {"forwards": 1, "largest forward": 48}
    for way, request in ASKED.items():
        answers = Answers()
        assert engine.answer(request, answers).facts["engaged"] == COUNTS[way], way
        for item in range(len(WINDOWS)):
            own, plain = hidden(answers.items[item]), hidden(cold.items[item])[request.first :]
            assert torch.allclose(own, plain, atol=2e-5, rtol=2e-4), way


def test_a_model_with_a_recurrent_state_keeps_the_state_at_the_prefixs_end_and_takes_no_batch(
    checkpoint: Checkpoint,
) -> None:
    kind = next(name for name, kind in tiny.KINDS.items() if kind.recurrent)
    engine = opened(checkpoint(kind))
    cold, after = Answers(), Answers()
    engine.answer(COLD, cold)
    assert engine.answer(ASKED["prefix-other"], after).facts["engaged"]["hit tokens"] == 32
    torch.testing.assert_close(hidden(after.items[0]), hidden(cold.items[0])[32:], atol=1e-4, rtol=1e-3)
    with pytest.raises(NotSupportedError, match="takes no padding"):
        engine.answer(ASKED["batch"], Answers())


def test_one_chunk_or_an_uncut_cache_is_not_engaged(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = opened(checkpoint("llama")).answer(replace(ASKED["chunked"], size=64), Answers()).facts
    assert "engaged" not in facts
    assert facts["not_engaged"] == "the window of 48 tokens was read at once, not in chunks of 64"
    monkeypatch.setattr(EncodedCache, "keep_first", lambda self, tokens: None)
    facts = opened(checkpoint("llama")).answer(ASKED["prefix"], Answers()).facts
    assert facts["not_engaged"] == "48 tokens were found in the prefix cache, not 32 (1 to a block)"


SHIM = """
import torch
from fidelab.engines.hf.cache import EncodedStore
from fidelab.engines.hf.model import HFModel

keep_first, positions = EncodedStore.keep_first, HFModel._positions

def kept(self, tokens):
    keep_first(self, tokens)
    if self.format.name == "int8":  # the last block is that of another request
        self.parts = tuple(torch.cat((x[:, :, :-16], x[:, :, :16]), dim=2) for x in self.parts)
    if self.format.name == "int7":
        codes, scales = self.parts
        self.parts = codes, 2 * scales

def placed(self, ids, cache, mask):
    at = positions(self, ids, cache, mask)
    within = mask is None and ids.shape[1] > 1 and cache.get_seq_length() % 16
    step = mask is None and ids.shape[1] == 1  # of a decode
    return at + 1 if {"q8_0": within, "fp8_e5m2": step}.get(self._arm.kv.k.name) else at

EncodedStore.keep_first, HFModel._positions = kept, placed
"""
SOUND = ("int4", "bf16", "fp8_e4m3")
FAULTS = {
    "int8": {"prefix": 128, "prefix-partial": 137, "prefix-other": 128, "prefix-generated": 128},
    "int7": {"prefix": 128, "prefix-partial": 137, "prefix-other": 128, "prefix-generated": 128},
    "q8_0": {"prefix-partial": 137},
    "fp8_e5m2": {"decode": 16, "prefix-generated": 128},
}


@pytest.fixture(scope="module")
def shimmed(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run whose caches have faults, one for each of some formats."""
    room = tmp_path_factory.mktemp("shimmed")
    (room / "shim").mkdir()
    (room / "shim" / "sitecustomize.py").write_text(SHIM)
    formats = (word for kv in (*FAULTS, *SOUND) for word in ("--kv", kv))
    sizes = ("--set", "axes.paths.windows=2", "--set", "axes.paths.others=7")
    done = cli(
        *("compare", make_tiny(room / "tiny"), "--dtype", "float32", "--reference", "f32", "--control", "none"),
        *(*formats, "--axes", "paths", *sizes, "--no-floor", "--threads", 1, "--pythonpath", room / "shim"),
        cwd=room,
    )
    assert done.code == 0, done.err
    return done


def parted(done: Done, arm: str) -> dict[str, float]:
    """Way → the position from which on it parts."""
    metrics = [metric for metric in done.axis(arm, "paths").metrics if metric.name == "parts at"]
    return {str(metric.cell["way"]): metric.value for metric in metrics if metric.value is not None}


@pytest.mark.full
@pytest.mark.parametrize("kv", FAULTS)
def test_a_planted_fault_is_named_by_its_ways_and_first_position(kv: str, shimmed: Done) -> None:
    assert parted(shimmed, kv) == FAULTS[kv]


@pytest.mark.full
@pytest.mark.parametrize("kv", SOUND)
def test_sound_arms_beside_faulty_ones_raise_no_alarm(kv: str, shimmed: Done) -> None:
    assert parted(shimmed, kv) == {}
    assert shimmed.axis(kv, "paths").summary == "8 ways agree with a cold prefill"


@pytest.mark.full
def test_the_sentences_name_the_way_the_position_and_the_arms(shimmed: Done) -> None:
    assert "decoding parts from prefill at position 16, fp8_e5m2 only" in shimmed.out
    assert "prefill after a hit within a block parts from a cold one at position 137, " in shimmed.out
    assert "in the reference itself" not in shimmed.out
