"""Plug-ins: what fidelab puts into engines: a Transformers cache of encoded parts, captures inside vLLM and SGLang."""
