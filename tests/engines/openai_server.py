"""A small real server on loopback that speaks completions, as test equipment; and a tokenizer of bytes.

Its model: behind a context the token ``next_token`` is the likeliest, and a token k places further on (round the
vocabulary) has P ∝ exp(-rate·k).  So KL between two rates has a closed form, the same at every position.
"""

from __future__ import annotations

import atexit
import json
import math
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BOS, EOS, VOCAB = 256, 257, 258
_STANDARD = {"model", "prompt", "max_tokens", "temperature", "seed", "logprobs", "echo", "stream", "stream_options"}


@dataclass
class Served:
    """What a server can do, what goes wrong, and what it was asked.

    ``scores``: how it gives log-probabilities of prompts (``prompt_logprobs``, ``echo``, ``shifted``, or none).
    ``lift``: added to every log-probability, behind contexts that begin with ``lifted`` or, without that, behind all.
    ``trouble``: statuses (or ``drop``, ``garbage``) of the next completions; ``ends``: generated tokens before EOS.
    """

    rate: float = 0.5
    lift: float = 0.0
    lifted: int | None = None
    owner: str = "vllm"
    models: Sequence[str] = ("tiny",)
    answers_as: str | None = None
    root: str | None = None
    takes_ids: bool = True
    returns_ids: bool = True
    strict: bool = False
    scores: str | None = "prompt_logprobs"
    generated_logprobs: bool = True
    most: int = 20
    longest: int = 1 << 20  # tokens of a prompt
    ends: int | None = None
    names_end: bool = True
    heeds_ignore_eos: bool = True
    per_event: int = 1
    adds_bos: bool = False
    cache_dtype: str | None = None
    remembers: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)  # what SGLang's says of itself, too
    key: str | None = None
    trouble: list[int | str] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    port: int = 0
    read: list[tuple[str, list[int]]] = field(default_factory=list)  # salt and tokens of each prompt

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def found(self, prompt: list[int], body: Mapping[str, Any], most: int | None = None) -> int:
        """Tokens of a prompt that it remembers; from then on, all of them."""
        salt = str(body.get("cache_salt"))
        before = [tokens for other, tokens in self.read if other == salt]
        self.read.append((salt, prompt))
        equal = (takewhile(lambda pair: pair[0] == pair[1], zip(one, prompt, strict=False)) for one in before)
        longest = max((len([*pairs]) for pairs in equal), default=0)
        return min(longest, len(prompt) - 1 if most is None else most)

    def logprobs(self, context: Sequence[int]) -> dict[int, float]:
        """All V log-probabilities behind a context, the likeliest first."""
        best = next_token(context)
        log_z = math.log(sum(math.exp(-self.rate * k) for k in range(VOCAB)))
        log_z -= self.lift if self.lifted is None or self.lifted in context[:1] else 0.0
        return {(best + k) % VOCAB: -self.rate * k - log_z for k in range(VOCAB)}

    def generate(self, prompt: Sequence[int], n: int, ignore_eos: bool) -> list[int]:
        ids: list[int] = []
        while len(ids) < n:
            if len(ids) == self.ends and not (ignore_eos and self.heeds_ignore_eos):
                return [*ids, EOS]
            ids.append(next_token([*prompt, *ids]))
        return ids


def next_token(context: Sequence[int]) -> int:
    """A letter, or a space, from what went before."""
    return b"abcdefghijklmnopqrstuvwxyz "[(sum(context) * 7 + len(context)) % 27]


def true_kl(rate: float, other: float) -> float:
    """KL(P‖Q), nats, of two servers' models."""
    weights = [math.exp(-rate * k) for k in range(VOCAB)]
    z, z_other = sum(weights), sum(math.exp(-other * k) for k in range(VOCAB))
    mean = sum(k * w for k, w in enumerate(weights)) / z
    return math.log(z_other / z) + (other - rate) * mean


@contextmanager
def serving(served: Served) -> Iterator[Served]:
    """The server, as long as the block lasts."""
    handler = type("Handler", (_Handler,), {"served": served})
    with _Server(("127.0.0.1", 0), handler) as server:
        served.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()


