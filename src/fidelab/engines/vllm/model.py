"""A loaded vLLM: requests with instructions for the capture, and the captured rows."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from fidelab.captures.container import Array
from fidelab.captures.requests import Sampling
from fidelab.core import Arm, Speculation
from fidelab.core.errors import EngineError, NotSupportedError
from fidelab.core.scratch import scratch
from fidelab.engines.base import one_line
from fidelab.engines.capture_files import read_head, read_nan, read_rows, read_states, typed
from fidelab.engines.k16v8 import is_pair, missing, translated_errors
from fidelab.engines.options import Arguments, passed, switched, trusts_code
from fidelab.engines.speculation import Drafts
from fidelab.engines.vllm.capture import FOLDER, register
from fidelab.engines.vllm.launch import COMPILES, SKIP_LAYERS, cpu_cache_bytes, engine_options, speculation_of
from fidelab.engines.vllm.options import ASYNC, MODEL_RUNNER, QUICK_START, SPECULATIVE, size_in_bytes
from fidelab.engines.vllm.runners import KEY

if TYPE_CHECKING:
    from fidelab.engines.hf.head import ReplayedHead

SEQUENCES = 16  # default number in one batch
_SERVED = 64  # the same where requests are answered as servers do
_WORKER = "fidelab.engines.vllm.capture.FidelabWorker"
_SENTINEL_ROWS = 8
_TRIAL_TOKENS = 8  # tokens whose keys and values are read back
_COUNTERS = "vllm:spec_decode_num_"
_DRAFT_COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")
_PASSED: Arguments = {  # of ``vllm.LLM``
    "enforce-eager": ("enforce_eager", switched),
    ASYNC: ("async_scheduling", switched),
    "kv-cache-memory": ("kv_cache_memory_bytes", size_in_bytes),
    "max-model-len": ("max_model_len", int),
    "max-num-seqs": ("max_num_seqs", int),
    "max-num-batched-tokens": ("max_num_batched_tokens", int),
    "block-size": ("block_size", int),
    "chunked-prefill": ("enable_chunked_prefill", switched),
    "attention-backend": ("attention_config", lambda name: {"backend": name}),
    "quantization": ("quantization", str),
    "gpu-memory-utilization": ("gpu_memory_utilization", float),
}
_SELECTOR_REFUSALS = ("is not valid for this configuration", "No valid attention backend found")


@dataclass(frozen=True)
class VLLMRequest:
    """A prompt, how many tokens to generate after it, and which rows to keep.

    ``first`` … ``last``: positions (``first`` ``None``: no rows; ``last`` ``None``: to the end); ``sentinel``: the
    replay is checked on the first of them; ``force``: token ids in place of the sampled ones; ``layers``: of these
    positions the residual stream is kept, and no rows.  ``counted``: see ``fidelab_counted``; ``reuse``: it may find
    its first tokens in the prefix cache.  ``sampling``: by vLLM itself, greedy where it is ``None``.
    ``picked``: only these of the positions are kept.
    """

    prompt: Sequence[int]
    n: int
    first: int | None = None
    last: int | None = None
    sentinel: bool = False
    force: Sequence[int] = field(default=())
    picked: Sequence[int] = field(default=())
    layers: bool = False
    counted: bool = False
    reuse: bool = False
    sampling: Sampling | None = None

    def instructions(self, key: str) -> dict[str, Any]:
        """``SamplingParams.extra_args`` for the capture in the worker."""
        live = _SENTINEL_ROWS if self.sentinel else 0
        asked = {"key": key, "first": self.first, "last": self.last, "live": live, "force": list(self.force)}
        asked |= {"layers": self.layers, "counted": self.counted}
        if self.picked:
            asked["picked"] = list(self.picked)
        return {name: value for name, value in asked.items() if value is not None and value is not False}


class VLLMModel:
    """One ``vllm.LLM`` with fidelab's capture in its workers.  ``mark`` is called at the end of each start-up phase.

    ``serving``: with a prefix cache, read only by requests that opt in, and room for a server's batch.
    ``layerwise``: states of layers will be requested, which a compiled model does not expose.
    ``cached``: by key of a finished request, how many of its tokens vLLM reports as found in the prefix cache.

    Raises:
        EngineError: If vLLM cannot load it, leaves parameters unfilled, or other logits than its own are replayed.
        NotSupportedError: If vLLM's kernels lack a feature that the arm needs, or the model keeps no keys and values.
    """

    def __init__(
        self, arm: Arm, mark: Callable[[str], None], *, serving: bool = False, layerwise: bool = False
    ) -> None:
        self._arm = arm
        self._mark = mark
        self._serving = serving
        self.cached: dict[str, int] = {}
        self._options = dict(arm.options)
        self._quick = self._options.get(QUICK_START) == "yes"
        self._eager = arm.device == "cpu" or layerwise or self._quick
        self._hidden = self._options.get("estimator") != "logprobs"
        self._count = 0
        self._scratch = ExitStack()
        self._path = self._scratch.enter_context(scratch("vllm"))
        os.environ[FOLDER] = str(self._path)
        register()
        if is_pair(arm.kv):
            with translated_errors():
                from k16v8.plugins.vllm.plugin import register as register_k16v8

                register_k16v8()
        self._load()
        self.head: ReplayedHead | None = None
        self._try_out()

    def _load(self) -> None:
        try:
            from vllm import LLM, SamplingParams
            from vllm.inputs.engine import tokens_input
            from vllm.sampling_params import RequestOutputKind

            self._params, self._input, self._kinds = SamplingParams, tokens_input, RequestOutputKind
            with _marked(self._mark):
                self.llm = LLM(self._arm.path, **self._arguments())
            self._engine = self.llm.llm_engine
        except Exception as error:
            if is_refusal(error):
                raise NotSupportedError(f"vLLM cannot run {self._arm.kv.label} here: {one_line(error, 300)}") from error
            remedy = f"; it may start as it is served: --engine-arg {QUICK_START}=no" if self._quick else ""
            raise EngineError(f"vLLM cannot load {self._arm.model}: {one_line(error, 300)}{remedy}") from error
        self.llm.collective_rpc("fidelab_install", args=(not self._hidden,))
        self.about: Mapping[str, Any] = self.llm.collective_rpc("fidelab_model")[0]
        self.config = self._engine.vllm_config
        if self._quick and not self.config.model_config.enforce_eager:
            raise EngineError(f"vLLM compiles this model although it was asked not to: --engine-arg {QUICK_START}=no")
        drafts, asynchronous = self.config.speculative_config, self.config.scheduler_config.async_scheduling
        if self.about["runner"] == "V1" and drafts and asynchronous:
            raise EngineError(f"Model Runner V1 hides which drafts it accepted: pass --engine-arg {ASYNC}=no")

    def _arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``vllm.LLM``."""
        arm, options, tp = self._arm, self._options, int(self._options.get("tp", 1))
        paired = is_pair(arm.kv)
        arguments: dict[str, Any] = {
            "dtype": arm.dtype,
            "kv_cache_dtype": "auto" if paired else arm.kv.k.name,
            "enforce_eager": self._eager and not COMPILES & {*options},
            "trust_remote_code": trusts_code(arm),
            "enable_prefix_caching": self._serving,
            "async_scheduling": False if options.get(MODEL_RUNNER) == "v1" else None,  # None: vLLM chooses
            "generation_config": "vllm",
            "max_num_seqs": _SERVED if self._serving else SEQUENCES,
            "tensor_parallel_size": tp,
            "distributed_executor_backend": "uni" if tp == 1 else "mp",
            "worker_extension_cls": _WORKER,
            "disable_log_stats": SPECULATIVE not in options,  # its counters of drafts are among the statistics
        }
        if arm.kv.skipped and not paired:
            arguments[SKIP_LAYERS] = [str(layer) for layer in arm.kv.skipped]
        if speculative := options.get(SPECULATIVE):
            draft = {"model": arm.draft} if arm.draft else {}
            arguments["speculative_config"] = {**json.loads(speculative), **draft}
        if arm.device == "cpu":
            size, enough = cpu_cache_bytes(arm)
            arguments["kv_cache_memory_bytes"] = size // tp
            if not enough and "kv-cache-memory" not in options:
                arguments["max_model_len"] = -1  # as long as fits
        elif paired:
            arguments["attention_config"] = {"backend": "CUSTOM"}
        return arguments | passed(arm.options, _PASSED) | engine_options(arm)

    def _try_out(self) -> None:
        """Run a few tokens: read the cache back, and check that the stored head replays vLLM's logits."""
        self.llm.collective_rpc("fidelab_watch")
        tokens = range(min(_TRIAL_TOKENS, self.about["vocabulary"]))
        [(_, _, key)] = self.run([VLLMRequest(tokens, 1, first=0, last=len(tokens) - 1, sentinel=True)])
        if not self.cache()[0]["layers"]:
            raise NotSupportedError(f"{self._arm.model} keeps no keys and values in vLLM")
        if self._hidden:
            self._find_head(key)

    def _find_head(self, key: str) -> None:
        """Assemble the head from the ranks' shards, and find the scale of its logits by the rows of a request."""
        from fidelab.engines.hf.head import head_of

        shards = self.llm.collective_rpc("fidelab_head")
        if why := next((shard["why"] for shard in shards if "why" in shard), ""):
            raise EngineError(f"{why}: pass --engine-arg estimator=logprobs")
        self._width = shards[0]["width"]
        arrays = read_head(self._path, shards, self.about["vocabulary"])
        rows, live = self._read(key, "rows"), self._read(key, "live")
        assert rows is not None
        assert live is not None
        self.head = head_of(arrays, self.about, self._arm.dtype, typed(rows, self._arm.dtype), live)

    # ---------------------------------------------------------------------------------------- requests

    def run(
        self,
        requests: Sequence[VLLMRequest],
        batch: int = 1,
        stop: Sequence[int] = (),
        progress: Callable[[int, int], None] = lambda _tokens, _decoded: None,
    ) -> Iterator[tuple[int, list[int], str]]:
        """Run requests in order, at most ``batch`` at once; ``stop`` ids end a sequence and are part of it.

        Yields (index, generated ids, key of the captured data) as requests finish.  ``progress`` is called with one
        token per running request at each step, and with the remaining tokens of a request at its end; its second
        argument says how many of them are decoded ones.

        Raises:
            EngineError: If a request is longer than the arm's limit.
        """
        for request in requests:
            self._check_length(len(request.prompt) + request.n)
        waiting = iter(enumerate(requests))
        running: dict[str, int] = {}
        steps: Counter[str] = Counter()
        try:
            while True:
                while len(running) < batch and (following := next(waiting, None)):
                    index, request = following
                    key = self._add(request, stop)
                    running[key] = index
                if not running:
                    return
                finished = [output for output in self._engine.step() if output.finished]
                steps.update(running.keys())
                progress(len(running), len(running))
                for output in finished:
                    key, ids = output.request_id, list(output.outputs[0].token_ids)
                    if self._serving:
                        self.cached[key] = output.num_cached_tokens or 0
                    index = running.pop(key)
                    left = len(ids) - steps.pop(key)
                    progress(len(requests[index].prompt) + left, max(0, left))
                    yield index, ids, key
        finally:
            if running:
                self._engine.abort_request(list(running))

    def tokens(self, group: Sequence[Sequence[int]], n: int) -> Iterator[list[int]]:
        """Yield the n tokens after each prompt, each as soon as all prompts have it; nothing is captured.

        Raises:
            EngineError: If the prompts do not fit the arm, or not all at once.
        """
        self._check_batch([len(prompt) + n for prompt in group])
        keys = [self._add(VLLMRequest(prompt, n), (), self._kinds.DELTA) for prompt in group]
        ids: dict[str, list[int]] = {key: [] for key in keys}
        n_yielded = 0
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    ids[output.request_id] += output.outputs[0].token_ids
                known = min(map(len, ids.values()))
                yield from ([ids[key][i] for key in keys] for i in range(n_yielded, known))
                n_yielded = known
        finally:
            self._engine.abort_request(keys)

    def _add(self, request: VLLMRequest, stop: Sequence[int], kind: Any = None) -> str:
        self._count += 1
        key = f"r{self._count}"
        how: dict[str, Any] = {"temperature": 0} if request.sampling is None else asdict(request.sampling)
        params = self._params(
            **how,
            max_tokens=request.n,
            stop_token_ids=list(stop),
            ignore_eos=True,
            detokenize=False,
            output_kind=kind or self._kinds.FINAL_ONLY,
            extra_args={KEY: request.instructions(key)} if kind is None else None,
            **({"skip_reading_prefix_cache": not request.reuse} if self._serving else {}),
        )
        self._engine.add_request(key, self._input(list(request.prompt)), params)
        return key

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, as the memory of this arm allows."""
        return int(self.config.model_config.max_model_len)

    def _check_length(self, tokens: int) -> None:
        if tokens > self.longest:
            raise EngineError(
                f"{tokens:,} tokens are more than this configuration's {self.longest:,}: raise max-model-len"
            )

    def _check_batch(self, sizes: Sequence[int]) -> None:
        """Refuse requests that could not run at the same time.

        Raises:
            EngineError: If they exceed the length, the number of sequences or the cache of this arm.
        """
        for tokens in sizes:
            self._check_length(tokens)
        if len(sizes) > (most := self.config.scheduler_config.max_num_seqs):
            raise EngineError(
                f"{len(sizes)} sequences are more than this configuration's {most} at once: raise max-num-seqs"
            )
        cache = self.cache()[0]
        block = cache["layers"][0]["block_size"]
        if (needed := sum(-(-tokens // block) for tokens in sizes)) > cache["blocks"]:
            raise EngineError(
                f"{len(sizes)} sequences need {needed * block:,} places of the cache, which has "
                f"{cache['blocks'] * block:,}: raise kv-cache-memory"
            )

    # --------------------------------------------------------------------------------------- as servers do

    def counted(self) -> dict[str, dict[str, Any]]:
        """:meth:`FidelabWorker.fidelab_counted` of the first rank."""
        counted: dict[str, dict[str, Any]] = self.llm.collective_rpc("fidelab_counted")[0]
        return counted

    def forget(self) -> None:
        """Empty the prefix cache."""
        if not self.llm.reset_prefix_cache():
            raise EngineError("vLLM does not empty its prefix cache")

    @contextmanager
    def chunks(self, size: int) -> Iterator[None]:
        """Have the scheduler compute at most ``size`` tokens per step."""
        scheduler = self._scheduler
        most = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = min(size, most)
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = most

    @contextmanager
    def pool(self, tokens: int) -> Iterator[None]:
        """Reduce the free cache to the most recently freed blocks, as many as ``tokens`` tokens need."""
        if len(self._scheduler.kv_cache_config.kv_cache_groups) > 1:
            raise NotSupportedError(
                "layers of several kinds (full attention, sliding, recurrent) share this model's cache, and what of it "
                "other requests take from a window is unknown"
            )
        pool = self._scheduler.kv_cache_manager.block_pool
        kept = -(-tokens // self.block_size)
        taken = pool.get_new_blocks(max(0, pool.get_num_free_blocks() - kept))
        try:
            yield
        finally:
            pool.free_blocks(taken)

    @property
    def block_size(self) -> int:
        """Tokens of a block of the prefix cache."""
        return int(self._scheduler.block_size)

    @property
    def _scheduler(self) -> Any:
        """vLLM's scheduler, which runs in this process."""
        return self._engine.engine_core.engine_core.scheduler

    # -------------------------------------------------------------------------------------------- rows

    def rows(self, key: str, n: int) -> Mapping[str, Array]:
        """Return the captured rows of a finished request. The replay is checked if the request was a sentinel.

        Raises:
            EngineError: If there are fewer than ``n`` rows, or the replay does not match the live logits.
        """
        rows = self._read(key, "rows")
        if rows is None or len(rows) < n:
            raise EngineError(f"vLLM computed {0 if rows is None else len(rows)} rows where {n} were wanted")
        if not self._hidden:
            return {"logprobs": rows[:n]}
        if self.head is not None and (live := self._read(key, "live")) is not None:
            from fidelab.engines.hf.head import to_tensor

            self.head.check(to_tensor(typed(rows[: len(live)], self._arm.dtype)), to_tensor(live))
        return {"hidden": typed(rows[:n], self._arm.dtype)}

    def _read(self, key: str, kind: str) -> NDArray[Any] | None:
        """Rows, or the live logits, of a finished request."""
        states = kind == "rows" and self._hidden
        dtype = self._arm.dtype if states else "float16" if kind == "rows" else "float32"
        return read_rows(self._path / f"{key}.{kind}", dtype, self._width if states else self.about["vocabulary"])

    def layer_states(self, windows: Iterable[Sequence[int]], first: int, last: int) -> Iterator[Array]:
        """Yield the residual stream of each window, ``[1 + layers, rows, d]``, computed alone.

        Raises:
            NotSupportedError: If the model is compiled, or its layers are not found.
        """
        if not self.config.model_config.enforce_eager:
            raise NotSupportedError("vLLM's layers can be seen where they run one by one: pass enforce-eager=yes")
        try:
            self.llm.collective_rpc("fidelab_layers", args=(True,))
            for window in windows:
                [(_, _, key)] = self.run([VLLMRequest(window[: last + 1], 1, first, last, layers=True)])
                yield read_states(self._path / f"{key}.states")
        except RuntimeError as error:
            raise NotSupportedError(f"vLLM's layers cannot be read: {one_line(error)}") from error
        finally:
            self.llm.collective_rpc("fidelab_layers", args=(False,))

    @property
    def layers(self) -> int:
        """Decoder layers of the model."""
        return int(self.config.model_config.get_total_num_hidden_layers())

    def nan_at(self, key: str) -> int | None:
        """Return the index of the first generated token of a finished request whose logits held NaN."""
        return read_nan(self._path / f"{key}.nan")

    # ------------------------------------------------------------------------------------------- others

    def tokenize(self, text: str) -> list[int]:
        """Return token ids without special tokens."""
        return list(self.llm.get_tokenizer().encode(text, add_special_tokens=False))

    def cache(self) -> list[dict[str, Any]]:
        """:meth:`FidelabWorker.fidelab_cache` of each rank."""
        ranks: list[dict[str, Any]] = self.llm.collective_rpc("fidelab_cache")
        return ranks

    @property
    def speculation(self) -> Speculation | None:
        """Speculation as vLLM understood it."""
        config, asked = self.config.speculative_config, speculation_of(self._options)
        if config is None or asked is None:
            return None
        tokens = int(config.num_speculative_tokens)
        lookup = (int(config.prompt_lookup_min), int(config.prompt_lookup_max)) if asked.lookup else None
        return replace(asked, method=str(config.method), tokens=tokens, lookup=lookup)

    def drafts(self) -> Drafts:
        """vLLM's counts of its drafts so far."""
        if self.config.speculative_config is None:
            return Drafts()
        named = {metric.name.removeprefix(_COUNTERS): metric for metric in self.llm.get_metrics()}
        return Drafts(*(int(getattr(named.get(name), "value", 0)) for name in _DRAFT_COUNTERS))

    def close(self) -> None:
        """End the workers."""
        with self._scratch:
            self._engine.engine_core.shutdown()


