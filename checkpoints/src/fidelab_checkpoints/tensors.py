"""Rules about tensors: values and scales, experts, files and index, what is quantized, packing, missing layers."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

import numpy as np

from fidelab.models.key_sizes import LEAST_RATIO, fragile_keys, key_sizes
from fidelab_checkpoints.files import RAW, Checkpoint, TensorInfo
from fidelab_checkpoints.layouts import unpack_words
from fidelab_checkpoints.modules import (
    CACHE_SCALES,
    GLOBAL_SCALES,
    INPUT_SCALES,
    SCALES,
    Module,
    Packing,
    generates,
    leaf_of,
    strip_prefixes,
    text_config,
    weight_in,
)
from fidelab_checkpoints.rules import (
    Finding,
    Severity,
    Subject,
    and_more,
    are,
    broken,
    counted,
    counted_findings,
    information,
    listed,
    suspicious,
    verb,
)
from fidelab_checkpoints.scan import MAX_EXPERTS, Statistics, fused, scan, slices
from fidelab_checkpoints.schemes import IGNORING

_FLOAT16_MAX = 65504.0
_LARGEST_WEIGHT = 1e4  # of what scales and codes may give together; weights of language models are below 100
_SMALLEST_WEIGHT = 1e-8
_OUTLIERS = 1000.0  # times the median of the same layer kind
_INPUT_OUTLIERS = 3000.0  # of scales of inputs, whose largest values differ by hundreds between layers of one kind
_CACHE_RANGE = (1e-5, 10.0)  # of FP8's scales: no key or value is beyond 4,480, and in no layer all are below 0.0045
_ALIKE_LAYERS = 3  # layers whose calibration does not give the same number by chance
_MASKS = ("masked_bias", ".attn.bias", ".attention.bias")  # of GPT-2 and its kind: masks, which may be infinite
_MAX_LISTED_MISSING = 100_000  # missing experts after which the search stops
_FLOATS = ("BF16", "F16", "F32", "F64")


# ---------------------------------------------------------------------------------------------------------- helpers


def _quantized(subject: Subject) -> list[Module]:
    return [module for module in subject.modules.values() if module.quantized]


def _tensor_statistics(subject: Subject, info: TensorInfo) -> list[tuple[str, Statistics]]:
    """Return a tensor's statistics: its own, or those of every expert in it."""
    if not fused(info):
        return [(info.name, subject.statistics[info.name])] if info.name in subject.statistics else []
    return [(part.name, subject.statistics[part.name]) for part in slices(info) if part.name in subject.statistics]


def _scales(
    subject: Subject, *, experts: bool | None = None, cache: bool = False
) -> Iterator[tuple[Module, str, str, Statistics]]:
    """Yield every tensor of scales: module, part, name (also of an expert in a fused tensor), statistics.

    A GGUF tensor in blocks counts by its scales.  ``experts``: only numbered or fused experts, or only all others.
    ``cache``: scales of the KV cache as well, which have rules of their own.
    """
    for module in subject.modules.values():
        for part, info in module.parts.items():
            blocks = info.dtype not in RAW and subject.checkpoint.format == "gguf"
            if (part not in SCALES and not blocks) or (part in CACHE_SCALES and not cache):
                continue
            if experts is None or experts == (module.expert is not None or fused(info)):
                for name, statistics in _tensor_statistics(subject, info):
                    if statistics.size:
                        yield module, part, name, statistics


def _layer_of(name: str) -> str | None:
    """Return the layer that a module is in, such as ``model.layers.3.``."""
    match = re.match(r"(.*?(?:^|\.)(?:layers|h|blocks|blk|block)\.\d+\.)", name)
    return match[1] if match else None


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges, such as ``1–3, 7``."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    texts = [f"{first}–{last}" if last > first else str(first) for first, last in parts]
    return ", ".join(texts) if len(texts) <= 6 else f"{', '.join(texts[:6])} …"


# -------------------------------------------------------------------------------------------------- values and scales


@broken(
    title="NaN or infinite weights",
    symptom="empty answers, a repeated first token or NaN log-probabilities from the first layer that has them on",
    cause="an overflow while calibrating or converting, such as bfloat16 norms written as float16; or a damaged file",
    check="every value of every tensor in floating point, and of GGUF the scales of every block",
    command="fidelab checkpoint audit CHECKPOINT --base ORIGINAL, then convert or quantize those layers again",
)
def _nonfinite(subject: Subject) -> Iterator[Finding]:
    scales = {name for _, _, name, _ in _scales(subject, cache=True)}
    found = [
        (name, statistics)
        for info in subject.checkpoint.tensors.values()
        for name, statistics in _tensor_statistics(subject, info)
        if not statistics.finite and name not in scales and not name.endswith(_MASKS)
    ]
    names = [name for name, _ in found]
    nan, inf = (sum(getattr(statistics, what) for _, statistics in found) for what in ("nan", "inf"))
    yield from listed(f"{nan:,} NaN and {inf:,} infinite values in {counted(names, 'tensor')}:", names)


@broken(
    title="NaN or infinite scales",
    symptom="NaN logits and empty answers; some kernels skip the layer instead, and text turns to noise",
    cause="a layer that calibration never reached, or a division by a zero range",
    check="every scale is a finite number",
    command="quantize those layers again with calibration data that reaches them, or round them to nearest",
)
def _scale_nonfinite(subject: Subject) -> Iterator[Finding]:
    found = [(name, s) for _, _, name, s in _scales(subject, experts=False) if not s.finite]
    count = sum(s.nan + s.inf for _, s in found)
    yield from listed(f"{count:,} scales {are(range(count))} NaN or infinite, in", [name for name, _ in found])


