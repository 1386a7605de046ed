"""Formats that keep tokens exact, from the command line to the report, on a tiny model of engine hf."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fidelab.axes.base import AxisScore
from fidelab.axes.encoded import encoded_facts
from fidelab.core import KVSpec
from fidelab.metrics.encoded import encoded_share
from fidelab.models.tiny import make_tiny
from fidelab.results.record import Report
from fidelab.results.sizes import Sizes
from tests.run.harness import Done, cli

TAIL = "int4[tail=96]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    make_tiny(folder / "m")
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Done:
    done = cli("compare", "./m", *COMPARED, "--dtype", "bfloat16", "--n-ctx", 128, "--windows", 8, cwd=folder)
    assert done.code == 0, done.err
    return done


COMPARED = ("--kv", "int4", "--kv", TAIL, "--axes", "kld", "--set", "floor=0", "--set", "twins=0")


def test_the_saving_at_the_measured_length_is_that_of_the_encoded_quarter(run: Done) -> None:
    whole, tail = run.arm("int4")["ran"], run.arm(TAIL)["ran"]
    native = run.arm("reference")["ran"]["cache_bytes_per_token"]
    [store] = tail["sequence"]["stores"]
    assert (store["tail"], store["encoded_token"], store["exact_token"]) == (96, whole["cache_bytes_per_token"], native)
    saving = 0.25 * (1 - whole["cache_bytes_per_token"] / native)
    report = Report.from_json(run.folder / "report.json")
    found = Sizes.of(report.reference, report.candidates)
    assert found.saving(TAIL) == pytest.approx(saving)
    assert found.describe(TAIL).endswith(" at 128 tokens")
    assert not found.describe("int4").endswith(" tokens")


def test_int4_is_not_struck_by_a_larger_one(run: Done) -> None:
    advice = run.report["recommendation"]
    assert advice["dominated"] == []
    assert "as small as" not in run.out


def test_the_share_encoded_is_recorded_and_below_half_there_is_no_verdict(run: Done) -> None:
    facts = run.axis(TAIL, "kld").facts
    assert facts["encoded_share"] == pytest.approx(sum((p + 1 - 96) / (p + 1) for p in range(95, 127)) / 63)
    assert facts["encoded_90_at"] == 1332
    verdict = run.arm(TAIL)["verdict"]
    assert (verdict["band"], verdict["because"][0]) == (None, "only 7% of tokens were encoded")
    assert "encoded_share" not in run.axis("int4", "kld").facts


def test_the_plan_names_the_context_that_reaches_90_percent(folder: Path) -> None:
    done = cli("compare", "./m", *COMPARED, "--n-ctx", 128, "--windows", 8, "--dry-run", cwd=folder)
    assert f"{TAIL}: 7% of the tokens that attention reads are encoded at 128 tokens, 90% from 1,332 tokens" in done.out
    assert "int4: " not in done.out


def score(n_ctx: int, **parts: AxisScore) -> AxisScore:
    """The rows of the second half of one window."""
    rows = np.arange(n_ctx // 2, n_ctx - 1)
    columns = {"position": rows, "n_ctx": np.full(len(rows), n_ctx)}
    ones = np.ones(len(rows))
    return AxisScore(ones, ones, ones, ones > 0, positions=columns, parts=parts)


@pytest.mark.parametrize("kv", ["int4[tail=32]/int4[tail=64]", "int4[tail=64]/int4", "bf16/int4[tail=64]"])
def test_the_side_with_fewer_tokens_encoded_counts_at_the_longest_context(kv: str) -> None:
    whole = score(128, short=score(128), long=score(512))
    assert encoded_facts(KVSpec.parse(kv), whole) == {
        "encoded_share": encoded_share(range(256, 511), 0, 64),
        "encoded_90_at": 888,
    }


@pytest.mark.parametrize("kv", ["int4", "bf16", "uint4[axis=head]", "fp8", "fp8[tail=3]/turboquant_4bit_nc"])
def test_formats_without_exceptions_and_those_of_other_packages_have_no_facts(kv: str) -> None:
    assert encoded_facts(KVSpec.parse(kv), score(128)) == {}


def test_random_weights_are_no_reference(run: Done) -> None:
    advice = run.report["recommendation"]
    assert (advice["kind"], advice["arm"], advice["confidence"]) == ("reference", None, None)
    assert advice["text"].startswith(
        "The reference is unusable: it predicts this text no better than token frequencies"
    )
