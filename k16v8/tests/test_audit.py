"""The precision audit: it names every known fault, passes what is honest, and says what went wrong in one line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from command import Done, assert_one_line, command
from k16v8.audit.faults import FAULTS, HONEST, Fault, Rules, tiled
from k16v8.audit.implementations import Implementation, implementation
from k16v8.audit.run import Finding, Inputs, audit, random_inputs, recorded_inputs, tolerance
from k16v8.errors import InputError

PYTHON_FILE = """
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

def good(q, k, v, *, causal, scale):
    assert causal
    at = torch.arange(k.shape[2])
    return sdpa(q, k, v, attn_mask=at <= at[-q.shape[2]:, None], scale=scale, enable_gqa=True)

def off(q, k, v, *, causal, scale):
    return good(q, k, v, causal=causal, scale=scale) * 1.01

def turned(q, k, v, *, causal, scale):
    return good(q, k, v, causal=causal, scale=scale).transpose(1, 2)

def raises(q, k, v, *, causal, scale):
    raise ValueError("page 7\\nis gone")

def nothing(q, k, v, *, causal, scale):
    pass

def choosy(q, k, v, *, causal, scale):
    if q.shape[2] > 1:
        raise NotImplementedError("decode only")
    return good(q, k, v, causal=causal, scale=scale)

def greedy(q, k, v, *, causal, scale):
    out = good(q, k, v, causal=causal, scale=scale)
    q.zero_(), k.zero_(), v.zero_()
    return out

