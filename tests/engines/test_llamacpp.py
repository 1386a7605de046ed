"""Engine llamacpp: what it refuses, what it says of itself, and its answers against llama-cpp-python's own."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import hadamard
from scipy.special import logsumexp

from fidelab import compare
from fidelab.captures.container import to_float32
from fidelab.captures.requests import Forced, Generate, Prefill
from fidelab.config.experiment import validate
from fidelab.core import Arm, KVSpec, Status
from fidelab.core.errors import EngineError, NotSupportedError, UsageError
from fidelab.engines.base import Engine
from fidelab.engines.hf.adapter import HFEngine
from fidelab.engines.llamacpp.adapter import LlamaCppEngine
from fidelab.engines.llamacpp.head import LlamaHead
from fidelab.engines.llamacpp.library import GGML_TYPES, LlamaModel, SeenCache, _native, function
from fidelab.engines.llamacpp.proof import CacheSide, decoded, proof, read_state
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import Model, resolve
from fidelab.models.gguf import Header, head_sizes, read_header
from fidelab.models.weights import file_sha256
from fidelab.plan.arms import resolve_arm
from fidelab.results.record import RuntimeRecord
from tests.engines.tiny import Answers
from tests.models import tiny_gguf
from tests.models.tiny_gguf import HEADS, HIDDEN, write_gguf
from tests.present import present

HEAD_DIM = HIDDEN // HEADS  # one layer, one head of keys and values
_ALLOCATED = re.compile(r"llama_kv_cache: size = +([\d.]+) MiB")
BAD = 40  # a token of the tiny file whose embedding is made NaN
TEXT = (
    "In 1969, two people walked on the Moon; 600,000,000 watched.  «Née» café, naïve — 你好 🙂\n\n\tdef f(x):\n"
    "        return x**2 + 10\nWe'll don't 3.14159 a  b   c\r\n<|im_start|>user"
)
BLOCKED = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4")
SHAPES: dict[str, dict[str, tuple[int, ...] | None]] = {  # of tensors that an architecture has besides those of llama
    "gemma2": {f"blk.0.post_{name}_norm.weight": (HIDDEN,) for name in ("attention", "ffw")},
    "command-r": {"blk.0.ffn_norm.weight": None},
}
PROMPTS = ("The capital of France is", "Once upon a time there was a very small mouse who lived in", "1, 2, 3, 4,")


def asked(path: Path, kv: str = "f16", dtype: str = "bfloat16", **options: str) -> Arm:
    named = tuple(sorted((key.replace("_", "-"), value) for key, value in options.items()))
    return Arm(kv, "llamacpp", path.name, str(path), "0" * 8, KVSpec.parse(kv), dtype, "cpu", 1, named)


def opened(path: Path, kv: str = "f16", **options: str) -> LlamaCppEngine:
    engine = LlamaCppEngine()
    engine.open(asked(path, kv, **options))
    return engine


def rows(answers: Answers, item: int) -> NDArray[np.float64]:
    """The log-probabilities that an item's rows stand for."""
    arrays = answers.items[item]
    if "logprobs" in arrays:
        return to_float32(arrays["logprobs"]).astype(np.float64)
    cap, head = answers.head["softcap"], to_float32(answers.head["weight"])
    logits = (to_float32(arrays["hidden"]) @ head.T).astype(np.float64) * answers.head["scale"]
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    return np.asarray(logits - logsumexp(logits, axis=-1, keepdims=True))


def encoded(kind: str) -> Callable[[NDArray[np.float32]], tuple[NDArray[Any], gguf.GGMLQuantizationType]]:
    """What stores a matrix in one of ggml's types, by its own quantizer."""
    number = gguf.GGMLQuantizationType[kind]

    def encode(matrix: NDArray[np.float32]) -> tuple[NDArray[Any], gguf.GGMLQuantizationType]:
        values, size = gguf.GGML_QUANT_SIZES[number]
        blocks = np.empty((len(matrix), matrix.shape[1] // values * size), dtype=np.uint8)
        if kind == "F32":
            return matrix, number
        sizes = (ctypes.c_int64,) * 3
        quantize = function(
            "ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, *(ctypes.c_void_p,) * 2, *sizes, ctypes.c_void_p
        )
        quantize(int(number), matrix.ctypes.data, blocks.ctypes.data, 0, *matrix.shape, None)
        return blocks, number

    return encode


def ids(answers: Answers, item: int) -> list[int]:
    return [int(token) for token in np.asarray(answers.items[item]["ids"])]


def answered(engine: Engine, request: Prefill | Generate | Forced) -> Answers:
    answers = Answers()
    answers.take(engine.answer(request, answers))
    return answers


def prefill(*windows: tuple[int, ...], first: int = 0) -> Prefill:
    last = len(windows[0]) - 2
    return Prefill("kld", windows, first, last, tuple((0,) * (last - first + 1) for _ in windows))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"flash_atn": "on"}, "no option 'flash-atn'; did you mean flash-attn"),
        ({"spec_type": "ngram-simple"}, "spec-type cannot be set here: llama.cpp decodes without drafts here"),
        ({"model_draft": "m"}, "model-draft cannot be set here: llama.cpp decodes without drafts here"),
        ({"flash_attn": "perhaps"}, "flash-attn='perhaps' is not on, off or auto"),
        ({"n_gpu_layers": "-2"}, "n-gpu-layers='-2' is not a number of layers"),
        ({"n_batch": "0"}, "n-batch='0' is not a number of tokens"),
        ({"n_ubatch": "many"}, "n-ubatch='many' is not a number of tokens"),
    ],
)
def test_an_impossible_option_is_named_with_what_there_is(option: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        LlamaCppEngine.supports(asked(Path("m.gguf"), **option))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("kv", "sizes", "reason"),
    [
        ("q8_0", ({80}, {80}), "heads of 80 are no multiple of q8_0's block of 32"),
        ("f16/q4_0", ({64}, {80}), "heads of 80 are no multiple of q4_0's block of 32"),
        ("f16/q4_0", ({80}, {64}), None),
        ("q8_0", ({64, 128}, {96}), None),
        ("f16", ({80}, {80}), None),
    ],
)
def test_heads_that_no_block_divides_are_named(kv: str, sizes: tuple[set[int], set[int]], reason: str | None) -> None:
    assert LlamaCppEngine.refuses_heads(KVSpec.parse(kv), *sizes) == reason


