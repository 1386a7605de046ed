"""Tokens that carry structure."""

from __future__ import annotations

import json
import re

import pytest

from fidelab.metrics.structure import structures


def _kinds(text: str, kind: str) -> str:
    """The characters of a kind, where every character is a token; others as dots."""
    return "".join(c if k == kind else "." for c, k in zip(text, structures(list(text)), strict=True))


def test_punctuation_and_keys_of_json_are_found_as_far_as_it_goes_and_values_are_not() -> None:
    text = 'see {"a": [1, "b"], "c": true} end'
    assert _kinds(text, "JSON key") == '....."a"............"c"...........'
    assert _kinds(text, "JSON punctuation").replace(".", "") == "{:[,],:}"
    assert _kinds('{"a": {"b": "unfin', "JSON key") == '."a"..."b"........'


@pytest.mark.parametrize("text", ["an {unbraced} word", "f(x)[i] = {y}", "a: b, c", "[link](address)"])
def test_brackets_that_begin_no_json_carry_none(text: str) -> None:
    assert not any("JSON" in kind for kind in structures(list(text)))


def test_an_object_with_name_and_arguments_or_text_between_tags_is_a_tool_call() -> None:
    call = json.dumps({"name": "f", "arguments": {"x": 1}})
    assert _kinds(f"a {call} b", "tool call") == f"..{call}.."
    assert _kinds("<tool_call>f(1)</tool_call>x", "tool call").strip(".") == "f(1)"


def test_roles_stops_and_indentation_are_found_and_a_token_counts_by_its_first_kind() -> None:
    text = "<|im_start|>user\nif x:\n    y\n<|im_end|>"
    assert re.findall(r"[^.]+", _kinds(text, "role or stop")) == ["<|im_start|>", "<|im_end|>"]
    assert _kinds(text, "indentation").count(" ") == 4
    assert structures(['{"a', '": ', "1}"]) == ["JSON key", "JSON key", "JSON punctuation"]


def test_every_key_and_bracket_of_any_json_is_found() -> None:
    value = {"k1": [{"k2": 'v {"no": 1}'}, [], {}], "k3": {"k4": -1.5e3, "k5": None}}
    text = json.dumps(value, indent=1)
    keys = re.findall(r'"k\d"', _kinds(text, "JSON key"))
    assert sorted(keys) == [f'"k{n}"' for n in range(1, 6)]
    assert _kinds(text, "JSON punctuation").count("{") == 4
