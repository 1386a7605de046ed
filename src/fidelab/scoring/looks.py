"""Which candidates need more data after a look.  See docs/metrics/verdicts.md#looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fidelab.axes.base import load_axis
from fidelab.config.schema import Experiment
from fidelab.core import Status
from fidelab.results.choice import settled
from fidelab.results.outcomes import ArmResult, RunFacts
from fidelab.scoring.attribution import is_diagnostic
from fidelab.scoring.pairing import Scorer
from fidelab.scoring.score import score_run
from fidelab.scoring.tiles import Figures


def undecided(experiment: Experiment, facts: RunFacts, results: Sequence[ArmResult], figures: Figures) -> list[str]:
    """Return the roles of the candidates that more of the text can decide, by the axes that look several times.

    The result is empty if the reference failed, since there is nothing to compare with.  ``figures``: of pairs that
    were compared; those of this look are added.
    """
    looking = {name: values for name, values in experiment.axes.items() if load_axis(name, values).n_looks > 1}
    experiment = experiment.model_copy(update={"axes": looking, "benches": {}})
    # Rows of all that the end compares, too: the reference's logits are computed once for all of them
    others = [result for result in results if result.role != "reference" and not is_diagnostic(result.role)]
    Scorer(experiment, results, facts.unavailable, figures=figures).compare_ahead(others)
    arms = []
    for result in results:
        if result.role.startswith(("reference", "candidate:")):
            captures = {name: folder for name, folder in result.captures.items() if name.split(".", 1)[0] in looking}
            failures = {name: why for name, why in result.failures.items() if name.split(".", 1)[0] in looking}
            arms.append(replace(result, captures=captures, failures=failures, benches={}))
    report = score_run(experiment, facts, arms, figures=figures).report
    done = settled(report, **experiment.limits.model_dump(exclude={"margin"}))
    able = {result.role for result in arms if result.status is Status.OK}
    if "reference" not in able:
        return []
    return [role for arm in report.candidates if (role := f"candidate:{arm.name}") in able and arm.name not in done]
