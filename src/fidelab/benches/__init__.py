"""Benches: each measures an arm by itself: speed, start-up, memory.  No bench ever sees an engine."""

from fidelab.registry import Registry

BENCHES = Registry(
    "bench",
    {
        "startup": "fidelab.benches.startup:Startup",
        "prefill": "fidelab.benches.prefill:Prefill",
        "decode": "fidelab.benches.decode:Decode",
        "memory": "fidelab.benches.memory:Memory",
        "serving": "fidelab.benches.serving:Serving",
    },
    group="fidelab.benches",
)
