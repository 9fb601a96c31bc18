"""Opening of what a run needs before it can be planned: checks, dimensions, data, tasks, evaluators.

    complete settings, start point, job -> `open_run` -> Opened -> `plan_run`

The checks come first, and a start counts only after them, so that a refused start leaves nothing behind. All functions
are collective calls, and raise errors on all ranks alike.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape, resolve_shape
from pretraining.distributed.dims import Dims, build_dims
from pretraining.distributed.float8 import check_float8
from pretraining.distributed.parallelize import compute_dtype
from pretraining.distributed.processes import Processes, on_every_rank
from pretraining.distributed.watchdog import collective_timeout
from pretraining.errors import ConfigError
from pretraining.evaluation.evaluators import Evaluators, open_evaluators
from pretraining.evaluation.generation import TextSampler, open_sampler
from pretraining.evaluation.tasks import Tasks, open_tasks
from pretraining.model.attention import Attention
from pretraining.model.kernels import has_kernel_for_documents
from pretraining.model.llama import block_class
from pretraining.observability.environment import record_environment
from pretraining.observability.metrics import Metrics
from pretraining.optim.registry import try_optimizer
from pretraining.train.job import Job
from pretraining.train.memory_check import check_memory, explain_out_of_memory
from pretraining.train.open_data import OpenedData, open_data


@dataclass(frozen=True)
class Opened:
    """Everything that a run has open.

    Attributes:
        config: complete settings that it was opened for.
        data: training datasets and evaluation folders.
        tasks: benchmark tasks to evaluate on; None = none.
        evaluators: user-defined evaluators; None = none.
        sampler: text generator; None = no generated text.
    """

    config: TrainConfig
    processes: Processes
    dims: Dims
    data: OpenedData
    tasks: Tasks | None = None
    evaluators: Evaluators | None = None
    sampler: TextSampler | None = None


def open_run(
    config: TrainConfig,
    start: CheckpointRef | None,
    job: Job,
    before: Opened | None = None,
    index_folder: str | None = None,
) -> Opened:
    """Check a run, count its start, and open what it needs.

    Args:
        config: complete settings.
        before: opened earlier in this start: returned if it was opened for the same settings.
        index_folder: as in `open_data`.

    Raises:
        Preempted: a stop is requested.
        PretrainError: the run cannot train with these settings, or its data cannot be opened.
    """
    processes = job.processes
    if before is not None and before.config == config:
        job.begin(config, start)
        return before
    sampler = open_sampler(config, processes)  # first, since a bad path is a quick error
    dims = check_run(config, processes, None if before is None else before.dims)
    tasks = open_tasks(config, processes, dims, config.data)
    evaluators = open_evaluators(config, job.evaluators)
    job.begin(config, start)
    earlier = {} if start is None or start.weights_only else start.manifest.data.get("datasets", {})
    with explain_out_of_memory(config, dims, processes):
        data = open_data(config, processes, earlier, index_folder)
    if job.lease is not None:
        record_environment(config.checkpoint.folder, 0 if start is None else start.step, job.launcher, processes)
    return Opened(config, processes, dims, data, tasks, evaluators, sampler)


def check_run(config: TrainConfig, processes: Processes, dims: Dims | None = None) -> Dims:
    """Check that the model can train with these settings; return the job's dimensions, built unless they are given.

    Raises:
        ConfigError: the device does not support the kernels, the optimizer or a score cannot be built, or the model
            does not fit in memory.
    """
    shape = resolve_shape(config.model)
    check_kernels(config, shape, processes.device)
    on_every_rank(lambda: try_optimizer(config.optimizer))
    on_every_rank(lambda: Metrics(config.evaluation.extra_scores))
    built = build_run_dims(config, processes) if dims is None else dims
    on_every_rank(lambda: check_memory(config, shape, built, processes))
    return built


def build_run_dims(config: TrainConfig, processes: Processes) -> Dims:
    """Build the dimensions of a run, and enable deterministic kernels under `--deterministic`; a collective call."""
    if config.run.deterministic:
        use_deterministic_kernels()
    return build_dims(config.parallel, processes, timeout=collective_timeout(config.guard))


def check_kernels(config: TrainConfig, shape: LlamaShape, device: torch.device) -> None:
    """Refuse settings that no kernel of the device or attention of the block supports; a collective call."""
    if (scaling := config.parallel.float8) is not None:
        on_every_rank(lambda: check_float8(scaling, device))
    dtype = compute_dtype(config.parallel, device)
    is_fixed = not config.data.document_mask or has_kernel_for_documents(device, dtype, shape.head_dim)
    if config.parallel.use_torch_compile and not is_fixed:
        raise ConfigError(
            "--use_torch_compile=true needs fixed shapes, and --document_mask=true changes them in each step on "
            f"{device.type} in {str(dtype).removeprefix('torch.')} with head size {shape.head_dim}. Drop one of them"
        )
    if config.parallel.context_parallel_size > 1 and shape.block is not None:
        on_every_rank(lambda: check_shared_attention(shape))


def check_shared_attention(shape: LlamaShape) -> None:
    """Check that a user-defined block can attend to tokens of other ranks.

    Raises:
        ConfigError: its attention is no subclass of `Attention`, and would see the tokens of this rank alone.
    """
    with torch.device("meta"):
        block = block_class(shape)(shape, 0)
    if not any(isinstance(module, Attention) for module in block.modules()):
        raise ConfigError(
            f"--block={shape.block} has no module of pretraining.model.attention.Attention, and other attention would "
            "see only this rank's part of a sequence: use it or a subclass, or give --context_parallel_size=1"
        )


def use_deterministic_kernels() -> None:
    """Make PyTorch use kernels that give the same bits each time."""
    # Libraries read these variables at their first use, which is later. NCCL picks algorithms by measuring otherwise.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # Filling every new buffer finds reads of uninitialised memory, but costs time and makes nothing deterministic.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
