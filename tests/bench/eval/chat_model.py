"""The model of the scripted chat server: its tokens, prompts, log-probabilities and answers to any conversation."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from fidelab.inputs.questions.question import Call

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

END = "<|im_end|>"
IMAGE_TOKENS = 256
LONGEST_TEXT = 1500  # tokens

_TOKEN = re.compile(r"<\|im_\w+\|>|</?think>| ?[^\W\d_]+|\d|\s+|.", re.DOTALL)
_COUNT = re.compile(r"\b(?:count|numbers)\b\D*?(?:(\d+) )?(?:to|through|up to) (\d+)", re.IGNORECASE)
_QUOTED = re.compile(r"\b(?:repeat|say|(?:reply|answer|respond) with)\b[^\"“]{0,40}[\"“]([^\"”]+)[\"”]", re.IGNORECASE)
_ASKS = re.compile(r"\b(?:what|which|repeat|recall|remind)\b", re.IGNORECASE)
_CODE = re.compile(r"\b(?=[A-Z-]*\d)(?=[\d-]*[A-Z])[A-Z\d]+(?:-[A-Z\d]+)*\b")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_CAPITALS = re.compile(r"\b[A-Z]{3,}\b")
_NAMED = re.compile(r"\b(?:word|name|password|colou?r|city) is [\"“']?(\w[\w-]*)", re.IGNORECASE)

_RENAMED = {"city": "location", "location": "city", "date": "day", "amount": "value", "query": "q"}
_PHRASES = ("{}", "The answer is {}.", "It is {}.")
_VOCABULARY = {
    "N": (
        "river harbour engine garden teacher window market forest letter bridge captain valley lantern painter orchard "
        "station village doctor mirror blanket kitchen library compass ladder meadow sailor pocket tower violin basket "
        "shepherd island notebook furnace glacier pigeon carpenter theatre canal telescope baker chimney pasture clock"
    ),
    "A": (
        "quiet green narrow ancient bright patient wooden distant gentle crooked silver hollow stubborn careful famous "
        "muddy golden lonely cheerful heavy northern empty polished curious slender frozen dusty generous weary wild"
    ),
    "V": (
        "follows repairs remembers paints carries watches crosses measures borrows protects visits describes welcomes "
        "studies forgets opens builds cleans finds replaces shelters draws leaves admires surprises guards"
    ),
    "P": ("coast hill square cellar fields quay attic road summit crossroads mill gate shore pond stable ferry"),
    "T": "spring autumn winter summer dawn noon dusk midnight harvest dinner",
    "D": "slowly often quietly rarely gladly always seldom nearly carefully suddenly",
}
_WORDS = {kind: words.split() for kind, words in _VOCABULARY.items()}
_SENTENCES = (
    "The A N D V the A N near the P.",
    "Before T, every A N V some N by the P.",
    "Nobody at the P doubts that the N V the A N.",
    "When the N V another N, the A N D V the P.",
    "After T the N and the N share the A P.",
    "Some A N from the P V the N until T.",
    "If the N is A, the N V the A N.",
    "Beyond the P, the A N V both the N and the N.",
    "Since T, this N has been more A than the N at the P.",
)
ALL_WORDS = [f" {word}" for words in _WORDS.values() for word in words]


def tokenize(text: str) -> list[str]:
    """Return words with the space before them, single digits and punctuation; joined they are the text."""
    return _TOKEN.findall(text)


def text_of(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def images_of(message: Message) -> tuple[str, ...]:
    """Return the data URLs of a message's images."""
    content = message.get("content") or ""
    parts = [] if isinstance(content, str) else content
    return tuple(part["image_url"]["url"] for part in parts if part["type"] == "image_url")


def with_text(message: Message, text: str) -> Message:
    """Return a message with its images and another text."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in images_of(message)]
    return {**message, "content": [*images, {"type": "text", "text": text}] if images else text}


def users_of(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message["role"] == "user"]


def prompt_tokens(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
    """Count the tokens of a conversation as the chat template writes it."""
    total = 3 + (len(tokenize(json.dumps(tools))) if tools else 0)
    for message in messages:
        calls = message.get("tool_calls")
        total += 4 + len(tokenize(text_of(message))) + IMAGE_TOKENS * len(images_of(message))
        total += len(tokenize(json.dumps(calls))) if calls else 0
    return total


def cut_to(messages: Sequence[Message], window: int) -> list[Message]:
    """Drop the start of a conversation's text until it fits into a window of tokens."""
    excess, kept = prompt_tokens(messages) - window, []
    for message in messages:
        tokens = tokenize(text_of(message))
        dropped = max(0, min(excess, len(tokens)))
        excess -= dropped
        kept.append(with_text(message, "".join(tokens[dropped:])) if dropped else message)
    return kept


def sentences(seed: str) -> Iterator[str]:
    """Yield English sentences without end, each one once."""
    random, written = Random(seed), set()
    while True:
        form = random.choice(_SENTENCES)
        sentence = re.sub(r"\b[NAVPTD]\b", lambda found: random.choice(_WORDS[found[0]]), form)
        if sentence not in written:
            written.add(sentence)
            yield sentence


def prose(seed: str, limit: int) -> str:
    """Write more than ``limit`` tokens, but at most :data:`LONGEST_TEXT`; a lower limit gives a prefix."""
    text, total = "", 0
    for n, sentence in enumerate(sentences(seed)):
        added = ("\n\n" if n % 6 == 0 else " ") * bool(n) + sentence
        total += len(tokenize(added))
        if total > LONGEST_TEXT:
            break
        text += added
        if total > limit:
            break
    return text


