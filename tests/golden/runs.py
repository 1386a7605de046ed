"""The golden runs: experiments as a user writes them, with the files that they read.

Nothing here knows how fidelab stores or reports anything.  ``fake`` is the engine with known distributions; the runs of
engine ``hf`` load models of random weights.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NOT_ON_FAKE: Mapping[str, str] = {
    "serving": "puts load on a server, and engine fake is none",
    "startup": "times processes, and no clock repeats itself",
}
"""Axes and benches that no golden run of engine ``fake`` can measure, and why."""

BY_ORDER = ("top-10 overlap", "top-k KLD")
"""Figures that rest on the order of equally likely tokens, which may differ by processor; kept of ``UNTIED`` alone."""
UNTIED = ("geometric", "hf-llama", "hf-gemma2")
"""Runs in whose rows no two tokens are equally likely."""


@dataclass(frozen=True)
class GoldenRun:
    """One experiment.

    ``files``: what it reads, by name.  ``model``: which tiny model is built, empty for engine ``fake``.  ``answers``:
    which table of answers engine ``fake`` gets as ``answers.json``.
    """

    experiment: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    answers: str = ""


_LINES = "".join(f"line {i} of a text\n" for i in range(60))
_PROMPTS = "".join(f"prompt {i}\n" for i in range(8))
_WORDS = ("harbour", "lamp", "cedar", "north", "winter", "glass", "river", "stone", "copper", "field", "wait", "so")

_SEEDED = """
import zlib

import numpy as np

from fidelab.engines.fake import FakeEngine

answer = FakeEngine.answer


def seeded(self, request, sink):
    name = f"{request.axis} {self._arm.kv.label}".encode()
    self._random = np.random.default_rng([zlib.crc32(name), len(request.items())])
    return answer(self, request, sink)


def coarse(self, rows):
    # steps of 1/256 nats compress well and tie now and then
    return np.round(256 * noisy(self, rows)) / 256


noisy = FakeEngine._noisy
FakeEngine.answer, FakeEngine._noisy = seeded, coarse
"""
"""Engine ``fake`` draws its noise from a seed, so that a run made again gives the same rows."""


def _documents(count: int, words: int) -> str:
    """A text of several documents of unequal length."""
    draw = random.Random(3)
    return "".join(f"# Document {i}\n{' '.join(draw.choices(_WORDS, k=words + 3 * (i % 4)))}.\n" for i in range(count))


def _log() -> str:
    """Twelve conversations of two domains; every second answer is JSON."""
    draw = random.Random(7)
    lines = []
    for number in range(12):
        question, answer = (" ".join(draw.choices(_WORDS, k=12)) for _ in range(2))
        written = json.dumps({"name": answer}) if number % 2 else answer
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": written}]
        lines.append(json.dumps({"id": f"c{number}", "domain": ("first", "second")[number % 2], "messages": messages}))
    return "\n".join(lines) + "\n"


def _problems() -> str:
    lines = (
        {"id": f"p{i:02}", "question": f"Problem {i:02}: how much?", "answer": f"It is.\n#### {17 * i}"}
        for i in range(24)
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


def _fake(axes: Mapping[str, Any], *candidates: Any, **more: Any) -> dict[str, Any]:
    """An experiment on engine ``fake`` without control and noise measurement unless ``more`` has them."""
    given: dict[str, Any] = {"model": "fake", "engine": "fake", "reference": "exact", "control": "none"}
    inputs = {} if "traffic" in more else {"text": "text.txt", "prompts": "prompts.txt"}
    return {**given, **inputs, "candidates": list(candidates), "axes": dict(axes), "floor": 0.0, "threads": 1, **more}


_NOISY = {"engine": {"name": "fake", "pythonpath": ["shim"]}}
_SHIM = {"shim/sitecustomize.py": _SEEDED}
_PLAIN = {"text.txt": _LINES, "prompts.txt": _PROMPTS}
_KLD = {"windows": 8, "n_ctx": 16}
_PERPLEXITY = {"perplexity": {"contexts": [16, 24], "windows": 8}}
_WRITTEN = {"trajectory": {"n_predict": 8}}


def _hf(model: str, axes: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    inputs = {"text": "text.txt", "prompts": "prompts.txt"}
    return {"model": model, "engine": "hf", "axes": dict(axes), **inputs, "threads": 1, **more}


def _numbered(count: int, words: int) -> str:
    """Documents in the words of the tiny models' tokenizer."""
    draw = random.Random(5)
    return "".join(
        f"# w{i + 3}\n{' '.join(f'w{draw.randrange(3, 64)}' for _ in range(words + i % 3))}\n" for i in range(count)
    )


