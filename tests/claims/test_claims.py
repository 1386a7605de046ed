"""Each claim that comes with fidelab has its figures from a second computation; bad files are refused in a line."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fidelab.claims import checks
from fidelab.claims.checks import Judged, Verdict, judge, read_claims, shipped_claims
from fidelab.errors import ConfigError, InputError
from tests.runs.harness import cli

CANNOT, HOLDS, UNDERPOWERED = Verdict.CANNOT, Verdict.HOLDS, Verdict.UNDERPOWERED


@pytest.fixture(scope="module")
def shipped() -> dict[str, Judged]:
    return {claim.name: judge(claim) for claim in shipped_claims()}


def judged(tmp_path: Path, **fields: Any) -> Judged:
    path = tmp_path / "claims.yaml"
    path.write_text(json.dumps({"claims": [{"name": "one", **fields}]}), "utf-8")
    [claim] = read_claims(path)
    return judge(claim)


def fisher(x: int, y: int, n: int) -> float:
    """Two-sided, by summing every table of these margins that is at most as likely."""
    ways = [math.comb(n, a) * math.comb(n, x + y - a) for a in range(x + y + 1)]
    return float(Fraction(sum(w for w in ways if w <= ways[x]), math.comb(2 * n, x + y)))


# ------------------------------------------------------------------------------------------ shipped claims


def test_every_shipped_claim_has_the_verdict_that_the_documents_give(shipped: dict[str, Judged]) -> None:
    assert {name: one.verdict for name, one in shipped.items()} == {
        "devstral-262k-times": CANNOT,
        "coder-next-times": HOLDS,
        "devstral-one-user": CANNOT,
        "gemma4-26b-32-users": CANNOT,
        "devstral-weight-reads": HOLDS,
        "k16v8-one-and-a-third": CANNOT,
        "k16v8-gsm8k": UNDERPOWERED,
        "swe-bench-8-5-3": UNDERPOWERED,
        "top-20-against-top-64": CANNOT,
        "bf16-kernel-15-percent": CANNOT,
        "int4-fp16-dequantization": CANNOT,
        "perplexity-chunks": HOLDS,
        "perplexity-of-engines": CANNOT,
        "vocabulary-152064": CANNOT,
    }
    assert all(one.arithmetic and one.claim.published and one.claim.source for one in shipped.values())


def test_times_of_devstral_are_not_those_of_100_tokens(shipped: dict[str, Judged]) -> None:
    figures = shipped["devstral-262k-times"].figures
    assert figures["wrong_rows"] == 8
    assert (figures["fewest_tokens"], figures["most_tokens"]) == pytest.approx((3.7 * 10.2, 96.5 * 0.9))
    assert shipped["coder-next-times"].figures["wrong_rows"] == 0


def test_one_load_has_two_rates(shipped: dict[str, Judged]) -> None:
    assert shipped["devstral-one-user"].figures["ratio"] == pytest.approx(78 / 37)
    assert shipped["gemma4-26b-32-users"].figures["ratio"] == pytest.approx(165.1 / 27)


def test_weight_reads_bound_a_rate(shipped: dict[str, Judged], tmp_path: Path) -> None:
    assert shipped["devstral-weight-reads"].figures["bound_tok_s"] == pytest.approx(2 * 640 / 13)
    assert judged(tmp_path, kind="rate", device="R9700", devices=2, read_gb=13, tok_s=101).verdict is CANNOT


def test_k16v8_reads_three_quarters_of_a_16_bit_cache(shipped: dict[str, Judged]) -> None:
    assert shipped["k16v8-one-and-a-third"].figures["limit"] == pytest.approx((2 + 2) / (2 + 1))


def test_p_values_of_8_5_and_3_of_300_are_those_of_enumeration(shipped: dict[str, Judged]) -> None:
    figures = shipped["swe-bench-8-5-3"].figures
    for name, (x, y) in {"first/second": (8, 5), "first/third": (8, 3), "second/third": (5, 3)}.items():
        assert figures[f"p {name}"] == pytest.approx(fisher(x, y, 300))


def test_the_detectable_difference_is_found_in_four_of_five_simulated_runs(shipped: dict[str, Judged]) -> None:
    reach, n, runs = shipped["swe-bench-8-5-3"].figures["detectable"], 300, 20_000
    random = np.random.default_rng(1)
    x, y = random.binomial(n, 3 / n, runs) / n, random.binomial(n, 3 / n + reach, runs) / n
    mean = (x + y) / 2
    z = np.abs(x - y) / np.sqrt(np.maximum(2 * mean * (1 - mean) / n, 1e-12))
    assert (z > 1.959964).mean() == pytest.approx(0.8, abs=0.05)


def test_gsm8k_of_200_cannot_show_equality_within_a_point(shipped: dict[str, Judged]) -> None:
    one = shipped["k16v8-gsm8k"]
    assert one.figures["p k16v8/fp16"] == pytest.approx(fisher(180, 181, 200))
    assert one.figures["detectable"] > 0.05


def test_k_alone_turns_0_0037_nats_into_0_04(tmp_path: Path) -> None:
    pairs = checks._constructed(0.0037)
    true = [float((np.exp(ref) * (ref - test)).sum()) for ref, test in pairs]
    assert np.mean(true) == pytest.approx(0.0037, rel=1e-6)
    for ref, test in pairs[:3]:
        assert np.exp(ref).sum() == pytest.approx(1)
        assert np.exp(test).sum() == pytest.approx(1)
    scores = {20: 0.0, 64: 0.0}
    for k in scores:  # the same by dictionaries, as servers answer
        for ref, test in pairs:
            mine, others = ({int(i): float(x[i]) for i in np.argsort(-x)[:k]} for x in (ref, test))
            for token in {*mine, *others}:
                p, q = mine.get(token, -30.0), others.get(token, -30.0)
                scores[k] += math.exp(p) * (p - q) / len(pairs)
    one = judged(tmp_path, kind="top_k", kl=[0.04, 0.0037], k=[20, 64])
    assert one.verdict is CANNOT
    figures = one.figures
    assert (figures["score_0"], figures["score_1"]) == pytest.approx((scores[20], scores[64]))
    assert scores[20] == pytest.approx(0.04, rel=0.2)
    assert scores[64] == pytest.approx(0.0037, rel=0.05)


def test_k_alone_makes_more_than_the_published_difference_of_engines(shipped: dict[str, Judged]) -> None:
    figures = shipped["top-20-against-top-64"].figures
    assert figures["score_0"] - figures["score_1"] > 0.037 - 0.021
    assert figures["score_1"] == pytest.approx(0.021, rel=0.05)


def test_attention_in_bf16_at_128_tokens_errs_by_far_less_than_15_percent(shipped: dict[str, Judged]) -> None:
    random = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(random.standard_normal((n, 128))) for n in (8, 128, 128))
    weights = torch.softmax(q @ k.T / math.sqrt(128), dim=1)
    exact, out = weights @ v, torch.zeros(8, 128, dtype=torch.bfloat16)
    short, values = weights.to(torch.bfloat16), v.to(torch.bfloat16)
    for place in range(128):
        out = out + short[:, place, None] * values[place]
    error = float(((out.double() - exact).norm(dim=1) / exact.norm(dim=1)).mean())
    figures = shipped["bf16-kernel-15-percent"].figures
    assert figures["rounded_everywhere"] == pytest.approx(error, rel=0.01)
    once = float(((short.double() @ values.double() - exact).norm(dim=1) / exact.norm(dim=1)).mean())
    assert figures["rounded_inputs"] == pytest.approx(once, rel=0.01)
    assert figures["unit_roundoff"] == torch.finfo(torch.bfloat16).eps / 2
    assert error < 0.02


def test_int4_in_fp16_is_several_times_closer_than_in_bf16(shipped: dict[str, Judged]) -> None:
    scales = torch.from_numpy(np.geomspace(1e-3, 1e-1, 1024).astype(np.float16))
    codes = torch.arange(1, 16)
    exact = codes[:, None].double() * scales.double()
    errors = {
        kind: float(((codes[:, None].to(kind) * scales.to(kind)).double() / exact - 1).abs().mean())
        for kind in (torch.float16, torch.bfloat16)
    }
    figures = shipped["int4-fp16-dequantization"].figures
    assert figures["fp16"] == pytest.approx(errors[torch.float16], rel=1e-9)
    assert figures["bf16"] == pytest.approx(errors[torch.bfloat16], rel=1e-9)
    assert 8 < figures["ratio"] < 16


def test_perplexity_by_chunk_is_that_of_every_text_weighted_by_its_probability() -> None:
    from itertools import product

    symbols, chunk, total = 3, 5, 0.0
    for text in product(range(symbols), repeat=chunk):
        log_p = sum(math.log((text[:i].count(s) + 1) / (i + symbols)) for i, s in enumerate(text))
        total -= math.exp(log_p) * log_p  # the source's own probabilities are the predictor's
    assert checks.chunk_perplexity(symbols, chunk) == pytest.approx(math.exp(total / chunk))


def test_chunks_alone_make_more_than_the_published_difference(shipped: dict[str, Judged]) -> None:
    figures = shipped["perplexity-chunks"].figures
    assert figures["published"] == pytest.approx(5.74 / 5.49 - 1)
    assert figures["chunk_alone"] > figures["published"]


def test_the_vocabulary_left_out_is_no_padding_and_hides_nats(shipped: dict[str, Judged]) -> None:
    figures = shipped["vocabulary-152064"].figures
    assert figures["left_out"] == 248_320 - 152_064 > figures["most_padding"] == 255
    p, q = np.array([0.6, 0.35, 0.05]), np.array([0.9 * 0.6 / 0.95, 0.9 * 0.35 / 0.95, 0.1])
    inside = (p[:2] / 0.95 * np.log(p[:2] / 0.95 / (q[:2] / 0.9))).sum()  # 0: they differ outside alone
    assert inside == pytest.approx(0, abs=1e-12)
    assert figures["missing_nats"] == pytest.approx(float((p * np.log(p / q)).sum()))


# ------------------------------------------------------------------------------------------ other claims


def test_discordant_pairs_are_judged_by_mcnemar(tmp_path: Path) -> None:
    one = judged(tmp_path, kind="proportions", n=1000, lost=15, gained=3)
    assert one.verdict is HOLDS
    assert one.figures["p"] == pytest.approx(2 * sum(math.comb(18, i) for i in range(4)) / 2**18)
    assert judged(tmp_path, kind="proportions", n=1000, lost=3, gained=2).verdict is UNDERPOWERED
    assert judged(tmp_path, kind="proportions", n=1000, lost=0, gained=0).verdict is UNDERPOWERED


def test_equality_holds_within_a_margin_that_the_interval_stays_in(tmp_path: Path) -> None:
    equal = {"kind": "proportions", "claimed": "equal", "margin": 0.01}
    assert judged(tmp_path, **equal, n=2000, lost=3, gained=2).verdict is HOLDS
    assert judged(tmp_path, **equal, n=2000, lost=300, gained=20).verdict is CANNOT
    assert judged(tmp_path, **equal, n=100, counts={"a": 50, "b": 50}).verdict is UNDERPOWERED


def test_a_difference_that_n_carries_holds(tmp_path: Path) -> None:
    assert judged(tmp_path, kind="proportions", n=200, counts={"a": 180, "b": 4}).verdict is HOLDS


def test_a_decode_rate_may_exceed_tokens_over_the_whole_time(tmp_path: Path) -> None:
    rows = {"kind": "time_rate", "tokens": 100, "rows": [{"at": "8K", "seconds": 10, "tok_s": 20}]}
    assert judged(tmp_path, **rows).verdict is CANNOT
    assert judged(tmp_path, **rows, rate="decode").verdict is HOLDS


def test_what_arithmetic_allows_holds(tmp_path: Path) -> None:
    assert judged(tmp_path, kind="dequantization", claimed="fp16").verdict is HOLDS
    assert judged(tmp_path, kind="kernel_error", error=0.004, tokens=128).verdict is HOLDS
    assert judged(tmp_path, kind="vocabulary", kept=151_936, vocabulary=152_064, tp=4).verdict is HOLDS
    assert judged(tmp_path, kind="top_k", kl=[0.5, 0.0037], k=[20, 64]).verdict is HOLDS
    assert judged(tmp_path, kind="two_rates", rates={"a": 100, "b": 104}).verdict is HOLDS


# ------------------------------------------------------------------------------------------ files and command


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("claims:\n- {name: a, kind: rat}", "claims.0: unknown kind 'rat'; known: rate, "),
        ("claims:\n- {name: a, kind: rate, device: H100, read_gb: .nan, tok_s: 3}", "claims.0.read_gb: "),
        ("claims:\n- {name: a, kind: proportions, n: -3, counts: {a: 1, b: 2}}", "claims.0.n: "),
        ("claims:\n- {name: a, kind: proportions, n: 3, counts: {a: 1, b: 4}}", "b has 4 of 3"),
        ("claims:\n- {name: a, kind: proportions, n: 3, lost: 1}", "give both lost and gained"),
        ("claims:\n- {name: a, kind: rate, device: H100, read_gb: 1, tok_s: 3, devces: 1}", "did you mean 'devices'?"),
        ("claims: []", "expected the key 'claims' alone"),
        ("- {name: a}", "expected keys like 'claims:'"),
        ("claims:\n- 3", "claims.0: unknown kind None"),
        ("claims: [", "is not YAML"),
        ("claims:\n- &a {name: a, kind: two_rates, rates: {a: 1, b: 1}}\n- *a", "two claims are named 'a'"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as refused:
        read_claims(path)
    assert said in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_unknown_device_names_the_claim(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="claim 'one': unknown device 'H1000'"):
        judged(tmp_path, kind="rate", device="H1000", read_gb=1, tok_s=1)


def test_the_command_judges_a_file_and_refuses_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text("claims:\n- {name: a, kind: proportions, n: 300, counts: {a: 8, b: 3}}", "utf-8")
    done = cli("claims", path, "--json", cwd=tmp_path)
    assert done.code == 0
    [one] = json.loads(done.out)["claims"]
    assert one["verdict"] == "underpowered"
    assert one["figures"]["p a/b"] == pytest.approx(fisher(8, 3, 300))
    assert "underpowered" in cli("claims", path, cwd=tmp_path).out
    for words in (("claims", tmp_path / "none.yaml"), ("claims", tmp_path)):
        done = cli(*words, cwd=tmp_path)
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