def is_refusal(error: Exception) -> bool:
    """True if vLLM or k16v8 refused a shape or a setting, rather than failed.

    vLLM raises NotImplementedError in its layers, and ValueError where it selects an attention backend.
    """
    package_refusals: tuple[type[Exception], ...] = ()
    if not missing():
        from k16v8.errors import NotSupportedError as RefusedByKernels

        package_refusals = (RefusedByKernels,)
    by_selector = isinstance(error, ValueError) and any(words in str(error) for words in _SELECTOR_REFUSALS)
    return by_selector or isinstance(error, (NotImplementedError, *package_refusals))


@contextmanager
def _marked(mark: Callable[[str], None]) -> Iterator[None]:
    """Mark ``import`` now, and ``weights`` when vLLM has loaded them and starts profiling, cache and compilation.

    vLLM does all of this in one call and only logs the durations.  Where the step has another name, only ``import`` is
    marked.
    """
    from vllm.v1.engine.core import EngineCore

    mark("import")
    name = "_initialize_kv_caches"
    original = getattr(EngineCore, name, None)
    if original is None:
        yield
        return

    def loaded(*args: Any, **kwargs: Any) -> Any:
        mark("weights")
        return original(*args, **kwargs)

    setattr(EngineCore, name, loaded)
    try:
        yield
    finally:
        setattr(EngineCore, name, original)