RUNS: Mapping[str, GoldenRun] = {
    # On both sides of each edge of the verdict's bands, a control, the noise floor, the composite's parts.
    "bands": GoldenRun(
        _fake(
            {"kld": {"windows": 12, "n_ctx": 16}, **_WRITTEN},
            *("tilt[q=0.57]", "tilt[q=0.571]", "tilt[q=0.653]", "tilt[q=0.655]", "tilt[q=0.712]", "tilt[q=0.714]"),
            *("tilt[q=0.9]", "fork[at=3,every=2]", "exact"),
            control="tilt[q=0.52]",
            floor=0.25,
        ),
        _PLAIN,
    ),
    # Rows that differ from position to position: percentiles, ties, intervals over documents, a noise floor above 0.
    "documents": GoldenRun(
        _fake(
            {"kld": {**_KLD, "n_ctx": 24, "windows": 9, "protocol": "full"}, **_PERPLEXITY},
            *("exact", "tilt[q=0.55]", "tilt[q=0.7]"),
            **{**_NOISY, "engine_args": {"noise": "0.15"}, "control": "tilt[q=0.51]", "floor": 0.3},
            limits={"max_kld": 0.05, "max_flips": "20%", "margin": "5%"},
        ),
        {"text.txt": _documents(10, 6), "prompts.txt": _PROMPTS, **_SHIM},
    ),
    # Non-inferiority: certificates at two contexts, one of which holds.
    "certificate": GoldenRun(
        _fake(
            {"kld": {"windows": 24, "n_ctx": [16, 24], "protocol": "sliding", "stride": 8}},
            *("tilt[q=0.501]", "tilt[q=0.52]", "tilt[q=0.75]"),
            limits={"max_kld": 0.02, "max_flips": 0.5, "margin": 0.2},
            engine_args={"estimator": "hidden"},
            bands="refract",
        ),
        {"text.txt": _documents(30, 4), "prompts.txt": _PROMPTS},
    ),
    # Another family of distributions; perplexity by strides.
    "geometric": GoldenRun(
        _fake(
            {
                "kld": {**_KLD, "compat": "refract"},
                "perplexity": {"contexts": [24], "windows": 6, "mode": "strided", "stride": 8},
                "forced": {"n_predict": 6, "limit": 4},
            },
            *("decay[b=0.51]", "decay[b=0.6]"),
            engine_args={"family": "geometric"},
            control="decay[b=0.505]",
        ),
        _PLAIN,
    ),
    # What goes wrong: refused, crashed, ignored, NaN in a row, another vocabulary, impossible tokens, no answer.
    "failures": GoldenRun(
        _fake(
            {"kld": _KLD, "trajectory": {"n_predict": 6}},
            *("refused", "silent", "nan-row[item=3,row=2]", "small-vocab[cut=16,q=0.6]", "masked", "missing"),
            *("garbage", "tilt[q=0.7]", "short[at=3,every=4]"),
            engine_args={"crash": "tilt[q=0.7]:1"},
            floor=0.25,
        ),
        _PLAIN,
    ),
    # A log of requests: kinds of text, tokens of structure, recorded prompts.
    "traffic": GoldenRun(
        _fake(
            {"kld": {"windows": 10, "n_ctx": 96}, **_WRITTEN, "forced": {"n_predict": 8, "limit": 4}},
            *("tilt[q=0.7]", "fork[at=5]"),
            traffic="log.jsonl",
        ),
        {"log.jsonl": _log()},
    ),
    # First settings for a quick look.
    "quick": GoldenRun(
        _fake({"kld": "quick", "trajectory": "quick", "forced": "quick"}, "tilt[q=0.6]", "fork[at=9,every=3]"),
        {"text.txt": _documents(60, 30), "prompts.txt": _PROMPTS},
    ),
    # All four axes of the composite.
    "composite": GoldenRun(
        _fake(
            {"kld": _KLD, **_WRITTEN, "rniah": {"lengths": [600, 700]}, "plad": {"n_predict": 8}},
            *("forget[every=3]", "fork[at=4,every=5]", "fork[at=4]", "exact", "missing"),
            control="fork[at=6,every=5]",
            floor=0.34,
        ),
        {**_PLAIN, "prompts.txt": "Find the big Castle 101.\nWrite a Happy story 102.\nExplain the tiny Jug 103.\n"},
        answers="needles",
    ),
    "retrieval": GoldenRun(
        _fake(
            {"kld": _KLD, "rniah": {"lengths": [700, 800], "trials": 4, "style": "question", "distractors": 2}},
            *("forget[every=2]", "forget[every=3]", "forget[every=5]", "forget"),
            control="forget[every=11]",
        ),
        _PLAIN,
        answers="questions",
    ),
    # Cells in which the reference finds nothing.
    "cells": GoldenRun(
        _fake(
            {"rniah": {"lengths": [600, 650], "positions": [0.1, 0.3, 0.5, 0.7, 0.9], "trials": 1, "style": "cloze"}},
            *("forget[every=3]", "forget[every=5]", "exact"),
            reference="forget[every=4]",
        ),
        _PLAIN,
        answers="needles",
    ),
    "arithmetic": GoldenRun(
        _fake(
            {"gsm8k": {"data": "problems.jsonl", "shots": 1, "n_predict": 32}},
            *("exact", "forget[every=2]", "forget[every=12]", "missing"),
            control="forget[every=23]",
        ),
        {**_PLAIN, "problems.jsonl": _problems()},
        answers="problems",
    ),
    # Questions of the package; one of them is answered wrongly by the reference, too.
    "eval": GoldenRun(
        _fake(
            {"eval": {"kinds": ["arithmetic", "word-problems"], "n_predict": 24}},
            *("exact", "forget[every=2]", "forget[every=12]", "missing"),
            control="forget[every=23]",
        ),
        _PLAIN,
        answers="eval",
    ),
    # Calls of tools, some forgotten; rows on the tokens of the right calls.
    "toolcalls": GoldenRun(
        _fake(
            {"toolcalls": {"limit": 3, "n_predict": 160}},
            *("exact", "forget[every=2]", "forget[every=12]", "tilt[q=0.6]", "missing"),
            control="forget[every=23]",
        ),
        _PLAIN,
        answers="toolcalls",
    ),
    # The reference's own text, fed token by token, with noise in the rows.
    "forced": GoldenRun(
        _fake(
            {"forced": {"n_predict": 24}},
            *("tilt[q=0.53]", "tilt[q=0.8]", "fork[at=3]"),
            **_NOISY,
            engine_args={"noise": "0.05"},
            floor=0.25,
        ),
        {**_PLAIN, **_SHIM},
    ),
    "degeneration": GoldenRun(
        _fake(
            {"degeneration": {"n_predict": 200}, "kld": _KLD},
            *("garbage", "short[at=90]", "exact", "forget[every=3]"),
        ),
        _PLAIN,
        answers="prose",
    ),
    "paths": GoldenRun(
        _fake(
            {"paths": {"ways": ["chunked", "decode", "prefix", "evicted"], "windows": 3}},
            *("tilt", "tilt[q=0.7]"),
            engine_args={"parts": "tilt:decode:97", "lacks": "evicted"},
        ),
        {**_PLAIN, "text.txt": "".join(f"line {i} of a text\n" for i in range(200))},
    ),
    # All combinations of options.
    "grid": GoldenRun(
        _fake(
            {"kld": _KLD, "trajectory": {"n_predict": 6}},
            vary={"bend": ["0", "fork:0.5"], "kv": ["exact", "fork", "tilt[q=0.6]", "refused"]},
        ),
        _PLAIN,
    ),
    # What the fake engine computes instead of measuring: rates and bytes.
    "speed": GoldenRun(
        _fake(
            {"kld": _KLD},
            "tilt[q=0.6]",
            benches={
                "prefill": {"lengths": [16, 32], "repeats": 3},
                "decode": {"depths": [0, 16], "n": 4, "repeats": 3},
                "memory": {"lengths": [16, 32]},
            },
        ),
        _PLAIN,
    ),
    # Hidden states of real attention with rounded caches.
    "hf-llama": GoldenRun(
        _hf(
            "llama",
            {
                "kld": {"windows": 6, "n_ctx": 24},
                "perplexity": {"contexts": [24], "windows": 6},
                "trajectory": {"n_predict": 8, "template": "raw"},
                "forced": {"n_predict": 8, "limit": 3, "template": "raw"},
            },
            **{"reference": "f32", "control": "bf16", "dtype": "float32"},
            candidates=["int4", "q8_0", "fp8_e4m3"],
        ),
        {"text.txt": _numbered(9, 15), "prompts.txt": "".join(f"w{i} w{i + 7} w{2 * i + 3}\n" for i in range(4, 10))},
        model="llama",
    ),
    # Windows of attention, a soft-cap, 16-bit states.
    "hf-gemma2": GoldenRun(
        _hf(
            "gemma2",
            {
                "kld": {"windows": 6, "n_ctx": 24},
            },
            **{"reference": "bf16", "control": "none", "dtype": "bfloat16"},
            candidates=["int4", "bf16/fp8_e4m3"],
        ),
        {"text.txt": _numbered(24, 40), "prompts.txt": "w3 w4\n"},
        model="gemma2",
    ),
}
