"""One sentence per candidate: what to do, in every case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fidelab.core import Status
from fidelab.report.sentence import ArmFacts, is_native, sentence

FP8 = ArmFacts(k="fp8_e4m3", v="fp8_e4m3", estimator="hidden", n_positions=8160)
INT4 = replace(FP8, k="int4", v="int4", band="FAIL", kld=0.712, kld_upper=0.8)
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
        (FP8, "no verdict: full-vocabulary KLD was not measured"),
        (replace(FP8, reason="KLD failed: time-out"), "no verdict: KLD failed: time-out"),
        (
            replace(FP8, estimator="topk", kld=0.002),
            "no verdict: only a lower bound could be measured (KLD ≥ 0.00200 nats)",
        ),
        (
            replace(FP8, kld=0.002),
            "no verdict: too little text for an interval (KLD 0.00200 nats); measure more windows",
        ),
        (
            replace(NATIVE_K, band="EXCELLENT", kld=0.0007, kld_upper=0.0009),
            "safe: costs 0.000700 nats (at most 0.000900), near-lossless",
        ),
        (
            replace(FP8, band="PASS", kld=0.0312, kld_upper=0.04, control="bf16", control_kld=0.0156),
            "safe: costs 0.0312 nats (at most 0.0400), within the good range",
        ),
        (
            replace(FP8, band="PASS", kld=0.0312, kld_upper=0.04, control="bf16", control_kld=0.016),
            "safe: costs 0.0312 nats (at most 0.0400), within the good range; "
            "the kernel path, not the format, is most of it (control bf16: 0.0160)",
        ),
        (
            replace(INT4, control="bf16", control_kld=0.5),
            "do not use: costs 0.712 nats (at most 0.800), a significant change; the kernel path, "
            "not the format, is most of it (control bf16: 0.500); try another attention backend",
        ),
        (INT4, "do not use: costs 0.712 nats (at most 0.800), a significant change; try k16v8"),
        (
            replace(FP8, band="DEGRADED", kld=0.07, kld_upper=0.09),
            "use with care: costs 0.0700 nats (at most 0.0900), a noticeable change; try k16v8",
        ),
        (
            replace(INT4, v="bf16"),
            "keys break: costs 0.712 nats (at most 0.800), a significant change; try k16v8",
        ),
        (
            replace(INT4, k="q4_0", v="q4_0", native_keys_format="f16/q8_0"),
            "do not use: costs 0.712 nats (at most 0.800), a significant change; try f16/q8_0",
        ),
        (
            replace(INT4, native_keys_format=""),  # an engine with one format for keys and values
            "do not use: costs 0.712 nats (at most 0.800), a significant change; try a wider format",
        ),
        (
            replace(FP8, status=Status.NOT_ENGAGED, reason="K is bfloat16", forced=True),
            "do not use: it was forced to run, and something else ran: K is bfloat16",
        ),
        (
            replace(INT4, native_keys_arm="bf16/int4", native_keys_band="PASS", native_keys_kld=0.02),
            "keys break: costs 0.712 nats (at most 0.800), a significant change; try bf16/int4 (0.0200 nats)",
        ),
        (
            replace(INT4, native_keys_arm="bf16/int4", native_keys_band="FAIL", native_keys_kld=0.3),
            "do not use: costs 0.712 nats (at most 0.800), a significant change; "
            "native keys alone do not mend it (bf16/int4: 0.300 nats): try wider values too",
        ),
        (
            replace(NATIVE_K, v="int2", band="FAIL", kld=0.4, kld_upper=0.5),
            "values break: costs 0.400 nats (at most 0.500), a significant change; try wider values",
        ),
        (
            replace(NATIVE_K, v="f16", band="DEGRADED", kld=0.06, kld_upper=0.07),
            "use with care: costs 0.0600 nats (at most 0.0700), a noticeable change",
        ),
        (
            replace(FP8, band="DEGRADED", kld=0.001, kld_upper=0.002, n_failed=12),
            "use with care: 12 of 8,160 positions gave no number, costs 0.00100 nats (at most 0.00200)",
        ),
        (
            replace(FP8, band="FAIL", n_failed=8160),
            "do not use: 8,160 of 8,160 positions gave no number",
        ),
        (
            replace(FP8, band="PASS", kld=0.001, kld_upper=0.002, lowered_by="needles lost: 40 points"),
            "use with care: needles lost: 40 points, costs 0.00100 nats (at most 0.00200)",
        ),
        (
            replace(FP8, band="DEGRADED", kld=0.04, kld_upper=0.045, lowered_by="R-NIAH is 12 points lower"),
            "use with care: R-NIAH is 12 points lower, costs 0.0400 nats (at most 0.0450)",
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
