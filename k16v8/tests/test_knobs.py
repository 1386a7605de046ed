"""Knobs of decode: what an experiment turns is what is launched and recorded, and nothing stays turned."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec

import pytest

import forked
from k16v8.errors import UsageError
from k16v8.kernels.knobs import KNOBS, Knobs, knobs_of, turned

SCRIPT = """
import json, torch
from k16v8.kernels.dispatch import load_triton

load_triton(interpret=True)
from k16v8.bench.contenders import CONTENDERS, Draw
from k16v8.bench.shapes import Cell
from k16v8.kernels.knobs import turned

found = []
many = {"tokens": 16, "stages": 3, "warps": 2, "registers": 168}
for knobs in ({}, {"tokens": 64}, many, {"split_tokens": 64, "merge_stages": 2}):
    with turned(**knobs):
        for one in [one for one in CONTENDERS if one.name.startswith("k16v8") and one.formats == "16/8"]:
            cell = Cell("decode", (4, 2, 64), 2, 128, page=64)
            work = one.prepare(cell, one.formats, Draw(torch.device("cpu"), 0), kernels="interpreter")
            out, held = work.call(), work.head(1, 1)
            scores = (work.q[1, 2:].double() @ held[0].T) / 8
            exact = torch.softmax(scores, 1) @ held[1]
            error = ((out[1, 2:].double() - exact).norm() / exact.norm()).item()
            found.append([knobs, one.name, work.launch, error])
print(json.dumps(found))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_what_is_turned_is_launched_and_recorded_in_both_layouts_and_the_result_stays_right() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = forked.run(["-c", SCRIPT], environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 8
    for knobs, name, launch, error in found:
        assert error < 0.0035, (knobs, name)
        expected = {"tokens": 32, "warps": 1, "stages": 1, "registers": 0} | knobs
        split = expected.pop("split_tokens", None)
        assert {key: launch[key] for key in expected} == expected
        assert split in (None, launch["split"])
        assert launch["programs"] == 2 * 2 * -(-128 // launch["split"])
        assert launch["rounds"] == -(-launch["programs"] // launch["slots"])
        assert launch["merge_stages"] == (knobs.get("merge_stages", 4) if launch["split"] < 128 else 0)
    assert {name for _, name, _, _ in found} == {"k16v8", "k16v8, tokens first"}


def test_knobs_are_as_before_afterwards_also_after_an_error() -> None:
    def fail() -> None:
        with turned(stages=7), turned(stages=3, registers=128):
            assert Knobs(stages=3, registers=128) == KNOBS
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert Knobs() == KNOBS


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stage": 3}, "no knob stage: it has tokens, warps, stages, registers, split_tokens, merge_stages"),
        ({"tokens": 48}, "tokens 48: a power of two is wanted"),
        ({"tokens": 8}, "a tile has 16 tokens at least"),
        ({"warps": 3}, "warps 3: a power of two is wanted"),
        ({"stages": -1}, "stages -1: a whole number is wanted"),
    ],
)
def test_a_knob_that_cannot_be_is_refused(settings: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said), turned(**settings):
        raise AssertionError


def test_settings_are_read_from_one_word() -> None:
    assert knobs_of("") == {}
    assert knobs_of("stages=7,registers=168") == {"stages": 7, "registers": 168}
    for wrong in ("stages", "stages=", "stages=-1", "7"):
        with pytest.raises(UsageError, match="write NAME=NUMBER"):
            knobs_of(wrong)
