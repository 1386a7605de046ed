"""``/v1/chat/completions`` for prompts with images, which go along as ``image_url`` with ``data:`` URLs.

Greedy answers are asked of any server.  Given text after images is scored where a server reports log-probabilities of
a chat's prompt, as vLLM does (``prompt_logprobs`` with ``continue_final_message``): the last tokens of the prompt have
to be those that were given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fidelab.captures.requests import ImageForced, ImageGenerate
from fidelab.engines.openai.dialects import (
    Completed,
    Top,
    check_length,
    ended,
    largest_answer,
    mapping,
    number,
    only_choice,
    token_ids,
    top_of,
)
from fidelab.engines.openai.http import Client, Refused
from fidelab.engines.openai.words import Words

_ADDITIONS: dict[str, Any] = {
    "return_token_ids": True,  # vLLM
    "repetition_penalty": 1.0,  # vLLM takes the checkpoint's
    "repeat_penalty": 1.0,
    "cache_prompt": False,
    "skip_special_tokens": False,
}
_IMAGE_TOKENS = 1 << 14  # that a server may report of one image, at most
_KINDS = {"iVBORw0KGgo": "png", "/9j/": "jpeg", "UklGR": "webp", "R0lGOD": "gif"}  # how base64 of such files begins


class UnscoredError(Refused):
    """The server reports no log-probabilities of a chat's prompt."""


class ImageChats:
    """Chats with images.  ``returns``: ``ids`` or ``text``, as the last answer had it; ``read``: tokens of prompts."""

    def __init__(self, client: Client, model: str, words: Words, top: int) -> None:
        self._client, self._model, self._words, self._top = client, model, words, top
        self._additions = True
        self.returns = "ids"

    def complete(self, request: ImageGenerate, index: int) -> Completed:
        """Return a greedy answer.

        Raises:
            Refused: If the server gives no answer.
        """
        top = {"logprobs": True, "top_logprobs": self._top} if request.rows and self._top else {}
        answer = self._post(request, index, max_tokens=request.max_tokens, stop=request.stop, **top)
        choice = only_choice(answer, self._client)
        text = mapping(choice, "message").get("content")
        generated = token_ids(choice)
        usage = mapping(answer, "usage")
        if generated is None:
            if not isinstance(text, str | None):
                raise Refused("the server answers a chat without text")
            generated, self.returns = self._words.encode(text or ""), "text"
        exact = self.returns == "ids"
        check_length(len(generated) if exact else number(usage, "completion_tokens"), request.max_tokens)
        ids = ended(generated, request.stop, choice.get("finish_reason") == "stop", self._words)
        return Completed(ids, self._tops(choice, ids) if request.rows else None, number(usage, "prompt_tokens"))

    def score(self, request: ImageForced, index: int) -> list[Top]:
        """Return the reported distribution before each given token.

        Raises:
            UnscoredError: If the server reports no log-probabilities for prompts.
            Refused: If it reads the text as other tokens.
        """
        given = request.continuations[index]
        fields = {"prompt_logprobs": self._top, "add_generation_prompt": False, "continue_final_message": True}
        answer = self._post(request, index, max_tokens=1, **fields)
        found = answer.get("prompt_logprobs", only_choice(answer, self._client).get("prompt_logprobs"))
        if not isinstance(found, list):
            raise UnscoredError(f"{self._client.root} gives no log-probabilities of prompts with images")
        rows = [top_of((int(token), info.get("logprob")) for token, info in (row or {}).items()) for row in found]
        if len(rows) <= len(given):
            raise Refused(f"the server scored {len(rows)} tokens of a prompt that ends with {len(given)} given ones")
        rows = rows[len(rows) - len(given) :]
        for at, (token, row) in enumerate(zip(given, rows, strict=True)):
            if token not in row:
                raise Refused(f"the server read a different token after the image at position {at}")
        return rows

    def _post(self, request: ImageGenerate | ImageForced, index: int, **fields: Any) -> dict[str, Any]:
        stop = fields.pop("stop", ())
        body = {"model": self._model, "messages": self._messages(request, index), "temperature": 0.0, "seed": 0}
        tokens = len(request.prompts[index]) + _IMAGE_TOKENS * len(request.shows[index]) + fields["max_tokens"]
        if isinstance(request, ImageForced):
            tokens += len(request.continuations[index])
        largest = largest_answer(tokens, self._top)
        while True:
            more = {**_ADDITIONS, **({"stop_token_ids": list(stop)} if stop else {})} if self._additions else {}
            try:
                return self._client.post("/chat/completions", {**body, **more, **fields}, largest=largest)
            except Refused as error:
                if error.status not in (400, 422) or not self._additions:
                    raise
                self._additions = False  # a strict server, which takes no fields of others

    def _messages(self, request: ImageGenerate | ImageForced, index: int) -> list[dict[str, Any]]:
        """A conversation as the API takes it."""
        images = iter(request.images[i] for i in request.shows[index])
        messages = []
        for message in json.loads(request.messages[index]):
            parts = [
                {"type": "image_url", "image_url": {"url": _data_url(next(images))}}
                if isinstance(part, dict)
                else {"type": "text", "text": self._words.decode(part)}
                for part in message["content"]
            ]
            alone = len(parts) == 1 and parts[0]["type"] == "text"
            more = json.loads(self._words.decode(message["more"])) if message.get("more") else {}
            messages.append({"role": message["role"], "content": parts[0]["text"] if alone else parts, **more})
        return messages

    def _tops(self, choice: Mapping[str, Any], ids: list[int]) -> list[Top] | None:
        """Log-probabilities of generated tokens, if each of them but a stop token has an entry."""
        content = mapping(choice, "logprobs").get("content")
        if not isinstance(content, list) or len(ids) - len(content) not in (0, 1):
            return None
        entries = [[entry, *(entry.get("top_logprobs") or [])] for entry in content]
        named = [[(self._words.token(str(e.get("token", ""))), e.get("logprob")) for e in entry] for entry in entries]
        return [*(top_of(pairs) for pairs in named), *({} for _ in range(len(ids) - len(content)))]


def _data_url(image: str) -> str:
    kind = next((kind for begin, kind in _KINDS.items() if image.startswith(begin)), "png")
    return f"data:image/{kind};base64,{image}"
