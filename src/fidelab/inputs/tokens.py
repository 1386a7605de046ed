"""Turn text into token ids with the model's own tokenizer and chat template, and describe both."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol

from fidelab.captures.requests import Tokens
from fidelab.core import Vocabulary, digest, sha256_of
from fidelab.core.errors import InputError
from fidelab.models import Model
from fidelab.models.bounds import bounded
from fidelab.models.cache import cache_dir
from fidelab.models.hub import first_line

_TEMPLATE_TEXT = 1 << 20  # characters that a template may write besides eight times what it was given

ChatMessage = Mapping[str, Any]  # role, content, and what else a template knows: tool_calls, reasoning_content
Tools = Sequence[Mapping[str, Any]]  # functions that a model may call, in OpenAI's form
Template = Literal["chat", "raw"]


class _Backend(Protocol):
    """Interface of a tokenizer library; ids come without the library's special tokens."""

    def encode(self, text: str) -> Tokens: ...
    def encode_with_offsets(self, text: str) -> tuple[Tokens, Tokens]: ...
    def chat(self, messages: Sequence[ChatMessage], tools: Tools) -> Tokens: ...
    def render(self, messages: Sequence[ChatMessage], tools: Tools, *, generation: bool, private: bool) -> str: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def pieces(self) -> list[str]: ...
    def special_ids(self) -> frozenset[int]: ...


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer.

    ``bos_id`` is set only where the tokenizer adds a BOS to a text. ``stop_ids`` end a turn. ``template`` is the
    template that :meth:`chat` uses for ``chat``, or ``raw`` where the model has none. ``offsets``: whether
    :meth:`encode_with_offsets` works.
    """

    model: Model
    bos_id: int | None
    stop_ids: Tokens
    template: Template
    offsets: bool
    backend: _Backend

    @classmethod
    def load(cls, model: Model) -> Tokenizer:
        """Return the tokenizer of a resolved model.

        Raises:
            InputError: If the model's folder has no tokenizer that can be loaded without running its code.
        """
        if model.kind == "fake":
            return cls(model, bos_id=None, stop_ids=(0,), template="raw", offsets=True, backend=_Bytes())
        backend = _Remembered(model)
        facts = backend.facts()
        return cls(
            model,
            bos_id=facts["bos_id"],
            stop_ids=tuple(facts["stop_ids"]),
            template="chat" if facts["has_template"] else "raw",
            offsets=facts["is_fast"],
            backend=backend,
        )

    def encode(self, text: str) -> Tokens:
        """Return the ids of ``text``, without BOS or EOS."""
        return self.backend.encode(text)

    def encode_with_offsets(self, text: str) -> tuple[Tokens, Tokens]:
        """Return the ids, and for each the offset (in characters of ``text``) where its text begins.

        Raises:
            InputError: If the tokenizer keeps no offsets (see ``offsets``).
        """
        return self.backend.encode_with_offsets(text)

    def chat(self, messages: Sequence[ChatMessage], template: Template = "chat", tools: Tools = ()) -> Tokens:
        """Return a prompt's ids, ending where the model's answer begins.

        ``chat`` runs the model's template, with thinking off if it has a switch, or ``raw`` without a template; ``raw``
        takes the contents as they are, a blank line between them, after a BOS where the tokenizer adds one, and omits
        ``tools``.

        Raises:
            InputError: If the template refuses these messages.
        """
        if template == "chat" and self.template == "chat":
            return self.backend.chat(messages, tools)
        bos = () if self.bos_id is None else (self.bos_id,)
        return (*bos, *self.encode(_join_messages(messages)))

    def render(
        self, messages: Sequence[ChatMessage], *, tools: Tools = (), generation: bool = False, private: bool = False
    ) -> str:
        """Return the text of a conversation as the model's template writes it, or as :meth:`chat` with ``raw`` does.

        ``generation``: adds the text that introduces the model's next answer.  ``private``: the text is stored nowhere.

        Raises:
            InputError: If the template refuses these messages.
        """
        if self.template == "chat":
            return self.backend.render(messages, tools, generation=generation, private=private)
        return _join_messages(messages) + ("\n\n" if generation else "")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included, nothing cleaned up."""
        return self.backend.decode(ids)

    def pieces(self) -> list[str]:
        """Return the tokenizer's own string for each id; ``""`` for an id that has none."""
        return self.backend.pieces()

    def special_ids(self) -> frozenset[int]:
        """Ids without text: begin, end and padding, roles, and ids without a string."""
        return self.backend.special_ids()

    @property
    def library(self) -> Any:
        """The Transformers tokenizer itself, for what this class does not offer; ``None`` for the fake model."""
        return getattr(self.backend, "library", None)

    def vocabulary(self) -> Vocabulary:
        """Size and hash of :meth:`pieces`: equal hashes mean that equal ids are equal strings."""
        pieces = self.pieces()
        return Vocabulary(len(pieces), digest(*pieces))


