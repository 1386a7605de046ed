"""Capability checks: what is asked, verdicts on captures made by hand, whole runs, and the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fidelab.axes.base import AxisInputs, AxisScore
from fidelab.axes.capability import code, sandbox
from fidelab.axes.capability.axis import Capability
from fidelab.axes.capability.checks import CHECKS
from fidelab.axes.capability.code import run_task
from fidelab.captures.manifest import capture_key
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate
from fidelab.captures.writer import CaptureWriter, store_vocabulary
from fidelab.core import Arm, KVSpec, Vocabulary, digest
from fidelab.core.errors import CaptureError, InputError
from fidelab.core.serial import to_json
from fidelab.inputs.texts import Text
from fidelab.inputs.tokens import Tokenizer
from fidelab.metrics.intervals import mcnemar_exact
from fidelab.models import Model, resolve
from fidelab.results.measurement import Measurement
from fidelab.results.plots import TablePlot, Texts
from tests.axes.capability.test_checks import PROGRAMS
from tests.engines import tiny
from tests.run.harness import Done, cli, write_inputs

BYTES = [f"<0x{i:02X}>" for i in range(256)]
RIGHT = {
    **{check.id: check.expected for check in CHECKS if check.kind in ("arithmetic", "knowledge", "edge")},
    **{f"code-{n}": f"```python\n{PROGRAMS[task.name]}\n```" for n, task in enumerate(code.TASKS, 1)},
    **{check.id: "as always" for check in CHECKS if check.kind == "parallel"},
}
CONFINED = not sandbox.unavailable()
Answers = Mapping[str, str | None]


def _inputs(limit: int | None = None, tokenizer: Tokenizer | None = None) -> AxisInputs:
    return AxisInputs(tokenizer or Tokenizer.load(resolve("fake")), Text("t", "x", (), ""), (), limit)


def _probes(limit: int | None = None, **settings: Any) -> dict[str, Generate]:
    return Capability(Capability.Settings.model_validate(settings)).requests(_inputs(limit))


def _ids(request: Generate) -> list[str]:
    return [json.loads(note)["id"] for note in request.notes]


# -------------------------------------------------------------------------------------------- questions


def test_kinds_share_probes_by_the_length_of_their_answers() -> None:
    requests = _probes()
    assert {part: (len(request.prompts), request.max_tokens, request.batch) for part, request in requests.items()} == {
        "short": (19, 48, 8),
        "code": (8, 256, 8),
        "single": (8, 32, 1),
        "batch": (8, 32, 8),
    }
    assert all(request.axis == f"capability.{part}" and not request.rows for part, request in requests.items())


def test_the_batch_is_asked_what_is_asked_one_by_one() -> None:
    requests = _probes(kinds=["parallel"])
    assert set(requests) == {"single", "batch"}
    assert requests["single"] == replace(requests["batch"], axis="capability.single", batch=1)


def test_what_cannot_be_asked_is_in_the_settings_with_its_reason() -> None:
    settings = dict(_probes()["short"].settings)
    assert settings["set"] == "1"
    assert {name: reason for name, reason in settings.items() if name.startswith("without ")} == {
        "without edge-empty": "without a chat template an empty prompt has no tokens",
        "without vision-1": "no engine here takes images",
        "without vision-2": "no engine here takes images",
        "without vision-3": "no engine here takes images",
        "without tool-call": "the model has no chat template",
        "without thinking": "the model has no chat template",
    }


@pytest.mark.parametrize(("limit", "room"), [(None, 2048), (1000, 1000 - 48)])
def test_the_long_prompt_fills_what_it_may(limit: int | None, room: int) -> None:
    request = _probes(limit, kinds=["edge"])["short"]
    length = len(request.prompts[_ids(request).index("edge-long")])
    assert room - 80 < length <= room  # a line has fewer than 80 bytes


def test_nothing_to_ask_is_one_line() -> None:
    with pytest.raises(InputError, match=r"nothing can be asked: no engine here takes images$"):
        _probes(kinds=["vision"])


# ----------------------------------------------------------------------------------------- closed forms


def _capture(store: Path, name: str, request: Generate, answers: Answers) -> Capture:
    arm = Arm(name, "hf", "m", "m", "0" * 64, KVSpec.parse(name), "float32", "cpu", 1)
    words = Vocabulary(len(BYTES), digest(*BYTES))
    store_vocabulary(store, words, BYTES)
    writer = CaptureWriter(store / name / request.axis, request, capture_key(arm, request, {}, 0), to_json(arm), words)
    for item, check in enumerate(_ids(request)):
        answer = answers.get(f"{check} in batch", answers.get(check)) if "batch" in request.axis else answers.get(check)
        writer.add(item, {"ids": np.array([] if answer is None else [*answer.encode(), 0], dtype=np.int32)})
        if answer is None:
            writer.fail(item, "empty output")
    return Capture(writer.finish("logprobs", {}, {}))


def _score(store: Path, ref: Answers, test: Answers, **settings: Any) -> AxisScore:
    axis = Capability(Capability.Settings.model_validate(settings))
    requests = axis.requests(_inputs())
    pairs = {
        part: Pair.match(_capture(store, "f32", request, ref), _capture(store, "int4", request, test))
        for part, request in requests.items()
    }
    return axis.score_parts(pairs, 0)


def _changed(**answers: str | None) -> Answers:
    return {**RIGHT, **{name.replace("_", "-"): answer for name, answer in answers.items()}}


def _axis(score: AxisScore) -> Measurement:
    """As the record holds it."""
    return score.measurement()


def _values(axis: Measurement) -> dict[str, float | None]:
    return {metric.name: metric.value for metric in axis.metrics if metric.name != "score"}


def _table(axis: Measurement, title: str = "All checks") -> dict[Any, dict[str, Any]]:
    [table] = [plot for plot in axis.plots if isinstance(plot, TablePlot) and plot.title == title]
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


WORDS = {"kinds": ["arithmetic", "knowledge", "parallel"]}  # 23 checks, none of which needs the sandbox


def test_lost_and_gained_are_counted_against_the_reference(tmp_path: Path) -> None:
    ref = _changed(arithmetic_1="43", arithmetic_2="0")
    test = _changed(arithmetic_1="43", arithmetic_3="12", arithmetic_4="about a dozen", knowledge_1="Sydney")
    axis = _axis(_score(tmp_path, ref, test, **WORDS))
    assert _values(axis) == {
        "lost": 3,
        "gained": 1,
        "passed": pytest.approx(19 / 23),
        "reference passed": pytest.approx(21 / 23),
        "difference": pytest.approx(-200 / 23),
        "McNemar p": mcnemar_exact(3, 1),
        "applicable": 23,
        "not applicable": 0,
    }
    assert axis.value("score") == pytest.approx(1900 / 23)


def test_the_table_lists_what_was_lost_first_with_answers_and_reason(tmp_path: Path) -> None:
    axis = _axis(_score(tmp_path, RIGHT, _changed(arithmetic_5="It is\n12."), **WORDS))
    rows = _table(axis)
    assert next(iter(rows.values())) == {
        "check": "arithmetic-5",
        "outcome": "lost",
        "expected": "2",
        "reference": "2",
        "candidate": "It is 12.",
        "reason": "read 12",
    }
    assert list(rows)[1:] == [c.id for c in CHECKS if c.kind in WORDS["kinds"] and c.id != "arithmetic-5"]
    [texts] = [plot for plot in axis.plots if isinstance(plot, Texts)]
    assert (texts.pairs[0].candidate, texts.pairs[0].note) == ("It is\n12.", "lost; expected: 2; read 12")
    assert _table(axis, "Checks by kind")["arithmetic"]["lost"] == 1


def test_a_limit_leaves_the_first_checks_of_each_kind_and_says_nothing_of_the_others(tmp_path: Path) -> None:
    axis = _axis(_score(tmp_path, RIGHT, RIGHT, kinds=["knowledge", "arithmetic", "vision"], limit=2))
    assert [*_table(axis)] == ["arithmetic-1", "arithmetic-2", "knowledge-1", "knowledge-2", "vision-1", "vision-2"]
    assert (axis.n_items, _values(axis)["not applicable"]) == (4, 2)


def test_what_stands_in_the_reasoning_alone_is_no_answer(tmp_path: Path) -> None:
    test = _changed(
        arithmetic_1="<think>42?</think>41", arithmetic_2="<think>97?</think>-13", knowledge_1="<think>Canberra"
    )
    rows = _table(_axis(_score(tmp_path, RIGHT, test, **WORDS)))
    outcomes = {name: rows[name]["outcome"] for name in ("arithmetic-1", "arithmetic-2", "knowledge-1")}
    assert outcomes == {"arithmetic-1": "lost", "arithmetic-2": "both pass", "knowledge-1": "lost"}


def test_a_batch_must_write_the_same_tokens_as_single_requests(tmp_path: Path) -> None:
    test = {**RIGHT, "parallel-3 in batch": "as alwayS", "parallel-4 in batch": "as"}
    rows = _table(_axis(_score(tmp_path, RIGHT, test, **WORDS)))
    assert [(rows[f"parallel-{n}"]["outcome"], rows[f"parallel-{n}"]["reason"]) for n in (2, 3, 4)] == [
        ("both pass", ""),
        ("lost", "differs from token 8 on"),
        ("lost", "differs from token 2 on"),
    ]


def test_a_candidate_may_write_other_texts_in_its_batch_as_long_as_alone(tmp_path: Path) -> None:
    score = _score(tmp_path, RIGHT, _changed(parallel_1="another text"), **WORDS)
    assert score.found.value("score") == 100.0
    assert not score.identical


def test_items_without_an_answer_are_counted_and_in_no_figure(tmp_path: Path) -> None:
    axis = _axis(_score(tmp_path, _changed(arithmetic_2=None), _changed(arithmetic_1=None, parallel_1=None), **WORDS))
    assert (axis.n_items, axis.n_failed, axis.value("score"), _values(axis)["lost"]) == (23, 3, 100.0, 0)
    assert [name for name, row in _table(axis).items() if row["outcome"] == "unusable"] == [
        "arithmetic-1",
        "arithmetic-2",
        "parallel-1",
    ]


def test_silence_alone_and_in_a_batch_is_no_agreement(tmp_path: Path) -> None:
    score = _score(tmp_path, dict.fromkeys(RIGHT), RIGHT, kinds=["parallel"])
    assert score.not_measurable == "the reference passes none of the 8 applicable checks"


def test_a_clear_loss_of_right_answers_costs_a_band(tmp_path: Path) -> None:
    lost = {f"arithmetic_{n}": "0" for n in range(1, 8)}
    score = _score(tmp_path, RIGHT, _changed(**lost), **WORDS)
    [harm] = score.found.downgrades
    assert harm.startswith("capability checks: 7 of the 15 that the reference answers right are lost (")


def test_a_small_loss_and_a_batch_that_forks_cost_no_band(tmp_path: Path) -> None:
    forks = {f"parallel-{n} in batch": "otherwise" for n in range(1, 9)}
    score = _score(tmp_path, RIGHT, {**_changed(arithmetic_1="0"), **forks}, **WORDS)
    assert _values(_axis(score))["lost"] == 9
    assert score.found.downgrades == ()


def test_without_a_sandbox_code_is_not_applicable_and_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_task.cache_clear()
    monkeypatch.setattr(sandbox, "unavailable", lambda: "the sandbox cannot confine a program here: no filter")
    monkeypatch.setattr(sandbox, "run", None)
    try:
        axis = _axis(_score(tmp_path, RIGHT, _changed(code_1="no code"), kinds=["code", "arithmetic"]))
    finally:
        run_task.cache_clear()
    assert (axis.n_items, axis.value("score"), _values(axis)["not applicable"]) == (8, 100.0, 8)
    row = _table(axis)["code-1"]
    assert (row["outcome"], row["reason"]) == (
        "not applicable",
        "the sandbox cannot confine a program here: no filter",
    )


def test_captures_of_another_set_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fidelab.axes.capability.axis.SET_VERSION", "0")
    axis = Capability(Capability.Settings.model_validate({"kinds": ["arithmetic"]}))
    request = axis.requests(_inputs())["short"]
    pair = Pair.match(_capture(tmp_path, "f32", request, RIGHT), _capture(tmp_path, "int4", request, RIGHT))
    monkeypatch.setattr("fidelab.axes.capability.axis.SET_VERSION", "1")
    with pytest.raises(CaptureError, match="captures hold check set 0, this version scores set 1; capture again"):
        axis.score_parts({"short": pair}, 0)


@pytest.mark.parametrize(
    ("answer", "passed"), [("Let me see: 43 </think> 43", 1), ("4 times 12 is 48, minus 5 is 43", 0), ("</think>48", 0)]
)
def test_thinking_must_end_in_the_right_answer(answer: str, passed: int, tmp_path: Path) -> None:
    axis = Capability(Capability.Settings.model_validate({"kinds": ["arithmetic"]}))
    request = axis.requests(_inputs())["short"].select([0])
    settings = tuple(sorted({**dict(request.settings), "kinds": "thinking"}.items()))
    note = '{"ends":"</think>","id":"thinking"}'
    request = replace(request, axis="capability.thinking", settings=settings, notes=(note,))
    ref = _capture(tmp_path, "f32", request, {"thinking": "</think>43"})
    pair = Pair.match(ref, _capture(tmp_path, "int4", request, {"thinking": answer}))
    assert axis.score_parts({"thinking": pair}, 0).num.tolist() == [passed]


# ------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A reference that is always right; candidates that forget, or write nothing."""
    cwd = tmp_path_factory.mktemp("capability")
    write_inputs(cwd)
    asked = [(check.prompt, RIGHT[check.id]) for check in CHECKS if check.id in RIGHT and check.kind != "parallel"]
    answers = [("The password is", "harbor"), *((text, right) for text, right in asked if text)]
    (cwd / "answers.json").write_text(json.dumps(answers))
    (cwd / "exp.yaml").write_text(
        "model: fake\nengine: fake\nreference: exact\ncontrol: none\ntext: text.txt\nprompts: prompts.txt\n"
        "engine_args: {answers: answers.json}\ncandidates: [exact, 'forget[every=2]', 'forget[every=8]', missing]\n"
        "axes:\n  capability: {n_predict: 64, code_tokens: 512, long: 512}\n  kld: {windows: 8, n_ctx: 16}\n"
    )
    return cli("compare", "-f", "exp.yaml", cwd=cwd)


