"""The settings of `pretrain doctor`: what is measured, and what counts as slow."""

from __future__ import annotations

from dataclasses import dataclass

from pretraining.config.setting import setting


@dataclass(frozen=True)
class DoctorConfig:
    """Measure devices, disk and links of the machines that training would run on, and name what is slow.

    Started like training: alone, or under torchrun, srun or mpirun. Takes seconds.
    """

    disk_path: str | None = setting(
        ".", "folder whose disk is measured, such as that of the data or the checkpoints; none = no disk"
    )
    disk_mib: int = setting(256, "size of the file that is written there and read again, MiB", minimum=1)
    message_mib: int | None = setting(
        None, "largest message between processes, MiB; none = 256 on GPUs, 16 on CPUs", minimum=1
    )
    slow_factor: float = setting(
        1.3, "name a rank or a link that is so many times slower than the median of the others", minimum=1.05
    )
    json: bool = setting(False, "one JSON object in place of the tables")
