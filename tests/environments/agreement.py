"""What compare accepts or refuses, beside what ``setup formats``, ``setup engines`` and ``doctor`` say of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from unittest import mock

from fidelab.config.experiment import validate
from fidelab.core.errors import UnknownNameError, UsageError
from fidelab.environments.asked import Engines
from fidelab.plan.resolve import resolve_experiment
from fidelab.results.numbers import one_line
from tests.run.harness import cli

RUNS = "runs"
UNKNOWN = "the engine has no such format"


class _Shared(Engines):
    """Engines that stay open from one experiment to the next: an engine is imported once for all of its formats."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def check_agreement(engines: Sequence[str], model: str, cwd: Path) -> dict[tuple[str, str], str]:
    """Every engine × every format that any of them has, as each command tells it; returns what compare does."""
    told = {
        "setup formats": _formats(json.loads(cli("setup", "formats", "--json", cwd=cwd).out)["formats"]),
        "setup engines": _engines(json.loads(cli("setup", "engines", "--json", cwd=cwd).out)["engines"]),
        "doctor": _doctor(json.loads(cli("doctor", "--json", cwd=cwd).out)["checks"]),
    }
    names = {name for table in told.values() for _, name in table}
    compared = _compare(engines, sorted(names), model, cwd)
    for command, table in told.items():
        shown = {pair: table.get(pair, UNKNOWN) for pair in compared}
        expected = {pair: one_line(text) for pair, text in compared.items()} if command == "doctor" else compared
        assert shown == expected, command
    return compared


def _compare(engines: Sequence[str], names: Sequence[str], model: str, cwd: Path) -> dict[tuple[str, str], str]:
    verdicts = {}
    shared = _Shared()
    with shared._stack, mock.patch("fidelab.plan.resolve.Engines", return_value=shared):
        for engine in engines:
            for name in names:
                written: dict[str, Any] = {"model": model, "engine": engine, "control": "none", "device": "cpu"}
                written |= {"axes": {"kld": {}}, "output_dir": str(cwd), "candidates": [{"kv": name, "name": "it"}]}
                try:
                    verdict = resolve_experiment(validate(written, "test")).unsupported.get("it", RUNS)
                except UnknownNameError:
                    verdict = UNKNOWN
                except UsageError as error:  # a name that is a side of pairs alone
                    verdict = str(error)
                verdicts[engine, name] = verdict
    return verdicts


def _formats(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    runs = {(engine, row["name"]): RUNS for row in rows for engine in row["engines"]}
    return runs | {(engine, row["name"]): why for row in rows for engine, why in row["refused"].items()}


def _engines(places: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    return {(p["engine"], name): p["refused"].get(name, RUNS) for p in reversed(places) for name in p["kv_formats"]}


def _doctor(checks: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    return {
        (check["group"][len("KV formats (") : -1], check["name"]): RUNS if check["status"] == "ok" else check["detail"]
        for check in checks
        if check["group"].startswith("KV formats")
    }
