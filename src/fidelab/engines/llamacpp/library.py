"""libllama through llama-cpp-python's C bindings: a model, its contexts, and their runtime info.

Only llama.cpp's log reports the types that a context really holds, so the log is read while a context is made.
"""

from __future__ import annotations

import ctypes
import math
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fidelab.core.errors import EngineError, NotSupportedError, UsageError
from fidelab.engines.llamacpp.flags import BY_NAME, FLAGS, spellings
from fidelab.engines.options import Value, other_options, switched, unknown_option

Floats = NDArray[np.float32]

USE_LOGPROBS = "pass --engine-arg estimator=logprobs"

# Name → number in ggml's enumeration, values per block, bytes per block.
GGML_TYPES: Mapping[str, tuple[int, int, int]] = {
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "bf16": (30, 1, 2),
    "q8_0": (8, 32, 34),
    "q5_1": (7, 32, 24),
    "q5_0": (6, 32, 22),
    "q4_1": (3, 32, 20),
    "q4_0": (2, 32, 18),
    "iq4_nl": (20, 32, 18),
}
# Parameters that are numbers of an enumeration → their names on llama.cpp's command line, from 0 on.
ENUMERATIONS: Mapping[str, tuple[str, ...]] = {
    "rope-scaling-type": ("none", "linear", "yarn", "longrope"),
    "split-mode": ("none", "layer", "row", "tensor"),
}
_T = TypeVar("_T")
_WITHOUT_ATTENTION = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
PAGE_CELLS = 256  # cells: the unit in which llama.cpp makes caches
_INTEGER_TYPES = (ctypes.c_int, ctypes.c_int32, ctypes.c_uint32, ctypes.c_int8, ctypes.c_uint8)
_FLOAT_TYPES = (ctypes.c_float, ctypes.c_double)
_BLOCK = 64  # rows of logits copied at a time
_POINTERS = 29  # words of a ggml tensor up to the end of its sources
_SIZES, _SOURCES = 2, 19  # the words where its four sizes and its sources begin
_LOOKS = ("VIEW", "PERMUTE", "RESHAPE", "TRANSPOSE", "CPY", "CONT")  # operations that pass their input on
_HEADS = ("output.weight", "token_embd.weight")  # the second where a model's head is its embedding
_CACHE_NAME = re.compile(r"cache_([kv])_l\d+ ")
_INFO, _ERROR, _CONTINUED = 2, 4, 5  # ggml's log levels; those between are warnings
_CACHE = re.compile(r"size = .*\(\s*\d+ cells,\s*(\d+) layers.*K \((\w+)\):.*V \((\w+)\):")
_CACHE_SIZE = re.compile(r"llama_kv_cache: size = +([\d.]+) MiB \(\s*\d+ cells,\s*(\d+) layers")
_ROUNDED = 0.01  # of a share of bytes, by the log's rounding
_ATTENTION = re.compile(r"flash_attn\s*= (\w+)")
_CHOSEN_ATTENTION = re.compile(r"(?i)flash attention (?:not supported, set to )?(enabled|disabled)")
_ROTATION = re.compile(r"attn_rot_([kv])\s*= (\d)")
_SPLITS = re.compile(r"graph: nodes = \d+, splits = (\d+)")


class _Log:
    """llama.cpp's log: warnings and errors go to standard error, lines are kept until the next section."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.callback: Any = None  # must live as long as the library
        self._level = _INFO

    def hear(self, level: int, raw: bytes, _data: Any) -> None:
        text = raw.decode(errors="replace")
        fresh, self._level = level != _CONTINUED, self._level if level == _CONTINUED else level
        if self._level > _INFO:
            sys.stderr.write(text)
        if self._level >= _INFO:
            _append(self.lines, text, fresh)
        if self._level == _ERROR:
            _append(self.errors, text, fresh)

    def section(self) -> None:
        self.lines.clear()
        self.errors.clear()

    def reason(self) -> str:
        """The first error of the section, which is the cause of later ones."""
        return " ".join(self.errors[0].split())[:200] if self.errors else "it gives no reason"


def _append(lines: list[str], text: str, fresh: bool) -> None:
    if fresh or not lines:
        lines.append(text)
    else:
        lines[-1] += text


@cache
def _native() -> tuple[Any, _Log]:
    """The bindings and the log, which is one per process as in llama.cpp."""
    import llama_cpp.llama_cpp as native

    log = _Log()
    log.callback = native.llama_log_callback(log.hear)
    native.llama_log_set(log.callback, ctypes.c_void_p(0))
    native.llama_backend_init()
    return native, log


def native() -> Any:
    """Return the bindings of llama.cpp."""
    return _native()[0]


def build() -> dict[str, str]:
    """Return llama.cpp's version and the CPU instructions of the build and the machine, which choose its kernels."""
    native, _ = _native()
    system = native.llama_print_system_info().decode().strip(" |")
    return {"system": system, "llama.cpp": native.llama_version().decode()}


