"""The engine contract.

Class methods describe the engine without loading anything (``versions``, ``kv_names``, ``supports``, ``control_for``);
an instance lives in a worker process: ``open`` once, ``answer`` for each request, ``close``.
"""

from __future__ import annotations

import platform
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import numpy as np

from fidelab.captures.container import Array, BFloat16
from fidelab.captures.requests import (
    CUT_SHORT,
    Forced,
    Generate,
    Prefill,
    Request,
    RoundedCache,
    RoundedWeights,
    Served,
    Tokens,
)
from fidelab.core import Arm, Estimator, KVSpec, Speculation
from fidelab.core.errors import NotSupportedError
from fidelab.core.runtime import RuntimeInfo
from fidelab.engines import ENGINES
from fidelab.engines.cache_formats import CacheFormat
from fidelab.engines.dialect import Dialect
from fidelab.engines.harmless import Harmless
from fidelab.engines.options import OWN_FLAGS
from fidelab.engines.server_metrics import MetricNames
from fidelab.engines.speculation import Drafts, speculation_record
from fidelab.engines.storage import LayerFormats, Stored


@dataclass(frozen=True)
class Support:
    """Whether an engine can run an arm, and the reason if it cannot."""

    ok: bool
    reason: str = ""


def read_back_proof(matches: float | None, least: float, received: str) -> dict[str, str]:
    """Return the ``proof`` of an engine whose cache is read back.

    Args:
        matches: share of the numbers that are in the cache as they were written; ``None`` if it cannot be read.
        least: the smallest share at which the format counts as stored.
        received: reason why the input of attention is unknown.
    """
    stored, named = "shown", "shown"  # other types would read the same bytes as other numbers
    if matches is None:
        stored, named = "open: blocks in this format cannot be read back", "open: by its name alone"
    elif matches < least:
        stored = f"refuted: {matches:.1%} of the keys and values written are in the cache"
        named = "open: by its name alone"
    return {"received": f"open: {received}", "stored": stored, "named": named}


@dataclass(frozen=True)
class Answer:
    """Answer of an engine to a request, without the arrays in the sink.

    ``head``: arrays ``weight`` [V, d] and perhaps ``bias`` with softcap and scale, for estimator ``hidden``;
    ``facts``: measurements of the capture itself (sentinel replay, tokens, seconds).
    """

    estimator: Estimator
    head: Mapping[str, Array] | None = None
    softcap: float | None = None
    scale: float = 1.0
    facts: Mapping[str, Any] = field(default_factory=dict)


class _Replayed(Protocol):
    """A language-model head; ``sentinels``: (cosine, KL) of each check of it while a request was answered."""

    sentinels: list[tuple[float, float]]

    def fields(self) -> dict[str, Any]:
        """The fields ``head``, ``softcap`` and ``scale`` of :class:`Answer`."""


class Sink(Protocol):
    """Destination of streamed answers."""

    def add(self, item: int, arrays: Mapping[str, Array]) -> None:
        """Add one item's arrays: ``hidden`` [rows, d] or ``logprobs`` [rows, V] float16; ``ids`` [n] for Generate."""

    def fail(self, item: int, reason: str) -> None:
        """Record an item that could not be answered, or whose answer is unusable."""

    def progress(self, tokens: int, decoded: int = 0) -> None:
        """Report the tokens processed since the last call, and how many of them were decoded or fed one by one."""


def add_sequence(
    sink: Sink, item: int, ids: Sequence[int], rows: Mapping[str, Array] | None = None, failed: str | None = None
) -> None:
    """Store the generated or given ids of one item with their rows; mark an item without ids as failed.

    ``failed``: reason why the sequence is unusable, or empty. A sequence without ids and without a reason is an empty
    output.
    """
    sink.add(item, {"ids": np.asarray(ids, dtype=np.int32), **(rows or {})})
    if failed or not ids:
        sink.fail(item, failed or "empty output")


