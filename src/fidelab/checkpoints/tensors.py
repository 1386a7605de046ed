"""Rules about tensors: values and scales, experts, files and index, what is quantized, packing, missing layers."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.checkpoints.files import RAW, Checkpoint, TensorInfo
from fidelab.checkpoints.layouts import ACTIVATION_PARTS, QuantizedModule, StoredArray, quantized_modules
from fidelab.checkpoints.modules import IGNORING, SCALES, Module, modules_of
from fidelab.checkpoints.rules import Finding, Severity, Subject, rule
from fidelab.checkpoints.scan import MOST_SLICES, Statistics, fused, scan, slices
from fidelab.errors import InputError

__all__: list[str] = []

_FLOAT16_MAX = 65504.0
_LARGEST_WEIGHT = 1e4  # of what scales and codes may give together; weights of language models are below 100
_SMALLEST_WEIGHT = 1e-8
_OUTLIER = 1000.0  # times the median of the same layer kind
_MASKS = ("masked_bias", ".attn.bias", ".attention.bias")  # of GPT-2 and its kind: masks, which may be infinite
_MOST_MISSING = 100_000  # experts that are listed
_ROWS = 64  # of each layer that are compared with the original's
_MOST_ERROR = {8: 0.15, 6: 0.15, 5: 0.25, 4: 0.35, 3: 0.7, 2: 1.2}  # relative, by bits; an ordinary one is a third
_FLOATS = ("BF16", "F16", "F32", "F64")


# ---------------------------------------------------------------------------------------------------------- helpers


def _named(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and 7 more``."""
    if len(names) <= 2:
        return " and ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"


def _count(names: Sequence[Any], noun: str) -> str:
    return f"{len(names):,} {noun}{'' if len(names) == 1 else 's'}"


def _are(names: Sequence[Any]) -> str:
    return "is" if len(names) == 1 else "are"


def _some(names: Sequence[str], noun: str, says: str, severity: Severity | None = None) -> Finding:
    """``3 tensors are …: a, b and 1 more``."""
    return Finding(f"{_count(names, noun)} {_are(names)} {says}: {_named(names)}", names, severity)


def _quantized(subject: Subject) -> list[Module]:
    return [module for module in subject.modules.values() if module.quantized]


def _seen(subject: Subject, info: TensorInfo) -> list[tuple[str, Statistics]]:
    """A tensor's statistics: its own, or those of every expert in it."""
    if not fused(info):
        return [(info.name, subject.statistics[info.name])] if info.name in subject.statistics else []
    return [(part.name, subject.statistics[part.name]) for part in slices(info) if part.name in subject.statistics]


def _scales(subject: Subject, *, experts: bool | None = None) -> Iterator[tuple[Module, str, str, Statistics]]:
    """Every tensor of scales: module, part, name (of an expert in a fused tensor, too), statistics.

    A GGUF tensor in blocks stands for its scales.  ``experts``: those of numbered or fused experts alone, or all the
    others.
    """
    for module in subject.modules.values():
        for part, info in module.parts.items():
            blocks = info.dtype not in RAW and subject.checkpoint.format == "gguf"
            if part not in SCALES and not blocks:
                continue
            if experts is None or experts == (module.expert is not None or fused(info)):
                for name, statistics in _seen(subject, info):
                    if statistics.size:
                        yield module, part, name, statistics


def _leaf(name: str) -> str:
    """A name without its numbers, the same for all layers."""
    return re.sub(r"\d+", "*", name)