def can_offload() -> bool:
    """Return whether this build can compute on a GPU."""
    return bool(_native()[0].llama_supports_gpu_offload())


@dataclass(frozen=True)
class SeenCache:
    """Facts about a new context from the log; ``None`` if the log has none, or several that disagree.

    Attributes:
        rotated_k, rotated_v: whether keys or values are multiplied by a Hadamard matrix before they are stored.
        windowed: share of the cache's bytes in layers with a sliding window; 0 without such layers.
        splits: parts of the graph on different devices; more than a GPU's usual two mean that it lacks operations.
    """

    attention: str | None
    k: str | None
    v: str | None
    layers: int | None
    rotated_k: bool | None
    rotated_v: bool | None
    splits: int | None
    windowed: float = 0.0

    @classmethod
    def read(cls, lines: Sequence[str]) -> SeenCache:
        """Parse the log's lines.  Models with sliding layers have a separate cache for these."""
        caches = [match.groups() for line in lines if (match := _CACHE.search(line))]
        flash = {match[1] for line in lines if (match := _ATTENTION.search(line))}
        chosen = {match[1] for line in lines if (match := _CHOSEN_ATTENTION.search(line))}  # where it was auto
        rotation = {
            side: {f == "1" for line in lines for s, f in _ROTATION.findall(line) if s == side} for side in "kv"
        }
        splits = {int(match[1]) for line in lines if (match := _SPLITS.search(line))}
        return cls(
            attention={"enabled": "flash", "disabled": "standard"}.get(_only(chosen or flash) or ""),
            k=_only({k for _, k, _ in caches}),
            v=_only({v for _, _, v in caches}),
            layers=sum(int(n) for n, _, _ in caches) if caches else None,
            rotated_k=_only(rotation["k"]),
            rotated_v=_only(rotation["v"]),
            splits=_only(splits),
            windowed=_windowed_share(lines),
        )


def _windowed_share(lines: Sequence[str]) -> float:
    """Return the share of a cache's bytes in layers with a sliding window, where all layers hold as many tokens.

    The log rounds bytes.  Where layers of both kinds have as many, their share of the layers is exact.
    """
    sizes: dict[bool, tuple[float, int]] = {}
    windowed = False
    for line in lines:
        if "SWA KV cache" in line:
            windowed = "non-SWA" not in line
        elif found := _CACHE_SIZE.search(line):
            sizes[windowed] = float(found[1]), int(found[2])
    if len(sizes) < 2:
        return 0.0
    by_bytes, by_layers = (sizes[True][n] / (sizes[True][n] + sizes[False][n]) for n in (0, 1))
    return by_layers if abs(by_bytes - by_layers) < _ROUNDED else by_bytes


def _only(values: set[_T]) -> _T | None:
    return values.pop() if len(values) == 1 else None


