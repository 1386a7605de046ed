"""Flags of ``llama-server``: names, variables, values, and what each means for an arm.  Standard library only.

Every flag of ``llama-server --help`` has one row.  It is taken (an option or a field of the arm), ignored (no compared
number depends on it) or refused.  ``scripts/llama_server_flags.py`` compares the names with llama.cpp's own list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_VARIABLE = re.compile(r"(LLAMA|HF|MTMD)_[A-Z0-9_]+")
_NEGATIVE_VARIABLE = "LLAMA_ARG_NO_"
# As llama.cpp reads them, in flags and variables.
_TRUTHY = ("on", "enabled", "true", "1")
_FALSY = ("off", "disabled", "false", "0")
_AUTO = ("auto", "-1")


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        names: as written, the first long one first; ``off``: names that switch it off.
        values: names of its values; empty for a switch.
        variable: environment variable that sets it, empty if it has none.
        option: option of an arm, or ``@`` and a field of it; empty unless the flag is taken.
        ignored, refused: why no arm has it.
    """

    names: tuple[str, ...]
    off: tuple[str, ...]
    values: tuple[str, ...]
    variable: str
    option: str = ""
    ignored: str = ""
    refused: str = ""

    @property
    def name(self) -> str:
        """The flag's long name, without dashes."""
        return self.names[0].removeprefix("--")


def _rows(text: str, *, option: str = "", ignored: str = "", refused: str = "") -> Iterator[Flag]:
    """Flags from lines of names, ``/`` and names that switch off, values, and a variable."""
    for line in filter(None, map(str.strip, text.splitlines())):
        line, _, own = line.partition(" = ")
        names: list[str] = []
        off: list[str] = []
        values: list[str] = []
        variable, target = "", names
        for word in line.split():
            if word == "/":
                target = off
            elif word.startswith("-"):
                target.append(word)
            elif _VARIABLE.fullmatch(word):
                variable = word
            else:
                values.append(word)
        names.sort(key=lambda name: not name.startswith("--"))  # stable
        yield Flag(tuple(names), tuple(off), tuple(values), variable, own or option, ignored, refused)


_SERVING = "only concerns serving"
_CHATS = "concerns how the server reads and writes chats; prompts are rendered with the checkpoint's own template"
_SAMPLING = "a default of sampling; the model's own probabilities are compared, and answers are greedy"
_LOGS = "concerns logs and metrics"
_LOADING = "says how weights get into memory; no number depends on it"
_OLD_LOADING = f"a flag of an older llama-server (now --load-mode); {_LOADING}"
_CORES = "says when and on which cores threads run; no number depends on it"
_FRESH = "windows and prompts start with an empty cache"
_ROOM = "the context is as long as each request"
_FIT = "the context is as long as each request, and layers go where -ngl and the flags of placement say"
_MEDIA = "only text is asked"
_NO_ROUTER = "concerns a router of several models"
_EMBEDDINGS = "concerns embeddings"
DRAFTS = "llama.cpp decodes without drafts here; bench serve measures a llama-server that drafts"
_REMOVED_DRAFTS = f"removed from llama-server (now --spec-draft-n-max and others); {DRAFTS}"
_FETCH = "names a file of a hub; fetch it and name it with -m FILE.gguf"
_PRINTS = "prints something and ends, so that there is no server to compare; remove it"
_SECRET = "a secret, which no report may hold; it is left out of the commands that the report shows"

