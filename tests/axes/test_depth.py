"""Rows at several depths of the same documents: figures by depth and by kind, and what the verdict states of them."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fidelab.axes.kld import KLD, KLDSettings
from fidelab.captures.pair import Pair
from fidelab.captures.requests import Prefill
from fidelab.inputs.corpus import depth_positions
from fidelab.results.depth import depth_statement
from tests.axes.captures import make_arm, make_capture
from tests.run.harness import Done, cli, refused, run_fake

KINDS = ("chat", "code", "logs")
DEPTHS = (1024, 2048, 4096)


def log_of(folder: Path, lengths: dict[str, list[int]]) -> str:
    """A log of texts: kind → the length of each in bytes, the fake model's tokens.  Those of kind code hold ``~``."""
    rng = np.random.default_rng(7)
    lines = []
    for kind, sizes in lengths.items():
        for number, size in enumerate(sizes):
            letters = "".join(chr(97 + int(i)) for i in rng.integers(26, size=size - 1))
            text = f"~{letters[1:]}" if kind == "code" else letters
            lines.append(json.dumps({"id": f"{kind}-{number}", "domain": kind, "text": text}))
    path = folder / "log.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def run(
    folder: Path,
    *candidates: str,
    lengths: dict[str, list[int]] | None = None,
    engine_args: Any = None,
    keep_rows: bool = False,
    **kld: Any,
) -> Done:
    folder.mkdir(exist_ok=True)
    lengths = lengths or {kind: [5000] * 6 for kind in KINDS}
    settings = {"protocol": "depth", "n_ctx": 4096, "windows": 12, "looks": [], "rows": 16, **kld}
    done = compared(folder, settings, *candidates, lengths=lengths, engine_args=engine_args or {}, keep_rows=keep_rows)
    assert done.code in (0, 1), done.err
    return done


def compared(folder: Path, kld: dict[str, Any], *candidates: str, lengths: dict[str, list[int]], **more: Any) -> Done:
    settings = {"model": "fake", "engine": "fake", "reference": "exact", "control": "none", "axes": {"kld": kld}}
    asked = {**settings, "traffic": log_of(folder, lengths), "candidates": [*candidates], **more}
    (folder / "experiment.yaml").write_text(yaml.safe_dump(asked))
    return cli("compare", "-f", "experiment.yaml", cwd=folder)


def tilt(q: float) -> float:
    return 0.5 * math.log(0.5 / q) + 0.5 * math.log(0.5 / (1 - q))


def requests_of(done: Done) -> list[Prefill]:
    """The requests that the reference answered, without those for run-to-run noise."""
    from fidelab.captures.reader import Capture

    folders = [path.parent for path in (done.cwd / "runs" / "captures").glob("*exact*/*-r0/manifest.json")]
    found = [Capture(folder).request for folder in folders]
    return [one for one in found if isinstance(one, Prefill)]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """An error that begins at position 2,048, one of a kind of text, and one that is everywhere."""
    names = ("tilt[q=0.6,from=2048]", "tilt[q=0.7,has=126]", "tilt[q=0.55]")
    return run(tmp_path_factory.mktemp("deep"), *names)


def test_the_mean_of_each_depth_is_that_of_its_rows_alone(deep: Done) -> None:
    kld = deep.axis("tilt[q=0.6,from=2048]", "kld")
    means = [kld.value("mean", {"context": n}) for n in DEPTHS]
    assert means == pytest.approx([tilt(0.51), tilt(0.51), tilt(0.6)], abs=1e-6)
    assert kld.value("mean", {}) == means[-1]  # the worst depth counts
    assert kld.value("slope", {}) == pytest.approx(_slope(deep, "tilt[q=0.6,from=2048]"), rel=1e-9)
    assert deep.axis("tilt[q=0.55]", "kld").value("slope", {}) == pytest.approx(0.0, abs=1e-9)


def _slope(done: Done, arm: str) -> float:
    """Least squares over the recorded positions with a level per document, by numpy's solver."""
    import pyarrow.parquet as pq

    table = pq.read_table(done.folder / "positions.parquet").to_pylist()
    rows = [row for row in table if row["arm"] == arm]
    documents = sorted({row["window"] for row in rows})
    x = np.zeros((len(rows), 1 + len(documents)))
    for n, row in enumerate(rows):
        x[n, 0], x[n, 1 + documents.index(row["window"])] = math.log2(1 + row["position"]), 1.0
    return float(np.linalg.lstsq(x, np.array([row["kl"] for row in rows]), rcond=None)[0][0])


def test_the_statement_names_the_depth_to_which_each_band_holds(deep: Done) -> None:
    kld = deep.axis("tilt[q=0.6,from=2048]", "kld")
    assert depth_statement(kld) == "excellent to 2k, pass to 4k, beyond: not tested"
    assert depth_statement(deep.axis("tilt[q=0.55]", "kld")) == "excellent to 4k, beyond: not tested"
    assert "By depth: excellent to 2k, pass to 4k" in str(deep.arm("tilt[q=0.6,from=2048]")["verdict"])


