"""What GPUs can do: peaks of arithmetic for MFU, and what a plan needs to know of those that it knows by name."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Dense bfloat16 peaks in TFLOP/s of devices whose names match. The first one counts, so longer names stand before
# shorter ones. Where a data sheet names the figure with sparsity, it is halved here.
PEAK_TFLOPS = (
    # NVIDIA: data sheets of HGX B300 and B200, GB300 and GB200 NVL72
    ("B300|B200", 2250.0),
    ("GB300|GB200", 2500.0),
    # NVIDIA: data sheets of GH200, H200, H100, H100 NVL; H800 computes as H100 does, H20 is its smaller sibling
    ("H200 NVL|H100 NVL", 835.5),
    ("H100 PCIe", 756.0),
    ("GH200|H200|H100|H800", 989.4),
    ("H20", 148.0),
    # NVIDIA: data sheets of A100 (A800 computes as it does), A40, A30, A10; AWS and NVIDIA for A10G
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
    """Return the dense bfloat16 peak of a device in TFLOP/s; None where it is not known, as of CPUs."""
    return next((peak for names, peak in PEAK_TFLOPS if re.search(rf"\b({names})\b", device_name)), None)


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, as a plan knows it.

    Attributes:
        peak_tflops: dense, in bfloat16, by its data sheet.
        sustained_tflops: what large matrix products in bfloat16 reach.
        memory_gib: that its driver shows.
        memory_tbs: bandwidth of its memory, TB/s.
        link_gbs: to the other GPUs of a node, GB/s in each direction.
        network_gbits: of a node to others, Gbit/s, where the user names none.
    """

    peak_tflops: float
    sustained_tflops: float
    memory_gib: float
    memory_tbs: float
    link_gbs: float
    network_gbits: float


_UNMEASURED = 0.8
"""Of the peak, where nobody has published what matrix products sustain."""

# Peaks, memory, its bandwidth and links: NVIDIA's data sheets (SXM forms of h100, h200, a100, b200). Sustained: Stas
# Bekman, Machine Learning Engineering, "Maximum Achievable Matmul FLOPS"; h200 as h100, whose arithmetic it has.
# Networks: 8 adapters of 400 Gbit/s a node in NVIDIA's reference designs from h100 on, 8 of 200 with a100.
GPUS = {
    "h100": Gpu(989.4, 794.5, 79.6, 3.35, 450, 3200),
    "h200": Gpu(989.4, 794.5, 140.4, 4.8, 450, 3200),
    "a100": Gpu(312.0, 271.2, 79.3, 2.04, 300, 1600),
    "b200": Gpu(2250.0, 1745.0, 179.0, 8.0, 900, 3200),
    "l40s": Gpu(362.0, _UNMEASURED * 362.0, 44.5, 0.864, 32, 400),
    "4090": Gpu(165.2, _UNMEASURED * 165.2, 23.6, 1.008, 32, 100),
}
