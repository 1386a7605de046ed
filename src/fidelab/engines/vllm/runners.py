"""vLLM's two model runners as one: after each step, which tokens of which request were computed and sampled.

vLLM picks the runner: V2 on CUDA for most models, V1 elsewhere, and the choice of ``VLLM_USE_V2_MODEL_RUNNER`` if it
is set.  :class:`RunnerV1` and :class:`RunnerV2` wrap a runner's sampling and call back with a :class:`Step` between the
sampling and everything that reads its tokens, so tokens can still be replaced.

V1 keeps a request's parameters, blocks and tokens in ``requests``.  V2 keeps them in arrays by slot: parameters are
noted when the scheduler passes a request on, the other values are read from the arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fidelab.core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

KEY = "fidelab"  # in SamplingParams.extra_args
_REJECTED = -1  # in place of a token in V1: vLLM's PLACEHOLDER_TOKEN_ID


@dataclass(frozen=True)
class Share:
    """One request's share of a step.

    Attributes:
        request: vLLM's id of the request.
        asked: its instructions for the capture, empty if it has none.
        index: its row among the sampled tokens.
        start: tokens in the cache before the step.
        offset: index of its first token among the step's hidden states.
        tokens: how many of them the step computes, drafts included.
        drafted: how many of these are drafts.
        logits: its rows of logits, one for each draft and one more.
        known: tokens of prompt and answer before the sampling.
        generated: tokens of the answer before the sampling.
    """

    request: str
    asked: Mapping[str, Any]
    index: int
    start: int
    offset: int
    tokens: int
    drafted: int
    logits: slice
    known: int
    generated: int


class Step(ABC):
    """A step after its sampling.

    Attributes:
        states: hidden states before the head, [tokens and padding, d].
        shares: the requests of the step.
        broken: for each row of logits whether it holds NaN; empty if no logits were seen.
    """

    def __init__(self, states: Tensor, shares: Sequence[Share], broken: Sequence[bool]) -> None:
        self.states, self.shares, self.broken = states, shares, broken

    @abstractmethod
    def force(self, share: Share, token: int) -> None:
        """Replace the sampled tokens of a request by one token, and reject its drafts."""

    @abstractmethod
    def rejected(self) -> list[int]:
        """Number of rejected drafts of each share."""


After = Callable[[Step], None]


class RunnerV1:
    """Model Runner V1, wrapped: ``after`` is called with each step that has requests with instructions."""

    version: ClassVar[str] = "V1"

    def __init__(self, runner: Any, after: After) -> None:
        self._runner, self._after = runner, after
        self._state: Any = None  # vLLM's state between a forward and its sampling
        self._sample_tokens: Callable[..., Any] = runner.sample_tokens
        self._sample: Callable[..., Any] = runner._sample
        runner.sample_tokens = self.sample_tokens
        runner._sample = self.sample

    def block_ids(self, request: str, group: int) -> list[int]:
        """The manager's blocks of a request in one group of layers."""
        return list(self._runner.requests[request].block_ids[group])

    def draft_layers(self) -> frozenset[str]:
        """Names of the attention layers of a draft model, or of heads that draft."""
        return frozenset(getattr(getattr(self._runner, "drafter", None), "_draft_attn_layer_names", None) or ())

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        self._state = self._runner.execute_model_state
        return self._sample_tokens(*args, **kwargs)

    def sample(self, logits: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample as vLLM does, then call back."""
        shares = [] if self._state is None else list(self._shares(self._state.scheduler_output))
        asked = any(share.asked for share in shares)
        broken = logits.isnan().any(dim=-1).tolist() if asked and logits is not None else ()
        out = self._sample(logits, *args, **kwargs)
        if asked:
            self._after(_StepV1(self._state.hidden_states, shares, broken, out.sampled_token_ids))
        return out

    def _shares(self, scheduled: Any) -> Iterator[Share]:
        drafts, end = scheduled.scheduled_spec_decode_tokens, 0
        for index, request in enumerate(self._runner.input_batch.req_ids):
            if request is None:
                continue
            drafted = len(drafts.get(request, ()))
            begin, end = end, end + 1 + drafted
            if request not in scheduled.num_scheduled_tokens:
                continue
            record = self._runner.requests[request]
            yield Share(
                request=request,
                asked=_instructions(record.sampling_params),
                index=index,
                start=record.num_computed_tokens,
                offset=int(self._runner.query_start_loc.np[index]),
                tokens=scheduled.num_scheduled_tokens[request],
                drafted=drafted,
                logits=slice(begin, end),
                known=record.num_tokens,
                generated=len(record.output_token_ids),
            )


class _StepV1(Step):
    """Sampled tokens are [requests, 1 + drafts], with -1 in place of rejected ones."""

    def __init__(self, states: Tensor, shares: Sequence[Share], broken: Sequence[bool], sampled: Tensor) -> None:
        super().__init__(states, shares, broken)
        self._sampled = sampled

    def force(self, share: Share, token: int) -> None:
        self._sampled[share.index, 0] = token
        self._sampled[share.index, 1:] = _REJECTED

    def rejected(self) -> list[int]:
        accepted = (self._sampled != _REJECTED).sum(dim=-1).tolist()
        return [max(0, 1 + share.drafted - accepted[share.index]) for share in self.shares]


class RunnerV2:
    """Model Runner V2, wrapped: ``after`` is called with each step that has requests with instructions."""

    version: ClassVar[str] = "V2"

    def __init__(self, runner: Any, after: After) -> None:
        self._runner, self._after = runner, after
        self._instructions: dict[str, Mapping[str, Any]] = {}
        self._add_requests: Callable[..., Any] = runner.add_requests
        self._sample: Callable[..., Any] = runner.sample
        runner.add_requests = self.add_requests
        runner.sample = self.sample

    def block_ids(self, request: str, group: int) -> list[int]:
        """The manager's blocks of a request in one group of layers."""
        slot, tables = self._runner.req_states.req_id_to_index[request], self._runner.block_tables
        n = int(tables.num_blocks.np[group, slot])
        ids: list[int] = tables.block_tables[group].gpu[slot, :n].tolist()
        return ids

    def draft_layers(self) -> frozenset[str]:
        """Names of the attention layers of a draft model, or of heads that draft."""
        return frozenset(getattr(getattr(self._runner, "speculator", None), "draft_attn_layer_names", None) or ())

    def add_requests(self, scheduled: Any) -> Any:
        """Note the instructions of new requests; a preempted request returns as a new one."""
        for request in scheduled.finished_req_ids:
            self._instructions.pop(request, None)
        for new in scheduled.scheduled_new_reqs:
            self._instructions[new.req_id] = _instructions(new.sampling_params)
        return self._add_requests(scheduled)

    def sample(self, states: Tensor, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample as vLLM does, then call back."""
        if not any(self._instructions.get(request) for request in batch.req_ids):
            return self._sample(states, batch, *args, **kwargs)
        model, broken = self._runner.model, list[bool]()
        compute = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            if logits is not None:
                broken.extend(logits.isnan().any(dim=-1).tolist())
            return logits

        shares, patched = self._shares(batch), vars(model).get("compute_logits")
        object.__setattr__(model, "compute_logits", compute_logits)
        try:
            out = self._sample(states, batch, *args, **kwargs)
        finally:
            object.__delattr__(model, "compute_logits")
            if patched is not None:  # by another plug-in
                object.__setattr__(model, "compute_logits", patched)
        self._after(_StepV2(states, shares, broken, out))
        return out

    def _shares(self, batch: Any) -> list[Share]:
        slots, kept = batch.idx_mapping_np, self._runner.req_states
        rows = batch.idx_mapping.long()
        known = kept.total_len.gpu[rows].tolist()
        computed = kept.num_computed_tokens.gpu[rows].tolist()  # the scheduler's own count takes drafts for accepted
        drafted = batch.num_draft_tokens_per_req
        return [
            Share(
                request=request,
                asked=self._instructions.get(request, {}),
                index=index,
                start=computed[index],
                offset=int(batch.query_start_loc_np[index]),
                tokens=int(batch.num_scheduled_tokens[index]),
                drafted=0 if drafted is None else int(drafted[index]),
                logits=slice(int(batch.cu_num_logits_np[index]), int(batch.cu_num_logits_np[index + 1])),
                known=known[index],
                generated=known[index] - int(kept.prompt_len.np[slots[index]]),
            )
            for index, request in enumerate(batch.req_ids)
        ]


class _StepV2(Step):
    """``out``: the sampler's output, how many tokens each request got of it, and how many of its drafts were rejected.

    A prompt's chunk that is not its last one gets none, and rejects none.
    """

    def __init__(self, states: Tensor, shares: Sequence[Share], broken: Sequence[bool], out: tuple[Any, ...]) -> None:
        super().__init__(states, shares, broken)
        sampler_output, self._n_sampled, self._n_rejected = out
        self._sampled = sampler_output.sampled_token_ids

    def force(self, share: Share, token: int) -> None:
        self._sampled[share.index, 0] = token
        more = (self._n_sampled[share.index] - 1).clamp(min=0)
        self._n_sampled[share.index] -= more
        self._n_rejected[share.index] += more

    def rejected(self) -> list[int]:
        rejected = self._n_rejected.tolist()
        return [int(rejected[share.index]) for share in self.shares]


def wrap_runner(runner: Any, after: After) -> RunnerV1 | RunnerV2:
    """Wrap a worker's model runner of either version."""
    return RunnerV2(runner, after) if hasattr(runner, "req_states") else RunnerV1(runner, after)


def _instructions(params: Any) -> Mapping[str, Any]:
    return ((params.extra_args or {}).get(KEY) or {}) if params else {}


# ------------------------------------------------------------------------------------------------- blocks


def kernel_block_ids(blocks: Sequence[int], block_size: int, kernel_block_size: int) -> list[int]:
    """Return the ids of the attention kernel's blocks that make up the cache manager's ``blocks``, in their order.

    Hybrid models have large manager blocks, so that a block of keys and values is as large as a recurrent state.  A
    manager block of ``block_size`` tokens is ``block_size / kernel_block_size`` consecutive kernel blocks.

    Raises:
        EngineError: If ``block_size`` is not a multiple of ``kernel_block_size``.
    """
    ratio, rest = divmod(block_size, kernel_block_size)
    if rest or not ratio:
        raise EngineError(
            f"vLLM's cache has blocks of {block_size} tokens, which are not a multiple of the attention kernel's "
            f"{kernel_block_size}: pass --engine-arg block-size={kernel_block_size}"
        )
    return [block * ratio + i for block in blocks for i in range(ratio)]


def kernel_block_size(runner: Any, group: int) -> int:
    """Tokens of a block as the attention kernel of a group of layers counts them; of both versions of the runner."""
    sizes = getattr(runner, "kernel_block_sizes", None) or getattr(runner, "_kernel_block_sizes", None) or ()
    of_manager = runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
    return int(sizes[group] if group < len(sizes) else of_manager)
