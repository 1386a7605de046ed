"""``fidelab bench serve`` and ``sweep`` against real servers: what is written, what is said, how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fidelab.bench.serving.contact import Contact
from fidelab.metrics.serving import saturation
from tests.bench.load.mock import MockServer, MockSettings
from tests.engines.openai_server import Served, byte_model, save_tokenizer, serving
from tests.run.harness import Done, cli

SMALL = ("--random-input-len", 32, "--random-output-len", 8, "--num-prompts", 12, "--max-concurrency", 4)


def serve(url: str, *words: object, cwd: Path, small: bool = True) -> Done:
    named = ("--base-url", url, "--tokenizer", byte_model())
    return cli("bench", "serve", *named, *(SMALL if small else ()), *words, cwd=cwd)


def sweep(url: str, *words: object, cwd: Path) -> Done:
    named = ("--base-url", url, "--tokenizer", byte_model())
    return cli("bench", "sweep", *named, "--random-output-len", 8, *words, cwd=cwd)


def served(done: Done) -> dict[str, Any]:
    record: dict[str, Any] = done.arm("reference")["benches"]["serving"]
    return record


def loads(done: Done) -> list[dict[str, Any]]:
    """Each load: how it ended, and its metrics' values by name."""
    record = served(done)
    return [
        {**cell, **{m["name"]: m["value"] for m in record["metrics"] if m["cell"] == cell["at"]}}
        for cell in record["cells"]
        if "arrival" in cell["at"]
    ]


def rows(done: Done) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (done.folder / "requests.jsonl").read_text().splitlines()]


def kinds(cell: dict[str, Any]) -> set[str]:
    return {flag["kind"] for flag in cell["flags"]} - {"lag"}  # that is the machine's


def test_a_load_leaves_a_whole_run_folder(tmp_path: Path) -> None:
    with MockServer(MockSettings(itl=0.005)) as mock:
        done = serve(mock.url, "--name", "awq", "--kv", "fp8/bf16", "--warmup", 3, cwd=tmp_path)
    assert done.code == 0, done
    assert {path.name for path in done.folder.iterdir()} >= {
        *("config.resolved.yaml", "requests.jsonl", "report.json", "report.html")
    }
    arm = done.arm("reference")
    assert (arm["name"], arm["engine"], arm["model"], arm["status"]) == ("awq", "openai", "mock", "ok")
    assert (arm["kv"]["k"], arm["kv"]["v"]) == ("fp8", "bf16")
    [cell] = loads(done)
    assert (cell["requests"], cell["facts"]["measured"]["completed"], cell["facts"]["measured"]["output_tokens"]) == (
        12,
        12,
        96,
    )
    assert cell["context counted"] == 32
    assert cell["valid"]
    assert len(rows(done)) == 15
    assert sum(row["warmup"] for row in rows(done)) == 3


def test_every_figure_follows_from_the_recorded_requests(tmp_path: Path) -> None:
    with MockServer(MockSettings(ttft=0.01, itl=0.002, tokens_per_event=3)) as mock:
        done = serve(mock.url, cwd=tmp_path)
    [cell] = loads(done)
    measured = [row for row in rows(done) if not row["warmup"]]
    assert all(len(row["events"]) == 3 and row["counted"]["output_tokens"] == 8 for row in measured)
    seconds = max(row["ended"] for row in measured)
    assert cell["facts"]["measured"]["seconds"] == pytest.approx(seconds, abs=1e-5)
    assert cell["output rate"] == pytest.approx(12 * 8 / seconds, rel=1e-3)
    tpot = [1e3 * (row["events"][-1] - row["events"][0]) / 7 for row in measured]
    assert cell["TPOT mean"] == pytest.approx(sum(tpot) / 12, rel=1e-3)
    ttft = [1e3 * (row["events"][0] - row["sent"]) for row in measured]
    assert cell["TTFT mean"] == pytest.approx(sum(ttft) / 12, rel=1e-3)
    flown = sum(row["ended"] - row["sent"] for row in measured)
    assert cell["effective concurrency"] == pytest.approx(flown / seconds, rel=1e-3)