def _ranges(numbers: Iterable[int]) -> str:
    """``1–3, 7``."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    texts = [f"{first}–{last}" if last > first else str(first) for first, last in parts]
    return ", ".join(texts) if len(texts) <= 6 else f"{', '.join(texts[:6])} …"


# -------------------------------------------------------------------------------------------------- values and scales


@rule(
    "nonfinite",
    title="NaN or infinite weights",
    severity="broken",
    symptom="empty answers, a repeated first token or NaN log-probabilities from the first layer that has them on",
    cause="an overflow while calibrating or converting, such as bfloat16 norms written as float16; or a damaged file",
    check="every value of every tensor in floating point, and of GGUF the scales of every block",
    command="fidelab audit CHECKPOINT --base ORIGINAL, then convert or quantize those layers again",
)
def _nonfinite(subject: Subject) -> Iterator[Finding]:
    scales = {name for _, _, name, _ in _scales(subject)}
    found = [
        (name, statistics)
        for info in subject.checkpoint.tensors.values()
        for name, statistics in _seen(subject, info)
        if not statistics.finite and name not in scales and not name.endswith(_MASKS)
    ]
    if found:
        names = [name for name, _ in found]
        nan, inf = (sum(getattr(statistics, what) for _, statistics in found) for what in ("nan", "inf"))
        yield Finding(f"{nan:,} NaN and {inf:,} infinite values in {_count(names, 'tensor')}: {_named(names)}", names)


@rule(
    "scale-nonfinite",
    title="NaN or infinite scales",
    severity="broken",
    symptom="NaN logits and empty answers; some kernels skip the layer instead, and text turns to noise",
    cause="a layer that calibration never reached, or a division by a zero range",
    check="every scale is a finite number",
    command="quantize those layers again with calibration data that reaches them, or round them to nearest",
)
def _scale_nonfinite(subject: Subject) -> Iterator[Finding]:
    found = [(name, s) for _, _, name, s in _scales(subject, experts=False) if not s.finite]
    if found:
        names = [name for name, _ in found]
        count = sum(s.nan + s.inf for _, s in found)
        yield Finding(f"{count:,} scales {_are(range(count))} NaN or infinite, in {_named(names)}", names)


@rule(
    "scale-zero",
    title="Zero scales",
    severity="broken",
    symptom="the layer gives zeros or NaN: empty answers, or text that repeats",
    cause="scales that were never written, were clamped at zero, or vanished in float16",
    check="no tensor of scales is all zero; of the others, how many zeros it has",
    command="convert or quantize those layers again; fidelab audit CHECKPOINT --base ORIGINAL tells whether they lived",
)
def _scale_zero(subject: Subject) -> Iterator[Finding]:
    packed = [item for item in _scales(subject, experts=False) if item[0].quantized]
    dead = [name for module, part, name, s in packed if s.dead and not _zero_in_base(subject, module)]
    if dead:
        yield Finding(f"all scales of {_count(dead, 'tensor')} are zero: {_named(dead)}", dead)
    # of NVFP4, whose scales are 8-bit floats, those of small groups vanish
    some = [
        (name, s)
        for module, part, name, s in packed
        if (s.size // 10 if module.parts[part].dtype.startswith("F8") else 0) < s.zeros < s.size
    ]
    if some:
        names = [name for name, _ in some]
        zeros, size = (sum(getattr(s, what) for _, s in some) for what in ("zeros", "size"))
        yield Finding(f"{zeros:,} of {size:,} scales are zero in {_named(names)}", names, "suspicious")


@rule(
    "scale-absurd",
    title="Absurd scales",
    severity="suspicious",
    symptom="activations overflow or vanish behind the layer: noise, or answers as if the layer were missing",
    cause="a wrong unit of the scale (its reciprocal, a missing global scale), or a diverged optimization",
    check=f"no weight beyond {_LARGEST_WEIGHT:g} or all below {_SMALLEST_WEIGHT:g} by its scale, none {_OUTLIER:g} "
    "times the median of the same kind of layer, none left at exactly 1",
    command="fidelab audit CHECKPOINT --base ORIGINAL compares the weights with the original's",
)
def _scale_absurd(subject: Subject) -> Iterator[Finding]:
    alike: dict[str, list[tuple[str, Statistics, float]]] = defaultdict(list)
    ones: list[str] = []
    for module, part, name, s in _scales(subject):
        if part not in ("scales", "weight_scale", "weight_scale_inv", "weight") or not module.quantized:
            continue
        if "weight_global_scale" in module.parts or "weight_scale_2" in module.parts or part == "blocks":
            continue
        info = module.parts[part]
        if info.dtype in RAW and s.same and s.first == 1 and s.size > 4 and module.expert is None and not fused(info):
            ones.append(name)
        if s.finite and s.largest:
            alike[f"{_leaf(module.name)}.{part}"].append((name, s, s.largest * _code_range(module)))
    extreme = [
        name for items in alike.values() for name, _, weight in items if not _SMALLEST_WEIGHT < weight < _LARGEST_WEIGHT
    ]
    beyond = set(extreme)
    if extreme:
        largest = max(s.largest for items in alike.values() for name, s, _ in items if name in beyond)
        yield Finding(f"scales up to {largest:.3g} give weights of an absurd size in {_named(extreme)}", extreme)
    odd: list[str] = []
    for items in alike.values():
        middle = median(s.largest for _, s, _ in items)
        if len(items) >= 4:
            odd += [name for name, s, _ in items if s.largest > _OUTLIER * middle and name not in beyond]
    if odd:
        yield Finding(f"scales over {_OUTLIER:g} times those of the same layers elsewhere in {_named(odd)}", odd)
    if ones:
        yield Finding(f"all scales are 1, as before any calibration, in {_named(ones)}", ones)


def _code_range(module: Module) -> float:
    """The largest magnitude of a code, about."""
    packed = module.packed
    if packed is not None and packed.dtype.startswith("F8"):
        return 448.0
    packing = module.packing()
    return float(1 << ((packing.bits if packing and packing.bits else 4) - 1))


@rule(
    "scale-negative",
    title="Negative scales",
    severity="information",
    symptom="none where the engine multiplies as it is; NaN or wrong weights where a tool takes logarithms of scales "
    "or clamps them at zero",
    cause="symmetric AutoRound keeps the sign of the value with the largest magnitude in its scale",
    check="the share of scales below zero",
    command="fidelab convert CHECKPOINT DST --to awq flips code, zero point and scale together, bit-exact",
)
def _scale_negative(subject: Subject) -> Iterator[Finding]:
    found = [(name, s) for _, _, name, s in _scales(subject) if s.negative]
    if found:
        names = [name for name, _ in found]
        negative, size = (sum(getattr(s, what) for _, s in found) for what in ("negative", "size"))
        share = 100 * negative / size
        yield Finding(f"{negative:,} of {size:,} scales ({share:.1f}%) are negative in {_named(names)}", names)


@rule(
    "scale-underflow",
    title="Scales too small for float16",
    severity="suspicious",
    symptom="weights of small groups become zero or coarse in float16 kernels: a slow loss of quality, seldom noise",
    cause="bfloat16 or float32 scales that an engine casts to float16, or scales of nearly dead groups",
    check="scales of integers that float16 rounds to zero, and float16 scales below 2^-14, which have fewer bits",
    command="serve with --dtype bfloat16 where the kernel can, or quantize with smaller groups",
)
def _scale_underflow(subject: Subject) -> Iterator[Finding]:
    vanishing, coarse = [], []
    for module, part, name, s in _scales(subject):
        info = module.parts[part]
        if part not in ("scales", "weight_scale") or info.dtype not in _FLOATS or module.packed is None:
            continue
        if module.packed.dtype.startswith("F8") or "weight_global_scale" in module.parts:
            continue
        if s.vanishing:
            vanishing.append((name, s.vanishing))
        elif info.dtype == "F16" and s.subnormal > s.size // 100:
            coarse.append((name, s.subnormal))
    for found, says in ((vanishing, "become zero in float16"), (coarse, "are subnormal numbers of float16")):
        if found:
            names = [name for name, _ in found]
            yield Finding(f"{sum(n for _, n in found):,} scales {says}, in {_named(names)}", names)


@rule(
    "overflow-float16",
    title="Values beyond float16",
    severity="suspicious",
    symptom="infinite activations and NaN logits as soon as the model runs in float16",
    cause="a bfloat16 model, whose range is larger, served or converted in float16",
    check="no bfloat16 or float32 value beyond 65504; broken where the configuration says float16",
    command="serve with --dtype bfloat16",
)
def _overflow(subject: Subject) -> Iterator[Finding]:
    scales = {name for _, _, name, _ in _scales(subject)}
    found = [
        (name, statistics.largest)
        for info in subject.checkpoint.tensors.values()
        if info.dtype in ("BF16", "F32", "F64") and subject.checkpoint.format != "gguf"  # llama.cpp keeps these types
        for name, statistics in _seen(subject, info)
        if statistics.largest > _FLOAT16_MAX and name not in scales
    ]
    if found:
        names = [name for name, _ in found]
        severity: Severity = "broken" if _dtype(subject.checkpoint) == "float16" else "suspicious"
        largest = max(value for _, value in found)
        yield Finding(f"values up to {largest:.4g} do not fit float16, in {_named(names)}", names, severity)


def _text(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The configuration of the text model."""
    text = checkpoint.config.get("text_config")
    return text if isinstance(text, dict) else checkpoint.config


def _dtype(checkpoint: Checkpoint) -> str:
    places = (checkpoint.config, _text(checkpoint))
    values = (place.get(key) for place in places for key in ("dtype", "torch_dtype"))
    return str(next(filter(None, values), "")).removeprefix("torch.")


