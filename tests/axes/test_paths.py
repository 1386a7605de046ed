"""Axis ``paths``: on captures made by hand, and on the fake engine through real workers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fidelab.axes.base import AxisScore
from fidelab.axes.paths import Paths
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture, is_complete
from fidelab.captures.requests import Served
from fidelab.core.errors import MismatchError
from fidelab.metrics.divergence import parting
from fidelab.models.tiny import make_tiny
from fidelab.results.measurement import Coordinates
from fidelab.results.record import Report
from tests.axes.captures import make_arm, make_capture
from tests.present import present
from tests.run.harness import Done, cli

V, N = 16, 64
Rows = NDArray[np.float64]
WINDOWS = tuple(tuple((i * k) % V for i in range(N)) for k in (1, 3, 5, 7))
AXIS = Paths(Paths.Settings())
FIRST = {"cold": 0, "chunked": 0, "decode": 16, "prefix": 32, "batch-7": 0}


def _rows(seed: int, scale: float, of: Rows | None = None) -> Rows:
    """Log-probabilities [windows, N - 1, V]: others, or those given with noise on every logit."""
    noise = np.random.default_rng(seed).normal(scale=scale, size=(len(WINDOWS), N - 1, V))
    scores = noise if of is None else of + noise
    return np.asarray(scores - np.log(np.exp(scores).sum(-1, keepdims=True)))


BASE = _rows(0, 1.0)


def _capture(store: Path, name: str, part: str, rows: Rows | None, engine: str, facts: Mapping[str, Any]) -> Capture:
    way = part.partition("-")[0]
    request = Served(f"paths.{part}", WINDOWS, FIRST[part], N - 2, way, settings=(("n_ctx", N), ("way", way)))
    answers = [
        rows if rows is None else {"logprobs": rows[i, FIRST[part] :].astype(np.float32)} for i in range(len(WINDOWS))
    ]
    failed = dict.fromkeys(range(len(WINDOWS)), "no rows") if rows is None else {}
    place = store / f"{name}-{engine}" / part
    return make_capture(place, request, answers, make_arm(name, engine), size=V, failed=failed, facts=facts)


ENGAGED = {"engaged": {"forwards": 4}}


def _arm(
    store: Path, name: str, ways: Mapping[str, Rows | None], engine: str = "fake", **facts: Mapping[str, Any]
) -> dict[str, Capture]:
    return {
        part: _capture(store, name, part, rows, engine, facts.get(part.replace("-", "_"), ENGAGED))
        for part, rows in ways.items()
    }


def _score(ref: Mapping[str, Capture], test: Mapping[str, Capture]) -> AxisScore:
    return AXIS.score_parts({part: Pair.match(ref[part], test[part]) for part in ref}, 0)


def _ways(base: Rows, noise: float, **parted: tuple[int, Rows]) -> dict[str, Rows | None]:
    """All ways of an arm: its cold rows with noise, and from a position on other rows."""
    ways: dict[str, Rows | None] = {"cold": base}
    for seed, part in enumerate(FIRST):
        if part != "cold":
            rows = _rows(100 + seed, noise, base)
            at, other = parted.get(part.replace("-", "_"), (N, base))
            rows[:, at:] = other[:, at:]
            ways[part] = rows
    return ways


def _ends(score: AxisScore) -> dict[str, float]:
    return {str(m.cell["way"]): m.value for m in score.found.metrics if m.name == "parts at" and m.value is not None}


def test_a_way_parts_where_half_of_the_positions_from_there_on_are_above_what_is_allowed() -> None:
    kl = np.zeros((4, 60))
    kl[:, 33:] = 1.0
    assert parting(kl, 0.5) == 33
    kl[2:] = 0.0  # half of the windows
    assert parting(kl, 0.5) == 33
    kl[1] = 0.0
    assert parting(kl, 0.5) is None
    single, end = np.zeros((2, 60)), np.zeros((4, 60))
    single[:, ::3] = 100.0  # however large
    assert parting(single, 0.5) is None
    end[:, -9:] = 1.0
    end[:2, -8:] = 0.0  # of the last 36 rows 20 are above, and 27 needed
    assert parting(end, 0.5) is None
    # positions without a number count as apart, and short ways are judged whole
    short = [parting(rows, 0.5) for rows in (np.full((1, 5), np.nan), np.zeros((1, 5)), np.empty((1, 0)))]
    assert short == [0, None, None]


@pytest.mark.parametrize(("windows", "left"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_a_way_that_parts_just_before_the_end_is_found_where_eight_rows_are_left(windows: int, left: int) -> None:
    kl = np.zeros((windows, 60))
    kl[:, -left:] = 1.0
    assert parting(kl, 0.5) == 60 - left
    kl[0, -1] = 0.0  # one of them is sound
    assert parting(kl, 0.5) is None
    kl[:, -left:] = 0.0
    kl[:, 60 - left + 1 :] = 1.0  # fewer rows
    assert parting(kl, 0.5) is None


def test_the_way_its_first_position_and_what_the_arm_adds_are_reported(tmp_path: Path) -> None:
    other = _rows(7, 1.0)
    ref, test = _arm(tmp_path, "bf16", _ways(BASE, 0.01)), _arm(tmp_path, "int8", _ways(BASE, 0.01, decode=(40, other)))
    score = _score(ref, test)
    assert _ends(score) == {"decode": 40}
    assert score.found.summary == "decoding parts from prefill at position 40"
    assert score.found.reference_summary == "4 ways agree with a cold prefill"
    assert score.found.downgrades == ("decoding parts from prefill at position 40",)
    at: Coordinates = {"way": "decode"}
    own, twin, added = (score.found.value(name, at) for name in ("kl_from_cold", "reference", "added"))
    assert added == pytest.approx(present(own) - present(twin))
    p, q = (np.exp(x[:, 40:]) for x in (BASE, other))
    expected = (p * (np.log(p) - np.log(q))).sum(-1).sum() / (len(WINDOWS) * (N - 1 - 16))
    assert own == pytest.approx(expected, rel=0.01)


def test_a_way_that_parts_in_the_reference_too_is_not_the_formats_fault(tmp_path: Path) -> None:
    other = _rows(7, 1.0)
    ref = _arm(tmp_path, "bf16", _ways(BASE, 0.01, prefix=(40, other)))
    test = _arm(tmp_path, "int8", _ways(BASE, 0.01, prefix=(40, other)))
    score = _score(ref, test)
    assert score.found.downgrades == ()
    [flag] = [flag for cell in score.found.cells for flag in cell.flags]
    parts = "prefill after a prefix hit parts from a cold one at position 40"
    assert (flag.kind, flag.text) == ("reference", f"in the reference itself, {parts}")
    assert score.found.reference_summary == parts


def test_what_stays_below_the_formats_own_cost_or_its_twins_noise_is_not_a_fault(tmp_path: Path) -> None:
    coarse = _rows(8, 0.3, BASE)  # a format that costs 0.05 nats, whose ways differ by half of that
    ref = _arm(tmp_path, "bf16", _ways(BASE, 0.01))
    assert _ends(_score(ref, _arm(tmp_path, "int4", _ways(coarse, 0.2)))) == {}
    noisy = _arm(tmp_path, "f16", _ways(BASE, 0.3))
    assert _ends(_score(noisy, _arm(tmp_path, "int8", _ways(BASE, 0.3)))) == {}
    ends = {part: FIRST[part] for part in FIRST if part != "cold"}
    assert _ends(_score(ref, _arm(tmp_path, "int5", _ways(BASE, 0.3)))) == ends


def test_without_a_twin_the_arms_other_ways_say_what_last_bits_cost(tmp_path: Path) -> None:
    ref = _arm(tmp_path, "bf16", _ways(BASE, 0.01), engine="vllm")
    test = _arm(tmp_path, "int8", _ways(BASE, 0.3, batch_7=(30, _rows(7, 1.5))))
    score = _score(ref, test)
    assert _ends(score) == {"batch-7": 30}
    assert score.found.metric("reference") is None


def test_ways_that_were_not_taken_are_said_and_count_for_nothing(tmp_path: Path) -> None:
    ways = _ways(BASE, 0.01)
    ref = _arm(tmp_path, "bf16", ways)
    test = _arm(
        tmp_path,
        "int8",
        {**ways, "prefix": None, "decode": _rows(9, 1.0), "batch-7": _rows(9, 1.0)},
        prefix={"not_supported": "engine fake has no way 'prefix'"},
        decode={"not_engaged": "the cache held 0 tokens"},
        batch_7={},
    )
    score = _score(ref, test)
    assert {cell.at["way"]: (str(cell.status), cell.reason) for cell in score.found.cells} == {
        "chunked": ("ok", None),
        "decode": ("not_engaged", "the cache held 0 tokens"),
        "prefix": ("not_supported", "engine fake has no way 'prefix'"),
        "batch-7": ("not_engaged", "the engine gave no counts that prove it"),
    }
    assert score.found.summary == "1 way agrees with a cold prefill"
    assert len(score.num) == len(WINDOWS) * (N - 1)
    assert is_complete(test["prefix"].folder)


def test_an_arm_whose_cold_prefill_is_not_proven_is_not_measurable(tmp_path: Path) -> None:
    ref = _arm(tmp_path, "bf16", _ways(BASE, 0.01))
    why = "engine hf has no ways of serving: take llamacpp, sglang or vllm"
    unproven = {part.replace("-", "_"): {"not_supported": why} for part in FIRST}
    test = _arm(tmp_path, "int8", dict.fromkeys(FIRST), "hf", **unproven)
    assert _score(ref, test).measurement().reason == why
    back = _score(test, ref)  # nor is anything known of the format's cost then
    assert _ends(back) == {}
    assert back.measurement().status == "ok"


def test_an_arm_that_computes_what_the_reference_does_in_every_way_is_identical(tmp_path: Path) -> None:
    ref, test = _arm(tmp_path, "bf16", _ways(BASE, 0.01)), _arm(tmp_path, "f16", _ways(BASE, 0.01))
    assert _score(ref, test).identical
    other = _arm(tmp_path / "other", "f16", _ways(BASE, 0.02))
    assert not _score(ref, other).identical


def test_rows_of_other_positions_are_not_paired(tmp_path: Path) -> None:
    ways = {"cold": BASE, "decode": BASE}
    ref, test = _arm(tmp_path, "bf16", ways), _arm(tmp_path, "int8", ways)
    with pytest.raises(MismatchError, match=r"axis 'paths\.decode' is not 'paths\.cold'"):
        Pair.match(ref["cold"], test["decode"])


def _compare(room: Path, *flags: object) -> Done:
    room.mkdir(exist_ok=True)
    (room / "text.txt").write_text("".join(f"line {i} of a text\n" for i in range(400)))
    arms = ("--engine", "fake", "--reference", "exact", "--kv", "tilt", "--kv", "tilt[q=0.7]", "--text", "text.txt")
    return cli("compare", "fake", *arms, "--axes", "paths", "--no-floor", *flags, cwd=room)


def test_a_run_says_in_one_sentence_which_way_parts_where_and_in_which_arm(tmp_path: Path) -> None:
    done = _compare(tmp_path, "--engine-arg", "parts=tilt:decode:97", "--engine-arg", "lacks=evicted")
    assert done.code == 0, done.err
    assert "decoding parts from prefill at position 97, tilt only" in done.out
    assert "paths, way evicted: not engaged: the fake engine counts no evicted, as it was asked to" in done.out
    axis = done.axis("tilt", "paths")
    distance = 0.2 * math.log(1.5)  # of (0.6, 0.4) from (0.4, 0.6)
    assert axis.value("kl_from_cold", {"way": "decode"}) == pytest.approx(distance * (255 - 97) / (255 - 16), rel=1e-4)
    assert axis.value("ways_that_part") == 1
    assert done.axis("tilt[q=0.7]", "paths").value("ways_that_part") == 0


def test_all_faces_have_the_table_of_ways_by_arms(tmp_path: Path) -> None:
    flags = ("--engine-arg", "parts=tilt:prefix:140", "--set", "axes.paths.ways=decode,prefix")
    done = _compare(tmp_path, *flags)
    assert done.code == 0, done.err
    page = (done.folder / "report.html").read_text()
    shown = cli("report", done.folder, "--details", cwd=done.cwd).out
    for face in (shown, page, Report.model_validate(done.report).to_markdown()):
        assert "KL between each serving path and a cold prefill" in face
        assert "from 140" in face
        assert "prefill after a prefix hit parts from a cold one at position 140, tilt only" in face
    assert [cell.at["way"] for cell in done.axis("tilt", "paths").cells] == ["decode", "prefix"]


@pytest.mark.parametrize(("axes", "code"), [("paths", 2), ("paths,kld", 0)])
def test_an_engine_without_ways_of_serving_is_asked_for_none_and_another_is_named(
    axes: str, code: int, tmp_path: Path
) -> None:
    words = ("compare", make_tiny(tmp_path / "tiny"), "--engine", "hf", "--kv", "int8", "--axes", axes, "--dry-run")
    done = cli(*words, cwd=tmp_path)
    assert done.code == code
    assert "engine hf has no ways of serving: take llamacpp, sglang or vllm" in (done.err if code else done.out)


def test_a_way_that_an_engine_lacks_is_said_and_not_asked(tmp_path: Path) -> None:
    (tmp_path / "shim").mkdir()
    shim = """
