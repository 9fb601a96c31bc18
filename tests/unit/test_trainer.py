"""`pretraining.Trainer` in this process: what it trains and returns, and that the process is as it was before."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, heed_interrupts, plain_environment
from training_runs import TINY, losses_of, write_two_datasets

from pretraining import TrainConfig, Trainer, load_model
from pretraining.cli import main
from pretraining.data.batch import ModelInputs
from pretraining.errors import CheckpointError, ConfigError, DivergenceError, LaunchError, PathError, Preempted
from pretraining.model.llama import Llama
from pretraining.observability.custom_metrics import Outputs
from pretraining.train import run as run_module
from pretraining.train.build import Job

SETTINGS: dict[str, Any] = dict(flag.split("=") for flag in TINY) | {
    "use_dummy_dataset": True,
    "num_steps": 4,
    "held_out_fraction": 0.2,
    "eval_batches": 2,
}


class WithHits(Trainer):
    """Counts hits, as token_accuracy does."""

    def extra_metrics(self, outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        return {"hits": (outputs.hits.sum(), outputs.valid_tokens)}


class Calling(WithHits):
    """Calls something when the metrics of a micro-batch are asked for, which is once a step here."""

    call: Callable[[int], object] = staticmethod(lambda step: None)
    calls = 0

    def extra_metrics(self, outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        self.calls += 1
        self.call(self.calls)
        return super().extra_metrics(outputs, batch)


def state_of_the_process() -> dict[str, Any]:
    """All that a run changes in its process while it is under way."""
    logger = logging.getLogger("pretraining")
    return {
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        # The compiler's progress bars have a thread for as long as the process.
        "threads": sorted(thread.name for thread in threading.enumerate() if thread.name != "tqdm_monitor"),
        "group": dist.is_initialized(),
        "logging": (list(logger.handlers), logger.level),
        "streams": (sys.stdout, sys.stderr),
        "environment": {name: os.environ[name] for name in os.environ if name != "PYTEST_CURRENT_TEST"},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filling": cast(Any, torch.utils.deterministic).fill_uninitialized_memory,
        "benchmark": torch.backends.cudnn.benchmark,
        "compute threads": torch.get_num_threads(),
        "collector": (gc.isenabled(), gc.get_freeze_count()),
        "gradients": torch.is_grad_enabled(),
    }


@pytest.fixture(autouse=True)
def same_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test leaves the process as it was; Ctrl-C is Python's, also where the tests run in the background."""
    before_pytest = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        gc.collect()
        before = state_of_the_process()
        yield
        assert state_of_the_process() == before
    finally:
        signal.signal(signal.SIGINT, before_pytest)


def trainer(kind: type[Trainer], run: Path, **settings: Any) -> Any:
    return kind.from_recipe(**(SETTINGS | settings), ckpt_save_path=run)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    rates = ("_second", "time", "per_day", "memory", "data_share")
    return [{name: line[name] for name in line if not any(word in name for word in rates)} for line in lines]


def test_a_run_is_that_of_the_command_line_and_its_result_says_what_came_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = trainer(Trainer, tmp_path / "python", eval_interval=2).train()
    out = capsys.readouterr().out
    assert "step 4/4  loss" in out and "Finished 4 steps" in out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", lambda *_: None)  # a command listens until its process ends
        patch.setattr("pretraining.cli.outlive_readers", lambda: None)
        flags = [f"{name}={value}" for name, value in SETTINGS.items()]
        main(["train", *flags, "eval_interval=2", f"ckpt_save_path={tmp_path / 'command'}"])
    logging.getLogger("pretraining").handlers.clear()
    logging.getLogger("pretraining").setLevel(logging.NOTSET)
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


def test_runs_follow_each_other_and_the_same_one_goes_on(tmp_path: Path) -> None:
    whole = trainer(WithHits, tmp_path / "whole", num_steps=6).train()
    first = trainer(WithHits, tmp_path / "parts", num_steps=6, run_steps=2).train()
    assert (first.status, first.step, first.total_steps) == ("finished", 2, 6)
    second = trainer(WithHits, tmp_path / "parts", num_steps=6).train()
    assert second.step == 6 and losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    assert second.metrics["custom/hits"] == whole.metrics["custom/hits"]
    again = trainer(WithHits, tmp_path / "parts", num_steps=6).train()
    assert (again.step, again.loss, again.metrics) == (6, second.loss, {})


