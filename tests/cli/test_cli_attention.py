"""``fidelab diagnose attention``: the model's own q, k and v, captured in a worker process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fidelab.captures.container import to_float32
from fidelab.captures.requests import Layerwise
from fidelab.cli.attention import captured_tensors
from fidelab.core import Arm, KVSpec
from fidelab.engines.hf.adapter import HFEngine
from fidelab.inputs.corpus import make_windows
from fidelab.inputs.texts import load_text
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import resolve
from fidelab.models.tiny import make_tiny
from tests.engines.tiny import Answers
from tests.run.harness import Done, cli

pytest.importorskip("k16v8.cli")

WRONG = """
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch import arange

def attend(q, k, v, *, causal, scale):
    at = arange(k.shape[2])
    return 1.02 * sdpa(q, k, v, attn_mask=at <= at[-q.shape[2]:, None], scale=scale, enable_gqa=True)
"""
SOUND = "sdpa-math,k16v8-torch"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("audit") / "tiny", layers=3, positions=256)


def audit(cwd: Path, *words: object) -> Done:
    return cli("diagnose", "attention", *words, cwd=cwd)


def test_a_sound_implementation_passes_and_a_wrong_one_is_named_on_the_models_tensors(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two_percent_too_much.py").write_text(WRONG, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    wrong = "two_percent_too_much:attend"
    done = audit(tmp_path, model, "--layers", "2,0", "--lengths", "16,64,1024", "--n-ctx", 64, "--json",
                 "--implementation", f"{SOUND},{wrong}")  # fmt: skip
    assert done.code == 1, done.err
    found = json.loads(done.out)
    judged = {(one["implementation"], one["case"], one["kv_length"]): one["status"] for one in found["findings"]}
    cases = [(case, length) for case in ("layer 0", "layer 2") for length in (16, 64)]
    assert judged == {
        **{(name, *case): "passed" for name in SOUND.split(",") for case in cases},
        **{(wrong, *case): "over" for case in cases},
    }
    assert found["not_measured"] == [1024]
    assert (found["model"], found["tensors"]) == (str(model), None)
    assert "KV length 1,024 not measured: there is no query at it; --n-ctx makes the window longer" in done.err
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py" and path.name != "__pycache__"] == []


def test_the_tensors_are_what_the_engine_answers_in_the_asked_type(model: Path) -> None:
    """By default the first, the middle and the last layer."""
    found = captured_tensors(str(model), (), "default", 32, 32, "f32", "cpu")
    assert sorted({name.partition(".")[0] for name in found}) == ["layer 0", "layer 1", "layer 2"]
    windows = make_windows(Tokenizer.load(resolve(str(model))), load_text("default"), 32, 1).windows
    engine, sink = HFEngine(), Answers()
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    try:
        engine.open(Arm("f32", "hf", "tiny", str(model), "0", KVSpec.parse("f32"), "float32", "cpu", 1))
        engine.answer(Layerwise("qkv", windows, 0, 31, tensors="qkv", layers=(1,)), sink)
    finally:
        torch.set_grad_enabled(grad)
        torch.set_num_threads(threads)
    for part in "qkv":
        ours = found[f"layer 1.{part}"]
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, torch.from_numpy(to_float32(sink.items[0][f"1.{part}"])))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--layers", "0,3"), "layer 3: "),
        (("--layers", "a"), "--layers 'a': write numbers"),
        (("--n-ctx", "300"), "at most 256 positions"),
        (("--n-ctx", "7"), "'--n-ctx': "),
        (("--dtype", "fp8"), "unknown type 'fp8'"),
        (("--text", "nowhere.txt"), "no text 'nowhere.txt'"),
    ],
)
def test_bad_flags_are_one_line(words: tuple[str, ...], said: str, model: Path, tmp_path: Path) -> None:
    done = audit(tmp_path, model, *words)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert said in done.err
