"""Profiles: stages on the fake engine, skips, failures, resume, the table; every shipped profile as it is."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from fidelab.cli import app
from fidelab.cli.reproduce import check_stages
from fidelab.config.profiles import Needs, load_profile, names, resolve
from fidelab.studies.profiles import find_figure, judge, machine_record
from tests.processes import until
from tests.run.harness import Done, cli, refused, write_inputs

FAKE = {
    **{"model": "fake", "engine": "fake", "reference": "exact", "control": "none", "floor": 0.0, "twins": 0.0},
    **{"text": "text.txt", "candidates": [{"kv": "tilt[q=0.6]", "name": "tilted"}]},
    "axes": {"kld": {"windows": "{windows}", "n_ctx": 16}},
}
AT = "candidates[name=tilted].axes.kld.metrics[name=mean]"
HUGE = {"needs": {"memory": 1e9}}
PROFILE: dict[str, Any] = {
    "kind": "profile",
    "purpose": "a question",
    "source": {"title": "a paper", "url": "https://example.org/paper", "setup": "a machine"},
    "parameters": {"model": "fake", "windows": 40},
    "stages": [
        {"name": "lost", "command": ["report", "no-such-run", "--json"]},
        {"name": "quality", "experiment": FAKE},
        {"name": "huge", **HUGE, "command": ["setup", "formats"], "variants": {"tiny": HUGE}},
        {"name": "after", "needs": {"stages": ["huge"]}, "command": ["setup", "formats"]},
    ],
    "expected": [
        {"name": "mean KL", "stage": "quality", "value": 0.5, "unit": "nats", "at": AT},
        {"name": "huge figure", "stage": "huge", "value": 1, "at": "x"},
        {"name": "lost figure", "stage": "lost", "at": "x"},
    ],
    "differences": ["another machine"],
    "variants": {"tiny": {"about": "small", "parameters": {"windows": 8}, "differences": ["few windows"]}},
}


def profiles(cwd: Path, *flags: object, **changes: Any) -> Done:
    """``fidelab reproduce`` of a file that is trusted."""
    write_inputs(cwd)
    (cwd / "own.yaml").write_text(json.dumps({**PROFILE, **changes}))
    return cli("reproduce", "own.yaml", "--trust", "own.yaml", *flags, cwd=cwd)


def folder_of(cwd: Path) -> Path:
    return max((cwd / "runs" / "profiles").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def rows(record: dict[str, Any], part: str) -> list[dict[str, Any]]:
    return [row for row in record["rows"] if row["at"]["part"] == part]


def record_of(cwd: Path) -> dict[str, Any]:
    return dict(json.loads((folder_of(cwd) / "study.json").read_text()))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One stage that fails, one that runs, one that no machine can run, and one that needs that."""
    return profiles(tmp_path_factory.mktemp("profiles"), "--variant", "tiny")


@pytest.fixture(scope="module")
def record(done: Done) -> dict[str, Any]:
    return record_of(done.cwd)


def test_a_failed_stage_fails_the_profile_and_stops_no_other(done: Done, record: dict[str, Any]) -> None:
    assert done.code == 1
    statuses = {row["at"]["name"]: row["status"] for row in rows(record, "stage")}
    assert statuses == {"lost": "failed", "quality": "ok", "huge": "not_supported", "after": "not_supported"}
    assert "stage lost failed: exit code 2" in done.err


def test_skips_say_what_is_needed_and_what_was_found(done: Done, record: dict[str, Any]) -> None:
    skips = json.loads((folder_of(done.cwd) / "skips.json").read_text())
    assert skips == record["facts"]["skips"]
    huge, after = skips
    assert (huge["stage"], huge["need"]) == ("huge", "1e+09 GB of memory")
    assert re.fullmatch(r"[\d.]+ GB of memory", huge["found"])
    assert after == {"stage": "after", "need": "stage huge", "found": "skipped"}


def test_the_record_has_the_figure_of_a_stages_report_or_why_not(done: Done, record: dict[str, Any]) -> None:
    report = json.loads((folder_of(done.cwd) / "stages" / "quality" / "out.json").read_text())
    [mean] = [m for m in report["candidates"][0]["axes"]["kld"]["metrics"] if m["name"] == "mean"]
    expected, measured = rows(record, "figure")[0]["metrics"]
    assert (expected["value"], measured["value"], measured["ci"]) == (0.5, mean["value"], mean["ci"])
    assert mean["value"] > 0
    assert [row.get("reason") for row in rows(record, "figure")] == [None, "stage skipped", "stage failed"]