@rule(
    "zero-weights",
    title="Zero weights",
    severity="suspicious",
    symptom="the layer adds nothing: empty or fluent but empty-headed answers, or noise if it is an early layer",
    cause="tensors that were allocated and never written, or codes clamped away by negative scales",
    check="no matrix is all zero, no packed matrix holds one code everywhere, or blank words for a tenth of it; with "
    "--base, broken where the original is not zero",
    command="fidelab audit CHECKPOINT --base ORIGINAL",
)
def _zero_weights(subject: Subject) -> Iterator[Finding]:
    dead: list[str] = []
    lived: list[str] = []
    partly: list[str] = []
    for module in subject.modules.values():
        info = module.packed or module.parts.get("weight") or module.parts.get("")
        if info is None or len(info.shape) < 2 or not (module.in_layer or module.quantized or module.kind == "head"):
            continue
        if "" in module.parts and not fused(info):  # a parameter of a kind that may well begin, and stay, at zero
            continue
        blocks = info.dtype not in RAW
        for name, s in _seen(subject, info):
            if s.size and s.finite and (s.dead if not module.quantized or blocks else s.same and s.size > 1):
                live = subject.base is not None and not _zero_in_base(subject, module)
                (lived if live else dead if subject.base is None else []).append(name)
            elif module.quantized and not blocks and s.blank > s.size // 10 and info.dtype in ("I32", "U32"):
                partly.append(name)
    if lived:
        yield _some(lived, "tensor", "zero where the original has weights", "broken")
    if dead:
        yield _some(dead, "tensor", "zero, or one code everywhere")
    if partly:
        yield Finding(f"over a tenth of the packed words are blank in {_named(partly)}", partly)


def _zero_in_base(subject: Subject, module: Module) -> bool:
    """Whether the original's weight is all zero; without an original, or where it has other names, no."""
    if subject.base is None:
        return False
    info = _original(subject.base, module.name)
    return info is not None and scan(subject.base, info).dead


def _original(base: Checkpoint, module: str) -> TensorInfo | None:
    """The original's weight of a module, under one of the prefixes that language models have there."""
    bare = _bare(module)
    names = (module, bare, *(f"{prefix}{bare}" for prefix in _PREFIXES))
    return next(
        (info for name in names if (info := base.tensors.get(f"{name}.weight") or base.tensors.get(name))), None
    )


_PREFIXES = ("model.language_model.", "language_model.model.", "model.model.", "model.", "language_model.")


def _bare(name: str) -> str:
    """A name without the prefixes that writers add to and remove from text models."""
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


# ------------------------------------------------------------------------------------------------------------- experts


@rule(
    "experts-uncalibrated",
    title="Uncalibrated experts",
    severity="broken",
    symptom="noise or NaN as soon as a token is routed to such an expert: short tests pass, long or foreign texts fail",
    cause="no calibration token reached these experts, so that their scales stayed infinite, zero or at their default",
    check="scales of every expert: finite, not zero, not one default value; the same parts in all experts of a layer",
    command="fidelab quantize MODEL --recipe RECIPE with more data, or with every token routed to every expert",
)
def _experts_uncalibrated(subject: Subject) -> Iterator[Finding]:
    groups: dict[tuple[str, str], dict[int, tuple[str, Statistics]]] = defaultdict(dict)
    for module, part, name, s in _scales(subject, experts=True):
        expert = module.expert or (f"{module.name}.*", int(name.rpartition("[")[2].rstrip("]")))
        groups[expert[0], part][expert[1]] = name, s
    members: dict[str, set[int]] = defaultdict(set)
    for module in subject.modules.values():
        if module.expert is not None and module.quantized:
            members[module.expert[0]].add(module.expert[1])
    found: dict[str, set[int]] = defaultdict(set)
    why: Counter[str] = Counter()
    names: list[str] = []
    for (layer, part), experts in groups.items():
        default = [n for n, (_, s) in experts.items() if _default(s, part)]
        normal = len(experts) - len(default)
        for n, (name, s) in experts.items():
            reason = (
                "infinite or NaN scales"
                if not s.finite
                else "zero scales"
                if s.dead
                else "default scales"
                if n in default and (normal or s.first == 1)
                else None
            )
            if reason is not None:
                found[layer].add(n)
                why[reason] += 1
                names.append(name)
        if lacking := members.get(layer, set()) - set(experts):
            found[layer] |= lacking
            why[f"no {part}"] += len(lacking)
            names += [layer.replace("*", str(n)) for n in sorted(lacking)]
    if found:
        layer, numbers = next(iter(found.items()))
        known = members.get(layer) or set(groups[next(key for key in groups if key[0] == layer)])
        more = f", and some in {len(found) - 1} more places" if len(found) > 1 else ""
        reasons = ", ".join(f"{reason} ({n:,} tensors)" for reason, n in why.most_common())
        yield Finding(
            f"experts {_ranges(numbers)} of {len(known)} in {layer}{more} were never calibrated: {reasons}", names
        )


def _default(s: Statistics, part: str) -> bool:
    """Whether scales look as they did before calibration: one number for all groups, or exactly 1."""
    return s.size > 0 and s.same and (s.first == 1 or (s.size > 4 and not part.startswith("input")))


@rule(
    "experts-missing",
    title="Experts missing",
    severity="broken",
    symptom="the loader leaves the experts as it initialized them: noise whenever a token is routed to them",
    cause="names that were not remapped, or a filter that dropped a part of the experts",
    check="the experts of every layer are numbered without gaps and as many as in the other layers",
    command="compare with the original: fidelab audit CHECKPOINT --base ORIGINAL; convert again",
)
def _experts_missing(subject: Subject) -> Iterator[Finding]:
    numbers: dict[str, set[int]] = defaultdict(set)
    for module in subject.modules.values():
        if module.expert is not None:
            numbers[module.expert[0]].add(module.expert[1])
    most: dict[str, int] = defaultdict(int)
    for layer, present in numbers.items():
        most[_leaf(layer)] = max(most[_leaf(layer)], *present)
    gaps: list[str] = []
    fewer: list[str] = []
    for layer, present in numbers.items():
        if len(gaps) + len(fewer) > _MOST_MISSING:
            break
        last = max(present)
        for n in range(min(most[_leaf(layer)] + 1, MOST_SLICES)):
            if n not in present:
                (gaps if n < last else fewer).append(layer.replace("*", str(n), 1))
    if gaps:
        yield _some(gaps, "expert", "not there, and such with higher numbers are")
    if fewer:
        yield _some(fewer, "expert", "not there, which other layers have", "broken" if gaps else "suspicious")


# --------------------------------------------------------------------------------------------------- files and index