def test_sizes_of_heads_are_those_of_the_file(tmp_path: Path) -> None:
    assert head_sizes(read_header(write_gguf(tmp_path / "tiny.gguf"))) == ({HEAD_DIM}, {HEAD_DIM})
    numbers = {"key_length": 80, "key_length_swa": 64, "value_length": [96, 128]}  # sliding layers, and one per layer
    metadata = {"general.architecture": "a", **{f"a.attention.{name}": value for name, value in numbers.items()}}
    assert head_sizes(Header(metadata, (), 0)) == ({80, 64}, {96, 128})


def test_the_kernel_of_automatic_flash_attention_is_known_where_both_lose_nothing() -> None:
    found = [LlamaCppEngine.lossless(asked(Path("m"), kv, flash_attn="auto")) for kv in ("f32", "f16", "q8_0")]
    assert found == [True, None, False]


def test_formats_take_no_options() -> None:
    for kv in ("q8_0[group=32]", "f16/q8_0[scale=per-head]"):
        with pytest.raises(UsageError, match="formats of engine llamacpp take no options"):
            LlamaCppEngine.check_kv(KVSpec.parse(kv))
    with pytest.raises(UsageError, match="no skip-layers"):
        LlamaCppEngine.check_kv(KVSpec.parse("q8_0[skip-layers=0]"))


def test_a_folder_of_safetensors_and_float32_are_refused_with_the_way_that_works() -> None:
    verdict = LlamaCppEngine.supports(asked(Path("/models/llama")))
    assert (verdict.ok, "pass the path of a .gguf file" in verdict.reason) == (False, True)
    oks = [LlamaCppEngine.supports(asked(Path("m.gguf"), dtype=dtype)).ok for dtype in ("float32", "float16")]
    assert oks == [False, True]


@pytest.mark.parametrize(
    ("kv", "flash", "ok"),
    [("q8_0", "on", True), ("q8_0", "off", False), ("f16/q4_0", "off", False), ("q8_0/f16", "off", True)],
)
def test_values_of_less_than_16_bits_need_flash_attention(kv: str, flash: str, ok: bool) -> None:
    assert LlamaCppEngine.supports(asked(Path("m.gguf"), kv, flash_attn=flash)).ok is ok


@pytest.mark.parametrize(
    ("reference", "control"),
    [("f16", "bf16"), ("f32", "bf16"), ("f32/f16", "bf16"), ("bf16", None), ("f16/q8_0", None)],
)
def test_the_control_of_a_wide_reference_takes_the_path_of_the_quantized(reference: str, control: str | None) -> None:
    assert LlamaCppEngine.control_for(KVSpec.parse(reference), "bf16") == control


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fidelab.engines.llamacpp.adapter.versions_of", lambda *_names: {})
    with pytest.raises(EngineError, match=r"pip install 'fidelab\[llamacpp\]'"):
        LlamaCppEngine.versions()


def test_captures_of_another_build_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fidelab.engines.llamacpp.adapter.versions_of", lambda name: {name: "1.0"})
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    monkeypatch.delenv("LLAMA_ATTN_ROT_DISABLE", raising=False)
    seen = [LlamaCppEngine.versions()]
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    seen.append(LlamaCppEngine.versions())
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    with pytest.raises(EngineError, match="holds no library"):
        LlamaCppEngine.versions()
    for content in (b"one", b"two"):
        (tmp_path / "libllama.so").write_bytes(content)
        seen.append(LlamaCppEngine.versions())
    assert len({tuple(found.items()) for found in seen}) == 4


