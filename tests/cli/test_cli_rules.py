"""Rules about flags that go together: the table, and that each command keeps its own."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

import fidelab.cli
from fidelab.cli.rules import RULES, Rule, broken
from fidelab.core.errors import UsageError
from tests.cli.test_cli_options import commands

NEEDS = Rule("{flag} needs x", "a", needs=("x", "y"))
EXCLUDES = Rule("{flag} without {others}", "a", excludes=("x", "y"))
ONLY = Rule("{flag} alone, not {others}", "a", only=("x",))


@pytest.mark.parametrize(
    ("rule", "given", "said"),
    [
        (NEEDS, {}, None),
        (NEEDS, {"a": "--a", "y": "-y"}, None),
        (NEEDS, {"a": "--a"}, "--a needs x"),
        (Rule("name x", needs=("x",)), {}, "name x"),
        (Rule("name x", needs=("x",)), {"x": "X"}, None),
        (EXCLUDES, {"x": "-x"}, None),
        (EXCLUDES, {"a": "--a", "x": "-x", "y": "-y"}, "--a without -x, -y"),
        (ONLY, {"a": "--a", "x": "-x"}, None),
        (ONLY, {"a": "--a", "z": "-z", "b": "-b"}, "--a alone, not -z"),
        (ONLY, {"a": "--a", "=preset": ""}, None),
    ],
)
def test_a_rule_says_what_a_flag_lacks_or_what_to_leave_out(
    rule: Rule, given: dict[str, str], said: str | None
) -> None:
    assert broken((rule,), given) == said


def test_the_first_broken_rule_is_told() -> None:
    assert broken((EXCLUDES, NEEDS), {"a": "--a", "x": "-x"}) == "--a without -x"


def test_rules_name_commands_and_parameters_that_exist() -> None:
    known = {words: {parameter.name for parameter in command.params} for words, command in commands()}
    for words, rules in RULES.items():
        parameters = known[words.partition(",")[0]]
        named = {name for rule in rules for name in (rule.flag, *rule.needs, *rule.excludes, *(rule.only or ()))}
        assert {name for name in named if name and not name.startswith("=")} <= parameters, words


def _flag(command: Any, name: str) -> list[str]:
    """Words that give a parameter."""
    parameter = next(one for one in command.params if one.name == name)
    value = {"run_dir": "latest", "form": "hub", "max_flips": "1%"}.get(name, "1")
    if not parameter.opts[0].startswith("-"):
        return [value]
    return [parameter.opts[0]] if getattr(parameter, "is_flag", False) else [parameter.opts[0], value]


def _breaking() -> list[Any]:
    """A command line that breaks each rule which two flags, or none, can break."""
    cases = []
    by_name = dict(commands())
    for words, rules in RULES.items():
        if "," in words:
            continue
        command = by_name[words]
        for rule in rules:
            if rule.flag in ("resume_dir",) or (rule.needs and not rule.flag and words == "reproduce run"):
                continue  # a callback reads the folder first; without words it is the list of profiles
            line = [*words.split(), *(_flag(command, rule.flag) if rule.flag else [])]
            others = list(rule.excludes[:1])
            if rule.only is not None:
                others = [next(p.name for p in command.params if p.name not in (rule.flag, *rule.only, "help"))]
            for other in others:
                line += _flag(command, other)
            required = [p for p in command.params if p.required and p.name not in (rule.flag, *others)]
            line += [word for parameter in required for word in _flag(command, parameter.name)]
            if rule.flag in ("export", "export_format"):  # the rule before asks for formats
                line += ["--bits", "8", *(["--kv", "q8_0"] if rule.needs == ("budget",) else [])]
            cases.append(pytest.param(line, rule, id=f"{words}: {rule.message[:50]}"))
    return cases


@pytest.mark.parametrize(("line", "rule"), _breaking())
def test_a_command_line_that_breaks_a_rule_is_one_line_and_runs_nothing(
    line: list[str], rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fidelab.results.store.find_run", lambda path, *_, **__: path)
    refused = CliRunner().invoke(fidelab.cli.app, line).exception
    assert isinstance(refused, UsageError)
    start = rule.message.partition("{others}")[0].partition("{flag}")[2 if rule.message.startswith("{flag}") else 0]
    assert start in str(refused)
    assert "\n" not in str(refused)
