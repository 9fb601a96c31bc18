"""Chats: the ids that `apply_chat_template` of transformers gives, and templates that are refused."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import pytest
import tokenizers
from transformers import AutoTokenizer
from unit.tools.prepare.prepare_files import packed, prepare_config, rows, write_table

from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import DataError
from pretraining.tools.command_settings import PrepareConfig
from pretraining.tools.prepare import chats, encode, units
from pretraining.tools.prepare.prepare import prepare

MARKS = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<think>"]
CHATML = (
    "{% for message in messages %}\n    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim }}\n"
    "    {%- if message.thinking %}{{ '<think>' ~ message.thinking }}{% endif %}\n"
    "{{ '<|im_end|>' }}\n{% endfor %}\n{% if add_generation_prompt %}never{% endif %}"
)
LLAMA3_LIKE = (
    "{{- bos_token }}{%- if tools is not none %}never{% endif %}\n"
    "{%- set ns = namespace(system='', count=0) -%}\n"
    "{%- if messages[0].role == 'system' -%}{%- set ns.system = messages[0].content -%}"
    "{%- set messages = messages[1:] -%}{%- endif -%}\n"
    "{{ '<|im_start|>system\n\n' + ns.system + '<|im_end|>' }}"
    "{%- for message in messages -%}\n"
    "  {%- if 'tool_calls' in message -%}{{ message.tool_calls | tojson }}{{ eos_token }}"
    "  {%- elif message.role == 'tool' -%}{{ {'output': message.content} | tojson(indent=2) }}\n"
    "  {%- elif message.content is string -%}{{ message.role }}: {{ message.content }}\n"
    "  {%- else -%}{% for part in message.content if part.type == 'text' %}{{ part.text }}{% break %}{% endfor %}"
    "  {%- endif -%}{%- set ns.count = ns.count + 1 -%}\n"
    "{%- endfor -%}{{ ns.count }}{{ dict(a=1) }}{{ unknown_name }}"
)
STRICT = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate: ' + message.role) }}{% endif %}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}[{{ message.content }}]{% endif %}{% endfor %}"
)
TODAY = "{{ strftime_now('%Y-%m-%d') }}{% for message in messages %}{{ message.content }}{% endfor %}"

REFUSES = "the chat template refuses it (TemplateError: roles must alternate: system)"
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " Hi <b>größe</b> & 'it' "}, {"role": "assistant", "content": "Hello."}],
    [{"role": "user", "content": "Write <|im_end|> and <think>."}, {"role": "assistant", "content": "<|im_end|>"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "漢字\n\nend"}],
    [
        {"role": "user", "content": "What is 1+1?", "name": None},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "adding",
            "tool_calls": [{"name": "add", "arguments": [1, 1.5]}],
        },
        {"role": "tool", "content": "2"},
    ],
    [
        {"role": "user", "content": [{"type": "text", "text": "two "}, {"type": "text", "text": "parts", "n": None}]},
        {"role": "assistant", "content": ""},
    ],
    [{"role": "assistant", "content": "I begin."}, {"role": "user", "content": ""}],
]
# contents that no template gets, and what the error says
NO_CONTENT: list[tuple[dict[str, Any], str]] = [
    (
        {"name": None},
        "message 2 has no content, and the chat template writes nothing else of it (its keys are 'role'): rename the",
    ),
    ({"value": "hi"}, "its keys are 'role', 'value')"),
    ({"text": "hi", "name": "Ann", "tool_calls": []}, "its keys are 'role', 'text', 'name', 'tool_calls')"),
    ({"content": None, "function_call": {"name": "f"}}, "its keys are 'role', 'function_call')"),
    ({"content": [{"type": "text", "text": "see"}, {"type": "image"}]}, 'it holds {"type": "image"}'),
    ({"content": [{"type": "input_audio", "text": "hi"}]}, "message 2 is neither text nor parts of text: it holds {"),
    ({"content": ["hi"]}, 'it holds "hi"'),
    ({"content": {"type": "text", "value": "hi"}}, """it holds {"type": "text", "value": "hi"}"""),
    ({"content": 5}, "it holds 5"),
]
PARTS_ALONE = "{% for message in messages %}{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
REQUIRED = (
    "{% if 'content' not in messages[-1] and not messages[-1].tool_calls %}{{ raise_exception('empty') }}{% endif %}"
)


def as_text(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat with the text of each message's parts."""
    parts = [message.get("content") for message in chat]
    texts = ["".join(part["text"] for part in each) if isinstance(each, list) else each for each in parts]
    return [{**message, "content": text} for message, text in zip(chat, texts, strict=True)]


