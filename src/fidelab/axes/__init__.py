"""Axes: each builds one probe and scores a pair of captures.  No axis ever sees an engine."""

from fidelab.registry import Registry

AXES = Registry(
    "axis",
    {
        "trajectory": "fidelab.axes.trajectory:Trajectory",
        "kld": "fidelab.axes.kld:KLD",
    },
    group="fidelab.axes",
)
