"""Engines: adapters that answer requests.  They run in worker processes, often in separate environments.

An adapter imports its third-party package inside ``open``; importing this room needs the standard library and numpy.
"""

from fidelab.core.registry import Registry

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
