"""Prompts that ask for calls, and the tokens of the right calls, by the model's own chat template.

A template without tools, or one that refuses these dialogues, gets plain JSON: the functions and the form of a call
are in the system message.  See docs/metrics/generated-text.md#tool-calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from fidelab.captures.requests import Tokens
from fidelab.core.errors import InputError
from fidelab.inputs.texts import load_text
from fidelab.inputs.tokens import Tokenizer, Tools
from fidelab.inputs.toolcalls.dialogue import Dialogue

Form = Literal["template", "template with texts", "plain JSON"]
"""How calls are asked for; ``with texts``: the template takes arguments as JSON texts."""
_FILLED = "These are the notes of an earlier session:\n\n{}\n\nThe notes end here.\n\n"


@dataclass(frozen=True)
class Asked:
    """The prompt of one call; ``right``: the tokens of the right call, and ``given``: those before it in the dialogue.

    ``given`` is the prompt, but for what a prompt alone has, such as an opened block of reasoning.  A template that
    hides the call leaves ``right`` empty.
    """

    prompt: Tokens
    given: Tokens
    right: Tokens


def form_of(tokenizer: Tokenizer, dialogues: Sequence[Dialogue]) -> Form:
    """Return the form in which a model's template shows functions, calls and results; plain JSON if it does not."""
    if tokenizer.template != "chat" or not dialogues:
        return "plain JSON"
    dialogue, forms = dialogues[0], tuple[Form, ...](("template", "template with texts"))
    for form in forms:
        last, texts = len(dialogue.steps) - 1, form != "template"
        messages = [*dialogue.before(last, texts=texts), dialogue.call(last, texts=texts)]
        try:
            written = tokenizer.render(messages, tools=dialogue.tools, private=True)
        except InputError:
            continue
        shown = _behind(tokenizer.render(messages[:-1], tools=dialogue.tools, private=True), written)
        names = [tool["function"]["name"] for tool in dialogue.tools]
        values = [value for step in dialogue.steps for value in _leaves(step.arguments) + _leaves(step.result)]
        keys = [key for tool in dialogue.tools for key in tool["function"]["parameters"]["properties"]]
        own = (dialogue.steps[last].name, *_leaves(dialogue.steps[last].arguments))
        if all(word in written for word in (*names, *keys, *values)) and all(word in shown for word in own):
            return form
    return "plain JSON"


def _leaves(value: Any) -> list[str]:
    """Texts without signs that a template may escape, and numbers."""
    if isinstance(value, Mapping):
        return [leaf for one in value.values() for leaf in _leaves(one)]
    if isinstance(value, list):
        return [leaf for one in value for leaf in _leaves(one)]
    if isinstance(value, bool):
        return []
    return [str(value)] if isinstance(value, int | float) or str(value).isalnum() else []


def ask(tokenizer: Tokenizer, dialogue: Dialogue, step: int, form: Form, filler: str = "") -> Asked:
    """Return one call as token ids, its dialogue before it.

    ``filler``: text before the first question.

    Raises:
        InputError: If the template refuses the dialogue.
    """
    before, tools = _messages(dialogue, step, form, filler)
    right = _right(dialogue, step, form)
    bos = () if tokenizer.template == "chat" or tokenizer.bos_id is None else (tokenizer.bos_id,)
    try:
        return _rendered(tokenizer, bos, before, right, tools)
    except InputError:
        if before[0]["role"] != "system":
            raise
    # a template without system messages: it begins the first question
    first = {"role": "user", "content": f"{before[0]['content']}\n\n{before[1]['content']}"}
    return _rendered(tokenizer, bos, [first, *before[2:]], right, tools)


def filler_text(tokenizer: Tokenizer, tokens: int, number: int) -> str:
    """Return text with about so many tokens before a question, of recorded work with tools.

    ``number``: of the dialogue; another one begins at another document.
    """
    if not tokens:
        return ""
    documents = _recorded()
    first = number % len(documents)
    joined, ids = "", tuple[int, ...]()
    for document in [*documents[first:], *documents[:first]] * (1 + tokens // 1000):
        joined += document
        if len(joined) < 2 * tokens:  # characters; few tokens have fewer than two
            continue
        ids = tokenizer.encode(joined[: 12 * tokens])
        if len(ids) >= tokens:
            break
    return _FILLED.format(tokenizer.decode(ids[:tokens]).strip())


@lru_cache(maxsize=1)
def _recorded() -> tuple[str, ...]:
    """Recorded work with tools: documents of the text ``agents``."""
    text = load_text("agents")
    ends = [*text.doc_starts[1:], len(text.content)]
    return tuple(
        text.content[start:end]
        for index, (start, end) in enumerate(zip(text.doc_starts, ends, strict=True))
        if text.domain_of(index) == "tool calls"
    )


def _rendered(
    tokenizer: Tokenizer, bos: Tokens, before: Sequence[Mapping[str, Any]], right: Mapping[str, Any], tools: Tools
) -> Asked:
    prompt = tokenizer.render(before, tools=tools, generation=True, private=True)
    whole = tokenizer.render([*before, right], tools=tools, private=True)
    answer = _behind(prompt, whole)
    given = whole[: len(whole) - len(answer)]
    answer = answer.rstrip("\n")
    return Asked((*bos, *tokenizer.encode(prompt)), (*bos, *tokenizer.encode(given)), tokenizer.encode(answer))


def _behind(start: str, whole: str) -> str:
    """Return the end of a text that another one lacks; a marker within which they part belongs to it."""
    at = next((n for n, (one, other) in enumerate(zip(start, whole, strict=False)) if one != other), len(start))
    if at < len(start):
        opened = max(whole.rfind("<", 0, at), whole.rfind("[", 0, at))
        if opened > max(whole.rfind(">", 0, at), whole.rfind("]", 0, at)):
            at = opened
    return whole[at:]


def _messages(dialogue: Dialogue, step: int, form: Form, filler: str) -> tuple[list[dict[str, Any]], Tools]:
    messages = dialogue.before(step, texts=form == "template with texts")
    if filler:
        messages[0] = {**messages[0], "content": filler + messages[0]["content"]}
    if form != "plain JSON":
        return messages, dialogue.tools
    plain = [{"role": "system", "content": _instructions(dialogue)}]
    calls = iter(range(step))
    for message in messages:
        if "tool_calls" in message:
            plain.append(_right(dialogue, next(calls), form))
        elif message["role"] == "tool":
            plain.append({"role": "user", "content": f"Result of {message['name']}: {message['content']}"})
        else:
            plain.append(message)
    return plain, ()


def _right(dialogue: Dialogue, step: int, form: Form) -> dict[str, Any]:
    if form != "plain JSON":
        return dialogue.call(step, texts=form == "template with texts")
    one = dialogue.steps[step]
    return {"role": "assistant", "content": json.dumps({"name": one.name, "arguments": dict(one.arguments)})}


def _instructions(dialogue: Dialogue) -> str:
    functions = "\n".join(json.dumps(tool["function"]) for tool in dialogue.tools)
    return (
        f"You have these functions, with JSON schemas of their parameters:\n{functions}\n"
        "To do what the user asks, call one of them: write only a JSON object with the name of the function and its "
        'arguments, {"name": "…", "arguments": {…}}. You then get its result. Leave out optional arguments that the '
        "user does not mention."
    )
