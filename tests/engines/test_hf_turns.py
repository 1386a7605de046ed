"""One process of engine ``hf`` answers for several formats in turn, as on a GPU, and keeps the model."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fidelab.captures.requests import Prefill
from fidelab.engines.hf import model as hf_model
from fidelab.engines.hf.adapter import HFEngine
from fidelab.engines.hf.loading import turn_key
from tests.engines import tiny
from tests.engines.test_hf_shared_load import compare as forked
from tests.engines.tiny import Answers, arm, opened

pytestmark = pytest.mark.processes

# A format that ends the process, or the memory that it may have, when it is the second one there.
FAULT = """
from fidelab.core import FormatSpec
from fidelab.engines.hf import model
from fidelab.formats import create as built_in
import gc, os, torch

def create(spec):
    base = built_in(FormatSpec("f32"))
    class Faulty(type(base)):
        def encode(self, x, scale=None):
            if WHEN:
                FAULT
            return super().encode(x, scale)
    object.__setattr__(base, '__class__', Faulty)
    return base
"""


def planted(when: str, fault: str) -> str:
    return FAULT.replace("WHEN", when).replace("FAULT", fault)


# This process looks at the plan alone, and its own models are left as they are.
VANDAL = planted(
    f"os.getpid() != {os.getpid()}",
    "[x.weight.data.add_(1.0) for x in gc.get_objects() if type(x) is torch.nn.Embedding]",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.model("llama"), tmp_path_factory.mktemp("tiny"))


def compare(checkpoint: Path, cwd: Path, *words: str, plugin: str = "") -> dict[str, Any]:
    """``fidelab compare``; a processor stands for the GPU: what is forked there is answered in turn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFEngine, "shared_load", staticmethod(lambda arm: None))
        patch.setattr(HFEngine, "turn_load", staticmethod(turn_key))
        return forked(checkpoint, cwd, *words, plugin=plugin)


def events(cwd: Path, kind: str) -> list[dict[str, Any]]:
    [file] = (cwd / "runs").glob("2*/events.jsonl")
    return [event for event in map(json.loads, file.read_text().splitlines()) if event["event"] == kind]


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["status"] for one in report["candidates"]}


KVS = ("--kv", "q8_0", "--kv", "int4", "--no-floor")


def test_formats_in_turn_answer_as_those_with_processes_of_their_own(checkpoint: Path, tmp_path: Path) -> None:
    turn = compare(checkpoint, tmp_path / "turn", *KVS)
    own = forked(checkpoint, tmp_path / "own", *KVS)
    loaded = [one["ran"]["loaded"] for one in (turn["reference"], *turn["candidates"])]
    assert loaded == ["for this configuration", *["once for several configurations"] * 2]
    for one, other in zip(turn["candidates"], own["candidates"], strict=True):
        assert one["axes"] == other["axes"]
    assert not events(tmp_path / "turn", "alone")


def test_a_dry_run_counts_one_start_and_one_load_for_all_of_them(checkpoint: Path, tmp_path: Path) -> None:
    plan = compare(checkpoint, tmp_path, *KVS, "--dry-run")
    assert (plan["starts"], plan["loads"]) == (1, 1)
    own = compare(checkpoint, tmp_path, *KVS, "--candidate", "kv=q8_0,weights=int8", "--dry-run")
    assert (own["starts"], own["loads"]) == (2, 2)


def test_a_format_that_changes_the_weights_is_named_and_the_rest_loads_again(checkpoint: Path, tmp_path: Path) -> None:
    report = compare(checkpoint, tmp_path, "--kv", "q8_0", "--kv", "planted", *KVS[2:], plugin=VANDAL)
    assert statuses(report) == {"q8_0": "ok", "planted": "failed", "int4": "ok"}
    vandal = next(one for one in report["candidates"] if one["name"] == "planted")
    assert "planted changed the model's weights while it ran" in vandal["reason"]
    last = next(one for one in report["candidates"] if one["name"] == "int4")
    assert last["ran"]["loaded"] == "for this configuration"


def test_after_a_first_configuration_that_changes_the_weights_the_next_ones_load_again(
    checkpoint: Path, tmp_path: Path
) -> None:
    words = ("--kv", "q8_0", "--kv", "int4", "--no-floor", "--reference", "planted")
    report = compare(checkpoint, tmp_path, *words, plugin=VANDAL)
    assert report["reference"]["status"] == "failed"
    loaded = [one["ran"]["loaded"] for one in report["candidates"]]
    assert loaded == ["for this configuration", "once for several configurations"]
    assert not events(tmp_path, "alone")  # nothing was wrong with them


@pytest.mark.parametrize(
    "fault", ["os._exit(139)", "raise torch.OutOfMemoryError('out of memory')"], ids=["ends", "memory"]
)
def test_what_fails_in_turn_runs_once_more_alone_and_the_rest_loads_again(
    checkpoint: Path, tmp_path: Path, fault: str
) -> None:
    report = compare(checkpoint, tmp_path, "--kv", "planted", *KVS, plugin=planted("model._keeps", fault))
    assert statuses(report) == {"planted": "identical", "q8_0": "ok", "int4": "ok"}  # float32 once more
    assert [event["role"] for event in events(tmp_path, "alone")] == ["candidate:planted"]
    loaded = {one["name"]: one["ran"]["loaded"] for one in report["candidates"]}
    assert loaded["planted"] == loaded["q8_0"] == "for this configuration"
    assert loaded["int4"] == "once for several configurations"


def test_a_kept_model_is_left_as_it_was_loaded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_model, "_shared", {})
    monkeypatch.setattr(hf_model, "_keeps", True)
    request = Prefill("kld", (tuple(range(3, 23)),), 4, 18, ((0,) * 15,))
    first = opened(checkpoint, "q8_0")
    module, before = first._model.module, first._model.module.config._attn_implementation
    module.set_attn_implementation("eager")  # as k16v8's kernels are switched on
    first.close()
    second, sink = opened(checkpoint, "f32"), Answers()
    assert second._model.module is module
    assert module.config._attn_implementation == before
    assert len(second._model._lm_head._forward_pre_hooks) == 1
    sink.take(second.answer(request, sink))


def test_only_one_model_is_kept(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(hf_model, "_shared", {})
    monkeypatch.setattr(hf_model, "_keeps", True)
    opened(checkpoint, "f32")
    opened(checkpoint, "f32", "bfloat16")
    assert len(hf_model._shared) == 1


def test_arms_on_a_gpu_share_a_process_unless_they_change_weights_or_attention(checkpoint: Path) -> None:
    def key(kv: str, device: str = "cuda", **options: str) -> str | None:
        return HFEngine.turn_load(replace(arm(checkpoint, kv, **options), device=device))

    assert key("f32") == key("q8_0") is not None
    assert key("f32") != key("f32", "cuda:1")
    for own in ({"weights": "int8"}, {"device-map": "auto"}, {"attention": "k16v8"}, {"jitter": "1"}):
        assert key("f32", **own) is None
    assert key("int8[sinks=4]") is None
    assert HFEngine.turn_load(arm(checkpoint, "f32")) is None  # a fork shares it there
    assert turn_key(arm(checkpoint, "f32")) is not None
