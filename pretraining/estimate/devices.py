"""Data of GPUs: peak FLOP/s for MFU, and more for the kinds that `pretrain plan` knows."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Dense bfloat16 peaks in TFLOP/s, by a pattern for the device's name. The first match counts, so longer names come
# first. Figures with sparsity in a data sheet are halved here.
PEAK_TFLOPS = (
    # NVIDIA: data sheets of HGX B300 and B200, GB300 and GB200 NVL72
    ("B300|B200", 2250.0),
    ("GB300|GB200", 2500.0),
    # NVIDIA: data sheets of GH200, H200, H100, H100 NVL; H800 is as fast as H100, H20 slower
    ("H200 NVL|H100 NVL", 835.5),
    ("H100 PCIe", 756.0),
    ("GH200|H200|H100|H800", 989.4),
    ("H20", 148.0),
    # NVIDIA: data sheets of A100 (A800 is as fast), A40, A30, A10; AWS and NVIDIA for A10G
    ("A100|A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    ("A10G", 70.0),
    # NVIDIA: data sheets of L40S, L40, L4; white papers of the Blackwell, Ada and Ampere GeForce architectures,
    # with accumulation in float32
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    # AMD: data sheets of MI355X, MI350X, MI325X, MI300X, MI250X, MI250, MI210
    ("MI355X", 2500.0),
    ("MI350X", 2300.0),
    ("MI325X|MI300X", 1307.4),
    ("MI250X", 191.5),  # a device is one of the card's two dies
    ("MI250|MI210", 181.0),  # MI250: the same
)


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak of a device in TFLOP/s; None if it is unknown, as for CPUs."""
    return next((peak for names, peak in PEAK_TFLOPS if re.search(rf"\b({names})\b", device_name)), None)


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        peak_tflops: dense peak in bfloat16.
        sustained_tflops: rate of large matrix products in bfloat16.
        memory_gib: memory that the driver reports.
        link_gbs: bandwidth to other GPUs of the node, GB/s per direction.
        network_gbits: default network bandwidth per node, Gbit/s.
    """

    peak_tflops: float
    sustained_tflops: float
    memory_gib: float
    link_gbs: float
    network_gbits: float


_UNMEASURED = 0.8
"""Sustained share of the peak for GPUs without published measurements."""

# Peaks, memory, links: NVIDIA's data sheets (SXM forms of h100, h200, a100, b200). Sustained: Stas
# Bekman, Machine Learning Engineering, "Maximum Achievable Matmul FLOPS"; h200 computes like h100. Networks: 8 adapters
# of 400 Gbit/s per node in NVIDIA's reference designs from h100 on, 8 of 200 with a100.
GPUS = {
    "h100": Gpu(989.4, 794.5, 79.6, 450, 3200),
    "h200": Gpu(989.4, 794.5, 140.4, 450, 3200),
    "a100": Gpu(312.0, 271.2, 79.3, 300, 1600),
    "b200": Gpu(2250.0, 1745.0, 179.0, 900, 3200),
    "l40s": Gpu(362.0, _UNMEASURED * 362.0, 44.5, 32, 400),
    "4090": Gpu(165.2, _UNMEASURED * 165.2, 23.6, 32, 100),
}
