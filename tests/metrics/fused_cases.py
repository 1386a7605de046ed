"""Cases of the fused scorer, each a promise, run by ``test_fused.py`` in a process whose Triton interprets.

``python -m tests.metrics.fused_cases NAME…`` prints a JSON object: name → what is wrong, empty where nothing is.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from fidelab.metrics import fused, fused_kernels, scorer
from fidelab.metrics.divergence import Head, RowComparison, compare_rows, comparison_of, head_logits
from fidelab.metrics.scorer import TileScorer
from pretend_cuda import pretend_cuda

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VOCABULARY = 2100  # sixteen tiles of the interpreter and some tokens
States = tuple[NDArray[np.float32], Head]


def bfloat16(values: NDArray[Any]) -> NDArray[np.float32]:
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def sides(
    n: int = 5, width: int = 64, tests: int = 1, noise: float = 0.05, *, half: bool = True, vocab: int = VOCABULARY,
    **of_head: Any,
) -> list[States]:  # fmt: skip
    rng = np.random.default_rng(0)

    def cast(values: NDArray[Any]) -> NDArray[np.float32]:
        return bfloat16(values) if half else values.astype(np.float32)

    head = Head(cast(3.2 / width**0.5 * rng.standard_normal((vocab, width))), **of_head)
    states = rng.standard_normal((n, width))
    return [(cast(states + noise * k * rng.standard_normal((n, width))), head) for k in range(tests + 1)]


def exact(ref: States, test: States, targets: NDArray[np.int64], *, kl_only: bool = False) -> RowComparison:
    """The definition on a float64 product."""

    def product(states: NDArray[Any], weight: NDArray[Any]) -> Any:
        return states.astype(np.float64) @ weight.astype(np.float64)

    p, q = (head_logits(states, head, product=product) for states, head in (ref, test))
    return compare_rows(p, q, targets, kl_only=kl_only)


def right(
    found: RowComparison, ref: States, test: States, targets: NDArray[np.int64], *, kl_only: bool = False
) -> None:
    """Every figure is that of the definition, and means are within today's bound."""
    expected = exact(ref, test, targets, kl_only=kl_only)
    for name in ("kl", "reverse_kl", "jsd", "chi2"):
        a, b = getattr(found, name).mean(), getattr(expected, name).mean()
        assert np.isnan(b) or abs(a - b) <= 1e-8 + 1e-5 * b, (name, a, b)
    for one in fields(RowComparison):
        a, b = getattr(found, one.name), getattr(expected, one.name)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=one.name)


def by_kernel(
    some: list[States], targets: NDArray[np.int64], *, half: bool = True, kl_only: bool = False, chunk: int = 0
) -> list[RowComparison]:
    """Rows as the kernels leave them, without what doubtful ones would get from the definition."""
    heads = {id(head): fused.PlacedHead(head, CPU, half=half) for _, head in some}

    def placed(side: States) -> fused.Side:
        states = torch.from_numpy(side[0])
        return fused.Side(states.bfloat16() if half else states, heads[id(side[1])])

    vocab = min(len(head.weight) for _, head in some)
    goals = torch.from_numpy(targets.astype(np.int32))
    ref, *tests = map(placed, some)
    found = fused.compared(ref, tests, goals, vocab, kl_only=kl_only, chunk=chunk)
    assert all(one.sound.all() for one in found), "a sound row is called doubtful"
    has_goal = (targets >= 0) & (targets < vocab)
    return [comparison_of(one.columns, one.top1, np.full(len(targets), np.nan), has_goal) for one in found]


def after(n: int) -> NDArray[np.int64]:
    return np.arange(n) * 97 - 1  # the first row has no next token


def check(some: list[States], **how: Any) -> None:
    targets = after(len(some[0][0]))
    kl_only = how.get("kl_only", False)
    for test, found in zip(some[1:], by_kernel(some, targets, **how), strict=True):
        right(found, some[0], test, targets, kl_only=kl_only)


def scored(some: list[States], device: torch.device = CUDA, said: list[str] | None = None) -> list[RowComparison]:
    """By :class:`TileScorer` on a pretend device, whose kernel is interpreted; it has to be the one that compared."""
    with pretend_cuda():
        one = TileScorer(1, device, (said if said is not None else list[str]()).append)
        assert one.fused is not None
        found = one.compare(some[0], some[1:], after(len(some[0][0])))
        assert one.fused is not None or said, "the kernel did not run"
    return found


def one_candidate() -> None:
    check(sides())


def one_row() -> None:
    check(sides(1))


def width_896() -> None:
    check(sides(3, 896, noise=0.3))


def width_that_no_step_divides() -> None:
    check(sides(3, 72))


def more_rows_than_a_tile() -> None:
    check(sides(19, tests=1))


def four_candidates() -> None:
    check(sides(3, tests=4))


def float32_factors() -> None:
    check(sides(3, half=False), half=False)


def small_differences() -> None:
    check(sides(noise=1e-3, half=False), half=False)