def test_the_table_shows_expected_against_measured_and_the_variants_parameters_reach_the_experiment(done: Done) -> None:
    row = next(line for line in done.out.splitlines() if "mean KL" in line)
    assert "0.5" in row.split()
    assert "another machine" in done.out
    assert "few windows" in done.out
    assert "https://example.org/paper" in done.out
    assert "huge" in done.out
    written = json.loads((folder_of(done.cwd) / "stages" / "quality" / "experiment.yaml").read_text())
    assert written["axes"]["kld"]["windows"] == 8


@pytest.mark.full
def test_resume_keeps_what_ended_well_and_runs_the_rest_again(tmp_path: Path) -> None:
    assert profiles(tmp_path, "--variant", "tiny").code == 1
    folder = folder_of(tmp_path)
    before = (folder / "stages" / "quality" / "stage.json").read_bytes()
    resolved = yaml.safe_load((folder / "config.resolved.yaml").read_text())
    resolved["resolved"]["stages"][0]["command"] = ["setup", "formats", "--json"]  # the fault is fixed
    (folder / "config.resolved.yaml").write_text(yaml.safe_dump(resolved))
    again = cli("reproduce", "--resume", folder, "--trust", folder, cwd=tmp_path)
    assert again.code == 0, again.err
    assert "quality (2 of 4): done before" in again.err
    assert (folder / "stages" / "quality" / "stage.json").read_bytes() == before
    assert [row["status"] for row in rows(record_of(tmp_path), "stage")] == ["ok"] * 2 + ["not_supported"] * 2


def test_a_profiles_folder_of_somebody_else_runs_nothing(done: Done, tmp_path: Path) -> None:
    shutil.copytree(done.cwd, tmp_path / "room")
    folder = folder_of(tmp_path / "room")
    resolved = yaml.safe_load((folder / "config.resolved.yaml").read_text())
    resolved["resolved"]["stages"][0]["command"] = ["setup", "fetch", "evil/model"]
    (folder / "config.resolved.yaml").write_text(yaml.safe_dump(resolved))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    again = cli("reproduce", "--resume", folder, cwd=tmp_path / "room")
    assert (again.code, again.out) == (2, "")
    [line] = again.err.splitlines()
    assert "may run any command of fidelab, and was not written by fidelab for you" in line
    assert f"--trust {folder / 'config.resolved.yaml'}" in line
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["../up", "a/b", "a b", ""])
def test_a_stage_is_a_folder_of_its_name(name: str, tmp_path: Path) -> None:
    assert "stages.0.name" in refused(
        profiles(tmp_path, stages=[{"name": name, "command": ["setup", "formats"]}], expected=[])
    )


