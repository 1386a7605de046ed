"""Recipes of mixed caches: the plan against brute force, its second round, and what engines read."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fidelab.core import KVSpec
from fidelab.core.errors import NotSupportedError, UsageError
from fidelab.metrics.divergence import RowComparison
from fidelab.studies.recipes import EXPORTS, Recipe, form_of
from fidelab.studies.roundings import Choices, Columns, Rows, refine

FORMATS = ("native", "a", "b")


def choices(sizes: np.ndarray, budget: float, together: Sequence[Sequence[str]] = ()) -> Choices:
    return Choices(
        unit="bits per value",
        budget=budget,
        groups=[str(n) for n in range(len(sizes))],
        formats=FORMATS,
        texts={},
        sizes=sizes,
        per=1.0,
        values=1,
        option=str,
        rivals={},
        together=together,
    )


def tables(seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Costs and sizes [5 layers, 3 formats], and a budget that something fits."""
    random = np.random.default_rng(seed)
    sizes = np.outer(random.integers(1, 4, 5), [16.0, 8.0, 4.0])
    costs = random.exponential(1.0, (5, 3)) * np.array([0.0, 0.1, 1.0])
    return costs, sizes, float(sizes[:, 2].sum() + random.uniform(0, 1) * (sizes[:, 0] - sizes[:, 2]).sum())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("together", [(), (("native", "a"), ("native", "b"))])
def test_the_plan_is_the_best_of_all_that_the_engine_can_store(seed: int, together: Sequence[Sequence[str]]) -> None:
    costs, sizes, budget = tables(seed)
    columns, _ = choices(sizes, budget, together).columns(costs)
    rows = np.arange(5)
    allowed = [
        list(plan)
        for plan in product(range(3), repeat=5)
        if sizes[rows, list(plan)].sum() <= budget
        and any({FORMATS[column] for column in plan} <= {*names} for names in together or [FORMATS])
    ]
    assert list(columns) in allowed
    assert costs[rows, columns].sum() == pytest.approx(min(costs[rows, plan].sum() for plan in allowed), rel=1e-5)


def cost(value: float) -> Rows:
    """Rows of one mean KL."""
    fields: dict[str, Any] = {name: np.zeros(2) for name in RowComparison.__dataclass_fields__}
    return Rows(RowComparison(**{**fields, "kl": np.full(2, value)}), np.array([0, 1]))


@pytest.mark.parametrize("seed", range(20))
def test_the_second_round_never_makes_a_plan_worse_where_it_measures(seed: int) -> None:
    random = np.random.default_rng(seed)
    _, sizes, budget = tables(seed)
    losses = {plan: float(random.exponential()) for plan in product(range(3), repeat=5)}

    def measured(plans: Sequence[Columns]) -> list[Rows | str]:
        return [cost(losses[tuple(map(int, plan))]) for plan in plans]

    start = np.full(5, 2)
    plans = [start]
    for group, column in product(range(5), range(2)):
        other = start.copy()
        other[group] = column
        if sizes[np.arange(5), other].sum() <= budget:
            plans.append(other)
    answers = measured(plans)
    answers[-1] = answers[-1] if len(plans) == 1 else "failed"
    best, rows = refine(plans, answers, measured, sizes, budget)
    assert rows.mean == pytest.approx(losses[tuple(map(int, best))])
    assert rows.mean <= min(one.mean for one in answers if isinstance(one, Rows))
    assert sizes[np.arange(5), best].sum() <= budget


def test_exchanges_that_help_are_put_together_where_that_helps_more() -> None:
    plans = [np.array([1, 1, 0]), np.array([0, 1, 0]), np.array([1, 0, 0])]
    answers = [cost(1.0), cost(0.8), cost(0.7)]
    best, rows = refine(plans, answers, lambda some: [cost(0.5) for _ in some], np.ones((3, 2)), 3.0)
    assert list(best) == [0, 0, 0]
    assert rows.mean == pytest.approx(0.5)
    best, rows = refine(plans, answers, lambda some: [cost(0.9) for _ in some], np.ones((3, 2)), 3.0)
    assert list(best) == [1, 0, 0]
    assert rows.mean == pytest.approx(0.7)


SKIPPING = Recipe.of({"0": "native", "1": "fp8_e4m3", "2": "fp8_e4m3", "3": "native", "4": "native", "5": "native"})
SIDES = Recipe.of(
    {"0.keys": "q8_0", "0.values": "q8_0", "1.keys": "q4_0", "1.values": "q4_0"}
    | {"2.keys": "q4_0", "2.values": "q4_0", "3.keys": "q4_0", "3.values": "native"}
)


def test_vllm_reads_one_format_and_the_layers_without_it() -> None:
    arguments = json.loads(EXPORTS["vllm"](SKIPPING, None))
    assert arguments == {"kv_cache_dtype": "fp8_e4m3", "kv_cache_dtype_skip_layers": ["0", "3", "4", "5"]}
    words = shlex.split(EXPORTS["vllm-args"](SKIPPING, None))
    assert words == ["--kv-cache-dtype", "fp8_e4m3", "--kv-cache-dtype-skip-layers", "0", "3", "4", "5"]


