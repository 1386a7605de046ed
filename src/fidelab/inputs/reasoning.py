"""Answers without their reasoning."""

from __future__ import annotations

import re

REASONING = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, SmolLM3, Kimi K2
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),  # Magistral
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker
    ("<|channel|>analysis", "<|channel|>final<|message|>"),  # gpt-oss
)
"""Markers around the reasoning that models write before they answer."""

_BEGINS, _ENDS = ("|".join(map(re.escape, side)) for side in zip(*REASONING, strict=True))
_BLOCK = re.compile("|".join(rf"{re.escape(begin)}.*?(?:{re.escape(end)}|\Z)" for begin, end in REASONING), re.DOTALL)
_END, _OPENED = re.compile(_ENDS), re.compile(rf"(?:{_BEGINS})\s*\Z")


def after_reasoning(text: str, prompt: str = "") -> str:
    """Return an answer without the reasoning in it (:data:`REASONING`).

    A block without an end takes all the rest, so the result may be empty.  Text before a lone end marker is reasoning
    too, because its beginning is in the prompt or was not written.  ``prompt``: end of the prompt.  If it opens a block
    of reasoning that the answer does not end, the whole answer is reasoning.
    """
    opened = _OPENED.search(prompt)
    rest = _BLOCK.sub("", opened[0] + text if opened else text)
    ends = [match.end() for match in _END.finditer(rest)]
    return rest[ends[-1] :] if ends else rest