def save_tokenizer(folder: Path) -> Path:
    """A tokenizer whose ids are bytes, with BOS and EOS."""
    names = pre_tokenizers.ByteLevel.alphabet()
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    stand_ins = {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}
    assert set(stand_ins.values()) == set(names)
    words = Tokenizer(models.BPE(vocab={char: byte for byte, char in stand_ins.items()}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(["<bos>", "<eos>"])
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", eos_token="<eos>").save_pretrained(folder)
    return folder


@cache
def byte_model() -> Path:
    """The folder of such a model, for tests of servers whose own tokenizer does not matter."""
    folder = Path(tempfile.mkdtemp(prefix="fidelab-bytes-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return save_model(folder)


def save_model(folder: Path) -> Path:
    """A model folder with that tokenizer, and weights that nobody computes with."""
    save_tokenizer(folder)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 128}
    sizes = {"vocab_size": VOCAB, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    (folder / "config.json").write_text(json.dumps({**config, **sizes, "torch_dtype": "bfloat16"}))
    save_file({"model.embed_tokens.weight": np.zeros((VOCAB, 4), dtype=np.float32)}, folder / "model.safetensors")
    return folder


def encode(text: str) -> list[int]:
    """Text as this tokenizer reads it."""
    found: list[int] = []
    while text:
        special = next((name for name in ("<bos>", "<eos>") if text.startswith(name)), None)
        found += [BOS if special == "<bos>" else EOS] if special else text[0].encode()
        text = text[len(special or text[0]) :]
    return found


def spelled(token: int) -> str:
    """A token's text, as a server with a byte decoder shows it."""
    return "" if token >= 256 else bytes([token]).decode("utf-8", "ignore")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Served

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        served = self.served
        match self.path:
            case "/v1/models" if self._let_in():
                self._json(
                    {"data": [{"id": name, "owned_by": served.owner, "root": served.root} for name in served.models]}
                )
            case "/version" if served.owner == "vllm":
                self._json({"version": "9.9"})
            case "/metrics" if served.cache_dtype and served.owner == "vllm":
                labels = f'block_size="16",cache_dtype="{served.cache_dtype}",enable_prefix_caching="False"'
                self._send(f"# HELP\nvllm:cache_config_info{{{labels}}} 1.0\n".encode(), "text/plain")
            case "/server_info" if served.owner == "sglang":
                kv = {"kv_cache_dtype": served.cache_dtype} if served.cache_dtype else {}
                about = {"version": "8.8", "attention_backend": "triton", "disable_radix_cache": True}
                self._json({**about, **kv, **served.about})
            case "/flush_cache" if served.owner == "sglang":
                served.read.clear()
                self._send(b"Cache flushed.", "text/plain")
            case _:
                self._json({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        served = self.served
        if not self._let_in():
            return
        if self.path == "/tokenize" and served.owner == "vllm":
            self._json({"tokens": encode(body["prompt"])})
        elif self.path == "/v1/completions":
            self._completions(body)
        elif self.path == "/generate" and served.owner == "sglang":
            self._generate(body)
        else:
            self._json({"detail": "Not Found"}, 404)

    def _completions(self, body: dict[str, Any]) -> None:
        served = self.served
        served.requests.append(body)
        if self._in_trouble():
            return
        unknown = sorted(body.keys() - _STANDARD)
        as_ids = isinstance(body["prompt"], list)
        top = max(body.get("logprobs") or 0, body.get("prompt_logprobs") or 0)
        if served.strict and unknown:
            self._error(400, f"Unrecognized request argument supplied: {unknown[0]}")
        elif as_ids and not served.takes_ids:
            self._error(422, "prompt: Input should be a valid string")
        elif len(body["prompt"] if as_ids else encode(body["prompt"])) > served.longest:
            self._error(400, f"This model's maximum context length is {served.longest} tokens")
        elif top > served.most:
            self._error(400, f"Requested logprobs of {top}, which is greater than max allowed: {served.most}")
        elif top and not served.generated_logprobs:
            self._error(500, "logprobs is not supported for models created with logits_all=False")
        else:
            prompt = body["prompt"] if as_ids else [BOS] * served.adds_bos + encode(body["prompt"])
            ids = served.generate(prompt, body["max_tokens"], bool(body.get("ignore_eos")))
            self._stream(body, prompt, ids) if body.get("stream") else self._answer(body, prompt, ids)

    def _answer(self, body: Mapping[str, Any], prompt: list[int], ids: list[int]) -> None:
        served = self.served
        shown = [token for token in ids if token != EOS]
        top = body.get("logprobs")
        choice: dict[str, Any] = {
            "index": 0,
            "text": bytes(shown).decode(),
            "finish_reason": "stop" if EOS in ids else "length",
            "logprobs": None,
        }
        if top:
            echoed = prompt if body.get("echo") and served.scores in ("echo", "shifted") else []
            choice["logprobs"] = self._logprobs(prompt, shown, top, echoed)
        if served.scores == "prompt_logprobs" and body.get("prompt_logprobs"):
            rows = [_report(served, prompt[:i], body["prompt_logprobs"], prompt[i]) for i in range(1, len(prompt))]
            named = [{str(token): {"logprob": value} for token, value in row.items()} for row in rows]
            choice["prompt_logprobs"] = [None, *named]
        if served.returns_ids and body.get("return_token_ids"):
            choice["token_ids"] = ids if served.names_end else shown
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        if served.remembers:
            usage["prompt_tokens_details"] = {"cached_tokens": served.found(prompt, body)}
        answered = served.answers_as or body.get("model")
        self._json({"object": "text_completion", "model": answered, "choices": [choice], "usage": usage})

    def _logprobs(self, prompt: list[int], ids: list[int], top: int, echoed: list[int]) -> dict[str, Any]:
        """As OpenAI gives them, with texts or with vLLM's names for ids.

        ``shifted``: each echoed token has the entry of the next one, and the last is lost.
        """
        by_id = self.served.scores == "prompt_logprobs"
        name = "token_id:{}".format if by_id else spelled
        whole, begin = [*prompt, *ids], len(prompt) - len(echoed)
        shift = int(self.served.scores == "shifted" and bool(echoed))
        tokens = whole[begin : len(whole) - shift] if shift else whole[begin:]
        rows = [_report(self.served, whole[: begin + i + shift], top, token) for i, token in enumerate(tokens)]
        tops = [{name(token): value for token, value in row.items()} for row in rows]
        own: list[float | None] = [row[token] for row, token in zip(rows, tokens, strict=True)]
        if echoed:
            own[0], tops[0] = None, None  # type: ignore[call-overload]
        return {"tokens": [name(token) for token in tokens], "token_logprobs": own, "top_logprobs": tops}

    def _stream(self, body: Mapping[str, Any], prompt: list[int], ids: list[int]) -> None:
        served, size = self.served, self.served.per_event
        events: list[dict[str, Any]] = []
        for at in range(0, len(ids), size):
            part = ids[at : at + size]
            own = {"token_ids": part} if served.returns_ids and body.get("return_token_ids") else {}
            text = "".join(spelled(token) for token in part)
            events.append({"choices": [{"index": 0, "text": text, "finish_reason": None, **own}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
            events.append({"choices": [], "usage": usage})
        self._events(events)

    def _generate(self, body: dict[str, Any]) -> None:
        served = self.served
        served.requests.append(body)
        if self._in_trouble():
            return
        prompt, params = body["input_ids"], body["sampling_params"]
        ids = served.generate(prompt, params["max_new_tokens"], bool(params.get("ignore_eos")))
        meta: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "cached_tokens": served.found(prompt, body, body.get("logprob_start_len")) if served.remembers else 0,
            "finish_reason": {"type": "stop", "matched": EOS} if EOS in ids else {"type": "length"},
        }
        if top := body.get("return_logprob") and body.get("top_logprobs_num"):
            whole = [*prompt, *ids]
            rows: list[Any] = [_report(served, whole[:i], top, whole[i]) for i in range(len(whole))]
            entries = [[[value, token, None] for token, value in row.items()] for row in rows]
            own = [[row[token], token, None] for row, token in zip(rows, whole, strict=True)]
            n = len(prompt)
            meta |= {"output_token_logprobs": own[n:], "output_top_logprobs": entries[n:]}
            if (at := body.get("logprob_start_len", -1)) >= 0:
                meta |= {"input_token_logprobs": [[None, prompt[at], None], *own[at + 1 : n]]}
                meta |= {"input_top_logprobs": [None, *entries[at + 1 : n]]}
        if body.get("stream"):
            self._events(
                {"output_ids": ids[:made], "meta_info": {**meta, "completion_tokens": made}}
                for made in range(served.per_event, len(ids) + 1, served.per_event)
            )
        else:
            self._json({"text": "", "output_ids": ids, "meta_info": meta})

    def _let_in(self) -> bool:
        given = self.headers.get("Authorization")
        self.served.keys.append(given)
        if self.served.key is None or given == f"Bearer {self.served.key}":
            return True
        self._error(401, f"Incorrect API key provided: {(given or '').removeprefix('Bearer ')}")
        return False

    def _in_trouble(self) -> bool:
        trouble = self.served.trouble.pop(0) if self.served.trouble else None
        match trouble:
            case None | "":
                return False
            case "drop":
                self.close_connection = True
                self.connection.close()
            case "garbage":
                self._send(b"<html>It works!</html>", "text/html")
            case "late":
                threading.Event().wait(3)
                self.close_connection = True
            case int(status):
                self._error(status, f"trouble {status}")
        return True

    def _events(self, events: Any) -> None:
        data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        self._send(data, "text/event-stream")

    def _error(self, status: int, message: str) -> None:
        self._json({"error": {"message": message, "type": "error"}}, status)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), "application/json", status)

    def _send(self, data: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _report(served: Served, context: Sequence[int], top: int, token: int) -> dict[int, float]:
    """The top tokens behind a context, and the actual one."""
    found = served.logprobs(context)
    return dict(list(found.items())[:top]) | {token: found[token]}
