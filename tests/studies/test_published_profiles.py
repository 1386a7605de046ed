"""Profiles against the documents that they repeat: settings, and figures as the documents print them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from fidelab.config.experiment import validate
from fidelab.config.profiles import ResolvedProfile, load_profile, resolve
from fidelab.config.schema import Experiment
from fidelab.studies.profiles import judge

PARTS = ("mean", "median", "p95", "p99", "max")


def profile(name: str, variant: str | None = None) -> ResolvedProfile:
    return resolve(name, load_profile(name), variant)


def experiment(found: ResolvedProfile, stage: str) -> Experiment:
    [settings] = [one.experiment for one in found.stages if one.name == stage]
    return validate(settings or {}, stage)


def values(found: ResolvedProfile, stage: str) -> dict[str, float | None]:
    """Path → published figure, of one stage."""
    return {figure.at: figure.value for figure in found.expected if figure.stage == stage}


def test_the_guides_caches_are_bf16_for_the_reference_and_fp8_for_all_checkpoints() -> None:
    found = experiment(profile("kld-guide"), "checkpoints")
    assert found.reference.kv is not None
    assert found.reference.kv.label == "bf16"
    caches = {arm.name: arm.kv.label if arm.kv else None for arm in found.candidates}
    assert caches == dict.fromkeys(("int4", "nvfp4", "lukealonso"), "fp8_e4m3")
    assert {arm.engine_args.get("quantization") for arm in found.candidates} == {None, "modelopt_fp4"}


def test_the_guides_table_of_checkpoints_is_expected() -> None:
    table = {
        "int4": (0.024057, 0.004778, 0.0976, 0.3499, 4.33),
        "nvfp4": (0.035313, 0.006843, 0.1465, 0.5318, 5.11),
        "lukealonso": (0.035637, 0.006939, 0.1479, 0.5341, 4.43),
    }
    assert values(profile("kld-guide"), "checkpoints") == {
        f"candidates[name={name}].axes.kld.metrics[name={part}]": value
        for name, row in table.items()
        for part, value in zip(PARTS, row, strict=True)
    }


def test_the_guides_three_rows_of_back_ends_are_cells_of_the_grid() -> None:
    found = profile("kld-guide")
    cells = experiment(found, "backends").cells
    keys = ("moe-runner-backend", "fp4-gemm-backend")
    chosen = {n: tuple(str(cells[n].engine_args[key]).removeprefix("flashinfer_") for key in keys) for n in (0, 3, 5)}
    assert chosen == {0: ("cutlass", "cutlass"), 3: ("cutedsl", "cudnn"), 5: ("cutlass", "cudnn")}
    assert [cells[n].engine_args[keys[0]] for n in (0, 5)] == ["flashinfer_cutlass", "cutlass"]
    table = {0: (0.035637, 0.1479, 0.5341), 3: (0.036, 0.1487, 0.5381), 5: (0.036, 0.1488, 0.5381)}
    expected = values(found, "backends")
    for cell, row in table.items():
        shown = (expected[f"candidates.{cell}.axes.kld.metrics[name={part}]"] for part in ("mean", "p95", "p99"))
        assert tuple(shown) == row


def test_the_guides_throughput_has_five_concurrencies_for_two_checkpoints_on_gpus() -> None:
    found = profile("kld-guide")
    table = {"awq": [152, 665, 976, 1516, 1662], "lukealonso": [132, 581, 852, 1191, 1202]}
    for name, row in table.items():
        assert list(values(found, f"throughput-{name}").values()) == row
    stages = {stage.name: stage for stage in found.stages}
    for name in table:
        assert "1,8,16,32,64" in (stages[f"throughput-{name}"].command or ())
        assert (stages[f"serve-{name}"].needs.device, stages[f"serve-{name}"].needs.gpus) == ("cuda", 4)
        assert stages[f"stop-{name}"].needs.stages == (f"serve-{name}",)


def test_the_guides_prompts_are_the_shortest_that_can_be_made() -> None:
    commands = [stage.command for stage in profile("kld-guide").stages if stage.command and "sweep" in stage.command]
    assert [command[command.index("--contexts") + 1] for command in commands] == [0, 0]


@pytest.mark.parametrize("variant", [None, "tiny"])
def test_lmcache_is_asked_where_it_is_installed_and_its_codec_everywhere(variant: str | None) -> None:
    stages = {stage.name: stage for stage in profile("decode", variant).stages}
    assert stages["lmcache"].needs.packages == ("k16v8", "lmcache")
    assert stages["codec"].needs.packages == ("k16v8",)
    absent = judge(
        stages["lmcache"], {"device": "cuda", "gpus": [{"name": "x", "gb": 80}], "memory_gb": 99, "disk_gb": 99}, {}
    )
    assert [skip.need for skip in absent if "lmcache" in skip.need] == ["package lmcache"] * (
        find_spec("lmcache") is None
    )


def test_the_labs_tables_of_contexts_and_of_concurrency_are_expected() -> None:
    found = profile("lab-bench")
    path = "reference.benches.serving.metrics[key={},cell.{}={}]"
    contexts = (128, 1024, 4096, 16384, 32768, 65536, 131072, 262000)
    seconds, rates = (4.1, 4.4, 3.7, 5.9, 9.8, 17.3, 40.3, 96.5), (16.0, 16.9, 10.2, 9.6, 3.9, 2.2, 2.0, 0.9)
    assert values(found, "contexts") == {
        path.format(key, "context", context): value
        for key, column in (("e2e_p50", seconds), ("output_rate", rates))
        for context, value in zip(contexts, column, strict=True)
    }
    loads = {1: 19.7, 2: 0.9, 4: 1.6, 8: 3.6, 16: 6.6, 32: 13.2}
    assert list(values(found, "concurrency").values()) == list(loads.values())
    assert list(values(found, "concurrency-default").values()) == [78, 841, 1266]
    words = {stage.name: [str(word) for word in stage.command or ()] for stage in found.stages}
    assert words["contexts"][words["contexts"].index("--contexts") + 1] == ",".join(map(str, contexts))
    assert words["concurrency"][words["concurrency"].index("--concurrency") + 1] == ",".join(map(str, loads))
    assert "context-length=262144" in words["serve"]


def test_the_baseline_expects_the_documents_table() -> None:
    figures = {figure.name: figure.value for figure in profile("cross-engine").expected if figure.stage == "baseline"}
    known = {name: value for name, value in figures.items() if value is not None}
    table = {
        "load": (188.9, 210, 31.8),
        "PPL": (5.49, 5.74, 6.01),
        "prefill": (11_690, 32_428, 1_298),
        "decode": (25.6, 90.2, 133.2),
        "KV pool": (92.1, 51),
        "cache": (702,),
    }
    for row, wanted in table.items():
        assert tuple(value for name, value in known.items() if f", {row}" in name) == wanted
    assert len(known) == sum(map(len, table.values()))
    methods = [name for name in figures if "decode" in name]
    assert len([name for name in methods if "isolated" in name]) == 3
    assert len([name for name in methods if "subtraction" in name]) == 3


def test_llamacpp_reads_a_gguf_of_its_own_in_every_stage_and_variant() -> None:
    for variant, file in ((None, "./Qwen3.6-35B-A3B-BF16.gguf"), ("tiny", "smollm2-135m")):
        for stage in profile("cross-engine", variant).stages:
            lines = {line["engine"]: line.get("model") for line in (stage.experiment or {})["engines"]}
            assert lines.pop("llamacpp", file) == file
            assert set(lines.values()) <= {None}


def test_decode_runs_on_vllm_or_by_parameter_on_transformers() -> None:
    for override, engine in (([], "vllm"), (["engine=hf"], "hf")):
        found = resolve("decode", load_profile("decode"), None, override)
        engines = {stage.name: stage.experiment["engine"] for stage in found.stages if stage.experiment}
        assert engines == dict.fromkeys(("perplexity", "accuracy", "speed"), engine)
        assert all(stage.needs.engines == (engine,) for stage in found.stages if stage.experiment)
    assert profile("decode", "tiny").parameters["engine"] == "hf"


def test_everything_of_the_paper_is_three_profiles_eight_models_and_a_hybrid() -> None:
    found = profile("decode-full")
    names = [stage.name for stage in found.stages]
    assert names[:3] == ["decode", "decode-sat", "calibration-study"]
    assert [(stage.command or ())[:3] for stage in found.stages[:3]] == [
        ("reproduce", "run", name) for name in names[:3]
    ]
    batches = {stage.name: stage.experiment or {} for stage in found.stages if stage.name.startswith("batch-")}
    assert len({one["model"] for one in batches.values()}) == 8
    assert all(one["benches"]["decode"]["batch"] == [32] for one in batches.values())
    assert list(values(found, "batch-qwen2-5-7b").values()) == [2065.7, 2763.0, 2845.0]
    assert list(values(found, "batch-qwen3-8b").values()) == [2467.3, 2282.8, 2315.5]
    assert list(values(found, "hybrid").values()) == [7.358, 7.347, 7.358]
    assert list(values(found, "hybrid-accuracy").values()) == [0.355, 0.25, 0.355]


def test_the_calibration_study_expects_perplexity_and_gsm8k() -> None:
    found = profile("calibration-study")
    assert [value for value in values(found, "granularity").values() if value is not None] == [157, 7.5]
    assert [*values(found, "static").values(), *values(found, "static-accuracy").values()] == [960_000, 0.0]
    assert list(values(found, "accuracy").values()) == [0.005, 0.845]
