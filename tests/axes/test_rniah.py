"""R-NIAH: prompts, the style that the reference answers, scores, and what a reader sees."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fidelab.axes.base import AxisInputs, AxisScore
from fidelab.axes.rniah import RNIAH
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate
from fidelab.config.schema import Experiment
from fidelab.core.errors import InputError, UsageError
from fidelab.inputs.needles import draw_needles
from fidelab.inputs.texts import Text
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import Model, resolve
from fidelab.results.plots import Heatmap, TablePlot, Texts
from fidelab.run.pipeline import execute
from tests.axes.captures import make_arm, make_capture
from tests.run.harness import Done, refused, run_fake

TOKENIZER = Tokenizer.load(resolve("fake"))


def _inputs(limit: int | None = 1 << 20) -> AxisInputs:
    return AxisInputs(TOKENIZER, Text("t", "t", (), ""), (), limit)


def _axis(**settings: Any) -> RNIAH:
    return RNIAH(RNIAH.Settings.model_validate({"style": "cloze", "lengths": [600], **settings}))


def _main(axis: RNIAH) -> Generate:
    request = axis.requests(_inputs())["main"]
    assert isinstance(request, Generate)
    return request


def _capture(store: Path, name: str, request: Generate, answers: list[str | None]) -> Capture:
    """``None``: the item failed."""
    ids = [[*(answer or "").encode(), 0] for answer in answers]
    failed = {item: "empty output" for item, answer in enumerate(answers) if answer is None}
    arm, pieces = replace(make_arm("exact", "fake"), name=name), TOKENIZER.pieces()
    return make_capture(store / name / request.axis, request, ids, arm, pieces=pieces, failed=failed)


def _codes(request: Generate) -> list[str]:
    return [json.loads(note)["codes"][0] for note in request.notes]


def _score(tmp_path: Path, axis: RNIAH, ref: list[Any], test: list[Any]) -> AxisScore:
    """Answers: True for the code, False for another text, or a text, or None for a failed item."""
    request = _main(axis)

    def told(answers: list[Any]) -> list[str | None]:
        words = {True: "{}.", False: "nothing"}
        return [
            None if answer is None else words.get(answer, answer).format(code)
            for answer, code in zip(answers, _codes(request), strict=True)
        ]

    sides = (_capture(tmp_path, name, request, told(side)) for name, side in (("ref", ref), ("test", test)))
    pair = Pair.match(*sides, subset=False)
    return axis.score_parts({"main": pair}, 0)


def _values(score: AxisScore) -> dict[str, float | None]:
    return {metric.name: metric.value for metric in score.found.metrics}


@pytest.mark.parametrize(
    ("limit", "lengths"),
    [
        (8192, [512, 2048, 4096]),
        (2100, [512, 2048]),
        (2060, [512]),
        (None, [512, 2048, 4096]),
        (32_768, [4096, 8192, 16_384]),
        (1 << 20, [4096 << k for k in range(6)]),
    ],
)
def test_default_lengths_leave_room_for_the_answer(limit: int | None, lengths: list[int]) -> None:
    axis = _axis(lengths="auto", trials=1)
    assert list(axis._plan(_inputs(limit)).lengths) == lengths


def test_lengths_beyond_the_limit_of_a_model_are_refused() -> None:
    with pytest.raises(InputError, match="fake has 256 positions; the shortest default length, 512, does not fit"):
        _axis(lengths="auto").requests(_inputs(256))
    with pytest.raises(UsageError, match=r"length 600 with \d+ tokens of answer is beyond the limit of fake, 610"):
        _axis().requests(_inputs(610))


def test_a_prompt_for_every_length_position_and_trial() -> None:
    request = _main(_axis(lengths=[600, 700], trials=2))
    assert [len(prompt) for prompt in request.prompts] == [600] * 6 + [700] * 6
    assert len(set(request.prompts)) == 12
    codes = [needles.codes[0] for needles in draw_needles(2, 1, 0, 0)]
    assert _codes(request) == codes * 6
    assert all(code in TOKENIZER.decode(ids) for ids, code in zip(request.prompts, _codes(request), strict=True))
    assert request.rows is False
    assert set(_codes(_main(_axis(compat="refract")))) == {"APRICOT-7-BLUE"}
    assert _main(_axis(needles=4, lengths=[2000])).max_tokens > 4 * len("APRICOT-7-BLUE")


def test_the_floor_keeps_the_trials_of_a_cell_together() -> None:
    axis = _axis(lengths=[600, 700], trials=3)
    floor = axis.repeated(_main(axis), 0.25)
    assert isinstance(floor, Generate)
    notes = [json.loads(note) for note in floor.notes]
    cells = [(note["length"], note["position"]) for note in notes]
    assert len(set(cells)) == 2
    assert all(cells.count(cell) == 3 for cell in cells)
    assert len(floor.prompts) == len(floor.notes) == 6


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"positions": [1.5]}, "positions lie between 0 and 1"),
        ({"lengths": []}, "write auto, or token counts"),
        ({"lengths": ["a"]}, "write auto, or token counts"),
        ({"compat": "refract", "needles": 2}, "leave out needles and distractors"),
        ({"style": "chat"}, "should be 'auto', 'question' or 'cloze'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _axis(**settings)


def _auto(tmp_path: Path, answers: list[str | None], lengths: list[int]) -> dict[str, Generate]:
    axis = _axis(style="auto", lengths=lengths, trials=1)
    asked = axis.requests(_inputs())
    request = asked["question"]
    assert isinstance(request, Generate)
    assert {len(ids) for ids in request.prompts} == {lengths[0]}
    found = axis.follow_up(_inputs(), {"question": _capture(tmp_path, "ref", request, answers)})
    return {part: request for part, request in found.items() if isinstance(request, Generate)}


def test_where_the_question_is_answered_all_lengths_are_asked_so_and_a_cloze_otherwise(tmp_path: Path) -> None:
    [code] = draw_needles(1, 1, 0, 0)[0].codes
    reasoned: list[str | None] = [f"<think>Is it {code}?", f"not {code}", "?"]
    answers: dict[str, list[str | None]] = {"question": ["?", f"It is {code}", "?"], "cloze": ["?", "?", "?"]}
    for style, told in (*answers.items(), ("cloze", reasoned)):
        found = _auto(tmp_path / str(told), told, [600, 700])
        assert dict(found["main"].settings)["style"] == style
        assert [len(ids) for ids in found["main"].prompts] == [600] * 3 + [700] * 3
    assert list(_auto(tmp_path / "one", [code, "?", "?"], [600])) == ["main"]


def test_only_informative_cells_count_and_the_others_are_named(tmp_path: Path) -> None:
    ref = [True] * 3 + [False] * 3 + [True] * 3
    test = [True] * 3 + [True] * 3 + [False] * 3
    score = _score(tmp_path, _axis(), ref, test)
    values = _values(score)
    assert score.found.value("score") == pytest.approx(50.0)
    assert (values["informative cells"], values["cells"], values["accuracy difference"]) == (2, 3, 0.0)
    assert score.found.facts["uninformative"] == [{"length": 600, "position": 0.5}]
    assert score.found.value("score_refract") == pytest.approx(100 * 2 / 3)
    compat = _score(tmp_path / "compat", _axis(compat="refract"), ref, test)
    assert compat.found.value("score") == pytest.approx(200 / 3)


def test_a_code_in_the_reasoning_or_denied_is_lost_on_either_side_but_in_compat(tmp_path: Path) -> None:
    answers = ["<think>{}?</think>I do not know.", "It is not {}", "<think>hm</think>{}"]
    score = _score(tmp_path / "a", _axis(positions=[0.5]), [True] * 3, answers)
    assert (_values(score)["lost"], _values(score)["found by the reference"]) == (2, 3)
    assert _values(_score(tmp_path / "b", _axis(positions=[0.5]), answers, [True] * 3))["found by the reference"] == 1
    plain = _score(tmp_path / "c", _axis(positions=[0.5], compat="refract"), [True] * 3, answers)
    assert (_values(plain)["lost"], plain.found.value("score")) == (0, 100.0)


def test_what_chance_alone_makes_of_the_score_stands_beside_it(tmp_path: Path) -> None:
    score = _score(tmp_path, _axis(), [True, True, False] * 3, [False, True, True] * 3)
    values = _values(score)
    assert score.found.value("score") == 100.0  # as often lost as gained in each cell
    assert values["score expected by chance"] == pytest.approx(100 - 100 / 6, abs=1)
    assert values["accuracy difference"] == 0.0
    assert _values(_score(tmp_path / "b", _axis(), [False] * 9, [True] * 9))["score expected by chance"] is None


def test_a_reference_that_finds_nothing_cannot_be_measured(tmp_path: Path) -> None:
    score = _score(tmp_path, _axis(), [False] * 9, [True] * 9)
    assert "accuracy 0 in all 3 cells" in score.not_measurable
    assert (score.found.value("score"), score.found.ci("score"), score.score(0).value) == (None, None, None)


def test_in_hard_mode_a_wrong_code_in_the_answer_is_a_miss_and_one_behind_it_is_not(tmp_path: Path) -> None:
    axis = _axis(distractors=2, lengths=[900], positions=[0.5])
    wrong = json.loads(_main(axis).notes[0])["wrong"][0]
    ref, test = f"{{}}. The old ink color is {wrong}", f"{wrong} or {{}}"
    score = _score(tmp_path, axis, [ref, True, True], [test, True, True])
    assert _values(score)["reference's accuracy"] == 1.0
    assert _values(score)["accuracy"] == pytest.approx(2 / 3)


def test_harm_needs_an_interval_wholly_below_minus_5_points(tmp_path: Path) -> None:
    hard = _score(tmp_path, _axis(), [True] * 9, [False] * 9)
    assert hard.found.downgrades[0].startswith("R-NIAH: 100 points fewer needles found than by the reference")
    assert _score(tmp_path / "one", _axis(), [True] * 9, [False, *[True] * 8]).found.downgrades == ()


def test_a_reader_sees_where_needles_are_lost_and_what_was_said_instead(tmp_path: Path) -> None:
    axis = _axis(lengths=[600, 700])
    ref, test = [True] * 15 + [False] * 3, [True] * 9 + [False] * 3 + [True] * 6
    heat, table, texts = _score(tmp_path, axis, ref, test).found.plots
    assert isinstance(heat, Heatmap)
    assert isinstance(table, TablePlot)
    assert isinstance(texts, Texts)
    assert (heat.y, heat.x) == (("600", "700"), ("0.1", "0.5", "0.9"))
    assert [grid.values for grid in heat.grids] == [
        ((1, 1, 1), (1, 1, 0)),
        ((1, 1, 1), (0, 1, 1)),
        ((0, 0, 0), (-1, 0, None)),
    ]
    assert list(table.rows[1]) == [700, "2 of 3", pytest.approx(2 / 3), pytest.approx(2 / 3), 0.0]
    assert [pair.label for pair in texts.pairs] == [f"700 tokens, position 0.1, trial {n}" for n in (1, 2, 3)]
    assert texts.pairs[0].candidate == "nothing"
    assert texts.pairs[0].reference.rstrip(".") in texts.pairs[0].note
    texts = _score(tmp_path / "more", axis, [True] * 18, [False] * 18).found.plots[-1]
    assert isinstance(texts, Texts)
    assert (len(texts.pairs), texts.title) == (12, "Needles lost (first 12 of 18)")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Answers only as a cloze; every third prompt forgotten is the first trial of each cell."""
    room = tmp_path_factory.mktemp("rniah")
    lines = [f"The rare paint color is {needles.codes[0]}." for needles in draw_needles(3, 1, 0, 0)]
    answers = [[line, line.removeprefix("The rare paint color is")] for line in lines]
    (room / "answers.json").write_text(json.dumps(answers))
    candidates = ["forget[every=3]", "forget[every=1]", "exact", "missing"]
    axes = {"rniah": {"lengths": [600, 700]}}
    return run_fake(room, axes, candidates, engine_args={"answers": str(room / "answers.json")})


