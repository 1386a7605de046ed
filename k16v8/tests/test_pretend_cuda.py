"""The pretend device itself: it refuses what CUDA refuses, records what the host waits for, leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pretend_cuda import PretendTensor, pretend_cuda


def test_a_tensor_of_the_host_is_refused_beside_one_of_the_device() -> None:
    with pretend_cuda():
        x = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match="same device, but found cpu, cuda:0"):
            x + torch.ones(3)
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([torch.ones(3), x])
        assert (x + torch.tensor(1.0)).tolist() == [2.0] * 3  # a single number of the host is allowed


def test_tensors_of_two_devices_are_refused_beside_each_other_until_one_is_moved() -> None:
    with pretend_cuda(devices=2):
        x, y = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
        assert [x.device, y.device] == [torch.device("cuda:0"), torch.device("cuda:1")]
        with pytest.raises(RuntimeError, match="found cuda:0, cuda:1"):
            x * y
        assert (x.to("cuda:1") * y).device == y.device


def test_a_device_that_is_not_there_is_refused() -> None:
    with pretend_cuda(devices=2), pytest.raises(RuntimeError, match="invalid device ordinal 2 of 2"):
        torch.zeros(1, device="cuda:2")


def test_results_views_and_types_stay_on_the_device() -> None:
    with pretend_cuda():
        x = torch.arange(12, device="cuda").view(3, 4)
        for made in (x[1:], x.t(), x.float(), torch.zeros_like(x), x.new_empty(2), torch.softmax(x.float(), -1), *x):
            assert isinstance(made, PretendTensor)
            assert made.is_cuda
        x[1:, 2] = 7
        assert x.tolist()[1:] == [[4, 5, 7, 7], [8, 9, 7, 11]]


def test_random_numbers_of_the_device_take_a_generator_of_the_device() -> None:
    with pretend_cuda():
        drawn = [torch.randn(3, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) for _ in range(2)]
        assert torch.equal(*drawn)
        with pytest.raises(RuntimeError, match="'cuda' device type for generator"):
            torch.randn(3, device="cuda", generator=torch.Generator())


WAITS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "item": (lambda x: x.sum().item(), "item"),
    "bool": (lambda x: bool(x.any()), "item"),
    "int": (lambda x: int(x[0]), "item"),
    "tolist": (lambda x: x.tolist(), "tolist"),
    "cpu": (lambda x: x.cpu(), "copy to the host"),
    "to": (lambda x: x.to("cpu", torch.float16), "copy to the host"),
    "copy_ to the host": (lambda x: torch.zeros(3).copy_(x), "copy to the host"),
    "nonzero": (lambda x: torch.nonzero(x), "nonzero"),
    "boolean index": (lambda x: x[x > 0], "boolean index"),
    "put by a boolean index": (lambda x: x.index_put_((x > 0,), x.clone()), "boolean index"),
    "masked_select": (lambda x: x.masked_select(x > 0), "masked_select"),
    "equal": (lambda x: torch.equal(x, x), "equal"),
    "repeat_interleave": (lambda x: x.repeat_interleave(x.long()), "repeat_interleave without output_size"),
    "index of the host": (lambda x: x[torch.tensor([1])], "index from the host"),
    "tensor": (lambda x: torch.tensor([1], device=x.device), "copy to the device"),
    "pageable memory": (lambda x: torch.ones(3).to(x.device, non_blocking=True), "copy to the device"),
    "copy_ of pageable memory": (lambda x: x.copy_(torch.ones(3), non_blocking=True), "copy to the device"),
    "a blocking copy": (lambda x: torch.ones(3).pin_memory().to(x.device), "copy to the device"),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_the_host_waits_for_is_recorded_once_with_its_place(name: str) -> None:
    waits, what = WAITS[name]
    with pretend_cuda() as cuda:
        x = torch.ones(3, device="cuda")
        with cuda.recorded() as found:
            waits(x)
    assert [(one.what, one.file) for one in found] == [(what, Path(__file__).name)]
    assert found[0].line == waits.__code__.co_firstlineno
    assert cuda.synchronizations == found


ASYNCHRONOUS: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x + 1).softmax(0).cumsum(0),
    "fill": lambda x: x.masked_fill_(x > 0, 2.0),
    "one number under a mask": lambda x: x.index_put_((x > 0,), torch.zeros((), device=x.device)),
    "index": lambda x: x[torch.arange(2, device=x.device)],
    "repeat_interleave": lambda x: x.repeat_interleave(x.long(), output_size=3),
    "pinned memory": lambda x: torch.tensor([1, 2], pin_memory=True).to(x.device, non_blocking=True),
    "part of pinned memory": lambda x: x.copy_(torch.zeros(5, pin_memory=True)[2:], non_blocking=True),
    "copy on the device": lambda x: x.clone().to("cuda").copy_(x),
}


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_what_runs_on_without_the_host_is_not_recorded(name: str) -> None:
    with pretend_cuda() as cuda:
        x = torch.ones(3, device="cuda")
        with cuda.recorded() as found:
            ASYNCHRONOUS[name](x)
    assert found == []


def test_the_current_device_is_the_one_that_was_entered() -> None:
    with pretend_cuda(devices=2) as cuda:
        with torch.cuda.device(1):
            assert torch.zeros(1, device="cuda").device.index == torch.cuda.current_device() == 1
        assert torch.zeros(1, device="cuda").device.index == torch.cuda.current_device() == 0
        assert cuda.entered == [1, 0]


def test_afterwards_torch_is_as_it_was_and_what_is_left_of_the_device_is_refused() -> None:
    names = ("is_available", "current_device", "get_device_properties", "_lazy_init", "_exchange_device")
    before = [getattr(torch.cuda, name) for name in names]
    generator, lifts = torch.Generator, torch._C._only_lift_cpu_tensors()
    with suppress(ZeroDivisionError), pretend_cuda():
        x = torch.ones(3, device="cuda")
        raise ZeroDivisionError
    assert [getattr(torch.cuda, name) for name in names] == before
    assert (torch.Generator, torch._C._only_lift_cpu_tensors()) == (generator, lifts)
    assert type(torch.ones(3) + 1) is Tensor
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    with pytest.raises(RuntimeError, match="outlived"):
        x + 1
