"""Models: find the files of a named model on this machine, with their hash and shape.

``resolve`` knows the forms of a name. ``embedded`` fetches the default model, and ``hub`` asks the Hugging Face hub.
``gguf`` reads a GGUF file without its weights, and ``convert`` converts the weights if an engine needs that.
``weights`` lists, measures and hashes weight files. ``cache`` keeps results, whole or not at all, and ``store`` lists
and removes them. Checkpoints are data here: safetensors and GGUF, never pickle, never code.
"""

from fidelab.models.cache import cache_dir
from fidelab.models.resolve import Model, check_conversion, gguf_file, path, pull, quantized_as, resolve, with_weights
from fidelab.models.store import Listed, collect_garbage, listing

__all__ = [
    "Listed",
    "Model",
    "cache_dir",
    "check_conversion",
    "collect_garbage",
    "gguf_file",
    "listing",
    "path",
    "pull",
    "quantized_as",
    "resolve",
    "with_weights",
]