def function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of ggml's C interface that the bindings leave out.

    Raises:
        AttributeError: If this build has no function of that name.
    """
    found = getattr(_native()[0]._lib, name)
    found.restype, found.argtypes = result, [*arguments]
    return found


class GraphReads:
    """Records the tensors that a graph's operations read.  ``callback`` is passed as ``cb_eval`` of a context.

    ``kinds``: the types of keys and values by side, ``k`` or ``v``.  ``head``: the names of the matrix that gives the
    logits and of the states that it is multiplied with.  Of a ggml tensor only its type, which is its first field, and
    its pointers to earlier operations are read.
    """

    def __init__(self) -> None:
        native, _ = _native()
        self._ask = [
            function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p),
            function("ggml_op_desc", ctypes.c_char_p, ctypes.c_void_p),
            function("ggml_type_name", ctypes.c_char_p, ctypes.c_int),
        ]
        self.kinds: dict[str, set[str]] = {"k": set(), "v": set()}
        self.head: tuple[str, str] | None = None
        self._sides: dict[int, str | None] = {}  # operations so far → the side of the cache that they are a view of
        self.callback = dict(native.llama_context_params._fields_)["cb_eval"](self._see)

    def _name(self, tensor: int) -> str:
        return str(self._ask[0](tensor).decode(errors="replace"))

    def _see(self, tensor: int, ask: bool, _data: Any) -> bool:
        if ask:
            name, operation = (self._ask[i](tensor).decode(errors="replace") for i in (0, 1))
            words = (ctypes.c_size_t * _POINTERS).from_address(tensor)
            if operation == "MUL_MAT" and (weight := self._name(words[_SOURCES])) in _HEADS:
                self.head = weight, self._name(words[_SOURCES + 1])
            sources = [word for word in words if word != tensor and word in self._sides]
            match = _CACHE_NAME.match(name)
            looks = operation in _LOOKS
            self._sides[tensor] = match[1] if looks and match else None
            if not looks:
                for source in sources:
                    if (side := self._sides[source]) is not None:
                        kind = ctypes.c_int.from_address(source).value
                        self.kinds[side].add(self._ask[2](kind).decode())
        return False


class States:
    """Takes the rows of one tensor, by its name, out of every graph of a context.

    ``stop``: nothing after the tensor is computed.  The context then has no logits and gives these rows instead.
    Otherwise :meth:`take` gives those of the calls since it was last called.
    """

    def __init__(self, tensor: str) -> None:
        native, _ = _native()
        self.stop = True
        self._tensor = tensor.encode()
        self._rows: list[Floats] = []
        self._name = function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
        self._get = function(
            "ggml_backend_tensor_get", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
        )
        self.callback = dict(native.llama_context_params._fields_)["cb_eval"](self._see)

    def take(self, n: int) -> Floats:
        """Return the rows [n, d] since the last call, in the order of the tokens whose logits were requested.

        Raises:
            EngineError: If the number of rows differs from the number requested.
        """
        rows, self._rows = self._rows, []
        if (found := sum(map(len, rows))) != n:
            raise EngineError(f"llama.cpp computed {found} rows of {self._tensor.decode()!r}, not {n}: {USE_LOGPROBS}")
        return np.concatenate(rows)

    def _see(self, tensor: int, ask: bool, _data: Any) -> bool:
        if ask:
            return bool(self._name(tensor) == self._tensor)
        width, n = (ctypes.c_int64 * 2).from_address(tensor + _SIZES * ctypes.sizeof(ctypes.c_size_t))
        rows = np.empty((n, width), dtype=np.float32)
        self._get(tensor, rows.ctypes.data, 0, rows.nbytes)
        self._rows.append(rows)
        return not self.stop


class LlamaModel:
    """One loaded GGUF file."""

    def __init__(self, path: str, **params: Any) -> None:
        """Load; ``params`` are fields of ``llama_model_params``. Arrays in them have to live until this returns.

        Raises:
            EngineError: If llama.cpp cannot load it, or the bindings lack a field.
        """
        self._native, log = _native()
        log.section()
        model_params = _with(self._native.llama_model_default_params(), params)
        self._model = self._native.llama_model_load_from_file(path.encode(), model_params)
        if not self._model:
            raise EngineError(f"llama.cpp cannot load {path}: {log.reason()}")
        self._vocab = self._native.llama_model_get_vocab(self._model)
        self.vocabulary = int(self._native.llama_vocab_n_tokens(self._vocab))

    @property
    def decodes(self) -> bool:
        """Whether the model is a pure decoder."""
        native, model = self._native, self._model
        return bool(native.llama_model_has_decoder(model)) and not native.llama_model_has_encoder(model)

    @property
    def window(self) -> int:
        """Tokens that layers with a sliding window read; 0 without such layers."""
        return int(self._native.llama_model_n_swa(self._model))

    @property
    def recurrent_layers(self) -> int:
        """Number of layers in a saved recurrent state, those with attention included; 0 without recurrent layers."""
        native, model = self._native, self._model
        recurrent = native.llama_model_is_hybrid(model) or native.llama_model_is_recurrent(model)
        return int(native.llama_model_n_layer(model)) if recurrent else 0

    def tokenize(self, text: str) -> list[int]:
        """Return the ids [n] of the text. Names of special tokens in it become these tokens, and none is added."""
        raw = text.encode()
        room = len(raw) + 16  # a token is at least a byte, but for a space put in front
        ids = (self._native.llama_token * room)()
        n = self._native.llama_tokenize(self._vocab, raw, len(raw), ids, room, False, True)
        if n < 0:
            raise EngineError("llama.cpp cannot tokenize the sample text")
        return list(ids[:n])

    def setting(self, name: str) -> float | None:
        """Return a number in the file's metadata, by its name after the architecture's prefix; ``None`` if absent."""
        architecture = self._text("general.architecture")
        return _number(self._text(f"{architecture}.{name}"))

    def _text(self, key: str) -> str:
        room = ctypes.create_string_buffer(256)
        self._native.llama_model_meta_val_str(self._model, key.encode(), room, len(room))
        return room.value.decode(errors="replace")

    def context(self, cells: int, sequences: int = 1, *, states: States | None = None, **params: Any) -> LlamaContext:
        """A context of ``sequences`` sequences of up to ``cells`` tokens each; ``params`` as ``llama_context_params``.

        Raises:
            EngineError: If llama.cpp cannot make it, or the bindings lack a field.
        """
        return LlamaContext(self._native, self._model, self.vocabulary, cells, sequences, states, params)

    def close(self) -> None:
        """Free the weights."""
        self._native.llama_model_free(self._model)


class LlamaContext:
    """A llama.cpp context, which owns a KV cache; used as ``with model.context(...) as context``."""

    def __init__(
        self,
        native: Any,
        model: Any,
        vocabulary: int,
        cells: int,
        sequences: int,
        states: States | None,
        params: Mapping[str, Any],
    ) -> None:
        self._native = native
        self._vocabulary = vocabulary
        self.states = states
        self._log = _native()[1]
        self._log.section()
        room = -(-cells // PAGE_CELLS) * PAGE_CELLS  # rounded as llama.cpp does, which avoids its warning
        watched = {"cb_eval": states.callback} if states is not None else {}
        fields = {"n_ctx": room * sequences, "n_seq_max": sequences, **watched, **params}
        context_params = _with(native.llama_context_default_params(), fields)
        self._context = native.llama_init_from_model(model, context_params)
        if not self._context:
            raise EngineError(f"llama.cpp cannot make a context of {sequences} × {cells} tokens: {self._log.reason()}")
        self.seen = SeenCache.read(self._log.lines)
        self._chunk = int(native.llama_n_batch(self._context))
        self._batch = native.llama_batch_init(max(self._chunk, sequences), 0, 1)
        self._ends = [0] * sequences
        # Of each call of ``llama_decode``: tokens of the first sequence before, its tokens in it, sequences in it.
        self.calls: list[tuple[int, int, int]] = []

    def __enter__(self) -> LlamaContext:
        return self

    def __exit__(self, *_: object) -> None:
        self._native.llama_batch_free(self._batch)
        self._native.llama_free(self._context)

    def clear(self) -> None:
        """Clear the cache, stored bytes included: a NaN that stays in a cell would survive its mask."""
        self._native.llama_memory_clear(self._native.llama_get_memory(self._context), True)
        self._ends = [0] * len(self._ends)

    def keep_first(self, tokens: int, sequence: int = 0) -> int:
        """Drop the cells of a sequence after its first ``tokens``, as a server does to continue from a prefix.

        Returns the number of remaining tokens that llama.cpp reports.

        Raises:
            NotSupportedError: If the model keeps a state that cannot be rolled back.
        """
        memory = self._native.llama_get_memory(self._context)
        if not self._native.llama_memory_seq_rm(memory, sequence, tokens, -1):
            raise NotSupportedError("this model keeps a state that llama.cpp cannot roll back to an earlier token")
        self._ends[sequence] = int(self._native.llama_memory_seq_pos_max(memory, sequence)) + 1
        return self._ends[sequence]

    def feed(
        self, tokens: Sequence[int], rows: Container[int], sequence: int = 0, piece: int | None = None
    ) -> Iterator[Floats]:
        """Append tokens to a sequence. Yields the logits [≤ 64, V] of the tokens ``rows``, in order.

        Where the context's ``states`` stop the computation, these and all other logits are states [n, d] instead.
        ``piece``: so many tokens in a call, where that is less than a call takes.
        """
        most = min(piece or self._chunk, self._chunk)
        for start in range(0, len(tokens), most):
            part = tokens[start : start + most]
            wanted = [start + i in rows for i in range(len(part))]
            yield from self._decode(part, [sequence] * len(part), wanted)

    def read(self, prompts: Sequence[Sequence[int]]) -> Floats:
        """Append a prompt to each of the first sequences, in few calls. Returns the logits [n, V] after each."""
        places = [(sequence, i) for sequence, prompt in enumerate(prompts) for i in range(len(prompt))]
        blocks: list[Floats] = []
        for start in range(0, len(places), self._chunk):
            part = places[start : start + self._chunk]
            tokens = [prompts[sequence][i] for sequence, i in part]
            ends = [i == len(prompts[sequence]) - 1 for sequence, i in part]
            blocks += self._decode(tokens, [sequence for sequence, _ in part], ends)
        return np.concatenate(blocks)

    def mixed(self, prompts: Sequence[Sequence[int]], rows: range) -> Iterator[Floats]:
        """Append a prompt to each of the first sequences, in calls that hold the same share of each of them.

        Yields the logits [≤ 64, V] of the tokens ``rows`` of the first prompt, in order.
        """
        shares = ((i / len(prompt), i, s) for s, prompt in enumerate(prompts) for i in range(len(prompt)))
        places = [(i, sequence) for _, i, sequence in sorted(shares)]
        for start in range(0, len(places), self._chunk):
            part = places[start : start + self._chunk]
            wanted = [sequence == 0 and i in rows for i, sequence in part]
            yield from self._decode([prompts[s][i] for i, s in part], [s for _, s in part], wanted)

    def step(self, tokens: Mapping[int, int]) -> Floats:
        """Append one token to each sequence of ``tokens`` (sequence → id). Returns logits [n, V] in that order."""
        blocks = list(self._decode(list(tokens.values()), list(tokens), [True] * len(tokens)))
        return np.concatenate(blocks)

    def stored_bytes(self) -> int:
        """Return the bytes that the saved state of sequence 0 takes: keys, values and some bookkeeping."""
        return int(self._native.llama_state_seq_get_size(self._context, 0))

    def state(self, sequence: int = 0, *, recurrent: bool = False) -> bytes:
        """Return the saved state of a sequence. For a hybrid model it can be limited to the recurrent layers."""
        flags = _WITHOUT_ATTENTION if recurrent else 0
        room = (ctypes.c_uint8 * int(self._native.llama_state_seq_get_size_ext(self._context, sequence, flags)))()
        written = int(self._native.llama_state_seq_get_data_ext(self._context, room, len(room), sequence, flags))
        return ctypes.string_at(room, written)

    def _decode(self, tokens: Sequence[int], sequences: Sequence[int], wanted: Sequence[bool]) -> Iterator[Floats]:
        batch = self._batch
        batch.n_tokens = len(tokens)
        self.calls.append((self._ends[0], sequences.count(0), len({*sequences})))
        for i, (token, sequence) in enumerate(zip(tokens, sequences, strict=True)):
            batch.token[i], batch.pos[i], batch.logits[i] = token, self._ends[sequence], wanted[i]
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            self._ends[sequence] += 1
        self._log.section()
        code = self._native.llama_decode(self._context, batch)
        if code:
            raise EngineError(f"llama.cpp could not decode {len(tokens)} tokens (code {code}): {self._log.reason()}")
        places = [i for i, kept in enumerate(wanted) if kept]
        if places and self.states is not None and self.states.stop:
            yield self.states.take(len(places))
            return
        for start in range(0, len(places), _BLOCK):
            yield np.stack([self._logits(i) for i in places[start : start + _BLOCK]])

    def _logits(self, place: int) -> Floats:
        pointer = self._native.llama_get_logits_ith(self._context, place)
        if not pointer:
            raise EngineError(f"llama.cpp gave no logits for token {place} of a batch")
        return np.ctypeslib.as_array(pointer, shape=(self._vocabulary,))


def parameters(
    options: Iterable[tuple[str, str]], known: Mapping[str, Value], controlled: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the options that are fields of llama.cpp's parameters, by ``context`` and ``model``.

    Raises:
        UsageError: If there is no such field, or it takes another kind of value. ``known`` and ``controlled`` are
            checked as well.
    """
    found: dict[str, dict[str, Any]] = {"context": {}, "model": {}}
    others = other_options("llamacpp", options, known, controlled)
    if not others:
        return found
    try:
        native, _ = _native()
    except ImportError:
        raise _unknown(others[0][0], known) from None
    structures = {"context": native.llama_context_params, "model": native.llama_model_params}
    fields = {
        name.replace("_", "-"): (of, name, kind)
        for of, structure in structures.items()
        for name, kind in structure._fields_
        if kind in (*_INTEGER_TYPES, *_FLOAT_TYPES, ctypes.c_bool)
    }
    for key, value in others:
        if key not in fields:
            raise _unknown(key, [*known, *fields])
        of, name, kind = fields[key]
        found[of][name] = _field(key, value, kind)
    return found