def _join_messages(messages: Sequence[ChatMessage]) -> str:
    return "\n\n".join(message["content"] for message in messages)


class _Bytes:
    """The fake model's tokenizer: one id per UTF-8 byte."""

    def encode(self, text: str) -> Tokens:
        return tuple(text.encode())

    def encode_with_offsets(self, text: str) -> tuple[Tokens, Tokens]:
        if text.isascii():
            return self.encode(text), tuple(range(len(text)))
        return self.encode(text), tuple(i for i, char in enumerate(text) for _ in char.encode())

    def chat(self, messages: Sequence[ChatMessage], tools: Tools) -> Tokens:
        raise AssertionError("the byte tokenizer has no chat template")

    def render(self, messages: Sequence[ChatMessage], tools: Tools, *, generation: bool, private: bool) -> str:
        raise AssertionError("the byte tokenizer has no chat template")

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def pieces(self) -> list[str]:
        return [f"<0x{i:02X}>" for i in range(256)]

    def special_ids(self) -> frozenset[int]:
        return frozenset({0})


_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".npz")
_MAX_CACHED_BYTES = 256 << 20  # bytes of answers; beyond, the older half is forgotten
# A plan asks for the same text's tokens several times: the last answers stay in memory, but those of huge texts.
_RECENT = 16
_MAX_RECENT_BYTES = 8 << 20
_recent: dict[tuple[Path, bytes], Any] = {}  # by store and key, the oldest first


