"""Logs of llama-perplexity: figures as printed, intervals from the table's running means, and logs that are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fidelab.errors import FidelabError, InputError, UsageError
from fidelab.imports.leave import Imported, window_blocks
from fidelab.imports.perplexity_log import import_logs
from fidelab.metrics.intervals import RatioItems, ratio_interval
from tests.runs.harness import cli

CHUNKS, N_CTX = 40, 512
KL = np.random.default_rng(0).gamma(4, 0.008, CHUNKS)
NLL = np.random.default_rng(1).normal(0.02, 0.03, CHUNKS)


def log(path: Path, kl: NDArray[np.float64] = KL, *, table: bool = True, statistics: bool = True) -> Path:
    """A log in the form of llama-perplexity, with the chunks' own means in ``kl``."""
    lines = [
        "some other line",
        f"kl_divergence: computing over {len(kl)} chunks, n_ctx={N_CTX}, batch_size=512, n_seq=1",
    ]
    if table:
        lines += [
            "",
            "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS",
        ]
        for n in range(1, len(kl) + 1):
            mean, nll = kl[:n].mean(), NLL[:n].mean()
            lines.append(
                f"{n:4d}     {8.1234:10.4f} ± {0.3:10.4f}    {nll:10.5f} ± {0.001:10.5f}    "
                f"{mean:10.5f} ± {0.0002:10.5f}   {2.5:6.3f} ± {0.1:6.3f} %    {91.5:6.3f} ± {0.2:6.3f} %"
            )
    if statistics:
        lines += [
            *("", "====== Perplexity statistics ======", "Mean PPL(Q)                   :   8.123400 ±   0.300000"),
            *("Mean PPL(base)                :   7.962500 ±   0.290000", "Cor(ln(PPL(Q)), ln(PPL(base))):  99.34%"),
            *(f"Mean ln(PPL(Q)/PPL(base))     :   {NLL[: len(kl)].mean():.6f} ±   0.001000", ""),
            *("====== KL divergence statistics ======", f"Mean    KLD:   {kl.mean():.6f} ±   0.000238"),
            *("Maximum KLD:   5.911021", "99.9%   KLD:   1.834118", "99.0%   KLD:   0.412901"),
            *("95.0%   KLD:   0.118233", "90.0%   KLD:   0.066712", "Median  KLD:   0.011044"),
            *("10.0%   KLD:   0.000312", "Minimum KLD:  -0.000011", ""),
            *("====== Token probability statistics ======", "Mean    Δp: -0.596 ± 0.014 %"),
            *("RMS Δp    :  5.519 ± 0.050 %", "Same top p: 91.901 ± 0.072 %"),
        ]
    path.write_text("\n".join(lines) + "\n")
    return path


def read(path: Path, folder: Path) -> Imported:
    return import_logs([path], folder)


def test_figures_are_those_that_were_printed(tmp_path: Path) -> None:
    [arm] = read(log(tmp_path / "q4.log"), tmp_path / "runs").report.candidates
    kld, text = arm.axes["kld"], arm.axes["perplexity"]
    assert arm.name == "q4"
    assert (kld.value("median"), kld.value("p99"), kld.value("p99.9"), kld.value("max")) == (
        *(0.011044, 0.412901, 1.834118),
        5.911021,
    )
    assert kld.value("top-1") == pytest.approx(0.91901)
    assert kld.value("RMS Δp") == pytest.approx(0.05519)
    assert kld.n_items == CHUNKS * 255
    assert (text.value("perplexity"), text.value("reference perplexity")) == (8.1234, 7.9625)


def test_intervals_are_those_of_the_chunks_own_means(tmp_path: Path) -> None:
    """The table's five decimals are all that is lost on the way."""
    [arm] = read(log(tmp_path / "q4.log"), tmp_path / "runs").report.candidates
    blocks = window_blocks(CHUNKS)
    for axis, name, values in (("kld", "mean", KL), ("perplexity", "ΔNLL", NLL)):
        found = arm.axes[axis]
        bounds = (0.0, np.inf) if axis == "kld" else None
        due = ratio_interval(RatioItems.of(values, 1.0, blocks), 42, bounds=bounds)
        assert found.value(name) == pytest.approx(values.mean(), abs=1e-6)
        assert found.ci(name) == pytest.approx(due, abs=2e-4)
        assert found.n_clusters == len(np.unique(blocks))
    assert arm.verdict is not None
    assert arm.verdict.band is not None


def test_chunks_that_differ_less_than_the_rounding_give_no_interval(tmp_path: Path) -> None:
    done = read(log(tmp_path / "q8.log", np.full(CHUNKS, 1e-5)), tmp_path / "runs")
    assert done.report.candidates[0].axes["kld"].ci("mean") is None
    assert "five decimals do not show" in " ".join(done.notes)


def test_a_log_without_its_table_says_what_is_missing(tmp_path: Path) -> None:
    done = read(log(tmp_path / "q4.log", table=False), tmp_path / "runs")
    assert "without the table of chunks there is no interval" in done.notes[0]
    assert done.report.candidates[0].axes["kld"].value("mean") == pytest.approx(KL.mean(), abs=1e-6)


def test_statistics_of_another_run_than_the_table_are_said_to_be(tmp_path: Path) -> None:
    path = log(tmp_path / "q4.log", statistics=False)
    path.write_text(path.read_text() + log(tmp_path / "other.log", 2 * KL, table=False).read_text())
    assert "they are not of one run" in " ".join(read(path, tmp_path / "runs").notes)


def test_a_plain_perplexity_run_has_a_perplexity_and_no_kl(tmp_path: Path) -> None:
    path = tmp_path / "ppl.log"
    path.write_text(
        "perplexity: calculating perplexity over 9 chunks, n_ctx=512, batch_size=2048\n"
        "[1]4.1,[2]5.2,\nFinal estimate: PPL = 6.2332 +/- 0.03782\n"
    )
    [arm] = read(path, tmp_path / "runs").report.candidates
    assert "kld" not in arm.axes
    assert (arm.axes["perplexity"].value("perplexity"), arm.axes["perplexity"].value("printed std. error")) == (
        6.2332,
        0.03782,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing of the kind\n", "no statistics"),
        (None, "its table ends before the statistics: the run was cut off"),
    ],
)
def test_a_file_without_statistics_is_refused(text: str | None, said: str, tmp_path: Path) -> None:
    path = log(tmp_path / "q4.log", statistics=False)
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=said):
        read(path, tmp_path / "runs")


def test_names_are_one_per_log_and_a_missing_file_is_named(tmp_path: Path) -> None:
    path = log(tmp_path / "q4.log")
    with pytest.raises(UsageError, match="--name once per log"):
        import_logs([path], tmp_path / "runs", names=["a", "b"])
    with pytest.raises(FidelabError, match=r"gone\.log cannot be read"):
        read(tmp_path / "gone.log", tmp_path / "runs")


def test_the_command_compares_several_logs(tmp_path: Path) -> None:
    log(tmp_path / "q4.log"), log(tmp_path / "q8.log", KL / 10)
    done = cli("import", "llama-perplexity", "q4.log", "q8.log", cwd=tmp_path)
    assert done.code == 0, done.err
    assert [arm["name"] for arm in done.report["candidates"]] == ["q4", "q8"]
    assert "q4" in done.out
