"""From what users wrote to jobs: names, controls, replicates, the floor."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fidelab.cli.dry_run import show_plan
from fidelab.config.experiment import validate
from fidelab.config.schema import EngineConfig, Experiment
from fidelab.config.serve import read_change, read_served
from fidelab.core import Arm, KVSpec, Speculation, waiting_variables
from fidelab.core.errors import ConfigError, EngineError, InputError, UnknownNameError, UsageError
from fidelab.engines.fake import FakeEngine
from fidelab.environments.asked import native_kv
from fidelab.models import pull, resolve
from fidelab.plan.arms import same_attention
from fidelab.plan.build import Plan
from fidelab.plan.memory import rank_remarks
from fidelab.plan.prepare import prepare
from fidelab.plan.resolve import Settings, convert_weights, resolve_experiment
from tests.engines.openai_server import Served, save_model, serving
from tests.models.tiny_gguf import write_gguf
from tests.present import present

FAKE: dict[str, Any] = {
    "model": "fake",
    "engine": "fake",
    "reference": "exact",
    "control": "none",
    "candidates": ["tilt"],
    "axes": {"kld": {"windows": 8, "n_ctx": 32}, "trajectory": {"limit": 8, "n_predict": 4}},
}


def _settings(tmp_path: Path, **change: Any) -> Settings:
    return resolve_experiment(validate({**FAKE, "output_dir": str(tmp_path), **change}, "test"))


def _plan(tmp_path: Path, **change: Any) -> Plan:
    return prepare(validate({**FAKE, "output_dir": str(tmp_path), **change}, "test")).plan


@pytest.fixture
def tiny(tmp_path: Path, make_folder: Callable[..., Path]) -> Path:
    """A model folder that resolves without being loaded."""
    return make_folder(tmp_path / "tiny")


def _hf(tmp_path: Path, tiny: Path, **change: Any) -> Settings:
    base = {
        "model": str(tiny),
        "reference": "f32",
        "candidates": ["int4"],
        "output_dir": str(tmp_path),
        "dtype": "float32",
    }
    return resolve_experiment(validate({**base, **change}, "test"))


def test_k16v8_is_native_keys_and_unscaled_fp8_values(tmp_path: Path, tiny: Path) -> None:
    [arm] = _hf(tmp_path, tiny, candidates=["k16v8"]).candidates
    assert (arm.kv.label, str(arm.kv.k), str(arm.kv.v)) == ("k16v8", "bf16", "fp8_e4m3")


def test_a_32_bit_reference_gets_the_native_cache_as_control_and_a_16_bit_one_none(tmp_path: Path, tiny: Path) -> None:
    assert _hf(tmp_path, tiny).roles["control"].kv == KVSpec.parse("bf16")
    assert "control" not in _hf(tmp_path, tiny, reference="bf16").roles


def test_a_cache_that_nobody_names_on_llama_cpp_is_its_own_default() -> None:
    assert native_kv(EngineConfig(name="llamacpp")).label == "f16"


def test_an_unknown_model_type_is_refused_before_anything_runs(
    tmp_path: Path, make_folder: Callable[..., Path]
) -> None:
    odd = make_folder(tmp_path / "odd", model_type="frobnicate")
    with pytest.raises(UsageError, match=r"odd has model_type 'frobnicate', which is unknown to transformers [\d.]+: "):
        _hf(tmp_path, odd)


def test_auto_settings_are_written_out(tmp_path: Path, tiny: Path) -> None:
    experiment = _hf(tmp_path, tiny, dtype="auto").experiment
    assert experiment.dtype in ("bfloat16", "float16")
    assert experiment.device != "auto"
    assert experiment.threads is not None


def test_an_unknown_format_lists_what_exists_nearest_first(tmp_path: Path) -> None:
    # the name is refused before the model is looked for
    data = {"model": "no-such-model", "reference": "f32", "candidates": ["fp8_e4m4"], "output_dir": str(tmp_path)}
    with pytest.raises(UnknownNameError) as error:
        resolve_experiment(validate(data, "test"))
    assert "did you mean 'fp8_e4m3'?" in str(error.value)
    *names, of = str(error.value).partition("Nearest: ")[2].split(", ")
    assert (len(names), of.startswith("of ")) == (5, True)
    assert all("fp" in name for name in names), names


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"engine": "hff"}, UnknownNameError, "did you mean 'hf'"),
        ({"axes": {"kdl": {}}}, UnknownNameError, "did you mean 'kld'"),
        ({"axes": {"kld": {"window": 3}}}, ConfigError, "unknown key 'axes.kld.window'; did you mean 'windows'"),
        ({"axes": {"kld": {"windows": "few"}}}, ConfigError, "axes.kld.windows"),
        ({"engine_args": {"colour": "red"}}, UsageError, "no option 'colour'"),
        ({"candidates": ["tilt[p=1]"]}, UsageError, "no option 'p'"),
        ({"reference": "refused"}, UsageError, "the reference cannot run"),
        ({"engine": "hf", "reference": "f32", "candidates": ["int4"]}, UsageError, "go together"),
    ],
)
def test_what_cannot_be_is_found_before_anything_runs(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words.replace("[", r"\[")):
        _settings(tmp_path, **change)


def _on_gpu(tmp_path: Path, tiny: Path, *formats: str, reference: str = "bf16", **options: str) -> list[Arm]:
    """Resolved arms of engine hf as they would be on a GPU."""
    settings = _hf(tmp_path, tiny, reference=reference, candidates=list(formats), dtype="bfloat16")
    arms = [replace(arm, device="cuda") for arm in settings.roles.values()]
    return [replace(arm, options=(("attention", options[arm.name]),)) if arm.name in options else arm for arm in arms]


def _attention(arms: Sequence[Arm]) -> dict[str, str | None]:
    return {arm.name: dict(arm.options).get("attention") for arm in arms}


def test_arms_that_the_package_k16v8_may_run_have_its_version_in_their_keys(tmp_path: Path, tiny: Path) -> None:
    import k16v8

    settings = _hf(tmp_path, tiny, candidates=["k16v8", "kv=k16v8,attention=k16v8,name=paged"], dtype="bfloat16")
    assert "k16v8" not in settings.resolved["k16v8"].versions
    assert settings.resolved["paged"].versions["k16v8"] == k16v8.__version__


def test_on_a_gpu_our_kernels_stay_where_they_hold_every_arm(tmp_path: Path, tiny: Path) -> None:
    arms = _on_gpu(tmp_path, tiny, "k16v8", "fp8_e4m3")
    assert same_attention(arms) == (arms, None)


@pytest.mark.parametrize("other", ["q8_0", "iq4_nl", "nvfp4"])
def test_on_a_gpu_one_arm_that_our_kernels_cannot_hold_takes_them_from_all(
    tmp_path: Path, tiny: Path, other: str
) -> None:
    arms, reason = same_attention(_on_gpu(tmp_path, tiny, "k16v8", other))
    assert _attention(arms) == dict.fromkeys(("bf16", "k16v8", other), "transformers")
    assert present(reason).startswith(f"{other}: attention=k16v8")


def test_arms_that_name_their_attention_keep_it_and_bind_nobody(tmp_path: Path, tiny: Path) -> None:
    arms, reason = same_attention(_on_gpu(tmp_path, tiny, "k16v8", "q8_0", q8_0="sdpa"))
    assert (_attention(arms), reason) == ({"bf16": None, "k16v8": None, "q8_0": "sdpa"}, None)


def test_the_resolved_arms_share_one_attention_and_the_record_says_whose_format_decided(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fidelab.plan.resolve._device", lambda _asked, _model: "cuda")
    settings = _hf(tmp_path, tiny, reference="bf16", candidates=["k16v8", "q8_0"], dtype="bfloat16")
    assert _attention(list(settings.roles.values())) == dict.fromkeys(("bf16", "k16v8", "q8_0"), "transformers")
    said = settings.resolved["bf16"].about["kernels_refused"]
    monkeypatch.undo()  # on a processor attention stays Transformers' own
    settings = _hf(tmp_path, tiny, reference="bf16", candidates=["k16v8", "q8_0"], dtype="bfloat16")
    assert {dict(arm.options).get("attention") for arm in settings.roles.values()} == {None}
    assert "one attention for all configurations; q8_0: attention=k16v8 does not hold q8_0" in said


def _beside(tmp_path: Path, tiny: Path, *arms: dict[str, Any], **change: Any) -> Settings:
    return _hf(tmp_path, tiny, reference="bf16", candidates=list(arms), dtype="bfloat16", **change)


EAGER = {"attention": "eager"}


def test_candidates_on_another_kernel_path_get_one_control_there(tmp_path: Path, tiny: Path) -> None:
    arms = [{"kv": kv, "engine_args": EAGER} for kv in ("q8_0", "int4")]
    settings = _beside(tmp_path, tiny, *arms, {"kv": "q8_0"})
    control = settings.roles["control:eager"]
    assert (str(control.kv.k), dict(control.options)) == ("bf16", EAGER)
    assert list(settings.roles)[:2] == ["reference", "control:eager"]


def test_the_control_of_another_kernel_path_is_the_nearest_arm_there(tmp_path: Path, tiny: Path) -> None:
    settings = _hf(tmp_path, tiny, candidates=[{"kv": "int4", "engine_args": EAGER}])
    assert settings.roles["control"].kv == settings.roles["control:eager"].kv == KVSpec.parse("bf16")


@pytest.mark.parametrize(
    ("arms", "change"),
    [
        ([{"kv": "q8_0"}], {"engine_args": EAGER}),
        ([{"kv": "q8_0", "engine_args": EAGER}], {"control": "none"}),
        ([{"kv": "bf16", "engine_args": EAGER}], {}),
        ([], {"vary": {"kv": ["q8_0", "int4"], "attention": ["sdpa", "eager"]}}),
    ],
    ids=["the reference's path", "no control wanted", "is its own control", "a grid"],
)
def test_no_control_of_another_path_where_there_is_none_to_be_had(
    tmp_path: Path, tiny: Path, arms: list[dict[str, Any]], change: dict[str, Any]
) -> None:
    assert not any(role.startswith("control:") for role in _beside(tmp_path, tiny, *arms, **change).roles)


def test_a_reference_that_names_its_attention_leaves_the_others_a_path_without(tmp_path: Path, tiny: Path) -> None:
    reference = {"kv": "bf16", "engine_args": EAGER}
    settings = _hf(tmp_path, tiny, reference=reference, candidates=["q8_0"], dtype="bfloat16")
    found = {role: dict(arm.options) for role, arm in settings.roles.items() if role.startswith("control:")}
    assert found == {"control:auto": {}}


def test_jobs_run_reference_first_and_floor_last(tmp_path: Path) -> None:
    plan = _plan(tmp_path, control="tilt[q=0.51]", candidates=["tilt", "exact"])
    assert [job.role for job in plan.jobs] == ["reference", "control", "candidate:tilt", "candidate:exact", "floor"]


def test_a_candidate_whose_queries_may_be_quantized_gets_a_diagnostic_arm_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def options(_engine: type[FakeEngine], arm: Arm) -> dict[str, str]:
        return {"noise": "0.5"} if arm.kv.k.name == "tilt" else {}

    monkeypatch.setattr(FakeEngine, "native_query_options", classmethod(options))
    candidates = [{"kv": "tilt", "name": "tilt", "engine_args": {"delay": "0"}}, "exact"]
    plan = _plan(tmp_path, control="full", candidates=candidates, floor=0)
    found = {job.role: job for job in plan.jobs}
    assert [role for role in found if role.startswith("queries")] == ["queries:tilt"]
    job = found["queries:tilt"]
    assert (job.arm.name, job.arm.kv) == ("tilt (16-bit queries)", found["candidate:tilt"].arm.kv)
    assert dict(job.arm.options) == {"delay": "0", "noise": "0.5"}
    assert {capture.request.axis for capture in job.captures} == {"kld"}
    plan = _plan(tmp_path, candidates=candidates, floor=0)
    assert not any(job.role.startswith("queries") for job in plan.jobs)


def test_the_floor_takes_a_quarter_of_the_items_spread_evenly(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    floor, reference = plan.job("floor"), plan.job("reference")
    assert reference is not None
    whole, part = reference.captures[0].request.items(), present(floor).captures[0].request.items()
    assert part == (whole[0], whole[7])


def _folders(tmp_path: Path) -> set[Path]:
    return {capture.folder for job in _plan(tmp_path).jobs for capture in job.captures}


@pytest.mark.parametrize(
    "name", ["FAKE_API_KEY", "FAKE_LOG_LEVEL", "OMP_NUM_THREADS", "OPENBLAS_THREAD_TIMEOUT", "VLLM_USE_V2_MODEL_RUNNER"]
)
def test_secrets_logs_and_what_others_read_leave_captures_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = _folders(tmp_path)
    monkeypatch.setenv(name, "7")
    assert _folders(tmp_path) == before


def test_the_wait_policy_counts_as_the_worker_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    ours = _folders(tmp_path)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert _folders(tmp_path) == ours
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert not _folders(tmp_path) & ours


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("OMP_WAIT_POLICY", {"OPENBLAS_THREAD_TIMEOUT"}),
        ("GOMP_SPINCOUNT", {"OPENBLAS_THREAD_TIMEOUT"}),
        ("OPENBLAS_THREAD_TIMEOUT", {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}),
        ("HOME", {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OPENBLAS_THREAD_TIMEOUT"}),
    ],
)
def test_how_a_librarys_threads_wait_is_left_to_who_set_it(name: str, ours: set[str]) -> None:
    assert waiting_variables({name: "x"}).keys() == ours


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_captures_made_with_other_heads_that_draft_are_other_captures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    heads = tmp_path / "heads" / f"model{suffix}"
    heads.parent.mkdir()
    drafted = Speculation("medusa", 2, None, str(heads.parent), ())
    monkeypatch.setattr(FakeEngine, "speculation", classmethod(lambda cls, options: drafted))
    heads.write_bytes(b"one")
    before = _folders(tmp_path)
    assert _folders(tmp_path) == before
    heads.write_bytes(b"two")
    assert not _folders(tmp_path) & before


def _gguf(tmp_path: Path, file: Path, **change: Any) -> Experiment:
    base = {
        "model": str(file),
        "reference": "f32",
        "candidates": ["int4"],
        "output_dir": str(tmp_path / "runs"),
        "axes": {"kld": {"windows": 2, "n_ctx": 32}},
        "threads": 1,
    }
    return validate({**base, **change}, "test")


def test_a_dry_run_counts_a_conversion_and_does_not_make_it(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = _gguf(tmp_path, write_gguf(tmp_path / "tiny.gguf"))
    show_plan(experiment, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["conversion_bytes"] == 2 * resolve(experiment.model).parameters
    assert not list(cache.rglob("*.safetensors"))
    model = pull(experiment.model)
    show_plan(experiment, as_json=True)
    assert json.loads(capsys.readouterr().out)["conversion_bytes"] == 0
    assert prepare(experiment, convert=False).settings.reference.weights == model.weights


def test_weights_are_converted_for_an_arm_that_needs_them(tmp_path: Path, cache: Path) -> None:
    settings = prepare(_gguf(tmp_path, write_gguf(tmp_path / "tiny.gguf"))).settings
    assert (Path(settings.reference.path) / "model.safetensors").is_file()
    converted = pull(settings.model.name)
    assert settings.candidates[0].weights == settings.reference.weights == converted.weights
    assert settings.resolved[settings.reference.name].about["weight_bytes"] == converted.weight_bytes > 0


def test_a_candidate_that_cannot_be_converted_leaves_the_others_alone(tmp_path: Path, tiny: Path, cache: Path) -> None:
    unknown = write_gguf(tmp_path / "unknown.gguf", architecture="smollm3")
    partial = write_gguf(tmp_path / "partial.gguf", changed={"blk.0.ffn_up.weight": None})
    candidates = ["int4", {"model": str(unknown), "kv": "f32"}, {"model": str(partial), "kv": "f32"}]
    settings = convert_weights(_hf(tmp_path, tiny, candidates=candidates))
    assert [arm.name in settings.unsupported for arm in settings.candidates] == [False, True, True]
    reasons = [settings.unsupported[arm.name] for arm in settings.candidates[1:]]
    assert "reads no GGUF files of architecture 'smollm3': use engine llamacpp" in reasons[0]
    assert "partial.gguf cannot be converted for Transformers (1 of 11 parameters" in reasons[1]


def test_a_model_with_another_tokenizer_is_refused_before_anything_runs(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    other = {"model": "smollm2-135m", "kv": "f32"}
    said = r"another tokenizer than the reference's \(261 and 49,152 ids\): no KL between their distributions"
    with pytest.raises(UsageError, match=f"smollm2-135m f32 has {said}"):
        _hf(tmp_path, file, candidates=[other])
    settings = _hf(tmp_path, file, candidates=["int4", other])
    [(name, reason)] = settings.unsupported.items()
    assert (name, re.match(said, reason) is not None) == ("smollm2-135m f32", True)


def test_a_reference_that_cannot_be_converted_is_refused(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(UsageError, match=r"reference cannot run on engine hf.*'smollm3': use engine llamacpp"):
        prepare(_gguf(tmp_path, write_gguf(tmp_path / "unknown.gguf", architecture="smollm3")))
    file = write_gguf(tmp_path / "partial.gguf", changed={"blk.0.ffn_up.weight": None})
    with pytest.raises(InputError, match="cannot be converted for Transformers"):
        prepare(_gguf(tmp_path, file))


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has no GPU."""
    monkeypatch.setattr("fidelab.plan.resolve.gpu_files", list)


