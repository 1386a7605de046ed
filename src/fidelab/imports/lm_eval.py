"""``fidelab import lm-eval``: samples of lm-evaluation-harness (``--log_samples``), compared item by item.

Each folder holds ``samples_TASK_TIME.jsonl`` (in a folder of the model's name, or next to it), a line per item and
filter with ``doc_id``, ``doc_hash``, ``target_hash`` and the values of its metrics.  The harness compares two models by
an unpaired z-test of their means, which ignores that both answered the same items; here items are paired. Metrics that
are 0 or 1 are read, others are listed and omitted.  See docs/metrics/between-runs.md#imported-results.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fidelab.core import plain_json
from fidelab.core.errors import InputError
from fidelab.imports.samples import Samples, compare_samples
from fidelab.imports.write_run import ImportedArm
from fidelab.metrics.equivalence import MARGIN

_SAMPLES_NAME = re.compile(r"samples_(?P<task>.+)_\d{4}-\d\d-\d\dT[\d.:-]+\.jsonl")
_MAX_FILE_BYTES = 1 << 30  # bytes of a file
_LISTED = 6  # models that one line names
_SAMPLE_KEYS = {"doc_id", "doc_hash", "prompt_hash", "target_hash", "filter"}


def import_samples(
    ref: Path,
    tests: Sequence[Path],
    output_dir: Path,
    *,
    names: Sequence[str] | None = None,
    margin: float = MARGIN,
    seed: int = 42,
    command: str = "",
) -> ImportedArm:
    """Compare folders of samples with a reference folder; see :func:`fidelab.imports.samples.compare_samples`.

    Raises:
        InputError: If a folder has no samples, or those of several models, or a line is damaged.
        MismatchError: If folders have no task in common, or different items in a task.
        UsageError: If names do not fit, or the reference is also a test.
    """
    return compare_samples(_read, ref, tests, output_dir, names=names, margin=margin, seed=seed, command=command)


def _read(path: Path) -> Samples:
    if not path.is_dir():
        raise InputError(f"{path} is not a folder: name what lm_eval --output_path PATH --log_samples wrote")
    files: dict[str, list[Path]] = {}
    for file in sorted(path.rglob("samples_*.jsonl"), key=lambda file: file.name):  # by task, then by time
        if match := _SAMPLES_NAME.fullmatch(file.name):
            files.setdefault(match["task"], []).append(file)
    if not files:
        raise InputError(f"{path} holds no samples_TASK_TIME.jsonl: run lm_eval with --log_samples")
    folders = sorted({file.parent for runs in files.values() for file in runs})
    if len(folders) > 1:
        listed = ", ".join(str(folder.relative_to(path)) for folder in folders[:_LISTED])
        more = f" and {len(folders) - _LISTED} more" if len(folders) > _LISTED else ""
        raise InputError(f"{path} holds samples of {len(folders)} models: name one of {listed}{more}")
    samples = Samples("lm-eval", path)
    for task, runs in files.items():
        file = runs[-1]
        if len(runs) > 1:
            samples.earlier[task] = (len(runs) - 1, file.name)
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise InputError(f"{file} has more than {_MAX_FILE_BYTES >> 30} GiB: that is not a file of samples")
        with file.open("r", encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    _add(samples, task, line, f"{file}, line {number}")
    return samples


def _add(samples: Samples, task: str, line: str, where: str) -> None:
    try:
        item = plain_json(line)
        document = item["doc_id"]
        if not isinstance(document, int) or isinstance(document, bool):
            raise TypeError("doc_id is not a whole number")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{where} is not a sample of lm-eval ({error.__class__.__name__}: {error})") from None
    content = f"{item.get('doc_hash')} {item.get('target_hash')}"
    if samples.documents.setdefault((task, document), content) != content:
        raise InputError(f"{where}: item {document} is there twice with different contents")
    if isinstance(item.get("prompt_hash"), str):
        samples.prompts[task, document] = item["prompt_hash"]
    listed = item.get("metrics")
    metrics = listed if isinstance(listed, list) else [name for name in item if name not in _SAMPLE_KEYS]
    for name in filter(lambda name: isinstance(name, str), metrics):
        value = item.get(name)
        if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
            key = task, str(item.get("filter", "none")), name
            samples.values.setdefault(key, {})[document] = float(value)
        elif isinstance(value, int | float | list):
            samples.left.add((task, str(item.get("filter", "none")), name))
