"""Engine ``hf`` on models of a few thousand random weights, and a sink that keeps its answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from fidelab.captures.container import Array, to_float32
from fidelab.core import Arm, KVSpec
from fidelab.engines.base import Answer
from fidelab.engines.hf.adapter import HFEngine
from fidelab.metrics.divergence import Head, head_logits
from tests.tiny_models import KINDS, VOCAB, WINDOW, Kind, model, randomised, tokens

__all__ = ["KINDS", "VOCAB", "WINDOW", "Answers", "Kind", "arm", "hidden", "ids", "model", "opened"]
__all__ += ["randomised", "replayed", "save", "tokens"]


def save(built: Any, folder: Path) -> Path:
    """A checkpoint folder as users have them: safetensors, configuration, tokenizer (words w0 … w63)."""
    built.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def opened(path: Path, kv: str = "f32", dtype: str = "float32", **options: str) -> HFEngine:
    """An engine that has loaded the checkpoint."""
    engine = HFEngine()
    engine.open(arm(path, kv, dtype, **options))
    return engine


def arm(path: Path, kv: str = "f32", dtype: str = "float32", **options: str) -> Arm:
    return Arm(kv, "hf", path.name, str(path), "0" * 8, KVSpec.parse(kv), dtype, "cpu", 1, tuple(options.items()))


class Answers:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.items: dict[int, Mapping[str, Array]] = {}
        self.failed: dict[int, str] = {}
        self.tokens = self.decoded = 0
        self.head: dict[str, Any] = {}
        self.facts: Mapping[str, Any] = {}

    def take(self, answer: Answer) -> Mapping[str, Any]:
        """Keep the head and the facts of an answer; returns the facts."""
        self.head = {**(answer.head or {}), "softcap": answer.softcap, "scale": answer.scale}
        self.facts = answer.facts
        return self.facts

    def add(self, item: int, arrays: Mapping[str, Array]) -> None:
        assert item not in self.items
        self.items[item] = arrays

    def fail(self, item: int, reason: str) -> None:
        self.failed[item] = reason

    def progress(self, tokens: int, decoded: int = 0) -> None:
        self.tokens += tokens
        self.decoded += decoded


def hidden(arrays: Mapping[str, Array]) -> Tensor:
    """Stored states as float32."""
    return torch.from_numpy(to_float32(arrays["hidden"]))


def ids(arrays: Mapping[str, Array]) -> list[int]:
    """Stored token ids."""
    return [int(token) for token in to_float32(arrays["ids"])]


def replayed(answer: Answer, arrays: Mapping[str, Array]) -> Tensor:
    """Logits as scoring computes them from what an engine handed over."""
    assert answer.head is not None
    head = {name: to_float32(array) for name, array in answer.head.items()}
    states = to_float32(arrays["hidden"])
    return torch.from_numpy(head_logits(states, Head(head["weight"], head.get("bias"), answer.softcap, answer.scale)))