def bias_scale_and_cap() -> None:
    """A float32 bias with a bfloat16 head."""
    check(sides(tests=2, bias=np.linspace(-1, 1, VOCABULARY, dtype=np.float32), scale=0.5, softcap=5.0))


def kl_alone() -> None:
    check(sides(tests=2), kl_only=True)


def head_in_pieces() -> None:
    check(sides(3, tests=2), chunk=700)


def sums_of_pieces() -> None:
    with mock.patch.object(fused, "EXACT_WIDTH", 32):
        check(sides(3, 80, tests=2))


def exact_products() -> None:
    """Of logits without any error the kernel's own is 2e-6 of each divergence at most, as its docstring says."""
    rng = np.random.default_rng(1)
    head = Head((rng.integers(-24, 25, (VOCABULARY, 32)) / 32).astype(np.float32))
    states = rng.integers(-16, 17, (16, 32)) / 16
    for step in (1 / 16, 1 / 4):  # sums of numbers that are all multiples of 1/512 and small
        some = [((states + k * step * rng.integers(-1, 2, states.shape)).astype(np.float32), head) for k in range(2)]
        [rows] = by_kernel(some, after(16))
        expected = exact(some[0], some[1], after(16))
        for name in ("kl", "reverse_kl", "jsd", "chi2"):
            a, b = getattr(rows, name), getattr(expected, name)
            assert b.min() > 1e-6, "differences are too small to tell"
            np.testing.assert_allclose(a, b, rtol=2e-6, err_msg=name)


def shifted_logits() -> None:
    """A constant that all logits of one side have on top costs nothing."""
    (states, head), (moved, _) = sides(noise=1e-2)
    other = Head(head.weight, bias=np.full(VOCABULARY, 7.0, dtype=np.float32))
    check([(states, head), (moved, other)])


def far_odds() -> None:
    (states, head), _ = sides()
    bias = np.zeros(VOCABULARY, dtype=np.float32)
    bias[::7] = 15.0
    check([(states, head), (states, Head(head.weight, bias=bias))])


def equal_states() -> None:
    ref, _ = sides()
    [rows] = by_kernel([ref, ref], after(5))
    for name in ("kl", "reverse_kl", "jsd", "tv", "chi2"):
        assert (getattr(rows, name) == 0.0).all(), name
    assert rows.top1.all()
    assert (rows.overlap == 1.0).all()


def equal_tokens() -> None:
    """Of equally likely tokens the first counts, in one tile and in several."""
    (states, head), (moved, _) = sides(noise=0.3)
    weight = head.weight.copy()
    best = (states @ weight.T).argmax(-1)
    for row in range(len(states)):
        weight[[row * 3, row * 3 + 1, VOCABULARY - 1 - row]] = weight[best[row]]
    twin = Head(weight)
    targets = np.argmax(states.astype(np.float64) @ weight.T.astype(np.float64), -1)
    [rows] = by_kernel([(states, twin), (moved, twin)], targets)
    expected = exact((states, twin), (moved, twin), targets)
    for name in ("top1", "right_ref", "right_test"):
        np.testing.assert_array_equal(getattr(rows, name), getattr(expected, name), err_msg=name)


def broken_rows() -> None:
    """On a pretend device: rows with NaN and infinity fail, others do not, and all are those of the definition."""
    ref, (states, head) = sides(6)
    states = states.copy()
    states[1, 0], states[4, 0] = np.nan, np.inf
    [rows] = scored([ref, (states, head)])
    assert np.flatnonzero(rows.failed).tolist() == [1, 4]
    right_without(rows, ref, (states, head))


def right_without(rows: RowComparison, ref: States, test: States) -> None:
    """As :func:`right`, of rows some of which failed."""
    expected = exact(ref, test, after(len(rows)))
    for one in fields(RowComparison):
        a, b = getattr(rows, one.name), getattr(expected, one.name)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=one.name)


def masked_tokens() -> None:
    bias = np.zeros(VOCABULARY, dtype=np.float32)
    bias[100:200] = -np.inf
    ref, test = sides(3, bias=bias)
    [rows] = scored([ref, test])
    assert not rows.failed.any()
    right_without(rows, ref, test)


def one_side_masks() -> None:
    """Q = 0 under P > 0 fails, however small P is; P = 0 under Q > 0 has an infinite reverse KL."""
    bias = np.zeros(VOCABULARY, dtype=np.float32)
    bias[77] = -np.inf
    (states, head), (moved, _) = sides(3)
    masked = Head(head.weight, bias=bias)
    [rows] = scored([(states, head), (moved, masked)])
    assert rows.failed.all()
    [rows] = scored([(states, masked), (moved, head)])
    assert not rows.failed.any()
    assert np.isinf(rows.reverse_kl).all()


def other_vocabularies() -> None:
    """A head of its own is compared over the common ids, and the rest's probability is known, of either side."""
    (states, head), (moved, _) = sides(4, vocab=2300, bias=np.linspace(0, 1, 2300, dtype=np.float32))
    assert head.bias is not None
    shorter = Head(bfloat16(1.01 * head.weight[:-50]), bias=head.bias[:-50])
    for some in ([(states, head), (moved, shorter)], [(moved, shorter), (states, head)]):
        [rows] = scored(some)
        assert np.isfinite(rows.cut).all()
        right_without(rows, *some)


