"""`pretraining.Trainer` in this process: training, evaluation and results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainers import SETTINGS, WithHits, metrics_of, trainer
from training_runs import losses_of, write_two_datasets

from pretraining import Trainer, load_model
from pretraining.cli import main
from pretraining.data.batch import ModelInputs
from pretraining.durations import Duration
from pretraining.errors import CheckpointError, ConfigError, LaunchError
from pretraining.observability.metrics import Outputs


def test_a_run_equals_that_of_the_command_and_its_result_has_losses_and_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = trainer(Trainer, tmp_path / "python", eval_interval=2).train()
    out = capsys.readouterr().out
    assert "step 4/4  loss" in out and "Finished 4 steps" in out
    flags = [f"{name}={value}" for name, value in SETTINGS.items()]
    main(["train", *flags, "eval_interval=2", f"ckpt_save_path={tmp_path / 'command'}"])
    assert metrics_of(tmp_path / "python") == metrics_of(tmp_path / "command")
    assert not [name for line in metrics_of(tmp_path / "python") for name in line if "custom" in name]
    *_, evaluation = metrics_of(tmp_path / "python")
    assert (result.status, result.step, result.total_steps, result.tokens_seen) == ("finished", 4, 4, 256)
    assert result.loss == losses_of(tmp_path / "python")[-1] == result.metrics["loss"]
    assert result.evaluation_loss == evaluation["evaluation_loss"] == result.metrics["evaluation_loss"]
    assert result.best_evaluation_loss is not None and result.best_evaluation_loss <= result.evaluation_loss
    assert result.run_path == tmp_path / "python" and "custom" not in repr(result)
    assert result.checkpoint == tmp_path / "python" / "checkpoints" / "step_4_ckp"
    assert result.metrics_file.read_text().count("\n") == 6
    again = trainer(Trainer, tmp_path / "python", eval_interval=2).train()
    assert (again.step, again.loss, again.metrics) == (4, result.loss, {})


def test_metrics_of_a_subclass_are_in_reports_and_evaluations_by_set(tmp_path: Path) -> None:
    write_two_datasets(tmp_path / "data")
    given = {"data_path": tmp_path / "data", "sep_token": 0, "logical_shards": 8, "use_dummy_dataset": False}
    more = {"global_batch_size": 4, "batch_size": 1, "report_interval": 2, "eval_interval": 2}
    mine = trainer(WithHits, tmp_path / "run", **given, **more)
    result = mine.train()
    reports = metrics_of(tmp_path / "run")
    assert len(reports) == 4
    for report in reports:
        begin = "evaluation_" if "evaluation_loss" in report else ""
        hits = {name: value for name, value in report.items() if name.startswith(f"{begin}custom/hits")}
        sets = ["/first", "/second"] if begin else []
        assert hits.keys() == {f"{begin}custom/hits{each}" for each in ("", *sets)}
        for each in ("", *sets):
            assert hits[f"{begin}custom/hits{each}"] == pytest.approx(report[f"{begin}token_accuracy{each}"])
    found = mine.evaluate()
    assert (found["step"], found["checkpoint"]) == (4, str(result.checkpoint))
    assert {name: found[name] for name in found if name.startswith("evaluation_")} == pytest.approx(
        {name: result.metrics[name] for name in result.metrics if name.startswith("evaluation_") and "/" not in name}
        | {"evaluation_custom/hits": result.metrics["evaluation_custom/hits"]}
    )
    assert found["sets"]["second"]["custom/hits"] == pytest.approx(found["sets"]["second"]["token_accuracy"])


@pytest.mark.thorough
@pytest.mark.parametrize("levers", [{"use_torch_compile": True}, {"fsdp_activation_checkpointing": True}])
def test_hidden_states_come_from_compiled_and_checkpointed_blocks_too(tmp_path: Path, levers: dict[str, bool]) -> None:
    class Norms(Trainer):
        needs_hidden_states = True

        def extra_metrics(self, outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
            assert outputs.hidden_states is not None
            norms = outputs.hidden_states.norm(dim=-1)
            return {"norm": (norms.sum(), norms.numel())}

    few = {"num_steps": 2, "held_out_fraction": 0.0}
    plain, lever = (
        trainer(Norms, tmp_path / name, **few, **more).train().metrics
        for name, more in (("plain", {}), ("lever", levers))
    )
    assert lever["custom/norm"] == pytest.approx(plain["custom/norm"], rel=1e-5)


def test_settings_come_from_recipes_and_on_top_from_python(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("num_steps: 7\nlearning_rate: 1e-3\nhidden_size: 64\n")
    (tmp_path / "second.yaml").write_text("num_steps: 8\n")
    given: dict[str, Any] = {"run_steps": None, "mixed_precision": False, "weights": (3, 1), "data_path": tmp_path}
    given |= {"hidden_size": 128, "datasets": ["web", "code"], "num_key_value_heads": "4"}
    config = Trainer.from_recipe(tmp_path / "first.yaml", str(tmp_path / "second.yaml"), **given).config
    assert (str(config.run.num_steps), config.model.hidden_size, config.optimizer.learning_rate) == ("8", 128, 1e-3)
    assert config.parallel.mixed_precision is False and config.run.run_steps is None
    assert (config.data.datasets, config.data.weights) == (("web", "code"), (3.0, 1.0))
    assert config.data.data_path == str(tmp_path)


def test_all_mistakes_in_the_settings_come_in_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        Trainer.from_recipe(num_stepz=3, learning_rate="fast", use_dummy_dataset=True)
    assert len(refused.value.problems) == 2
    config = trainer(Trainer, tmp_path).config
    with pytest.raises(ConfigError) as refused:
        Trainer(replace(config, batch=replace(config.batch, batch_size=0), run=replace(config.run, num_steps=3.5)))
    assert len(refused.value.problems) == 2


def test_paths_and_lengths_may_be_given_as_recipes_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = trainer(Trainer, tmp_path, tie_word_embeddings=True).config
    given = replace(
        config,
        evaluation=replace(config.evaluation, eval_datasets=("~/a", "b")),
        run=replace(config.run, num_steps=3),
        report=replace(config.report, report_interval="2ksteps"),
    )
    made = Trainer(given).config
    assert made.evaluation.eval_datasets == (f"{tmp_path}/a", "b") and Trainer(made).config == made
    assert (made.run.num_steps, made.report.report_interval) == (Duration(3, "steps"), Duration(2000, "steps"))
    mine = Trainer(replace(config, checkpoint=replace(config.checkpoint, ckpt_save_path=Path("~/run"))))
    assert mine.train().run_path == tmp_path / "run"
    assert mine.save("~/export") == tmp_path / "export" and (tmp_path / "export" / "config.json").is_file()
    assert load_model("~/run").state_dict().keys() == load_model("~/export").state_dict().keys()
    assert mine.evaluate("~/run")["step"] == 4
    for wrong in (replace(config, run=replace(config.run, num_steps="often")), "~nobody_of_this_name/run"):
        with pytest.raises(ConfigError):
            _ = mine.evaluate(wrong) if isinstance(wrong, str) else Trainer(wrong)


def test_a_model_continues_token_ids_and_is_saved_for_others(tmp_path: Path) -> None:
    made = trainer(Trainer, tmp_path / "run", tie_word_embeddings=True)
    for early in (made.evaluate, lambda: made.generate([1]), lambda: made.save(tmp_path / "early")):
        with pytest.raises(CheckpointError) as refused:
            early()
        assert refused.value.path == tmp_path / "run"
    made.train()
    new = made.generate([1, 2, 3], 5)
    assert len(new) == 5 and new == made.generate((1, 2, 3), 5, seed=0)
    greedy = made.generate([1, 2, 3], 3, temperature=0.0, path=tmp_path / "run" / "checkpoints" / "step_4_ckp")
    tokens, model = [1, 2, 3], load_model(tmp_path / "run")
    with torch.no_grad():
        for _ in greedy:
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert tokens[3:] == greedy
    for prompt, tokens_wanted in (("some text", 5), ([], 5), ([1], 0)):
        with pytest.raises(ConfigError):
            made.generate(prompt, tokens_wanted)
    assert made.save(tmp_path / "hf", dtype="float32") == tmp_path / "hf"
    saved = load_model(tmp_path / "hf")
    assert torch.equal(saved.lm_head.weight, model.lm_head.weight)
    assert made.evaluate(tmp_path / "hf")["evaluation_loss"] == pytest.approx(made.evaluate()["evaluation_loss"])
    other = trainer(Trainer, tmp_path / "other", ckpt_load_path=tmp_path / "hf", tie_word_embeddings=True)
    assert other.generate([1, 2, 3], 3, temperature=0.0) == greedy  # where it would start


def test_what_a_trainer_cannot_do_is_refused(tmp_path: Path) -> None:
    for setting in ("eval_only", "dry_run"):
        with pytest.raises(ConfigError):
            trainer(Trainer, tmp_path, **{setting: True}).train()
    with pytest.raises(ConfigError):
        made = trainer(Trainer, tmp_path / "run", held_out_fraction=0.0, num_steps=1)
        made.train()
        made.evaluate()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(LaunchError):
        trainer(Trainer, tmp_path).train()
    dist.destroy_process_group()
