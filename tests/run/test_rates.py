"""What requests take: their work, and rates from what arms took before, in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fidelab.captures.requests import Forced, Generate, Prefill, Request, Timed
from fidelab.core import Arm, KVSpec
from fidelab.engines.base import engine_class
from fidelab.environments.environment import Environment
from fidelab.models import Model
from fidelab.physics.devices import find_device
from fidelab.plan import estimate
from fidelab.plan.deploy import ResolvedArm
from fidelab.plan.estimate import DEFAULT, Timings, Work, work_of

MODEL = Model(
    name="m",
    path=Path("m"),
    kind="folder",
    weights="w",
    revision=None,
    vocab_size=100,
    hidden_size=10,
    max_positions=None,
    parameters=1000,
    native="bf16",
    architecture="LlamaForCausalLM",
    layers=5,
    weight_bytes=10**9,
)
ARM = Arm("bf16", "hf", "m", "m", "w", KVSpec.parse("bf16"), "float32", "cpu", 2)
READ, FORWARD, LOAD = 0.01, 0.2, 7.0


def resolved(model: Model = MODEL, **change: Any) -> ResolvedArm:
    arm = replace(ARM, **change)
    return ResolvedArm(arm, engine_class(arm.engine), model, Environment(arm.engine, "python"), {})


def prefill(windows: int, tokens: int) -> Prefill:
    return Prefill("kld", ((1,) * tokens,) * windows, 0, tokens - 1, ((0,) * tokens,) * windows)


def generate(prompts: int, tokens: int, new: int, batch: int = 4, axis: str = "trajectory") -> Generate:
    return Generate(axis, ((1,) * tokens,) * prompts, new, (), batch=batch)


def truth(request: Request) -> float:
    """Seconds on a machine with exactly these rates."""
    work = work_of(request, MODEL)
    return READ * work.stretch * (work.read + work.written) + FORWARD * work.forwards


def took(*requests: Request) -> dict[str, tuple[Work, float]]:
    return {request.axis: (work_of(request, MODEL), truth(request)) for request in requests}


def expected(timings: Timings, request: Request) -> float:
    return sum(timings.rates(resolved()).parts(work_of(request, MODEL), request.axis))


@pytest.fixture
def timings(tmp_path: Path) -> Timings:
    """After one run of the arm."""
    found = Timings(tmp_path / "timings.json")
    found.add(resolved(), LOAD, took(prefill(4, 64), generate(8, 32, 16)))
    return Timings(tmp_path / "timings.json")


@pytest.mark.parametrize(
    ("request_", "read", "written", "forwards"),
    [
        (prefill(3, 64), 192, 0, 0),
        (generate(8, 32, 16), 256, 128, 32),  # two batches of four
        (Generate("x", ((1,) * 10, (1,) * 90, (1,) * 12), 5, (), batch=4), 112, 15, 10),  # unlike lengths apart
        (Forced("forced.kl", ((1,) * 8,) * 2, ((1,) * 6,) * 2), 16, 12, 12),
        (Timed("decode", ((1,) * 20,) * 4, n=3, batch=2), 80, 12, 6),
    ],
)
def test_work_counts_what_is_read_what_is_decoded_and_in_how_many_forwards(
    request_: Request, read: int, written: int, forwards: int
) -> None:
    work = work_of(request_, MODEL)
    assert (work.read, work.written, work.forwards) == (read, written, forwards)


def test_tokens_of_long_windows_take_longer_by_their_attention() -> None:
    # 2 · parameters for the weights, 4 · d · layers · tokens / 2 for attention
    assert work_of(prefill(1, 100), MODEL).stretch == 1 + (4 * 10 * 5 * 50) / (2 * 1000)


@pytest.mark.parametrize("request_", [prefill(40, 64), prefill(2, 512), generate(64, 100, 48), generate(8, 32, 16)])
def test_work_of_another_size_takes_what_the_rates_of_the_last_run_say(request_: Request, timings: Timings) -> None:
    assert timings.rates(resolved()).load == LOAD
    assert timings.rates(resolved()).source == "its last runs here"
    assert expected(timings, request_) == pytest.approx(truth(request_))


def test_an_axis_whose_answers_end_early_is_expected_to_do_so_again(timings: Timings) -> None:
    early = generate(8, 32, 256, axis="gsm8k")
    timings.add(resolved(), LOAD, {"gsm8k": (work_of(early, MODEL), 0.25 * truth(early))})
    assert expected(timings, generate(16, 32, 256, axis="gsm8k")) == pytest.approx(0.5 * truth(early), rel=0.05)


@pytest.mark.parametrize(
    ("change", "scale", "source"),
    [
        ({"kv": KVSpec.parse("int4")}, 1, "the last runs of bf16 in float32 on hf"),
        ({"options": (("jitter", "1"),)}, 1, "its last runs here"),
        ({"dtype": "bfloat16"}, 1, "the last runs of bf16 in float32 on hf"),
        ({"weights": "other", "kv": KVSpec.parse("int4")}, 3, "another model on engine hf"),
        ({"weights": "other"}, 3, "another model on engine hf"),
    ],
)
def test_an_arm_that_never_ran_has_the_rates_of_the_nearest_that_did(
    change: Mapping[str, Any], scale: int, source: str, timings: Timings
) -> None:
    model = replace(MODEL, parameters=scale * MODEL.parameters)
    rates = timings.rates(resolved(model, **change))
    assert rates.source == source
    assert (rates.read, rates.forward) == pytest.approx((scale * READ, scale * FORWARD))


def test_of_several_arms_the_one_of_this_model_counts_and_of_equals_the_newest(timings: Timings) -> None:
    timings.add(resolved(weights="other"), LOAD, {"kld": (work_of(prefill(4, 64), MODEL), 100.0)})
    assert timings.rates(resolved(dtype="bfloat16")).read == pytest.approx(READ)
    timings.add(resolved(kv=KVSpec.parse("int4")), LOAD, {"kld": (work_of(prefill(4, 64), MODEL), 100.0)})
    assert timings.rates(resolved(kv=KVSpec.parse("int8"))).source == "the last runs of int4 in float32 on hf"


def test_nothing_known_is_said_to_be_a_default_and_loads_as_the_engine_does(tmp_path: Path) -> None:
    rates = {name: Timings(tmp_path / "none").rates(resolved(engine=name)) for name in ("hf", "vllm")}
    assert {one.source for one in rates.values()} == {DEFAULT}
    assert rates["vllm"].load > rates["hf"].load > MODEL.weight_bytes / 1e9
    assert rates["hf"].forward > rates["hf"].read > 0


@pytest.mark.parametrize(
    ("told", "row"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA L40S", "L40S"),
        ("a GPU of nobody's table", "RTX-4090"),
    ],
)
def test_before_a_gpu_was_timed_its_published_rates_count(
    told: str, row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "graphics", lambda: {"gpus": [told]})
    rates, published = Timings(tmp_path / "none").rates(resolved(device="cuda")), find_device(row)
    assert rates.read == pytest.approx(2 * MODEL.parameters / (0.4 * published.compute["bf16"]))
    assert rates.forward == pytest.approx(2 * MODEL.parameters / (0.7 * published.bandwidth))
    assert rates.source == f"published rates of {row}: nothing like it has run on this machine"
    assert Timings(tmp_path / "none").rates(resolved(device="cuda", options=(("tp", "4"),))).read == rates.read / 4


def test_what_is_too_short_to_measure_and_a_file_that_cannot_be_read_leave_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "timings.json"
    Timings(path).add(resolved(), LOAD, {"kld": (work_of(prefill(1, 8), MODEL), 0.001)})
    assert Timings(path).rates(resolved()).source == DEFAULT
    for text in ("", "{", '{"runs": 3, "scoring": 1}', '{"runs": [{"arm": {}}], "scoring": 1}', "[" * 9000):
        path.write_text(text)
        assert Timings(path).rates(resolved()).source == DEFAULT


@pytest.mark.parametrize(("factor", "kept"), [(1.7, 1.7), (0.01, 0.5), (90.0, 4.0)])
def test_scoring_is_expected_to_take_what_it_took_before_within_bounds(
    factor: float, kept: float, tmp_path: Path
) -> None:
    Timings(tmp_path / "timings.json").add_scoring(factor)
    again = Timings(tmp_path / "timings.json")
    assert again.scoring == kept
    again.add_scoring(0.9)  # it took 90% of what was expected by then
    assert again.scoring == pytest.approx(max(0.5, 0.9 * kept))


def test_one_slow_run_changes_no_estimate(tmp_path: Path) -> None:
    path = tmp_path / "timings.json"
    work = Work(read=1000, stretch=1.0)
    for seconds in (10.0, 12.0, 630.0):
        Timings(path).add(resolved(), 2.0, {"kld": (work, seconds)})
    assert Timings(path).rates(resolved()).read == pytest.approx(0.012)
    for _ in range(5):
        Timings(path).add(resolved(), 2.0, {"kld": (work, 20.0)})
    assert Timings(path).rates(resolved()).read == pytest.approx(0.02)


def test_a_run_that_only_reads_leaves_the_decoding_rate_that_is_known(timings: Timings) -> None:
    timings.add(resolved(), LOAD, took(prefill(4, 64)))
    assert timings.rates(resolved()).forward == pytest.approx(FORWARD)


def test_an_arm_that_has_only_read_decodes_at_the_pace_of_its_reading(tmp_path: Path) -> None:
    found = Timings(tmp_path / "timings.json")
    default = found.rates(resolved())
    found.add(resolved(), LOAD, took(prefill(4, 64)))
    rates = found.rates(resolved())
    assert rates.read == pytest.approx(READ)
    assert rates.forward == pytest.approx(READ * default.forward / default.read)


def test_a_model_that_is_much_smaller_says_nothing_of_a_large_one(timings: Timings, tmp_path: Path) -> None:
    large = replace(MODEL, parameters=11 * MODEL.parameters)
    rates = timings.rates(resolved(large, weights="other"))
    assert rates == Timings(tmp_path / "none").rates(resolved(large, weights="other"))
    assert rates.source == DEFAULT
    assert timings.rates(resolved(replace(MODEL, parameters=10 * MODEL.parameters), weights="other")).source != DEFAULT