def mixed_heads() -> None:
    """Candidates with the reference's head and others come back in their order."""
    ref, *tests = sides(3, tests=3)
    tests[1] = tests[1][0], Head(bfloat16(1.02 * ref[1].weight))
    for found, test in zip(scored([ref, *tests]), tests, strict=True):
        right_without(found, ref, test)


def memory_that_does_not_suffice() -> None:
    """Fewer rows, then heads in pieces, then logits in memory; figures stay."""
    some, said, compared = sides(5), list[str](), fused.compared
    most = 2

    def full(ref: Any, *rest: Any, chunk: int, **more: Any) -> Any:
        if len(ref.states) > most or not chunk:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compared(ref, *rest, chunk=chunk, **more)

    with (
        mock.patch.object(fused, "compared", full),
        mock.patch.object(fused.FusedScorer, "fewest_rows", 2),
        mock.patch.object(fused, "FEWEST_ROWS", 2),
        mock.patch.object(fused, "_FEWEST_COLUMNS", 512),
    ):
        [rows] = scored(some, said=said)
        right_without(rows, *some)
        assert said == [
            "cuda is out of memory: scoring continues with 2 rows at a time",
            "cuda is out of memory: heads go there in pieces of 1,050 tokens",
        ], said
        most = 0
        said.clear()
        [rows] = scored(some, said=said)
        right_without(rows, *some)
        assert said[-1] == "cuda is out of memory for the kernel of scoring: logits go through memory", said


def head_larger_than_the_device() -> None:
    """It goes there in pieces that take a quarter of the free memory, from the beginning."""
    some = sides(3)
    with pretend_cuda(), mock.patch.object(fused, "_FEWEST_COLUMNS", 100):
        one = fused.FusedScorer(CUDA)
        with mock.patch("torch.cuda.mem_get_info", return_value=(some[0][1].weight.nbytes // 2, 0)):
            assert one.max_rows([(torch.from_numpy(states), head) for states, head in some]) >= 1
        assert one.chunk == VOCABULARY // 4


def kernel_that_does_not_compile() -> None:
    some, said = sides(3), list[str]()

    def broken(*rest: Any, **more: Any) -> Any:
        raise RuntimeError("failed to legalize\nPassManager::run failed")

    with mock.patch.object(fused, "compared", broken):
        [rows] = scored(some, said=said)
    right_without(rows, *some)
    why = "PassManager::run failed"
    assert said == [f"cuda: the kernel for scoring does not run, logits go through memory: {why}"], said


def float32_goes_through_memory() -> None:
    """Chosen by one function: without a matrix unit for its factors the product of CUDA's library is faster."""
    some = sides(3, half=False)
    with pretend_cuda(), mock.patch.object(fused, "compared", side_effect=AssertionError("the kernel was asked")):
        [rows] = TileScorer(1, CUDA).compare(some[0], some[1:], after(3))
    right_without(rows, *some)


def absent_triton() -> None:
    with mock.patch.dict(sys.modules, {"fidelab.metrics.fused": None}), pretend_cuda():
        assert scorer.fused_path(CUDA) is None
    assert scorer.fused_path(CPU) is None


def too_many_equal_tokens() -> None:
    """More likely tokens than are held: the definition computes the overlap."""
    (states, head), (moved, _) = sides(2)
    weight = head.weight.copy()
    weight[:200] = weight[(states[0] @ weight.T).argmax()]
    some = [(states, Head(weight)), (moved, Head(weight))]
    some[1] = moved, some[0][1]
    [rows] = scored(some)
    expected = exact(some[0], some[1], after(2))
    np.testing.assert_allclose(rows.kl, expected.kl, rtol=1e-4, atol=1e-7)
    assert np.isfinite(rows.overlap).all()


def planted_faults_are_seen() -> None:
    """Columns beyond the vocabulary that count, and a tile's mean that is left out, are errors that these cases see."""
    some = sides(2, vocab=2100)
    columns = fused_kernels._columns

    def unmasked(*given: Any) -> Any:
        column, inside, read = columns.fn(*given)
        return column, inside | (inside == 0), read

    for name, fault in (("_columns", unmasked), ("_tail", lambda x: 0.5 * x * x)):
        with mock.patch.object(fused_kernels, name, fault):
            try:
                check(some)
            except AssertionError:
                continue
        raise RuntimeError(f"a fault in {name} was not seen")


CASES: dict[str, Callable[[], None]] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and name not in ("bfloat16", "sides", "exact", "right", "by_kernel", "after", "check", "scored", "right_without")
}


def main(names: list[str]) -> None:
    wrong = {}
    for name in names:
        try:
            CASES[name]()
            wrong[name] = ""
        except Exception:
            wrong[name] = traceback.format_exc()
    print(json.dumps(wrong))


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
