"""``fidelab setup formats``: every format, its bytes and its engines."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import typer
from typer.testing import CliRunner

from fidelab.cli import formats
from fidelab.core import KVSpec
from fidelab.core.errors import UnknownNameError
from fidelab.engines.base import engine_class
from fidelab.engines.format_names import names_of
from fidelab.engines.k16v8 import meaning
from fidelab.environments import listing as environments
from fidelab.formats import FORMATS


def run(*args: str) -> str:
    app = typer.Typer()
    app.command()(formats.formats)
    result = CliRunner().invoke(app, list(args), catch_exceptions=False, env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.stdout


@pytest.fixture(scope="module", autouse=True)
def asked_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines answer once for all tests here: their answers do not depend on what the command is given.

    Engines that happen to be installed in environments of their own are not asked: that takes long.
    """
    asked = functools.cache(environments.listing)
    with (
        mock.patch.object(environments, "engines_dir", return_value=tmp_path_factory.mktemp("engines")),
        mock.patch.object(environments, "listing", lambda engines=None: asked(tuple(engines) if engines else None)),
    ):
        yield


@pytest.fixture(scope="module")
def listing() -> dict[str, Any]:
    out: dict[str, Any] = json.loads(run("--json"))
    return out


def row(listing: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in listing["formats"] if entry["name"] == name)
    return found


def test_every_format_is_listed_in_order_with_its_bytes_and_the_engines_that_have_it(listing: dict[str, Any]) -> None:
    ours = [entry["name"] for entry in listing["formats"] if entry["own"]]
    assert [name for name in ours if name != "k16v8"] == FORMATS.names()
    assert row(listing, "f16")["bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert row(listing, "q8_0")["bits_per_value"] == 8.5
    int5 = row(listing, "int5")
    assert int5["emulated"]
    assert (int5["bytes_per_token"], int5["stored_bytes_per_token"]) == (180 * (40 + 4), 180 * (64 + 4))
    assert all("hf" in row(listing, name)["engines"] for name in (*FORMATS.names(), "k16v8"))
    assert all(entry["engines"] or entry["refused"] for entry in listing["formats"])


def test_an_engines_own_formats_have_their_bytes_and_a_name_with_two_meanings_has_two_rows() -> None:
    names = ("int8", "turboquant_k8v4", "fp8_ds_mla")
    place = environments.InstalledEngine("vllm", "here", None, kv_names=names, refused={names[1]: "no GPU"})
    here = environments.InstalledEngine("hf", "here", None, kv_names=("int8",))
    rows = formats._rows(formats._EMBEDDED, {"hf": here, "vllm": place})
    int8 = [(entry["bits_per_value"], *entry["stored"]) for entry in rows if entry["name"] == "int8"]
    assert int8 == [(8.5, "hf"), (8.25, "vllm")]
    [packed] = [entry for entry in rows if entry["name"] == names[1]]
    assert (packed["k_bits"], packed["v_bits"], packed["keeps"]) == (8.0, 4.5, "ends")
    assert packed["bytes_per_token"] == 26 * 3 * (64 + 32 + 4) + 4 * 3 * 2 * 64 * 2
    assert packed["refused"] == {"vllm": "no GPU"}
    [latent] = [entry for entry in rows if entry["name"] == names[2]]
    assert (latent["bytes_per_token"], [*latent["refused"]]) == (None, ["vllm"])


def test_the_table_with_every_engines_formats_fits_80_columns() -> None:
    places = {
        name: environments.InstalledEngine(name, "here", None, kv_names=tuple(names_of(engine_class(name))))
        for name in ("vllm", "sglang", "llamacpp")
    }
    with mock.patch.object(environments, "listing", return_value=[*places.values()]):
        lines = run().splitlines()
    assert any("turboquant_4bit_nc†" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_the_table_marks_emulated_formats() -> None:
    table = run()
    assert "int5*" in table
    assert "int4*" not in table
    assert "30 layers, 3 KV heads, head dimension 64" in table


def test_an_engine_lists_only_its_formats_and_how_it_stores_them(listing: dict[str, Any]) -> None:
    here = json.loads(run("--json", "--engine", "transformers"))
    assert here["formats"]
    assert all([*entry["stored"]] == ["hf"] for entry in here["formats"] if not entry["refused"])
    stored = {entry["name"]: entry["stored"].get("hf") for entry in here["formats"]}
    assert [stored[name] for name in ("bf16", "int4", "k16v8", "int5")] == ["native", "plug-in", "plug-in", "emulated"]
    table = run("--engine", "hf")
    assert "stored" in table
    assert "llamacpp" not in table
    vllm = [meaning(KVSpec.parse(name), "bf16") for name in ("fp8", "int8", "k16v8")]
    assert [engine_class("vllm").stores(kv, emulated=False) for kv in vllm] == ["native", *["plug-in"] * 2]


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(UnknownNameError, match="hff"):
        run("--engine", "hff")


def test_the_model_gives_the_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from fidelab import models

    fake = dataclasses.replace(models.resolve("fake"), name="tiny", layers=2, kv_heads=5, head_dim=80)
    monkeypatch.setattr(models, "resolve", lambda name: fake)
    listing = json.loads(run("--json", "--model", "tiny"))
    assert listing["geometry"] == {"model": "tiny", "layers": 2, "kv_heads": 5, "head_dim": 80}
    assert row(listing, "f32")["bytes_per_token"] == 2 * 2 * 5 * 80 * 4
