"""Files of ``llama-perplexity --kl-divergence-base``: one that it wrote, closed forms, and what must not be compared.

The files in ``data`` were written by llama-perplexity of llama.cpp (as in llama-cpp-python 0.3.36) for the model of
``make_tiny(vocab=300)``: ``-c 16 -b 16 --chunks 6 -fa on``, caches f32 and q4_0.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from scipy.special import log_softmax, rel_entr

from fidelab.core.errors import FidelabError, InputError, MismatchError, UsageError
from fidelab.imports.kld_base import BaseFile
from fidelab.imports.kld_dumps import import_dumps
from fidelab.results.measurement import Measurement

DATA = Path(__file__).parent / "data"
F32, Q4 = DATA / "llama-perplexity-f32.kld", DATA / "llama-perplexity-q4_0.kld"
N_CTX, VOCABULARY, WINDOWS = 10, 7, 12
ROWS = N_CTX - 1 - N_CTX // 2


def score(folder: Path, ref: Path, test: Path) -> Measurement:
    [arm] = import_dumps(ref, [test], folder / "runs").report.candidates
    return arm.axes["kld"]


def scores(seed: int, spread: float = 2.0, vocabulary: int = VOCABULARY) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (spread * rng.standard_normal((WINDOWS, ROWS, vocabulary))).astype(np.float32)


def tokens(vocabulary: int = VOCABULARY) -> NDArray[np.int64]:
    return np.random.default_rng(9).integers(0, vocabulary, (WINDOWS, N_CTX))


def written(path: Path, values: NDArray[np.float32], ids: NDArray[np.int64] | None = None) -> Path:
    """A file with these rows [windows, rows, vocabulary], encoded as llama-perplexity does."""
    ids = tokens(values.shape[-1]) if ids is None else ids
    vocabulary = values.shape[-1]
    logs = log_softmax(values.astype(np.float64), axis=-1)
    top = logs.max(axis=-1, keepdims=True)
    least = np.maximum(logs.min(axis=-1, keepdims=True), top - 16.0)
    scale = (top - least) / 65535
    rows = np.zeros((*logs.shape[:2], 2 * ((vocabulary + 1) // 2) + 4), dtype="<u2")
    rows[..., :4] = np.concatenate([scale, least], axis=-1).astype("<f4").view("<u2")
    rows[..., 4 : 4 + vocabulary] = np.clip(np.rint((logs - least) / scale), 0, 65535)
    head = np.array([ids.shape[1], vocabulary, len(ids)], dtype="<i4")
    path.write_bytes(b"_logits_" + head.tobytes() + ids.astype("<i4").tobytes() + rows.tobytes())
    return path


def folder(path: Path, values: NDArray[np.float32]) -> Path:
    path.mkdir()
    for number, rows in enumerate(log_softmax(values, axis=-1).astype(np.float32)):
        save_file({"log_probs": rows}, path / f"{number}.safetensors")
    return path


def test_a_file_of_llama_perplexity_gives_its_own_figures(tmp_path: Path) -> None:
    found = score(tmp_path, F32, Q4)
    # what llama-perplexity --kl-divergence printed for the second arm against the first file
    assert found.value("mean") == pytest.approx(0.02244, abs=1e-5)
    assert found.value("top1") == pytest.approx(0.92857, abs=1e-5)
    assert found.value("rms_dp") == pytest.approx(0.00088, abs=1e-5)
    assert (found.n_items, found.n_failed, found.facts["n_ctx"]) == (6 * 7, 0, 16)


def test_rows_come_back_within_half_a_step(tmp_path: Path) -> None:
    values = scores(0)
    read = BaseFile.read(written(tmp_path / "a.kld", values))
    for number in range(WINDOWS):
        logs = log_softmax(values[number].astype(np.float64), axis=-1)
        step = (logs.max(-1) - logs.min(-1)) / 65535
        assert (np.abs(read.open(number).rows(0, ROWS) - logs).max(-1) <= step).all()
        assert read.tokens(number) is not None


def test_tokens_far_below_the_most_likely_one_share_what_is_left(tmp_path: Path) -> None:
    values = scores(0)
    values[..., 4:] -= 60.0
    rows = BaseFile.read(written(tmp_path / "a.kld", values)).open(0)
    unknown = rows.unknown(0, ROWS)
    assert unknown is not None
    assert unknown[:, 4:].all()
    np.testing.assert_allclose(np.exp(rows.rows(0, ROWS).astype(np.float64)).sum(-1), 1.0, atol=1e-4)


def test_kl_of_a_folder_against_a_file_is_that_with_far_tokens_as_one(tmp_path: Path) -> None:
    ref, test = scores(0), scores(1)
    ref[..., 4:] -= 9.0  # of most rows some are further than 16 nats, of some none
    found = score(tmp_path, written(tmp_path / "ref.kld", ref), folder(tmp_path / "int8", test))
    p, q = (np.exp(log_softmax(side.astype(np.float64), axis=-1)) for side in (ref, test))
    logs = np.log(p)
    far = logs - logs.max(-1, keepdims=True) <= -16
    count = np.maximum(far.sum(-1, keepdims=True), 1)
    pooled = [np.where(far, (side * far).sum(-1, keepdims=True) / count, side) for side in (p, q)]
    expected = rel_entr(*pooled).sum(-1)
    assert found.value("mean") == pytest.approx(expected.mean(), abs=2e-4)
    assert expected.mean() <= rel_entr(p, q).sum(-1).mean()


def test_fewer_windows_and_other_tokens_are_refused_by_number_and_another_first_token_is_not(tmp_path: Path) -> None:
    ids = tokens()
    first, changed = ids.copy(), ids.copy()
    first[:, 0] = 0  # the token that begins a sequence
    changed[5, 6] = (changed[5, 6] + 1) % VOCABULARY
    ref = written(tmp_path / "ref.kld", scores(0), ids)
    assert score(tmp_path, ref, written(tmp_path / "a.kld", scores(1), first)).value("mean") is not None
    with pytest.raises(MismatchError, match="window 5 of"):
        score(tmp_path, ref, written(tmp_path / "b.kld", scores(1), changed))
    with pytest.raises(MismatchError, match="lacks window 4 and 7 more"):
        score(tmp_path, ref, written(tmp_path / "few.kld", scores(1)[:4], ids[:4]))


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda raw: raw[:-3], "ended early"),
    "longer": (lambda raw: raw + b"ab", "instead of"),
    "of no window": (lambda raw: raw[:16] + b"\0\0\0\0" + raw[20:], "damaged"),
    "of a huge vocabulary": (lambda raw: raw[:12] + b"\xff\xff\xff\x7f" + raw[16:], "damaged"),
    "header alone": (lambda raw: raw[:14], "ends within its header"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    damage, said = DAMAGES[name]
    path = tmp_path / "ref.kld"
    path.write_bytes(damage(F32.read_bytes()))
    with pytest.raises(FidelabError, match=said) as caught:
        score(tmp_path, path, Q4)
    assert "\n" not in str(caught.value)


def test_a_path_without_a_dump_and_the_reference_itself_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="itself"):
        score(tmp_path, F32, F32)
    with pytest.raises(InputError, match="llama-perplexity"):
        score(tmp_path, F32, tmp_path / "nothing")
