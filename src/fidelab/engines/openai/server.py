"""Identify a server and read its report about its KV cache; nothing is inferred from its behaviour."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fidelab.core.errors import EngineError
from fidelab.engines.openai.dialects import mapping
from fidelab.engines.openai.http import Client, Refused
from fidelab.engines.openai.named import names_of

_KINDS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama-server", "me": "llama_cpp.server"}  # by owned_by
_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'\b(\w++)="((?:[^"\\]++|\\.)*+)"')  # possessive: linear in whatever a server sends
_SPECULATED = "vllm:spec_decode_num_drafts"
_NAME = 200  # characters of a model's name
_LABELS = 1 << 14  # characters of them that are looked at


@dataclass(frozen=True)
class Server:
    """``model``: the served name; ``kv``: its names for the formats of K and V; ``facts``: all else that it reports.

    ``names``: the served name and others under which the server lists the same model.
    """

    model: str
    kind: str = "unknown"
    version: str | None = None
    kv: tuple[str, str] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()


def identify(client: Client, asked: str | None) -> Server:
    """Identify a server; ``asked``: the served model's name, where the user named one.

    Raises:
        EngineError: If it cannot be reached, refuses the key, or does not serve that model.
    """
    try:
        models = client.models()
    except Refused as error:
        if asked is None:
            raise EngineError(f"{error}; or name the served model: --engine-arg model=NAME") from None
        models = []
    names = [name for model in models if isinstance(name := model.get("id"), str)]
    shown = client.clean(", ".join(map(client.clean, names[:8])))
    if asked is None and len(names) != 1:
        raise EngineError(f"{client.api} serves {shown or 'no model'}: name one by --engine-arg model=NAME")
    if asked is not None and names and asked not in names:
        raise EngineError(f"{client.api} does not serve model {asked!r}; it serves: {shown}")
    owner = next((str(model.get("owned_by")) for model in models if asked in (None, model.get("id"))), "")
    name = asked or names[0]
    if asked is None and not _is_name(name, client):
        raise EngineError(
            f"{client.api} names its model by what is not a name ({shown or 'nothing'}): look what it is, "
            "or name one by --engine-arg model=NAME"
        )
    return replace(_reported(client, name, _KINDS.get(owner)), names=names_of(name, models))


def _reported(client: Client, name: str, kind: str | None) -> Server:
    """Read the reports of a server of this kind."""
    match kind:
        case "vllm":
            return _vllm(client, name)
        case "sglang":
            return _sglang(client, name)
        case "llama-server":
            return _llama_server(client, name)
        case _:
            return Server(name, kind or "unknown")


def other_models(client: Client, server: Server) -> list[str]:
    """Return the names of other models under which the server answered this client."""
    own = {spelled for name in (server.model, *server.names) for spelled in (name, client.clean(name))}
    return sorted(client.named - own)


def why_blind(client: Client, server: Server) -> str:
    """Return why the model on a server cannot take pictures, where the server says so; else an empty text.

    vLLM refuses pictures that its model cannot take.  The others here may ignore them.
    """
    why = "the model takes no pictures"
    match server.kind:
        case "llama-server":
            vision = mapping(optional_object(client, "/props"), "modalities").get("vision")
            return f"{why}: started without --mmproj" if vision is False else ""
        case "sglang":
            about = optional_object(client, "/model_info") or optional_object(client, "/get_model_info")
            return why if about.get("has_image_understanding") is False else ""
        case "llama_cpp.server":
            return f"{why}: llama_cpp.server ignores them without a chat handler"
    return ""


def _is_name(text: str, client: Client) -> bool:
    """Whether a text can be a model's name: short, printable, and not the key."""
    return 0 < len(text) <= _NAME and text.isprintable() and "\ufffd" not in text and not client.holds_key(text)


def cache_labels(client: Client) -> tuple[dict[str, str], bool]:
    """Return vLLM's labels of the cache from its metrics, and whether the metrics count speculated tokens.

    Empty without metrics.
    """
    try:
        text = client.text("/metrics")
    except EngineError:
        return {}, False
    match = _CACHE_INFO.search(text)
    return dict(_LABEL.findall(match[1][:_LABELS])) if match else {}, _SPECULATED in text


def _vllm(client: Client, model: str) -> Server:
    about = optional_object(client, "/version")
    labels, _ = cache_labels(client)
    kv = _text(client, labels, "cache_dtype")
    return Server(
        model,
        "vllm",
        _text(client, about, "version"),
        (kv, kv) if kv else None,
        _chosen(
            client,
            {key: _value(text) for key, text in labels.items()},
            block_size="block_size",
            cache_tokens="kv_cache_size_tokens",
            cache_bytes="kv_cache_memory_bytes",
            prefix_caching="enable_prefix_caching",
        ),
    )


def _sglang(client: Client, model: str) -> Server:
    about = optional_object(client, "/server_info")
    kv = _text(client, about, "kv_cache_dtype")
    attention, cache_off = _text(client, about, "attention_backend"), about.get("disable_radix_cache")
    return Server(
        model,
        "sglang",
        _text(client, about, "version"),
        (kv, kv) if kv else None,
        {
            **({"attention_backend": attention} if attention else {}),
            **_chosen(client, about, block_size="page_size", cache_tokens="max_total_num_tokens", tp="tp_size"),
            **({"prefix_caching": not cache_off} if isinstance(cache_off, bool) else {}),
        },
    )


def _llama_server(client: Client, model: str) -> Server:
    about = optional_object(client, "/props")
    both = {**mapping(about, "default_generation_settings"), **about}
    k, v = (_text(client, both, f"cache_type_{side}") for side in "kv")  # builds that report it; most do not
    return Server(model, "llama-server", _text(client, about, "build_info"), (k, v) if k and v else None)


def optional_object(client: Client, path: str) -> dict[str, Any]:
    """Return the JSON object at a path; ``{}`` if there is none."""
    try:
        return client.get(path, api=False)
    except EngineError:
        return {}


def _text(client: Client, answer: Mapping[str, Any], key: str) -> str | None:
    value = answer.get(key)
    return client.clean(value) or None if isinstance(value, str) else None


def _value(text: str) -> bool | int | str:
    """The value of a Prometheus label."""
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.isascii() and text.isdecimal() and len(text) < _DIGITS else text


_DIGITS = 19  # of an integer of 64 bits


def _chosen(client: Client, answer: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """Values of the server by fidelab's names, if they are numbers or words; ``names`` maps them to the server's."""
    values = ((name, answer.get(key)) for name, key in names.items())
    found = {name: _text(client, answer, names[name]) if isinstance(value, str) else value for name, value in values}
    return {
        name: value
        for name, value in found.items()
        if (isinstance(value, str) and value != "None") or (isinstance(value, int) and abs(value) < 10**_DIGITS)
    }
