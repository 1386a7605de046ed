"""Engines: adapters that answer requests.  They run in worker processes, often in separate environments.

An adapter imports its third-party package inside ``open``; importing this room needs the standard library and numpy.
"""

from fidelab.core.registry import Registry

DEFAULT = "hf"
"""The engine where none is named.  It is built in, and rounds weights, keys and values for studies."""
CLIENT = "openai"
"""The engine of a server that runs already, whatever its kind."""


def _hint(name: str) -> str:
    from fidelab.core.meant import engine_hint

    return engine_hint(name)


ENGINES = Registry(
    "engine",
    {
        DEFAULT: "fidelab.engines.hf.adapter:HFEngine",
        "llamacpp": "fidelab.engines.llamacpp.adapter:LlamaCppEngine",
        "sglang": "fidelab.engines.sglang.adapter:SGLangEngine",
        "vllm": "fidelab.engines.vllm.adapter:VLLMEngine",
        CLIENT: "fidelab.engines.openai.adapter:OpenAIEngine",
        "fake": "fidelab.engines.fake:FakeEngine",
    },
    group="fidelab.engines",
    hint=_hint,
)


def engine_name(text: str) -> str:
    """Return an engine's own name: ``llamacpp`` for ``llama.cpp``, ``hf`` for ``transformers``, else the same name."""
    if text in ENGINES.built_in:
        return text
    titles = {str(getattr(cls, "title", "")).lower(): name for name, cls in ENGINES.available().items()}
    return titles.get(text.lower(), text)
