"""Rules about the chat template and special tokens: conversations are rendered with the engines' own libraries.

Transformers renders the template in its sandbox (what vLLM and SGLang use, too), the package tokenizers cuts the text
into ids.  Of the vocabulary of a GGUF file only sizes and ids are read: there the rules only check texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fidelab.core import plain_json, read_file
from fidelab.core.errors import InputError, MissingPackageError
from fidelab.core.registry import require
from fidelab.models.bounds import bounded
from fidelab_checkpoints.files import Checkpoint
from fidelab_checkpoints.modules import generates, text_config
from fidelab_checkpoints.rules import Finding, Subject, broken, information, suspicious

_MOST_JSON, _MOST_TEMPLATE = 64 << 20, 1 << 20  # bytes
_MAX_RENDERED_LENGTH = 1 << 20  # characters
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_MARK = re.compile(r"<\|[^|<>\s]{1,60}\|>|<｜[^｜<>]{1,60}｜>|</?s>|<(?:start|end)_of_turn>|<bos>|<eos>|<unk>")

_THOUGHT = re.compile(r"<[^<]*think", re.IGNORECASE)

_SYSTEM, _DEVELOPER = "Speak like a sailor of old", "Keep to three sentences"
_QUESTION, _ANSWER, _NEXT = "Which town lies at the fjord", "That must be Bergen", "Who founded it"
_CITY, _RESULT = "Reykjavik", "drizzle and gales"
_TOOL = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "The weather of the coming days.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "description": "Name of the town."}},
            "required": ["town"],
        },
    },
}


def _call(arguments: Any) -> list[dict[str, Any]]:
    """A question, a call of the tool, and its result."""
    call = {"id": "call00001", "type": "function", "function": {"name": "forecast", "arguments": arguments}}
    return [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "forecast", "content": _RESULT},
    ]


_USER = [{"role": "user", "content": _QUESTION}]
_TURN = [*_USER, {"role": "assistant", "content": _ANSWER}]
_CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": (_USER, {}),
    "prompt": (_USER, {"add_generation_prompt": True}),
    "turn": (_TURN, {}),
    "turns": ([*_TURN, {"role": "user", "content": _NEXT}], {"add_generation_prompt": True}),
    "system": ([{"role": "system", "content": _SYSTEM}, *_USER], {}),
    "developer": ([{"role": "developer", "content": _DEVELOPER}, *_USER], {}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": _QUESTION}]}], {}),
    "tools": (_USER, {"tools": [_TOOL]}),
    "call": (_call({"town": _CITY}), {"tools": [_TOOL]}),
    "call as text": (_call(json.dumps({"town": _CITY})), {"tools": [_TOOL]}),
}


@dataclass
class _Chat:
    """The texts of a checkpoint.

    Attributes:
        template, place: the chat template and the file that holds it.
        special: ``bos_token`` → its text.
        ids: ``(file, key)`` → ids that configurations give.
        tokenizer: of the package tokenizers.
        unreadable: what is wrong with which file.
        unchecked: which file needs which package.
        described: whether there is a tokenizer at all.
        texts: name of a conversation → what became of it; or why it was refused.
        refused: name of a conversation → why.
        exceeded: which bound the template went beyond.
    """

    template: str | None = None
    place: str = ""
    special: dict[str, str] = field(default_factory=dict)
    ids: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    tokenizer: Any = None
    unreadable: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    described: bool = False
    texts: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    exceeded: str = ""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text; with ``special``, with the special tokens that the tokenizer itself adds."""
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def id_of(self, token: str) -> int | None:
        """Return the id of a special token (``eos_token``)."""
        text = self.special.get(token)
        return None if text is None or self.tokenizer is None else self.tokenizer.token_to_id(text)

    @property
    def specials(self) -> set[int]:
        """Ids that the tokenizer treats as special."""
        decoder = self.tokenizer.get_added_tokens_decoder()
        return {number for number, token in decoder.items() if token.special}

    @property
    def ends(self) -> set[int]:
        """All ids that end an answer."""
        found = {number for (_, key), numbers in self.ids.items() if key == "eos_token_id" for number in numbers}
        own = self.id_of("eos_token")
        return found if own is None else found | {own}


