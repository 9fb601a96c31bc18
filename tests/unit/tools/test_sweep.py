"""pretrain sweep: the grid of a command line, runs that are rows, and a sweep that goes on after a kill."""

from __future__ import annotations

import csv
import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_SECONDS, ROOT, plain_environment

from pretraining.cli import main
from pretraining.errors import ConfigError
from pretraining.tools import pictures, sweep

TINY = [
    *("use_dummy_dataset=true", "model_variant=tiny", "hidden_size=16", "num_attention_heads=2", "num_hidden_layers=1"),
    *("vocab_size=64", "seq_length=16", "batch_size=2", "num_steps=4", "report_interval=2", "tracker=none"),
]


def grid(*overrides: str, **flags: str) -> tuple[Any, list[sweep.Combination]]:
    return sweep.read_sweep([*TINY, *overrides], flags)


def test_every_combination_is_a_run_and_the_last_setting_varies_fastest() -> None:
    settings, found = grid("learning_rate=1e-4, 3e-4", "optimizer=adamw,muon", processes="2")
    assert settings.processes == 2
    assert [dict(each.values) for each in found] == [
        {"learning_rate": rate, "optimizer": name} for rate in ("1e-4", "3e-4") for name in ("adamw", "muon")
    ]
    assert [each.number for each in found] == [0, 1, 2, 3]
    assert found[3].name == "learning_rate=3e-4,optimizer=muon"
    assert found[3].arguments == (*TINY, "learning_rate=3e-4", "optimizer=muon")


def test_settings_that_are_lists_vary_between_semicolons() -> None:
    _, found = grid("optimizer=my.module:Own", "optimizer_options=a=1,b=2;a=2")
    assert [each.values["optimizer_options"] for each in found] == ["a=1,b=2", "a=2"]
    assert len({each.name for each in found}) == 2 and all("/" not in each.name for each in found)


def test_a_recipe_may_be_the_first_word(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("num_steps: 4\n")
    _, found = sweep.read_sweep([str(recipe), "use_dummy_dataset=true", "seed=1,2"], {})
    assert found[1].arguments == (f"recipe={recipe}", "use_dummy_dataset=true", "seed=2")


def test_names_are_those_of_folders_and_differ(tmp_path: Path) -> None:
    paths = [f"data_path=/data/{'x' * 200}/a;/data/{'x' * 200}/b", "sample_prompt=one, and no other"]
    _, found = sweep.read_sweep([*TINY[1:], *paths], {})
    assert len({each.name for each in found}) == 2
    assert all("/" not in each.name and len(each.name) < 200 for each in found)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "nothing varies: give one setting several values"),
        (["sample_prompt=a,b"], "a text stand between semicolons, as in '--model_variant=125m;350m'"),
        (["seed=1,2", "print_slurm=true", "collect=true"], "leave --only and --collect out"),
        (["seed=1,2", "print_slurm=true", "only=1"], "leave --only and --collect out"),
        (["learning_rate=1e-3,1e-3"], "learning_rate=1e-3,1e-3: a value comes twice"),
        (["learning_rate=1e-3,fast"], "learning_rate=fast"),
        (["learning_rat=1e-3,1e-4"], "learning_rate"),
        (["seed=1,2", "run.seed=3,4"], "two grids for seed, 1,2 and run.seed=3,4: keep one"),
        (["seed=1,2", "ckpt_save_path=runs/a"], "--ckpt_save_path is set by the sweep"),
        (["ckpt_save_path=a;b"], "--ckpt_save_path is set by the sweep"),
        (["seed=1,2", "run_steps=2"], "--run_steps ends runs before they are done"),
        (["seed=1,2", "only=2"], "--only=2: the combinations are numbered 0 to 1"),
        (["seed=1,2", "alone"], "'alone' sets nothing"),
        (["optimizer=adamw,muon", "muon_ns_steps=3"], "optimizer=adamw: --muon_ns_steps is for --optimizer=muon"),
    ],
)
def test_what_is_no_sweep_is_refused_before_anything_runs(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        grid(*given)
    assert said in str(error.value)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.thorough
def test_a_run_that_fails_is_a_row_and_only_what_has_not_ended_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    command = ["sweep", *TINY, "max_skipped_steps=1", "learning_rate=1e-2,1e38", f"sweep_path={folder}"]
    main(command)
    said = capsys.readouterr().out
    good, bad = rows_of(folder)
    assert (good["status"], good["step"], good["reason"]) == ("finished", "4", "")
    assert float(good["loss"]) > 0 and float(good["seconds"]) > 0
    assert bad["status"] == "failed" and "finite" in bad["reason"]
    assert "1 of 2  learning_rate=1e-2" in said and "training loss at the end:" in said
    assert said.index(f"  {float(good['loss']):.4f}  learning_rate=1e-2") < said.index("failed  learning_rate=1e38")
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "step 4/4" in (folder / "learning_rate=1e-2" / "output.log").read_text()

    trained: list[str] = []
    monkeypatch.setattr(sweep, "_train", lambda combination, run, processes: trained.append(combination.name))
    main(command)
    main([*command, "collect=true", "retry_failed=true"])
    assert trained == []
    main([*command, "retry_failed=true"])
    assert trained == ["learning_rate=1e38"]
    (folder / "sweep.csv").unlink()
    main([*command, "retry_failed=true", "only=0"])
    assert trained == ["learning_rate=1e38"]
    assert not (folder / "sweep.csv").exists()  # jobs of an array do not write over each other

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    capsys.readouterr()
    main([*command, "collect=true"])
    assert "for a picture pip install 'pretraining[report]'" in capsys.readouterr().out
    (folder / "sweep.csv").unlink()
    (folder / "sweep.csv").mkdir()
    with pytest.raises(SystemExit):
        main([*command, "collect=true"])
    assert "sweep.csv" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_sweep_of_several_processes_a_run_trains_and_one_that_is_killed_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    command = [sys.executable, "-m", "pretraining", "sweep", *TINY, "seed=1,2", "processes=2", f"sweep_path={folder}"]
    long = [each.replace("num_steps=4", "num_steps=100000").replace(str(folder), f"{folder}_long") for each in command]
    options: dict[str, Any] = {"cwd": ROOT, "env": plain_environment(), "text": True}
    first = tmp_path / "sweep_long" / "seed=1"
    for number, status in ((signal.SIGTERM, 75), (signal.SIGKILL, -9)):
        killed = subprocess.Popen([*long, "checkpoint_interval=2"], **options)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (first / "logs" / "metrics.jsonl").exists() or not list(first.glob("checkpoints/*/manifest.json")):
            assert time.monotonic() < deadline and killed.poll() is None
            time.sleep(0.1)
        killed.send_signal(number)
        assert killed.wait(PATIENCE_SECONDS) == status
        assert not (first / "outcome.json").exists()
        status_file = first / "run_status.json"
        while json.loads(status_file.read_text())["status"] == "running":  # its processes end by themselves
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert "start       from " in (first / "output.log").read_text()
    refused = subprocess.run([*long, "checkpoint_interval=2", "batch_size=4"], capture_output=True, **options)
    assert f"{first} is a run of other settings (batch_size=2, batch_size=4)" in refused.stderr
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["status"] for row in rows_of(folder)] == ["finished", "finished"]
    assert "2 seeds" in done.stdout


