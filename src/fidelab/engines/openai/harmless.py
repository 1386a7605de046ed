"""Options of engine openai that a file of somebody else may set without permission."""

from __future__ import annotations

from collections.abc import Mapping

from fidelab.engines.harmless import COUNT, SERVED, Amount, Harmless, Here, Words, group

HARMLESS: Mapping[str, Harmless] = {
    **group("a server that this machine's users started", Here(), "base-url"),
    **group("a name that is sent to that server", SERVED, "model"),
    **group("numbers of requests and of candidates for a token", COUNT, "concurrency", "logprobs"),
    **group("seconds until a request counts as failed", Amount(0, 1e6), "timeout"),
    **group("how prompts are sent", Words(("ids", "text")), "prompts"),
}