def _of(done: Done, name: str) -> Measurement:
    return done.axis(name, "capability")


N_CODE = 8 if CONFINED else 0
N_ALL = 19 + N_CODE + 8  # an empty prompt has no tokens without a chat template


def test_a_candidate_that_writes_nothing_failed(done: Done) -> None:
    axis = _of(done, "missing")
    assert (axis.status, axis.n_failed) == ("failed", N_ALL)
    assert done.arm("missing")["verdict"]["band"] == "FAIL"


def test_the_floor_holds_a_quarter_of_each_part_and_lists_no_unasked_check(done: Done) -> None:
    floor = done.floor("capability")
    assert (floor.status, floor.value("score")) == ("identical", 100.0)
    assert floor.n_items == 5 + N_CODE // 4 + 2
    reasons = {row["reason"] for row in _table(floor).values() if row["outcome"] == "not applicable"}
    assert "not asked in these captures" not in reasons


# ------------------------------------------------------------------------------------- the embedded model


@pytest.fixture
def _same_torch_afterwards() -> Iterator[None]:
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)


@pytest.mark.long
@pytest.mark.model
@pytest.mark.usefixtures("_same_torch_afterwards")
def test_the_embedded_model_knows_capitals_and_batches_as_it_answers_alone(smollm2: Model, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    axis = Capability(Capability.Settings.model_validate({"kinds": ["knowledge", "parallel"], "n_predict": 12}))
    asked = axis.requests(_inputs(smollm2.max_positions, tokenizer))
    assert dict(asked["short"].settings)["template"] == "chat"
    requests = {part: request.select([0, 2, 3] if part == "short" else [1, 2]) for part, request in asked.items()}
    engine, arm = tiny.opened(smollm2.path), tiny.arm(smollm2.path)
    store_vocabulary(tmp_path, tokenizer.vocabulary(), tokenizer.pieces())
    pairs = {}
    for part, request in requests.items():
        sink = tiny.Answers()
        answer = engine.answer(request, sink)
        key = capture_key(arm, request, {}, 0)
        writer = CaptureWriter(tmp_path / part, request, key, to_json(arm), tokenizer.vocabulary())
        for item, arrays in sink.items.items():
            writer.add(item, arrays)
        capture = Capture(writer.finish(str(answer.estimator), {}, {}))
        pairs[part] = Pair.match(capture, capture)
    score = axis.score_parts(pairs, 0)
    asked_ids = ("knowledge-1", "knowledge-3", "knowledge-4", "parallel-2", "parallel-3")
    rows = _table(_axis(score))
    assert {name: rows[name]["outcome"] for name in asked_ids} == dict.fromkeys(asked_ids, "both pass")
    assert score.identical