CACHE = (
    "llama_kv_cache: size = {} MiB (   512 cells,  {} layers,  1/1 seqs), K ({}):    2.99 MiB, V ({}):    2.99 MiB\n"
)


def test_what_the_log_says_is_read_and_nothing_is_made_up() -> None:
    sliding = ["llama_context: flash_attn            = enabled\n", CACHE.format(1, 4, "q8_0", "f16")]
    sliding += ["llama_kv_cache: attn_rot_k = 1, n_embd\n", "llama_kv_cache: attn_rot_v = 0, n_embd\n"]
    sliding += [CACHE.format(9, 20, "q8_0", "f16"), "sched_reserve: graph: nodes = 936, splits = 2, input\n"]
    assert SeenCache.read(sliding) == SeenCache("flash", "q8_0", "f16", 24, True, False, 2)
    assert SeenCache.read([CACHE.format(1, 4, "f16", "f16"), CACHE.format(1, 4, "q8_0", "f16")]).k is None
    assert SeenCache.read(["llama_context: flash_attn = auto\n"]) == SeenCache(None, None, None, None, None, None, None)


def test_the_share_of_layers_with_a_window_is_that_of_the_log() -> None:
    full, swa = (
        f"llama_kv_cache_iswa: creating {kind} KV cache, size = 512 cells\n" for kind in ("non-SWA", "    SWA")
    )
    alike = [full, CACHE.format("1.99", 4, "q8_0", "f16"), swa, CACHE.format("9.96", 20, "q8_0", "f16")]
    assert SeenCache.read(alike).windowed == 20 / 24  # of the layers, which the log does not round
    wider = [full, CACHE.format(8, 4, "q8_0", "f16"), swa, CACHE.format(10, 20, "q8_0", "f16")]
    assert SeenCache.read(wider).windowed == 10 / 18
    assert SeenCache.read([CACHE.format(1, 4, "f16", "f16")]).windowed == 0


@pytest.fixture
def tiny_model(tmp_path: Path, cache: Path) -> Model:
    return resolve(str(write_gguf(tmp_path / "tiny.gguf")))


