"""The way to lm-eval that docs/tutorial.md shows, on a task defined here: its answers are those of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import plain_environment
from unit.checkpoint.checkpoint_files import SHAPES
from unit.tools.test_sample import TEXTS, make_run

from pretraining.api import load_model
from pretraining.config.commands import ExportConfig
from pretraining.data.tokenizer import load_tokenizer, train_tokenizer
from pretraining.tools.export import export

pytestmark = pytest.mark.slow
pytest.importorskip("lm_eval", reason="needs the extra `slow`")

WORDS = ("text", "signs", "few", "train", "and", "some ✓", "to train on", "ä")
QUESTIONS: list[dict[str, Any]] = [
    {"question": f"some {first} and {second} to", "choices": [first, second, "on", "signs few"], "label": number % 4}
    for number, (first, second) in enumerate((first, second) for first in WORDS for second in WORDS)
]
TASK = {
    "task": "words",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "label",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def test_an_export_is_scored_on_a_local_task_as_the_model_would_score_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    train_tokenizer(TEXTS, 290).save(tmp_path / "tokenizer")
    shape = replace(SHAPES["plain"], vocab_size=300)
    run = make_run(tmp_path, shape, tokenizer_path=str(tmp_path / "tokenizer"), sep_token=0)
    export(ExportConfig(str(run), str(tmp_path / "exported"), dtype="float32"))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "words.yaml").write_text(yaml.safe_dump(TASK))
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))

    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", "pretrained=exported,dtype=float32"]
    command += ["--tasks", "words", "--include_path", "tasks", "--device", "cpu", "--batch_size", "8"]
    command += ["--output_path", "found"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    environment = plain_environment(offline)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (tmp_path / "found").rglob("results_*.json")
    expected = accuracy(tmp_path)
    assert 0 < expected < 1
    assert json.loads(results.read_text())["results"]["words"]["acc,none"] == pytest.approx(expected)


def accuracy(folder: Path) -> float:
    """Share of the questions whose right choice is the likeliest, by the model itself."""
    model, tokenizer = load_model(folder / "exported"), load_tokenizer(folder / "exported")

    def log_p(question: str, choice: str) -> float:
        before, tokens = len(tokenizer.encode(question)), tokenizer.encode(f"{question} {choice}")
        with torch.no_grad():
            of_next = model(torch.tensor([tokens[:-1]]))[0].log_softmax(1)
        return float(sum(of_next[place - 1, tokens[place]] for place in range(before, len(tokens))))

    right = 0
    for each in QUESTIONS:
        found = [log_p(each["question"], choice) for choice in each["choices"]]
        right += found.index(max(found)) == each["label"]
    return right / len(QUESTIONS)