def tokenizer_with(folder: Path, template: str | None) -> Path:
    """Write a byte-level BPE with special tokens and a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(["one two three größe role content"], 300).save(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(MARKS[:3])
    library.add_tokens(MARKS[3:])
    library.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def wanted_of(folder: Path, chats: list[Any]) -> list[list[int] | None]:
    """Return the ids that transformers gives for each chat; None if it refuses it."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    found: list[list[int] | None] = []
    for chat in chats:
        try:
            ids = tokenizer.apply_chat_template(chat, tokenize=True, add_generation_prompt=False, return_dict=False)
            found.append(list(ids))
        except Exception:
            found.append(None)
    return found


def config_for(tmp_path: Path, template: str | None, chats: list[Any], **changes: Any) -> PrepareConfig:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"id": 1, "messages": chat}) + "\n" for chat in chats))
    tokenizer = str(tokenizer_with(tmp_path / "tokenizer", template))
    settings = {"text_field": "messages", "tokenizer_path": tokenizer, "num_workers": 1, **changes}
    return prepare_config(tmp_path, **settings)


@pytest.mark.parametrize("encoder", ["tokenizers", "auto"])
@pytest.mark.parametrize("template", [CHATML, LLAMA3_LIKE, STRICT], ids=["chatml", "llama3", "strict"])
def test_the_ids_are_those_of_transformers_and_refused_rows_are_bad_records(
    tmp_path: Path, template: str, encoder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(tmp_path, template, CHATS, bad_records="skip", encoder=encoder)
    wanted = wanted_of(tmp_path / "tokenizer", [as_text(chat) for chat in CHATS])
    summary = prepare(config)
    assert rows(summary.folder) == [ids for ids in wanted if ids]
    assert len(summary.bad_record_names) == wanted.count(None) == summary.bad_records
    if template is STRICT:
        assert summary.bad_record_names[0] == f"in.jsonl, row 3: {REFUSES}"
        with pytest.raises(DataError, match=r"row 3: the chat template refuses it .*--bad_records=skip"):
            prepare(replace(config, bad_records="stop", output_path=str(tmp_path / "stop")))
    share = f"{100 / summary.documents:.1f}%"
    marked = f"marks      1 document ({share}) with names of special tokens in their messages, encoded as ids"
    assert marked in capsys.readouterr().out
    assert (tmp_path / "out/chat_template.jinja").read_text() == template
    assert summary.settings["special_tokens"] == "ids"
    assert prepare(config) == summary


@pytest.mark.parametrize("template", [CHATML, LLAMA3_LIKE], ids=["chatml", "llama3"])
def test_a_message_whose_content_the_template_does_not_get_is_a_bad_record(tmp_path: Path, template: str) -> None:
    chats = [[{"role": "user", "content": "q"}, {"role": "assistant", **each}] for each, _ in NO_CONTENT]
    config = config_for(tmp_path, template, [CHATS[0], *chats], bad_records="skip")
    summary = prepare(config)
    assert rows(summary.folder) == wanted_of(tmp_path / "tokenizer", CHATS[:1])
    for row, (name, (_, words)) in enumerate(zip(summary.bad_record_names, NO_CONTENT, strict=True), start=2):
        assert name.startswith(f"in.jsonl, row {row}: ") and words in name
    with pytest.raises(DataError, match=r"in\.jsonl, row 2: message 2 has no content.*--bad_records=skip"):
        prepare(replace(config, bad_records="stop", output_path=str(tmp_path / "stop")))


def test_a_message_without_content_may_have_what_the_template_reads_of_it(tmp_path: Path) -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}]
    cases: list[tuple[str, dict[str, Any]]] = [
        (LLAMA3_LIKE, {"content": None, "tool_calls": calls}),
        (LLAMA3_LIKE + REQUIRED, {"tool_calls": calls}),
        (CHATML, {"content": None, "reasoning": "because"}),
        ("{% for m in messages %}{{ m.content }}{{ m.get('refusal', '') }}{% endfor %}", {"refusal": "no"}),
        ("{{ messages | tojson }}", {"value": "all is written"}),
    ]
    for number, (template, more) in enumerate(cases):
        chat = [{"role": "user", "content": "q"}, {"role": "assistant", **more}]
        config = config_for(tmp_path, template, [chat], output_path=str(tmp_path / f"out{number}"))
        if "reasoning" in more:
            chat[1]["thinking"] = chat[1]["reasoning"]
        if chat[1].get("content", "") is None:
            del chat[1]["content"]
        assert rows(prepare(config).folder) == wanted_of(tmp_path / "tokenizer", [chat])


