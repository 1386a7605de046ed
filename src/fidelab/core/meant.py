"""Words that users of other tools type, by meaning: names of formats and engines, options, commands.

Errors look here first, then for names with the same beginning, then for names with similar letters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# ------------------------------------------------------------------------------------------------- formats

# Names of one type, as engines, torch and other tools write it.
SAME: tuple[tuple[str, ...], ...] = (
    ("f32", "float32", "fp32", "float"),
    ("f16", "float16", "fp16", "half"),
    ("bf16", "bfloat16"),
    ("fp8_e4m3", "fp8", "fp8_e4m3fn", "float8_e4m3fn", "float8_e4m3", "fp8e4m3", "e4m3", "e4m3fn", "f8_e4m3"),
    ("fp8_e5m2", "float8_e5m2", "fp8e5m2", "e5m2", "f8_e5m2"),
    ("fp8_e4m3fnuz", "float8_e4m3fnuz", "e4m3fnuz"),
    ("fp8_e5m2fnuz", "float8_e5m2fnuz", "e5m2fnuz"),
    ("q8_0", "q8"),
    ("q5_0", "q5"),
    ("q4_0", "q4"),
    ("iq4_nl", "iq4"),
    ("nvfp4", "fp4", "nv_fp4"),
    ("mxfp4", "mx_fp4"),
    ("turboquant_k8v4", "tq_k8v4"),
    ("turboquant_4bit_nc", "tq4", "turboquant", "turbo4", "turboquant_4bit"),
    ("turboquant_3bit_nc", "tq3", "turbo3", "turboquant_3bit"),
    ("ultraquant_4bit", "ultraquant"),
)


@dataclass(frozen=True)
class Elsewhere:
    """A cache format of a tool that fidelab does not run, and how the same or the nearest one is reached.

    ``names``: a pattern of what its users would write after ``--kv``, besides names that engines here have, too.
    """

    tool: str
    option: str
    values: str
    names: str
    way: str


ELSEWHERE: tuple[Elsewhere, ...] = (
    Elsewhere(
        "Ollama",
        "OLLAMA_KV_CACHE_TYPE",
        "f16, q8_0, q4_0",
        r"ollama.*",
        "--engine llamacpp with the same name; a running Ollama by --engine openai",
    ),
    Elsewhere(
        "LM Studio",
        "K and V Cache Quantization Type",
        "F32, F16, Q8_0, Q5_1, Q5_0, Q4_1, Q4_0, IQ4_NL",
        r"lm-?studio.*",
        "--engine llamacpp with the name in small letters; a running LM Studio by --engine openai",
    ),
    Elsewhere(
        "LMDeploy",
        "--quant-policy",
        "8, 4",
        r"(quant[-_]?)?policy[-_=]?[48]|kv[-_]?int[48]",
        "uint8[group=N] or uint4[group=N] on engine hf, N the size of a head",
    ),
    Elsewhere(
        "TensorRT-LLM",
        "kv_cache_config.dtype",
        "fp8, nvfp4, int8",
        r"trt(llm)?[-_].*",
        "fp8_e4m3 or nvfp4 on engine vllm, sglang or hf; int8 on engine hf",
    ),
    Elsewhere(
        "mlx-lm",
        "--kv-bits, --kv-group-size",
        "2 to 8, groups of 64",
        r"kv[-_]?bits[-_=]?[2-8]|[2-8][-_]?bits?|mlx.*",
        "uint4[group=64] on engine hf, and so on for other widths: affine, with a scale and a least value per group",
    ),
    Elsewhere(
        "ExLlamaV3",
        "-cq K_BITS,V_BITS",
        "2 to 8, also K and V apart",
        r"exl3?.*|cq[2-8]([-_,][2-8])?",
        "int4[rotate=hadamard] or int6[rotate=hadamard]/int4[rotate=hadamard] on engine hf are the nearest",
    ),
)
"""Names of tools that fidelab does not run as engines."""

_WEIGHTS = re.compile(
    r"(ud-)?i?q[1-8]_(k(_(xxs|xs|s|m|l|xl))?|xxs|xs|s|m)|tq[12]_0|(gptq|awq|bnb|hqq|exl[23]|autoround|aqlm|quip)([-_].*)?"
    r"|w[48]a(4|8|16)(_?fp8|_?int)?|nf4|gguf|ggml|marlin|compressed[-_]tensors|modelopt"
)
"""Names of formats of weights alone, as llama.cpp, Transformers and vLLM write them."""

_PEERS: Mapping[str, tuple[str, ...]] = {
    "8": ("fp8_e4m3", "int8_per_token_head", "q8_0", "int8"),
    "5": ("q5_0", "q5_1", "int5"),
    "4": ("int4_per_token_head", "turboquant_4bit_nc", "q4_0", "nvfp4", "int4"),
    "3": ("turboquant_3bit_nc", "int3"),
}
"""Bits per value → the usual formats of as many bits, of all engines."""


def weights_format(name: str) -> bool:
    """Return whether a name in small letters is that of a format of weights, which no cache has."""
    return _WEIGHTS.fullmatch(name) is not None


def bits_peers(name: str) -> tuple[str, ...]:
    """Return the usual formats with as many bits as the first digit of a name says."""
    digit = re.search(r"\d", name)
    return _PEERS.get(digit[0], ()) if digit else ()


# ------------------------------------------------------------------------------------------------- engines

_GGUF = "llamacpp runs the same files: --engine llamacpp with MODEL.gguf"
_BY_SERVER = "start its server and name it: --engine openai --base-url http://HOST:PORT/v1"
_HF = "write --engine hf"
ENGINE_WORDS: Mapping[str, str] = {
    "ollama": f"{_GGUF} (Ollama keeps it in ~/.ollama/models/blobs)",
    "lmstudio": f"{_GGUF} (LM Studio keeps it in ~/.lmstudio/models)",
    **dict.fromkeys(
        (
            "llamacpppython",
            "llamaserver",
            "llamacli",
            "llama",
            "gguf",
            "ggml",
            "koboldcpp",
            "llamafile",
            "jan",
            "gpt4all",
        ),
        _GGUF,
    ),
    **dict.fromkeys(
        (
            *(
                "mlx",
                "mlxlm",
                "exllama",
                "exllamav2",
                "exllamav3",
                "exl2",
                "exl3",
                "tabbyapi",
                "tensorrt",
                "tensorrtllm",
            ),
            *("trtllm", "trt", "lmdeploy", "turbomind", "tgi", "aphrodite", "mlc", "mlcllm", "openvino", "ovms", "nim"),
            *("ktransformers", "deepspeed", "triton", "localai", "litellm", "dynamo", "lorax", "mii", "max"),
        ),
        _BY_SERVER,
    ),
    **dict.fromkeys(("huggingface", "transformers", "pytorch", "torch", "accelerate", "hftransformers"), _HF),
    **dict.fromkeys(("server", "http", "api", "url", "openaiapi", "remote"), "write --engine openai --base-url URL"),
}
"""Other tools, in small letters without signs → how their models are reached."""


def engine_hint(name: str) -> str:
    """Return how models of a tool are reached that is not an engine here; empty for an unknown name."""
    return ENGINE_WORDS.get(re.sub(r"[^a-z0-9]", "", name.lower()), "")


# --------------------------------------------------------------------------------------------------- tests

_TASK = "a task of lm-eval: fidelab import lm-eval reads its samples of both configurations"
_WORD_OF_TEST: Mapping[str, str] = {
    **dict.fromkeys(("ppl", "perp", "wikitext"), "write perplexity"),
    **dict.fromkeys(("kl", "kldiv", "kldivergence", "divergence"), "write kld"),
    **dict.fromkeys(("niah", "needle", "ruler", "retrieval", "passkey"), "write rniah"),
    **dict.fromkeys(("tools", "bfcl", "functioncalling", "toolcalling"), "write toolcalls"),
    **dict.fromkeys(("generate", "generation", "greedy", "top1"), "write trajectory"),
    **dict.fromkeys(
        (
            *(
                "mmlu",
                "mmlupro",
                "hellaswag",
                "arc",
                "arcchallenge",
                "arceasy",
                "piqa",
                "winogrande",
                "boolq",
                "openbookqa",
            ),
            *(
                "humaneval",
                "mbpp",
                "ifeval",
                "truthfulqa",
                "gpqa",
                "lambada",
                "lambadaopenai",
                "bbh",
                "longbench",
                "math",
            ),
        ),
        _TASK,
    ),
}
"""Words for tests, in small letters without signs → what to write."""


def axis_hint(name: str) -> str:
    """Return the test that a word means; empty for an unknown word."""
    return _WORD_OF_TEST.get(re.sub(r"[^a-z0-9]", "", name.lower()), "")


# ------------------------------------------------------------------------------------------------- options

_KV = "--kv {format}"
_LENGTH = "--n-ctx {value} (tokens per window) or --context {value} (memory is reported for it)"
_BATCHES = "left out: batches change the sums of a kernel, not the question (--engine-arg {name}={value} sets one)"
OPTION_WORDS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *(
                "-ctk",
                "-ctv",
                "--cache-type-k",
                "--cache-type-v",
                "--cache-type",
                "--kv-cache-dtype",
                "--kv-cache-type",
            ),
            *(
                "--kv-dtype",
                "--kv-cache",
                "--cache-dtype",
                "--quantkv",
                "--kv-quant",
                "--kv-format",
                "--kv-type",
                "--kvcache",
            ),
            *("--format", "--formats", "--quant", "--qtype", "--cache", "--quant-policy", "--kv-cache-quant"),
        ),
        _KV,
    ),
    **dict.fromkeys(("-c", "--ctx-size", "--ctx", "--num-ctx", "--max-model-len", "--context-length"), _LENGTH),
    **dict.fromkeys(("--ctx-len", "--seq-len", "--seqlen", "--max-seq-len", "--max-length", "--max-ctx"), _LENGTH),
    **dict.fromkeys(("--tasks", "--task", "--tests", "--test", "--metrics", "--metric", "--axis"), "--axes {value}"),
    **dict.fromkeys(("--bench", "--benchmark", "--benchmarks"), "--benches {value}"),
    **dict.fromkeys(("--backend", "--framework", "--runtime", "--loader", "--engines"), "--engine {value}"),
    **dict.fromkeys(
        ("--output-path", "--output", "-o", "--out", "--outdir", "--runs-dir", "--results"), "--output-dir {value}"
    ),
    **dict.fromkeys(
        ("--chunks", "--n-chunks", "--samples", "--num-samples", "--n-windows", "--nsamples"), "--windows {value}"
    ),
    "--ppl-stride": "--stride {value}",
    **dict.fromkeys(
        ("-n", "--n-tokens", "--max-tokens", "--max-new-tokens", "--predict", "--num-predict"), "--n-predict {value}"
    ),
    **dict.fromkeys(("--dataset", "--data", "--corpus", "--wikitext", "--txt", "--input"), "--text {value}"),
    **dict.fromkeys(("--baseline", "--base", "--ref", "--original", "--against"), "--reference {value}"),
    **dict.fromkeys(("--candidates", "--compare", "--with", "--quantized", "--target"), "--candidate model={value}"),
    **dict.fromkeys(("--vram", "--memory", "--gpu-memory", "--mem", "--fits"), "--fit {value}"),
    **dict.fromkeys(
        ("--kld", "--max-kl", "--kl", "--threshold", "--kld-threshold", "--max-kl-div"), "--max-kld {value}"
    ),
    **dict.fromkeys(("--url", "--api-base", "--api-url", "--endpoint-url", "--server", "--host"), "--base-url {value}"),
    **dict.fromkeys(("--gpu", "--gpus", "--cuda", "--cuda-device", "--main-gpu", "-mg"), "--device cuda"),
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--gpu-layers"), "--device cuda (all layers on the GPU)"),
    **dict.fromkeys(("-fa", "--flash-attn"), "--engine-arg flash-attn=on"),
    **dict.fromkeys(("-b", "-ub", "--batch-size", "--ubatch-size", "--max-batch-size"), _BATCHES),
    **dict.fromkeys(("-tp", "--tp-size", "--tensor-parallel-size"), "--engine-arg tensor-parallel-size={value}"),
    **dict.fromkeys(
        ("--gpu-memory-utilization", "--mem-fraction-static", "--enforce-eager", "--trust-remote-code"),
        "--engine-arg {name}={value}",
    ),
    **dict.fromkeys(
        ("--attention-backend", "--block-size", "--page-size", "--revision", "--rope-scaling"),
        "--engine-arg {name}={value}",
    ),
    **dict.fromkeys(("--torch-dtype", "--precision", "--compute-type"), "--dtype {value}"),
    **dict.fromkeys(
        ("--quantization", "-q", "--load-in-4bit", "--load-in-8bit", "--weights"),
        "--candidate model=FILE (a checkpoint with such weights)",
    ),
    **dict.fromkeys(("--model-args", "--gen-kwargs", "--override"), "--engine-arg {value}"),
    **dict.fromkeys(
        ("--kl-divergence", "--perplexity", "--ppl"), "--axes kld,perplexity (compare measures the KLD by itself)"
    ),
    "--kl-divergence-base": "--reference FILE with --bin, or fidelab import kld-dumps",
    "--apply-chat-template": "--template chat",
    "--log-samples": "--keep-rows",
    **dict.fromkeys(("-v", "--verbose", "--all", "--detail", "--full"), "--details"),
    **dict.fromkeys(("--dryrun", "--plan", "--estimate", "--check"), "--dry-run"),
    **dict.fromkeys(("--fast", "--quick-test", "--smoke"), "--quick"),
    **dict.fromkeys(("--format-json", "--as-json", "--output-json", "-j"), "--json"),
    **dict.fromkeys(("--md", "--format-markdown"), "--markdown"),
    **dict.fromkeys(("--time", "--time-limit", "--max-time", "--timeout"), "--budget {value}"),
    **dict.fromkeys(("--jobs", "--n-threads", "--num-threads", "-t", "--cpu-threads"), "--threads {value}"),
    **dict.fromkeys(("--min-top1", "--min-same-top1", "--min-top", "--top1"), "--min-same-top {value}"),
    **dict.fromkeys(("--config", "--yaml", "--experiment"), "-f {value}"),
    **dict.fromkeys(("--continue", "--restart"), "--resume latest"),
    "-m": "MODEL as the first word: fidelab {command} MODEL",
    **dict.fromkeys(
        ("--hf-repo", "-hf", "--model-path", "--pretrained", "--model-name"),
        "MODEL as the first word: fidelab {command} {value}",
    ),
}
"""Options of other tools → what to write; a command that lacks the option named first does not suggest it.

