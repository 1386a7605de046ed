"""One name per quantity: the heading of a figure, the metric, the claim and the limit on it are called the same."""

from __future__ import annotations

from fidelab.axes.kld import KLD_METRICS
from fidelab.core import Status
from fidelab.metrics.equivalence import CLAIM_NAMES
from fidelab.report.cells import confident_flips_of, top_token_estimate
from fidelab.report.view import FIGURES
from fidelab.results.choice import LIMIT_OF_CLAIM, LIMITS
from fidelab.results.measurement import Definition, Measurement

HEADINGS = {"top1": "same top token", "confident_flips": "confident flips"}


def test_each_metric_of_the_main_table_has_its_own_name_as_its_heading() -> None:
    for key, heading in HEADINGS.items():
        assert KLD_METRICS[key].name == heading
        assert FIGURES.count(heading) == 1


def test_no_two_metrics_of_the_kld_have_one_name() -> None:
    names = [definition.name for definition in KLD_METRICS.values()]
    assert len({*names}) == len(names)


def test_a_claim_and_the_limit_that_replaces_its_margin_have_one_name() -> None:
    for claim, limit in LIMIT_OF_CLAIM.items():
        if claim != "accuracy_loss":  # the limit is on the net loss of all contexts together
            assert CLAIM_NAMES[claim] == LIMITS[limit]


def test_flips_are_all_changed_tokens_and_never_the_confident_ones() -> None:
    assert CLAIM_NAMES["flips"] == "flips" == LIMITS["max_flips"]
    assert "flips" not in FIGURES


def test_a_share_of_three_documents_has_no_interval_and_one_without_events_has_its_upper_end() -> None:
    def of(documents: int) -> Measurement:
        top1 = Definition("top1", "share", "higher")(1.0, (0.98, 1.0))
        flips = Definition("confident_flips", "share", "lower")(0.0, (0.0, 0.006))
        return Measurement(status=Status.OK, metrics=(top1, flips), n_clusters=documents)

    assert (str(top_token_estimate(of(3))), str(confident_flips_of(of(3)))) == ("100.0%", "0")
    assert (str(top_token_estimate(of(4))), str(confident_flips_of(of(4)))) == ("100.0% (98.0–100.0%)", "0 (≤0.60%)")
