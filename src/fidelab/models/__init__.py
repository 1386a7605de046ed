"""Models: from the name that a user writes to files on this machine, with their hash and shape.

``resolve`` knows the forms of a name; ``embedded`` fetches the default model, ``hub`` asks the Hugging Face
hub, ``gguf`` reads what a GGUF file says without its weights, ``convert`` converts these where an engine needs
them, ``weights`` lists, measures and hashes, ``cache`` keeps what was made, whole or not at all, ``store`` lists
and removes it. Checkpoints are data here: safetensors and GGUF, never pickle, never code.
"""

from fidelab.models.cache import cache_dir
from fidelab.models.resolve import Model, check_conversion, path, pull, quantized_as, resolve, with_weights
from fidelab.models.store import Listed, collect_garbage, listing

__all__ = [
    "Listed",
    "Model",
    "cache_dir",
    "check_conversion",
    "collect_garbage",
    "listing",
    "path",
    "pull",
    "quantized_as",
    "resolve",
    "with_weights",
]
