"""The Python API behind the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from fidelab.axes import AXES
from fidelab.config.experiment import validate
from fidelab.core.errors import UsageError
from fidelab.engines import DEFAULT
from fidelab.results.measurement import DECIDING
from fidelab.results.record import Report
from fidelab.results.store import find_run, read_run
from fidelab.run.runner import ProgressReporter, Silent

Share = float | str
"""A share as a number (0.4) or as on the command line (``"40%"``)."""


class Settings(TypedDict, total=False):
    """Keywords of :func:`compare` besides the configurations, named as on the command line or in an experiment file."""

    quick: bool
    """Measure KLD only, with fewer windows and without repeats."""
    windows: int
    """KLD: windows of the shortest context."""
    n_ctx: int | Sequence[int]
    """KLD: tokens per window, or several contexts."""
    text: str
    prompts: str
    traffic: str
    max_kld: float
    max_flips: Share
    max_accuracy_loss: Share
    min_saving: Share
    min_tokens_per_s: float
    margin: Share
    context: int | str
    fit: str
    benches: Mapping[str, Mapping[str, Any]]
    speed: bool
    floor: float
    twins: float
    budget: float | str
    engine_args: Mapping[str, Any]
    env: Mapping[str, str]
    vary: Mapping[str, Sequence[str]]
    reference_from: str
    limits: Mapping[str, Any]
    dtype: Literal["auto", "float32", "float16", "bfloat16"]
    device: str
    threads: int
    deadline: float
    executor: str | Mapping[str, Any]
    seed: int
    runs: int
    bands: Literal["fidelab", "refract"]
    force: bool
    keep_rows: bool
    keep_text: bool
    skip_bad: bool
    output_dir: str
    captures_dir: str


_LIMITS = ("max_kld", "max_flips", "max_accuracy_loss", "min_saving", "min_tokens_per_s", "margin")


def compare(
    model: str,
    *,
    reference: str | Mapping[str, Any] | None = None,
    candidates: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
    engine: str | Mapping[str, Any] = DEFAULT,
    control: str = "auto",
    axes: str | Mapping[str, Mapping[str, Any]] | Sequence[str] | None = None,
    progress: bool | Callable[[str, float], None] | None = None,
    **settings: Unpack[Settings],
) -> Report:
    """Run a reference and candidates, score them, and return the report, which is also written to ``output_dir``.

    Args:
        model: embedded name, hub id with optional ``@revision``, folder, or ``.gguf`` file.
        reference, control, candidates: KV formats (a name, ``K/V``, options in brackets) or whole arms
            (``{"kv": "fp8_e4m3", "model": "./awq"}``, ``"kv=fp8_e4m3,block-size=32"``); the engine's native format
            where no reference is named.  A single candidate needs no list.
        engine: ``hf``, ``llamacpp``, ``vllm``, ``sglang``, ``openai``; with ``python``, ``image`` or ``pythonpath``:
            ``{"name": "vllm", "python": PATH}``.
        axes: a name, names, or name → settings (``{"kld": {"windows": 8}}``); trajectory and kld by default, with
            ``quick`` kld alone.
        progress: ``True`` prints a line on standard error for each arm and each tenth of the run. This is the default
            in a terminal and in a notebook. A function is called with the current step and the share of the tokens
            processed, 0 to 1.
        settings: see :class:`Settings`.

    Raises:
        FidelabError: For anything that the user can fix. The message is one line.
    """
    from fidelab.run.repeat import execute_all

    candidates = [candidates] if isinstance(candidates, str | Mapping) else list(candidates)
    fields = {
        "engine": engine,
        "reference": reference or {},
        "control": control,
        "candidates": candidates,
        "axes": axes,
        **settings,
    }
    call = ", ".join([repr(model), *(f"{name}={value!r}" for name, value in fields.items() if value is not None)])
    experiment = validate({"model": model, **_as_in_files(fields)}, "compare")
    shown = _is_watched() if progress is None else progress
    return execute_all(
        experiment,
        command=f"fidelab.compare({call})",
        watch=lambda _number, _runs: (
            Silent() if not shown else ProgressReporter(shown if callable(shown) else _Lines().tell)
        ),
    )[0]


def load(run: str | Path) -> Report:
    """Read the report of a finished run: its folder, its name in ``runs``, a report file, or ``"latest"``.

    Raises:
        InputError: If there is no such run, or its report is damaged.
    """
    return read_run(find_run(Path(run)))


def _as_in_files(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as an experiment file has them: sizes belong to axis kld, limits to the recommendation.

    Raises:
        UsageError: If a size is given for an axis that is not measured.
    """
    data = dict(fields)
    quick, axes = data.pop("quick", False), data.pop("axes")
    axes = (DECIDING,) if axes is None and quick else ("trajectory", DECIDING) if axes is None else axes
    axes = [axes] if isinstance(axes, str) else axes
    chosen: dict[str, Any] = {name: {} for name in axes} if not isinstance(axes, Mapping) else {**axes}
    if quick:
        chosen = {name: {**AXES.load(name).quick, **values} for name, values in chosen.items()}
        data = {"floor": 0.0, "twins": 0.0, "quick_start": "auto", **data}
    for name in ("windows", "n_ctx"):
        if (value := data.pop(name, None)) is not None:
            if DECIDING not in chosen:
                raise UsageError(f"{name} belongs to test {DECIDING}, which axes= leaves out")
            chosen[DECIDING] = {**chosen[DECIDING], name: value}
    limits = {name: data.pop(name) for name in _LIMITS if name in data}
    if limits:
        data["limits"] = {**data.get("limits", {}), **limits}
    return {**data, "axes": chosen}


def _is_watched() -> bool:
    """Whether somebody sees standard error: a terminal, or a notebook."""
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())


class _Lines:
    """A line on standard error where something else is done, and every tenth of the whole."""

    def __init__(self) -> None:
        self._last: tuple[str, int] | None = None

    def tell(self, what: str, share: float) -> None:
        if (what, int(10 * share)) != self._last:
            self._last = what, int(10 * share)
            print(f"fidelab: {100 * share:3.0f}% {what}", file=sys.stderr, flush=True)
