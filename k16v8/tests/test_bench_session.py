"""What a first session on a GPU rests on: the machine's description, the compile pool, FlashAttention 3, SGLang."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import forked
from k16v8.bench import contenders, machine, precompile, serving
from k16v8.bench.contenders import flash_attention_3, flash_attention_3_call
from k16v8.bench.precompile import units
from k16v8.bench.shapes import geometry
from k16v8.errors import NotSupportedError
from k16v8.kernels import prefill
from k16v8.kernels.reference import Attention, attend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("cuda", "driver", "line"),
    [
        (
            "13.0",
            "570.86.15",
            "torch sees no GPU: driver 570.86.15 is installed, torch 2.13.0 is built for CUDA 13.0 and needs driver "
            "580 or later; install a newer driver, or a torch for an older CUDA",
        ),
        (
            "13.0",
            "580.95.05",
            "torch sees no GPU: driver 580.95.05 is installed, torch 2.13.0 is built for CUDA 13.0 and needs driver "
            "580 or later; check CUDA_VISIBLE_DEVICES and nvidia-smi",
        ),
        (
            "12.8",
            "",
            "torch sees no GPU: no NVIDIA driver was found, torch 2.13.0 is built for CUDA 12.8 and needs driver 525 "
            "or later; run this on a machine with a GPU",
        ),
        (
            None,
            "580.95.05",
            "torch 2.13.0 is built without CUDA (driver 580.95.05 is installed): use a Python that has a CUDA build of "
            "torch",
        ),
    ],
    ids=["old driver", "hidden device", "no driver", "build without CUDA"],
)
def test_where_torch_sees_no_gpu_driver_and_cuda_are_named(cuda: str | None, driver: str, line: str) -> None:
    assert machine.no_gpu("2.13.0", cuda, driver) == line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert machine.main([]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith("k16v8: torch ")


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\nGCC 12.2.0\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)\n",
    ],
)
def test_the_drivers_version_is_read_from_the_kernel_where_nvidia_smi_is_missing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "version"
    file.write_text(text)
    monkeypatch.setattr(machine, "_DRIVER_FILE", file)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.driver_version() == "580.95.05"
    file.unlink()
    assert machine.driver_version() == ""


def test_a_device_without_fp8_types_is_noted_and_one_without_bfloat16_refused() -> None:
    assert machine.capability_notes("NVIDIA H100", "9.0") == []
    assert machine.capability_notes("NVIDIA RTX PRO 6000", "12.0") == []
    (note,) = machine.capability_notes("NVIDIA A100", "8.0")
    assert note.startswith("NVIDIA A100 (compute capability 8.0) has no FP8 types: ")
    with pytest.raises(
        NotSupportedError, match=r"^Tesla T4 has compute capability 7\.5: the kernels need 8\.0 or later"
    ):
        machine.capability_notes("Tesla T4", "7.5")


def test_the_description_of_a_machine_has_what_a_session_asks(capsys: pytest.CaptureFixture[str]) -> None:
    assert machine.main(["--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["slug"].startswith("cpu")
    assert found["page_step"] == 16
    assert found["versions"]["torch"] == metadata.version("torch")
    assert {"vllm", "sglang", "sglang-kernel", "flashinfer-python"} <= found["versions"].keys()


# As vLLM 0.32 and sglang-kernel 0.4 declare them.
_VARLEN = (
    "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k=0 seqused_k=0 q_v=0 dropout_p=0 softmax_scale=0 "
    "causal=0 window_size=0 softcap=0 alibi_slopes=0 deterministic=0 return_attn_probs=0 block_table=0 "
    "return_softmax_lse=0 out=0 scheduler_metadata=0 q_descale=0 k_descale=0 v_descale=0 num_splits=0 output_scale=0 "
    "fa_version=0 s_aux=0 cp_world_size=0 cp_rank=0 cp_tot_seqused_k=0"
)
_KVCACHE = (
    "q k_cache v_cache k=0 v=0 qv=0 rotary_cos=0 rotary_sin=0 cache_seqlens=0 cache_batch_idx=0 cache_leftpad=0 "
    "page_table=0 cu_seqlens_q=0 cu_seqlens_k_new=0 max_seqlen_q=0 rotary_seqlens=0 q_descale=0 k_descale=0 "
    "v_descale=0 softmax_scale=0 causal=0 window_size=0 softcap=0 rotary_interleaved=0 scheduler_metadata=0 "
    "num_splits=0 pack_gqa=0 sm_margin=0 return_softmax_lse=0"
)


def _declared(names: str, compute: Callable[[dict[str, Any]], Tensor]) -> Any:
    """A function of that signature."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    split = [name.partition("=") for name in names.split()]
    signature = inspect.Signature(
        [inspect.Parameter(name, kind, default=None if equal else inspect._empty) for name, equal, _ in split]
    )
    return lambda *words, **given: compute(signature.bind(*words, **given).arguments)


