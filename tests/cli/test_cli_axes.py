"""Which axes flags choose, and with what settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fidelab.axes import AXES
from fidelab.cli.axes import axis_settings
from fidelab.core.errors import UsageError
from tests.run.harness import SMALL, cli, write_inputs


def chosen(axes: str, *limit: str, quick: bool = False, **kld: Any) -> dict[str, dict[str, Any]]:
    return axis_settings(axes, {"kld": kld}, limit, quick)


def test_presets_stand_for_their_axes() -> None:
    assert list(chosen("core")) == ["trajectory", "kld"]
    assert list(chosen("full")) == ["trajectory", "kld", "rniah", "plad"]
    assert list(chosen("all")) == AXES.names()
    assert list(chosen("kld, core")) == ["kld", "trajectory"]  # once each


def test_a_limit_without_an_axis_cuts_the_prompts_and_one_with_an_axis_that_axis_alone() -> None:
    assert chosen("full", "3") == {"trajectory": {"limit": 3}, "kld": {}, "rniah": {}, "plad": {"limit": 3}}
    assert chosen("trajectory,gsm8k", "5", "gsm8k=20") == {"trajectory": {"limit": 5}, "gsm8k": {"limit": 20}}


@pytest.mark.parametrize(
    ("axes", "limit", "said"),
    [
        ("kld", "1", "--limit belongs to test trajectory"),
        ("kld", "gsm8k=1", "--limit belongs to test gsm8k"),
        ("core", "kld=3", r"--limit kld=3: test kld has no limit; it gets smaller with --set axes.kld.windows=8"),
        ("full", "rniah=3", "with --set axes.rniah.lengths=.512., --set axes.rniah.trials=1"),
        ("core", "many", "--limit 'many': write a number"),
        ("core", "kld=", "write a number"),
        (" , ", "1", "--axes is empty"),
    ],
)
def test_a_limit_that_cannot_be_is_refused(axes: str, limit: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        chosen(axes, limit)


def test_a_flag_goes_before_the_quick_settings() -> None:
    assert chosen("kld", quick=True)["kld"]["windows"] < 32
    assert chosen("kld", quick=True, windows=30)["kld"]["windows"] == 30


@pytest.mark.parametrize("axis", AXES.names())
def test_the_quick_settings_of_an_axis_are_settings_that_it_has(axis: str) -> None:
    cls = AXES.load(axis)
    assert dict(cls.quick).items() <= cls.Settings.model_validate(dict(cls.quick)).model_dump().items()


def test_any_setting_can_be_set(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    words = ("compare", "fake", *SMALL, "--kv", "tilt", "--axes", "kld", "--n-ctx", 16, "--windows", 2, "--no-floor")
    done = cli(*words, "--set", "axes.kld.windows=3", "--set", "seed=7", cwd=tmp_path)
    assert done.code == 0
    settings = done.report["settings"]
    assert (settings["axes"]["kld"]["windows"], settings["seed"]) == (3, 7)
    refused = cli(*words, "--set", "axes.kld.colour=red", cwd=tmp_path)
    assert (refused.code, len(refused.err.splitlines())) == (2, 1)


def test_a_limit_beyond_what_there_is_says_so_in_one_line(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    words = ("compare", "fake", *SMALL, "--kv", "tilt", "--axes", "trajectory,plad", "--no-floor")
    limits = ("--limit", 99, "--limit", "plad=8")
    said = ["trajectory: limit 99, but there are only 8: all are asked"]
    done, planned, data = (
        cli(*words, *limits, *dry, cwd=tmp_path) for dry in ((), ["--dry-run"], ["--dry-run", "--json"])
    )
    assert done.code == planned.code == 0
    for text in (done.err, planned.out):
        assert [line for line in text.splitlines() if "there are only" in line] == said
    assert json.loads(data.out)["remarks"] == said