class _Remembered:
    """A tokenizer whose answers are kept in the cache folder, so that repeated calls need no import of Transformers.

    An answer holds for the content of all files in the model's folder but its weights, for the versions of the
    libraries, and for this module.  Without a usable store, answers are not kept.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._store = _Store(cache_dir() / "tokens.sqlite3")
        # of the files that a tokenizer may be made from: all of the model's folder but its weights, in order
        paths = sorted([*model.path.glob("*"), *model.path.glob("additional_chat_templates/*")])
        files = [path for path in paths if path.is_file() and path.suffix not in _WEIGHTS]
        digests = [(path.relative_to(model.path).as_posix(), sha256_of(path)) for path in files]
        libraries = [(name, version(name)) for name in ("transformers", "tokenizers", "jinja2")]
        self._identity = json.dumps([digests, libraries, hashlib.sha256(Path(__file__).read_bytes()).hexdigest()])

    @cached_property
    def _backend(self) -> _HuggingFace:
        return _HuggingFace(self._model)

    @property
    def library(self) -> Any:
        """As :attr:`Tokenizer.library`."""
        return self._backend.library

    def facts(self) -> dict[str, Any]:
        """``bos_id``, ``stop_ids``, ``has_template``, ``is_fast``, ``dated``: its template may show today's date."""
        found: dict[str, Any] = self._recall("facts", (), lambda: self._backend.facts())
        return found

    def encode(self, text: str) -> Tokens:
        return tuple(self._recall("encode", text, lambda: self._backend.encode(text)))

    def encode_with_offsets(self, text: str) -> tuple[Tokens, Tokens]:
        ids, starts = self._recall("offsets", text, lambda: self._backend.encode_with_offsets(text))
        return tuple(ids), tuple(starts)

    def chat(self, messages: Sequence[ChatMessage], tools: Tools) -> Tokens:
        if self.facts()["dated"]:
            return self._backend.chat(messages, tools)
        asked = [[dict(m) for m in messages], [dict(tool) for tool in tools]]
        return tuple(self._recall("chat", asked, lambda: self._backend.chat(messages, tools)))

    def render(self, messages: Sequence[ChatMessage], tools: Tools, *, generation: bool, private: bool) -> str:
        if private or self.facts()["dated"]:
            return self._backend.render(messages, tools, generation=generation, private=private)
        asked = [[dict(m) for m in messages], [dict(tool) for tool in tools], generation]
        compute = self._backend.render
        return str(
            self._recall("render", asked, lambda: compute(messages, tools, generation=generation, private=private))
        )

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._recall("decode", list(map(int, ids)), lambda: self._backend.decode(ids)))

    def pieces(self) -> list[str]:
        return list(self._recall("pieces", (), lambda: self._backend.pieces()))

    def special_ids(self) -> frozenset[int]:
        return frozenset(self._recall("special", (), lambda: sorted(self._backend.special_ids())))

    def _recall(self, name: str, arguments: Any, compute: Callable[[], Any]) -> Any:
        key = hashlib.sha256(json.dumps([self._identity, name, arguments]).encode()).digest()
        if (place := (self._store.path, key)) in _recent:
            return _recent[place]
        kept, found = self._store.read(key), None
        with contextlib.suppress(ValueError):  # a damaged answer is computed again
            found = None if kept is None else json.loads(kept)
        if found is None:
            found = compute()
            kept = json.dumps(found)
            self._store.write(key, kept)
        while len(_recent) >= _RECENT:
            _recent.pop(next(iter(_recent)), None)
        if kept is not None and len(kept) <= _MAX_RECENT_BYTES:
            _recent[place] = found
        return found


class _Store:
    """Texts by key in one SQLite file, which several processes may use at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, key: bytes) -> str | None:
        with contextlib.suppress(sqlite3.Error, OSError):
            row = self._database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
            return None if row is None else str(row[0])
        return None

    def write(self, key: bytes, answer: str) -> None:
        with contextlib.suppress(sqlite3.Error, OSError), self._database as database:
            database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))

    @cached_property
    def _database(self) -> sqlite3.Connection:
        """Open the database once.  Replace a file that is not a database, and shrink one that is too large."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return self._opened()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # locked, read-only, no room
                raise
            self.path.unlink()
            return self._opened()

    def _opened(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, timeout=1.0)
        database.execute("PRAGMA synchronous = OFF")  # an answer that is lost is computed again
        database.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer TEXT)")
        if self.path.stat().st_size > _MAX_CACHED_BYTES:
            with database:
                database.execute("DELETE FROM answers WHERE rowid <= (SELECT MIN(rowid) + COUNT(*) / 2 FROM answers)")
            database.execute("VACUUM")
        return database


