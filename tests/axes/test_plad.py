"""PLAD: its questions, its figures on captures made by hand, and whole runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fidelab.axes.base import AxisInputs, AxisScore
from fidelab.axes.plad import PLAD
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate, Tokens
from fidelab.core import canonical_json
from fidelab.core.errors import InputError
from fidelab.inputs.prompts import Prompt
from fidelab.inputs.texts import Text
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import Model, resolve
from fidelab.results.measurement import Measurement
from fidelab.results.plots import TablePlot, Texts
from tests.axes.captures import BYTES, make_arm, make_capture
from tests.run.harness import Done, cli, refused, run_fake

PLAIN = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]

Cells = Mapping[tuple[int, str], int]  # (prompt, perturbation) → how many tenths of the answer change
Failures = Mapping[int, str]


def _moved(tenths: int) -> list[int]:
    """An answer at a drift of so many tenths from ``PLAIN``."""
    return [*PLAIN[: 10 - tenths], *(99 for _ in range(tenths))]


def _asked(cells: Cells) -> list[tuple[int, str]]:
    """The questions behind some cells, each prompt as it is before its perturbations."""
    prompts = dict.fromkeys(prompt for prompt, _ in cells)
    return [key for p in prompts for key in [(p, ""), *(cell for cell in cells if cell[0] == p)]]


def _settings(names: Sequence[str], prompts: int, n_predict: int) -> dict[str, Any]:
    said = {"perturbations": ",".join(names), "prompts": prompts, "seed": 42, "template": "raw"}
    return {"n_predict": n_predict, **said}


def _probe(asked: Sequence[tuple[int, str]], n_prompts: int) -> Generate:
    names = list(dict.fromkeys(name for _, name in asked if name))
    notes = [
        {"prompt": p, "id": f"p{p}", "perturbation": name, **({"change": f"{name}-change"} if name else {})}
        for p, name in asked
    ]
    prompts = tuple((7, p, len(name)) for p, name in asked)
    settings, told = tuple(_settings(names, n_prompts, 10).items()), tuple(map(canonical_json, notes))
    return Generate("plad", prompts, 10, (0,), settings=settings, rows=False, notes=told)


def _capture(
    store: Path, name: str, request: Generate, answers: Sequence[Sequence[int]], failed: Failures | None = None
) -> Capture:
    return make_capture(store / name, request, answers, make_arm(name), pieces=BYTES, failed=failed)


def _pair(
    store: Path, ref: Cells, test: Cells, failed: Failures | None = None, name: str = "int4", prompts: int = 0
) -> Pair:
    """Answers at the given drifts; the same cells on both sides.  ``failed``: items of the test side."""
    asked = _asked(ref)
    request = _probe(asked, prompts or len({p for p, _ in asked}))

    def answers(cells: Cells) -> list[list[int]]:
        return [_moved(cells[key]) if key in cells else PLAIN for key in asked]

    folder = store / f"against-{name}"
    return Pair.match(
        _capture(folder, "f32", request, answers(ref)), _capture(folder, name, request, answers(test), failed)
    )


def _score(pair: Pair) -> AxisScore:
    return PLAD(PLAD.Settings()).score(pair, 0)


def _axis(score: AxisScore) -> Measurement:
    """As the record holds it."""
    return score.measurement()


def _metric(score: AxisScore, name: str) -> Any:
    return score.found.metric(name)


def _rows(score: AxisScore) -> dict[Any, dict[str, Any]]:
    [table] = [plot for plot in score.found.plots if isinstance(plot, TablePlot)]
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


@pytest.mark.parametrize(("ref", "test", "cell"), [(2, 3, 60.6531), (1, 3, 36.7879), (5, 2, 100.0), (0, 10, 0.6738)])
def test_a_cell_scores_as_metrics_says(tmp_path: Path, ref: int, test: int, cell: float) -> None:
    score = _score(_pair(tmp_path, {(0, "typo"): ref}, {(0, "typo"): test}))
    assert score.found.value("score") == pytest.approx(cell, abs=5e-5)
    assert _metric(score, "excess_drift").value == pytest.approx((test - ref) / 10)
    assert score.found.ci("score") is None  # a single prompt


def test_noise_costs_score_but_no_signed_excess(tmp_path: Path) -> None:
    ref = {(p, "typo"): 5 for p in range(30)}
    test = {(p, "typo"): 5 + (1 if p % 2 else -1) for p in range(30)}
    score = _score(_pair(tmp_path, ref, test))
    excess, sign = _metric(score, "excess_drift"), _metric(score, "sign_test")
    assert score.found.value("score") == pytest.approx(50 + 50 * math.exp(-0.5))
    assert excess.value == pytest.approx(0.0, abs=1e-12)
    assert excess.ci[0] < 0 < excess.ci[1]
    assert sign.value == 1.0


def test_the_sign_test_counts_prompts_not_cells(tmp_path: Path) -> None:
    ref = {(p, name): 2 for p in range(6) for name in ("typo", "case", "punct", "paraphrase")}
    score = _score(_pair(tmp_path, ref, dict.fromkeys(ref, 4)))
    assert _metric(score, "sign_test").value == pytest.approx(stats.binomtest(6, 6).pvalue)


def test_intervals_resample_prompts_with_all_their_cells(tmp_path: Path) -> None:
    names = ("typo", "case", "punct", "paraphrase")
    rng = np.random.default_rng(3)
    per_prompt = rng.integers(2, 9, size=24).tolist()
    many = {(p, name): per_prompt[p] for p in range(24) for name in names}
    once = {(p, "typo"): per_prompt[p] for p in range(24)}
    scores = [_score(_pair(tmp_path / str(len(c)), dict.fromkeys(c, 2), c)) for c in (many, once)]
    ours, theirs = (_metric(score, "excess_drift") for score in scores)
    assert ours.value == pytest.approx(theirs.value)
    # Four copies of each prompt's cell tell nothing new: the error is that of 24 prompts, not of 96 cells.
    error = np.std(np.array(per_prompt) / 10, ddof=1) / math.sqrt(24)
    for metric in (ours, theirs):
        assert metric.ci is not None
        assert metric.ci[1] - metric.ci[0] > 2 * 1.9 * error
    assert scores[0].found.ci("score") == pytest.approx(scores[1].found.ci("score"), abs=1.0)


def test_a_failed_answer_costs_its_cell_and_a_failed_unperturbed_one_all_of_its_prompt(tmp_path: Path) -> None:
    ref = {(p, name): 1 for p in range(3) for name in ("typo", "case")}
    score = _score(_pair(tmp_path, ref, ref, failed={0: "NaN logits", 5: "NaN logits"}))  # prompt 0; prompt 1, case
    assert (score.measurement().n_items, score.measurement().n_failed) == (6, 3)
    assert score.usable.tolist() == [False, False, True, False, True, True]
    assert not score.identical
    assert (_rows(score)["typo"]["failed"], _rows(score)["case"]["failed"]) == (1, 2)


def test_equal_drifts_of_other_answers_are_not_identical(tmp_path: Path) -> None:
    request = _probe([(0, ""), (0, "typo")], 1)
    ref = _capture(tmp_path, "f32", request, [[1, 2], [1, 3]])
    same = _score(Pair.match(ref, _capture(tmp_path, "bf16", request, [[1, 2], [1, 3]])))
    other = _score(Pair.match(ref, _capture(tmp_path, "int4", request, [[7, 8], [7, 9]])))
    assert (same.identical, other.identical) == (True, False)
    assert same.found.value("score") == other.found.value("score") == 100.0


def test_full_agreement_has_the_exact_binomial_bound(tmp_path: Path) -> None:
    cells = {(p, "typo"): 3 for p in range(5)}
    score = _score(_pair(tmp_path, cells, cells))
    lowest = math.exp(-5)
    assert score.found.ci("score") == pytest.approx((100 * (lowest + (1 - lowest) * 0.025 ** (1 / 5)), 100.0))
    most = 1 - 0.025 ** (1 / 5)
    assert _metric(score, "excess_drift").ci == pytest.approx((-most, most))


def _answered(store: Path, prompts: Sequence[int], ref: Sequence[int], test: Sequence[int]) -> AxisScore:
    """Answers of one token, the same to each prompt as it is and with a typo; ``prompts``: which are alike."""
    asked = [key for p in range(len(prompts)) for key in [(p, ""), (p, "typo")]]
    request = _probe(asked, len(prompts))
    request = replace(request, prompts=tuple((7, prompts[p], len(name)) for p, name in asked))
    sides = ([[ids[p]] * 5 for p, _ in asked] for ids in (ref, test))
    captures = (_capture(store, kv, request, side) for kv, side in zip(("f32", "int4"), sides, strict=True))
    return _score(Pair.match(*captures))


def test_an_arm_that_answers_every_prompt_alike_has_no_score_and_fails(tmp_path: Path) -> None:
    score = _answered(tmp_path, range(10), range(1, 11), [99] * 9 + [5])
    assert score.found.fails == (
        "answers do not depend on the prompt: PLAD finds the same one for 9 of 10 prompts (reference: 1)",
    )
    assert (score.found.value("score"), score.found.ci("score")) == (None, None)
    assert not score.usable.any()
    assert _rows(score)["typo"]["score"] is None
    assert _metric(score, "excess_drift").value is None
    assert _metric(score, "prompts_with_the_most_frequent_answer").value == 0.9


def test_prompts_that_are_alike_or_that_the_reference_answers_alike_may_be_answered_alike(tmp_path: Path) -> None:
    score = _answered(tmp_path / "alike", [1] * 9 + [2], [1] * 9 + [2], [8] * 9 + [9])
    assert (score.found.fails, score.found.value("score")) == ((), 100.0)
    assert _answered(tmp_path / "one", range(6), [4] * 6, [5] * 6).found.fails == ()
    score = _answered(tmp_path / "other", range(4), [1, 2, 3, 4], [1, 7, 8, 4])
    assert (score.found.value("score"), score.found.fails) == (100.0, ())
    assert _metric(score, "prompts_answered_unlike_the_reference").value == 0.5


def test_the_table_has_a_row_per_perturbation(tmp_path: Path) -> None:
    ref = {(p, "typo"): 1 for p in range(9)} | {(p, "case"): 5 for p in range(4)}
    test = {(p, "typo"): 3 for p in range(9)} | {(p, "case"): 5 for p in range(4)}
    rows = _rows(_score(_pair(tmp_path, ref, test, prompts=10)))
    assert list(rows) == ["typo", "case"]
    typo, case = rows["typo"], rows["case"]
    assert (typo["cells"], typo["skipped"], case["cells"], case["skipped"]) == (9, 1, 4, 6)
    assert typo["score"] == pytest.approx(100 * math.exp(-1))
    assert (typo["reference drift, %"], typo["candidate drift, %"]) == (pytest.approx(10), pytest.approx(30))
    assert typo["excess, points"] == pytest.approx(20)
    assert typo["sign test p"] == pytest.approx(2 / 2**9)
    assert (case["score"], case["excess, points"], case["sign test p"]) == (100.0, 0.0, 1.0)
    assert _metric(_score(_pair(tmp_path / "b", ref, test, prompts=10)), "skipped").value == 7


def test_the_answers_with_the_largest_excess_are_shown_first_and_eight_at_most(tmp_path: Path) -> None:
    ref = {(p, "typo"): 1 for p in range(12)}
    test = {(p, "typo"): p % 11 for p in range(12)}  # 0 … 10, then 0
    [texts] = [p for p in _axis(_score(_pair(tmp_path, ref, test))).plots if isinstance(p, Texts)]
    assert [pair.label for pair in texts.pairs] == [f"prompt {p} (p{p}), typo" for p in range(10, 2, -1)]
    first = texts.pairs[0]
    plain = bytes(PLAIN).decode()
    assert first.reference == f"prompt as it is:\n{plain}\n\nperturbed prompt:\n{plain[:-1]}c"
    assert first.candidate == f"prompt as it is:\n{plain}\n\nperturbed prompt:\n{'c' * 10}"
    assert first.note == "typo-change; drift 10% in the reference, 100% here"


def test_answers_that_moved_no_more_than_the_references_are_not_shown(tmp_path: Path) -> None:
    score = _score(_pair(tmp_path, {(0, "typo"): 3, (1, "typo"): 2}, {(0, "typo"): 1, (1, "typo"): 2}))
    assert [type(plot) for plot in score.found.plots] == [TablePlot]


def test_without_a_vocabulary_there_are_figures_and_no_texts(tmp_path: Path) -> None:
    pair = _pair(tmp_path, {(0, "typo"): 1}, {(0, "typo"): 5})
    [file] = tmp_path.rglob("vocabularies/*")
    file.unlink()
    score = _score(pair)
    assert (score.found.value("score") or 100) < 100
    assert [type(plot) for plot in score.found.plots] == [TablePlot]


@pytest.fixture(scope="module")
def inputs() -> AxisInputs:
    """Two prompts to which all four perturbations apply, one to which only ``punct`` does."""
    texts = ["Find the big Castle 101", "Describe a Happy story.", "7 + 8 ="]
    prompts = tuple(Prompt(f"id{i}", "user", ({"role": "user", "content": t},)) for i, t in enumerate(texts))
    return AxisInputs(Tokenizer.load(resolve("fake")), Text("none", "", (), ""), prompts, 512)


def _asks(inputs: AxisInputs, **settings: Any) -> Generate:
    return PLAD(PLAD.Settings(**settings)).request(inputs)


def test_the_probe_asks_each_prompt_as_it_is_and_perturbed(inputs: AxisInputs) -> None:
    request = _asks(inputs)
    notes = [json.loads(note) for note in request.notes]
    names = ["", "typo", "case", "punct", "paraphrase"]
    assert [(n["prompt"], n["perturbation"]) for n in notes] == [
        *((0, name) for name in names),
        *((1, name) for name in names),
        (2, ""),
        (2, "punct"),
    ]
    texts = [bytes(ids).decode() for ids in request.prompts]
    assert texts[0] == "Find the big Castle 101"
    assert texts[2:5] == ["find the big castle 101", "Find the big Castle 101?", "Find the large Castle 101"]
    assert [n["change"] for n in notes[3:5]] == ["101 → 101?", "big → large"]
    assert not request.rows
    assert dict(request.settings) == _settings(names[1:], 3, 64)


def test_a_perturbation_asks_the_same_whatever_others_are_asked_for(inputs: AxisInputs) -> None:
    alone = _asks(inputs, perturbations=["paraphrase", "paraphrase"])
    assert set(alone.prompts) <= set(_asks(inputs).prompts)
    assert [json.loads(note)["prompt"] for note in alone.notes] == [0, 0, 1, 1]  # nothing to ask of the third


def test_a_perturbation_that_the_tokenizer_does_not_see_is_skipped(inputs: AxisInputs) -> None:
    class Uncased:
        def __getattr__(self, name: str) -> Any:
            return getattr(inputs.tokenizer.backend, name)

        def encode(self, text: str) -> Tokens:
            return inputs.tokenizer.backend.encode(text.lower())

    uncased: Any = Uncased()
    request = _asks(replace(inputs, tokenizer=replace(inputs.tokenizer, backend=uncased)))
    assert {json.loads(note)["perturbation"] for note in request.notes} == {"", "typo", "punct", "paraphrase"}


def test_what_does_not_fit_into_the_model_and_nothing_to_ask_are_refused(inputs: AxisInputs) -> None:
    with pytest.raises(InputError, match=r"plad: prompt 'id1' has 26 tokens; with axes.plad.n_predict 500 .* 512"):
        _asks(inputs, n_predict=500)
    with pytest.raises(InputError, match=r"of case, paraphrase none applies to any of 1 prompts"):
        _asks(replace(inputs, prompts=inputs.prompts[2:]), perturbations=["paraphrase", "case"])


def test_the_floor_keeps_a_prompt_and_its_perturbations_together(inputs: AxisInputs) -> None:
    axis, whole = PLAD(PLAD.Settings()), _asks(inputs)
    part = axis.repeated(whole, 0.5)
    assert isinstance(part, Generate)
    assert [json.loads(note)["prompt"] for note in part.notes] == [0] * 5 + [2] * 2
    assert axis.repeated(whole, 1.0) == whole


def test_the_floor_scores_prompts_of_the_same_text_too(tmp_path: Path, inputs: AxisInputs) -> None:
    twins = replace(inputs, prompts=(inputs.prompts[2], replace(inputs.prompts[2], id="twin"), inputs.prompts[0]))
    axis, whole = PLAD(PLAD.Settings()), _asks(twins)
    part = axis.repeated(whole, 1 / 3)
    assert isinstance(part, Generate)
    assert len(part.prompts) == 2
    ref = _capture(tmp_path, "f32", whole, [list(ids[:4]) for ids in whole.prompts])
    again = _capture(tmp_path, "bf16", part, [list(ids[:4]) for ids in part.prompts])
    score = axis.score(Pair.match(ref, again, subset=True), 0)
    assert (score.measurement().n_items, score.identical, score.found.value("score")) == (1, True, 100.0)


BASES, ALL, CONTROL = "fork[at=4,every=5]", "fork[at=4,every=1]", "fork[at=6,every=5]"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The fake engine: three prompts, four perturbations each, eight tokens, no answer minds the perturbation."""
    cwd = tmp_path_factory.mktemp("plad")
    (cwd / "castles.txt").write_text("Find the big Castle 101.\nWrite a Happy story 102.\nExplain the tiny Jug 103.\n")
    (cwd / "answers.json").write_text(json.dumps([[f"10{i}", letter * 20] for i, letter in enumerate("xabc")]))
    candidates = ["exact", BASES, ALL, "missing", "garbage"]
    settings = {"engine_args": {"answers": "answers.json"}, "prompts": "castles.txt", "control": CONTROL, "floor": 0.5}
    done = run_fake(cwd, {"plad": {"n_predict": 8}}, candidates, **settings)
    assert done.code == 0, done.err
    return done


