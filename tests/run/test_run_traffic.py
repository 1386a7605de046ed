"""A run on the user's own log: what it is measured on, and that none of its words are written down unasked."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from fidelab.axes.groups import by_group
from fidelab.axes.kld import KLD_METRICS
from fidelab.metrics.divergence import RowComparison, compare_rows
from fidelab.results.record import Report
from tests.run.harness import Done, cli, refused, run_fake

SECRET = "swordfish"


def _log(folder: Path) -> Path:
    """Twelve conversations of two domains, every one with the secret in it."""
    random.seed(7)
    words = ["harbour", "lamp", "cedar", "north", "winter", "glass", "river", "stone", "copper", "field"]
    lines = []
    for number in range(12):
        question, answer = (" ".join(random.choices(words, k=12)) for _ in range(2))
        messages = [
            {"role": "user", "content": f"{SECRET} {question}"},
            {"role": "assistant", "content": f'{{"{SECRET}": "{answer}"}}' if number % 2 else answer},
        ]
        lines.append(json.dumps({"id": f"c{number}", "domain": ("first", "second")[number % 2], "messages": messages}))
    file = folder / "log.jsonl"
    file.write_text("\n".join([*lines, "broken"]))
    return file


def _compare(cwd: Path, *flags: object) -> Done:
    _log(cwd)
    sizes = ("--windows", 10, "--n-ctx", 192, "--n-predict", 8, "--axes", "kld,trajectory,plad,forced")
    arms = ("--engine", "fake", "--reference", "exact", "--kv", "tilt[q=0.7]", "--kv", "fork[at=5]")
    return cli("compare", "fake", *arms, *sizes, "--traffic", "log.jsonl", *flags, cwd=cwd)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Done:
    done = _compare(tmp_path_factory.mktemp("traffic"), "--skip-bad")
    assert done.code == 0, done.err
    return done


def test_broken_line_stops_the_run_before_anything_runs(tmp_path: Path) -> None:
    line = refused(_compare(tmp_path))
    assert "line 13" in line
    assert "--skip-bad" in line
    assert not (tmp_path / "runs").exists()


def test_what_was_left_out_is_said(run: Done) -> None:
    assert "conversations: 12 (6 first, 6 second)" in run.err
    assert "bad records left out: 1 (line 13" in run.err


def test_domains_stand_in_the_report_and_the_worst_in_the_sentence(run: Done) -> None:
    arm = Report.from_json(run.folder / "report.json").candidates[0]
    means = {m.cell["domain"]: m for m in arm.axes["kld"].metrics if m.name == "mean" and "domain" in m.cell}
    assert set(means) == {"first", "second"}
    worst = max(means, key=lambda name: means[name].value or 0.0)
    details = cli("report", run.folder, "--details", cwd=run.cwd).out
    assert f"Of 2 kinds of text, worst on {worst}" in " ".join(details.split())
    assert "by kind of text" in details
    assert "where tokens carry structure" in details


def test_prompts_are_the_logs(run: Done) -> None:
    assert Report.from_json(run.folder / "report.json").candidates[0].axes["trajectory"].n_items == 12


def test_no_word_of_the_log_is_in_any_file_of_the_run(run: Done) -> None:
    files = [path for path in (run.cwd / "runs").rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_words_are_shown_if_asked(tmp_path: Path) -> None:
    done = _compare(tmp_path, "--skip-bad", "--keep-text")
    assert done.code == 0, done.err
    assert "First divergences" in (done.folder / "report.json").read_text()


def test_rescored_report_keeps_the_domains_and_no_words(run: Done) -> None:
    before = run.report["candidates"][0]["axes"]["kld"]["metrics"]
    done = cli("report", "--rescore", run.folder, cwd=run.cwd)
    assert done.code == 0, done.err
    assert run.report["candidates"][0]["axes"]["kld"]["metrics"] == before
    assert SECRET not in (run.folder / "report.json").read_text()


def test_recorded_answers_are_fed_instead_of_the_references(tmp_path: Path) -> None:
    _log(tmp_path)
    axes, inputs = (
        {"forced": {"answers": "recorded", "n_predict": 5, "limit": 4}},
        {"text": "default", "prompts": "default"},
    )
    done = run_fake(tmp_path, axes, ["tilt[q=0.7]"], traffic="log.jsonl", skip_bad=True, **inputs)
    assert done.code == 0, done.err
    axis = done.axis(done.report["candidates"][0]["name"], "forced")
    assert (axis.n_items, axis.value("prompts")) == (4 * 5, 4)


def test_recorded_answers_without_a_log_are_refused(tmp_path: Path) -> None:
    assert "--traffic" in refused(run_fake(tmp_path, {"forced": {"answers": "recorded"}}, ["tilt[q=0.7]"]))


@pytest.mark.parametrize("flag", [("--text", "x.txt"), ("--prompts", "x.txt")])
def test_log_beside_another_text_is_refused(flag: tuple[str, str], tmp_path: Path) -> None:
    assert "traffic gives the text and the prompts" in refused(_compare(tmp_path, *flag))


def test_groups_are_means_over_their_own_rows() -> None:
    rng = np.random.default_rng(3)
    rows = RowComparison.concat(
        [compare_rows(rng.normal(size=(60, 9)), rng.normal(size=(60, 9)), rng.integers(9, size=60))]
    )
    labels = np.array(["a"] * 20 + ["b"] * 33 + ["few"] * 3 + [""] * 4, dtype=object)
    found = [*by_group("domain", labels, rows, np.arange(60) // 5, KLD_METRICS["mean"], KLD_METRICS["top1"], 1)]
    means = {m.cell["domain"]: m.value for m in found if m.name == "mean"}
    assert means == pytest.approx({"a": rows.kl[:20].mean(), "b": rows.kl[20:53].mean()})
    shares = {m.cell["domain"]: m.value for m in found if m.name == "same top token"}
    assert shares == pytest.approx({"a": rows.top1[:20].mean(), "b": rows.top1[20:53].mean()})