class _HuggingFace:
    """A tokenizer of the Transformers library, from a folder; code in the folder is never run."""

    def __init__(self, model: Model) -> None:
        from transformers import AutoTokenizer, GenerationConfig

        self._name = model.name
        try:
            self.library: Any = AutoTokenizer.from_pretrained(
                model.path, local_files_only=True, trust_remote_code=False
            )
            self._generation: Any = None
            if (model.path / "generation_config.json").is_file():
                self._generation = GenerationConfig.from_pretrained(model.path, local_files_only=True)
        except Exception as error:  # each tokenizer library has its own errors
            raise InputError(
                f"{model.name} has no tokenizer that can be loaded from {model.path} ({first_line(error)})"
            ) from error

    def facts(self) -> dict[str, Any]:
        bos = self.library.bos_token_id
        ids = self.library("a")["input_ids"]
        plain = self.library("a", add_special_tokens=False)["input_ids"]
        stops = {self.library.eos_token_id, self._end_of_turn()}
        listed = getattr(self._generation, "eos_token_id", None)
        stops.update(listed if isinstance(listed, list) else [listed])
        return {
            "bos_id": bos if bos is not None and ids[:1] == [bos] and plain[:1] != [bos] else None,
            "stop_ids": tuple(sorted(stop for stop in stops if stop is not None)),
            "has_template": self._has_template,
            "is_fast": self._is_fast,
            "dated": "strftime_now" in str(self.library.chat_template),
        }

    @property
    def _is_fast(self) -> bool:
        return bool(self.library.is_fast)

    @property
    def _has_template(self) -> bool:
        return bool(self.library.chat_template)

    def encode(self, text: str) -> Tokens:
        return tuple(self.library(text, add_special_tokens=False, verbose=False)["input_ids"])

    def encode_with_offsets(self, text: str) -> tuple[Tokens, Tokens]:
        if not self._is_fast:
            raise InputError(f"the tokenizer of {self._name} keeps no character offsets")
        out = self.library(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return tuple(out["input_ids"]), tuple(start for start, _ in out["offset_mapping"])

    def chat(self, messages: Sequence[ChatMessage], tools: Tools) -> Tokens:
        return self.encode(self.render(messages, tools, generation=True, private=True))

    def render(self, messages: Sequence[ChatMessage], tools: Tools, *, generation: bool, private: bool) -> str:
        switches: dict[str, Any] = {"tools": [dict(tool) for tool in tools]} if tools else {}
        try:
            text = apply_template(
                self.library,
                messages,
                add_generation_prompt=generation,
                enable_thinking=False,
                thinking=False,
                **switches,
            )
        except Exception as error:  # jinja2's errors, and those that templates raise themselves
            raise InputError(f"the chat template of {self._name} refuses the prompt: {first_line(error)}") from error
        return text

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.library.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def pieces(self) -> list[str]:
        return [piece or "" for piece in self.library.convert_ids_to_tokens(range(len(self.library)))]

    def special_ids(self) -> frozenset[int]:
        added = (i for i, token in self.library.added_tokens_decoder.items() if token.special)
        unnamed = (i for i, piece in enumerate(self.pieces()) if not piece)
        return frozenset((*self.library.all_special_ids, *added, *unnamed))

    def _end_of_turn(self) -> int | None:
        """The special token that the template puts right after an assistant's answer, if it does."""
        if not self._has_template:
            return None
        turn = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        try:
            rendered = apply_template(self.library, turn)
        except Exception:  # a template for other kinds of talk
            return None
        _, answer, tail = rendered.rpartition("answer")
        ids = self.encode(tail.strip()) if answer else ()
        added = self.library.added_tokens_decoder.get(ids[0]) if ids else None
        return ids[0] if added is not None and added.special else None


def apply_template(library: Any, messages: Sequence[ChatMessage], **switches: Any) -> str:
    """Return the text that the chat template of a Transformers tokenizer makes of some messages.

    A template is a program by the author of the model, so its time, its memory and the length of its text are limited.

    Raises:
        TimeoutError, MemoryError, ValueError: If the template exceeds a limit.

    Exception: Any exception of the template or jinja2.
    """
    given = [dict(message) for message in messages]
    with bounded():
        text = str(library.apply_chat_template(given, tokenize=False, **switches))
    size = sum(len(value) for message in given for value in map(str, message.values()))
    if len(text) > _TEMPLATE_TEXT + 8 * (size + len(str(switches))):
        raise ValueError(f"it makes {len(text):,} characters of the prompt")
    return text
