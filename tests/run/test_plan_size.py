"""``fidelab plan``: a finished run as the pilot of the next one."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill
from fidelab.captures.writer import CaptureWriter
from fidelab.metrics.equivalence import Loss, certify
from fidelab.metrics.intervals import RatioItems, ratio_interval
from fidelab.run.sample_size import _claim
from tests.captures.sample import tree
from tests.run.harness import Done, cli, compare
from tests.run.test_run_closed_forms import tilt

WINDOWS, CONTROL = 40, 0.52
QS = [0.55 + 0.3 * (window * 7 % WINDOWS) / WINDOWS for window in range(WINDOWS)]  # of each window
BLOCK = 3  # windows: ∛40, rounded


def kld_capture(folder: Path, arm: str) -> Path:
    arms = json.loads((folder / "outcomes.json").read_text())["arms"]
    found = next(record for record in arms if record["role"] == f"candidate:{arm}")
    return folder.joinpath(found["captures"]["kld"]).resolve()


def answer_anew(run: Done, arm: str, qs: Sequence[float]) -> None:
    """Give an arm's KLD capture another two-level distribution in every window, and score the run again."""
    folder = kld_capture(run.folder, arm)
    old = Capture(folder)
    request, manifest = old.request, old.manifest
    assert isinstance(request, Prefill)
    n, rows = manifest["vocabulary"]["size"] // 2, len(request.units[0])
    shutil.rmtree(folder)
    writer = CaptureWriter(folder, request, manifest["key"], manifest["asked"], old.vocabulary)
    for window, q in enumerate(qs):
        row = np.log(np.repeat([q / n, (1 - q) / n], n)).astype(np.float32)
        writer.add(window, {"logprobs": np.tile(row, (rows, 1))})
    writer.finish(manifest["estimator"], manifest["ran"], manifest["facts"])
    before = (run.folder / "report.json").read_bytes()
    cli("report", "--rescore", run.folder, cwd=run.cwd)
    assert (run.folder / "report.json").read_bytes() != before