@pytest.mark.parametrize("engine", [LlamaCppEngine, HFEngine])
def test_an_arm_names_the_form_that_its_engine_loads(engine: type[Engine], tiny_model: Model) -> None:
    data = {"model": tiny_model.name, "engine": engine.name, "reference": "f16", "candidates": ["q8_0"]}
    experiment = validate(data, "test")
    arm = resolve_arm(experiment, experiment.reference, tiny_model)
    file = Path(tiny_model.name)
    expected = (file, file_sha256(file)) if engine is LlamaCppEngine else (tiny_model.path, tiny_model.weights)
    assert (Path(arm.path), arm.weights) == expected


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny file with a head of its own, and with one token whose embedding is NaN."""
    from gguf import GGUFReader

    tied = tiny_gguf._shapes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_gguf, "_shapes", lambda v: {**tied(v), "output.weight": (v, HIDDEN)})
        path = write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    table = next(t for t in GGUFReader(path, "r+").tensors if t.name == "token_embd.weight")
    table.data[BAD] = np.nan
    return path


@pytest.mark.llamacpp
@pytest.mark.parametrize("name", GGML_TYPES)
def test_types_have_ggmls_numbers_and_sizes(name: str) -> None:
    from llama_cpp._ggml import libggml

    number, per_block, size = GGML_TYPES[name]
    type_name: Any = libggml.ggml_type_name
    type_name.restype = ctypes.c_char_p
    libggml.ggml_type_size.restype = ctypes.c_size_t
    libggml.ggml_blck_size.restype = ctypes.c_int64
    found = (type_name(number).decode(), libggml.ggml_blck_size(number), libggml.ggml_type_size(number))
    assert found == (name, per_block, size)


@pytest.mark.llamacpp
@pytest.mark.parametrize(("kv", "size"), [("f16", 4), ("f32", 8), ("bf16", 4), ("f32/f16", 6), ("f16/f32", 6)])
def test_the_cache_is_weighed(kv: str, size: int, tiny: Path) -> None:
    ran = opened(tiny, kv).runtime_info()
    assert (ran.cache_bytes_per_token, ran.expected_bytes_per_token) == (size * HEAD_DIM, size * HEAD_DIM)
    assert (ran.k_format, ran.v_format) == (str(KVSpec.parse(kv).k), str(KVSpec.parse(kv).v))
    assert (ran.kv_layers, ran.attention, ran.more["k_rotated"]) == (1, "flash", False)
    assert opened(tiny, flash_attn="off").runtime_info().attention == "standard"


@pytest.mark.llamacpp
@pytest.mark.parametrize("architecture", ["llama", "smollm3"])
def test_a_files_text_is_tokenized_as_llama_cpp_does_whatever_its_architecture(
    architecture: str, tmp_path: Path, cache: Path
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", architecture=architecture)
    text = "a  b\n\n\tc   22 Ünï 汉字 🙂 x<|im_end|>y"
    assert opened(file).tokenize(text) == list(Tokenizer.load(resolve(str(file))).encode(text))


@pytest.mark.llamacpp
def test_a_file_that_llama_cpp_cannot_load_gives_one_line(tiny: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-4096])
    with pytest.raises(EngineError) as caught:
        opened(cut)
    said = str(caught.value)
    assert said.startswith("llama.cpp cannot load")
    assert "no reason" not in said
    assert "\n" not in said


@pytest.mark.llamacpp
def test_settings_that_the_bindings_lack_and_formats_that_the_model_cannot_have_are_refused(tiny: Path) -> None:
    with pytest.raises(EngineError, match="has no n_layers_on_the_moon"):
        LlamaModel(str(tiny), n_layers_on_the_moon=1)
    with pytest.raises(EngineError, match="cannot make a context"):
        opened(tiny, "q8_0")  # blocks of 32, heads of 16


@pytest.mark.llamacpp
@pytest.mark.parametrize(
    ("options", "overridden"),
    [
        ({"override_tensor": r"blk\.0\.ffn_(up|down)=CPU"}, {"blk.0.ffn_up.weight", "blk.0.ffn_down.weight"}),
        ({"n_cpu_ffn": "1"}, {f"blk.0.ffn_{name}.weight" for name in ("up", "down", "gate")}),
        ({"n_cpu_moe": "20"}, set()),  # a dense model
        ({"cpu_moe": "yes"}, set()),
    ],
)
def test_tensors_are_overridden_as_the_arm_says_and_the_rows_stay(
    options: dict[str, str], overridden: set[str], tiny: Path
) -> None:
    plain = answered(opened(tiny), prefill((5, 6, 7, 8, 9)))
    native, log = _native()
    lines: list[str] = []

    def hear(level: int, text: bytes, data: Any) -> None:
        lines.append(text.decode(errors="replace"))
        log.hear(level, text, data)

    heard = native.llama_log_callback(hear)
    native.llama_log_set(heard, ctypes.c_void_p(0))
    try:
        engine = opened(tiny, **options)
    finally:
        native.llama_log_set(log.callback, ctypes.c_void_p(0))
    moved = {line.split()[1] for line in lines if "overridden" in line}
    assert moved == overridden
    rows = answered(engine, prefill((5, 6, 7, 8, 9)))
    assert np.array_equal(np.asarray(rows.items[0]["hidden"]), np.asarray(plain.items[0]["hidden"]))


@pytest.mark.llamacpp
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_split": "3,1", "split_mode": "layer", "main_gpu": "0"},
        {"numa": "distribute"},
        {"devices": "none"},
        {"no_host": "yes", "kv_unified": "yes", "swa_full": "yes"},
        {"offload_kqv": "no", "op_offload": "no"},
        {"override_kv": "tokenizer.ggml.add_bos_token=bool:false,general.name=str:x"},
    ],
)
def test_placement_is_passed_on_and_changes_no_row_on_a_cpu(options: dict[str, str], tiny: Path) -> None:
    plain, placed = (answered(opened(tiny, **each), prefill((5, 6, 7, 8, 9))) for each in ({}, options))
    assert np.array_equal(np.asarray(placed.items[0]["hidden"]), np.asarray(plain.items[0]["hidden"]))


@pytest.mark.llamacpp
def test_checked_tensors_are_refused_for_a_nan(tiny: Path) -> None:
    with pytest.raises(EngineError, match="has invalid data"):
        opened(tiny, check_tensors="yes")


@pytest.mark.llamacpp
def test_overridden_metadata_is_what_llama_cpp_computes_with(tiny: Path) -> None:
    plain = answered(opened(tiny), prefill((5, 6, 7, 8, 9)))
    other = answered(opened(tiny, override_kv="llama.rope.freq_base=float:10"), prefill((5, 6, 7, 8, 9)))
    assert not np.array_equal(np.asarray(other.items[0]["hidden"]), np.asarray(plain.items[0]["hidden"]))


@pytest.mark.llamacpp
@pytest.mark.parametrize(("kv", "flash"), [("f16", "flash"), ("f32", "flash")])
def test_automatic_flash_attention_reports_what_llama_cpp_chose(kv: str, flash: str, tiny: Path) -> None:
    assert opened(tiny, kv, flash_attn="auto").runtime_info().attention == flash


@pytest.mark.llamacpp
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"devices": "CUDA77"}, "this build has no device 'CUDA77'; it has"),
        ({"override_tensor": "a=CUDA77"}, "this build has no buffer 'CUDA77'; it has CPU"),
        ({"tensor_split": ",".join("1" * 99)}, "tensor-split has 99 shares, and this build"),
    ],
)
def test_a_place_that_this_build_lacks_is_named_with_those_that_it_has(
    options: dict[str, str], said: str, tiny: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        opened(tiny, **options)


@pytest.mark.llamacpp
def test_a_build_without_a_gpu_ignores_layers_for_it_and_says_so(tiny: Path) -> None:
    from llama_cpp import llama_supports_gpu_offload

    if llama_supports_gpu_offload():
        pytest.skip("this build computes on a GPU")
    ran = opened(tiny, n_gpu_layers="99").runtime_info()
    assert ran.more["n_gpu_layers"] == "ignored: this build has no GPU"
    assert "n_gpu_layers" not in opened(tiny).runtime_info().more


@pytest.mark.llamacpp
def test_the_gpu_is_not_silently_replaced(tiny: Path) -> None:
    from llama_cpp import llama_supports_gpu_offload

    if llama_supports_gpu_offload():
        pytest.skip("this build computes on a GPU")
    with pytest.raises(NotSupportedError, match="--device cpu"):
        LlamaCppEngine().open(replace(asked(tiny), device="cuda"))


@pytest.mark.llamacpp
def test_a_nan_fails_its_own_item_and_no_other(tiny: Path) -> None:
    engine = opened(tiny)
    prompts = ((5, 6, 7), (8, BAD, 9), (10, 11))
    together = answered(engine, Generate("trajectory", prompts, 6, (), 3))
    alone = answered(engine, Generate("trajectory", (prompts[0], prompts[2]), 6, (), 1))
    assert together.failed == {1: "NaN logits at generated token 0"}
    assert [ids(together, 0), ids(together, 2)] == [ids(alone, 0), ids(alone, 1)]


@pytest.mark.llamacpp
@pytest.mark.parametrize("flash", ["on", "off"])
def test_a_nan_window_does_not_reach_the_next_one(flash: str, tiny: Path) -> None:
    window = tuple(range(50, 60))
    longer = (*range(50, 90), BAD)  # its last cell is not written again
    answers = answered(opened(tiny, flash_attn=flash), prefill(window, longer, window))
    assert np.isfinite(rows(answers, 0)).all()
    np.testing.assert_array_equal(rows(answers, 2), rows(answers, 0))


@pytest.mark.llamacpp
def test_windows_in_small_calls_give_the_same_rows(tiny: Path) -> None:
    window = tuple(41 + i % 200 for i in range(90))
    whole, parts = (answered(opened(tiny, n_batch=n), prefill(window, first=10)) for n in ("512", "7"))
    assert rows(whole, 0).shape == (79, 261)
    # From 64 tokens on another kernel computes attention; a token at a wrong place changes its rows by several nats.
    np.testing.assert_allclose(rows(parts, 0), rows(whole, 0), atol=0.2)
    assert parts.tokens == whole.tokens == 90


PLACES = ((3, 30, 88), (0, 41))
DEPTHS = Prefill(
    "kld",
    (tuple(41 + i % 200 for i in range(90)), tuple(45 + i for i in range(51))),
    0,
    88,
    ((0,) * 3, (0,) * 2),
    positions=PLACES,
)


@pytest.mark.llamacpp
@pytest.mark.parametrize("options", [{}, {"n_batch": "16"}, {"estimator": "logprobs"}])
def test_rows_at_given_positions_are_those_of_the_whole_window(tiny: Path, options: dict[str, str]) -> None:
    found = answered(opened(tiny, **options), DEPTHS)
    for item, (window, own) in enumerate(zip(DEPTHS.windows, PLACES, strict=True)):
        whole = rows(answered(opened(tiny, **options), prefill(window)), 0)
        # Sums in float32 in another order, by processor: logits of 30 differ by 5e-6; another row by whole units
        np.testing.assert_allclose(rows(found, item), whole[list(own)], rtol=1e-6, atol=2e-5)


@pytest.mark.llamacpp
def test_memory_that_does_not_suffice_costs_the_deeper_rows_alone(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, plain = opened(tiny), answered(opened(tiny), DEPTHS)
    context = engine._context

    def small(cells: int, *more: Any, **named: Any) -> Any:
        if cells > 64:
            raise EngineError("llama.cpp cannot make a context")
        return context(cells, *more, **named)

    monkeypatch.setattr(engine, "_context", small)
    found = answered(engine, DEPTHS)
    assert found.facts["cut_short"] == {"0": 2}
    assert np.isnan(rows(found, 0)[2]).all()
    np.testing.assert_allclose(rows(found, 0)[:2], rows(plain, 0)[:2], atol=0.2)  # from 64 tokens on another kernel
    np.testing.assert_allclose(rows(found, 1), rows(plain, 1), rtol=1e-6, atol=2e-5)


@pytest.mark.llamacpp
def test_no_sequence_of_a_batch_runs_out_of_room(tmp_path: Path) -> None:
    prompts = tuple(tuple(41 + (i + n) % 200 for i in range(n)) for n in (200, 201, 190))
    engine = opened(write_gguf(tmp_path / "tiny.gguf"))
    answers = answered(engine, Generate("trajectory", prompts, 90, (), 3, rows=False))
    assert [len(ids(answers, i)) for i in range(3)] == [90, 90, 90]
    assert answers.failed == {}


@pytest.mark.llamacpp
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *BLOCKED])
def test_states_and_every_type_of_head_give_the_live_rows(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_gguf, "HIDDEN", 256)  # the block of the k-quants
    path = write_gguf(tmp_path / "tiny.gguf", stored={"token_embd.weight": encoded(kind)})
    window = tuple(41 + i % 200 for i in range(90))
    states = answered(opened(path), prefill(window, first=60))
    live = answered(opened(path, estimator="logprobs"), prefill(window, first=60))
    assert (*states.items[0], *live.items[0]) == ("hidden", "logprobs")
    assert states.facts["sentinel_kl"] < (1e-5 if kind in ("Q4_1", "Q5_1") else 1e-9)
    np.testing.assert_allclose(rows(states, 0), rows(live, 0), rtol=2**-11, atol=0.05)


@pytest.mark.llamacpp
@pytest.mark.parametrize(
    ("architecture", "numbers"),
    [
        ("granite", {"logit_scale": 7.0}),
        ("command-r", {"logit_scale": 0.3}),
        ("gemma2", {"final_logit_softcapping": 4.0}),
    ],
)
def test_scale_and_softcap_of_an_architecture_are_replayed(
    architecture: str, numbers: dict[str, float], tmp_path: Path
) -> None:
    numbers |= {"attention.layer_norm_epsilon": 1e-5}
    path = write_gguf(
        tmp_path / "tiny.gguf", architecture=architecture, numbers=numbers, changed=SHAPES.get(architecture)
    )
    window = tuple(41 + i % 200 for i in range(50))
    states, live = (answered(opened(path, estimator=name), prefill(window)) for name in ("hidden", "logprobs"))
    np.testing.assert_allclose(rows(states, 0), rows(live, 0), rtol=2**-11, atol=0.05)


@pytest.mark.llamacpp
def test_a_head_that_does_not_replay_the_logits_fails_with_what_to_do(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaHead, "rounded", lambda _head, states: states * np.float32(1.01))
    with pytest.raises(EngineError, match=r"does not replay .*: pass --engine-arg estimator=logprobs"):
        answered(opened(tiny), prefill(tuple(range(50, 60))))


@pytest.mark.llamacpp
def test_a_stop_id_ends_a_sequence_and_is_part_of_it(tiny: Path) -> None:
    engine, prompts = opened(tiny), ((5, 6, 7), (10, 11))
    free = ids(answered(engine, Generate("trajectory", prompts, 8, ())), 0)
    stop = free[3]
    answers = answered(engine, Generate("trajectory", prompts, 8, (stop,)))
    assert ids(answers, 0) == free[: free.index(stop) + 1]
    assert len(rows(answers, 0)) == len(ids(answers, 0))


@pytest.mark.llamacpp
def test_rows_are_kept_only_where_asked_for_and_an_empty_continuation_fails_alone(tiny: Path) -> None:
    answers = answered(opened(tiny), Generate("rniah", ((5, 6),), 3, (), rows=False))
    assert list(answers.items[0]) == ["ids"]
    answers = answered(opened(tiny), Forced("forced", ((5, 6), (5, 7)), ((), (8, 9))))
    assert answers.failed == {0: "empty continuation"}
    assert rows(answers, 1).shape[0] == 2


BLOCKS = ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
GIVEN = np.random.default_rng(5).standard_normal((4, 128)).astype(np.float32)


def side(name: str, values: NDArray[np.float32] = GIVEN) -> CacheSide:
    """As llama.cpp stores rows, by gguf's quantizers."""
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name.upper()])
    return CacheSide(GGML_TYPES[name][0], raw.view(np.uint8).reshape(len(values), -1))