def improvise(messages: Sequence[Message], limit: int, seed: str) -> str:
    """Answer a conversation: a tool's result, a count, a quotation, a fact stated earlier, or prose."""
    if messages[-1]["role"] == "tool":
        return f"The result is {text_of(messages[-1])}"
    texts = [text_of(message) for message in users_of(messages)] or [""]
    if count := _COUNT.search(texts[-1]):
        first, last = int(count[1] or 1), int(count[2])
        step = 1 if last >= first else -1
        numbers = map(str, range(first, last + step, step)[:LONGEST_TEXT])
        if re.search(r"\b(?:per|own|new|separate) lines?\b", texts[-1]):
            return "\n".join(numbers)
        return (" " if "by spaces" in texts[-1] else ", ").join(numbers)
    if quoted := _QUOTED.search(texts[-1]):
        return quoted[1]
    if _ASKS.search(texts[-1]) and (fact := _stated(texts)):
        return fact
    return prose(seed, limit)


def _stated(texts: Sequence[str]) -> str | None:
    """Find the code, number or word that the earlier messages state; a long last message counts, too."""
    before, question = list(texts[:-1]), texts[-1].lower()
    if len(texts[-1]) > 1000:
        before.append(texts[-1])
    kinds = [_CODE, _NUMBER, _NAMED, _CAPITALS]
    if "number" in question:
        kinds.insert(0, _NUMBER)
    elif re.search(r"\b(?:word|name|colou?r|city)\b", question):
        kinds[:0] = [_NAMED, _CODE, _CAPITALS]
    for kind in kinds:
        for text in before:
            if found := kind.search(text):
                return found[1] if kind.groups else found[0]
    return None


def logprob_entry(token: str, at: int, top: int) -> dict[str, Any]:
    """Return the entry of OpenAI's ``logprobs.content``: the token is the most likely one, and the sum is below 1."""
    random = Random(f"{at} {token}")
    chosen = random.uniform(0.55, 0.99)
    others = [word for word in random.sample(ALL_WORDS, 21) if word != token]
    shares = [(1 - chosen) * 0.5 ** (rank + 1) for rank in range(20)]
    ranked = [(token, chosen), *zip(others, shares, strict=False)]
    entries = [{"token": text, "logprob": math.log(p), "bytes": list(text.encode())} for text, p in ranked]
    return {**entries[0], "top_logprobs": entries[:top]}


@dataclass(frozen=True)
class Generated:
    """Tokens of an answer, and the text, calls and finish reason that they make.

    ``text`` ends before a stop sequence; ``ended``: the end token follows ``tokens``.
    ``thinking``: field of the message for reasoning, empty if its markers stay in the content.
    """

    tokens: Sequence[str]
    text: str
    finish: str
    stop: str | None
    ended: bool
    calls: tuple[Call, ...] = ()
    thinking: str = ""
    spoken: int = 0  # characters before the calls

    def deltas(self) -> list[dict[str, Any]]:
        """Return the streamed delta of each token; it is empty where a parser holds the token back."""
        found: list[dict[str, Any]] = []
        waiting, name, at = self._call_deltas(), "content", 0
        for token in self.tokens:
            piece = self.text[at : at + len(token)]
            if self.calls and at >= self.spoken:
                found.append(next(waiting, {}))
            elif self.thinking and token in ("<think>", "</think>"):
                name = self.thinking if token == "<think>" else "content"
                found.append({})
            else:
                found.append({name: piece} if piece else {})
            at += len(token)
        return found

    def message(self) -> dict[str, Any]:
        deltas = self.deltas()
        content = "".join(delta.get("content", "") for delta in deltas)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if self.calls or self.thinking else ""),
        }
        message |= {"refusal": None, "annotations": None, "audio": None, "function_call": None}
        message["reasoning"] = None
        message["tool_calls"] = [
            {"id": _id(n), "type": "function", "function": vars(call)} for n, call in enumerate(self.calls)
        ]
        if self.thinking:
            message[self.thinking] = "".join(delta.get(self.thinking, "") for delta in deltas) or None
        return message

    def _call_deltas(self) -> Iterator[dict[str, Any]]:
        for n, call in enumerate(self.calls):
            head = {"id": _id(n), "type": "function", "index": n, "function": {"name": call.name, "arguments": ""}}
            yield {"tool_calls": [head]}
            for piece in tokenize(call.arguments):
                yield {"tool_calls": [{"index": n, "function": {"arguments": piece}}]}


def _id(n: int) -> str:
    return f"chatcmpl-tool-{n:08x}"


def until(tokens: Sequence[str], end: int) -> list[str]:
    """Return the tokens that hold the first ``end`` characters."""
    kept, length = [], 0
    for token in tokens:
        if length >= end:
            break
        kept.append(token)
        length += len(token)
    return kept


def rephrased(text: str, times: int) -> str:
    if "\n" in text or len(tokenize(text)) > 12 or text.startswith(("{", "[")):
        return text + "\n" * (times % 3)
    return _PHRASES[times % 3].format(text)


def looped(text: str, limit: int) -> str:
    first, second, *_ = [*re.split(r"(?<=[.!?])\s+", text), ""]
    return f"{first}{f' {second}' * (limit // len(tokenize(second)) + 1)}" if second else text


def continued(text: str, seed: str, limit: int) -> str:
    """End the answer with markers instead of the end token, and let users and assistants speak on."""
    text = " ".join(re.split(r"(?<=\.)\s+", text)[:6])
    roles = ("user", "assistant")
    for n, sentence in enumerate(sentences(seed)):
        if len(tokenize(text)) > min(limit, 1500):
            return text
        text += f"{END}\n<|im_start|>{roles[n % 2]}\n{sentence}"
    raise AssertionError


def renamed(arguments: str) -> str:
    return json.dumps({_RENAMED.get(name, f"{name}_value"): value for name, value in json.loads(arguments).items()})
