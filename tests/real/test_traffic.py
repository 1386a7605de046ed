"""A log of requests with tools, and sampled answers, go through other engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fidelab.captures.reader import Capture
from fidelab.models import Model
from tests.real.harness import installed
from tests.run.harness import cli

pytestmark = [pytest.mark.long, pytest.mark.model]

TOOL = {"type": "function", "function": {"name": "forecast", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "forecast", "arguments": '{"city": "Oslo"}'}}


@pytest.mark.parametrize(("engine", "reference", "kv"), [("llamacpp", "f16", "q8_0"), ("vllm", "auto", "k16v8")])
def test_log_with_tools_goes_through(engine: str, reference: str, kv: str, smollm2: Model, tmp_path: Path) -> None:
    installed(engine)
    conversations = [
        [
            {"role": "user", "content": f"What is the weather in Oslo on day {day}, and which coat do I need?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": '{"rain_mm": 6.5}'},
            {"role": "assistant", "content": "Rain is expected all day, so take the long coat and good shoes."},
        ]
        for day in range(3)
    ]
    lines = [json.dumps({"messages": messages, "tools": [TOOL]}) for messages in conversations]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    sizes = ("--windows", 2, "--n-ctx", 64, "--n-predict", 4, "--threads", 1, "--no-floor", "--control", "none")
    arms = ("--engine", engine, "--reference", reference, "--kv", kv, "--axes", "kld,trajectory")
    done = cli("compare", smollm2.name, *arms, *sizes, "--traffic", "log.jsonl", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "conversations: 3 (3 tool calls)" in done.err
    assert done.axis(kv, "trajectory").n_items == 3
    assert "Measured only on tool calls" in done.arm(kv)["verdict"]["notes"]


@pytest.mark.parametrize(("engine", "reference", "kv"), [("llamacpp", "f16", "q8_0"), ("vllm", "auto", "k16v8")])
def test_what_the_reference_draws_is_forced(
    engine: str, reference: str, kv: str, smollm2: Model, tmp_path: Path
) -> None:
    installed(engine)
    (tmp_path / "prompts.txt").write_text("Name a colour.\nWrite a line about the sea.\n")

    def texts(temperature: float, seed: int) -> list[list[int]]:
        arms = ("--engine", engine, "--reference", reference, "--kv", kv, "--axes", "forced")
        sizes = ("--prompts", "prompts.txt", "--threads", 1, "--no-floor", "--control", "none")
        settings = ("n_predict=12", f"temperature={temperature}", f"seed={seed}")
        drawn = (word for setting in settings for word in ("--set", f"axes.forced.{setting}"))
        done = cli("compare", smollm2.name, *arms, *sizes, *drawn, cwd=tmp_path)
        assert done.code == 0, done.err
        assert done.axis(kv, "forced").n_items
        arms_of = json.loads((done.folder / "outcomes.json").read_text())["arms"]
        [reference_arm] = [arm for arm in arms_of if arm["role"] == "reference"]
        capture = Capture(done.folder.joinpath(reference_arm["captures"]["forced.path"]).resolve())
        return [capture.ids(item) for item in range(len(capture.items))]

    greedy, first, again, other = texts(0, 1), texts(1.2, 1), texts(1.2, 1), texts(1.2, 2)
    assert first == again
    assert len({str(x) for x in (greedy, first, other)}) == 3