@pytest.mark.parametrize(
    ("formats", "k", "v", "skipped"),
    [
        ({"0": "native", "1": "fp8_e4m3", "2": "native", "3": "native"}, "fp8_e4m3", "fp8_e4m3", (0, 2, 3)),
        ({"0": "bf16/int8", "1": "native"}, "bf16", "int8", (1,)),
        ({"0": "int8[group=64]", "1": "native"}, "int8[group=64]", "int8[group=64]", (1,)),
        ({"0.keys": "native", "0.values": "q8_0"}, "bf16", "q8_0", ()),
    ],
)
def test_the_spec_of_a_recipe_is_read_back_as_its_layers(
    formats: dict[str, str], k: str, v: str, skipped: tuple[int, ...]
) -> None:
    text = EXPORTS["fidelab"](Recipe.of(formats), None).strip()
    spec = KVSpec.parse(text)
    assert (str(spec.k), str(spec.v), spec.skip_layers) == (k, v, skipped)


def test_model_optimizers_map_names_the_quantized_layers() -> None:
    mixed = Recipe.of(
        {"0.keys": "fp8_e4m3", "0.values": "fp8_e4m3", "1.keys": "fp8_e4m3", "1.values": "nvfp4"}
        | {"2.keys": "native", "2.values": "native"}
    )
    found = json.loads(EXPORTS["modelopt"](mixed, None))["quantization"]
    assert found["kv_cache_quant_algo"] == "MIXED_PRECISION"
    assert found["kv_cache_quantized_layers"] == {
        "model.layers.0.self_attn": {"quant_algo": "FP8"},
        "model.layers.1.self_attn": {"quant_algo": "FP8_K_NVFP4_V"},
    }
    whole = json.loads(EXPORTS["modelopt"](Recipe.of({"0": "fp8_e4m3", "1": "fp8_e4m3"}), None))["quantization"]
    assert (whole["kv_cache_quant_algo"], len(whole["kv_cache_quantized_layers"])) == ("FP8", 2)


def test_ik_llama_sets_the_first_and_the_last_layers() -> None:
    words = shlex.split(EXPORTS["ik_llama"](SIDES, None))
    flags = dict(zip(words[::2], words[1::2], strict=True))
    layers: dict[str, list[str]] = {}
    for side in "kv":
        types = [flags[f"--cache-type-{side}"]] * 4
        for place in ("first", "last"):
            name, _, n = flags.get(f"--cache-type-{side}-{place}", "f16,0").partition(",")
            at = slice(0, int(n)) if place == "first" else slice(4 - int(n), 4)
            types[at] = [name] * int(n)
        layers[side] = types
    assert layers == {"k": ["q8_0", "q4_0", "q4_0", "q4_0"], "v": ["q8_0", "q4_0", "q4_0", "f16"]}


@pytest.mark.parametrize(
    ("form", "recipe", "says"),
    [
        ("vllm", SIDES, "vLLM has one cache format next to native layers, this plan has several"),
        ("fidelab", SIDES, "--kv has one format next to native layers, this plan has several"),
        (
            "vllm",
            Recipe.of({"0": "bf16/int8"}),
            "vLLM itself stores fp8_e4m3 and fp8_e5m2, not bf16/int8; --export-format fidelab has it",
        ),
        ("modelopt", SIDES, "Model-Optimizer has FP8, NVFP4 and FP8/NVFP4, not q8_0/q8_0 of layer 0"),
        ("llamacpp", SIDES, "llama.cpp has one type for keys and one for values in all layers"),
        ("ik_llama", SKIPPING, "ik_llama.cpp has q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl and f16, not fp8_e4m3"),
        (
            "ik_llama",
            Recipe.of({str(n): ("q8_0", "q4_0")[n % 2] for n in range(4)}),
            "ik_llama.cpp sets the first and the last layers, this plan changes keys in 4 places",
        ),
        ("tensorrt-llm", SKIPPING, "no released TensorRT-LLM documents cache formats by layer"),
    ],
)
def test_what_an_engine_cannot_store_is_refused_with_the_nearest_that_works(
    form: str, recipe: Recipe, says: str
) -> None:
    with pytest.raises(NotSupportedError) as caught:
        EXPORTS[form](recipe, "q8_0")
    assert str(caught.value) == f"--export: {says}. Nearest that works: q8_0 in all layers"


@pytest.mark.parametrize(
    ("name", "given", "form"),
    [
        ("plan.json", None, "vllm"),
        ("hf_quant_config.json", None, "modelopt"),
        ("plan.args", None, "vllm-args"),
        ("plan.kv", None, "fidelab"),
        ("plan.json", "ik_llama", "ik_llama"),
    ],
)
def test_the_form_follows_the_name_of_the_file_unless_it_is_given(name: str, given: str | None, form: str) -> None:
    assert form_of(Path(name), given) == form


@pytest.mark.parametrize(
    ("name", "given", "says"), [("plan.txt", None, "add --export-format vllm, "), ("x", "vlm", "did you mean 'vllm'")]
)
def test_a_form_that_does_not_exist_is_refused(name: str, given: str | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        form_of(Path(name), given)
