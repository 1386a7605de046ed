"""Probes a server before it is loaded: its identity, the requests it accepts, how it counts tokens.

One short streamed request shows whether the server accepts token ids, which of vLLM's additional fields it refuses, and
how many tokens it adds to a prompt (a BOS, a template).  A server whose streams carry no usage gets one more request
without streaming.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from fidelab.bench.load.exchange import LoadRequest, Target
from fidelab.bench.load.server_metrics import Scraper
from fidelab.bench.serving.settings import ServingSettings
from fidelab.captures.requests import Tokens
from fidelab.core.errors import EngineError, InputError
from fidelab.core.paths import expand
from fidelab.engines.openai.dialects import first_choice, mapping, number
from fidelab.engines.openai.http import Client, Refused, is_local, split_url
from fidelab.engines.openai.named import misnamed
from fidelab.engines.openai.server import Server, identify, other_models
from fidelab.inputs.tokens import Tokenizer
from fidelab.inputs.traffic import mixed_prompts, text_prompts
from fidelab.models import Model, listing, resolve
from fidelab.models.embedded import NAMES
from fidelab.models.hub import first_line

Form = Literal["ids", "text"]
Answer = TypeVar("Answer")

PATHS = {"completions": "/completions", "chat": "/chat/completions"}
_PROMPT = 24  # tokens of the trial prompts; a template of the server's comes on top
_OUTPUT = 4  # tokens of their answers
_SEED = 7919  # seed of the trial prompts: no load begins with the same tokens
_QUESTION_TIMEOUT = 30.0  # seconds for a single request
_LONGEST_SHORT = 1024  # tokens: no chat template is as long
_ATTEMPTS = 3  # at an answer that breaks off now and then
_CONNECT_SECONDS = 5.0  # seconds of attempts
_NOT_TAKEN = (400, 422)  # statuses of servers that do not take a field of a request
_TOKENIZER_FILES = ["*token*", "*.model", "vocab*", "merges*", "*.jinja", "config.json", "generation_config.json"]
_UNKNOWN = re.compile(r"extra|unknown|unrecogni[sz]ed|unexpected|not permitted|not allowed|unsupported", re.IGNORECASE)


@dataclass(frozen=True)
class _Usage:
    """A trial's answer."""

    prompt_tokens: int | None
    output_tokens: int | None
    finish: str | None