def answers_of(k: CacheSide, v: CacheSide, asked: str, rotated: bool = False) -> tuple[str, str]:
    exact = side("f32"), side("f32")
    found = proof((asked, asked), (k, v), exact, (rotated, rotated), {"k": {asked}, "v": {asked}})
    assert found["received"] == "shown"
    return found["stored"], found["named"]


@pytest.mark.parametrize("name", [*BLOCKS, "iq4_nl"])
def test_stored_blocks_are_decoded_as_gguf_does(name: str) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (9, 4 * GGML_TYPES[name][2]), dtype=np.uint8)
    raw.reshape(9, 4, -1)[:, :, 1::2][:, :, :2] &= 0x3F  # no infinite headers
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name.upper()])
    np.testing.assert_array_equal(decoded(raw, name), expected)


@pytest.mark.parametrize("name", [*BLOCKS, "f32", "f16", "bf16"])
@pytest.mark.parametrize("turn", [1, 64])
def test_rows_that_hold_what_came_prove_their_type_rotated_or_not(name: str, turn: int) -> None:
    matrix = hadamard(turn).astype(np.float64) / np.sqrt(turn)
    turned = (GIVEN.reshape(-1, turn).astype(np.float64) @ matrix).reshape(GIVEN.shape).astype(np.float32)
    if turn > 1 and name == "f32":
        pytest.skip("llama.cpp rotates nothing that it does not quantize; float32 would have to agree bit by bit")
    assert answers_of(side(name, turned), side(name, turned), name, turn > 1) == ("shown", "shown")


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_of_other_keys_are_not_what_came_and_what_rounding_a_blocks_scale_adds_is(name: str) -> None:
    many = np.random.default_rng(6).standard_normal((4000, 128)).astype(np.float32)
    held, exact = side(name, many), side("f32", many)
    found = proof((name, name), (held, held), (exact, exact), (False, False), {"k": {name}, "v": {name}})
    assert (found["stored"], found["named"]) == ("shown", "shown")
    stored, named = answers_of(side(name), side(name, np.roll(GIVEN, 1, axis=0)), name)
    assert (stored, named) == (
        f"refuted: values of the first layer are not those that came, as {name} has them",
        "shown",
    )


