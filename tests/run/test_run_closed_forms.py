"""Whole runs on the fake engine: every figure is what the closed form says."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fidelab.results.plots import Curve, TextPair, Texts
from tests.run.harness import SMALL, Done, axis_of, cli, compare, write_inputs


def two_level(p1: float, p2: float, q1: float, q2: float) -> float:
    """KL of two distributions over two groups of equal tokens, each pair of masses normalised first."""
    p, q = p1 + p2, q1 + q2
    return p1 / p * math.log(p1 / p * q / q1) + p2 / p * math.log(p2 / p * q / q2)


def tilt(q: float) -> float:
    return two_level(0.5, 0.5, q, 1 - q)


def geometric(a: float, b: float) -> float:
    x = np.arange(256)
    z_a, z_b = np.exp(-a * x).sum(), np.exp(-b * x).sum()
    return math.log(z_b / z_a) + (b - a) * float((x * np.exp(-a * x)).sum() / z_a)


def test_what_another_tool_would_make_of_the_captures_stands_beside_the_truth(tmp_path: Path) -> None:
    flags = ("--set", "axes.kld.compat=refract", "--set", "axes.kld.k=256")
    done = compare(tmp_path, "tilt[q=0.6]", flags=flags, windows=8)
    kld = done.axis("tilt[q=0.6]", "kld")
    assert kld.value("mean") == pytest.approx(tilt(0.6), abs=1e-6)
    assert kld.value("compat") == pytest.approx(tilt(0.6), abs=1e-6)  # all 256 tokens are listed
    few = compare(tmp_path, "tilt[q=0.6]", flags=(*flags[:3], "axes.kld.k=20"), windows=8)
    assert (few.axis("tilt[q=0.6]", "kld").value("compat") or 0) > 10 * tilt(0.6)
    assert few.axis("tilt[q=0.6]", "kld").value("mean") == kld.value("mean")


@pytest.mark.parametrize("q", [0.6, 0.9])
def test_mean_kl_of_the_two_level_family_and_its_excess_beyond_the_controls(q: float, grand: Done) -> None:
    kld = grand.axis(f"tilt[q={q}]", "kld")
    assert kld.value("mean") == pytest.approx(tilt(q), abs=1e-6)
    assert kld.value("score") == pytest.approx(100 * math.exp(-tilt(q)), abs=1e-4)
    found = kld.metric("over_control")
    assert found is not None
    assert (found.unit, found.better) == ("nats", "lower")
    assert found.value == pytest.approx(tilt(q) - tilt(0.52), abs=1e-6)
    assert found.interval == pytest.approx([tilt(q) - tilt(0.52)] * 2, abs=1e-6)


def test_every_quantile_of_a_constant_divergence_is_its_mean(grand: Done) -> None:
    kld = grand.axis("tilt[q=0.6]", "kld")
    for name in ("median", "p90", "p95", "p99", "p999", "max"):
        assert kld.value(name) == pytest.approx(tilt(0.6), abs=1e-6)
    assert (kld.n_items, kld.n_failed) == (40 * 7, 0)
    assert kld.value("stderr") == pytest.approx(0.0, abs=1e-9)


def test_a_smaller_vocabulary_is_cut_and_renormalised_on_both_sides(grand: Done) -> None:
    tail = 112 / 128  # of the upper half, what 240 of 256 ids leave
    expected = two_level(0.5, 0.5 * tail, 0.6, 0.4 * tail)
    kld = grand.axis("small-vocab[cut=16,q=0.6]", "kld")
    assert kld.value("mean") == pytest.approx(expected, abs=1e-6)
    assert kld.n_failed == 0
    assert abs(expected - tilt(0.6)) > 1e-4


def test_a_tokens_impossible_in_both_arms_costs_nothing(tmp_path: Path) -> None:
    run = compare(
        tmp_path, "tilt[q=0.6]", "masked", flags=["--engine-arg", "mask=on", "--no-floor"], windows=8, limit=1
    )
    tail = 127 / 128
    kld = run.axis("tilt[q=0.6]", "kld")
    assert kld.value("mean") == pytest.approx(two_level(0.5, 0.5 * tail, 0.6, 0.4 * tail), abs=1e-6)
    assert kld.n_failed == 0
    assert run.arm("masked")["status"] == "identical"


def test_mean_kl_of_the_geometric_family(tmp_path: Path) -> None:
    flags = ["--engine-arg", "family=geometric", "--no-floor"]
    run = compare(tmp_path, "decay[b=0.6]", "decay[b=1.5]", flags=flags, windows=4, limit=1)
    for b in (0.6, 1.5):
        assert run.axis(f"decay[b={b}]", "kld").value("mean") == pytest.approx(geometric(0.5, b), abs=1e-6)


def test_hidden_states_and_their_head_give_the_same_divergence(tmp_path: Path) -> None:
    flags = ["--engine-arg", "estimator=hidden", "--no-floor"]
    kld = compare(tmp_path, "tilt[q=0.6]", flags=flags, windows=4, limit=1).axis("tilt[q=0.6]", "kld")
    assert kld.value("mean") == pytest.approx(tilt(0.6), abs=1e-6)
    assert kld.facts["estimator"] == "hidden"


def test_a_nan_row_is_left_out_of_the_mean_and_a_token_impossible_in_the_candidate_alone_fails_the_row(
    grand: Done,
) -> None:
    kld = grand.axis("masked", "kld")
    assert (kld.status, kld.n_failed, kld.value("mean")) == ("failed", 280, None)
    kld = grand.axis("nan-row[item=3,row=2]", "kld")
    assert (kld.n_items, kld.n_failed, kld.value("mean")) == (280, 1, 0.0)
    assert grand.arm("nan-row[item=3,row=2]")["verdict"]["band"] == "DEGRADED"


def test_more_than_one_percent_of_nan_rows_fails(tmp_path: Path) -> None:
    run = compare(tmp_path, "nan-row", flags=["--no-floor"], windows=8, limit=1)
    assert run.axis("nan-row", "kld").n_failed == 1  # of 56
    assert run.arm("nan-row")["verdict"]["band"] == "FAIL"


def test_verdicts_follow_the_mean(grand: Done) -> None:
    bands = {name: grand.arm(name)["verdict"]["band"] for name in ("control", "tilt[q=0.6]", "tilt[q=0.9]", "masked")}
    assert bands == {"control": "EXCELLENT", "tilt[q=0.6]": "PASS", "tilt[q=0.9]": "FAIL", "masked": "FAIL"}


def test_the_control_is_measured_like_a_candidate_and_has_no_excess_nor_has_a_run_without(
    grand: Done, plain: Done
) -> None:
    kld = grand.axis("control", "kld")
    assert kld.value("mean") == pytest.approx(tilt(0.52), abs=1e-6)
    assert kld.metric("over_control") is None
    assert plain.report["control"] is None
    assert plain.axis("tilt[q=0.6]", "kld").metric("over_control") is None


def test_the_floor_is_a_quarter_of_the_items_and_zero(grand: Done) -> None:
    kld, trajectory = grand.floor("kld"), grand.floor("trajectory")
    assert (kld.n_items, kld.value("mean")) == (10 * 7, 0.0)
    assert (trajectory.n_items, trajectory.value("score")) == (2, 100.0)


def test_a_candidate_that_is_the_reference_is_identical_in_two_real_captures(grand: Done) -> None:
    arm = grand.arm("exact")
    assert arm["status"] == "identical"
    kld, trajectory = axis_of(arm, "kld"), axis_of(arm, "trajectory")
    assert (kld.value("mean"), kld.value("score"), trajectory.value("score")) == (0.0, 100.0, 100.0)
    [folder] = (grand.cwd / "runs" / "captures").glob("fake-fake-exact-*")
    assert sorted(path.name[-2:] for path in folder.glob("kld-*")) == ["r0", "r1", "r2"]
    assert len({path.name[:-3] for path in folder.glob("kld-*")}) == 3


def forks(run: Done, arm: str) -> tuple[TextPair, ...]:
    [texts] = [plot for plot in run.axis(arm, "trajectory").plots if isinstance(plot, Texts)]
    return texts.pairs


def test_trajectory_of_a_fork(grand: Done) -> None:
    found = grand.axis("fork[at=3,every=2]", "trajectory")
    assert found.value("score") == pytest.approx(100 * (4 * 3 + 4 * 8) / 64)
    assert (found.value("exact_match"), found.value("median_first_divergence")) == (0.5, 3.0)
    assert found.value("near_ties") == 0.0  # far below the best token
    [survival] = [plot for plot in found.plots if isinstance(plot, Curve)]
    assert survival.y == (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5)


def test_a_fork_is_shown_as_text_with_the_margin_there(grand: Done) -> None:
    shown = forks(grand, "fork[at=3,every=2]")
    assert [fork.label for fork in shown] == [f"prompt {n}, token 3: margin 1.39 nats" for n in (0, 2, 4, 6)]  # ln 4
    for number, fork in zip((0, 2, 4, 6), shown, strict=True):
        start = sum(f"prompt {number}".encode())
        ids = [1 + (start + step) % 250 for step in range(8)]
        other = [ids[3] + 1, *(252 + step % 3 for step in range(4))]
        assert (fork.tag, fork.prompt) == ("real", f"prompt {number}")
        assert fork.shared == bytes(ids[:3]).decode(errors="replace")
        assert fork.reference == bytes(ids[3:]).decode(errors="replace")
        assert fork.candidate == bytes(other).decode(errors="replace")


def test_a_candidate_that_stops_early_is_not_perfect_and_has_no_text_there(grand: Done) -> None:
    found = grand.axis("short[at=3,every=4]", "trajectory")
    assert found.value("score") == pytest.approx(100 * (2 * 3 + 6 * 8) / 64)
    assert found.value("score_refract") == 100.0
    assert (found.value("exact_match"), found.value("median_first_divergence")) == (0.75, 3.0)
    shown = forks(grand, "short[at=3,every=4]")
    assert {(fork.candidate, fork.tag, fork.label[-13:]) for fork in shown} == {("", "ended", "one side ends")}


@pytest.mark.parametrize(("margin", "share"), [(0.05, 1.0), (0.2, 0.0)])
def test_the_margin_decides_between_near_ties_and_real_forks(margin: float, share: float, tmp_path: Path) -> None:
    flags = ["--engine-arg", f"margin={margin}", "--no-floor", "--axes", "trajectory"]
    words = ("--n-predict", 8, "--limit", 4)
    write_inputs(tmp_path)
    run = cli("compare", "fake", *SMALL, *words, "--kv", "fork[at=2,every=2]", *flags, cwd=tmp_path)
    assert run.axis("fork[at=2,every=2]", "trajectory").value("near_ties") == share


def test_an_arm_that_answers_no_prompt_is_never_called_safe(grand: Done) -> None:
    arm = grand.arm("missing")
    found = axis_of(arm, "trajectory")
    assert (found.status, found.n_failed, found.value("score")) == ("failed", 8, None)
    assert (arm["verdict"]["band"], arm["composite"]) == ("FAIL", None)
    assert arm["verdict"]["sentence"].startswith("do not use, trajectory: no item was usable")


def test_a_format_that_was_ignored_is_not_engaged_and_has_no_score(grand: Done) -> None:
    arm = grand.arm("silent")
    assert (arm["status"], arm["reason"]) == ("not_engaged", "asked for K = silent, the engine stored exact")
    assert axis_of(arm, "kld").value("score") is None


def test_a_format_that_the_engine_refuses_is_not_supported_and_never_runs(grand: Done) -> None:
    arm = grand.arm("refused")
    assert (arm["status"], arm["reason"]) == (
        "not_supported",
        "the fake engine refuses this format, as it was asked to",
    )
    assert list((grand.cwd / "runs" / "captures").glob("*refused*")) == []


def test_a_reference_that_did_not_engage_is_said_to(tmp_path: Path) -> None:
    run = compare(tmp_path, "tilt", flags=["--reference", "silent", "--no-floor"], windows=2, limit=1)
    assert run.arm("reference")["status"] == "not_engaged"
    assert run.code == 1
