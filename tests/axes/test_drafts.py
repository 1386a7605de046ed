"""What a report says of a speculating arm, from captures made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fidelab.axes.base import AxisScore
from fidelab.axes.trajectory import Trajectory
from fidelab.captures.pair import Pair
from fidelab.captures.requests import Generate
from fidelab.core import Arm, KVSpec
from tests.axes.captures import make_arm, make_capture

V = 16
TEXT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4]
NGRAM = {"method": "ngram", "tokens": 3, "lookup": [2, 2], "draft": "", "options": ["speculative-config"]}
ARM = replace(make_arm("auto", "vllm"), name="plain")
DRAFTING = replace(ARM, name="drafting", options=(("speculative-config", "{}"),))


def generate() -> Generate:
    return Generate(
        "trajectory", ((9, 8), (7, 6)), len(TEXT), (), settings=(("n_predict", len(TEXT)), ("template", "raw"))
    )


def rows(text: Sequence[int], second: Mapping[int, tuple[int, float]]) -> dict[str, Any]:
    """Rows that prefer the text by 8 nats; ``second``: at some tokens another is second, so many nats below."""
    logits = np.zeros((len(text), V), dtype=np.float32)
    for i, token in enumerate(text):
        logits[i, token] = 8.0
        if i in second:
            other, below = second[i]
            logits[i, other] = 8.0 - below
    return {"ids": np.asarray(text, dtype=np.int32), "logprobs": logits}


def scored(tmp_path: Path, changed: Mapping[int, tuple[int, float]], arm: Arm = DRAFTING, **counts: int) -> AxisScore:
    """The second text parts at the places of ``changed``: token, and how far the reference has it below its own."""
    theirs = [changed[i][0] if i in changed else token for i, token in enumerate(TEXT)]
    counted = {**NGRAM, "drafts": 2, "drafted": 6, "accepted": 5, **counts}
    ref = make_capture(tmp_path / "ref", generate(), [rows(TEXT, {}), rows(TEXT, changed)], ARM, size=V)
    answers = [rows(TEXT, {}), rows(theirs, {})]
    test = make_capture(tmp_path / "test", generate(), answers, arm, size=V, facts={"speculation": counted})
    return Trajectory(Trajectory.Settings()).score(Pair.match(ref, test), 0)


def test_acceptance_is_what_the_engine_counted(tmp_path: Path) -> None:
    score = scored(tmp_path, {})
    assert score.found.value("acceptance_length") == pytest.approx(1 + 5 / 2)
    assert score.found.value("accepted") == pytest.approx(5 / 6)
    assert score.found.flags[0].text == (
        "speculation (ngram): 3.50 tokens per verification, 83% of the drafted tokens accepted"
    )
    assert score.found.flags[1].text == "the text is the reference's, token for token, on all 2 prompts"


def test_a_near_tie_is_not_a_change_of_the_text(tmp_path: Path) -> None:
    text = scored(tmp_path, {5: (11, 0.02)}).found.flags[1].text
    assert text.startswith("1 of 2 texts part at near ties (the reference's margin is 0.02 nats at most)")


def test_a_text_that_speculation_changed_is_named_with_its_place_and_margin(tmp_path: Path) -> None:
    text = scored(tmp_path, {5: (11, 2.5)}).found.flags[1].text
    assert (
        text == "speculation changed the text at prompt 1, token 5, where the reference preferred its token by 2.5 nats"
    )


def test_an_arm_that_differs_in_more_than_speculation_is_not_blamed_on_it(tmp_path: Path) -> None:
    text = scored(tmp_path, {5: (11, 2.5)}, replace(DRAFTING, kv=KVSpec.parse("fp8_e4m3"))).found.flags[1].text
    assert text.startswith("the text changes at prompt 1, token 5")
    assert "more than speculation differs" in text


def test_speculation_that_never_drafted_is_said(tmp_path: Path) -> None:
    assert (
        scored(tmp_path, {}, drafts=0, drafted=0, accepted=0).found.flags[0].text
        == "speculation (ngram) drafted no token"
    )


def test_an_arm_without_speculation_has_no_word_about_it(tmp_path: Path) -> None:
    ref, test = (
        make_capture(tmp_path / name, generate(), [rows(TEXT, {})] * 2, replace(ARM, name=name), size=V)
        for name in "ab"
    )
    score = Trajectory(Trajectory.Settings()).score(Pair.match(ref, test), 0)
    assert score.found.flags == ()
    assert score.found.metric("accepted") is None