from fidelab.engines.fake import FakeEngine

answer = FakeEngine.answer

def checked(self, request, sink):
    assert request.way in ("cold", "decode")
    return answer(self, request, sink)

FakeEngine.ways, FakeEngine.answer = frozenset(("cold", "decode")), checked
"""
    (tmp_path / "shim" / "sitecustomize.py").write_text(shim)
    done = _compare(tmp_path, "--pythonpath", tmp_path / "shim", "--set", "axes.paths.ways=decode,prefix")
    assert done.code == 0, done.err
    cells = {cell.at["way"]: cell for cell in done.axis("tilt", "paths").cells}
    assert (str(cells["prefix"].status), str(cells["decode"].status)) == ("not_supported", "ok")
    assert cells["prefix"].reason == "engine fake has no way 'prefix'"


@pytest.mark.parametrize(("arm", "reason"), [("tilt", "ValueError: no"), ("exact", "reference has no answer")])
def test_a_way_that_fails_leaves_the_others_their_figures(arm: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "shim").mkdir()
    shim = f"""
from fidelab.engines.fake import FakeEngine

answer = FakeEngine.answer

def broken(self, request, sink):
    if request.way == "prefix" and self._kv == {arm!r}:
        raise ValueError("no")
    return answer(self, request, sink)

FakeEngine.answer = broken
"""
    (tmp_path / "shim" / "sitecustomize.py").write_text(shim)
    flags = ("--set", "axes.paths.ways=decode,prefix", "--engine-arg", "parts=tilt:decode:97")
    done = _compare(tmp_path, "--pythonpath", tmp_path / "shim", *flags)
    assert done.code == 1, done.err
    axis = done.axis("tilt", "paths")
    cells = {cell.at["way"]: cell for cell in axis.cells}
    assert (str(cells["decode"].status), str(cells["prefix"].status)) == ("ok", "failed")
    assert reason in str(cells["prefix"].reason)
    assert axis.value("parts_at", {"way": "decode"}) == 97
    assert f"paths, way prefix: failed: {cells['prefix'].reason}" in done.out


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("axes.paths.ways=backwards", "there is no way 'backwards'; there are cold, chunked, decode"),
        ("axes.paths.others=0", "a batch has 1 to 255 other requests"),
        ("axes.paths.others=200", "200 other requests need"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(setting: str, reason: str, tmp_path: Path) -> None:
    done = _compare(tmp_path, "--set", setting)
    assert done.code == 2
    assert reason in " ".join(done.err.split())
    assert "Traceback" not in done.err