def test_a_template_that_knows_only_parts_gets_the_text_of_parts_as_one(tmp_path: Path) -> None:
    config = config_for(tmp_path, PARTS_ALONE, [CHATS[4]])
    one = [{"role": "user", "content": [{"type": "text", "text": "two parts"}]}]
    assert rows(prepare(config).folder) == wanted_of(tmp_path / "tokenizer", [one])


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.json", "in.parquet", "in.arrow", "hub"])
def test_chats_are_read_from_every_format(tmp_path: Path, name: str) -> None:
    marked = [{"role": "user", "content": "q", "n": 1}, {"role": "assistant", "content": "<|bos|>"}]
    conversations: list[Any] = [CHATS[0], CHATS[2], marked]
    config, path = config_for(tmp_path, CHATML, []), tmp_path / name
    columns: dict[str, list[Any]] = {"id": [1, 2, 3, 4], "messages": [*conversations, None]}
    if name == "hub":
        datasets.Dataset.from_dict(columns).save_to_disk(str(path))
        config = replace(config, input_path=(), hf_dataset=str(path))
    elif name in ("in.parquet", "in.arrow"):
        write_table(path, columns, 2)
    else:
        records = [json.dumps({"messages": chat}) for chat in columns["messages"]]
        path.write_bytes(packed(name, (f"[{','.join(records)}]" if name == "in.json" else "\n".join(records)).encode()))
    summary = prepare(config if name == "hub" else replace(config, input_path=(str(path),)))
    assert rows(summary.folder) == wanted_of(tmp_path / "tokenizer", conversations)
    assert (summary.documents, summary.empty_documents, summary.marked_documents) == (3, 1, 1)


def test_messages_that_the_datasets_library_keeps_as_json_are_parsed(tmp_path: Path) -> None:
    calls = [{"name": "f", "arguments": {"x": 1}}], [{"name": "g", "arguments": {"y": ["s", None], "z": None}}]
    conversations = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": each}] for each in calls
    ]
    saved = datasets.Dataset.from_dict({"messages": conversations}, on_mixed_types="use_json")
    config, path = config_for(tmp_path, LLAMA3_LIKE, []), str(tmp_path / "in")
    saved.save_to_disk(path)
    saved.to_parquet(f"{path}.parquet")
    table = replace(config, input_path=(f"{path}.parquet",), dataset="table")
    for each in (table, replace(config, input_path=(), hf_dataset=path)):
        assert rows(prepare(each).folder) == wanted_of(tmp_path / "tokenizer", conversations)


def test_json_in_a_string_is_text_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_for(tmp_path, CHATML, [json.dumps(CHATS[0])])
    assert prepare(config).settings["special_tokens"] == "text"
    assert "holds chats as strings of JSON, which are encoded as text" in caplog.text


