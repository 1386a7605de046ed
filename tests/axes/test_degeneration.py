"""Degeneration onset: on captures made by hand, on the fake engine, and on the embedded model."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fidelab.axes.base import AxisScore
from fidelab.axes.degeneration import Degeneration
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate
from fidelab.inputs.files import DATA
from fidelab.inputs.tokens import Tokenizer
from fidelab.metrics.degeneration import degeneration_onset, distinct_floor
from fidelab.metrics.intervals import mcnemar_exact
from fidelab.models import Model
from fidelab.results.plots import Curve, TablePlot, Texts
from fidelab.run.api import compare
from tests.axes.captures import make_arm, make_capture
from tests.run.harness import Done, run_fake

V, LENGTH, STOP = 8192, 400, 0
AXIS = Degeneration(Degeneration.Settings())
PROMPTS = ("fact-01", "list-01", "fact-02", "fact-03", "list-03")
PROSE = (DATA / "prose.md").read_text("utf-8")


def _text(seed: int) -> list[int]:
    """Clean: numbered words of the project's prose, from another place for each seed; 0 is the token that ends."""
    words = re.findall(r"\w+|[^\w\s]", PROSE)
    known = {word: number for number, word in enumerate(dict.fromkeys(words), 1)}
    return [known[word] for word in words[LENGTH * seed : LENGTH * (seed + 1)]]


def _loop(seed: int, at: int) -> list[int]:
    return (_text(seed)[:at] + [5, 6, 7] * LENGTH)[:LENGTH]


def _noise(seed: int, at: int) -> list[int]:
    rng = random.Random(seed)
    return _text(seed)[:at] + [rng.randrange(1, V) for _ in range(LENGTH - at)]


def _capture(store: Path, name: str, texts: Sequence[Sequence[int]], failed: dict[int, str]) -> Capture:
    settings = (("n_predict", LENGTH), ("template", "raw"))
    prompts = tuple((1, 2, i) for i in range(len(texts)))
    request = Generate("degeneration", prompts, LENGTH, (STOP,), settings=settings, rows=False)
    return make_capture(store / name, request, texts, make_arm(name), size=V, failed=failed)


def _score(
    store: Path, ref: Sequence[Sequence[int]], test: Sequence[Sequence[int]], failed: dict[int, str] | None = None
) -> AxisScore:
    p, q = _capture(store, "f32", ref, {}), _capture(store, "int4", test, failed or {})
    return AXIS.score(Pair.match(p, q), 0)


def _values(score: AxisScore) -> dict[str, Any]:
    return {metric.name: metric.value for metric in score.found.metrics}


CLEAN = [_text(i) for i in range(8)]


def test_clean_texts_that_differ_are_no_harm(tmp_path: Path) -> None:
    score = _score(tmp_path, CLEAN, [_text(10 + i) for i in range(8)])
    found = _values(score)
    assert (found["degenerate earlier"], found["degenerate"], found["median onset"]) == (0.0, 0, None)
    assert (score.found.downgrades, score.found.fails, score.identical) == ((), (), False)


def test_noise_where_the_reference_has_none_lowers_the_verdict_and_says_from_where(tmp_path: Path) -> None:
    score = _score(tmp_path, CLEAN, [*CLEAN[:7], _noise(7, 200)])
    [sentence] = score.found.downgrades
    at, k, n = map(int, re.findall(r"\d+", sentence))
    assert sentence == f"garbage from token ~{at} in {k} of {n} prompts (reference: none)"
    assert (abs(at - 200) <= 16, k, n) == (True, 1, 8)
    assert score.found.fails == ()


@pytest.mark.parametrize(("looping", "lowered"), [(5, False), (6, True), (8, True)])
def test_loops_lower_the_verdict_when_they_are_more_than_chance(tmp_path: Path, looping: int, lowered: bool) -> None:
    assert (mcnemar_exact(looping, 0) <= 0.05) is lowered
    score = _score(tmp_path, CLEAN, [_loop(i, 150) if i < looping else CLEAN[i] for i in range(8)])
    assert bool(score.found.downgrades) is lowered
    assert _values(score)["degenerate earlier"] == looping / 8


def test_loops_as_often_later_as_earlier_are_chance(tmp_path: Path) -> None:
    ref = [_loop(i, 100 if i % 2 else 250) for i in range(8)]
    test = [_loop(i, 250 if i % 2 else 100) for i in range(8)]
    score = _score(tmp_path, ref, test)
    found = _values(score)
    shares = [found[name] for name in ("degenerate earlier", "degenerate later", "p of earlier against later")]
    assert shares == [0.5, 0.5, 1]
    assert score.found.downgrades == ()


@pytest.mark.parametrize(("at", "share"), [(217, 1.0), (218, 0.0)])
def test_harm_begins_more_than_32_tokens_before_the_references_onset(tmp_path: Path, at: int, share: float) -> None:
    score = _score(tmp_path, [_loop(i, 250) for i in range(8)], [_loop(i, at) for i in range(8)])
    assert _values(score)["degenerate earlier"] == share
    told = ["reference: in 8 of these, from token ~250" in sentence for sentence in score.found.downgrades]
    assert told == ([True] if share else [])


