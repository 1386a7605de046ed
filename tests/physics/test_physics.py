"""Physics of decoding: shapes from configurations, bytes, ceilings, bounds, what fits."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

from fidelab.cli import app
from fidelab.core import KVSpec, cache_parameter
from fidelab.core.errors import FidelabError, InputError, NotSupportedError, UsageError
from fidelab.core.sequence import KVLayer
from fidelab.models.tiny import GGUF_NAME, make_tiny
from fidelab.physics import devices, geometry
from fidelab.physics.devices import Device, find_device
from fidelab.physics.geometry import model_geometry, named_geometry
from fidelab.physics.shapes import Geometry
from fidelab.physics.traffic import Model
from tests.tiny_models import KINDS, model

BF16, K16V8, FP8 = (KVSpec.parse(name) for name in ("bf16", "k16v8", "fp8_e4m3"))
QWEN, MISTRAL, LLAMA = (
    Model(Geometry.of_sizes(*sizes)) for sizes in ((28, 4, 128, 7.616e9), (32, 8, 128, 7.248e9), (32, 8, 128, 8.030e9))
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_is_what_the_architecture_caches(kind: str, tmp_path: Path) -> None:
    KINDS[kind].config().save_pretrained(tmp_path)
    shape = model_geometry(tmp_path)
    assert tuple((layer.heads, layer.k_dim, layer.v_dim, layer.window) for layer in shape.kv) == KINDS[kind].kv
    assert shape.parameters == sum(p.numel() for p in model(kind).parameters())
    assert (shape.state_bytes > 0) == KINDS[kind].recurrent


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "lfm2"])
def test_recurrent_state_is_as_large_as_in_a_real_forward(kind: str, tmp_path: Path) -> None:
    KINDS[kind].config().save_pretrained(tmp_path)
    real = copy.deepcopy(model(kind)).bfloat16()  # other tests share the model
    cache = transformers.DynamicCache(config=real.config)
    with torch.no_grad():
        real(input_ids=torch.zeros((1, 1), dtype=torch.long), cache=cache, use_cache=True)
    held = [getattr(layer, name, None) or {} for layer in cache.layers for name in ("conv_states", "recurrent_states")]
    states = [state for states in held for state in states.values() if state is not None]
    assert model_geometry(tmp_path).state_bytes == sum(state.nbytes for state in states) > 0


def test_a_model_whose_cache_stays_empty_is_an_error_that_names_class_and_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model("granite").config.save_pretrained(tmp_path)
    monkeypatch.setattr(geometry, "cache_parameter", lambda _model: "swallowed_by_kwargs")
    with pytest.raises(InputError, match=r"of \d+ layers of GraniteForCausalLM cached nothing .* swallowed_by_kwargs="):
        model_geometry(tmp_path)


def test_the_cache_is_passed_by_the_name_that_forward_lists_and_without_one_it_is_refused() -> None:
    class Old:
        def forward(self, input_ids: object, past_key_values: object = None, **kwargs: object) -> None: ...

    class New:
        def forward(self, input_ids: object, cache: object = None, **kwargs: object) -> None: ...

    class Model:
        def forward(self, input_ids: object, **kwargs: object) -> None: ...

    assert [cache_parameter(kind()) for kind in (Old, New)] == ["past_key_values", "cache"]
    with pytest.raises(NotSupportedError, match=r"Model.forward takes no cache"):
        cache_parameter(Model())


def test_the_embedded_model_caches_46080_bytes_in_float32_and_half_in_bf16() -> None:
    shape, _ = named_geometry("smollm2-135m")
    assert [Model(shape).token_bytes(KVSpec.parse(kv)) for kv in ("f32", "bf16")] == [46_080, 23_040]


def test_experts_count_by_how_many_a_token_takes(tmp_path: Path) -> None:
    transformers.GptOssConfig(
        num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=2, vocab_size=64, hidden_size=32,
        intermediate_size=32, head_dim=16, num_attention_heads=4, num_key_value_heads=2,
    ).save_pretrained(tmp_path)  # fmt: skip
    shape = model_geometry(tmp_path)
    assert (shape.experts, shape.active_experts) == (8, 2)
    dense = shape.parameters - shape.idle_parameters - shape.expert_parameters
    assert shape.active_parameters == dense + shape.expert_parameters // 4
    assert shape.read_parameters(1) == pytest.approx(shape.active_parameters)
    assert shape.touched_experts(3) == pytest.approx(8 * (1 - 0.75**3))
    assert shape.read_parameters(10_000) == pytest.approx(dense + shape.expert_parameters)


def test_an_embedding_table_is_read_only_where_it_is_the_head_too(tmp_path: Path) -> None:
    shapes = []
    for tied in (True, False):
        folder = tmp_path / str(tied)
        transformers.LlamaConfig(
            num_hidden_layers=1, vocab_size=100, hidden_size=32, intermediate_size=32, num_attention_heads=2,
            tie_word_embeddings=tied,
        ).save_pretrained(folder)  # fmt: skip
        shapes.append(model_geometry(folder))
    tied_shape, untied = shapes
    assert untied.parameters == tied_shape.parameters + 3200
    assert (tied_shape.idle_parameters, untied.idle_parameters) == (0, 3200)
    assert untied.read_parameters(1) == tied_shape.read_parameters(1)


ROWS = json.loads((Path(__file__).parent / "kv_heads.json").read_text("utf-8"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["config"]["model_type"])
def test_kv_heads_are_those_that_vllm_caches(row: dict[str, Any], tmp_path: Path) -> None:
    words = dict(row["config"])
    transformers.CONFIG_MAPPING[words.pop("model_type")](**words).save_pretrained(tmp_path)
    assert {layer.heads for layer in model_geometry(tmp_path).kv} == {row["kv_heads"]}


def test_engine_hf_holds_what_transformers_caches(tmp_path: Path) -> None:
    config = next(row["config"] for row in ROWS if row["config"].get("new_decoder_architecture"))
    transformers.FalconConfig(**{**config, "num_kv_heads": 2}).save_pretrained(tmp_path)
    found = {}
    for engine in ((), ("--engine", "hf")):
        found[engine] = json.loads(run(str(tmp_path), "--kv", "q8_0", "--json", *engine).stdout)
    served, own = found.values()
    assert own["formats"][0]["bytes_per_token"] == 4 * served["formats"][0]["bytes_per_token"] == 4 * 2 * 2 * 2 * 2 * 8
    assert served["model"]["notes"] == ["Transformers caches each of the 2 KV heads 4 times: --engine hf counts these"]
    assert own["model"]["notes"] == ["Transformers caches each KV head 4 times; servers cache 2 heads per layer"]
    assert (served["model"].get("engine"), own["model"]["engine"]) == (None, "hf")


@pytest.mark.parametrize("kind", ["bert", "roberta", "clip", "vit", "modernbert"])
def test_a_model_that_does_not_decode_is_refused(kind: str, tmp_path: Path) -> None:
    transformers.CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    refusal = run(str(tmp_path)).exception
    assert isinstance(refusal, InputError)
    assert str(refusal) == f"{tmp_path} is {kind}, not a decoder: fidelab runs decoder-only models"


@pytest.mark.parametrize("inside", [False, True], ids=["text", "images"])
def test_layers_of_gemma_3n_that_share_a_cache_count_once(inside: bool, tmp_path: Path) -> None:
    text: dict[str, Any] = {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "vocab_size": 64}
    text |= {
        "vocab_size_per_layer_input": 262_144,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    text |= {"head_dim": 16, "sliding_window": 8, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
    text |= {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0]}
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]}
    config = transformers.Gemma3nConfig(text_config=text) if inside else transformers.Gemma3nTextConfig(**text)
    config.save_pretrained(tmp_path)
    shape = model_geometry(tmp_path)
    assert [(layer.number, layer.heads, layer.window) for layer in shape.kv] == [(0, 2, 8), (1, 2, None), (2, 2, 8)]
    assert shape.layers == 5


@pytest.mark.parametrize(
    ("key", "number"),
    [("num_hidden_layers", 2_001), ("n_layer", 2_001), ("n_routed_experts", 10_001), ("vision_depth", 2_001)],
)
def test_numbers_of_modules_are_bounded(key: str, number: int) -> None:
    with pytest.raises(InputError, match=f"{key} is {number:,}, at most"):
        geometry._check_sizes({"text_config": {key: number}}, Path("config.json"))


def test_sizes_per_layer_or_expert_are_not_numbers_of_modules() -> None:
    words = {"vocab_size_per_layer_input": 262_144, "num_experts_per_tok": 10_001, "dim_per_layer": 3_000}
    geometry._check_sizes({"text_config": words}, Path("config.json"))


def test_layers_that_an_engine_leaves_in_16_bits_are_listed() -> None:
    words = (*SIZES, "--engine", "vllm", "--kv", "turboquant_4bit_nc", "--kv", "fp8_e4m3[skip-layers=3]")
    found = json.loads(run(*words, "--json").stdout)
    assert [(one["kv"], one["exact_layers"]) for one in found["formats"]] == [
        ("auto", []),
        ("turboquant_4bit_nc", [0, 1, 26, 27]),
        ("fp8_e4m3[skip-layers=3]", [3]),
    ]
    shown = run(*words).stdout
    assert "turboquant_4bit_nc: 4 of 28 layers are 16 bit: 0, 1, 26, 27" in shown
    assert "fp8_e4m3[skip-layers=3]: 1 of 28 layers is 16 bit: 3" in shown
    assert "KV cache, engine vllm" in shown


@pytest.mark.parametrize(
    ("engine", "formats"),
    [("vllm", ["auto", "k16v8", "fp8_e4m3", "int4"]), ("sglang", ["bf16"]), ("llamacpp", ["bf16", "q8_0"])],
)
def test_an_engine_has_its_own_default_formats(engine: str, formats: list[str]) -> None:
    found = json.loads(run(*SIZES, "--engine", engine, "--json").stdout)
    assert [one["kv"] for one in found["formats"]][: len(formats)] == formats


def test_a_gguf_file_and_a_folder_give_the_same_shape(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    (one, _), (other, _) = (named_geometry(str(path)) for path in (folder, folder / GGUF_NAME))
    assert one.kv == other.kv
    assert one.parameters == other.parameters


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"model_type": "llama", "hidden_size": 64}, "num_hidden_layers"),
        ({"hidden_size": 64, "num_hidden_layers": 2}, "model_type"),
        ({"model_type": "nonesuch", "hidden_size": 64, "num_hidden_layers": 2}, "cannot build model_type 'nonesuch'"),
    ],
)
def test_a_configuration_without_what_is_needed_names_it(words: dict[str, object], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(words))
    with pytest.raises(InputError, match=said):
        model_geometry(tmp_path)


def test_bytes_per_token_share_and_ceiling_are_those_of_known_models() -> None:
    assert [QWEN.token_bytes(kv) for kv in (BF16, K16V8)] == [57_344, 43_008]
    assert [LLAMA.token_bytes(kv) for kv in (BF16, K16V8)] == [131_072, 98_304]
    assert QWEN.limit(K16V8, BF16) == pytest.approx(4 / 3)
    shares = [QWEN.kv_share(BF16, 2048, 1), QWEN.kv_share(BF16, 8192, 1)]
    shares += [one.kv_share(BF16, 8192, 1) for one in (MISTRAL, LLAMA)]
    assert [round(100 * share, 2) for share in shares] == [0.77, 2.99, 6.90, 6.27]
    assert [round(QWEN.ceiling(K16V8, BF16, t, 32), 2) for t in (2048, 8192, 32768)] == [1.05, 1.14, 1.25]


def test_windows_cap_what_is_held_and_not_what_is_reserved() -> None:
    layers = (KVLayer(8, 64, 64, 128), KVLayer(8, 64, 64)) * 12
    gpt_oss = Model(Geometry("gpt-oss-20b", 24, layers, 20_914_757_184))
    assert gpt_oss.cache_bytes(BF16, 8192, 32) / 2**30 == pytest.approx(6.09, abs=0.005)
    assert gpt_oss.cache_bytes(BF16, 8192, 32, capped=False) / 2**30 == 12.0


def test_heads_fewer_than_devices_are_held_several_times_latents_have_one_format_and_skipped_layers_16_bits() -> None:
    shape = Geometry.of_sizes(2, 4, 64, 1e6)
    assert [Model(shape, tp=tp).token_bytes(BF16) for tp in (1, 2, 4, 8)] == [2048, 1024, 512, 512]
    latent = Model(Geometry("mla", 1, (KVLayer(1, 512, 64, None, True),), 10**6, query_heads=16), tp=4)
    assert latent.token_bytes(BF16) == 2 * 576
    with pytest.raises(UsageError, match="latents"):
        latent.token_bytes(K16V8)
    assert QWEN.token_bytes(KVSpec.parse("fp8_e4m3[skip-layers=0,27]")) == (26 * 1024 + 2 * 2048)


@pytest.mark.parametrize("kv", [BF16, K16V8])
@pytest.mark.parametrize("batch", [1, 7])
def test_the_longest_context_fits_and_one_token_more_does_not(kv: KVSpec, batch: int) -> None:
    shape = Model(Geometry("windowed", 3, (KVLayer(2, 64, 64, 512), KVLayer(2, 64, 64)), 10**6, state_bytes=999))
    memory = 3e7
    most = shape.longest_context(kv, batch, memory)
    assert most
    assert shape.device_bytes(kv, most, batch) <= memory < shape.device_bytes(kv, most + 1, batch)
    largest = shape.largest_batch(kv, 1000, memory)
    assert largest
    assert shape.device_bytes(kv, 1000, largest) <= memory < shape.device_bytes(kv, 1000, largest + 1)
    assert shape.longest_context(kv, 1, 1e6) == 0
    assert Model(Geometry("sliding", 1, (KVLayer(2, 64, 64, 512),), 10**6)).longest_context(kv, 1, 1e8) is None
    fits = [QWEN.longest_context(kv, batch, size) or 0 for size in np.linspace(1e10, 2e11, 20)]
    assert all(a <= b for a, b in pairwise(fits))


@pytest.mark.parametrize("name", ["H100", "H200"])
def test_measured_rates_of_the_table_are_those_of_the_recorded_runs(name: str) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / f"nvidia-{name.lower()}-kernels.json"
    record = json.loads(path.read_text("utf-8"))
    assert name in record["device"]["name"]
    row = devices.devices()[name]
    assert row.sustained == pytest.approx(record["runs"][-1]["copy_bandwidth"], rel=1e-3)
    assert row.verified.endswith(record["runs"][-1]["date"][:10])
    rates = [
        one["moved_bytes"] / one["seconds"] for cell in record["cells"] for one in cell["results"] if one["seconds"]
    ]
    assert row.sustained < max(rates) < row.peak_bandwidth  # why a copy bounds no kernel that only reads


def test_a_device_has_the_memory_that_its_driver_reports() -> None:
    h100, own = find_device("H100"), Device("x", 8e9, 1e9)
    assert (h100.memory, h100.usable, own.usable) == (80e9, 85.52e9, 8e9)


def test_bounds_follow_from_bytes_and_operations() -> None:
    h100 = find_device("h100")
    rates = {name: QWEN.decode_rate(BF16, 1, 1, find_device(name))[0] for name in ("H100", "A100", "W7900")}
    assert {name: round(rate) for name, rate in rates.items()} == {"H100": 220, "A100": 134, "W7900": 57}
    rate, bound = QWEN.decode_rate(BF16, 1, 4096, h100)
    assert bound == "compute"
    assert rate == pytest.approx(989e12 / (2 * 7.616e9), rel=1e-4)
    assert QWEN.prefill_rate(1, h100)[1] == "memory"
    assert QWEN.prefill_rate(8192, h100)[1] == "compute"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "fidelab" / "devices.yaml"


def test_rows_of_the_own_table_are_added_to_the_published_ones(state: Path) -> None:
    state.parent.mkdir(parents=True)
    state.write_text("here: {memory: 32, bandwidth: 640, sustained: 700, compute: {bf16: 2}, verified: by hand}")
    row = find_device("HERE")
    assert (row.memory, row.bandwidth, row.compute, row.verified) == (32e9, 700e9, {"bf16": 2e12}, "by hand")
    assert {name for name, device in devices.devices().items() if device.verified} == {"here", "H100", "H200"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("here: {memory: 1, bandwidth: -3}", "bandwidth must be a number above 0"),
        ("here: {memory: 1, bandwith: 3}", "unknown field 'bandwith'"),
        ("[1]", "maps names to rows"),
        ("here: [", "correct it or remove it"),
    ],
)
def test_a_wrong_row_of_the_own_table_is_named(text: str, said: str, state: Path) -> None:
    state.parent.mkdir(parents=True)
    state.write_text(text)
    with pytest.raises(InputError, match=said):
        find_device("H100")


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["estimate", *words])


SIZES = ("--layers", "28", "--kv-heads", "4", "--head-dim", "128", "--params", "7.616e9")


def test_the_command_takes_sizes_and_prints_what_follows() -> None:
    words = (*SIZES, "--kv", "k16v8", "--device", "A100", "--batch", "32")
    done = run(*words)
    assert done.exit_code == 0, done.exception
    for text in ("57,344", "43,008", "1.14×", "unverified"):
        assert text in done.stdout
    found = json.loads(run(*words, "--json").stdout)
    assert [cell["ceiling"]["k16v8"] for cell in found["cells"]] == pytest.approx([1.052, 1.142, 1.249], abs=1e-3)


def test_a_link_must_carry_in_one_step_what_does_not_fit() -> None:
    words = (*SIZES, "--kv", "k16v8", "--device", "H100", "--context", "128k", "--batch", "32", "--memory", "16G")
    found = json.loads(run(*words, "--json").stdout)
    for row in found["devices"][0]["formats"]:
        rate = found["cells"][0]["decode"]["H100"][row["kv"]]["tokens_per_s"]
        assert row["link_shortfall"]["pcie5-x16"] == pytest.approx(row["overflow_bytes"] * rate / 32 / 64e9)
        assert row["link_shortfall"]["nvlink"] == pytest.approx(row["overflow_bytes"] * rate / 32 / 900e9)
    shown = " ".join(run(*words).stdout.split())
    beyond = found["devices"][0]["formats"][1]["overflow_bytes"] / 2**30
    step = 32e3 / found["cells"][0]["decode"]["H100"]["k16v8"]["tokens_per_s"]
    until = f"to be read in every step of {step:.3g} ms, a link would have"
    assert f"k16v8 at 128k × 32: {beyond:.0f} GiB do not fit; {until}" in shown
    assert "do not fit" not in run(*SIZES, "--device", "H100").stdout


@pytest.mark.parametrize(("batch", "shortfalls"), [(25, [11.1, 156.25, 312.5]), (125, [55.6, 781.25, 1562.5])])
def test_a_step_time_is_the_deadline_of_a_link(batch: int, shortfalls: list[float]) -> None:
    """A published table: links that lack 10 and 50 TB/s, as 100 and 500 GB have to come within 10 ms."""
    sizes = ("--layers", "25", "--kv-heads", "4", "--head-dim", "100", "--params", "8e9", "--kv", "fp8_e4m3")
    words = (*sizes, "--device", "H100", "--context", "100000", "--batch", str(batch), "--memory", "16G")
    found = json.loads(run(*words, "--step-time", "10ms", "--json").stdout)["devices"][0]["formats"][0]
    assert found["step_seconds"] == pytest.approx(0.01)
    links = [found["link_shortfall"][link] for link in ("nvlink", "pcie5-x16", "cxl2")]
    assert links == pytest.approx(shortfalls, rel=1e-2)
    assert "to be read in every step of 10 ms" in " ".join(run(*words, "--step-time", "0.01 s").stdout.split())


def test_a_device_that_was_measured_is_printed_with_its_copied_rate() -> None:
    assert "H100: 79.6 GiB, 3,350 GB/s (copies reach 3,018)" in run(*SIZES, "--device", "H100").stdout
    assert "copies reach" not in run(*SIZES, "--device", "A100").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*SIZES, "--step-time", "10"), "--step-time '10': write a time above 0 with its unit"),
        ((*SIZES, "--step-time", "0ms"), "--step-time '0ms': write a time above 0"),
        (("--layers", "28"), "missing: --kv-heads, --head-dim, --params"),
        (("--layers", "0", *SIZES[2:]), "layers must be above 0"),
        ((*SIZES[:-1], "nan"), "params must be a number"),
        ((*SIZES, "--device", "H1000"), "unknown device 'H1000': the closest are H100"),
        ((*SIZES, "--context", "8k,x"), "--context '8k,x'"),
        ((*SIZES, "--batch", "0"), "--batch '0'"),
        ((*SIZES, "--memory", "much"), "'much' is not a size"),
        ((*SIZES, "--kv", "int44"), "int44"),
        (("nonesuch",), "no model 'nonesuch' here"),
    ],
)
def test_bad_input_is_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    refusal = run(*words).exception
    assert isinstance(refusal, FidelabError)  # which main() prints, with exit code 2
    assert said in str(refusal)
    assert len(str(refusal).splitlines()) == 1
