"""Axis toolcalls: whether the arm's tool calls parse and fit the tool's schema, at the turns of a log that call a tool.

See docs/metrics.md#tool-calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from json import loads
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from fidelab.axes.answers import tool_calls
from fidelab.axes.base import (
    OVER_CONTROL,
    Axis,
    AxisInputs,
    AxisScore,
    AxisSettings,
    answer_text,
    greedy_request,
    lost_and_gained,
    notes_of,
    select_groups,
    texts,
)
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate, Request
from fidelab.core import canonical_json
from fidelab.core.errors import InputError, UnavailableError
from fidelab.metrics.equivalence import flip_counts
from fidelab.metrics.intervals import RatioItems, ratio_estimate, ratio_interval, wilson_interval
from fidelab.results.measurement import Definition, Metric
from fidelab.results.plots import TextPair

_MAX_SHOWN_TURNS = 8  # lost turns for which the report shows the text

_VALID = Definition("valid", "share", "higher", "Share of the turns with calls that all parse and fit their schemas.")
_REFERENCE = Definition("valid_in_the_reference", "share", None, "The same share of the reference.")
_DIFFERENCE = Definition("difference", "points", "higher", "Valid minus valid in the reference, paired over the turns.")
_PARSED = Definition("turns_with_a_call", "count", None, "Turns at which a call can be read from the arm's answer.")
_RIGHT = Definition("valid_turns_of_the_reference", "count", None, "Turns at which the reference's calls are valid.")
_LOST = Definition("lost", "count", "lower", "Turns with valid calls of the reference alone.")
_GAINED = Definition("gained", "count", None, "Turns with valid calls of the arm alone.")
_P = Definition("mcnemar_p", "p", None, "McNemar's exact test of turns lost against gained.", name="McNemar p")
_BY_CLUSTER = Definition(
    "mcnemar_p_by_conversation", "p", None, "The same test over conversations.", name="McNemar p by conversation"
)
_SAME_TOOLS = Definition(
    "same_tools", "share", "higher", "Of the reference's valid turns: the same tools in this order."
)
_SAME = Definition("same_calls", "share", "higher", "Of the reference's valid turns: the same tools and arguments.")


class ToolCallsSettings(AxisSettings):
    """Turns and length of the answers; part of the comparability key except for ``batch``."""

    limit: int | None = Field(default=64, ge=1, description="first turns only; null: all")
    n_predict: int = Field(default=256, ge=1, description="tokens generated per turn")
    batch: int = Field(default=16, ge=1, description="turns decoded together")


class ToolCalls(Axis):
    """Greedy answers at the turns of a log at which its assistant called tools, with the turns before as prompt.

    See docs/metrics.md#tool-calls.
    """

    name: ClassVar[str] = "toolcalls"
    title: ClassVar[str] = "Tool calls: do they still parse and fit their schemas?"
    Settings: ClassVar[type[AxisSettings]] = ToolCallsSettings
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="points", better="higher")
    quick: ClassVar[Mapping[str, Any]] = {"limit": 8}
    settings: ToolCallsSettings

    def request(self, inputs: AxisInputs) -> Generate:
        s = self.settings
        turns = _turns(inputs)
        if not turns:
            raise UnavailableError(
                "toolcalls asks at the turns of a log at which the assistant called tools: give one with tools and "
                "calls of them (--traffic FILE.jsonl), and a model whose chat template writes tools"
            )
        room = inputs.max_positions
        fitting = [turn for turn in turns if room is None or len(turn[0]) + s.n_predict <= room]
        if not fitting:
            shortest = min(len(turn[0]) for turn in turns)
            raise InputError(
                f"toolcalls: the shortest turn has {shortest} tokens; with n_predict {s.n_predict} that is beyond the "
                f"model's limit of {room} positions"
            )
        asked = fitting[: s.limit]
        prompts, notes = tuple(prompt for prompt, _ in asked), tuple(note for _, note in asked)
        settings = (("n_predict", s.n_predict), ("template", "chat"), ("too_long", len(turns) - len(fitting)))
        return greedy_request(inputs, self.name, prompts, s, settings, notes=notes)

    def available(self, inputs: AxisInputs) -> int:
        return len(_turns(inputs))

    def repeated(self, request: Request, share: float) -> Request | None:
        conversations = [loads(note)["conversation"] for note in request.notes] if isinstance(request, Generate) else []
        return select_groups(request, conversations, share)

    def score(self, pair: Pair, seed: int) -> AxisScore:
        items = _read(pair)
        valid = {side: np.array([getattr(item, side).valid for item in items], dtype=float) for side in ("ref", "test")}
        score = AxisScore.percent(
            valid["test"],
            [item.conversation for item in items],
            [item.answered for item in items],
            identical=all(item.answered and item.same_ids for item in items),
            right=(valid["ref"], valid["test"]),
        )
        answered = [item for item in items if item.answered]
        able = sum(item.ref.valid for item in answered)
        never = f"the reference writes no valid tool call at any of {len(answered)} turns: there is nothing to compare"
        return replace(score, not_measurable="" if able or not answered else never).with_measurement(
            metrics=_metrics(score, answered, seed) if able else (),
            plots=texts("Turns whose calls were lost", map(_text_pair, _lost_turns(answered)[:_MAX_SHOWN_TURNS])),
            cluster="conversation",
            summary=lost_and_gained([(float(item.ref.valid), float(item.test.valid)) for item in answered]),
            reference_summary=f"calls tools at {able} of {len(answered)} turns" if answered else "",
            facts={"turns": len(items), "turns_left_out_as_too_long": dict(pair.ref.request.settings)["too_long"]},
        )


def _turns(inputs: AxisInputs) -> list[tuple[tuple[int, ...], str]]:
    """Return the prompt and note of every turn with a tool call; empty if the template leaves tools out.

    A note holds the conversation's number and the tools as token ids, since the words of a log are not stored.
    """
    tokenizer, traffic = inputs.tokenizer, inputs.traffic
    if traffic is None or traffic.text is not None or tokenizer.template != "chat":
        return []
    turns = []
    for number, conversation in enumerate(traffic.conversations):
        messages, tools = conversation.messages, conversation.tools
        called = [
            i for i, message in enumerate(messages) if message["role"] == "assistant" and message.get("tool_calls")
        ]
        if not tools or not called:
            continue
        note = canonical_json({"conversation": number, "tools": list(tokenizer.encode(canonical_json(list(tools))))})
        for index in called:
            if not index:
                continue
            try:
                offered, plain = (
                    tokenizer.render(messages[:index], tools=offer, generation=True, private=True)
                    for offer in (tools, ())
                )
            except InputError:  # a template that accepts only whole conversations
                continue
            if offered != plain:
                turns.append((tuple(tokenizer.encode(offered)), note))
    return turns


@dataclass(frozen=True)
class _Answer:
    """The calls of one side's answer; ``valid``: it has calls, and all fit their tools' schemas."""

    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    valid: bool


@dataclass(frozen=True)
class _Turn:
    """One turn on both sides."""

    index: int
    conversation: int
    ref: _Answer
    test: _Answer
    answered: bool
    same_ids: bool


def _read(pair: Pair) -> list[_Turn]:
    turns, notes = [], notes_of(pair.ref)
    for r, t in pair.items:
        note = notes[r]
        schemas = _schemas(pair.ref.text(note["tools"]))
        ref, test = _answer(pair.ref, r, schemas), _answer(pair.test, t, schemas)
        ids = pair.ref.ids(r), pair.test.ids(t)
        turns.append(_Turn(r, int(note["conversation"]), ref, test, bool(ids[0] and ids[1]), ids[0] == ids[1]))
    return turns


def _schemas(text: str) -> dict[str, Any]:
    """Return the tools' schemas by name, from the JSON of the tools."""
    tools = loads(text[text.index("[") :])
    return {tool["function"]["name"]: tool["function"].get("parameters", {"type": "object"}) for tool in tools}


