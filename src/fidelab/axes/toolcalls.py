"""Tool calls: does the candidate still make the calls that the reference makes, and how far do their tokens shift?

See docs/metrics/generated-text.md#tool-calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from fidelab.axes.base import OVER_CONTROL, Axis, AxisInputs, AxisScore, AxisSettings, greedy_request, part_name
from fidelab.axes.rows import compare_item, estimator_of, figures_of, not_measurable
from fidelab.axes.toolcalls_figures import Answer, Item, TokenRows, toolcalls_score
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Forced, Generate, Request
from fidelab.core import Estimator, canonical_json, strict_json
from fidelab.core.errors import CaptureError, InputError
from fidelab.inputs.questions.graders import validate_schema
from fidelab.inputs.toolcalls.dialogue import Dialogue
from fidelab.inputs.toolcalls.judge import Wanted, judge
from fidelab.inputs.toolcalls.load import load_dialogues
from fidelab.inputs.toolcalls.prompts import Asked, Form, ask, filler_text, form_of
from fidelab.inputs.toolcalls.read import read_calls
from fidelab.results.measurement import Definition

_CALLS, _KL = "calls", "kl"  # parts, each with its depth: calls.0
_NOT_READ = ", not read back"
_TAIL = 16  # tokens at the end of a prompt that may open a block of reasoning


class ToolCallsSettings(AxisSettings):
    """Dialogues and depths; part of the comparability key except for ``batch``."""

    limit: int | None = Field(default=None, ge=1, description="first dialogues only, of five calls each; null: all 40")
    n_predict: int = Field(default=256, ge=1, description="tokens generated per call")
    depth: tuple[int, ...] = Field(
        default=(0,), min_length=1, description="tokens of other work before each dialogue; several: a part for each"
    )
    batch: int = Field(default=16, ge=1, description="calls decoded together")

    @field_validator("depth")
    @classmethod
    def _rising(cls, depth: tuple[int, ...]) -> tuple[int, ...]:
        if min(depth) < 0:
            raise ValueError("a depth is 0 or more tokens")
        return tuple(sorted(set(depth)))


class ToolCalls(Axis):
    """Right calls of tools in percent, and the KL on the tokens of the right calls.

    See docs/metrics/generated-text.md#tool-calls.
    """

    name: ClassVar[str] = "toolcalls"
    title: ClassVar[str] = "Tool calls: are the right functions called with the right arguments?"
    Settings: ClassVar[type[AxisSettings]] = ToolCallsSettings
    covers: ClassVar[str] = "tasks"
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="points", better="higher")
    quick: ClassVar[Mapping[str, Any]] = {"limit": 4}
    settings: ToolCallsSettings

    def requests(self, inputs: AxisInputs) -> Mapping[str, Request]:
        s, found = self.settings, dict[str, Request]()
        dialogues = load_dialogues()[: s.limit]
        form = form_of(inputs.tokenizer, dialogues)
        for depth in s.depth:
            asked = self._asked(inputs, dialogues, form, depth)
            same = (("depth", depth), ("form", f"{form}{'' if _is_read(inputs, asked[0]) else _NOT_READ}"))
            calls = greedy_request(
                inputs,
                part_name(self.name, f"{_CALLS}.{depth}"),
                tuple(one.prompt for _, one in asked),
                s,
                (*same, ("n_predict", s.n_predict)),
                notes=tuple(note for note, _ in asked),
            )
            found[f"{_CALLS}.{depth}"] = calls
            if shown := [(note, one) for note, one in asked if one.right]:
                found[f"{_KL}.{depth}"] = Forced(
                    part_name(self.name, f"{_KL}.{depth}"),
                    tuple(one.given for _, one in shown),
                    tuple(one.right for _, one in shown),
                    same,
                    tuple(note for note, _ in shown),
                )
        return found

    def _asked(
        self, inputs: AxisInputs, dialogues: Sequence[Dialogue], form: Form, depth: int
    ) -> list[tuple[str, Asked]]:
        """Notes and token ids of all calls at a depth."""
        found = []
        for number, dialogue in enumerate(dialogues):
            filler = filler_text(inputs.tokenizer, depth, number)
            for step in range(len(dialogue.steps)):
                one = ask(inputs.tokenizer, dialogue, step, form, filler)
                found.append((canonical_json(_note(dialogue, number, step)), one))
        longest = max(len(one.prompt) + max(self.settings.n_predict, len(one.right)) for _, one in found)
        if inputs.max_positions is not None and longest > inputs.max_positions:
            smaller = "axes.toolcalls.depth" if depth else "axes.toolcalls.n_predict"
            raise InputError(
                f"toolcalls: dialogues at depth {depth} need {longest:,} tokens with n_predict "
                f"{self.settings.n_predict}; the model's limit is {inputs.max_positions:,}: use a smaller {smaller}"
            )
        return found

    def remarks(self, inputs: AxisInputs, requests: Mapping[str, Request]) -> Iterator[str]:
        settings = [dict(request.settings) for request in requests.values()]
        forms = {str(one.get("form")) for one in settings}
        if "plain JSON" in forms:
            yield "toolcalls: the chat template shows no tools, calls are asked for as plain JSON"
        if any(form.endswith(_NOT_READ) for form in forms):
            yield "toolcalls: calls as this chat template writes them cannot be read, only their tokens are compared"
        if not any(isinstance(request, Forced) for request in requests.values()):
            yield "toolcalls: the chat template does not show a call as the model writes it, so its tokens have no KL"

    def available(self, inputs: AxisInputs) -> int:
        return len(load_dialogues())

    def compared(self, pair: Pair) -> Iterable[tuple[int, int, NDArray[np.int64]]]:
        if not isinstance(pair.ref.request, Forced):
            return ()
        return ((r, t, _targets(pair.ref.request, r)) for r, t in pair.items)

    def figures(self, pair: Pair) -> Iterable[tuple[int, Mapping[str, NDArray[Any]]]] | None:
        request = pair.ref.request
        if not isinstance(request, Forced):
            return None
        return ((t, figures_of(compare_item(pair, r, t, _targets(request, r)))) for r, t in pair.items)

    def score_parts(self, pairs: Mapping[str, Pair], seed: int) -> AxisScore:
        items, tokens, facts = list[Item](), list[TokenRows](), dict[str, Any]()
        for part, pair in pairs.items():
            kind, _, depth = part.partition(".")
            facts = {**facts, **pair.ref.manifest["settings"]}
            if kind == _CALLS:
                items += _items(pair, int(depth))
            elif (nothing := not_measurable([pair])) is not None:
                facts["no KL"] = nothing.not_measurable
            else:
                tokens += _tokens(pair, int(depth))
        facts["depth"] = sorted({*(item.depth for item in items), *(row.depth for row in tokens)})
        return toolcalls_score(items, tokens, seed, facts)


def _is_read(inputs: AxisInputs, asked: tuple[str, Asked]) -> bool:
    """Whether the right call is read as it is written."""
    note, one = asked
    reading = read_calls(inputs.tokenizer.decode(one.right))
    return not one.right or judge(reading, _wanted(strict_json(note))).kind == "right"


def _note(dialogue: Dialogue, number: int, step: int) -> dict[str, Any]:
    """The parts of a call that scoring needs; ``number``: of the dialogue, its cluster."""
    one = dialogue.steps[step]
    return {
        "id": f"{dialogue.id}.{step + 1}",
        "dialogue": number,
        "name": one.name,
        "arguments": dict(one.arguments),
        "schema": dict(dialogue.schema(one.name)),
        "tools": [tool["function"]["name"] for tool in dialogue.tools],
    }


def _wanted(note: Mapping[str, Any]) -> Wanted:
    tools = [str(tool) for tool in note["tools"]]
    return Wanted(str(note["name"]), dict(note["arguments"]), validate_schema(note["schema"]), tools)


def _noted(capture: Capture, item: int) -> tuple[str, int, Wanted]:
    """Id and dialogue of an item, and its right call."""
    try:
        note = strict_json(capture.request.notes[item])
        return str(note["id"]), int(note["dialogue"]), _wanted(note)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CaptureError(
            f"capture {capture.folder}: the note of item {item} is not a call ({error}); capture again"
        ) from None


def _items(pair: Pair, depth: int) -> Iterator[Item]:
    for r, t in pair.items:
        name, dialogue, wanted = _noted(pair.ref, r)
        yield Item(dialogue, _answer(pair.ref, r, wanted), _answer(pair.test, t, wanted), name, depth)


def _answer(capture: Capture, item: int, wanted: Wanted) -> Answer:
    """One side's answer; a failed item has no ids."""
    request = capture.request
    if capture.items[item]["failed"] is not None or "ids" not in capture.names(item):
        return Answer(())
    assert isinstance(request, Generate)
    ids = capture.ids(item)
    ended = bool(ids) and ids[-1] in request.stop
    text = capture.text(ids[:-1] if ended else ids)
    reading = read_calls(text, capture.text(request.prompts[item][-_TAIL:]))
    cut = len(ids) >= request.max_tokens and not ended
    return Answer(ids, text, judge(reading, wanted), unfinished=cut and not reading.calls)


def _tokens(pair: Pair, depth: int) -> Iterator[TokenRows]:
    bound = estimator_of(pair) is Estimator.TOPK
    for r, t in pair.items:
        _, dialogue, _ = _noted(pair.ref, r)
        yield TokenRows(dialogue, depth, compare_item(pair, r, t, _targets(pair.ref.request, r)), bound)


def _targets(request: Request, item: int) -> NDArray[np.int64]:
    return np.asarray(request.continuations[item] if isinstance(request, Forced) else (), dtype=np.int64)
