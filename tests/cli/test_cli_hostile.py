"""Text that a terminal would obey, in every field of a run: no command lets it through to where it prints."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from rich.text import Text

from fidelab.cli.output import guard_streams, open_console
from fidelab.engines.openai.http import Client
from fidelab.report.html import render_html
from fidelab.report.markdown import render_markdown
from tests.bench.load.mock import MockServer, MockSettings
from tests.bench.load.sse_server import Talk, serve, sized
from tests.engines.openai_server import byte_model
from tests.report.hostile import hostile_report as filled_report
from tests.report.sample import hostile_report, positions_for, sample_report, write_positions
from tests.report.sample_benches import hostile_benches
from tests.run.harness import SMALL, Done, cli, fake_file, refused, write_inputs

TITLE, CLIPBOARD, COLOUR, CURSOR = "\x1b]0;mine\x07", "\x1b]52;c;bWluZQ==\x1b\\", "\x1b[41m", "\x1b[2J\x1b[3A\r\b"
CONTROLS = f"{TITLE}{CLIPBOARD}{COLOUR}{CURSOR}\x9b2J\x9d0;mine\x9c\x7f\x00\x0e"
ORDER = "\u202egpj.\u2066x\u200f\u2028\ufeff"
HOSTILE = f"a{CONTROLS}b{ORDER}c"
REPORTS = {"filled": filled_report(HOSTILE), "axes": hostile_report(), "benches": hostile_benches()}


def seen(text: str) -> str:
    """The text, of which a terminal obeys line ends and tabs alone."""
    obeyed = {
        char
        for char in text
        if char not in "\n\t\u200c\u200d" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    }
    assert not obeyed, sorted(obeyed)
    return text


def shown(*words: object, cwd: Path) -> Done:
    """What a command prints, looked at."""
    done = cli(*words, cwd=cwd)
    seen(done.out)
    seen(done.err)
    return done


@pytest.fixture(scope="module", params=REPORTS)
def room(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose record is hostile, and its report before that."""
    room = tmp_path_factory.mktemp("room")
    report = REPORTS[request.param]
    for name, record in (("run", report), ("before", sample_report())):
        record.write(room / "runs" / name / "report.json")
        (room / "runs" / name / "config.resolved.yaml").write_text("model: fake\n")
    write_positions(room / "runs" / "run", positions_for(report))
    return room


@pytest.mark.parametrize(
    "words",
    [
        ("report", "runs/run"),
        ("report", "runs/run", "--markdown"),
        ("check", "runs/run", "--all", "--max-kld", "0.01", "--baseline", "runs/before"),
        ("check", "runs/before", "--all", "--baseline", "runs/run", "--markdown"),
        ("check", "runs/run", "--all", "--baseline", "runs/run"),
        ("report", "--rescore", "runs/run"),
        ("compare", "--resume", "runs/run"),
    ],
    ids=" ".join,
)
def test_no_command_prints_what_a_terminal_obeys(words: tuple[str, ...], room: Path) -> None:
    done = shown(*words, cwd=room)
    assert done.out or done.err
    assert done.code in (0, 1, 2, 3)


@pytest.mark.parametrize(
    "words",
    [("report", "runs/run", "--json"), ("check", "runs/run", "--all", "--max-kld", "1", "--json", "-")],
    ids=" ".join,
)
def test_json_escapes_what_cannot_be_printed_and_loses_nothing(words: tuple[str, ...], room: Path) -> None:
    done = shown(*words, cwd=room)
    found = json.loads(done.out)
    if words[0] == "report":
        assert found == json.loads((room / "runs/run/report.json").read_text("utf-8"))
    assert "\\u001b" in done.out or "\\u202e" in done.out


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_no_file_of_a_report_holds_what_a_terminal_obeys(report: object) -> None:
    for text in (render_html(report), render_markdown(report)):  # type: ignore[arg-type]
        seen(text)


def test_a_run_with_hostile_names_texts_and_logs(tmp_path: Path) -> None:
    """In the name of an arm, of a file and of the folder; in prompts and answers; in what a worker prints."""
    folder = tmp_path / f"room{TITLE.replace('/', '')}"
    fake_file(
        folder,
        text=f"text{COLOUR}.txt",
        prompts="prompts.txt",
        candidates=[
            {"name": f"tilt{TITLE}\u202e", "kv": "tilt"},
            {"name": f"gone{COLOUR}", "kv": "tilt[q=0.6]", "engine_args": {"crash": "0"}},
        ],
        axes={"kld": {"windows": 4, "n_ctx": 16}, "trajectory": {"n_predict": 4, "limit": 2}},
        floor=0,
    )
    (folder / f"text{COLOUR}.txt").write_text(f"line {CONTROLS[:-2]} of a text\n" * 60)
    (folder / "prompts.txt").write_text(f"prompt {COLOUR}{TITLE}\u202e\n" * 4)
    done = shown("compare", "-f", "experiment.yaml", cwd=folder)
    assert "tilt" in done.out, done
    run = done.folder
    for words in (("report", run), ("report", "--rescore", run)):
        shown(*words, cwd=folder)
    json.loads(shown("report", run, "--json", cwd=folder).out)
    seen((run / "report.html").read_text("utf-8"))