@pytest.mark.parametrize(("name", "other"), [("iq4_nl", "q4_0"), ("f16", "bf16"), ("q8_0", "q4_0"), ("f32", "f16")])
def test_rows_of_another_type_are_named_although_they_are_called_as_asked(name: str, other: str) -> None:
    called = CacheSide(GGML_TYPES[name][0], side(other).rows)
    _, named = answers_of(called, side("f32"), name)
    assert named == f"refuted: keys of the first layer are {other}, not {name}"


def test_another_type_in_a_later_layer_is_named() -> None:
    for name in ("f16", "bf16", "q8_0", "f32"):
        alike = replace(side(name), kinds=frozenset({GGML_TYPES[name][0]}))
        assert answers_of(alike, alike, name) == ("shown", "shown")
    held = replace(side("q8_0"), kinds=frozenset({GGML_TYPES["q8_0"][0], GGML_TYPES["f16"][0]}))
    _, named = answers_of(held, side("q8_0"), "q8_0")
    assert named == "refuted: keys of some layers are f16, not q8_0"


def test_a_state_of_another_layout_leaves_both_questions_open() -> None:
    assert read_state(bytes(400), 4, 1) is None
    found = proof(("q8_0", "q8_0"), None, None, (False, False), {"k": set(), "v": set()})
    assert found["stored"] == found["named"] == "open: the saved state has a layout that is not known"


