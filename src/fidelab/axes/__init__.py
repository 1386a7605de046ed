"""Axes: each asks every arm and scores pairs of answers.  No axis ever sees an engine."""

from fidelab.registry import Registry

AXES = Registry(
    "axis",
    {
        "trajectory": "fidelab.axes.trajectory:Trajectory",
        "kld": "fidelab.axes.kld:KLD",
        "rniah": "fidelab.axes.rniah:RNIAH",
        "plad": "fidelab.axes.plad:PLAD",
        "perplexity": "fidelab.axes.perplexity:Perplexity",
        "gsm8k": "fidelab.axes.gsm8k:GSM8K",
        "forced": "fidelab.axes.forced:ForcedDecode",
        "degeneration": "fidelab.axes.degeneration:Degeneration",
        "capability": "fidelab.axes.capability.axis:Capability",
    },
    group="fidelab.axes",
)