def _sequences(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], table: Tensor | None) -> Tensor:
    """``[B, Q, heads, D]``: causal attention of the last queries, by the definition."""
    outs = []
    for row, length in enumerate(lengths):
        keys, values = (x[row] if table is None else x[table[row].long()].flatten(0, 1) for x in (k, v))
        positions = torch.arange(length - q.shape[1], length)
        out, _ = attend(q[row].double(), keys[:length].double(), values[:length].double(), positions, Attention())
        outs.append(out)
    return torch.stack(outs).to(q.dtype)


def _of_vllm(given: dict[str, Any]) -> Tensor:
    assert (given["causal"], given["fa_version"]) == (True, 3)
    starts, queries = given["cu_seqlens_q"], given["max_seqlen_q"]
    assert starts.diff().unique().tolist() == [queries]
    q, k, v = given["q"], given["k"], given["v"]
    q = q.view(-1, queries, *q.shape[1:])
    if (table := given.get("block_table")) is None:
        lengths = given["cu_seqlens_k"].diff().tolist()
        k, v = (x.unflatten(0, (len(lengths), -1)) for x in (k, v))
    else:
        lengths = given["seqused_k"].tolist()
    assert max(lengths) == given["max_seqlen_k"]
    return _sequences(q, k, v, lengths, table).flatten(0, 1)


def _of_sglang(given: dict[str, Any]) -> Tensor:
    assert given["causal"] is True
    lengths = given["cache_seqlens"].tolist()
    return _sequences(given["q"], given["k_cache"], given["v_cache"], lengths, given.get("page_table"))


_LIBRARIES = {
    "vllm.vllm_flash_attn": {"flash_attn_varlen_func": _declared(_VARLEN, _of_vllm)},
    "sgl_kernel.flash_attn": {"flash_attn_with_kvcache": _declared(_KVCACHE, _of_sglang)},
    "flash_attn_interface": {"flash_attn_with_kvcache": _declared(_KVCACHE, _of_sglang)},
}


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = cast(Any, ModuleType(name))
    for key, value in {**_LIBRARIES[name], **content}.items():
        setattr(module, key, value)
    if "." in name:
        monkeypatch.setitem(sys.modules, name.partition(".")[0], ModuleType(name.partition(".")[0]))
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("module", _LIBRARIES)
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "pages"])
def test_flash_attention_3_is_called_by_its_signature_and_attends_to_what_lies_in_the_cache(
    module: str, queries: int, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _module(monkeypatch, module)
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, queries, 4, 8, generator=random)
    k, v = (torch.randn(2, 32, 2, 8, generator=random) for _ in "kv")
    due = _sequences(q, k, v, [32, 32], None).flatten(0, 1)
    table = None
    if paged:
        table = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32)
        pages = [torch.empty(4, 16, 2, 8) for _ in "kv"]
        for page, x in zip(pages, (k, v), strict=True):
            page[table.flatten().long()] = x.reshape(4, 16, 2, 8)
        k, v = pages
    lengths = torch.tensor([32, 32], dtype=torch.int32)
    out = flash_attention_3_call(module, q, k, v, lengths, 32, table)()
    assert torch.equal(contenders._flat(out), due)


