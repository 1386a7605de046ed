"""Quantized checkpoints as files: read, audited, converted; nothing of a model's code runs.

``files`` opens a checkpoint as tensors by name, wherever it lies.
"""
