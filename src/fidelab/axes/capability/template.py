"""Features of a model's chat template beyond plain turns: tools and thinking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fidelab.axes.capability.parse import REASONING
from fidelab.captures.requests import Tokens
from fidelab.inputs.tokens import apply_template

if TYPE_CHECKING:
    from fidelab.inputs.tokens import ChatMessage, Tokenizer


class NotApplicable(Exception):
    """The model cannot take the check; the message has the reason."""


def tool_prompt(tokenizer: Tokenizer, messages: Sequence[ChatMessage], tool: dict[str, Any]) -> Tokens:
    """A prompt with one tool on offer.

    Raises:
        NotApplicable: there is no template, or it ignores tools.
    """
    plain, offered = (_render(tokenizer, messages, tools=tools) for tools in (None, [tool]))
    if plain == offered:
        raise NotApplicable("the model's chat template takes no tools")
    return tokenizer.encode(offered)


def thinking_prompt(tokenizer: Tokenizer, messages: Sequence[ChatMessage]) -> tuple[Tokens, str]:
    """A prompt with thinking switched on, and the marker that ends it.

    Raises:
        NotApplicable: there is no template, no switch in it, or no known marker.
    """
    off, on = (_render(tokenizer, messages, enable_thinking=on, thinking=on) for on in (False, True))
    if off == on:
        raise NotApplicable("the model's chat template has no switch for thinking")
    source = str(_library(tokenizer).chat_template)
    end = next((end for _, end in REASONING if end in source), None)
    if end is None:
        raise NotApplicable("the model's chat template does not say how thinking ends")
    return tokenizer.encode(on), end


def _library(tokenizer: Tokenizer) -> Any:
    """The Transformers tokenizer inside."""
    if tokenizer.template != "chat":
        raise NotApplicable("the model has no chat template")
    return tokenizer.library


def _render(tokenizer: Tokenizer, messages: Sequence[ChatMessage], **switches: Any) -> str:
    library = _library(tokenizer)
    try:
        return apply_template(library, messages, add_generation_prompt=True, **switches)
    except Exception as error:  # jinja2's errors, and those that templates raise themselves
        line = " ".join(str(error).split())[:200]
        raise NotApplicable(f"the model's chat template refuses the question: {line}") from None
