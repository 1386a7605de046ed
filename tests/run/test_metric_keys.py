"""Code looks metrics up by key: what people read of them decides nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fidelab.results.measurement import Definition, Metric
from fidelab.run.pipeline import rescore
from tests.run.harness import SMALL, cli, write_inputs


def test_other_display_names_change_no_verdict_no_composite_and_no_recommendation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    sizes = ("--windows", 40, "--n-ctx", 16, "--axes", "kld,trajectory")
    flags = (*sizes, "--kv", "tilt[q=0.6]", "--kv", "fork", "--control", "tilt[q=0.51]")
    done = cli("compare", "fake", *SMALL, *flags, cwd=tmp_path)
    assert done.code == 0, done.err
    before, _ = rescore(done.folder)
    define = Definition.__call__

    def renamed(definition: Definition, *values: Any, **more: Any) -> Metric:
        return define(definition, *values, **more).model_copy(update={"name": f"other {definition.key}"})

    monkeypatch.setattr(Definition, "__call__", renamed)
    after, _ = rescore(done.folder)
    for one, other in zip(before.candidates, after.candidates, strict=True):
        assert [metric.name for metric in one.axes["kld"].metrics] != [m.name for m in other.axes["kld"].metrics]
        assert (one.verdict, one.composite, one.certificates) == (other.verdict, other.composite, other.certificates)
        assert one.verdict is not None
    assert before.recommendation is not None
    assert before.recommendation == after.recommendation
