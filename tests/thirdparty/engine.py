"""An engine as another package would add it, in one file: it counts, and all tokens but the next id are as likely."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from fidelab.extend import (
    Answer,
    Arm,
    Dialect,
    Engine,
    Estimator,
    Generate,
    KVSpec,
    NotSupportedError,
    Prefill,
    RuntimeInfo,
    Sink,
    Support,
)

_VOCABULARY, _SPECIAL = 512, 2  # of the small models of random weights: special tokens, bytes, pairs
_KV: Mapping[str, float] = {"sure": 4.0, "unsure": 3.0}  # log-odds of the next id


class Echo(Engine):
    """Counts up, surely or less surely."""

    name: ClassVar[str] = "echo"
    title: ClassVar[str] = "Echo"
    native_kv: ClassVar[str] = "sure"
    estimator: ClassVar[Estimator] = Estimator.LOGPROBS
    kinds: ClassVar[frozenset[str]] = frozenset(("prefill", "generate"))
    dialect: ClassVar[Dialect] = Dialect(
        programs=("echo-server",),
        program="echo-server",
        mark="echo-server",
        port=7000,
        names={"model": "@model", "cache": "@kv"},
    )

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"echo": "1"}

    @classmethod
    def kv_names(cls) -> Sequence[str]:
        return list(_KV)

    @classmethod
    def supports(cls, arm: Arm) -> Support:
        return Support(arm.device == "cpu", "it has no GPU")

    @classmethod
    def lossless(cls, arm: Arm) -> bool | None:
        return arm.kv.k.name == "sure"

    @classmethod
    def holds_alike(cls, kv: KVSpec) -> str | None:
        return "sure" if kv.text == "uint7" else None

    @classmethod
    def serve_command(cls, arm: Arm, host: str, port: int) -> list[str]:
        return ["echo-server", "--model", arm.path, "--cache", arm.kv.text, "--host", host, "--port", str(port)]

    def open(self, arm: Arm) -> None:
        self.mark("import")
        self.mark("weights")
        self._arm = arm

    def tokenize(self, text: str) -> list[int]:
        return [_SPECIAL + byte for byte in text.encode()]

    def answer(self, request: Prefill | Generate, sink: Sink) -> Answer:  # type: ignore[override]
        for item, tokens in enumerate(request.items()):
            match request:
                case Prefill():
                    sink.add(item, {"logprobs": self._rows(tokens[request.first : request.last + 1])})
                case Generate():
                    ids = [(tokens[-1] + step) % _VOCABULARY for step in range(1, request.max_tokens + 1)]
                    rows = {"logprobs": self._rows([tokens[-1], *ids[:-1]])} if request.rows else {}
                    sink.add(item, {"ids": np.array(ids, dtype=np.int32), **rows})
                case _:
                    raise NotSupportedError(f"engine echo does not answer {request.kind}")
            sink.progress(len(tokens))
        return Answer(Estimator.LOGPROBS)

    def _rows(self, ids: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        logits = np.zeros((len(ids), _VOCABULARY))
        logits[np.arange(len(ids)), [(token + 1) % _VOCABULARY for token in ids]] = _KV[self._arm.kv.k.name]
        return np.asarray(logits - np.log(np.exp(logits).sum(1, keepdims=True)), dtype=np.float32)

    def runtime_info(self) -> RuntimeInfo:
        return RuntimeInfo(
            versions=self.versions(),
            device="cpu",
            attention="none",
            k_format=str(self._arm.kv.k),
            v_format=str(self._arm.kv.v),
            k_dtype="float64",
            v_dtype="float64",
            cache_bytes_per_token=8.0,
            expected_bytes_per_token=8.0,
        )