def _answer(capture: Capture, item: int, schemas: Mapping[str, Any]) -> _Answer:
    if capture.items[item]["failed"] is not None or not capture.ids(item):
        return _Answer("", (), False)
    text = answer_text(capture, item)
    calls = tuple(tool_calls(text))
    valid = bool(calls) and all(name in schemas and fits_schema(given, schemas[name]) for name, given in calls)
    return _Answer(text, calls, valid)


def fits_schema(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    """Return whether a call's arguments match the tool's JSON schema (2020-12).

    Nothing matches a schema that refers to another document, since none is fetched.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    registry: Any = Registry()
    try:
        return bool(Draft202012Validator(schema, registry=registry).is_valid(arguments))
    except (SchemaError, Unresolvable, RecursionError, TypeError, ValueError):
        return False


def _lost_turns(turns: Sequence[_Turn]) -> list[_Turn]:
    return [turn for turn in turns if turn.ref.valid and not turn.test.valid]


def _metrics(score: AxisScore, turns: Sequence[_Turn], seed: int) -> tuple[Metric, ...]:
    clusters = score.clusters[score.usable]
    valid = {side: np.array([getattr(turn, side).valid for turn in turns], dtype=float) for side in ("ref", "test")}
    ref, test = (RatioItems.of(valid[side], 1.0, clusters) for side in ("ref", "test"))
    limits: dict[str, Any] = {"bounds": (0.0, 1.0), "proportion": True}
    difference = score.minus_reference(seed)
    flips = flip_counts(valid["ref"], valid["test"], clusters)
    able = [turn for turn in turns if turn.ref.valid]
    tools = sum([name for name, _ in turn.ref.calls] == [name for name, _ in turn.test.calls] for turn in able)
    calls = sum(turn.ref.calls == turn.test.calls for turn in able)
    return (
        score.score(seed),
        _VALID(ratio_estimate(test), ratio_interval(test, seed, **limits)),
        _REFERENCE(ratio_estimate(ref), ratio_interval(ref, seed, **limits)),
        _DIFFERENCE(difference.estimate, difference.interval),
        _PARSED(sum(bool(turn.test.calls) for turn in turns)),
        _RIGHT(len(able)),
        _LOST(flips.harmful),
        _GAINED(flips.beneficial),
        _P(flips.p),
        _BY_CLUSTER(flips.p_clusters),
        _SAME_TOOLS(tools / len(able), wilson_interval(tools, len(able))),
        _SAME(calls / len(able), wilson_interval(calls, len(able))),
    )


def _text_pair(turn: _Turn) -> TextPair:
    return TextPair(
        label=f"turn {turn.index} of conversation {turn.conversation}",
        reference=turn.ref.text.strip(),
        candidate=turn.test.text.strip(),
        note="the candidate's calls do not fit the schemas" if turn.test.calls else "no call can be read",
    )