def test_the_servers_own_counters_confirm_the_client_and_json_is_the_report(tmp_path: Path) -> None:
    with MockServer(MockSettings(itl=0.002)) as mock:
        done = serve(mock.url, "--json", cwd=tmp_path)
    assert json.loads(done.out) == done.report
    [cell] = loads(done)
    assert cell["facts"]["client over server"] == pytest.approx(1, abs=0.01)
    assert "server-mismatch" not in kinds(cell)


def test_the_servers_own_median_stands_beside_the_clients(tmp_path: Path) -> None:
    with MockServer(MockSettings(ttft=0.03)) as mock:
        done = serve(mock.url, cwd=tmp_path)
    [cell] = loads(done)
    assert 20 < cell["server's TTFT p50"] < 100  # 20 to 50 ms is one bucket, and a busy machine is late
    assert cell["TTFT p50"] >= 30
    shown = cli("report", done.folder, "--markdown", cwd=tmp_path).out
    assert shown.index("| TTFT p50") < shown.index("| server's TTFT p50") < shown.index("| TPOT p50")


def test_an_open_loop_keeps_its_times(tmp_path: Path) -> None:
    words = ("--request-rate", 200, "--arrival", "constant", "--num-prompts", 20, "--warmup", 0)
    with MockServer(MockSettings()) as mock:
        done = serve(mock.url, "--random-input-len", 16, "--random-output-len", 4, *words, cwd=tmp_path, small=False)
    [cell] = loads(done)
    assert cell["at"] == {"context": 16, "output": 4, "arrival": "constant", "rate": 200}
    due = [row["due"] for row in rows(done)]
    assert due == pytest.approx([due[0] + 0.005 * n for n in range(20)], abs=1e-5)
    assert all(row["sent"] >= row["due"] for row in rows(done))


def test_the_key_goes_to_the_server_and_into_no_file(tmp_path: Path) -> None:
    with serving(Served(key="sesame-key")) as server:
        done = serve(f"http://127.0.0.1:{server.port}", "--api-key", "sesame-key", cwd=tmp_path)
    assert {key for key in server.keys if key} == {"Bearer sesame-key"}
    everything = done.out + done.err + "".join(path.read_text() for path in done.folder.iterdir() if path.is_file())
    assert "sesame-key" not in everything
    assert "--api-key KEY" in done.report["command"]


def test_a_sweep_measures_every_cell_and_finds_where_the_server_saturates(tmp_path: Path) -> None:
    """The mock answers four at a time: eight wait."""
    with MockServer(MockSettings(ttft=0.01, itl=0.005, concurrency=4)) as mock:
        done = sweep(mock.url, "--concurrency", "1,2,4,8", "--contexts", "16,64", "--num-prompts", 16, cwd=tmp_path)
    cells = loads(done)
    asked = [(context, concurrency) for context in (16, 64) for concurrency in (1, 2, 4, 8)]
    assert [(cell["at"]["context"], cell["at"]["concurrency"]) for cell in cells] == asked
    assert all(cell["status"] == "ok" for cell in cells)
    rates = [[cell["output rate"] for cell in cells if cell["at"]["context"] == context] for context in (16, 64)]
    assert all(2 * one < four < 2 * one * 4 and eight < 1.5 * four for one, _, four, eight in rates)
    if all(cell["valid"] for cell in cells):  # a busy machine may have left one of them unfilled
        expected = [saturation([1, 2, 4, 8], curve)[0] for curve in rates]
        found = [metric["value"] for metric in served(done)["metrics"] if metric["name"] == "saturation"]
        assert found == expected


def test_a_context_beyond_the_servers_limit_is_not_supported_and_the_sweep_goes_on(tmp_path: Path) -> None:
    with MockServer(MockSettings(max_model_len=256, itl=0.005)) as mock:
        done = sweep(mock.url, "--concurrency", "2", "--contexts", "1k,64", cwd=tmp_path)
    assert done.code == 0, done
    large, small = loads(done)
    assert large["status"] == "not_supported"
    assert "max_model_len" in large["reason"]
    assert "256" in large["reason"]
    assert small["valid"]