def test_a_run_leaves_no_model_behind_also_where_it_computes_with_copies(tmp_path: Path) -> None:
    trainer(WithHits, tmp_path, mixed_precision=True, num_steps=1).train()
    assert not [each for each in gc.get_objects() if issubclass(type(each), Llama)]


def test_a_run_leaves_the_switches_of_torch_and_the_environment_as_they_were(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    seen: list[tuple[bool, int, bool]] = []

    class Looking(WithHits):
        def extra_metrics(self, outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
            state = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
            seen.append((*state, "CUBLAS_WORKSPACE_CONFIG" in os.environ))
            return super().extra_metrics(outputs, batch)

    trainer(Looking, tmp_path / "first", num_steps=1, deterministic=True, cpu_threads=before + 1).train()
    trainer(Looking, tmp_path / "second", num_steps=1).train()
    assert (seen[0], seen[-1]) == ((True, before + 1, True), (False, before, False))


def test_a_run_after_one_that_failed_finds_nothing_of_it(tmp_path: Path) -> None:
    class Failing(WithHits):
        def extra_metrics(self, outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
            raise KeyError("a mistake of mine")

    with pytest.raises(KeyError, match="a mistake of mine") as failed:
        trainer(Failing, tmp_path / "run").train()
    gc.collect()
    # A notebook keeps its last error.
    assert failed.value.__traceback__ is not None
    assert not [each for each in gc.get_objects() if issubclass(type(each), Llama)]
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match="hits is a pair with a tensor of shape"):
        trainer(type("Bad", (Trainer,), {"extra_metrics": lambda *_: {"hits": (torch.ones(2), 1)}}), tmp_path).train()
    with pytest.raises(DivergenceError):
        trainer(WithHits, tmp_path / "nan", learning_rate="1e30", max_skipped_steps=1, num_steps=9).train()
    result = trainer(WithHits, tmp_path / "run").train()
    assert result.status == "finished" and json.loads((tmp_path / "run" / "run_status.json").read_text())["starts"] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_the_step_that_is_under_way_and_the_next_run_goes_on(
    tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"num_steps": 6, "held_out_fraction": 0.0}
    trainer(Trainer, tmp_path / "whole", **few).train()
    stopped = trainer(Calling, tmp_path / "stopped", **few)
    stopped.call = lambda step: signal.raise_signal(number) if step == 2 else None
    if number == signal.SIGINT:  # the user wants no more of the script or the cell either
        with pytest.raises(KeyboardInterrupt):
            stopped.train()
    else:
        assert (result := stopped.train()).status == "preempted" and result.step == 3
    said = "Interrupted" if number == signal.SIGINT else "Preempted"
    assert f"{said} at step 3 of 6" in capsys.readouterr().out
    assert stopped._source(None) == str(tmp_path / "stopped")
    assert trainer(Trainer, tmp_path / "stopped", **few).train().status == "finished"
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "whole")


def test_a_second_interrupt_ends_the_run_at_once(tmp_path: Path) -> None:
    stopped = trainer(Calling, tmp_path, held_out_fraction=0.0)

    def interrupt_twice(step: int) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    stopped.call = interrupt_twice
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert [report["step"] for report in metrics_of(tmp_path)] == [1]
    assert trainer(Trainer, tmp_path, held_out_fraction=0.0).train().step == 4


def test_an_interrupt_in_the_last_step_ends_what_comes_after_the_run(tmp_path: Path) -> None:
    stopped = trainer(Calling, tmp_path, held_out_fraction=0.0)
    stopped.call = lambda step: signal.raise_signal(signal.SIGINT) if step == 4 else None
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert json.loads((tmp_path / "run_status.json").read_text())["status"] == "finished"


def test_an_interrupt_before_the_first_step_is_pythons_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any) -> None:
        assert dist.is_initialized()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run_module, "train_to_the_end", build)
    with pytest.raises(KeyboardInterrupt):
        trainer(Trainer, tmp_path).train()


