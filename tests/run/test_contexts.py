"""KLD at two contexts, through whole runs: which one an arm's figures are of, and what is paired with what."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill
from fidelab.captures.writer import CaptureWriter
from fidelab.results.measurement import Measurement
from tests.run.harness import SMALL, Done, cli, write_inputs
from tests.run.test_attribution import part_means, relabelled
from tests.run.test_run_closed_forms import tilt

SHORT, LONG, WINDOWS, LONGER = 16, 64, 24, 6  # 24 · 16 / 64 windows of the longer context
CONTROL, MIXED = 0.52, [0.62, 0.68] * (WINDOWS // 2)


def answer_anew(run: Done, role: str, n_ctx: int, qs: Sequence[float]) -> None:
    """Give an arm another two-level distribution in every window of one context, and score the run again."""
    arms = json.loads((run.folder / "outcomes.json").read_text())["arms"]
    found = next(arm for arm in arms if arm["role"] == role)
    folder = run.folder.joinpath(found["captures"][f"kld.{n_ctx}"]).resolve()
    old = Capture(folder)
    request, manifest = old.request, old.manifest
    assert isinstance(request, Prefill)
    shutil.rmtree(folder)
    writer = CaptureWriter(folder, request, manifest["key"], manifest["asked"], old.vocabulary)
    for window, q in zip(range(len(request.windows)), qs, strict=True):
        row = np.log(np.repeat([q / 128, (1 - q) / 128], 128)).astype(np.float32)
        writer.add(window, {"logprobs": np.tile(row, (request.n_rows, 1))})
    writer.finish(manifest["estimator"], manifest["ran"], manifest["facts"])
    assert cli("report", "--rescore", run.folder, cwd=run.cwd).code == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """``tilt[q=0.6]`` is dear at the longer context, ``tilt[q=0.65]`` at the shorter; a row of one window fails."""
    kv = ("tilt[q=0.6]", "tilt[q=0.65]", f"nan-row[item={LONGER},row=2]", "exact")
    flags = ("--control", f"tilt[q={CONTROL}]", "--n-ctx", f"{LONG},{SHORT}", "--axes", "kld")
    done = _compare(tmp_path_factory.mktemp("contexts"), *kv, flags=flags)
    answer_anew(done, "candidate:tilt[q=0.6]", LONG, [0.8] * LONGER)
    answer_anew(done, "control", SHORT, [0.53] * WINDOWS)
    answer_anew(done, "candidate:tilt[q=0.65]", LONG, [0.6] * LONGER)
    answer_anew(done, "candidate:tilt[q=0.65]", SHORT, MIXED)
    return done


def _compare(cwd: Path, *kv: str, flags: Sequence[object] = ()) -> Done:
    write_inputs(cwd)
    words = [word for name in kv for word in ("--kv", name)]
    return cli("compare", "fake", *SMALL, "--keep-rows", "--windows", WINDOWS, *words, *flags, cwd=cwd)


def kld(run: Done, arm: str) -> Measurement:
    return run.axis(arm, "kld")


def test_every_context_is_a_part_of_the_axis_with_its_own_captures(run: Done) -> None:
    asked = {name: one["settings"]["n_ctx"] for name, one in run.report["comparability_key"].items()}
    assert asked == {f"kld.{SHORT}": SHORT, f"kld.{LONG}": LONG}


def test_the_verdict_rests_on_the_worst_context(run: Done) -> None:
    found = kld(run, "tilt[q=0.6]")
    assert found.facts["n_ctx"] == LONG
    assert found.value("mean") == pytest.approx(tilt(0.8), rel=1e-4)
    means = [found.value("mean", {"context": n_ctx}) for n_ctx in (SHORT, LONG)]
    assert means == pytest.approx([tilt(0.6), tilt(0.8)], rel=1e-4)
    assert run.arm("tilt[q=0.6]")["verdict"]["band"] == "FAIL"  # 0.0204 nats alone would PASS
    assert kld(run, "tilt[q=0.65]").facts["n_ctx"] == SHORT


def test_candidates_are_compared_where_the_worse_one_is_worst(run: Done) -> None:
    found = next(one for one in run.report["comparisons"] if one["worse"] == "tilt[q=0.6]")
    assert found["better"] == "tilt[q=0.65]"
    assert found["difference"] == pytest.approx(tilt(0.8) - tilt(0.6), abs=1e-6)


def test_the_page_counts_the_positions_of_the_worst_context(run: Done) -> None:
    page = (run.folder / "report.html").read_text()
    assert "positions.parquet belongs to another run" not in page
    assert "are left out" not in page


def test_the_floor_repeats_a_share_of_every_context(run: Done) -> None:
    floor = run.floor("kld")
    assert (floor.status, [one["windows"] for one in floor.facts["contexts"]]) == ("identical", [WINDOWS // 4, 2])


def test_the_resolved_settings_repeat_the_contexts(run: Done) -> None:
    again = cli("compare", "-f", run.folder / "config.resolved.yaml", "--dry-run", "--json", cwd=run.cwd)
    assert again.code == 0
    assert {job["captures_missing"] for job in json.loads(again.out)["jobs"]} == {0}


def test_attribution_compares_its_three_parts_at_the_candidates_context(run: Done) -> None:
    report = relabelled(run, {"exact": "reference", "exact:tilt[q=0.6]": "candidate:tilt[q=0.65]"})
    assert part_means(report) == pytest.approx((tilt(0.8), tilt(CONTROL), tilt(0.6)), rel=1e-4)
