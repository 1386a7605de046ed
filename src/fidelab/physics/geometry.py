"""The shape of a named model: from its GGUF file, or from the model that Transformers builds.

Nothing is derived from the names of configuration fields: Transformers builds the model on the
``meta`` device, where tensors have shapes and no content, and one token is passed through it.  The content of its cache
afterwards is what the architecture caches. This also covers shared layers, latents, sliding windows and recurrent
states.  One exception: Falcon, whose KV heads Transformers repeats before it caches them, as no server does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fidelab.core import cache_parameter
from fidelab.core.errors import FidelabError, InputError
from fidelab.core.registry import require
from fidelab.core.sequence import KVLayer
from fidelab.models import embedded, hub
from fidelab.models.decoder import check_decoder, not_a_decoder
from fidelab.models.local import local_model, unknown_name
from fidelab.models.resolve import HUB_ID
from fidelab.models.weights import read_entries, read_json, weight_files
from fidelab.physics.gguf_shapes import gguf_geometry
from fidelab.physics.shapes import Geometry, Weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "num_selected_experts")
_MAX_EXPERTS = 2**16  # a larger value is not an expert count


def model_geometry(source: Path, name: str = "") -> Geometry:
    """Return the shape of a model in a folder with ``config.json``, or of such a file.

    Raises:
        InputError: If there is no configuration, or Transformers does not know the architecture or cannot build it from
            these fields.
        MissingPackageError: If Transformers or torch is not installed.
    """
    file = source if source.is_file() else source / "config.json"
    words = read_json(file)
    kind = words.get("model_type")
    if not isinstance(kind, str):
        raise _cannot(file, "it lacks model_type")
    check_decoder(words, name or str(source))
    try:
        _check_sizes(words, file)
        user = f"{file}: the shape of model_type {kind!r}"
        transformers = require("transformers", user)
        require("torch", user)
        config = transformers.AutoConfig.from_pretrained(file.parent, trust_remote_code=False, local_files_only=True)
        # Fields that every shape needs and that the file lacks: the class would use its defaults
        inner = words.get("text_config")
        own = {**words, **(inner if isinstance(inner, Mapping) else {})}
        text = config.get_text_config()
        if lacks := [
            key
            for key in ("num_hidden_layers", "hidden_size")
            if not {key, text.attribute_map.get(key, key)} & own.keys()
        ]:
            raise _cannot(file, f"it lacks {', '.join(lacks)}")
        return _built(config, name or str(source))
    except FidelabError:
        raise
    except Exception as error:  # configurations and models fail in as many ways as there are classes
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise _cannot(file, f"Transformers cannot build model_type {kind!r} from it ({first})") from error


def named_geometry(name: str) -> tuple[Geometry, str]:
    """Return the shape of a model by name, and its 16-bit type. No weights are fetched or read.

    ``name``: an embedded name, a folder with ``config.json``, such a file, a ``.gguf`` file, or a hub id.

    Raises:
        InputError: If no model has that name, or Transformers cannot build its architecture.
    """
    here = embedded.gguf_file(name) if name in embedded.NAMES else local_model(name)
    if here is None:
        if name.endswith(".gguf"):
            raise InputError(f"no file {name}")
        match = HUB_ID.fullmatch(name)
        if match is None:
            raise unknown_name(name, "an embedded name, a hub id, a folder with config.json, or a .gguf file")
        here, _ = hub.snapshot(match["repo"], match["revision"], weights=False)
    if here.suffix == ".gguf" and here.is_file():
        return gguf_geometry(here, name), "bf16"
    words = read_json(here if here.is_file() else here / "config.json")
    geometry = model_geometry(here, name)
    if here.is_dir() and words.get("quantization_config"):
        geometry = _as_stored(geometry, here)
    return geometry, "f16" if "float16" in (words.get("torch_dtype"), words.get("dtype")) else "bf16"


def _as_stored(geometry: Geometry, folder: Path) -> Geometry:
    """Return the shape of a quantized checkpoint with the bytes of its weight files; unchanged without these files.

    Tables of embeddings that a step does not read are counted in 16 bits, as no format of checkpoints quantizes them.
    """
    try:
        tensors = [item for path in weight_files(folder) for item in read_entries(path)[0].items()]
    except InputError:
        note = "this checkpoint is quantized, and its weights are not here: they are counted in 16 bits; --weight-bits"
        return replace(geometry, notes=(*geometry.notes, f"{note} sets others"))
    sizes = {name: entry.end - entry.start for name, entry in tensors}
    total = sum(sizes.values())
    experts = sum(size for name, size in sizes.items() if ".experts." in name) if geometry.experts else 0
    idle = min(2 * geometry.idle_parameters, total - experts)
    return replace(geometry, stored=Weights(total, idle, experts))


def _cannot(file: Path, why: str) -> InputError:
    return InputError(f"{file}: {why}; or pass --layers, --kv-heads, --head-dim and --params")


_MAX_BUILT = {  # modules that are built one by one, by the end of the key that counts them
    re.compile(r"(?:^|_)(?:(?<!per_)layers?|blocks?|depths?|stages?|altup_num_inputs)$"): 2_000,
    re.compile(r"(?:^|_)experts?$"): 10_000,
}
_MAX_NUMBER = 1 << 40  # of any other number
_MAX_LIST_LENGTH = 20_000  # of one list


def _check_sizes(value: Any, file: Path, key: str = "") -> None:
    """Refuse sizes for which building the model would not end. Those of real models are far smaller.

    Raises:
        InputError: If a field exceeds its bound. The message names both.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check_sizes(inner, file, str(name))
    elif isinstance(value, list):
        if len(value) > _MAX_LIST_LENGTH:
            raise _cannot(file, f"{key} has {len(value):,} items, at most {_MAX_LIST_LENGTH:,} are read")
        for inner in value:
            _check_sizes(inner, file, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        most = next((bound for end, bound in _MAX_BUILT.items() if end.search(key)), _MAX_NUMBER)
        if abs(value) > most:
            raise _cannot(file, f"{key} is {value:,}, at most {most:,} are read")


def _built(config: PretrainedConfig, name: str) -> Geometry:
    import torch
    from torch.distributions import Distribution
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMaskedLM,
        AutoModelForMultimodalLM,
        DynamicCache,
    )
    from transformers.cache_utils import DummyLayer

    text = config.get_text_config()
    autos = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)
    auto = next((one for one in autos if type(config) in one._model_mapping), None)
    encodes = type(text) in AutoModelForMaskedLM._model_mapping and getattr(text, "is_decoder", None) is False
    if auto is None or encodes:  # classes such as BERT's can be both
        raise not_a_decoder(name, config.model_type)
    notes = []
    with torch.device("meta"), torch.no_grad():
        try:
            model = auto.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
        except ImportError:  # a tower for images or sound needs a package; the language model does not
            if text is config:
                raise
            model = AutoModelForCausalLM.from_config(text, dtype=torch.bfloat16, trust_remote_code=False)
            notes.append("only the language model is counted: its other parts need a package that is not installed")
        cache = DynamicCache(config=text)
        parameter = cache_parameter(model)
        checks = Distribution._validate_args  # they read values, which tensors on meta lack
        Distribution.set_default_validate_args(False)
        try:
            model(input_ids=torch.zeros((1, 1), dtype=torch.long), use_cache=True, **{parameter: cache})
        finally:
            Distribution.set_default_validate_args(checks)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    head = model.get_output_embeddings()
    named = dict(model.named_parameters())
    total = sum(p.numel() for p in named.values())
    language = {id(p): p.numel() for part in (decoder, head) if part is not None for p in part.parameters()}
    tables = {id(m.weight): m.weight.numel() for m in decoder.modules() if isinstance(m, torch.nn.Embedding)}
    if head is not None:
        tables.pop(id(head.weight), None)  # one matrix for both is multiplied with in every step
    idle = total - sum(language.values()) + sum(tables.values())
    experts = [p for key, p in named.items() if ".experts." in key and id(p) in language]
    n_experts, active = 0, 0
    if experts:
        counts = [getattr(text, key, None) for key in ("num_local_experts", "n_routed_experts", "num_experts")]
        n = next((count for count in counts if isinstance(count, int) and 0 < count < _MAX_EXPERTS), None)
        each = next((k for k in (getattr(text, key, None) for key in _ACTIVE) if isinstance(k, int) and k > 0), None)
        if n is None or each is None:
            raise InputError(
                f"{text.model_type}: the configuration does not say "
                f"{'how many experts there are' if n is None else 'how many experts a token takes'} "
                f"({'num_local_experts' if n is None else _ACTIVE[0]})"
            )
        n_experts, active = n, min(each, n)
    latent = getattr(text, "kv_lora_rank", None) is not None
    images = getattr(text, "cross_attention_layers", ())  # attend to an image, and there is none
    layers = {n: x for n, x in enumerate(cache.layers) if not isinstance(x, DummyLayer) and n not in images}
    empty = sum(
        getattr(layer, "keys", None) is None and not any(True for _ in _states(layer)) for layer in layers.values()
    )
    if empty or not layers:
        raise InputError(
            f"{empty or 'all'} of {len(cache.layers)} layers of {type(model).__name__} cached nothing "
            f"when it was called with {parameter}="
        )
    kv = tuple(_kv_layer(n, layer, latent) for n, layer in layers.items() if getattr(layer, "keys", None) is not None)
    repeated = 1
    if text.model_type == "falcon" and text.new_decoder_architecture:
        served = text.num_kv_heads
        if any(layer.heads % served for layer in kv):
            raise InputError(f"{kv[0].heads} heads are no multiple of num_kv_heads {served}")
        repeated = kv[0].heads // served
        kv = tuple(replace(layer, heads=served) for layer in kv)
    return Geometry(
        name=name,
        layers=int(text.num_hidden_layers),
        kv=kv,
        parameters=total,
        state_bytes=sum(state.nbytes for layer in layers.values() for state in _states(layer)),
        idle_parameters=idle,
        expert_parameters=sum(p.numel() for p in experts) if n_experts else 0,
        experts=n_experts,
        active_experts=active,
        query_heads=int(getattr(text, "num_attention_heads", 0) or 0),
        max_positions=getattr(text, "max_position_embeddings", None),
        repeated=repeated,
        notes=tuple(notes),
    )


def _kv_layer(number: int, layer: Any, latent: bool) -> KVLayer:
    _, heads, _, k_dim = layer.keys.shape
    window = getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None
    return KVLayer(heads, k_dim, layer.values.shape[-1], window, latent and heads == 1, number)


def _states(layer: Any) -> Iterator[Any]:
    """Tensors of a recurrent layer's state."""
    for name in ("conv_states", "recurrent_states"):
        held = getattr(layer, name, None)
        yield from (state for state in (held.values() if isinstance(held, Mapping) else [held]) if state is not None)
