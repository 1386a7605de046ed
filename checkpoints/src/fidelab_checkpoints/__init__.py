"""Quantized checkpoints as files: read, audited and converted.  Code that comes with a model is never run.

``files`` opens a checkpoint as tensors by name, from a folder, a file or the hub.  ``modules`` groups the tensors to
layers and reads the configuration of each.  ``scan`` reads every value once.  ``rules`` is the table of possible
defects, ``tensors``, ``templates`` and ``geometry`` hold the rules, ``audit`` applies all of them, and ``catalogue``
writes them as the page docs/failures.md.  ``interface`` lists the names that fidelab uses.
"""

__version__ = "0.2.0"
