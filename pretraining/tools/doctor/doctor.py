"""`pretrain doctor`: measures what training depends on, in every process of a job, and says what is good and what not.

    each rank alone: machine, device, disk --> all together: saves, collectives, links --> verdicts, on every rank

All ranks measure at the same time, since that is how they train: processes that share cores, a disk or a network slow
each other down here, too.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from pretraining.config.commands import DoctorConfig
from pretraining.config.training import CheckpointConfig, ModelConfig
from pretraining.config.variants import name_of_model, parameter_count, resolve_shape
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import Processes, gather_from_every_rank, join_processes, on_rank_zero
from pretraining.errors import ConfigError
from pretraining.estimate.memory import MASTER_BYTES, optimizer_state_bytes
from pretraining.files import is_folder
from pretraining.launch.layout import ProcessLayout
from pretraining.launch.network import NCCL_INTERFACE
from pretraining.tools.doctor import measure
from pretraining.tools.doctor.diagnosis import (
    Diagnosis,
    RankReport,
    as_object,
    as_text,
    check_rates,
    check_speed,
    slow_bfloat16,
)
from pretraining.tools.doctor.gpu_health import GpuState, check_gpu, gpu_state
from pretraining.tools.doctor.machine_facts import check_across, check_machine, facts_of
from pretraining.tools.doctor.measure import (
    DISK_WRITE,
    GIB,
    barrier,
    measure_collectives,
    measure_device,
    measure_disk,
    measure_links,
    measure_saves,
    synchronize,
)
from pretraining.tools.doctor.verdicts import Check, Verdict, merged

LARGEST_MIB = {"cpu": 16, "cuda": 256}
SAVE_SECONDS = 8
"""How long the save may take that is measured: of a larger checkpoint a part is written."""
LONG_SAVE_SECONDS = 300
ROOM_FOR_CHECKPOINTS = 3


def doctor(config: DoctorConfig, layout: ProcessLayout) -> Verdict:
    """Measures and prints, in every process of a job; returns the worst verdict, the same in all.

    Raises:
        ConfigError: a folder cannot be used.
    """
    place = (layout.rank, layout.world_size, layout.local_rank, layout.local_world_size)
    with join_processes(*place, layout.as_environment(), parallel=config.parallel) as processes:
        diagnosis = diagnose(config, processes)
        if processes.is_main:
            print(json.dumps(as_object(diagnosis)) if config.doctor.json else as_text(diagnosis), flush=True)
    return diagnosis.verdict


def diagnose(config: DoctorConfig, processes: Processes) -> Diagnosis:
    """Measures; a collective call."""
    device, asked = processes.device, config.doctor
    barrier()
    clock = time.time()
    ranks = gather_from_every_rank(lambda: _examine(config, processes, clock))
    saving, save_rate = _check_saves(config, processes, ranks)
    collectives, links = [], {}
    bad = {check.item for rank in ranks for check in rank.checks if check.verdict == "bad"}
    if processes.world_size > 1 and NCCL_INTERFACE not in bad:  # with it NCCL ends this process, and nothing is said
        largest = (asked.message_mib or LARGEST_MIB[device.type]) * 2**20
        collectives = measure_collectives(device, largest)
        links = measure_links(device, largest, [rank.host for rank in ranks])
    checks = [
        *merged([rank.checks for rank in ranks]),
        *check_across([rank.facts for rank in ranks], [rank.clock for rank in ranks]),
        *saving,
        *check_speed(ranks, links, asked.slow_factor),
    ]
    return Diagnosis(ranks, collectives, links, checks, save_rate)


def _examine(config: DoctorConfig, processes: Processes, clock: float) -> RankReport:
    """What this rank measures by itself; one rank of a machine measures the disk."""
    device, asked = processes.device, config.doctor
    facts = facts_of(device)
    checks = check_machine(device, processes.local_world_size, os.environ)  # before this process makes load itself
    rates = measure_device(device, processes.local_world_size)
    if device.type == "cuda":
        checks += check_gpu(_gpu_under_load(device))
    if asked.disk_path is not None and processes.local_rank == 0:
        folder = Path(asked.disk_path)
        if not is_folder(folder):
            raise ConfigError(f"--disk_path={folder} is not a folder: name one, or give --disk_path=none.")
        rates += measure_disk(folder, asked.disk_mib, f".pretrain_doctor_{processes.rank}_{os.getpid()}")
    checks += check_rates(rates, facts["device"])
    checks += _check_bfloat16(config, rates, device)
    return RankReport(facts["machine"], facts, checks, rates, clock)


def _gpu_under_load(device: torch.device) -> GpuState | None:
    """Asks how the GPU is while it multiplies matrices."""
    one = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(16):
            torch.mm(one, one)
        synchronize(device)

    return gpu_state(str(torch.cuda.get_device_properties(device).uuid), work)


def _check_bfloat16(config: DoctorConfig, rates: list[measure.Rate], device: torch.device) -> Iterator[Check]:
    is_chosen = compute_dtype(config.parallel, device) == torch.bfloat16
    slow = list(slow_bfloat16(rates, is_chosen=is_chosen))
    for sentence in slow:
        yield Check("bfloat16", "look at" if is_chosen else "good", sentence)
    if not slow:
        yield Check("bfloat16", "good", "not slower than float32")


def _check_saves(
    config: DoctorConfig, processes: Processes, ranks: list[RankReport]
) -> tuple[list[Check], float | None]:
    """Looks where checkpoints go: whether there is room, and how long a save takes; a collective call.

    Returns:
        Verdicts, and GiB/s of a save; None where no folder is given.
    """
    path, size = config.checkpoint.ckpt_save_path, None
    if path is None or path == CheckpointConfig.ckpt_save_path:
        return [], None
    if config.model != ModelConfig():
        shape = resolve_shape(config.model)
        size = MASTER_BYTES * parameter_count(shape) + optimizer_state_bytes(config.optimizer, shape)
    places = (Path(path).absolute(), *Path(path).absolute().parents)
    folder = on_rank_zero(lambda: next(place for place in places if is_folder(place)))
    free = on_rank_zero(lambda: shutil.disk_usage(folder).free)
    disk = next((rate.value * GIB for rank in ranks for rate in rank.rates if rate.name == DISK_WRITE), 0.0)
    least = config.doctor.disk_mib * 2**20
    wanted = max(least, int(disk * SAVE_SECONDS)) if size is None else min(size, max(least, int(disk * SAVE_SECONDS)))
    rate = measure_saves(folder, max(1, min(wanted, free // 2)))
    return [_check_room(size, free, folder), _check_save_rate(config, size, rate, folder)], rate


def _check_room(size: int | None, free: int, folder: Path) -> Check:
    found = f"{free / GIB:,.1f} GiB are free in {folder}"
    if size is None:
        return Check(
            "room for checkpoints", "good", f"{found}; with a model or a recipe, a checkpoint's size is compared"
        )
    found += f", and a checkpoint takes {size / GIB:,.2f} GiB"
    if free < size:
        return Check("room for checkpoints", "bad", found, "make room, or give another --ckpt_save_path")
    if free < ROOM_FOR_CHECKPOINTS * size:
        advice = "make room, or keep few (--keep_last=1): a new one is there before an old one goes"
        return Check("room for checkpoints", "look at", found, advice)
    return Check("room for checkpoints", "good", found)


def _check_save_rate(config: DoctorConfig, size: int | None, rate: float, folder: Path) -> Check:
    found = f"{rate:.3g} GiB/s, all processes together, in {folder}"
    if size is None:
        return Check("saves", "good", found)
    seconds = size / GIB / rate
    found += f": {seconds:,.1f} s a checkpoint of {name_of_model(config.model)}"
    if seconds > LONG_SAVE_SECONDS:
        return Check("saves", "look at", found, "a faster disk, --async_save=true, or a longer --checkpoint_interval")
    return Check("saves", "good", found)
