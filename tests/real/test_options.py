"""Options of the engines' own parsers and variables of single arms, on real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from fidelab.models.tiny import make_tiny
from tests.real.harness import NEEDS_FP8, installed
from tests.run.harness import Done, cli

pytestmark = pytest.mark.long

SMALL = ("--axes", "kld", "--windows", 2, "--n-ctx", 64, "--no-floor", "--control", "none", "--threads", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), head_dim=64)


def compare(model: Path, engine: str, cwd: Path, *flags: object) -> Done:
    installed(engine)
    done = cli("compare", model, "--engine", engine, *SMALL, *flags, cwd=cwd)
    assert done.code == 0, done.err
    return done


def captures(cwd: Path) -> set[Path]:
    return {path.parent for path in (cwd / "runs" / "captures").glob("*/*/manifest.json")}


def test_rotation_of_llama_cpp_on_and_off_stand_in_one_run(model: Path, tmp_path: Path) -> None:
    unrotated = "kv=q8_0,env.LLAMA_ATTN_ROT_DISABLE=1"
    flags = ("--candidate", "kv=q8_0", "--candidate", unrotated)
    done = compare(model / "model.gguf", "llamacpp", tmp_path, *flags)
    on, off = done.arm("q8_0"), done.arm("q8_0 LLAMA_ATTN_ROT_DISABLE=1")
    assert (on["ran"]["k_rotated"], off["ran"]["k_rotated"]) == (True, False)
    assert on["axes"]["kld"] != off["axes"]["kld"]
    assert off["ran"]["variables"]["LLAMA_ATTN_ROT_DISABLE"] == "1"


@NEEDS_FP8
def test_another_variable_of_vllm_makes_new_captures_and_the_same_one_none(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for value in ("0", "0", "1"):
        monkeypatch.setenv("VLLM_CPU_SGL_KERNEL", value)
        compare(model, "vllm", tmp_path, "--kv", "fp8_e4m3")
        made.append(captures(tmp_path))
    first, same, other = made
    assert same == first
    assert len(other - first) == 2


@NEEDS_FP8
def test_an_option_that_only_vllms_parser_knows_reaches_vllm(model: Path, tmp_path: Path) -> None:
    candidate = "kv=fp8_e4m3,num-gpu-blocks-override=77,max-model-len=512,enable-chunked-prefill=no"
    done = compare(model, "vllm", tmp_path, "--candidate", candidate)
    [arm] = done.report["candidates"]
    assert (arm["ran"]["cache_blocks"], arm["ran"]["chunked_prefill"]) == (77, False)


def test_an_option_that_only_sglangs_parser_knows_reaches_sglang(tmp_path: Path) -> None:
    done = compare(Path("smollm2-135m"), "sglang", tmp_path, "--candidate", "kv=auto,max-running-requests=4")
    assert done.report["candidates"][0]["status"] in ("ok", "identical")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("max-modle-len=3", "did you mean max-model-len"),
        ("seed=abc", "invalid int value"),
        ("max-logprobs=5", "hold the whole vocabulary"),
        ("enable-prefix-caching=yes", "test paths"),
    ],
)
def test_what_vllm_refuses_stops_the_run_before_anything_loads(
    option: str, said: str, model: Path, tmp_path: Path
) -> None:
    installed("vllm")
    done = cli("compare", model, "--engine", "vllm", *SMALL, "--candidate", f"kv=auto,{option}", cwd=tmp_path)
    assert done.code == 2
    assert said in done.err
    assert not (tmp_path / "runs").exists() or not captures(tmp_path)
