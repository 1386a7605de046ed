"""Quantized checkpoints as files: read, audited, converted; nothing of a model's code runs.

``files`` opens a checkpoint as tensors by name, wherever it lies; ``modules`` groups them to layers and reads what the
configuration says of these; ``scan`` looks at every value once. ``rules`` is the table of what can be wrong,
``tensors``, ``templates`` and ``geometry`` hold the rules, ``audit`` applies all, and ``catalogue`` writes them as
the page docs/failures.md.
"""
