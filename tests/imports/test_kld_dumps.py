"""Dumped log-probabilities: closed-form divergences, and what must not be compared."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fidelab.core import Estimator, Status
from fidelab.core.errors import FidelabError, InputError, MismatchError, UsageError
from fidelab.imports import kld_dumps
from fidelab.imports.kld_dumps import import_dumps
from fidelab.imports.write_run import ImportedArm
from fidelab.metrics.intervals import RatioItems, ratio_interval
from fidelab.report.positions import read_positions
from fidelab.results.measurement import Measurement
from fidelab.results.plots import Curve
from fidelab.results.record import ArmRecord
from tests.present import present
from tests.run.harness import cli

VOCAB, ROWS = 50, 8


def log_probs(seed: int, rows: int = ROWS, vocab: int = VOCAB) -> Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.log_softmax(2 * logits, -1)


def tilted(rows: Tensor, tilt: float) -> tuple[Tensor, Tensor]:
    """Rows Q ∝ P·exp(tilt·[x = 0]) and KL(P‖Q) = log(1 + p₀·(exp(tilt) − 1)) − p₀·tilt of each, in closed form."""
    p0 = rows[:, 0].exp()
    norm = torch.log1p(p0 * math.expm1(tilt))
    test = rows.clone()
    test[:, 0] += tilt
    return test - norm[:, None], norm - p0 * tilt


def save(folder: Path, windows: list[Tensor] | dict[int, Tensor], dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in (windows if isinstance(windows, dict) else dict(enumerate(windows))).items():
        save_file({"log_probs": rows.to(dtype).contiguous()}, folder / f"{number}.safetensors")
    return folder


def dumps(
    folder: Path, n: int = 24, tilt: Callable[[int], float] = lambda i: 0.5 + i / 20, dtype: torch.dtype = torch.float32
) -> tuple[Path, Path, Tensor]:
    """Two dumps of n windows, and the KL of every row [n, rows] in closed form."""
    ref = [log_probs(i) for i in range(n)]
    test, kl = zip(*(tilted(rows, tilt(i)) for i, rows in enumerate(ref)), strict=True)
    return save(folder / "ref", ref, dtype), save(folder / "test", list(test), dtype), torch.stack(kl)


def run(folder: Path, ref: Path, *tests: Path, **more: object) -> ImportedArm:
    return import_dumps(ref, tests, folder / "runs", **more)  # type: ignore[arg-type]


def only(result: ImportedArm) -> tuple[ArmRecord, Measurement]:
    [arm] = result.report.candidates
    return arm, arm.axes["kld"]


def curve(axis: Measurement, key: str) -> Curve:
    return next(plot for plot in axis.plots if isinstance(plot, Curve) and plot.key == key)


def test_figures_the_curve_and_the_worst_position_are_those_of_the_closed_form(tmp_path: Path) -> None:
    ref, test, kl = dumps(tmp_path)
    result = run(tmp_path, ref, test)
    arm, axis = only(result)
    flat = kl.flatten().numpy()
    assert axis.value("mean") == pytest.approx(flat.mean(), rel=1e-5)
    assert axis.value("score") == pytest.approx(100 * math.exp(-flat.mean()), rel=1e-6)
    quantiles = tuple(np.quantile(flat, [0.5, 0.99, 1.0]))
    assert tuple(map(axis.value, ("median", "p99", "max"))) == pytest.approx(quantiles, rel=1e-4)
    assert (axis.n_items, axis.n_failed, axis.facts["estimator"]) == (24 * ROWS, 0, Estimator.LOGPROBS)
    assert axis.value("rms_dp") is None  # the dumps hold no tokens
    assert len(curve(axis, "confidence").x) > 1
    composite = present(arm.composite)
    assert (composite.value, composite.band) == (axis.value("score"), None)
    by_position = [mean for mean in curve(axis, "position").y if mean is not None]
    assert by_position == pytest.approx(kl.mean(0).tolist(), rel=1e-4)
    found = read_positions(result.folder / "positions.parquet", {"test": 24 * ROWS})["test"]
    assert (found.worst[0].window, found.worst[0].position) == divmod(int(kl.argmax()), ROWS)


def test_rows_read_in_pieces_are_the_rows_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref, test, _ = dumps(tmp_path, n=3)
    _, whole = only(run(tmp_path, ref, test))
    monkeypatch.setattr(kld_dumps, "_CHUNK_VALUES", 3 * VOCAB)
    _, pieces = only(run(tmp_path, ref, test))
    assert pieces == whole


def test_the_interval_is_over_blocks_of_windows_that_overlap_and_smaller_ones_without(tmp_path: Path) -> None:
    ref, test, kl = dumps(tmp_path)
    _, axis = only(run(tmp_path, ref, test))  # 8 rows every 2: four windows share a token
    blocks = np.repeat(np.arange(24) // 4, ROWS)
    expected = ratio_interval(RatioItems.of(kl.flatten().numpy(), 1.0, blocks), 42, bounds=(0.0, math.inf))
    assert axis.facts["n_clusters"] == 6
    assert axis.ci("mean") == pytest.approx(expected, rel=1e-4)
    _, apart = only(run(tmp_path, ref, test, stride=ROWS))
    assert apart.facts["n_clusters"] == 8  # ∛24 is about 3


def test_a_single_block_gives_no_interval_and_no_verdict(tmp_path: Path) -> None:
    ref, test, _ = dumps(tmp_path, n=3)
    arm, axis = only(run(tmp_path, ref, test))
    assert (axis.ci("mean"), axis.facts["n_clusters"]) == (None, 1)
    assert present(arm.verdict).band is None
    assert "single block" in present(arm.verdict).sentence


@pytest.mark.parametrize(("tilt", "band"), [(0.02, "EXCELLENT"), (5.0, "FAIL")])
def test_the_upper_end_of_the_interval_sets_the_verdict_without_advice_on_cache_formats(
    tilt: float, band: str, tmp_path: Path
) -> None:
    ref, test, kl = dumps(tmp_path, tilt=lambda _i: tilt)
    verdict = present(only(run(tmp_path, ref, test))[0].verdict)
    assert verdict.band == band
    assert (kl.mean() < 0.01) == (band == "EXCELLENT")
    assert not any(word in verdict.sentence for word in ("k16v8", "keys"))


def test_half_precision_is_renormalised(tmp_path: Path) -> None:
    for dtype, near in ((torch.float16, 1e-4), (torch.bfloat16, 5e-3)):
        ref, test, kl = dumps(tmp_path / str(dtype), dtype=dtype)
        result = run(tmp_path, ref, test)
        _, axis = only(result)
        assert axis.value("mean") == pytest.approx(float(kl.mean()), abs=near)
        assert any("bfloat16" in note for note in result.notes) == (dtype is torch.bfloat16)


def test_another_vocabulary_size_is_cut_to_the_common_ids(tmp_path: Path) -> None:
    ref, _, _ = dumps(tmp_path)
    wide = [log_probs(i, vocab=VOCAB + 7) for i in range(24)]
    result = run(tmp_path, ref, save(tmp_path / "wide", wide))
    _, axis = only(result)
    kl = []
    for i, rows in enumerate(wide):
        p, q = log_probs(i), torch.log_softmax(rows[:, :VOCAB], -1)
        kl.append((p.exp() * (p - q)).sum(-1))
    assert axis.value("mean") == pytest.approx(float(torch.stack(kl).mean()), rel=1e-5)
    assert any("57 ids" in note for note in result.notes)


def test_rows_with_nan_are_failed_and_cap_the_verdict(tmp_path: Path) -> None:
    ref, test, kl = dumps(tmp_path, tilt=lambda _i: 0.02)
    rows = tilted(log_probs(3), 0.02)[0]
    rows[5, 7] = math.nan
    save(test, {3: rows})
    arm, axis = only(run(tmp_path, ref, test))
    assert (axis.n_failed, axis.n_items) == (1, 24 * ROWS)
    kl[3, 5] = math.nan
    assert axis.value("mean") == pytest.approx(float(kl.nanmean()), rel=1e-3)
    assert arm.verdict is not None
    assert arm.verdict.band == "DEGRADED"
    rows[:] = math.nan
    save(test, {3: rows})
    arm, axis = only(run(tmp_path, ref, test))
    assert axis.n_failed == ROWS
    assert present(arm.verdict).band == "FAIL"


def test_broken_rows_of_the_reference_are_said_to_be_its_own(tmp_path: Path) -> None:
    ref, test, _ = dumps(tmp_path)
    rows = log_probs(2)
    rows[1, 0] = math.nan
    save(ref, {2: rows})
    result = run(tmp_path, ref, test)
    assert only(result)[1].n_failed == 1
    assert any("1 rows of the reference itself" in note for note in result.notes)


def test_a_dump_without_any_usable_row_fails(tmp_path: Path) -> None:
    ref, _, _ = dumps(tmp_path)
    arm, axis = only(run(tmp_path, ref, save(tmp_path / "nan", [torch.full((ROWS, VOCAB), math.nan)] * 24)))
    assert (axis.status, axis.value("mean"), axis.n_failed) == (Status.FAILED, None, 24 * ROWS)
    assert present(arm.verdict).band == "FAIL"


def test_rows_that_all_equal_the_reference_are_no_result(tmp_path: Path) -> None:
    ref, _, _ = dumps(tmp_path)
    arm, axis = only(run(tmp_path, ref, save(tmp_path / "copy", [log_probs(i) for i in range(24)])))
    assert (arm.status, axis.status) == (Status.NOT_ENGAGED, Status.IDENTICAL)
    assert present(arm.verdict).band is None


def test_several_candidates_are_ordered_by_paired_differences(tmp_path: Path) -> None:
    ref, bad, _ = dumps(tmp_path, tilt=lambda _i: 2.0)
    good = save(tmp_path / "good", [tilted(log_probs(i), 0.5)[0] for i in range(24)])
    result = run(tmp_path, ref, bad, good, names=["NVFP4", "AWQ"])
    assert [arm.name for arm in result.report.candidates] == ["NVFP4", "AWQ"]
    [pair] = result.report.comparisons
    assert (pair.better, pair.worse, pair.differs) == ("AWQ", "NVFP4", True)
    means = {arm.name: arm.axes["kld"].value("mean") or 0.0 for arm in result.report.candidates}
    assert pair.difference == pytest.approx(means["NVFP4"] - means["AWQ"])


def test_the_command_leaves_a_run_that_the_report_command_shows(tmp_path: Path) -> None:
    dumps(tmp_path)
    done = cli("import", "kld-dumps", "ref", "test", "--name", "AWQ", "--model", "some/model", cwd=tmp_path)
    assert done.code == 0
    assert "AWQ" in done.out
    assert done.arm("AWQ")["model"] == "some/model"
    settings = done.report["settings"]["imported"]
    assert (settings["windows"], settings["rows"], settings["stride"]) == (24, [ROWS], 2)
    again = cli("report", done.folder, "--json", cwd=tmp_path)
    assert json.loads(again.out) == done.report
    assert (done.folder / "report.html").stat().st_size > 1000


def refused(folder: Path, ref: Path, test: Path, kind: type[FidelabError]) -> str:
    with pytest.raises(kind) as caught:
        run(folder, ref, test)
    assert "\n" not in str(caught.value)
    assert not (folder / "runs").exists()
    return str(caught.value)


@pytest.mark.parametrize("swap", [False, True])
def test_200_files_for_100_windows_are_draft_head_rows(swap: bool, tmp_path: Path) -> None:
    few = save(tmp_path / "few", [log_probs(i) for i in range(4)])
    many = save(tmp_path / "many", [log_probs(i) for i in range(8)])
    said = refused(tmp_path, *((many, few) if swap else (few, many)), MismatchError)
    assert f"{many} has 8 files for the 4 windows of {few}" in said
    assert "draft-head" in said
    assert "even-numbered" in said


def test_shapes_that_alternate_are_draft_head_rows(tmp_path: Path) -> None:
    windows = [log_probs(i, rows=ROWS - i % 2) for i in range(8)]
    both = [save(tmp_path / name, windows) for name in ("ref", "test")]
    said = refused(tmp_path, both[0], both[1], InputError)
    assert "8 × 50 and 7 × 50 in turn" in said
    assert "draft-head" in said


def test_a_shorter_last_window_is_not_a_fault(tmp_path: Path) -> None:
    windows = [log_probs(i, rows=ROWS if i < 4 else 3) for i in range(5)]
    ref = save(tmp_path / "ref", windows)
    test = save(tmp_path / "test", [tilted(rows, 1.0)[0] for rows in windows])
    assert only(run(tmp_path, ref, test))[1].n_items == 4 * ROWS + 3


def test_other_windows_rows_and_vocabularies_are_named(tmp_path: Path) -> None:
    ref, test, _ = dumps(tmp_path, n=5)
    save(test, {4: log_probs(4, vocab=20)})
    assert "4.safetensors has 20 ids per row, 0.safetensors 50" in refused(tmp_path, ref, test, InputError)
    save(test, {4: log_probs(4), 2: log_probs(2, rows=5)})
    assert "2.safetensors has 5 rows, the reference 8" in refused(tmp_path, ref, test, MismatchError)
    (test / "2.safetensors").rename(test / "9.safetensors")
    assert f"{test} lacks window 2, which {ref} has" in refused(tmp_path, ref, test, MismatchError)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"logits": log_probs(0), "hidden": log_probs(1)}, "no tensor 'log_probs'; it holds 'hidden', 'logits'"),
        ({"log_probs": torch.zeros(4, 5, dtype=torch.int32)}, "is of type int32"),
        ({"log_probs": torch.zeros(4, 5, dtype=torch.float8_e4m3fn)}, "cannot be read"),
        ({"log_probs": torch.zeros(5)}, "has shape [5]; expected [rows, vocabulary]"),
        ({"log_probs": torch.zeros(1, 4, 5)}, "has shape [1, 4, 5]"),
        ({"log_probs": torch.zeros(0, 5)}, "has shape [0, 5]"),
        ({"log_probs": torch.randn(4, 50) + 10}, "row 0 of 'log_probs' is not normalised"),
        ({"log_probs": log_probs(0)[:, :25].contiguous()}, "is not normalised"),
        ({"log_probs": log_probs(0).exp()}, "is not normalised"),
    ],
)
def test_a_file_of_something_else_is_refused(tensors: dict[str, Tensor], said: str, tmp_path: Path) -> None:
    ref, test, _ = dumps(tmp_path, n=4)
    save_file(tensors, test / "2.safetensors")
    message = refused(tmp_path, ref, test, InputError)
    assert "2.safetensors" in message
    assert said in message


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["0.pt", "0.safetensors"])
def test_pickles_are_refused_and_never_opened(name: str, tmp_path: Path) -> None:
    ref, _, _ = dumps(tmp_path, n=4)
    test, sprung = tmp_path / "pickled", tmp_path / "sprung"
    test.mkdir()
    (test / name).write_bytes(pickle.dumps(Trap(sprung)))
    said = refused(tmp_path, ref, test, InputError)
    assert name in said
    assert "convert it to safetensors" in said
    torch.save({"log_probs": log_probs(0)}, test / name)
    assert "convert it to safetensors" in refused(tmp_path, ref, test, InputError)
    assert not sprung.exists()


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"{}", b"\xff" * 64, "truncated"])
def test_what_is_not_a_whole_safetensors_file_is_refused(content: bytes | str, tmp_path: Path) -> None:
    ref, test, _ = dumps(tmp_path, n=4)
    file = test / "1.safetensors"
    file.write_bytes(file.read_bytes()[:-7] if isinstance(content, str) else content)
    assert "1.safetensors is not a complete safetensors file" in refused(tmp_path, ref, test, InputError)


def test_folders_without_windows_are_refused(tmp_path: Path) -> None:
    ref, test, _ = dumps(tmp_path, n=4)
    empty, foreign = tmp_path / "empty", tmp_path / "foreign"
    empty.mkdir()
    foreign.mkdir()
    (foreign / "model.safetensors").touch()
    assert "it is empty" in refused(tmp_path, ref, empty, InputError)
    assert "it holds model.safetensors" in refused(tmp_path, ref, foreign, InputError)
    assert "is not a folder" in refused(tmp_path, tmp_path / "none", test, InputError)
    assert "is the reference itself" in refused(tmp_path, ref, test / ".." / "ref", UsageError)


def test_names_must_fit(tmp_path: Path) -> None:
    ref, test, _ = dumps(tmp_path, n=4)
    two = "two test folders are named"
    for names, said in ((["a"], "1 names for 2"), (["a", "a"], two), (["a", "b", "c"], "3 names for 2")):
        with pytest.raises(UsageError, match=said):
            run(tmp_path, ref, test, test, names=names)
    with pytest.raises(UsageError, match="--stride"):
        run(tmp_path, ref, test, stride=9)


def test_a_fault_ends_with_one_line_and_code_2(tmp_path: Path) -> None:
    dumps(tmp_path, n=4)
    (tmp_path / "test" / "3.safetensors").unlink()
    done = cli("import", "kld-dumps", "ref", "test", cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
