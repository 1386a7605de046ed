"""The client against a scripted server: what arrives, in whichever framing, and every way in which it can go wrong."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from fidelab.bench.load.client import drive
from fidelab.bench.load.exchange import Exchange, Load, ServerRefusedError, Target
from fidelab.core.errors import InputError, UsageError
from tests.bench.load.sse_server import (
    DONE,
    HEAD,
    Script,
    Talk,
    chunked,
    event,
    proper,
    requests,
    serve,
    sized,
    stream,
    unused_port,
    well,
)

KEY = "sk-proj-0123456789+abcdefghij/ABCDEFGHIJ=xyz"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def ask(script: Script, count: int = 1, concurrency: int = 1, timeout: float = 20.0) -> list[Exchange]:
    """What becomes of ``count`` requests, one after another, in this process."""
    with serve(script) as served:
        target = Target(served.url, timeout=timeout)
        return drive(target, Load(requests(count), concurrency=concurrency)).exchanges


def answer_by(data: bytes, close: bool = False) -> Script:
    async def script(talk: Talk) -> None:
        talk.send(data)
        if close:
            talk.close()

    return script


@pytest.mark.parametrize(
    ("data", "close"),
    [
        (CHUNKED + chunked(*[bytes([byte]) for byte in stream(3)]), False),
        (HEAD + b"Connection: close\r\n\r\n" + stream(3).replace(b"\n", b"\r\n"), True),
    ],
    ids=["a chunk per byte", "until closed, CRLF"],
)
def test_a_stream_is_read_in_every_framing(data: bytes, close: bool) -> None:
    (found,) = ask(answer_by(data, close))
    assert (found.error, found.prompt_tokens, found.output_tokens, found.finish_reason) == (None, 5, 3, "length")
    assert len(found.events) == 3
    assert found.sent <= found.events[0] <= found.events[-1] <= found.ended


def test_events_have_the_time_at_which_they_arrived() -> None:
    async def slowly(talk: Talk) -> None:
        talk.send(CHUNKED + chunked(event("a"), end=False))
        await asyncio.sleep(0.15)
        talk.send(chunked(event("b") + event("c", "stop") + DONE))

    (found,) = ask(slowly)
    first, second, third = found.events
    assert second - first >= 0.14
    assert second == third == found.ended  # one arrival, one reading of the clock


def test_connections_are_used_again() -> None:
    with serve(well) as served:
        result = drive(Target(served.url), Load(requests(20), concurrency=2))
    assert [one.error for one in result.exchanges] == [None] * 20
    assert served.connections == 2


async def _close_reused(talk: Talk) -> None:
    """Closes connections just when they are used for the second time."""
    if talk.reused:
        talk.close()
    else:
        talk.send(proper())


def test_a_request_on_a_connection_that_the_server_had_closed_is_sent_once_more_and_counted() -> None:
    found = ask(_close_reused, count=3)
    assert [(one.error, one.retried) for one in found] == [(None, False), (None, True), (None, True)]


def test_a_request_of_which_something_was_answered_is_not_sent_again() -> None:
    async def script(talk: Talk) -> None:
        if talk.number == 1:
            talk.send(CHUNKED + chunked(event("a"), end=False))
            talk.close()
        else:
            talk.send(proper())

    found = ask(script, count=3)
    assert [(one.error, one.retried, len(one.events)) for one in found] == [
        (None, False, 3),
        ("aborted", False, 1),
        (None, False, 3),
    ]


def test_a_fresh_connection_that_is_closed_without_answer_is_not_tried_again() -> None:
    with serve(answer_by(b"", close=True)) as served:
        (found,) = drive(Target(served.url), Load(requests(1), concurrency=1)).exchanges
    assert (found.error, found.retried, len(served.bodies)) == ("aborted", False, 1)


@pytest.mark.parametrize(
    ("data", "close", "kind", "detail"),
    [
        (sized(b'{"error":{"message":"boom"}}', b"500 Oh"), False, "http-500", "boom"),
        (sized(b"busy", b"429 Slow"), False, "http-429", "busy"),
        (b"HTTP/1.1 503 No\r\nConnection: close\r\n\r\ntoo much", True, "http-503", "too much"),
        (b"HTTP/1.1 204 No\r\n\r\n", False, "http-204", "no message"),
        (CHUNKED + chunked(event("a"), b"data: {oops\n\n"), False, "invalid-json", "event 2"),
        (CHUNKED + chunked(event("a"), end=False), True, "aborted", "broke off"),
        (CHUNKED + chunked(event("a"), end=False) + b"zz\r\n", False, "invalid-http", "chunk size"),
        (CHUNKED + chunked(event("a")), False, "aborted", "ended before"),
        (sized(b'{"choices":[]}'), False, "no-stream", "one JSON object"),
        (CHUNKED + chunked(event("a"), b'data: {"error":"boom"}\n\n', DONE), False, "server", "boom"),
    ],
)
def test_each_failure_has_its_kind_and_the_next_request_goes_on(
    data: bytes, close: bool, kind: str, detail: str
) -> None:
    async def script(talk: Talk) -> None:
        talk.send(data if talk.number == 1 else proper())
        if talk.number == 1 and close:
            talk.close()

    before, found, after = ask(script, count=3)
    assert found.error == kind
    assert detail in found.detail
    assert (before.error, after.error) == (None, None)


def test_what_is_not_http_has_its_kind() -> None:
    async def script(talk: Talk) -> None:
        talk.send(b"220 mail.example ESMTP\r\n" if talk.number == 1 else proper())

    assert [one.error for one in ask(script, count=3)] == [None, "invalid-http", None]


def test_a_stream_that_never_ends_runs_into_the_time_out_and_keeps_its_events() -> None:
    async def script(talk: Talk) -> None:
        if talk.number == 1:
            talk.send(CHUNKED)
            while not talk.writer.is_closing():
                talk.send(chunked(event("a"), end=False))
                await asyncio.sleep(0.02)
        talk.send(proper())

    before, found, after = ask(script, count=3, timeout=0.3)
    assert (before.error, found.error, after.error) == (None, "timeout", None)
    assert len(found.events) > 0
    assert 0.3 <= found.ended - found.sent < 5


@pytest.mark.parametrize(
    ("first", "drip"),
    [
        (b"HTTP/1.1 ", b"2"),
        (HEAD, b"X-More: yes\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (CHUNKED, chunked(b": alive\n\n", end=False)),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 1000000\r\n\r\n", b" "),
    ],
    ids=["status", "headers", "go on", "comments", "error"],
)
def test_bytes_that_drip_do_not_prolong_a_request(first: bytes, drip: bytes) -> None:
    async def script(talk: Talk) -> None:
        if talk.number == 1:
            talk.send(first)
            while not talk.writer.is_closing():
                talk.send(drip)
                await asyncio.sleep(0.02)
        talk.send(proper())

    before, found, after = ask(script, count=3, timeout=0.3)
    assert (before.error, after.error) == (None, None)
    assert found.error in ("timeout", "invalid-http", "http-500")
    assert found.ended - found.sent < 5


@pytest.mark.parametrize(
    "head",
    [CHUNKED, HEAD + b"\r\n", b"HTTP/1.1 500 Oh\r\n\r\n", HEAD + b"X: "],
    ids=["chunks", "body", "error", "header"],
)
def test_an_answer_without_end_is_cut_off_and_the_next_goes_on(head: bytes) -> None:
    sent = 0

    async def script(talk: Talk) -> None:
        nonlocal sent
        if talk.number != 1:
            talk.send(proper())
            return
        talk.send(head)
        piece = event("a") * 1000
        while not talk.writer.is_closing():
            talk.send(chunked(piece, end=False) if head is CHUNKED else piece)
            sent += len(piece)
            await talk.writer.drain()

    before, found, after = ask(script, count=3, timeout=60.0)
    assert (before.error, after.error) == (None, None)
    assert found.error in ("too-large", "http-500", "invalid-http")
    assert sent < 20 << 20  # what lies in sockets' buffers is sent, too


@pytest.mark.parametrize("said", ["[key]", KEY, KEY.replace("+", "%2B"), KEY.replace("/", "\\/")])
def test_the_key_is_replaced_before_a_message_is_cut(said: str) -> None:
    texts = (" " * 930 + said, "x" * 220 + said, said)
    answers = [
        sized(texts[0].encode(), b"500 Oh"),
        sized(json.dumps({"error": texts[1]}).encode(), b"500 Oh"),
        CHUNKED + chunked(b"data: " + texts[0].encode() + b"\n\n"),
        CHUNKED + chunked(b"data: " + json.dumps({"error": texts[1]}).encode() + b"\n\n", DONE),
        CHUNKED + chunked(event("a", said), DONE),
    ]

    async def script(talk: Talk) -> None:
        talk.send(answers[talk.number - 1] if talk.number else proper())

    with serve(script) as served:
        load = Load(requests(len(answers) + 1), concurrency=1)
        found = drive(Target(served.url, api_key=KEY), load).exchanges
    shown = "".join(f"{one.detail} {one.finish_reason}" for one in found)
    assert shown.count("[key]") >= 3
    assert KEY[:12] not in shown
    assert said == "[key]" or said[: len(said) // 3] not in shown


def test_the_key_is_sent() -> None:
    with serve(well) as served:
        drive(Target(served.url, api_key="sk-1"), Load(requests(1)))
    (head,) = served.heads
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"\r\nauthorization: bearer sk-1\r\n" in head.lower()


def test_bodies_arrive_as_they_were_rendered() -> None:
    sent = requests(5, prompt="ü" * 100_000)
    with serve(well) as served:
        drive(Target(served.url, path="/chat/completions"), Load(sent, concurrency=1))
    assert served.bodies == [request.body for request in sent]
    assert served.heads[0].startswith(b"POST /v1/chat/completions ")


def test_the_key_is_never_shown() -> None:
    assert "sk-secret" not in repr(Target("http://127.0.0.1:1/v1", api_key="sk-secret"))

    async def script(talk: Talk) -> None:
        talk.send(sized(b'{"error":"bad key ' + talk.head.replace(b"\r\n", b" ") + b'"}', b"500 Oh"))

    with serve(script) as served:
        (found,) = drive(Target(served.url, api_key="sk-secret"), Load(requests(1))).exchanges
    assert found.error == "http-500"
    assert "[key]" in found.detail
    assert "sk-secret" not in repr(found)


@pytest.mark.parametrize("url", ["localhost:8000", "http://127.0.0.1:x/v1", "http://me:hush@127.0.0.1:9/v1"])
def test_what_is_not_a_url_or_holds_a_password_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"not a URL|user name") as caught:
        drive(Target(url), Load(requests(1)))
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("key", ["a\r\nX: y", "schlüssel€"])
def test_a_key_that_http_cannot_carry_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="the API key holds"):
        drive(Target("http://127.0.0.1:9/v1", api_key=key), Load(requests(1)))


def test_a_server_that_is_not_there_stops_the_load_at_once() -> None:
    port = unused_port()
    with pytest.raises(InputError, match=f"no server answers at http://127.0.0.1:{port}/v1/completions") as caught:
        drive(Target(f"http://127.0.0.1:{port}/v1"), Load(requests(1000), concurrency=8))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["nowhere.invalid", "a..invalid"])
def test_a_host_that_nobody_knows_stops_the_load(host: str) -> None:
    with pytest.raises(InputError, match="no server answers"):
        drive(Target(f"http://{host}/v1"), Load(requests(10)))


@pytest.mark.parametrize(
    ("status", "message"), [(b"404 No", "correct --model"), (b"401 No", "give --api-key"), (b"400 No", "refuses these")]
)
def test_a_refusal_of_the_first_requests_stops_the_load_with_the_servers_words(status: bytes, message: str) -> None:
    with serve(answer_by(sized(b'{"error":{"message":"no such thing"}}', status))) as served:
        with pytest.raises(ServerRefusedError, match=message) as caught:
            drive(Target(served.url), Load(requests(1000), concurrency=2))
        assert len(served.bodies) < 10
    assert caught.value.status == int(status[:3])
    assert caught.value.said == "no such thing"


def test_a_server_that_takes_connections_and_says_nothing_stops_the_load() -> None:
    async def silent(talk: Talk) -> None:
        await asyncio.sleep(60)

    with serve(silent) as served, pytest.raises(InputError, match=r"does not answer \(no complete answer within 0.2 s"):
        drive(Target(served.url, timeout=0.2), Load(requests(1000), concurrency=2))


def test_a_redirect_stops_the_load() -> None:
    moved = b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n"
    with serve(answer_by(moved)) as served, pytest.raises(ServerRefusedError, match="redirects to another address"):
        drive(Target(served.url), Load(requests(50), concurrency=2))


def test_refusals_that_differ_only_in_numbers_are_alike() -> None:
    async def script(talk: Talk) -> None:
        talk.send(sized(b'{"error":"%d tokens are too many"}' % (1000 + talk.number), b"400 No"))

    with serve(script) as served, pytest.raises(ServerRefusedError, match="tokens are too many"):
        drive(Target(served.url), Load(requests(50), concurrency=1))


@pytest.mark.parametrize("status", [b"500 Oh", b"429 Slow", b"503 No"])
def test_troubles_of_the_moment_are_counted_not_raised(status: bytes) -> None:
    found = ask(answer_by(sized(b"wait", status)), count=6)
    assert [one.error for one in found] == [f"http-{int(status[:3])}"] * 6


def test_refusals_behind_an_answer_are_counted_not_raised() -> None:
    async def script(talk: Talk) -> None:
        talk.send(proper() if talk.number == 0 else sized(b'{"error":"too long"}', b"400 No"))

    assert [one.error for one in ask(script, count=6)] == [None, *["http-400"] * 5]


def test_a_server_that_dies_under_load_ends_the_load_and_keeps_what_was_answered() -> None:
    async def script(talk: Talk) -> None:
        talk.send(proper())
        if talk.number == 20:
            asyncio.get_running_loop().stop()  # which closes the port

    with serve(script) as served:
        result = drive(Target(served.url, timeout=1.0, connect_timeout=1.0), Load(requests(2000), concurrency=4))
    kinds = [one.error for one in result.exchanges]
    assert kinds.count(None) >= 20
    assert 0 < kinds.count("connect") < 200
    assert len(kinds) < 2000


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1, signed by itself, and its key in one file."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, "-keyout", "k", "-out", "c"],
        cwd=folder,
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("this openssl makes no certificate")
    both = folder / "both.pem"
    both.write_bytes((folder / "k").read_bytes() + (folder / "c").read_bytes())
    return both


def test_tls_is_spoken_and_checked(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with serve(well, context) as served:
        with pytest.raises(InputError, match="certificate"):
            drive(Target(served.url), Load(requests(5), concurrency=1))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        result = drive(Target(served.url), Load(requests(5), concurrency=2))
    assert [(one.error, len(one.events)) for one in result.exchanges] == [(None, 3)] * 5
