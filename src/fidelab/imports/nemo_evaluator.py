"""``fidelab import nemo-evaluator``: bundles of NVIDIA NeMo Evaluator, compared answer by answer, and its policies.

A bundle is ``eval-….json`` with the benchmark's name beside ``results.jsonl``, which has a line per answer with
``problem_idx``, ``repeat``, ``reward``, ``prompt`` and ``expected_answer``; a folder holds one, or a folder per
benchmark.  Answers to one problem are a cluster.  Rewards of 0 and 1 are read, others are listed and omitted.  Read are
the files of version 0.3.0.  See docs/metrics/between-runs.md#imported-results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fidelab.core import digest, plain_json
from fidelab.core.errors import InputError, UsageError
from fidelab.imports import NEMO_EVALUATOR
from fidelab.imports.json_file import read_json
from fidelab.imports.samples import Samples, compare_samples
from fidelab.imports.write_run import ImportedArm
from fidelab.metrics.equivalence import MARGIN
from fidelab.results.values import Record

_MAX_FILE_BYTES = 1 << 30  # bytes of a file of answers
_REPEATS = 1_000_000  # more answers to one problem than anybody asks for
_METRICS = ("mean_reward", "pass@1")  # which are equal for rewards of 0 and 1

Tier = Literal["critical", "supporting", "advisory"]
Direction = Literal["higher_is_better", "lower_is_better"]


def import_bundles(
    ref: Path,
    tests: Sequence[Path],
    output_dir: Path,
    *,
    names: Sequence[str] | None = None,
    margin: float = MARGIN,
    seed: int = 42,
    command: str = "",
) -> ImportedArm:
    """Compare folders of bundles with a reference folder; see :func:`fidelab.imports.samples.compare_samples`.

    Raises:
        InputError: If a folder has no bundle, or two of one benchmark, or a line is damaged.
        MismatchError: If folders have no benchmark in common, or different problems in one.
        UsageError: If names do not fit, or the reference is also a test.
    """
    return compare_samples(_read, ref, tests, output_dir, names=names, margin=margin, seed=seed, command=command)


def _read(path: Path) -> Samples:
    if not path.is_dir():
        raise InputError(f"{path} is not a folder: name the output folder of NeMo Evaluator")
    samples = Samples(NEMO_EVALUATOR, path, repeats=_REPEATS)
    found: dict[str, Path] = {}
    for bundle in sorted(path.rglob("eval-*.json")):
        name = read_json(bundle, "bundle").root["benchmark"]["name"].text()
        results = bundle.with_name("results.jsonl")
        if not name:
            raise InputError(f"{bundle} does not name its benchmark: it is not a bundle of NeMo Evaluator")
        if name in found:
            raise InputError(f"{path} holds {name} twice, in {found[name]} and {bundle}: name the folder of one run")
        if not results.is_file():
            raise InputError(f"{bundle} has no results.jsonl beside it: its answers are needed, not its scores")
        found[name] = bundle
        if results.stat().st_size > _MAX_FILE_BYTES:
            raise InputError(f"{results} has more than {_MAX_FILE_BYTES >> 30} GiB: that is not a file of answers")
        with results.open("r", encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    _add(samples, name, line, f"{results}, line {number}")
    if not found:
        raise InputError(f"{path} holds no eval-….json: name the output folder of NeMo Evaluator")
    if len({bundle.parent for bundle in found.values()}) < len(found):
        raise InputError(
            f"{path} holds several bundles beside one results.jsonl: run each benchmark into its own folder"
        )
    return samples


def _add(samples: Samples, benchmark: str, line: str, where: str) -> None:
    try:
        answer = plain_json(line)
        problem, repeat, reward = answer["problem_idx"], answer.get("repeat", 0), answer["reward"]
        if not all(type(number) is int and 0 <= number < _REPEATS for number in (problem, repeat)):
            raise TypeError("problem_idx or repeat is not a whole number")
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise TypeError("reward is not a number")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{where} is not an answer of NeMo Evaluator ({type(error).__name__}: {error})") from None
    item, key = problem * _REPEATS + repeat, (benchmark, "none", "reward")
    if item in samples.values.get(key, ()):
        raise InputError(f"{where}: repeat {repeat} of problem {problem} is there twice")
    samples.documents[benchmark, item] = digest(str(answer.get("expected_answer")))
    if isinstance(answer.get("prompt"), str):
        samples.prompts[benchmark, item] = digest(answer["prompt"])
    if reward in (0, 1):
        samples.values.setdefault(key, {})[item] = float(reward)
    else:
        samples.left.add(key)


class _Limits(Record):
    tier: Tier | None = None
    max_drop: float | None = Field(default=None, ge=0)
    max_relative_drop: float | None = Field(default=None, ge=0)
    relative_guard_below: float | None = Field(default=None, ge=0, le=1)
    metric: str | None = None
    direction: Direction | None = None


class GatePolicy(Record):
    """A policy of ``nel gate``: limits by default, and of single benchmarks."""

    version: Literal[1] = 1
    defaults: _Limits = Field(default_factory=_Limits)
    benchmarks: dict[str, _Limits] = Field(default_factory=dict)

    def rules(self, axes: Collection[str]) -> Iterator[Mapping[str, Any]]:
        """Yield the same limits as rules of ``fidelab check``, on the benchmarks of a run with these axes.

        A benchmark that the policy names and the run lacks gets a rule, too: its figure is missing.

        Raises:
            UsageError: If a limit cannot be checked here.
        """
        prefix, suffix = f"{NEMO_EVALUATOR}:", ":reward"
        have = [axis.removeprefix(prefix).removesuffix(suffix) for axis in axes if axis.startswith(prefix)]
        if not have:
            raise UsageError("a policy of NeMo Evaluator needs a run of its bundles: fidelab import nemo-evaluator")
        for name in dict.fromkeys([*self.benchmarks, *have]):
            own = self.benchmarks.get(name, _Limits())
            given = {**self.defaults.model_dump(exclude_none=True), **own.model_dump(exclude_none=True)}
            if given.get("metric", _METRICS[0]) not in _METRICS:
                raise UsageError(f"{name}: metric {given['metric']} is not read here; {' and '.join(_METRICS)} are")
            if "max_relative_drop" in given:
                raise UsageError(
                    f"{name}: max_relative_drop is not checked here: write max_drop, which an interval decides"
                )
            drop = 100 * given.get("max_drop", 0.015)  # nel's default
            limit = {"max": drop} if given.get("direction") == "lower_is_better" else {"min": -drop}
            tier = given.get("tier", "supporting")
            yield {"metric": f"{prefix}{name}{suffix}.difference", "tier": tier, **limit}
