"""The command that measures a format of engine hf on an engine with a server names the same format, or none."""

from __future__ import annotations

import html
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fidelab.config.experiment import validate
from fidelab.config.schema import ArmConfig
from fidelab.core import KVSpec, Status
from fidelab.core.paths import command_from_here
from fidelab.models import resolve
from fidelab.plan.arms import resolve_arm
from fidelab.report.html import render_html
from fidelab.report.markdown import render_markdown
from fidelab.report.text import render_text
from fidelab.results.decision_record import Recommendation
from fidelab.results.outcomes import ArmResult
from fidelab.scoring.score import _other_engine_command
from tests.report.sample import sample_report


def command(kv: str, model: str = "fake", **options: str) -> str | None:
    experiment = validate({"model": "fake", "engine": "fake", "candidates": [{"kv": "exact"}]}, "test")
    arm = resolve_arm(experiment, ArmConfig(kv=KVSpec.parse("exact")), resolve("fake"))
    arm = replace(arm, model=model, engine="hf", kv=KVSpec.parse(kv), options=tuple(sorted(options.items())))
    return _other_engine_command(ArmResult("candidate:0", arm, Status.OK))


@pytest.mark.parametrize(
    ("kv", "options", "expected"),
    [
        ("q8_0", {}, "fidelab compare fake --engine llamacpp --kv q8_0"),
        ("fp8_e4m3", {}, "fidelab compare fake --engine vllm --kv fp8_e4m3"),
        ("bf16/fp8_e4m3", {}, "fidelab compare fake --engine vllm --kv k16v8"),
        # how attention was computed is not part of the format
        ("bf16/fp8_e4m3", {"attention": "sdpa"}, "fidelab compare fake --engine vllm --kv k16v8"),
        ("bf16/fp8_e4m3", {"attention": "k16v8", "dequant": "unpack"}, "fidelab compare fake --engine vllm --kv k16v8"),
        ("bf16/fp8_e4m3", {"rotate": "hadamard"}, None),
        # other formats of the same name there: their scales are per token and head
        ("int4", {}, None),
        ("int8", {}, None),
        ("bf16/int8", {}, None),
        ("bf16/fp8_e4m3fnuz", {}, "fidelab compare fake --engine vllm --kv bf16/fp8_e4m3fnuz"),
    ],
)
def test_the_command_names_a_format_that_means_the_same_there(
    kv: str, options: dict[str, str], expected: str | None
) -> None:
    assert command(kv, **options) == expected


def test_the_command_runs_where_it_is_shown_and_only_exports_strip_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "my models" / "tiny"
    whole = f"fidelab compare '{model}' --engine llamacpp --kv q8_0"
    shown = Recommendation(
        kind="use",
        arm="k16v8",
        confidence="confirmed",
        text="Use k16v8: smaller",
        evidence=("KLD 0.0007",),
        command=whole,
        command_note="",
    )
    report = sample_report(recommendation=shown)
    report = report.model_copy(update={"reference": report.reference.model_copy(update={"model": str(model)})})
    assert command("q8_0", model=str(model)) == whole
    assert whole in html.unescape(render_html(report))
    model.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    for folder, path in (
        (tmp_path, "'my models/tiny'"),
        (model.parent, "tiny"),
        (tmp_path / "elsewhere", f"'{model}'"),
    ):
        monkeypatch.chdir(folder)
        file = io.StringIO()
        render_text(report, Console(file=file, width=200))
        assert f"Next    fidelab compare {path} --engine llamacpp --kv q8_0\n" in file.getvalue()
        assert file.getvalue().partition(" · ")[0] == path.strip("'")
    assert "fidelab compare tiny --engine llamacpp --kv q8_0" in render_markdown(report)
    assert str(tmp_path) not in render_markdown(report)


def test_the_command_of_another_program_keeps_its_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    serve = f"vllm serve {tmp_path}/model --kv-cache-dtype fp8"
    assert command_from_here(serve) == serve
    assert command_from_here("fidelab compare 'a --kv q8_0") == "fidelab compare 'a --kv q8_0"
