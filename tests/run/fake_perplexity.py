"""A stand-in for ``llama-perplexity`` and ``llama-bench``, for builds that cannot be had here: old and crashing ones.

It has the help, log and file of the real one.  Its tokens are the bytes of the text.  Its distributions are random
numbers by model and token, which a quantized cache moves by as much as its bits are few.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

HELP = """
-h,    --help, --usage                  print usage and exit
-t,    --threads N                      number of CPU threads
-c,    --ctx-size N                     size of the prompt context
-ngl,  --gpu-layers, --n-gpu-layers N   number of layers to store in VRAM
-fa,   --flash-attn [on|off|auto]       set Flash Attention use
-e,    --escape, --no-escape            whether to process escapes sequences
-ctk,  --cache-type-k TYPE              KV cache data type for K
                                        allowed values: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1
                                        (default: f16)
-ctv,  --cache-type-v TYPE              KV cache data type for V
-lv,   --verbosity, --log-verbosity N   Set the verbosity threshold. Values:
                                         - 3: info
--save-all-logits, --kl-divergence-base FNAME
                                        set logits file
"""
BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
NOISE = {"f32": 0.0, "f16": 0.0, "q8_0": 0.02, "q4_0": 0.3}


def main(words: list[str]) -> int:
    mode = os.environ.get("FAKE_PERPLEXITY", "")
    if "--help" in words:
        print(HELP if mode != "old" else HELP.replace("--kl-divergence-base", "--other"))
        return 0
    if "--version" in words:
        print(f"version: 9999 ({os.environ.get('FAKE_BUILD', 'abc1234')})", file=sys.stderr)
        return 0
    import numpy as np  # here, since most starts only ask what the program offers

    from fidelab.models.pieces import Pieces

    given = dict(zip(words[::2], words[1::2], strict=False)) if "--no-escape" not in words else {}
    if not given:
        plain = [word for word in words if word != "--no-escape"]
        given = dict(zip(plain[::2], plain[1::2], strict=True))
    k, v = given["-ctk"], given["-ctv"]
    if mode == f"crash {k}":
        print("0.00.100.000 E ggml_cuda_host_malloc: failed to allocate 9.00 MiB: out of memory", file=sys.stderr)
        return 1
    pieces = Pieces.read(Path(given["-m"]))
    n_ctx, chunks = int(given["-c"]), int(given["--chunks"])
    ids = {pieces.bytes_of(token): token for token in reversed(range(len(pieces.strings)))}
    text = [ids[bytes([byte])] for byte in Path(given["-f"]).read_bytes()]
    windows = min(chunks, len(text) // n_ctx)
    if mode != "silent":
        shown = "f16" if mode == "ignores types" else None
        sizes = [16 * BYTES[shown or name] * n_ctx / 2**20 for name in (k, v)]
        print("0.00.100.000 I llama_context: flash_attn            = enabled", file=sys.stderr)
        place = "CUDA0" if mode == "gpu" else "CPU"
        print(f"0.00.100.001 I llama_kv_cache: {place} KV buffer size = {sum(sizes):.2f} MiB", file=sys.stderr)
        print(
            f"0.00.100.002 I llama_kv_cache: size = {sum(sizes):.2f} MiB ({n_ctx} cells, 1 layers, 1/1 seqs), "
            f"K ({shown or k}): {sizes[0]:.2f} MiB, V ({shown or v}): {sizes[1]:.2f} MiB",
            file=sys.stderr,
        )
    size = len(pieces.strings)
    seed = int.from_bytes(Path(given["-m"]).read_bytes()[-4:], "little")
    logits = 3 * np.random.default_rng(seed).standard_normal((size, size))
    moved = np.random.default_rng(1).standard_normal((size, size)) * (NOISE[k] + NOISE[v]) / 2
    if mode == "ignores types":
        moved *= 0
    table = logits + moved
    table -= np.log(np.exp(table).sum(axis=-1, keepdims=True))
    with Path(given["--kl-divergence-base"]).open("wb") as out:
        out.write(b"_logits_" + np.array([n_ctx, size, windows], "<i4").tobytes())
        out.write(np.array(text[: windows * n_ctx], "<i4").tobytes())
        for window in range(windows):
            rows = [table[text[window * n_ctx + at]] for at in range(n_ctx // 2, n_ctx - 1)]
            for row in rows:
                least = max(row.min(), row.max() - 16.0)
                scale = (row.max() - least) / 65535
                numbers = np.zeros(2 * ((size + 1) // 2), "<u2")
                numbers[:size] = np.clip(np.rint((row - least) / scale), 0, 65535)
                out.write(np.array([scale, least], "<f4").tobytes() + numbers.tobytes())
            out.flush()
            if mode == "stall":
                time.sleep(600)
            if mode == f"killed {k}":
                os.abort()
    print("0.00.200.000 I Final estimate: PPL = 9.0000 +/- 0.5", file=sys.stderr)
    return 0


BENCH_HELP = """
  -h, --help
  -r, --repetitions <n>                       number of times to repeat each test (default: 5)
  -o, --output <csv|json|jsonl|md|sql>        output format printed to stdout (default: md)
  -p, --n-prompt <n>                                (default: 512)
  -n, --n-gen <n>                                   (default: 128)
  -d, --n-depth <n>                                 (default: 0)
  -ctk, --cache-type-k <t>                          (default: f16)
  -ctv, --cache-type-v <t>                          (default: f16)
  -t, --threads <n>                                 (default: 4)
  -ngl, --n-gpu-layers <n>                          (default: 99)
  -fa, --flash-attn <0|1>                           (default: 0)
  -dev, --device <dev0/dev1/...>                    (default: auto)
"""


def bench(words: list[str]) -> int:
    """Stand in for ``llama-bench``: bytes of the cache and of the file set the rate."""
    mode = os.environ.get("FAKE_BENCH", "")
    if "--help" in words:
        print(BENCH_HELP if mode != "old" else BENCH_HELP.replace("-d, --n-depth", "-x, --other"))
        return 0
    if mode == "crash":
        print("main: error: failed to create context with model", file=sys.stderr)
        return 1
    print("ggml: a line of the log", file=sys.stderr)
    given = dict(zip(words[::2], words[1::2], strict=True))
    k, v = given.get("-ctk", "f16"), given.get("-ctv", "f16")
    rate = 100_000 / (Path(given["-m"]).stat().st_size + 100 * (BYTES[k] + BYTES[v]))
    tests = [
        {
            "build_commit": "abc1234",
            "build_number": 9999,
            "cpu_info": "A processor",
            "gpu_info": "",
            "n_threads": int(given.get("-t", 4)),
            "type_k": "f16" if mode == "other types" else k,
            "type_v": v,
            "n_prompt": prompt,
            "n_gen": gen,
            "n_depth": int(given["-d"]),
            "samples_ts": [rate * (9 if prompt else 1) * (1 + 0.001 * number) for number in range(int(given["-r"]))],
        }
        for prompt, gen in ((int(given["-p"]), 0), (0, int(given["-n"])))
        if prompt or gen
    ]
    print("no rates" if mode == "garbage" else json.dumps(tests))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