def test_garbage_at_once_on_most_prompts_that_the_reference_begins_well_fails(tmp_path: Path) -> None:
    for broken, fails in ((4, False), (5, True)):
        test = [_loop(i, 10) if i < broken else CLEAN[i] for i in range(8)]
        assert bool(_score(tmp_path / str(broken), CLEAN, test).found.fails) is fails
    ref = [_loop(i, 10) if i < 3 else CLEAN[i] for i in range(8)]
    score = _score(tmp_path, ref, [_loop(i, 10) if i < 6 else CLEAN[i] for i in range(8)])
    assert score.found.fails == ("garbage within the first 32 tokens in 3 of 5 prompts that the reference begins well",)


def test_garbage_that_the_reference_writes_too_is_not_a_failure(tmp_path: Path) -> None:
    texts = [_noise(i, 0) for i in range(8)]
    score = _score(tmp_path, texts, [_noise(50 + i, 0) for i in range(8)])
    assert (score.found.fails, score.found.downgrades, _values(score)["degenerate"]) == ((), (), 8)


def test_an_answer_that_ends_is_clean_and_one_that_ends_after_garbage_judged_without_its_end(tmp_path: Path) -> None:
    found = _values(_score(tmp_path / "a", CLEAN, [[*ids[:40], STOP] for ids in CLEAN]))
    assert (found["degenerate"], found["median length"], found["median length, reference"]) == (0, 40, LENGTH)
    found = _values(_score(tmp_path / "b", CLEAN, [[*_loop(i, 100), STOP] for i in range(8)]))
    assert (found["degenerate"], found["median onset"], found["median length"]) == (8, 100, LENGTH)


def test_the_curve_falls_at_the_onsets_and_the_table_names_them(tmp_path: Path) -> None:
    curve, table = _score(tmp_path, CLEAN, [_loop(0, 100), _loop(1, 200), *CLEAN[2:]]).found.plots[:2]
    assert isinstance(curve, Curve)
    assert isinstance(table, TablePlot)
    clean = dict(zip(curve.x, curve.y, strict=True))
    assert (clean[100.0], clean[200.0], clean[400.0]) == (1.0, 7 / 8, 6 / 8)
    assert table.rows[1] == (1, LENGTH, None, "clean", LENGTH, 200, "loop", "yes")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Eight prompts answered with prose of 300 bytes, and one arm that writes one token for ever."""
    cwd = tmp_path_factory.mktemp("degeneration")
    ascii_prose = PROSE.encode("ascii", "ignore").decode()
    answers = [(f"prompt {i}", ascii_prose[i * 3000 : i * 3000 + 300]) for i in range(8)]
    (cwd / "answers.json").write_text(json.dumps(answers))
    axes = {"degeneration": {"n_predict": 320}, "kld": {"windows": 8, "n_ctx": 16}}
    done = run_fake(cwd, axes, ["garbage", "short[at=90]", "exact"], engine_args={"answers": str(cwd / "answers.json")})
    assert done.code == 0, done.err
    return done


def test_an_arm_of_garbage_fails_and_its_report_says_why(run: Done) -> None:
    verdict = run.arm("garbage")["verdict"]
    assert verdict["band"] == "FAIL"
    assert "garbage from token ~0 in 8 of 8 prompts (reference: none)" in verdict["because"]


def test_around_the_onset_there_is_text(run: Done) -> None:
    [texts] = [plot for plot in run.axis("garbage", "degeneration").plots if isinstance(plot, Texts)]
    first = texts.pairs[0]
    assert first.candidate == "\x07" * 64
    assert first.reference == PROSE.encode("ascii", "ignore").decode()[:64]


@pytest.mark.model
def test_real_tokens_of_clean_text_raise_no_alarm(smollm2: Model) -> None:
    tokenizer = Tokenizer.load(smollm2)
    ids, n = tokenizer.encode(PROSE), 512
    starts = [i * (len(ids) - n) // 199 for i in range(200)]
    vocab = tokenizer.vocabulary().size
    floor = distinct_floor([ids[start : start + n] for start in starts[::20]])
    assert [at for at in starts if degeneration_onset(ids[at : at + n], ids[:20], vocab, floor)] == []


@pytest.mark.long
@pytest.mark.model
def test_two_bit_keys_and_values_degenerate_earlier_and_bf16_does_not(smollm2: Model, tmp_path: Path) -> None:
    """Prompts on which the reference, which loops on others, writes clean text.

    Which of them int2 turns into repetition depends on last bits, and so on the machine: some it does everywhere.
    """
    lines = (DATA / "prompts.jsonl").read_text("utf-8").splitlines()
    chosen = [line for line in lines if json.loads(line)["id"] in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(chosen))
    report = compare(
        "smollm2-135m",
        reference="f32",
        control="none",
        candidates=["bf16", "int2"],
        axes={"degeneration": {"n_predict": 132}, "kld": {"windows": 2, "n_ctx": 64}},
        prompts=str(tmp_path / "prompts.jsonl"),
        dtype="float32",
        floor=0.0,
        output_dir=str(tmp_path),
    )
    earlier = {arm.name: arm.axes["degeneration"].value("degenerate_earlier") for arm in report.candidates}
    assert earlier["bf16"] == 0
    assert (earlier["int2"] or 0) >= 1 / len(PROMPTS)
