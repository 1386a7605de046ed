"""The cross-engine experiment on every engine that is installed, at the smallest sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fidelab.config.cross import CrossEngine, validate_cross
from fidelab.config.profiles import experiments
from fidelab.environments.environment import locate
from fidelab.errors import FidelabError
from fidelab.models import Model
from fidelab.results.cross_record import CrossReport, EngineRow
from fidelab.runs.cross_engine import run_cross

pytestmark = [pytest.mark.long, pytest.mark.model]

LINES: dict[str, dict[str, Any]] = {
    "hf": {"engine": "hf", "dtype": "bfloat16", "reference": "bf16", "candidate": "fp8_e4m3"},
    "llamacpp": {"engine": "llamacpp", "reference": "f16", "candidate": "q8_0"},
    "vllm": {"engine": "vllm", "reference": "auto", "candidate": "fp8_e4m3"},
    "sglang": {"engine": "sglang", "reference": "auto", "candidate": "fp8_e4m3"},
}
TOKENS = 2048
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
        "timing": {"prompt": 64, "n": 8, "repeats": 3},
        "long": {"tokens": TOKENS},
        "output_dir": str(output),
    }
    return validate_cross(data, "experiment")


@pytest.fixture(scope="module")
def report(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> CrossReport:
    engines = [name for name in LINES if installed(name)]
    found, folder = run_cross(experiment(tmp_path_factory.mktemp("cross"), engines), command="fidelab run")
    assert json.loads((folder / "cross-engine.json").read_text()) == json.loads(found.to_json())
    return found


@pytest.fixture(params=list(LINES))
def row(request: pytest.FixtureRequest, report: CrossReport) -> EngineRow:
    """Each engine's row; engines without an environment are skipped."""
    found = next((row for row in report.engines if row.name == request.param), None)
    if found is None:
        pytest.skip(f"engine {request.param} is not installed (fidelab engines install {request.param} --cpu)")
    return found


def test_the_reference_runs_and_says_what_ran(row: EngineRow) -> None:
    assert (row.status, row.reason) == ("ok", None)
    assert row.version is not None
    assert row.ran is not None
    assert row.ran.cache_bytes_per_token == 30 * 3 * 64 * 2 * 2  # layers · KV heads · dimensions · sides · bytes


def test_it_is_timed_by_both_methods(row: EngineRow) -> None:
    assert row.speed is not None
    assert (row.speed.status, row.speed.reason) == ("ok", None)
    assert row.speed.load_seconds is not None
    assert row.speed.load_seconds > 0
    assert row.speed.prefill is not None
    assert row.speed.decode_isolated is not None
    assert len(row.speed.prefill.repeats) == len(row.speed.decode_isolated.repeats) == 3


def test_the_long_window_is_counted_exactly(row: EngineRow) -> None:
    assert row.long is not None
    assert (row.long.status, row.long.reason) == ("ok", None)
    assert (row.long.counted, row.long.rows) == (TOKENS, TOKENS)
    assert row.long.bytes_per_token == row.long.by_hand == 2 * 2 * 32 * 2 * 2


def test_the_8_bit_cache_costs_little_or_is_not_supported(row: EngineRow) -> None:
    assert row.candidate is not None
    if row.name == "sglang":
        assert row.candidate.status == "not_supported"
        assert row.candidate.reason
    else:
        assert (row.candidate.status, row.candidate.reason) == ("ok", None)
        assert row.candidate.kld is not None
        assert 0 < row.candidate.kld < 0.5
        assert row.candidate.composite is not None


def test_engines_on_one_checkpoint_agree(report: CrossReport) -> None:
    pairs = [pair for pair in report.agreement if {pair.reference, pair.other} <= {*SAME_CHECKPOINT}]
    if not pairs:
        pytest.skip("fewer than two engines that load the same checkpoint are installed")
    for pair in pairs:
        assert pair.kld is not None
        assert pair.kld < 0.01, (
            f"{pair.other} from {pair.reference}"
        )  # the 16-bit types' own rounding is 0.001 to 0.002
    perplexities = [row.perplexity["128"] for row in report.engines if row.name in SAME_CHECKPOINT]
    there = [value for value in perplexities if value is not None]
    assert len(there) == len(perplexities)
    assert max(there) < 1.02 * min(there)


def test_the_bundled_experiment_names_every_engine_of_this_file() -> None:
    import fidelab.config.profiles as room

    assert "cross-engine" in experiments()
    text = (Path(room.__file__).parent / "experiments" / "cross-engine.yaml").read_text()
    assert all(f"engine: {name}\n" in text for name in LINES)
