"""Depths on the embedded model: figures against Transformers alone, and errors that begin where they are planted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fidelab.models import Model
from fidelab.results.measurement import Measurement
from fidelab.run.api import compare
from tests.present import present

pytestmark = [pytest.mark.model, pytest.mark.full, pytest.mark.processes]

DEPTHS = (64, 128, 256)
KLD = {"protocol": "depth", "n_ctx": list(DEPTHS), "windows": 10, "looks": [], "rows": 8}


@pytest.fixture(scope="module")
def folder(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over ten documents of the text ``agents``, of 256 tokens each."""
    folder = tmp_path_factory.mktemp("depths")
    compare(
        "smollm2-135m",
        reference="f32",
        candidates=["bf16", "int4[sinks=128]"],
        control="none",
        axes={"kld": KLD},
        text="agents",
        dtype="float32",
        floor=0,
        output_dir=str(folder),
    )
    return folder


def measured(folder: Path, arm: str) -> Measurement:
    report = json.loads(next(folder.glob("2*/report.json")).read_text())
    found = next(one for one in report["candidates"] if one["name"] == arm)
    return Measurement.model_validate(found["axes"]["kld"])


def test_means_of_depths_are_those_of_transformers_with_rounded_keys_and_values(folder: Path, smollm2: Model) -> None:
    import torch
    import transformers

    class Rounded(transformers.DynamicCache):  # type: ignore[misc]
        def update(self, k: Any, v: Any, *more: Any, **named: Any) -> Any:
            return super().update(k.bfloat16().float(), v.bfloat16().float(), *more, **named)

    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32).eval()
    found: dict[int, list[float]] = {n: [] for n in DEPTHS}
    for probe in sorted((folder / "captures").glob("*f32*/kld*-r0/probe.json.gz")):
        request = json.loads(gzip.decompress(probe.read_bytes()))
        for window, own in zip(request["windows"], request["positions"], strict=True):
            ids = torch.tensor([window])
            with torch.no_grad():
                p = model(input_ids=ids).logits[0, own].double().log_softmax(-1)
                q = model(input_ids=ids, past_key_values=Rounded()).logits[0, own].double().log_softmax(-1)
            for position, value in zip(own, (p.exp() * (p - q)).sum(-1).tolist(), strict=True):
                found[next(n for n in DEPTHS if n // 2 <= position <= n - 2)].append(value)
    kld = measured(folder, "bf16")
    for n in DEPTHS:
        assert len(found[n]) == 80
        assert kld.value("mean", {"context": n}) == pytest.approx(np.mean(found[n]), rel=2e-3)


def test_an_error_that_begins_at_a_depth_is_seen_from_that_depth_on(folder: Path) -> None:
    """The first 128 tokens of the cache are exact, the rest have four bits."""
    kld = measured(folder, "int4[sinks=128]")
    means = [present(kld.value("mean", {"context": n})) for n in DEPTHS]
    assert means[:2] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert means[2] > 1e-3
    assert present(present(kld.metric("slope", {})).interval)[0] > 0