def test_a_script_for_slurm_has_a_job_a_combination(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["sweep", *TINY, "seed=1,2,3", "--print-slurm=true", f"sweep_path={tmp_path}/a print_slurm"])
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-2" in script and '--only="$SLURM_ARRAY_TASK_ID" &' in script
    assert f"'sweep_path={tmp_path}/a print_slurm'" in script and "slurm=true" not in script
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    assert list(tmp_path.iterdir()) == []


def row(number: int, seed: int, rate: str, loss: float | None, status: str = "finished") -> dict[str, Any]:
    return {
        **{"number": number, "learning_rate": rate, "seed": str(seed), "status": status, "step": 4, "tokens_seen": 64},
        **{"loss": loss, "evaluation_loss": None, "tokens_per_second_per_gpu": 1.0, "seconds": 1.0, "reason": ""},
        "run": "",
    }


def test_seeds_are_summed_up_by_mean_and_range() -> None:
    rows = [row(0, 1, "1", 3.0), row(1, 2, "1", 4.0), row(2, 1, "2", 2.0), row(3, 2, "2", None, "failed")]
    lines = list(sweep.summary(rows))
    assert lines[1:] == [
        "  2.0000 (2.0000 to 2.0000, 1 seeds)  learning_rate=2",
        "  3.5000 (3.0000 to 4.0000, 2 seeds)  learning_rate=1",
        "  failed  learning_rate=2  ",
    ]


def test_a_run_without_a_finite_loss_is_said_so_and_unlike_losses_are_not_compared() -> None:
    rows = [row(0, 1, "1", 3.0), row(1, 1, "2", None)]
    assert list(sweep.summary(rows))[2] == "  no finite loss  learning_rate=2  "
    one_evaluated = [{**rows[0], "evaluation_loss": 9.0}, row(1, 1, "2", 4.0)]
    assert list(sweep.summary(one_evaluated)) == [
        "training loss at the end:",
        "  3.0000  learning_rate=1",
        "  4.0000  learning_rate=2",
    ]


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        (0, None, "finished"),
        (1, "failed", "failed"),
        (1, None, "failed"),
        (1, "running", "killed"),
        (1, "preempted", "killed"),
        (-9, "running", "killed"),
        (75, "preempted", "killed"),
        (124, "running", "killed"),
    ],
)
def test_what_was_stopped_from_outside_is_no_failure(
    code: int, status: str | None, expected: str, tmp_path: Path
) -> None:
    if status is not None:
        (tmp_path / "run_status.json").write_text(json.dumps({"status": status}))
    assert sweep._status_of(code, tmp_path) == expected