def _unknown(key: str, names: Iterable[str]) -> UsageError:
    """Error for an option that is none: a flag of llama-server that no arm has says why."""
    flag = BY_NAME.get(spellings().get(f"--{key}", key))
    reason = flag and (flag.ignored or flag.refused)
    if reason:
        return UsageError(f"engine llamacpp: {key} cannot be set here: {reason}")
    names = [*names, *(flag.option for flag in FLAGS if flag.option and not flag.option.startswith("@"))]
    return unknown_option("llamacpp", key, names, "see llama-server --help")


def _field(key: str, text: str, kind: Any) -> Any:
    """The value of a field of llama.cpp's parameters.

    Raises:
        UsageError: If the text is of another kind, or out of the type's range.
    """
    value: float | None
    if key in ENUMERATIONS:
        words = ENUMERATIONS[key]
        value, what = words.index(text) if text in words else _whole(text, kind), f"one of {', '.join(words)}"
    elif kind is ctypes.c_bool:
        value, what = switched(text), "yes or no"
    elif kind in _FLOAT_TYPES:
        value, what = _number(text), "a number that llama.cpp takes"
    else:
        value, what = _whole(text, kind), "a whole number that llama.cpp takes"
    if value is None:
        raise UsageError(f"engine llamacpp: {key}={text!r} is not {what}")
    return value


def _whole(text: str, kind: Any) -> int | None:
    value = int(text) if re.fullmatch(r"-?[0-9]{1,10}", text) else None
    return value if value is not None and kind(value).value == value else None


def _number(text: str) -> float | None:
    try:
        return value if math.isfinite(value := float(text)) else None
    except ValueError:
        return None


def _with(params: ctypes.Structure, values: Mapping[str, Any]) -> ctypes.Structure:
    """Set fields of a structure; ctypes itself accepts any attribute silently.

    Raises:
        EngineError: If the bindings lack a field.
    """
    known = {field[0] for field in params._fields_}
    for name, value in values.items():
        if name not in known:
            raise EngineError(f"this llama-cpp-python has no {name}: pip install --upgrade 'fidelab[llamacpp]'")
        setattr(params, name, value)
    return params
