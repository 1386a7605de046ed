"""A number format of a third party keeps what every format promises, and commands show it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from fidelab.engines.base import engine_class
from fidelab.environments import listing as environments
from fidelab.formats import FORMATS
from fidelab.models.tiny import make_tiny
from tests.formats import test_formats_contract as contract
from tests.run.harness import cli, write_inputs

pytestmark = pytest.mark.usefixtures("installed")

PROMISES = [
    test
    for name, test in vars(contract).items()
    if name.startswith("test_") and {*inspect.signature(test).parameters} <= {"text", "dim", "dtype"}
]


@pytest.mark.parametrize("promise", [test for test in PROMISES if inspect.signature(test).parameters])
def test_it_keeps_every_promise_of_the_contract(promise: Callable[..., None]) -> None:
    if "cuda" in promise.__name__ and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    wanted = inspect.signature(promise).parameters
    promise("upper16", **{key: value for key, value in {"dim": 80, "dtype": torch.bfloat16}.items() if key in wanted})


def test_engine_hf_has_it_and_the_table_of_formats_shows_its_bytes(tmp_path_factory: pytest.TempPathFactory) -> None:
    room = tmp_path_factory.mktemp("formats")
    assert FORMATS.names()[-1] == "upper16"
    assert "upper16" in engine_class("hf").kv_names()
    with mock.patch.object(environments, "engines_dir", return_value=room):
        done = cli("setup", "formats", "--engine", "hf", "--json", cwd=room)
    assert done.code == 0, done.err
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in json.loads(done.out)["formats"]}
    assert rows["upper16"]["stored"] == {"hf": "plug-in"}
    assert rows["upper16"]["bytes_per_token"] == rows["bf16"]["bytes_per_token"]


def test_a_comparison_on_engine_hf_runs_it_and_says_that_its_name_is_not_proven(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    cwd = tmp_path_factory.mktemp("upper16")
    write_inputs(cwd)
    make_tiny(cwd / "tiny")
    sizes = ("--axes", "kld", "--windows", 2, "--n-ctx", 32, "--no-floor", "--control", "none", "--reference", "f32")
    inputs = ("--text", "text.txt", "--prompts", "prompts.txt", "--device", "cpu", "--threads", 1)
    done = cli("compare", "tiny", "--kv", "upper16", *sizes, *inputs, cwd=cwd)
    assert done.code == 0, done.err + done.out
    ran = done.arm("upper16")["ran"]
    assert (ran["k_format"], ran["k_dtype"], ran["cache_bytes_per_token"]) == ("upper16", "int16", 512.0)
    unknown = "open: fidelab knows no other definition of upper16"
    assert ran["proof"] == {"received": "shown", "stored": unknown, "named": unknown}