def test_a_run_that_is_told_to_end_before_its_first_step_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(config: TrainConfig, job: Job) -> None:
        signal.raise_signal(signal.SIGTERM)
        job.stop_requests.end_before_training()

    monkeypatch.setattr(run_module, "train_to_the_end", build)
    with pytest.raises(Preempted, match=r"before training began \(SIGTERM\)"):
        trainer(Trainer, tmp_path).train()


def test_a_run_in_another_thread_hears_no_signals_and_trains(tmp_path: Path) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(trainer(WithHits, tmp_path).train()))
    thread.start()
    thread.join()
    assert results[0].status == "finished"


def test_settings_come_from_recipes_and_on_top_from_python(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("num_steps: 7\nlearning_rate: 1e-3\nhidden_size: 64\n")
    (tmp_path / "second.yaml").write_text("num_steps: 8\n")
    made = Trainer.from_recipe(
        tmp_path / "first.yaml",
        str(tmp_path / "second.yaml"),
        hidden_size=128,
        run_steps=None,
        mixed_precision=False,
        datasets=["web", "code"],
        weights=(3, 1),
        num_key_value_heads="4",
        data_path=tmp_path,
    )
    config = made.config
    assert (str(config.run.num_steps), config.model.hidden_size, config.optimizer.learning_rate) == ("8", 128, 1e-3)
    assert config.parallel.mixed_precision is False and config.run.run_steps is None
    assert (config.data.datasets, config.data.weights, config.data.data_path) == (
        ("web", "code"),
        (3.0, 1.0),
        str(tmp_path),
    )


def test_all_mistakes_in_the_settings_come_in_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        Trainer.from_recipe(num_stepz=3, learning_rate="fast", use_dummy_dataset=True)
    assert len(refused.value.problems) == 2
    config = trainer(Trainer, tmp_path).config
    with pytest.raises(ConfigError) as refused:
        Trainer(replace(config, batch=replace(config.batch, batch_size=0), run=replace(config.run, num_steps=3)))
    assert len(refused.value.problems) == 2 and "as Duration.parse makes it" in str(refused.value)


def test_a_model_goes_on_with_token_ids_or_text_and_is_saved_for_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trainer(Trainer, tmp_path / "run", tie_word_embeddings=True)
    for early in (made.evaluate, lambda: made.generate([1]), lambda: made.save(tmp_path / "early")):
        with pytest.raises(CheckpointError, match=r"run holds no checkpoint: call train\(\) first, or name a path"):
            early()
    made.train()
    new = made.generate([1, 2, 3], 5)
    assert len(new) == 5 and new == made.generate((1, 2, 3), 5, seed=0)
    greedy = made.generate([1, 2, 3], 3, temperature=0.0, path=tmp_path / "run" / "checkpoints" / "step_4_ckp")
    tokens, model = [1, 2, 3], load_model(tmp_path / "run")
    with torch.no_grad():
        for _ in greedy:
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert tokens[3:] == greedy
    with pytest.raises(ConfigError, match="comes without a tokenizer"):
        made.generate("some text")
    with pytest.raises(ConfigError, match="needs a token id to begin with"):
        made.generate([])
    with pytest.raises(ConfigError, match="max_new_tokens"):
        made.generate([1], 0)
    capsys.readouterr()
    assert made.save(tmp_path / "hf", dtype="float32") == tmp_path / "hf"
    assert "from_pretrained" in capsys.readouterr().out
    saved = load_model(tmp_path / "hf")
    assert torch.equal(saved.lm_head.weight, model.lm_head.weight)
    assert made.evaluate(tmp_path / "hf")["evaluation_loss"] == pytest.approx(made.evaluate()["evaluation_loss"])
    other = trainer(Trainer, tmp_path / "other", ckpt_load_path=tmp_path / "hf", tie_word_embeddings=True)
    assert other.generate([1, 2, 3], 3, temperature=0.0) == greedy  # what it would begin from


def test_text_goes_on_with_the_tokenizer_of_the_data(tmp_path: Path) -> None:
    from pretraining.data.tokenizer import train_tokenizer

    (tmp_path / "tokenizer").mkdir()
    train_tokenizer(["some text to train on, and some more"] * 20, 300).save(tmp_path / "tokenizer")
    more = {"vocab_size": 320, "tokenizer_path": tmp_path / "tokenizer", "sample_tokens": 0}
    made = trainer(Trainer, tmp_path / "run", **more)
    made.train()
    text = made.generate("some", 4, temperature=0.0)
    assert isinstance(text, str) and text


def test_what_a_trainer_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"call evaluate\(\)"):
        trainer(Trainer, tmp_path, eval_only=True).train()
    with pytest.raises(ConfigError, match="eval_only"):
        made = trainer(Trainer, tmp_path / "run", held_out_fraction=0.0, num_steps=1)
        made.train()
        made.evaluate()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(LaunchError, match="in a process group already"):
        trainer(Trainer, tmp_path).train()
    dist.destroy_process_group()