def test_a_run_chooses_the_cloze_and_finds_what_each_arm_lost(run: Done) -> None:
    assert run.code == 0, run.err
    axes = {name: run.axis(name, "rniah") for name in ("forget[every=3]", "forget[every=1]", "exact")}
    assert {name: axis.value("score") for name, axis in axes.items()} == {
        "forget[every=3]": pytest.approx(100 * 2 / 3),
        "forget[every=1]": 0.0,
        "exact": 100.0,
    }
    assert axes["exact"].status == "identical"
    assert axes["exact"].facts["style"] == "cloze"
    assert axes["forget[every=1]"].n_items == 18
    missing = run.axis("missing", "rniah")
    assert (missing.status, missing.reason) == ("failed", "no item was usable")


def test_a_haystack_that_is_too_short_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "hay.txt").write_text("Too short. " * 20)
    assert "has 219 tokens, but 3 trials at length 600 need 728" in refused(
        run_fake(tmp_path, {"rniah": {"lengths": [600], "haystack": "hay.txt"}}, ["tilt"])
    )


@pytest.mark.long
@pytest.mark.model
def test_the_embedded_model_finds_needles_at_512_as_a_cloze(smollm2: Model, tmp_path: Path) -> None:
    axis = _axis(lengths=[512], trials=1)
    experiment = {
        "model": "smollm2-135m",
        "reference": "f32",
        "candidates": ["bf16"],
        "axes": {"rniah": axis.settings.model_dump(mode="json")},
        "dtype": "float32",
        "output_dir": str(tmp_path),
        "floor": 0.0,
        "twins": 0.0,
    }
    execute(Experiment.model_validate(experiment), command="")
    [path] = (tmp_path / "captures").glob("*-f32-*/rniah.main-*")
    reference = Capture(path)
    score = axis.score_parts({"main": Pair.match(reference, reference)}, 0)
    values = _values(score)
    assert (values["reference's accuracy"], values["informative cells"]) == (1.0, 3)


def test_the_resolved_settings_name_the_haystack_by_its_whole_path(tmp_path: Path) -> None:
    (tmp_path / "hay.txt").write_text("A plain sentence follows another one. " * 200)
    axes = {"rniah": {"lengths": [600], "haystack": "hay.txt", "trials": 1}}
    report = run_fake(tmp_path, axes, ["tilt"], floor=0.0).report
    assert report["settings"]["axes"]["rniah"]["haystack"] == str(tmp_path / "hay.txt")
