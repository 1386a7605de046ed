"""Causes: known messages of engines are explained, unknown ones are left alone."""

from __future__ import annotations

import signal

import pytest

from fidelab.workers.failures import explain, explain_exit, split_dump

BLACKWELL = [
    '  File "/x/sglang/srt/model_executor/model_runner.py", line 412, in init_attention_backend',
    "    assert backend in allowed",
    "AssertionError",
]


def test_an_assertion_of_an_engine_without_a_message_names_other_attention_backends() -> None:
    said = explain(BLACKWELL) or ""
    assert "Blackwell" in said
    assert "torch_native, then triton" in said


@pytest.mark.parametrize("lines", [["AssertionError"], [*BLACKWELL[:2], "AssertionError: 3 is not 4"]])
def test_other_assertions_stay_unexplained(lines: list[str]) -> None:
    assert explain(lines) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", "device memory"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "host memory"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("no space left on the device while writing x", "disk is full"),
        ("AssertionError: Torch not compiled with CUDA enabled", "--device cpu"),
        ("ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (12)", "lower max_num_seqs"),
        ("ValueError: Requested prompt logprobs of 50, which is greater than max allowed: 20", "max_logprobs"),
        ("ValueError: Free memory on device cuda:0 (3/24 GiB) on startup is less than desired", "still holds"),
        ("ValueError: The checkpoint has model type `new` but Transformers does not recognize this", "upgrade"),
        ("ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (784).", "lower max_num_seqs"),
        ("ValueError: invalid argument for batch_prefill", "another one"),
        ("HSA exception: Queue at 0x7f aborting", "torch_native, then triton"),
        (
            "Queue 0x7f aborting with error : HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation",
            "torch_native, then triton",
        ),
        ("AttributeError: module 'aiter' has no attribute 'dtypes'", "shim"),
        ("dyld: Symbol not found: _llama_memory_breakdown_print", "different builds"),
        ("OSError: /x/libllama.so: undefined symbol: ggml_backend_dev_count", "different builds"),
        ("ModuleNotFoundError: No module named 'flash_attn.ops.triton.rotary'", "flash-attn"),
        ("KeyError: 'model.layers.0.mlp.experts.w13_weight'", "newer engine"),
        ("all log-probabilities are NaN", "left unloaded"),
        ("100% NaN log-probabilities", "left unloaded"),
        ("45 parameters were filled by no checkpoint tensor, first model.layers.3.w", "left unloaded"),
        ("OSError: [Errno 98] Address already in use", "port is taken"),
        ("[Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use", "port"),
        ("huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach https://hub: offline mode", "fidelab setup fetch"),
        ("huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot", "out of reach"),
        ("OSError: We couldn't connect to 'https://hub' to load the files", "out of reach"),
        ("huggingface_hub.errors.GatedRepoError: 403 Client Error.", "HF_TOKEN"),
        ("RuntimeError: Failed to infer device type, please set the environment variable", "setup install vllm"),
        ("ValueError: No available memory for the cache blocks. Try increasing it", "kv-cache-memory"),
        (
            "(4.00 GiB KV cache is needed, which is larger than the available KV cache memory (2.5 GiB).",
            "max-model-len",
        ),
        ("is larger than the maximum number of tokens that can be stored in KV cache (1024).", "max-model-len"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "mem-fraction-static"),
        (
            "SGLang cannot read the model: ModuleNotFoundError: No module named 'torchvision'",
            "setup install sglang --cpu",
        ),
        (
            "SGLang does not start: ImportError: libcuda.so.1: cannot open shared object file",
            "setup install sglang --cpu",
        ),
        ("ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", "NVIDIA's driver"),
        ("CUDA error: no kernel image is available for execution on the device", "no kernels for this GPU"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", "update the driver"),
        ("llama_model_load: error loading model: unknown model architecture: 'new'", "newer one"),
        ("gguf_init_from_file_impl: invalid magic characters: 'PK', expected 'GGUF'", "not a GGUF file"),
        ("this GGUF file is version 4 but this software only supports up to version 3", "not a GGUF file"),
        ("tensor 'a' data is not within the file bounds, model is corrupted or incomplete", "fetch it again"),
        ("llama_model_load_from_file_impl: failed to load model", "cannot load the file"),
    ],
)
def test_a_known_message_is_explained(line: str, said: str) -> None:
    cause = explain(["starting", line, "traceback ends"])
    assert cause is not None
    assert said in cause


def test_the_last_known_message_counts_unless_it_is_a_general_complaint() -> None:
    assert explain(["No space left on device", "CUDA out of memory"]) == explain(["CUDA out of memory"])
    lines = ["error loading model: unknown model architecture: 'new'", "failed to load model"]
    assert explain(lines) == explain(lines[:1]) != explain(lines[1:])


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [""],
        ["all is well"],
        ["ValueError: shapes differ"],
        ["INFO: Available KV cache memory: 2.50 GiB", "INFO: GPU KV cache size: 11,648 tokens", "# GPU blocks: 728"],
        ["INFO: Uvicorn running on http://127.0.0.1:30000", "The server is fired up and ready to roll!"],
        ["Automatically detected platform cpu.", "Free memory on device cuda:0 (180/191 GiB) on startup."],
        [
            "llama_model_loader: loaded meta data with 36 key-value pairs",
            "load_tensors: CPU model buffer size = 90 MiB",
        ],
        ["Load weight begin. avail mem=20.1 GB", "mem_fraction_static=0.3, max_total_num_tokens=4096"],
        ["skipping expert weights model.layers.0.mlp.experts.w13_weight", "0 rows are NaN, 96 of 96 are finite"],
    ],
)
def test_an_unknown_message_has_no_cause(lines: list[str]) -> None:
    assert explain(lines) is None


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "status 3"),
        (-signal.SIGSEGV, "SIGSEGV"),
        (-signal.SIGKILL, "out-of-memory killer"),
        (-(signal.SIGRTMIN + 3), f"signal {signal.SIGRTMIN + 3}"),
    ],
)
def test_an_exit_is_put_in_words(code: int, said: str) -> None:
    assert said in explain_exit(code)


DUMP = """\
loading
Fatal Python error: Segmentation fault

Thread 0x00007f2b (most recent call first):
  File "/env/fidelab/workers/child.py", line 256 in _listen

{head} 0x00007f2c (most recent call first):
  File "/env/llama_cpp/llama_cpp.py", line 99 in llama_decode
  File "/env/fidelab/workers/child.py", line 131 in main""".splitlines()


@pytest.mark.parametrize("head", ["Current thread", "Thread"])
def test_a_dump_names_the_function_of_the_crashed_thread_or_of_the_main_one(head: str) -> None:
    log, dump = split_dump([line.format(head=head) for line in DUMP])
    assert log == ["loading"]
    assert explain_exit(-signal.SIGSEGV, dump) == (
        "the worker was ended by SIGSEGV in llama_decode (llama_cpp/llama_cpp.py, line 99)"
    )