def test_what_the_file_system_says_names_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(filename: str | None) -> None:
        raise OSError(28, "No space left on device", filename)

    monkeypatch.setattr(run_module, "train_to_the_end", lambda *_: fail("/full/disk"))
    with pytest.raises(PathError, match="/full/disk cannot be used: No space left on device"):
        trainer(Trainer, tmp_path).train()
    monkeypatch.setattr(run_module, "train_to_the_end", lambda *_: fail(None))
    with pytest.raises(OSError, match="No space left"):
        trainer(Trainer, tmp_path).train()


NOTEBOOK = """
import gc, json, logging, os, signal, sys, threading
import torch, torch.distributed as dist

def state():
    logger = logging.getLogger("pretraining")
    return [
        [repr(signal.getsignal(number)) for number in range(1, 65) if number not in (32, 33)],
        [thread.name for thread in threading.enumerate()],
        dist.is_initialized(), len(logger.handlers), logger.level, dict(os.environ), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(), repr(sys.stdout), gc.isenabled(),
    ]

torch.set_num_threads(2)
before = state()
from pretraining import Trainer
settings = json.loads(sys.argv[1])

class Failing(Trainer):
    def extra_metrics(self, outputs, batch):
        raise ValueError("of mine")

class Interrupted(Trainer):
    def extra_metrics(self, outputs, batch):
        signal.raise_signal(signal.SIGINT)
        return {}

results = []
for number, kind in enumerate((Trainer, Failing, Interrupted, Trainer)):
    try:
        trained = kind.from_recipe(**settings, ckpt_save_path=f"{sys.argv[2]}/{number}", deterministic=number == 0)
        results.append(trained.train().status)
    except (ValueError, KeyboardInterrupt) as error:
        results.append(type(error).__name__)
    assert state() == before, (number, state(), before)
print(json.dumps(results))
"""


def test_a_process_that_goes_on_after_its_runs_is_as_it_was_and_ends_as_always(tmp_path: Path) -> None:
    """As a notebook's: no terminal, torch imported before. The interpreter's own end must find nothing to wait for."""
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, json.dumps(SETTINGS), str(tmp_path)],
        env=plain_environment(),
        cwd=ROOT,
        preexec_fn=heed_interrupts,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert json.loads(lines[-1]) == ["finished", "ValueError", "KeyboardInterrupt", "finished"]
    assert any(line.startswith("step 4/4  loss") for line in lines)


def test_torch_is_imported_with_as_many_threads_as_a_command_would_have(tmp_path: Path) -> None:
    program = (
        "import json, os, sys; from pretraining import Trainer; assert 'torch' not in sys.modules; "
        "made = Trainer.from_recipe(**json.loads(sys.argv[1]), ckpt_save_path=sys.argv[2]); "
        "assert 'torch' not in sys.modules; made.train(); assert 'OMP_NUM_THREADS' not in os.environ"
    )
    environment = {name: value for name, value in plain_environment().items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", program, json.dumps(SETTINGS | {"cpu_threads": 2}), str(tmp_path)]
    out = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "2 threads each" in out