def test_a_loss_in_one_kind_of_text_is_named_under_that_kind_alone(deep: Done) -> None:
    kld = deep.axis("tilt[q=0.7,has=126]", "kld")
    found = {kind: kld.value("mean", {"domain": kind}) for kind in KINDS}
    assert found == pytest.approx({"chat": tilt(0.52), "code": tilt(0.7), "logs": tilt(0.52)}, abs=1e-6)
    at = {n: kld.value("mean", {"context": n, "domain": "code"}) for n in DEPTHS}
    assert at == pytest.approx(dict.fromkeys(DEPTHS, tilt(0.7)), abs=1e-6)


def test_a_kind_in_a_worse_band_than_the_whole_is_a_line_under_the_answer(tmp_path: Path) -> None:
    geometric = {"family": "geometric", "predicts": "on"}  # a reference that predicts its text
    done = run(tmp_path, "decay[b=0.577,has=126,bytes=8]", engine_args=geometric)
    assert "but: code is pass: KLD" in done.out
    assert "chat" not in done.out.partition("not tested")[0]


def test_kinds_take_turns_so_that_none_is_left_to_luck(deep: Done) -> None:
    counts = dict.fromkeys(KINDS, 0)
    for request in requests_of(deep):
        for _, kind in dict(request.settings)["domains"]:
            counts[kind] += 1
    assert counts == {"chat": 4, "code": 4, "logs": 4}


def test_a_document_is_read_once_for_all_depths_with_as_many_rows_in_each(deep: Done) -> None:
    for request in requests_of(deep):
        for window, own in zip(request.windows, request.positions, strict=True):
            assert len(window) == 4096
            counts = [sum(n // 2 <= p <= n - 2 for p in own) for n in DEPTHS]
            assert counts == [16, 16, 16]
            assert len(own) == 48


def test_a_depth_of_fewer_than_ten_documents_is_not_decided_and_ends_the_depth_stated(tmp_path: Path) -> None:
    lengths = {"chat": [5000] * 4 + [1500] * 4, "code": [5000] * 3 + [1500] * 4}
    done = run(tmp_path, "tilt[q=0.7,from=2048]", lengths=lengths)
    kld = done.axis("tilt[q=0.7,from=2048]", "kld")
    assert [size["n_documents"] for size in kld.facts["undecided"]] == [7, 7]
    assert kld.value("mean", {"context": 4096}) == pytest.approx(
        tilt(0.7), abs=1e-6
    )  # shown, and no part of the verdict
    assert kld.value("mean", {}) == pytest.approx(tilt(0.52), abs=1e-6)
    assert depth_statement(kld) == "excellent to 1k, beyond: not decided (7 documents at 2k)"
    assert "2,048 tokens: 7 documents: not decided with fewer than 10" in done.err + done.out


def test_a_text_without_documents_has_blocks_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("".join(f"line {i} of a long text\n" for i in range(3000)))
    settings = {"protocol": "depth", "n_ctx": 2048, "windows": 30, "looks": [], "rows": 8}
    done = run_fake(tmp_path, {"kld": settings}, ["tilt[q=0.6]"], text="long.txt")
    assert "the text has no documents: intervals are over blocks of windows" in done.err
    assert done.axis("tilt[q=0.6]", "kld").cluster == "block"


def test_depths_beyond_the_models_limit_are_left_out_and_named(tmp_path: Path) -> None:
    """The embedded tokenizer's model reads 8,192 positions; the fake one has no limit."""
    from fidelab.axes.base import AxisInputs
    from fidelab.inputs.texts import Text
    from fidelab.inputs.tokens import Tokenizer
    from fidelab.models import resolve

    tokenizer = Tokenizer.load(resolve("fake"))
    content = "x" * 5000
    text = Text("own", content * 12, tuple(range(0, 60000, 5000)), "", ("chat",) * 12)
    axis = KLD(KLDSettings(protocol="depth", n_ctx=8192, windows=12))
    inputs = AxisInputs(tokenizer, text, (), 4096)
    requests = axis.requests(inputs)
    [first, *_] = requests.values()
    assert isinstance(first, Prefill)
    assert dict(first.settings)["contexts"] == DEPTHS
    assert next(iter(axis.remarks(inputs, requests))) == "kld: 8,192 tokens are left out, the model reads 4,096"


def test_looks_and_captures_read_whole_documents(tmp_path: Path) -> None:
    done = run(tmp_path, "tilt[q=0.51]", windows=16, looks=[10], lengths={kind: [5000] * 8 for kind in KINDS})
    sizes = sorted(len(request.windows) for request in requests_of(done))
    assert max(sizes) <= 4  # what a stopped run loses
    assert done.axis("tilt[q=0.51]", "kld").facts["windows"] in (10, 16)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"compat": "refract"}, "compat is for windows of one length"),
        ({"protocol": "half", "n_ctx": 64, "rows": 9}, "rows is for protocol depth"),
        ({"n_ctx": [1024, 1500]}, "each is at least twice the one before"),
        ({"n_ctx": 65536}, "has no document of"),
    ],
)
def test_settings_that_depth_cannot_have_are_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    asked = {"protocol": "depth", "n_ctx": 4096, "windows": 12, **settings}
    assert said in refused(compared(tmp_path, asked, "tilt[q=0.6]", lengths={"chat": [900] * 2}))