@pytest.mark.usefixtures("login")
def test_gpus_of_a_cluster_are_not_looked_for_here(tmp_path: Path, tiny: Path) -> None:
    settings = _hf(tmp_path, tiny, device="cuda", executor={"name": "ray"})
    assert {arm.device for arm in settings.roles.values()} == {"cuda"}


@pytest.mark.parametrize(
    ("device", "gpus", "said"),
    [
        ("cuda", 2, ["tensor parallelism over 8 asks for 8 GPUs, this machine has 2"]),
        (
            "cpu",
            0,
            ["tensor parallelism over 8 asks for 8 GPUs, this machine has none; here 8 processes share its processor"],
        ),
        ("cuda", 8, []),
        ("cuda", 0, []),
    ],
    ids=["too few", "no GPU", "enough", "a driver that tells no number"],
)
def test_more_ranks_than_gpus_are_one_line_of_the_plan(
    device: str, gpus: int, said: list[str], tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fidelab.plan.memory.gpu_memory", lambda: (2.0**34,) * gpus)
    settings = _hf(tmp_path, tiny)
    arms = {
        name: replace(one, arm=replace(one.arm, device=device, options=(("tp", "8"),)))
        for name, one in settings.resolved.items()
    }
    assert [*rank_remarks(replace(settings, resolved=arms))] == said
    monkeypatch.setattr("fidelab.plan.memory.gpu_memory", lambda: pytest.fail("one rank needs no number of GPUs"))
    assert [*rank_remarks(settings)] == []


@pytest.mark.usefixtures("login")
def test_an_arm_of_a_cluster_s_gpus_is_refused_where_it_would_run_but_its_options_before(tmp_path: Path) -> None:
    there = _settings(tmp_path, candidates=["refused"], device="cuda", executor={"name": "ray"})
    assert there.unsupported == {}
    assert there.resolved["refused"].unasked
    here = _settings(tmp_path, candidates=["refused"])
    assert list(here.unsupported) == ["refused"]
    assert not here.resolved["refused"].unasked
    with pytest.raises(UsageError, match="no option 'colour'"):
        _settings(tmp_path, engine_args={"colour": "red"}, device="cuda", executor={"name": "ray"})


def test_arms_of_a_cluster_have_four_threads_unless_told(tmp_path: Path) -> None:
    assert _settings(tmp_path, device="cpu", executor={"name": "ray"}).reference.threads == 4
    assert _settings(tmp_path, device="cpu", executor={"name": "ray"}, threads=7).reference.threads == 7


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("auto", "say cuda or cpu"),
        ("cuda:1", "the cluster chooses the GPU; pass --device cuda"),
        ("mps", "write cpu or cuda"),
    ],
)
def test_device_that_is_none_of_a_cluster_is_refused(device: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        _settings(tmp_path, device=device, executor={"name": "ray"})


def test_a_pasted_command_is_planned_without_its_engine_and_not_run(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fidelab.environments.environment.provided_here", lambda cls: not cls.packages)
    file = write_gguf(tmp_path / "tiny.gguf")
    served = read_served(f"llama-server -m {file} -fa on", lambda engine: {})
    data = {
        "candidates": [read_change(text, served, lambda engine: {}) for text in ("-ctk f32", "-ctk q8_0")],
        "axes": {"kld": {"windows": 2, "n_ctx": 32}},
    }
    experiment = validate({**served.settings(), **data, "output_dir": str(tmp_path)}, "test")
    show_plan(experiment, as_json=True)
    plan = json.loads(capsys.readouterr().out)
    assert [job["role"] for job in plan["jobs"]][:3] == ["reference", "control", "candidate:-ctk f32"]
    assert plan["not_supported"] == {"-ctk q8_0": "heads of 16 are no multiple of q8_0's block of 32"}
    assert plan["tokens"] > 0
    [remark] = plan["remarks"]
    assert remark.startswith("engine llamacpp is not installed: fidelab setup install llamacpp")
    assert remark.endswith("; planned without asking it")
    with pytest.raises(EngineError, match="engine llamacpp is not installed"):
        prepare(experiment)


def test_the_plan_of_a_pasted_command_says_how_many_gpus_it_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fidelab.environments.environment.provided_here", lambda cls: not cls.packages)
    monkeypatch.setattr("fidelab.plan.memory.gpu_memory", lambda: (2.0**34,))
    model = save_model(tmp_path)
    served = read_served(f"vllm serve {model} --tensor-parallel-size 8 --dtype float32", lambda engine: {})
    data = {
        "candidates": [read_change("--kv-cache-dtype fp8_e4m3", served, lambda engine: {})],
        "axes": {"kld": {"windows": 2, "n_ctx": 32}},
    }
    show_plan(validate({**served.settings(), **data, "output_dir": str(tmp_path)}, "test"), as_json=True)
    remarks = json.loads(capsys.readouterr().out)["remarks"]
    assert [remark for remark in remarks if remark.startswith("tensor parallelism over 8 asks for 8 GPUs")], remarks


def test_a_candidate_that_computes_what_the_reference_does_is_named_in_the_plan(tmp_path: Path) -> None:
    plan = _plan(tmp_path, candidates=["exact", "tilt"])
    assert "exact computes what the reference computes: it shows run-to-run noise alone" in plan.remarks
    assert not any("computes what" in line for line in _plan(tmp_path).remarks)


def test_a_dry_run_says_which_servers_do_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model")
    with serving(Served()) as alive, contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        dead = taken.getsockname()[1]
        taken.close()
        urls = [f"http://127.0.0.1:{port}/v1" for port in (alive.port, dead)]
        arms = [{"name": name, "engine_args": {"base-url": url}} for name, url in zip("ad", urls, strict=True)]
        settings = {"model": str(folder), "engine": "openai", "reference": arms[0], "candidates": arms[1:]}
        axes = {"kld": {"windows": 2, "n_ctx": 32}}
        show_plan(validate({**settings, "axes": axes, "output_dir": str(tmp_path)}, "test"), as_json=True)
    remarks = json.loads(capsys.readouterr().out)["remarks"]
    assert f"d: http://127.0.0.1:{dead} refuses connections: start the server, or correct base-url" in remarks
    assert not any(line.startswith("a:") for line in remarks)