@rule(
    "index-missing",
    title="Tensors that the index names and no file holds",
    severity="broken",
    symptom="an error while loading, or weights left as they were initialized and noise from there on",
    cause="a shard that was not downloaded, or an index that belongs to another version of the files",
    check="every name of model.safetensors.index.json is in a file",
    command="fetch the checkpoint again, or write it anew with fidelab convert",
)
def _index_missing(subject: Subject) -> Iterator[Finding]:
    checkpoint = subject.checkpoint
    missing = [name for name in checkpoint.index or () if name not in checkpoint.tensors]
    if missing:
        files = checkpoint.missing_files
        where = f" (of {_count(files, 'file')} missing: {_named(files)})" if files else ""
        yield Finding(
            f"{_count(missing, 'tensor')} of the index {_are(missing)} in no file{where}: {_named(missing)}", missing
        )


@rule(
    "index-unlisted",
    title="Tensors that the index does not name",
    severity="suspicious",
    symptom="engines that go by the index do not load them: weights as initialized, or an older version of the layer",
    cause="shards that were written anew without their index",
    check="every tensor of every shard is in model.safetensors.index.json",
    command="write the checkpoint anew: fidelab convert",
)
def _index_unlisted(subject: Subject) -> Iterator[Finding]:
    index = subject.checkpoint.index
    if index is not None:
        unlisted = [name for name in subject.checkpoint.tensors if name not in index]
        if unlisted:
            yield _some(unlisted, "tensor", "not in the index")


@rule(
    "index-elsewhere",
    title="Tensors in another file than the index says",
    severity="suspicious",
    symptom="engines that fetch tensors by the index fail with a missing key; others load",
    cause="shards that were written anew without their index",
    check="every tensor is in the file that the index names for it",
    command="write the checkpoint anew: fidelab convert",
)
def _index_elsewhere(subject: Subject) -> Iterator[Finding]:
    checkpoint = subject.checkpoint
    homes: dict[str, set[str]] = defaultdict(set)
    for info in (*checkpoint.tensors.values(), *checkpoint.copies):
        homes[info.name].add(info.file.name)
    wrong = [name for name, file in (checkpoint.index or {}).items() if name in homes and file not in homes[name]]
    if wrong:
        yield _some(wrong, "tensor", "in another file than the index says")


@rule(
    "scale-apart",
    title="Scales in another file than their weights",
    severity="information",
    symptom="none in engines that load all files; tools that convert file by file skip the layer, and NaN follows",
    cause="shards that were cut at a size, through the middle of a module",
    check="the parts of every quantized module are in one file",
    command="convert with a tool that looks for parts in all files, such as fidelab convert",
)
def _scale_apart(subject: Subject) -> Iterator[Finding]:
    apart = [
        info.name
        for module in _quantized(subject)
        if module.packed is not None
        for info in module.parts.values()
        if info.file != module.packed.file
    ]
    if apart:
        yield _some(apart, "tensor", "apart from the weights")


@rule(
    "duplicate-tensor",
    title="A tensor twice",
    severity="suspicious",
    symptom="which of the two is loaded depends on the engine and the order of files; other content, other answers",
    cause="old shards beside new ones, or one layer saved under two prefixes",
    check="no name is in two files, and no layer under two prefixes; broken where the contents differ",
    command="remove the older files, and write the checkpoint anew: fidelab convert",
)
def _duplicates(subject: Subject) -> Iterator[Finding]:
    checkpoint = subject.checkpoint
    differ: list[str] = []
    same: list[str] = []
    for copy in checkpoint.copies:
        (same if _equal(checkpoint, copy, checkpoint.tensors[copy.name]) else differ).append(copy.name)
    if differ:
        yield _some(differ, "tensor", "in two files with other content", "broken")
    if same:
        yield _some(same, "tensor", "in two files")
    bare: dict[str, list[str]] = defaultdict(list)
    for name in checkpoint.tensors:
        bare[_bare(name)].append(name)
    twice = [name for names in bare.values() if len(names) > 1 for name in names]
    if twice:
        yield _some(twice, "tensor", "the same layers under two prefixes")


def _equal(checkpoint: Checkpoint, one: TensorInfo, other: TensorInfo) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(checkpoint.chunks(one), checkpoint.chunks(other), strict=True)
    return all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in pairs)


# ------------------------------------------------------------------------------------- what is quantized, and what not


_NEEDED = {
    "qweight": ("scales",),
    "weight_packed": ("weight_scale",),
    "blocks": ("scales",),
}


@rule(
    "incomplete-module",
    title="Quantized layers that lack a part",
    severity="broken",
    symptom="a missing key while loading, or a layer that is skipped: NaN or noise",
    cause="a converter that skipped what it did not find (a scale in another file), or names that were not remapped",
    check="packed weights have scales (and AWQ and GPTQ zero points), and scales have weights",
    command="convert again with fidelab convert, which refuses to write an incomplete module",
)
def _incomplete(subject: Subject) -> Iterator[Finding]:
    lacking: dict[str, list[str]] = defaultdict(list)
    for module in subject.modules.values():
        parts = set(module.parts)
        for marker, needed in _NEEDED.items():
            if marker in parts:
                missing = [part for part in needed if part not in parts]
                if marker == "qweight" and subject.scheme.method in ("awq", "gptq") and "qzeros" not in parts:
                    missing += ["qzeros"]
                for part in missing:
                    lacking[part].append(module.name)
        weight = module.parts.get("weight")
        if weight is not None and weight.dtype in ("I8", "U8", "F8_E4M3", "F8_E5M2") and module.scales is None:
            lacking["scales of its 8-bit weight"].append(module.name)
        scaled = [part for part in parts if part in SCALES and part not in ("k_scale", "v_scale", "q_scale")]
        if scaled and not module.quantized and not _cache_scales(module):
            lacking["the weight that its scales belong to"].append(module.name)
    for part, names in lacking.items():
        yield Finding(f"{_count(names, 'module')} lack{'s' if len(names) == 1 else ''} {part}: {_named(names)}", names)


def _cache_scales(module: Module) -> bool:
    """Whether scales beside a weight in 16 bits are those of activations."""
    return "weight" in module.parts and all(part.startswith("input") for part in module.parts if part in SCALES)


@rule(
    "doubly-quantized",
    title="Weights stored twice, or quantized twice",
    severity="broken",
    symptom="either copy may be loaded: noise where the two differ, and twice the memory where both are",
    cause="packed weights saved beside the original ones, or a quantized checkpoint quantized again",
    check="a module has one form of its weight, and the configuration one method",
    command="quantize the original anew; fidelab convert writes each module in one form",
)
def _doubly(subject: Subject) -> Iterator[Finding]:
    forms = ("weight", "qweight", "weight_packed", "blocks")
    twice = [module.name for module in subject.modules.values() if sum(form in module.parts for form in forms) > 1]
    if twice:
        yield Finding(
            f"{_count(twice, 'module')} hold{'s' if len(twice) == 1 else ''} two forms of the weight: {_named(twice)}",
            twice,
        )
    mixed = {
        "qweight" if "qweight" in module.parts else "weight_packed"
        for module in subject.modules.values()
        if {"qweight", "weight_packed"} & set(module.parts)
    }
    if len(mixed) > 1:
        names = [module.name for module in subject.modules.values() if "qweight" in module.parts]
        yield Finding("some modules are packed as GPTQ or AWQ, others as compressed-tensors", names)
    config = subject.checkpoint.config
    both = [key for key in ("quantization_config", "compression_config") if isinstance(config.get(key), dict)]
    if len(both) == 2 and config[both[0]].get("config_groups") != config[both[1]].get("config_groups"):
        yield Finding("config.json has a quantization_config and another compression_config")