number = 7
"""


@pytest.fixture(scope="module")
def inputs() -> dict[int, list[Inputs]]:
    return {length: list(random_inputs((length,))) for length in (128, 1024, 4096, 16384)}


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, of a new name each time."""
    name = f"user_attention_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(PYTHON_FILE, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def _over(found: list[Finding]) -> list[tuple[str, str, int]]:
    return [(one.implementation, one.case, one.kv_length) for one in found if one.status == "over"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_known_fault_is_over_tolerance_where_it_is_said_to_be(fault: Fault, inputs: dict[int, list[Inputs]]) -> None:
    (place,) = (one for one in inputs[fault.kv_length] if one.case == fault.case)
    (found,) = audit([fault.implementation], [place])
    assert found.status == "over"


@pytest.mark.full
def test_without_faults_the_same_code_passes_at_every_case_and_length(inputs: dict[int, list[Inputs]]) -> None:
    found = [one for some in inputs.values() for one in audit(HONEST, some)]
    assert {one.status for one in found} == {"passed"}
    assert {one.kv_length for one in found} == {128, 1024, 4096, 16384}


@pytest.mark.full
def test_torch_attention_and_ours_pass_at_every_length(inputs: dict[int, list[Inputs]]) -> None:
    asked = [implementation(name) for name in ("sdpa-math", "sdpa-flash", "k16v8-torch")]
    found = [one for some in inputs.values() for one in audit(asked, some)]
    assert _over(found) == []
    assert {one.reason for one in found if one.status == "not_supported"} == {
        "takes no softcap",
        "takes no k_scale and no v_scale",
    }
    assert all(one.status == "passed" for one in found if one.implementation == "k16v8-torch")


def test_a_missing_k_scale_in_extend_leaves_decode_alone(inputs: dict[int, list[Inputs]]) -> None:
    (fault,) = (fault for fault in FAULTS if fault.rules.drops_k_scale)
    assert {case for _, case, _ in _over(list(audit([fault.implementation], inputs[128])))} == {"extend fp8"}


def test_a_window_offset_matters_only_where_tokens_left_the_window() -> None:
    broken = Implementation("x", partial(tiled, rules=Rules(drops_window_offset=True)))
    one = next(one for one in random_inputs((128,)) if one.case == "decode window")
    wide = Inputs(one.case, one.q, one.k, one.v, type(one.attention)(window=128))
    assert [found.status for found in audit([broken], [one, wide])] == ["over", "passed"]


def test_logits_in_bf16_as_models_write_attention_out_are_named() -> None:
    found = list(audit([implementation("eager")], random_inputs((128,))))
    assert ("eager", "extend peaked", 128) in _over(found)
    assert ("eager", "extend flat", 128) not in _over(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_the_exact_output_once_is_within_and_a_bias_of_one_unit_is_not(dtype: torch.dtype) -> None:
    one = next(random_inputs((128,), dtype=dtype))
    exact, unit = one.exact(), tolerance(dtype)[1] / 2
    one_head = torch.zeros_like(exact, dtype=torch.bool)
    one_head[1, 2] = True
    found = audit(
        [
            Implementation("rounded", lambda *_, **__: exact.to(dtype)),
            Implementation("biased", lambda *_, **__: (exact * (1 + unit)).to(dtype)),
            Implementation("one query", lambda *_, **__: torch.where(one_head, 1.01 * exact, exact).to(dtype)),
            Implementation("NaN", lambda *_, **__: torch.where(one_head, math.nan, exact).to(dtype)),
        ],
        [one],
    )
    assert [finding.status for finding in found] == ["passed", "over", "over", "over"]


def test_errors_are_relative_to_the_rms_of_each_query_and_head() -> None:
    one = next(random_inputs((128,), dtype=torch.float32))
    exact = one.exact()
    noise = torch.zeros_like(exact)
    noise[0, 2, 0, 5] = 0.25 * exact[0, 2, 0].square().mean().sqrt() * math.sqrt(exact.shape[3])
    (found,) = audit([Implementation("x", lambda *_, **__: (exact + noise).float())], [one])
    assert found.worst == pytest.approx(0.25, rel=1e-4)
    assert found.median < 1e-6


def test_the_exact_output_is_torch_attention_on_dequantized_keys() -> None:
    one = next(one for one in random_inputs((40,)) if one.case == "extend fp8")
    assert one.k_scale is not None
    assert one.v_scale is not None
    at = torch.arange(40)
    k, v = one.k.double() * one.k_scale, one.v.double() * one.v_scale
    oracle = functional.scaled_dot_product_attention(
        one.q.double(), k, v, attn_mask=at <= at[-16:, None], enable_gqa=True
    )
    torch.testing.assert_close(one.exact(), oracle)


def test_where_zero_is_due_only_zero_passes() -> None:
    zero = torch.zeros(1, 1, 1, 8)
    one = Inputs("x", zero + 1, zero + 1, zero, next(random_inputs((1,))).attention)
    made: list[Callable[..., Tensor]] = [lambda *_, **__: zero, lambda *_, **__: zero + 1e-30]
    assert [one.status for one in audit([Implementation("x", each) for each in made], [one])] == ["passed", "over"]


def test_what_one_implementation_does_to_its_inputs_does_not_reach_the_next(user: str) -> None:
    found = audit([implementation(f"{user}:{name}") for name in ("greedy", "good")], random_inputs((128,)))
    assert _over(list(found)) == []


def test_recorded_tensors_are_cut_at_each_length_whose_last_token_asks() -> None:
    q, k, v = torch.randn(4, 100, 16), torch.randn(2, 300, 16), torch.randn(2, 300, 16)
    tensors = {f"layers.{n}.{part}": x for n in (3, 7) for part, x in zip("qkv", (q, k, v), strict=True)}
    asked = list(recorded_inputs(tensors, (128, 256, 1024)))
    assert [(one.case, one.kv_length) for one in asked] == [
        *(("layers.3", 256), ("layers.3", 300), ("layers.7", 256), ("layers.7", 300))
    ]
    assert torch.equal(asked[0].q[0], q[:, 40:56])  # positions 240 to 255
    assert torch.equal(asked[1].q[0], q[:, -16:])
    assert torch.equal(asked[0].k[0], k[:, :256])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": None}, "have no q"),
        ({"v": None}, "have no 'v' next to q"),
        ({"k": torch.ones(2, 9, 8)}, "do not fit together"),
        ({"k": torch.ones(3, 9, 16), "v": torch.ones(3, 9, 16)}, "do not fit together"),
        ({"k": torch.ones(2, 3, 16), "v": torch.ones(2, 3, 16)}, "do not fit together"),
        ({"q": torch.ones(4, 5, 16, dtype=torch.int32)}, "q is int32"),
        ({"v": torch.full((2, 9, 16), math.nan)}, "v holds NaN or infinity"),
        ({"q": torch.ones(5, 16)}, "write [heads, tokens, dim]"),
    ],
)
def test_recorded_tensors_that_cannot_be_are_refused(change: dict[str, Tensor | None], message: str) -> None:
    tensors = {"q": torch.ones(4, 5, 16), "k": torch.ones(2, 9, 16), "v": torch.ones(2, 9, 16)} | change
    with pytest.raises(InputError) as raised:
        list(recorded_inputs({name: x for name, x in tensors.items() if x is not None}))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def _run(*words: str) -> Done:
    return command("audit", *words)


