"""Paces of own programs: what is expected of the next start, from those before it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fidelab.plan.paces import Paces, Reading

READING = Reading("build", "/models/a-Q8_0.gguf", 1_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where paces lie."""
    return tmp_path / "own_paces.json"


def test_tokens_take_as_long_as_in_the_last_start(path: Path) -> None:
    Paces(path).add(READING, tokens=500, seconds=10.0)
    Paces(path).add(READING, tokens=1_000, seconds=10.0)
    assert Paces(path).seconds(READING, 3_000) == (30.0, "at the pace of its last run here")


def test_a_model_of_twice_the_size_takes_twice_as_long(path: Path) -> None:
    Paces(path).add(READING, tokens=1_000, seconds=10.0)
    larger = replace(READING, model="/models/b.gguf", model_bytes=2_000)
    assert Paces(path).seconds(larger, 3_000) == (60.0, "at the pace of a-Q8_0.gguf here")


def test_a_model_that_was_written_anew_is_another(path: Path) -> None:
    Paces(path).add(READING, tokens=1_000, seconds=10.0)
    found = Paces(path).seconds(replace(READING, model_bytes=500), 1_000)
    assert found == (5.0, "at the pace of a-Q8_0.gguf here")


def test_nothing_is_known_of_a_program_that_has_not_run(path: Path) -> None:
    Paces(path).add(READING, tokens=1_000, seconds=10.0)
    assert Paces(path).seconds(replace(READING, how="another build"), 1_000) is None


@pytest.mark.parametrize("damage", ["", "[", "{}", "[1]", '[{"reading": {}}]'])
def test_a_file_that_cannot_be_read_counts_as_empty_and_is_replaced(path: Path, damage: str) -> None:
    path.write_text(damage)
    assert Paces(path).seconds(READING, 1_000) is None
    Paces(path).add(READING, tokens=1_000, seconds=10.0)
    assert Paces(path).seconds(READING, 1_000) is not None


@pytest.mark.parametrize("value", [0, -1])
def test_a_pace_that_cannot_be_is_left_out(path: Path, value: float) -> None:
    Paces(path).add(READING, tokens=1_000, seconds=10.0)
    [pace] = json.loads(path.read_text())
    path.write_text(json.dumps([{**pace, "tokens_per_second": value}]))
    assert Paces(path).seconds(READING, 1_000) is None


def test_the_file_stays_short(path: Path) -> None:
    for number in range(80):
        Paces(path).add(replace(READING, model=f"/models/{number}.gguf"), tokens=1_000, seconds=10.0)
    assert len(json.loads(path.read_text())) == 64
    found = Paces(path).seconds(replace(READING, model="/models/79.gguf"), 1_000)
    assert found == (10.0, "at the pace of its last run here")
