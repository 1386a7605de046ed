"""``fidelab checkpoint``: what the commands print, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

from checkpoints.tests.quantized import write_quantized
from checkpoints.tests.synthetic import plain, quantized
from fidelab.environments.checkpoints import checkpoints
from tests.models.tiny_gguf import write_gguf
from tests.run.harness import cli, refused

SCALES = "model.layers.0.mlp.down_proj.scales"


def test_the_verdict_is_the_exit_code_and_json_has_all_of_it(tmp_path: Path) -> None:
    whole = quantized("gptq").write(tmp_path / "whole")
    broken = quantized("gptq")
    broken.tensors[SCALES].view(-1)[3] = float("nan")
    folder = broken.write(tmp_path / "broken")
    assert cli("checkpoint", "audit", whole, cwd=tmp_path).code == 0
    done = cli("checkpoint", "audit", folder, cwd=tmp_path)
    assert (done.code, done.err.strip()) == (1, f"fidelab: {folder} is broken: 1 finding")
    assert SCALES in done.out
    assert "verdict: broken" in done.out
    answer = json.loads(cli("checkpoint", "audit", folder, "--json", cwd=tmp_path).out)
    assert (answer["schema"], answer["verdict"]) == ("fidelab.audit/1", "broken")
    assert {*answer["rules"], *answer["unchecked"]} == {*checkpoints.RULES}
    [finding] = answer["findings"]
    assert (finding["rule"], finding["count"], finding["tensors"]) == ("scale-nonfinite", 1, [SCALES])


def test_an_audit_says_what_was_checked_and_what_was_not(tmp_path: Path) -> None:
    whole = quantized("gptq").write(tmp_path / "whole")
    alone = checkpoints.audit(str(whole))
    out = " ".join(cli("checkpoint", "audit", whole, cwd=tmp_path).out.split())
    assert f"checked {len(alone.rules)} rules, {alone.tensors} tensors, 1 file not checked base-missing," in out
    assert "(needs --base ORIGINAL); tp-split (needs --tp N) verdict: ok" in out


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    whole = plain().write(tmp_path / "whole")
    for words, says in (
        ((tmp_path / "nothing",), "no model"),
        ((whole, "--tp", "0"), "at least 1"),
        ((whole, "--base", write_gguf(tmp_path / "m.gguf")), "in the same format"),
    ):
        assert says in refused(cli("checkpoint", "audit", *words, cwd=tmp_path))


def test_what_is_printed_is_the_certificate_in_one_line(tmp_path: Path) -> None:
    write_quantized(tmp_path / "source", "gptq", symmetric=True)
    done = cli("checkpoint", "convert", "source", "target", "--to", "awq", cwd=tmp_path)
    expected = "gptq to awq: 14 quantized modules and 7 other tensors compared, all 164,160 values are equal\n"
    assert (done.code, done.out) == (0, expected), done.err


def test_a_dry_run_of_quantizing_names_what_is_kept_and_needs_no_tool(tmp_path: Path) -> None:
    plain().write(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text("method: rtn\nscheme: {format: W4A16, group: 32}\nkeep: ['re:.*o_proj']\n")
    words = ("checkpoint", "quantize", "./model", "--recipe", "recipe.yaml", "--dry-run")
    done = cli(*words, "--python", "/nowhere/python", cwd=tmp_path)
    assert done.code == 0, done.err
    planned = json.loads(cli(*words, "--json", cwd=tmp_path).out)
    assert f"{len(planned['quantized'])} modules quantized" in done.out
    assert "re:.*o_proj 2" in done.out
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("model-")]


def test_a_dry_run_of_quantizing_refuses_a_recipe_that_does_not_fit(tmp_path: Path) -> None:
    plain().write(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text("method: rtn\nkeep: ['re:.*nothing']\n")
    words = ("checkpoint", "quantize", "./model", "--recipe", "recipe.yaml", "--dry-run")
    assert "matches 0 modules" in refused(cli(*words, cwd=tmp_path))
