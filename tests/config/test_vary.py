"""The grid of an isolation matrix as users write it, by flags or in YAML."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from fidelab.config.experiment import validate
from fidelab.config.load import dump
from fidelab.config.presets import cells_of
from fidelab.config.schema import Experiment
from fidelab.core import KVSpec
from fidelab.core.errors import ConfigError


def experiment(vary: Any, **more: Any) -> Experiment:
    return validate({"model": "m", "vary": vary, **more}, "file")


def test_the_cells_are_all_combinations_named_by_their_levels() -> None:
    found = cells_of(experiment(["attention=sdpa,eager", "kv=bf16,int4"]))
    assert [cell.name for cell in found] == [
        "attention=sdpa, kv=bf16",
        "attention=sdpa, kv=int4",
        "attention=eager, kv=bf16",
        "attention=eager, kv=int4",
    ]
    assert [(cell.engine_args, cell.kv) for cell in found[:2]] == [
        ({"attention": "sdpa"}, KVSpec.parse("bf16")),
        ({"attention": "sdpa"}, KVSpec.parse("int4")),
    ]


def test_commas_inside_brackets_separate_no_values() -> None:
    assert experiment(["kv=int4[group=32,skip-layers=0,1],int8"]).vary == {
        "kv": ["int4[group=32,skip-layers=0,1]", "int8"]
    }


def test_every_key_of_an_arm_can_vary() -> None:
    keys = {"kv": ["a", "b"], "dtype": ["float32", "bfloat16"], "engine": ["hf", "vllm"], "model": ["x", "./y"]}
    cell = cells_of(experiment({**keys, "block_size": [16, 32]}))[-1]
    assert (cell.kv, cell.dtype, cell.model, cell.engine_args) == (
        KVSpec.parse("b"),
        "bfloat16",
        "./y",
        {"block-size": "32"},
    )
    assert cell.engine is not None
    assert cell.engine.name == "vllm"


def test_a_key_with_one_value_holds_for_all_cells_and_64_are_allowed() -> None:
    found = cells_of(experiment(["attention=fidelab", "kv=bf16,int4"]))
    assert [cell.engine_args for cell in found] == [{"attention": "fidelab"}] * 2
    eight = ",".join(map(str, range(8)))
    assert len(cells_of(experiment([f"a={eight}", f"b={eight}"]))) == 64


def test_a_resolved_file_repeats_the_grid_and_adds_no_candidates() -> None:
    said = experiment(["kv=bf16,int4"], candidates=["int8"])
    found = yaml.safe_load(dump(said))
    assert (found["vary"], len(found["candidates"])) == ({"kv": ["bf16", "int4"]}, 1)
    assert validate(found, "again") == said


@pytest.mark.parametrize(
    ("vary", "says"),
    [
        (["kv"], r"'kv': write KEY=a,b,…"),
        (["=a,b"], r"write KEY=a,b,…"),
        (["kv="], "kv has an empty value; write kv=a,b,…"),
        (["kv=a,,b"], "kv has an empty value"),
        ({"kv": []}, "kv has an empty value"),
        (["kv=a,a"], "kv has the value 'a' twice"),
        (["kv=a,b", "kv=c,d"], "kv is given twice"),
        (["block-size=1,2", "block_size=3,4"], "block_size is given twice"),
        (["kv=a"], "kv has a single value: nothing varies"),
        ({"kv": ["a,b", "c"]}, "kv: 'a,b' holds a comma"),
        (["name=a,b"], "name cannot be varied"),
        (["python=/a,/b"], "python cannot be varied"),
        (["dtype=float8,float32"], "vary: dtype: Input should be 'auto'"),
        (
            [f"a={','.join(map(str, range(9)))}", f"b={','.join(map(str, range(8)))}"],
            "the grid has 72 cells, more than",
        ),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused_in_one_line(vary: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        experiment(vary)
    assert "\n" not in str(error.value)


def test_without_a_grid_candidates_are_needed_as_before() -> None:
    with pytest.raises(ConfigError, match="candidates: name at least one"):
        validate({"model": "m"}, "file")
