"""How far 16-bit arms of different engines are from one another on the same checkpoint: mean KL, pairwise, with floors.

hf computes in bfloat16 and, as the truth, in float32; vLLM and SGLang in bfloat16.  Windows of 512 tokens of the
default text, protocol `half`.  One engine at a time; engines that are not installed are said to be absent.

    python benchmarks/engine_agreement.py [--threads N] [--windows N] [--pythonpath FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fidelab.config.schema import Experiment
    from fidelab.results.outcomes import ArmResult

LIMIT = 0.006  # nats
LINES: dict[str, dict[str, Any]] = {
    "hf bfloat16": {"engine": "hf", "dtype": "bfloat16", "reference": "bf16"},
    "hf float32": {"engine": "hf", "dtype": "float32", "reference": "f32"},
    "vllm": {"engine": "vllm", "dtype": "bfloat16", "reference": "auto"},
    "sglang": {"engine": "sglang", "dtype": "bfloat16", "reference": "auto"},
}


def main() -> None:
    """Capture, compare, print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--pythonpath", help="shim folder for SGLang")
    options = parser.parse_args()
    from fidelab.core import waiting_variables

    os.environ |= waiting_variables(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        _measure(options, Path(folder))


def _measure(options: argparse.Namespace, folder: Path) -> None:
    from fidelab.core import Status
    from fidelab.core.errors import FidelabError
    from fidelab.results.engagement import engaged
    from fidelab.scoring.pairing import Scorer
    from fidelab.studies.cross_engine import agreement

    arms: dict[str, ArmResult] = {}
    first: Experiment | None = None
    for name, line in LINES.items():
        experiment = _experiment(line, options, folder)
        first = first or experiment
        try:
            results = _ask(experiment, folder / "logs" / name.replace(" ", "-"))
        except FidelabError as error:
            _say(engine=name, status="absent", reason=str(error))
            continue
        status, reason = engaged(results["reference"])
        if status is not Status.OK:
            _say(engine=name, status=str(status), reason=reason)
            continue
        arms[name] = results["reference"]
        floor = Scorer(experiment, list(results.values()), {}).measure(results["floor"])
        kld = floor.scores.get("kld")
        _say(
            engine=name,
            versions=(results["reference"].ran or {}).get("versions"),
            floor=kld.mean() if kld else None,
            reason=floor.reason,
            seconds=round(results["reference"].timing.get("seconds") or 0.0, 1),
        )
    assert first is not None
    for pair in agreement(first, arms):
        mean_kl = pair.value("kld")
        within = mean_kl is not None and mean_kl <= LIMIT
        _say(
            reference=pair.at["from"],
            other=pair.at["engine"],
            mean_kl=mean_kl,
            ci=pair.ci("kld"),
            top1=pair.value("top1"),
            positions=pair.n_items,
            limit=LIMIT,
            within=within,
            reason=pair.reason,
        )


def _experiment(line: dict[str, Any], options: argparse.Namespace, folder: Path) -> Experiment:
    from fidelab.config.experiment import validate

    engine: dict[str, Any] = {"name": line["engine"]}
    if line["engine"] == "sglang" and options.pythonpath:
        engine["pythonpath"] = [options.pythonpath]
    data = {
        "model": "smollm2-135m",
        "engine": engine,
        "dtype": line["dtype"],
        "reference": line["reference"],
        "control": "none",
        "candidates": [line["reference"]],  # an experiment needs one; it is not asked
        "axes": {"kld": {"windows": options.windows, "n_ctx": 512}},
        "device": "cpu",
        "threads": options.threads,
        "output_dir": str(folder / "runs"),
    }
    return validate(data, "engine_agreement")


def _ask(experiment: Experiment, logs: Path) -> dict[str, ArmResult]:
    """The reference, and a quarter of it again in another process."""
    from fidelab.plan.prepare import prepare
    from fidelab.run.runner import JobRunner, Silent
    from fidelab.workers.fork_server import ForkServers

    prepared = prepare(experiment)
    runner = JobRunner(prepared, Silent(), lambda *_a, **_k: None, servers=ForkServers())
    jobs = [job for job in prepared.plan.jobs if job.role in ("reference", "floor")]
    return {job.role: runner.run(job, logs / f"{job.role}.log") for job in jobs}


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
