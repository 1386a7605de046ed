"""Tool calls: judged on captures made by hand, forced rows against closed forms, and whole runs on the fake engine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats

from fidelab.axes.base import AxisInputs, AxisScore
from fidelab.axes.toolcalls import ToolCalls
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Forced, Generate, Request
from fidelab.core.errors import CaptureError, InputError
from fidelab.inputs.texts import Text
from fidelab.inputs.tokens import Tokenizer
from fidelab.inputs.toolcalls.load import load_dialogues
from fidelab.metrics.intervals import RatioItems, mcnemar_exact, ratio_interval
from fidelab.models import resolve
from fidelab.results.plots import TablePlot, Texts
from tests.axes.captures import BYTES, make_arm, make_capture
from tests.inputs.test_toolcalls import Template
from tests.run.harness import Done, run_fake
from tests.sizes import size

STOP = 0
AXIS = ToolCalls(ToolCalls.Settings())
CALLS = [(dialogue, step) for dialogue in load_dialogues() for step in dialogue.steps]
RIGHT = [json.dumps({"name": step.name, "arguments": dict(step.arguments)}) for _, step in CALLS]
CUT = '{"name": "' + "x" * 246  # as many tokens as the budget, without a stop


def _requests(positions: int | None = None, **settings: Any) -> dict[str, Request]:
    inputs = AxisInputs(Tokenizer.load(resolve("fake")), Text("t", "x", (), ""), (), positions)
    return dict(ToolCalls(ToolCalls.Settings.model_validate(settings)).requests(inputs))


@pytest.fixture(scope="module")
def asked() -> dict[str, Request]:
    return _requests()


def _renamed(answer: str) -> str:
    """A right call with one key renamed."""
    call = json.loads(answer)
    key = next(iter(call["arguments"]))
    call["arguments"] = {f"{name}_" if name == key else name: value for name, value in call["arguments"].items()}
    return json.dumps(call)


def _capture(folder: Path, request: Generate, answers: Sequence[str | None]) -> Capture:
    """Answers as text, with the stop behind it unless it is cut, or none: the item failed."""
    ids = [None if one is None else [*one.encode(), *(() if one == CUT else (STOP,))] for one in answers]
    failed = {item: "empty output" for item, tokens in enumerate(ids) if tokens is None}
    return make_capture(folder, request, ids, make_arm(folder.name), pieces=BYTES, failed=failed)


def _score(store: Path, request: Request, ref: Sequence[str | None], test: Sequence[str | None]) -> AxisScore:
    assert isinstance(request, Generate)
    few = request.select(range(len(ref)))
    pair = Pair.match(_capture(store / "f32", few, ref), _capture(store / "int4", few, test))
    return AXIS.score_parts({"calls.0": pair}, 0)


def _value(score: AxisScore, name: str) -> Any:
    return score.found.value(name)


# ----------------------------------------------------------------------------------------------------------- requests


def test_every_call_is_asked_and_its_tokens_are_forced_after_the_same_prompt(asked: dict[str, Request]) -> None:
    calls, kl = asked["calls.0"], asked["kl.0"]
    assert isinstance(calls, Generate)
    assert isinstance(kl, Forced)
    assert len(calls.prompts) == len(CALLS) >= 200
    assert kl.prompts == calls.prompts
    assert kl.notes == calls.notes
    assert [bytes(ids).decode() for ids in kl.continuations] == RIGHT
    assert dict(calls.settings) == {"depth": 0, "form": "plain JSON", "n_predict": 256}


def test_a_limit_chooses_dialogues_and_depths_are_parts_of_their_own() -> None:
    found = _requests(limit=2, depth=[600, 0])
    assert set(found) == {"calls.0", "kl.0", "calls.600", "kl.600"}
    near, far = (found[part].items() for part in ("calls.0", "calls.600"))
    assert len(near) == len(far) == 10
    assert all(600 <= len(b) - len(a) <= 800 for a, b in zip(near, far, strict=True))
    inputs = AxisInputs(Tokenizer.load(resolve("fake")), Text("t", "x", (), ""), (), None)
    assert AXIS.available(inputs) == len(load_dialogues())
    [remark] = AXIS.remarks(inputs, found)
    assert remark == "toolcalls: the chat template shows no tools, calls are asked for as plain JSON"


def test_a_template_whose_calls_cannot_be_read_is_said() -> None:
    class Odd(Template):
        def render(self, messages: Sequence[Any], tools: Sequence[Any], *, generation: bool, private: bool) -> str:
            text = super().render(messages, tools, generation=generation, private=private)
            return text.replace("<tool_call>", "@").replace("</tool_call>", "@").replace('"name"', '"it"')

    fake = Tokenizer.load(resolve("fake"))
    for backend, remarks in ((Template(), 0), (Odd(), 1)):
        tokenizer = replace(fake, template="chat", backend=backend)  # type: ignore[arg-type]
        inputs = AxisInputs(tokenizer, Text("t", "x", (), ""), (), None)
        requests = ToolCalls(ToolCalls.Settings.model_validate({"limit": 1})).requests(inputs)
        said = list(AXIS.remarks(inputs, requests))
        assert len(said) == remarks
        assert all("cannot be read" in line for line in said)


def test_dialogues_beyond_the_models_limit_are_refused_with_the_setting_to_change() -> None:
    with pytest.raises(InputError, match=r"at depth 0 need [\d,]+ tokens .* use a smaller axes\.toolcalls\.n_predict"):
        _requests(500, limit=1)
    with pytest.raises(InputError, match=r"at depth 900 need .* use a smaller axes\.toolcalls\.depth"):
        _requests(4000, limit=1, depth=[900], n_predict=8)
    with pytest.raises(ValidationError, match="0 or more"):
        ToolCalls.Settings.model_validate({"depth": [-1]})


# ------------------------------------------------------------------------------------------------------------- judged


def test_one_key_renamed_in_5_percent_of_200_calls_is_found(asked: dict[str, Request], tmp_path: Path) -> None:
    test = [_renamed(one) if n % 20 == 7 else one for n, one in enumerate(RIGHT)]
    score = _score(tmp_path, asked["calls.0"], RIGHT, test)
    assert [_value(score, name) for name in ("lost", "gained", "right_in_the_reference")] == [10, 0, 200]
    assert _value(score, "mcnemar_p") == pytest.approx(stats.binomtest(0, 10).pvalue)
    low, high = score.found.ci("difference") or (0, 0)
    assert _value(score, "difference") == pytest.approx(-5.0)
    assert low < -5 < high < 0
    assert (_value(score, "parsed"), _value(score, "right_function")) == (1.0, 1.0)
    assert _value(score, "valid_arguments") == 0.95
    assert (score.found.summary, score.found.reference_summary) == ("lost 10 of 200", "200 of 200 right")
    table, changed, texts = score.found.plots
    assert isinstance(table, TablePlot)
    assert table.rows == (("right", "200", "190"), ("invalid arguments", "0", "10"))
    assert isinstance(changed, TablePlot)
    assert str(changed.rows[0][2]).startswith("invalid arguments: ")
    assert isinstance(texts, Texts)


@pytest.mark.parametrize(("able", "power"), [(1.0, 0.93), (0.8, 0.81), (0.5, 0.38)])
def test_the_documented_power_at_200_calls_is_that_of_the_exact_test(able: float, power: float) -> None:
    """Each right call is broken with probability 5%, nothing is gained."""
    least = next(n for n in range(1, 20) if mcnemar_exact(n, 0) < 0.05)
    assert least == 6
    lost = np.random.default_rng(0).binomial(round(200 * able), 0.05, 40_000)
    found = float((lost >= least).mean())
    assert found == pytest.approx(1 - stats.binom.cdf(least - 1, round(200 * able), 0.05), abs=0.01)
    assert found == pytest.approx(power, abs=0.015)


def test_an_answer_that_the_budget_cut_counts_neither_way_and_is_counted(
    asked: dict[str, Request], tmp_path: Path
) -> None:
    ref, test = [*RIGHT[:20]], [*RIGHT[:20]]
    test[3], ref[5] = CUT, CUT
    score = _score(tmp_path, asked["calls.0"], ref, test)
    assert (_value(score, "unfinished"), _value(score, "unfinished_in_the_reference")) == (1, 1)
    assert (_value(score, "accuracy"), _value(score, "lost")) == (1.0, 0)
    assert (score.measurement().n_items, score.measurement().n_failed) == (20, 0)
    assert score.found.downgrades == ()
    assert int(score.usable.sum()) == 18


def test_a_complete_call_before_the_cut_is_judged(asked: dict[str, Request], tmp_path: Path) -> None:
    request = asked["calls.0"]
    assert isinstance(request, Generate)
    babble = f"{RIGHT[0]} {'x' * 300}"[: request.max_tokens]
    few = request.select([0])
    ref = _capture(tmp_path / "f32", few, [RIGHT[0]])
    test = make_capture(tmp_path / "int4", few, [list(babble.encode())], make_arm("int4"), pieces=BYTES)
    score = AXIS.score_parts({"calls.0": Pair.match(ref, test)}, 0)
    assert (_value(score, "accuracy"), _value(score, "unfinished")) == (1.0, 0)


def test_answers_cut_far_more_often_than_the_references_lower_the_verdict(
    asked: dict[str, Request], tmp_path: Path
) -> None:
    test = [CUT if n % 3 == 0 else one for n, one in enumerate(RIGHT[:60])]
    found = _score(tmp_path / "more", asked["calls.0"], RIGHT[:60], test).found
    assert found.downgrades == ("20 more of 60 tool calls stay unfinished",)
    assert found.summary == "lost 0 of 40; 20 unfinished, 0 in the reference"
    few = [CUT if n < 5 else one for n, one in enumerate(RIGHT[:60])]  # five of five: p = 0.06
    assert _score(tmp_path / "few", asked["calls.0"], RIGHT[:60], few).found.downgrades == ()


def test_a_reference_that_calls_no_tools_is_said(asked: dict[str, Request], tmp_path: Path) -> None:
    score = _score(tmp_path, asked["calls.0"], ["Sure!"] * 30, ["Well."] * 30)
    assert score.not_measurable == "the reference makes 0 of 30 right calls; below 5% a loss cannot be seen"
    assert score.found.reference_summary == "0 of 30 right"
    assert (_value(score, "score"), score.found.downgrades) == (None, ())


def test_calls_of_one_dialogue_are_resampled_together(asked: dict[str, Request], tmp_path: Path) -> None:
    score = _score(tmp_path, asked["calls.0"], RIGHT[:15], RIGHT[:15])
    assert score.clusters.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert score.identical
    assert score.found.cluster == "dialogue"


def test_failed_items_are_counted_and_in_no_figure(asked: dict[str, Request], tmp_path: Path) -> None:
    score = _score(tmp_path, asked["calls.0"], RIGHT[:10], [None, *RIGHT[1:10]])
    assert (score.measurement().n_items, score.measurement().n_failed, _value(score, "lost")) == (10, 1, 0)
    assert not score.identical


@pytest.mark.parametrize(
    "note",
    [
        *("{}", "[]", "3", '{"id": "a", "dialogue": 0, "name": "f", "arguments": 3, "tools": [], "schema": {}}'),
        '{"id": "a", "dialogue": 0, "name": "f", "arguments": {}, "tools": [], "schema": {"$ref": "file:///etc/passwd"}}',
    ],
)
def test_saved_outputs_whose_notes_are_not_calls_are_refused(note: str, tmp_path: Path) -> None:
    request = Generate("toolcalls.calls.0", ((1,),), 256, (STOP,), rows=False, notes=(note,))
    with pytest.raises(CaptureError, match="the note of item 0 is not a call"):
        _score(tmp_path, request, ["x"], ["x"])


@pytest.mark.parametrize("dialogues", [8, 40])
def test_the_interval_of_the_signed_loss_has_its_coverage(dialogues: int) -> None:
    """Most tokens move little, some by far more; dialogues differ in their mean."""
    draw, held, n = np.random.default_rng(1), 0, size(200, 2000)
    for seed in range(n):
        lengths = draw.integers(100, 300, dialogues)
        loss = draw.normal(0.002, 0.02, lengths.sum()) + np.repeat(draw.normal(0, 0.004, dialogues), lengths)
        loss += np.where(draw.random(lengths.sum()) < 0.01, draw.exponential(0.5, lengths.sum()), 0)
        items = RatioItems.of(loss, 1.0, np.repeat(np.arange(dialogues), lengths))
        low, high = ratio_interval(items, seed) or (0, 0)
        held += low <= 0.002 + 0.01 * 0.5 <= high
    assert held / n == pytest.approx(0.95, abs=0.04 if n < 1000 else 0.02)


# ---------------------------------------------------------------------------------------------------------- whole runs

LIMIT = 8


def _pairs(change: Callable[[int, str], str] = lambda _, answer: answer) -> str:
    """Answers for engine fake: each prompt of the first dialogues, the longest first, and what follows it."""
    request = _requests(limit=LIMIT)["calls.0"].items()
    pairs = [[bytes(prompt).decode(), change(n, RIGHT[n])] for n, prompt in enumerate(request)]
    return json.dumps(sorted(pairs, key=lambda pair: -len(pair[0])))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A reference that makes every call; one candidate renames keys, others give the right calls other odds."""
    cwd = tmp_path_factory.mktemp("toolcalls")
    (cwd / "answers.json").write_text(_pairs())
    (cwd / "renamed.json").write_text(_pairs(lambda n, answer: _renamed(answer) if n % 4 == 0 else answer))
    axes = {"toolcalls": {"limit": LIMIT}, "kld": {"windows": 8, "n_ctx": 16}}
    renamed: Any = {"name": "renamed", "kv": "tilt[q=0.4]", "engine_args": {"answers": "renamed.json"}}
    candidates = ["exact", "tilt[q=0.6]", renamed, "nan-row"]
    return run_fake(cwd, axes, candidates, engine_args={"answers": "answers.json"}, floor=0.0)