def test_vllms_flash_attention_3_is_taken_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    _module(monkeypatch, "vllm.vllm_flash_attn", is_fa_version_supported=lambda version: version == 3)
    _module(monkeypatch, "sgl_kernel.flash_attn", is_fa3_supported=lambda device: True)
    assert flash_attention_3(CUDA) == "vllm.vllm_flash_attn"


def test_a_wheel_without_flash_attention_3_leaves_it_to_the_next_library_or_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _module(
        monkeypatch,
        "vllm.vllm_flash_attn",
        is_fa_version_supported=lambda version: False,
        fa_version_unsupported_reason=lambda version: "FA3 is unavailable due to: no _vllm_fa3_C",
    )
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(NotSupportedError) as caught:
        flash_attention_3(CUDA)
    line = "vllm.vllm_flash_attn has no FlashAttention 3 here: FA3 is unavailable due to: no _vllm_fa3_C"
    assert str(caught.value) == line
    _module(monkeypatch, "sgl_kernel.flash_attn", is_fa3_supported=lambda device: True)
    assert flash_attention_3(CUDA) == "sgl_kernel.flash_attn"


def test_a_vllm_whose_other_parts_do_not_load_leaves_flash_attention_3_to_the_next_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def supported(version: int) -> bool:
        raise ModuleNotFoundError("No module named 'vllm._C'")

    _module(monkeypatch, "vllm.vllm_flash_attn", is_fa_version_supported=supported, flash_attn_varlen_func=None)
    _module(monkeypatch, "sgl_kernel.flash_attn", is_fa3_supported=lambda device: True)
    assert flash_attention_3(CUDA) == "sgl_kernel.flash_attn"
    monkeypatch.setattr(prefill, "find_spec", lambda name: name)
    prefill.installed.cache_clear()
    assert prefill.installed().fa3 == ""
    prefill.installed.cache_clear()


def test_without_a_library_the_reason_names_packages_that_exist() -> None:
    with pytest.raises(NotSupportedError, match=r"not installed \(vLLM's CUDA wheel and sglang-kernel have it\)"):
        flash_attention_3(CPU)


def test_the_pool_covers_gates_serving_and_goal_cells_on_a_gpu_and_builds_alone_without_one() -> None:
    found = units("sm_90", device="cuda")
    kinds = {unit.kind: [one.name for one in found if one.kind == unit.kind] for unit in found}
    assert {"build", "case", "serving", "cell"} == kinds.keys()
    assert "decode bf16/fp8_e4m3 64" in kinds["build"]
    assert "decode 32/8/128 B32 T32768 16/8" in kinds["cell"]
    assert len(kinds["case"]) > 20
    assert {unit.kind for unit in units("sm_90", device="cpu")} == {"build"}
    assert units("sm_999", device="cpu") == []  # Triton knows it, the compiler's table here does not


def test_a_cell_and_a_decode_step_of_the_pool_call_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, str]] = []

    def prepare(cell: Any, pair: str, draw: Any, *, kernels: str) -> Any:
        return type("Work", (), {"call": lambda self: called.append((cell.key, pair))})()

    ours = [contenders.Contender("k16v8", pair, "ours", prepare) for pair in ("16/16", "16/8")]
    monkeypatch.setattr(
        precompile, "CONTENDERS", (*ours, contenders.Contender("sdpa-flash", "16/16", "rival", prepare))
    )
    for unit in units("", device="cuda"):
        if unit.kind == "cell":
            precompile.compile_unit(unit, "", "cpu")
    assert len(called) == len(set(called)) == 16
    assert ("decode 28/4/128 B1 T32768", "16/8") in called


_POOL = """
import json
import os
from pathlib import Path
from k16v8.bench.precompile import Unit, compile_all

if __name__ == "__main__":
    names = ("write bf16/fp8_e4m3 16", "schedule bf16/fp8_e4m3 16", "no a/b 16")
    asked = [Unit("build", name) for name in names]
    for workers in (2, 1):
        print(json.dumps(compile_all(asked, "sm_90", "cpu", workers=workers)))
        print(json.dumps(sorted(path.name for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))))
"""


