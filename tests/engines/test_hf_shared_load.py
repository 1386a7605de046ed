"""One load of a model for several configurations of engine ``hf``, and a format that changes the weights."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fidelab
from fidelab.core.errors import EngineError
from fidelab.engines.hf import model as hf_model
from fidelab.engines.hf.loading import load_key
from fidelab.engines.hf.structure import checksums
from fidelab.formats import FORMATS
from tests.engines import tiny
from tests.engines.tiny import Answers, arm, opened
from tests.run.harness import cli

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.model("llama"), tmp_path_factory.mktemp("tiny"))


def test_formats_of_one_model_share_a_load_and_other_weights_or_attention_do_not(checkpoint: Path) -> None:
    key = load_key(arm(checkpoint, "f32"))
    assert key is not None
    assert load_key(arm(checkpoint, "q8_0")) == key
    assert load_key(arm(checkpoint, "f32", "bfloat16")) != key
    assert load_key(arm(checkpoint, "f32", attention="eager")) != key
    assert load_key(arm(checkpoint, "f32", jitter="1")) == key  # flips bits of its own copy
    for own in ({"weights": "int8"}, {"device-map": "auto"}, {"attention": "k16v8"}):
        assert load_key(arm(checkpoint, "f32", **own)) is None
    assert load_key(arm(checkpoint, "int8[sinks=4]")) is None


def test_an_answer_of_a_shared_model_is_that_of_its_own_load(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fidelab.captures.requests import Prefill

    request = Prefill("kld", (tuple(range(3, 23)),), 4, 18, ((0,) * 15,))

    def states() -> tuple[torch.Tensor, bool]:
        engine, sink = opened(checkpoint, "q8_0"), Answers()
        sink.take(engine.answer(request, sink))
        return tiny.hidden(sink.items[0]), engine._model.shared

    alone, shared = states()
    assert not shared
    monkeypatch.setattr(hf_model, "_shared", {})
    hf_model.share(arm(checkpoint, "f32"))
    together, shared = states()
    assert shared
    assert torch.equal(alone, together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_any_single_bit_of_a_weight_changes_its_checksum(dtype: torch.dtype) -> None:
    module = torch.nn.Linear(7, 5, bias=False)
    module.weight = torch.nn.Parameter(torch.randn(5, 7).to(dtype), requires_grad=False)
    before = checksums(module)
    flat = module.weight.data.view(torch.uint8).reshape(-1)
    for place in range(0, len(flat), 3):
        flat[place] ^= 1 << (place % 8)
        assert checksums(module) != before
        flat[place] ^= 1 << (place % 8)
    assert checksums(module) == before


def test_an_answer_of_a_model_that_changed_is_refused(checkpoint: Path) -> None:
    from fidelab.captures.requests import Prefill

    engine, sink = opened(checkpoint, "q8_0"), Answers()
    name, weight = next(iter(engine._model.module.named_parameters()))
    weight.data[0, 0] += 1
    with pytest.raises(EngineError, match=f"q8_0 changed the model's weights while it ran: 1 of .* first {name}"):
        engine.answer(Prefill("kld", (tuple(range(3, 23)),), 4, 18, ((0,) * 15,)), sink)


FORMAT = '''
"""float32 as it is, and the first weight of the process' model a little larger with every call."""
from fidelab.engines.hf import model
from fidelab.formats import create as built_in
from fidelab.core import FormatSpec

def create(spec):
    base = built_in(FormatSpec("f32"))
    class Vandal(type(base)):
        def encode(self, x, scale=None):
            for loaded in model._shared.values():
                loaded.model.get_input_embeddings().weight.data[0, 0] += 1.0
            return super().encode(x, scale)
    object.__setattr__(base, '__class__', Vandal)
    return base
'''


WORDS = ("--dtype", "float32", "--reference", "f32", "--axes", "kld", "--text", "text.txt", "--n-ctx", "32")
SMALL = (*WORDS, "--windows", "6", "--control", "none")


def compare(checkpoint: Path, cwd: Path, *words: str, plugin: str = "") -> dict[str, Any]:
    """``fidelab compare`` with a format ``planted`` whose module is ``plugin``.  Its workers are processes."""
    cwd.mkdir(exist_ok=True)
    (cwd / "text.txt").write_text(" ".join(f"w{n * 7 % 64}" for n in range(4000)))
    folders = [str(Path(fidelab.__file__).parents[1]), str(ROOT)]
    with pytest.MonkeyPatch.context() as patch:
        if plugin:  # workers find it by its entry point
            folders.insert(0, str(_site(cwd / "site", plugin)))
            patch.syspath_prepend(folders[0])
            patch.delitem(sys.modules, "planted", raising=False)
            patch.setitem(FORMATS._table, "planted", "planted:create")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join(folders))
        done = cli("compare", checkpoint, "--engine", "hf", *SMALL, *words, "--json", cwd=cwd)
    assert done.out, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def _site(site: Path, plugin: str) -> Path:
    """A folder where a package with the format is installed."""
    info = site / "planted-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[fidelab.formats]\nplanted = planted:create\n")
    (site / "planted.py").write_text(plugin)
    return site


def test_starts_and_loads_of_a_dry_run_are_those_of_the_run(checkpoint: Path, tmp_path: Path) -> None:
    words = ("--kv", "q8_0", "--candidate", "kv=q8_0,weights=int8", "--kv", "int4", "--floor")
    plan = compare(checkpoint, tmp_path, *words, "--dry-run")
    compare(checkpoint, tmp_path, *words)
    [events] = (tmp_path / "runs").glob("2*/events.jsonl")
    opened = [event for event in map(json.loads, events.read_text().splitlines()) if event["event"] == "opened"]
    assert len(opened) == plan["starts"]
    [*manifests] = (tmp_path / "runs/captures").rglob("manifest.json")
    loaded = [json.loads(file.read_text())["ran"]["loaded"] for file in manifests]
    own = loaded.count("for this configuration")
    assert (own, len(loaded)) == (2, plan["starts"])  # of rounded weights, and its twin
    assert plan["loads"] == own + 3  # once before, and after each of the two


def test_a_quick_look_repeats_nothing_unless_noise_is_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    roles = [job["role"] for job in compare(checkpoint, tmp_path, "--kv", "q8_0", "--quick", "--dry-run")["jobs"]]
    assert roles == ["reference", "candidate:q8_0"]
    more = compare(checkpoint, tmp_path, "--kv", "q8_0", "--quick", "--floor", "--dry-run")["jobs"]
    assert [job["role"] for job in more] == ["reference", "candidate:q8_0", "twin:q8_0", "floor"]


def test_a_format_that_changes_the_weights_is_named_and_the_rest_is_compared(checkpoint: Path, tmp_path: Path) -> None:
    kvs = ("--kv", "q8_0", "--kv", "planted", "--kv", "int4", "--no-floor")
    report = compare(checkpoint, tmp_path, *kvs, plugin=FORMAT)
    arms = {one["name"]: one for one in report["candidates"]}
    assert {name: one["status"] for name, one in arms.items()} == {"q8_0": "ok", "planted": "failed", "int4": "ok"}
    assert "planted changed the model's weights while it ran" in arms["planted"]["reason"]
    assert report["reference"]["ran"]["loaded"] == "once for several configurations"
    means = {name: _mean(one) for name, one in arms.items() if one["status"] == "ok"}
    assert 0 < means["q8_0"] < means["int4"]


def _mean(one: dict[str, Any]) -> float:
    return next(float(m["value"]) for m in one["axes"]["kld"]["metrics"] if m["key"] == "mean" and not m["cell"])