@pytest.mark.parametrize(("contexts", "real"), [("0,32", [1, 32]), ("0,1", [1])])
def test_context_0_is_the_shortest_prompt_and_the_record_has_its_length(
    tmp_path: Path, contexts: str, real: list[int]
) -> None:
    with MockServer(MockSettings(itl=0.005)) as mock:
        done = sweep(mock.url, "--concurrency", 1, "--contexts", contexts, "--num-prompts", 3, cwd=tmp_path)
    assert done.code == 0, done
    assert [(cell["at"]["context"], cell["status"]) for cell in loads(done)] == [(n, "ok") for n in real]
    assert loads(done)[0]["context counted"] == real[0]


def test_the_shortest_prompt_counts_what_the_server_adds(tmp_path: Path) -> None:
    """It puts a BOS before texts, whose tokens are bytes here: the shortest texts are of a few letters."""
    from fidelab.models.tiny import make_tiny

    tokenizer = save_tokenizer(make_tiny(tmp_path / "model"))
    with serving(Served(takes_ids=False, adds_bos=True)) as server:
        words = ("--concurrency", 1, "--contexts", 0, "--num-prompts", 3, "--tokenizer", tokenizer)
        done = sweep(f"http://127.0.0.1:{server.port}", *words, "--repeats", 2, cwd=tmp_path)
    assert done.code == 0, done
    (cell,) = loads(done)
    assert (cell["status"], cell["context counted"]) == ("ok", cell["at"]["context"])
    assert 2 <= cell["at"]["context"] < 32


def test_a_context_that_the_servers_own_tokens_fill_is_not_supported_and_the_sweep_goes_on(tmp_path: Path) -> None:
    """It puts a BOS before texts: no prompt makes one token there."""
    from fidelab.models.tiny import make_tiny

    tokenizer = save_tokenizer(make_tiny(tmp_path / "model"))
    with serving(Served(takes_ids=False, adds_bos=True)) as server:
        url = f"http://127.0.0.1:{server.port}"
        words = ("--concurrency", 1, "--contexts", "1,32", "--num-prompts", 3, "--tokenizer", tokenizer)
        done = sweep(url, *words, cwd=tmp_path)
    assert done.code == 0, done
    short, whole = loads(done)
    assert (short["status"], whole["status"]) == ("not_supported", "ok")
    assert "the server adds 1" in short["reason"]
    assert "not supported: a prompt of 1 tokens cannot be made" in done.err


def test_a_pipe_gets_every_column_and_goodput_takes_several_targets(tmp_path: Path) -> None:
    words = ("--goodput", "ttft:60000,tpot:60000", "--request-rate", 500, "--repeats", 2)
    with MockServer(MockSettings(draft_tokens=2, tokens_per_event=2, ttft=0.02)) as mock:
        done = serve(mock.url, *words, cwd=tmp_path)
    assert "narrow terminal" not in done.out
    for word in ("client", "lag", "acceptance", "goodput", "–"):  # the queue is read once a second
        assert word in done.out
    assert served(done)["facts"]["settings"]["goodput"] == {"ttft": 60000, "tpot": 60000}
    [cell] = loads(done)
    assert cell["good requests"] == 1


def test_a_load_beyond_the_limit_alone_ends_with_1_in_one_line(tmp_path: Path) -> None:
    with MockServer(MockSettings(max_model_len=256)) as mock:
        done = serve(mock.url, "--random-input-len", "1k", cwd=tmp_path)
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("fidelab: 1,032 tokens (1,024 + 8) are beyond the server's")


def test_repeats_are_passes_over_all_cells(tmp_path: Path) -> None:
    with MockServer(MockSettings()) as mock:
        done = sweep(mock.url, "--concurrency", "1,2", "--contexts", "16", "--repeats", 3, "--warmup", 0, cwd=tmp_path)
    rates = [metric for metric in served(done)["metrics"] if metric["name"] == "output rate"]
    assert [len(rate["repeats"]) for rate in rates] == [3, 3]
    assert [(row["repeat"], row["cell"]) for row in rows(done)[::8]] == [(r, c) for r in range(3) for c in range(2)]


def test_no_prompt_is_asked_twice(tmp_path: Path) -> None:
    with serving(Served()) as server:
        words = ("--concurrency", "1,2", "--contexts", "100", "--repeats", 2, "--num-prompts", 4)
        sweep(f"http://127.0.0.1:{server.port}", *words, cwd=tmp_path)
    prompts = [tuple(body["prompt"]) for body in server.requests]
    assert len(prompts) >= 2 * 2 * (4 + 2)
    assert len(set(prompts)) == len(prompts)


