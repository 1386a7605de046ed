"""Engine options that a foreign file may set without permission; all others need it.

Engines have hundreds of options, and each release adds some that load code by its name.  The list therefore names
options that are known to be harmless, with a value that is read as a number, as one of the engine's own names, or as a
switch of computation. ``docs/security.md`` shows this table.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from fidelab.core import plain_json

_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?[KMGT]?")
_WORD = re.compile(r"[\w.,:+\[\]=-]{1,200}")  # no path, no address, no code
_GRANTS = re.compile(r"trust|allow|remote|insecure")  # switches that give rights, which the number 1 also turns on
_FALSE = ("", "no", "false", "off", "none", "null")

HARMLESS: Mapping[str, tuple[str, ...]] = {
    "how attention, products and drafts are computed": (
        "async-scheduling", "attention-backend", "chunked-prefill", "cuda-graph", "dequant", "device-map",
        "disable-cuda-graph", "disable-overlap-schedule", "disable-radix-cache", "enable-chunked-prefill",
        "enforce-eager", "experts-implementation", "flash-attn", "model-runner", "offload-kqv", "quantization",
        "sampling-backend", "schedule-policy", "spec-type", "swa-full", "tp-plan", "weights",
    ),
    "what is saved, and what is run although it was refused": ("estimator", "force", "logprobs", "prompts"),
    "parsers of answers, by the engine's own names": ("reasoning-parser", "skip-server-warmup", "tool-call-parser"),
    "names of drafts and of served models": ("method", "model", "served-model-name"),
    "files that are only read, in the file's own folder": ("chat-template", "mmproj", "model-draft"),
}  # fmt: skip
"""Meaning → options whose values, as words without a path, are harmless."""

FILES = HARMLESS["files that are only read, in the file's own folder"]
_KEYS = frozenset(key for keys in HARMLESS.values() for key in keys)


def is_harmless(key: str, value: str) -> bool:
    """Return whether an option may be set without permission.

    ``value``: as text; JSON is parsed and checked.  Values that switch something off are always harmless. Numbers are
    harmless unless the name is of a switch that gives rights.  Words are harmless under the names of :data:`HARMLESS`.
    So is the address of a server on this machine.
    """
    if value.lower() in _FALSE or (_NUMBER.fullmatch(value) and not _GRANTS.search(key)):
        return True
    if key == "base-url":
        return _is_here(value)
    if value[:1] in "{[":
        try:
            return all(is_harmless(inner, leaf) for inner, leaf in _leaves(key, plain_json(value)))
        except (ValueError, RecursionError):
            return False
    return key in _KEYS and _WORD.fullmatch(value) is not None


def _leaves(key: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [leaf for name, inner in value.items() for leaf in _leaves(str(name).replace("_", "-"), inner)]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in _leaves(key, inner)]
    return [(key, "" if value is None else str(value))]


def _is_here(url: str) -> bool:
    try:
        host = (urlsplit(url if "//" in url else f"//{url}").hostname or "").rstrip(".")
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def table() -> list[str]:
    """Return the table in Markdown, line by line."""
    rows = [f"| {what} | {', '.join(f'`{key}`' for key in keys)} |" for what, keys in HARMLESS.items()]
    return ["| what it is | options |", "|---|---|", *rows]
