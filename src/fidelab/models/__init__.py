"""Models: from the name that a user writes to files on this machine, with their hash and shape.

``resolve`` knows the forms of a name; ``embedded`` fetches the default model, ``hub`` asks the Hugging Face
hub, ``gguf`` converts, ``weights`` lists, measures and hashes, ``cache`` keeps what was made, whole or not
at all. Checkpoints are data here: safetensors and GGUF, never pickle, never code.
"""

from fidelab.models.cache import cache_dir
from fidelab.models.resolve import Listed, Model, listing, path, pull, resolve

__all__ = ["Listed", "Model", "cache_dir", "listing", "path", "pull", "resolve"]
