"""Servers that mean harm: each request ends in time, takes few bytes, and ends in one line without the key."""

from __future__ import annotations

import asyncio
import base64
import html
import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from fidelab.captures.requests import Generate, Prefill
from fidelab.core.errors import EngineError, UsageError
from fidelab.engines.openai import http as openai_http
from fidelab.engines.openai.adapter import OpenAIEngine
from fidelab.engines.openai.http import PAGE, Client, Refused, cleaner
from fidelab.engines.openai.server import identify
from tests.bench.load.sse_server import HEAD, Script, Talk, chunked, serve, sized
from tests.engines.openai_server import EOS, Served, encode, save_tokenizer, serving
from tests.engines.test_openai import opened, prefill
from tests.engines.tiny import Answers

KEY = "sk-proj-0123456789+abcdefghij/ABCDEFGHIJ=xyz"
SOON = 5.0  # seconds: a guard against hanging, many times the time-out
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(openai_http, "_FIRST_WAIT", 0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def client(url: str, key: str | None = None, timeout: float = 0.4) -> Client:
    return Client(url, key, timeout)


def refusal(call: Callable[[], object]) -> str:
    """What an error says; empty where there is none."""
    try:
        call()
    except EngineError as error:
        return str(error)
    return ""


ASKS: dict[str, Callable[[Client], object]] = {
    "get": lambda one: one.get("/models"),
    "text": lambda one: one.text("/metrics"),
    "post": lambda one: one.post("/completions", {"prompt": "x"}),
    "stream": lambda one: list(one.stream("/completions", {"prompt": "x"})),
}


def drips(first: bytes, drip: bytes) -> Script:
    """Sends something all the time, so that no single read ever waits for long."""

    async def script(talk: Talk) -> None:
        talk.send(first)
        while not talk.writer.is_closing():
            talk.send(drip)
            await asyncio.sleep(0.05)

    return script


# What an answer begins with, and what follows it drop by drop.
DRIPS: dict[str, tuple[bytes, bytes]] = {
    "status": (b"HTTP/1.1 ", b"2"),
    "headers": (OK, b"X-More: yes\r\n"),
    "go on": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": (OK + b"Content-Length: 1000000\r\n\r\n", b" "),
    "comments in chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunked(b": alive\n\n", end=False)),
    "comments": (HEAD + b"\r\n", b": alive\n\n"),
    "error": (b"HTTP/1.1 500 Oh\r\nContent-Length: 1000000\r\n\r\n", b" "),
}


def test_bytes_that_drip_do_not_prolong_a_request() -> None:
    """Several requests at a time: nearly all of it is waiting."""

    def wrong(pair: tuple[str, str]) -> str:
        drip, ask = pair
        with serve(drips(*DRIPS[drip])) as served:
            began = time.monotonic()
            line = refusal(lambda: ASKS[ask](client(served.url)))
            seconds = time.monotonic() - began
        told = "did not answer within 0.4 s" in line or "headers" in line
        return "" if told and seconds < SOON else f"{drip}, {ask}: {line!r} after {seconds:.1f} s"

    with ThreadPoolExecutor(7) as pool:
        found = list(pool.map(wrong, itertools.product(DRIPS, ASKS)))
    assert len(found) == 28
    assert [line for line in found if line] == []


def test_a_caller_may_run_an_event_loop_of_its_own() -> None:
    async def answer(talk: Talk) -> None:
        talk.send(sized(b'{"data":[]}'))

    async def notebook(url: str) -> object:
        return client(url, timeout=SOON).get("/models")

    with serve(answer) as served:
        assert asyncio.run(notebook(served.url)) == {"data": []}


def test_attempts_together_end_at_the_deadline() -> None:
    async def busy(talk: Talk) -> None:
        talk.send(b"HTTP/1.1 503 Busy\r\nRetry-After: 20\r\nContent-Length: 0\r\n\r\n")

    began = time.monotonic()
    with serve(busy) as served, pytest.raises(Refused, match="too busy in 1 attempts"):
        client(served.url).get("/models")
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize("ask", [ASKS["get"], ASKS["post"], ASKS["stream"]], ids=["get", "post", "stream"])
@pytest.mark.parametrize(
    "head",
    [OK + b"\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"HTTP/1.1 500 Oh\r\n\r\n", OK + b"X: "],
    ids=["body", "chunks", "error", "header"],
)
def test_an_answer_without_end_is_cut_off(head: bytes, ask: Callable[[Client], object]) -> None:
    sent = 0

    async def flood(talk: Talk) -> None:
        nonlocal sent
        talk.send(head)
        piece = b"data: " + b"x" * 65_000
        while not talk.writer.is_closing():
            talk.send(chunked(piece, end=False) if b"chunked" in head else piece)
            sent += len(piece)
            await talk.writer.drain()

    with serve(flood) as served, pytest.raises(EngineError) as caught:
        ask(client(served.url, timeout=60))
    assert "\n" not in str(caught.value)
    assert sent < PAGE + (16 << 20)  # what lies in sockets' buffers is sent, too


def test_a_page_of_metrics_is_read_as_far_as_it_may_be_long() -> None:
    async def page(talk: Talk) -> None:
        talk.send(OK + b"\r\n")
        talk.send(b"vllm:number 1\n")
        while not talk.writer.is_closing():
            talk.send(b"# HELP nothing\n" * 4000)
            await talk.writer.drain()

    with serve(page) as served, pytest.raises(Refused, match="more than 8 MiB"):
        client(served.url, timeout=60).text("/metrics")


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 1" + b"0" * 30 + b"\r\n\r\n{}",
        OK + b"Content-Length: 1" + b"0" * 5000 + b"\r\n\r\n{}",
        OK + b"Content-Length: 100\r\nConnection: close\r\n\r\n{}",
        OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}",
        sized(b'{"a":' + b"[" * 500_000),
        sized(b'{"a":' + b'{"error":' * 900 + b"1" + b"}" * 901, b"400 No"),
        sized(b'{"a":' + b"9" * 10_000 + b"}"),
        sized(b"[]"),
        sized(b'"\\ud800"'),
        sized(b'{"error":{"message":"\\ud83d \\udcbb"}}'),
        sized(b"\xff\xfe\xfd"),
        sized(b""),
    ],
    ids=lambda answer: repr(answer[40:90]),
)
@pytest.mark.parametrize("ask", [ASKS["post"], ASKS["stream"]], ids=["post", "stream"])
def test_answers_of_any_form_are_one_line(answer: bytes, ask: Callable[[Client], object]) -> None:
    async def script(talk: Talk) -> None:
        talk.send(answer)
        talk.close()

    with serve(script) as served:
        line = refusal(lambda: ask(client(served.url, timeout=2.0)))
    assert "\n" not in line
    assert len(line) < 600
    line.encode()


