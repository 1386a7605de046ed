"""Write docs/zoo.md and its pictures from a run of profile ``zoo``.

    fidelab reproduce zoo
    python benchmarks/zoo.py [runs/profiles/ID] [--docs docs]

Within an engine all formats answered the same windows.  Rows are ordered by mean KL; ``≈`` marks a row whose paired
difference to the row above is not shown to be other than zero.  A format is on the frontier of its engine if no other
one takes as few bytes and is closer to the 16-bit reference.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from fidelab.report.standalone import frontier_svg
from fidelab.results.record import ArmRecord, Report

MODELS = {
    "robust": "robust model",
    "fragile": "keys with outliers",
    "sliding": "sliding windows",
}
ENGINES = {"hf": "Transformers", "llamacpp": "llama.cpp", "vllm": "vLLM", "sglang": "SGLang"}
INTRODUCTION = """\
# KV formats side by side

This page compares the KV cache formats of the installed engines on the same text. There are three models: SmolLM2-135M
(robust), a copy of it that computes the same with outliers in its keys (`fidelab checkpoint make-fragile`), and Gemma 3
270M, most of whose layers see 512 tokens. They are small and ran on a CPU: measure your model before you decide.

- **KLD** is the mean KL divergence in nats from the same engine's 16-bit cache, with its 95% interval.
- **≈** marks a row that the paired test cannot tell from the row above.
- **Frontier**: no format of the engine that takes as few bytes is closer.
- **Bytes** are those of an encoded token. KIVI and the KVarN-like format also keep the last 64 tokens in 16 bits, the
  latter the first 4 as well. That is an eighth of these windows and flatters them.
- **Compare within a table.** Engines compute in different types: Transformers in float32, vLLM and SGLang in bfloat16.

Measured on {date} with fidelab {version}. Regenerate the page with `make zoo`.
"""
COLUMNS = ("format", "bytes per token", "of 16 bits", "KLD", "95% interval", "same top token", "verdict", "frontier")
LEAST_BYTES_GAIN = 0.005  # of the row's bytes: block formats differ by paddings


def read(run: Path) -> dict[tuple[str, str], Report]:
    """(model, engine) → the report of the stage."""
    found = {}
    for stage in sorted((run / "stages").iterdir()):
        model, _, engine = stage.name.partition("-")
        reports = sorted((stage / "runs").glob("2*/report.json"))
        if engine and reports:
            found[model, engine] = Report.from_json(reports[-1])
    return found


def metric(arm: ArmRecord, key: str) -> tuple[float, str]:
    """Value and 95% interval, as text, of one figure of the KLD test."""
    found = next(each for each in arm.axes["kld"].metrics if each.key == key)
    low, high = found.ci or (None, None)
    interval = "none" if low is None or high is None else f"{low:.2g}–{high:.2g}"
    return (float("nan") if found.value is None else found.value), interval


def size(arm: ArmRecord) -> float | None:
    return arm.ran.cache_bytes_per_token if arm.ran else None


def rows(report: Report, sixteen: float) -> Iterator[str]:
    """Table rows of one engine and model; ``sixteen`` are the bytes per token of a 16-bit cache."""
    good = [arm for arm in report.candidates if arm.status == "ok" and size(arm)]
    good.sort(key=lambda arm: metric(arm, "mean")[0])
    told = {(each.better, each.worse): each.differs for each in report.comparisons if each.axis == "kld"}
    smallest = float("inf")
    for before, arm in zip([None, *good], good, strict=False):
        mean, interval = metric(arm, "mean")
        length = size(arm) or 0.0
        best = length < smallest * (1 - LEAST_BYTES_GAIN)
        smallest = min(smallest, length)
        tie = "≈ " if before and told.get((before.name, arm.name)) is False else ""
        band = arm.verdict.band.lower() if arm.verdict and arm.verdict.band else "none"
        cells = [arm.name, f"{length:,.0f}", f"{length / sixteen:.0%}", f"{tie}{mean:.3g}", interval]
        cells += [f"{metric(arm, 'top1')[0]:.1%}", band, "yes" if best else ""]
        yield "| " + " | ".join(cells) + " |"
    for arm in report.candidates:
        if arm.status != "ok":
            yield f"| {arm.name} | | | {arm.status}: {(arm.reason or '').splitlines()[0][:80]} | | | | |"


def page(reports: dict[tuple[str, str], Report], docs: Path) -> str:
    first = next(iter(reports.values()))
    lines = INTRODUCTION.format(date=f"{first.created:%Y-%m-%d}", version=first.fidelab_version).split("\n")
    for model, what in MODELS.items():
        chosen = {engine: report for (name, engine), report in reports.items() if name == model}
        if not chosen:
            continue
        some = next(iter(chosen.values()))
        lines += [f"## {what.capitalize()}", ""]
        if "hf" in chosen and (drawn := frontier_svg(chosen["hf"], 800)):
            name = f"zoo-{model}.svg"
            (docs / "assets" / name).write_text(drawn, "utf-8")
            lines += [f"![Mean KL against bytes per token, Transformers](assets/{name})", ""]
        sixteen = (size(some.reference) or 0.0) if some.reference else 0.0
        for engine in ENGINES:
            if engine not in chosen:
                continue
            report = chosen[engine]
            versions = (report.reference.ran.versions if report.reference and report.reference.ran else None) or {}
            version = next((f" {text}" for key, text in versions.items() if key.startswith(engine[:4])), "")
            if engine == "hf":
                version = f" {versions.get('transformers', '')}"
            tokens = report.settings["axes"]["kld"]["n_ctx"]
            lines += [f"### {ENGINES[engine]}{version}, {what}", "", f"Windows of {tokens:,} tokens.", ""]
            lines += [
                "| format | bytes per token | of 16 bits | KLD | 95% interval | same top token | verdict | frontier |"
            ]
            lines += ["|---|--:|--:|--:|---|--:|---|---|", *rows(report, sixteen), ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="folder of the profile's run; else the latest")
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args(arguments)
    run = options.run or sorted(Path("runs/profiles").glob("*-zoo"))[-1]
    (options.docs / "zoo.md").write_text(page(read(run), options.docs), "utf-8")


if __name__ == "__main__":
    main()
