"""A REFRACT report made by hand from its schema: small numbers whose scores are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMA = "refract.report.v0.3.1"
TEN = list(range(100, 110))
DIVERGED = [*TEN[:5], 7, 7, 7]  # eight tokens, another one from index 5 on: 62.5 by REFRACT, 50.0 by ours

DRIFTS = ((0.2, 0.3), (0.1, 0.3), (0.5, 0.2), (0.0, 1.0))
PLAD_SCORE = (60.6531 + 36.7879 + 100.0 + 0.6738) / 4  # excess drifts of 0.1, 0.2, below 0, and 1


def prompt(ref: list[int] | int, cand: list[int] | int, prefix: int | None = None, **more: Any) -> dict[str, Any]:
    """One prompt of axis A: by token ids, or (numbers) by its lengths alone."""
    ids = {"ref_token_ids": ref, "cand_token_ids": cand} if isinstance(ref, list) else {}
    lengths = {} if isinstance(ref, list) else {"ref_length": ref, "cand_length": cand}
    prefixes = {} if prefix is None else {"prefix_agreement_length": prefix}
    return {"id": "p-1", "category": "factual", "prompt": "Say it.", **ids, **lengths, **prefixes, **more}


def cell(base: float, cand: float, length: int = 4096, position: float = 0.5) -> dict[str, Any]:
    """One cell of axis C."""
    return {"length": length, "position": position, "n_trials": 1, "base_acc": base, "cand_acc": cand}


def drift(ref: float, cand: float, number: int = 0, kind: str = "typo") -> dict[str, Any]:
    """One perturbed prompt of axis D."""
    return {"prompt_id": f"p-{number}", "perturbation": kind, "ref_drift": ref, "cand_drift": cand}


def refract_report(**changes: Any) -> dict[str, Any]:
    """A report whose stated scores are those of REFRACT's definitions; keywords replace top-level keys."""
    scores = {"gtm": 62.5, "kld": 49.6585304, "rniah": 200 / 3, "plad": PLAD_SCORE}
    composite = 4 / sum(1 / score for score in scores.values())
    return {
        "schema": SCHEMA,
        "framework_version": "0.3.2",
        "environment": {"backend": "llamacpp"},
        "timestamp": "2026-01-02T03:04:05",
        "model": "C:\\models\\tiny.gguf",
        "reference": "ctk=f16,ctv=f16",
        "candidate": "ctk=q8_0,ctv=q4_0",
        "composite": composite,
        "band": "FAIL",
        "diagnosis": [],
        "composite_detail": {f"{name}_score": score for name, score in scores.items()} | {"floor_score": None},
        "axes": {
            "gtm": {"score": 62.5, "n_tokens_each": 10, "per_prompt": [prompt(TEN, DIVERGED)], "notes": []},
            "kld": {"score": scores["kld"], "mean_kld": 0.7, "chunks": 32, "ctx": 512, "same_topp_pct": 80.0},
            "rniah": {"score": scores["rniah"], "cells": [cell(1, 1), cell(1, 0, 8192), cell(0, 0, 16384)]},
            "plad": {
                "score": PLAD_SCORE,
                "per_prompt": [drift(ref, cand, n) for n, (ref, cand) in enumerate(DRIFTS)],
                "per_perturbation_score": {"typo": PLAD_SCORE, "paraphrase": float("nan")},
            },
        },
        **changes,
    }


def with_axis(name: str, **changes: Any) -> dict[str, Any]:
    """The report with some keys of one axis replaced; None drops a key."""
    report = refract_report()
    axis = report["axes"][name] | changes
    report["axes"][name] = {key: value for key, value in axis.items() if value is not None}
    return report


def write(folder: Path, report: Any, name: str = "report.json") -> Path:
    """The file as REFRACT writes it: NaN stands in it bare."""
    path = folder / name
    path.write_text(json.dumps(report, indent=2))
    return path
