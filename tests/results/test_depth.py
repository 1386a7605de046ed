"""What is stated of a verdict's depth, rule by rule."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fidelab.core import Status
from fidelab.results.depth import depth_statement, depths_of
from fidelab.results.measurement import Definition, Measurement

MEAN = Definition("mean", "nats", "lower")
EXCELLENT, PASS, DEGRADED, FAIL = (0.001, 0.002), (0.02, 0.03), (0.06, 0.08), (0.2, 0.3)


Given = tuple[int, tuple[float, float] | None, int]


def kld(*depths: Given, protocol: str = "depth", bound: bool = False) -> Measurement:
    """A KLD with depths: context, the interval of its mean, documents."""
    metrics = [MEAN(sum(ends or (0.0, 0.0)) / 2, ends, cell={"context": n}, bound=bound) for n, ends, _ in depths]
    sizes = [{"n_ctx": n, "n_clusters": documents} for n, _, documents in depths]
    facts: Mapping[str, object] = {
        "protocol": protocol,
        "contexts": [size for size in sizes if size["n_clusters"] >= 10],
        "undecided": [size for size in sizes if size["n_clusters"] < 10],
    }
    return Measurement(status=Status.OK, metrics=tuple(metrics), facts=dict(facts), cluster="document")


@pytest.mark.parametrize(
    ("depths", "said"),
    [
        ([(1024, EXCELLENT, 10), (2048, EXCELLENT, 10)], "excellent to 2k, beyond: not tested"),
        (
            [(1024, EXCELLENT, 10), (8192, EXCELLENT, 12), (32768, PASS, 10)],
            "excellent to 8k, pass to 32k, beyond: not tested",
        ),
        (  # the worst band so far counts
            [(1024, EXCELLENT, 10), (2048, DEGRADED, 10), (4096, EXCELLENT, 10)],
            "excellent to 1k, degraded to 4k, beyond: not tested",
        ),
        ([(1024, EXCELLENT, 10), (2048, FAIL, 10), (4096, FAIL, 10)], "excellent to 1k, fail at 2k"),
        (
            [(1024, PASS, 10), (2048, EXCELLENT, 9), (4096, EXCELLENT, 10)],
            "pass to 1k, beyond: not decided (9 documents at 2k)",
        ),
        ([(1024, EXCELLENT, 1), (2048, EXCELLENT, 0)], "not decided (1 document at 1k)"),
        # only the upper end is that of FAIL: the interval is wide, and nothing is shown
        (
            [(1024, EXCELLENT, 10), (2048, (0.0, 0.15), 10)],
            "excellent to 1k, beyond: not decided (10 documents at 2k)",
        ),
        ([(1024, EXCELLENT, 10), (2048, None, 10)], "excellent to 1k, beyond: not decided (10 documents at 2k)"),
    ],
)
def test_each_band_is_stated_to_the_depth_to_which_it_holds(depths: list[Given], said: str) -> None:
    assert depth_statement(kld(*depths)) == said


def test_a_band_rests_on_the_upper_end_of_the_interval() -> None:
    [depth] = depths_of(kld((1024, (0.008, 0.02), 10)))
    assert (depth.n_ctx, depth.clusters, str(depth.band)) == (1024, 10, "PASS")


def test_lower_bounds_and_other_protocols_have_no_statement() -> None:
    assert depth_statement(kld((1024, EXCELLENT, 10), bound=True)) == ""
    assert depth_statement(kld((1024, EXCELLENT, 10), protocol="half")) == ""
