"""Benches: each measures one property of an arm by itself: speed, start-up or memory.  No bench ever sees an engine."""

from fidelab.core.registry import Registry

BENCHES = Registry(
    "bench",
    {
        "startup": "fidelab.bench.startup:Startup",
        "prefill": "fidelab.bench.prefill:PrefillBench",
        "decode": "fidelab.bench.decode:Decode",
        "memory": "fidelab.bench.memory:Memory",
        "serving": "fidelab.bench.serving.bench:Serving",
    },
    group="fidelab.benches",
)
