"""torchtitan's Trainer with the project's shapes, rows and weights, for `against_torchtitan.py`.

All of these are set through torchtitan's extension points: model specification, data loader, model state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import JobConfig
from torchtitan.models.llama3 import Llama3StateDictAdapter, TransformerModelArgs, get_train_spec
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer

from pretraining.config.batch_sizes import resolve_batch_sizes
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape, resolve_shape
from pretraining.distributed.parallelize import compute_dtype
from pretraining.launch.layout import port_of_name
from scripts.benchmark.common import batches_in_memory, device, initial_model, place
from scripts.benchmark.race import Turn

NAME = "race"  # name of model and size in torchtitan's registry


def train(config: TrainConfig, turn: Turn) -> None:
    shape = resolve_shape(config.model)
    if place()[1] == 1:  # torchtitan expects torchrun's variables
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone, MASTER_PORT=str(port_of_name(str(config.checkpoint.folder))))
    spec = get_train_spec()
    spec.model_args = {NAME: _arguments_of(shape)}
    spec.build_tokenizer_fn = None
    spec.build_dataloader_fn = lambda **_: Rows(config, shape)
    register_train_spec(NAME, spec)
    trainer = InTurns(_job(config))
    trainer.turn = turn
    _set_weights(trainer, config)
    trainer.train()


class Rows(BaseDataLoader):  # type: ignore[misc]  # torchtitan is not installed for mypy
    """This rank's micro-batches, in memory."""

    def __init__(self, config: TrainConfig, shape: LlamaShape) -> None:
        self._micro_batches: list[tuple[dict[str, torch.Tensor], torch.Tensor]] = []
        for step in batches_in_memory(config, shape, *place()):
            for micro_batch in step:
                inputs = micro_batch.model_inputs()
                self._micro_batches.append(({"input": inputs.tokens_BS}, inputs.labels_BS))

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        return iter(self._micro_batches)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class InTurns(Trainer):  # type: ignore[misc]  # as above
    """torchtitan's Trainer, which also takes turns and sums losses on the device."""

    turn: Turn

    def train_step(self, data_iterator: Any) -> None:
        every = self.job_config.metrics.log_freq
        if self.step == 1:
            self._losses, self._reported = torch.zeros((), device=self.device), None
        elif (self.step - 1) % every == 0:
            if torch.distributed.get_world_size() > 1:
                torch.distributed.all_reduce(self._losses)
            self._reported = self._losses.item() / every
            self._losses.zero_()
        self.turn.before_step(self._reported)
        super().train_step(data_iterator)

    def forward_backward_step(self, **arguments: Any) -> torch.Tensor:
        loss: torch.Tensor = super().forward_backward_step(**arguments)
        self._losses += loss.detach()
        return loss


def _arguments_of(shape: LlamaShape) -> TransformerModelArgs:
    # torchtitan computes the feed-forward size as factor x 8/3 x hidden size, rounded up to a multiple.
    eight_thirds = int(8 * shape.hidden_size / 3)
    scaling = RoPEScalingArgs(scaling_factor=1.0)  # torchtitan always scales rotary frequencies; 1.0 changes nothing
    if shape.rope_scaling is not None:
        scaling = RoPEScalingArgs(
            scaling_factor=shape.rope_scaling.factor,
            low_freq_factor=shape.rope_scaling.low_freq_factor,
            high_freq_factor=shape.rope_scaling.high_freq_factor,
            original_max_position_embeddings=shape.rope_scaling.original_max_position_embeddings,
        )
    return TransformerModelArgs(
        dim=shape.hidden_size,
        n_layers=shape.num_hidden_layers,
        n_heads=shape.num_attention_heads,
        n_kv_heads=shape.num_key_value_heads,
        vocab_size=shape.vocab_size,
        multiple_of=shape.intermediate_size,
        ffn_dim_multiplier=min(1.0, 0.999 * shape.intermediate_size / eight_thirds),
        norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        rope_scaling_args=scaling,
        max_seq_len=shape.max_position_embeddings,
    )


def _job(config: TrainConfig) -> JobConfig:
    _, ranks = place()
    plan = resolve_batch_sizes(config.batch, ranks)
    job = JobConfig()
    job.job.dump_folder = config.checkpoint.ckpt_save_path
    job.model.name = job.model.flavor = NAME
    job.training.local_batch_size = plan.micro_batch_size
    job.training.global_batch_size = plan.global_batch_size
    job.training.seq_len = config.data.seq_length
    job.training.steps = int(config.run.num_steps.amount)
    job.training.max_norm = config.optimizer.grad_clip_thresh
    job.training.mixed_precision_param = str(compute_dtype(config.parallel, device())).removeprefix("torch.")
    job.optimizer.lr = config.optimizer.peak_learning_rate
    job.optimizer.weight_decay = config.optimizer.decay
    job.optimizer.beta1, job.optimizer.beta2 = config.optimizer.adam_beta1, config.optimizer.adam_beta2
    job.optimizer.eps = config.optimizer.adam_epsilon
    job.lr_scheduler.warmup_steps, job.lr_scheduler.min_lr_factor = 0, 1.0
    job.metrics.log_freq = int(config.report.report_interval.amount)
    job.compile.enable = config.parallel.use_torch_compile  # the loss, too: its default
    job.activation_checkpoint.mode = "none"
    if config.parallel.fsdp_activation_checkpointing:
        spacing = config.parallel.selective_checkpointing
        job.activation_checkpoint.mode = "full" if spacing == "1" else "selective"
        job.activation_checkpoint.selective_ac_option = spacing
    strategy = config.parallel.sharding_strategy
    if strategy == "ddp":
        job.parallelism.data_parallel_replicate_degree, job.parallelism.data_parallel_shard_degree = ranks, 1
    elif strategy == "zero2":
        job.parallelism.fsdp_reshard_after_forward = "never"
    return job


def _set_weights(trainer: Trainer, config: TrainConfig) -> None:
    state = Llama3StateDictAdapter(trainer.model_args, None).from_hf(initial_model(config).state_dict())
    [model] = trainer.model_parts
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