def test_a_candidate_whose_unperturbed_answers_alone_differ_is_caught(run: Done) -> None:
    plad = run.axis(BASES, "plad")  # four of eight tokens: drift 0.5 against 0
    assert plad.value("score") == pytest.approx(100 * math.exp(-2.5))
    assert plad.value("excess_drift") == 0.5
    assert (plad.value("drift_of_the_reference"), plad.value("skipped"), plad.n_items) == (0.0, 0, 12)


def test_the_controls_score_stands_beside(run: Done) -> None:
    plad, control = (run.axis(arm, "plad").value("score") or 0.0 for arm in (BASES, "control"))
    assert control == pytest.approx(100 * math.exp(-1.25))
    assert run.axis(BASES, "plad").value("over_control") == pytest.approx(plad - control)


def test_a_candidate_that_differs_everywhere_alike_drifts_no_more_and_no_output_is_a_failed_axis(run: Done) -> None:
    assert (run.arm(ALL)["status"], run.axis(ALL, "plad").value("score")) == ("ok", 100.0)
    assert run.axis("exact", "plad").status == "identical"
    plad = run.axis("missing", "plad")
    assert (plad.status, plad.n_failed, plad.value("score")) == ("failed", 12, None)


def test_constant_garbage_is_a_reason_to_fail(tmp_path: Path) -> None:
    axes = {"plad": {"n_predict": 8}, "kld": {"windows": 8, "n_ctx": 16}}
    verdict = run_fake(tmp_path, axes, ["garbage"], floor=0).arm("garbage")["verdict"]
    assert verdict["band"] == "FAIL"
    assert any(fact.startswith("answers do not depend on the prompt") for fact in verdict["because"])


