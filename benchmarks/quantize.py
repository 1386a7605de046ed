"""Methods of quantization, made by ``fidelab checkpoint quantize``, ranked by mean KL with paired intervals.

python benchmarks/quantize.py FOLDER [--python ENVIRONMENT/bin/python] [--groups 64 32] [--model smollm2-135m]
    [--methods gptq rtn awq autoround] [--candidates weights=nvfp4 ...]

The package's own text is calibrated on and tested by alternate documents. What lies in FOLDER already is kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fidelab import compare
from fidelab.inputs.texts import load_text
from fidelab.results.record import Comparison, Report
from fidelab.studies.quantize import quantize
from fidelab_checkpoints.convert import convert


def write_texts(folder: Path) -> None:
    """``calibration.txt`` and ``test.txt``, alternate documents of the package's own text."""
    text = load_text("default")
    ends = (*text.doc_starts[1:], len(text.content))
    documents = [text.content[start:end] for start, end in zip(text.doc_starts, ends, strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "calibration.txt").write_text("".join(documents[::2]), "utf-8")
    (folder / "test.txt").write_text("".join(documents[1::2]), "utf-8")


def make(folder: Path, model: str, method: str, group: int, python: str | None) -> Path:
    """The dequantized weights of a model that was quantized so."""
    name = f"{method}{group}"
    recipe = folder / f"{name}.yaml"
    data = "calibration: {samples: 16, length: 256, sources: [{text: calibration.txt}]}\n" if method != "rtn" else ""
    recipe.write_text(f"method: {method}\nscheme: {{format: W4A16, group: {group}}}\n{data}fidelity: null\n", "utf-8")
    if not (folder / name).is_dir():
        quantize(model, recipe, folder / name, python=python, say=lambda text: print(f"{name}: {text}", flush=True))
    dense = folder / f"{name}-dense"
    if not dense.is_dir():
        convert(folder / name, dense, "safetensors", dtype="float32", lossy=True)
    return dense


def ranked(
    folder: Path,
    model: str,
    group: int,
    python: str | None,
    methods: Sequence[str] = ("gptq", "rtn"),
    candidates: Sequence[str] = (),
    windows: int = 16,
) -> Report:
    """Methods with groups of this size, and further candidates that are rounded when the model is loaded."""
    write_texts(folder)
    made = [{"name": method, "model": str(make(folder, model, method, group, python))} for method in methods]
    return compare(
        model,
        candidates=[*made, *candidates],
        dtype="float32",
        control="none",
        axes={"kld": {"windows": windows, "n_ctx": 256}},
        text=str(folder / "test.txt"),
        output_dir=str(folder / "runs"),
    )


def measured(folder: Path, model: str, group: int, python: str | None, method: str = "gptq") -> Comparison:
    """A method and rounding to nearest with groups of this size, by their paired difference."""
    report = ranked(folder, model, group, python, (method, "rtn"))
    return next(found for found in report.comparisons if found.axis == "kld")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python")
    parser.add_argument("--groups", type=int, nargs="+", default=[64, 32])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--methods", nargs="+", default=["gptq", "rtn"])
    parser.add_argument("--candidates", nargs="*", default=[])
    parser.add_argument("--windows", type=int, default=16)
    options = parser.parse_args()
    for group in options.groups:
        report = ranked(
            options.folder.absolute(),
            options.model,
            group,
            options.python,
            options.methods,
            options.candidates,
            options.windows,
        )
        for arm in report.candidates:
            found = arm.axes["kld"].metric("mean", {})
            value = "no figure" if found is None else f"{found.value:.4f} nats, 95% {found.interval}"
            print(f"group {group}: {arm.name}: {value}")
        for pair in report.comparisons:
            verdict = "differs" if pair.differs else "equal within 10%" if pair.equivalent else "tied"
            print(
                f"group {group}: {pair.better} costs {pair.difference:.4f} nats less than {pair.worse}, "
                f"95% {pair.ci}, {verdict}",
                flush=True,
            )


if __name__ == "__main__":
    main()
