"""Profile ``arithmetic``: figures computed by fidelab, against arithmetic by hand and the published ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fidelab.config.profiles import load_profile, resolve
from fidelab.core.errors import ConfigError, UnknownNameError
from fidelab.studies.arithmetic import FUNCTIONS, check_computation, compute, main
from tests.run.harness import cli, refused

PROFILE = load_profile("arithmetic")
GIB, MIB = 2**30, 2**20


def harmonic(*scores: float) -> float:
    return len(scores) / sum(1 / score for score in scores)


def share(layers: int, heads: int, parameters: float, tokens: int) -> float:
    """Percentage of a 16-bit cache of heads of 128 in the bytes of a step."""
    cache = layers * heads * 128 * 2 * 2 * tokens
    return 100 * cache / (cache + 2 * parameters)


# name of the computation → the figure by arithmetic of this test, without fidelab
BY_HAND = {
    "llamacpp-composite": harmonic(69.62, 99.75, 100, 96.54),
    "sglang-composite": harmonic(67.71, 97.95, 100, 90.77),
    "vllm-composite": harmonic(62.40, 96.35, 100, 90.58),
    **{
        f"{name}-score": 100 / math.e**nats for name, nats in (("llamacpp", 0.0025), ("sglang", 0.021), ("vllm", 0.037))
    },
    "vllm-over-llamacpp": 14.8,
    "vllm-over-sglang": 37 / 21,
    "coder-30b": 1000 / 34,
    "coder-next-60b": 1000 / 41,
    "coder-next-8k": 100 / 6.9,
    "devstral-128": 100 / 4.1,
    "qwen35-weights": 26_895_998_464 * 4.25 / 8 / 1e9,
    "qwen35-cache": 16 * 4 * 256 * 2 * 262_144 / 2 / GIB,
    "gemma-kept": len({*range(8), *range(52, 60), *(5, 11, 17, 23, 29, 35, 41, 47, 53, 59)}),
    "group-of-704": max(size for size in (128, 64, 32, 16) if not 352 % size),
    "bytes-16": 28 * 2 * 4 * 128 * 2,
    "bytes-k16v8": 28 * 4 * 128 * (2 + 1),
    "capacity": 4 / 3,
    "qwen-2k": share(28, 4, 7.616e9, 2048),
    "mistral-2k": share(32, 8, 7.248e9, 2048),
    "llama-2k": share(32, 8, 8.030e9, 2048),
    "qwen-8k": share(28, 4, 7.616e9, 8192),
    "mistral-8k": share(32, 8, 7.248e9, 8192),
    "llama-8k": share(32, 8, 8.030e9, 8192),
    "weights-8k": 100 - share(32, 8, 7.248e9, 8192),
    **{f"{link}-7b": 10_000 / rate for link, rate in (("nvlink", 900), ("pcie", 64), ("cxl", 32))},
    **{f"{link}-24b": 50_000 / rate for link, rate in (("nvlink", 900), ("pcie", 64), ("cxl", 32))},
    "read-7b": 32 * 8 * 2 * (128 / 2 + 128 / 32 * 2) * 131_072 * 32 / 0.010 / 1e12,  # a 16-bit scale per 32 values
    "qwen-speedup": 28450 / 20657,
    "qwen-over-fp8": 100 * (2845 - 2763) / 2763,
    "k-over-v": 17681 / 0.51,
    "positions": 204_800,
    "window": 2048 * 152_064 * 4 / MIB,
    "window-vlm": 2048 * 248_320 * 4 / MIB,
    "model": 100 * 2048 * 152_064 * 4 / GIB,
    "model-vlm": 100 * 2048 * 248_320 * 4 / GIB,
    "nvfp4-over-awq": 35_313 / 24_057,
    "awq-1": 100 * 20 / 132,
    "awq-64": 100 * 460 / 1202,
}
# The published figures that do not follow from the others
UNLIKE = {
    *("devstral-128", "devstral-4k", "devstral-262k", "weights-8k", "read-7b", "read-24b", "qwen-limit"),
    *("qwen-over-fp8", "llama-over-fp8", "gsm8k-static", "hill-smax", "hill-half", "hill-gamma"),
}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cwd = tmp_path_factory.mktemp("arithmetic")
    done = cli("reproduce", "arithmetic", "--json", cwd=cwd)
    assert done.code == 0, done.err
    return dict(json.loads(done.out))


@pytest.fixture(scope="module")
def rows(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Row of each figure, by the name of its computation."""
    places = {figure.name: figure.at for figure in PROFILE.expected}
    return {places[row["at"]["name"]]: row for row in record["rows"] if row["at"]["part"] == "figure"}


def value(row: dict[str, Any], key: str) -> float:
    return float(next(metric["value"] for metric in row["metrics"] if metric["key"] == key))


@pytest.mark.parametrize("name", BY_HAND)
def test_a_figure_is_that_of_arithmetic_by_hand(name: str, rows: dict[str, dict[str, Any]]) -> None:
    assert value(rows[name], "measured") == pytest.approx(BY_HAND[name], rel=1e-12)


