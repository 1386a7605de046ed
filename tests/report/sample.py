"""A full report: reference, control, floor, and candidates of every outcome; the figures are made up."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fidelab.core import KVSpec, Status
from fidelab.results.measurement import Definition, Measurement
from fidelab.results.plots import Curve, TextPair, Texts
from fidelab.results.record import ArmRecord, Composite, Report, RuntimeRecord, Verdict
from fidelab.results.store import RunFolder
from tests.report.sample_axes import DIVERGENCES, hostile_axis, plad_axis, rniah_axis
from tests.report.sample_axes import HOSTILE as HOSTILE

OUTCOMES = ("excellent", "pass", "fail", "identical", "failed", "not engaged", "not supported")
"""Words that every rendering of the sample contains."""

MODEL = "SmolLM2-135M-Instruct"
MEAN = Definition("mean", "nats", "lower", about="mean KL divergence per position")
TOP1 = Definition("top1", "share", "higher", name="same top token")
SCORE = Definition("score", "points", "higher")
NO_INTERVAL = "without an interval"


def kld_axis(mean: float, half: float, control: float | None = None, **changes: Any) -> Measurement:
    """KLD whose other metrics follow from the mean.

    ``changes`` replace fields of the measurement; ``bound``: only lower bounds are known; ``contexts``: tokens per
    window → (mean, positions, documents), each of its own; ``over``: the excess over the control and its interval.
    """
    changed = mean / (1 + mean)
    bound = changes.pop("bound", False)
    contexts: Mapping[int, tuple[float, int, int | None]] = changes.pop("contexts", {})
    over = changes.pop("over", None)
    if over is None and control is not None:
        over = (mean - control, (mean - control - half, mean - control + half))
    quantiles = {"median": 1 / 3, "p90": 2, "p95": 4, "p99": 9, "p999": 30, "max": 100}
    metrics = [
        MEAN(mean, (max(0.0, mean - half), mean + half), bound=bound, headline=True),
        Definition("stderr", "nats", "lower", name="std. error")(half / 2),
        *(
            Definition(name, "nats", "lower", name="p99.9" if name == "p999" else name)(
                mean * factor, bound=bound, caveat=NO_INTERVAL
            )
            for name, factor in quantiles.items()
        ),
        TOP1(1 - changed, (1 - 1.25 * changed, 1 - 0.8 * changed) if changed else (0.999, 1.0)),
        Definition("confident_flips", "share", "lower")(
            changed / 4, (changed / 5, changed / 3) if changed else (0.0, 0.001)
        ),
        Definition("tokens_to_flip", "tokens")(
            1 / changed if changed else None, (0.8 / changed, 1.25 / changed) if changed else (1000.0, None)
        ),
        Definition("rms_dp", "share", "lower", name="RMS Δp")(changed, caveat=NO_INTERVAL),
        SCORE(100 * (1 - changed), (90.0, 100.0)),
    ]
    for n_ctx, (own, _, _) in contexts.items():
        metrics.append(MEAN(own, (own / 2.5, own * 2), cell={"context": n_ctx}, bound=bound))
        metrics.append(TOP1(1 - own / (1 + own), cell={"context": n_ctx}))
    if over is not None:
        metrics.append(Definition("over_control", "nats", "lower")(*over, bound=bound))
    facts: dict[str, Any] = {
        "estimator": "topk" if bound else "hidden",
        "n_ctx": 512,
        "n_clusters": 31,
        "n_documents": 31,
    }
    facts["windows"] = 32
    if contexts:
        facts["contexts"] = [
            {"n_ctx": n_ctx, "n_positions": n, "n_documents": documents, "windows": 16}
            for n_ctx, (_, n, documents) in contexts.items()
        ]
    fields: dict[str, Any] = {
        "status": Status.OK,
        "title": "KL divergence from the reference",
        "metrics": tuple(metrics),
        "n_items": 8160,
        "n_failed": 0,
        "facts": facts,
        "plots": kld_curves(mean),
    }
    return Measurement(**{**fields, **changes})


def kld_curves(mean: float, edges: Sequence[float] = range(255, 512, 32)) -> tuple[Curve, ...]:
    """Mean KL by position in the window, with a gap, and by the reference's confidence."""
    middles = tuple((a + b) / 2 for a, b in itertools.pairwise(edges))
    return (
        Curve(
            key="position",
            title="KL by position in the window",
            x_label="position in the window, tokens",
            y_label="mean KL, nats (log)",
            x=middles,
            y=tuple(None if bin == 5 else mean * (0.8 + bin / 20) for bin in range(len(middles))),
            log_y=True,
            kl=True,
            caption="Rising lines: the cost grows with the context.",
        ),
        Curve(
            key="confidence",
            title="KL by the reference's confidence",
            x_label="reference's largest probability",
            y_label="mean KL, nats (log)",
            x=(0.25, 0.75),
            y=(mean, mean),
            log_y=True,
            kl=True,
            caption="Left: the reference itself is unsure. Loss where the reference is confident matters most.",
        ),
    )


