"""Options of llama.cpp and its server that a file of somebody else may set without permission."""

from __future__ import annotations

from collections.abc import Mapping

from fidelab.engines.harmless import COUNT, NAME, SHARE, SWITCH, Amount, Beside, Count, Either, Harmless, Words, group
from fidelab.engines.llamacpp.library import ENUMERATIONS

HARMLESS: Mapping[str, Harmless] = {
    **group(
        "numbers of tokens, sequences and layers",
        COUNT,
        *("ctx-checkpoints", "ctx-size", "draft-max", "draft-min", "main-gpu", "n-batch", "n-ctx", "n-seq-max"),
        *("n-ubatch", "parallel", "spec-ngram-size-m", "spec-ngram-size-n", "yarn-orig-ctx"),
    ),
    **group("a number of layers, or all", Count(-1), "n-gpu-layers"),
    **group("MiB of memory, or no limit", Count(-1), "cache-ram"),
    **group(
        "factors of the positions",
        Amount(-1),
        *("rope-freq-base", "rope-freq-scale", "yarn-attn-factor", "yarn-beta-fast", "yarn-beta-slow"),
        "yarn-ext-factor",
    ),
    **group("a probability", SHARE, "draft-p-min"),
    **group("how attention is computed", Either((SWITCH, Words(("auto",)))), "flash-attn"),
    **group(
        "how steps are computed",
        SWITCH,
        *("cont-batching", "kv-unified", "no-perf", "offload-kqv", "op-offload", "swa-full", "use-extra-bufts"),
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
