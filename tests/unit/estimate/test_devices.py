from __future__ import annotations

import pytest

from pretraining.estimate.devices import GPUS, peak_tflops


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("AMD Instinct MI300X OAM", 1307.4),
        ("AMD Instinct MI250X / MI250", 191.5),
        ("cpu", None),
    ],
)
def test_peaks_are_found_by_the_devices_own_name(device: str, peak: float | None) -> None:
    assert peak_tflops(device) == peak


def test_sustained_rates_are_below_the_peaks() -> None:
    for name, gpu in GPUS.items():
        assert peak_tflops(f"NVIDIA {'RTX ' * name.isdecimal()}{name.upper()}") == gpu.peak_tflops
        assert 0.7 * gpu.peak_tflops < gpu.sustained_tflops < gpu.peak_tflops
