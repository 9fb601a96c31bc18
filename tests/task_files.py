"""Small benchmark tasks in a folder, with the odd requests that real ones have, and tokenizers for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing

from pretraining.data.tokenizer import load_tokenizer, train_tokenizer

VOCABULARY = 300
WORDS = "the cat sat on a mat and the dog ran to the sea while two and two are four "
CHOICES = [
    {"q": "the cat sat on", "choices": [" a mat", " the sea and the dog", " four"], "gold": 0},
    {"q": "two and two are ", "choices": ["four", "the dog ran", "a mat"], "gold": 0},  # a space at the end
    {"q": "", "choices": ["the dog ran", "four four four", "a"], "gold": 1},  # no context
    {"q": "<|bos|>the dog ran", "choices": [" to the sea", " on a mat", " two"], "gold": 2},  # begins already
    {"q": 9 * WORDS, "choices": [" the cat", " the sea", " a dog"], "gold": 1},  # longer than the context
    {"q": "the sea <|endoftext|> two", "choices": [" and two", " cats", " mats"], "gold": 0},
]
TEXTS = [{"text": WORDS}, {"text": 12 * WORDS}, {"text": "a"}]
COMMON: dict[str, Any] = {"validation_split": "validation", "doc_to_text": "{{q}}", "metadata": {"version": 1.0}}
TASKS: dict[str, dict[str, Any]] = {
    "small_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "fewshot_split": "validation",
        "tag": "small_tag",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "small_likelihood": {
        "output_type": "loglikelihood",
        "doc_to_target": "{{choices[gold]}}",
        "num_fewshot": 0,
        "tag": "small_tag",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "small_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
    "small_answer": {
        "output_type": "generate_until",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tasks(folder: Path, **changes: Any) -> list[str]:
    """Write all tasks, and a group of two; return the flags of those that can be scored.

    Args:
        changes: entries of `small_choice`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in (("choices", CHOICES), ("texts", TEXTS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    for name, own in TASKS.items():
        data = folder / f"{'texts' if name == 'small_text' else 'choices'}.jsonl"
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"validation": str(data)}}}
        task |= {**COMMON, **own, **(changes if name == "small_choice" else {})}
        (folder / f"{name}.yaml").write_text(json.dumps(task))
    group = {"group": "small_group", "task": ["small_choice", "small_likelihood"]}
    (folder / "small_group.yaml").write_text(
        json.dumps({**group, "aggregate_metric_list": [{"metric": "acc"}], "metadata": {"version": 2.0}})
    )
    return ["eval_tasks=small_choice,small_likelihood,small_text", f"eval_tasks_path={folder}"]


def write_task(folder: Path, name: str, documents: list[dict[str, Any]], text: str = "", **own: Any) -> None:
    """Write one more task, whose questions are a validation set unless its entries say otherwise.

    Args:
        text: lines of YAML for what JSON cannot say.
    """
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in documents))
    split = "test" if "test_split" in own else "validation"
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {split: str(data)}}}
    task |= {"doc_to_text": "{{q}}", f"{split}_split": split, "metadata": {"version": 1.0}, **own}
    lines = [f"{key}: {json.dumps(value)}" for key, value in task.items()]
    (folder / f"{name}.yaml").write_text("\n".join([*lines, text, ""]))


def write_tokenizer(folder: Path, *, begins: bool = True) -> None:
    """Write a tokenizer that puts <|bos|> before each text, or one without such a token."""
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer([WORDS] * 20, VOCABULARY - 2).save(folder)
    if not begins:
        return
    library = load_tokenizer(folder).library
    library.encode_special_tokens = False
    library.add_special_tokens(["<|bos|>"])
    number = library.token_to_id("<|bos|>")
    library.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", number)])
    library.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<|bos|>"}))