def _chat(subject: Subject) -> _Chat:
    """Read and render the chat template once, for all rules."""
    if "chat" not in subject.kept:
        chat = _of_gguf(subject.checkpoint) if subject.checkpoint.format == "gguf" else _of_folder(subject.checkpoint)
        if chat.template is not None:
            _render(chat, chat.template)
        subject.kept["chat"] = chat
    found: _Chat = subject.kept["chat"]
    return found


def _of_gguf(checkpoint: Checkpoint) -> _Chat:
    metadata = checkpoint.metadata
    template = metadata.get("tokenizer.chat_template")
    keys = ("bos_token_id", "eos_token_id", "eot_token_id", "padding_token_id", "unknown_token_id")
    return _Chat(
        template=template if isinstance(template, str) and template else None,
        place="tokenizer.chat_template",
        special={"bos_token": "<s>", "eos_token": "</s>"},
        ids={
            ("tokenizer.ggml", key): (number,)
            for key in keys
            if isinstance(number := metadata.get(f"tokenizer.ggml.{key}"), int)
        },
        described="tokenizer.ggml.tokens" in metadata,
    )


def _of_folder(checkpoint: Checkpoint) -> _Chat:
    chat, folder = _Chat(), checkpoint.folder
    files: dict[str, dict[str, Any]] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.json"):
        if (folder / name).is_file():
            try:
                files[name] = _read(folder / name)
            except InputError as error:
                chat.unreadable.append(str(error))
    if (folder / "tokenizer.json").is_file():
        try:
            chat.tokenizer = _tokenizer(folder / "tokenizer.json")
        except InputError as error:
            chat.unreadable.append(str(error))
        except MissingPackageError as error:
            chat.unchecked.append(f"tokenizer.json: {error}")
    settings = files.get("tokenizer_config.json", {})
    chat.described = bool(settings) or (folder / "tokenizer.json").is_file()
    for token in _SPECIAL:
        for source in (settings, files.get("special_tokens_map.json", {})):
            value = source.get(token)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                chat.special.setdefault(token, text)
    configs = {
        "generation_config.json": files.get("generation_config.json", {}),
        "config.json": {**text_config(checkpoint.config), **checkpoint.config},
    }
    for name, content in configs.items():
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            numbers = tuple(number for number in _listed(content.get(key)) if type(number) is int)
            if numbers:
                chat.ids[name, key] = numbers
    _read_template(chat, checkpoint, files)
    return chat


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON object; its integers may be of any size, as ``model_max_length`` often is."""
    try:
        value = plain_json(read_file(path, _MOST_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path.name} cannot be read ({' '.join(str(error).split())[:120]})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path.name} should hold a JSON object, not {type(value).__name__}")
    return value


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _tokenizer(path: Path) -> Any:
    """Load the tokenizer of a file. A panic of the library, which is not an Exception, also counts as unreadable.

    Raises:
        MissingPackageError: If the package tokenizers is not installed.
    """
    package = require("tokenizers", "this check")
    try:
        return package.Tokenizer.from_file(str(path))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise InputError(f"{path.name} cannot be read ({' '.join(str(error).split())[:120]})") from None


def _read_template(chat: _Chat, checkpoint: Checkpoint, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Read the template where Transformers looks for it: in its own file, then in ``tokenizer_config.json``."""
    path = checkpoint.folder / "chat_template.jinja"
    if path.is_file():
        try:
            raw = path.read_bytes()[: _MOST_TEMPLATE + 1]
            chat.template, chat.place = raw.decode(), path.name
        except (OSError, UnicodeDecodeError) as error:
            chat.unreadable.append(f"{path.name} cannot be read ({error})")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if chat.template is None and (value := files.get(name, {}).get("chat_template")) is not None:
            named = {
                entry["name"]: entry.get("template")
                for entry in _listed(value)
                if isinstance(entry, dict) and isinstance(entry.get("name"), str)
            }
            template = named.get("default") if named else value
            if isinstance(template, str):
                chat.template, chat.place = template, name
            elif not named:
                chat.unreadable.append(f"chat_template in {name} is {type(value).__name__}, not a text")


