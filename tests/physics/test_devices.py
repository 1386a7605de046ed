"""The device table: sources, plausible rates, and names in any spelling."""

from __future__ import annotations

import math

import pytest

from fidelab.core.errors import UsageError
from fidelab.physics.devices import Device, device_of, devices, find_device

GIB = 2**30


@pytest.mark.parametrize("device", devices().values(), ids=lambda device: device.name)
def test_every_row_has_a_source_and_plausible_rates(device: Device) -> None:
    assert device.source
    assert 0.6 * device.memory < device.usable <= 1.075 * device.memory  # GB that are GiB: 7.4% more
    assert 50e9 < device.peak_bandwidth < 20e12
    assert (device.sustained or 0) < device.peak_bandwidth
    assert 10e-3 < device.memory / device.peak_bandwidth < 2  # seconds to read all of it
    assert all(rate < device.peak_bandwidth for rate in device.links.values())
    bf16 = device.flops("bf16")
    assert math.isinf(bf16) or 20 < bf16 / device.peak_bandwidth < 700  # operations per byte
    assert device.flops("fp8") >= bf16 or math.isinf(device.flops("fp8"))
    assert device.sizes == tuple(sorted(device.sizes))
    assert not device.sizes or device.sizes[-1] == device.memory


@pytest.mark.parametrize("name", devices())
def test_every_name_of_the_table_finds_its_own_row(name: str) -> None:
    assert find_device(name).name == name
    assert find_device(name.lower().replace("-", " ")).name == name
    assert all(find_device(other).name == name for other in find_device(name).also)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4090", "RTX-4090"),
        ("rtx 4090", "RTX-4090"),
        ("RTX4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("4070 ti", "RTX-4070-Ti"),
        ("4060 Ti", "RTX-4060-Ti-16GB"),
        ("M3 Max", "M3-Max"),
        ("Apple M4", "M4"),
        ("strix halo", "Ryzen-AI-Max-395"),
        ("GB10", "DGX-Spark"),
        ("H100 80GB", "H100"),
    ],
)
def test_devices_are_found_as_people_write_them(text: str, name: str) -> None:
    assert find_device(text).name == name


@pytest.mark.parametrize(("size", "lent"), [(36, 24.0), (64, 48.0), (128, 96.0)])
def test_macs_lend_the_gpu_two_thirds_of_a_small_memory_and_three_quarters_of_a_large_one(
    size: int, lent: float
) -> None:
    device = find_device(f"m3 max {size}gb")
    assert device.name == f"M3-Max-{size}GB"
    assert device.usable / GIB == pytest.approx(lent)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Max", "device 'Max' can be any of M2-Max, M3-Max, M4-Max: write one of these"),
        ("M3 Max 63GB", "device 'M3 Max 63GB': M3-Max has 36, 48, 64, 96, 128 GB"),
        ("RTX-4090 48GB", "device 'RTX-4090 48GB': RTX-4090 has 24 GB"),
        ("4091", "unknown device '4091': the closest are"),
        ("nvidia", "unknown device 'nvidia'"),
        ("", "unknown device ''"),
    ],
)
def test_other_names_than_of_one_device_are_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_device(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4080 SUPER", None),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX-4070-Ti-SUPER"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GB10", "DGX-Spark"),
        ("Apple M3 Max", "M3-Max"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("Tesla T4", None),
    ],
)
def test_a_drivers_name_is_the_row_of_that_device_and_of_no_relative(told: str, name: str | None) -> None:
    assert getattr(device_of(told), "name", None) == name