@broken(
    title="Zero scales",
    symptom="the layer gives zeros or NaN: empty answers, or text that repeats",
    cause="scales that were never written, were clamped at zero, or vanished in float16",
    check="no tensor of scales is all zero; of the others, how many zeros it has",
    command="quantize those layers again; fidelab checkpoint audit CHECKPOINT --base ORIGINAL tells whether they lived",
)
def _scale_zero(subject: Subject) -> Iterator[Finding]:
    packed = [item for item in _scales(subject, experts=False) if item[0].quantized]
    dead = [name for module, part, name, s in packed if s.dead and not _zero_in_base(subject, module)]
    yield from listed(f"all scales of {counted(dead, 'tensor')} are zero:", dead)
    # of NVFP4, whose scales are 8-bit floats, those of small groups vanish
    some = [
        (name, s)
        for module, part, name, s in packed
        if (s.size // 10 if module.parts[part].dtype.startswith("F8") else 0) < s.zeros < s.size
    ]
    zeros, size = (sum(getattr(s, what) for _, s in some) for what in ("zeros", "size"))
    yield from listed(f"{zeros:,} of {size:,} scales are zero in", [name for name, _ in some], "suspicious")


@suspicious(
    title="Absurd scales",
    symptom="activations overflow or vanish after the layer: noise, or answers as if the layer were missing",
    cause="a wrong unit of the scale (its reciprocal, a missing global scale), or a diverged optimization",
    check=f"no weight beyond {_LARGEST_WEIGHT:g} or all below {_SMALLEST_WEIGHT:g} by its scales, none {_OUTLIERS:g} "
    f"times more or less than the median of the same kind of layer (of inputs {_INPUT_OUTLIERS:g} times), none left at "
    "exactly 1, not one number for all groups or for all layers, and most scales of inputs fit their format",
    command="fidelab checkpoint audit CHECKPOINT --base ORIGINAL compares the weights with the original's",
)
def _scale_absurd(subject: Subject) -> Iterator[Finding]:
    alike: dict[str, list[tuple[str, float]]] = defaultdict(list)
    extreme: dict[str, float] = {}
    ones: list[str] = []
    constant: list[str] = []
    for module, part, name, s in _scales(subject):
        if not module.quantized or part == "blocks":
            continue
        info = module.parts[part]
        alone = module.expert is None and not fused(info)
        scalar = part in INPUT_SCALES or part in GLOBAL_SCALES or module.packed is info or _eight_bits(module)
        if alone and info.dtype in RAW and s.same and s.first == 1 and (s.size > 4 or (scalar and s.size == 1)):
            ones.append(name)
        elif alone and s.same and s.size > 16 and info.dtype in (*_FLOATS, "F8_E4M3") and not s.dead:
            constant.append(name)
        if not s.finite or not s.largest:
            continue
        alike[f"{leaf_of(module.name)}.{part}"].append((name, s.largest))
        if part not in INPUT_SCALES and part not in GLOBAL_SCALES:
            factor = _global_factor(subject, module)
            if factor and not _SMALLEST_WEIGHT < s.largest * factor * _code_range(module) < _LARGEST_WEIGHT:
                extreme[name] = s.largest * factor
    yield from listed(
        f"scales up to {max(extreme.values(), default=0.0):.3g} give weights of an absurd size in", [*extreme]
    )
    above: dict[float, list[str]] = defaultdict(list)
    below: dict[float, list[str]] = defaultdict(list)
    for kind, items in alike.items():
        middle = median(value for _, value in items)
        limit = _INPUT_OUTLIERS if kind.endswith(INPUT_SCALES) else _OUTLIERS
        for name, value in items if len(items) >= 4 else ():
            if name not in extreme and not middle / limit <= value <= middle * limit:
                (above if value > middle else below)[limit].append(name)
    for limit, odd in above.items():
        yield from listed(f"scales over {limit:g} times those of the same layers elsewhere in", odd)
    for limit, odd in below.items():
        yield from listed(f"scales below 1/{limit:g} of those of the same layers elsewhere in", odd)
    yield from listed("all scales are 1, as before any calibration, in", ones)
    yield from listed("all groups have one and the same scale in", [name for name in constant if name not in extreme])
    yield from _alike_everywhere(subject)
    yield from _inputs_out_of_range(subject)


def _eight_bits(module: Module) -> bool:
    return module.packed is not None and module.packed.dtype.startswith("F8")


def _global_factor(subject: Subject, module: Module) -> float:
    """Return what a module's scales are multiplied by; 0 where other rules report that number."""
    for part in GLOBAL_SCALES:
        if part in module.parts:
            value = subject.statistics[module.parts[part].name].largest
            return 1 / value if value and part == "weight_global_scale" else value
    return 1.0


def _alike_everywhere(subject: Subject) -> Iterator[Finding]:
    """Yield scales that are one number for a whole matrix, and the same number in all layers of several kinds."""
    values: dict[str, dict[str, float]] = defaultdict(dict)
    places: dict[str, set[tuple[str | None, str]]] = defaultdict(set)
    for module, part, name, s in _scales(subject, experts=False):
        if s.size == 1 and s.finite and module.quantized:
            values[part][name] = s.first
            places[part].add((_layer_of(module.name), leaf_of(module.name)))
    for part, found in values.items():
        layers, leaves = ({place[n] for place in places[part]} for n in (0, 1))
        if len({*found.values()}) == 1 and len(layers) >= _ALIKE_LAYERS and len(leaves) >= 3:
            number = next(iter(found.values()))
            if number not in (0, 1):
                yield Finding(f"{part} is {number:.4g} in all {counted([*found], 'module')}", [*found])


def _inputs_out_of_range(subject: Subject) -> Iterator[Finding]:
    """Yield scales of inputs if most say that inputs are beyond the range of their format without a scale."""
    for part in INPUT_SCALES:
        found = {name: s.first for _, name_of, name, s in _scales(subject) if name_of == part and s.size == 1}
        middle = median(found.values()) if len(found) >= 4 else 0.0
        if middle > 1 if part == "input_scale" else 0 < middle < 1:
            text = f"the median {part} is {middle:.3g}, which no activations of language models need: reciprocals?"
            yield Finding(f"{text} {counted([*found], 'scale')} in {and_more([*found])}", [*found])


def _code_range(module: Module) -> float:
    """Return the approximate largest magnitude of a code."""
    packed = module.packed
    if packed is not None and packed.dtype.startswith("F8"):
        return 448.0
    packing = module.packing()
    return float(1 << ((packing.bits if packing and packing.bits else 4) - 1))


@broken(
    title="Negative scales",
    symptom="NaN or wrong weights where an engine takes logarithms of scales, clamps them at zero or drops their sign; "
    "none where it multiplies integers as they are",
    cause="a scale of -1 that was never set; symmetric AutoRound, which keeps the sign of the largest value in it",
    check="no scale of small floats, of inputs or of a whole matrix is below zero; information for scales of integers",
    command="fidelab checkpoint convert CHECKPOINT DST --to awq flips integers' code, zero point and scale together; "
    "quantize others again",
)
def _scale_negative(subject: Subject) -> Iterator[Finding]:
    signed: list[tuple[str, Statistics]] = []
    wrong: list[tuple[str, Statistics]] = []
    for module, part, name, s in _scales(subject):
        if s.negative:
            integers = part in ("scales", "weight_scale") and module.packed is not None
            integers = integers and module.packed.dtype in ("I32", "I8")  # type: ignore[union-attr]
            (signed if integers else wrong).append((name, s))
    severities: tuple[tuple[list[tuple[str, Statistics]], Severity], ...] = ((wrong, "broken"), (signed, "information"))
    for found, severity in severities:
        names = [name for name, _ in found]
        negative, size = (sum(getattr(s, what) for _, s in found) for what in ("negative", "size"))
        share = 100 * negative / size if size else 0
        yield from listed(f"{negative:,} of {size:,} scales ({share:.1f}%) are negative in", names, severity)


@suspicious(
    title="Scales too small for float16",
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
        if module.packed.dtype.startswith("F8") or any(part in module.parts for part in GLOBAL_SCALES):
            continue
        if s.vanishing:
            vanishing.append((name, s.vanishing))
        elif info.dtype == "F16" and s.subnormal > s.size // 100:
            coarse.append((name, s.subnormal))
    for found, says in ((vanishing, "become zero in float16"), (coarse, "are subnormal numbers of float16")):
        yield from listed(f"{sum(n for _, n in found):,} scales {says}, in", [name for name, _ in found])


@suspicious(
    title="Values beyond float16",
    symptom="infinite activations and NaN logits as soon as the model runs in float16",
    cause="a bfloat16 model, whose range is larger, served or converted in float16",
    check="no bfloat16 or float32 value beyond 65504; broken where the configuration says float16",
    command="serve with --dtype bfloat16",
)
def _overflow_float16(subject: Subject) -> Iterator[Finding]:
    scales = {name for _, _, name, _ in _scales(subject, cache=True)}
    found = [
        (name, statistics.largest)
        for info in subject.checkpoint.tensors.values()
        if info.dtype in ("BF16", "F32", "F64") and subject.checkpoint.format != "gguf"  # llama.cpp keeps these types
        for name, statistics in _tensor_statistics(subject, info)
        if statistics.largest > _FLOAT16_MAX and name not in scales
    ]
    severity: Severity = "broken" if _dtype(subject.checkpoint) == "float16" else "suspicious"
    largest = max((value for _, value in found), default=0.0)
    yield from listed(f"values up to {largest:.4g} do not fit float16, in", [name for name, _ in found], severity)


def _dtype(checkpoint: Checkpoint) -> str:
    places = (checkpoint.config, text_config(checkpoint.config))
    values = (place.get(key) for place in places for key in ("dtype", "torch_dtype"))
    return str(next(filter(None, values), "")).removeprefix("torch.")


@suspicious(
    title="Zero weights",
    symptom="the layer adds nothing: empty or fluent but empty-headed answers, or noise if it is an early layer",
    cause="tensors that were allocated and never written, or codes clamped away by negative scales",
    check="no matrix is all zero, no norm where other norms are not, no packed matrix holds one code everywhere, or "
    "blank words for a tenth of it; with --base, broken where the original is not zero",
    command="fidelab checkpoint audit CHECKPOINT --base ORIGINAL",
)
def _zero_weights(subject: Subject) -> Iterator[Finding]:
    dead: list[str] = []
    lived: list[str] = []
    partly: list[str] = []
    norms = _zero_norms(subject)
    for module in subject.modules.values():
        info = module.packed or module.parts.get("weight") or module.parts.get("")
        if module.name in norms:
            live = subject.base is not None and not _zero_in_base(subject, module)
            (lived if live else dead if subject.base is None else []).append(f"{module.name}.weight")
        if info is None or len(info.shape) < 2 or not (module.in_layer or module.quantized or module.kind == "head"):
            continue
        if "" in module.parts and not fused(info):  # a parameter of a kind that may well begin, and stay, at zero
            continue
        blocks = info.dtype not in RAW
        for name, s in _tensor_statistics(subject, info):
            if s.size and s.finite and (s.dead if not module.quantized or blocks else s.same and s.size > 1):
                live = subject.base is not None and not _zero_in_base(subject, module)
                (lived if live else dead if subject.base is None else []).append(name)
            elif module.quantized and not blocks and s.blank > s.size // 10 and info.dtype in ("I32", "U32"):
                partly.append(name)
    yield from counted_findings(lived, "tensor", "zero where the original has weights", "broken")
    yield from counted_findings(dead, "tensor", "zero, or one code everywhere")
    yield from listed("over a tenth of the packed words are blank in", partly)


def _zero_norms(subject: Subject) -> set[str]:
    """Return the norms whose weights are all zero.

    Some architectures multiply by one plus the weight and begin at zero.  If all norms of a kind, or most norms of the
    checkpoint, are zero, none of them is a fault.
    """
    kinds: dict[str, dict[str, bool]] = defaultdict(dict)
    for module in subject.modules.values():
        weight = module.parts.get("weight")
        if module.kind == "norm" and weight is not None and weight.name in subject.statistics:
            kinds[leaf_of(module.name)][module.name] = subject.statistics[weight.name].dead
    every = [zero for norms in kinds.values() for zero in norms.values()]
    if sum(every) * 2 > len(every):
        return set()
    return {
        name
        for norms in kinds.values()
        for name, zero in norms.items()
        if zero and (len(norms) == 1 or not all(norms.values()))
    }


def _zero_in_base(subject: Subject, module: Module) -> bool:
    """Return whether the original's weight is all zero; false without an original or under other names."""
    if subject.base is None:
        return False
    info = weight_in(subject.base, module.name)
    return info is not None and scan(subject.base, info).dead


# ------------------------------------------------------------------------------------------------------------- experts


@broken(
    title="Uncalibrated experts",
    symptom="noise or NaN as soon as a token is routed to such an expert: short tests pass, long or foreign texts fail",
    cause="no calibration token reached these experts, so that their scales stayed infinite, zero or at their default",
    check="scales of every expert: finite, not zero, not one default value; the same parts in all experts of a layer",
    command="fidelab checkpoint quantize MODEL --recipe RECIPE with more data, or every token routed to every expert",
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
            left = n in default and (normal or s.first == 1)
            kinds = {"infinite or NaN": not s.finite, "zero": s.dead, "default": left}
            if kind := next((kind for kind, found_so in kinds.items() if found_so), None):
                reason = f"{kind} scales"
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
    """Return whether scales look uncalibrated: one number for all groups, or exactly 1."""
    return s.size > 0 and s.same and (s.first == 1 or (s.size > 4 and not part.startswith("input")))


@broken(
    title="Experts missing",
    symptom="the loader leaves the experts as it initialized them: noise whenever a token is routed to them",
    cause="names that were not remapped, or a filter that dropped a part of the experts",
    check="the experts of every layer are numbered without gaps and as many as in the other layers",
    command="compare with the original: fidelab checkpoint audit CHECKPOINT --base ORIGINAL; convert again",
)
def _experts_missing(subject: Subject) -> Iterator[Finding]:
    numbers: dict[str, set[int]] = defaultdict(set)
    for module in subject.modules.values():
        if module.expert is not None:
            numbers[module.expert[0]].add(module.expert[1])
    most: dict[str, int] = defaultdict(int)
    for layer, present in numbers.items():
        most[leaf_of(layer)] = max(most[leaf_of(layer)], *present)
    gaps: list[str] = []
    fewer: list[str] = []
    for layer, present in numbers.items():
        if len(gaps) + len(fewer) > _MAX_LISTED_MISSING:
            break
        last = max(present)
        for n in range(min(most[leaf_of(layer)] + 1, MAX_EXPERTS)):
            if n not in present:
                (gaps if n < last else fewer).append(layer.replace("*", str(n), 1))
    yield from counted_findings(gaps, "expert", "not there, and such with higher numbers are")
    yield from counted_findings(
        fewer, "expert", "not there, which other layers have", "broken" if gaps else "suspicious"
    )


@broken(
    title="Experts without their router",
    symptom="the loader leaves the router as it initialized it: tokens go to random experts, and text is noise",
    cause="a filter for expert names that dropped the router of a layer, or a shard that was rewritten without it",
    check="every layer with experts has a router, where another layer has one",
    command="take the original's router: fidelab checkpoint audit CHECKPOINT --base ORIGINAL names it; convert again",
)
def _router_missing(subject: Subject) -> Iterator[Finding]:
    experts: dict[str, None] = {}
    routers: dict[str, str] = {}
    for module in subject.modules.values():
        layer = _layer_of(module.name)
        if layer is None:
            continue
        if module.kind == "router":
            routers.setdefault(layer, module.name[len(layer) :].removesuffix("."))
        elif re.search(r"\.experts(\.|$)|_exps$", module.name):
            experts[layer] = None
    stacks: dict[str, str] = {leaf_of(layer): leaf for layer, leaf in routers.items()}
    missing = [
        f"{layer}{stacks[leaf_of(layer)]}" for layer in experts if leaf_of(layer) in stacks and layer not in routers
    ]
    yield from counted_findings(missing, "router", "not there, and other layers of experts have theirs")


# --------------------------------------------------------------------------------------------------- files and index


@broken(
    title="Tensors that the index names and no file holds",
    symptom="an error while loading, or weights left as they were initialized and noise from there on",
    cause="a shard that was not downloaded, or an index that belongs to another version of the files",
    check="every name of model.safetensors.index.json is in a file",
    command="fetch the checkpoint again, or rewrite it with fidelab checkpoint convert",
)
def _index_missing(subject: Subject) -> Iterator[Finding]:
    checkpoint = subject.checkpoint
    missing = [name for name in checkpoint.index or () if name not in checkpoint.tensors]
    files = checkpoint.missing_files
    where = f" (of {counted(files, 'file')} missing: {and_more(files)})" if files else ""
    yield from listed(f"{counted(missing, 'tensor')} of the index {are(missing)} in no file{where}:", missing)


@suspicious(
    title="Tensors that the index does not name",
    symptom="engines that go by the index do not load them: weights as initialized, or an older version of the layer",
    cause="shards rewritten without their index",
    check="every tensor of every shard is in model.safetensors.index.json",
    command="rewrite the checkpoint: fidelab checkpoint convert",
)
def _index_unlisted(subject: Subject) -> Iterator[Finding]:
    index = subject.checkpoint.index
    if index is not None:
        unlisted = [name for name in subject.checkpoint.tensors if name not in index]
        yield from counted_findings(unlisted, "tensor", "not in the index")


@suspicious(
    title="Tensors in another file than the index says",
    symptom="engines that fetch tensors by the index fail with a missing key; others load",
    cause="shards rewritten without their index",
    check="every tensor is in the file that the index names for it",
    command="rewrite the checkpoint: fidelab checkpoint convert",
)
def _index_elsewhere(subject: Subject) -> Iterator[Finding]:
    checkpoint = subject.checkpoint
    homes: dict[str, set[str]] = defaultdict(set)
    for info in (*checkpoint.tensors.values(), *checkpoint.copies):
        homes[info.name].add(info.file.name)
    wrong = [name for name, file in (checkpoint.index or {}).items() if name in homes and file not in homes[name]]
    yield from counted_findings(wrong, "tensor", "in another file than the index says")


@information(
    title="Scales in another file than their weights",
    symptom="none in engines that load all files; tools that convert file by file skip the layer, and NaN follows",
    cause="shards that were cut at a size, through the middle of a module",
    check="the parts of every quantized module are in one file",
    command="convert with a tool that looks for parts in all files, such as fidelab checkpoint convert",
)
def _scale_apart(subject: Subject) -> Iterator[Finding]:
    apart = [
        info.name
        for module in _quantized(subject)
        if module.packed is not None
        for info in module.parts.values()
        if info.file != module.packed.file
    ]
    yield from counted_findings(apart, "tensor", "apart from the weights")


@suspicious(
    title="A tensor twice",
    symptom="which of the two is loaded depends on the engine and the order of files; other content, other answers",
    cause="old shards next to new ones, or one layer saved under two prefixes",
    check="no name is in two files, and no layer under two prefixes; broken where the contents differ",
    command="remove the older files, and rewrite the checkpoint: fidelab checkpoint convert",
)
def _duplicate_tensor(subject: Subject) -> Iterator[Finding]:
    checkpoint = subject.checkpoint
    differ: list[str] = []
    same: list[str] = []
    for copy in checkpoint.copies:
        (same if checkpoint.equals(copy, checkpoint, checkpoint.tensors[copy.name]) else differ).append(copy.name)
    yield from counted_findings(differ, "tensor", "in two files with other content", "broken")
    yield from counted_findings(same, "tensor", "in two files")
    bare: dict[str, list[str]] = defaultdict(list)
    for name in checkpoint.tensors:
        bare[strip_prefixes(name)].append(name)
    twice = [name for names in bare.values() if len(names) > 1 for name in names]
    yield from counted_findings(twice, "tensor", "the same layers under two prefixes")


@suspicious(
    title="A single file next to the shards",
    symptom="Transformers loads model.safetensors and never looks at the shards, engines that go by the index load the "
    "shards: other weights, other answers",
    cause="an older version of the checkpoint that was left in the folder when shards were written into it",
    check="where an index lists shards, there is no model.safetensors that it does not name; broken where its tensors "
    "are other ones",
    command="remove model.safetensors, or the shards with their index, whichever is the older",
)
def _stale_file(subject: Subject) -> Iterator[Finding]:
    checkpoint = subject.checkpoint
    if not checkpoint.beside:
        return
    file = checkpoint.beside[0].file.name
    names = {info.name for info in checkpoint.beside}
    differ = [info.name for info in checkpoint.beside if info.name not in checkpoint.tensors]
    differ += [name for name in checkpoint.tensors if name not in names]
    differ = differ or [
        info.name
        for info in checkpoint.beside
        if not checkpoint.equals(info, checkpoint, checkpoint.tensors[info.name])
    ]
    yield from listed(f"{file} is not in the index and has other content than the shards:", differ, "broken")
    if not differ:
        yield Finding(f"{file} is not in the index and has the content of the shards")


# ------------------------------------------------------------------------------------- what is quantized, and what not


_WITH_QZEROS = ("awq", "gptq", "gptq_v2")
_NEEDED = {"qweight": "scales", "weight_packed": "weight_scale", "blocks": "scales"}


@broken(
    title="Quantized layers that lack a part",
    symptom="a missing key while loading, or a layer that is skipped: NaN or noise",
    cause="a converter that skipped what it did not find (a scale in another file), or names that were not remapped",
    check="packed weights have scales, and zero points where AWQ, GPTQ or symmetric: false of compressed-tensors want "
    "them, and scales have weights",
    command="convert again with fidelab checkpoint convert, which refuses to write an incomplete module",
)
def _incomplete_module(subject: Subject) -> Iterator[Finding]:
    lacking: dict[str, list[str]] = defaultdict(list)
    for module in subject.modules.values():
        parts = set(module.parts)
        needed = [part for marker, part in _NEEDED.items() if marker in parts]
        if "qweight" in parts and subject.scheme.layout in _WITH_QZEROS:
            needed.append("qzeros")
        for part in needed:
            if part not in parts:
                lacking[part].append(module.name)
        weight = module.parts.get("weight")
        if _asymmetric(subject, module) and "weight_zero_point" not in parts:
            lacking["weight_zero_point"].append(module.name)
        if weight is not None and weight.dtype in ("I8", "U8", "F8_E4M3", "F8_E5M2") and module.scales is None:
            lacking["scales of its 8-bit weight"].append(module.name)
        if _lacks_global(subject, module):
            lacking["its global scale"].append(module.name)
        scaled = [part for part in parts if part in SCALES and part not in CACHE_SCALES]
        if scaled and not module.quantized and not _cache_scales(module):
            lacking["the weight that its scales belong to"].append(module.name)
    for part, names in lacking.items():
        yield from listed(f"{counted(names, 'module')} {verb(names, 'lack')} {part}:", names)


def _asymmetric(subject: Subject, module: Module) -> bool:
    """Return whether compressed-tensors stores zero points of these integers."""
    scheme, packed = subject.scheme, module.packed
    if scheme.layout != "compressed-tensors" or scheme.of(module.name).symmetric is not False or packed is None:
        return False
    return packed.dtype in ("I32", "I8") and not scheme.ignores(module.name)


def _lacks_global(subject: Subject, module: Module) -> bool:
    """Return whether NVFP4, whose groups' scales are 8-bit floats, has no scale for the whole matrix."""
    scales, packing = module.scales, module.packing()
    if scales is None or packing is None or packing.layout != "bytes" or scales.dtype != "F8_E4M3":
        return False
    return subject.scheme.method is not None and not any(part in module.parts for part in GLOBAL_SCALES)


def _cache_scales(module: Module) -> bool:
    """Return whether scales next to a weight in 16 bits are those of activations."""
    return "weight" in module.parts and all(part.startswith("input") for part in module.parts if part in SCALES)


@broken(
    title="Weights stored twice, or quantized twice",
    symptom="either copy may be loaded: noise where the two differ, and twice the memory where both are",
    cause="packed weights saved next to the original ones, or a quantized checkpoint quantized again",
    check="a module has one form of its weight, and the configuration one method",
    command="quantize the original again; fidelab checkpoint convert writes each module in one form",
)
def _doubly_quantized(subject: Subject) -> Iterator[Finding]:
    forms = ("weight", "qweight", "weight_packed", "blocks")
    twice = [module.name for module in subject.modules.values() if sum(form in module.parts for form in forms) > 1]
    yield from listed(f"{counted(twice, 'module')} {verb(twice, 'hold')} two forms of the weight:", twice)
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
    file, own = subject.checkpoint.modelopt or {}, subject.scheme.raw
    named = [place.get("quant_algo") for place in (own, file)]
    if file and (subject.scheme.method != "modelopt" or (all(named) and named[0] != named[1])):
        method = own.get("quant_algo") or subject.scheme.method
        yield Finding(f"config.json says {method} and hf_quant_config.json {file.get('quant_algo')}")


@broken(
    title="Configuration and tensors disagree whether anything is quantized",
    symptom="a missing key while loading, or packed integers taken for weights: noise",
    cause="a config.json that was copied from the original, or weights that were",
    check="a quantization_config goes with quantized tensors, and quantized tensors with a quantization_config",
    command="fetch config.json and weights of the same revision; or quantize again",
)
def _quantization_mismatch(subject: Subject) -> Iterator[Finding]:
    if subject.checkpoint.format == "gguf":
        return
    quantized = [module.name for module in _quantized(subject)]
    if quantized and subject.scheme.method is None:
        yield from counted_findings(quantized, "module", "quantized and config.json says nothing of it")
    scales = subject.scheme.kv_cache and _cache_scale_names(subject)
    for_cache = subject.scheme.method == "modelopt" and not subject.scheme.raw.get("quant_algo")  # and for nothing else
    expected = subject.scheme.method is not None and subject.checkpoint.tensors and not for_cache
    if not quantized and not scales and expected:
        yield Finding(f"config.json says {subject.scheme.method} and no module is quantized")


@broken(
    title="Layers that the configuration lists as kept, and are quantized",
    symptom="the engine builds a 16-bit layer and finds packed weights: a missing key, or NaN in that layer",
    cause="an ignore list that was edited, or belongs to another run",
    check="no quantized module matches ignore, modules_to_not_convert or what else the method calls it",
    command="fix the list in config.json, or quantize again",
)
def _ignored_quantized(subject: Subject) -> Iterator[Finding]:
    names = [module.name for module in _quantized(subject) if subject.scheme.ignores(module.name)]
    where = "not listed in quantized_layers" if subject.scheme.listed else f"listed in {subject.scheme.ignored_by}"
    yield from counted_findings(names, "quantized module", where)


_EXEMPT_MODULES = re.compile(r"(^|\.)(eh_proj|weights_proj|compressor\.\w+)$")  # of DeepSeek, built plain by engines
_MTP = re.compile(r"(^|\.)mtp\w*\.")


@broken(
    title="Layers kept in 16 bits that the configuration does not list",
    symptom="the engine builds a quantized layer and finds no packed weights: a missing key, or a layer that stays as "
    "initialized (NaN in a dense layer, text that is noise)",
    cause="layers kept at quantization time and not written to the list; experts in one tensor, which no tool took for "
    "linear layers",
    check="every linear layer that the method would quantize and that is stored in 16 bits is on the list, and so are "
    "experts in one tensor; suspicious in modules for multi-token prediction",
    command="add the names to the list in config.json",
)
def _plain_not_ignored(subject: Subject) -> Iterator[Finding]:
    scheme = subject.scheme
    if scheme.method is None or not _quantized(subject):
        return
    kinds = {leaf_of(module.name) for module in _quantized(subject)}
    plain: list[str] = []
    rest: list[str] = []
    for module in subject.modules.values():
        weight = module.parts.get("weight") or module.parts.get("")
        if weight is None or module.quantized or weight.dtype not in _FLOATS:
            continue
        if fused(weight):
            if not _experts_ignored(subject, module):
                plain.append(module.name)
            continue
        if "weight" not in module.parts or len(weight.shape) != 2 or scheme.method == "mxfp4":
            continue
        exempt = module.kind in ("norm", "embedding") or _EXEMPT_MODULES.search(module.name)
        if exempt or not scheme.targets_linear(module.name):
            continue
        elsewhere = leaf_of(module.name) in kinds
        if scheme.method in ("compressed-tensors", "modelopt", "quark"):
            special = module.kind in ("head", "router", "shared gate") or _MTP.search(module.name)
            if special or module.in_layer:
                (rest if special else plain).append(module.name)
        elif elsewhere:
            plain.append(module.name)
        elif (module.in_layer or _MTP.search(module.name)) and module.kind in ("linear", "recurrent", "vision"):
            rest.append(module.name)
    where = f"not in {scheme.ignored_by}" if not scheme.listed else "in quantized_layers"
    yield from counted_findings(plain, "module", f"in 16 bits and {where}")
    yield from counted_findings(rest, "module", f"in 16 bits, may be built quantized, and {where}", "suspicious")


def _experts_ignored(subject: Subject, module: Module) -> bool:
    """Return whether the experts in one tensor are kept, under their own name or those of single experts."""
    layer = module.name.rpartition(".experts")[0]
    roles = ("gate_proj", "up_proj", "down_proj")
    names = (module.name, f"{layer}.experts", *(f"{layer}.experts.0.{role}" for role in roles))
    return any(not subject.scheme.targets_linear(name) for name in names)


@broken(
    title="A list of kept layers under a key that the method does not read",
    symptom="the engine builds the listed layers quantized: a missing key, or NaN in a dense layer",
    cause="a conversion between methods that left ignore where modules_to_not_convert is read, or the reverse",
    check="the list is under the key of the configuration's method",
    command="rename the key in config.json, or convert with fidelab checkpoint convert",
)
def _ignore_key(subject: Subject) -> Iterator[Finding]:
    scheme = subject.scheme
    if scheme.method is None or scheme.ignored or scheme.listed:
        return
    every = {key for keys in IGNORING.values() for key in keys}
    wrong = sorted(key for key in every - set(IGNORING[scheme.method]) if scheme.raw.get(key))
    if wrong:
        expected = " or ".join(IGNORING[scheme.method])
        listed = [str(name) for name in scheme.raw[wrong[0]]] if isinstance(scheme.raw[wrong[0]], list) else []
        yield Finding(f"{wrong[0]} is not read for {scheme.method}, {expected} is", listed)


@broken(
    title="A quantized router or shared-expert gate",
    symptom="the loader builds it in 16 bits and cannot hold packed weights: a missing key, or random routing",
    cause='a pattern such as "experts" that matches more, or less, than it was written for',
    check="routers and shared-expert gates are stored in 16 or 32 bits",
    command="keep them: a rule of the recipe for .*gate$ with its expected count (fidelab checkpoint quantize)",
)
def _router_quantized(subject: Subject) -> Iterator[Finding]:
    names = [module.name for module in _quantized(subject) if module.kind in ("router", "shared gate")]
    yield from counted_findings(names, "router or shared-expert gate", "quantized")


@broken(
    title="A quantized norm",
    symptom="a missing key while loading, or activations of the wrong size in every layer after it",
    cause="a pattern that matches more than linear layers",
    check="norms are stored in 16 or 32 bits",
    command="quantize again with linear layers as the only target",
)
def _norm_quantized(subject: Subject) -> Iterator[Finding]:
    names = [module.name for module in _quantized(subject) if module.kind == "norm"]
    yield from counted_findings(names, "norm", "quantized")


@suspicious(
    title="Recurrent layers in few bits",
    symptom="errors add up in the state: good short answers, noise after some hundred tokens",
    cause="DeltaNet, Mamba or convolution layers taken for ordinary linear layers",
    check="projections of recurrent layers have at least 8 bits",
    command="fidelab diagnose sensitivity ORIGINAL --weights int4 --by kind says what they cost; keep them in 16 bits",
)
def _recurrent_quantized(subject: Subject) -> Iterator[Finding]:
    names = []
    for module in _quantized(subject):
        packing = module.packing()
        bits = (packing.bits if packing else None) or subject.scheme.of(module.name).bits
        if module.kind == "recurrent" and bits is not None and bits < 8:
            names.append(module.name)
    yield from counted_findings(names, "recurrent layer", "in fewer than 8 bits")


# ------------------------------------------------------------------------------------------------------------- packing


@broken(
    title="Bits, groups or shapes other than the configuration says",
    symptom="an error about shapes while loading, or codes unpacked at the wrong places: noise",
    cause="a configuration that belongs to another run, or per-layer settings that it does not mention",
    check="bits, number of groups, packing order, stored shape, and the shapes of zero points and scales follow from "
    "the configuration",
    command="fix bits and group_size in config.json, or quantize again",
)
def _packing_mismatch(subject: Subject) -> Iterator[Finding]:
    wrong: dict[str, list[str]] = defaultdict(list)
    for module in _quantized(subject):
        if text := _strategy_shape(subject, module) or _packing_fault(subject, module):
            wrong[text].append(module.name)
    for text, names in wrong.items():
        yield from listed(f"{counted(names, 'module')} with {text}:", names)


def _packing_fault(subject: Subject, module: Module) -> str | None:
    """Return what differs between a module's tensors and its configuration."""
    scheme, weights, packing = subject.scheme, subject.scheme.of(module.name), module.packing()
    bits = packing.bits if packing else 8 if _eight_bits(module) else None
    blocks, scales = module.parts.get("blocks"), module.scales
    if blocks is not None and scales is not None and scales.shape != blocks.shape[:-1]:
        return f"scales of shape {scales.shape} where blocks have {blocks.shape[:-1]}"
    if weights.bits is not None and bits is not None and bits != weights.bits:
        return f"{bits} bits where the configuration says {weights.bits}"
    if packing is None:
        together = "qweight" not in module.parts or "scales" not in module.parts
        return None if together else "shapes that do not belong together"
    named = (scheme.layout or "").removesuffix("_v2")
    if named in ("gptq", "awq") and packing.layout in ("gptq", "awq") and packing.layout != named:
        return f"codes packed as {packing.layout} where the configuration says {named}"
    if packing.layout in ("bytes", "words") and scales is not None and scales.shape[0] != packing.n:
        return f"scales of {scales.shape[0]} outputs where codes have {packing.n}"
    if text := _zeros_shape(module, packing, packing.bits or weights.bits):
        return text
    k, group = packing.inputs(weights.bits), _group(subject, module)
    if group is not None and k is not None and packing.groups != -(-k // group):
        return f"{packing.groups} groups of {k} inputs where groups of {group} would be {-(-k // group)}"
    shape = module.parts.get("weight_shape")
    if shape is not None and k is not None and subject.statistics[shape.name].size == 2:
        stored = tuple(int(n) for n in subject.checkpoint.read(shape).tolist())
        per_word = 32 // weights.bits if weights.bits and packing.layout == "words" else 1
        if stored[0] != packing.n or not k - per_word < stored[1] <= k:
            return f"a weight_shape of {stored} where codes are ({packing.n}, {k})"
    return None


def _group(subject: Subject, module: Module) -> int | None:
    """Return the configured inputs per group; blocks of FP8 say nothing of experts in FP4."""
    weights = subject.scheme.of(module.name)
    return None if weights.block is not None and not _eight_bits(module) else weights.group


def _zeros_shape(module: Module, packing: Packing, bits: int | None) -> str | None:
    """Return the problem with the shape of the zero points; ``None`` if it is right or there are none."""
    zeros = module.parts.get("qzeros") or module.parts.get("weight_zero_point")
    if zeros is None or not bits:
        return None
    words = -(-packing.n * bits // 32)
    if zeros.name.endswith("qzeros"):
        expected: tuple[int, ...] = (packing.groups, words)
    else:
        expected = (words if zeros.dtype == "I32" else packing.n, packing.groups)
    if zeros.shape == expected or (packing.groups == 1 and math.prod(zeros.shape) in (1, math.prod(expected))):
        return None
    return f"zero points of shape {zeros.shape} where {expected} belong to the scales"


def _strategy_shape(subject: Subject, module: Module) -> str | None:
    """Return the problem with the shape of the scales, by the configured strategy; ``None`` if it is right."""
    weights, packed, scales = subject.scheme.of(module.name), module.packed, module.scales
    if packed is None or scales is None or len(packed.shape) != 2 or subject.scheme.ignores(module.name):
        return None
    n, k = packed.shape
    count = math.prod(scales.shape)
    if weights.strategy == "tensor" and count != 1:
        return f"scales of shape {scales.shape} where strategy tensor has one"
    if weights.strategy == "channel" and (count != n or scales.shape[0] != n):
        return f"scales of shape {scales.shape} where strategy channel has one for each of {n} outputs"
    if weights.block is not None and packed.dtype.startswith("F8"):
        expected = (-(-n // weights.block[0]), -(-k // weights.block[1]))
        if scales.shape != expected:
            rows, columns = weights.block
            return f"scales of shape {scales.shape} where blocks of {rows} × {columns} have {expected}"
    return None


@broken(
    title="Groups that do not divide the inputs",
    symptom="engines refuse the layer, or their kernels read scales of the next row at the end of each: noise",
    cause="a group size taken over from another model (704 = 5.5 × 128, 576 = 4.5 × 128)",
    check="the inputs of every quantized layer are a multiple of the group size",
    command="quantize again with a group size that divides them, such as 64 or 32",
)
def _group_not_dividing(subject: Subject) -> Iterator[Finding]:
    found: dict[tuple[int, int], list[str]] = defaultdict(list)
    for module in _quantized(subject):
        packing = module.packing()
        k = packing.inputs(subject.scheme.of(module.name).bits) if packing else None
        if packing is None or k is None or packing.groups < 2:
            continue
        group = _group(subject, module) or -(-k // packing.groups)
        if k % group:
            found[k, group].append(module.name)
    for (k, group), names in found.items():
        yield from listed(f"{k} inputs are {k / group:g} groups of {group} in {counted(names, 'module')}:", names)


@broken(
    title="Layers that tensor parallelism cannot split",
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
        k = packing.inputs(subject.scheme.of(module.name).bits) if packing else None
        if packing is None or k is None:
            continue
        if module.parallel == "inputs":
            group = (_group(subject, module) or -(-k // packing.groups)) if packing.groups > 1 else 1
            if k % tp:
                found[f"{k} inputs over {tp} devices"].append(module.name)
            elif (k // tp) % group:
                found[f"{k} / {tp} = {k // tp} inputs are {k / tp / group:g} groups of {group}"].append(module.name)
        elif module.parallel == "outputs":
            parts = _shard_count(subject.checkpoint, module, tp)
            if packing.n % parts or (packing.n // parts) % 8:
                found[f"{packing.n} / {parts} outputs are not a multiple of 8"].append(module.name)
    for text, names in found.items():
        yield from listed(f"{text} in {counted(names, 'module')}:", names)


def _shard_count(checkpoint: Checkpoint, module: Module, tp: int) -> int:
    """Return the number of parts that a layer's outputs are split into.

    Heads of keys and values are repeated if there are too few.
    """
    heads = text_config(checkpoint.config).get("num_key_value_heads")
    few = module.name.endswith(("k_proj", "v_proj")) and type(heads) is int and 0 < heads < tp
    return int(heads) if few else tp  # type: ignore[arg-type]


@broken(
    title="A group index that is not one",
    symptom="wrong scales for most inputs: noise, or a crash where a kernel reads beyond its scales",
    cause="an index that was dropped, zeroed or written for another order of inputs (desc_act, actorder)",
    check="g_idx is within the groups, is not one group for all, is in order where the configuration says so, and is "
    "there where desc_act or actorder says that it is not",
    command="convert from the original files with fidelab checkpoint convert, which reorders or refuses",
)
def _group_index(subject: Subject) -> Iterator[Finding]:
    outside, single, ignored, absent = [], [], [], []
    for module in _quantized(subject):
        index = module.parts.get("g_idx") or module.parts.get("weight_g_idx")
        packing = module.packing()
        if index is None and packing is not None and packing.groups > 1 and subject.scheme.reordered:
            absent.append(module.name)
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
    key = "actorder group" if subject.scheme.method == "compressed-tensors" else "desc_act true"
    lack = f"{counted(absent, 'module')} {verb(absent, 'lack')} the index of groups:"
    yield from listed(f"the configuration says {key}, and {lack}", absent)
    yield from listed("groups that are not there are named in", outside)
    yield from listed("all inputs are in one of several groups in", single)
    if ignored:
        yield Finding(
            f"inputs are out of order in {and_more(ignored)}, and the configuration says desc_act false", ignored
        )


@broken(
    title="Zero points of the other version of GPTQ",
    symptom="all weights are off by one step: fluent noise, or answers that fall apart after a few words",
    cause="version 1 of the format stores zero points minus one, version 2 as they are, and only the configuration "
    "tells them apart",
    check="zero points of symmetric weights are the middle code of the version that the configuration names",
    command='set "checkpoint_format" in config.json to what the tensors are (gptq or gptq_v2)',
)
def _zero_point_offset(subject: Subject) -> Iterator[Finding]:
    scheme = subject.scheme
    if scheme.layout not in ("gptq", "gptq_v2"):
        return
    version = 2 if scheme.layout == "gptq_v2" else 1
    wrong: dict[int, list[str]] = defaultdict(list)
    for module in _quantized(subject):
        zeros, packing = module.parts.get("qzeros"), module.packing()
        if zeros is None or packing is None or packing.layout != "gptq" or packing.bits not in (4, 8):
            continue
        if not scheme.of(module.name).symmetric:
            continue
        s = subject.statistics[zeros.name]
        middle = {1: {4: 0x77777777, 8: 0x7F7F7F7F}, 2: {4: 0x88888888, 8: 0x80808080}}
        other = 3 - version
        if s.same and s.low & 0xFFFFFFFF == middle[other][packing.bits]:
            wrong[other].append(zeros.name)
    for found, names in wrong.items():
        where = f"in {counted(names, 'tensor')} and the configuration says version {version}:"
        yield from listed(f"zero points are those of GPTQ version {found} {where}", names)


@broken(
    title="Zero points of weights that are configured as symmetric",
    symptom="a key without a place while loading, or kernels for symmetric weights that leave the zero points out: "
    "every weight is shifted, and text is noise",
    cause="a configuration of another run, or a symmetric flag that was set by hand to get a faster kernel",
    check="where the configuration says symmetric (sym true, zero_point false), zero points are the middle code or not "
    "there; suspicious where compressed-tensors stores them and all are the middle",
    command="set symmetric (sym, zero_point) in config.json to what the tensors are",
)
def _zero_point_unannounced(subject: Subject) -> Iterator[Finding]:
    shifted, idle = [], []
    for module in _quantized(subject):
        if not subject.scheme.of(module.name).symmetric:
            continue
        zeros = module.parts.get("qzeros") or module.parts.get("weight_zero_point")
        packing = module.packing()
        bits = (packing.bits if packing else None) or subject.scheme.of(module.name).bits
        if zeros is None or packing is None or not bits or not 1 <= bits <= 8 or _zeros_shape(module, packing, bits):
            continue
        if not _in_the_middle(subject.checkpoint, zeros, packing.n, bits):
            shifted.append(zeros.name)
        elif zeros.name.endswith("weight_zero_point"):
            idle.append(zeros.name)
    says = "the configuration says symmetric, and"
    yield from listed(f"{says} the zero points of {counted(shifted, 'tensor')} are not the middle code:", shifted)
    yield from listed(f"{says} {counted(idle, 'tensor')} of zero points {are(idle)} stored:", idle, "suspicious")


def _in_the_middle(checkpoint: Checkpoint, zeros: TensorInfo, n: int, bits: int) -> bool:
    """Return whether zero points are all the middle code, in either version of GPTQ.

    Another rule distinguishes the versions.
    """
    stored = checkpoint.read(zeros)
    if zeros.dtype != "I32":  # signed integers that were not packed
        return not stored.any()
    rows = zeros.name.endswith("weight_zero_point")
    if stored.ndim != 2:  # one group, stored without its dimension
        stored = stored.reshape((-1, 1) if rows else (1, -1))
    fields = unpack_words(stored, bits, axis=0 if rows else 1)
    fields = fields[:n] if rows else fields[:, :n]
    if not fields.size:
        return True
    middle = 1 << (bits - 1)
    first = int(fields.flat[0])
    return bool((fields == first).all()) and first in ((middle,) if rows else (middle, middle - 1))


@information(
    title="Scales of another type than the model",
    symptom="kernels that want scales in the activations' type are passed over for slow ones, two to five times slower",
    cause="scales written in float16 next to a bfloat16 model, or layers written by different tools",
    check="scales of GPTQ and AWQ have 16 bits; 16-bit scales are of one type, the one that the configuration names",
    command="serve with --dtype of the scales and look at which kernel the engine says it uses",
)
def _scale_dtype(subject: Subject) -> Iterator[Finding]:
    by_type: dict[str, list[str]] = defaultdict(list)
    wide: list[str] = []
    for module in _quantized(subject):
        scales = module.scales
        if scales is None or module.packed is None:
            continue
        if scales.dtype in ("F16", "BF16"):
            by_type[scales.dtype].append(scales.name)
        elif scales.dtype in _FLOATS and "qweight" in module.parts:
            wide.append(scales.name)
    says = "are in 32 bits or more, and kernels of GPTQ and AWQ read 16:"
    yield from listed(f"scales of {counted(wide, 'module')} {says}", wide, "suspicious")
    model = {"float16": "F16", "bfloat16": "BF16"}.get(_dtype(subject.checkpoint))
    if len(by_type) > 1:
        few = min(by_type.values(), key=len)
        yield from listed(f"scales are {' and '.join(by_type)}; of the rarer type {are(few)}", few, "suspicious")
    elif model is not None and by_type and model not in by_type:
        [(dtype, names)] = by_type.items()
        yield from listed(f"scales are {dtype} and the model is {model}, in", names)


@suspicious(
    title="Announced scales of the KV cache are not there",
    symptom="an FP8 KV cache with scales of 1: a loss that grows with the context, or clipped keys",
    cause="calibration of the KV cache that did not run, or scales that a conversion dropped",
    check="a kv_cache_scheme goes with k_scale and v_scale of every attention layer",
    command="fidelab compare MODEL --kv fp8 measures the loss; or calibrate the KV cache again",
)
def _kv_scales_missing(subject: Subject) -> Iterator[Finding]:
    scales = _cache_scale_names(subject)
    if not scales:
        if subject.scheme.kv_cache:
            yield Finding("the configuration announces scales of the KV cache and no layer has one")
        return
    shared = text_config(subject.checkpoint.config).get("num_kv_shared_layers")  # the last layers cache nothing
    attention: dict[str, None] = {}
    for name in subject.modules:
        layer = _layer_of(name)
        if layer is not None and re.search(r"attn\.k_proj$", name):
            attention[layer] = None
    if type(shared) is int and shared > 0:
        attention = dict.fromkeys([*attention][:-shared])
    stacks = {leaf_of(layer) for layer, _ in scales}
    missing = [
        f"{layer}{_place(scales, part)}"
        for layer in attention
        if leaf_of(layer) in stacks
        for part in ("k_scale", "v_scale")
        if (layer, part) not in scales
    ]
    yield from counted_findings(missing, "scale", "not there, and other layers have theirs")


def _cache_scale_names(subject: Subject) -> dict[tuple[str, str], TensorInfo]:
    """Return the scales of the KV cache by layer and part (``k_scale``, ``v_scale``).

    Older writers have one ``kv_scale`` for both.  Quark's are the ``output_scale`` of the projections.
    """
    found: dict[tuple[str, str], TensorInfo] = {}
    for name, module in subject.modules.items():
        layer = _layer_of(name)
        if layer is None or not re.search(r"(^|\.)(self_)?att(n|ention)(\.|$)", name):
            continue
        for part, kinds in _CACHE_PARTS.items():
            for kind in kinds if part in module.parts else ():
                found[layer, kind] = module.parts[part]
        if "output_scale" in module.parts and name.endswith(("k_proj", "v_proj")):
            found[layer, f"{name[-6]}_scale"] = module.parts["output_scale"]
    return found


_CACHE_PARTS = {"k_scale": ("k_scale",), "v_scale": ("v_scale",), "kv_scale": ("k_scale", "v_scale")}


def _place(scales: Mapping[tuple[str, str], TensorInfo], part: str) -> str:
    """Return the position of a scale within its layer, comparable between layers."""
    places = {kind: info.name[len(layer) :] for (layer, kind), info in scales.items()}
    return places.get(part, f"self_attn.{part}")


@broken(
    title="Scales of the KV cache that no engine can use",
    symptom="NaN or zeros in attention; engines take a scale of -1 for one that was not loaded, and use 1 or stop",
    cause="a layer that calibration never reached, a place holder that was saved, or a scale stored as its reciprocal",
    check="scales of the KV cache and of attention are finite and above zero; suspicious outside "
    f"{_CACHE_RANGE[0]:g} to {_CACHE_RANGE[1]:g}",
    command="fidelab checkpoint calibrate ORIGINAL measures them again",
)
def _kv_scales_invalid(subject: Subject) -> Iterator[Finding]:
    found = [(name, s) for _, part, name, s in _scales(subject, cache=True) if part in CACHE_SCALES]
    kinds = {
        "NaN or infinite": [name for name, s in found if not s.finite],
        "negative": [name for name, s in found if s.negative],
        "zero": [name for name, s in found if s.finite and s.zeros],
    }
    for says, names in kinds.items():
        yield from counted_findings(names, _cache_scale_noun(names), says)
    least, most = _CACHE_RANGE
    sound = [(name, s) for name, s in found if s.finite and not s.negative and not s.zeros]
    names = [name for name, s in sound if s.smallest < least or s.largest > most]
    says = f"beyond {least:g} to {most:g}"
    yield from counted_findings(names, _cache_scale_noun(names), says, "suspicious")


@suspicious(
    title="Scales of the KV cache left at 1, or at one number",
    symptom="an FP8 KV cache that clips keys beyond 448, or wastes most of its codes on small values: a loss that "
    "grows with the context",
    cause="calibration of the KV cache that did not run, or wrote its initial value",
    check="no k_scale and no v_scale is exactly 1 (information for ModelOpt, some of whose versions raise scales to "
    f"1), nor the same in all of {_ALIKE_LAYERS} layers or more",
    command="fidelab checkpoint calibrate ORIGINAL measures them; fidelab compare MODEL --kv fp8 measures the loss",
)
def _kv_scales_default(subject: Subject) -> Iterator[Finding]:
    scales = _cache_scale_names(subject)
    ones = dict.fromkeys(
        info.name for info in scales.values() if (s := subject.statistics[info.name]).size and s.same and s.first == 1
    )
    severity: Severity = "information" if subject.scheme.method == "modelopt" else "suspicious"
    yield from counted_findings([*ones], _cache_scale_noun([*ones]), "exactly 1", severity)
    alike: dict[str, None] = {}
    for kind in ("k_scale", "v_scale"):
        names = [info.name for (_, part), info in scales.items() if part == kind]
        numbers = {subject.statistics[name].first for name in names}
        same = all(subject.statistics[name].same for name in names)
        if len(names) >= _ALIKE_LAYERS and same and len(numbers) == 1 and not numbers & {0.0, 1.0}:
            alike |= dict.fromkeys(names)
    yield from counted_findings([*alike], _cache_scale_noun([*alike]), "one and the same number")


def _cache_scale_noun(names: Sequence[str]) -> str:
    return "scale of the KV cache" if len(names) == 1 else "KV-cache scale"


@suspicious(
    title="Scales of the KV cache that the configuration does not announce",
    symptom="engines leave the scales out, or find no place for them and stop; an FP8 KV cache then has scales of 1",
    cause="a configuration that was copied from another run, or lost its kv_cache_scheme in a conversion",
    check="k_scale and v_scale go with a kv_cache_scheme (or what else the method calls it)",
    command="add the kv_cache_scheme to quantization_config, as fidelab checkpoint calibrate writes it",
)
def _kv_scales_unannounced(subject: Subject) -> Iterator[Finding]:
    scales = _cache_scale_names(subject).values()
    names = [*dict.fromkeys(info.name for info in scales if math.prod(info.shape) == 1)]
    if not subject.scheme.kv_cache:
        yield from counted_findings(names, _cache_scale_noun(names), "not announced")


# ------------------------------------------------------------------------------------------------------ missing layers


@broken(
    title="No vision tower",
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


@broken(
    title="No LM head or no embedding",
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
    text = text_config(checkpoint.config)
    if not generates(config):
        return
    tied = next((value for place in (config, text) if type(value := place.get("tie_word_embeddings")) is bool), None)
    if not _has(modules, "embedding"):
        yield Finding("no tensor is named as an embedding table", severity="suspicious")
    elif not _has(modules, "head"):
        base_head = subject.base is not None and any("lm_head" in name for name in subject.base.tensors)
        if tied is False or (base_head and not tied):
            yield Finding("tie_word_embeddings is false and there is no lm_head", ["lm_head.weight"])


@suspicious(
    title="An LM head that is not the embedding it is tied to",
    symptom="engines that tie the two leave the stored head out, others load it: other answers, or noise where the "
    "head was trained",
    cause="tie_word_embeddings of the original next to a head that was trained or untied, or a head that was left over",
    check="where tie_word_embeddings is true, a stored lm_head is the embedding table, number by number",
    command="set tie_word_embeddings to false in config.json, or remove lm_head.weight",
)
def _head_tied(subject: Subject) -> Iterator[Finding]:
    checkpoint = subject.checkpoint
    places = (checkpoint.config, text_config(checkpoint.config))
    tied = [value for place in places if type(value := place.get("tie_word_embeddings")) is bool]
    if checkpoint.format == "gguf" or not tied or not all(tied) or checkpoint.config.get("is_encoder_decoder"):
        return
    tables = [
        module.parts["weight"]
        for name, module in subject.modules.items()
        if module.kind == "embedding" and name.endswith(("embed_tokens", "wte", "embed_in", "word_embeddings"))
        if "weight" in module.parts and not module.in_layer
    ]
    heads = [module for name, module in subject.modules.items() if name.rpartition(".")[2] == "lm_head"]
    if len(tables) != 1 or len(heads) != 1 or heads[0].quantized or "weight" not in heads[0].parts:
        return
    head, [table] = heads[0].parts["weight"], tables
    if head.shape != table.shape or not _equal_values(checkpoint, head, table):
        yield Finding(f"tie_word_embeddings is true and {head.name} is not {table.name}", [head.name])


def _equal_values(checkpoint: Checkpoint, one: TensorInfo, other: TensorInfo) -> bool:
    """Return whether two tensors hold the same numbers, in whatever types."""
    if one.dtype == other.dtype:
        return checkpoint.equals(one, checkpoint, other)
    if one.dtype not in _FLOATS or other.dtype not in _FLOATS:
        return False
    return np.array_equal(checkpoint.floats(one), checkpoint.floats(other), equal_nan=True)


@information(
    title="Keys that formats of 8 bits lose",
    symptom="with a KV cache of 8-bit keys: perplexity and KL many times those of other models, loops, wrong words; "
    "with 16-bit keys nothing",
    cause="the model as it was trained: large biases or weights of single channels of keys, as in Qwen2.5",
    check=f"no channel of keys is {LEAST_RATIO} times the model's median channel, or beyond FP8's 448, by the weights",
    command="fidelab compare MODEL --kv k16v8 --kv q8_0 measures the loss; keep keys in 16 bits, or rotate them",
)
def _fragile_keys(subject: Subject) -> Iterator[Finding]:
    checkpoint = subject.checkpoint
    if checkpoint.missing_files:
        return
    layers = key_sizes(checkpoint.files[0] if checkpoint.format == "gguf" else checkpoint.folder)
    if text := fragile_keys(layers):
        yield Finding(text)
