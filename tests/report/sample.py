"""A full report: reference, control, floor, and candidates of every outcome; the figures are made up."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fidelab.core import Estimator, KVSpec, Status
from fidelab.results.axis_record import Axes, Bins, Excess, KldAxis, OtherAxis, TrajectoryAxis
from fidelab.results.plots import Divergence
from fidelab.results.record import ArmRecord, Composite, KVFormats, Ran, Report, Verdict
from fidelab.results.store import RunFolder
from tests.report.sample_axes import DIVERGENCES, hostile_axis, plad_axis, rniah_axis
from tests.report.sample_axes import HOSTILE as HOSTILE

OUTCOMES = ("EXCELLENT", "PASS", "FAIL", "identical", "failed", "not engaged", "not supported")
"""Words that every rendering of the sample contains."""

MODEL = "SmolLM2-135M-Instruct"


def kld_axis(mean: float, half: float, control: float | None = None, **changes: Any) -> KldAxis:
    """An axis whose other figures follow from the mean."""
    excess, changed = None, mean / (1 + mean)
    if control is not None:
        excess = Excess(mean=mean - control, ci=(mean - control - half, mean - control + half))
    fields: dict[str, Any] = {
        "status": Status.OK,
        "score": 100 * (1 - mean / (1 + mean)),
        "ci": (90.0, 99.9),
        "mean": mean,
        "mean_ci": (max(0.0, mean - half), mean + half),
        "stderr": half / 2,
        "median": mean / 3,
        "p90": mean * 2,
        "p95": mean * 4,
        "p99": mean * 9,
        "p999": mean * 30,
        "max": mean * 100,
        "top1": 1 - changed,
        "top1_ci": (1 - 1.25 * changed, 1 - 0.8 * changed) if changed else (0.999, 1.0),
        "real_flips": changed / 4,
        "real_flips_ci": (changed / 5, changed / 3) if changed else (0.0, 0.001),
        "tokens_to_flip": 1 / changed if changed else None,
        "tokens_to_flip_ci": (0.8 / changed, 1.25 / changed) if changed else (1000.0, None),
        "rms_dp": mean / (1 + mean),
        "n_positions": 8160,
        "n_failed": 0,
        "estimator": Estimator.HIDDEN,
        "excess_over_control": excess,
        "by_position": Bins(
            edges=tuple(range(255, 512, 32)),
            mean=tuple(None if bin == 5 else mean * (0.8 + bin / 20) for bin in range(8)),
            count=tuple(0 if bin == 5 else 1020 for bin in range(8)),
        ),
        "by_confidence": Bins(edges=(0, 0.5, 1), mean=(mean, mean), count=(4000, 4160)),
        "n_units": 31,
        "n_ctx": 512,
        "n_documents": 31,
    }
    return KldAxis(**{**fields, **changes})


def trajectory_axis(score: float, half: float, **changes: Any) -> TrajectoryAxis:
    """An axis whose other figures follow from the score."""
    fields: dict[str, Any] = {
        "status": Status.OK,
        "score": score,
        "ci": (score - half, min(100.0, score + half)),
        "exact_match_rate": score / 200,
        "median_first_divergence": 17.5,
        "near_tie_share": 0.4,
        "positional_agreement": 0.62,
        "n_items": 10,
        "n_failed": 0,
        "n_predict": 64,
        "template": "chat",
        "excess_over_control": Excess(mean=score - 90, ci=(score - 95, score - 85)),
        "survival": (1.0, 0.9, 0.7),
        "score_refract": score,
    }
    return TrajectoryAxis(**{**fields, **changes})


def hostile_report() -> Report:
    """Hostile text in every field that a report shows."""
    axes = {
        "kld": kld_axis(0.02, 0.01),
        "trajectory": trajectory_axis(
            70,
            10,
            template=HOSTILE,
            divergences=(
                Divergence(item=0, at=1, prompt=HOSTILE, shared=HOSTILE, reference=HOSTILE, candidate=HOSTILE),
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
                update={
                    "axes": Axes.model_validate(axes),
                    "verdict": Verdict(band="PASS", sentence=HOSTILE, because=(HOSTILE,)),
                }
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
            "kld": kld_axis(
                mean,
                mean / 5,
                control=0.00003,
                by_position=Bins(
                    edges=tuple(range(256, 513, 8)),
                    mean=tuple(mean * (1 + 0.3 * ((7 * bin + number) % 5)) for bin in range(32)),
                    count=(32,) * 32,
                ),
            ),
            "trajectory": trajectory_axis(
                95 - 4 * number, 4, survival=tuple((1 - number / n / 40) ** step for step in range(65))
            ),
            "rniah": rniah_axis(number / n),
        }
        band = "EXCELLENT" if mean < 0.008 else "PASS" if mean < 0.04 else "DEGRADED" if mean < 0.08 else "FAIL"
        name = f"format_{number:02}"
        arms.append(
            candidate(name, mean, band, 46080 - 1500 * number, f"costs {mean:.3g} nats", axes=Axes.model_validate(axes))
        )
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
        kld = found.axes.kld
        if kld is None or kld.mean is None:
            continue
        n = kld.n_positions or 0
        kl = kld.mean * rng.lognormal(-1.125, 1.5, n)
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
        "kv": KVFormats.from_spec(spec),
        "status": Status.OK,
        "ran": Ran.model_validate(
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
        "ran": Ran(k_dtype=spec.k.name, v_dtype=spec.v.name, attention="sdpa", cache_bytes_per_token=size),
        "axes": Axes(kld=kld_axis(mean, mean / 5, control=0.00003), trajectory=trajectory_axis(70.3, 12.1)),
        "benches": {"memory": {"status": "ok", "reserved_bytes": 123456}},
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
    half_broken = Axes.model_validate(
        {
            "kld": kld_axis(0.151, 0.02, control=0.00003, n_failed=12),
            "trajectory": TrajectoryAxis(status=Status.FAILED, reason="time-out after 60 s"),
            "rniah": OtherAxis(status=Status.NOT_MEASURABLE, reason="no informative cell", details={"cells": 9}),
        }
    )
    k16v8 = {
        "kld": kld_axis(0.000712, 0.000142, control=0.00003),
        "trajectory": trajectory_axis(70.3, 12.1, divergences=DIVERGENCES),
        "rniah": rniah_axis(0.0),
        "plad": plad_axis(),
    }
    fp8 = {
        "kld": kld_axis(0.0312, 0.00624, control=0.00003),
        "trajectory": trajectory_axis(36.3, 12.1, survival=(1.0, 0.5, 0.3), divergences=DIVERGENCES[1:]),
        "rniah": rniah_axis(0.33),
    }
    same = Axes(kld=kld_axis(0, 0, status=Status.IDENTICAL), trajectory=trajectory_axis(100, 0))
    fields: dict[str, Any] = {
        "run_id": "2026-05-04-smollm2-a1b2",
        "created": datetime(2026, 5, 4, 12, 30, 15, tzinfo=UTC),
        "fidelab_version": "0.1.0",
        "command": "fidelab run runs/2026-05-04-smollm2-a1b2/config.resolved.yaml",
        "environment": {"device": {"name": "cpu", "threads": 2}, "python": "3.11.9"},
        "settings": {"axes": {"kld": {"protocol": "half", "n_ctx": 512, "windows": 32}}, "seed": 0},
        "comparability_key": {"inputs": "9f2c", "protocol": "half", "n_predict": 64},
        "reference": arm("f32", ran=Ran(k_dtype="f32", v_dtype="f32", cache_bytes_per_token=92160)),
        "control": arm("bf16", axes=Axes(kld=kld_axis(0.00003, 0.000004), trajectory=trajectory_axis(90, 6))),
        "candidates": (
            candidate(
                "k16v8",
                0.000712,
                "EXCELLENT",
                34560,
                "safe: costs 0.000712 nats; 1 top token in 1,405 changes",
                axes=Axes.model_validate(k16v8),
            ),
            candidate(
                "fp8_e4m3",
                0.0312,
                "PASS",
                23040,
                "safe: costs 0.0312 nats; 1 top token in 33 changes",
                axes=Axes.model_validate(fp8),
            ),
            candidate(
                "int4[group=32,skip-layers=0,29]",
                0.151,
                "FAIL",
                14400,
                "do not use: costs 0.151 nats; try k16v8",
                axes=half_broken,
            ),
            arm(
                "f16/f16",
                status=Status.IDENTICAL,
                axes=same,
                verdict=Verdict(band="EXCELLENT", sentence="safe: identical to the reference"),
            ),
            broken("q8_0", Status.FAILED, "out of memory: lower the context"),
            broken("fp8_e5m2", Status.NOT_ENGAGED, "the cache holds bf16"),
            broken("nvfp4", Status.NOT_SUPPORTED, "hf has: bf16, f16, f32, fp8_e4m3, int4"),
        ),
        "floor": Axes(
            kld=kld_axis(0, 0, n_positions=2040), trajectory=trajectory_axis(100, 0, exact_match_rate=1.0, n_items=3)
        ),
    }
    return Report(**{**fields, **changes})
