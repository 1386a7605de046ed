"""Sanity of one model on a server: questions with exact graders, and checks of serving (``fidelab eval``)."""

from fidelab.bench.eval.keeper import EvalKeeper
from fidelab.bench.eval.measure import Evaluated, EvalWatch, evaluate
from fidelab.bench.eval.record import (
    EVAL,
    Change,
    answers_of,
    compare_with,
    decide_change,
    faults_of,
    open_of,
    serving_faults,
)
from fidelab.bench.eval.settings import SERVING, EvalSettings

__all__ = [
    "EVAL",
    "SERVING",
    "Change",
    "EvalKeeper",
    "EvalSettings",
    "EvalWatch",
    "Evaluated",
    "answers_of",
    "compare_with",
    "decide_change",
    "evaluate",
    "faults_of",
    "open_of",
    "serving_faults",
]
