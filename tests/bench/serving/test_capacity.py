"""How much a server takes, on servers whose limits are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fidelab.bench.load.server_metrics import understand
from fidelab.bench.serving import ServingSettings, measure_capacity, measure_serving, reach
from fidelab.bench.serving.contact import Contact, cache_room
from fidelab.results.measurement import Measurement
from tests.bench.load.mock import MockServer, MockSettings
from tests.engines.openai_server import byte_model
from tests.present import present


def paced(**more: Any) -> MockSettings:
    """A server whose answers take long enough to be at work together."""
    return MockSettings(itl=0.01, ttft=0.01, **more)


def measured(
    mock: MockSettings, contexts: Sequence[int] = (), most: int = 8, facts: Any = None, told: bool = True, **given: Any
) -> Measurement:
    with MockServer(mock) as server:
        contact = reach(
            ServingSettings.of(
                base_url=server.url, tokenizer=str(byte_model()), **{"output": 24, "warmup": 0, **given}
            ),
            None,
        )
        contact = _with_facts(contact, facts or {})
        return measure_capacity(contact if told else replace(contact, limit=None), contexts, most)


def _with_facts(contact: Contact, facts: dict[str, Any]) -> Contact:
    return replace(contact, server=replace(contact.server, facts=facts))


def stopped(found: Measurement) -> list[tuple[Any, ...]]:
    return [(cell.at["context"], cell.facts["stopped by"]) for cell in found.cells]


@pytest.mark.full
def test_the_most_requests_that_are_at_work_at_once_are_found() -> None:
    found = measured(paced(concurrency=5), contexts=(64,))
    assert found.value("requests_at_once") == 5
    assert stopped(found) == [(64, "queued")]
    assert "5 of 6 were at work at once" in found.flags[-1].text


@pytest.mark.full
def test_where_nothing_stops_it_the_most_that_was_tried_is_said() -> None:
    found = measured(paced(), contexts=(64,), most=3)
    assert found.value("requests_at_once") == 3
    assert stopped(found) == [(64, "most")]


@pytest.mark.full
@pytest.mark.parametrize("told", [True, False], ids=["limit told", "limit not told"])
def test_the_longest_prompt_that_is_not_rejected_is_found(told: bool) -> None:
    found = measured(paced(max_model_len=3000), contexts=(64, 4000), most=1, told=told)
    longest = found.value("longest_context") or 0
    assert 0.98 * 2976 <= longest <= 2976
    assert stopped(found) == [(64, "most"), (4000, "limit")]
    assert found.cells[1].status == "not_supported"
    assert ("limit is 3,000" if told else "maximum context length is 3000") in found.flags[0].text


@pytest.mark.full
def test_missed_targets_of_the_goodput_are_a_limit() -> None:
    found = measured(MockSettings(ttft=0.2), contexts=(64,), goodput={"ttft": 20})
    assert found.status == "failed"
    assert "0 of 1 met ttft 20 ms" in (found.reason or "")


def test_what_the_caches_size_predicts_stands_beside_what_was_measured() -> None:
    found = measured(paced(concurrency=4), (40,), facts={"cache_tokens": 320, "block_size": 16})
    assert found.value("by_cache_size") == 320 // (40 + 24)
    assert found.value("requests_at_once") == 4


@pytest.mark.parametrize(
    ("facts", "room"),
    [
        ({"cache_tokens": 1000}, 10),
        ({"cache_tokens": 1024, "block_size": 64}, 8),  # 100 tokens take two blocks
        ({"cache_tokens": 50}, 0),
        ({}, None),
        ({"cache_tokens": "many"}, None),
        ({"cache_tokens": True}, None),
    ],
)
def test_a_request_takes_whole_blocks_of_the_cache(facts: dict[str, Any], room: int | None) -> None:
    with MockServer(MockSettings()) as server:
        contact = reach(ServingSettings.of(base_url=server.url, tokenizer=str(byte_model())), None)
    assert cache_room(_with_facts(contact, facts), 100) == room


@pytest.mark.parametrize("fit", [True, False])
def test_a_cell_of_a_sweep_that_does_not_fit_the_cache_is_not_run_unless_told(fit: bool) -> None:
    with MockServer(MockSettings()) as server:
        settings = ServingSettings.of(
            base_url=server.url,
            tokenizer=str(byte_model()),
            contexts=(56,),
            output=8,
            concurrency=(2, 4),
            num_prompts=8,
            warmup=0,
            fit=fit,
        )
        contact = _with_facts(reach(settings, None), {"cache_tokens": 192, "block_size": 16})
        small, large = (cell for cell in measure_serving(settings, contact=contact).cells if "concurrency" in cell.at)
    assert small.status == "ok"
    assert large.status == ("not_supported" if fit else "ok")
    if fit:
        assert large.reason == (
            "4 requests of 64 tokens do not fit the server's cache of 192 tokens, which holds 3: the others would wait"
        )
        assert not large.flags


def test_preemptions_are_read_from_the_servers_own_counters() -> None:
    def vllm(count: int) -> bytes:
        return f"vllm:num_requests_running 1\nvllm:num_preemptions_total {count}\n".encode()

    def sglang(count: int) -> bytes:
        return f"sglang:num_running_reqs 1\nsglang:num_retracted_requests_total {count}\n".encode()

    for texts in ([(0.0, vllm(2)), (4.0, vllm(5))], [(0.0, sglang(2)), (4.0, sglang(5))]):
        reading = present(understand(texts, 0.0, 4.0))
        assert reading.preemptions == 3
    silent = present(understand([(at, b"vllm:num_requests_running 1\n") for at in (0.0, 4.0)], 0.0, 4.0))
    assert silent.preemptions is None