def trajectory_axis(score: float, half: float, **changes: Any) -> Measurement:
    """Greedy text whose other metrics follow from the score.

    ``changes`` replace fields; ``survival``: shares still identical after 0, 1, … tokens; ``texts``: first divergences.
    """
    survival = changes.pop("survival", (1.0, 0.9, 0.7))
    texts: tuple[TextPair, ...] = changes.pop("texts", ())
    exact = changes.pop("exact", 1.0 if score == 100 else score / 200)
    metrics = (
        SCORE(score, (score - half, min(100.0, score + half)), headline=True),
        Definition("exact_match", "share", "higher")(exact),
        Definition("positional_agreement", "share", "higher")(1.0 if exact == 1 else 0.62),
        Definition("median_first_divergence", "tokens")(None if exact == 1 else 17.5),
        Definition("near_ties", "share")(None if exact == 1 else 0.4),
        Definition("score_refract", "points", "higher", name="score (REFRACT)")(score),
        Definition("over_control", "points", "higher")(score - 90, (score - 95, score - 85)),
    )
    curve = Curve(
        key="survival",
        title="How long greedy text stays the same",
        x_label="tokens generated",
        y_label="still identical",
        x=tuple(range(len(survival))),
        y=survival,
        stairs=True,
        percent=True,
        caption="Share of prompts whose text is still identical after n tokens.",
    )
    fields: dict[str, Any] = {
        "status": Status.OK,
        "title": "Greedy text",
        "metrics": metrics,
        "n_items": 10,
        "n_failed": 0,
        "facts": {"n_predict": 64, "template": "chat"},
        "plots": (curve, *([Texts(title="where texts part", pairs=texts)] if texts else [])),
    }
    return Measurement(**{**fields, **changes})


def hostile_report() -> Report:
    """Hostile text in every field that a report shows."""
    axes = {
        "kld": kld_axis(0.02, 0.01),
        "trajectory": trajectory_axis(
            70,
            10,
            facts={"template": HOSTILE, HOSTILE: HOSTILE},
            texts=(
                TextPair(
                    label=HOSTILE,
                    prompt=HOSTILE,
                    shared=HOSTILE,
                    reference=HOSTILE,
                    candidate=HOSTILE,
                    note=HOSTILE,
                    tag=HOSTILE,
                ),
            ),
        ),
        HOSTILE: hostile_axis(),
    }
    ran = candidate("q8_0", 0.02, "PASS", 1, HOSTILE, name=HOSTILE, engine=HOSTILE, model=HOSTILE)
    return sample_report(
        run_id=HOSTILE,
        command=HOSTILE,
        fidelab_version=HOSTILE,
        settings={HOSTILE: HOSTILE},
        environment={HOSTILE: {HOSTILE: [HOSTILE]}},
        comparability_key={HOSTILE: HOSTILE},
        reference=arm("f32", name=HOSTILE, model=HOSTILE),
        control=arm("bf16", name=HOSTILE, status=Status.FAILED, reason=HOSTILE),
        candidates=(
            ran.model_copy(
                update={"axes": axes, "verdict": Verdict(band="PASS", sentence=HOSTILE, because=(HOSTILE,))}
            ),
            broken("q4_0", Status.FAILED, HOSTILE),
        ),
    )