@pytest.mark.parametrize(
    "words",
    [
        (HOSTILE.replace("\x00", ""),),
        ("compare", HOSTILE.replace("\x00", ""), "--kv", "k16v8"),
        ("compare", "fake", *SMALL, "--kv", f"tilt{COLOUR}"),
        ("compare", "fake", *SMALL, "--kv", "tilt", "--axes", f"kld,{TITLE}"),
        ("compare", "fake", *SMALL, "--kv", "tilt", "--engine-arg", f"delay={COLOUR}"),
        ("compare", "fake", *SMALL, "--kv", "tilt", f"--{TITLE}"),
        ("compare", "-f", f"missing{TITLE.replace('/', '')}.yaml"),
        ("compare", "-f", "broken.yaml"),
        ("compare", "-f", "keys.yaml"),
        ("report", f"missing{COLOUR}"),
        ("report", "\udcff"),
        ("check", f"missing{COLOUR}", "--max-kld", "1"),
        ("check", "keys.yaml", "--policy", "keys.yaml"),
        ("setup", "fetch", f"missing{COLOUR}"),
        ("bench", "serve", "--base-url", f"http://{COLOUR}"),
    ],
    ids=lambda words: repr(words[:2])[:50],
)
def test_no_fault_repeats_what_a_terminal_obeys(words: tuple[str, ...], tmp_path: Path) -> None:
    write_inputs(tmp_path)
    (tmp_path / "broken.yaml").write_text('model: "\\e]0;mine\\a\n')
    (tmp_path / "keys.yaml").write_text('"mod\\e[41mel": "\\e]0;mine\\a"\n')
    refused(shown(*words, cwd=tmp_path))


def test_a_server_that_says_hostile_things_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get = Client.get

    def hostile(client: Client, path: str, **more: bool) -> dict[str, object]:
        return {"version": HOSTILE} if path == "/version" else get(client, path, **more)

    monkeypatch.setattr(Client, "get", hostile)
    with MockServer(MockSettings()) as mock_server:
        url = mock_server.url
        done = shown(
            *("bench", "serve", "--base-url", url, "--tokenizer", byte_model()),
            *("--random-input-len", 16, "--random-output-len", 4),
            *("--num-prompts", 2, "--warmup", 0, "--max-concurrency", 1, "--name", HOSTILE.replace("\x00", "")),
            cwd=tmp_path,
        )
    assert "mock" in done.err, done
    json.loads(shown("report", done.folder, "--json", cwd=tmp_path).out)


def test_a_server_that_refuses_in_hostile_words(tmp_path: Path) -> None:
    async def script(talk: Talk) -> None:
        known = b"/models" in talk.head
        said = {"data": [{"id": "tiny"}]} if known else {"error": {"message": HOSTILE + "\ud800"}}
        talk.send(sized(json.dumps(said).encode(), b"200 OK" if known else b"400 No"))

    with serve(script) as served:
        done = shown("bench", "serve", "--base-url", served.url, "--tokenizer", byte_model(), cwd=tmp_path)
    assert done.code == 2
    assert "answers 400: a" in done.err


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def guarded() -> Iterator[Terminal]:
    """Standard output and error of a terminal, guarded."""
    stream, variables = Terminal(), {"TERM": "xterm-256color", "COLUMNS": "100"}
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream), mock.patch.dict(os.environ, variables):
        os.environ.pop("NO_COLOR", None)
        guard_streams()
        yield stream


def test_print_and_write_escape() -> None:
    with guarded() as terminal:
        print(f"x {TITLE} \ud800 \u202e \U000e0001 caf\u00e9\u00a0\u3000 \u200d")
        sys.stderr.writelines(["\x9b2J\n"])
        sys.stdout.write('{"a": "\x7f\r"}\n')
    assert terminal.getvalue().split("\n") == [
        "x \\u001b]0;mine\\u0007 \\ud800 \\u202e \\udb40\\udc01 caf\u00e9\u00a0\u3000 \u200d",
        "\\u009b2J",
        '{"a": "\\u007f\\u000d"}',
        "",
    ]


def test_a_console_writes_its_own_sequences_alone() -> None:
    with guarded() as terminal:
        open_console().print(Text(f"x{TITLE}y{COLOUR}z", style="bold"))  # rich itself leaves the bell out
    assert terminal.getvalue() == "\x1b[1mx\ufffd]0;miney\ufffd[41mz\x1b[0m\n"


def test_bars_write_their_own_sequences_alone(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    candidate = f"name=tilt{TITLE}{COLOUR},kv=tilt"
    words = ("compare", "fake", *SMALL, "--windows", 4, "--n-ctx", 16, "--n-predict", 4, "--limit", 2)
    argv = ["fidelab", *map(str, words), "--candidate", candidate, "--no-floor"]
    from fidelab.cli import main

    with (
        guarded() as terminal,
        contextlib.chdir(tmp_path),
        mock.patch.object(sys, "argv", argv),
        pytest.raises(SystemExit) as stop,
    ):
        main()
    written = terminal.getvalue()
    assert stop.value.code == 0, written
    assert "\x1b[" in written  # the bar's own
    assert "tilt\ufffd]0;mine" in written
    assert not {"\x1b]", "\x07", "\x9b"} & {*written, *(written[at : at + 2] for at in range(len(written)))}
    assert COLOUR not in written


def test_bars_of_tqdm_still_move_the_cursor() -> None:
    from tqdm import tqdm  # type: ignore[import-untyped]

    with guarded() as terminal:
        for _ in tqdm(range(2), desc=f"x{TITLE}", mininterval=0):
            pass
    written = terminal.getvalue()
    assert written.startswith("\r")
    assert "\x1b]" not in written
    assert "x\\u001b]0;mine\\u0007" in written