def test_the_date_of_a_template_is_that_of_the_first_start_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 200)
    config, before = config_for(tmp_path, TODAY, [CHATS[0]] * 4), datetime.now()

    def stop_at_second(unit: units.Unit, *rest: Any) -> Any:
        if unit.number == 1:
            raise DataError("stopped")
        return encode_unit(unit, *rest)

    encode_unit = encode.encode_unit
    with monkeypatch.context() as patch:
        patch.setattr(encode, "encode_unit", stop_at_second)
        with pytest.raises(DataError, match="stopped"):
            prepare(config)
    plan = tmp_path / "out/.in.preparing/plan.json"
    document = json.loads(plan.read_text())
    assert before.isoformat() <= document["encoding"]["now"] <= datetime.now().isoformat()
    document["encoding"]["now"] = "2020-02-02T20:20:20"
    plan.write_text(json.dumps(document))
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer/tokenizer.json"))
    dates = {tokenizer.decode(row, skip_special_tokens=False)[:10] for row in rows(prepare(config).folder)}
    assert dates == {"2020-02-02"}, "units with another date are made again"


NO_TEMPLATE = "the tokenizer has no chat template"
UNREADABLE = "Use a tokenizer with another template"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# templates of strangers, and what the error says
TEMPLATES: list[tuple[str, str]] = [
    ("{% if %}", UNREADABLE),
    ("{{ " + "(" * 500_000, UNREADABLE),
]
# templates that reach for more than their text
ESCAPES = [
    "{{ messages.__class__.__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{% set ns = namespace(__class__=1) %}{{ ns.__class__ }}{{ ns.__dict__.x }}",
    "{% set ns = namespace() %}{% set ns.x = ns.__init__.__globals__ %}{{ ns.x.os }}",
    "{{ messages.append(1) }}",
    "{% include '/etc/passwd' %}",
]
# template, contents of the rows, changes of settings, what the error says
REFUSED: list[tuple[str | None, list[Any], dict[str, Any], str]] = [
    *((template, [CHATS[0]] * 50, {"bad_records": "skip"}, words) for template, words in TEMPLATES),
    *((template, CHATS[:1], {}, "in.jsonl, row 1: the chat template refuses it (") for template in ESCAPES),
    *((None, CHATS[:1], changes, NO_TEMPLATE) for changes in ({}, {"tokenizer_path": None})),
    (None, CHATS[:1], {}, "--tokenizer_path"),
    (None, CHATS[:1], {"text_field": "text"}, "set --text_field"),
    (CHATML, CHATS[:1], {"special_tokens": "text"}, "--special_tokens=text: --text_field=messages holds chats"),
    (CHATML, [CHATS[0], "text"], {}, "row 2: it holds text, but the first"),
    (CHATML, ["text", CHATS[0]], {}, "'messages' holds text in some inputs, and chats or token ids"),
]


@pytest.mark.parametrize(("template", "contents", "changes", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_encoded_as_chats_is_one_error(
    tmp_path: Path, template: str | None, contents: list[Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError) as error:
        prepare(config_for(tmp_path, template, contents, **changes))
    assert words in str(error.value)


def test_ctrl_c_stops_a_template_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "_fail", lambda message: signal.raise_signal(signal.SIGINT))
    config = config_for(tmp_path, "{{ raise_exception('Ctrl-C') }}" + ENDLESS, CHATS[:1], bad_records="skip")
    with pytest.raises(KeyboardInterrupt):
        prepare(config)


def test_a_root_without_the_template_takes_it_from_the_same_tokenizer_and_another_one_is_refused(
    tmp_path: Path,
) -> None:
    config = config_for(tmp_path, CHATML, CHATS[:1])
    tokenizer_with(tmp_path / "out", None)
    summary = prepare(replace(config, special_tokens="ids"))
    assert rows(summary.folder) == wanted_of(tmp_path / "tokenizer", CHATS[:1]) and prepare(config) == summary
    (tmp_path / "out/chat_template.jinja").write_text(TODAY)
    with pytest.raises(DataError, match="chat_template: it has"):
        prepare(replace(config, tokenizer_path=None))
