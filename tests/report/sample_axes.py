"""Axes with figures and panels for the sample: ordinary, hostile and odd ones."""

from __future__ import annotations

from typing import Any

from fidelab.core import Status
from fidelab.results.axis_record import Excess, Figure, OtherAxis
from fidelab.results.plots import Curve, Divergence, Grid, Heatmap, TablePlot, TextPair, Texts

HOSTILE = (
    "</script><script>alert(1);document.title='owned'</script>"
    "<img src=x onerror=alert(2)><svg onload=\"document.title='owned'\">"
    "\"' autofocus onfocus=document.title='owned' --><!--\u2028]]>{{ 7 * 7 }}[bold]\x1b[31m\u202e"
)
"""Tries to leave text, attributes, comments, the data block and the template; changes the title where a script runs."""

DIVERGENCES = (
    Divergence(
        item=3,
        at=17,
        margin=1.31,
        prompt="Name a colour of the sky.\n",
        shared="The sky is ",
        reference="blue during\n  the day",
        candidate="green & <b>bold</b>",
    ),
    Divergence(item=0, at=2, margin=0.04, prompt="Count.", shared="1, ", reference="2, 3", candidate="two, three"),
    Divergence(item=5, at=9, prompt="Say no.", shared="No.", reference="", candidate=" Never."),
)


def rniah_axis(lost: float, **changes: Any) -> OtherAxis:
    """Retrieval: figures, three heat maps with a gap, and a curve that arms share."""
    base = ((1.0, 1.0, 1.0), (1.0, 0.67, None))
    kept = tuple(tuple(None if value is None else round(value * (1 - lost), 3) for value in row) for row in base)
    less = tuple(tuple(None if value is None else round(-value * lost, 3) for value in row) for row in base)
    fields: dict[str, Any] = {
        "status": Status.OK,
        "score": 100 * (1 - lost),
        "ci": (max(0.0, 90 - 100 * lost), 100.0),
        "n_items": 18,
        "n_failed": 0,
        "excess_over_control": Excess(mean=-100 * lost, ci=(-100 * lost - 5, -100 * lost + 5)),
        "figures": (
            Figure(name="accuracy", value=0.94 * (1 - lost), ci=(0.5 * (1 - lost), 0.99), unit="share"),
            Figure(name="sign test", value=0.0004, unit="p"),
            Figure(name="onset", value=None, unit="tokens"),
        ),
        "panels": (
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
    return OtherAxis(**{**fields, **changes})


def plad_axis() -> OtherAxis:
    """Perturbations: a table and texts."""
    return OtherAxis(
        status=Status.OK,
        score=96.5,
        figures=(Figure(name="mean excess", value=-0.0031, ci=(-0.01, 0.004), unit="ratio"),),
        panels=(
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


def odd_axis(name: str) -> OtherAxis:
    """Panels without content, and with the largest and smallest numbers."""
    words: dict[str, Any] = {"title": name, "x_label": name, "y_label": name}
    return OtherAxis(
        status=Status.OK,
        figures=(Figure(name=name, value=1e300),),
        panels=(
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
        ),
    )


def hostile_axis() -> OtherAxis:
    """Hostile text in every field that an axis may fill."""
    return OtherAxis(
        status=Status.OK,
        reason=HOSTILE,
        figures=(Figure(name=HOSTILE, value=1.0),),
        panels=(
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
            Curve(key=HOSTILE, title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE, x=(1, 2), y=(1, 2)),
            TablePlot(title=HOSTILE, columns=(HOSTILE, "n"), rows=((HOSTILE, 1),), note=HOSTILE),
            Texts(
                title=HOSTILE,
                pairs=(TextPair(label=HOSTILE, reference=HOSTILE, candidate=HOSTILE, note=HOSTILE),),
            ),
        ),
        details={HOSTILE: HOSTILE},
    )