def test_an_unknown_perturbation_on_the_command_line_is_one_line(run: Done) -> None:
    line = refused(cli("compare", "-f", "experiment.yaml", "--set", "axes.plad.perturbations=[typos]", cwd=run.cwd))
    assert "unknown perturbation 'typos'" in line
    assert "case" in line


@pytest.mark.long
@pytest.mark.model
def test_on_a_real_model_a_coarse_cache_drifts(smollm2: Model, tmp_path: Path) -> None:
    (tmp_path / "plad.yaml").write_text(
        "model: smollm2-135m\ndtype: float32\nthreads: 1\nreference: f32\ncontrol: none\ncandidates: [int3]\n"
        "floor: 0\naxes: {plad: {n_predict: 8, limit: 2, perturbations: [typo, punct]}}\n"
    )
    done = cli("compare", "-f", "plad.yaml", cwd=tmp_path)
    assert done.code == 0, done.err
    plad = done.axis("int3", "plad")
    assert (plad.status, plad.n_items, plad.n_failed) == ("ok", 4, 0)
    assert 0 < (plad.value("drift_of_the_reference") or 0) < 1
    assert 0 < (plad.value("score") or 0) <= 100
    [table] = [plot for plot in plad.plots if isinstance(plot, TablePlot)]
    assert [row[:2] for row in table.rows] == [("typo", 2), ("punct", 2)]
