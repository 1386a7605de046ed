"""The cross-engine experiment on every engine that is installed, at the smallest sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fidelab.config.cross import CrossEngine
from fidelab.config.experiment import validate_cross
from fidelab.config.profiles import experiments
from fidelab.core.errors import FidelabError
from fidelab.environments.environment import locate
from fidelab.models import Model
from fidelab.results.study import Study, StudyRow
from fidelab.studies.cross_engine import run_cross

pytestmark = [pytest.mark.long, pytest.mark.model]

LINES: dict[str, dict[str, Any]] = {
    "hf": {"engine": "hf", "dtype": "bfloat16", "reference": "bf16", "candidate": "fp8_e4m3"},
    "llamacpp": {"engine": "llamacpp", "reference": "f16", "candidate": "q8_0"},
    "vllm": {"engine": "vllm", "reference": "auto", "candidate": "fp8_e4m3"},
    "sglang": {"engine": "sglang", "reference": "auto", "candidate": "fp8_e4m3"},
}
SAME_CHECKPOINT = ("hf", "vllm", "sglang")


def installed(engine: str) -> bool:
    try:
        locate(engine)
    except FidelabError:
        return False
    return True


def experiment(output: Path, engines: list[str]) -> CrossEngine:
    data = {
        "kind": "cross-engine",
        "model": "smollm2-135m",
        "engines": [LINES[name] for name in engines],
        "axes": {
            "kld": {"windows": 4, "n_ctx": 128},
            "trajectory": {"limit": 1, "n_predict": 8},
            "rniah": {"lengths": [128], "positions": [0.5], "trials": 1, "style": "cloze"},
            "plad": {"limit": 1, "n_predict": 8, "perturbations": ["case"]},
            "perplexity": {"contexts": [128], "windows": 4},
        },
        "floor": 0.0,
        "threads": 1,
        "device": "cpu",
        "benches": {"prefill": {"lengths": [64], "repeats": 3}, "decode": {"depths": [64], "n": 8, "repeats": 3}},
        "output_dir": str(output),
    }
    return validate_cross(data, "experiment")


@pytest.fixture(scope="module")
def study(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Study:
    engines = [name for name in LINES if installed(name)]
    found, folder = run_cross(experiment(tmp_path_factory.mktemp("cross"), engines), command="fidelab compare")
    assert (folder.path / "study.json").read_text() == found.to_json()
    return found


@pytest.fixture(params=list(LINES))
def engine(request: pytest.FixtureRequest, study: Study) -> str:
    """Each engine; those without an environment are skipped."""
    if study.row(engine=request.param) is None:
        pytest.skip(f"engine {request.param} is not installed (fidelab setup install {request.param} --cpu)")
    return str(request.param)


def row(study: Study, engine: str, part: str) -> StudyRow:
    found = study.row(engine=engine, part=part)
    assert found is not None
    return found


def test_the_reference_runs_and_says_what_ran(study: Study, engine: str) -> None:
    reference, arm = row(study, engine, "reference"), study.arms[f"reference of {engine}"]
    assert (reference.status, reference.reason) == ("ok", None)
    assert reference.facts["version"]
    assert arm.ran is not None
    assert arm.ran.cache_bytes_per_token == 30 * 3 * 64 * 2 * 2  # layers · KV heads · dimensions · sides · bytes
    assert reference.value("bytes_per_token") == arm.ran.cache_bytes_per_token


def test_it_is_timed_by_both_methods(study: Study, engine: str) -> None:
    assert (row(study, engine, "reference").value("load") or 0) > 0
    rates = {metric.key: metric for one in study.rows if one.at["engine"] == engine for metric in one.metrics}
    assert [len(rates[key].repeats) for key in ("prefill_rate", "decode_isolated")] == [3, 3]


def test_the_8_bit_cache_costs_little_or_is_not_supported(study: Study, engine: str) -> None:
    candidate = row(study, engine, "candidate")
    if engine == "sglang":
        assert candidate.status == "not_supported"
        assert candidate.reason
    else:
        assert (candidate.status, candidate.reason) == ("ok", None)
        assert 0 < (candidate.value("kld") or 0) < 0.5
        assert candidate.value("composite") is not None


def test_engines_on_one_checkpoint_agree(study: Study) -> None:
    pairs = [pair for pair in study.rows if {pair.at["engine"], pair.at.get("from")} <= {*SAME_CHECKPOINT}]
    if not pairs:
        pytest.skip("fewer than two engines that load the same checkpoint are installed")
    for pair in pairs:
        kld = pair.value("kld")
        assert kld is not None
        assert kld < 0.01, pair.at  # the 16-bit types' own rounding is 0.001 to 0.002
    perplexities = [
        row.value("perplexity")
        for row in study.rows
        if row.at["part"] == "perplexity" and row.at["engine"] in SAME_CHECKPOINT
    ]
    there = [value for value in perplexities if value is not None]
    assert len(there) == len(perplexities)
    assert max(there) < 1.02 * min(there)


def test_the_bundled_experiment_names_every_engine_of_this_file() -> None:
    import fidelab.config.profiles as room

    assert "cross-engine" in experiments()
    text = (Path(room.__file__).parent / "experiments" / "cross-engine.yaml").read_text()
    assert all(f"engine: {name}\n" in text for name in LINES)
