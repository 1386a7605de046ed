"""The model's own tokenizer, for servers that name tokens by their text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from fidelab.core.errors import EngineError

_BROKEN = "\ufffd"  # a token that is part of a character
_TOKEN_ID = "token_id:"  # vLLM's prefix of tokens that are named by id


class Words:
    """Text ↔ ids, and the text of single tokens.  Threads may share it once ``spelled`` was read."""

    def __init__(self, path: str, model: str) -> None:
        """Load the tokenizer of a model's folder.

        Raises:
            EngineError: If there is no tokenizer that can be loaded.
        """
        import transformers

        transformers.logging.set_verbosity_error()
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # each tokenizer library has errors of its own
            message = " ".join(str(error).split())[:200]
            raise EngineError(f"{model} has no tokenizer that can be loaded ({message})") from error

    def encode(self, text: str) -> list[int]:
        """Return ids without special tokens of the tokenizer's own."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @property
    def bos(self) -> int | None:
        """The id that begins a text, if the model has one."""
        bos: int | None = self._tokenizer.bos_token_id
        return bos

    def ending(self, stop: Sequence[int]) -> int | None:
        """The id to assume where a server reports a stop without naming the token."""
        eos: int | None = self._tokenizer.eos_token_id
        return eos if eos in stop else next(iter(stop), None)

    @cached_property
    def spelled(self) -> list[str]:
        """Text of each id after another token, since the first token of a text may lose its space."""
        anchor = self.encode("a")[-1:]
        before = len(self.decode(anchor))
        return [self.decode([*anchor, token])[before:] for token in range(len(self._tokenizer))]

    @cached_property
    def _ids(self) -> Mapping[str, int]:
        """Ids by text, for texts that belong to a single id."""
        counts = Counter(self.spelled)
        return {
            text: token for token, text in enumerate(self.spelled) if counts[text] == 1 and text and _BROKEN not in text
        }

    def token(self, text: str) -> int | None:
        """Return the id with this text; ``None`` if several or none have it."""
        if text.startswith(_TOKEN_ID) and text[len(_TOKEN_ID) :].isdigit():
            return int(text[len(_TOKEN_ID) :])
        return self._ids.get(text)

    def is_spelled(self, token: int, text: str) -> bool:
        """Return whether a server's text may be this token's. A partial character may be any token's."""
        known = self.token(text)
        if known is not None:
            return known == token
        spelling = self.spelled[token] if 0 <= token < len(self.spelled) else ""
        return text in ("", spelling) or _BROKEN in spelling or _BROKEN in text
