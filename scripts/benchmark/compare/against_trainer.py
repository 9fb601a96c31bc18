"""Tokens/s of the project against `transformers`: LlamaForCausalLM and its Trainer.

    python -m scripts.benchmark.compare.against_trainer
    python -m scripts.benchmark.compare.against_trainer --processes=2
    python -m scripts.benchmark.compare.against_trainer --model_variant=125m --batch_size=16 --use_torch_compile=true

Both start from the same weights and train the same shape on the same micro-batches, with fused AdamW, gradient clipping
and SDPA attention. Precision, compilation and activation checkpointing are the same. Both report every 10 steps, and
neither evaluates or saves. Equal losses at the end show that both did the same work. The Trainer has its rows in memory
and writes no curves; the project reads batches from its loader and writes metrics.jsonl and TensorBoard files.
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any

import torch
import transformers

from pretraining.config.batch_sizes import resolve_batch_sizes
from pretraining.config.training import ALL_BLOCKS, TrainConfig
from pretraining.config.variants import LlamaShape, resolve_shape
from pretraining.distributed.parallelize import compute_dtype
from pretraining.model.hf import config_document
from scripts.benchmark.common import batches_in_memory, device, initial_model, place
from scripts.benchmark.race import Turn, parse_race, project, race, race_settings


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences in memory with shifted labels, so that both sides learn from the same number of tokens.

    The Trainer distributes batches to the ranks in turn, so the micro-batches of the ranks alternate here.
    """

    def __init__(self, config: TrainConfig, shape: LlamaShape) -> None:
        self._rows: list[dict[str, torch.Tensor]] = []
        _, ranks = place()
        for step in zip(*(batches_in_memory(config, shape, rank, ranks) for rank in range(ranks)), strict=True):
            for micro_batch in chain.from_iterable(zip(*step, strict=True)):
                inputs = micro_batch.model_inputs()  # a dummy row is one document: no mask is needed
                for inputs_S, labels_S in zip(inputs.tokens_BS, inputs.labels_BS, strict=True):
                    self._rows.append({"input_ids": inputs_S, "labels": labels_S, "shift_labels": labels_S})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._rows[index]


class TakesTurns(transformers.TrainerCallback):  # type: ignore[misc]
    """A callback that makes the Trainer wait for its turns."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._loss: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._turn.before_step(self._loss)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self._loss = float(logs["loss"])


def trainer(config: TrainConfig, turn: Turn) -> None:
    _, ranks = place()
    shape, plan = resolve_shape(config.model), resolve_batch_sizes(config.batch, ranks)
    in_bfloat16 = compute_dtype(config.parallel, device()) == torch.bfloat16
    arguments = transformers.TrainingArguments(
        output_dir=config.checkpoint.ckpt_save_path,
        per_device_train_batch_size=plan.micro_batch_size,
        gradient_accumulation_steps=plan.grad_accum_steps,
        max_steps=int(config.run.num_steps.amount),
        optim="adamw_torch_fused",
        learning_rate=config.optimizer.peak_learning_rate,
        lr_scheduler_type="constant",
        weight_decay=config.optimizer.decay,
        adam_beta1=config.optimizer.adam_beta1,
        adam_beta2=config.optimizer.adam_beta2,
        adam_epsilon=config.optimizer.adam_epsilon,
        max_grad_norm=config.optimizer.grad_clip_thresh,
        bf16=in_bfloat16,
        torch_compile=config.parallel.use_torch_compile,
        activation_checkpointing=config.parallel.fsdp_activation_checkpointing,
        use_cpu=device().type == "cpu",
        ddp_backend="gloo" if ranks > 1 and device().type == "cpu" else None,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=device().type == "cuda",
        logging_steps=int(config.report.report_interval.amount),
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
    )
    transformers.Trainer(
        model=_hugging_face_model(config, shape),
        args=arguments,
        train_dataset=Rows(config, shape),
        callbacks=[TakesTurns(turn)],
    ).train()


def _hugging_face_model(config: TrainConfig, shape: LlamaShape) -> Any:
    """Return LlamaForCausalLM of a shape, with the project's initial weights."""
    document = config_document(shape, "float32", 0, None, None) | {"use_cache": False}
    described = transformers.AutoConfig.for_model(**document)
    model = transformers.AutoModelForCausalLM.from_config(described, attn_implementation="sdpa")
    model.load_state_dict(initial_model(config).state_dict())
    return model


if __name__ == "__main__":
    flags, settings = parse_race("The project against LlamaForCausalLM and the Trainer of transformers.")
    if race_settings(settings, flags).parallel.selective_checkpointing != ALL_BLOCKS:
        sys.exit("error: the Trainer recomputes all blocks or none: remove --selective_checkpointing")
    print(f"against   transformers {transformers.__version__}")
    race({"project": project, "Trainer": trainer}, settings, flags)