def test_the_command_passes_with_0_and_leaves_out_what_cannot_run_here() -> None:
    done = _run("--lengths", "128", "--json")
    assert done.exit_code == 0, done
    record = json.loads(done.stdout)
    assert record["tolerance"]["bf16"] == {"median": 0.75 / 256, "worst": 2 / 256}
    measured = {one["implementation"] for one in record["findings"] if one["status"] == "passed"}
    assert {"sdpa-math", "sdpa-flash", "k16v8-torch"} <= measured
    if not torch.cuda.is_available():
        triton = next(one for one in record["findings"] if one["implementation"] == "k16v8-triton")
        assert "need a GPU" in triton["reason"]
        assert triton["median"] is None


def test_a_function_over_tolerance_is_named_with_its_case_and_ends_with_1(user: str) -> None:
    done = _run("--implementation", f"{user}:good,{user}:off", "--lengths", "128")
    assert done.exit_code == 1
    assert f"over tolerance: {user}:off, decode normal at KV length 128" in done.stderr
    assert f"{user}:good, " not in done.stderr
    assert "OVER" in done.stdout


def test_the_self_test_finds_all_faults() -> None:
    done = _run("--self-test", "--json")
    assert done.exit_code == 0, done
    judged = {one["implementation"]: one["status"] for one in json.loads(done.stdout)["findings"]}
    assert judged == {fault.name: "over" for fault in FAULTS} | {honest.name: "passed" for honest in HONEST}


def test_a_tolerance_that_lets_a_fault_through_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k16v8.audit.run.tolerance", lambda dtype: (0.004, 0.01))
    done = _run("--self-test")
    assert done.exit_code == 1
    assert "judged wrongly: softmax weights truncated, extend normal at KV length 1024" in done.stderr


def test_what_a_function_leaves_out_is_said_with_its_reason(user: str) -> None:
    done = _run("--implementation", f"{user}:choosy", "--lengths", "128")
    assert done.exit_code == 0, done
    assert "decode only" in done.stdout
    assert "extend peaked" in done.stdout


def test_a_file_of_tensors_is_audited(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    full = {name: torch.randn(shape, generator=random) for name, shape in _SHAPES.items()}
    path = tmp_path / "layers.safetensors"
    save_file({**{f"first.{name}": x for name, x in full.items()}, **{n: x.bfloat16() for n, x in full.items()}}, path)
    done = _run("--tensors", str(path), "--implementation", "sdpa-math,k16v8-torch", "--json")
    assert done.exit_code == 0, done
    found = json.loads(done.stdout)["findings"]
    assert [(one["implementation"], one["case"], one["kv_length"]) for one in found] == [
        (name, case, length)
        for case in ("q, k, v", "first")
        for length in (128, 150)
        for name in ("sdpa-math", "k16v8-torch")
    ]
    bf16, f32 = ([one["median"] for one in found if one["case"] == case] for case in ("q, k, v", "first"))
    assert min(bf16) > 1e-3  # rounded once to the type of the file
    assert max(f32) < 1e-6


_SHAPES = {"q": (4, 30, 64), "k": (2, 150, 64), "v": (2, 150, 64)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--implementation", "sdpa-maths"), "did you mean 'sdpa-math'?"),
        (("--implementation", "no_such_module:attend"), "cannot be imported (ModuleNotFoundError"),
        (("--implementation", "USER:goodd"), "did you mean 'good'?"),
        (("--implementation", "USER:number"), "is not a function but int"),
        (("--implementation", "USER:raises"), "decode normal, KV length 128 raised ValueError: page 7 is"),
        (("--implementation", "USER:turned"), "returned bfloat16 [2, 1, 4, 64], not bfloat16 [2, 4, 1,"),
        (("--implementation", "USER:nothing"), "returned NoneType, not a tensor"),
        (("--implementation", "flash-attn"), "nothing was measured; flash-attn: "),
        (("--device", "tpu"), "there are cpu and cuda"),
        (("--dtype", "fp8"), "unknown type"),
        (("--lengths", "128,x"), "write numbers"),
        (("--lengths", "0"), "a length is 1 or more"),
        (("--self-test", "--implementation", "eager"), "--self-test has implementations"),
        (("--tensors", "absent.safetensors"), "no such file"),
        (("--tensors", "USER.py"), "no complete safetensors file"),
    ],
)
def test_what_cannot_be_is_one_line(words: tuple[str, ...], message: str, user: str) -> None:
    done = _run("--lengths", "128", *(word.replace("USER", user) for word in words))
    assert_one_line(done, message)