def test_published_figures_agree_except_those_with_a_reason(rows: dict[str, dict[str, Any]]) -> None:
    judged = {name: row["facts"]["agrees"] for name, row in rows.items() if "agrees" in row["facts"]}
    assert {name for name, agrees in judged.items() if agrees == "no"} == UNLIKE
    assert all(rows[name]["facts"]["remark"] for name in UNLIKE)
    assert len(judged) - len(UNLIKE) >= 55


def test_a_figure_with_a_range_agrees_within_it_and_one_without_within_its_last_digit(
    rows: dict[str, dict[str, Any]],
) -> None:
    coder = next(metric for metric in rows["coder-30b"]["metrics"] if metric["key"] == "measured")
    assert coder["ci"] == pytest.approx([1000 / 34.5, 1000 / 33.5])
    assert coder["ci"][1] > 29.5  # 30 as printed
    assert value(rows["coder-30b"], "difference") == pytest.approx(1000 / 34 - 30)
    assert rows["cxl-7b"]["facts"] == {  # 312.5, which the source cuts off
        **{"unit": "×", "agrees": "yes"},
        **{"expected": "312", "measured": "312.5", "difference": "+0.5"},
    }


def test_the_first_line_counts_and_each_reason_stands_below(record: dict[str, Any]) -> None:
    first, *others = record["sentences"]
    assert first.endswith(f"published figures agree, {len(UNLIKE)} do not:")
    text = "\n".join(others)
    assert "Hill Smax (3.75, here 3.966), Hill half batch (5.1, here 6.55), Hill exponent (1.32, here 0.941)" in text
    assert "94–99% mixes contexts" in text


def test_every_computation_is_a_figure_and_every_function_is_used() -> None:
    stages = {stage.name: stage.compute or {} for stage in PROFILE.stages}
    named = {(stage, name) for stage, entries in stages.items() for name in entries}
    assert named == {(figure.stage, figure.at) for figure in PROFILE.expected}
    assert {entry.function for entries in stages.values() for entry in entries.values()} | {"ceiling"} == set(FUNCTIONS)
    assert 0.8 <= compute("ceiling", CEILING)["value"] - 0.25 < 0.81


CEILING = {
    **{"layers": 28, "kv_heads": 4, "head_dim": 128, "parameters": 7.616e9, "tokens": 2048, "batch": 32},
    "kv": "k16v8",
}


def test_no_result_of_a_computation_is_written_in_the_profile() -> None:
    printed = {
        str(figure.value): figure.at for figure in PROFILE.expected if figure.value is not None and figure.value > 100
    }
    for stage in PROFILE.stages:
        for name, entry in (stage.compute or {}).items():
            given = {str(argument) for argument in entry.of.values()}
            assert not {text for text in given if printed.get(text) == name}


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("ratoi", {"figure": 1, "base": 2}, "did you mean 'ratio'?"),
        ("ratio", {"figure": 1}, "missing a required argument: 'base'"),
        ("ratio", {"figure": 1, "base": 2, "x": 3}, "unexpected keyword argument 'x'"),
        ("ratio", {"figure": "one", "base": 2}, "figure cannot be 'one'"),
        ("ratio", {"figure": True, "base": 2}, "figure cannot be True"),
        ("hill", {"batch": [1, 2], "rate": "x", "parameter": "smax"}, "rate cannot be 'x'"),
        ("hill", {"batch": [1, 2], "rate": [1, 2], "parameter": "top"}, "parameter cannot be 'top'"),
    ],
)
def test_a_computation_that_cannot_be_is_refused(function: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError)) as caught:
        check_computation(function, arguments, "p: stage s: f")
    assert message in str(caught.value)


def test_a_profile_with_an_unknown_function_is_refused_before_anything_runs(tmp_path: Path) -> None:
    wrong = {"f": {"function": "eval", "of": {"text": "1"}}}
    data = {
        **{"kind": "profile", "purpose": "a question", "source": {"title": "x"}, "parameters": {}},
        "stages": [{"name": "s", "compute": wrong}],
    }
    (tmp_path / "own.yaml").write_text(json.dumps(data))
    said = refused(cli("reproduce", "own.yaml", "--trust", "own.yaml", cwd=tmp_path))
    assert "unknown function of own.yaml: stage s: f 'eval'" in said
    assert not (tmp_path / "runs").exists()


def test_one_figure_that_cannot_be_computed_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = {
        "zero": {"function": "ratio", "of": {"figure": 1, "base": 0}},
        "link": {"function": "shortfall", "of": {"tb_per_s": 1, "link": "pigeon"}},
        "good": {"function": "ratio", "of": {"figure": "3.0", "base": 2}},
    }
    (tmp_path / "compute.json").write_text(json.dumps(entries))
    assert main([str(tmp_path / "compute.json")]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["good"] == {"value": 1.5, "ci": [pytest.approx(1.475), pytest.approx(1.525)]}
    assert "division" in found["zero"]["reason"]
    assert "pigeon" in found["link"]["reason"]
    assert [line.split(":")[1].strip() for line in err.splitlines()] == ["zero", "link"]


def test_the_variant_computes_the_same() -> None:
    plain, tiny = resolve("arithmetic", PROFILE), resolve("arithmetic", PROFILE, "tiny")
    assert [stage.compute for stage in plain.stages] == [stage.compute for stage in tiny.stages]
