"""Dialogues with one right next call each, what is wrong with a call, and prompts through chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fidelab.core.errors import InputError
from fidelab.inputs.questions.graders import validate_tools
from fidelab.inputs.tokens import Tokenizer
from fidelab.inputs.toolcalls.dialogue import Dialogue
from fidelab.inputs.toolcalls.judge import KINDS, Wanted, judge, violation
from fidelab.inputs.toolcalls.load import load_dialogues
from fidelab.inputs.toolcalls.prompts import ask, filler_text, form_of
from fidelab.inputs.toolcalls.read import Call, Reading, read_calls
from fidelab.models import resolve

DIALOGUES = load_dialogues()
ORDERS = next(one for one in DIALOGUES if one.id == "orders-1")
FAKE = Tokenizer.load(resolve("fake"))


# ---------------------------------------------------------------------------------------------------------- dialogues


def test_there_are_200_calls_in_dialogues_of_five_turns_or_more() -> None:
    assert sum(len(dialogue.steps) for dialogue in DIALOGUES) >= 200
    assert all(len(dialogue.steps) >= 5 for dialogue in DIALOGUES)
    assert len({dialogue.id for dialogue in DIALOGUES}) == len(DIALOGUES)
    asked = {tuple((step.user, step.name, json.dumps(step.arguments)) for step in one.steps) for one in DIALOGUES}
    assert len(asked) == len(DIALOGUES)


def test_dialogues_are_the_same_each_time() -> None:
    load_dialogues.cache_clear()
    assert load_dialogues() == DIALOGUES


@pytest.mark.parametrize("dialogue", DIALOGUES, ids=lambda one: one.id)
def test_every_right_call_is_offered_and_valid_and_names_nothing_that_was_not_said(dialogue: Dialogue) -> None:
    validate_tools(dialogue.tools)
    names = {tool["function"]["name"] for tool in dialogue.tools}
    for number, step in enumerate(dialogue.steps):
        assert step.name in names
        assert violation(dialogue.schema(step.name), dict(step.arguments)) == ""
        said = " ".join(message["content"] for message in dialogue.before(number)).lower()
        for leaf in _leaves(step.arguments):
            assert leaf.lower() in said or leaf in _PARAPHRASED, (step.user, leaf)


_PARAPHRASED = {"write", "=", "<", ">", "first", "2", "1", "date", "duplicate", "C", "F", "K"}
"""Values that are said in other words: ``may write``, ``above``, ``one``, ``two passengers``."""


def _leaves(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [leaf for one in value.values() for leaf in _leaves(one)]
    if isinstance(value, list):
        return [leaf for one in value for leaf in _leaves(one)]
    return [] if isinstance(value, bool) else [str(value)]


def test_schemas_have_every_kind_of_argument() -> None:
    text = json.dumps([dialogue.tools for dialogue in DIALOGUES[:8]])
    for kind in ("object", "array", "string", "integer", "number", "boolean"):
        assert f'"type": "{kind}"' in text
    assert '"enum"' in text
    assert '"default"' in text
    functions = [tool["function"]["parameters"] for dialogue in DIALOGUES[:8] for tool in dialogue.tools]
    assert any(set(one["required"]) < set(one["properties"]) for one in functions)


# ---------------------------------------------------------------------------------------------------------- judgement

STEP = ORDERS.steps[0]
NAMES = [tool["function"]["name"] for tool in ORDERS.tools]
WANTED = Wanted(STEP.name, STEP.arguments, ORDERS.schema(STEP.name), NAMES)


def _judged(arguments: Any, name: str = STEP.name, **more: Any) -> tuple[str, str]:
    found = judge(Reading((Call(name, arguments, **more),)), WANTED)
    assert found.kind in KINDS
    return found.kind, found.fault


def _changed(**values: Any) -> dict[str, Any]:
    return {**STEP.arguments, **values}


def test_the_right_call_is_right_in_another_order_and_with_other_numbers_of_the_same_value() -> None:
    assert _judged(STEP.arguments) == ("right", "")
    assert _judged(dict(reversed(list(STEP.arguments.items())))) == ("right", "")
    items = [{**item, "quantity": float(item["quantity"])} for item in STEP.arguments["items"]]
    assert _judged(_changed(items=items)) == ("right", "")


def test_an_optional_argument_with_its_default_may_be_there_or_not() -> None:
    last = ORDERS.steps[-1]
    wanted = Wanted(last.name, last.arguments, ORDERS.schema(last.name), NAMES)
    for more in ({}, {"gift": False}):
        assert judge(Reading((Call(last.name, {**last.arguments, **more}),)), wanted).kind == "right"
    assert judge(Reading((Call(last.name, {**last.arguments, "gift": True}),)), wanted).kind == "wrong arguments"


def test_each_kind_of_fault_is_named() -> None:
    assert judge(read_calls("No."), WANTED) == judge(Reading(fault="no call, only text"), WANTED)
    assert judge(Reading((Call("a", {}),) * 2), WANTED).fault == "2 calls, expected 1"
    assert _judged({}, "refund") == ("wrong function", "refund called, expected place_order")
    assert _judged({}, "buy") == ("wrong function", "buy called, which is not offered, expected place_order")
    assert _judged({key: value for key, value in STEP.arguments.items() if key != "gift"})[0] == "wrong arguments"
    assert _judged(_changed(gift="true"))[0] == "invalid arguments"
    assert _judged(_changed(Gift=True))[0] == "invalid arguments"
    shipping = {**STEP.arguments["shipping"], "floor": 99}
    kind, fault = _judged(_changed(shipping=shipping))
    assert kind == "wrong arguments"
    assert fault.startswith("shipping is ")


def test_a_number_written_as_text_is_invalid_unless_the_form_writes_only_texts() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
    wanted = Wanted("f", {"n": 5, "s": "5"}, schema, ["f"])
    assert judge(Reading((Call("f", {"n": "5", "s": "5"}),)), wanted).kind == "invalid arguments"
    assert judge(Reading((Call("f", {"n": "5", "s": "5"}, texts=True),)), wanted).kind == "right"
    assert judge(Reading((Call("f", {"n": "x", "s": "5"}, texts=True),)), wanted).kind == "invalid arguments"
    assert judge(Reading((Call("f", {"n": 5, "s": 5}),)), wanted).kind == "invalid arguments"
    nested = Wanted("f", {"o": {"a": [True]}}, {"type": "object", "properties": {"o": {"type": "object"}}}, ["f"])
    for text in ('{"a": [true]}', "{'a': [True]}"):
        assert judge(Reading((Call("f", {"o": text}, texts=True),)), nested).kind == "right"


def test_what_is_wrong_can_always_be_written_down() -> None:
    for text in ('[refund(order="\\ud800", amount=1)]', '<|tool_call>call:refund{order:"\\ud800"}<tool_call|>'):
        found = judge(read_calls(text), Wanted("refund", {"order": "a"}, {"type": "object"}, ["refund"]))
        assert found.kind == "wrong arguments"
        assert found.fault.encode()


# ------------------------------------------------------------------------------------------------------------ prompts


class Template:
    """A chat template like Hermes'.  ``tools``: shows them; ``texts``: wants arguments as text; ``hides``: leaves
    out calls; ``refuses``: a role; ``thinks``: its prompts end in an empty block of reasoning that dialogues lack.
    """

    def __init__(self, *, tools: bool = True, texts: bool = False, hides: bool = False, **more: Any) -> None:
        self.tools, self.texts, self.hides = tools, texts, hides
        self.refuses, self.thinks = more.get("refuses", ""), more.get("thinks", False)

    def render(self, messages: Sequence[Any], tools: Sequence[Any], *, generation: bool, private: bool) -> str:
        if self.refuses in [message["role"] for message in messages]:
            raise InputError("the chat template refuses the prompt")
        text = "".join(f"{json.dumps(tool)}\n" for tool in tools) if self.tools else ""
        for message in messages:
            text += f"<{message['role']}>{message['content']}"
            for call in message.get("tool_calls", ()) if self.tools and not self.hides else ():
                function = call["function"]
                if isinstance(function["arguments"], str) is not self.texts:
                    raise InputError("the chat template refuses the prompt")
                written = function["arguments"] if self.texts else json.dumps(function["arguments"])
                text += f'<tool_call>{{"name": "{function["name"]}", "arguments": {written}}}</tool_call>'
            text += "<end>\n"
        return text + (f"<assistant>{'<think></think>' if self.thinks else ''}" if generation else "")

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


def _with(**template: Any) -> Tokenizer:
    return replace(FAKE, template="chat", backend=Template(**template))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ({}, "template"),
        ({"texts": True}, "template with texts"),
        ({"tools": False}, "plain JSON"),
        ({"refuses": "tool"}, "plain JSON"),
        ({"hides": True}, "plain JSON"),
    ],
)
def test_the_form_follows_from_what_the_template_shows(template: dict[str, Any], form: str) -> None:
    assert form_of(_with(**template), DIALOGUES) == form
    assert form_of(FAKE, DIALOGUES) == "plain JSON"


@pytest.mark.parametrize("template", [{}, {"texts": True}, {"tools": False}, {"refuses": "system"}, {"thinks": True}])
def test_prompt_and_right_call_are_those_of_the_template_and_the_call_is_read_back(template: dict[str, Any]) -> None:
    tokenizer = _with(**template)
    form = form_of(tokenizer, DIALOGUES)
    for number, step in enumerate(ORDERS.steps):
        asked = ask(tokenizer, ORDERS, number, form)
        prompt, right = (bytes(ids).decode() for ids in (asked.prompt, asked.right))
        assert prompt.endswith(f"{step.user}<end>\n<assistant>{'<think></think>' if template.get('thinks') else ''}")
        given = bytes(asked.given).decode()
        assert given == prompt.removesuffix("<think></think>")
        assert right.endswith("<end>")
        [call] = read_calls(right.removesuffix("<end>")).calls
        assert (call.name, call.arguments) == (step.name, step.arguments)


def test_a_template_without_system_messages_gets_plain_json_in_the_first_question() -> None:
    class Plain(Template):
        def render(self, messages: Sequence[Any], tools: Sequence[Any], *, generation: bool, private: bool) -> str:
            if {"system", "tool"} & {message["role"] for message in messages}:
                raise InputError("the chat template refuses the prompt")
            return super().render(messages, tools, generation=generation, private=private)

    tokenizer = replace(FAKE, template="chat", backend=Plain(tools=False))  # type: ignore[arg-type]
    prompt = bytes(ask(tokenizer, ORDERS, 1, "plain JSON").prompt).decode()
    assert prompt.startswith("<user>You have these functions")
    assert f"Result of place_order: {json.dumps(ORDERS.steps[0].result)}<end>" in prompt


def test_filler_has_the_wanted_tokens_and_stands_before_the_first_question() -> None:
    filler = filler_text(FAKE, 3000, 1)
    assert 3000 <= len(filler) <= 3200
    assert filler_text(FAKE, 0, 1) == ""
    assert filler_text(FAKE, 3000, 2) != filler
    asked = ask(FAKE, ORDERS, 2, "plain JSON", filler)
    text = bytes(asked.prompt).decode()
    assert text.index(filler) < text.index(ORDERS.steps[0].user)
    assert asked.right == ask(FAKE, ORDERS, 2, "plain JSON").right
