"""Axes: each one builds the requests for all arms and scores pairs of captures.  No axis depends on an engine."""

from fidelab.core.registry import Registry


def _hint(name: str) -> str:
    from fidelab.core.meant import axis_hint

    return axis_hint(name)


AXES = Registry(
    "test",
    {
        "trajectory": "fidelab.axes.trajectory:Trajectory",
        "kld": "fidelab.axes.kld:KLD",
        "rniah": "fidelab.axes.rniah:RNIAH",
        "plad": "fidelab.axes.plad:PLAD",
        "perplexity": "fidelab.axes.perplexity:Perplexity",
        "gsm8k": "fidelab.axes.gsm8k:GSM8K",
        "eval": "fidelab.axes.eval:Eval",
        "toolcalls": "fidelab.axes.toolcalls:ToolCalls",
        "forced": "fidelab.axes.forced:ForcedDecode",
        "degeneration": "fidelab.axes.degeneration:Degeneration",
        "paths": "fidelab.axes.paths:Paths",
    },
    group="fidelab.axes",
    hint=_hint,
)
