"""Axes with metrics and plots for the sample: ordinary, hostile and odd ones."""

from __future__ import annotations

from typing import Any

from fidelab.core import Status
from fidelab.results.measurement import Cell, Definition, Flag, Measurement
from fidelab.results.plots import Bars, Curve, Grid, Heatmap, TablePlot, TextPair, Texts

HOSTILE = (
    "</script><script>alert(1);document.title='owned'</script>"
    "<img src=x onerror=alert(2)><svg onload=\"document.title='owned'\">"
    "\"' autofocus onfocus=document.title='owned' --><!--\u2028]]>{{ 7 * 7 }}[bold]\x1b[31m\u202e"
)
"""Tries to leave text, attributes, comments, the data block and the template; changes the title where a script runs."""

DIVERGENCES = (
    TextPair(
        label="prompt 3, token 17: margin 1.31 nats",
        tag="real",
        prompt="Name a colour of the sky.\n",
        shared="The sky is ",
        reference="blue during\n  the day",
        candidate="green & <b>bold</b>",
    ),
    TextPair(
        label="prompt 0, token 2: margin 0.0400 nats",
        tag="near tie",
        prompt="Count.",
        shared="1, ",
        reference="2, 3",
        candidate="two, three",
    ),
    TextPair(
        label="prompt 5, token 9: one side ends",
        tag="ended",
        prompt="Say no.",
        shared="No.",
        reference="",
        candidate=" Never.",
    ),
)


def rniah_axis(lost: float, **changes: Any) -> Measurement:
    """Retrieval: metrics, three heat maps with a gap, and a curve that arms share."""
    base = ((1.0, 1.0, 1.0), (1.0, 0.67, None))
    kept = tuple(tuple(None if value is None else round(value * (1 - lost), 3) for value in row) for row in base)
    less = tuple(tuple(None if value is None else round(-value * lost, 3) for value in row) for row in base)
    fields: dict[str, Any] = {
        "status": Status.OK,
        "n_items": 18,
        "n_failed": 0,
        "n_clusters": 18,
        "cluster": "prompt",
        "summary": f"lost {round(16 * lost)} of 16",
        "reference_summary": "finds 16 of 18",
        "metrics": (
            Definition("score", "points", "higher")(100 * (1 - lost), (max(0.0, 90 - 100 * lost), 100.0)),
            Definition("over_control", "points", "higher")(-100 * lost, (-100 * lost - 5, -100 * lost + 5)),
            Definition("accuracy", "share", "higher")(0.94 * (1 - lost), (0.5 * (1 - lost), 0.99)),
            Definition("sign_test", "p")(0.0004),
            Definition("onset", "tokens")(None),
        ),
        "plots": (
            Heatmap(
                title="hits by length and place",
                x_label="place in the prompt",
                y_label="prompt, tokens",
                x=("0.1", "0.5", "0.9"),
                y=("512", "2048"),
                low=0,
                high=1,
                grids=(
                    Grid(name="reference", values=base),
                    Grid(name="candidate", values=kept),
                    Grid(name="difference", values=less, signed=True),
                ),
                note="3 trials per cell",
            ),
            Curve(
                key="by_length",
                title="accuracy by length",
                x_label="prompt, tokens",
                y_label="accuracy",
                x=(512, 2048, 8192),
                y=(1.0, None, 0.94 * (1 - lost)),
                log_x=True,
            ),
        ),
    }
    return Measurement(**{**fields, **changes})


def plad_axis() -> Measurement:
    """Perturbations: a table and texts."""
    return Measurement(
        status=Status.OK,
        metrics=(
            Definition("score", "points", "higher")(96.5),
            Definition("mean_excess", "ratio", "lower")(-0.0031, (-0.01, 0.004)),
        ),
        plots=(
            TablePlot(
                title="by perturbation",
                columns=("perturbation", "cell", "skipped"),
                rows=(("typo", 60.6531, 0), ("case", 9.5, 12), ("punct", None, 3)),
                note="skipped: not applicable",
            ),
            Texts(
                title="largest drift",
                pairs=(TextPair(label="typo, prompt 2", reference="one\ntwo", candidate="", note="ends at once"),),
            ),
        ),
    )


def odd_axis(name: str) -> Measurement:
    """Plots without content, and with the largest and smallest numbers."""
    words: dict[str, Any] = {"title": name, "x_label": name, "y_label": name}
    return Measurement(
        status=Status.OK,
        metrics=(Definition("odd", name=name)(1e300), Definition("odd", "bytes", name=name)(1e300, cell={name: name})),
        plots=(
            Heatmap(**words, x=(), y=(), low=0, high=0, grids=(Grid(name=name, values=()),)),
            Heatmap(
                **words,
                x=(name,) * 40,
                y=(name,),
                low=-1e308,
                high=1e308,
                grids=(Grid(name=name, values=((1e300,) * 40,)),),
            ),
            Curve(**words, key="empty", x=(), y=()),
            Curve(**words, key="gaps", x=(0, 1), y=(None, None), log_x=True, log_y=True),
            Curve(**words, key="extreme", x=(-1e308, 1e308), y=(-1e308, 1e308)),
            TablePlot(title=name, columns=(), rows=((),)),
            TablePlot(title=name, columns=(name, name), rows=((1e-300, None), (-5, "text"))),
            Texts(title=name, pairs=()),
            Bars(key="nothing", title=name, y_label=name, labels=(), parts={}),
            Bars(key="zero", title=name, y_label=name, labels=(name, name), parts={name: (0.0, 1e300)}),
        ),
    )


def hostile_axis() -> Measurement:
    """Hostile text in every field that an axis may fill."""
    return Measurement(
        status=Status.OK,
        reason=HOSTILE,
        metrics=(
            Definition("hostile", about=HOSTILE, name=HOSTILE)(
                1.0, caveat=HOSTILE, flags=(Flag(kind=HOSTILE, text=HOSTILE),)
            ),
            Definition("hostile", "tok/s", "higher", name=HOSTILE)(1.0, cell={HOSTILE: HOSTILE}, headline=True),
        ),
        cells=(Cell(status=Status.FAILED, reason=HOSTILE, at={HOSTILE: HOSTILE}, facts={HOSTILE: HOSTILE}),),
        flags=(Flag(kind=HOSTILE, text=HOSTILE),),
        plots=(
            Heatmap(
                title=HOSTILE,
                x_label=HOSTILE,
                y_label=HOSTILE,
                x=(HOSTILE,),
                y=(HOSTILE,),
                low=0,
                high=1,
                grids=(Grid(name=HOSTILE, values=((0.5,),)),),
                note=HOSTILE,
            ),
            Curve(
                key=HOSTILE,
                title=HOSTILE,
                x_label=HOSTILE,
                y_label=HOSTILE,
                x=(1, 2),
                y=(1, 2),
                series=HOSTILE,
                caption=HOSTILE,
                doubts=("", HOSTILE),
            ),
            Bars(
                key=HOSTILE, title=HOSTILE, y_label=HOSTILE, labels=(HOSTILE,), parts={HOSTILE: (1.0,)}, caption=HOSTILE
            ),
            TablePlot(title=HOSTILE, columns=(HOSTILE, "n"), rows=((HOSTILE, 1),), note=HOSTILE),
            Texts(
                title=HOSTILE,
                pairs=(
                    TextPair(
                        label=HOSTILE,
                        reference=HOSTILE,
                        candidate=HOSTILE,
                        note=HOSTILE,
                        prompt=HOSTILE,
                        shared=HOSTILE,
                        tag=HOSTILE,
                    ),
                ),
            ),
        ),
        facts={HOSTILE: HOSTILE},
    )