def test_a_run_that_was_killed_is_told_and_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["sweep", *TINY, "seed=1,2", f"sweep_path={tmp_path}"]
    ends = iter(["kill -9 $$", "exit 1", "echo error: out of luck; exit 1"])
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(program))

    def next_program() -> None:
        program.write_text(f"#!/bin/sh\n{next(ends)}\n")
        program.chmod(0o755)

    next_program()
    main([*command, "only=0"])
    assert "killed, signal 9" in capsys.readouterr().out
    main([*command, "collect=true"])
    assert "1 stopped from outside: the same command goes on with them" in capsys.readouterr().out
    next_program()
    main([*command, "only=0"])
    assert "failed, exit code 1" in capsys.readouterr().out
    next_program()
    main([*command, "only=0", "retry_failed=true"])
    assert "failed, out of luck" in capsys.readouterr().out


def test_an_outcome_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nmkdir -p {tmp_path}/sweep/seed=1/outcome.json/held\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(SystemExit):
        main(["sweep", *TINY, "seed=1,2", f"sweep_path={tmp_path}/sweep", "only=0"])
    said = capsys.readouterr().err
    assert "outcome.json" in said and "cannot be used" in said and "Traceback" not in said


def test_what_cannot_be_read_is_no_outcome(tmp_path: Path) -> None:
    for text in ("[", "[]", "{}"):
        (tmp_path / "outcome.json").write_text(text)
        assert sweep._outcome(tmp_path) is None


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep"
    run = folder / "seed=1" / "logs"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "tokens_seen": 32, "loss": 3.0}) + "\n")
    (folder / "sweep.png").mkdir()
    with pytest.raises(SystemExit):
        main(["sweep", *TINY, "seed=1,2", "collect=true", f"sweep_path={folder}"])
    assert "sweep.png cannot be written" in capsys.readouterr().err
    assert [each["status"] for each in rows_of(folder)] == ["under way", "not begun"]


def test_curves_of_what_diverges_and_of_words_are_drawn(tmp_path: Path) -> None:
    rows = [row(0, 1, "0", 3.0), row(1, 1, "2", 2.0)]
    curves = {"a": [(1.0, 4.0), (2.0, float("inf"))], "b": [(1.0, 4.0), (2.0, 2.0)]}
    pictures.draw_sweep(curves, rows, ["learning_rate"], "loss", tmp_path / "numbers.png")
    worded = [{**each, "learning_rate": name} for each, name in zip(rows, ("cosine", "wsd"), strict=True)]
    pictures.draw_sweep(curves, worded, ["learning_rate"], "loss", tmp_path / "words.svg")
    assert (tmp_path / "numbers.png").stat().st_size > 5000 and "</svg>" in (tmp_path / "words.svg").read_text()


def test_damaged_lines_and_losses_that_are_no_numbers_do_not_name_the_winner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_seed = {
        "1": ['{"step": 1, "tokens_seen": 8, "loss": 1.0}', "}damaged{", "[]", '{"step": 2, "loss": 9.0}'],
        "2": ['{"step": 1, "tokens_seen": "many", "loss": 2.0}', '{"step": 2, "tokens_seen": 16, "loss": 3.0}'],
        "3": ['{"step": 2, "tokens_seen": 16, "loss": -Infinity}'],
        "4": ['{"step": 2, "tokens_seen": 16, "loss": NaN}'],
        "5": ['{"step": 2, "tokens_seen": 16, "loss": "0"}'],
    }
    for rate, lines in of_seed.items():
        run = tmp_path / f"learning_rate={rate}"
        (run / "logs").mkdir(parents=True)
        (run / "logs" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        (run / "outcome.json").write_text('{"status": "finished", "seconds": "long"}')
        (run / "arguments.json").write_text('{"arguments": 1}')
    caplog.set_level(logging.INFO)
    sweep.sweep([*TINY, "learning_rate=1,2,3,4,5", "collect=true", f"sweep_path={tmp_path}"], {})
    said = [record.getMessage() for record in caplog.records]
    start = said.index("training loss at the end:")
    assert [line.split()[0] for line in said[start + 1 : start + 6]] == ["3.0000", "9.0000", "no", "no", "no"]
    warning = next(record for record in caplog.records if record.levelname == "WARNING")
    assert "learning_rate=1/logs/metrics.jsonl: 2 damaged lines left out" in warning.getMessage()
