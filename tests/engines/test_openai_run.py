"""Whole runs against two servers on loopback: what the report says, and what it must not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.engines.openai_server import VOCAB, Served, save_model, serving, true_kl
from tests.run.harness import Done, cli, write_inputs

Compare = Callable[..., Done]


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    """``fidelab compare`` of two servers."""
    model = save_model(tmp_path / "model")
    write_inputs(tmp_path)

    def run(one: Served, other: Served, axes: str, *flags: object) -> Done:
        inputs = ("--text", "text.txt", "--prompts", "prompts.txt", "--no-floor", "--engine", "openai")
        sizes = ("--n-predict", 6, "--template", "raw", "--threads", 1)
        sizes = (*sizes, *(("--windows", 4, "--n-ctx", 16) if "kld" in axes else ()))
        contexts = ("--set", "axes.perplexity.contexts=[16]", "--set", "axes.perplexity.windows=4")
        with serving(one), serving(other):
            candidate = f"base-url={other.url},name=other"
            return cli(
                *("compare", model, *inputs, *sizes, "--axes", axes, *(contexts if "perplexity" in axes else ())),
                *("--base-url", one.url, "--candidate", candidate, *flags),
                cwd=tmp_path,
            )

    return run


def test_a_bound_is_shown_as_one_and_judges_nothing(compare: Compare) -> None:
    done = compare(Served(), Served(rate=0.4), "trajectory,kld,perplexity")
    assert done.code == 0, done.err
    arm = done.arm("other")
    kld = done.axis("other", "kld")
    mean = kld.metric("mean")
    assert mean is not None
    assert (kld.facts["estimator"], mean.bound, mean.better) == ("topk", True, None)
    assert 0 < (mean.value or 0) <= true_kl(0.5, 0.4) + 1e-6
    assert (kld.metric("score"), kld.metric("over_control"), arm["verdict"]["band"]) == (None, None, None)
    assert "only a lower bound" in arm["verdict"]["sentence"]
    assert "≥" in done.out
    assert done.axis("other", "trajectory").value("score") == 100
    assert (arm["composite"]["value"], arm["composite"]["axes"]) == (100, ["trajectory"])  # of what is not a bound
    assert arm["composite"]["band"] is None
    # The likeliest token costs ln Z, and each token further on the rate more: the mean place follows from one side.
    perplexity = done.axis("other", "perplexity")
    log_z = [np.log(np.exp(-rate * np.arange(VOCAB)).sum()) for rate in (0.5, 0.4)]
    place = (np.log(perplexity.value("reference_ppl") or 0) - log_z[0]) / 0.5
    assert perplexity.value("ln_ratio") == pytest.approx(log_z[1] - log_z[0] - 0.1 * place, rel=1e-4)


def test_what_a_server_does_not_report_takes_no_other_axis_down(compare: Compare) -> None:
    done = compare(Served(scores=None), Served(), "trajectory,kld,perplexity,forced")
    assert done.code == 0, done.err
    arm = done.arm("other")
    assert done.axis("other", "trajectory").value("score") == 100
    for axis in ("kld", "perplexity", "forced"):
        assert arm["axes"][axis]["status"] == "not_measurable"
        assert "gives no log-probabilities of prompts" in arm["axes"][axis]["reason"]
    assert arm["verdict"]["sentence"] == "no verdict: full-vocabulary KLD was not measured"


def test_generated_ids_are_not_compared_with_text_tokenized_again(compare: Compare) -> None:
    done = compare(Served(), Served(returns_ids=False), "trajectory")
    assert done.code != 0
    assert "retokenized cannot be paired with returned ones" in done.err


@pytest.mark.parametrize(
    ("lift", "said"),
    [(2.0, "has a log-probability of 1.0"), (0.5, "has probabilities that add up to 1.6")],
    ids=["above-0", "sum-above-1"],
)
def test_a_server_whose_log_probabilities_are_none_leaves_the_other_arms_their_report(
    lift: float, said: str, compare: Compare
) -> None:
    with serving(Served(rate=0.4)) as third:
        done = compare(Served(), Served(lift=lift), "trajectory,kld", "--candidate", f"base-url={third.url},name=well")
    assert done.code == 1, done.err
    assert said in done.arm("other")["reason"]
    assert done.axis("other", "kld").value("mean") is None
    assert done.arm("well")["status"] == "ok"
    assert done.axis("well", "kld").value("mean")
    named = compare(Served(lift=lift), Served(), "trajectory,kld")
    assert named.code == 1, named.err
    assert said in named.arm("reference")["reason"]
    assert named.arm("other")["reason"].startswith("the reference has no answer")


@pytest.mark.parametrize("facts", [{"attention_backend": 5}, {"attention_backend": ["triton"]}])
def test_what_a_server_says_of_itself_in_another_type_is_left_out(facts: dict[str, object], compare: Compare) -> None:
    done = compare(Served(), Served(owner="sglang", about=facts), "trajectory")
    assert done.code == 0, done.err
    assert (done.arm("other")["status"], done.arm("other")["ran"]["attention"]) == ("identical", None)