def _render(chat: _Chat, template: str) -> None:
    """Render every conversation with Transformers, all within the limits of one."""
    try:
        render = require("transformers.utils.chat_template_utils", "this check").render_jinja_template
    except MissingPackageError as error:
        chat.unchecked.append(f"{chat.place}: {error}")
        return
    if len(template) > _MOST_TEMPLATE:
        chat.exceeded = f"it has more than {_MOST_TEMPLATE:,} characters"
        return
    try:
        with bounded():
            for name, (messages, options) in _CONVERSATIONS.items():
                try:
                    [text], _ = render([messages], chat_template=template, **chat.special, **options)
                except (TimeoutError, MemoryError):
                    raise
                except Exception as error:  # jinja2's errors, and those that templates raise themselves
                    chat.refused[name] = " ".join(str(error).split())[:200] or type(error).__name__
                    continue
                if len(text) > _MAX_RENDERED_LENGTH:
                    chat.exceeded = f"it makes {len(text):,} characters of a short conversation"
                    return
                chat.texts[name] = text
    except TimeoutError as error:
        chat.exceeded = str(error)
    except MemoryError:
        chat.exceeded = "it needs more than 1 GiB of memory"


def _rows(subject: Subject) -> int | None:
    """Return the number of rows of the embedding."""
    for module in subject.modules.values():
        if module.name.endswith(("embed_tokens", "token_embd", "wte", "embed_in", "tok_embeddings", "word_embeddings")):
            info = module.parts.get("weight") or module.parts.get("qweight")
            if info is not None and len(info.shape) == 2 and module.kind == "embedding":
                return info.shape[0]
    return None


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


# ------------------------------------------------------------------------------------------------------- the tokenizer


@broken(
    title="Tokenizer files that cannot be read",
    symptom="the server does not start, or falls back to another tokenizer or template without a word",
    cause="a download that broke off, or a file edited by hand",
    check="every file of the tokenizer is read, tokenizer.json by the package tokenizers itself",
    command="copy the tokenizer's files from the original model",
)
def _tokenizer_unreadable(subject: Subject) -> Iterator[Finding]:
    for text in _chat(subject).unreadable:
        yield Finding(text)


@information(
    title="Tokenizer or chat template not checked",
    symptom="unknown: the rules about special tokens and chat templates did not run",
    cause="fidelab is installed without the extra hf",
    check="the packages tokenizers and Transformers are installed",
    command="pip install 'fidelab[hf]' and audit again",
)
def _tokenizer_unchecked(subject: Subject) -> Iterator[Finding]:
    for text in _chat(subject).unchecked:
        yield Finding(text)


_TOKENIZERS = {"gpt2": ("merges",), "llama": ("scores",), "t5": ("scores",)}  # GGUF's tokenizers → lists that they need


@suspicious(
    title="Metadata of the tokenizer that a GGUF file lacks",
    symptom="llama.cpp splits text by the pre-tokenizer default, with a warning of degraded quality: other tokens than "
    "the model was trained on; without a model, merges or scores the file does not load",
    cause="a conversion by an old script, or of a model whose pre-tokenizer the script did not know",
    check="a BPE vocabulary (gpt2) has tokenizer.ggml.pre; broken without tokenizer.ggml.model, "
    "the list that it needs (merges, scores), or with lists of types or scores of another length than the tokens",
    command="convert again with the convert_hf_to_gguf.py of today",
)
def _tokenizer_metadata(subject: Subject) -> Iterator[Finding]:
    metadata = subject.checkpoint.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    if subject.checkpoint.format != "gguf" or not isinstance(tokens, int):
        return
    model, pre = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if not isinstance(model, str):
        yield Finding("there are tokens and no tokenizer.ggml.model", severity="broken")
        return
    for key in _TOKENIZERS.get(model, ()):
        if f"tokenizer.ggml.{key}" not in metadata:
            yield Finding(f"tokenizer.ggml.model is {model} and there is no tokenizer.ggml.{key}", severity="broken")
    if model == "gpt2" and not pre:
        yield Finding("there is no tokenizer.ggml.pre: llama.cpp splits text as 'default', with degraded quality")
    for key in ("token_type", "scores"):
        stored = metadata.get(f"tokenizer.ggml.{key}")
        count = len(stored) if isinstance(stored, list | tuple) else stored  # long lists are kept as their length
        if isinstance(count, int) and count != tokens:
            yield Finding(f"tokenizer.ggml.{key} has {count:,} entries for {tokens:,} tokens", severity="broken")


