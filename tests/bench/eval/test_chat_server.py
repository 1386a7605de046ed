"""The scripted chat server is right, and each planted fault changes what it should."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from fidelab.inputs.questions.question import Question
from tests.bench.eval.chat_model import END, prompt_tokens, tokenize
from tests.bench.eval.chat_server import FAULTS, ChatServer, serving

CLIENT = httpx.Client(timeout=30, trust_env=False)
RED, BLUE = "data:image/png;base64,cmVk", "data:image/png;base64,Ymx1ZQ=="
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}
CALL = {"name": "weather", "arguments": {"city": "Lyon", "days": 3}}
FACT = "The access code is KX-7193. " + "The sea is calm today. " * 1200
QUESTIONS = [
    Question("arithmetic-1", "arithmetic", ({"role": "user", "content": "17 · 23?"},), 16, {}, "391"),
    Question("images-1", "images", ({"role": "user", "content": "Colour?"},), 16, {}, "red", image={"colour": "red"}),
    Question("images-2", "images", ({"role": "user", "content": "Colour?"},), 16, {}, "blue", image={"colour": "blue"}),
    Question("tools-1", "tools", ({"role": "user", "content": "Weather in Lyon?"},), 64, {}, json.dumps(CALL), (TOOL,)),
    Question("retrieval-1", "retrieval", ({"role": "user", "content": FACT + "Which code?"},), 16, {}, "KX-7193"),
]
STORY = "Write a long story."
TURNS = [
    {"role": "user", "content": "My locker has number 4417. Remember it."},
    {"role": "assistant", "content": "I will."},
    {"role": "user", "content": "What is the number of my locker?"},
]


def server(**settings: Any) -> ChatServer:
    return ChatServer.of(QUESTIONS, lambda question: RED if question.image["colour"] == "red" else BLUE, **settings)


def post(served: ChatServer, prompt: str | Sequence[Any] = STORY, **options: Any) -> httpx.Response:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    body = {"messages": messages, "temperature": 0, "max_tokens": 100, **options}
    return CLIENT.post(f"{served.url}/v1/chat/completions", json=body)


def ask(served: ChatServer, prompt: str | Sequence[Any] = STORY, **options: Any) -> dict[str, Any]:
    """Return the only choice of an answer, with its usage."""
    whole = post(served, prompt, **options).raise_for_status().json()
    return {**whole["choices"][0], "usage": whole["usage"]}


def say(served: ChatServer, prompt: str | Sequence[Any] = STORY, **options: Any) -> str:
    return str(ask(served, prompt, **options)["message"]["content"])


def stream(served: ChatServer, prompt: str | Sequence[Any] = STORY, **options: Any) -> list[dict[str, Any]]:
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    events = post(served, prompt, **options).raise_for_status().text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def joined(chunks: Sequence[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def picture(url: str) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Colour?"}]
    return [{"role": "user", "content": parts}]


def test_questions_get_their_answers() -> None:
    with serving(server()) as served:
        assert say(served, "17 · 23?") == "391"
        assert [say(served, picture(url)) for url in (RED, BLUE)] == ["red", "blue"]
        assert say(served, FACT + "Which code?") == "KX-7193"
        assert say(served, TURNS) == "4417"
        called = ask(served, "Weather in Lyon?", tools=[TOOL])
        function = called["message"]["tool_calls"][0]["function"]
        assert called["finish_reason"] == "tool_calls"
        assert {**function, "arguments": json.loads(function["arguments"])} == CALL
        assert json.loads(say(served, "Weather in Lyon?")) == CALL


def test_length_and_stop_sequences_are_respected() -> None:
    with serving(server()) as served:
        story = ask(served, max_tokens=37)
        assert (story["finish_reason"], len(tokenize(story["message"]["content"]))) == ("length", 37)
        assert story["message"]["content"] == say(served)[: len(story["message"]["content"])]
        counted = ask(served, "Count from 1 to 9.", stop=["7, 8", "5,"])
        assert (counted["message"]["content"], counted["finish_reason"]) == ("1, 2, 3, 4, ", "stop")
        assert (counted["stop_reason"], counted["usage"]["completion_tokens"]) == ("5,", 14)
        assert joined(stream(served, "Count from 1 to 9.", stop="5,")) == "1, 2, 3, 4, "


def test_usage_is_exact() -> None:
    with serving(server()) as served:
        usage = ask(served, "17 · 23?")["usage"]
        assert usage == {"prompt_tokens": 3 + 4 + 8, "completion_tokens": 4, "total_tokens": 19}  # with the end token
        assert ask(served, picture(RED))["usage"]["prompt_tokens"] == 3 + 4 + 2 + 256
        sized = CLIENT.post(f"{served.url}/tokenize", json={"messages": TURNS}).json()
        assert sized["count"] == ask(served, TURNS)["usage"]["prompt_tokens"]


@pytest.mark.parametrize("reasoning", ["", "reasoning", "content", "think"])
@pytest.mark.parametrize("limit", [20, 300])
def test_a_stream_equals_the_whole_answer(reasoning: str, limit: int) -> None:
    with serving(server(reasoning=reasoning)) as served:
        for prompt, tools in (("17 · 23?", []), (STORY, []), ("Weather in Lyon?", [TOOL])):
            options = {"max_tokens": limit, "logprobs": True, "top_logprobs": 3, "tools": tools}
            whole, chunks = ask(served, prompt, **options), stream(served, prompt, **options)
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            assert joined(chunks) == (whole["message"]["content"] or "")
            assert choices[-1]["finish_reason"] == whole["finish_reason"]
            entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
            assert entries == whole["logprobs"]["content"]
            assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
            assert len(entries) == whole["usage"]["completion_tokens"]
            calls = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls", [])]
            arguments = "".join(call["function"]["arguments"] for call in whole["message"]["tool_calls"])
            assert "".join(call["arguments"] for call in calls) == arguments


def test_reasoning_has_its_field_or_its_markers() -> None:
    with serving(server(reasoning="content")) as served:
        message = ask(served, "17 · 23?")["message"]
        assert message["content"].strip() == "391"
        assert len(message["reasoning_content"]) > 100
        assert say(served, "17 · 23?", chat_template_kwargs={"enable_thinking": False}) == "391"
    with serving(server(reasoning="think")) as served:
        assert say(served, "17 · 23?").startswith("<think>\n")


def test_log_probabilities_belong_to_the_tokens() -> None:
    with serving(server()) as served:
        choice = ask(served, logprobs=True, top_logprobs=5)
        entries = choice["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
        assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)
        assert all(2.718282 ** entry["logprob"] > 0.5 for entry in entries)
        assert ask(served, "17 · 23?", logprobs=True)["logprobs"]["content"][-1]["token"] == END


def test_parallel_answers_equal_single_ones() -> None:
    prompts = [f"Tell me about year {year}." for year in range(1900, 1924)]
    with serving(server(delay=0.02)) as served:
        single = [say(served, prompt) for prompt in prompts]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda prompt: say(served, prompt), prompts)) == single
        assert len(set(single)) == len(prompts)
        assert served.most_parallel > 1


def test_long_texts_have_no_sentence_twice() -> None:
    with serving(server()) as served:
        text = say(served, max_tokens=1000)
        sentences = text.replace("\n\n", " ").split(". ")
        assert len(tokenize(text)) == 1000
        assert len(set(sentences)) == len(sentences) > 50
        assert ask(served, max_tokens=2000)["finish_reason"] == "stop"
        assert say(served, temperature=1) != say(served, temperature=1)
        assert say(served, temperature=1, seed=3) == say(served, temperature=1, seed=3)


@pytest.mark.parametrize(
    ("settings", "options", "status", "message"),
    [
        ({"max_model_len": 50}, {"max_tokens": 60}, 400, "This model's maximum context length is 50 tokens. However,"),
        ({"takes_images": False}, {"messages": picture(RED)}, 400, "tiny-chat is not a multimodal model"),
        ({"chat": "no-template"}, {}, 400, "As of transformers v4.44, default chat template"),
        ({"models": ("a", "b")}, {"model": "c"}, 404, "The model `c` does not exist."),
        ({"chat": "missing"}, {}, 404, "Not Found"),
        ({"key": "secret"}, {}, 401, "Unauthorized"),
        ({"trouble": [503]}, {}, 503, "trouble 503"),
    ],
)
def test_requests_are_refused(settings: Any, options: Any, status: int, message: str) -> None:
    with serving(server(**settings)) as served:
        response = post(served, **options)
        assert response.status_code == status
        assert message in response.text


def test_a_stream_breaks_off() -> None:
    with serving(server(trouble=["break"])) as served, pytest.raises(httpx.RemoteProtocolError):
        post(served, stream=True)


def test_a_fault_strikes_each_nth_request() -> None:
    with serving(server(fault="ignored-stop", every=3)) as served:
        answers = [say(served, "Count from 1 to 9.", stop="5,") for _ in range(6)]
        assert [len(answer) for answer in answers] == [12, 12, 25, 12, 12, 25]


def _pair(served: ChatServer) -> list[str]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda prompt: say(served, prompt), ("17 · 23?", "Count from 1 to 3.")))


def _arguments(served: ChatServer) -> Any:
    called = ask(served, "Weather in Lyon?", tools=[TOOL])
    return json.loads(called["message"]["tool_calls"][0]["function"]["arguments"])


def _tokens(served: ChatServer) -> str:
    return "".join(entry["token"] for entry in ask(served, logprobs=True)["logprobs"]["content"])


OBSERVED: dict[str, Any] = {
    "template": lambda served: "<|im_end|>\n<|im_start|>user\n" in say(served, "17 · 23?"),
    "looping": lambda served: max(map(say(served, max_tokens=999).count, say(served).split(". "))) > 20,
    "ignored-stop": lambda served: say(served, "Count from 1 to 9.", stop="5,").endswith("9"),
    "mixed-parallel": lambda served: _pair(served) == ["1, 2, 3", "391"],
    "dropped-images": lambda served: say(served, picture(RED)) == say(served, picture(BLUE)),
    "usage": lambda served: ask(served)["usage"]["completion_tokens"] != 100,
    "tool-arguments": lambda served: _arguments(served) == {"location": "Lyon", "days_value": 3},
    "context-4k": lambda served: say(served, FACT + "Which code?").isdigit(),
    "lossy-stream": lambda served: joined(stream(served)) != say(served),
    "forgets-turns": lambda served: "4417" not in say(served, TURNS),
    "not-greedy": lambda served: say(served) != say(served) and say(served, "17 · 23?") != say(served, "17 · 23?"),
    "other-logprobs": lambda served: _tokens(served) != say(served),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_changes_only_what_it_should(fault: str) -> None:
    for name, observed in OBSERVED.items():
        delay = 0.5 if name == "mixed-parallel" else 0.0  # two threads are in flight together on a busy machine
        with serving(server(fault=fault, delay=delay)) as served:
            spreads = name == "lossy-stream" and fault == "not-greedy"  # any two answers differ
            spreads |= name == "other-logprobs" and fault == "not-greedy"
            assert observed(served) is (name == fault or spreads), name


def test_a_cut_prompt_has_fewer_tokens_and_late_facts() -> None:
    with serving(server(fault="context-4k")) as served:
        assert prompt_tokens([{"role": "user", "content": FACT}]) > 6000
        assert ask(served, FACT + "Which code?")["usage"]["prompt_tokens"] <= 4096
        turns = [{"role": "user", "content": FACT + " The pass is QQ-52."}, {"role": "user", "content": "Which code?"}]
        assert say(served, turns) != "KX-7193"
        late = "The sea is calm. " * 1500 + f"{TURNS[0]['content']} {TURNS[2]['content']}"
        assert say(served, late) == "4417"


def test_dropped_images_have_no_tokens() -> None:
    with serving(server(fault="dropped-images")) as served:
        assert ask(served, picture(RED))["usage"]["prompt_tokens"] == 3 + 4 + 2


def test_models_and_version_are_those_of_vllm() -> None:
    with serving(server(models=("a", "b"), max_model_len=9000)) as served:
        models = CLIENT.get(f"{served.url}/v1/models").json()["data"]
        assert [(model["id"], model["owned_by"], model["max_model_len"]) for model in models] == [
            ("a", "vllm", 9000),
            ("b", "vllm", 9000),
        ]
        assert CLIENT.get(f"{served.url}/version").json() == {"version": "0.32.0"}
        assert CLIENT.get(f"{served.url}/health").status_code == 200
