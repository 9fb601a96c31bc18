"""A tokenizer travels whole: folder -> `pretrain prepare` -> `pretrain train` -> `pretrain export` -> AutoTokenizer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from training_runs import TINY

from pretraining.cli import main
from pretraining.config.recipe_files import load_config
from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import DataError

MODEL = [flag for flag in TINY if not flag.startswith("vocab_size")]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def write_folder(folder: Path, config: dict[str, Any], files: dict[str, str]) -> Path:
    """Write a tokenizer whose special tokens have names in the given files alone."""
    (folder / "additional_chat_templates").mkdir(parents=True)
    library = tokenizers.Tokenizer.from_str(train_tokenizer(["some words of a text"] * 9, 270).definition.decode())
    library.add_special_tokens(list(SPECIAL.values()))
    document = json.loads(library.to_str())
    document["model"]["dropout"] = 0.5  # which is off in data and in exports
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def exported_from(folder: Path, root: Path) -> Path:
    (root / "web.jsonl").write_text('{"text": "some words of a text"}\n' * 200)
    with contextlib.chdir(root):
        main(["prepare", "input_path=web.jsonl", "output_path=data", f"tokenizer_path={folder}"])
        main(["train", *MODEL, "data_path=data", "logical_shards=8", "num_steps=1", "ckpt_save_path=run"])
    tokenizer = load_config(root / "run" / "config.yaml").data.tokenizer_path
    assert tokenizer == "./data", "as typed, it would be a name on the Hub elsewhere"
    main(["export", str(root / "run"), str(root / "out")])
    return root / "out"


OF_FORMS = {
    "special_tokens_map": ({}, {"special_tokens_map.json": json.dumps(SPECIAL)}),
    "config": ({**SPECIAL, "chat_template": "{{ bos_token }}"}, {}),
    "templates": (
        SPECIAL,
        {
            "chat_template.jinja": "{{ bos_token }}{{ messages[0].content }}",
            "additional_chat_templates/tool_use.jinja": "{{ tools }}",
            "added_tokens.json": '{"<pad>": 274}',
            "vocab.json": "{}",
        },
    ),
}


@pytest.mark.parametrize(("config", "files"), OF_FORMS.values(), ids=OF_FORMS)
def test_an_export_has_the_tokenizer_of_the_folder(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str]
) -> None:
    load = pytest.importorskip("transformers").AutoTokenizer.from_pretrained
    folder = write_folder(tmp_path / "given", config, files)
    before, after = load(folder), load(exported_from(folder, tmp_path))
    assert after.special_tokens_map == before.special_tokens_map == SPECIAL
    assert after.chat_template == before.chat_template
    for name in SPECIAL:
        assert getattr(after, f"{name}_id") == getattr(before, f"{name}_id") is not None
    for name, content in files.items():
        assert (tmp_path / "out" / name).read_text() == content
    assert len({tuple(after("some words of a text")["input_ids"]) for _ in range(20)}) == 1
    main(["import", str(tmp_path / "out"), str(tmp_path / "imported")])
    main(["export", str(tmp_path / "imported"), str(tmp_path / "again")])
    again = load(tmp_path / "again")
    assert (again.special_tokens_map, again.chat_template) == (SPECIAL, before.chat_template)


def with_begin(document: dict[str, Any], number: int, name: str = "<s>") -> None:
    token = {"id": name, "ids": [number], "tokens": [name]}
    piece = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    document["post_processor"] = {
        **{"type": "TemplateProcessing", "single": piece, "pair": [*piece, *piece[1:]]},
        "special_tokens": {name: token},
    }


def with_roberta(document: dict[str, Any]) -> None:
    around = {"sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": True, "add_prefix_space": False}
    document["post_processor"] = {"type": "RobertaProcessing", **around}


@pytest.mark.parametrize(
    ("change", "place", "said"),
    [
        (lambda document: with_begin(document, 128_000), "given", "with the id 128000, which its vocabulary of 2"),
        (lambda document: with_begin(document, 5), "root", "entries has as '%'"),
        (lambda document: with_begin(document, 274, "<missing>"), "given", "correct or remove it"),
        (with_roberta, "given", "correct or remove it"),
    ],
)
def test_wrong_ids_are_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None], place: str, said: str) -> None:
    folder = write_folder(tmp_path / place, SPECIAL, {})
    document = json.loads((folder / "tokenizer.json").read_text())
    change(document)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "web.jsonl").write_text('{"text": "some words"}\n')
    given = [f"tokenizer_path={folder}"] if place == "given" else []
    with pytest.raises(SystemExit) as ending:
        main(["prepare", f"input_path={tmp_path / 'web.jsonl'}", f"output_path={tmp_path / 'root'}", *given])
    error = ending.value.__context__
    assert isinstance(error, DataError) and error.path == folder / "tokenizer.json" and said in str(error)


def test_a_private_file_behind_a_link_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from unit.tools.test_export import make_run

    (tmp_path / "id_rsa").write_text("a secret")
    folder = write_folder(tmp_path / "given", SPECIAL, {})
    (folder / "vocab.json").symlink_to(tmp_path / "id_rsa")
    make_run(tmp_path / "run", tokenizer_path=str(folder))
    main(["export", str(tmp_path / "run"), str(tmp_path / "out")])  # without the tokenizer of the run
    assert "vocab.json: leads out of its folder, to" in "".join(capsys.readouterr())
    assert not (tmp_path / "out" / "vocab.json").exists()