def test_a_stopped_profile_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    slow = {**FAKE, "engine_args": {"delay": "0.1"}, "axes": {"kld": {"windows": 20, "n_ctx": 16}}}
    data = {**PROFILE, "stages": [{"name": "quality", "experiment": slow}], "expected": []}
    (tmp_path / "own.yaml").write_text(json.dumps(data))
    command = [sys.executable, "-m", "fidelab", "reproduce", "own.yaml", "--trust", "own.yaml"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert until(lambda: list(tmp_path.glob("runs/profiles/*/stages/quality/runs/2*")), 60)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    folder = folder_of(tmp_path)
    assert process.returncode == 130
    assert f"Resume with: fidelab reproduce --resume {folder}" in said
    assert not _alive(folder)
    again = cli("reproduce", "--resume", folder, cwd=tmp_path)
    assert again.code == 0, again.err


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_the_stage_of_a_killed_profile_ends_as_well(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    slow = {**FAKE, "engine_args": {"delay": "60"}, "axes": {"kld": {"windows": 20, "n_ctx": 16}}}
    data = {**PROFILE, "stages": [{"name": "quality", "experiment": slow}], "expected": []}
    (tmp_path / "own.yaml").write_text(json.dumps(data))
    command = [sys.executable, "-m", "fidelab", "reproduce", "own.yaml", "--trust", "own.yaml"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    assert until(lambda: list(tmp_path.glob("runs/profiles/*/stages/quality/runs/2*")), 60)
    process.kill()
    process.wait()
    assert until(lambda: not _alive(folder_of(tmp_path)), 40)


def _alive(folder: Path) -> list[str]:
    """Commands of processes that name this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if str(folder) in line and path.parent.name != str(os.getpid()):
            found.append(line)
    return found


def test_only_the_stages_that_are_named_run(tmp_path: Path) -> None:
    done = profiles(tmp_path, "--stage", "quality", "--json")
    assert done.code == 0, done.err
    assert [row["at"]["name"] for row in rows(json.loads(done.out), "stage")] == ["quality"]


def test_a_profile_of_which_nothing_ran_is_undecided(tmp_path: Path) -> None:
    done = profiles(tmp_path, "--stage", "huge")
    assert done.code == 3
    assert "no stage could be run here" in done.err


def test_a_dry_run_writes_nothing_and_tells_what_is_needed_the_seconds_and_the_disk_space(tmp_path: Path) -> None:
    done = profiles(tmp_path, "--dry-run", "--json")
    assert done.code == 0
    skips = {row["at"]["name"]: row["facts"]["skips"] for row in json.loads(done.out)["rows"]}
    assert [skip["need"] for skip in skips["huge"]] == ["1e+09 GB of memory"]
    assert skips["quality"] == []
    assert not (tmp_path / "runs").exists()
    study = json.loads(profiles(tmp_path, "--dry-run", "--json", "--stage", "quality").out)
    [row] = study["rows"]
    costs = {metric["key"]: metric["value"] for metric in row["metrics"]}
    assert costs["seconds"] > 0
    assert costs["disk"] > 0
    assert study["sentences"] == [
        f"in all about {costs['seconds']:,.0f} s and {costs['disk'] / 1e6:,.1f} MB of saved outputs"
    ]


@pytest.mark.parametrize(
    ("needs", "need"),
    [
        ({"disk": 1e9}, "1e+09 GB of free disk"),
        ({"packages": ["no_such_package"]}, "package no_such_package"),
        ({"engines": ["no-such-engine"]}, "engine no-such-engine"),
        ({"data": ["no-such-file.jsonl"]}, "data no-such-file.jsonl"),
        ({"never": "a second machine"}, "a second machine"),
    ],
)
def test_every_need_is_judged(tmp_path: Path, needs: dict[str, Any], need: str) -> None:
    [stage] = resolve("p", load_profile("demo"), "tiny").stages
    [skip] = judge(stage.model_copy(update={"needs": Needs.model_validate(needs)}), machine_record(tmp_path), {})
    assert (skip.need, bool(skip.found)) == (need, True)


@pytest.mark.parametrize(
    ("kind", "sizes", "needs", "need"),
    [
        ("cuda", [80], {"device": "cuda", "gpus": 2}, "2 GPUs"),
        ("cuda", [24], {"device": "cuda", "gpu_memory": 40}, "40 GB of GPU memory"),
        ("rocm", [192], {"device": "cuda"}, "device cuda"),
        ("rocm", [192], {"device": "gpu", "gpu_memory": 150}, None),
        ("cuda", [80, 80], {"device": "cuda", "gpus": 2, "gpu_memory": 40}, None),
    ],
)
def test_gpus_are_judged_by_kind_number_and_memory(
    tmp_path: Path, kind: str, sizes: list[int], needs: dict[str, Any], need: str | None
) -> None:
    gpus = [{"name": "a card", "gb": size} for size in sizes]
    machine = {**machine_record(tmp_path), "device": kind, "gpus": gpus}
    [stage] = resolve("p", load_profile("demo"), "tiny").stages
    skips = judge(stage.model_copy(update={"needs": Needs.model_validate(needs)}), machine, {})
    assert [skip.need for skip in skips] == ([] if need is None else [need])


def test_a_figure_is_found_by_keys_places_and_conditions() -> None:
    data = {"arms": [{"name": "a", "m": [{"name": "x", "cell": {"n": 1}, "value": 3, "ci": [2, 4]}, {"name": "y"}]}]}
    assert find_figure(data, "arms[name=a].m[name=x,cell.n=1]") == (3.0, (2.0, 4.0), None)
    assert find_figure(data, "arms.0.m.0.cell.n") == (1.0, None, None)
    assert find_figure(data, "arms[name=b].m")[2] == "no item with name=b"
    assert find_figure(data, "arms[name=a].z")[2] == "no 'z' in what the stage printed"
    assert find_figure({"axis": {"reason": "no data", "metrics": []}}, "axis.metrics[name=x]")[2] == "no data"


def test_of_several_items_that_fit_the_only_one_with_the_rest_of_the_path_is_taken() -> None:
    data = {"rows": [{"n": 1, "m": [{"key": "x", "value": 3}]}, {"n": 1, "m": [{"key": "y", "value": 4}]}]}
    assert find_figure(data, "rows[n=1].m[key=y]") == (4.0, None, None)
    data["rows"].append({"n": 1, "m": [{"key": "y", "value": 5}]})
    assert find_figure(data, "rows[n=1].m[key=y]")[2] == "several items with n=1"


def test_a_figure_is_shown_in_the_sources_unit_and_judged_by_its_tolerance(tmp_path: Path) -> None:
    expected = [
        {"name": "like", "stage": "s", "at": "a", "value": 2.0, "divisor": 1000, "tolerance": 0.05},
        {"name": "unlike", "stage": "s", "at": "a", "value": 2000.0, "tolerance": 0, "remark": "another unit"},
        {"name": "free", "stage": "s", "at": "b", "value": 5, "remark": "not judged"},
    ]
    figures = {"a": {"function": "product", "of": {"first": 2, "second": 1010}}}
    figures["b"] = {"function": "ratio", "of": {"figure": 1, "base": 2}}
    done = profiles(tmp_path, "--json", stages=[{"name": "s", "compute": figures}], expected=expected)
    assert done.code == 0, done.err
    record = json.loads(done.out)
    found = {row["at"]["name"]: row for row in rows(record, "figure")}
    measured = {name: {m["key"]: m["value"] for m in row["metrics"]} for name, row in found.items()}
    assert measured["like"] == pytest.approx({"expected": 2.0, "measured": 2.02, "difference": 0.02})
    assert {name: row["facts"].get("agrees") for name, row in found.items()} == {
        **{"like": "yes", "unlike": "no"},
        "free": None,
    }
    assert record["sentences"][:2] == [
        "1 of 2 published figures agree, 1 does not:",
        "- unlike (2,000, here 2,020): another unit",
    ]


def test_skips_and_figures_of_a_profile_within_a_profile_are_in_the_outer_record(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    figures = {"f": {"function": "ratio", "of": {"figure": 3, "base": 2}}}
    inner = {
        **PROFILE,
        "stages": [{"name": "sum", "compute": figures}, {"name": "huge", **HUGE, "command": ["setup", "formats"]}],
        "expected": [{"name": "inner figure", "stage": "sum", "at": "f", "value": 1.5}],
    }
    (tmp_path / "inner.yaml").write_text(json.dumps(inner))
    command = ["reproduce", "run", "inner.yaml", "--trust", "inner.yaml", "--output-dir", "{folder}", "--json"]
    done = profiles(tmp_path, "--json", stages=[{"name": "whole", "command": command}], expected=[])
    assert done.code == 0, done.err
    record = json.loads(done.out)
    [figure] = rows(record, "figure")
    assert (figure["at"]["name"], figure["at"]["stage"]) == ("inner figure", "whole/sum")
    assert [(skip["stage"], skip["need"]) for skip in record["facts"]["skips"]] == [
        ("whole/huge", "1e+09 GB of memory")
    ]
    assert json.loads((folder_of(tmp_path) / "skips.json").read_text()) == record["facts"]["skips"]


STAGE = {"name": "s", "command": ["setup", "formats"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": [{**STAGE, "needs": {"memry": 3}}]}, "unknown key 'stages.0.needs.memry'; did you mean 'memory'?"),
        ({"stages": [{**STAGE, "needs": {"memory": "much"}}]}, "stages.0.needs.memory"),
        ({"stages": [{**STAGE, "needs": {"device": "tpu"}}]}, "stages.0.needs.device"),
        ({"stages": [{**STAGE, "needs": {"stages": ["t"]}}]}, "stage 's': unknown earlier stage 't'; known: none"),
        ({"stages": [STAGE, STAGE]}, "two stages have the name 's'"),
        ({"stages": [{"name": "s"}]}, "a stage has either 'experiment' or 'command'"),
        (
            {"stages": [{**STAGE, "command": ["dctor"]}], "expected": []},
            "stage s: fidelab dctor: no command 'fidelab dctor'; did you mean: fidelab doctor",
        ),
        ({"stages": [{**STAGE, "command": ["setup", "formats", "--jsn"]}], "expected": []}, "No such option: --jsn"),
        ({"stages": [{**STAGE, "command": ["{mdel}"]}], "expected": []}, "{mdel} is not a parameter; available: model"),
        (
            {"stages": [{"name": "s", "experiment": {**FAKE, "axs": {}}}], "expected": []},
            "unknown key 'axs'; did you mean 'axes'?",
        ),
        ({"kind": "cross-engine"}, "is not a profile: 'kind: profile' is missing"),
    ],
)
def test_a_profile_that_cannot_be_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert message in refused(profiles(tmp_path, **{"expected": [], **changes}))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["decod"], "unknown profile 'decod'; did you mean 'decode'?"),
        (["decode", "--variant", "tny"], "unknown variant of profile decode 'tny'; did you mean 'tiny'?"),
        (["decode", "--stage", "gate"], "unknown stage of profile decode 'gate'; did you mean 'gates'?"),
        (["decode", "--set", "modl=x"], "unknown parameter of profile decode 'modl'; did you mean 'model'?"),
        (["decode", "--set", "model"], "--set 'model': write a.b=value"),
        (["run"], "name a profile"),
        (["--resume", "nowhere"], "nowhere is not a run of a profile"),
        (["decode", "--resume", "nowhere"], "--resume takes the settings of the profile"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest_one(tmp_path: Path, words: list[str], message: str) -> None:
    assert message in refused(cli("reproduce", *words, cwd=tmp_path))
    assert not (tmp_path / "runs").exists()


def test_profiles_are_listed_run_says_how_one_is_run_and_a_file_that_is_not_trusted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(json.dumps(PROFILE))
    assert "if you trust it, add --trust own.yaml" in refused(cli("reproduce", "own.yaml", cwd=tmp_path))
    assert "decode is a profile: fidelab reproduce decode" in cli("compare", "-f", "decode", cwd=tmp_path).err
    listed = json.loads(cli("reproduce", "list", "--json", cwd=tmp_path).out)["profiles"]
    assert [row["name"] for row in listed] == names()
    assert {"demo", "decode", "cross-engine", "kld-guide", "hardware-report"} <= set(names())


@pytest.mark.parametrize("name", names())
def test_a_shipped_profile_and_its_tiny_variant_resolve(tmp_path: Path, name: str) -> None:
    for variant in (None, "tiny"):
        check_stages(resolve(name, load_profile(name), variant), get_command(app))
    shown = cli("reproduce", "show", name, cwd=tmp_path)
    assert yaml.safe_load(shown.out)["purpose"] == load_profile(name).purpose


@pytest.mark.parametrize("name", names())
def test_a_shipped_profile_pins_its_models_or_says_that_it_cannot(name: str) -> None:
    profile = load_profile(name)
    values = [str(value) for key, value in profile.parameters.items() if key != "candidate"]
    hub = [value for value in values if "/" in value and not value.startswith("./")]
    for value in hub:
        model, _, revision = value.partition("@")
        assert model in profile.pins.models
        assert profile.pins.models[model] == (revision or None)


@pytest.mark.parametrize("name", names())
def test_the_tiny_variant_needs_no_gpu_for_at_least_one_stage(name: str) -> None:
    resolved = resolve(name, load_profile(name), "tiny")
    if any(stage.compute is None for stage in resolved.stages):  # else no model runs
        assert resolved.parameters["model"] == "smollm2-135m"
    assert any(stage.needs.device in (None, "cpu") and not stage.needs.gpu_memory for stage in resolved.stages)
    assert resolved.differences
