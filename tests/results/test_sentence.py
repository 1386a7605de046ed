"""One sentence per candidate: what to do, in every case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fidelab.core import Status
from fidelab.results.sentence import ArmFacts, is_native, sentence

FP8 = ArmFacts(k="fp8_e4m3", v="fp8_e4m3", estimator="hidden", n_positions=8160)
INT4 = replace(FP8, k="int4", v="int4", band="FAIL", kld=0.712, kld_ci=(0.356, 0.8))
NATIVE_K = replace(FP8, k="bf16")


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        (replace(FP8, status=Status.FAILED, reason="out of\nmemory"), "not running: out of memory"),
        (replace(FP8, status=Status.FAILED), "not running: no reason was recorded"),
        (replace(FP8, status=Status.NOT_SUPPORTED, reason="hf has: bf16"), "not supported: hf has: bf16"),
        (
            replace(FP8, status=Status.NOT_ENGAGED, reason="the cache holds bf16"),
            "not engaged: this format did not run, so nothing is known about it: the cache holds bf16",
        ),
        (
            replace(FP8, status=Status.IDENTICAL, band="EXCELLENT"),
            "safe: the format ran and its output is identical to the reference's",
        ),
        (
            replace(FP8, status=Status.IDENTICAL, band="EXCELLENT", n_ctx=2048, kv_share=0.094),
            "safe: the format ran and its output is identical to the reference's; keys and values are 9% of what a "
            "sequence of 2,048 tokens keeps in this model, the rest is recurrent state; up to 2,048 tokens of context, "
            "not measured beyond",
        ),
        (
            replace(FP8, status=Status.IDENTICAL, band="EXCELLENT", n_ctx=2048, kv_share=0.5),
            "safe: the format ran and its output is identical to the reference's; up to 2,048 tokens of context, not "
            "measured beyond",
        ),
        (FP8, "no verdict: full-vocabulary KLD was not measured"),
        (replace(FP8, reason="KLD failed: time-out"), "no verdict: KLD failed: time-out"),
        (
            replace(FP8, estimator="topk", kld=0.002),
            "no verdict: only a lower bound could be measured (KLD ≥ 0.00200 nats)",
        ),
        (
            replace(FP8, estimator="topk", kld=0.02, at_best="PASS"),
            "no verdict, at best PASS: only a lower bound could be measured (KLD ≥ 0.0200 nats)",
        ),
        (
            replace(FP8, estimator="topk", kld=0.512, kld_ci=(0.4, 0.6), band="FAIL"),
            "do not use: costs at least 0.512 nats; try k16v8",
        ),
        (
            replace(FP8, kld=0.07, at_best="DEGRADED", n_ctx=512),
            "no verdict, at best DEGRADED: too little text for an interval (KLD 0.0700 nats); measure more windows",
        ),
        (
            replace(NATIVE_K, band="FAIL", kld=3.47, top1=0.087, real_flips=0.84, n_ctx=512),
            "values break: costs 3.47 nats (without an interval); 91% of the top tokens change, 84% beyond "
            "a near tie; try wider values",
        ),
        (
            replace(INT4, native_keys_format="", floor=0.0451),
            "do not use: costs 0.712 nats (0.36–0.80; a change of last bits alone: 0.0451); try a wider format",
        ),
        (
            replace(
                FP8, band="EXCELLENT", kld=0.00552, kld_ci=(0.005, 0.0061), top1=18 / 19, real_flips=1 / 60, n_ctx=2048
            ),
            "safe: costs 0.00552 nats (0.0050–0.0061); 1 top token in 19 changes, 1 in 60 beyond a near tie; "
            "up to 2,048 tokens of context, not measured beyond",
        ),
        (
            replace(FP8, band="EXCELLENT", kld=1e-9, kld_ci=(0.0, 2e-9), top1=1.0, real_flips=0.0),
            "safe: costs 1.00e-9 nats (0–2.0e-9); no top token changes",
        ),
        (
            replace(FP8, band="PASS", kld=0.02, kld_ci=(0.015, 0.025), top1=0.8, real_flips=0.0),
            "safe: costs 0.0200 nats (0.015–0.025); 1 top token in 5.0 changes, none beyond a near tie",
        ),
        (
            replace(FP8, status=Status.IDENTICAL, band="EXCELLENT", n_ctx=512),
            "safe: the format ran and its output is identical to the reference's; "
            "up to 512 tokens of context, not measured beyond",
        ),
        (
            replace(FP8, kld=0.002),
            "no verdict: too little text for an interval (KLD 0.00200 nats); measure more windows",
        ),
        (
            replace(NATIVE_K, band="EXCELLENT", kld=0.0007, kld_ci=(0.00035, 0.0009)),
            "safe: costs 0.000700 nats (0.00035–0.00090)",
        ),
        (
            replace(FP8, band="PASS", kld=0.0312, kld_ci=(0.0156, 0.04), control="bf16", control_kld=0.0156),
            "safe: costs 0.0312 nats (0.016–0.040)",
        ),
        (
            replace(FP8, band="PASS", kld=0.0312, kld_ci=(0.0156, 0.04), control="bf16", control_kld=0.016),
            "safe: costs 0.0312 nats (0.016–0.040); "
            "the kernel path, not the format, is most of it (control bf16: 0.0160)",
        ),
        (
            replace(INT4, control="bf16", control_kld=0.5),
            "do not use: costs 0.712 nats (0.36–0.80); the kernel path, "
            "not the format, is most of it (control bf16: 0.500); try another attention backend",
        ),
        (INT4, "do not use: costs 0.712 nats (0.36–0.80); try k16v8"),
        (
            replace(FP8, band="DEGRADED", kld=0.07, kld_ci=(0.035, 0.09)),
            "use with care: costs 0.0700 nats (0.035–0.090); try k16v8",
        ),
        (
            replace(INT4, v="bf16"),
            "keys break: costs 0.712 nats (0.36–0.80); try k16v8",
        ),
        (
            replace(INT4, k="q4_0", v="q4_0", native_keys_format="f16/q8_0"),
            "do not use: costs 0.712 nats (0.36–0.80); try f16/q8_0",
        ),
        (
            replace(INT4, native_keys_format=""),  # an engine with one format for keys and values
            "do not use: costs 0.712 nats (0.36–0.80); try a wider format",
        ),
        (
            replace(FP8, status=Status.NOT_ENGAGED, reason="K is bfloat16", forced=True),
            "do not use: it was forced to run, and something else ran: K is bfloat16",
        ),
        (
            replace(INT4, native_keys_arm="bf16/int4", native_keys_band="PASS", native_keys_kld=0.02),
            "keys break: costs 0.712 nats (0.36–0.80); try bf16/int4 (0.0200 nats)",
        ),
        (
            replace(INT4, native_keys_arm="bf16/int4", native_keys_band="FAIL", native_keys_kld=0.3),
            "do not use: costs 0.712 nats (0.36–0.80); "
            "native keys alone do not mend it (bf16/int4: 0.300 nats): try wider values too",
        ),
        (
            replace(NATIVE_K, v="int2", band="FAIL", kld=0.4, kld_ci=(0.2, 0.5)),
            "values break: costs 0.400 nats (0.20–0.50); try wider values",
        ),
        (
            replace(NATIVE_K, v="f16", band="DEGRADED", kld=0.06, kld_ci=(0.03, 0.07)),
            "use with care: costs 0.0600 nats (0.030–0.070)",
        ),
        (
            replace(FP8, band="DEGRADED", kld=0.001, kld_ci=(0.0005, 0.002), n_failed=12),
            "use with care: 12 of 8,160 positions gave no number, costs 0.00100 nats (0.00050–0.0020)",
        ),
        (
            replace(FP8, band="FAIL", n_failed=8160),
            "do not use: 8,160 of 8,160 positions gave no number",
        ),
        (
            replace(FP8, band="PASS", kld=0.001, kld_ci=(0.0005, 0.002), lowered_by="needles lost: 40 points"),
            "use with care: needles lost: 40 points, costs 0.00100 nats (0.00050–0.0020)",
        ),
        (
            replace(FP8, band="DEGRADED", kld=0.04, kld_ci=(0.02, 0.045), lowered_by="R-NIAH is 12 points lower"),
            "use with care: R-NIAH is 12 points lower, costs 0.0400 nats (0.020–0.045)",
        ),
    ],
)
def test_the_sentence_says_what_to_do(arm: ArmFacts, said: str) -> None:
    assert sentence(arm) == said


@pytest.mark.parametrize("name", ["bf16", "f16", "F32", "fp16", "float32", "bfloat16", "auto", "native"])
def test_native_formats_are_known_by_all_their_names(name: str) -> None:
    assert is_native(name)


@pytest.mark.parametrize("name", ["fp8_e4m3", "q8_0", "int4", "fp8", "f16x", "turbo3"])
def test_coarse_formats_are_not_native(name: str) -> None:
    assert not is_native(name)


def test_a_preliminary_verdict_says_so_and_what_it_takes() -> None:
    said = sentence(replace(INT4, clusters="2 documents", preliminary=True))
    assert said.startswith("do not use (preliminary): costs 0.712 nats (0.36–0.80, 2 documents); ")
    assert "a verdict takes 6 documents or more" in said


def test_an_interval_that_crosses_a_band_is_said_to() -> None:
    said = sentence(replace(FP8, band="FAIL", at_best="PASS", kld=0.08, kld_ci=(0.03, 0.2), clusters="12 blocks"))
    assert "its interval reaches from PASS to FAIL: more windows decide" in said
    assert "reaches" not in sentence(INT4)


def test_probability_that_is_cut_off_with_ids_of_one_side_alone_is_told_from_a_thousandth_on() -> None:
    told = "ids that one vocabulary alone has hold 2.14% of the probability, which KLD leaves out"
    assert told in sentence(replace(INT4, cut=0.0214))
    assert "vocabulary" not in sentence(replace(INT4, cut=0.0009))


def test_where_weights_are_rounded_too_no_other_cache_format_is_advised() -> None:
    assert "try k16v8" in sentence(INT4)
    said = sentence(replace(INT4, rounded=True))
    assert "try k16v8" not in said
    assert "weights and cache apart: --vary weights=native,… --vary kv=…" in said
    assert "--vary" not in sentence(replace(INT4, k="bf16", v="bf16", rounded=True))
