"""Engine openai against a real server on loopback whose distributions are known."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fidelab.captures.reader import why_no_distribution
from fidelab.captures.requests import Forced, Generate, Prefill, Timed, Tokens
from fidelab.captures.requests import Served as Asked
from fidelab.core import Arm, Estimator, KVSpec
from fidelab.core.errors import EngineError, UsageError
from fidelab.engines.base import Answer
from fidelab.engines.openai import http as openai_http
from fidelab.engines.openai.adapter import OpenAIEngine
from fidelab.metrics.divergence import compare_topk
from tests.engines.openai_server import BOS, EOS, VOCAB, Served, encode, next_token, save_tokenizer, serving, true_kl
from tests.engines.tiny import Answers, ids

PROMPTS = tuple(tuple(encode(text)) for text in ("a first prompt", "another one", "x"))
EQUAL = tuple(tuple(encode(text)) for text in ("abc", "bcd", "cde"))
WINDOW = tuple(encode("some text to be scored"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def _no_key_and_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(openai_http, "_FIRST_WAIT", 0.01)


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(Served()) as running:
        yield running


def arm(folder: Path, url: str, kv: str = "as-served", **options: str) -> Arm:
    given = {"base-url": url, **{key.replace("_", "-"): value for key, value in options.items()}}
    return Arm(kv, "openai", "tiny", str(folder), "0" * 8, KVSpec.parse(kv), "float32", "cpu", 1, (*given.items(),))


def opened(folder: Path, served: Served, kv: str = "as-served", **options: str) -> OpenAIEngine:
    engine = OpenAIEngine()
    engine.open(arm(folder, served.url, kv, **options))
    return engine


def generate(engine: OpenAIEngine, n: int = 6, rows: bool = True) -> tuple[Answers, Answer]:
    sink = Answers()
    return sink, engine.answer(Generate("trajectory", PROMPTS, n, (EOS,), rows=rows), sink)


def prefill(engine: OpenAIEngine, window: Sequence[int] = WINDOW, first: int = 2) -> tuple[Answers, Answer]:
    last = len(window) - 2
    request = Prefill("kld", (tuple(window),), first, last, ((0,) * (last - first + 1),))
    sink = Answers()
    return sink, engine.answer(request, sink)


def greedy(prompt: Sequence[int], n: int) -> list[int]:
    found: list[int] = []
    for _ in range(n):
        found.append(next_token([*prompt, *found]))
    return found


def row(sink: Answers, item: int, at: int) -> dict[int, float]:
    """What is reported at one row."""
    tokens, logprobs = (np.asarray(sink.items[item][name])[at].tolist() for name in ("topk_ids", "topk_logprobs"))
    return {token: value for token, value in zip(tokens, logprobs, strict=True) if token >= 0}


@pytest.mark.parametrize(
    "server",
    [
        *(Served(), Served(owner="sglang"), Served(owner="me", scores=None)),
        *(Served(ends=3), Served(ends=3, names_end=False), Served(owner="sglang", ends=3)),
    ],
)
def test_ids_are_those_that_the_server_generated_with_the_stop_token(folder: Path, server: Served) -> None:
    with serving(server):
        sink, _ = generate(opened(folder, server, concurrency="3"))
    end = [] if server.ends is None else [EOS]
    assert [ids(item) for item in sink.items.values()] == [
        [*greedy(prompt, server.ends or 6), *end] for prompt in PROMPTS
    ]


def test_text_tokenized_again_is_labelled_and_a_strict_server_asked_in_standard_words(folder: Path) -> None:
    with serving(Served(takes_ids=False, returns_ids=False, ends=3)) as server:
        engine = opened(folder, server)
        sink, _ = generate(engine)
    ran = engine.runtime_info().record()
    assert (ran["prompts"], ran["ids"]) == ("text", "retokenized")
    assert ids(sink.items[0]) == [*greedy(PROMPTS[0], 3), EOS]
    with serving(Served(strict=True, scores="echo")) as server:
        engine = opened(folder, server)
        sink, _ = generate(engine)
    assert ids(sink.items[0]) == greedy(PROMPTS[0], 6)
    assert engine.runtime_info().record()["ids"] == "retokenized"


def test_answers_of_another_model_are_remarked(folder: Path) -> None:
    for name, remarks in ((None, []), ("other-8b", ["the server answered as model other-8b, not as tiny"])):
        with serving(Served(answers_as=name)) as server:
            engine = opened(folder, server)
            generate(engine)
        assert engine.runtime_info().record()["remarks"] == remarks


@pytest.mark.parametrize(("root", "n_remarks"), [("/models/tiny", 0), (None, 1)])
def test_an_answer_by_another_name_of_the_same_model_is_not_remarked(
    root: str | None, n_remarks: int, folder: Path
) -> None:
    with serving(Served(models=("first", "tiny"), answers_as="first", root=root)) as server:
        engine = opened(folder, server, model="tiny")
        generate(engine)
    assert len(engine.runtime_info().record()["remarks"]) == n_remarks


@pytest.mark.parametrize(
    ("name", "said"),
    [(None, "open: a server shows nothing of its cache"), ("other-8b", "open: answered by other-8b")],
)
def test_the_proof_names_another_model_that_answered(name: str | None, said: str, folder: Path) -> None:
    with serving(Served(answers_as=name)) as server:
        engine = opened(folder, server)
        generate(engine)
    assert engine.runtime_info().record()["proof"] == dict.fromkeys(("received", "stored", "named"), said)


def test_a_lenient_server_is_told_to_penalize_nothing(folder: Path, served: Served) -> None:
    generate(opened(folder, served))
    asked = served.requests[-1]
    assert (asked["temperature"], asked["repetition_penalty"], asked["repeat_penalty"]) == (0.0, 1.0, 1.0)


def test_rows_hold_the_top_of_each_position_and_without_logprobs_are_ids_alone(folder: Path, served: Served) -> None:
    sink, answer = generate(opened(folder, served))
    assert answer.estimator is Estimator.TOPK
    context = [*PROMPTS[1], *greedy(PROMPTS[1], 2)]
    assert row(sink, 1, 2) == pytest.approx(dict(list(served.logprobs(context).items())[:20]))
    with serving(Served(generated_logprobs=False)) as server:
        sink, _ = generate(opened(folder, server))
    assert list(sink.items[0]) == ["ids"]


def test_log_probabilities_that_are_none_fail_their_own_item_alone(folder: Path) -> None:
    with serving(Served(lift=2.0, lifted=PROMPTS[2][0])) as server:
        sink, _ = generate(opened(folder, server))
    assert list(sink.items) == [0, 1]
    assert list(sink.failed) == [2]
    assert "log-probability of 1.067, and none is above 0" in sink.failed[2]


def test_a_bos_that_the_server_adds_is_not_sent_twice(folder: Path) -> None:
    with serving(Served(takes_ids=False, adds_bos=True)) as server:
        engine = opened(folder, server)
        sink = Answers()
        answer = engine.answer(Generate("t", ((BOS, *PROMPTS[0]),), 4, (EOS,), rows=False), sink)
    assert ids(sink.items[0]) == greedy((BOS, *PROMPTS[0]), 4)
    assert answer.facts["prompts_read_otherwise"] == 0


@pytest.mark.parametrize(
    "server",
    [
        Served(),
        Served(scores="echo"),
        Served(scores="shifted", owner="me", takes_ids=False, returns_ids=False),
        Served(owner="sglang"),
    ],
    ids=["prompt_logprobs", "echo", "shifted echo", "sglang"],
)
def test_rows_are_the_distributions_behind_their_positions_and_name_the_actual_token(
    folder: Path, server: Served
) -> None:
    with serving(server):
        sink, _ = prefill(opened(folder, server))
    for at in range(len(WINDOW) - 3):
        reported = row(sink, 0, at)
        true = server.logprobs(WINDOW[: at + 3])
        assert reported == pytest.approx({token: true[token] for token in reported})
        assert len(reported) >= (20 if server.scores == "prompt_logprobs" else 5)  # half characters have no text
        assert server.scores == "shifted" or WINDOW[at + 3] in reported


def test_a_window_beyond_the_servers_context_costs_its_deeper_rows_alone(folder: Path) -> None:
    places = ((2, 9, 18), (3, 7))
    windows = (WINDOW[:20], WINDOW[:12])
    request = Prefill("kld", windows, 2, 18, ((0,) * 3, (0,) * 2), positions=places)
    found, whole = Answers(), Answers()
    with serving(Served(longest=19)) as server:
        facts = opened(folder, server).answer(request, found).facts
    with serving(Served()) as server:
        assert "cut_short" not in opened(folder, server).answer(request, whole).facts
    assert facts["cut_short"] == {"0": 1}
    assert found.failed == {}
    assert row(found, 0, 0) == row(whole, 0, 0)
    assert row(found, 0, 1) == {}
    assert why_no_distribution(np.asarray(found.items[0]["topk_logprobs"])) == ""  # as a capture is read
    assert [row(found, 1, at) for at in (0, 1)] == [row(whole, 1, at) for at in (0, 1)]


@pytest.mark.parametrize(("asked", "found"), [({}, 5), ({"logprobs": "3"}, 3)])
def test_as_many_tokens_are_asked_for_as_the_server_gives(folder: Path, asked: dict[str, str], found: int) -> None:
    with serving(Served(most=7)) as server:
        assert opened(folder, server, **asked).runtime_info().record()["top_logprobs"] == found


@pytest.mark.parametrize("top", [5, 20, VOCAB])
def test_the_bound_is_below_the_true_kl_and_tight_over_all_tokens(folder: Path, top: int) -> None:
    with serving(Served(most=VOCAB)) as one, serving(Served(most=VOCAB, rate=0.3)) as other:
        sinks = [prefill(opened(folder, server, logprobs=str(top)))[0] for server in (one, other)]
    ref, test = ((np.asarray(s.items[0]["topk_ids"]), np.asarray(s.items[0]["topk_logprobs"])) for s in sinks)
    rows = compare_topk(ref, test, np.asarray(WINDOW[3:]))
    truth = true_kl(0.5, 0.3)
    assert (rows.kl <= truth + 1e-6).all()
    assert (rows.kl > 0).all()
    if top == VOCAB:
        assert rows.kl == pytest.approx(truth, rel=1e-4)
    assert rows.top1.all()


def test_forced_text_is_one_prefill_and_says_so(folder: Path, served: Served) -> None:
    sink = Answers()
    forced = greedy(PROMPTS[0], 4)
    answer = opened(folder, served).answer(Forced("forced.kl", PROMPTS[:1], (tuple(forced),)), sink)
    assert answer.facts["one_prefill"]
    assert np.asarray(sink.items[0]["topk_ids"]).shape[0] == 4
    for at, token in enumerate(forced):
        assert max(found := row(sink, 0, at), key=lambda name: found[name]) == token


def test_a_server_without_prompt_logprobs_or_with_an_echo_of_other_tokens_measures_no_prompt(folder: Path) -> None:
    with serving(Served(scores=None)) as server:
        engine = opened(folder, server)
        sink, answer = prefill(engine)
        assert generate(engine)[0].items
    assert answer.facts["not_measurable"] == f"{server.url} gives no log-probabilities of prompts"
    assert (list(sink.failed), sink.items) == ([0], {})
    split = tuple("é".encode())[:1]  # half a character: as text it is another token
    with serving(Served(scores="echo", takes_ids=False)) as server, pytest.raises(EngineError, match="other tokens"):
        prefill(opened(folder, server), (*WINDOW[:5], *split, *WINDOW[5:]))


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_each_streamed_token_has_its_time(folder: Path, owner: str) -> None:
    with serving(Served(owner=owner, ends=2)) as server:
        sink = Answers()
        opened(folder, server).answer(Timed("decode", PROMPTS, n=5), sink)
    seconds = sink.items[2]["seconds"]
    assert isinstance(seconds, np.ndarray)
    assert seconds.shape == (6,)
    assert seconds.dtype == np.float64
    assert (np.diff(seconds) >= 0).all()
    assert seconds[0] > 0


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_groups_are_streamed_and_have_one_row_of_times_each(folder: Path, owner: str) -> None:
    with serving(Served(owner=owner)) as server:
        engine, sink = opened(folder, server), Answers()
        server.requests.clear()
        facts = engine.answer(Timed("decode", EQUAL, n=5, batch=2), sink).facts
        asked = [tuple(request.get("prompt") or request["input_ids"]) for request in server.requests]
    assert (sorted(asked[:2]), asked[2:]) == (sorted(EQUAL[:2]), [EQUAL[2]])
    assert [np.asarray(sink.items[item]["seconds"]).shape for item in (0, 1)] == [(6,), (6,)]
    assert (facts["tokens"], facts["generated"], sink.tokens) == (9 + 15, 15, 9 + 15)


def test_a_groups_token_is_there_when_the_last_of_its_prompts_has_it(
    folder: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sink, both = opened(folder, served), Answers(), threading.Barrier(2)
    times = {EQUAL[0]: (100.0, 300.0, 400.0), EQUAL[1]: (200.0, 250.0, 600.0)}

    def stream(prompt: Tokens, n: int) -> Iterator[tuple[float, int]]:
        both.wait(20)  # which one request after the other would break
        yield from ((seconds, 1) for seconds in times[prompt][:n])

    monkeypatch.setattr(engine._dialect, "stream", stream)
    engine.answer(Timed("decode", EQUAL[:2], n=2, batch=2), sink)
    late = np.asarray(sink.items[0]["seconds"]) - [200.0, 300.0, 600.0]
    assert (late >= 0).all()
    assert (late < 50).all()


def test_timed_prompts_run_one_at_a_time_whatever_the_concurrency(
    folder: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, running, most = opened(folder, served, concurrency="3"), threading.Semaphore(3), []

    def stream(_prompt: Tokens, n: int) -> Iterator[tuple[float, int]]:
        with running:
            threading.Event().wait(0.05)
            most.append(3 - running._value)
        yield from ((1.0, 1) for _ in range(n))

    monkeypatch.setattr(engine._dialect, "stream", stream)
    engine.answer(Timed("decode", EQUAL, n=2), Answers())
    assert most == [1, 1, 1]


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (Served(per_event=2, returns_ids=True), "several tokens into one event"),
        (Served(per_event=2, returns_ids=False), "streamed 3 tokens and counts 6"),
        (Served(ends=2, heeds_ignore_eos=False), "ended after 3 of 6 tokens"),
        (Served(owner="sglang", per_event=3), "several tokens into one event"),
    ],
)
def test_tokens_whose_times_are_not_known_are_no_measurement(folder: Path, server: Served, said: str) -> None:
    with serving(server):
        engine = opened(folder, server)
        with pytest.raises(EngineError, match=said):
            engine.answer(Timed("decode", PROMPTS, n=5), Answers())


@pytest.mark.parametrize(
    ("server", "asked", "found"),
    [
        (Served(), "as-served", "as-served"),
        (Served(cache_dtype="fp8_e4m3"), "fp8_e4m3", "fp8_e4m3"),
        (Served(cache_dtype="auto"), "fp8_e4m3", "auto"),
        (Served(), "fp8_e4m3", None),
        (Served(owner="sglang", cache_dtype="fp8_e5m2"), "fp8_e5m2", "fp8_e5m2"),
        (Served(owner="me"), "q8_0", None),
    ],
)
def test_a_format_is_what_the_server_reports(folder: Path, server: Served, asked: str, found: str | None) -> None:
    with serving(server):
        ran = opened(folder, server, asked).runtime_info()
    assert (ran.k_format, ran.v_format) == (found, found)


def test_what_the_server_says_of_itself_is_recorded_and_its_tokenizer_asked(folder: Path, served: Served) -> None:
    with serving(Served(cache_dtype="auto")) as server:
        ran = opened(folder, server).runtime_info().record()
    assert ran["versions"]["vllm"] == "9.9"
    assert (ran["served_kv"], ran["block_size"], ran["prefix_caching"]) == ("auto", 16, False)
    engine = opened(folder, served)
    assert engine.tokenize("some text") == encode("some text")
    assert engine.runtime_info().record()["tokenizer"] == "server"


@pytest.mark.parametrize("trouble", [[429, 503], ["drop"], [503, "drop", 429]])
def test_a_busy_server_is_asked_again(folder: Path, served: Served, trouble: list[int | str]) -> None:
    engine = opened(folder, served)
    served.trouble[:] = trouble
    sink, _ = generate(engine)
    assert len(sink.items) == 3
    assert not sink.failed


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (400, "answers 400: trouble 400"),
        (500, "answers 500: trouble 500"),
        (404, r"has no /completions for this \(404: trouble 404\): correct base-url or model"),
        ("garbage", "answers with no JSON object .*It works.*is base-url an OpenAI API"),
    ],
)
def test_a_refused_item_fails_and_the_others_go_on(folder: Path, served: Served, trouble: int | str, said: str) -> None:
    engine = opened(folder, served, concurrency="1")
    served.trouble[:] = ["", trouble]
    sink, _ = generate(engine)
    assert list(sink.failed) == [1]
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(sink.failed[1])
    assert sorted(sink.items) == [0, 2]


def test_a_server_that_is_late_fails_the_item(folder: Path, served: Served) -> None:
    engine = opened(folder, served, concurrency="1", timeout="0.5")
    served.trouble[:] = ["late"]
    sink, _ = generate(engine)
    assert "did not answer within 0.5 s" in sink.failed[0]
    assert sorted(sink.items) == [1, 2]


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (429, r"none of 3 items was answered.*too busy in 5 attempts \(429: trouble 429\)"),
        ("drop", r"127\.0\.0\.1:\d+ cannot be reached or broke off"),
    ],
    ids=["always busy", "dies in the middle"],
)
def test_a_server_that_never_answers_ends_the_probe(
    folder: Path, served: Served, trouble: int | str, said: str
) -> None:
    engine = opened(folder, served, concurrency="1")
    served.trouble[:] = [trouble] * 100
    with pytest.raises(EngineError, match=said):
        generate(engine)


def test_nobody_at_the_address_is_said_at_once(folder: Path) -> None:
    with serving(Served()) as server:
        url = server.url
    with pytest.raises(EngineError, match="refuses connections: start the server, or correct base-url"):
        OpenAIEngine().open(arm(folder, url))


@pytest.mark.parametrize(
    ("models", "asked", "said"),
    [
        (("a", "b"), {}, "serves a, b: name one by --engine-arg model=NAME"),
        ((), {}, "serves no model"),
        (("a",), {"model": "c"}, "does not serve model 'c'; it serves: a"),
    ],
)
def test_the_model_has_to_be_served(folder: Path, models: Sequence[str], asked: dict[str, str], said: str) -> None:
    with serving(Served(models=models)) as server, pytest.raises(EngineError, match=said):
        opened(folder, server, **asked)


def test_a_key_comes_from_the_environment_goes_to_the_server_alone_and_a_wrong_one_is_not_repeated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    with serving(Served(key="sk-secret")) as server:
        engine = opened(folder, server, api_key_env="MY_KEY")
        generate(engine)
    assert {*server.keys} == {"Bearer sk-secret"}
    assert "sk-secret" not in repr(engine.runtime_info().record())
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    with serving(Served(key="sk-right")) as server, pytest.raises(EngineError, match="api-key-env=NAME") as caught:
        opened(folder, server)
    assert "sk-wrong" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs the address of a server"),
        ({"base-url": "localhost:8000"}, "base-url is not a URL"),
        ({"base-url": "http://me:secret@host/v1"}, "no user name, password"),
        ({"base-url": "http://host:x"}, "base-url is not a URL"),
        ({"base-url": "http://host", "api-key": "secret"}, "takes no key"),
        ({"base-url": "http://host", "api-key-env": "sk-secret"}, "name of an environment variable"),
        ({"base-url": "http://host", "api-key-env": "UNSET_VARIABLE"}, "UNSET_VARIABLE .* is not set"),
        ({"base-url": "http://host", "concurrency": "0"}, "concurrency='0' is not a number of requests"),
        ({"base-url": "http://host", "timeout": "inf"}, "not a number of seconds"),
        ({"base-url": "http://host", "baseurl": "x"}, "no option 'baseurl'; did you mean base-url"),
    ],
)
def test_an_impossible_option_is_named_and_a_secret_is_not_repeated(options: dict[str, str], said: str) -> None:
    given = dataclasses.replace(arm(Path("x"), "http://host"), options=tuple(options.items()))
    with pytest.raises(UsageError, match=said) as caught:
        OpenAIEngine.supports(given)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kv", ["auto/fp8", "fp8[scale=1]", "auto[skip-layers=0]"])
def test_a_cache_that_no_server_can_be_asked_for_is_refused(kv: str) -> None:
    with pytest.raises(UsageError, match="what it was started with"):
        OpenAIEngine.check_kv(KVSpec.parse(kv))


def way(engine: OpenAIEngine, name: str, size: int = 0, others: tuple[Tokens, ...] = ()) -> tuple[Answers, Answer]:
    sink = Answers()
    last = len(WINDOW) - 2
    return sink, engine.answer(Asked(f"paths.{name}", (WINDOW,), max(1, size), last, name, size, others), sink)


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_a_hit_is_proven_by_the_servers_own_count(folder: Path, owner: str) -> None:
    with serving(Served(owner=owner, remembers=True)) as served:
        engine = opened(folder, served)
        for name, others in (("prefix", ()), ("prefix-other", (PROMPTS[0],))):
            sink, answer = way(engine, name, 8, others)
            assert answer.facts["engaged"] == {"hit tokens": 8}
            assert row(sink, 0, 0) == pytest.approx(row(prefill(engine, first=8)[0], 0, 0), abs=1e-5)
        assert way(engine, "cold")[1].facts["engaged"] == {"sent at once": 1}


def test_without_a_count_a_hit_is_not_engaged(folder: Path, served: Served) -> None:
    answer = way(opened(folder, served), "prefix", 8)[1]
    assert answer.facts["not_engaged"].startswith("the server does not report a prefix cache hit")
    assert "engaged" not in answer.facts


def test_a_batch_is_sent_at_once(folder: Path) -> None:
    together = threading.Barrier(4, timeout=30)

    class Gathering(Served):
        def found(self, prompt: list[int], body: Mapping[str, Any], most: int | None = None) -> int:
            together.wait()
            return 0

    with serving(Gathering()) as served:
        engine = opened(folder, served)
        served.remembers = True
        answer = way(engine, "batch", others=PROMPTS)[1]
    assert answer.facts["engaged"] == {"sent at once": 4}
