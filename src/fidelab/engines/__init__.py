"""Engines: adapters that answer probes.  They run in worker processes, perhaps in foreign environments.

An adapter imports its third-party package inside ``open``; this room needs the standard library, numpy and
the rooms ``formats``, ``kernels`` and ``plugins`` only.
"""

from fidelab.registry import Registry

ENGINES = Registry(
    "engine",
    {
        "hf": "fidelab.engines.hf.adapter:HFEngine",
        "llamacpp": "fidelab.engines.llamacpp.adapter:LlamaCppEngine",
        "sglang": "fidelab.engines.sglang.adapter:SGLangEngine",
        "vllm": "fidelab.engines.vllm.adapter:VLLMEngine",
        "openai": "fidelab.engines.openai.adapter:OpenAIEngine",
        "fake": "fidelab.engines.fake:FakeEngine",
    },
    group="fidelab.engines",
)
