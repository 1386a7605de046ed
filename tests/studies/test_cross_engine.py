"""The cross-engine experiment on fake engines, whose distributions and clock are known in closed form."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from fidelab.config.cross import CrossEngine
from fidelab.config.experiment import validate_cross
from fidelab.config.profiles import experiments
from fidelab.report.study import render_study
from fidelab.results.study import Study, StudyRow
from fidelab.run.pipeline import Interrupted
from fidelab.studies.cross_engine import run_cross
from tests.run.harness import Done, cli, write_inputs

TILTED, CANDIDATE = "tilt[q=0.55]", "tilt[q=0.6]"
EXACT = {"engine": "fake", "reference": "exact", "candidate": CANDIDATE}
EXPERIMENT: dict[str, Any] = {
    "kind": "cross-engine",
    "model": "fake",
    "engines": [
        {**EXACT, "name": "one"},
        {**EXACT, "name": "absent", "engine_args": {"colour": "red"}},
        {**EXACT, "name": "crashing", "engine_args": {"crash": "1"}},
        {"engine": {"name": "fake"}, "name": "two", "reference": TILTED, "candidate": "refused"},
    ],
    "axes": {
        "kld": {"windows": 40, "n_ctx": 16},
        "trajectory": {"n_predict": 8, "limit": 4},
        "perplexity": {"contexts": [64], "windows": 4},
    },
    **{"text": "text.txt", "prompts": "prompts.txt", "threads": 1},
    "benches": {"prefill": {"lengths": [64], "repeats": 3}, "decode": {"depths": [64], "n": 16, "repeats": 3}},
}


def kl(p: float, q: float) -> float:
    """KL of two-level distributions."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def cross(room: Path, *flags: str, **changes: Any) -> Done:
    write_inputs(room)
    (room / "cross.yaml").write_text(json.dumps({**EXPERIMENT, **changes}))
    return cli("compare", "-f", "cross.yaml", *flags, cwd=room)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Two engines that answer, one that refuses its options, one that crashes."""
    return cross(tmp_path_factory.mktemp("cross"), "--json")


@pytest.fixture(scope="module")
def found(done: Done) -> Study:
    return study(done)


def study(done: Done) -> Study:
    return Study.model_validate_json((done.folder / "study.json").read_text())


def row(found: Study, name: str, part: str, **at: Any) -> StudyRow:
    measured = found.row(engine=name, part=part, **at)
    assert measured is not None
    return measured


@pytest.mark.parametrize(("other", "reference", "p", "q"), [("two", "one", 0.5, 0.55), ("one", "two", 0.55, 0.5)])
def test_the_references_are_compared_in_both_directions(
    found: Study, other: str, reference: str, p: float, q: float
) -> None:
    pair = row(found, other, "agreement", **{"from": reference})
    kld, ci = pair.value("kld"), pair.ci("kld")
    assert kld == pytest.approx(kl(p, q), rel=1e-4)
    assert kld is not None
    assert ci is not None
    assert ci[0] <= kld <= ci[1]
    assert pair.n_items == 40 * 7
    assert sum(row.at["part"] == "agreement" for row in found.rows) == 2


def test_each_candidate_is_compared_with_its_own_reference_which_has_its_own_perplexity_and_floor(found: Study) -> None:
    candidate = row(found, "one", "candidate")
    assert candidate.value("kld") == pytest.approx(kl(0.5, 0.6), rel=1e-4)
    assert (candidate.facts["KV"], candidate.value("trajectory_score")) == (CANDIDATE, 100.0)
    assert candidate.facts["verdict"].startswith("PASS")
    # all tokens of the text are bytes below 128, the likelier half of the tilted arm
    assert row(found, "one", "perplexity", context=64).value("perplexity") == pytest.approx(128 / 0.5, rel=1e-4)
    assert row(found, "two", "perplexity", context=64).value("perplexity") == pytest.approx(128 / 0.55, rel=1e-4)
    assert [row(found, name, "reference").value("floor") for name in ("one", "two")] == [0.0, 0.0]


def test_a_candidate_has_the_share_of_positions_with_its_references_top_token(found: Study) -> None:
    share = row(found, "one", "candidate").metric("top1")
    assert share is not None
    assert (share.name, share.unit, share.value) == ("same top token", "share", 1.0)
    out = io.StringIO()
    render_study(found, Console(file=out, width=200))
    table = out.getvalue().partition("\ncandidate\n")[2].partition("\nagreement\n")[0]
    assert "same top token" in table
    assert "100.00%" in table


def test_markdown_has_the_engines_side_by_side(done: Done, tmp_path: Path) -> None:
    shown = cli("report", done.folder, "--markdown", cwd=tmp_path).out
    head, _ruler, first, *_ = shown.partition("\ncandidate:\n")[2].strip().splitlines()
    columns = [cell.strip() for cell in head.split("|")[1:-1]]
    for name in ("engine", "KV", "mean KL, nats", "same top token", "kld score", "trajectory score", "composite"):
        assert name in columns
    assert first.startswith("| one |")
    assert "Failed or not measurable:" in shown


def test_the_command_prints_the_same_tables_as_markdown(tmp_path: Path) -> None:
    done = cross(tmp_path, "--markdown", engines=[{**EXACT, "name": "one"}], benches={})
    assert "\ncandidate:\n\n| engine |" in done.out
    assert cli("report", done.folder, "--markdown", cwd=tmp_path).out == done.out


@pytest.mark.parametrize(("arm", "at"), [("reference", {"tokens": 64}), ("candidate", {"depth": 64})])
def test_both_arms_are_timed_and_rates_are_the_clocks(arm: str, at: dict[str, int], found: Study) -> None:
    speed = row(found, "one", "timing", arm=arm, batch=1, **at)
    keys = ["prefill_rate"] if "tokens" in at else ["decode_isolated", "decode_by_subtraction"]
    assert {key: speed.value(key) for key in keys} == dict.fromkeys(keys, 1024 if "tokens" in at else 64)
    assert all(metric.repeats == (metric.value,) * 3 for metric in speed.metrics)
    assert (row(found, "one", "reference").value("load") or -1) >= 0


def test_memory_has_a_table_of_its_own_with_every_figure(tmp_path: Path) -> None:
    axes = {"kld": {"windows": 4, "n_ctx": 16}}
    done = cross(tmp_path, "--markdown", engines=[EXACT], axes=axes, benches={"memory": {"lengths": [64]}})
    head = done.out.partition("\nmemory:\n")[2].strip().splitlines()[0]
    found = json.loads((done.folder / "study.json").read_text())
    rows = [row for row in found["rows"] if row["at"]["part"] == "memory"]
    assert rows
    for metric in (metric for row in rows for metric in row["metrics"]):
        assert f"| {metric['name']}" in head
    assert "timing" not in {row["at"]["part"] for row in found["rows"]}


def test_an_engine_that_cannot_run_leaves_its_reason_and_the_others_go_on(done: Done, found: Study) -> None:
    references = {row.at["engine"]: row for row in found.rows if row.at["part"] == "reference"}
    statuses = [(name, row.status) for name, row in references.items()]
    assert statuses == [("one", "ok"), ("absent", "failed"), ("crashing", "failed"), ("two", "ok")]
    assert "has no option 'colour'" in (references["absent"].reason or "")
    assert "SIGABRT" in (references["crashing"].reason or "")
    assert done.code == 1
    assert "fidelab: absent reference failed: engine fake has no option 'colour'" in done.err


def test_a_line_has_a_model_of_its_own_for_both_configurations_and_the_same_token_ids(tmp_path: Path) -> None:
    own = {**EXACT, "name": "own", "model": "fake:own"}
    quick: dict[str, Any] = {"benches": {}, "axes": {"kld": {"windows": 4, "n_ctx": 16}}}
    done = cross(tmp_path / "room", engines=[{**EXACT, "name": "one"}, own], **quick)
    assert done.code == 0, done.err
    found = study(done)
    assert (row(found, "own", "reference").facts["model"], "model" in row(found, "one", "reference").facts) == (
        "fake:own",
        False,
    )
    report = json.loads((done.folder / row(found, "own", "reference").facts["run"] / "report.json").read_text())
    assert {report["reference"]["model"], report["candidates"][0]["model"]} == {"fake:own"}
    assert row(found, "own", "candidate").value("kld") == pytest.approx(kl(0.5, 0.6), rel=1e-4)
    assert row(found, "own", "candidate").value("top1") == 1.0
    assert row(found, "own", "agreement", **{"from": "one"}).value("kld") == 0.0  # the same windows


def test_a_gguf_that_is_missing_fails_its_line_alone_and_says_how_to_make_it(tmp_path: Path) -> None:
    gone = {**EXACT, "name": "gone", "model": "./gone.gguf"}
    quick: dict[str, Any] = {"benches": {}, "axes": {"kld": {"windows": 4, "n_ctx": 16}}}
    done = cross(tmp_path / "room", engines=[gone, {**EXACT, "name": "one"}], **quick)
    assert done.code == 1
    reason = "no file ./gone.gguf; make it from fake with llama.cpp's convert_hf_to_gguf.py, or name another file"
    assert row(study(done), "gone", "reference").reason == reason
    assert row(study(done), "one", "candidate").status == "ok"
    plan = cli("compare", "-f", "cross.yaml", "--dry-run", cwd=done.cwd)
    assert f"cannot run: {reason}" in plan.out


def test_the_file_of_a_line_holds_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    lines = [{"engine": "llamacpp", "candidate": "q8_0", "model": name} for name in ("model.gguf", "owner/name")]
    lines[1] |= {"name": "other"}
    made = validate_cross({**EXPERIMENT, "engines": lines, "text": "default", "prompts": "default"}, "file")
    assert [line.model for line in made.engines] == [str(tmp_path / "model.gguf"), "owner/name"]


def test_an_engine_that_is_not_installed_says_how_to_install_it(tmp_path: Path, cache: Path) -> None:
    lines = [{"engine": "vllm", "candidate": "fp8_e4m3"}, EXPERIMENT["engines"][0]]
    done = cross(tmp_path / "room", engines=lines, benches={}, axes={"kld": {"windows": 4, "n_ctx": 16}})
    absent, present = (row(study(done), name, "reference") for name in ("vllm", "one"))
    assert "engine vllm is not installed: fidelab setup install vllm" in (absent.reason or "")
    assert present.status == "ok"


def test_a_format_that_an_engine_lacks_is_not_supported_and_no_fault(done: Done, found: Study) -> None:
    candidate = row(found, "two", "candidate")
    assert candidate.status == "not_supported"
    assert "refuses this format" in (candidate.reason or "")
    assert "two candidate failed" not in done.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"engins": []}, "unknown key 'engins'; did you mean 'engines'?"),
        ({"engines": [{"engine": "fake", "candidate": "exact", "dtyp": "auto"}]}, "'engines.0.dtyp'; did you mean 'd"),
        ({"engines": [{"engine": {"name": "hf", "pyton": "x"}, "candidate": "x"}]}, "did you mean 'python'?"),
        ({"benches": {"decode": {"deths": [5]}}}, "unknown key 'benches.decode.deths'; did you mean 'depths'?"),
        ({"engines": [{"engine": "fake", "candidate": "exact"}] * 2}, "two are called 'fake'"),
        ({"kind": "cross"}, "kind: 'cross' is not a runnable kind: use cross-engine"),
        ({"engines": [{"engine": "sglnag", "candidate": "auto"}]}, "unknown engine 'sglnag'"),
        ({"axes": {"kld": {"window": 2}}}, "unknown key 'axes.kld.window'; did you mean 'windows'?"),
        ({"text": "nowhere.txt"}, "no text 'nowhere.txt'"),
    ],
)
def test_bad_settings_are_one_line_before_anything_runs(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    done = cross(tmp_path / "room", **change)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.splitlines()) == 1
    assert not (done.cwd / "runs").exists()


def test_the_resolved_file_repeats_the_experiment(done: Done, found: Study, tmp_path: Path) -> None:
    again = cli(
        "compare", "-f", done.folder / "config.resolved.yaml", "--json", "--set", f"output_dir={tmp_path}", cwd=tmp_path
    )
    repeated = Study.model_validate_json(again.out)
    parts = ("perplexity", "candidate", "agreement")
    theirs, ours = ([row for row in one.rows if row.at["part"] in parts] for one in (repeated, found))
    assert theirs == ours


def test_json_is_the_record_and_nothing_else(done: Done, found: Study) -> None:
    assert Study.model_validate_json(done.out) == found


def test_the_tables_say_every_figure(found: Study) -> None:
    out = io.StringIO()
    render_study(found, Console(file=out, width=100))
    text = out.getvalue()
    for said in ("256", "1,024", "64.0", "0.0204", "0.00503", "not supported", "PASS", "agreement"):
        assert said in text
    assert "two candidate: not supported: the fake engine refuses this format" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("name", experiments())
def test_bundled_experiments_are_valid(name: str) -> None:
    import fidelab.config.profiles as room

    data = yaml.safe_load((Path(room.__file__).parent / "experiments" / f"{name}.yaml").read_text())
    assert isinstance(validate_cross(data, name), CrossEngine)


@pytest.mark.parametrize("said", ["cross-engine", "cross-engine.yaml", "experiments/cross-engine.yaml"])
def test_a_bundled_experiment_is_found_by_its_name(tmp_path: Path, said: str) -> None:
    done = cli("compare", "-f", said, "--set", "engines=[]", cwd=tmp_path)
    assert "cross-engine.yaml: engines: List should have at least 1 item" in done.err


def test_a_file_of_the_users_wins_over_a_bundled_one_and_one_engine_of_a_list_can_be_changed(tmp_path: Path) -> None:
    (tmp_path / "cross-engine").write_text("kind: cross-engine\n")
    assert "cross-engine: 'model' is missing" in cli("compare", "-f", "cross-engine", cwd=tmp_path).err
    done = cross(tmp_path / "room", "--set", "engines.3.candidate=tilt[q=2]", "--set", "engines.3.colour=red")
    assert "unknown key 'engines.3.colour'" in done.err
    done = cross(tmp_path / "room", "--set", "engines.9.candidate=exact")
    assert done.err == "fidelab: --set 'engines.9.candidate=exact': engines.9 is not a group of settings\n"


@pytest.mark.parametrize("said", ["cross-engin", "experiments/other.yaml", "elsewhere/cross-engine.yaml"])
def test_an_unknown_name_lists_the_bundled_experiments(tmp_path: Path, said: str) -> None:
    done = cli("compare", "-f", said, cwd=tmp_path)
    assert done.err == f"fidelab: {said} does not exist; name an experiment file or a bundled one: cross-engine\n"
    assert done.code == 2


def test_defaults_are_the_four_axes_and_perplexity(tmp_path: Path) -> None:
    line = {"engine": "fake", "candidate": "exact", "reference": "nonsense"}
    data = {**EXPERIMENT, "engines": [line], "axes": None, "benches": {}}
    (tmp_path / "cross.yaml").write_text(json.dumps(data))
    write_inputs(tmp_path)
    done = cli("compare", "-f", "cross.yaml", cwd=tmp_path)
    resolved = yaml.safe_load((done.folder / "config.resolved.yaml").read_text())
    assert list(resolved["axes"]) == ["trajectory", "kld", "rniah", "plad", "perplexity"]
    assert resolved["axes"]["kld"]["windows"] == 8


def test_a_stopped_experiment_offers_no_run_of_one_engine_to_resume(tmp_path: Path) -> None:
    def stop(_what: str) -> None:
        raise Interrupted(tmp_path)

    line = {"engine": "fake", "candidate": "exact", "reference": "exact"}
    experiment = validate_cross(
        {"kind": "cross-engine", "model": "fake", "engines": [line], "output_dir": str(tmp_path)}, "file"
    )
    with pytest.raises(KeyboardInterrupt) as stopped:
        run_cross(experiment, command="fidelab compare", watch=stop)
    assert not isinstance(stopped.value, Interrupted)
