"""What the founding documents describe is served by a command: rows of a table, run in this process."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engines.openai_server import Served, byte_model, serving
from tests.run.harness import Done, cli

ROWS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").with_stem("founding_rows").read_text())


@dataclass(frozen=True)
class Place:
    """A folder with runs, and the words that rows may hold."""

    folder: Path
    words: dict[str, str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("rows")
    small = ("--engine", "fake", "--reference", "exact")
    runs = {}
    for name, more in {
        "run": "--kv tilt[q=0.51] --kv tilt[q=0.6] --axes kld --windows 6 --n-ctx 64",
        "cells": "--kv tilt[q=0.6] --axes trajectory,perplexity --limit 2 --set axes.perplexity.contexts=[64,128]",
    }.items():
        done = cli("compare", "fake", *small, *more.split(), cwd=folder)
        assert done.code == 0, done.err
        runs[name] = str(done.folder.relative_to(folder))
    with serving(Served()) as served:
        yield Place(folder, {**runs, "url": served.url, "tokenizer": str(byte_model())})


@pytest.fixture(scope="module")
def said() -> dict[str, Done]:
    """Commands that ran, for rows with the same one."""
    return {}


@pytest.mark.parametrize("row", ROWS, ids=[row["row"] for row in ROWS])
def test_a_row_of_a_founding_document_is_served(row: dict[str, Any], place: Place, said: dict[str, Done]) -> None:
    words = row["words"]
    for name, value in place.words.items():
        words = words.replace(f"{{{name}}}", value)
    if words not in said:
        said[words] = cli(*shlex.split(words), cwd=place.folder)
    done, codes = said[words], row.get("code", 0)
    assert done.code in (codes if isinstance(codes, list) else [codes]), done.err
    flat = " ".join(done.out.split())
    assert [text for text in row["says"] if text not in flat] == []


def test_rows_are_named_once_and_by_their_document() -> None:
    names = [row["row"] for row in ROWS]
    assert len(set(names)) == len(names)
    assert {name.partition(":")[0] for name in names} == {"000", "001", "002", "003"}
