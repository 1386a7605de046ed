"""A report in Python: configurations by name, the recommended one, its folder, frames, a chart, and how it is shown."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fidelab
from fidelab.core.errors import InputError, MissingPackageError, UnknownNameError, UsageError
from fidelab.results.record import Report
from tests.report.sample import positions_for, sample_report, write_positions
from tests.run.harness import compare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in ``runs``."""
    room = tmp_path_factory.mktemp("python")
    assert compare(room, "tilt[q=0.6]", windows=8, limit=2).code == 0
    return next((room / "runs").glob("2*"))


def test_a_configuration_is_found_by_its_name_with_its_figures() -> None:
    report = sample_report()
    arm = report["k16v8"]
    assert arm is report.candidates[[one.name for one in report.candidates].index("k16v8")]
    mean = arm.axes["kld"].metric("mean")
    assert mean is not None
    assert (arm.kld, arm.kld_interval) == (mean.value, mean.ci)
    assert arm.top1 == arm.axes["kld"].value("top1")
    assert report["f32"] is report.reference
    with pytest.raises(UnknownNameError, match="did you mean 'k16v8'"):
        report["k16v"]


def test_a_configuration_without_a_kld_says_why() -> None:
    with pytest.raises(UsageError, match=r"q8_0 has no KLD: .*out of memory"):
        _ = sample_report()["q8_0"].kld


def test_best_is_the_recommended_candidate_and_raises_where_there_is_none(folder: Path) -> None:
    report = fidelab.load(folder)
    assert report.recommendation is not None
    if report.recommendation.arm is None:
        with pytest.raises(UsageError, match="recommends no candidate"):
            _ = report.best
    else:
        assert report.best.name == report.recommendation.arm
    with pytest.raises(UsageError, match="recommends no candidate"):
        _ = sample_report().model_copy(update={"recommendation": None}).best


def test_load_reads_a_folder_a_name_a_file_and_the_latest_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parents[1])
    reports = [fidelab.load(name) for name in (folder, folder.name, folder / "report.json", "latest")]
    assert all(report == reports[0] for report in reports)
    assert {report.path for report in reports} == {folder}
    with pytest.raises(InputError, match="there is no such run"):
        fidelab.load("nothing")


def test_the_folder_is_known_once_a_report_is_written(tmp_path: Path) -> None:
    report = sample_report()
    with pytest.raises(UsageError, match="is in no folder"):
        _ = report.path
    report.write(tmp_path / "report.json")
    assert report.path == tmp_path
    assert Report.from_json(tmp_path / "report.json") == report


def test_positions_are_a_frame_with_a_row_per_position(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    report = sample_report()
    report.write(tmp_path / "report.json")
    with pytest.raises(InputError, match=r"has no positions\.parquet"):
        report.positions()
    tables = positions_for(report)
    write_positions(tmp_path, tables)
    frame = report.positions()
    assert len(frame) == sum(len(columns["kl"]) for columns in tables.values())
    assert {"arm", "window", "position", "kl"} <= {*frame.columns}


@pytest.mark.parametrize(("module", "call"), [("matplotlib.pyplot", "plot"), ("pandas", "to_pandas")])
def test_a_missing_package_is_one_line_that_names_its_extra(
    module: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (module, module.partition(".")[0]):
        monkeypatch.setitem(sys.modules, name, None)
    extra = {"plot": "plot", "to_pandas": "pandas"}[call]
    with pytest.raises(MissingPackageError, match=rf"pip install 'fidelab\[{extra}\]'$"):
        getattr(sample_report(), call)()


def test_the_plot_has_a_point_with_a_name_per_configuration() -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="needs the extra plot")
    matplotlib.use("Agg")
    axes = sample_report().plot()
    named = {text.get_text() for text in axes.texts}
    assert named >= {"k16v8", "fp8_e4m3"}
    assert axes.get_yscale() == "log"


def test_names_in_the_plot_stand_within_its_frame() -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="needs the extra plot")
    matplotlib.use("Agg")
    axes = sample_report().plot()
    renderer = axes.figure.canvas.get_renderer()
    frame = axes.get_window_extent(renderer)
    for text in axes.texts:
        box = text.get_window_extent(renderer)
        assert frame.x0 <= box.x0
        assert box.x1 <= frame.x1, text.get_text()


def test_a_cell_shows_the_answer_and_stays_small(folder: Path) -> None:
    report = fidelab.load(folder)
    for shown in (report._repr_markdown_(), report._repr_html_()):
        assert "tilt" in shown
        assert len(shown) < 40_000
    assert str(report).count("\n") < 12
    assert len(repr(report)) < 200


def test_no_text_of_a_report_is_markup_in_a_cell() -> None:
    from tests.report.sample import HOSTILE, hostile_report

    page = hostile_report()._repr_html_()
    assert "<script" not in page
    assert HOSTILE not in page


def test_dir_lists_what_is_public() -> None:
    assert {"compare", "load", "Report", "__version__"} == {*dir(fidelab)}


def test_importing_fidelab_needs_no_ipython_and_no_extra() -> None:
    code = (
        "import sys\nfor name in ('IPython', 'ipykernel', 'pandas', 'matplotlib', 'torch'): sys.modules[name] = None\n"
        "import fidelab\nprint(fidelab.compare.__name__, fidelab.load.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "compare load", done.stderr


def test_sizes_and_limits_are_keywords_as_on_the_command_line(tmp_path: Path) -> None:
    from tests.run.harness import write_inputs

    write_inputs(tmp_path)
    report = fidelab.compare(
        "fake",
        engine="fake",
        reference="exact",
        candidates="tilt",
        quick=True,
        windows=4,
        n_ctx=16,
        max_kld=0.5,
        min_saving="10%",
        text=str(tmp_path / "text.txt"),
        output_dir=str(tmp_path / "runs"),
    )
    assert report.settings["axes"] == {"kld": {**report.settings["axes"]["kld"], "windows": 4, "n_ctx": 16}}
    assert (report.settings["limits"]["max_kld"], report.settings["limits"]["min_saving"]) == (0.5, 0.1)
    assert (report.settings["floor"], report.settings["twins"]) == (0, 0)
    assert report.path == tmp_path / "runs" / report.run_id
    with pytest.raises(UsageError, match="windows belongs to test kld"):
        fidelab.compare("fake", engine="fake", candidates="tilt", axes="trajectory", windows=4)


@pytest.mark.parametrize(
    ("progress", "notebook", "told"), [(None, False, False), (None, True, True), (False, True, False)]
)
def test_progress_is_shown_where_somebody_sees_it(
    progress: bool | None,
    notebook: bool,
    told: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tests.run.harness import write_inputs

    write_inputs(tmp_path)
    if notebook:
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
    else:
        monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    fidelab.compare(
        "fake",
        engine="fake",
        reference="exact",
        candidates="tilt",
        quick=True,
        windows=4,
        n_ctx=16,
        text=str(tmp_path / "text.txt"),
        output_dir=str(tmp_path / "runs"),
        progress=progress,
    )
    assert ("fidelab:" in capsys.readouterr().err) is told


@pytest.mark.full
def test_mypy_finds_a_wrong_keyword(tmp_path: Path) -> None:
    if shutil.which("mypy", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("mypy is not installed")
    file = tmp_path / "wrong.py"
    file.write_text('import fidelab\nfidelab.compare("m", candidates="q8_0", widnows=3)\n')
    words = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert re.search(r"wrong\.py:2: error: .*widnows", done.stdout)
