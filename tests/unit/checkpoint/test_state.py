from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from pretraining.checkpoint.state import Manifest, check_same_model, file_of_tensor
from pretraining.config.training import ModelConfig
from pretraining.config.variants import resolve_shape
from pretraining.errors import CheckpointError

SHAPE = resolve_shape(ModelConfig(model_variant="tiny"))


def manifest() -> Manifest:
    return Manifest(
        format_version=1,
        step=3,
        tokens_seen=300,
        seconds=1.5,
        loss=2.5,
        evaluation_loss=None,
        data={"next_sample": 12},
        global_batch_size=4,
        model=asdict(SHAPE),
        world={"processes": 1, "sharding_strategy": "fsdp"},
        torch_version="2.13.0",
        files={},
        config="",
    )


def test_a_manifest_reads_back_equal() -> None:
    assert Manifest.parse(manifest().document(), "m.json") == manifest()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "not the manifest of a checkpoint"),
        ({"step": 3}, "no format_version"),
        ({"format_version": 99}, "format version 99; this version of pretraining reads 1"),
        ({"format_version": 1, "step": 3}, "lacks config, data.*damaged"),
    ],
)
def test_what_is_no_manifest_is_refused_by_name(document: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Manifest.parse(document, "m.json")


def test_a_checkpoint_of_another_model_is_refused_with_each_difference() -> None:
    check_same_model(manifest(), SHAPE, "here")
    other = replace(SHAPE, hidden_size=512, vocab_size=7)
    with pytest.raises(CheckpointError) as raised:
        check_same_model(manifest(), other, "runs/a")
    assert "hidden_size: 256 in the checkpoint, 512 in this run" in str(raised.value)
    assert "vocab_size: 32000 in the checkpoint, 7 in this run" in str(raised.value)
    assert "runs/a" in str(raised.value)


def test_each_block_has_a_file_and_the_rest_has_one() -> None:
    names = [
        "lm_head.weight",
        "model.layers.0.mlp.up_proj.weight",
        "optimizer.step.model.layers.11.mlp.up_proj.weight",
        "optimizer.step.model.norm.weight",
    ]
    assert list(file_of_tensor(names).values()) == [1, 2, 13, 1]
