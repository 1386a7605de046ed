"""Engine hf, one loaded model under many roundings: every answer is that of an arm with these weights."""

from __future__ import annotations

import pytest
import torch

from fidelab.captures.requests import Prefill, Request, RoundedWeights, request_from_record, request_record
from fidelab.core.errors import NotSupportedError, UsageError
from tests.engines import tiny
from tests.engines.conftest import Checkpoint
from tests.engines.tiny import Answers

LENGTH, FIRST, LAST = 20, 9, 18
WINDOWS = tuple(tiny.tokens(LENGTH, seed) for seed in range(2))
UNITS = ((0,) * (LAST - FIRST + 1),) * 2


def request_of(weights: str) -> RoundedWeights:
    return RoundedWeights("sensitivity", WINDOWS, FIRST, LAST, UNITS, weights)


def states(answers: Answers) -> torch.Tensor:
    return torch.cat([tiny.hidden(answers.items[index]) for index in range(2)])


def answered(engine: object, request: Request) -> tuple[torch.Tensor, dict[str, object]]:
    sink = Answers()
    answer = engine.answer(request, sink)  # type: ignore[attr-defined]
    return states(sink), dict(answer.facts)


@pytest.mark.parametrize(
    "weights",
    [
        "int4[group=32,only=layers.2.mlp.down_proj]",
        "int4[group=32,only=1]",
        "int8[group=32,only=q_proj]",
        "int4[group=32,only=0]+int8[group=32,only=2]",
        "nvfp4",
    ],
)
def test_an_answer_has_the_bits_of_an_arm_with_these_weights(weights: str, checkpoint: Checkpoint) -> None:
    engine = tiny.opened(checkpoint("llama"))
    native, _ = answered(engine, request_of("native"))
    arm = tiny.opened(checkpoint("llama"), weights=weights)
    expected, _ = answered(arm, Prefill("kld", WINDOWS, FIRST, LAST, UNITS))
    found, _ = answered(engine, request_of(weights))
    assert torch.equal(found, expected)
    assert not torch.equal(found, native)


@pytest.mark.parametrize("kind", ["llama", "gemma4", "qwen3_next", "falcon_h1"])
def test_afterwards_the_weights_are_what_they_were(kind: str, checkpoint: Checkpoint) -> None:
    engine = tiny.opened(checkpoint(kind))
    before = {name: parameter.clone() for name, parameter in engine._model.module.named_parameters()}
    native, _ = answered(engine, request_of("native"))
    rounded, _ = answered(engine, request_of("int4[group=8]"))
    assert not torch.equal(rounded, native)
    for name, parameter in engine._model.module.named_parameters():
        assert torch.equal(parameter, before[name]), name
    again, _ = answered(engine, request_of("native"))
    assert torch.equal(again, native)


@pytest.mark.parametrize("kind", ["llama", "gemma4", "qwen3_next", "falcon_h1"])
def test_layers_below_the_rounded_ones_change_no_bit_whether_they_run_or_not(kind: str, checkpoint: Checkpoint) -> None:
    weights = "int4[group=8,only=1]"
    engine = tiny.opened(checkpoint(kind))
    answered(engine, request_of("native"))
    found, _ = answered(engine, request_of(weights))
    whole, _ = answered(tiny.opened(checkpoint(kind), weights=weights), Prefill("kld", WINDOWS, FIRST, LAST, UNITS))
    assert torch.equal(found, whole)


def test_layers_below_the_rounded_ones_do_not_run_nor_beside_a_native_answer_on_disk(checkpoint: Checkpoint) -> None:
    engine = tiny.opened(checkpoint("llama"))
    answered(engine, request_of("native"))
    ran: list[int] = []
    for n, layer in enumerate(engine._model.module.model.layers):
        layer.mlp.register_forward_hook(lambda _m, _a, _o, n=n: ran.append(n))
    _, facts = answered(engine, request_of("int4[group=32,only=2]"))
    assert ran == [2, 2]
    assert facts["from_layer"] == 2
    engine = tiny.opened(checkpoint("llama"))
    first, facts = answered(engine, request_of("int4[group=32,only=1]"))
    assert facts["from_layer"] == 1
    ran.clear()
    for n, layer in enumerate(engine._model.module.model.layers):
        layer.mlp.register_forward_hook(lambda _m, _a, _o, n=n: ran.append(n))
    again, _ = answered(engine, request_of("int4[group=32,only=1]"))
    assert ran == [1, 2, 1, 2]
    assert torch.equal(again, first)


def test_a_failure_in_the_middle_puts_the_weights_back(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.opened(checkpoint("llama"))
    native, _ = answered(engine, request_of("native"))
    with monkeypatch.context() as patch:
        patch.setattr(type(engine._model), "forward", lambda *_a, **_k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            answered(engine, request_of("int4[group=32]"))
    again, _ = answered(engine, request_of("native"))
    assert torch.equal(again, native)


@pytest.mark.parametrize(
    ("weights", "error", "said"),
    [
        ("int4[only=nonesuch]", UsageError, "nonesuch names no weight"),
        ("int8[group=32,only=lm_head]", NotSupportedError, "run it with compare"),
    ],
)
def test_what_cannot_be_rounded_for_one_answer_is_said(
    weights: str, error: type[Exception], said: str, checkpoint: Checkpoint
) -> None:
    with pytest.raises(error, match=said):
        answered(tiny.opened(checkpoint("llama")), request_of(weights))


def test_a_request_survives_its_record() -> None:
    request = request_of("int4[group=32,only=1]")
    assert request_from_record(request_record(request)) == request
    with pytest.raises(ValueError, match="weights"):
        request_from_record({**request_record(request), "weights": 3})
