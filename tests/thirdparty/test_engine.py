"""An engine of a third party runs, is shown and has its server's commands, without a change in fidelab."""

from __future__ import annotations

import math
import shlex

import pytest

from fidelab.config.serve import read_served
from fidelab.models.tiny import make_tiny
from fidelab.results.record import Report
from tests.run.harness import Done, cli, write_inputs


@pytest.fixture(scope="module")
def ran(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Done:
    cwd = tmp_path_factory.mktemp("echo")
    write_inputs(cwd)
    make_tiny(cwd / "tiny")
    words = ("--engine", "echo", "--kv", "unsure", "--control", "none", "--windows", 4, "--n-ctx", 16, "--no-floor")
    done = cli("compare", "tiny", *words, "--text", "text.txt", "--prompts", "prompts.txt", "--limit", 3, cwd=cwd)
    assert done.code == 0, done.err
    return done


def test_its_formats_are_compared_by_their_definition(ran: Done) -> None:
    def next_one(logit: float) -> float:
        return math.exp(logit) / (math.exp(logit) + 511)

    p, q = next_one(4.0), next_one(3.0)
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert ran.axis("unsure", "kld").value("mean") == pytest.approx(expected, rel=1e-3)
    assert (ran.axis("unsure", "trajectory").n_items, ran.axis("unsure", "trajectory").value("score")) == (3, 100.0)
    assert Report.from_json(ran.folder / "report.json").reference.kv_text == "sure"


def test_reports_have_its_title(ran: Done) -> None:
    assert "tiny · Echo" in ran.out
    assert "Echo" in cli("report", ran.folder, "--markdown", cwd=ran.cwd).out


def test_the_command_of_its_server_is_shown_and_read(ran: Done) -> None:
    command = ran.arm("unsure")["serve_command"]
    words = ["echo-server", "--model", str(ran.cwd / "tiny"), "--cache", "unsure", "--host", "127.0.0.1"]
    assert shlex.split(command) == [*words, "--port", "7000"]
    pasted = read_served(command, lambda _engine: {})
    assert (pasted.engine, pasted.settings()["reference"]) == ("echo", {"kv": "unsure"})


def test_a_name_in_other_letters_is_understood_and_an_engine_that_is_not_there_is_not(ran: Done) -> None:
    dry = ("--kv", "unsure", "--text", "text.txt", "--prompts", "prompts.txt", "--axes", "trajectory", "--dry-run")
    assert cli("compare", "tiny", "--engine", "ECHO", *dry, cwd=ran.cwd).code == 0
    refused = cli("compare", "tiny", "--engine", "ecko", *dry, cwd=ran.cwd)
    assert (refused.code, "echo" in refused.err) == (2, True)
