"""Which questions the benches of a run ask its arms, and over how many loads of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import psutil

from fidelab.bench.base import BenchInputs, LiveSettings, Question
from fidelab.core import Arm, Status
from fidelab.core.roles import CONTROL, EXACT, FLOOR, QUERIES, TRUTH, TWIN
from fidelab.inputs.tokens import Tokenizer
from fidelab.inputs.traffic import random_prompts
from fidelab.plan.estimate import Benched
from fidelab.plan.resolve import Settings
from fidelab.results.engagement import engaged
from fidelab.results.outcomes import ArmResult

_WARMUPS = 4  # unmeasured answers to expect: three agree at the soonest
_UNBENCHED = (FLOOR, TWIN, TRUTH, EXACT, QUERIES)  # diagnostic arms and run-to-run noise
_LOADS = 3  # over which repeats are spread where arms cannot be alive together
_SHARE = 0.6  # of the available memory that live arms may take together
_BESIDE_WEIGHTS = 2**30  # bytes that a worker takes besides its weights: libraries, activations, cache
_FLOAT32_FACTOR = 2  # a 16-bit checkpoint computed in 32 bits


def benched_roles(results: Sequence[ArmResult]) -> list[ArmResult]:
    """Return the arms that benches measure: reference, control and candidates, as far as they ran."""
    arms = [result for result in results if result.role.partition(":")[0] not in _UNBENCHED]
    arms = [result for result in arms if not result.role.startswith(f"{CONTROL}:")]
    return [result for result in arms if engaged(result)[0] in (Status.OK, Status.IDENTICAL)]


class BenchPlan:
    """Questions that the benches of a run ask its arms."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self._settings = settings
        make = partial(random_prompts, len(tokenizer.pieces()), tokenizer.special_ids())
        self.inputs = BenchInputs(lambda length, count, seed: make(length, count, seed), settings.model.max_positions)

    def expected(self, results: Sequence[ArmResult]) -> Iterator[Benched]:
        """Return the planned work, for an estimate."""
        arms = benched_roles(results)
        benches = self._settings.benches
        questions = [question for bench in benches.values() for question in bench.questions(self.inputs)]
        live = [question for question in questions if not benches[question.bench].fresh]
        loads = self._loads(arms, live)
        for resolved in (self._settings.resolved[result.arm.name] for result in arms):
            arm = resolved.arm
            asked = [q for q in questions if not (q.impossible or self._served(arm, q.bench))]
            if any(question in live for question in asked):
                yield "", resolved, loads, None, 0
            for question in asked:
                if benches[question.bench].fresh:
                    yield question.bench, resolved, question.repeats, question.request(0), question.repeats
                else:
                    warmups = loads * min(question.max_warmup, _WARMUPS)
                    yield question.bench, resolved, 0, question.request(0), question.repeats + warmups
            for bench in benches.values():
                if bench.loads and resolved.engine_class.is_server:
                    for request in bench.traffic():
                        yield bench.name, resolved, 0, request, 1

    def _loads(self, arms: Sequence[ArmResult], live: Sequence[Question]) -> int:
        """1: all arms stay loaded and are asked in turn; else over how many loads the repeats are spread."""
        settings = [bench.settings for bench in self._settings.benches.values()]
        wishes = {one.interleave for one in settings if isinstance(one, LiveSettings)}
        spread = min(_LOADS, max((question.repeats for question in live), default=1))
        if len(arms) < 2 or "live" in wishes:
            return 1
        return 1 if "loads" not in wishes and self._can_coexist(arms) else spread

    def _can_coexist(self, arms: Sequence[ArmResult]) -> bool:
        """Whether the arms can be alive together without disturbing one another."""
        resolved = [self._settings.resolved[arm.arm.name] for arm in arms]
        own = [arm for arm in resolved if not arm.engine_class.is_server]
        if any(one.arm.device.startswith("cuda") for one in own):
            return False  # engines set a pool aside there that takes most of the device
        sizes = (one.model.weight_bytes * (_FLOAT32_FACTOR if one.arm.dtype == "float32" else 1) for one in own)
        need = sum(_BESIDE_WEIGHTS + size for size in sizes)
        return need <= _SHARE * psutil.virtual_memory().available

    def _is_server(self, arm: Arm) -> bool:
        return self._settings.resolved[arm.name].engine_class.is_server

    def _served(self, arm: Arm, bench: str) -> str:
        """Reason why this bench cannot measure an engine that somebody else started; empty if it can."""
        return self._settings.benches[bench].not_on_servers if self._is_server(arm) else ""