@broken(
    title="Special tokens that the vocabulary lacks",
    symptom="BOS becomes <unk> or several ordinary tokens; answers do not end, or ids lie outside the embedding",
    cause="a tokenizer_config.json of another model, or one that lost its added tokens on conversion",
    check="bos, eos, unk and pad of tokenizer_config.json are ids of tokenizer.json, and BOS is not <unk>",
    command="copy tokenizer.json, tokenizer_config.json and special_tokens_map.json from the original model",
)
def _special_token_unknown(subject: Subject) -> Iterator[Finding]:
    chat = _chat(subject)
    if chat.tokenizer is not None:
        for token, text in chat.special.items():
            if chat.tokenizer.token_to_id(text) is None:
                yield Finding(f"{token} {text!r} is not in the vocabulary of tokenizer.json")
    special = chat.special
    bos = special.get("bos_token")
    if bos is not None and bos in ("<unk>", special.get("unk_token")) and bos != special.get("eos_token"):
        yield Finding(f"bos_token is the unknown token {bos!r}")


@broken(
    title="Ids of special tokens outside the vocabulary",
    symptom="an index error or garbage when a batch is padded; answers that never end",
    cause="ids of another model's configuration, or an embedding that was cut to its used rows",
    check="bos, eos and pad ids of config.json, generation_config.json or GGUF are rows of the embedding",
    command="correct the ids after those of the original model",
)
def _special_id_range(subject: Subject) -> Iterator[Finding]:
    rows = _rows(subject)
    if rows is None:
        return
    for (file, key), numbers in _chat(subject).ids.items():
        bad = [n for n in numbers if n >= rows or (n < 0 and key != "pad_token_id")]
        if bad:
            yield Finding(f"{key} {', '.join(map(str, bad))} of {file} is outside the {rows:,} rows of the embedding")


@suspicious(
    title="Tokens beyond the embedding",
    symptom="an index error, a crash of the device or arbitrary text as soon as such a token occurs",
    cause="tokens added to the tokenizer of a model whose embedding was not resized, or the other model's tokenizer",
    check="the largest id of the tokenizer is a row of the embedding; broken where the chat template uses it",
    command="take the tokenizer of the original model, or resize the embedding of the original and quantize again",
)
def _vocabulary_beyond_embedding(subject: Subject) -> Iterator[Finding]:
    chat, rows = _chat(subject), _rows(subject)
    if rows is None:
        return
    if chat.tokenizer is not None:
        beyond = {text: n for text, n in chat.tokenizer.get_vocab(with_added_tokens=True).items() if n >= rows}
        if beyond:
            texts = sorted(beyond, key=lambda text: beyond[text])
            used = any(text in rendered for text in texts if len(text) > 2 for rendered in chat.texts.values())
            used = used or any(text in chat.special.values() for text in texts)
            yield Finding(
                f"{len(texts):,} token{'s' if len(texts) > 1 else ''} of tokenizer.json, ids up to "
                f"{max(beyond.values()):,}, lie beyond the {rows:,} rows of the embedding: {_quoted(texts[:3])}",
                severity="broken" if used else None,
            )
    count = subject.checkpoint.metadata.get("tokenizer.ggml.tokens")
    if isinstance(count, int) and count > rows:
        yield Finding(f"{count:,} tokens and only {rows:,} rows of the embedding", severity="broken")


