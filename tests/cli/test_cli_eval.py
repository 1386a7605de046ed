"""``fidelab eval`` on the scripted server: exit codes, lines on standard error, and what is kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.eval.asking import chat_server
from tests.bench.eval.chat_server import ChatServer, serving
from tests.report.sample import sample_report
from tests.run.harness import Done, cli, refused

KEY = "sesame-opens-the-server"
SUMS = ("--kinds", "arithmetic")
SERVING = ("--kinds", "serving")


@pytest.fixture
def server() -> Iterator[ChatServer]:
    """A server without a fault."""
    with serving(chat_server()) as served:
        yield served


def ask(url: str, *words: object, cwd: Path) -> Done:
    return cli("eval", "--base-url", url, *words, cwd=cwd)


def asked(cwd: Path, *words: object, **about: Any) -> Done:
    """``fidelab eval`` on a server of its own."""
    with serving(chat_server(**about)) as served:
        return ask(served.url, *words, cwd=cwd)


def said(done: Done) -> list[str]:
    """The lines on standard error that explain the exit code."""
    lines = [line for line in done.err.splitlines() if line.startswith("fidelab: ")]
    return [line for line in lines if not line.startswith("fidelab: latest is ")]


def found(done: Done) -> dict[str, Any]:
    record: dict[str, Any] = done.arm("reference")["benches"]["eval"]
    return record


def checks(done: Done) -> dict[str, str]:
    return dict(found(done)["facts"]["checks"])


def in_page(done: Done, text: str) -> bool:
    return text in (done.folder / "report.html").read_text()


# ---------------------------------------------------------------------------------------------- exit codes


def test_the_right_server_ends_with_0_and_leaves_a_report_and_a_page(tmp_path: Path) -> None:
    done = asked(tmp_path)
    assert (done.code, said(done)) == (0, []), done
    n = found(done)["n_items"]
    assert {path.name for path in done.folder.iterdir()} == {"config.resolved.yaml", "report.html", "report.json"}
    assert found(done)["summary"] == (f"{n} of {n} questions right; 12 of 12 serving checks passed")
    assert {*checks(done).values()} == {"passed"}
    assert all(one["right"] for one in found(done)["facts"]["questions"].values())
    assert in_page(done, "Is the model on this server sane?")
    assert done.err.startswith("http://127.0.0.1:")
    assert "serves tiny-chat (vllm 0.32.0)" in done.err


def test_a_fault_ends_with_1_and_is_named_on_standard_error(tmp_path: Path) -> None:
    done = asked(tmp_path, *SERVING, fault="ignored-stop")
    assert done.code == 1
    [line] = said(done)
    assert line.startswith("fidelab: stop: the answer goes on after the stop sequence")
    assert checks(done) == {**checks(done), "stop": "failed", "length": "passed"}
    assert in_page(done, "goes on after the stop sequence")


def test_a_kind_of_which_most_is_wrong_ends_with_1(tmp_path: Path) -> None:
    done = asked(tmp_path, "--kinds", "tools,arithmetic", fault="tool-arguments")
    assert (done.code, said(done)) == (1, ["fidelab: tools: 0 of 5 calls right"])
    assert in_page(done, "get_weather")


def test_a_cut_by_the_time_limit_ends_with_3_and_keeps_the_answers(tmp_path: Path) -> None:
    done = asked(tmp_path, "--kinds", "arithmetic,sql", "--time-limit", 3, "--parallel", 1, delay=0.4)
    assert done.code == 3
    assert re.fullmatch(r"fidelab: not reached within --time-limit: (arithmetic \(\d of 8\), )?sql", said(done)[-1])
    kept = [one["right"] for one in found(done)["facts"]["questions"].values()]
    assert kept.count(True) >= 1
    assert False not in kept


def test_a_fault_next_to_a_cut_ends_with_1(tmp_path: Path) -> None:
    done = asked(
        tmp_path, "--kinds", "images,retrieval", "--time-limit", 5, "--parallel", 8, delay=0.4, fault="dropped-images"
    )
    assert done.code == 1
    assert said(done)[0].startswith("fidelab: images: 0 of ")
    assert len(said(done)) > 1
    assert all("not reached" in line for line in said(done)[1:])


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--base-url", "http://127.0.0.1:9"), "refuses connections: start the server, or correct --base-url"),
        (("--base-url", "nowhere"), "--base-url is not a URL"),
        (("--base-url", "http://127.0.0.1:9", "--engine", "vllm"), "--engine is for a server that is started here"),
        ((), "name a running server by --base-url URL, or a model and --engine to start one"),
        (("some/model",), "some/model: name the engine whose server is started"),
        (("http://host:1",), "http://host:1 is the address of a server: write --base-url http://host:1"),
        (("--base-url", "http://127.0.0.1:9", "--kinds", "sums"), "unknown kind of question 'sums'"),
        (("--base-url", "http://127.0.0.1:9", "--kinds", ","), "name a kind"),
        (("--base-url", "http://127.0.0.1:9", "--policy", "bad.yaml"), "bad.yaml:1:6 is not YAML"),
        (("--base-url", "http://127.0.0.1:9", "--policy", "none.yaml"), "none.yaml"),
        (("--base-url", "http://127.0.0.1:9", "--baseline", "runs/other"), "r is not a run of fidelab eval"),
        (("--base-url", "http://127.0.0.1:9", "--baseline", "runs/none"), "runs/none"),
    ],
)
def test_a_command_that_cannot_run_is_refused_in_one_line(words: tuple[str, ...], line: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("{a: [")
    sample_report(run_id="r").write(tmp_path / "runs" / "other" / "report.json")
    assert line in refused(cli("eval", *words, cwd=tmp_path))


def test_several_models_need_a_name(tmp_path: Path) -> None:
    with serving(chat_server(models=("base", "tuned"))) as served:
        assert "serves base, tuned: name one by MODEL" in refused(ask(served.url, *SUMS, cwd=tmp_path))
        assert "does not serve model 'other'" in refused(ask(served.url, "other", *SUMS, cwd=tmp_path))
        done = ask(served.url, "tuned", *SUMS, cwd=tmp_path)
        assert done.code == 0
        assert done.arm("reference")["model"] == "tuned"
        assert {body["model"] for body in served.requests} == {"tuned"}


def test_a_server_with_a_key_refuses_other_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving(chat_server(key=KEY)) as served:
        for words in ((), ("--api-key", "another-long-key")):
            line = refused(ask(served.url, *SUMS, *words, cwd=tmp_path))
            assert "refuses the key (401: Unauthorized): give it by --api-key" in line
            assert "another" not in line


def test_a_key_opens_the_server_and_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKED", KEY)
    with serving(chat_server(key=KEY)) as served:
        for words in (("--api-key", KEY), ("--api-key-env", "LOCKED")):
            done = ask(served.url, *SUMS, *words, cwd=tmp_path)
            assert done.code == 0
            assert KEY not in done.out + done.err + "".join(path.read_text() for path in done.folder.iterdir())
            assert " ".join(words).replace(KEY, "KEY") in done.report["command"]


def test_a_server_that_knows_no_address_of_answers_is_refused(tmp_path: Path) -> None:
    done = asked(tmp_path, *SUMS, chat="missing", completes=False)
    assert done.code == 2
    [line] = said(done)
    assert line.endswith("has no /completions for this (404: Not Found): correct --base-url or MODEL")


# ----------------------------------------------------------------------------------------- unusual servers


@pytest.mark.parametrize("chat", ["no-template", "missing"])
def test_a_server_without_a_chat_template_gets_plain_text_and_a_note(chat: str, tmp_path: Path) -> None:
    done = asked(tmp_path, "--kinds", "serving,sql,tools", chat=chat)
    assert (done.code, said(done)) == (0, []), done
    note = "the server has no chat template: messages were sent to /completions as plain text"
    assert note in [flag["text"] for flag in found(done)["flags"]]
    assert {one["status"] for one in found(done)["cells"] if one["at"] == {"kind": "tools"}} == {"not_supported"}


def test_a_server_that_refuses_images_passes_all_else(tmp_path: Path) -> None:
    done = asked(tmp_path, "--kinds", "serving,images,arithmetic", takes_images=False)
    assert (done.code, said(done)) == (0, []), done
    assert checks(done)["pictures"] == "not tested"
    [images] = [one for one in found(done)["cells"] if one["at"] == {"kind": "images"}]
    assert images["status"] == "not_supported"
    assert "tiny-chat is not a multimodal model" in images["reason"]


def test_a_server_that_takes_nothing_of_a_kind_says_why(tmp_path: Path) -> None:
    done = asked(tmp_path, "--kinds", "images", takes_images=False)
    assert "the server takes no pictures" in found(done)["reason"]


def test_a_stream_that_breaks_off_is_a_fault_and_the_rest_is_asked(tmp_path: Path) -> None:
    before = 1 + 16 + 8  # requests: the first one, single ones twice, and in parallel
    done = asked(tmp_path, *SERVING, trouble=[*[""] * before, "break"])
    assert done.code == 1
    [line] = said(done)
    assert line.startswith("fidelab: streaming: 1 of 4 streams failed: http://127.0.0.1:")
    assert "broke off" in line
    assert "--resume" not in line + json.dumps(found(done))
    assert {name for name, state in checks(done).items() if state == "failed"} == {"streaming"}


def test_a_request_over_its_time_limit_is_told_from_the_time_limit_of_all(tmp_path: Path) -> None:
    done = asked(tmp_path, *SUMS, "--timeout", 0.5, delay=2.0)
    assert done.code == 1
    assert said(done) == ["fidelab: arithmetic: 0 of 8 right"]
    assert "did not answer within 0.5 s" in json.dumps(found(done))
    assert "--engine-arg" not in json.dumps(found(done))


def test_reasoning_in_markers_is_removed_and_remarked(tmp_path: Path) -> None:
    done = asked(tmp_path, "--kinds", "serving,arithmetic,json", reasoning="think")
    assert (done.code, said(done)) == (0, []), done
    assert "answers have their reasoning in the text" in " ".join(flag["text"] for flag in found(done)["flags"])


# ----------------------------------------------------------------------------------------------- outputs


def test_json_prints_the_report(server: ChatServer, tmp_path: Path) -> None:
    done = ask(server.url, *SUMS, "--json", cwd=tmp_path)
    assert json.loads(done.out) == done.report
    assert done.report["reference"]["benches"]["eval"]["n_items"] == 8


def test_labels_and_folder_are_those_of_the_flags(server: ChatServer, tmp_path: Path) -> None:
    done = ask(server.url, *SUMS, "--name", "awq", "--output-dir", "kept", cwd=tmp_path)
    [folder] = (tmp_path / "kept").glob("2*")
    report = json.loads((folder / "report.json").read_text())
    assert (done.code, report["reference"]["name"]) == (0, "awq")


def test_requests_in_flight_are_as_many_as_asked_for(tmp_path: Path) -> None:
    for parallel in (1, 3):
        with serving(chat_server(delay=0.1)) as served:
            assert ask(served.url, *SUMS, "--parallel", parallel, cwd=tmp_path).code == 0
            assert (1 < served.most_parallel <= parallel) or served.most_parallel == parallel == 1


def test_the_same_server_is_unchanged_against_its_own_run(server: ChatServer, tmp_path: Path) -> None:
    words = ("--kinds", "serving,arithmetic")
    assert ask(server.url, *words, cwd=tmp_path).code == 0
    done = ask(server.url, *words, "--baseline", "latest", cwd=tmp_path)
    assert (done.code, said(done)) == (0, [])
    assert "unchanged: all 8 answers are right or wrong as in the baseline" in done.err.splitlines()
    metrics = {one["key"]: one["value"] for one in found(done)["metrics"]}
    assert (metrics["lost"], metrics["gained"], metrics["mcnemar_p"]) == (0, 0, 1)


def test_a_loss_against_the_baseline_ends_with_1(server: ChatServer, tmp_path: Path) -> None:
    words = ("--kinds", "serving,images")
    assert ask(server.url, *words, cwd=tmp_path).code == 0
    server.fault = "dropped-images"
    done = ask(server.url, *words, "--baseline", "latest", cwd=tmp_path)
    assert done.code == 1
    broken, lost = said(done)
    assert broken == "fidelab: pictures passed in the baseline and fails now"
    assert lost.startswith("fidelab: lost 8 of 8, gained 0 (p = 0.0078): images-1, images-2")


def test_a_fault_that_the_baseline_has_too_ends_with_0(tmp_path: Path) -> None:
    with serving(chat_server(fault="usage")) as served:
        assert ask(served.url, *SERVING, *("--kinds", "serving,arithmetic"), cwd=tmp_path).code == 1
        done = ask(served.url, "--kinds", "serving,arithmetic", "--baseline", "latest", cwd=tmp_path)
    assert (done.code, said(done)) == (0, [])


def test_a_baseline_of_other_questions_is_refused_and_the_run_is_kept(server: ChatServer, tmp_path: Path) -> None:
    assert ask(server.url, "--kinds", "sql", cwd=tmp_path).code == 0
    done = ask(server.url, *SUMS, "--baseline", "latest", cwd=tmp_path)
    assert done.code == 2
    assert "has no answered question in common with this run" in said(done)[-1]
    assert f"the results so far are in runs/{done.folder.name}" in done.err
    assert found(done)["n_items"] == 8
    assert (done.folder / "report.html").exists()


# ------------------------------------------------------------------------------------------------ policies


def rule(cwd: Path, least: str, kind: str = "arithmetic") -> Path:
    path = cwd / "policy.yaml"
    path.write_text(f"rules:\n  - {{metric: benches.eval.accuracy, cell: {{kind: {kind}}}, min: {least}}}\n")
    return path


@pytest.mark.parametrize(("least", "code"), [("60%", 0), ("80%", 3)])  # 8 of 8 are 67.6% or more
def test_a_policy_decides_as_fidelab_check_does(least: str, code: int, server: ChatServer, tmp_path: Path) -> None:
    policy = rule(tmp_path, least)
    done = ask(server.url, *SUMS, "--policy", policy, cwd=tmp_path)
    assert done.code == code
    assert len(said(done)) == bool(code)
    assert cli("check", "latest", "--policy", policy, cwd=tmp_path).code == code


def test_limits_of_a_policy_replace_those_of_all_kinds(tmp_path: Path) -> None:
    policy = rule(tmp_path, "60%")
    done = asked(tmp_path, "--kinds", "images,arithmetic", "--policy", policy, fault="dropped-images")
    assert (done.code, said(done)) == (0, [])
    assert cli("check", "latest", "--policy", policy, cwd=tmp_path).code == 0
    assert found(done)["downgrades"] == ["images: 0 of 8 right"]


def test_kinds_that_a_server_refuses_leave_a_run_undecided(tmp_path: Path) -> None:
    done = asked(tmp_path, "--kinds", "images", takes_images=False)
    assert done.code == 3
    assert said(done)[-1].startswith("fidelab: nothing was tested: the server takes no pictures")


def test_a_policy_decides_on_the_kinds_that_it_names(tmp_path: Path) -> None:
    policy = rule(tmp_path, "60%", "images")
    done = asked(tmp_path, "--kinds", "images", "--policy", policy, fault="dropped-images")
    assert done.code == cli("check", "latest", "--policy", policy, cwd=tmp_path).code == 1
    assert said(done)[0].startswith("fidelab: benches.eval.accuracy kind images is 0.00%")


def test_a_policy_leaves_the_serving_checks_in_force(tmp_path: Path) -> None:
    done = asked(tmp_path, "--kinds", "serving,arithmetic", "--policy", rule(tmp_path, "60%"), fault="usage")
    assert done.code == 1
    assert said(done)[0].startswith("fidelab: usage: ")