@dataclass(frozen=True)
class Contact:
    """Properties of a server.

    A prompt of n tokens counts as ``added + n`` tokens at the server.
    """

    server: Server
    settings: ServingSettings
    key: str | None = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    form: Form = "ids"
    """Form of prompts: token ids, or texts of exact length."""
    additions: tuple[str, ...] = ()
    """Fields beyond the standard's that are sent."""
    refused: tuple[str, ...] = ()
    """Those that the server refused."""
    added: int = 0
    counts: bool = True
    """The server counts tokens, in streams or in whole answers."""
    by_finish: bool = False
    """The server does not count tokens in streams, but its other answers have the same counts and end at the limit."""
    limit: int | None = None
    """Tokens of prompt and answer together, where the server says so."""

    @property
    def url(self) -> str:
        """The API's address."""
        return "".join(split_url(self.settings.base_url))

    @property
    def target(self) -> Target:
        """The target for a load."""
        names = (self.server.model, *self.server.names)
        path = PATHS[self.settings.endpoint]
        return Target(self.url, path, api_key=self.key, timeout=self.settings.timeout, models=names)

    def client(self) -> Client:
        """Return a client for single requests."""
        return Client(self.settings.base_url, self.key, min(_QUESTION_TIMEOUT, self.settings.timeout))

    def scraper(self) -> Scraper:
        """Return a reader of the server's own metrics."""
        return Scraper(self.url, headers={"Authorization": f"Bearer {self.key}"} if self.key else None)

    def facts(self) -> dict[str, Any]:
        """Return facts for the report: the server and the settings of its requests."""
        root, api = split_url(self.settings.base_url)
        return {
            "target": root,
            "model": self.server.model,
            "endpoint": api + self.target.path,
            "settings": self.settings.model_dump(mode="json", exclude={"base_url"}) | self.record(),
        }

    def unreachable(self) -> str:
        """Return why the server no longer answers as this model's; empty if it does."""
        try:
            identify(self.client(), self.server.model)
        except EngineError as error:
            return str(error)
        return ""

    def explain(self, request: LoadRequest) -> str | None:
        """Return the server's message if it refuses a request that is not streamed."""
        body = {name: value for name, value in json.loads(request.body).items() if name != "stream_options"}
        try:
            self.client().post(PATHS[self.settings.endpoint], {**body, "stream": False})
        except Refused as error:
            return str(error) if error.status in _NOT_TAKEN else None
        except EngineError:
            pass
        return None

    def record(self) -> dict[str, Any]:
        """Return facts for the report: how the requests were made."""
        return {
            "prompts": "token ids" if self.form == "ids" else "text of exact length",
            "tokenizer": self.tokenizer.model.name,
            "tokens_added_by_server": self.added,
            "additions": list(self.additions),
            "refused_by_server": list(self.refused),
            "max_model_len": self.limit,
        }

    def requests(
        self, inputs: Sequence[int], outputs: Sequence[int], due: Sequence[float] | None, seed: int
    ) -> list[LoadRequest]:
        """Return rendered requests of this many tokens, each with its own prompt.

        Raises:
            InputError: If no prompt has this length.
        """
        lengths = [length - self.added for length in inputs]
        if min(lengths, default=1) < 1:
            raise InputError(
                f"a prompt of {min(inputs)} tokens cannot be made: the server adds {self.added}; ask for more, or "
                f"correct --tokenizer ({self.tokenizer.model.name})"
            )
        asked = zip(self.prompts_of(lengths, seed), inputs, outputs, strict=True)
        return [
            LoadRequest(
                index=index,
                body=json.dumps(self.body(prompt, output)).encode(),
                prompt_tokens=length if self.counts else None,
                max_tokens=output,
                due=None if due is None else due[index],
            )
            for index, (prompt, length, output) in enumerate(asked)
        ]

    def shortest(self, count: int, seeds: Sequence[int]) -> int:
        """Return the tokens of the shortest prompts, as the server counts them: ``count`` for each of the seeds.

        Raises:
            InputError: If none up to 1,024 tokens can be made.
        """
        for length in range(1, _LONGEST_SHORT + 1):
            with contextlib.suppress(InputError):
                for seed in seeds:
                    self.prompts_of([length] * count, seed)
                return length + self.added
        raise InputError(f"no prompt of up to {_LONGEST_SHORT:,} tokens can be made: name contexts above 0")

    def body(self, prompt: Tokens | str, output: int, *, stream: bool = True) -> dict[str, Any]:
        """Return one greedy request, with all the options that make the server write the whole answer."""
        extras: dict[str, Any] = {"ignore_eos": True, "min_tokens": output, "stream_options": {"include_usage": True}}
        chat = self.settings.endpoint == "chat"
        return {
            "model": self.server.model,
            **({"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}),
            "max_tokens": output,
            "temperature": 0.0,
            "stream": stream,
            **{name: extras[name] for name in self.additions if stream or name != "stream_options"},
        }

    def prompts_of(self, lengths: Sequence[int], seed: int) -> Sequence[Tokens | str]:
        """Return distinct generated prompts of this many tokens.

        Raises:
            InputError: If no prompt has this length.
        """
        if self.form == "ids":
            return mixed_prompts(len(self.tokenizer.pieces()), self.tokenizer.special_ids(), lengths, seed)
        return text_prompts(self.tokenizer, lengths, seed, chat=self.settings.endpoint == "chat")


def cache_room(contact: Contact, tokens: int) -> int | None:
    """Return how many requests of this length the server's cache holds together.

    ``None`` means that the server does not report the size of its cache.
    """
    size, block = contact.server.facts.get("cache_tokens"), contact.server.facts.get("block_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        return None
    block = block if isinstance(block, int) and 0 < block <= size else 1
    return size // (math.ceil(tokens / block) * block)


def reach(settings: ServingSettings, key: str | None) -> Contact:
    """Identify the server and try it out.

    Raises:
        EngineError: If the server cannot be reached, refuses the key, does not serve this model, answers no trial, or
            answers as another model.
        InputError: If the named tokenizer cannot be loaded, or none is named and the model's is not on this machine.
    """
    client = Client(settings.base_url, key, settings.timeout)
    server = identify(client, settings.served_model_name or settings.model)
    tokenizer = _tokenizer(settings, server)
    additions = ("stream_options", *(("ignore_eos", "min_tokens") if settings.ignore_eos else ()))
    form: Form = "ids" if settings.endpoint == "completions" and settings.prompts != "text" else "text"
    try:  # as vLLM and SGLang give it
        limits = [number(entry, "max_model_len") for entry in client.models() if entry.get("id") == server.model]
    except Refused:
        limits = []
    contact = Contact(server, settings, key, tokenizer, form, additions, limit=next(iter(limits), None) or None)
    contact = _Trial(client, contact).settle()
    if others := other_models(client, server):
        raise EngineError(
            f"{client.api}: {misnamed(others[0], server.model)}: look what answers at this address, or correct --model"
        )
    return contact


def _tokenizer(settings: ServingSettings, server: Server) -> Tokenizer:
    if settings.tokenizer is not None:
        return _load_tokenizer(settings.tokenizer)
    tokenizer = None
    if settings.model is not None or not Path(server.model).is_absolute() or is_local(settings.base_url):
        # The tokenizer if it is on this machine, else `None`. Nothing is fetched.
        name = settings.model or server.model
        present = any(model.name == name and model.present for model in listing()) or expand(name).exists()
        try:
            if present:
                tokenizer = _load_tokenizer(name)
            else:
                tokenizer = _of_hub(name, fetch=False) if name.count("/") == 1 else None
        except InputError:
            tokenizer = None
    if tokenizer is None:
        raise InputError(
            f"the tokenizer of {settings.model or server.model} is not on this machine: name it by "
            "--tokenizer NAME_OR_FOLDER"
        )
    return tokenizer


def _load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer of an embedded name, a folder, a ``.gguf`` file, or a hub id.  No weights are fetched.

    Raises:
        InputError: If there is no such tokenizer.
    """
    if name in NAMES or expand(name).exists() or name.count("/") != 1 or name.startswith(("/", ".", "~")):
        return Tokenizer.load(resolve(name))
    return _of_hub(name, fetch=True)


def _of_hub(name: str, *, fetch: bool) -> Tokenizer:
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    try:
        path = snapshot_download(
            repo,
            revision=revision or None,
            allow_patterns=_TOKENIZER_FILES,
            ignore_patterns=["*/*"],
            local_files_only=not fetch,
        )
    except Exception as error:  # huggingface_hub lets errors of several HTTP libraries through
        raise InputError(
            f"cannot fetch the tokenizer of {name} from the hub ({first_line(error)}); name a folder"
        ) from error
    files = Model(
        name=name,
        path=Path(path),
        kind="folder",
        weights="",
        revision=revision or None,
        vocab_size=0,
        hidden_size=0,
        max_positions=None,
        parameters=0,
        native="bf16",
        architecture="",
    )
    return Tokenizer.load(files)


class _Trial:
    """Trial requests; fields that a server refuses are left out of the next attempt."""

    def __init__(self, client: Client, contact: Contact) -> None:
        self._client = client
        self._contact = contact
        self._path = PATHS[contact.settings.endpoint]

    def settle(self) -> Contact:
        """Return the contact, with all findings of the trials."""
        length, answer = self._streamed(_PROMPT)
        counted, by_finish = answer, False
        if answer.prompt_tokens is None or answer.output_tokens is None:
            counted = self._retried(lambda: self._whole(length))
            by_finish = (
                counted.prompt_tokens is not None
                and (counted.finish, counted.output_tokens) == ("length", _OUTPUT)
                and answer.finish == "length"
            )
        contact = replace(self._contact, counts=counted.prompt_tokens is not None, by_finish=by_finish)
        if counted.prompt_tokens is None:
            return contact
        return replace(contact, added=counted.prompt_tokens - length)

    def _streamed(self, length: int) -> tuple[int, _Usage]:
        """Return the answer to a streamed trial, and the length of its prompt in tokens.

        A template may need more tokens than were requested.
        """
        while True:
            try:
                length, prompt = self._prompt(length)
                return length, self._retried(partial(self._stream, prompt))
            except Refused as error:
                # The contact without the refused field; `None` if it cannot be left out
                contact, message = self._contact, str(error)
                named = [name for name in contact.additions if name in message]
                if error.status in _NOT_TAKEN and (named or _UNKNOWN.search(message)) and contact.additions:
                    dropped = tuple(named) or contact.additions
                    kept = tuple(name for name in contact.additions if name not in dropped)
                    without = replace(contact, additions=kept, refused=(*contact.refused, *dropped))
                elif contact.form == "ids" and contact.settings.prompts != "ids" and error.status in (*_NOT_TAKEN, 500):
                    without = replace(contact, form="text", refused=(*contact.refused, "prompts of token ids"))
                else:
                    without = None
                if without is None:
                    raise
                self._contact = without

    def _prompt(self, length: int) -> tuple[int, Tokens | str]:
        """Return a trial prompt, which is longer if the template by itself needs more."""
        for longer in (length, 4 * length):
            try:
                return longer, self._contact.prompts_of([longer], _SEED)[0]
            except InputError:
                continue
        return 16 * length, self._contact.prompts_of([16 * length], _SEED)[0]

    def _retried(self, ask: Callable[[], Answer]) -> Answer:
        """Ask again for answers that break off now and then; slow failures and refusals are not repeated."""
        began, patience = time.monotonic(), min(_CONNECT_SECONDS, self._contact.settings.timeout / 2)
        for left in reversed(range(_ATTEMPTS)):
            try:
                return ask()
            except EngineError as error:
                if getattr(error, "status", 0) or not left or time.monotonic() - began > patience:
                    raise
        raise AssertionError("unreachable")

    def _stream(self, prompt: Tokens | str) -> _Usage:
        """Return one streamed answer."""
        usage: Mapping[str, Any] = {}
        finish = None
        for _, event in self._client.stream(self._path, self._contact.body(prompt, _OUTPUT)):
            if event.get("error"):
                raise Refused(f"{self._client.root} answers: {self._client.clean_json(event['error'])}")
            finish = first_choice(event).get("finish_reason") or finish
            usage = mapping(event, "usage") or usage
        if finish is None and not usage:
            raise EngineError(f"{self._client.root} broke off a stream of {_OUTPUT} tokens: look at its log")
        return _read_usage(usage, finish)

    def _whole(self, length: int) -> _Usage:
        """Return one unstreamed answer."""
        answer = self._client.post(self._path, self._contact.body(self._prompt(length)[1], _OUTPUT, stream=False))
        return _read_usage(mapping(answer, "usage"), first_choice(answer).get("finish_reason"))


def _read_usage(usage: Mapping[str, Any], finish: Any) -> _Usage:
    counts = number(usage, "prompt_tokens"), number(usage, "completion_tokens")
    return _Usage(*counts, finish if isinstance(finish, str) else None)