@pytest.mark.llamacpp
@pytest.mark.parametrize("flash", ["on", "off"])
@pytest.mark.parametrize("kv", ["f32", "f16", "bf16", "f32/bf16"])
def test_the_saved_state_shows_what_the_cache_holds(kv: str, flash: str, tiny: Path) -> None:
    found = opened(tiny, kv, flash_attn=flash).runtime_info().more["proof"]
    assert (found["stored"], found["named"]) == ("shown", "shown")
    if flash == "on" and kv.startswith("f32"):
        assert found["received"] == "open: the graph reads keys as f16"  # a copy is made for flash attention
    else:
        assert found["received"] == "shown"


@pytest.mark.parametrize(
    ("kv", "flash", "lossless"),
    [("f32", "on", True), ("f16", "on", True), ("f16", "off", False), ("bf16", "on", False), ("f16/q8_0", "on", False)],
)
def test_flash_attention_reads_float16_whatever_holds_it(kv: str, flash: str, lossless: bool) -> None:
    assert LlamaCppEngine.lossless(asked(Path("m.gguf"), kv, flash_attn=flash)) is lossless


@pytest.fixture(scope="module")
def smollm(smollm2: Model) -> Path:
    assert smollm2.gguf is not None
    return smollm2.gguf


@pytest.fixture(scope="module")
def prompts(smollm2: Model) -> tuple[tuple[int, ...], ...]:
    return tuple(Tokenizer.load(smollm2).encode(text) for text in PROMPTS)


@pytest.fixture(scope="module")
def theirs(smollm: Path) -> Iterator[Callable[[], Any]]:
    """llama-cpp-python's own class, at its own settings but for flash attention and one thread."""
    from llama_cpp import Llama

    made = Llama(
        str(smollm), n_ctx=256, n_threads=1, n_threads_batch=1, flash_attn=True, logits_all=True, verbose=False
    )

    def reset() -> Any:
        made.reset()
        return made

    yield reset
    made.close()


@pytest.mark.llamacpp
@pytest.mark.model
def test_tokens_are_those_of_the_parents_tokenizer(smollm: Path, smollm2: Model) -> None:
    assert opened(smollm).tokenize(TEXT) == list(Tokenizer.load(smollm2).encode(TEXT))