@pytest.fixture(scope="module")
def pilot(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """40 windows in 14 blocks, 8 prompts; a candidate whose windows differ, one that is constant, one that is exact."""
    kv = ("tilt[q=0.7]", "tilt[q=0.6]", "exact", "fork[at=3,every=2]", "silent")
    run = compare(
        tmp_path_factory.mktemp("pilot"), *kv, flags=["--control", f"tilt[q={CONTROL}]", "--keep-rows"], windows=WINDOWS
    )
    answer_anew(run, "tilt[q=0.7]", QS)
    return run


def plan(run: Done, *words: object) -> dict[str, Any]:
    done = cli("plan", run.folder, *words, "--json", cwd=run.cwd)
    assert (done.code, done.err) == (0, "")
    return dict(json.loads(done.out))


def line(found: dict[str, Any], arm: str, quantity: str = "mean") -> dict[str, Any]:
    return next(dict(entry) for entry in found["lines"] if (entry["arm"], entry["quantity"]) == (arm, quantity))


def blocks(values: Sequence[float]) -> tuple[float, float, int]:
    """Mean, standard deviation of a cluster, number of clusters; a value per window, windows in blocks."""
    each = np.array(values)
    cut = [each[i : i + BLOCK] for i in range(0, len(each), BLOCK)]
    shares = [(part - each.mean()).sum() / len(each) for part in cut]
    n = len(cut)
    return float(each.mean()), n * math.sqrt(sum(share**2 for share in shares) / (n - 1)), n


def search(sd: float, precision: float) -> int:
    return next(n for n in range(2, 10**6) if stats.t.ppf(0.975, n - 1) * sd / math.sqrt(n) <= precision)


def reach(sd: float, n: int) -> float:
    """Of a mean KL: its upper end takes a smaller tail, and below 6 clusters t is 1.4 times as wide."""
    low, high = (stats.t.ppf(level, n - 1) for level in (0.975, 1 - 0.025 * n / (n + 12)))
    return float((1.4 * low if n < 6 else (low + high) / 2) * sd / math.sqrt(n))


def search_kl(sd: float, precision: float) -> int:
    return next(n for n in range(2, 10**6) if reach(sd, n) <= precision)


def harm(run: Done, tmp_path: Path) -> Path:
    """A copy of a run and its captures to spoil; its folder."""
    shutil.copytree(run.cwd / "runs", tmp_path / "runs")
    return tmp_path / "runs" / run.folder.name


# ------------------------------------------------------------------------------------------------ figures


def test_clusters_and_windows_needed_follow_from_the_spread_over_blocks(pilot: Done) -> None:
    mean, sd, n = blocks([tilt(q) for q in QS])
    clusters = search_kl(sd, 0.003)
    found = line(plan(pilot, "--precision", 0.003), "tilt[q=0.7]")
    assert found["status"] == "needed"
    assert found["estimate"] == pytest.approx(mean, abs=1e-6)
    assert found["half_width"] == pytest.approx(reach(sd, n), rel=1e-4)
    assert (found["clusters"], found["clusters_needed"]) == (n, clusters)
    assert found["items_needed"] == math.ceil(clusters * WINDOWS / n)


def test_the_upper_figure_takes_the_upper_bound_of_the_spread(pilot: Done) -> None:
    _, sd, n = blocks([tilt(q) for q in QS])
    worst = sd * math.sqrt((n - 1) / stats.chi2.ppf(0.05, n - 1))
    found = line(plan(pilot, "--precision", 0.003), "tilt[q=0.7]")
    assert found["clusters_upper"] == search_kl(worst, 0.003)
    assert found["items_upper"] == math.ceil(found["clusters_upper"] * WINDOWS / n)


def test_the_excess_over_the_control_is_planned_by_paired_differences(pilot: Done) -> None:
    mean, sd, _ = blocks([tilt(q) - tilt(CONTROL) for q in QS])
    found = line(plan(pilot, "--precision", 0.003), "tilt[q=0.7]", "excess")
    assert (found["estimate"], found["clusters_needed"]) == (pytest.approx(mean, abs=1e-6), search(sd, 0.003))


def test_a_percentage_is_of_the_candidates_own_mean(pilot: Done) -> None:
    found = plan(pilot, "--precision", "2%")
    for arm, mean in (("tilt[q=0.7]", np.mean([tilt(q) for q in QS])), ("tilt[q=0.6]", tilt(0.6))):
        for quantity in ("mean", "excess"):
            assert line(found, arm, quantity)["precision"] == pytest.approx(0.02 * mean, abs=1e-7)


def test_a_finer_precision_needs_more_windows(pilot: Done) -> None:
    counts = [plan(pilot, "--precision", p)["advice"]["items"] for p in (0.005, 0.003, 0.001)]
    assert counts == sorted(set(counts))


def test_the_advice_is_the_most_that_any_line_needs(pilot: Done) -> None:
    found = plan(pilot, "--precision", 0.003)
    assert found["advice"]["items"] == line(found, "tilt[q=0.7]")["items_needed"]
    assert found["advice"]["upper"] == line(found, "tilt[q=0.7]")["items_upper"]


def test_a_constant_divergence_is_precise_enough_already(pilot: Done) -> None:
    found = line(plan(pilot, "--precision", 0.003), "tilt[q=0.6]")
    assert found["status"] == "enough"
    assert found["half_width"] == pytest.approx(0, abs=1e-9)


def test_identical_output_is_exact_and_asks_for_nothing(pilot: Done) -> None:
    for words in (("--precision", 0.003), ("--axis", "trajectory", "--precision", 1)):
        found = line(plan(pilot, *words), "exact")
        assert (found["status"], found["items_needed"]) == ("exact", None)


def test_an_arm_without_figures_says_why_and_the_others_go_on(pilot: Done) -> None:
    found = line(plan(pilot, "--precision", 0.003), "silent")
    assert (found["status"], found["reason"]) == ("failed", "asked for K = silent, the engine stored exact")


def test_prompts_are_planned_in_points_of_the_score(pilot: Done) -> None:
    shares = np.array([3, 8] * 4) / 8  # all answers have 8 tokens
    clusters = search(100 * shares.std(ddof=1), 5)
    found = plan(pilot, "--axis", "trajectory", "--precision", 5)
    fork = line(found, "fork[at=3,every=2]")
    assert (found["unit"], found["items"], fork["clusters"]) == ("points", "prompts", 8)
    assert fork["estimate"] == pytest.approx(100 * shares.mean())
    assert (fork["clusters_needed"], fork["items_needed"]) == (clusters, clusters)


def test_prompts_that_all_agree_are_not_known_exactly_for_that(tmp_path: Path) -> None:
    run = compare(tmp_path, "tilt[q=0.6]", flags=["--no-floor", "--keep-rows"], windows=4)
    found = line(plan(run, "--axis", "trajectory", "--precision", 5), "tilt[q=0.6]")
    reach = stats.binomtest(0, 8).proportion_ci(0.95).high
    assert found["status"] == "needed"
    assert found["half_width"] == pytest.approx(100 * reach)
    assert (found["clusters_needed"], found["clusters_upper"]) == (72, 72)


@pytest.mark.full
def test_as_many_clusters_as_planned_give_the_precision_asked(pilot: Done) -> None:
    """Clusters drawn again from the pilot's own: their intervals are as wide as asked."""
    n = line(plan(pilot, "--precision", 0.01), "tilt[q=0.7]")["clusters_needed"]
    clusters = np.arange(WINDOWS) // BLOCK
    own = RatioItems.of([tilt(q) for q in QS], 1.0, clusters).by_cluster()
    rng, widths = np.random.default_rng(0), []
    for _ in range(300):
        drawn = rng.integers(0, len(own.num), n)
        items = RatioItems(own.num[drawn], own.den[drawn], np.arange(n))
        interval = ratio_interval(items, bounds=(0.0, math.inf))
        assert interval is not None
        widths.append((interval[1] - interval[0]) / 2)
    assert np.median(widths) == pytest.approx(0.01, rel=0.1)


# ------------------------------------------------------------------------------------------------- advice


def test_the_command_is_the_runs_own_with_the_new_number(pilot: Done) -> None:
    advice = plan(pilot, "--precision", 0.005)["advice"]
    words = shlex.split(advice["command"])
    assert words[-2:] == ["--windows", str(advice["items"])]
    old = shlex.split(pilot.report["command"])
    at = old.index("--windows")
    assert words[:-2] == old[:at] + old[at + 2 :]


def test_the_recommended_command_can_be_given(pilot: Done) -> None:
    advice = plan(pilot, "--precision", 0.033)["advice"]
    assert WINDOWS < advice["items"] <= advice["supply"]["holds"]
    done = cli(*shlex.split(advice["command"])[1:], "--dry-run", "--json", cwd=pilot.cwd)
    [reference, *_] = json.loads(done.out)["jobs"]
    assert reference["captures_missing"] == 1  # the trajectory is there already
    assert reference["tokens"] == 16 * advice["items"]


def test_where_the_packages_text_does_not_suffice_the_command_takes_another(tmp_path: Path) -> None:
    run = compare(tmp_path, "tilt[q=0.7]", flags=["--no-floor", "--keep-rows", "--text", "default", "--n-ctx", 512])
    answer_anew(run, "tilt[q=0.7]", QS)
    advice = plan(run, "--precision", 1e-6)["advice"]
    assert advice["command"].endswith(f"--windows {advice['items']} --text wikitext-2")
    out = " ".join(cli("plan", run.folder, "--precision", 1e-6, cwd=tmp_path).out.split())
    assert "The text default holds " in out
    assert "pass --text wikitext-2 or a longer file" in out


def test_a_run_from_a_file_is_repeated_with_the_setting(pilot: Done, tmp_path: Path) -> None:
    folder = harm(pilot, tmp_path)
    report = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps({**report, "command": "fidelab compare -f mine.yaml"}))
    done = cli("plan", folder, "--precision", 0.005, "--json", cwd=tmp_path)
    advice = json.loads(done.out)["advice"]
    assert advice["command"] == f"fidelab compare -f mine.yaml --set axes.kld.windows={advice['items']}"