FLAGS: tuple[Flag, ...] = (
    *_rows("""
        --model -m FILE LLAMA_ARG_MODEL = @model
        --threads -t N LLAMA_ARG_THREADS = @threads
        --cache-type-k -ctk TYPE LLAMA_ARG_CACHE_TYPE_K = @k
        --cache-type-v -ctv TYPE LLAMA_ARG_CACHE_TYPE_V = @v
        --batch-size -b N LLAMA_ARG_BATCH = n-batch
        --ubatch-size -ub N LLAMA_ARG_UBATCH = n-ubatch
        --flash-attn -fa on|off|auto LLAMA_ARG_FLASH_ATTN = flash-attn
        --swa-full LLAMA_ARG_SWA_FULL = swa-full
        --kv-unified -kvu / -no-kvu --no-kv-unified LLAMA_ARG_KV_UNIFIED = kv-unified
        --rope-scaling none|linear|yarn LLAMA_ARG_ROPE_SCALING_TYPE = rope-scaling-type
        --rope-scale X LLAMA_ARG_ROPE_SCALE = rope-freq-scale
        --rope-freq-base X LLAMA_ARG_ROPE_FREQ_BASE = rope-freq-base
        --rope-freq-scale X LLAMA_ARG_ROPE_FREQ_SCALE = rope-freq-scale
        --yarn-orig-ctx N LLAMA_ARG_YARN_ORIG_CTX = yarn-orig-ctx
        --yarn-ext-factor X LLAMA_ARG_YARN_EXT_FACTOR = yarn-ext-factor
        --yarn-attn-factor X LLAMA_ARG_YARN_ATTN_FACTOR = yarn-attn-factor
        --yarn-beta-slow X LLAMA_ARG_YARN_BETA_SLOW = yarn-beta-slow
        --yarn-beta-fast X LLAMA_ARG_YARN_BETA_FAST = yarn-beta-fast
        --kv-offload -kvo / -nkvo --no-kv-offload LLAMA_ARG_KV_OFFLOAD = offload-kqv
        --op-offload / --no-op-offload = op-offload
        --repack / -nr --no-repack LLAMA_ARG_REPACK = use-extra-bufts
        --no-host LLAMA_ARG_NO_HOST = no-host
        --gpu-layers -ngl --n-gpu-layers N|auto|all LLAMA_ARG_N_GPU_LAYERS = n-gpu-layers
        --split-mode -sm none|layer|row|tensor LLAMA_ARG_SPLIT_MODE = split-mode
        --tensor-split -ts N0,N1,... LLAMA_ARG_TENSOR_SPLIT = tensor-split
        --main-gpu -mg N LLAMA_ARG_MAIN_GPU = main-gpu
        --device -dev DEVICE,... LLAMA_ARG_DEVICE = devices
        --override-tensor -ot PATTERN=BUFFER,... LLAMA_ARG_OVERRIDE_TENSOR = override-tensor
        --cpu-moe -cmoe LLAMA_ARG_CPU_MOE = cpu-moe
        --n-cpu-moe -ncmoe N LLAMA_ARG_N_CPU_MOE = n-cpu-moe
        --n-cpu-ffn -ncffn N LLAMA_ARG_N_CPU_FFN = n-cpu-ffn
        --numa distribute|isolate|numactl LLAMA_ARG_NUMA = numa
        --override-kv KEY=TYPE:VALUE,... = override-kv
        --check-tensors = check-tensors
    """),
    *_rows(
        """
        --host ADDRESS LLAMA_ARG_HOST
        --port N LLAMA_ARG_PORT
        --reuse-port LLAMA_ARG_REUSE_PORT
        --path FOLDER LLAMA_ARG_STATIC_PATH
        --api-prefix TEXT LLAMA_ARG_API_PREFIX
        --api-key-file FILE LLAMA_ARG_API_KEY_FILE
        --ssl-key-file FILE LLAMA_ARG_SSL_KEY_FILE
        --ssl-cert-file FILE LLAMA_ARG_SSL_CERT_FILE
        --cors-origins TEXT LLAMA_ARG_CORS_ORIGINS
        --cors-methods TEXT LLAMA_ARG_CORS_METHODS
        --cors-headers TEXT LLAMA_ARG_CORS_HEADERS
        --cors-credentials / --no-cors-credentials LLAMA_ARG_CORS_CREDENTIALS
        --alias -a NAME LLAMA_ARG_ALIAS
        --tags TEXT LLAMA_ARG_TAGS
        --timeout -to N LLAMA_ARG_TIMEOUT
        --sse-ping-interval N LLAMA_ARG_SSE_PING_INTERVAL
        --threads-http N LLAMA_ARG_THREADS_HTTP
        --props LLAMA_ARG_ENDPOINT_PROPS
        --slots / --no-slots LLAMA_ARG_ENDPOINT_SLOTS
        --slot-save-path FOLDER LLAMA_ARG_SLOT_SAVE_PATH
        --slot-prompt-similarity -sps X
        --media-path FOLDER
        --sleep-idle-seconds N
        --parallel -np N LLAMA_ARG_N_PARALLEL
        --cont-batching -cb / -nocb --no-cont-batching LLAMA_ARG_CONT_BATCHING
        --ui --webui / --no-ui --no-webui LLAMA_ARG_UI
        --ui-config --webui-config JSON LLAMA_ARG_UI_CONFIG
        --ui-config-file --webui-config-file FILE LLAMA_ARG_UI_CONFIG_FILE
        --ui-mcp-proxy --webui-mcp-proxy / --no-ui-mcp-proxy --no-webui-mcp-proxy LLAMA_ARG_UI_MCP_PROXY
        --tools LIST LLAMA_ARG_TOOLS
        --tools-runtime TEXT LLAMA_ARG_TOOLS_RUNTIME
        --mcp-servers-config FILE LLAMA_ARG_MCP_SERVERS_CONFIG
        --mcp-servers-json JSON LLAMA_ARG_MCP_SERVERS_JSON
        --agent -ag / -no-ag --no-agent LLAMA_ARG_AGENT
        --offline LLAMA_ARG_OFFLINE
        --warmup / --no-warmup
        --special -sp
        --escape -e / --no-escape
        --reverse-prompt -r TEXT
        --spm-infill
        """,
        ignored=_SERVING,
    ),
    *_rows(
        """
        --jinja / --no-jinja LLAMA_ARG_JINJA
        --chat-template TEXT LLAMA_ARG_CHAT_TEMPLATE
        --chat-template-file FILE LLAMA_ARG_CHAT_TEMPLATE_FILE
        --chat-template-kwargs JSON LLAMA_ARG_CHAT_TEMPLATE_KWARGS
        --reasoning-format FORMAT LLAMA_ARG_THINK
        --reasoning -rea on|off|auto LLAMA_ARG_REASONING
        --reasoning-effort LEVEL LLAMA_ARG_REASONING_EFFORT
        --reasoning-budget N LLAMA_ARG_THINK_BUDGET
        --reasoning-budget-message TEXT LLAMA_ARG_THINK_BUDGET_MESSAGE
        --reasoning-preserve / --no-reasoning-preserve LLAMA_ARG_REASONING_PRESERVE
        --skip-chat-parsing / --no-skip-chat-parsing LLAMA_ARG_SKIP_CHAT_PARSING
        --prefill-assistant / --no-prefill-assistant LLAMA_ARG_PREFILL_ASSISTANT
        """,
        ignored=_CHATS,
    ),
    *_rows(
        """
        --samplers LIST
        --seed -s N
        --sampler-seq --sampling-seq TEXT
        --ignore-eos
        --temp --temperature X LLAMA_ARG_TEMPERATURE
        --top-k N LLAMA_ARG_TOP_K
        --top-p X LLAMA_ARG_TOP_P
        --min-p X LLAMA_ARG_MIN_P
        --top-nsigma --top-n-sigma X
        --xtc-probability X
        --xtc-threshold X
        --typical --typical-p X
        --repeat-last-n N
        --repeat-penalty X LLAMA_ARG_REPEAT_PENALTY
        --presence-penalty X LLAMA_ARG_PRESENCE_PENALTY
        --frequency-penalty X LLAMA_ARG_FREQUENCY_PENALTY
        --dry-multiplier X
        --dry-base X
        --dry-allowed-length N
        --dry-penalty-last-n N
        --dry-sequence-breaker TEXT
        --adaptive-target X
        --adaptive-decay X
        --dynatemp-range X
        --dynatemp-exp X
        --mirostat N
        --mirostat-lr X
        --mirostat-ent X
        --logit-bias -l TEXT
        --grammar TEXT
        --grammar-file FILE
        --json-schema -j JSON
        --json-schema-file -jf FILE
        --predict -n --n-predict N LLAMA_ARG_N_PREDICT
        --keep N
        --backend-sampling -bs LLAMA_ARG_BACKEND_SAMPLING
        """,
        ignored=_SAMPLING,
    ),
    *_rows(
        """
        --verbose -v --log-verbose
        --verbosity -lv --log-verbosity N LLAMA_ARG_LOG_VERBOSITY
        --log-disable
        --log-file FILE LLAMA_ARG_LOG_FILE
        --log-jsonl / --no-log-jsonl LLAMA_ARG_LOG_JSONL
        --log-colors on|off|auto LLAMA_ARG_LOG_COLORS
        --log-prefix / --no-log-prefix LLAMA_ARG_LOG_PREFIX
        --log-timestamps / --no-log-timestamps LLAMA_ARG_LOG_TIMESTAMPS
        --log-prompts-dir FOLDER
        --metrics LLAMA_ARG_ENDPOINT_METRICS
        --perf / --no-perf LLAMA_ARG_PERF
        """,
        ignored=_LOGS,
    ),
    *_rows(
        """
        --load-mode -lm MODE LLAMA_ARG_LOAD_MODE
        --lazy-mode -lzm on|off|auto LLAMA_ARG_LAZY_MODE
        """,
        ignored=_LOADING,
    ),
    *_rows(
        """
        --mmap / --no-mmap LLAMA_ARG_MMAP
        --mlock LLAMA_ARG_MLOCK
        --direct-io -dio / -ndio --no-direct-io LLAMA_ARG_DIO
        """,
        ignored=_OLD_LOADING,
    ),
    *_rows(
        """
        --cpu-mask -C MASK
        --cpu-range -Cr RANGE
        --cpu-strict 0|1
        --prio N
        --poll N
        --cpu-mask-batch -Cb MASK
        --cpu-range-batch -Crb RANGE
        --cpu-strict-batch 0|1
        --prio-batch N
        --poll-batch 0|1
        """,
        ignored=_CORES,
    ),
    *_rows("--threads-batch -tb N", ignored="configurations use one number of threads, that of --threads"),
    *_rows(
        """
        --cache-prompt / --no-cache-prompt LLAMA_ARG_CACHE_PROMPT
        --cache-reuse N LLAMA_ARG_CACHE_REUSE
        --cache-ram -cram N LLAMA_ARG_CACHE_RAM
        --cache-idle-slots / --no-cache-idle-slots LLAMA_ARG_CACHE_IDLE_SLOTS
        --ctx-checkpoints -ctxcp --swa-checkpoints N LLAMA_ARG_CTX_CHECKPOINTS
        --checkpoint-min-step -cms N LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT
        """,
        ignored=_FRESH,
    ),
    *_rows(
        """
        --ctx-size -c N LLAMA_ARG_CTX_SIZE
        --kv-unified-per-slot N LLAMA_ARG_KV_UNIFIED_PER_SLOT
        """,
        ignored=_ROOM,
    ),
    *_rows(
        """
        --fit -fit on|off LLAMA_ARG_FIT
        --fit-target -fitt LIST LLAMA_ARG_FIT_TARGET
        --fit-ctx -fitc N LLAMA_ARG_FIT_CTX
        """,
        ignored=_FIT,
    ),
    *_rows(
        "--context-shift / --no-context-shift LLAMA_ARG_CONTEXT_SHIFT", ignored="no window is longer than the context"
    ),
    *_rows("--defrag-thold -dt X LLAMA_ARG_DEFRAG_THOLD", ignored="deprecated: llama.cpp itself ignores it"),
    *_rows(
        "--moe-cache-mib N LLAMA_ARG_MOE_CACHE_MIB",
        ignored="keeps a copy of weights on the GPU; the library here has no such copy",
    ),
    *_rows(
        """
        --mmproj -mm FILE LLAMA_ARG_MMPROJ
        --mmproj-url -mmu URL LLAMA_ARG_MMPROJ_URL
        --mmproj-auto / --no-mmproj --no-mmproj-auto LLAMA_ARG_MMPROJ_AUTO
        --mmproj-offload / --no-mmproj-offload LLAMA_ARG_MMPROJ_OFFLOAD
        --mmproj-device -mmdev DEVICE MTMD_BACKEND_DEVICE
        --image-min-tokens N LLAMA_ARG_IMAGE_MIN_TOKENS
        --image-max-tokens N LLAMA_ARG_IMAGE_MAX_TOKENS
        --mtmd-batch-max-tokens N LLAMA_ARG_MTMD_BATCH_MAX_TOKENS
        --video-fps X LLAMA_ARG_VIDEO_FPS
        --video-timestamp-interval N LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL
        --video-ffmpeg-dir FOLDER LLAMA_ARG_VIDEO_FFMPEG_DIR
        """,
        ignored=_MEDIA,
    ),
    *_rows(
        """
        --pooling none|mean|cls|last|rank LLAMA_ARG_POOLING
        --embd-normalize N
        """,
        ignored=_EMBEDDINGS,
    ),
    *_rows(
        """
        --models-max N LLAMA_ARG_MODELS_MAX
        --models-autoload / --no-models-autoload LLAMA_ARG_MODELS_AUTOLOAD
        """,
        ignored=_NO_ROUTER,
    ),
    *_rows(
        """
        --spec-draft-model -md --model-draft FILE LLAMA_ARG_SPEC_DRAFT_MODEL
        --spec-draft-hf -hfd -hfrd --hf-repo-draft REPO LLAMA_ARG_SPEC_DRAFT_HF_REPO
        --spec-draft-type-k -ctkd --cache-type-k-draft TYPE LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K
        --spec-draft-type-v -ctvd --cache-type-v-draft TYPE LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V
        --spec-draft-threads -td --threads-draft N
        --spec-draft-threads-batch -tbd --threads-batch-draft N
        --spec-draft-cpu-mask -Cd --cpu-mask-draft MASK
        --spec-draft-cpu-range -Crd --cpu-range-draft RANGE
        --spec-draft-cpu-strict --cpu-strict-draft 0|1
        --spec-draft-prio --prio-draft N
        --spec-draft-poll --poll-draft 0|1
        --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft MASK
        --spec-draft-cpu-strict-batch --cpu-strict-batch-draft 0|1
        --spec-draft-prio-batch --prio-batch-draft N
        --spec-draft-poll-batch --poll-batch-draft 0|1
        --spec-draft-override-tensor -otd --override-tensor-draft PATTERN=BUFFER,...
        --spec-draft-cpu-moe -cmoed --cpu-moe-draft LLAMA_ARG_SPEC_DRAFT_CPU_MOE
        --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft N LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE
        --spec-draft-n-max N LLAMA_ARG_SPEC_DRAFT_N_MAX
        --spec-draft-n-min N LLAMA_ARG_SPEC_DRAFT_N_MIN
        --spec-synth-len X LLAMA_ARG_SPEC_SYNTH_LEN
        --spec-synth-rates LIST LLAMA_ARG_SPEC_SYNTH_RATES
        --spec-draft-p-split --draft-p-split X LLAMA_ARG_SPEC_DRAFT_P_SPLIT
        --spec-draft-p-min --draft-p-min X LLAMA_ARG_SPEC_DRAFT_P_MIN
        --spec-draft-backend-sampling / --no-spec-draft-backend-sampling LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING
        --spec-draft-sampling greedy|probabilistic LLAMA_ARG_SPEC_DRAFT_SAMPLING
        --spec-draft-device -devd --device-draft DEVICE,...
        --spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft N|auto|all LLAMA_ARG_N_GPU_LAYERS_DRAFT
        --spec-type LIST LLAMA_ARG_SPEC_TYPE
        --spec-ngram-mod-n-min N
        --spec-ngram-mod-n-max N
        --spec-ngram-mod-n-match N
        --spec-ngram-simple-size-n N
        --spec-ngram-simple-size-m N
        --spec-ngram-simple-min-hits N
        --spec-ngram-map-k-size-n N
        --spec-ngram-map-k-size-m N
        --spec-ngram-map-k-min-hits N
        --spec-ngram-map-k4v-size-n N
        --spec-ngram-map-k4v-size-m N
        --spec-ngram-map-k4v-min-hits N
        --lookup-cache-static -lcs FILE
        --lookup-cache-dynamic -lcd FILE
        --spec-default
        """,
        ignored=DRAFTS,
    ),
    *_rows(
        """
        --draft-max --draft --draft-n N LLAMA_ARG_DRAFT_MAX
        --draft-min --draft-n-min N LLAMA_ARG_DRAFT_MIN
        --spec-ngram-size-n N
        --spec-ngram-size-m N
        --spec-ngram-min-hits N
        """,
        ignored=_REMOVED_DRAFTS,
    ),
    *_rows("--lora-init-without-apply", ignored="concerns adapters that a request switches on"),
    *_rows(
        """
        --hf-token -hft TEXT HF_TOKEN
        --api-key TEXT LLAMA_API_KEY
        """,
        ignored=_SECRET,
    ),
    *_rows(
        """
        --hf-repo -hf -hfr REPO LLAMA_ARG_HF_REPO
        --hf-file -hff FILE LLAMA_ARG_HF_FILE
        --docker-repo -dr REPO LLAMA_ARG_DOCKER_REPO
        --model-url -mu URL LLAMA_ARG_MODEL_URL
        --embd-gemma-default
        --fim-qwen-1.5b-default
        --fim-qwen-3b-default
        --fim-qwen-7b-default
        --fim-qwen-7b-spec
        --fim-qwen-14b-spec
        --fim-qwen-30b-default
        --gpt-oss-20b-default
        --gpt-oss-120b-default
        --vision-gemma-4b-default
        --vision-gemma-12b-default
        """,
        refused=_FETCH,
    ),
    *_rows(
        """
        --lora FILE
        --lora-scaled FILE:SCALE,...
        """,
        refused="adds an adapter to the weights; merge it with llama-export-lora and name the result with -m FILE.gguf",
    ),
    *_rows(
        """
        --control-vector FILE
        --control-vector-scaled FILE:SCALE,...
        --control-vector-layer-range START END
        """,
        refused="changes the states between layers, which is not compared here; remove it",
    ),
    *_rows(
        """
        --embedding --embeddings LLAMA_ARG_EMBEDDINGS
        --rerank --reranking LLAMA_ARG_RERANKING
        """,
        refused="makes a server that answers with vectors or scores, and here tokens are compared; remove it",
    ),
    *_rows(
        """
        --models-dir FOLDER LLAMA_ARG_MODELS_DIR
        --models-preset FILE LLAMA_ARG_MODELS_PRESET
        """,
        refused="makes a router of several models; name one model with -m FILE.gguf",
    ),
    *_rows("--rpc LIST LLAMA_ARG_RPC", refused="computes on other machines, which is not compared here; remove it"),
    *_rows(
        """
        --grp-attn-n -gan N
        --grp-attn-w -gaw N
        """,
        refused="is self-extend, which was removed from llama-server; remove it, or set --rope-scaling",
    ),
    *_rows(
        """
        --help -h --usage
        --version
        --cache-list -cl
        --completion-bash
        --list-devices
        """,
        refused=_PRINTS,
    ),
)