def many_arms(n: int) -> Report:
    """A report with so many candidates, whose KL and sizes differ."""
    arms = []
    for number in range(n):
        mean = 10.0 ** (-4 + 4 * number / n)
        axes = {
            "kld": kld_axis(mean, mean / 5, control=0.00003, plots=kld_curves(mean, range(256, 513, 8))),
            "trajectory": trajectory_axis(
                max(1, 95 - 4 * number), 4, survival=tuple((1 - number / n / 40) ** step for step in range(65))
            ),
            "rniah": rniah_axis(number / n),
        }
        band = "EXCELLENT" if mean < 0.008 else "PASS" if mean < 0.04 else "DEGRADED" if mean < 0.08 else "FAIL"
        name = f"format_{number:02}"
        arms.append(candidate(name, mean, band, max(90, 46080 - 1500 * number), f"costs {mean:.3g} nats", axes=axes))
    return sample_report(candidates=tuple(arms))


def write_positions(folder: Path, columns: Mapping[str, Mapping[str, Any]]) -> Path:
    """``positions.parquet`` as a run writes it: arm → columns."""
    run = RunFolder(folder)
    run.write_positions(columns.items())
    return run.positions


def positions_for(report: Report, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Log-normal KL around each arm's mean, as many positions as the report says, in windows of 255."""
    rng = np.random.default_rng(seed)
    arms = [*([report.control] if report.control else []), *report.candidates]
    columns = {}
    for found in arms:
        kld = found.axes.get("kld")
        mean = kld.value("mean", {}) if kld is not None else None
        if kld is None or mean is None:
            continue
        n = kld.n_items or 0
        kl = mean * rng.lognormal(-1.125, 1.5, n)
        kl[: kld.n_failed or 0] = np.nan
        columns[found.name] = {
            "window": (np.arange(n) // 255).astype(np.int32),
            "position": (256 + np.arange(n) % 255).astype(np.int32),
            "kl": kl,
            "top1_agrees": rng.random(n) < 0.9,
            "reference_confidence": rng.random(n),
        }
    return columns


def arm(kv: str, **changes: Any) -> ArmRecord:
    """An arm on Transformers; ``changes`` replace its fields."""
    spec = KVSpec.parse(kv)
    fields: dict[str, Any] = {
        "name": kv,
        "engine": "hf",
        "model": MODEL,
        "kv": spec,
        "status": Status.OK,
        "ran": RuntimeRecord.model_validate(
            {
                "k_dtype": spec.k.name,
                "v_dtype": spec.v.name,
                "attention": "sdpa",
                "cache_bytes_per_token": 46080,
                "versions": {"transformers": "5.0", "torch": "2.9"},
                "scale_source": "unit",
            }
        ),
    }
    return ArmRecord(**{**fields, **changes})


def candidate(kv: str, mean: float, band: str, size: float, sentence: str, **changes: Any) -> ArmRecord:
    """A candidate that ran and was measured."""
    spec = KVSpec.parse(kv)
    composite = Composite(value=88.1, ci=(84.2, 91.0), too_close_to_call=band == "DEGRADED")
    fields: dict[str, Any] = {
        "ran": RuntimeRecord(k_dtype=spec.k.name, v_dtype=spec.v.name, attention="sdpa", cache_bytes_per_token=size),
        "axes": {"kld": kld_axis(mean, mean / 5, control=0.00003), "trajectory": trajectory_axis(70.3, 12.1)},
        "composite": composite,
        "verdict": Verdict.model_validate(
            {"band": band, "sentence": sentence, "because": [f"upper bound {1.2 * mean:.3g}"]}
        ),
    }
    return arm(kv, **{**fields, **changes})


def broken(kv: str, status: Status, reason: str) -> ArmRecord:
    """A candidate that gave no numbers."""
    return arm(kv, status=status, reason=reason, ran=None, verdict=Verdict(sentence=f"not running: {reason}"))


def sample_report(**changes: Any) -> Report:
    """The whole sample; ``changes`` replace its fields."""
    half_broken = {
        "kld": kld_axis(0.151, 0.02, control=0.00003, n_failed=12),
        "trajectory": Measurement(status=Status.FAILED, reason="time-out after 60 s"),
        "rniah": Measurement(status=Status.NOT_MEASURABLE, reason="no informative cell", facts={"cells": 9}),
    }
    k16v8 = {
        "kld": kld_axis(0.000712, 0.000142, control=0.00003),
        "trajectory": trajectory_axis(70.3, 12.1, texts=DIVERGENCES),
        "rniah": rniah_axis(0.0),
        "plad": plad_axis(),
    }
    fp8 = {
        "kld": kld_axis(0.0312, 0.00624, control=0.00003),
        "trajectory": trajectory_axis(36.3, 12.1, survival=(1.0, 0.5, 0.3), texts=DIVERGENCES[1:]),
        "rniah": rniah_axis(0.33),
    }
    same = {"kld": kld_axis(0, 0, status=Status.IDENTICAL), "trajectory": trajectory_axis(100, 0)}
    fields: dict[str, Any] = {
        "run_id": "2026-05-04-smollm2-a1b2",
        "created": datetime(2026, 5, 4, 12, 30, 15, tzinfo=UTC),
        "fidelab_version": "0.1.0",
        "command": "fidelab compare -f runs/2026-05-04-smollm2-a1b2/config.resolved.yaml",
        "environment": {"device": {"name": "cpu", "threads": 2}, "python": "3.11.9"},
        "settings": {
            "axes": {"kld": {"protocol": "half", "n_ctx": 512, "windows": 32}, "trajectory": {}, "rniah": {}},
            "seed": 0,
        },
        "comparability_key": {"inputs": "9f2c", "protocol": "half", "n_predict": 64},
        "reference": arm("f32", ran=RuntimeRecord(k_dtype="f32", v_dtype="f32", cache_bytes_per_token=92160)),
        "control": arm("bf16", axes={"kld": kld_axis(0.00003, 0.000004), "trajectory": trajectory_axis(90, 6)}),
        "candidates": (
            candidate(
                "k16v8",
                0.000712,
                "EXCELLENT",
                34560,
                "safe, KLD 0.000712. The top token changes at 0.071% of positions.",
                axes=k16v8,
            ),
            candidate(
                "fp8_e4m3",
                0.0312,
                "PASS",
                23040,
                "safe, KLD 0.0312. The top token changes at 3.03% of positions.",
                axes=fp8,
            ),
            candidate(
                "int4[group=32,skip-layers=0,29]",
                0.151,
                "FAIL",
                14400,
                "do not use, KLD 0.151. Try k16v8.",
                axes=half_broken,
            ),
            arm(
                "f16/f16",
                status=Status.IDENTICAL,
                axes=same,
                verdict=Verdict(band="EXCELLENT", sentence="safe, identical to the reference"),
            ),
            broken("q8_0", Status.FAILED, "out of memory: lower the context"),
            broken("fp8_e5m2", Status.NOT_ENGAGED, "the cache holds bf16"),
            broken("nvfp4", Status.NOT_SUPPORTED, "hf has: bf16, f16, f32, fp8_e4m3, int4"),
        ),
        "floor": {"kld": kld_axis(0, 0, n_items=2040), "trajectory": trajectory_axis(100, 0, n_items=3)},
    }
    return Report(**{**fields, **changes})
