"""Typed dataclasses as plain data: what is written is read again, and what has another form is refused by its place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from fidelab.core import Arm, FormatSpec, KVSpec, Status
from fidelab.core.serial import OMIT, fits, from_json, to_json


@dataclass(frozen=True)
class Inner:
    size: int
    span: tuple[float, float] | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    status: Status
    place: Path
    inner: list[Inner]
    options: tuple[tuple[str, int], ...] = ()
    layers: tuple[int, ...] = ()
    named: Mapping[int, str] = field(default_factory=dict)
    side: Literal["k", "v"] = "k"
    free: Any = None
    spec: FormatSpec | None = None
    absent: Mapping[str, str] = field(default_factory=dict, metadata=OMIT)


PLAIN = {"name": "x", "status": "ok", "place": "a/b", "inner": []}
FULL = Outer(
    name="x",
    status=Status.FAILED,
    place=Path("a/b"),
    inner=[Inner(1), Inner(2, (0.5, 1.5))],
    options=(("a", 1), ("b", 2)),
    layers=(0, 3),
    named={7: "seven"},
    side="v",
    free={"any": [1, None]},
    spec=FormatSpec.parse("int4[group=32]"),
    absent={"why": "it is there"},
)


@pytest.mark.parametrize("value", [FULL, from_json(Outer, PLAIN)], ids=["every field", "defaults"])
def test_what_went_through_json_is_read_as_it_was(value: Outer) -> None:
    assert from_json(Outer, json.loads(json.dumps(to_json(value)))) == value


def test_plain_data_follows_the_types_of_fields_which_are_left_out_only_at_a_default_that_says_so() -> None:
    plain = to_json(FULL)
    assert (plain["options"], plain["layers"], plain["spec"]) == ({"a": 1, "b": 2}, [0, 3], "int4[group=32]")
    assert (plain["status"], plain["place"], plain["inner"][1]) == ("failed", "a/b", {"size": 2, "span": [0.5, 1.5]})
    plain = to_json(from_json(Outer, PLAIN))
    assert "absent" not in plain
    assert plain["options"] == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": 5}, "Outer.name is of another type: 5"),
        ({"status": "odd"}, "Outer.status: 'odd' is not a valid Status"),
        ({"place": None}, "Outer.place is of another type"),
        ({"inner": [{"size": 1}, {"size": True}]}, r"Outer.inner\[1\].size is of another type: True"),
        ({"inner": [{"size": -1}]}, "size is of another type: -1"),
        ({"inner": [{"size": 2**63}]}, "size is of another type"),
        ({"inner": [{"size": 1, "span": [0.0, math.inf]}]}, "span is of another type"),
        ({"inner": [{"size": 1, "span": [0.0]}]}, "span is of another type"),
        ({"inner": [{}]}, r"Outer.inner\[0\] lacks 'size'"),
        ({"inner": {}}, "inner is of another type"),
        ({"options": [["a", 1]]}, "options is of another type"),
        ({"options": {"a": "1"}}, "Outer.options.a is of another type"),
        ({"layers": ["0"]}, r"layers\[0\] is of another type"),
        ({"named": {"seven": "x"}}, "a name that is not a number: 'seven'"),
        ({"side": "q"}, "side is of another type: 'q'"),
        ({"spec": "no format"}, "spec is of another type"),
        ({"more": 1}, "Outer has no field 'more'"),
    ],
    ids=str,
)
def test_data_of_another_form_is_refused_by_its_place(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_json(Outer, {**PLAIN, **changes})


@pytest.mark.parametrize(
    ("data", "kind", "fitting"),
    [
        ([True, "why"], list[bool | str], True),
        ([1], list[bool | str], False),
        ({"a": [1, 2]}, Mapping[str, tuple[int, int]] | None, True),
        ({"a": [1, 2, 3]}, Mapping[str, tuple[int, int]] | None, False),
        (3, float, True),
        (3.0, int, False),
    ],
    ids=str,
)
def test_data_fits_a_type_if_it_is_its_plain_form(data: Any, kind: Any, fitting: bool) -> None:
    assert fits(data, kind) is fitting


def test_an_arms_form_is_that_of_capture_keys_and_manifests() -> None:
    kv = KVSpec.parse("int4[group=32,skip-layers=0,3]/f16")
    arm = Arm("n", "hf", "m", "/m", "0" * 64, kv, "bfloat16", "cpu", 2, (("b", "1"), ("c", "2")))
    plain = to_json(arm)
    assert plain["kv"] == {"label": kv.label, "k": "int4[group=32]", "v": "f16", "skip_layers": [0, 3]}
    assert plain["options"] == {"b": "1", "c": "2"}
    assert "env" not in plain
    assert "draft" not in plain
    assert from_json(Arm, plain) == arm