@pytest.mark.full
def test_a_server_that_dies_ends_the_sweep_and_leaves_its_cells(tmp_path: Path) -> None:
    with MockServer(MockSettings(itl=0.01)) as mock:

        def end_after_first_cell() -> None:
            while not list(tmp_path.glob("runs/2*/report.json")):
                time.sleep(0.01)
            os.kill(mock.pid, signal.SIGKILL)

        timer = threading.Thread(target=end_after_first_cell)
        timer.start()
        done = sweep(mock.url, "--concurrency", "1,2,4", "--contexts", "16", "--num-prompts", 40, cwd=tmp_path)
        timer.join()
    assert done.code == 1
    assert "refuses connections" in done.err
    record = served(done)
    assert record["status"] == "failed"
    assert record["cells"][0]["valid"]
    assert len(loads(done)) < 3
    assert (done.folder / "report.html").is_file()


def test_ctrl_c_keeps_the_cells_so_far(tmp_path: Path) -> None:
    words = ("sweep", "--concurrency", "1,2,4", "--contexts", "16", "--num-prompts", "100", "--random-output-len", "20")
    with MockServer(MockSettings(itl=0.001)) as mock:
        argv = [sys.executable, "-m", "fidelab", "bench", *words, "--base-url", mock.url]
        argv += ["--tokenizer", str(byte_model()), "--output-dir", str(tmp_path)]
        child = subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        while child.poll() is None and not list(tmp_path.glob("2*/report.json")):
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "the cells so far are in" in err
    [report] = tmp_path.glob("2*/report.json")
    cells = json.loads(report.read_text())["reference"]["benches"]["serving"]["cells"]
    assert 1 <= sum("arrival" in cell["at"] for cell in cells) < 3
    assert report.with_name("report.html").is_file()


def refused(done: Done) -> str:
    """The one line of a command that is refused and leaves nothing."""
    assert done.code == 2, done
    assert not (done.cwd / "runs").exists()
    [line] = done.err.splitlines()
    return line.removeprefix("fidelab: ")


@pytest.mark.parametrize(
    ("server", "words", "said"),
    [
        (MockSettings(model="this"), ("--model", "that"), "does not serve model 'that'; it serves: this"),
        (MockSettings(endless=True, itl=0.005), ("--timeout", 0.5), "did not answer within 0.5 s"),
    ],
    ids=["another model", "an answer without end"],
)
def test_a_server_that_cannot_be_measured(
    tmp_path: Path, server: MockSettings, words: tuple[object, ...], said: str
) -> None:
    with MockServer(server) as mock:
        assert said in refused(serve(mock.url, *words, cwd=tmp_path))


def test_a_key_that_is_refused_names_our_flag(tmp_path: Path) -> None:
    with serving(Served(key="right")) as server:
        line = refused(serve(f"http://127.0.0.1:{server.port}", "--api-key", "wrong", cwd=tmp_path))
    assert "give it by --api-key" in line
    assert "wrong" not in line


@pytest.mark.parametrize(
    ("fault", "kind"), [({"drop_rate": 0.5}, "aborted"), ({"invalid_json_rate": 0.5}, "invalid-json")]
)
def test_some_broken_streams_are_counted_and_make_the_cell_invalid(
    tmp_path: Path, fault: dict[str, float], kind: str
) -> None:
    with MockServer(MockSettings(seed=3, **fault)) as mock:  # type: ignore[arg-type]
        done = serve(mock.url, "--num-prompts", 40, cwd=tmp_path)
    assert done.code == 1
    [cell] = loads(done)
    assert set(cell["facts"]["errors"]) == {kind}
    assert cell["facts"]["measured"]["completed"] + cell["errors"] == 40
    assert not cell["valid"]
    assert f"{cell['facts']['errors'][kind]} {kind}" in done.err


def test_a_server_that_answers_as_another_model_is_refused_before_any_load(tmp_path: Path) -> None:
    with MockServer(MockSettings(answers_as=("other",))) as mock:
        done = serve(mock.url, cwd=tmp_path)
    assert "the server answered as model other, not as mock" in refused(done)


