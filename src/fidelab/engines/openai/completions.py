"""``/v1/completions`` in its variants, with as many of vLLM's and llama.cpp's additions as a server takes.

The server's abilities are tried out once, on a few tokens: whether it takes and returns token ids, and how it gives
log-probabilities of prompts.  Sampling settings with server-specific defaults (above all repetition penalties) are
always sent.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fidelab.captures.requests import Tokens
from fidelab.core.errors import EngineError
from fidelab.engines.openai.dialects import (
    NO_LOGPROBS,
    SAMPLE,
    Completion,
    Dialect,
    Top,
    check_length,
    ended,
    first_choice,
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
    "return_tokens": True,  # llama-server
    "return_tokens_as_token_ids": True,  # vLLM, in log-probabilities
    "repetition_penalty": 1.0,  # vLLM takes the checkpoint's
    "repeat_penalty": 1.0,  # llama_cpp.server's default is 1.1
    "cache_prompt": False,
    "add_special_tokens": False,
    "skip_special_tokens": False,
}
_BATCH_TOLERANCE = 0.05  # nats: the same distribution, computed in another batch


class Completions(Dialect):
    """See the module's docstring."""

    def __init__(self, client: Client, model: str, words: Words, prompts: str | None, tops: Sequence[int]) -> None:
        """Try the server out; ``prompts``: ``ids`` or ``text`` if the user chose one; ``tops``: numbers to try.

        Raises:
            EngineError: If it completes neither ids nor text. The message has its answer.
        """
        self._client = client
        self._model = model
        self._words = words
        self._additions = False
        self._adds_bos = False
        self._mode: str | None = None  # how prompts are scored: "prompt_logprobs" or "echo"
        self._shifts: dict[bool, int] = {}  # a BOS goes first → see _shift
        sample = tuple(words.encode(SAMPLE))
        self._settle_prompts(sample, ("ids", "text") if prompts is None else (prompts,))
        self._settle_logprobs(sample, tops)

    @property
    def shifted(self) -> bool:
        """Whether the server's echo gives each token the log-probabilities of the next one, which is corrected."""
        return any(self._shifts.values())

    def complete(self, prompt: Tokens, max_tokens: int, stop: Tokens, rows: bool) -> Completion:
        answer, choice = self._post(
            prompt,
            max_tokens=max_tokens,
            **({"stop_token_ids": list(stop)} if self._additions else {}),
            **({"logprobs": self.top_generated} if rows and self.top_generated else {}),
        )
        returned_ids = token_ids(choice)
        usage = mapping(answer, "usage")
        check_length(number(usage, "completion_tokens") if returned_ids is None else len(returned_ids), max_tokens)
        if self.returns == "ids" and returned_ids is None:
            raise Refused(f"{self._client.root} returned token ids when it was tried out, and now returns none")
        generated = returned_ids if returned_ids is not None else self._words.encode(_text_of(choice))
        ids = ended(generated, stop, choice.get("finish_reason") == "stop", self._words)
        tops = self._aligned(ids, choice, exact=returned_ids is not None) if rows else None
        return Completion(ids, tops, number(usage, "prompt_tokens"), _cached(answer) or 0)

    def scored(self, ids: Tokens, first: int = 0, salt: str = "") -> tuple[list[Top], int | None]:
        fields = {"cache_salt": salt} if salt and self._additions else {}
        if self._mode == "prompt_logprobs":
            answer, choice = self._post(ids, max_tokens=1, prompt_logprobs=self.top, logprobs=self.top, **fields)
            return self._from_prompt_logprobs(ids, choice), _cached(answer)
        answer, choice = self._post(ids, max_tokens=1, echo=True, logprobs=self.top, **fields)
        reported, texts = self._tops(choice)
        positions = self._positions(ids, texts)
        shift = self._shift(ids, positions, reported)
        rows: list[Top] = [{} for _ in ids]
        for position, top in zip((*positions, len(ids)), reported, strict=False):
            if 0 <= position - 1 + shift < len(ids):
                rows[position - 1 + shift] = top
        return rows, _cached(answer)

    def stream(self, prompt: Tokens, n: int) -> Iterator[tuple[float, int]]:
        body = self._body(prompt, max_tokens=n, stream=True)
        if self._additions:  # a prefix in the server's cache is not a cold prefill
            body |= {"ignore_eos": True, "cache_salt": uuid.uuid4().hex, "stream_options": {"include_usage": True}}
        counted = None
        total = 0
        largest = largest_answer(len(prompt) + n, 0)
        for seconds, event in self._client.stream("/completions", body, largest=largest):
            counted = number(mapping(event, "usage"), "completion_tokens") or counted
            choice = first_choice(event)
            returned_ids = token_ids(choice)
            tokens = len(returned_ids) if returned_ids is not None else int(bool(choice.get("text")))
            total += tokens
            if tokens:
                yield seconds, tokens
        if counted is not None and counted != total:
            raise Refused(f"the server streamed {total} tokens and counts {counted}: their times are not known")

    # -------------------------------------------------------------------------------------------- trying out

    def _settle_prompts(self, sample: Tokens, ways: Sequence[str]) -> None:
        last: Refused | None = None
        for self.sends in ways:
            for self._additions in (True, False):
                try:
                    answer, choice = self._post(sample, max_tokens=1)
                except Refused as error:
                    last = error
                    continue
                n_read = number(mapping(answer, "usage"), "prompt_tokens")
                if self.sends == "ids" and n_read not in (None, len(sample)):
                    last = Refused(f"{self._client.root} reads {n_read} tokens where {len(sample)} ids were sent")
                    continue
                self._adds_bos = self.sends == "text" and n_read == len(sample) + 1
                self.returns = "ids" if token_ids(choice) is not None else "text"
                return
        raise EngineError(str(last))

    def _settle_logprobs(self, sample: Tokens, tops: Sequence[int]) -> None:
        for top in tops:
            for mode, fields in (("prompt_logprobs", {"prompt_logprobs": top}), ("echo", {"echo": True})):
                if mode == "prompt_logprobs" and not self._additions:
                    continue
                try:
                    answer, choice = self._post(sample, max_tokens=1, logprobs=top, **fields)
                except Refused as error:
                    self.why_not = f"{NO_LOGPROBS} ({error})"
                    continue
                reported, _ = self._tops(choice)
                if mode == "prompt_logprobs":
                    has_prompt = isinstance(choice.get("prompt_logprobs"), list)
                else:
                    has_prompt = len(reported) > max(1, number(mapping(answer, "usage"), "completion_tokens") or 1)
                if reported:
                    self.top_generated = top
                if has_prompt:
                    self._mode, self.top = mode, top
                    return
            if self.top_generated:
                return

    # ----------------------------------------------------------------------------------------------- requests

    def _body(self, prompt: Tokens, **fields: Any) -> dict[str, Any]:
        ids = list(prompt)
        if self.sends == "text" and self._adds_bos and ids[:1] == [self._words.bos]:
            del ids[0]
        body = {
            "model": self._model,
            "prompt": ids if self.sends == "ids" else self._words.decode(ids),
            "temperature": 0.0,
            "seed": 0,
        }
        return body | (_ADDITIONS if self._additions else {}) | fields

    def _post(self, prompt: Tokens, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answer, and its only choice."""
        top = max(fields.get("logprobs", 0), fields.get("prompt_logprobs", 0))
        largest = largest_answer(len(prompt) + fields["max_tokens"], top)
        answer = self._client.post("/completions", self._body(prompt, **fields), largest=largest)
        return answer, only_choice(answer, self._client)

    # ------------------------------------------------------------------------------------- log-probabilities

    def _tops(self, choice: Mapping[str, Any]) -> tuple[list[Top], list[str]]:
        """Reported log-probabilities per token, and the tokens' own texts."""
        logprobs = choice.get("logprobs")
        if not isinstance(logprobs, dict):
            return [], []
        if isinstance(content := logprobs.get("content"), list):  # the form of chats; llama-server adds ids
            entries = [[entry, *(entry.get("top_logprobs") or [])] for entry in content]
            named = [[(self._token_id(e), e.get("logprob")) for e in entry] for entry in entries]
            return [top_of(pairs) for pairs in named], [str(entry.get("token", "")) for entry in content]
        texts = [str(text) for text in logprobs.get("tokens") or []]
        token_logprobs = logprobs.get("token_logprobs") or [None] * len(texts)
        tops = logprobs.get("top_logprobs") or [None] * len(texts)
        pairs = [
            [*((self._words.token(text), value) for text, value in (top or {}).items()), (self._words.token(t), lp)]
            for t, lp, top in zip(texts, token_logprobs, tops, strict=True)
        ]
        return [top_of(entry) for entry in pairs], texts

    def _token_id(self, entry: Mapping[str, Any]) -> int | None:
        token = entry.get("id")
        return token if isinstance(token, int) else self._words.token(str(entry.get("token", "")))

    def _from_prompt_logprobs(self, ids: Tokens, choice: Mapping[str, Any]) -> list[Top]:
        raw = choice.get("prompt_logprobs")
        if not isinstance(raw, list) or len(raw) != len(ids):
            n = len(raw) if isinstance(raw, list) else 0
            raise Refused(f"the server scored {n} tokens of a prompt that has {len(ids)}")
        rows = [top_of((int(token), info.get("logprob")) for token, info in (entry or {}).items()) for entry in raw]
        for index in range(1, len(ids)):
            if ids[index] not in rows[index]:
                raise Refused(f"the server read another token than the prompt has at position {index}")
        after, _ = self._tops(choice)
        return [*rows[1:], after[0] if after else {}]

    def _positions(self, ids: Tokens, texts: Sequence[str]) -> list[int]:
        """Positions of a prompt's tokens that an echo shows: all, or all but BOS, as llama_cpp.server does.

        Raises:
            Refused: If the echoed tokens are not those of the prompt.
        """
        n_equal = 0
        for left_out in (None, self._words.bos):
            shown = [position for position, token in enumerate(ids) if token != left_out]
            fits = [self._words.is_spelled(ids[at], text) for at, text in zip(shown, texts, strict=False)]
            if all(fits) and len(fits) == len(shown) and len(texts) - len(shown) in (0, 1):
                return shown
            n_equal = max(n_equal, fits.index(False) if False in fits else len(fits))
        raise Refused(f"the server reads the text of a prompt as other tokens than it has, from token {n_equal} on")

    def _shift(self, ids: Tokens, positions: Sequence[int], reported: Sequence[Top]) -> int:
        """Offset of echoed entries: 1 if a token's entry describes the distribution after it (llama_cpp.server).

        Found by comparison with the distribution after the whole prompt, requested without echo: it is the entry of
        the generated token, or of the last one before it.  Determined separately for prompts with and without BOS.
        """
        kind = ids[0] == self._words.bos
        if kind not in self._shifts:
            plain, _ = self._tops(self._post(ids, max_tokens=1, logprobs=self.top)[1])
            n = len(positions)
            gaps = [_gap(plain[0], reported[at]) if plain and at < len(reported) else 1.0 for at in (n, n - 1)]
            if min(gaps) > _BATCH_TOLERANCE:
                raise Refused("the log-probabilities of an echoed prompt are not those that follow it")
            self._shifts[kind] = int(gaps[1] < gaps[0])
        return self._shifts[kind]

    def _aligned(self, ids: Sequence[int], choice: Mapping[str, Any], *, exact: bool) -> list[Top] | None:
        """Log-probabilities at the position of each id; empty for a stop token that is not reported."""
        tops, texts = self._tops(choice)
        if len(ids) - len(tops) not in (0, 1):
            return None
        if not exact and not all(map(self._words.is_spelled, ids, texts)):
            return None
        return [*tops, *({} for _ in range(len(ids) - len(tops)))]


def _gap(one: Top, other: Top) -> float:
    """Largest difference (nats) over the tokens that both report; 1 without common tokens."""
    return max((abs(one[token] - other[token]) for token in one.keys() & other.keys()), default=1.0)


def _cached(answer: Mapping[str, Any]) -> int | None:
    """Tokens of the prompt that the server reports as found in its prefix cache."""
    return number(mapping(mapping(answer, "usage"), "prompt_tokens_details"), "cached_tokens")


def _text_of(choice: Mapping[str, Any]) -> str:
    text = choice.get("text")
    if not isinstance(text, str):
        raise Refused("the server answers without text")
    return text
