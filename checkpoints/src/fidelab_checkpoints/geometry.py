"""Rules about sizes: layers, heads, experts and vocabulary of the configuration against the tensors' shapes.

Architectures differ, and so do layers.  A size is therefore wrong only if no number in the configuration explains it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fidelab_checkpoints.files import RAW
from fidelab_checkpoints.modules import Module, text_config
from fidelab_checkpoints.rules import Finding, Subject, broken

_MAX_PADDING_ROWS = 1024  # rows that an embedding may have beyond the vocabulary
_LAYER = re.compile(r"(?P<stack>.*?)(?:layers|h|blocks|blk|block)\.(?P<number>\d+)\.(?P<leaf>.+)")
_OTHER_STACK = re.compile(
    r"(^|\.)(visual|vision\w*|audio\w*|speech\w*|mtp\w*|draft\w*|talker|encoder|qformer|v|a|mm)\."
)
_EXPERTS = re.compile(r"(?P<layer>.*)\.experts\.(?P<number>\d+)\.")
_EMBEDDING = ("embed_tokens", "token_embd", "wte", "tok_embeddings", "embed_in", "word_embeddings")
_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_LAYER = ("block_configs", "layer_configs", "kv_lora_rank", "q_lora_rank", "num_heads_per_layer")  # own arithmetic
_GGUF = {  # keys of GGUF after the architecture's prefix, by their names in config.json
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_count": "num_experts",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
}
_LEAVES = {  # leaf of a module → what its outputs and its inputs are
    "self_attn.q_proj": ("queries", "hidden"),
    "self_attn.k_proj": ("keys", "hidden"),
    "self_attn.v_proj": ("keys", "hidden"),
    "self_attn.qkv_proj": ("all heads", "hidden"),
    "self_attn.o_proj": ("hidden", "heads"),
    "mlp.gate_proj": ("intermediate", "hidden"),
    "mlp.up_proj": ("intermediate", "hidden"),
    "mlp.gate_up_proj": ("two intermediate", "hidden"),
    "mlp.down_proj": ("hidden", "intermediate"),
    "attn_q": ("queries", "hidden"),
    "attn_k": ("keys", "hidden"),
    "attn_v": ("keys", "hidden"),
    "attn_output": ("hidden", "heads"),
    "ffn_gate": ("intermediate", "hidden"),
    "ffn_up": ("intermediate", "hidden"),
    "ffn_down": ("hidden", "intermediate"),
}


@dataclass(frozen=True)
class _Geometry:
    """Numbers of a configuration.

    Each set holds all values that a size may have, and is empty if none is specified.
    """

    config: Mapping[str, Any]

    def numbers(self, *keys: str) -> set[int]:
        """Return the integers under these keys, including all items of lists."""
        layers = self.config.get("per_layer_config")  # overrides for single layers, by layer number
        places = [self.config, *(layers.values() if isinstance(layers, dict) else ())]
        values = (place.get(key) for place in places if isinstance(place, Mapping) for key in keys)
        return {n for v in values for n in (v if isinstance(v, list) else [v]) if type(n) is int and n > 0}

    def ending(self, end: str) -> set[int]:
        """Return the integers under keys with this ending: layers with a sliding window often have separate sizes."""
        return self.numbers(end, *(key for key in self.config if key.endswith(f"_{end}")))

    @property
    def layers(self) -> int | None:
        counts = (self.numbers(key) for key in ("num_layers_per_stack", "num_hidden_layers", "n_layer", "num_layers"))
        return next((max(found) for found in counts if found), None)

    @property
    def sizes(self) -> dict[str, set[int]]:
        """The allowed sizes for each kind of a layer's outputs or inputs."""
        hidden = self.numbers("hidden_size", "n_embd")
        if any(self.config.get(key) for key in _PER_LAYER):
            return {"hidden": hidden}
        heads, kv, dims = (self.ending(end) for end in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        dims |= {h // n for h in hidden for n in heads if h % n == 0} if not self.numbers("head_dim") else set()
        kv = kv or heads
        wide = {n * d for n in heads for d in dims}
        keys = {n * d for n in kv for d in dims}
        names = ("ffn_dim", "n_inner", "ffn_hidden_size")
        inner = self.numbers(*(key for key in self.config if "intermediate" in key or key in names))
        inner |= {n * m for n in inner for m in (2, *self.numbers("n_shared_experts", "num_shared_experts"))}
        kind = str(self.config.get("model_type"))
        gated = bool(self.config.get("attn_output_gate")) or kind.startswith(("qwen3_next", "qwen3_5"))
        return {
            "hidden": hidden,
            "heads": wide,
            "queries": wide | {2 * n for n in wide} if gated else wide,
            "keys": keys,
            "all heads": {q + 2 * k for q in wide for k in wide | keys},
            "intermediate": inner,
            "two intermediate": {2 * n for n in inner},
        }


def _geometry(subject: Subject) -> _Geometry:
    """Return the sizes of the text model."""
    checkpoint = subject.checkpoint
    if checkpoint.format == "gguf":
        prefix = checkpoint.metadata.get("general.architecture")
        config = {name: checkpoint.metadata.get(f"{prefix}.{key}") for key, name in _GGUF.items()}
        if prefix in ("qwen3next", "qwen35", "qwen35moe"):
            config["attn_output_gate"] = True
        return _Geometry({**config, "vocab_size": checkpoint.metadata.get("tokenizer.ggml.tokens")})
    config, text = checkpoint.config, text_config(checkpoint.config)
    return _Geometry({} if text is config and config.get("is_encoder_decoder") else text)


def _stack(subject: Subject) -> dict[int, list[tuple[str, Module]]]:
    """Return the text model's layers by number, each with its leaves and modules."""
    stacks: dict[str, dict[int, list[tuple[str, Module]]]] = defaultdict(lambda: defaultdict(list))
    for name, module in subject.modules.items():
        match = _LAYER.fullmatch(name)
        if match is not None and not _OTHER_STACK.search(match["stack"]):
            stacks[match["stack"]][int(match["number"])].append((match["leaf"], module))
    return max(stacks.values(), key=lambda layers: sum(len(modules) for modules in layers.values()), default={})


def _size(subject: Subject, module: Module) -> tuple[int, int] | None:
    """Return the outputs and inputs of a linear layer, quantized or not; ``None`` if its tensors do not determine
    them.
    """
    weight = module.parts.get("weight")
    if weight is not None and len(weight.shape) == 2:
        if subject.checkpoint.format == "gguf" or (weight.dtype in RAW and weight.dtype not in ("U8", "I32", "U32")):
            return weight.shape[0], weight.shape[1]
        return None
    packing = module.packing()
    if packing is None:
        return None
    inputs = packing.inputs(subject.scheme.of(module.name).bits)
    return (packing.n, inputs) if inputs else None


def _embedding(subject: Subject) -> tuple[str, tuple[int, int]] | None:
    for name, module in subject.modules.items():
        if name.rpartition(".")[2] in _EMBEDDING and not _OTHER_STACK.search(name):
            size = _size(subject, module)
            return None if size is None else (name, size)
    return None


def _or(numbers: set[int]) -> str:
    return " or ".join(f"{n:,}" for n in sorted(numbers)[:4])


@broken(
    title="More or fewer layers than configured",
    symptom="the loader stops, or the missing layers stay as they were initialized: noise; further ones are ignored",
    cause="layers pruned or merged without the configuration, a configuration of another size, or a lost shard",
    check="layers are numbered from 0 to num_hidden_layers - 1 (or block_count), with none besides",
    command="take config.json of the same model, or fetch the missing shard",
)
def _geometry_layers(subject: Subject) -> Iterator[Finding]:
    geometry, stack = _geometry(subject), _stack(subject)
    count = geometry.layers
    if count is None or not stack or count > 10_000:
        return
    missing = [n for n in range(count) if n not in stack]
    if missing:
        yield Finding(
            f"{count} layers are configured, {len(missing)} of them {'has' if len(missing) == 1 else 'have'} no "
            f"tensor, the first is layer {missing[0]}"
        )
    more = geometry.numbers("num_nextn_predict_layers", "mtp_num_hidden_layers")
    beyond = sorted(n for n in stack if n >= count + max(more, default=0))
    if beyond:
        names = [module.name for n in beyond for _, module in stack[n]]
        text = f"{count} layers are configured, and there are {len(beyond)} more, from layer {beyond[0]}"
        yield Finding(text, names, "suspicious")


@broken(
    title="Shapes other than configured",
    symptom="a size mismatch while loading; with fused or transposed layers garbage instead of an error",
    cause="config.json of another size or version of the model, a transposed matrix, or heads or neurons that were cut",
    check="outputs and inputs of attention and MLP layers, quantized or not, against hidden_size, heads, head_dim, "
    "key-value heads and every intermediate size that is configured",
    command="compare config.json with the original's: fidelab checkpoint audit CHECKPOINT --base ORIGINAL",
)
def _geometry_shapes(subject: Subject) -> Iterator[Finding]:
    sizes = _geometry(subject).sizes
    wrong: dict[tuple[str, str, int, str], list[str]] = defaultdict(list)
    for modules in _stack(subject).values():
        for leaf, module in modules:
            kinds = _LEAVES.get(re.sub(r"^mlp\.(?:experts\.\d+|shared_experts?)\.", "mlp.", leaf))
            size = _size(subject, module) if kinds else None
            if kinds is None or size is None:
                continue
            for side, kind, number in zip(("outputs", "inputs"), kinds, size, strict=True):
                allowed = sizes.get(kind, set())
                if allowed and number not in allowed:
                    wrong[leaf.rpartition(".")[2], side, number, _or(allowed)].append(module.name)
    for (leaf, side, number, allowed_text), names in wrong.items():
        of = f"{len(names)} {leaf}" if len(names) > 1 else names[0]
        have = "have" if len(names) > 1 else "has"
        yield Finding(f"{of} {have} {number:,} {side}, configured {allowed_text}", names)
    embedding = _embedding(subject)
    if embedding is not None and (hidden := sizes["hidden"]):
        name, (_, width) = embedding
        factored = _geometry(subject).ending("embedding_size") | _geometry(subject).numbers("word_embed_proj_dim")
        if width not in hidden | factored:
            yield Finding(f"{name} is {width:,} wide, configured {_or(hidden)}", [name])


@broken(
    title="A vocabulary other than configured",
    symptom="an error while loading, or an index error at tokens that the embedding lacks",
    cause="an embedding resized without the configuration, or tokens added without the embedding",
    check="embedding and LM head have vocab_size rows, or up to 1,024 more as padding, and about as many as each other",
    command="set vocab_size to the rows of the embedding, and see that the tokenizer has no ids beyond",
)
def _geometry_vocabulary(subject: Subject) -> Iterator[Finding]:
    configured = max(_geometry(subject).numbers("vocab_size"), default=None)
    embedding = _embedding(subject)
    rows: dict[str, int] = {} if embedding is None else {embedding[0]: embedding[1][0]}
    for name, module in subject.modules.items():
        size = _size(subject, module) if module.kind == "head" and not re.search(r"\.\d+\.", name) else None
        if size is not None and not _OTHER_STACK.search(name):
            rows[name] = size[0]
    if configured is not None:
        few = {name: n for name, n in rows.items() if n < configured}
        for name, n in few.items():
            yield Finding(f"{name} has {n:,} rows for a vocabulary of {configured:,}", [name])
        for name, n in rows.items():
            if n >= configured + _MAX_PADDING_ROWS:
                text = f"{name} has {n:,} rows for a vocabulary of {configured:,}, which is more than padding"
                yield Finding(text, [name], "suspicious")
        if few:
            return
    if rows and max(rows.values()) - min(rows.values()) >= _MAX_PADDING_ROWS:
        texts = ", ".join(f"{name} has {n:,}" for name, n in rows.items())
        yield Finding(f"rows of the vocabulary differ: {texts}", list(rows), severity="suspicious")


@broken(
    title="More or fewer experts than configured",
    symptom="an error while loading, experts that stay uninitialized, or tokens routed to experts that are not there",
    cause="experts pruned or merged without the configuration or the router, or names that were not remapped",
    check="numbered or fused experts of every layer, and the rows of its router, are as many as configured",
    command="take config.json of the same model; fidelab checkpoint audit CHECKPOINT --base ORIGINAL names the missing",
)
def _geometry_experts(subject: Subject) -> Iterator[Finding]:
    allowed = _geometry(subject).numbers(*_EXPERT_COUNT_KEYS)
    if not allowed:
        return
    experts: dict[str, set[int]] = defaultdict(set)
    routers: dict[str, int] = {}
    for name, module in subject.modules.items():
        if _OTHER_STACK.search(name):
            continue
        if match := _EXPERTS.match(f"{name}."):
            experts[match["layer"]].add(int(match["number"]))
        elif module.kind == "router" and (size := _size(subject, module)) is not None:
            routers[name] = size[0]
    more = _geometry(subject).ending("shared_experts") | _geometry(subject).numbers("zero_expert_num")
    for what, counts, further in (
        ("experts", {layer: len(numbers) for layer, numbers in experts.items()}, set()),
        ("rows in the router", routers, more),  # which may choose these as well
    ):
        wrong = {name: n for name, n in counts.items() if n not in allowed | {m + a for m in further for a in allowed}}
        if wrong:
            name, n = next(iter(wrong.items()))
            yield Finding(
                f"{len(wrong)} layer{'s' if len(wrong) > 1 else ''} of experts {'have' if len(wrong) > 1 else 'has'} "
                f"other than {_or(allowed)} {what}: {name} has {n:,}",
                list(wrong),
            )