def test_one_answer_of_another_model_within_a_load_makes_the_cell_invalid(tmp_path: Path) -> None:
    with MockServer(MockSettings(answers_as=(*["mock"] * 20, *["other"] * 40))) as mock:
        done = serve(mock.url, "--num-prompts", 20, cwd=tmp_path)
    [cell] = loads(done)
    assert not cell["valid"]
    assert cell["facts"]["errors"].keys() == {"other-model"}
    assert "the server answered as model other, not as mock" in [flag["text"] for flag in cell["flags"]]
    assert "the server answered as model other, not as mock" in done.err
    assert done.code == 1


def test_a_load_that_another_model_answers_alone_failed_by_its_name(tmp_path: Path) -> None:
    with MockServer(MockSettings(answers_as=("mock", *["one", "two", "three"] * 9))) as mock:
        done = serve(mock.url, cwd=tmp_path)
    assert done.code == 1
    assert re.search(r"other-model \(the server answered as model (one|two|three), not as mock\)", done.err)


@pytest.mark.parametrize("names", [("",), ("mock", ""), ("mock",), ("first",), ("", "first", "mock")])
def test_answers_without_a_name_or_by_another_name_of_the_model_are_its_own(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    with MockServer(MockSettings(answers_as=names, aliases=("first",), itl=0.005)) as mock:
        done = serve(mock.url, "--model", "mock", "--max-concurrency", 1, cwd=tmp_path)
    assert done.code == 0, done
    [cell] = loads(done)
    assert cell["valid"]
    assert cell["facts"]["errors"] == {}


def test_no_usage_gives_no_token_figures_and_says_so(tmp_path: Path) -> None:
    with MockServer(MockSettings(no_usage=True)) as mock:
        done = serve(mock.url, cwd=tmp_path)
    assert done.code == 1
    [cell] = loads(done)
    assert not {"output rate", "TPOT mean"} & set(cell)
    assert cell["facts"]["measured"]["output_tokens"] == 0
    assert "the server counted no tokens for 12 of 12 answers" in done.err


def test_a_rate_that_the_client_cannot_reach_is_said(tmp_path: Path) -> None:
    words = ("--request-rate", 100000, "--arrival", "constant", "--num-prompts", 600)
    with MockServer(MockSettings()) as mock:
        done = serve(mock.url, "--random-input-len", 8, "--random-output-len", 2, *words, cwd=tmp_path, small=False)
    assert done.code == 1
    [cell] = loads(done)
    assert "rate" in kinds(cell)
    assert "the client could not keep the rate: 100,000 requests/s were due" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--request-rate", "fast"), "--request-rate 'fast': not a number"),
        (("--request-rate", "0"), "--request-rate 0: write requests per second above 0"),
        (("--random-input-len", "many"), "--random-input-len 'many': write numbers above 0"),
        (("--random-input-len", "128,1k"), "--random-input-len '128,1k': write one number"),
        (("--random-output-len", "16,32"), "--random-output-len '16,32': write one number"),
        (("--goodput", "itl:5"), "--goodput 'itl:5': write ttft:MS"),
        (("--endpoint", "embeddings"), "endpoint"),
    ],
)
def test_a_flag_that_cannot_be_is_one_line(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    with MockServer(MockSettings()) as mock:
        line = refused(serve(mock.url, *words, cwd=tmp_path))
    assert said in line


def test_a_server_that_is_not_there_and_a_url_that_is_none(tmp_path: Path) -> None:
    line = refused(serve("http://127.0.0.1:9", cwd=tmp_path))
    assert "refuses connections: start the server, or correct --base-url" in line
    assert refused(serve("ftp://example", cwd=tmp_path)).startswith("--base-url is not a URL")


def test_the_shortest_prompts_of_a_sweep_have_one_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many distinct prompts a cell needs: more of them may need to be longer."""
    monkeypatch.setattr(Contact, "shortest", lambda self, count, seeds: count + len(seeds))
    with serving(Served()) as server:
        done = sweep(server.url, "--contexts", "0", "--concurrency", "1,2,8", cwd=tmp_path)
    assert [cell["at"]["concurrency"] for cell in loads(done)] == [1, 2, 8]
    assert len({cell["at"]["context"] for cell in loads(done)}) == 1