@rule(
    "quantization-mismatch",
    title="Configuration and tensors disagree whether anything is quantized",
    severity="broken",
    symptom="a missing key while loading, or packed integers taken for weights: noise",
    cause="a config.json that was copied from the original, or weights that were",
    check="a quantization_config goes with quantized tensors, and quantized tensors with a quantization_config",
    command="fetch config.json and weights of the same revision; or quantize again",
)
def _mismatch(subject: Subject) -> Iterator[Finding]:
    if subject.checkpoint.format == "gguf":
        return
    quantized = [module.name for module in _quantized(subject)]
    if quantized and subject.scheme.method is None:
        yield _some(quantized, "module", "quantized and config.json says nothing of it")
    scales = subject.scheme.kv_cache and any("k_scale" in module.parts for module in subject.modules.values())
    if not quantized and not scales and subject.scheme.method is not None and subject.checkpoint.tensors:
        yield Finding(f"config.json says {subject.scheme.method} and no module is quantized")


@rule(
    "ignored-quantized",
    title="Layers that the configuration lists as kept, and are quantized",
    severity="broken",
    symptom="the engine builds a 16-bit layer and finds packed weights: a missing key, or NaN in that layer",
    cause="an ignore list that was edited, or belongs to another run",
    check="no quantized module matches ignore, modules_to_not_convert or what else the method calls it",
    command="mend the list in config.json, or quantize again",
)
def _ignored_quantized(subject: Subject) -> Iterator[Finding]:
    names = [module.name for module in _quantized(subject) if subject.scheme.ignores(module.name)]
    if names:
        yield _some(names, "quantized module", f"listed in {subject.scheme.ignored_by}")


_EXEMPT = re.compile(r"(^|\.)(eh_proj|mtp\w*)(\.|$)")  # of multi-token prediction, built plain by engines


@rule(
    "plain-not-ignored",
    title="Layers kept in 16 bits that the configuration does not list",
    severity="broken",
    symptom="the engine builds a quantized layer and finds no packed weights: a missing key, or a layer that stays as "
    "initialized (NaN in a dense layer, text that is noise)",
    cause="layers kept at quantization time and not written to the list",
    check="every linear layer that the method would quantize and that is stored in 16 bits is on the list",
    command="add the names to the list in config.json",
)
def _plain_not_ignored(subject: Subject) -> Iterator[Finding]:
    scheme = subject.scheme
    if scheme.method in (None, "mxfp4", "modelopt") or not _quantized(subject):
        return
    kinds = {_leaf(module.name) for module in _quantized(subject)}
    plain: list[str] = []
    rest: list[str] = []
    for module in subject.modules.values():
        weight = module.parts.get("weight")
        if weight is None or module.quantized or len(weight.shape) != 2 or weight.dtype not in _FLOATS:
            continue
        if (
            module.kind in ("norm", "embedding")
            or _EXEMPT.search(module.name)
            or not scheme.targets_linear(module.name)
        ):
            continue
        elsewhere = _leaf(module.name) in kinds
        if scheme.method == "compressed-tensors":
            special = module.kind in ("head", "router", "shared gate")
            if special or module.in_layer:
                (rest if special else plain).append(module.name)
        elif elsewhere:
            plain.append(module.name)
        elif module.in_layer and module.kind in ("linear", "recurrent", "vision"):
            rest.append(module.name)
    if plain:
        yield _some(plain, "module", f"in 16 bits and not in {scheme.ignored_by}")
    if rest:
        yield _some(rest, "module", f"in 16 bits, may be built quantized, and not in {scheme.ignored_by}", "suspicious")


@rule(
    "ignore-key",
    title="A list of kept layers under a key that the method does not read",
    severity="broken",
    symptom="the engine builds the listed layers quantized: a missing key, or NaN in a dense layer",
    cause="a conversion between methods that left ignore where modules_to_not_convert is read, or the reverse",
    check="the list is under the key of the configuration's method",
    command="rename the key in config.json, or convert with fidelab convert",
)
def _ignore_key(subject: Subject) -> Iterator[Finding]:
    scheme = subject.scheme
    if scheme.method is None or scheme.ignored:
        return
    every = {key for keys in IGNORING.values() for key in keys}
    wrong = sorted(key for key in every - set(IGNORING[scheme.method]) if scheme.raw.get(key))
    if wrong:
        expected = " or ".join(IGNORING[scheme.method])
        listed = [str(name) for name in scheme.raw[wrong[0]]] if isinstance(scheme.raw[wrong[0]], list) else []
        yield Finding(f"{wrong[0]} is not read for {scheme.method}, {expected} is", listed)


@rule(
    "router-quantized",
    title="A quantized router or shared-expert gate",
    severity="broken",
    symptom="the loader builds it in 16 bits and has no place for packed weights: a missing key, or random routing",
    cause='a pattern such as "experts" that matches more, or less, than it was written for',
    check="routers and shared-expert gates are stored in 16 or 32 bits",
    command="keep them: a rule of the recipe for .*gate$ with its expected count (fidelab quantize)",
)
def _router_quantized(subject: Subject) -> Iterator[Finding]:
    names = [module.name for module in _quantized(subject) if module.kind in ("router", "shared gate")]
    if names:
        yield _some(names, "router or shared-expert gate", "quantized")


@rule(
    "norm-quantized",
    title="A quantized norm",
    severity="broken",
    symptom="a missing key while loading, or activations of the wrong size in every layer behind it",
    cause="a pattern that matches more than linear layers",
    check="norms are stored in 16 or 32 bits",
    command="quantize again with linear layers as the only target",
)
def _norm_quantized(subject: Subject) -> Iterator[Finding]:
    names = [module.name for module in _quantized(subject) if module.kind == "norm"]
    if names:
        yield _some(names, "norm", "quantized")


