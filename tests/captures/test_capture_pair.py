"""Pairs: what must not be compared is refused, and the mismatch is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fidelab.captures.pair import Pair, comparability_key
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate, Prefill, Request
from fidelab.core.errors import MismatchError
from tests.captures import sample

W, P = sample.WINDOWS, sample.PROMPTS
SPARSE = replace(W, first=0, positions=((1, 2), (1, 2), (0, 1)))
OTHER = sample.named("int4")


def pair(tmp_path: Path, ref: Request = W, test: Request = W, *, subset: bool = False) -> Pair:
    left, right = Capture(sample.write(tmp_path, request=ref)), Capture(sample.write(tmp_path, OTHER, test))
    return Pair.match(left, right, subset=subset)


@pytest.mark.parametrize("query", [W, P], ids=["windows", "prompts"])
def test_equal_questions_pair_item_by_item(query: Request, tmp_path: Path) -> None:
    n = len(query.items())
    assert pair(tmp_path, query, query).items == tuple((i, i) for i in range(n))


@pytest.mark.parametrize(
    ("ref", "test", "said"),
    [
        (W, P, "kind 'generate' is not 'prefill'"),
        (W, replace(W, axis="perplexity"), "axis 'perplexity' is not 'kld'"),
        (W, replace(W, settings=(("n_ctx", 4), ("protocol", "full"))), "protocol 'full' is not 'half'"),
        (W, replace(W, settings=(("n_ctx", 4),)), "protocol None is not 'half'"),
        (W, W.select([0, 1]), "2 windows are not 3"),
        (P, P.select([0]), "1 items are not 2"),
        (W, replace(W, windows=(*W.windows[:2], (9, 9, 9, 9))), "tokens of item 2 differ"),
        (W, W.select([1, 0, 2]), "tokens of item 0 differ"),
        (W, replace(W, first=0, units=((0, 0, 0),) * 3), "rows 0–2 of each window are not 1–2"),
        (W, replace(W, last=1, units=((0,),) * 3), "rows 1–1 of each window are not 1–2"),
        (SPARSE, replace(SPARSE, positions=((1, 2), (1, 2), (0, 2))), "rows of item 2 are at other positions"),
        (SPARSE, W, "rows of item 2 are at other positions"),
        (P, replace(P, settings=(("n_predict", 9), ("template", "raw"))), "n_predict 9 is not 3"),
        (P, replace(P, settings=(("n_predict", 3), ("template", "chat"))), "template 'chat' is not 'raw'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mismatch_is_named(ref: Prefill | Generate, test: Prefill | Generate, said: str, tmp_path: Path) -> None:
    with pytest.raises(MismatchError) as caught:
        pair(tmp_path, ref, test)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(("ref", "test"), [("topk", "hidden"), ("logprobs", "topk")])
def test_top_k_never_pairs_with_a_full_vocabulary(ref: str, test: str, tmp_path: Path) -> None:
    head = {"weight": np.eye(8, dtype=np.float32)}
    left = sample.write(tmp_path, estimator=ref, head=head)
    right = sample.write(tmp_path, OTHER, estimator=test, head=head)
    with pytest.raises(MismatchError, match=f"estimator {test} cannot be paired with {ref}"):
        Pair.match(Capture(left), Capture(right))


def test_full_vocabulary_kinds_and_padded_tails_pair_and_another_string_in_common_is_refused(tmp_path: Path) -> None:
    left = sample.write(tmp_path, estimator="hidden", head={"weight": np.eye(8, dtype=np.float32)})
    assert Pair.match(Capture(left), Capture(sample.write(tmp_path, OTHER))).items
    right = sample.write(tmp_path, OTHER, pieces=[*sample.PIECES, "<pad0>", "<pad1>"])
    assert Pair.match(Capture(sample.write(tmp_path)), Capture(right)).items
    right = sample.write(tmp_path / "other", OTHER, pieces=[*sample.PIECES[:5], "<other>", *sample.PIECES[6:]])
    with pytest.raises(MismatchError, match=r"token 5 is '<other>', in the reference '<5>'"):
        Pair.match(Capture(sample.write(tmp_path)), Capture(right))


def test_a_floor_pairs_by_its_tokens_and_is_refused_with_foreign_ones(tmp_path: Path) -> None:
    assert pair(tmp_path, W, W.select([2, 0]), subset=True).items == ((2, 0), (0, 1))
    foreign = replace(W.select([0]), windows=((9, 9, 9, 9),))
    with pytest.raises(MismatchError, match="tokens of item 0 differ"):
        pair(tmp_path, W, foreign, subset=True)


def test_comparability_sees_the_tokens_and_neither_batch_nor_arm(tmp_path: Path) -> None:
    foreign = replace(W, windows=(*W.windows[:2], (9, 9, 9, 9)))
    left, right = Capture(sample.write(tmp_path)), Capture(sample.write(tmp_path, request=foreign))
    assert comparability_key(left) != comparability_key(right)
    left, right = (Capture(sample.write(tmp_path, request=replace(P, batch=n))) for n in (4, 16))
    assert left.folder != right.folder
    assert comparability_key(left) == comparability_key(right)
    left, right = (Capture(sample.write(tmp_path, arm)) for arm in (sample.ARM, OTHER))
    assert comparability_key(left) == comparability_key(right)


@pytest.mark.parametrize(("ref", "test"), [(None, "retokenized"), ("retokenized", "returned")])
def test_ids_tokenized_again_never_pair_with_an_engines_own(ref: str | None, test: str, tmp_path: Path) -> None:
    left = sample.write(tmp_path, request=P, ran={"ids": ref} if ref else {})
    right = sample.write(tmp_path, OTHER, P, ran={"ids": test})
    with pytest.raises(MismatchError, match=f"generated ids that are {test} cannot be paired with"):
        Pair.match(Capture(left), Capture(right))


def test_ids_that_are_both_tokenized_again_pair_and_are_labelled(tmp_path: Path) -> None:
    left, right = (Capture(sample.write(tmp_path, arm, P, ran={"ids": "retokenized"})) for arm in (sample.ARM, OTHER))
    assert Pair.match(left, right).items
    assert comparability_key(left)["ids"] == "retokenized"
    assert "ids" not in comparability_key(Capture(sample.write(tmp_path, sample.named("q8_0"), P)))


def test_windows_pair_however_generated_ids_come(tmp_path: Path) -> None:
    right = sample.write(tmp_path, OTHER, ran={"ids": "retokenized"})
    assert Pair.match(Capture(sample.write(tmp_path)), Capture(right)).items
