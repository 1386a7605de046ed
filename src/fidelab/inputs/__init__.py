"""Inputs: the token ids for every arm, made once in the parent process with the model's own tokenizer.

``tokens`` turns text and chat messages into ids; ``corpus`` cuts a text into windows; ``prompts`` reads prompt files.
``data`` contains the package's own text and prompts.
"""