@rule(
    "recurrent-quantized",
    title="Recurrent layers in few bits",
    severity="suspicious",
    symptom="errors add up in the state: good short answers, noise after some hundred tokens",
    cause="DeltaNet, Mamba or convolution layers taken for ordinary linear layers",
    check="projections of recurrent layers have at least 8 bits",
    command="fidelab sensitivity ORIGINAL --weights int4 --by kind says what they cost; keep them in 16 bits",
)
def _recurrent_quantized(subject: Subject) -> Iterator[Finding]:
    names = []
    for module in _quantized(subject):
        packing = module.packing()
        bits = (packing.bits if packing else None) or subject.scheme.bits
        if module.kind == "recurrent" and bits is not None and bits < 8:
            names.append(module.name)
    if names:
        yield _some(names, "recurrent layer", "in fewer than 8 bits")


# ------------------------------------------------------------------------------------------------------------- packing


@rule(
    "packing-mismatch",
    title="Bits, groups or shapes other than the configuration says",
    severity="broken",
    symptom="an error about shapes while loading, or codes unpacked at the wrong places: noise",
    cause="a configuration that belongs to another run, or per-layer settings that it does not mention",
    check="bits, number of groups, packing order and stored shape follow from the configuration",
    command="mend bits and group_size in config.json, or quantize again",
)
def _packing_mismatch(subject: Subject) -> Iterator[Finding]:
    scheme = subject.scheme
    wrong: dict[str, list[str]] = defaultdict(list)
    for module in _quantized(subject):
        packing = module.packing()
        if packing is None:
            if "qweight" in module.parts and "scales" in module.parts:
                wrong["shapes that do not belong together"].append(module.name)
            continue
        named = (scheme.layout or "").removesuffix("_v2")
        if named in ("gptq", "awq") and packing.layout in ("gptq", "awq") and packing.layout != named:
            wrong[f"codes packed as {packing.layout} where the configuration says {named}"].append(module.name)
            continue
        if scheme.bits is not None and packing.bits is not None and packing.bits != scheme.bits:
            wrong[f"{packing.bits} bits where the configuration says {scheme.bits}"].append(module.name)
            continue
        k = packing.inputs(scheme.bits)
        if scheme.group is not None and k is not None and packing.groups != -(-k // scheme.group):
            text = (
                f"{packing.groups} groups of {k} inputs where groups of {scheme.group} would be {-(-k // scheme.group)}"
            )
            wrong[text].append(module.name)
        shape = module.parts.get("weight_shape")
        if shape is not None and k is not None and subject.statistics[shape.name].size == 2:
            stored = tuple(int(n) for n in subject.checkpoint.read(shape).tolist())
            per_word = 32 // scheme.bits if scheme.bits and packing.layout == "words" else 1
            if stored[0] != packing.n or not k - per_word < stored[1] <= k:
                wrong[f"a weight_shape of {stored} where codes are ({packing.n}, {k})"].append(module.name)
    for text, names in wrong.items():
        yield Finding(f"{_count(names, 'module')} with {text}: {_named(names)}", names)


@rule(
    "group-not-dividing",
    title="Groups that do not divide the inputs",
    severity="broken",
    symptom="engines refuse the layer, or their kernels read scales of the next row at the end of each: noise",
    cause="a group size taken over from another model (704 = 5.5 × 128, 576 = 4.5 × 128)",
    check="the inputs of every quantized layer are a multiple of the group size",
    command="quantize again with a group size that divides them, such as 64 or 32",
)
def _group_not_dividing(subject: Subject) -> Iterator[Finding]:
    found: dict[tuple[int, int], list[str]] = defaultdict(list)
    for module in _quantized(subject):
        packing = module.packing()
        k = packing.inputs(subject.scheme.bits) if packing else None
        if packing is None or k is None or packing.groups < 2:
            continue
        group = subject.scheme.group or -(-k // packing.groups)
        if k % group:
            found[k, group].append(module.name)
    for (k, group), names in found.items():
        yield Finding(
            f"{k} inputs are {k / group:g} groups of {group} in {_count(names, 'module')}: {_named(names)}", names
        )


@rule(
    "tp-split",
    title="Layers that tensor parallelism cannot split",
    severity="broken",
    symptom="engines refuse to load with this number of devices, or devices use scales of their neighbours: noise",
    cause="a group size that divides the layer and not a device's share of it (704 / 2 = 5.5 × 64)",
    check="with --tp N: inputs / N are a multiple of the group size, outputs / N a multiple of 8",
    command="serve with fewer devices, or quantize again with smaller groups",
)
def _tp_split(subject: Subject) -> Iterator[Finding]:
    tp = subject.tp
    if tp == 1 or subject.checkpoint.format == "gguf":
        return
    found: dict[str, list[str]] = defaultdict(list)
    for module in _quantized(subject):
        packing = module.packing()
        k = packing.inputs(subject.scheme.bits) if packing else None
        if packing is None or k is None:
            continue
        if module.parallel == "inputs":
            group = (subject.scheme.group or -(-k // packing.groups)) if packing.groups > 1 else 1
            if k % tp:
                found[f"{k} inputs over {tp} devices"].append(module.name)
            elif (k // tp) % group:
                found[f"{k} / {tp} = {k // tp} inputs are {k / tp / group:g} groups of {group}"].append(module.name)
        elif module.parallel == "outputs":
            parts = _parts(subject.checkpoint, module, tp)
            if packing.n % parts or (packing.n // parts) % 8:
                found[f"{packing.n} / {parts} outputs are no multiple of 8"].append(module.name)
    for text, names in found.items():
        yield Finding(f"{text} in {_count(names, 'module')}: {_named(names)}", names)


def _parts(checkpoint: Checkpoint, module: Module, tp: int) -> int:
    """Into how many parts the outputs of a layer go; heads of keys and values are repeated where they are too few."""
    heads = _text(checkpoint).get("num_key_value_heads")
    few = module.name.endswith(("k_proj", "v_proj")) and type(heads) is int and 0 < heads < tp
    return int(heads) if few else tp  # type: ignore[arg-type]


@rule(
    "group-index",
    title="A group index that is not one",
    severity="broken",
    symptom="wrong scales for most inputs: noise, or a crash where a kernel reads beyond its scales",
    cause="an index that was dropped, zeroed or written for another order of inputs (desc_act, actorder)",
    check="g_idx is within the groups, is not one group for all, and is in order where the configuration says so",
    command="convert from the original files with fidelab convert, which reorders or refuses",
)
def _group_index(subject: Subject) -> Iterator[Finding]:
    outside, single, ignored = [], [], []
    for module in _quantized(subject):
        index = module.parts.get("g_idx") or module.parts.get("weight_g_idx")
        packing = module.packing()
        if index is None or packing is None or index.dtype not in ("I32", "I64"):
            continue
        s = subject.statistics[index.name]
        if s.size and not 0 <= s.low <= s.high < packing.groups and not (s.low == s.high == -1):
            outside.append(index.name)
        elif s.size > 1 and s.same and packing.groups > 1:
            single.append(index.name)
        elif subject.scheme.raw.get("desc_act") is False and s.size and packing.groups > 1:
            content = subject.checkpoint.read(index)
            if (np.diff(content) < 0).any():
                ignored.append(index.name)
    if outside:
        yield Finding(f"groups that are not there are named in {_named(outside)}", outside)
    if single:
        yield Finding(f"all inputs are in one of several groups in {_named(single)}", single)
    if ignored:
        yield Finding(
            f"inputs are out of order in {_named(ignored)}, and the configuration says desc_act false", ignored
        )


@rule(
    "zero-point-offset",
    title="Zero points of the other version of GPTQ",
    severity="broken",
    symptom="all weights are off by one step: fluent noise, or answers that fall apart after a few words",
    cause="version 1 of the format stores zero points minus one, version 2 as they are, and only the configuration "
    "tells them apart",
    check="zero points of symmetric weights are the middle code of the version that the configuration names",
    command='set "checkpoint_format" in config.json to what the tensors are (gptq or gptq_v2)',
)
def _zero_point_offset(subject: Subject) -> Iterator[Finding]:
    scheme = subject.scheme
    if scheme.layout not in ("gptq", "gptq_v2") or not scheme.symmetric:
        return
    version = 2 if scheme.layout == "gptq_v2" else 1
    wrong: dict[int, list[str]] = defaultdict(list)
    for module in _quantized(subject):
        zeros, packing = module.parts.get("qzeros"), module.packing()
        if zeros is None or packing is None or packing.layout != "gptq" or packing.bits not in (4, 8):
            continue
        s = subject.statistics[zeros.name]
        middle = {1: {4: 0x77777777, 8: 0x7F7F7F7F}, 2: {4: 0x88888888, 8: 0x80808080}}
        other = 3 - version
        if s.same and s.low & 0xFFFFFFFF == middle[other][packing.bits]:
            wrong[other].append(zeros.name)
    for found, names in wrong.items():
        yield Finding(
            f"zero points are those of GPTQ version {found} in {_count(names, 'tensor')} and the configuration says "
            f"version {version}: {_named(names)}",
            names,
        )


@rule(
    "scale-dtype",
    title="Scales of another type than the model",
    severity="information",
    symptom="kernels that want scales in the activations' type are passed over for slow ones, two to five times slower",
    cause="scales written in float16 beside a bfloat16 model, or layers written by different tools",
    check="16-bit scales of GPTQ and AWQ are of one type, the one that the configuration names",
    command="serve with --dtype of the scales and look at which kernel the engine says it uses",
)
def _scale_dtype(subject: Subject) -> Iterator[Finding]:
    by_type: dict[str, list[str]] = defaultdict(list)
    for module in _quantized(subject):
        scales = module.scales
        if scales is not None and scales.dtype in ("F16", "BF16") and module.packed is not None:
            by_type[scales.dtype].append(scales.name)
    model = {"float16": "F16", "bfloat16": "BF16"}.get(_dtype(subject.checkpoint))
    if len(by_type) > 1:
        few = min(by_type.values(), key=len)
        yield Finding(
            f"scales are {' and '.join(by_type)}; of the rarer type {_are(few)} {_named(few)}", few, "suspicious"
        )
    elif model is not None and by_type and model not in by_type:
        [(dtype, names)] = by_type.items()
        yield Finding(f"scales are {dtype} and the model is {model}, in {_named(names)}", names)


@rule(
    "kv-scales-missing",
    title="Announced scales of the KV cache are not there",
    severity="suspicious",
    symptom="an FP8 KV cache with scales of 1: a loss that grows with the context, or clipped keys",
    cause="calibration of the KV cache that did not run, or scales that a conversion dropped",
    check="a kv_cache_scheme goes with k_scale and v_scale of every attention layer",
    command="fidelab compare MODEL --kv fp8 measures the loss; or calibrate the KV cache again",
)
def _kv_scales(subject: Subject) -> Iterator[Finding]:
    if subject.scheme.kv_cache and not any("k_scale" in module.parts for module in subject.modules.values()):
        yield Finding("config.json has a kv_cache_scheme and no layer has a k_scale")


# ------------------------------------------------------------------------------------------------------ missing layers


@rule(
    "vision-missing",
    title="No vision tower",
    severity="broken",
    symptom="fabricated answers about images, which the text part never sees",
    cause="a text-only conversion or calibration of a model for images, or names lost on the way",
    check="a vision_config goes with tensors of a vision tower, an audio_config with an audio tower; suspicious where "
    "the architecture is one for text alone",
    command="quantize again with the vision tower kept in 16 bits; ask about an image, and about a wrong one",
)
def _vision_missing(subject: Subject) -> Iterator[Finding]:
    for kind, what in (("vision", "vision tower"), ("audio", "audio tower")):
        announced = subject.checkpoint.config.get(f"{kind}_config")
        if isinstance(announced, dict) and announced and not _has(subject.modules.values(), kind):
            named = subject.checkpoint.config.get("architectures")
            text_only = isinstance(named, list) and any(str(name).endswith("ForCausalLM") for name in named)
            yield Finding(
                f"config.json has a {kind}_config and no tensor belongs to a {what}",
                severity="suspicious" if text_only else "broken",
            )


def _has(modules: Iterable[Module], kind: str) -> bool:
    return any(module.kind == kind for module in modules)


@rule(
    "head-missing",
    title="No LM head or no embedding",
    severity="broken",
    symptom="an LM head as initialized: every token is as likely as every other; or an error while loading",
    cause="a head taken for a tied one and dropped, or names lost on the way",
    check="an LM head is stored where tie_word_embeddings is false, and an embedding table always",
    command="take lm_head.weight from the original, or set tie_word_embeddings to what the original has",
)
def _head_missing(subject: Subject) -> Iterator[Finding]:
    checkpoint, modules = subject.checkpoint, subject.modules.values()
    if checkpoint.missing_files or not checkpoint.tensors:
        return
    if checkpoint.format == "gguf":
        embedded = checkpoint.metadata.get("general.type") in ("adapter", "mmproj") or "token_embd" in subject.modules
        if not embedded:
            yield Finding("there is no token_embd.weight")
        return
    config = checkpoint.config
    text = _text(checkpoint)
    named = config.get("architectures")
    generates = isinstance(named, list) and any(
        str(name).endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in named
    )
    if not generates:
        return
    tied = next((value for place in (config, text) if type(value := place.get("tie_word_embeddings")) is bool), None)
    if not _has(modules, "embedding"):
        yield Finding("no tensor is named as an embedding table", severity="suspicious")
    elif not _has(modules, "head"):
        base_head = subject.base is not None and any("lm_head" in name for name in subject.base.tensors)
        if tied is False or (base_head and not tied):
            yield Finding("tie_word_embeddings is false and there is no lm_head", ["lm_head.weight"])


@rule(
    "base-missing",
    title="Layers that the original has",
    severity="broken",
    symptom="the engine leaves them as initialized, or refuses: noise in text, or a blind or deaf model",
    cause="experts, biases or towers that a conversion did not know by name",
    check="with --base: every tensor of the original is there, as it is or quantized, and of the same shape",
    command="convert or quantize again; fidelab convert ends with a certificate over all tensors",
)
def _base_missing(subject: Subject) -> Iterator[Finding]:
    if subject.base is None or subject.checkpoint.missing_files:
        return
    present = {_bare(module.name): module for module in subject.modules.values()}
    stacked = any(".experts." in name and module.expert is None for name, module in subject.modules.items())
    numbered = any(module.expert is not None for module in subject.modules.values())
    tied = not _has(subject.modules.values(), "head")
    missing, shapes = [], []
    for original in modules_of(subject.base).values():
        module = present.get(_bare(original.name))
        if module is None:
            regrouped = ".experts" in original.name and (numbered if original.expert is None else stacked)
            if not regrouped and not (tied and original.kind == "head") and "rotary" not in original.name:
                missing += [info.name for info in original.parts.values()]
            continue
        missing += [
            original.parts[part].name for part in ("bias",) if part in original.parts and part not in module.parts
        ]
        weight, packing = original.parts.get("weight"), module.packing()
        k = packing.inputs(subject.scheme.bits) if packing else None
        if weight is None or len(weight.shape) != 2:
            continue
        plain = module.parts.get("weight")
        repacked = packing is not None and k is not None and not _close(weight.shape, (packing.n, k), packing.layout)
        reshaped = plain is not None and not module.quantized and plain.shape[1:] != weight.shape[1:]
        if repacked or reshaped:
            shapes.append(module.name)
    if missing:
        yield Finding(
            f"{_count(missing, 'tensor')} of the original {_are(missing)} not there: {_named(missing)}", missing
        )
    if shapes:
        yield _some(shapes, "module", "of another shape than the original")


def _close(shape: Sequence[int], stored: Sequence[int], layout: str) -> bool:
    """Whether a packed shape, which may be filled up to whole words, is that of the original."""
    slack = 32 if layout in ("words", "gptq") else 1
    return stored[0] == shape[0] and shape[1] <= stored[1] < shape[1] + slack


@rule(
    "base-differs",
    title="Weights that are not the original's",
    severity="broken",
    symptom="noise, or another model's answers, though every tensor loads",
    cause="codes in another order than the kernel unpacks, zero points off by one, layers swapped, or another original",
    check=f"with --base: the first {_ROWS} rows of every quantized layer, dequantized, against the original's; a "
    "factor per input, as AWQ moves into the layer before, is taken out",
    command="convert again with fidelab convert, or name the checkpoint that it was really made from",
)
def _base_differs(subject: Subject) -> Iterator[Finding]:
    base = subject.base
    if base is None:
        return
    found: dict[str, float] = {}
    for name, values in _dequantized(subject):
        info = _original(base, name)
        if info is None or len(info.shape) != 2 or info.nbytes % info.shape[0]:
            continue
        error = _error(values, base.floats(_head(info, len(values))))
        if error is not None and error > _MOST_ERROR.get(_bits(subject, name), _MOST_ERROR[8]):
            found[name] = error
    if found:
        worst = max(found.values())
        names = list(found)
        yield Finding(
            f"{_count(names, 'module')} differ{'s' if len(names) == 1 else ''} from the original by up to "
            f"{100 * worst:.0f}% of its size: {_named(names)}",
            names,
        )


def _bits(subject: Subject, name: str) -> int:
    """Bits per weight of a quantized module."""
    module = subject.modules[name]
    packed, packing = module.packed, module.packing()
    if packed is not None and packed.dtype not in RAW:
        return packed.nbytes * 8 // max(1, math.prod(packed.shape))
    return (packing.bits if packing else None) or subject.scheme.bits or 4


def _dequantized(subject: Subject) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The first rows of every quantized layer, as far as they can be had; other rules speak of the rest."""
    checkpoint = subject.checkpoint
    if checkpoint.format == "gguf":
        for module in _quantized(subject):
            if module.packed is not None and len(module.packed.shape) == 2:
                yield module.name, checkpoint.floats(_head(module.packed, _ROWS))
        return
    if subject.scheme.layout is None:
        return
    try:
        known = quantized_modules(checkpoint.tensors, checkpoint.quantization)
    except InputError:  # a module is incomplete
        return
    for name, layer in known.items():
        try:
            yield name, layer.unpack(_first_rows(checkpoint, layer, _ROWS)).dequantize()
        except InputError:
            continue


def _head(info: TensorInfo, rows: int) -> TensorInfo:
    """The first rows of a matrix."""
    count = min(rows, info.shape[0])
    return replace(info, shape=(count, *info.shape[1:]), nbytes=info.nbytes // info.shape[0] * count)


def _first_rows(checkpoint: Checkpoint, module: QuantizedModule, rows: int) -> dict[str, StoredArray]:
    """What a module stores of its first outputs, so that a large layer need not be held in memory."""
    infos = {part: checkpoint.tensors[name] for part, name in module.parts.items() if part not in ACTIVATION_PARTS}
    along_columns = "qweight" in infos  # GPTQ and AWQ keep outputs in columns
    codes = next(infos[part] for part in ("scales", "weight_packed", "weight") if part in infos)
    n = codes.shape[1 if along_columns else 0]
    rows = min(rows, n)
    stored = {}
    for part, info in infos.items():
        if along_columns and len(info.shape) == 2:
            count = max(1, rows * info.shape[1] // n)
            values = np.concatenate([chunk.reshape(-1, info.shape[1])[:, :count] for chunk in checkpoint.chunks(info)])
        elif part == "weight_shape":
            values = np.array([rows, checkpoint.read(info)[1]])
        elif info.shape and info.shape[0] > 1 and part not in ("g_idx", "weight_g_idx"):
            values = checkpoint.read(_head(info, max(1, -(-rows * info.shape[0] // n))))
        else:
            values = checkpoint.read(info)
        stored[part] = StoredArray(values, info.dtype)
    return stored


def _error(values: NDArray[np.float32], original: NDArray[np.float32]) -> float | None:
    """Root mean square of the difference, relative to that of the original; a factor per input is taken out.

    ``None``: their shapes differ, or something is not finite.
    """
    if values.shape != original.shape or not (np.isfinite(values).all() and np.isfinite(original).all()):
        return None
    power = (original**2).sum(0)
    factor = (values * original).sum(0) / np.where(power > 0, power, 1)
    expected = original * factor
    size = float(np.sqrt((expected**2).mean()))
    return float(np.sqrt(((values - expected) ** 2).mean())) / size if size else None
