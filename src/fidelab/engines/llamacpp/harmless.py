"""Options of llama.cpp and its server that a file of somebody else may set without permission."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fidelab.engines.harmless import (
    COUNT,
    NAME,
    SHARE,
    SWITCH,
    Amount,
    Beside,
    Count,
    Either,
    Harmless,
    Shaped,
    Words,
    group,
)
from fidelab.engines.llamacpp.library import ENUMERATIONS
from fidelab.engines.llamacpp.placement import NUMA

_SHARES = re.compile(r"\d{1,6}(\.\d{1,6})?(,\d{1,6}(\.\d{1,6})?){0,63}", re.ASCII)
_DEVICES = re.compile(r"[A-Za-z0-9]\w{0,30}(,[A-Za-z0-9]\w{0,30}){0,63}", re.ASCII)
_OVERRIDES = re.compile(r"[\w.|()\[\]*+?\\^$-]{1,200}=\w{1,40}(,[\w.|()\[\]*+?\\^$-]{1,200}=\w{1,40}){0,200}", re.ASCII)

HARMLESS: Mapping[str, Harmless] = {
    **group(
        "numbers of tokens, sequences and layers",
        COUNT,
        *("ctx-checkpoints", "ctx-size", "draft-max", "draft-min", "main-gpu", "n-batch", "n-ctx", "n-seq-max"),
        *("n-cpu-ffn", "n-cpu-moe", "n-ubatch", "parallel", "spec-ngram-size-m", "spec-ngram-size-n", "yarn-orig-ctx"),
    ),
    **group("a number of layers, or all", Either((Count(-1), Words(("all", "auto")))), "n-gpu-layers"),
    **group("shares of the GPUs", Shaped(_SHARES, "numbers with commas between them"), "tensor-split"),
    **group(
        "llama.cpp's names of devices on this machine", Shaped(_DEVICES, "names with commas between them"), "devices"
    ),
    **group("llama.cpp's own words for memory near cores", Words(NUMA), "numa"),
    **group(
        "where tensors lie, by patterns of names and buffers on this machine",
        Shaped(_OVERRIDES, "PATTERN=BUFFER"),
        "override-tensor",
    ),
    **group("MiB of memory, or no limit", Count(-1), "cache-ram"),
    **group(
        "factors of the positions",
        Amount(-1),
        *("rope-freq-base", "rope-freq-scale", "yarn-attn-factor", "yarn-beta-fast", "yarn-beta-slow"),
        "yarn-ext-factor",
    ),
    **group("a probability", SHARE, "draft-p-min"),
    **group(
        "how attention is computed", Either((SWITCH, Words(("auto", "enabled", "disabled", "1", "0")))), "flash-attn"
    ),
    **group(
        "how steps are computed",
        SWITCH,
        *(
            "check-tensors",
            "cont-batching",
            "cpu-moe",
            "kv-unified",
            "no-perf",
            "offload-kqv",
            "op-offload",
            "swa-full",
            "use-extra-bufts",
        ),
    ),
    **group("how weights get into memory", SWITCH, "use-mlock", "use-mmap"),
    **{
        name: Harmless(Either((Words(words), Count(-1, len(words) - 1))), "llama.cpp's own words and their numbers")
        for name, words in ENUMERATIONS.items()
    },
    **group("how drafts are made, by llama.cpp's own names", NAME, "spec-type"),
    **group("what is saved", Words(("hidden", "logprobs")), "estimator"),
    **group("weights that are only read", Beside(), "mmproj", "model-draft"),
    **group("a template that only renders text, or llama.cpp's own name of one", Beside(NAME), "chat-template"),
    **group("whether templates are rendered", SWITCH, "jinja"),
}