@suspicious(
    title="No end of sequence",
    symptom="answers run on to the limit of tokens, often into a conversation with themselves",
    cause="eos_token_id lost when the configuration was rewritten",
    check="eos in the tokenizer, generation_config.json or config.json; encoders need none",
    command="copy generation_config.json and tokenizer_config.json from the original model",
)
def _eos_missing(subject: Subject) -> Iterator[Finding]:
    chat = _chat(subject)
    if subject.checkpoint.config.get("architectures") and not generates(subject.checkpoint.config):
        return
    listed = any(key in ("eos_token_id", "eot_token_id") for _, key in chat.ids)
    if chat.described and not listed and (subject.checkpoint.format == "gguf" or "eos_token" not in chat.special):
        yield Finding("neither the tokenizer nor a configuration names an end-of-sequence token")


@suspicious(
    title="Different ends of sequence",
    symptom="answers that do not end on one engine and do on another, or stop at once",
    cause="generation_config.json of the base model next to the tokenizer of the tuned one",
    check="the tokenizer's eos is among eos_token_id of generation_config.json, or else of config.json",
    command="list both ids in eos_token_id of generation_config.json, as the original model has them",
)
def _eos_disagree(subject: Subject) -> Iterator[Finding]:
    chat = _chat(subject)
    own = chat.id_of("eos_token")
    for file in ("generation_config.json", "config.json"):
        listed = chat.ids.get((file, "eos_token_id"))
        if listed:
            if own is not None and own not in listed:
                yield Finding(
                    f"eos_token {chat.special['eos_token']!r} of the tokenizer is id {own}, eos_token_id of {file} is "
                    f"{', '.join(map(str, listed))}"
                )
            return


@suspicious(
    title="BOS twice",
    symptom="slightly worse answers on every prompt, different by engine and endpoint; nothing fails",
    cause="a chat template that writes BOS before a tokenizer that adds one, or writes it twice",
    check="the rendered prompt and the tokenizer's own frame begin with one BOS; a duplicate is reported",
    command="send messages to the chat endpoint; tokenize rendered prompts with add_special_tokens=False",
)
def _bos_doubled(subject: Subject) -> Iterator[Finding]:
    chat = _chat(subject)
    bos, prompt = chat.special.get("bos_token"), chat.texts.get("prompt", "")
    if not bos:
        return
    if prompt.startswith(bos + bos):
        yield Finding(f"a rendered prompt begins with {bos!r} twice")
    number = chat.id_of("bos_token")
    if number is None:
        return
    framed, plain = chat.encode("a", special=True), chat.encode("a")
    if framed[:2] == [number, number] and plain[:1] != [number]:
        yield Finding(f"the tokenizer puts {bos!r} before a text twice")
    elif framed[:1] == [number] and plain[:1] != [number] and prompt.startswith(bos):
        yield Finding(
            f"the template writes {bos!r} and the tokenizer adds it: prompts rendered to text first get two",
            severity="information",
        )


# -------------------------------------------------------------------------------------------------------- the template


@broken(
    title="A chat template that does not work",
    symptom="HTTP 400 or 500 for every chat request, while completions work",
    cause="a template cut off or escaped wrongly on conversion, or written for another engine",
    check="it parses, and shows the text of a user's message and of an answer, within 10 s and 1 GiB",
    command="copy chat_template.jinja or tokenizer_config.json from the original model",
)
def _template_invalid(subject: Subject) -> Iterator[Finding]:
    chat = _chat(subject)
    if chat.exceeded:
        yield Finding(f"the chat template in {chat.place} was stopped: {chat.exceeded}")
        return
    for name, what in (("prompt", "one question"), ("turns", "a question, an answer and another question")):
        if name in chat.refused:
            yield Finding(f"the chat template in {chat.place} refuses {what} ({chat.refused[name]})")
            return
    for name, expected in (("prompt", (_QUESTION,)), ("turns", (_QUESTION, _ANSWER, _NEXT))):
        if name in chat.texts and (lost := [text for text in expected if text not in chat.texts[name]]):
            whose = "an answer" if lost == [_ANSWER] else "a user's message"
            yield Finding(f"the chat template in {chat.place} leaves out the text of {whose}")
            return


