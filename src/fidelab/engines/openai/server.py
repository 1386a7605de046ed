"""Identify a server and read what it reports about its KV cache; nothing is inferred from its behaviour."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fidelab.engines.openai.dialects import mapping
from fidelab.engines.openai.http import Client, Refused
from fidelab.errors import EngineError

__all__ = ["Server", "identify"]

_KINDS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama-server", "me": "llama_cpp.server"}  # by owned_by
_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Server:
    """``model``: the served name; ``kv``: its names for the formats of K and V; ``facts``: what else it reports."""

    model: str
    kind: str = "unknown"
    version: str | None = None
    kv: tuple[str, str] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def identify(client: Client, asked: str | None) -> Server:
    """Identify a server; ``asked``: the served model's name, where the user named one.

    Raises:
        EngineError: it cannot be reached, refuses the key, or does not serve that model.
    """
    try:
        listed = client.get("/models").get("data")
        models = [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []
    except Refused as error:
        if asked is None:
            raise EngineError(f"{error}; or name the served model: --engine-arg model=NAME") from None
        models = []
    names = [str(model.get("id")) for model in models]
    shown = ", ".join(map(client.clean, names[:8]))
    if asked is None and len(names) != 1:
        raise EngineError(f"{client.api} serves {shown or 'no model'}: name one by --engine-arg model=NAME")
    if asked is not None and names and asked not in names:
        raise EngineError(f"{client.api} does not serve model {asked!r}; it serves: {shown}")
    owner = next((str(model.get("owned_by")) for model in models if asked in (None, model.get("id"))), "")
    name = asked or names[0]
    match _KINDS.get(owner):
        case "vllm":
            return _vllm(client, name)
        case "sglang":
            return _sglang(client, name)
        case "llama-server":
            return _llama_server(client, name)
        case kind:
            return Server(name, kind or "unknown")


def _vllm(client: Client, model: str) -> Server:
    about = _optional(client, "/version")
    try:
        match = _CACHE_INFO.search(client.text("/metrics"))
    except EngineError:
        match = None
    labels = dict(_LABEL.findall(match[1])) if match else {}
    kv = labels.get("cache_dtype")
    return Server(
        model,
        "vllm",
        _text(about, "version"),
        (kv, kv) if kv else None,
        _chosen(
            {key: _value(text) for key, text in labels.items()},
            block_size="block_size",
            cache_tokens="kv_cache_size_tokens",
            cache_bytes="kv_cache_memory_bytes",
            prefix_caching="enable_prefix_caching",
        ),
    )


def _sglang(client: Client, model: str) -> Server:
    about = _optional(client, "/server_info") or _optional(client, "/get_server_info")
    kv = _text(about, "kv_cache_dtype")
    cache_off = about.get("disable_radix_cache")
    return Server(
        model,
        "sglang",
        _text(about, "version"),
        (kv, kv) if kv else None,
        {
            **_chosen(
                about,
                attention_backend="attention_backend",
                block_size="page_size",
                cache_tokens="max_total_num_tokens",
                tp="tp_size",
            ),
            **({} if cache_off is None else {"prefix_caching": not cache_off}),
        },
    )


def _llama_server(client: Client, model: str) -> Server:
    about = _optional(client, "/props")
    both = {**mapping(about, "default_generation_settings"), **about}
    k, v = _text(both, "cache_type_k"), _text(both, "cache_type_v")  # builds that tell; most do not
    return Server(model, "llama-server", _text(about, "build_info"), (k, v) if k and v else None)


def _optional(client: Client, path: str) -> dict[str, Any]:
    """The JSON object at a path, or ``{}`` where there is none."""
    try:
        return client.get(path, api=False)
    except EngineError:
        return {}


def _text(answer: Mapping[str, Any], key: str) -> str | None:
    value = answer.get(key)
    return value if isinstance(value, str) and value else None


def _value(text: str) -> bool | int | str:
    """The value of a Prometheus label."""
    return text == "True" if text in ("True", "False") else int(text) if text.isdecimal() else text


def _chosen(answer: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """The server's values by our names; ``names`` maps ours to the server's."""
    return {name: answer[key] for name, key in names.items() if answer.get(key) not in (None, "", "None")}