def continuations(request: Forced, sink: Sink) -> Iterator[tuple[int, Tokens, Tokens]]:
    """Yield index, prompt and continuation of each item; mark items without a continuation as failed."""
    for index, (prompt, continuation) in enumerate(zip(request.prompts, request.continuations, strict=True)):
        if continuation:
            yield index, prompt, continuation
        else:
            add_sequence(sink, index, (), failed="empty continuation")


class Shallow:
    """A request for rows at given positions, cut short where the memory does not suffice for all of a window.

    The rows that are lost are stored as NaN, and the facts say how many of a window's rows count
    (:data:`~fidelab.captures.requests.CUT_SHORT`).  A request without positions is never cut.

    Example:
        >>> shallow = Shallow(request)
        >>> while shallow.halve():  # until an engine can read its windows
        ...     longest = max(map(len, shallow.request.windows))

    Attributes:
        request: the request with windows of at most so many tokens as fit.
    """

    def __init__(self, request: Prefill) -> None:
        self._asked = self.request = request

    def halve(self) -> bool:
        """Cut windows to half of the longest; return ``False`` if nothing can be left out."""
        most = max(map(len, self.request.windows)) // 2
        positions = tuple(tuple(p for p in own if p < most - 1) for own in self.request.positions)
        if not positions or not all(positions):
            return False
        self.request = replace(
            self._asked,
            windows=tuple(window[:most] for window in self._asked.windows),
            units=tuple(units[: len(own)] for units, own in zip(self._asked.units, positions, strict=True)),
            positions=positions,
            first=min(own[0] for own in positions),
            last=max(own[-1] for own in positions),
        )
        return True

    def fit(self, limit: int) -> Prefill:
        """Cut windows until their rows and one token more are within ``limit`` tokens; return the request.

        It is cut no further than to its last row, and an engine refuses what is still too long.
        """
        while self.request.last + 2 > limit and self.halve():
            pass
        return self.request

    def whole(self, item: int, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the rows of one window with NaN in the place of those that were left out."""
        lost = len(self._asked.rows_of(item)) - len(self.request.rows_of(item))
        return {name: _with_nan_rows(array, lost) for name, array in arrays.items()} if lost else arrays

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for the capture: item → number of rows that count, of those that were cut short; empty without any."""
        if self.request is self._asked:
            return {}
        sizes = {n: len(self.request.rows_of(n)) for n in range(len(self._asked.windows))}
        return {CUT_SHORT: {str(n): size for n, size in sizes.items() if size < len(self._asked.rows_of(n))}}


def _with_nan_rows(array: Array, n: int) -> Array:
    """Append ``n`` rows of NaN, or of -1 to whole numbers."""
    if isinstance(array, BFloat16):
        return BFloat16(np.pad(array.bits, ((0, n), (0, 0)), constant_values=_NAN_BITS))
    fill = np.nan if np.issubdtype(array.dtype, np.floating) else -1
    return np.pad(array, ((0, n), (0, 0)), constant_values=fill)


_NAN_BITS = 0x7FC0  # of bfloat16


def unmeasurable(request: Request, sink: Sink, reason: str) -> dict[str, Any]:
    """Mark every item of a request as failed, and return its facts: the engine cannot measure it."""
    for index in range(len(request.items())):
        sink.fail(index, reason)
    return {"not_measurable": reason}


def no_ways(engine: str) -> str:
    """Return the refusal of serving ways by an engine that has none."""
    return f"engine {engine} has no ways of serving: take llamacpp, sglang or vllm"


def one_line(error: Exception, limit: int = 200) -> str:
    """Describe an exception of another package by its type and at most ``limit`` characters.  The log has the rest."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:limit]}{'…' if len(text) > limit else ''}"


def device_name(device: str) -> str:
    """Return the name of a torch device for the record: the GPU's, or ``cpu`` with the machine's architecture."""
    if not device.startswith("cuda"):
        return f"cpu ({platform.machine()})"
    import torch

    return str(torch.cuda.get_device_name(device))


def dtype_name(dtype: Any) -> str:
    """Return the name of a torch type: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def raw_bytes(tensor: Any) -> memoryview:
    """Return the bytes of a torch tensor, off the device. A tensor on the CPU is not copied."""
    import torch

    return memoryview(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())


# Formats as engines call them → bits of the fraction, the leading one included, and of the exponent.
_FLOATS = {
    **dict.fromkeys(("f32", "float32"), (24, 8)),
    **dict.fromkeys(("bf16", "bfloat16"), (8, 8)),
    **dict.fromkeys(("f16", "float16"), (11, 5)),
}
_COARSE = re.compile(r"(fp8|fp4|nvfp4|mxfp[48]|u?int[2-8]|lloyd|i?q[2-8]_)")


def _lossless(name: str, dtype: str) -> bool | None:
    """Whether a format holds every number of a type.  ``None``: unknown, as for bfloat16 beyond float16's range."""
    if name in ("auto", dtype):
        return True
    if name not in _FLOATS or dtype not in _FLOATS:
        return False if _COARSE.match(name) else None
    (fraction, exponent), (needed, range_) = _FLOATS[name], _FLOATS[dtype]
    return False if fraction < needed else True if exponent >= range_ else None


class Engine(ABC):
    """Adapter of one engine.

    ``phases``: seconds that opening took, by phase and in order: ``import``, ``weights``, ``warm-up``; see
    docs/metrics/speed.md#start-up-time.  Time that an engine cannot attribute counts for the later phase.
    ``foreseen``: kinds of the requests known before opening.  Some need other launch settings.
    ``seed``: seed of the next request.  The proof of engagement draws its samples from it.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""  # name in texts; empty: ``name``
    estimator: ClassVar[Estimator] = Estimator.HIDDEN  # unless an option says otherwise
    packages: ClassVar[tuple[str, ...]] = ()  # distributions, any of which provides the engine; empty: built in
    needs: ClassVar[tuple[str, ...]] = ()  # packages of an extra of fidelab that it imports where it is built in
    library: ClassVar[str] = ""  # the distribution whose version is the engine's where ``packages`` is empty
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # names that fidelab itself knows; engines have more
    samples: ClassVar[bool] = False  # draws tokens with a seed where a request asks for it
    controlled: ClassVar[Mapping[str, str]] = MappingProxyType({})  # options that cannot be set, and why
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})  # further names of ``options``
    harmless: ClassVar[Mapping[str, Harmless]] = MappingProxyType({})  # options that foreign files may set, and values
    dialect: ClassVar[Dialect | None] = None  # the command line of its own server; none: it has no server
    server_metrics: ClassVar[MetricNames | None] = None  # on its own server's page of metrics; none: it has no page
    own_flags: ClassVar[Mapping[str, str]] = OWN_FLAGS  # of its server that fidelab writes; what presets say instead
    shortened_flags: ClassVar[bool] = True  # its server takes the beginning of a flag for the whole, as argparse does
    native_kv: ClassVar[str] = "bf16"  # default KV format
    cache_formats: ClassVar[Mapping[str, CacheFormat]] = MappingProxyType({})  # its own; none: fidelab's definitions
    own_program: ClassVar[bool] = False  # a program of the user's own build answers the KLD as well (bin)
    emulates: ClassVar[bool] = False  # stores every format of fidelab by its definition, and has no server
    layer_formats: ClassVar[LayerFormats | None] = None  # of a plan by layer; none: one format for all layers
    separate_kv: ClassVar[bool] = True  # keys and values may have any two of its formats
    examined: ClassVar[tuple[str, ...]] = ()  # further distributions that are compared with their published files
    kinds: ClassVar[frozenset[str]] = frozenset(("prefill", "generate", "forced", "timed"))  # of requests it answers
    ways: ClassVar[frozenset[str]] = frozenset()  # of ``captures.requests.WAYS`` in which it answers ``Served``
    shares_attention: ClassVar[bool] = False  # its option ``attention`` must be the same in all arms of a comparison
    has_jitter: ClassVar[bool] = False  # has an option jitter=SEED, which flips the last bit of some weights
    preload: ClassVar[tuple[str, ...]] = ()  # modules that its workers share; none: each starts a fresh interpreter
    imported_ahead: ClassVar[tuple[str, ...]] = ()  # where these open a GPU, so that no fork could share them: modules
    # that a configuration's process imports while the one before it is at work
    is_server: ClassVar[bool] = False  # the answers come from a running server that the arm's options name
    start_seconds: ClassVar[float] = 10.0  # of opening besides reading the weights, as long as none was measured here
    checkpoint_format: ClassVar[str] = "safetensors"  # a folder, ``Arm.path``; ``gguf``: a file where there is one
    dequantizes: ClassVar[frozenset[str]] = frozenset()  # formats of checkpoints that it computes with in 16 bits

    @classmethod
    def native_query_options(cls, arm: Arm) -> Mapping[str, str]:
        """Return options of an attention kernel that reads the arm's cache with queries in the model's own type.

        The options are empty if the engine's kernels do not quantize queries, or if all known kernels do.
        """
        return {}

    @classmethod
    def unreachable(cls, arm: Arm) -> str:
        """Return why the server of an arm's options does not answer at all; empty if it does, or there is none."""
        return ""

    @classmethod
    def shared_load(cls, arm: Arm) -> str | None:
        """Return a key of the model that an arm opens; arms with equal keys may share one load before they are forked.

        ``None``: the arm loads its own, since it changes weights, or its device cannot be shared by a fork.
        """
        return None

    @classmethod
    def load_shared(cls, arm: Arm | None) -> None:
        """Load an arm's model in this process, from which its workers are forked; ``None``: release it.

        It starts no thread that is left.  :meth:`open` takes it where :meth:`shared_load` gives the same key.
        """
        raise NotImplementedError(f"engine {cls.name} shares no load")

    @classmethod
    def turn_load(cls, arm: Arm) -> str | None:
        """Return a key of the model that an arm opens on a device that no fork can share.

        Arms with equal keys may be answered by one process in turn, which keeps the model.  ``None``: the arm has a
        process of its own, since it changes weights, or since :meth:`shared_load` is for it.
        """
        return None

    @classmethod
    def keep_load(cls) -> None:
        """Keep the model that is opened next in this process, for arms with the same key of :meth:`turn_load`."""
        raise NotImplementedError(f"engine {cls.name} keeps no load")

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self.foreseen: frozenset[str] = frozenset()
        self.seed = 0
        self._marked = time.monotonic()

    def mark(self, phase: str, **of_others: float) -> None:
        """Count the seconds since the last mark, or since this object was made, as this phase of opening.

        ``of_others``: seconds of these that belong to earlier phases, where the engine itself reports them.
        """
        now = time.monotonic()
        spent = {**of_others, phase: now - self._marked - sum(of_others.values())}
        for name, seconds in spent.items():
            self.phases[name] = self.phases.get(name, 0.0) + max(0.0, seconds)
        self._marked = now

    @classmethod
    @abstractmethod
    def versions(cls) -> dict[str, str]:
        """Return the versions of the engine and of its compute libraries, without importing them."""

    @classmethod
    @abstractmethod
    def kv_names(cls) -> Sequence[str]:
        """Return the KV format names of this engine, verbatim."""

    @classmethod
    @abstractmethod
    def supports(cls, arm: Arm) -> Support:
        """Return whether this arm can run here. The check is cheap and runs before anything loads."""

    @classmethod
    def cache_format(cls, kv: KVSpec) -> CacheFormat | None:
        """Return what is known of a format of this engine; ``None`` for those that fidelab defines, or unknown ones.

        >>> engine_class("vllm").cache_format(KVSpec.parse("nvfp4")).proof
        'bytes'
        """
        return cls.cache_formats.get(kv.k.name) if kv.same and not kv.k.options else None

    @classmethod  # noqa: B027  (formats without options need no check)
    def check_kv(cls, kv: KVSpec) -> None:
        """Reject a KV spec whose options make no sense, before anything runs.

        Raises:
            UsageError: If the option is unknown or its value is invalid.
        """

    @classmethod
    def refuses_heads(cls, kv: KVSpec, keys: Collection[int], values: Collection[int]) -> str | None:
        """Return why no cache of this format can hold heads of these sizes; ``None`` if none is known."""
        if (row := cls.cache_format(kv)) is None:
            return None
        for side, codes, sizes in ((kv.k, row.k, keys), (kv.v, row.v, values)):
            if odd := [size for size in sizes if size % codes.block]:
                return f"heads of {odd[0]} are no multiple of {side.name}'s block of {codes.block}"
        return None

    @classmethod
    def speculation(cls, options: Mapping[str, str]) -> Speculation | None:
        """Return the speculation of an arm with these options; ``None`` without speculation.

        Raises:
            UsageError: If the options cannot be read.
        """
        return None

    @classmethod
    def estimator_for(cls, arm: Arm) -> Estimator:
        """Return the name of the estimator, which defines the part of each distribution that captures hold."""
        return Estimator(dict(arm.options).get("estimator", cls.estimator))

    @classmethod
    def control_for(cls, reference: KVSpec, native: str) -> str | None:
        """Return the nearest KV format that should lose nothing against this reference; ``None`` if there is none."""
        return None

    @classmethod
    def quick_start(cls, arm: Arm) -> Arm | None:
        """Return the arm as it starts in the least time where only prompts are read: nothing compiled, no graphs.

        ``None`` if nothing can be left out.  Such an arm is another one than :meth:`as_deployed` gives.
        """
        return None

    @classmethod
    def compile_seconds(cls, arm: Arm) -> float:
        """Return the seconds that an arm's start takes besides ``start_seconds``: compilation and graphs of a GPU."""
        return 0.0

    @classmethod
    def as_deployed(cls, arm: Arm) -> Arm:
        """Return the arm with a server's defaults for its open settings, for benchmarks.

        Captures may need settings that are not used in deployment, such as layers that run one by one.
        """
        return arm

    @classmethod
    def serve_command(cls, arm: Arm, host: str, port: int) -> list[str]:
        """Return the command of the engine's own server, with the settings of this arm only.

        The first words are the program as users call it (``vllm serve``, ``python -m …``, ``llama-server``);
        ``arm.path`` is the model in the command.

        Raises:
            NotSupportedError: If the engine has no server, or its server lacks a setting.
        """
        raise NotSupportedError(f"engine {cls.name} has no server of its own: vllm, sglang and llamacpp have one")

    @classmethod
    def environment_command(cls, arm: Arm, host: str, port: int) -> list[str]:
        """Return :meth:`serve_command` as it is called in the engine's environment.

        A first word ``python`` is that environment's interpreter.
        """
        return cls.serve_command(arm, host, port)

    @classmethod
    def serve_variables(cls, arm: Arm) -> dict[str, str]:
        """Return environment variables that belong to :meth:`serve_command`. The arm's own precede others."""
        return dict(arm.env)

    @classmethod
    def stores(cls, kv: KVSpec, *, emulated: bool) -> Stored:
        """Return how the engine stores a format that it has.

        ``emulated``: fidelab itself holds the format in more bits than its definition has.
        """
        return "native"

    @classmethod
    def holds_alike(cls, kv: KVSpec) -> str | None:
        """Return this engine's name of a format that it stores as fidelab defines it; ``None`` if it does not.

        An engine with :attr:`emulates` is measured again on the first engine that has a name.
        """
        return None

    @classmethod
    def lossless(cls, arm: Arm) -> bool | None:
        """Return whether the arm's formats hold all keys and values of its compute type; ``None`` if unknown.

        Two lossless arms may give the same output. A lossy format must change it.
        """
        sides = {_lossless(side.name, arm.dtype) for side in (arm.kv.k, arm.kv.v)}
        return False if False in sides else None if None in sides else True

    @abstractmethod
    def open(self, arm: Arm) -> None:
        """Load the model and mark the phases ``import`` and ``weights``.  The rest is ``warm-up``.

        Third-party packages are imported here.

        Raises:
            EngineError: If it cannot be loaded.
            NotSupportedError: If it lacks a feature that the arm needs.
        """

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return token ids without special tokens, only to check the engine's tokenizer against fidelab's."""

    @abstractmethod
    def answer(self, request: Request, sink: Sink) -> Answer:
        """Answer one request, streaming into the sink. At most one chunk is held."""

    def facts_of(self, request: Request, sink: Sink) -> dict[str, Any]:
        """Answer a request by the method named for its kind (``_prefill``, ``_generate``, …), and return its facts."""
        facts: dict[str, Any] = getattr(self, f"_{request.kind}")(request, sink)
        return facts

    def answer_by_kind(
        self,
        request: Request,
        sink: Sink,
        estimator: Estimator,
        head: _Replayed | None = None,
        speculation: Speculation | None = None,
        drafts: Callable[[], Drafts] = Drafts,
    ) -> Answer:
        """Answer a request by :meth:`facts_of`.

        Adds the worst sentinels of the head, the drafts since the request began and the seconds to the facts, and the
        head if scoring multiplies stored states with it.  ``drafts``: the engine's counts so far.
        """
        began, before = time.monotonic(), drafts()
        if head is not None:
            head.sentinels.clear()
        facts = self.facts_of(request, sink)
        if speculation is not None:
            facts["speculation"] = speculation_record(speculation, drafts() - before)
        if head is not None and head.sentinels:
            cosines, divergences = zip(*head.sentinels, strict=True)
            facts |= {"sentinel_cosine": min(cosines), "sentinel_kl": max(divergences)}
        whole = Prefill | Forced | Served | RoundedWeights | RoundedCache
        rows = request.rows if isinstance(request, Generate) else isinstance(request, whole)
        fields = head.fields() if head is not None and rows else {}
        return Answer(estimator, **fields, facts={**facts, "seconds": time.monotonic() - began})

    @abstractmethod
    def runtime_info(self) -> RuntimeInfo:
        """Return the runtime info. Called after the last request, when the cache has been observed."""

    def peak_device_bytes(self) -> int | None:
        """Return the peak device memory in bytes since :meth:`reset_peak`; ``None`` without a device or if unknown."""
        return None

    def reset_peak(self) -> None:  # noqa: B027  (engines without such a count have nothing to reset)
        """Reset the peak of device memory.  Called before each request."""

    def close(self) -> None:  # noqa: B027  (the exit releases the rest)
        """Release resources. The process exits right after, or opens the next arm with the same :meth:`turn_load`."""


def runs_own_program(name: str) -> bool:
    """Return whether an engine of this package can be a program of the user's own (``bin``)."""
    return name in ENGINES.built_in and bool(ENGINES.load(name).own_program)


def engine_class(name: str) -> type[Engine]:
    """Return the adapter. Its class variables hold in every environment."""
    cls: type[Engine] = ENGINES.load(name)
    return cls


def engines() -> list[type[Engine]]:
    """Return all adapters that can be imported."""
    return [cls for cls in ENGINES.available().values() if isinstance(cls, type) and issubclass(cls, Engine)]


def engine_titles() -> dict[str, str]:
    """Return the names of engines in texts: ``llama.cpp`` for ``llamacpp``."""
    return {cls.name: cls.title or cls.name for cls in engines()}
