"""Rules about what engines build together: fused linear layers, experts of a layer, multi-token prediction."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from fidelab_checkpoints.modules import (
    CACHE_SCALES,
    GLOBAL_SCALES,
    INPUT_SCALES,
    Module,
    generates,
    text_config,
)
from fidelab_checkpoints.rules import Finding, Subject, broken, counted, listed, suspicious

_FUSED = (  # names of layers that vLLM and SGLang load into one
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq_a", "wkv"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
_FIRST = {name: fused[0] for fused in _FUSED for name in fused}
_CROSS = re.compile(r"(encoder_attn|cross_attn|crossattention|EncDecAttention)\.")  # queries have inputs of their own
_SAME = 1.01  # ratio of scales that writers made equal, with the rounding of 16 bits
_SAME_INPUTS = 2.0  # ratio of scales of the same inputs; FP8 loses one step of its exponent at it


def _siblings(subject: Subject) -> Iterator[list[Module]]:
    """Yield the layers that engines fuse, where more than one is there."""
    fused: dict[tuple[str, str], list[Module]] = defaultdict(list)
    for name, module in subject.modules.items():
        parent, _, leaf = name.rpartition(".")
        if leaf in _FIRST and module.matrix and not _CROSS.search(name):
            fused[parent, _FIRST[leaf]].append(module)
    yield from (modules for modules in fused.values() if len(modules) > 1)


def _form(module: Module) -> dict[str, object]:
    """Return how a layer is stored, which has to be the same in layers that are fused."""
    packed, packing, scales = module.packed, module.packing(), module.scales
    if packed is None:
        return {"quantization": False}
    count = 1
    for size in scales.shape if scales is not None else ():
        count *= size
    ignored = ("bias", *CACHE_SCALES)
    return {
        "quantization": True,
        "type": packed.dtype,
        "bits": (packing.bits, packing.words) if packing else None,
        "groups": packing.groups if packing else min(count, 2),
        "parts": frozenset(part for part in module.parts if part not in ignored),
    }


def _differences(modules: list[Module]) -> str | None:
    """Return the first thing in which the storage of layers differs."""
    forms = [_form(module) for module in modules]
    return next((key for key in forms[0] if len({form.get(key) for form in forms}) > 1), None)


@broken(
    title="Layers that engines fuse and that are stored in different ways",
    symptom="engines stop with a missing key of the fused layer (qkv_proj, gate_up_proj, experts), or use the scale of "
    "one part for all: noise, or a loss of quality",
    cause="bits chosen layer by layer, an ignore list that names one of them, or scales that were not made equal",
    check="q, k and v, gate and up (w1 and w3), the first projections of latent and of linear attention, and the "
    "experts of a layer agree in storage, bits, groups, parts and whether they are listed; suspicious where their "
    f"global scales differ, or scales of their inputs by more than {_SAME_INPUTS:g} times",
    command="quantize again with one setting for all of them (fidelab checkpoint quantize)",
)
def _fused_siblings(subject: Subject) -> Iterator[Finding]:
    if subject.checkpoint.format == "gguf" or subject.scheme.method is None:
        return
    found: dict[str, list[str]] = defaultdict(list)
    listing: list[str] = []
    scales: dict[str, dict[str, float]] = defaultdict(dict)
    for modules in _siblings(subject):
        names = [module.name for module in modules]
        if key := _differences(modules):
            found[key] += names
        elif len({subject.scheme.ignores(name) for name in names}) > 1:
            listing += names
        for part in (*GLOBAL_SCALES, *INPUT_SCALES):
            ratio = _ratio(subject, modules, part)
            if ratio > (_SAME_INPUTS if part in INPUT_SCALES and not _totals(modules) else _SAME):
                scales[part] |= dict.fromkeys(names, ratio)
    for key, names in found.items():
        yield from listed(f"{counted(names, 'module')} that engines fuse differ in {key}:", names)
    for part, ratios in scales.items():
        text = f"{part} differs up to {max(ratios.values()):.3g} times between layers that engines fuse:"
        yield from listed(text, [*ratios], "suspicious")
    says = f"engines fuse are partly listed in {subject.scheme.ignored_by}:"
    yield from listed(f"{counted(listing, 'module')} that {says}", listing)
    yield from listed("experts of one layer are stored in different ways, of the rarer", _odd_experts(subject))


def _totals(modules: list[Module]) -> bool:
    return any(part in module.parts for module in modules for part in GLOBAL_SCALES)


def _ratio(subject: Subject, modules: list[Module], part: str) -> float:
    """Return the ratio of the largest and the smallest of a scale in several layers; 0 where it cannot be."""
    known = [subject.statistics[module.parts[part].name] for module in modules if part in module.parts]
    values = [s.first for s in known if s.size == 1 and s.finite and s.first > 0]
    return max(values) / min(values) if len(values) > 1 else 0.0


def _odd_experts(subject: Subject) -> list[str]:
    """Return the experts that are stored in another way than most of the same role in their layer."""
    roles: dict[str, dict[str, object]] = defaultdict(dict)
    for name, module in subject.modules.items():
        if module.expert is not None and module.matrix:
            roles[module.expert[0]][name] = tuple(
                (key, value)
                for key, value in _form(module).items()
                if key in ("quantization", "type", "bits", "groups")
            )
    odd: list[str] = []
    for forms in roles.values():
        [(usual, _), *others] = Counter(forms.values()).most_common()
        odd += [name for name, form in forms.items() if form != usual] if others else []
    return odd


_MTP_COUNTS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
    "num_mtp_layers",
    "mtp_num_layers",
)
_MTP_MODULE = re.compile(r"(^|\.)(mtp\w*|nextn\w*|eh_proj)(\.|$)")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


@suspicious(
    title="No layers for multi-token prediction",
    symptom="the engine does not start with speculative decoding by MTP, or drafts noise that is never accepted; "
    "without it nothing happens",
    cause="a tool that loads the model by Transformers, which drops these layers, and keeps the configuration",
    check="where the configuration announces layers for multi-token prediction, some tensor belongs to them",
    command="take their tensors from the original, and list them as kept; or set their number to 0 in config.json",
)
def _mtp_missing(subject: Subject) -> Iterator[Finding]:
    checkpoint = subject.checkpoint
    if checkpoint.format == "gguf" or checkpoint.missing_files or not generates(checkpoint.config):
        return
    text = text_config(checkpoint.config)
    places: tuple[Mapping[str, object], ...] = (text, checkpoint.config)
    announced = [(key, n) for place in places for key in _MTP_COUNTS if type(n := place.get(key)) is int and n > 0]
    layers = text.get("num_hidden_layers")
    if not announced or not subject.modules or type(layers) is not int:
        return
    beyond = (match for name in subject.modules if (match := _LAYER.search(name)))
    if any(_MTP_MODULE.search(name) for name in subject.modules) or any(int(match[2]) >= layers for match in beyond):
        return
    key, n = announced[0]
    yield Finding(f"{key} is {n} and no tensor belongs to multi-token prediction")
