"""Compact rows of log-probabilities: what they cost, what they change, and what damaged ones say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fidelab.axes.rows import compare_item
from fidelab.captures.compact import COMPACT, LEAST_VOCABULARY, decode_rows, encode_rows
from fidelab.captures.manifest import capture_key
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture, is_complete
from fidelab.captures.requests import Prefill
from fidelab.captures.writer import CaptureWriter
from fidelab.core import Vocabulary
from fidelab.core.serial import to_json
from fidelab.metrics.divergence import compare_rows, log_softmax
from tests.captures.sample import ARM

V, N = 32_768, 64
TARGETS = np.random.default_rng(7).integers(0, V, N)


def _rows(noise: float = 0.0) -> NDArray[np.float16]:
    """Rows with the shape that models give: few likely tokens and a tail of 15 nats."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(N, V)) * 2.2 + np.where(rng.random((N, V)) < 1e-3, rng.normal(size=(N, V)) * 2 + 9, 0)
    return log_softmax(logits + noise * np.random.default_rng(1).normal(size=(N, V))).astype(np.float16)


def _capture(folder: Path, rows: NDArray[np.float16], replicate: int = 0) -> Capture:
    request = Prefill("kld", ((0, *TARGETS.tolist()),), 0, N - 1, ((0,) * N,))
    key = capture_key(ARM, request, {}, replicate)
    writer = CaptureWriter(folder, request, key, to_json(ARM), Vocabulary(V, "0" * 64))
    writer.add(0, {"logprobs": rows})
    return Capture(writer.finish("logprobs", {}, {}))


@pytest.mark.parametrize("noise", [1e-3, 0.01, 0.1])
def test_compact_rows_change_the_mean_kl_by_less_than_1e_6_nats(tmp_path: Path, noise: float) -> None:
    sides = _rows(), _rows(noise)
    ref, test = (_capture(tmp_path / str(i), rows, i) for i, rows in enumerate(sides))
    found = compare_item(Pair.match(ref, test), 0, 0, TARGETS)
    exact = compare_rows(sides[0].astype(np.float32), sides[1].astype(np.float32), TARGETS)
    assert abs(found.kl.mean() - exact.kl.mean()) < 1e-6
    assert abs(found.nll_test.mean() - exact.nll_test.mean()) < 1e-6
    assert (found.top1 == exact.top1).all()


def test_equal_rows_have_a_kl_of_exactly_zero_though_their_grids_differ(tmp_path: Path) -> None:
    ref, test = (_capture(tmp_path / str(i), _rows(), i) for i in range(2))
    assert (ref.floats(0, "logprobs", 0, N) != test.floats(0, "logprobs", 0, N)).any()
    assert (compare_item(Pair.match(ref, test), 0, 0, TARGETS).kl == 0).all()


def test_rows_that_differ_in_one_bit_have_a_kl_above_zero(tmp_path: Path) -> None:
    rows = _rows()
    rows[:, 5] = np.nextafter(rows[:, 5], np.float16(0))
    ref, test = _capture(tmp_path / "0", _rows()), _capture(tmp_path / "1", rows, 1)
    assert (compare_item(Pair.match(ref, test), 0, 0, TARGETS).kl > 0).all()


def test_sides_with_different_vocabularies_are_compared_on_the_common_ids(tmp_path: Path) -> None:
    sides = _rows(), _rows(0.1)[:, :-64]
    ref, test = (_capture(tmp_path / str(i), rows, i) for i, rows in enumerate(sides))
    found = compare_item(Pair.match(ref, test), 0, 0, TARGETS)
    exact = compare_rows(sides[0].astype(np.float32), sides[1].astype(np.float32), TARGETS)
    assert abs(found.kl.mean() - exact.kl.mean()) < 1e-6


def test_compact_rows_take_less_than_half_of_float16(tmp_path: Path) -> None:
    assert _capture(tmp_path / "a", _rows()).bytes < 0.5 * _rows().nbytes


def test_impossible_tokens_and_broken_rows_are_read_as_they_were() -> None:
    rows = _rows()
    rows[0, 3], rows[1, :] = -np.inf, np.nan
    decoded = decode_rows(encode_rows(rows, (), 1), 0, 2)
    assert decoded[0, 3] == -np.inf
    assert np.isnan(decoded[1]).all()


def test_some_rows_are_read_as_they_are_among_all() -> None:
    form = encode_rows(_rows(), (), 1)
    assert (decode_rows(form, 0, N)[7:9] == decode_rows(form, 7, 9)).all()


@pytest.mark.parametrize("name", ["packed", "ends", "exact", "exact_ends", "form", "digest", "lift"])
def test_arrays_that_do_not_fit_each_other_are_refused(name: str) -> None:
    form = encode_rows(_rows()[:2], (), 1)
    with pytest.raises(ValueError, match=r"row|they|their"):
        decode_rows({**form, name: form[name][:-1]}, 0, 2)


def test_a_small_vocabulary_is_stored_as_it_is(tmp_path: Path) -> None:
    capture = _capture(tmp_path / "a", _rows()[:, : LEAST_VOCABULARY - 1])
    assert capture.compact(0) == {}
    assert capture.array_shape(0, "logprobs") == (N, LEAST_VOCABULARY - 1)


def test_a_capture_with_compact_rows_is_complete_and_names_its_rows(tmp_path: Path) -> None:
    capture = _capture(tmp_path / "a", _rows())
    assert is_complete(capture.folder)
    assert capture.names(0) == ["logprobs"]
    assert capture.array_shape(0, "logprobs") == (N, V)
    assert not any(name.startswith(COMPACT) for name in capture.names(0))
