"""Rules that imports hand to records: whose margin a certificate has, and which side lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from fidelab.imports.lm_eval import import_samples
from tests.imports.test_lm_eval import outcomes, samples


@pytest.mark.parametrize(("margin", "state"), [(0.01, "underpowered"), (0.04, "holds"), (0.002, "underpowered")])
def test_the_margin_of_an_import_is_that_of_its_certificate_and_sentence(
    margin: float, state: str, tmp_path: Path
) -> None:
    """Of 1,000 items 10 are lost and 8 gained: the loss of 0.2 points has an upper end of about 1 point."""
    ref, test = outcomes(800, 10, 8, 182)
    folders = [samples(tmp_path / name, right) for name, right in (("ref", ref), ("test", test))]
    [arm] = import_samples(folders[0], folders[1:], tmp_path / "runs", margin=margin).report.candidates
    [certificate] = arm.certificates.values()
    [claim] = certificate.claims
    assert (claim.margin, str(claim.state)) == (margin, state)
    assert claim.estimate == pytest.approx(0.002)
    assert arm.verdict is not None
    assert f"{100 * margin:g} points" in arm.verdict.sentence
    [flips] = certificate.flips
    assert (flips.harmful, flips.beneficial) == (10, 8)