``{format}`` is the value as a KV format, ``{name}`` the option without dashes.
"""

COMMAND_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("list", "ls", "history", "ps", "runs-list"), "runs list"),
    **dict.fromkeys(("setup list", "setup ls", "setup status", "setup show", "engines"), "setup engines"),
    **dict.fromkeys(("add", "setup add", "setup engine"), "setup install"),
    **dict.fromkeys(
        ("run", "test", "measure", "kld", "perplexity", "ppl", "diff", "kl", "quality", "evaluate"), "compare"
    ),
    **dict.fromkeys(("show", "info", "runs info", "runs view"), "runs show"),
    **dict.fromkeys(("benchmark", "speed", "perf", "throughput", "latency"), "bench"),
    **dict.fromkeys(("gate", "verify", "validate", "ci", "assert"), "check"),
    **dict.fromkeys(("html", "view", "open", "page", "results"), "report"),
    **dict.fromkeys(("pull", "download", "get", "setup download", "setup pull"), "setup fetch"),
    **dict.fromkeys(
        (
            "prune",
            "gc",
            "clear",
            "cleanup",
            "uninstall",
            "rm",
            "setup remove",
            "setup uninstall",
            "runs rm",
            "runs clean",
        ),
        "setup clean",
    ),
    **dict.fromkeys(("size", "vram", "memory", "mem", "fit", "plan", "calc", "devices"), "estimate"),
    **dict.fromkeys(("system", "diagnostics", "env", "health"), "doctor"),
    **dict.fromkeys(("launch", "up", "server"), "serve start"),
    **dict.fromkeys(("down", "kill"), "serve stop"),
    **dict.fromkeys(("lm-eval", "lm_eval", "mmlu", "gsm8k"), "eval"),
    **dict.fromkeys(("resume", "continue"), "compare --resume latest"),
    **dict.fromkeys(("quant", "compress"), "checkpoint quantize"),
    **dict.fromkeys(("lint", "inspect"), "checkpoint audit"),
    **dict.fromkeys(("upload", "push", "publish"), "share reference"),
    **dict.fromkeys(("replicate", "profile", "profiles"), "reproduce list"),
    "version": "--version",
    "help": "--help",
}
"""Words that are not commands, alone or after their group → the command."""
