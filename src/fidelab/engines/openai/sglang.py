"""SGLang's own ``/generate``: ids in and out, log-probabilities with ids; its ``/v1/completions`` gives less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fidelab.captures.requests import Tokens
from fidelab.engines.openai.dialects import (
    SAMPLE,
    Completion,
    Dialect,
    Top,
    check_length,
    ended,
    largest_answer,
    mapping,
    number,
    top_of,
)
from fidelab.engines.openai.http import Client, Refused
from fidelab.engines.openai.words import Words


class SGLangGenerate(Dialect):
    """See the module's docstring."""

    def __init__(self, client: Client, words: Words, tops: Sequence[int]) -> None:
        self._client = client
        self._words = words
        self.top = self.top_generated = tops[0]
        self._post(tuple(words.encode(SAMPLE)), 1)

    def complete(self, prompt: Tokens, max_tokens: int, stop: Tokens, rows: bool) -> Completion:
        fields = {"return_logprob": True, "top_logprobs_num": self.top} if rows else {}
        answer, meta = self._post(prompt, max_tokens, {"stop_token_ids": list(stop)}, **fields)
        stopped = mapping(meta, "finish_reason").get("type") == "stop"
        returned_ids = [int(token) for token in answer.get("output_ids") or []]
        check_length(len(returned_ids), max_tokens)
        ids = ended(returned_ids, stop, stopped, self._words)
        tops = _from_sglang(meta, "output") if rows else []
        missing = len(ids) - len(tops)
        aligned = [*tops, *({} for _ in range(missing))] if rows and missing in (0, 1) else None
        return Completion(ids, aligned, number(meta, "prompt_tokens"), number(meta, "cached_tokens") or 0)

    def scored(self, ids: Tokens, first: int = 0, salt: str = "") -> tuple[list[Top], int | None]:
        # The server computes all tokens from logprob_start_len on, whatever it remembers of them.
        _, meta = self._post(ids, 1, return_logprob=True, logprob_start_len=first, top_logprobs_num=self.top)
        rows = _from_sglang(meta, "input")
        if len(rows) != len(ids) - first:
            raise Refused(f"the server scored {first + len(rows)} tokens of a prompt that has {len(ids)}")
        scored = [*[{}] * first, *rows[1:], *_from_sglang(meta, "output")[:1]]
        return scored, number(meta, "cached_tokens")

    def forget(self) -> None:
        self._client.text("/flush_cache")

    def stream(self, prompt: Tokens, n: int) -> Iterator[tuple[float, int]]:
        body = self._body(prompt, n, {"ignore_eos": True}) | {"stream": True}
        known = 0
        largest = largest_answer(len(prompt) + n * n, 0)  # each event has all ids so far
        for seconds, event in self._client.stream("/generate", body, api=False, largest=largest):
            generated = number(mapping(event, "meta_info"), "completion_tokens") or known
            if generated > known:
                yield seconds, generated - known
            known = generated

    def _body(self, ids: Tokens, max_tokens: int, params: Mapping[str, Any]) -> dict[str, Any]:
        neutral = {"temperature": 0.0, "repetition_penalty": 1.0, "skip_special_tokens": False}
        return {"input_ids": list(ids), "sampling_params": {**neutral, "max_new_tokens": max_tokens, **params}}

    def _post(
        self, ids: Tokens, max_tokens: int, params: Mapping[str, Any] | None = None, **fields: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        body = self._body(ids, max_tokens, params or {}) | fields
        largest = largest_answer(len(ids) + max_tokens, fields.get("top_logprobs_num", 0))
        answer = self._client.post("/generate", body, api=False, largest=largest)
        if not isinstance(answer.get("output_ids"), list):
            raise Refused(f"{self._client.root} returns no output_ids: {self._client.clean_json(answer)}")
        return answer, mapping(answer, "meta_info")


def _from_sglang(meta: Mapping[str, Any], side: str) -> list[Top]:
    """Reported log-probabilities per position, the actual token included; entries are [log-probability, id, text]."""
    logprobs = meta.get(f"{side}_token_logprobs") or []
    tops = meta.get(f"{side}_top_logprobs") or [None] * len(logprobs)
    return [top_of([(e[1], e[0]) for e in [*(top or []), actual]]) for actual, top in zip(logprobs, tops, strict=True)]
