"""Inputs: the token ids that every arm is asked with, made once, in the parent, with the model's own
tokenizer.

``tokens`` turns text and chat messages into ids; ``corpus`` cuts a text into windows; ``prompts`` reads
prompt files.  The package's own text and prompts lie in ``data``.
"""
