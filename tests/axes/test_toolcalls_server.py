"""Tool calls on two scripted servers, one of which has a planted fault.  Neither gives log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from fidelab.axes.base import AxisInputs
from fidelab.axes.toolcalls import ToolCalls
from fidelab.inputs.texts import Text
from fidelab.inputs.tokens import Tokenizer
from fidelab.inputs.toolcalls.load import load_dialogues
from fidelab.models import resolve
from tests.engines.openai_server import EOS, Served, save_model, serving
from tests.run.harness import Done, cli, write_inputs


@dataclass
class Scripted(Served):
    """A server that knows what it says behind each prompt."""

    said: Mapping[tuple[int, ...], str] = field(default_factory=dict)

    def generate(self, prompt: Sequence[int], n: int, ignore_eos: bool) -> list[int]:
        said = self.said.get(tuple(prompt))
        return super().generate(prompt, n, ignore_eos) if said is None else [*said.encode(), EOS][:n]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """All 200 calls; the other server renames the keys of every twentieth, and writes tags, which change nothing."""
    cwd = tmp_path_factory.mktemp("servers")
    model = save_model(cwd / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 14}))
    write_inputs(cwd)
    inputs = AxisInputs(Tokenizer.load(resolve(str(model))), Text("t", "x", (), ""), (), None)
    prompts = ToolCalls(ToolCalls.Settings.model_validate({"n_predict": 400})).requests(inputs)["calls.0"].items()
    steps = [step for dialogue in load_dialogues() for step in dialogue.steps]
    right, wrong = dict[tuple[int, ...], str](), dict[tuple[int, ...], str]()
    for n, (prompt, step) in enumerate(zip(prompts, steps, strict=True)):
        arguments = dict(step.arguments)
        right[prompt] = json.dumps({"name": step.name, "arguments": arguments})
        if n % 20 == 11:
            arguments = {f"{key}s": value for key, value in arguments.items()}
        wrong[prompt] = f"<tool_call>{json.dumps({'name': step.name, 'arguments': arguments})}</tool_call>"
    one, other = Scripted(said=right, scores=None), Scripted(said=wrong, scores=None)
    with serving(one), serving(other):
        return cli(
            *("compare", model, "--engine", "openai", "--axes", "toolcalls", "--no-floor", "--threads", 1),
            *("--base-url", one.url, "--candidate", f"base-url={other.url},name=other"),
            *("--text", "text.txt", "--prompts", "prompts.txt", "--set", "axes.toolcalls.n_predict=400"),
            cwd=cwd,
        )


def test_one_key_renamed_in_5_percent_of_the_calls_of_a_server_is_found(done: Done) -> None:
    assert done.code == 0, done.err
    found = done.axis("other", "toolcalls")
    assert (found.n_items, found.value("lost"), found.value("gained")) == (200, 10, 0)
    assert (found.value("parsed"), found.value("right_function"), found.value("valid_arguments")) == (1.0, 1.0, 0.95)
    p = found.value("mcnemar_p")
    assert p is not None
    assert p < 0.005
    low, high = found.ci("difference") or (0, 0)
    assert low < -5 < (high or 0) < 0


def test_without_log_probabilities_the_judged_half_stands_alone_and_says_so(done: Done) -> None:
    found = done.axis("other", "toolcalls")
    assert found.metric("mean_kl", {}) is None
    assert "gives no log-probabilities of prompts" in str(found.facts["no KL"])