def test_a_run_without_a_command_gets_the_flag_alone(pilot: Done, tmp_path: Path) -> None:
    folder = harm(pilot, tmp_path)
    report = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps({**report, "command": "fidelab.compare('it's', …)"}))
    done = cli("plan", folder, "--precision", 0.005, cwd=tmp_path)
    assert done.out.splitlines()[-1].startswith("  fidelab compare … --windows ")


def test_a_text_that_is_too_short_is_said_to_be(pilot: Done) -> None:
    holds = len((pilot.cwd / "text.txt").read_bytes()) // 16
    assert plan(pilot, "--precision", 0.001)["advice"]["supply"]["holds"] == holds
    out = " ".join(cli("plan", pilot.folder, "--precision", 0.001, cwd=pilot.cwd).out.split())
    assert f"holds {holds} windows: pass a longer --text" in out


def test_prompts_that_are_too_few_are_said_to_be(pilot: Done) -> None:
    words = ("--axis", "trajectory", "--precision", 5)
    assert plan(pilot, *words)["advice"]["supply"]["holds"] == 8
    out = " ".join(cli("plan", pilot.folder, *words, cwd=pilot.cwd).out.split())
    assert "holds 8 prompts: pass --prompts FILE" in out


@pytest.mark.parametrize("content", [None, "another text\n" * 200], ids=["gone", "changed"])
def test_a_text_that_is_not_the_pilots_any_more_is_not_counted(content: str | None, tmp_path: Path) -> None:
    run = compare(tmp_path, "tilt[q=0.7]", flags=["--no-floor", "--keep-rows"])
    answer_anew(run, "tilt[q=0.7]", QS)
    (tmp_path / "text.txt").unlink()
    if content is not None:
        (tmp_path / "text.txt").write_text(content)
    assert plan(run, "--precision", 0.001)["advice"]["supply"] is None


