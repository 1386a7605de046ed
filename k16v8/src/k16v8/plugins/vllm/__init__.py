"""vLLM: a plug-in with an attention backend of its own; see :mod:`k16v8.plugins.vllm.plugin`."""
