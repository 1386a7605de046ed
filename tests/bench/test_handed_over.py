"""Rules that runs hand to benches: what is known of an arm besides its answers stands in its record."""

from __future__ import annotations

import pytest

from fidelab.bench.base import Facts
from fidelab.bench.decode import Decode, DecodeSettings
from fidelab.bench.prefill import PrefillBench, PrefillSettings
from tests.bench.test_bench_records import INPUTS, by_part


@pytest.mark.parametrize(("loads", "flags"), [(1, []), (3, ["loads"])])
def test_repeats_over_several_loads_of_the_model_are_flagged(loads: int, flags: list[str]) -> None:
    decode = Decode(DecodeSettings(depths=(64,), n=2, batch=(1,)))
    prefill = PrefillBench(PrefillSettings.model_validate({"lengths": "100", "batch": "1"}))
    times = {
        "64.b1.alone": [[1.0]] * 3,
        "64.b1": [[1.0, 1.5, 2.0]] * 3,
        "100.b1": [[1.0]] * 3,
    }
    for bench in (decode, prefill):
        [cell] = bench.record(by_part(bench.questions(INPUTS), times), Facts(loads=loads)).cells
        assert [flag.kind for flag in cell.flags] == flags