def test_time_and_disk_grow_in_proportion_and_loads_do_not(pilot: Done) -> None:
    advice = plan(pilot, "--precision", 0.003)["advice"]
    factor = advice["items"] / WINDOWS
    events = [json.loads(text) for text in (pilot.folder / "events.jsonl").read_text().splitlines()]
    loads = sum(event["seconds"] for event in events if event["event"] == "opened")
    captured = sum(e["seconds"] for e in events if e["event"] == "captured" and e["axis"] == "kld")
    assert advice["seconds"] == pytest.approx(loads + factor * captured)
    folders = (pilot.cwd / "runs" / "captures").glob("*/kld-*")
    assert advice["disk_bytes"] == pytest.approx(factor * sum(Capture(path).bytes for path in folders), abs=1)


def test_without_telemetry_there_is_no_estimate_of_time(pilot: Done, tmp_path: Path) -> None:
    folder = harm(pilot, tmp_path)
    (folder / "events.jsonl").write_text('{"event": "opened"\n')
    done = cli("plan", folder, "--precision", 0.003, "--json", cwd=tmp_path)
    assert json.loads(done.out)["advice"]["seconds"] is None


def test_a_run_that_is_precise_enough_gets_no_advice(pilot: Done) -> None:
    assert plan(pilot, "--precision", 1)["advice"] is None
    out = cli("plan", pilot.folder, "--precision", 1, cwd=pilot.cwd).out
    assert out.splitlines()[-1] == "The run is precise enough: 40 windows do."


# ------------------------------------------------------------------------------------------------- output


def test_the_output_fits_into_a_hundred_columns_but_for_the_command(pilot: Done) -> None:
    lines = cli("plan", pilot.folder, "--precision", 1e-6, cwd=pilot.cwd).out.splitlines()
    assert all(len(text) <= 100 for text in lines[:-1])
    assert lines[-1].startswith("  fidelab compare fake")
    assert any("(up to " in text for text in lines)


