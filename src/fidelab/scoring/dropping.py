"""Replace rows of log-probabilities by figures once they were compared."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from fidelab.axes.base import Axis, part_name, parts_of
from fidelab.captures.manifest import key_digest, load_manifest
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.store import Readers, drop_rows
from fidelab.core import Estimator, Status
from fidelab.core.errors import UNTRUSTED_DATA_ERRORS, CaptureError, FidelabError
from fidelab.core.roles import TWIN, base_of, is_partial, kind_of
from fidelab.results.outcomes import ArmResult
from fidelab.scoring.tiles import Figures

_LOGGER = logging.getLogger(__name__)


def drop_compared_rows(axes: Mapping[str, Axis], results: Sequence[ArmResult], readers: Readers) -> None:
    """Replace rows of log-probabilities by figures where an arm kept them while it answered.

    It keeps them for a twin, where another run read them, and where a part could not be compared.  Axes that read more
    of rows than figures keep them still, and so do rows that cannot be compared, and arms that another run reads.
    """
    for result, base in compared_pairs(results):
        with exclusive(readers, result) as alone:
            if alone:
                drop_where_compared(axes, result, base, (Estimator.LOGPROBS,))


def drop_reference_rows(
    axes: Mapping[str, Axis], results: Sequence[ArmResult], roles: Sequence[str], readers: Readers
) -> None:
    """Drop the rows of arms that others are compared with, such as the reference, once all ``roles`` were compared.

    Rows stay where an arm of them failed: it may be asked again.
    """
    by_role = {result.role: result for result in results}
    for base in results:
        others = [by_role.get(role) for role in roles if base_of(role) == base.role]
        done = [other for other in others if other is not None and other.status is Status.OK]
        if not base_of(base.role) and len(done) == len(others):
            captures = {name: folder for name, folder in base.captures.items() if _were_compared(name, folder, done)}
            itself = replace(base, captures=captures)
            with exclusive(readers, itself) as alone:
                if alone:
                    drop_where_compared(axes, itself, itself, (Estimator.LOGPROBS,))


def exclusive(readers: Readers, result: ArmResult) -> AbstractContextManager[bool]:
    """Whether no other run reads this arm's captures."""
    folder = next(iter(result.captures.values()), None)
    return nullcontext(False) if folder is None else readers.alone(folder.parent)


def _were_compared(name: str, base: Path, readers: Sequence[ArmResult]) -> bool:
    """Whether all captures of this name hold what compares them with the base's."""
    try:
        own = key_digest(load_manifest(base)["key"])
        theirs = [Capture(reader.captures[name], verify=False) for reader in readers if name in reader.captures]
    except CaptureError:
        return False
    return {capture.against for capture in theirs} == {own} and not any(capture.has_rows() for capture in theirs)


def compared_pairs(results: Sequence[ArmResult]) -> list[tuple[ArmResult, ArmResult]]:
    """Arms with those that they are compared with; twins first, since they need the rows of other arms."""
    by_role = {result.role: result for result in results}
    pairs = [(result, by_role[base]) for result in results if (base := base_of(result.role)) in by_role]
    return sorted(pairs, key=lambda pair: kind_of(pair[0].role) != TWIN)


def drop_where_compared(
    axes: Mapping[str, Axis],
    result: ArmResult,
    base: ArmResult,
    estimators: Collection[Estimator],
    figures: Figures | None = None,
) -> None:
    """Replace the rows of an arm by figures where both captures hold rows of these estimators and match.

    ``figures``: of pairs that were compared before, by resolved folders.
    """
    for name, axis in axes.items():
        theirs = parts_of(name, base.captures)
        for part, folder in parts_of(name, result.captures).items():
            if part not in theirs:
                continue
            try:
                ref, test = Capture(theirs[part]), Capture(folder)
                if not {ref.estimator, test.estimator} & {*estimators} or not ref.has_rows():
                    continue
                if test.against and not test.has_rows():
                    continue
                pair = Pair.match(ref, test, subset=is_partial(result.role))
                known = (figures or {}).get((ref.folder.resolve(), test.folder.resolve()), {})
                if (found := axis.figures(replace(pair, figures=known))) is not None:
                    drop_rows(pair, found)
            except (FidelabError, *UNTRUSTED_DATA_ERRORS) as error:  # scoring meets it again, and says it
                _LOGGER.debug("%s, %s keeps its rows: %s", result.role, part_name(name, part), error)
