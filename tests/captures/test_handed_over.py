"""Rules that stored answers hand on: which figures replace rows, and what two runs have to share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fidelab.captures.manifest import key_digest
from fidelab.captures.pair import Pair, comparability_key
from fidelab.captures.reader import Capture, is_complete
from fidelab.captures.store import copy_capture, drop_rows
from fidelab.core.errors import CaptureError
from fidelab.core.serial import to_json
from tests.captures import sample

OTHER = sample.named("int4")
FIGURES = [(item, {"kl": np.array([0.1, 0.2]) + item}) for item in range(3)]


def compared(store: Path) -> tuple[Capture, Capture]:
    """A reference's capture, and one whose rows were compared with it and dropped."""
    ref, test = Capture(sample.write(store)), Capture(sample.write(store, OTHER))
    drop_rows(Pair.match(ref, test), FIGURES)
    return ref, Capture(test.folder)


def test_figures_count_only_against_the_capture_that_they_were_made_with(tmp_path: Path) -> None:
    ref, test = compared(tmp_path)
    own, key = key_digest(ref.manifest["key"]), test.manifest["key"]
    assert test.against == own
    assert is_complete(test.folder, key, own)
    assert not is_complete(test.folder, key, "0" * 64)
    assert not is_complete(test.folder, key, "")  # rows are asked for
    assert is_complete(ref.folder, ref.manifest["key"], "0" * 64)  # rows can be compared with anything


def test_figures_stay_with_their_items(tmp_path: Path) -> None:
    _, test = compared(tmp_path)
    assert not test.has_rows()
    for item, columns in FIGURES:
        np.testing.assert_allclose(np.asarray(test.array(item, "figures.kl")), columns["kl"])


def test_a_capture_without_rows_is_not_copied_to_others(tmp_path: Path) -> None:
    ref, test = compared(tmp_path / "store")
    key = {**ref.manifest["key"], "versions": {"borrowed": "1"}}
    copy_capture(ref, tmp_path / "to" / "arm" / "kld", key, to_json(sample.ARM))
    copied = Capture(tmp_path / "to" / "arm" / "kld")
    assert (copied.manifest["key"], copied.manifest["items"]) == (key, ref.manifest["items"])
    with pytest.raises(CaptureError, match="rows went after a comparison"):
        copy_capture(test, tmp_path / "to" / "other" / "kld", key, to_json(OTHER))


def test_what_two_runs_have_to_share_is_all_that_their_questions_depend_on(tmp_path: Path) -> None:
    own, windows = comparability_key(Capture(sample.write(tmp_path))), sample.WINDOWS
    others = {
        "items": sample.write(tmp_path, request=windows.select([0, 1])),
        "settings": sample.write(tmp_path, request=replace(windows, settings=(("n_ctx", 4), ("protocol", "full")))),
        "vocabulary": sample.write(tmp_path / "words", pieces=[*sample.PIECES[:-1], "<other>"]),
        "estimator": sample.write(
            tmp_path / "hidden", estimator="hidden", head={"weight": np.eye(8, dtype=np.float32)}
        ),
    }
    for name, folder in others.items():
        found = comparability_key(Capture(folder))
        assert {key for key in own if found[key] != own[key]} == {name}
    assert comparability_key(Capture(sample.write(tmp_path, OTHER))) == own  # whichever arm answered