def test_a_key_that_no_header_carries_is_refused_without_repeating_it() -> None:
    for key in ("sk-a\r\nX: y", "schlüssel"):
        with pytest.raises(UsageError, match="characters that HTTP headers cannot hold") as caught:
            client("http://127.0.0.1:1", key)
        assert key not in str(caught.value)


SPELLINGS: dict[str, Callable[[str], str]] = {
    "as it is": lambda key: key,
    "percent": lambda key: key.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
    "JSON": lambda key: json.dumps(key.replace("/", "\\/"))[1:-1].replace("\\\\", "\\"),
    "HTML": html.escape,
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "base64 of addresses": lambda key: base64.urlsafe_b64encode(key.encode()).decode(),
}


@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("blanks", [0, 10, 200, 230, 239, 930, 100_000])
def test_the_key_is_replaced_before_text_is_cut(spell: Callable[[str], str], blanks: int) -> None:
    clean = cleaner([KEY])
    for before in (" " * blanks, "x" * blanks, "<" + " " * blanks):
        shown = clean(f"{before}{spell(KEY)} and {spell(KEY)}")
        assert len(shown) <= 240
        assert not any(spell(KEY)[:n] in shown for n in range(8 * len(spell(KEY)) // len(KEY), len(spell(KEY))))
    assert clean(" " * blanks + spell(KEY)).strip('"\\') == "[key]"


def test_many_keys_make_no_room_for_one_that_was_cut_and_a_short_key_is_not_a_part_of_other_words() -> None:
    assert cleaner([KEY])(KEY * 10_000) == "[key]" * 47 + "[key…"
    assert cleaner(["x"])("x: no matrix for key x") == "[key]: no matrix for key [key]"


def test_a_dot_of_the_key_stands_for_a_dot_alone() -> None:
    assert cleaner(["sk.proj-0123"])("sk.proj-0123 is not sk-proj-0123") == "[key] is not sk-proj-0123"


@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS)
def test_no_answer_shows_the_key(spell: Callable[[str], str]) -> None:
    """As a page that is not JSON, as an error, as an address, in a stream, behind a lot of white space."""
    said = spell(KEY)
    answers = [
        sized(b" " * 930 + said.encode()),
        sized(said.encode(), b"401 No"),
        sized(json.dumps({"error": {"message": said}}).encode(), b"400 No"),
        sized(json.dumps({"error": " " * 220 + said}).encode()),
        sized(json.dumps({"choices": said}).encode(), b"500 Oh"),
        f"HTTP/1.1 307 Moved\r\nLocation: http://x/?{said}\r\nContent-Length: 0\r\n\r\n".encode(),
        f"HTTP/1.1 {said}\r\n\r\n".encode(),
        HEAD + b"\r\ndata: " + b" " * 220 + said.encode() + b"\n\n",
    ]
    for answer in answers:

        async def script(talk: Talk, answer: bytes = answer) -> None:
            talk.send(answer)
            talk.close()

        for name in ("post", "stream"):
            with serve(script) as served:
                line = refusal(partial(ASKS[name], client(served.url, KEY, timeout=20.0)))
            assert line or name == "stream"  # which may hold no event
            assert KEY[:12] not in line
            assert said[: len(said) // 3] not in line


def test_a_text_that_repeats_the_key_is_not_captured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    monkeypatch.setattr(Served, "generate", lambda *_args: encode(KEY))
    with serving(Served(key=KEY)) as server, pytest.raises(EngineError, match="answers with the key"):
        opened(folder, server, api_key_env="MY_KEY").answer(
            Generate("t", ((1, 2, 3),), 100, (EOS,), rows=False), Answers()
        )


def hostile_identity(said: str, owner: str = "vllm") -> Script:
    """A server that says the same of everything."""
    labels = f'vllm:cache_config_info{{cache_dtype="{said}",block_size="{"9" * 5000}",x="{said}"}} 1\n'
    facts: dict[str, object] = dict.fromkeys(
        ("version", "kv_cache_dtype", "attention_backend", "build_info", "cache_type_k"), said
    )
    facts |= {"page_size": 10**400, "tp_size": {"a": said}, "cache_type_v": said, "disable_radix_cache": said}

    async def script(talk: Talk) -> None:
        path = talk.head.split()[1]
        if path == b"/v1/models":
            talk.send(sized(json.dumps({"data": [{"id": "tiny", "owned_by": owner}]}).encode()))
        elif path == b"/metrics":
            talk.send(sized(labels.encode("utf-8", "replace")))
        else:
            talk.send(sized(json.dumps(facts).encode()))

    return script


@pytest.mark.parametrize("owner", ["vllm", "sglang", "llamacpp"])
@pytest.mark.parametrize("said", [KEY, "x" * 100_000, "\ud800", "a\n" * 1000])
def test_what_a_server_says_of_itself_is_short_and_without_the_key(owner: str, said: str) -> None:
    with serve(hostile_identity(said, owner)) as served:
        server = identify(client(served.url, KEY, timeout=20.0), None)
    shown = json.dumps([server.version, server.kv, dict(server.facts)], ensure_ascii=False)
    shown.encode()
    assert KEY[:12] not in shown
    assert len(shown) < 2000


@pytest.mark.parametrize("name", ["", "x" * 5000, "\x1b]0;mine\x07", "a\nb", "\ud800", "\u202etxt", KEY])
def test_a_name_that_is_none_is_refused_unless_the_user_gives_one(name: str) -> None:
    async def script(talk: Talk) -> None:
        talk.send(sized(json.dumps({"data": [{"id": name}]}).encode()))

    with serve(script) as served:
        with pytest.raises(EngineError, match=r"what is not a name .*--engine-arg model=NAME") as caught:
            identify(client(served.url, KEY, timeout=20.0), None)
        with pytest.raises(EngineError, match="does not serve model 'mine'"):
            identify(client(served.url, KEY, timeout=20.0), "mine")
    assert KEY not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_labels_without_end_take_no_time() -> None:
    async def script(talk: Talk) -> None:
        models = sized(b'{"data":[{"id":"tiny","owned_by":"vllm"}]}')
        talk.send(models if b"/models" in talk.head else sized(b"vllm:cache_config_info{" + b"a" * 4_000_000 + b"}\n"))

    with serve(script) as served:
        assert identify(client(served.url, timeout=SOON), None).kv is None


def test_more_tokens_than_asked_fail_the_item(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in ("vllm", "sglang"):
        with serving(Served(owner=owner)) as server:
            engine = opened(folder, server)
            monkeypatch.setattr(Served, "generate", lambda *_args: [65] * 9)
            with pytest.raises(EngineError, match="answers with 9 tokens where at most 4 were asked"):
                engine.answer(Generate("t", ((1, 2, 3),), 4, (EOS,), rows=False), Answers())
            monkeypatch.undo()


@pytest.fixture
def engine(folder: Path) -> Iterator[OpenAIEngine]:
    with serving(Served()) as server:
        yield opened(folder, server, concurrency="1")


@pytest.mark.parametrize(
    "choice",
    [
        {"prompt_logprobs": "no list"},
        {"prompt_logprobs": [None, *([{"x": 1}] * 21)]},
        {"prompt_logprobs": [1] * 22},
        {"prompt_logprobs": [{str(10**12): {"logprob": -1.0}}] * 22},
        {"prompt_logprobs": [{"-7": {"logprob": -1.0}}] * 22},
        {"prompt_logprobs": [{"7": {"logprob": 10**400}}] * 22},
        {"logprobs": {"content": [1, 2]}, "prompt_logprobs": [None] * 22},
        {"logprobs": {"tokens": 7}, "prompt_logprobs": [None] * 22},
    ],
    ids=str,
)
def test_log_probabilities_of_another_form_are_one_line(
    engine: OpenAIEngine, choice: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "post", lambda *_args, **_more: {"choices": [choice]})
    with pytest.raises(EngineError, match="none of 1 items was answered") as caught:
        prefill(engine)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ids", [[-1], [10**12], [2**31], ["x"], [None], "ids", None, [[1]], [True]])
def test_token_ids_of_another_form_are_one_line(
    engine: OpenAIEngine, ids: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = {"token_ids": ids, "text": 7, "finish_reason": []}
    monkeypatch.setattr(Client, "post", lambda *_args, **_more: {"choices": [choice], "usage": {"prompt_tokens": []}})
    sink = Answers()
    line = refusal(lambda: engine.answer(Generate("t", ((1, 2, 3),), 4, (EOS,), rows=False), sink))
    assert "\n" not in line
    assert line or ids == [True]  # which is 1


def test_large_answers_about_many_tokens_are_read(folder: Path) -> None:
    window = tuple(encode("x" * 2000))
    with serving(Served()) as server:
        sink, request = Answers(), Prefill("kld", (window,), 2, 1998, ((0,) * 1997,))
        opened(folder, server).answer(request, sink)
    assert list(sink.items) == [0]