@suspicious(
    title="Content in parts is blanked",
    symptom="answers to an empty question from clients that send content as a list of parts, such as agents and IDEs",
    cause="a template that only prints content that is a string, or only parts of images",
    check="content [{type: text}] is shown, or refused with an error; a server then flattens it",
    command="let the template also print the text of each part, or pass --chat-template with one that does",
)
def _template_parts(subject: Subject) -> Iterator[Finding]:
    chat = _chat(subject)
    text = chat.texts.get("parts")
    if text is not None and _QUESTION not in text and _QUESTION in chat.texts.get("user", ""):
        yield Finding("a message whose content is a list with one text is shown without its text")


@suspicious(
    title="Arguments of tool calls",
    symptom="empty edits and broken calls in agents after the first tool call, or HTTP 400 and 500",
    cause="a template that expects arguments as text where engines pass objects, or encodes them twice",
    check="a call's arguments, as an object and as JSON text, are shown as JSON encoded once",
    command="make the template print text as it is and objects by tojson, or pass --chat-template with one that does",
)
def _template_tool_arguments(subject: Subject) -> Iterator[Finding]:
    chat = _chat(subject)
    if "tool_calls" not in (chat.template or "") or "prompt" not in chat.texts:
        return
    wrong = _arguments(chat, "call")
    if wrong:
        yield Finding(f"arguments given as an object are {wrong}")
    elif wrong := _arguments(chat, "call as text"):
        yield Finding(
            f"arguments given as JSON text, as clients send them, are {wrong}; engines that parse them first, as vLLM "
            "does, are not concerned",
            severity="information",
        )


def _arguments(chat: _Chat, name: str) -> str:
    """Return the problem with a call's arguments."""
    if name in chat.refused:
        return f"refused ({chat.refused[name]})"
    text = chat.texts.get(name, "")
    if '\\"town\\"' in text:
        return "encoded twice"
    return "written as Python writes them, not as JSON" if f"'town': '{_CITY}'" in text else ""


@suspicious(
    title="Tools that the prompt does not show",
    symptom="the model does not call tools, calls invented ones, or repeats a call whose result it never sees",
    cause="a template that was simplified, or of the base model",
    check="where a template speaks of tools: offered tools, a call and its result are in the prompt",
    command="copy the chat template from the original model",
)
def _template_tools_ignored(subject: Subject) -> Iterator[Finding]:
    chat = _chat(subject)
    template = chat.template or ""
    if "tool" not in template:
        return
    if "tools" in template and chat.texts.get("tools") == chat.texts.get("user") is not None:
        yield Finding("tools that are offered are not in the prompt")
    call = chat.texts.get("call", chat.texts.get("call as text"))
    if call is not None:
        lost = [what for what, text in (("call", _CITY), ("result", _RESULT)) if text not in call]
        if lost:
            # Models that write calls as plain text have them in the content, if a server does not parse them.
            untold = lost == ["call"] and "tool_calls" not in template
            yield Finding(
                f"the {' and the '.join(lost)} of a tool {'are' if len(lost) > 1 else 'is'} not in the prompt",
                severity="information" if untold else None,
            )


@suspicious(
    title="A role whose messages vanish",
    symptom="instructions have no effect, without an error",
    cause="a template that skips roles it does not know",
    check="messages of the roles system and developer are shown, or refused with an error",
    command="send such instructions as system (or in the user's message), or take the template of the original model",
)
def _template_role_dropped(subject: Subject) -> Iterator[Finding]:
    chat = _chat(subject)
    if _QUESTION not in chat.texts.get("user", ""):
        return
    if _SYSTEM not in chat.texts.get("system", _SYSTEM):
        yield Finding("messages of role system are left out without an error")
    elif _DEVELOPER not in chat.texts.get("developer", _DEVELOPER):
        yield Finding("messages of role developer are left out without an error", severity="information")


