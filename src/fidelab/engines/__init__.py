"""Engines: adapters that answer probes.  They run in worker processes, perhaps in foreign environments.

An adapter imports its third-party package inside ``open``; this room needs the standard library, numpy and
the rooms ``formats``, ``kernels`` and ``plugins`` only.
"""

from fidelab.registry import Registry

ENGINES = Registry(
    "engine",
    {
        "hf": "fidelab.engines.hf:HFEngine",
        "llamacpp": "fidelab.engines.llamacpp:LlamaCppEngine",
        "sglang": "fidelab.engines.sglang:SGLangEngine",
        "vllm": "fidelab.engines.vllm:VLLMEngine",
        "openai": "fidelab.engines.openai:OpenAIEngine",
        "fake": "fidelab.engines.fake:FakeEngine",
    },
    group="fidelab.engines",
)
