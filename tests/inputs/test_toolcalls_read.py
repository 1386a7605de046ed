"""Calls of tools in generated text: the forms that are read, those that are refused with a reason, and hostile ones."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from fidelab.inputs.toolcalls import read
from fidelab.inputs.toolcalls.read import MAX_CHARS, Call, read_calls

ARGUMENTS = {"city": "Oslo", "days": 3, "hourly": True, "units": {"wind": ["m/s", "kn"]}}
WRITTEN = json.dumps(ARGUMENTS)
PYTHON = 'get_weather(city="Oslo", days=3, hourly=True, units={"wind": ["m/s", "kn"]})'

RIGHT = {
    "Hermes and Qwen": '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>',
    "Hermes after words": 'Let me look.\n<tool_call>{"name": "get_weather", "arguments": %s}</tool_call>',
    "Hermes, end tag left out": '<tool_call>{"name": "get_weather", "arguments": %s}',
    "Hermes, arguments first": '<tool_call>{"arguments": %s, "name": "get_weather"}</tool_call>',
    "Hermes in a fence": '<tool_call>\n```json\n{"name": "get_weather", "arguments": %s}\n```\n</tool_call>',
    "Hermes after reasoning": "<think>Use <tool_call>{}?</think>\n"
    '<tool_call>{"name": "get_weather", "arguments": %s}</tool_call>',
    "Llama": '<|python_tag|>{"name": "get_weather", "parameters": %s}<|eom_id|>',
    "Llama, bare": '{"name": "get_weather", "parameters": %s}',
    "Llama, with a type": '{"type": "function", "name": "get_weather", "parameters": %s}',
    "Llama, tagged": "<function=get_weather>%s</function>",
    "Mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": %s, "id": "call00001"}]',
    "Mistral, tokenizer 11": "[TOOL_CALLS]get_weather[ARGS]%s",
    "Mistral, with an id": "[TOOL_CALLS]get_weather[CALL_ID]call00001[ARGS]%s",
    "gpt-oss": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>%s<|call|>",
    "gpt-oss after analysis": "<|channel|>analysis<|message|>The weather.<|end|><|start|>assistant<|channel|>"
    "commentary to=functions.get_weather <|constrain|>json<|message|>%s",
    "gpt-oss, recipient first": " to=functions.get_weather<|channel|>commentary json<|message|>%s<|call|>",
    "DeepSeek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>%s"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "DeepSeek, in a fence": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    "```json\n%s\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "Kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>%s"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "Phi and Granite": '<|tool_call|>[{"name": "get_weather", "arguments": %s}]<|/tool_call|>',
    "Nemotron": '<TOOLCALL>[{"name": "get_weather", "arguments": %s}]</TOOLCALL>',
    "Command R": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": %s}]<|END_ACTION|>',
    "OpenAI": '{"tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": %s}}]}',
    "Solar": "<|tool_calls|><|tool_call:begin|>call00000<|tool_call:name|>get_weather<|tool_call:args|>%s"
    "<|tool_call:end|><|calls|>",
    "Apertus": '<|tools_prefix|>[{"get_weather": %s}]<|tools_suffix|>',
    "Functionary": ">>>get_weather\n%s",
    "JSON": '{"name": "get_weather", "arguments": %s}',
    "JSON in a list": '[ {"name": "get_weather", "arguments": %s} ]',
    "JSON in a fence": 'Here:\n```json\n{"name": "get_weather",\n "arguments": %s}\n```\nDone.',
    "JSON after words": 'I call it: {"name": "get_weather", "arguments": %s} and wait.',
}
OTHER = {
    "Gemma, code": f"```tool_code\n{PYTHON}\n```",
    "Gemma, printed": f"```tool_code\nprint(default_api.{PYTHON})\n```",
    "Gemma, list": f"[{PYTHON}]",
    "LFM": f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
    "FunctionGemma": "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:3,hourly:true,"
    "units:{wind:[<escape>m/s<escape>,<escape>kn<escape>]}}<end_function_call>",
    "Gemma 4": '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3,hourly:true,'
    'units:{wind:[<|"|>m/s<|"|>,<|"|>kn<|"|>]}}<tool_call|>',
    "JSON, arguments as a text": json.dumps({"name": "get_weather", "arguments": WRITTEN}),
}
TEXTS = {
    "Qwen3-Coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
    '</parameter>\n<parameter=hourly>\ntrue\n</parameter>\n<parameter=units>\n{"wind": ["m/s", "kn"]}\n</parameter>\n'
    "</function>\n</tool_call>",
    "GLM": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n<arg_key>hourly</arg_key>\n<arg_value>true</arg_value>\n<arg_key>units</arg_key>\n"
    '<arg_value>{"wind": ["m/s", "kn"]}</arg_value>\n</tool_call>',
    "DeepSeek 3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="hourly" string="false">true</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="units" string="false">{"wind": ["m/s", "kn"]}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "MiniCPM": '<function name="get_weather"><param name="city">Oslo</param><param name="days">3</param>'
    '<param name="hourly">true</param><param name="units">{"wind": ["m/s", "kn"]}</param></function>',
    "Hunyuan": "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
    "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Oslo</arg_value:opensource>\n"
    "<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n"
    "<arg_key:opensource>hourly</arg_key:opensource>\n<arg_value:opensource>true</arg_value:opensource>\n"
    "<arg_key:opensource>units</arg_key:opensource>\n"
    '<arg_value:opensource>{"wind": ["m/s", "kn"]}</arg_value:opensource>\n'
    "</tool_call:opensource>\n</tool_calls:opensource>",
    "MiniMax": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="days">3</parameter>\n<parameter name="hourly">true</parameter>\n'
    '<parameter name="units">{"wind": ["m/s", "kn"]}</parameter>\n</invoke>\n</minimax:tool_call>',
}


@pytest.mark.parametrize("form", RIGHT)
def test_every_form_with_json_is_read(form: str) -> None:
    assert read_calls(RIGHT[form] % WRITTEN).calls == (Call("get_weather", ARGUMENTS),)
    spaced = json.dumps(ARGUMENTS, indent=2).replace("{", "{ ")
    assert read_calls(f"\n  {RIGHT[form] % spaced}\n").calls == (Call("get_weather", ARGUMENTS),)


@pytest.mark.parametrize("form", OTHER)
def test_every_form_with_objects_of_its_own_is_read(form: str) -> None:
    assert read_calls(OTHER[form]).calls == (Call("get_weather", ARGUMENTS),)


@pytest.mark.parametrize("form", TEXTS)
def test_forms_that_write_every_argument_as_text_keep_the_texts(form: str) -> None:
    texts = {"city": "Oslo", "days": "3", "hourly": "true", "units": '{"wind": ["m/s", "kn"]}'}
    assert read_calls(TEXTS[form]).calls == (Call("get_weather", texts, texts=True),)


def test_several_calls_of_one_answer_are_all_read() -> None:
    one = '{"name": "f", "arguments": {"n": %d}}'
    for text in (
        f"<tool_call>{one % 1}</tool_call>\n<tool_call>{one % 2}</tool_call>",
        f"[TOOL_CALLS] [{one % 1}, {one % 2}]",
        '[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]f[ARGS]{"n": 2}',
        f"{one % 1}; {one % 2}",
        "[f(n=1), f(n=2)]",
        "```tool_code\nf(n=1)\nf(n=2)\n```",
        "<start_function_call>call:f{n:1}<end_function_call><start_function_call>call:f{n:2}<end_function_call>",
    ):
        assert [call.arguments for call in read_calls(text).calls] == [{"n": 1}, {"n": 2}], text


BROKEN = {
    "": "the answer is empty",
    "  \n": "the answer is empty",
    "It is sunny in Oslo.": "no call, only text",
    "<think>I should call get_weather": "only reasoning",
    '{"city": "Oslo"}': "JSON that is not a call",
    "[1, 2]": "JSON that is not a call",
    '{"name": "get_weather"}': "the call has no arguments",
    '{"arguments": {"city": "Oslo"}}': "the call has no name",
    '{"name": "f", "arguments": [1]}': "the arguments are not an object",
    '{"name": "f", "arguments": "Oslo"}': "not JSON: Expecting value",
    '{"name": "f", "arguments": {"city": "Oslo"': "the JSON ends early",
    '{"name": "f", "arguments": {"city": "Os': "the JSON ends early",
    '{"name": "f", "arguments": {"city": Oslo}}': "not JSON: Expecting value",
    "{'name': 'f', 'arguments': {}}": "not JSON: Expecting property name enclosed in double quotes",
    '{"name": "f", "arguments": {"a": 1, "a": 2}}': "a key is there twice",
    '{"name": "f", "arguments": {"a": NaN}}': "not JSON: NaN is not JSON",
    "<tool_call>get_weather(Oslo)</tool_call>": "not JSON: Expecting value",
    "<tool_call></tool_call>": "the JSON ends early",
    "<tool_call><function=f><parameter=a>1</function></tool_call>": "an argument is not closed",
    "<tool_call>f g\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>": "the call has no name",
    "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>": "a key is there twice",
    "<|tools_prefix|>[3]<|tools_suffix|>": "JSON that is not a call",
    "[TOOL_CALLS]": "the JSON ends early",
    "[TOOL_CALLS]f[ARGS]": "not JSON: Expecting value",
    "<|python_tag|>import os": "neither JSON nor a call",
    "<|channel|>commentary to=functions.f": "a call without a message",
    "<|channel|>commentary to=functions.f<|message|><|call|>": "the call has no arguments",
    '```tool_code\nget_weather("Oslo")\n```': "an argument has no name",
    "```tool_code\nget_weather(city=here)\n```": "an argument is code",
    "```tool_code\nget_weather(city=\n```": "a call that cannot be parsed",
    "[f(a=1, a=2)]": "a key is there twice",
    '[f(a={"b": 1, "b": 2})]': "a key is there twice",
    "[f(a={1: 2})]": "an argument is code",
    "```tool_code\nx = 3\n```": "code that is not a call",
    "<start_function_call>call:f{city:<escape>Oslo}": "a text is not closed",
    "<start_function_call>call:f{city:": "the call is not closed",
    "<start_function_call>f": "a marker of calls without a call",
    "[f(a=1)] " + "x" * MAX_CHARS: f"the answer has more than {MAX_CHARS:,} characters",
    json.dumps([{"name": "f", "arguments": {}}] * 17): "more than 16 calls",
}


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_every_broken_call_is_named_with_its_reason(text: str) -> None:
    found = read_calls(text)
    assert (found.calls, found.fault) == ((), BROKEN[text])


def test_reasoning_that_the_prompt_opened_is_left_out() -> None:
    text = 'I call f.</think>{"name": "f", "arguments": {}}'
    assert read_calls(text, "<think>\n").calls == (Call("f", {}),)
    assert read_calls("I call f.", "<think>\n").fault == "only reasoning"


def test_nothing_that_a_model_wrote_is_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    code = f"open({str(trap)!r}, 'w').write('x')"
    for text in (
        f"```tool_code\n{code}\n```",
        f"```tool_code\nf(a={code})\n```",
        f"[f(a={code})]",
        f'```tool_code\nf(a=__import__("os").system("touch {trap}"))\n```',
        f"<|python_tag|>{code}",
        json.dumps({"name": code, "arguments": {"a": code}}),
        json.dumps({"name": "f", "arguments": code}),
        f"<tool_call><function=f><parameter=a>{code}</parameter></function></tool_call>",
        f"```python\n@({code})\ndef f(): pass\n```",
    ):
        read_calls(text)
        assert not trap.exists(), text
    for module in Path(read.__file__).parent.glob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(module.read_text("utf-8"))) if isinstance(node, ast.Name)}
        assert not names & {"eval", "exec", "compile", "__import__", "open"}, module


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 9000, '{"a":' * 3000, "f(a=" + "[" * 9000, "```tool_code\n" + "f(a=" * 4000, "-" * 9000 + "f(a=1)"),
        *("```tool_code\nf(a=" + "-" * 9000 + "1)\n```", "<tool_call>" * 1800, "```" * 6000, "<|python_tag|>" * 1400),
        *("<start_function_call>call:f{a:" + "[" * 9000, "<start_function_call>call:f{a:" + "{a:" * 6000),
        *("<parameter=a>" * 1500, "<tool_call><function=f>" + "<parameter=a>" * 1400, "[TOOL_CALLS]" * 1600),
        *("\x00", '{"name": "f", "arguments": {"a": 1e999}}', "f(a=1e999)", "f(a=" + "9" * 9000 + ")"),
        *("to=functions.f" * 1400, "<arg_key>" * 2000, "to=functions.f <|message|>" * 700, "\ud800{"),
        "<｜tool▁call▁begin｜>" * 900,
    ],
    ids=range(23),
)
def test_hostile_text_ends_with_a_reason_or_a_call(text: str) -> None:
    found = read_calls(text)
    assert found.fault or found.calls
