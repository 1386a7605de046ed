"""Tool calls: which are read, which fit their schema, and what a loss of them looks like."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fidelab.axes.answers import tool_calls
from fidelab.axes.base import AxisInputs
from fidelab.axes.toolcalls import ToolCalls, fits_schema
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate
from fidelab.core import canonical_json
from fidelab.core.errors import UnavailableError
from fidelab.inputs.conversations import load_traffic
from fidelab.inputs.texts import Text
from fidelab.inputs.tokens import Tokenizer
from fidelab.metrics.intervals import mcnemar_exact
from fidelab.models import resolve
from tests.axes.captures import BYTES, make_arm, make_capture
from tests.run.harness import cli, write_inputs

STOP = 0
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "forecast", "parameters": SCHEMA}}]
GOOD = '<tool_call>{"name": "forecast", "arguments": {"city": "Oslo", "days": 2}}</tool_call>'
OTHER = '<tool_call>{"name": "forecast", "arguments": {"city": "Bergen"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (GOOD, [("forecast", {"city": "Oslo", "days": 2})]),
        (GOOD + "\n" + OTHER, [("forecast", {"city": "Oslo", "days": 2}), ("forecast", {"city": "Bergen"})]),
        ('[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]', [("a", {}), ("b", {})]),
        ('[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[CALL_ID]9[ARGS]{}', [("a", {"x": 1}), ("b", {})]),
        ('<|python_tag|>{"name": "a", "parameters": {"x": "1"}}', [("a", {"x": "1"})]),
        ('{"function": {"name": "a", "arguments": "{\\"x\\": 1}"}}', [("a", {"x": 1})]),
        ("<function=a><parameter=x>1</parameter></function><function=b></function>", [("a", {"x": "1"}), ("b", {})]),
        ('<tool_call>{"name": "forecast", "arguments": {"city": "Os', []),
        ("It will rain.", []),
    ],
)
def test_calls_are_read_in_the_forms_that_models_write(text: str, calls: list[tuple[str, Any]]) -> None:
    assert tool_calls(text) == calls


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"city": "Oslo"}, True),
        ({"city": "Oslo", "days": 3}, True),
        ({"city": "Oslo", "days": 0}, False),
        ({"city": 7}, False),
        ({}, False),
        ({"city": "Oslo", "unit": "C"}, False),
    ],
)
def test_arguments_are_held_against_the_schema(arguments: dict[str, Any], fits: bool) -> None:
    assert fits_schema(arguments, SCHEMA) is fits


def test_no_document_is_fetched_for_a_schema() -> None:
    assert fits_schema({}, {"$ref": "http://127.0.0.1:9/schema.json"}) is False


def _capture(store: Path, name: str, request: Generate, answers: Sequence[str]) -> Capture:
    ids = [[*answer.encode(), STOP] if answer else None for answer in answers]
    failed = {item: "empty output" for item, answer in enumerate(answers) if not answer}
    return make_capture(store / name, request, ids, make_arm(name), pieces=BYTES, failed=failed)


def _score(store: Path, ref: Sequence[str], test: Sequence[str]) -> Any:
    note = {"tools": list(canonical_json(TOOLS).encode())}
    request = Generate(
        "toolcalls",
        tuple((1, i) for i in range(len(ref))),
        400,
        (STOP,),
        settings=(("n_predict", 400), ("template", "chat"), ("too_long", 0)),
        rows=False,
        notes=tuple(canonical_json({**note, "conversation": i // 2}) for i in range(len(ref))),
    )
    pair = Pair.match(_capture(store, "f32", request, ref), _capture(store, "int4", request, test))
    return ToolCalls(ToolCalls.Settings()).score(pair, 0)


def test_each_class_of_turn_is_counted(tmp_path: Path) -> None:
    broken = '<tool_call>{"name": "forecast", "arguments": {"city": '
    unknown = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    misfit = '{"name": "forecast", "arguments": {"city": "Oslo", "days": 0}}'
    ref = [GOOD] * 6 + ["no call", "no call", GOOD, GOOD]
    test = [GOOD, OTHER, broken, unknown, misfit, "no call", GOOD, "no call", GOOD, ""]
    score = _score(tmp_path, ref, test)
    values = {metric.name: metric.value for metric in score.found.metrics}
    assert score.measurement().n_failed == 1
    assert values["valid"] == pytest.approx(4 / 9)
    assert values["valid in the reference"] == pytest.approx(7 / 9)
    assert values["difference"] == pytest.approx(100 * (4 - 7) / 9)
    assert (values["valid turns of the reference"], values["lost"], values["gained"]) == (7, 4, 1)
    assert values["turns with a call"] == 6
    assert values["same tools"] == pytest.approx(4 / 7)
    assert values["same calls"] == pytest.approx(2 / 7)
    assert values["McNemar p"] == pytest.approx(mcnemar_exact(4, 1))
    assert [pair.note for pair in score.found.plots[0].pairs] == [
        "no call can be read",
        *["the candidate's calls do not fit the schemas"] * 2,
        "no call can be read",
    ]


def test_a_reference_without_valid_calls_gives_no_figure(tmp_path: Path) -> None:
    score = _score(tmp_path, ["no call", "none"], ["no call", GOOD])
    found = score.measurement()
    assert found.status == "not_measurable"
    assert found.reason == "the reference writes no valid tool call at any of 2 turns: there is nothing to compare"
    assert not found.metrics


def test_the_right_answers_are_what_a_certificate_rests_on(tmp_path: Path) -> None:
    score = _score(tmp_path, [GOOD, GOOD, "no"], [GOOD, "no", GOOD])
    assert [side.tolist() for side in score.right] == [[1, 1, 0], [1, 0, 1]]


def _log(folder: Path) -> Path:
    lines = []
    for number in range(6):
        call = {"function": {"name": "forecast", "arguments": {"city": f"City {number}"}}}
        messages = [
            {"role": "user", "content": f"Swordfish: will it rain in city {number}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": "Yes."},
        ]
        lines.append(json.dumps({"messages": messages, "tools": TOOLS}))
    file = folder / "log.jsonl"
    file.write_text("\n".join(lines))
    return file


def test_without_a_log_with_tools_the_axis_says_what_it_needs(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    flags = ("--engine", "fake", "--reference", "exact", "--kv", "tilt[q=0.6]", "--windows", 2, "--n-ctx", 16)
    done = cli("compare", "fake", *flags, "--text", "text.txt", "--axes", "kld,toolcalls", cwd=tmp_path)
    assert done.code == 0, done.err
    axis = done.axis("tilt[q=0.6]", "toolcalls")
    assert axis.status == "not_measurable"
    assert "--traffic FILE.jsonl" in str(axis.reason)


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_turns_with_calls_are_asked_and_no_word_of_the_log_is_written_down(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(resolve("smollm2-135m"))
    traffic = load_traffic(_log(tmp_path), tokenizer)
    inputs = AxisInputs(tokenizer, Text("t", "x", (), ""), (), None, traffic, private=True)
    axis = ToolCalls(ToolCalls.Settings())
    with pytest.raises(UnavailableError, match="a model whose chat template writes tools"):
        axis.request(inputs)
    tokenizer.library.chat_template = TEMPLATE
    request = axis.request(inputs)
    assert len(request.prompts) == 6
    assert not any("forecast" in note or "Swordfish" in note for note in request.notes)
    text = tokenizer.decode(request.prompts[2])
    assert "forecast" in text
    assert text.endswith("<user>Swordfish: will it rain in city 2?<assistant>")
    assert json.loads(tokenizer.decode(json.loads(request.notes[2])["tools"])) == TOOLS