def test_a_run_finds_the_planted_fault_and_nothing_on_the_others(done: Done) -> None:
    assert done.code == 0, done.err
    exact, tilted, renamed = (done.axis(name, "toolcalls") for name in ("exact", "tilt[q=0.6]", "renamed"))
    assert (exact.status, exact.value("score"), exact.n_items) == ("identical", 100.0, 5 * LIMIT)
    assert (tilted.status, tilted.value("lost"), renamed.value("lost")) == ("ok", 0, 10)
    verdict = done.arm("renamed")["verdict"]
    assert any("accuracy of tool calls falls by 25.0 points" in fact for fact in verdict["because"]), verdict["because"]
    assert done.arm("renamed")["certificates"]["toolcalls"]["claims"]


def test_a_token_whose_row_failed_is_counted_and_in_no_figure(done: Done) -> None:
    found, n = done.axis("nan-row", "toolcalls"), sum(len(answer) for answer in RIGHT[: 5 * LIMIT])
    assert (found.value("failed_tokens"), found.value("tokens"), found.value("mean_kl")) == (1, n - 1, 0)
    assert done.axis("exact", "toolcalls").metric("failed_tokens", {}) is None
    assert found.status == "ok"


@pytest.mark.parametrize(("name", "q"), [("tilt[q=0.6]", 0.6), ("renamed", 0.4)])
def test_teacher_forced_figures_equal_the_closed_form(done: Done, name: str, q: float) -> None:
    """All bytes of the right calls are in the half of the vocabulary with probability 1/2, and q in the candidate."""
    found = done.axis(name, "toolcalls")
    assert found.value("mean_kl") == pytest.approx(0.5 * math.log(0.5 / q) + 0.5 * math.log(0.5 / (1 - q)), rel=1e-5)
    assert found.value("p99") == pytest.approx(found.value("mean_kl"), rel=1e-5)
    assert found.value("signed_loss") == pytest.approx(math.log(0.5 / q), rel=1e-5)
    assert found.value("flips") == (0.0 if q > 0.5 else 1.0)
    assert found.value("tokens") == sum(len(answer) for answer in RIGHT[: 5 * LIMIT])
    mean = found.metric("mean_kl", {})
    assert mean is not None
    assert mean.banded


def test_the_forced_figures_stand_alone_where_the_reference_cannot_call(tmp_path: Path) -> None:
    axes = {"toolcalls": {"limit": 6, "n_predict": 8}, "kld": {"windows": 8, "n_ctx": 16}}
    alone = run_fake(tmp_path, axes, ["exact", "tilt[q=0.6]"], floor=0.0, control="tilt[q=0.51]")
    found = alone.axis("tilt[q=0.6]", "toolcalls")
    assert (found.status, found.reference_summary) == ("ok", "0 of 30 right")
    assert found.value("mean_kl") == pytest.approx(0.0204, abs=1e-4)
    assert found.value("score") is None
    assert not {"difference", "mcnemar_p", "lost"} & {metric.key for metric in found.metrics}
    assert found.summary == "0.0204 nats on the right calls; 30 unfinished, 30 in the reference"
    assert found.value("over_control") is None
    assert alone.axis("exact", "toolcalls").status == "identical"
    assert "toolcalls" not in alone.arm("tilt[q=0.6]")["certificates"]
