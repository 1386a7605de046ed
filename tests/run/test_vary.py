"""A grid (``--vary``) from the command line to the report, on the fake engine and on a real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fidelab.inputs.texts import load_text
from fidelab.models import Model
from fidelab.run.api import compare
from tests.run.harness import SMALL, Done, cli, run_fake, write_inputs

SIZES = ("--windows", 8, "--n-ctx", 16, "--control", "none", "--axes", "kld")


def vary(cwd: Path, *levels: str, flags: tuple[object, ...] = ()) -> Done:
    write_inputs(cwd)
    words = [word for level in levels for word in ("--vary", level)]
    done = cli("compare", "fake", *SMALL, *SIZES, *words, *flags, cwd=cwd)
    assert done.code == 0, done.err
    return done


def names(done: Done) -> list[str]:
    return [arm["name"] for arm in done.report["candidates"]]


def test_every_combination_is_a_candidate_after_the_others_and_a_refused_one_says_so(tmp_path: Path) -> None:
    done = vary(tmp_path, "bend=0,fork:0.5", "kv=exact,fork,refused", flags=("--kv", "tilt"))
    assert names(done) == [
        "tilt",
        *(f"bend={b}, kv={kv}" for b in ("0", "fork:0.5") for kv in ("exact", "fork", "refused")),
    ]
    assert done.arm("bend=0, kv=exact")["status"] == "identical"
    assert done.arm("bend=0, kv=refused")["status"] == "not_supported"
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert any(line.startswith("bend=fork:0.5, kv=fork") and "0.0309" in line for line in lines)


def test_a_dry_run_counts_the_cells_and_runs_none(tmp_path: Path) -> None:
    done = vary(tmp_path, "margin=1,2", "kv=exact,tilt,refused", flags=("--dry-run", "--json"))
    found = json.loads(done.out)
    assert sum(job["role"].startswith("candidate:margin=") for job in found["jobs"]) == 4
    assert len(found["not_supported"]) == 2
    assert not (tmp_path / "runs").exists()


def test_the_grid_can_be_written_in_an_experiment_file(tmp_path: Path) -> None:
    done = run_fake(tmp_path, {"kld": {"windows": 8, "n_ctx": 16}}, [], vary={"kv": ["exact", "tilt"]})
    assert done.code == 0, done.err
    assert names(done) == ["kv=exact", "kv=tilt"]


@pytest.mark.long
@pytest.mark.model
def test_on_a_real_model_the_format_costs_far_more_than_the_attention(smollm2: Model, tmp_path: Path) -> None:
    """Two exact attentions differ by rounding in bfloat16 (a replay is allowed 1e-3 nats)."""
    (tmp_path / "text.txt").write_text(load_text("default").content[:12_000])
    report = compare(
        "smollm2-135m",
        candidates=[],
        vary={"attention": ["sdpa", "eager"], "kv": ["bf16", "int4"]},
        axes={"kld": {"windows": 40, "n_ctx": 32}},
        text=str(tmp_path / "text.txt"),
        floor=0.0,
        threads=1,
        output_dir=str(tmp_path / "runs"),
    )
    same, int4, eager, eager_int4 = (arm.axes["kld"].value("mean") or 0.0 for arm in report.candidates)
    assert same == 0.0
    assert 0 < eager < 2e-3
    assert min(int4, eager_int4) > 0.05