@pytest.mark.llamacpp
@pytest.mark.model
def test_rows_are_the_log_softmax_of_llama_cpps_logits(
    smollm: Path, prompts: tuple[tuple[int, ...], ...], theirs: Callable[[], Any]
) -> None:
    llama = theirs()
    llama.eval(list(prompts[1]))
    logits = llama.scores[: len(prompts[1]) - 1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    found = rows(answered(opened(smollm), prefill(prompts[1])), 0)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    stored = rows(answered(opened(smollm, estimator="logprobs"), prefill(prompts[1])), 0)
    np.testing.assert_allclose(stored, expected, rtol=2**-11, atol=1e-4)  # half a unit in the last place of float16


@pytest.mark.llamacpp
@pytest.mark.model
def test_greedy_tokens_are_llama_cpps_own(
    smollm: Path, prompts: tuple[tuple[int, ...], ...], theirs: Callable[[], Any]
) -> None:
    answers = answered(opened(smollm), Generate("trajectory", prompts[:2], 16, (), 2, rows=False))
    for item, prompt in enumerate(prompts[:2]):
        tokens = theirs().generate(list(prompt), temp=0.0, repeat_penalty=1.0)
        assert ids(answers, item) == [token for token, _ in zip(tokens, range(16), strict=False)]


@pytest.mark.llamacpp
@pytest.mark.model
@pytest.mark.parametrize("kv", ["f16", "q8_0", "f16/q4_0"])
def test_a_batch_gives_what_its_prompts_give_one_by_one_and_forced_decoding_the_same(
    kv: str, smollm: Path, prompts: tuple[tuple[int, ...], ...]
) -> None:
    engine = opened(smollm, kv)
    together = answered(engine, Generate("trajectory", prompts, 12, (), 3))
    alone = answered(engine, Generate("trajectory", prompts, 12, (), 1))
    given = tuple(tuple(ids(alone, i)) for i in range(3))
    forced = answered(engine, Forced("forced", prompts, given))
    assert (engine.runtime_info().k_format, engine.runtime_info().v_format) == (
        str(KVSpec.parse(kv).k),
        str(KVSpec.parse(kv).v),
    )
    for item in range(3):
        assert ids(together, item) == ids(alone, item)
        np.testing.assert_array_equal(rows(forced, item), rows(alone, item))
        np.testing.assert_allclose(rows(together, item), rows(alone, item), atol=0.05)


@pytest.mark.llamacpp
@pytest.mark.model
@pytest.mark.parametrize(
    ("kv", "size"), [("q8_0", 12_240), ("q5_1", 8_640), ("q5_0", 7_920), ("q4_1", 7_200), ("iq4_nl/q4_0", 6_480)]
)
def test_the_bytes_of_block_formats_are_those_of_their_blocks(kv: str, size: int, smollm: Path) -> None:
    ran, spec = opened(smollm, kv).runtime_info(), KVSpec.parse(kv)
    assert (ran.cache_bytes_per_token, ran.expected_bytes_per_token) == (size, size)
    assert (ran.k_format, ran.v_format, ran.kv_layers) == (str(spec.k), str(spec.v), 30)


@pytest.mark.llamacpp
@pytest.mark.model
def test_a_run_tells_twins_format_loss_and_control_apart(tmp_path: Path) -> None:
    report = compare(
        "smollm2-135m",
        engine="llamacpp",
        reference="f16",
        candidates=["f16", "q8_0", "q4_0"],
        axes={"kld": {"windows": 3, "n_ctx": 64}},
        threads=1,
        floor=0,
        output_dir=str(tmp_path),
    )
    assert report.control is not None
    assert report.control.name == "bf16"
    twin, q8, q4 = report.candidates
    assert twin.status is Status.IDENTICAL
    klds = [arm.axes["kld"].value("mean") or 0.0 for arm in (q8, q4)]
    assert 1e-4 < klds[0] < klds[1] < 1.0


@pytest.mark.llamacpp
@pytest.mark.model
@pytest.mark.parametrize("kv", ["f16", "q8_0", "f16/q4_0"])
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma-3-270m"])
def test_the_bytes_at_a_context_are_those_that_llama_cpp_allocates(name: str, kv: str) -> None:
    """By its log: ``llama_kv_cache: size = 180.00 MiB (8192 cells, 30 layers, …)``, a line per kind of layers."""
    path = present(resolve(name).gguf)
    ran, spec = RuntimeRecord.model_validate(opened(path, kv).runtime_info().record()), KVSpec.parse(kv)
    native, log = _native()
    weights = native.llama_model_load_from_file(str(path).encode(), native.llama_model_default_params())
    try:
        for tokens in (2048, 8192):
            params = native.llama_context_default_params()
            params.n_ctx, *types = tokens, *(GGML_TYPES[str(side)][0] for side in (spec.k, spec.v))
            params.type_k, params.type_v = types
            params.swa_full, params.flash_attn_type = False, 1  # as llama-server
            log.section()
            native.llama_free(native.llama_init_from_model(weights, params))
            allocated = sum(float(found[1]) for line in log.lines if (found := _ALLOCATED.search(line)))
            assert ran.bytes_of_sequence(tokens) == pytest.approx(allocated * 2**20, rel=0.01)
    finally:
        native.llama_model_free(weights)