def test_processes_of_the_pool_write_one_triton_cache_and_name_what_does_not_compile(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script, cache = tmp_path / "pool.py", tmp_path / "cache"
    script.write_text(_POOL)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    two, held, one, held_again = map(json.loads, done.stdout.splitlines())
    for found in (two, one):
        assert (found["done"], found["units"], found["passed"]) == (3, 3, False)
        assert list(found["failed"]) == ["build no a/b 16"]
    assert len(held) == 3  # of the writer with few and with all options, and of the list, which has none
    assert held == held_again


def test_the_pool_fits_the_memory_of_the_gpu() -> None:
    assert [precompile.default_workers(16, gib << 30) for gib in (4, 24, 80, 180)] == [1, 3, 8, 8]
    assert precompile.default_workers(2, 80 << 30) == 2
    assert precompile.default_workers(64, None) == 64


def test_a_target_that_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert precompile.main(["--target", "sm_1"]) == 2
    assert capsys.readouterr().err.startswith("k16v8: --target sm_1: there are sm_80, ")


def _serving(*words: str) -> subprocess.CompletedProcess[str]:
    arguments = ["-m", "k16v8.bench.serving", "--device", "cpu", "--geometry", "tiny", *words]
    return forked.run(arguments, {**os.environ, "TRITON_INTERPRET": "1"})


def test_pages_of_no_multiple_of_16_tokens_are_one_line() -> None:
    pytest.importorskip("triton")
    done = _serving("--page", "24")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "k16v8: interpreter[k=bf16,v=fp8_e4m3]: page size 24; pages have a multiple of 16 tokens\n"


def test_a_decode_that_is_ended_leaves_the_checks_that_it_made() -> None:
    pytest.importorskip("triton")
    done = _serving()
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [[*line["checks"]] for line in lines] == [["decode"], ["decode", "drafts"], ["decode", "drafts", "prompts"]]


def test_no_figure_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    device = cast(Any, type("Device", (), {"type": "cuda"})())

    class Step:
        kernels = type("Kernels", (), {"name": "triton"})()

        def __init__(self, *words: Any, **given: Any) -> None: ...

    def broken(*words: Any) -> Any:
        raise RuntimeError("the compiler\nfailed")

    monkeypatch.setattr(serving, "Serving", Step)
    for name in ("_accuracy", "_drafts", "_prompts", "_replayed"):
        monkeypatch.setattr(serving, name, lambda *words: {"passed": True})
    monkeypatch.setattr(serving, "_host", lambda step: {"microseconds": 340.0, "goal": 100.0, "met": False})
    for name in ("_uneven", "_variants"):
        monkeypatch.setattr(serving, name, broken)
    found = serving.measure(geometry("tiny"), [1], device)
    assert found["passed"] is True
    assert found["figures"]["host"]["met"] is False
    assert found["figures"]["variants"]["reason"].startswith("RuntimeError: the compiler")


_PLUGINS = "import sys\ndef load_plugins():\n    print('plug-ins')\n"
_BENCH = "import sys\nprint('bench', __name__, sys.argv[1:])\nsys.exit(3)\n"


def test_sglangs_bench_runs_after_its_plug_ins_with_the_same_words_and_exit_code(tmp_path: Path) -> None:
    for module, content in (("srt/plugins", _PLUGINS), ("benchmark/one_batch", _BENCH)):
        file = tmp_path / "sglang" / f"{module}.py"
        file.parent.mkdir(parents=True)
        file.write_text(content)
    paths = [str(tmp_path), *sys.path]
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, paths))}
    command = [sys.executable, "-m", "k16v8.bench.sglang", "--model-path", "x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "plug-ins\nbench __main__ ['--model-path', 'x']\n", done.stderr
    assert done.returncode == 3


def test_without_sglang_the_bench_says_so_in_one_line() -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-m", "k16v8.bench.sglang"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("k16v8: SGLang cannot be imported (")
    assert done.stderr.count("\n") == 1


def test_sglangs_bench_refuses_our_backend_with_graphs_and_says_why() -> None:
    words = [sys.executable, "-m", "k16v8.bench.sglang", "--attention-backend", "k16v8"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "no CUDA graphs, since its table of pages moves in each step: add --disable-cuda-graph" in done.stderr