BY_NAME: Mapping[str, Flag] = {flag.name: flag for flag in FLAGS}


def spellings() -> dict[str, str]:
    """Return each name as it is written → the flag's long name, after ``no-`` where it switches the flag off."""
    positive = {name: flag.name for flag in FLAGS for name in flag.names}
    return positive | {name: f"no-{flag.name}" for flag in FLAGS for name in flag.off}


def variables() -> dict[str, str]:
    """Return each environment variable → the flag's long name, after ``no-`` where it switches the flag off.

    Variables of secrets are left out.
    """
    found = {flag.variable: flag.name for flag in FLAGS if flag.variable and flag.ignored != _SECRET}
    negative = {
        flag.variable.replace("LLAMA_ARG_", _NEGATIVE_VARIABLE): f"no-{flag.name}"
        for flag in FLAGS
        if flag.off and flag.variable.startswith("LLAMA_ARG_")
    }
    return negative | found


def switch(value: str) -> bool | None:
    """Return whether a value means on, as llama.cpp reads values of variables; ``None`` for another value."""
    return True if value in _TRUTHY else False if value in _FALSY else None


def flash_attention(value: str) -> str | None:
    """Return ``on``, ``off`` or ``auto`` for any spelling that llama.cpp, or an option of an arm, has for it."""
    words = {"on": (*_TRUTHY, "yes"), "off": (*_FALSY, "no"), "auto": _AUTO}
    return next((name for name, spelled in words.items() if value.lower() in spelled), None)


def _layers(value: str) -> str | None:
    return None if value == "auto" else "-1" if value == "all" else value


def _scale(value: str) -> str:
    number = float(value)
    if not number > 0:
        raise ValueError("a factor is above 0")
    return f"{1 / number:.9g}"


def _flash(value: str) -> str:
    if (word := flash_attention(value)) is None:
        raise ValueError("write on, off or auto")
    return word


CONVERSIONS: Mapping[str, Callable[[str], str | None]] = {
    "flash-attn": _flash,
    "gpu-layers": _layers,
    "rope-scale": _scale,
}
"""Flag → the option's value for a flag's value.  ``None`` is the default.  Raises ``ValueError`` for a wrong value."""