def test_figures_of_depths_and_kinds_are_those_of_a_program_that_reads_the_saved_rows_alone(
    tmp_path: Path,
) -> None:
    """Rows and requests by the safetensors package, json and numpy: nothing of fidelab computes a figure."""
    names = ("tilt[q=0.7,has=126]", "tilt[q=0.6,from=2048]")
    done = run(tmp_path, *names, keep_rows=True, engine_args={"noise": "0.05"}, lengths={k: [5000] * 7 for k in KINDS})
    whole = {name: _rows_by_hand(done, name) for name in ("exact", *names)}
    for name in names:
        kld = done.axis(name, "kld")
        kl = {place: _kl(whole["exact"][place][0], row) for place, (row, _) in whole[name].items()}
        kinds = {place: kind for place, (_, kind) in whole[name].items()}
        for n in DEPTHS:
            here = [place for place in kl if n // 2 <= place[1] <= n - 2]
            assert kld.value("mean", {"context": n}) == pytest.approx(np.mean([kl[p] for p in here]), rel=1e-5)
            for kind in KINDS:
                of_kind = [kl[p] for p in here if kinds[p] == kind]
                found = kld.value("mean", {"context": n, "domain": kind})
                assert found == pytest.approx(np.mean(of_kind), rel=1e-5)
        for kind in KINDS:
            of_kind = [value for place, value in kl.items() if kinds[place] == kind]
            assert kld.value("mean", {"domain": kind}) == pytest.approx(np.mean(of_kind), rel=1e-5)


def _rows_by_hand(done: Done, arm: str) -> dict[tuple[str, int], tuple[Any, str]]:
    """(window's tokens, position) → (log-probabilities, kind) of all captures of an arm but those for noise."""
    from safetensors.numpy import load_file

    [label] = [
        Path(folder)
        for folder in (done.cwd / "runs" / "captures").iterdir()
        if folder.name.startswith("fake")
        and json.loads(next(folder.glob("*/manifest.json")).read_text())["asked"]["name"] == arm
    ]
    found = {}
    for folder in label.glob("kld*-r0"):
        request = json.loads(gzip.decompress((folder / "probe.json.gz").read_bytes()))
        arrays = {name: value for part in folder.glob("part-*.safetensors") for name, value in load_file(part).items()}
        kinds = dict(request["settings"]["domains"])
        for item, (window, own) in enumerate(zip(request["windows"], request["positions"], strict=True)):
            rows = arrays[f"{item}.logprobs"]
            for n, position in enumerate(own):
                found[str(window[:64]), position] = (rows[n].astype(np.float64), kinds[request["units"][item][n]])
    return found


def _kl(p: Any, q: Any) -> float:
    p, q = (row - np.logaddexp.reduce(row) for row in (p, q))
    return float((np.exp(p) * (p - q)).sum())


def test_rows_that_memory_did_not_suffice_for_leave_their_depth_undecided_and_no_other(tmp_path: Path) -> None:
    """Two of eleven documents lack the deeper half on the candidate's side."""
    positions = depth_positions((64, 128), 8)
    windows = tuple(tuple(int(t) for t in np.random.default_rng(n).integers(1, 8, 128)) for n in range(11))
    units = tuple((n,) * 16 for n in range(1, 12))
    settings = (("contexts", (64, 128)), ("n_ctx", 128), ("protocol", "depth"), ("unit", "document"))
    request = Prefill("kld", windows, positions[0], positions[-1], units, settings, (), (positions,) * 11)
    exact = np.log(np.full((16, 8), 1 / 8, dtype=np.float32))
    tilted = np.log(np.tile([0.15] * 4 + [0.1] * 4, (16, 1))).astype(np.float32)
    cut = np.concatenate([tilted[:8], np.full((8, 8), np.nan, dtype=np.float32)])
    ref = make_capture(tmp_path / "ref", request, [{"logprobs": exact}] * 11, make_arm("f32"))
    answers = [{"logprobs": cut}] * 2 + [{"logprobs": tilted}] * 9
    facts = {"cut_short": {"0": 8, "1": 8}}
    test = make_capture(tmp_path / "test", request, answers, make_arm("int8"), facts=facts)
    score = KLD(KLDSettings(protocol="depth", n_ctx=128, windows=11)).score_parts({"": Pair.match(ref, test)}, 1)
    found, cost = score.found, 0.5 * math.log(0.125 / 0.15) + 0.5 * math.log(0.125 / 0.1)
    assert score.usable.all()  # nothing counts as a failed position
    assert [found.value("mean", {"context": n}) for n in (64, 128)] == pytest.approx([cost] * 2, abs=1e-6)
    sizes = {
        name: [(one["n_ctx"], one["n_documents"]) for one in found.facts[name]] for name in ("contexts", "undecided")
    }
    assert sizes == {"contexts": [(64, 11)], "undecided": [(128, 9)]}
    assert [flag.text for flag in found.flags] == [
        "2 of 11 documents were read in part: memory or context did not suffice"
    ]
