"""`pretrain doctor`: measures what training depends on, in every process of a job, and names what is slow.

    each rank alone: machine, device, disk --> all together: collectives, links --> rank 0: next to each other

All ranks measure at the same time, since that is how they train: processes that share cores, a disk or a network slow
each other down here, too.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch

from pretraining.config.commands import DoctorConfig
from pretraining.config.training import ParallelConfig
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import Processes, gather_from_every_rank, join_processes
from pretraining.errors import ConfigError
from pretraining.files import is_folder
from pretraining.launch.layout import ProcessLayout
from pretraining.tools.doctor.diagnosis import (
    Diagnosis,
    RankReport,
    as_object,
    as_text,
    find_what_is_slow,
    slow_bfloat16,
)
from pretraining.tools.doctor.machine_facts import facts_of, warnings_across, warnings_of
from pretraining.tools.doctor.measure import barrier, measure_collectives, measure_device, measure_disk, measure_links

LARGEST_MIB = {"cpu": 16, "cuda": 256}


def doctor(config: DoctorConfig, layout: ProcessLayout) -> None:
    """Measures and prints, in every process of a job.

    Raises:
        ConfigError: the folder for the disk cannot be used.
    """
    place = (layout.rank, layout.world_size, layout.local_rank, layout.local_world_size)
    with join_processes(*place, layout.as_environment()) as processes:
        diagnosis = diagnose(config, processes)
        if processes.is_main:
            print(json.dumps(as_object(diagnosis)) if config.json else as_text(diagnosis), flush=True)


def diagnose(config: DoctorConfig, processes: Processes) -> Diagnosis:
    """Measures; a collective call."""
    device = processes.device
    barrier()
    clock = time.time()
    ranks = gather_from_every_rank(lambda: _examine(config, processes, clock))
    collectives, links = [], {}
    if processes.world_size > 1:
        largest = (config.message_mib or LARGEST_MIB[device.type]) * 2**20
        collectives = measure_collectives(device, largest)
        links = measure_links(device, largest, [rank.host for rank in ranks])
    warnings = warnings_across([rank.facts for rank in ranks], [rank.clock for rank in ranks])
    for sentence in dict.fromkeys(sentence for rank in ranks for sentence in rank.warnings):
        named = [number for number, rank in enumerate(ranks) if sentence in rank.warnings]
        warnings.append(sentence + ("" if len(named) == len(ranks) else f" (rank {', '.join(map(str, named))})"))
    return Diagnosis(ranks, collectives, links, find_what_is_slow(ranks, links, config.slow_factor), warnings)


def _examine(config: DoctorConfig, processes: Processes, clock: float) -> RankReport:
    """What this rank measures by itself; one rank of a machine measures the disk."""
    facts = facts_of(processes.device)
    rates = measure_device(processes.device, processes.local_world_size)
    if config.disk_path is not None and processes.local_rank == 0:
        folder = Path(config.disk_path)
        if not is_folder(folder):
            raise ConfigError(f"--disk_path={folder} is not a folder: name one, or give --disk_path=none.")
        rates += measure_disk(folder, config.disk_mib, f".pretrain_doctor_{processes.rank}_{os.getpid()}")
    in_bfloat16 = compute_dtype(ParallelConfig(), processes.device) == torch.bfloat16
    warnings = warnings_of(processes.device, processes.local_world_size, os.environ)
    warnings += slow_bfloat16(rates, is_chosen=in_bfloat16)
    return RankReport(facts["machine"], facts, warnings, rates, clock)
