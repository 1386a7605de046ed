"""What is found out about a server before load is put on it, against a small real one that speaks completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fidelab.bench.serving import Contact, ServingSettings, reach
from fidelab.bench.serving import contact as contacting
from fidelab.core.errors import EngineError, InputError
from fidelab.engines.openai.http import Client, is_local
from tests.bench.load.mock import MockServer, MockSettings
from tests.engines.openai_server import Served, save_tokenizer, serving
from tests.models.tiny_gguf import write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's folder whose tokens are bytes."""
    from fidelab.models.tiny import make_tiny

    home = make_tiny(tmp_path_factory.mktemp("bytes") / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (home / name).unlink(missing_ok=True)
    return str(save_tokenizer(home))


def reached(served: Served, **given: Any) -> Contact:
    with serving(served):
        return reach(ServingSettings.of(base_url=served.url, **given), None)


def bodies(contact: Contact, *inputs: int, output: int = 8) -> list[dict[str, Any]]:
    return [json.loads(r.body) for r in contact.requests(inputs, [output] * len(inputs), None, seed=1)]


def test_prompts_are_token_ids_where_a_tokenizer_is_at_hand(folder: str) -> None:
    contact = reached(Served(), tokenizer=folder)
    assert contact.form == "ids"
    body, other = bodies(contact, 32, 48)
    assert (len(body["prompt"]), len(other["prompt"])) == (32, 48)
    assert body["prompt"][0] != other["prompt"][0]
    assert body["model"] == "tiny"
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (8, 8, True)
    assert (body["temperature"], body["stream"]) == (0, True)
    assert body["stream_options"] == {"include_usage": True}


def test_a_server_that_takes_no_ids_gets_text_of_exact_length(folder: str) -> None:
    contact = reached(Served(takes_ids=False), tokenizer=folder)
    assert contact.form == "text"
    [body] = bodies(contact, 40)
    assert len(body["prompt"].encode()) == 40
    assert "prompts of token ids" in contact.refused


def test_what_a_server_adds_to_a_prompt_is_left_out_of_it(folder: str) -> None:
    """It puts a BOS before texts: 39 of our tokens are 40 of its own."""
    contact = reached(Served(takes_ids=False, adds_bos=True), tokenizer=folder)
    assert contact.added == 1
    [body] = bodies(contact, 40)
    assert len(body["prompt"].encode()) == 39


def test_fields_that_a_server_refuses_are_left_out_and_named(folder: str) -> None:
    contact = reached(Served(strict=True), tokenizer=folder)
    assert contact.additions == ("stream_options",)
    assert set(contact.refused) == {"ignore_eos", "min_tokens"}
    assert contact.record()["refused_by_server"] == list(contact.refused)
    [body] = bodies(contact, 16)
    assert not {"ignore_eos", "min_tokens"} & body.keys()


def test_no_ignore_eos_sends_none(folder: str) -> None:
    [body] = bodies(reached(Served(), tokenizer=folder, ignore_eos=False), 16)
    assert not {"ignore_eos", "min_tokens"} & body.keys()


def test_a_chat_endpoint_gets_text_as_a_message_of_the_user(folder: str) -> None:
    with MockServer(MockSettings()) as mock:
        contact = reach(ServingSettings.of(base_url=mock.url, endpoint="chat", tokenizer=folder), None)
    assert contact.form == "text"
    [body] = bodies(contact, 64)
    [message] = body["messages"]
    assert message["role"] == "user"
    assert message["content"].isascii()


def test_a_server_that_counts_only_outside_of_streams_is_known_by_its_endings(folder: str) -> None:
    with MockServer(MockSettings()) as mock:
        counted = reach(ServingSettings.of(base_url=mock.url, tokenizer=folder), None)
    with MockServer(MockSettings(no_usage=True)) as mock:
        silent = reach(ServingSettings.of(base_url=mock.url, tokenizer=folder), None)
    assert (counted.counts, counted.by_finish) == (True, False)
    assert (silent.counts, silent.by_finish) == (False, False)
    assert silent.requests([16], [8], None, 0)[0].prompt_tokens is None


def test_endings_count_where_the_usage_of_an_unstreamed_answer_confirms_them(
    monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """As llama_cpp.server does: no usage in streams, but in whole answers."""
    stream = Client.stream

    def without_usage(*args: Any, **more: Any) -> Any:
        return ((at, {**event, "usage": None}) for at, event in stream(*args, **more))

    monkeypatch.setattr(Client, "stream", without_usage)
    with MockServer(MockSettings()) as mock:
        contact = reach(ServingSettings.of(base_url=mock.url, tokenizer=folder), None)
    assert (contact.counts, contact.by_finish) == (True, True)
    with MockServer(MockSettings(tokens=2)) as mock:  # it stops before the length
        assert not reach(ServingSettings.of(base_url=mock.url, tokenizer=folder), None).by_finish
    other = {"choices": [{"finish_reason": "length"}], "usage": {"prompt_tokens": 24, "completion_tokens": 3}}
    monkeypatch.setattr(Client, "post", lambda *_args, **_more: other)
    with MockServer(MockSettings()) as mock:  # it counts other tokens than it was asked for
        contact = reach(ServingSettings.of(base_url=mock.url, tokenizer=folder), None)
    assert (contact.counts, contact.by_finish) == (True, False)


def test_an_answer_that_breaks_off_is_asked_for_again(folder: str) -> None:
    served = Served(trouble=["drop", "garbage"])
    assert reached(served, tokenizer=folder).form == "ids"
    assert len(served.requests) == 3


def test_a_refusal_is_not_asked_for_again(folder: str) -> None:
    served = Served(trouble=[500, 500])
    with pytest.raises(EngineError, match="trouble 500"):
        reached(served, tokenizer=folder, prompts="ids")
    assert len(served.requests) == 1


def test_a_prompt_shorter_than_what_the_server_adds_is_refused(folder: str) -> None:
    contact = reached(Served(takes_ids=False, adds_bos=True), tokenizer=folder)
    with pytest.raises(InputError, match="a prompt of 1 tokens cannot be made: the server adds 1"):
        bodies(contact, 1)


@pytest.mark.parametrize("prompts", ["auto", "ids", "text"])
def test_a_tokenizer_that_is_not_on_this_machine_is_asked_for(prompts: str) -> None:
    with pytest.raises(InputError, match="the tokenizer of tiny is not on this machine: name it by --tokenizer"):
        reached(Served(), prompts=prompts)


def test_the_key_is_sent_and_shown_nowhere(folder: str) -> None:
    served = Served(key="sesame")
    with serving(served):
        contact = reach(ServingSettings.of(base_url=served.url, tokenizer=folder), "sesame")
    assert set(served.keys) == {"Bearer sesame"}
    assert "sesame" not in repr(contact) + repr(contact.target) + json.dumps(contact.record())


def test_a_tokenizer_that_is_nowhere_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no model"):
        reached(Served(), tokenizer=str(tmp_path / "nothing"))


def test_a_path_that_a_server_names_is_looked_up_only_where_it_runs_here(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reached(Served(models=(folder,))).form == "ids"
    monkeypatch.setattr(contacting, "is_local", lambda _url: False)
    with pytest.raises(InputError, match="is not on this machine"):
        reached(Served(models=(folder,)))
    assert reached(Served(models=(folder,)), model=folder).form == "ids"


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("http://localhost:8000", True),
        ("http://[::1]:8000", True),
        ("http://10.0.0.7:8000", False),
        ("https://localhost.example/v1", False),
    ],
)
def test_a_loopback_address_is_this_machine(url: str, local: bool) -> None:
    assert is_local(url) is local


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "~/nowhere"])
def test_a_path_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(InputError, match=f"no model '{name}' here"):
        reached(Served(), tokenizer=name)


def test_a_gguf_file_gives_its_tokenizer_without_being_converted(tmp_path: Path, cache: Path) -> None:
    contact = reached(Served(), tokenizer=str(write_gguf(tmp_path / "tiny.gguf")))
    assert contact.form == "ids"
    assert not list(cache.rglob("*.safetensors"))
