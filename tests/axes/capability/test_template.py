"""What a chat template can do is seen in what it renders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fidelab.axes.capability.checks import TOOL
from fidelab.axes.capability.template import NotApplicable, thinking_prompt, tool_prompt
from fidelab.core.errors import InputError
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import bounds, resolve
from tests.conftest import MakeFolder

MESSAGES = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}<u>{{ m.content }}{% endfor %}<a>"
TOOLS = "{% if tools %}{{ tools[0].function.name }} {% endif %}" + PLAIN
THINKS = PLAIN + "{% if not enable_thinking %}<think></think>{% endif %}"
THINKS_ODDLY = PLAIN + "{% if thinking %}<brood>{% endif %}"
REFUSES = "{{ raise_exception('only\\nsystem prompts') }}"

Make = Callable[[str | None], Tokenizer]


@pytest.fixture
def make(tmp_path: Path, make_folder: MakeFolder) -> Make:
    """A byte-level tokenizer with a chat template."""

    def build(template: str | None) -> Tokenizer:
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        backend = Backend(
            models.BPE({piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
        )
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        fast_class: Any = PreTrainedTokenizerFast
        fast = fast_class(tokenizer_object=backend)
        fast.chat_template = template
        folder = make_folder(tmp_path / "m")
        fast.save_pretrained(folder)
        return Tokenizer.load(resolve(str(folder)))

    return build


def test_a_tool_is_offered_by_a_template_that_takes_tools(make: Make) -> None:
    tokenizer = make(TOOLS)
    assert tokenizer.decode(tool_prompt(tokenizer, MESSAGES, TOOL)) == "get_weather <u>hi<a>"


def test_thinking_is_on_and_its_end_known(make: Make) -> None:
    tokenizer = make(THINKS)
    ids, end = thinking_prompt(tokenizer, MESSAGES)
    assert (tokenizer.decode(ids), end) == ("<u>hi<a>", "</think>")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "the model has no chat template"),
        (PLAIN, "the model's chat template takes no tools"),
        (REFUSES, "the model's chat template refuses the question: only system prompts"),
    ],
)
def test_what_takes_no_tools_says_why(template: str | None, reason: str, make: Make) -> None:
    with pytest.raises(NotApplicable) as why:
        tool_prompt(make(template), MESSAGES, TOOL)
    assert str(why.value) == reason


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "the model has no chat template"),
        (PLAIN, "the model's chat template has no switch for thinking"),
        (THINKS_ODDLY, "the model's chat template does not say how thinking ends"),
    ],
)
def test_what_cannot_think_says_why(template: str | None, reason: str, make: Make) -> None:
    with pytest.raises(NotApplicable) as why:
        thinking_prompt(make(template), MESSAGES)
    assert str(why.value) == reason


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LOOP, "it does not end within 0.2 s"),
        ("{{ 'a' * 10000000000 }}", "MemoryError"),
        ("{% for a in range(99999) %}{{ 'a' * 100 }}{% endfor %}", "characters of the prompt"),
    ],
    ids=["endless", "memory", "endless-text"],
)
def test_a_template_that_is_meant_to_harm_is_one_line(
    template: str, said: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make(PLAIN)
    tokenizer.library.chat_template = template
    monkeypatch.setattr(bounds, "SECONDS", 0.2)
    with pytest.raises(InputError, match=r"the chat template of .* refuses the prompt") as refused:
        tokenizer.chat(MESSAGES)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(NotApplicable):
        tool_prompt(tokenizer, MESSAGES, TOOL)