@suspicious(
    title="Answers without an end",
    symptom="answers run on, or the model writes the user's next turn itself",
    cause="a template without the end-of-turn token, or an end-of-turn token that eos_token_id does not list",
    check="the template's text after an answer has a special token, and one that ends generation",
    command="list the end-of-turn token in eos_token_id of generation_config.json, or restore the original template",
)
def _template_unclosed_turn(subject: Subject) -> Iterator[Finding]:
    chat = _chat(subject)
    before, found, tail = chat.texts.get("turn", "").rpartition(_ANSWER)
    if not found:
        return
    # Some templates close an answer by the mark of the next turn, which then ends generation as well.
    between = chat.texts.get("turns", "").rpartition(_ANSWER)[2].partition(_NEXT)[0]
    if chat.tokenizer is None:
        marks = _MARK.findall(between)
        if not tail.strip() and (not marks or marks[0] in before.rpartition(_QUESTION)[2]):
            yield Finding("nothing closes an assistant's message")
        return
    ending = chat.specials - ({chat.id_of("unk_token")} - chat.ends)
    numbers = [number for number in chat.encode(tail) if number in ending]
    if chat.ends & {*numbers, *chat.encode(between)}:
        return
    if not tail.strip():
        yield Finding("nothing closes an assistant's message")
    elif not numbers:
        yield Finding(f"an assistant's message is closed by {tail.strip()[:40]!r}, which is not a special token")
    elif chat.ends:
        yield Finding(
            f"an assistant's message is closed by {chat.tokenizer.id_to_token(numbers[0])!r}, id {numbers[0]}, "
            f"which is not among the ids that end an answer ({', '.join(map(str, sorted(chat.ends)))})"
        )


@suspicious(
    title="No way into the answer",
    symptom="the model first writes its own role, continues the user's message, or answers in another turn's format",
    cause="a template without add_generation_prompt, or with one of another format than its answers",
    check="the prompt is the conversation followed by what the template itself puts before an answer",
    command="copy the chat template from the original model",
)
def _template_generation_prompt(subject: Subject) -> Iterator[Finding]:
    chat = _chat(subject)
    asked, prompt, turn = (chat.texts.get(name) for name in ("user", "prompt", "turn"))
    if asked is None or prompt is None or turn is None or not turn.startswith(asked) or _ANSWER not in turn:
        return
    if not prompt.startswith(asked):
        yield Finding("with a generation prompt, the conversation before it is rendered otherwise")
        return
    header, opened = turn[len(asked) : turn.rindex(_ANSWER)].rstrip(), prompt[len(asked) :].rstrip()
    if header and not opened:
        yield Finding(f"add_generation_prompt adds nothing, while answers begin with {header[:60]!r}")
    elif header and not opened.startswith(header) and not header.startswith(opened):
        opener = _THOUGHT.split(opened)[0].rstrip()
        if opener != opened and opener and header.startswith(opener):
            return  # a prompt opens thoughts that old answers lack
        yield Finding(f"a prompt ends with {opened[:60]!r}, while answers begin with {header[:60]!r}")


@suspicious(
    title="Marks of the template that are not tokens",
    symptom="the model sees its role marks spelled out in pieces: role confusion, answers that do not end",
    cause="the template of another model, or a tokenizer that lost its added tokens",
    check="marks such as <|im_start|> in rendered conversations are single ids, and not <unk>",
    command="copy tokenizer.json and the chat template from the same original model",
)
def _template_special_tokens(subject: Subject) -> Iterator[Finding]:
    chat = _chat(subject)
    if chat.tokenizer is None:
        return
    unknown = chat.id_of("unk_token")
    marks = sorted({mark for text in chat.texts.values() for mark in _MARK.findall(text)})
    bad = [mark for mark in marks if len(ids := chat.encode(mark)) != 1 or (ids == [unknown] and mark != "<unk>")]
    # A mark may be the unknown token by its own name, as <|endoftext|> is in many vocabularies.
    bad = [mark for mark in bad if chat.tokenizer.token_to_id(mark) is None]
    if bad:
        yield Finding(
            f"{len(bad)} mark{'s' if len(bad) > 1 else ''} of the chat template {'are' if len(bad) > 1 else 'is'} no "
            f"token of the vocabulary: {_quoted(bad[:3])}"
        )
