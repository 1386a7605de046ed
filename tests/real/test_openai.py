"""Engine openai against llama_cpp.server on the embedded model; skipped where that is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from fidelab.captures.requests import Generate, Prefill
from fidelab.core import Arm, KVSpec
from fidelab.engines.openai.adapter import OpenAIEngine
from fidelab.inputs.tokens import Tokenizer
from fidelab.metrics.divergence import compare_topk
from fidelab.models import Model
from tests.engines.tiny import Answers, ids
from tests.real.servers import llamacpp_server
from tests.run.harness import cli, write_inputs

pytestmark = pytest.mark.model

F16, Q8_0 = 1, 8  # numbers of ggml's types
TEXT = "The river runs from the mountains to the sea, and the town lies on its left bank."


@pytest.fixture(scope="module")
def urls(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two servers: an f16 and a q8_0 cache."""
    assert smollm2.gguf is not None
    logs = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                llamacpp_server(smollm2.gguf, logs / f"{kv}.log", n_ctx=640, type_k=kv, type_v=kv, flash_attn="true")
            )
            for kv in (F16, Q8_0)
        ]


def _opened(model: Model, url: str) -> OpenAIEngine:
    options = (("base-url", url), ("concurrency", "1"), ("logprobs", "10"))
    engine, kv = OpenAIEngine(), KVSpec.parse("as-served")
    engine.open(Arm("served", "openai", "smollm2", str(model.path), "0", kv, "bfloat16", "cpu", 1, options))
    return engine


@pytest.mark.long
def test_the_server_is_known_and_its_habits_found_out(smollm2: Model, urls: list[str]) -> None:
    engine = _opened(smollm2, urls[0])
    tokens = Tokenizer.load(smollm2).encode(TEXT)
    assert tuple(engine.tokenize(TEXT)) == tokens
    sink = Answers()
    engine.answer(Prefill("kld", (tokens,), 2, len(tokens) - 2, ((0,) * (len(tokens) - 3),)), sink)
    ran = engine.runtime_info().record()
    found = [ran[name] for name in ("server", "prompts", "ids", "tokenizer")]
    assert found == ["llama_cpp.server", "text", "retokenized", "server"]
    assert ran["echo_shifted"]


def test_prompt_rows_are_those_of_the_tokens_generated_there(smollm2: Model, urls: list[str]) -> None:
    """A greedy text, scored as a prompt: each of its tokens is the likeliest at its position."""
    engine = _opened(smollm2, urls[0])
    tokenizer = Tokenizer.load(smollm2)
    prompt = tokenizer.encode(TEXT)
    sink = Answers()
    engine.answer(Generate("t", (prompt,), 12, tokenizer.stop_ids, rows=False), sink)
    generated = ids(sink.items[0])
    window = (*prompt, *generated)
    scored = Answers()
    first = len(prompt) - 1
    engine.answer(Prefill("kld", (window,), first, len(window) - 2, ((0,) * len(generated),)), scored)
    assert np.asarray(scored.items[0]["topk_ids"])[:, 0].tolist() == generated


@pytest.mark.long
def test_a_quantized_cache_costs_something_and_not_much(smollm2: Model, urls: list[str]) -> None:
    tokens = Tokenizer.load(smollm2).encode(TEXT)
    request = Prefill("kld", (tokens,), 2, len(tokens) - 2, ((0,) * (len(tokens) - 3),))
    sides = []
    for url in urls:
        sink = Answers()
        _opened(smollm2, url).answer(request, sink)
        sides.append((np.asarray(sink.items[0]["topk_ids"]), np.asarray(sink.items[0]["topk_logprobs"])))
    rows = compare_topk(sides[0], sides[1], np.asarray(tokens[3:]))
    assert 0 < rows.kl.mean() < 0.05
    assert not rows.failed.any()


def test_a_run_completes(urls: list[str], tmp_path: Path) -> None:
    write_inputs(tmp_path)
    sizes = ("--limit", 2, "--n-predict", 8, "--set", "axes.rniah.lengths=[512]", "--set", "axes.rniah.trials=1")
    done = cli(
        *("compare", "smollm2-135m", "--engine", "openai", "--axes", "trajectory,rniah", *sizes, "--no-floor"),
        *("--base-url", urls[0], "--candidate", f"base-url={urls[1]},name=q8_0", "--prompts", "prompts.txt"),
        cwd=tmp_path,
    )
    assert done.code == 0, done.err
    axes = done.arm("q8_0")["axes"]
    assert axes["trajectory"]["n_failed"] == 0
    assert axes["rniah"]["status"] in ("ok", "identical", "not_measurable")
    assert done.arm("q8_0")["ran"]["ids"] == "retokenized"
