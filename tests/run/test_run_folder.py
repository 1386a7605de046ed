"""What a run leaves: files that agree with each other, that can be read again, and that repeat the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pyarrow import parquet

import fidelab
from fidelab.captures.reader import is_complete
from fidelab.core.errors import FidelabError, UsageError
from fidelab.results.record import Report
from tests.run.conftest import CANDIDATES
from tests.run.harness import Done, axis_of, cli, compare, refused, same_report, write_inputs


def rows(run: Done) -> dict[str, list[dict[str, Any]]]:
    read: Any = parquet.read_table
    found: dict[str, list[dict[str, Any]]] = {}
    for row in read(run.folder / "positions.parquet").to_pylist():
        found.setdefault(row["arm"], []).append(row)
    return found


def test_json_output_is_the_report_which_holds_to_its_schema_and_keeps_the_order_of_candidates(grand: Done) -> None:
    assert json.loads(grand.out) == grand.report
    jsonschema.validate(grand.report, Report.json_schema())
    assert tuple(arm["name"] for arm in grand.report["candidates"]) == CANDIDATES


def test_every_reason_is_one_line(grand: Done) -> None:
    for arm in grand.report["candidates"]:
        for reason in (arm["reason"], arm["verdict"]["sentence"], *arm["verdict"]["because"]):
            assert reason is None or (reason.strip() and "\n" not in reason)


def test_the_command_in_the_report_is_the_one_that_was_given(grand: Done) -> None:
    assert grand.report["command"].startswith("fidelab compare fake --engine fake --reference exact")
    assert "'tilt[q=0.6]'" in grand.report["command"]


def test_rescoring_gives_the_report_byte_for_byte(grand: Done) -> None:
    files = ("report.json", "report.html")
    before = {name: (grand.folder / name).read_bytes() for name in files}
    table = rows(grand)
    found = cli("report", "--rescore", grand.folder, "--json", cwd=grand.cwd)
    assert {name: (grand.folder / name).read_bytes() for name in files} == before
    assert json.loads(found.out) == json.loads(before["report.json"])
    assert rows(grand) == table
    assert found.code == grand.code


def test_a_run_and_its_captures_can_move_together_and_be_rescored(plain: Done, tmp_path: Path) -> None:
    shutil.copytree(plain.cwd / "runs", tmp_path / "runs", symlinks=True)
    moved = tmp_path / "runs" / plain.folder.name
    (moved / "report.json").unlink()
    assert cli("report", "--rescore", moved, cwd=tmp_path).code == 0
    assert (moved / "report.json").read_bytes() == (plain.folder / "report.json").read_bytes()


def test_a_run_moved_alone_says_where_its_outputs_are_looked_for_and_what_to_type(plain: Done, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / plain.folder.name
    shutil.copytree(plain.folder, moved)
    store, made = moved.parent / "captures", plain.cwd / "runs" / "captures"
    assert f"the saved outputs of {moved} are looked for in {store}; ln -s {made} {store}, or " in refused(
        cli("report", "--rescore", moved, cwd=tmp_path)
    )
    store.symlink_to(made)
    assert cli("report", "--rescore", moved, cwd=tmp_path).code == 0


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_rescoring_refuses_a_harmed_capture_by_name_and_keeps_the_report(
    harm: str, plain: Done, tmp_path: Path
) -> None:
    shutil.copytree(plain.cwd / "runs", tmp_path / "runs", symlinks=True)
    moved = tmp_path / "runs" / plain.folder.name
    [victim] = (tmp_path / "runs" / "captures").glob("fake-fake-tilt*/kld-*/part-00000.safetensors")
    victim.write_bytes(b"cut") if harm == "cut" else shutil.rmtree(victim.parent)
    before = (moved / "report.json").read_bytes()
    assert victim.parent.name in refused(cli("report", "--rescore", moved, cwd=tmp_path))
    assert (moved / "report.json").read_bytes() == before


def test_saved_outputs_that_are_damaged_are_removed(plain: Done, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(plain.cwd / "runs" / "captures", store)
    [victim] = store.glob("fake-fake-tilt*/kld-*")
    (victim / "part-00000.safetensors").write_bytes(b"")
    for flags, word, there in (([], "would remove", True), (["--remove"], "removed", False)):
        found = cli("setup", "clean", "outputs", "--captures-dir", store, *flags, cwd=tmp_path)
        assert f"{word} {victim}" in found.out
        assert victim.exists() == there


def test_positions_hold_a_row_per_scored_position_and_arm(grand: Done) -> None:
    table = rows(grand)
    scored = [arm for arm in (grand.arm("control"), *grand.report["candidates"]) if axis_of(arm, "kld").n_items]
    assert {arm: len(found) for arm, found in table.items()} == {
        arm["name"]: axis_of(arm, "kld").n_items for arm in scored
    }
    first = [(row["window"], row["position"]) for row in table["tilt[q=0.6]"]]
    assert first == [(window, position) for window in range(40) for position in range(8, 15)]


@pytest.mark.parametrize("arm", ["tilt[q=0.52]", "tilt[q=0.9]", "nan-row[item=3,row=2]", "masked"])
def test_positions_agree_with_the_reports_mean_and_failures(arm: str, grand: Done) -> None:
    record = grand.arm("control") if arm == "tilt[q=0.52]" else grand.arm(arm)
    values = [row["kl"] for row in rows(grand)[arm]]
    usable = [value for value in values if value is not None]
    assert values.count(None) == axis_of(record, "kld").n_failed
    if usable:
        assert sum(usable) / len(usable) == pytest.approx(axis_of(record, "kld").value("mean"), rel=1e-12)
    else:
        assert axis_of(record, "kld").value("mean") is None


def test_events_are_json_lines_that_tell_the_runs_story(grand: Done) -> None:
    events = [json.loads(line) for line in (grand.folder / "events.jsonl").read_text().splitlines()]
    names = [event["event"] for event in events]
    assert (names[0], names[-1]) == ("planned", "reported")
    jobs = [event["role"] for event in events if event["event"] == "job_ended"]
    assert jobs == events[0]["jobs"]
    assert (jobs[0], jobs[1], jobs[-1]) == ("reference", "control", "floor")
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert events[0]["unsupported"] == {"refused": "the fake engine refuses this format, as it was asked to"}


def test_the_resolved_settings_spell_out_every_default(plain: Done) -> None:
    settings = yaml.safe_load((plain.folder / "config.resolved.yaml").read_text())
    assert settings["axes"]["kld"] == {
        "windows": 8,
        "n_ctx": 16,
        "looks": [],
        "protocol": "half",
        "rows": 64,
        "stride": None,
        "place": None,
        "compat": None,
        "k": 20,
    }
    assert settings["axes"]["trajectory"]["template"] == "chat"
    assert "auto" not in (settings["dtype"], settings["device"], settings["threads"])
    assert settings == plain.report["settings"]


def test_running_the_resolved_settings_gives_the_same_scores(plain: Done, tmp_path: Path) -> None:
    again = cli(
        "compare", "-f", plain.folder / "config.resolved.yaml", "--set", f"output_dir={tmp_path / 'runs'}", cwd=tmp_path
    )
    assert again.code == 0
    first, second = same_report(plain.report), same_report(again.report)
    first["settings"]["output_dir"] = second["settings"]["output_dir"]
    assert second == first
    started = [event for event in map(json.loads, open_events(again)) if event["event"] == "job_started"]
    assert {event["role"] for event in started if event["missing"]} == {"reference", "candidate:tilt[q=0.6]", "floor"}
    assert len(started) == 3


def open_events(run: Done) -> list[str]:
    return (run.folder / "events.jsonl").read_text().splitlines()


def test_a_command_with_a_line_break_does_not_break_the_resolved_settings(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    (tmp_path / "a\nb.txt").write_text((tmp_path / "text.txt").read_text())
    run = compare(tmp_path, "tilt", flags=["--text", "a\nb.txt", "--no-floor"], windows=2, limit=1)
    settings = yaml.safe_load((run.folder / "config.resolved.yaml").read_text())
    assert settings["text"] == str(tmp_path / "a\nb.txt")


def test_every_capture_of_a_finished_run_is_complete_and_nothing_temporary_remains(grand: Done) -> None:
    folders = [path.parent for path in (grand.cwd / "runs" / "captures").rglob("manifest.json")]
    assert len(folders) == 2 * 13
    assert all(map(is_complete, folders))
    assert list((grand.cwd / "runs").rglob(".*")) == []


def test_the_same_run_twice_gives_the_same_report(plain: Done, tmp_path: Path) -> None:
    again = same_report(compare(tmp_path, "tilt[q=0.6]", windows=8, limit=2).report)
    first = same_report(plain.report)
    for name in ("output_dir", "text", "prompts"):
        first["settings"][name] = again["settings"][name]
    assert again == first


def test_the_api_runs_the_same_job(plain: Done, tmp_path: Path) -> None:
    report = fidelab.compare(
        "fake",
        engine="fake",
        reference="exact",
        candidates=["tilt[q=0.6]"],
        axes={"kld": {"windows": 8, "n_ctx": 16}, "trajectory": {"n_predict": 8, "limit": 2}},
        text=str(plain.cwd / "text.txt"),
        prompts=str(plain.cwd / "prompts.txt"),
        output_dir=str(tmp_path),
    )
    expected = Report.from_json(plain.folder / "report.json")
    assert report.candidates[0].axes == expected.candidates[0].axes
    assert report.candidates[0].verdict == expected.candidates[0].verdict
    assert Report.from_json(tmp_path / report.run_id / "report.json") == report


def test_the_api_raises_what_the_command_line_prints_as_errors_of_one_family(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'tilt'"):
        fidelab.compare("fake", engine="fake", reference="exact", candidates=["tlit"], output_dir=str(tmp_path / "r"))
    assert not (tmp_path / "r").exists()
    with pytest.raises(FidelabError, match="unknown key 'widnows'"):
        fidelab.compare("fake", reference="exact", candidates=["tilt"], widnows=3)  # type: ignore[call-arg]


def fake(tmp_path: Path, **settings: Any) -> Report:
    """A small run by the API."""
    write_inputs(tmp_path)
    inputs: dict[str, Any] = {name: str(tmp_path / f"{name}.txt") for name in ("text", "prompts")}
    return fidelab.compare(
        "fake", engine="fake", reference="exact", floor=0.0, output_dir=str(tmp_path), **inputs, **settings
    )


SMALL_KLD = {"kld": {"windows": 4, "n_ctx": 16}}


def test_the_api_takes_one_candidate_and_one_axis_without_a_list(tmp_path: Path) -> None:
    assert [arm.name for arm in fake(tmp_path, candidates="tilt", axes=SMALL_KLD).candidates] == ["tilt"]
    named = fake(tmp_path, candidates={"kv": "tilt", "name": "mine"}, axes="trajectory")
    assert [(arm.name, list(arm.axes)) for arm in named.candidates] == [("mine", ["trajectory"])]


def test_the_api_tells_a_function_how_far_it_is(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    axes = {"kld": {"windows": 40, "n_ctx": 16}}
    fake(tmp_path, candidates="tilt", axes=axes, progress=lambda what, share: told.append((what, share)))
    assert list(dict.fromkeys(what for what, _ in told)) == ["starting", "reference", "tilt", "scoring"]
    shares = [share for _, share in told]
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert shares == sorted(shares)
    assert any(0 < share < 1 for share in shares)


def test_the_api_prints_on_request_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake(tmp_path, candidates="tilt", axes=SMALL_KLD)
    assert capsys.readouterr() == ("", "")
    fake(tmp_path / "again", candidates="tilt", axes=SMALL_KLD, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == "fidelab:   0% starting"
    assert lines[-1] == "fidelab: 100% scoring"
    assert len(lines) == len(set(lines))
    assert any(line.endswith("% tilt") for line in lines)


def test_a_report_is_found_by_its_folder_by_its_file_and_as_the_latest(plain: Done, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("20260101-120000-old", "20260102-120000-new"):
        shutil.copytree(plain.folder, runs / name)
    (runs / "captures").mkdir()
    whole = cli("report", "runs/20260102-120000-new", cwd=tmp_path)
    assert whole.code == 0
    assert "20260102-120000-new/report.html" in whole.out
    new = "runs/20260102-120000-new"
    for word in ("latest", "runs/latest", f"{new}/report.json", f"{new}/report.html"):
        again = cli("report", word, cwd=tmp_path)
        assert (again.code, again.out) == (0, whole.out), word
    assert "-old/report.html" in cli("report", "runs/20260101-120000-old/report.json", cwd=tmp_path).out
    assert cli("check", "latest", "--baseline", "runs/20260101-120000-old", "--all", cwd=tmp_path).code == 0


def test_a_report_away_from_its_run_is_shown_and_nothing_is_written(plain: Done, tmp_path: Path) -> None:
    (tmp_path / "theirs.json").write_bytes((plain.folder / "report.json").read_bytes())
    done = cli("report", "theirs.json", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "tilt[q=0.6]" in done.out
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.json"]


def test_where_there_is_no_run_none_is_the_latest(tmp_path: Path) -> None:
    done = cli("report", "latest", cwd=tmp_path)
    assert (done.code, done.err) == (2, "fidelab: runs holds no run, so none is the latest: name a run's folder\n")
