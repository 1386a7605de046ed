"""Formats of keys and values like for like: one frontier of bytes and loss, on a robust and on a fragile model.

    python benchmarks/kv_zoo.py [--windows 6] [--n-ctx 512] [--threads 2] [--folder DIR]

The embedded model, and a copy whose keys have outliers (``fidelab checkpoint make-fragile``), answer the same windows
under every pair of formats in one process; rows are compared with the native answer. Printed are, by packed bits per
value with scales, the mean KL with its interval by documents; which pairs are on the frontier; and the paired
differences of K16/V8 to the pairs that take no more bytes; and how much of a gain comes from a tail of exact tokens,
by the same pair with and without it. KIVI is `uintN[axis=channel]/uintN` with a tail, TurboQuant's scalar quantizer
`lloydN` behind a randomised rotation.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from fidelab.captures.requests import Prefill, RoundedCache
from fidelab.config.schema import Experiment
from fidelab.core import KVSpec
from fidelab.formats import create
from fidelab.metrics.intervals import paired_difference
from fidelab.models import path as locate
from fidelab.plan.prepare import prepare
from fidelab.studies.roundings import Rows, ask
from fidelab.studies.study import OpenStudy
from fidelab_checkpoints.fragile import make_fragile

K16V8 = "bf16/fp8_e4m3"
ROTATED = "rotate=hadamard"
RANDOM = "rotate=hadamard,seed=1"  # with lloyd: TurboQuant's scalar quantizer
TAIL = 64  # tokens
KIVI = [f"uint{bits}[axis=channel]/uint{bits}" for bits in (4, 2)]
TAILED = ["int4/int4", *KIVI, f"lloyd4[{RANDOM}]/lloyd4[{RANDOM}]", f"lloyd2[{RANDOM}]/lloyd2[{RANDOM}]", "int2/int2"]


def with_tail(pair: str, sinks: int = 0) -> tuple[str, str]:
    """Both sides of a pair with the last tokens, and the first ones, as they are."""
    spec = KVSpec.parse(pair)
    more = [("tail", str(TAIL)), *([("sinks", str(sinks))] if sinks else [])]
    k, v = (replace(side, options=tuple(sorted((*side.options, *more)))) for side in (spec.k, spec.v))
    return str(k), str(v)


PAIRS = [
    "bf16/bf16",
    K16V8,
    "bf16/fp8_e4m3[scale=per-token-head]",
    "bf16/int8",
    "bf16/int4",
    "fp8_e4m3/fp8_e4m3",
    "fp8_e4m3[scale=per-tensor]/fp8_e4m3[scale=per-tensor]",
    "fp8_e4m3[scale=per-channel]/fp8_e4m3[scale=per-channel]",
    "fp8_e4m3[scale=per-token-head]/fp8_e4m3[scale=per-token-head]",
    f"fp8_e4m3[scale=per-token-head,{ROTATED}]/fp8_e4m3[scale=per-token-head,{ROTATED}]",
    "q8_0/q8_0",
    f"q8_0[{ROTATED}]/q8_0[rotate=hadamard-64]",
    f"q8_0[{ROTATED},seed=1]/q8_0[{ROTATED},seed=1]",
    "int8[group=64]/int8[group=64]",
    f"int8[group=64,{ROTATED}]/int8[group=64,{ROTATED}]",
    "q8_0/q4_0",
    f"q8_0[{ROTATED}]/q4_0[rotate=hadamard-64]",
    "q5_1/q5_1",
    f"q5_1[{ROTATED}]/q5_1[rotate=hadamard-64]",
    "q4_0/q4_0",
    f"q4_0[{ROTATED}]/q4_0[rotate=hadamard-64]",
    "int4/int4",
    f"int4[{ROTATED}]/int4[{ROTATED}]",
    "nvfp4/nvfp4",
    f"nvfp4[{ROTATED}]/nvfp4[{ROTATED}]",
    "mxfp4/mxfp4",
    f"int3[{ROTATED}]/int3[{ROTATED}]",
    "int2/int2",
    "fp8_e4m3[scale=per-head]/fp8_e4m3[scale=per-head]",
    "uint8/uint8",
    "uint8[axis=channel]/uint8",
    "uint8[axis=channel]/fp8_e4m3",
    "uint4/uint4",
    "uint2/uint2",
    *KIVI,
    *(f"lloyd{bits}[{RANDOM}]/lloyd{bits}[{RANDOM}]" for bits in (4, 3, 2)),
    *("/".join(with_tail(pair)) for pair in TAILED),
    "/".join(with_tail("int2/int2", sinks=4)),
]


def bits(pair: str, dim: int, tokens: int) -> float:
    """Packed bits per stored value, scales included: the mean of both sides, and of a cache's lengths at scored rows.

    Those are the second half of a window of ``tokens``.  What stays as it is has 16 bits, though this benchmark
    computes in float32.
    """
    spec, found = KVSpec.parse(pair), list[float]()
    for side in (create(spec.k), create(spec.v)):
        coded = 8 * side.packed_token_bytes(dim) / dim
        for length in range(tokens // 2 + 1, tokens + 1):
            encoded = side.encoded_tokens(length) if side.has_exceptions else length
            found.append((encoded * coded + (length - encoded) * 16) / length)
    return sum(found) / len(found)


def measure(model: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Rows | str]:
    """The rows of every pair against the native answer."""
    experiment = Experiment.model_validate(
        {
            "model": model,
            "dtype": "float32",
            "control": "none",
            "candidates": ["int8"],
            "axes": {"kld": {"windows": arguments.windows, "n_ctx": arguments.n_ctx}},
            "floor": 0.0,
            "twins": 0.0,
            "threads": arguments.threads,
            "output_dir": str(folder),
        }
    )
    prepared = prepare(experiment, only="reference")
    [job] = prepared.plan.jobs
    [asked] = [capture.request for capture in job.captures]
    assert isinstance(asked, Prefill)
    study = OpenStudy.begin("kv-zoo", prepared, "", None)
    rules = [f"*:{pair}" for pair in PAIRS]
    answers = ask(study, asked, "kv-zoo", rules, "zoo", RoundedCache)
    found = answers.rows(rules)
    return {pair: found[rule] for pair, rule in zip(PAIRS, rules, strict=True)}


def show(title: str, found: dict[str, Rows | str], dim: int, tokens: int) -> None:
    """The table, the frontier and the differences."""
    print(f"\n{title}")
    good = {pair: rows for pair, rows in found.items() if isinstance(rows, Rows)}
    ordered = sorted(good, key=lambda pair: (bits(pair, dim, tokens), good[pair].mean))
    least = float("inf")
    for pair in ordered:
        loss = good[pair].metrics()[0]
        kld = loss.value or 0.0
        span = "" if loss.interval is None else f"{loss.interval[0]:.3g} to {loss.interval[1]:.3g}"
        mark = "*" if kld < least else " "
        least = min(least, kld)
        print(f"{mark} {bits(pair, dim, tokens):6.2f} bits  {kld:10.3g}  {span:22}  {pair}")
    for pair, rows in found.items():
        if isinstance(rows, str):
            print(f"  {pair}: {rows}")
    own = good[K16V8]
    print("K16/V8 minus, nats, paired by documents (below 0: K16/V8 is better):")
    for pair in ordered:
        if pair != K16V8 and bits(pair, dim, tokens) <= bits(K16V8, dim, tokens) and good[pair].mean < 20 * own.mean:
            difference = paired_difference(own.items, good[pair].items)
            if difference.interval is not None:
                low, high = difference.interval
                said = "better" if high < 0 else "worse" if low > 0 else "not told apart"
                print(f"  {difference.estimate:+10.3g}  {low:+.3g} to {high:+.3g}  {said:14}  {pair}")
    print(f"what a tail of {TAIL} exact tokens of {tokens} gives, nats, paired by documents:")
    for pair in TAILED:
        tailed = "/".join(with_tail(pair))
        if pair in good and tailed in good:
            difference = paired_difference(good[pair].items, good[tailed].items)
            low, high = difference.interval or (float("nan"), float("nan"))
            share = 100 * difference.estimate / good[pair].mean
            sizes = f"{bits(pair, dim, tokens):.2f} → {bits(tailed, dim, tokens):.2f} bits"
            print(f"  {difference.estimate:+10.3g}  {low:+.3g} to {high:+.3g}  {share:4.0f}%  {sizes}  {pair}")


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--n-ctx", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where captures are kept")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        fragile = folder / "fragile"
        if not fragile.exists():
            make_fragile(locate("smollm2-135m", "hf"), fragile)
        dim = 64
        for title, model in (("smollm2-135m", "smollm2-135m"), ("smollm2-135m with fragile keys", str(fragile))):
            show(title, measure(model, arguments, folder), dim, arguments.n_ctx)


if __name__ == "__main__":
    main()
