"""A new run takes tokens and tokenizer of its prepared data, and refuses data, weights or flags of another one."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from training_runs import TINY, metrics_of
from unit.train.whole_runs import error_of, refusal, start

from pretraining import Trainer
from pretraining.checkpoint.run_folder import committed_checkpoints, read_manifest
from pretraining.checkpoint.start_point import find_start
from pretraining.cli import main
from pretraining.config.recipe_files import load_config
from pretraining.config.training import NO_TOKEN, TrainConfig
from pretraining.data.tokenizer import load_tokenizer, train_tokenizer
from pretraining.errors import ConfigError, DataError
from pretraining.tools.command_settings import PrepareConfig
from pretraining.tools.prepare.prepare import prepare
from pretraining.train.complete import find_and_complete

MODEL = [*(flag for flag in TINY if not flag.startswith("vocab_size")), "sample_tokens=2"]
COMMON = ["logical_shards=8", "held_out_fraction=0.2", "eval_batches=1", "num_steps=2"]
TEXTS = [f"document {n} of some text, " * (n % 9 + 3) for n in range(200)]


def write_tokenizer(folder: Path, text: str = "some words", begin: int | None = None) -> None:
    """Write a tokenizer of 300 entries or fewer that may put a token before every text."""
    folder.mkdir(exist_ok=True)
    tokenizer = train_tokenizer([text, *TEXTS], 300)
    if begin is not None:
        name = tokenizer.library.id_to_token(begin)
        tokenizer.library.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{name} $A", special_tokens=[(name, begin)]
        )
    (folder / "tokenizer.json").write_text(tokenizer.library.to_str())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')


def encode(texts: Path, tokenizer: Path, data: Path) -> None:
    prepare(PrepareConfig(input_path=(str(texts),), output_path=str(data), tokenizer_path=str(tokenizer)))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared dataset whose tokenizer puts token 5 before every text, and ends it with 0; a run on it.

    And another tokenizer, with the same texts. Tests must not change them.
    """
    folder = tmp_path_factory.mktemp("prepared")
    write_tokenizer(folder / "given", begin=5)
    (folder / "web.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (folder / "wrong").mkdir()
    train_tokenizer(["def other(words):\n    return words\n"] * 20, 300).save(folder / "wrong")
    for tokenizer, data in (("given", "data"), ("wrong", "wrong_data")):
        encode(folder / "web.jsonl", folder / tokenizer, folder / data)
    start(folder / "run", f"data_path={folder / 'data'}", *COMMON, model=MODEL)
    for name, flags in (("exported", ["dtype=float32"]), ("unreadable", [])):
        main(["export", f"ckpt_load_path={folder / 'run'}", f"output_path={folder / name}", *flags])
    (folder / "unreadable/tokenizer.json").write_text("{")
    return folder


@pytest.fixture
def data(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared / "data", tmp_path / "data")


def rewrite(data: Path, name: str = "web", **changes: object) -> None:
    """Change the record of the tokenizer in a prepare.json."""
    content = json.loads((data / "web/prepare.json").read_text())
    changed = {**content, "tokenizer": content["tokenizer"] | changes}
    (data / name / "prepare.json").write_text(json.dumps(changed))


def settings_of(run: Path) -> TrainConfig:
    return load_config(run / "config.yaml")


def separator_of(run: Path) -> object:
    """Return the token that ends the documents of a run."""
    (*_, newest) = committed_checkpoints(run)
    return read_manifest(newest.path).data["sep_token"]


def test_a_new_run_takes_the_tokens_tokenizer_and_vocabulary_of_its_data_and_a_dry_run_and_inspect_do(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = prepared / "data", prepared / "run"
    start(tmp_path / "new", f"data_path={data}", *COMMON, "dry_run=true", model=MODEL)
    printed = "".join(capsys.readouterr())
    for line in (
        f"sep_token   0, the end_of_text of prepare.json in {data / 'web'}",
        f"bos_token   5, the begin_of_text of prepare.json in {data / 'web'}",
        f"tokenizer   {data}, that of prepare.json in {data / 'web'}",
    ):
        assert line in printed
    assert any(line.split()[:2] == ["sep_token", "0"] for line in printed.splitlines())
    entries = load_tokenizer(data).vocab_size
    assert f"vocab_size  384, for the {entries} entries of {data}" in printed and entries < 384
    settings = settings_of(run)
    assert (settings.data.bos_token, settings.data.tokenizer_path, settings.model.vocab_size) == (5, str(data), 384)
    assert (read_manifest(run / "checkpoints/step_2_ckp").data["bos_token"], separator_of(run)) == (5, 0)
    [report] = metrics_of(run, "evaluation_bits_per_byte")
    assert 0 < report["evaluation_bits_per_byte"] < report["evaluation_loss"] / math.log(2)  # tokens of several bytes
    spans = []
    for given in ([], ["sep_token=0", "bos_token=5"]):
        main(["inspect", *MODEL, f"data_path={data}", *given, "batch_size=2", "step=1", "json=true"])
        spans.append(capsys.readouterr().out)
    assert spans[0] == spans[1]


def test_a_resumed_run_keeps_what_its_checkpoint_recorded(data: Path, tmp_path: Path) -> None:
    flags = [f"data_path={data}", *COMMON, "num_steps=4"]
    start(tmp_path / "run", *flags, "run_steps=1", model=MODEL)
    hidden = (data / "web/prepare.json").rename(data / "kept.json")
    start(tmp_path / "run", *flags, "run_steps=1", model=MODEL)
    settings = settings_of(tmp_path / "run")
    assert (settings.data.bos_token, settings.data.tokenizer_path, separator_of(tmp_path / "run")) == (5, str(data), 0)
    # and one that began without stays without
    start(tmp_path / "old", *flags, "run_steps=1", model=MODEL)
    hidden.rename(data / "web/prepare.json")
    start(tmp_path / "old", *flags, "run_steps=1", model=MODEL)
    settings = settings_of(tmp_path / "old")
    assert (settings.data.bos_token, settings.data.tokenizer_path, settings.model.vocab_size) == (None, None, None)
    assert separator_of(tmp_path / "old") is None


def test_a_project_that_moves_finds_its_tokenizer_again(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project, moved = tmp_path / "project", tmp_path / "moved"
    shutil.copytree(prepared / "data", project / "data")
    monkeypatch.chdir(project)
    start(Path("runs/a"), "data_path=data", *COMMON, model=MODEL)
    start(Path("runs/b"), f"data_path={project}/data", *COMMON, model=MODEL)
    assert [settings_of(Path(f"runs/{run}")).data.tokenizer_path for run in "ab"] == ["./data", f"{project}/data"]
    monkeypatch.chdir(tmp_path)
    main(["sample", "project/runs/a", "--prompt=some", "--max_new_tokens=2"])  # as the last start found it
    project.rename(moved)
    monkeypatch.chdir(moved)
    for command in (
        "train runs/a --num_steps=3",
        "export runs/a out",
        "sample runs/a --prompt=some --max_new_tokens=2",
        "inspect runs/a --step=1 --text=true",
        "train runs/a --eval_only=true",
        # nobody typed this tokenizer, either
        f"inspect runs/b --step=1 --text=true --data_path={moved}/data",
        f"train runs/b --num_steps=3 --data_path={moved}/data",
    ):
        main(command.split())
    assert load_tokenizer(moved / "out").sha256 == load_tokenizer(moved / "data").sha256
    assert [settings_of(Path(f"runs/{run}")).data.tokenizer_path for run in "ab"] == ["./data", f"{moved}/data"]
    printed = "".join(capsys.readouterr())
    assert f"{project}/data, the tokenizer of the last start, is gone" in printed


def test_a_tokenizer_that_was_here_never_becomes_a_name_on_the_hub(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(prepared / "given", tmp_path / "own" / "tokenizer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    start(Path("runs/a"), "tokenizer_path=own/tokenizer", *COMMON[3:], model=MODEL)
    assert settings_of(Path("runs/a")).data.tokenizer_path == "./own/tokenizer"
    shutil.rmtree("own")
    for command in (["train"], ["sample", "--prompt=some"], ["sample", "--prompt=some", "--tokenizer_path=./own/b"]):
        error = str(error_of(lambda command=command: main([*command, "runs/a"])))  # type: ignore[misc]
        assert "own/" in error and "cannot read a tokenizer here" in error


def test_the_first_rank_tells_all_whether_the_tokenizer_of_a_resumed_run_is_still_there(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path / "run", f"data_path={data}", *COMMON, "run_steps=1", model=MODEL)
    config, elsewhere = settings_of(tmp_path / "run"), tmp_path / "on another node"
    (data / "web/prepare.json").unlink()
    data.rename(elsewhere)

    def ask_rank_zero(function: Callable[[], object]) -> object:
        elsewhere.rename(data)
        found = function()
        data.rename(elsewhere)
        return found

    monkeypatch.setattr("pretraining.distributed.processes.on_rank_zero", ask_rank_zero)
    without = replace(config, data=replace(config.data, tokenizer_path=None, index_path="/local"))
    resolved, _ = find_and_complete(without, lambda: find_start(without.checkpoint))
    assert resolved.data.tokenizer_path == str(data) and resolved.data.index_path == "/local"


@pytest.mark.parametrize("typed", [[], ["sep_token=none"]])
def test_a_run_in_a_folder_with_a_timestamp_is_found_again(data: Path, tmp_path: Path, typed: list[str]) -> None:
    pattern, flags = tmp_path / "run.{timestamp}", [f"data_path={data}", *COMMON, "run_steps=1"]
    start(pattern, *flags, *typed, model=MODEL)
    (data / "web/prepare.json").unlink()
    start(pattern, *flags, model=MODEL)
    (run,) = tmp_path.glob("run.*")
    assert separator_of(run) == (None if typed else 0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: write_tokenizer(data, "other text"), "is not the one that encoded"),
        (lambda data: (data / "tokenizer.json").write_text("{"), "cannot read a tokenizer here"),
        (lambda data: (data / "tokenizer.json").unlink(), ""),
        (lambda data: rewrite(data, begin_of_text=None), ""),
    ],
)
def test_another_or_a_damaged_tokenizer_beside_the_data_is_not_taken(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, why: str
) -> None:
    change(data)
    start(tmp_path / "run", f"data_path={data}", *COMMON, "vocab_size=384", "num_steps=1")
    settings, recorded = settings_of(tmp_path / "run").data, json.loads((data / "web/prepare.json").read_text())
    assert settings.bos_token == recorded["tokenizer"]["begin_of_text"]
    assert (settings.tokenizer_path is None) == (settings.bos_token is not None)
    printed = "".join(capsys.readouterr())
    assert ("no tokenizer is used: " in printed) == bool(why) and why in printed


def test_a_tokenizer_with_a_token_that_has_no_row_is_refused_or_accepted_and_never_at_a_resume(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(tmp_path / "larger")
    file, data = tmp_path / "larger/tokenizer.json", tmp_path / "data"
    document = json.loads(file.read_text())
    size = len(document["model"]["vocab"]) + 1
    document["model"]["vocab"]["never there"] = size - 1
    file.write_text(json.dumps(document))
    encode(prepared / "web.jsonl", file, data)
    few = [f"data_path={data}", *COMMON, f"vocab_size={size - 1}", "held_out_fraction=0.3"]
    for more in ([], ["dry_run=true"], [f"tokenizer_path={data}"]):
        error = refusal(tmp_path / "run", *few, *more)
        assert f"the tokenizer of {data} has {size} entries, but the model has {size - 1} rows" in str(error)
        assert f"--vocab_size={size} or more, or accept it: --accept_tokenizer=true" in str(error)
        assert not (tmp_path / "run").exists()
    accepted = [*few, "accept_tokenizer=true", f"tokenizer_path={data}", "sample_tokens=2", "sample_prompt=a"]
    start(tmp_path / "run", *accepted, "run_steps=1")
    assert "stops the run" in "".join(capsys.readouterr())
    for more in ([], ["dry_run=true"], ["eval_only=true"]):  # the run has accepted it
        start(tmp_path / "run", *few, f"tokenizer_path={data}", "run_steps=1", *more)
        assert settings_of(tmp_path / "run").data.accept_tokenizer
    assert metrics_of(tmp_path / "run", "evaluation_bits_per_byte")


def test_a_run_that_began_before_its_tokenizer_was_known_is_not_refused_at_a_resume(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [f"data_path={data}", *COMMON, f"vocab_size={load_tokenizer(data).vocab_size - 1}"]
    hidden = (data / "web/prepare.json").rename(data / "kept.json")
    start(tmp_path / "run", *few, "run_steps=1")
    hidden.rename(data / "web/prepare.json")
    start(tmp_path / "run", *few, f"tokenizer_path={data}", "run_steps=1")
    error = refusal(tmp_path / "run", *few, f"tokenizer_path={data}", "eval_only=true")
    assert "entries, but the model has" in str(error)


def test_a_tokenizer_whose_tokens_do_not_tell_their_bytes_has_no_bits_per_byte_and_a_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    library.save(str(tmp_path / "words.json"))
    (data / "web/prepare.json").unlink()
    start(tmp_path / "run", f"data_path={data}", *COMMON, f"tokenizer_path={tmp_path / 'words.json'}", "vocab_size=300")
    assert f"no bits per byte: the tokens of {tmp_path / 'words.json'} do not tell" in "".join(capsys.readouterr())
    assert not metrics_of(tmp_path / "run", "evaluation_bits_per_byte")


def test_a_sample_of_text_needs_a_tokenizer(data: Path, tmp_path: Path) -> None:
    flags = [f"data_path={data}", *COMMON, "sample_at_evaluations=true", "dry_run=true"]
    start(tmp_path / "run", *flags, model=MODEL)
    (data / "web/prepare.json").unlink()
    assert "tokenizer_path" in refusal(tmp_path / "run", *flags, "vocab_size=384", model=MODEL).settings


def test_weights_that_expect_a_begin_token_and_data_without_one_are_a_warning(
    prepared: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(data, begin_of_text=None)
    for place in ("run", "exported", "unreadable"):
        for path, is_without in ((prepared / "data", False), (data, True)):
            capsys.readouterr()
            load = [f"ckpt_load_path={prepared / place}", "weights_only=true", "dry_run=true"]
            start(tmp_path / "second", f"data_path={path}", *COMMON, *load, model=MODEL)
            printed = "".join(capsys.readouterr())
            is_said = is_without and place != "unreadable"
            assert ("expect token 5 before every text" in printed and "--bos_token=5" in printed) == is_said
    assert "which tokenizer the weights expect is unknown" in printed


@pytest.mark.parametrize("typed", ["eos_token=null", "sep_token=-1"])
def test_a_typed_none_is_no_token_and_stays_so_when_resumed_and_in_config_yaml(
    data: Path, tmp_path: Path, typed: str
) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    for flags in ([typed], []):
        start(run, f"data_path={data}", *COMMON, *flags, "run_steps=1", model=MODEL)
        assert separator_of(run) is None
    main(["train", f"--recipe={run / 'config.yaml'}", f"ckpt_save_path={again}", "num_steps=1"])
    assert separator_of(again) is None


@pytest.mark.parametrize(
    ("written", "flags", "expected"),
    [
        *[(text, [], 0) for text in ("sep_token:\n", 'sep_token: ""\n')],
        ("", ["--sep_token="], 0),  # such as of a variable that is not set
        ("sep_token: none\n", [], None),
    ],
)
def test_what_is_not_given_in_a_recipe_is_that_of_the_data(
    data: Path, tmp_path: Path, written: str, flags: list[str], expected: int | None
) -> None:
    (tmp_path / "own.yaml").write_text(f"eval_batches: 1\n{written}")
    common = [f"--recipe={tmp_path / 'own.yaml'}", f"data_path={data}", "logical_shards=8", "num_steps=1"]
    start(tmp_path / "run", *common, *flags, model=MODEL)
    assert separator_of(tmp_path / "run") == expected


def test_none_in_python_means_none_where_it_is_given(data: Path, tmp_path: Path) -> None:
    flags = dict(flag.split("=") for flag in [*MODEL, *COMMON])
    for given, expected in (({}, 0), ({"sep_token": None}, None), ({"sep_token": NO_TOKEN}, None)):
        run = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        Trainer.from_recipe(**{**flags, "data_path": data, "num_steps": 1, "ckpt_save_path": run, **given}).train()
        assert separator_of(run) == expected


def test_evaluation_folders_count_where_nothing_is_trained(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = [f"ckpt_load_path={prepared / 'exported'}", "eval_only=true", f"eval_datasets={prepared / 'data/web'}"]
    main(["train", "seq_length=32", "mixed_precision=false", "logical_shards=8", *alone])
    assert "sep_token   0, the end_of_text of prepare.json" in "".join(capsys.readouterr())


@pytest.mark.parametrize("written", [2, "x", -1])
def test_prepared_datasets_that_disagree_or_cannot_be_read_are_an_error_until_sep_token_is_given(
    data: Path, tmp_path: Path, written: object
) -> None:
    shutil.copytree(data / "web", data / "second")
    rewrite(data, "second", end_of_text=written)
    asked = [f"data_path={data}", *COMMON, "dry_run=true"]
    error = refusal(tmp_path / "run", *asked, model=MODEL)
    assert "data/second" in str(error) and "sep_token" in error.settings
    start(tmp_path / "run", *asked, "sep_token=0", model=MODEL)
    start(tmp_path / "run", *asked, "datasets=web", model=MODEL)


def test_weights_and_data_of_other_tokenizers_are_refused_until_they_are_accepted(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    for weights, own in (("exported", "exported"), ("run", "data")):  # a Hugging Face folder; a run
        load = [f"ckpt_load_path={prepared / weights}", "weights_only=true", *COMMON]
        error = refusal(new, *load, f"data_path={prepared / 'wrong_data'}", model=MODEL)
        assert "tokenizers differ, that of the weights in " in str(error) and "tokens differ, the first is" in str(
            error
        )
        assert f"--tokenizer_path={prepared / own}" in str(error)
        assert "accept_tokenizer" in error.settings
        start(new, *load, f"data_path={prepared / 'data'}", "dry_run=true", model=MODEL)
    accepted = [*load, f"data_path={prepared / 'wrong_data'}", "accept_tokenizer=true"]
    start(new, *accepted, model=MODEL)
    assert "accepted: tokenizers differ" in "".join(capsys.readouterr())
    start(new, f"data_path={prepared / 'wrong_data'}", *COMMON, model=MODEL)  # a resumed run is not asked
    assert settings_of(new).data.accept_tokenizer
    assert "tokenizers differ" not in "".join(capsys.readouterr())
    sets = f"eval_datasets={prepared / 'wrong_data/web'}"
    main(["train", *MODEL, f"ckpt_save_path={new}", sets, "eval_only=true"])


def test_a_tokenizer_that_is_not_that_of_the_data_is_refused(prepared: Path, tmp_path: Path) -> None:
    flags = [f"data_path={prepared / 'data'}", *COMMON, "vocab_size=384"]
    error = refusal(tmp_path / "new", *flags, f"tokenizer_path={prepared / 'wrong'}", model=MODEL)
    assert f"that of --tokenizer_path={prepared / 'wrong'} and that of prepare.json in" in str(error)
    assert "Drop the flag, or accept it: --accept_tokenizer=true" in str(error)
    start(tmp_path / "new", *flags, f"tokenizer_path={prepared / 'given'}", "dry_run=true", model=MODEL)
    missing = refusal(tmp_path / "new", *flags, f"tokenizer_path={tmp_path / 'new'}/tokenizer.json", model=MODEL)
    assert isinstance(missing, DataError)


def test_datasets_of_two_tokenizers_are_named(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("data", "wrong_data"):
        shutil.copytree(prepared / name / "web", tmp_path / "data" / name)
    flags = [f"data_path={tmp_path / 'data'}", *COMMON, "vocab_size=384"]
    error = refusal(tmp_path / "new", *flags, model=MODEL)
    assert all(f"that of prepare.json in {tmp_path / 'data' / name}" in str(error) for name in ("data", "wrong_data"))
    assert "tokenizers differ, " in str(error) and "accept_tokenizer" in error.settings
    start(tmp_path / "new", *flags, "accept_tokenizer=true", model=MODEL)
    assert "accepted: tokenizers differ, that of prepare.json in" in "".join(capsys.readouterr())
    assert settings_of(tmp_path / "new").data.tokenizer_path is None


def test_evaluation_sets_count_at_a_start_and_in_an_evaluation(prepared: Path, tmp_path: Path) -> None:
    sets = f"eval_datasets={prepared / 'wrong_data' / 'web'}"
    error = refusal(tmp_path / "new", f"data_path={prepared / 'data'}", sets, *COMMON, model=MODEL)
    assert isinstance(error, ConfigError) and str(prepared / "wrong_data/web") in str(error)
    for weights in ("run", "exported"):
        alone = [f"ckpt_load_path={prepared / weights}", "eval_only=true", "eval_batches=1", "mixed_precision=false"]
        with pytest.raises(SystemExit) as ending:
            main(["train", *alone, "seq_length=32", sets])
        assert "that of the weights in" in str(ending.value.__context__)
        main(["train", *alone, "seq_length=32", sets, "accept_tokenizer=true"])


@pytest.mark.parametrize("has_sentencepiece", [False, True])
def test_a_tokenizer_that_is_unknown_is_no_difference(
    prepared: Path, tmp_path: Path, has_sentencepiece: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = shutil.copytree(prepared / "exported", tmp_path / "weights", ignore=shutil.ignore_patterns("tokenizer*"))
    if has_sentencepiece:
        (weights / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    load = [f"ckpt_load_path={weights}", *COMMON, "dry_run=true"]
    start(tmp_path / "new", *load, f"data_path={prepared / 'wrong_data'}", model=MODEL)
    assert "differ" not in "".join(capsys.readouterr())


def test_data_without_a_record_is_read_with_the_tokenizer_of_the_weights(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared / "data", tmp_path / "foreign")
    foreign = tmp_path / "foreign"
    for name in ("web/prepare.json", "tokenizer.json"):
        (foreign / name).unlink()
    flags = [f"ckpt_load_path={prepared / 'exported'}", f"data_path={foreign}", *COMMON]
    error = refusal(tmp_path / "new", *flags, f"tokenizer_path={prepared / 'wrong'}", model=MODEL)
    assert f"that of --tokenizer_path={prepared / 'wrong'} and that of the weights in" in str(error)
    start(tmp_path / "new", *flags, model=MODEL)
    assert settings_of(tmp_path / "new").data.tokenizer_path == str(prepared / "exported")


def test_a_larger_vocabulary_that_extends_that_of_the_weights_is_trained_on(prepared: Path, tmp_path: Path) -> None:
    train_tokenizer(["some words", *TEXTS], 340).save(tmp_path / "larger")
    encode(prepared / "web.jsonl", tmp_path / "larger", tmp_path / "data")
    load = [f"ckpt_load_path={prepared / 'exported'}", "weights_only=true", f"data_path={tmp_path / 'data'}"]
    start(tmp_path / "new", *load, *COMMON, "vocab_size=512", model=MODEL)