def test_a_terminal_without_unicode_gets_plain_letters(pilot: Done) -> None:
    command = [sys.executable, "-m", "fidelab", "plan", str(pilot.folder), "--precision", "0.003"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=pilot.cwd, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "+/- asked" in done.stdout


def test_nothing_is_written(pilot: Done) -> None:
    before = tree(pilot.cwd)
    plan(pilot, "--precision", 0.003)
    assert tree(pilot.cwd) == before


# ---------------------------------------------------------------------------------------------- bad input


def refused(*words: object, cwd: Path) -> str:
    done = cli("plan", *words, cwd=cwd)
    assert (done.code, done.out) == (2, "")
    [said] = done.err.splitlines()
    assert said.startswith("fidelab: ")
    return said


@pytest.mark.parametrize("value", ["0", "-1", "x", "", "%", "nan", "inf", "1e-300", "0%", "-5%", "5%%", "1e999", "0,1"])
def test_a_precision_that_cannot_be_is_refused(value: str, pilot: Done) -> None:
    said = refused(pilot.folder, f"--precision={value}", cwd=pilot.cwd)
    assert f"--precision {value!r}: write a number above 0" in said


def test_an_unknown_axis_names_those_of_the_run(pilot: Done) -> None:
    said = refused(pilot.folder, "--precision", 1, "--axis", "kdl", cwd=pilot.cwd)
    assert "unknown axis of this run 'kdl'; did you mean 'kld'? There are: kld, trajectory." in said


def test_a_folder_that_is_no_run_is_said_to_be_none(room: Path) -> None:
    assert "is not a run folder" in refused(room, "--precision", 1, cwd=room)
    assert "does not exist" in refused("nowhere", "--precision", 1, cwd=room)


def test_an_unfinished_run_says_how_to_finish_it(pilot: Done, tmp_path: Path) -> None:
    folder = harm(pilot, tmp_path)
    (folder / "report.json").unlink()
    assert f"fidelab compare --resume {folder}" in refused(folder, "--precision", 1, cwd=tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"arms": [{}]}', '{"arms": 3}'])
def test_damaged_outcomes_say_how_to_mend_them(content: str, pilot: Done, tmp_path: Path) -> None:
    folder = harm(pilot, tmp_path)
    (folder / "outcomes.json").write_text(content)
    said = refused(folder, "--precision", 1, cwd=tmp_path)
    assert "outcomes.json" in said
    assert f"--resume {folder}" in said


def test_a_capture_that_is_gone_is_named(pilot: Done, tmp_path: Path) -> None:
    folder = harm(pilot, tmp_path)
    victim = kld_capture(folder, "tilt[q=0.6]")
    shutil.rmtree(victim)
    assert victim.name in refused(folder, "--precision", 1, cwd=tmp_path)


def test_a_pilot_of_one_cluster_says_what_to_do(tmp_path: Path) -> None:
    run = compare(tmp_path, "tilt", flags=["--no-floor", "--keep-rows"], windows=1, limit=1)
    for words in ((), ("--axis", "trajectory")):
        said = refused(run.folder, "--precision", 1, *words, cwd=tmp_path)
        assert "single cluster" in said
        assert "more windows or prompts" in said


def test_a_percentage_of_a_score_of_0_asks_for_a_number(tmp_path: Path) -> None:
    run = compare(tmp_path, "fork[at=0,every=1]", flags=["--no-floor", "--keep-rows"], windows=4)
    words = ("--axis", "trajectory", "--precision")
    assert "a percentage of an estimate of 0 is 0" in refused(run.folder, *words, "5%", cwd=tmp_path)
    assert line(plan(run, *words, 5), "fork[at=0,every=1]")["clusters_needed"] == 72


def test_a_run_whose_reference_failed_says_why(crashed_reference: Done) -> None:
    said = refused(crashed_reference.folder, "--precision", 1, cwd=crashed_reference.cwd)
    assert "reference has no answer on axis kld: the worker" in said


def test_a_pilot_of_few_clusters_is_never_called_precise(tmp_path: Path) -> None:
    run = compare(tmp_path, "tilt", flags=["--no-floor", "--keep-rows"], windows=4, limit=2)
    found = line(plan(run, "--precision", 100), "tilt")
    assert (found["status"], found["clusters_needed"]) == ("needed", 6)
    assert found["clusters"] < 6
    assert "nothing from fewer than 6 is called precise" in found["reason"]


# ------------------------------------------------------------------------------------------ certificates


def certificates(pilot: Done, *words: str) -> dict[tuple[str, str], dict[str, Any]]:
    done = json.loads(cli("plan", pilot.folder, "--json", *words, cwd=pilot.cwd).out)
    return {(line["arm"], line["quantity"]): line for line in done["lines"]}


def test_a_certificate_is_planned_from_the_clusters_that_the_report_names(pilot: Done) -> None:
    """As in the report of a run that was given the margin, and windows in proportion."""
    found = certificates(pilot, "--max-kld", "0.13", "--margin", "2%")
    cli("report", "--rescore", pilot.folder, "--max-kld", "0.13", "--margin", "2%", cwd=pilot.cwd)
    report = json.loads((pilot.folder / "report.json").read_text())
    seen = 0
    for arm in report["candidates"]:
        for claim in arm["certificates"].get("kld", {}).get("claims", ()):
            line = found[arm["name"], claim["key"]]
            assert (line["estimate"], line["precision"]) == (claim["estimate"], claim["margin"])
            if line["status"] == "needed":
                assert line["clusters_needed"] == max(claim["clusters_needed"], claim["clusters"] + 1)
                assert line["items_needed"] == math.ceil(line["clusters_needed"] * WINDOWS / claim["clusters"])
                assert line["clusters_upper"] >= line["clusters_needed"]
                seen += 1
            else:
                assert line["status"] == ("enough" if claim["state"] == "holds" else "failed")
    assert seen


def test_where_no_cluster_differs_the_bound_shrinks_with_their_number() -> None:
    loss = Loss.of_accuracy(np.ones(40), np.ones(40), np.arange(40), 0.005)
    line = _claim("exact", certify([loss]).claims[0], loss, 40)
    assert line.half_width is not None
    assert line.clusters_needed == math.ceil(40 * line.half_width / 0.005)
    assert "the figure holds if none does" in (line.reason or "")


def test_a_loss_beyond_the_margin_is_not_planned(pilot: Done) -> None:
    line = certificates(pilot, "--max-kld", "1e-6")["tilt[q=0.7]", "mean_kl"]
    assert line["status"] == "failed"
    assert "mean KL at or beyond the margin is shown: no sample size confirms it" in line["reason"]


def test_a_candidate_with_a_claim_that_is_exceeded_sets_no_size(pilot: Done) -> None:
    found = certificates(pilot, "--max-kld", "1e-6", "--margin", "0.5%")
    lines = [line for (arm, _), line in found.items() if arm == "tilt[q=0.7]"]
    assert [line["items_needed"] for line in lines] == [None]


def test_a_smaller_margin_needs_more_windows(pilot: Done) -> None:
    key = "tilt[q=0.7]", "mean_kl"
    mean = certificates(pilot, "--max-kld", "1")[key]["estimate"]
    needed = [certificates(pilot, "--max-kld", str(mean * (1 + room)))[key]["items_needed"] for room in (0.05, 0.1)]
    assert needed[0] > needed[1] > WINDOWS


def test_a_table_of_certificates_says_what_it_plans(pilot: Done) -> None:
    said = cli("plan", pilot.folder, "--max-kld", "0.05", cwd=pilot.cwd).out
    assert "losses ruled out with probability 0.8" in said
    assert "mean KL" in said
    assert "nats" in said


@pytest.mark.parametrize("words", [(), ("--precision", "0.1", "--margin", "1%")])
def test_either_a_precision_or_margins_are_given(words: tuple[str, ...], pilot: Done) -> None:
    done = cli("plan", pilot.folder, *words, cwd=pilot.cwd)
    assert done.code == 2
    assert "give either --precision P, or margins of a non-inferiority test: --margin 1%, --max-kld 0.01" in done.err


def test_a_margin_that_cannot_be_is_refused(pilot: Done) -> None:
    done = cli("plan", pilot.folder, "--margin", "200%", cwd=pilot.cwd)
    assert (done.code, "margin" in done.err) == (2, True)
