"""The list of faults at hand-overs: each can be planted, and a file of tests beside it can find it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LISTED = yaml.safe_load((ROOT / "tests" / "handed_over.yaml").read_text("utf-8"))


@pytest.mark.parametrize("fault", LISTED, ids=[one["name"] for one in LISTED])
def test_each_listed_fault_can_be_planted(fault: dict[str, str]) -> None:
    assert (ROOT / "src" / "fidelab" / fault["file"]).read_text("utf-8").count(fault["was"]) == 1
    assert fault["is"] != fault["was"]
    assert (ROOT / fault["tests"]).is_file()
    # this file reads the lines themselves: it fails whatever is planted, and would find every fault
    assert not (ROOT / fault["tests"]).samefile(__file__)


def test_each_fault_is_listed_once() -> None:
    assert len({one["name"] for one in LISTED}) == len(LISTED)
    assert len({(one["file"], one["was"], one["is"]) for one in LISTED}) == len(LISTED)
