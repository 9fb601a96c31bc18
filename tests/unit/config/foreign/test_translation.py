"""What every translation of a foreign file promises: each key is accounted for, with its line; nothing is silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pretraining.config.command_line import load_train_config
from pretraining.config.commands import TranslateConfig
from pretraining.config.fields import settings_of
from pretraining.config.foreign.kinds import KINDS, recognise, translate
from pretraining.config.foreign.translation import (
    FILLED_IN,
    NOT_UNDERSTOOD,
    Source,
    Translating,
    becomes,
    left_out,
    one_of,
    only,
    share_of_run,
    trackers,
)
from pretraining.config.settings_files import parse_tree
from pretraining.errors import ConfigError

CONTENT = """
optim:
  lr: 3e-4
  fused: true
scheduler: {lr: 5}
act: gelu
"""


def translating(content: str = CONTENT, **options: Any) -> Translating:
    return Translating("some", Source("a.yaml", None, content, parse_tree(content, "a.yaml")), **options)


def test_each_key_has_a_note_with_its_line() -> None:
    work = translating(accept_llama=True)
    work.apply(
        {
            "optim.lr": becomes("learning_rate"),
            "optim.fused": left_out("it always is"),
            "act": only("silu", reason="no Llama"),
        }
    )
    done = work.finish()
    assert done.settings == {"learning_rate": "3e-4"}
    assert [(note.key, note.value, note.became, note.line) for note in done.notes] == [
        ("optim.lr", "3e-4", "learning_rate=3e-4", 3),
        ("optim.fused", "true", "", 4),
        ("scheduler.lr", "5", "", 5),
        ("act", "gelu", "", 6),
    ]
    assert done.notes[2].remark.startswith("not known to the reader of some files")
    assert done.notes[3].remark == "no Llama; left out, as accept_llama says"
    assert done.note_of("learning_rate") is done.notes[0]


def test_the_table_shows_all_of_it() -> None:
    work = translating("a: 1\nbcd: null\n")
    work.set("a", "the same", seed="1")
    assert work.finish().table() == ["  a: 1       seed=1  the same", "  bcd: null  -       not given"]


def test_problems_are_collected_with_file_line_and_key() -> None:
    work = translating("a: x\nb: y\nc: gelu\nd: [{}]\n")
    work.apply(
        {
            "a": one_of("tie_word_embeddings", {"yes": "true"}),
            "c": only("silu", reason="no Llama"),
            "d": becomes("seed"),
        }
    )
    work.refuse("b", "it cannot be")
    with pytest.raises(ConfigError) as error:
        work.finish()
    assert list(error.value.problems) == [
        "a.yaml:1: a: x: one of yes is needed",
        "a.yaml:3: c: gelu: no Llama. --accept_llama=true trains a Llama of the same shape without it",
        "a.yaml:4: d: a plain value is needed",
        "a.yaml:2: b: y: it cannot be",
    ]


def test_what_a_system_takes_for_missing_keys_is_named_as_filled_in() -> None:
    work = translating("seed: 1\n# lr: 5\n")
    work.fill_in({"lr": "3e-4", "seed": "2"})
    work.apply({"lr": becomes("learning_rate", remark="fine"), "seed": becomes("seed")})
    assert [(note.key, note.became, note.remark, note.line) for note in work.finish().notes] == [
        ("seed", "seed=1", "", 1),
        ("lr", "learning_rate=3e-4", f"{FILLED_IN}; fine", None),
    ]


def test_a_problem_that_several_keys_meet_is_told_once() -> None:
    def ask(work: Translating, key: str) -> None:
        work.number("lr")

    work = translating("lr: often\na: 1\nb: 1\n")
    work.apply({"a": ask, "b": ask, "lr": becomes("learning_rate")})
    with pytest.raises(ConfigError) as error:
        work.finish()
    assert list(error.value.problems) == ["a.yaml:1: lr: often: a number is needed"]


@pytest.mark.parametrize(("ask", "said"), [("is_true", "true or false is needed"), ("number", "a number is needed")])
def test_a_value_of_another_type_is_named_with_its_place(ask: str, said: str) -> None:
    work = translating("optim:\n  lr: often\n")
    with pytest.raises(ConfigError, match=f"a.yaml:2: optim.lr: often: {said}"):
        getattr(work, ask)("optim.lr")
    assert getattr(work, ask)("optim.other") is None


@pytest.mark.parametrize("value", ["0", "0.0", "0e0"])
def test_equal_numbers_are_equal(value: str) -> None:
    work = translating(f"dropout: {value}\n")
    work.apply({"dropout": only("0", reason="no")})
    assert work.finish().notes[0].remark == "as in every Llama"


@pytest.mark.parametrize(
    ("suffix", "content", "line"),
    [
        (".yaml", "a:\n  lr: 1\nb:\n  lr: 2\n", 4),
        (".json", '{"a": {"lr": 1},\n "b": {\n  "lr": 2}}', 3),
        (".toml", "[a]\nlr = 1\n[b]\nx_lr = 3\nlr = 2\n", 5),
    ],
)
def test_a_key_is_found_below_its_section(suffix: str, content: str, line: int) -> None:
    assert Source("a", None, content, parse_tree(content, "a", suffix)).line_of("b.lr") == line


def test_a_file_of_no_kind_says_what_was_looked_for() -> None:
    source = Source("a.yaml", None, "", {"x": "1"})
    assert recognise(source, ".yaml") == []
    with pytest.raises(ConfigError) as error:
        translate(source, ".yaml")
    text = str(error.value)
    assert text.startswith("a.yaml is of no known kind")
    assert all(f"{name}: {kind.what}" in text and kind.signs[0] in text for name, kind in KINDS.items())


def test_a_file_of_two_kinds_says_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "other", KINDS["stub"])
    with pytest.raises(ConfigError, match=r"a.yaml may be stub or other \(stub: dist.backend; other: dist.backend\)"):
        translate(Source("a.yaml", None, "", {"dist": {"backend": "gloo"}}), ".yaml")


def test_the_flag_takes_every_kind() -> None:
    assert set(settings_of(TranslateConfig)["kind"].choices) == set(KINDS)


def test_a_kind_that_is_not_known_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--from=stup is not known: did you mean stub"):
        translate(Source("a.yaml", None, "", {}), ".yaml", "stup")


def test_no_sign_of_a_kind_is_one_of_another_or_holds_it() -> None:
    for name, kind in KINDS.items():
        others = [sign for other, each in KINDS.items() if other != name for sign in each.signs]
        assert [(sign, each) for sign in kind.signs for each in others if f"{each}.".startswith(f"{sign}.")] == []


@pytest.mark.parametrize(
    ("content", "flag"),
    [
        ('{"optimizer": {"type": "Lamb"}, "gradient_clipping": 1}', "optimizer"),
        ('{"scheduler": {"type": "OneCycle", "params": {}}, "gradient_clipping": 1}', "schedule"),
        ('{"per_device_train_batch_size": 2, "optim": "adafactor"}', "optimizer"),
        ('{"per_device_train_batch_size": 2, "adafactor": true}', "optimizer"),
        ('{"per_device_train_batch_size": 2, "lr_scheduler_type": "inverse_sqrt"}', "schedule"),
        ('{"use_amp": true, "optimizer": "lamb"}', "optimizer"),
        ('{"use_amp": true, "lr_scheduler": "step"}', "schedule"),
    ],
)
def test_a_flag_wins_over_what_a_file_cannot_translate(tmp_path: Path, content: str, flag: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    others = {"use_dummy_dataset": "true", "num_steps": "10", "warmup_steps": "1"}
    with pytest.raises(ConfigError, match=r"a\.json:1: "):
        load_train_config([str(path)], others)
    value = {"optimizer": "adamw", "schedule": "cosine"}[flag]
    config = load_train_config([str(path)], {flag: value, **others})
    assert {"optimizer": config.optimizer.optimizer, "schedule": config.schedule.schedule}[flag] == value


def test_the_parts_of_a_schedule_that_the_command_line_replaces_are_left_out_with_it() -> None:
    tree = {"job": {"description": "a"}, "lr_scheduler": {"decay_type": "wavy", "decay_ratio": "0.1"}}
    done = translate(Source("a.toml", None, "", tree, {"schedule": "cosine"}), ".toml")
    assert "schedule" not in done.settings and not done.unknown


def test_an_argument_under_a_foreign_name_does_not_win_over_its_own_refusal() -> None:
    source = Source("a.toml", None, "", {"job": {"description": "a"}}, {"lr_scheduler.decay_type": "wavy"})
    with pytest.raises(ConfigError, match=r"lr_scheduler\.decay_type=wavy: one of linear, cosine, sqrt is needed"):
        translate(source, ".toml")


def test_keys_that_are_not_known_stand_last_under_a_heading_with_the_nearest_known_one() -> None:
    work = translating("optim: {lrr: 1, lr: 2}\nspeed: 3\nzzz: 4\n")
    work.apply({"optim.lr": becomes("learning_rate"), "seed": becomes("seed")})
    work.leave_out_groups({"speed": "not needed"})
    done = work.finish()
    assert [line.split()[0] for line in done.table()] == ["optim.lr:", "speed:", "Not", "optim.lrr:", "zzz:"]
    assert done.table()[2] == NOT_UNDERSTOOD
    assert [note.remark for note in done.unknown] == [
        "not known to the reader of some files: did you mean optim.lr?",
        "not known to the reader of some files",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_which_nothing_is_understood_is_refused(kind: str) -> None:
    suffix = KINDS[kind].suffixes[0]
    source = Source("a" + suffix, None, "", {"zzz": "1", "yyy": "2"})
    with pytest.raises(ConfigError, match=rf"reader of {kind} files knows none of its keys \(zzz, yyy\).*--from=…"):
        translate(source, suffix, kind)


def test_a_name_that_is_nearly_one_of_the_guides_is_asked_about() -> None:
    tree = {"training": {"use_amp": "true", "lr": "1", "warmup_step": "1"}}
    done = translate(Source("a.json", None, "", tree), ".json")
    assert [note.remark.partition("did you mean ")[2] for note in done.unknown] == ["learning_rate?", "warmup_steps?"]


def test_a_value_that_is_a_secret_is_not_shown() -> None:
    content = "hub_token: abc\na: {token: abc, WANDB_API_KEY: abc}\nsep_token: 5\n"
    assert [note.value for note in translating(content).finish().notes] == ["(not shown)"] * 3 + ["5"]


def test_two_keys_that_give_a_setting_two_values_are_named() -> None:
    work = translating("a: 0.10\nb: 1e-1\nc: 0.2\n")
    work.apply({key: becomes("learning_rate") for key in "abc"})
    with pytest.raises(ConfigError) as error:
        work.finish()
    problem = "two values for learning_rate, 0.10 and 0.2: a.yaml:1: a: 0.10 and a.yaml:3: c: 0.2: keep one"
    assert list(error.value.problems) == [problem]


def test_a_value_that_is_no_number_does_not_differ_from_itself() -> None:
    work = translating("a: NaN\nb: nan\n")
    work.apply({key: becomes("adam_beta1") for key in "ab"})
    assert work.finish().settings == {"adam_beta1": "nan"}


def test_a_value_that_is_no_number_is_refused_by_its_setting(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"per_device_train_batch_size": 2, "adam_beta1": NaN}')
    with pytest.raises(ConfigError) as error:
        load_train_config([str(path)], {"use_dummy_dataset": "true", "num_steps": "10"})
    assert len(error.value.problems) == 1
    assert error.value.problems[0].startswith(f"{path}:1: adam_beta1: NaN: ")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.yaml", "optim:\n  lr: 1e-3\ndist: {dtype: float32}\n"),
        ("a.json", '{"use_amp": true, "learning_rate": 1e-3}'),
        ("a.toml", "[training]\nlocal_batch_size = 2\n[optimizer]\nlr = 1e-3\n"),
        ("a.py", "learning_rate = 1e-3\nn_layer = 2\n"),
    ],
)
def test_a_byte_order_mark_is_passed_over(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8-sig")
    assert load_train_config([str(path)], {"use_dummy_dataset": "true"}).optimizer.learning_rate == 1e-3


def test_a_bad_value_that_two_rules_read_is_one_problem() -> None:
    work = translating("a: x\nb: 1\n")
    work.apply(dict.fromkeys("ab", lambda each, key: each.set(key, seed=each.number("a"))))
    with pytest.raises(ConfigError) as error:
        work.finish()
    assert list(error.value.problems) == ["a.yaml:1: a: x: a number is needed"]


def test_what_is_assumed_stands_at_the_end_and_takes_nothing_from_what_is_given() -> None:
    work = translating("a: 1\nb: null\n")
    work.set("a", seed="1")
    work.assume("c", "by default", batch_size=4)
    work.assume("b", "by default", num_workers=2)
    work.assume("d", "by default", seed=2, min_length=3)
    work.assume("a", "by default", keep_last=1)
    work.assume("model", "give one")
    done = work.finish()
    assert done.settings == {"seed": "1", "batch_size": "4", "num_workers": "2"}
    assert done.table()[1:] == [
        "  b: (not given)      num_workers=2  by default",
        "  c: (not given)      batch_size=4   by default",
        "  model: (not given)  -              give one",
    ]


def test_a_part_of_a_file_is_a_source_of_its_own() -> None:
    outer = translating("lr: 1\nmore:\n  inner:\n    lr: 2\n    other: {}\n")
    part = Translating("some", outer.source.part("more.inner"))
    part.apply({"lr": becomes("seed")})
    assert part.place("lr") == "a.yaml:4: more.inner.lr"
    outer.include(part)
    notes = {note.key: note for note in outer.finish().notes}
    assert (notes["more.inner.lr"].became, notes["more.inner.lr"].line) == ("seed=2", 4)
    assert notes["more.inner.other"].remark == "not given"


def test_groups_are_left_out_with_what_is_under_them() -> None:
    work = translating("a: {b: 1, c: {d: 2}}\nxyz: 3\ne: {}\n")
    work.set("a.b", seed="1")
    work.leave_out_groups({"a": "speed", "e": "nothing"})
    remarks = ["", "speed", "not known to the reader of some files", "nothing"]
    assert [note.remark for note in work.finish().notes] == remarks


@pytest.mark.parametrize(
    ("listed", "became", "remark"),
    [
        ("[TensorBoard, wandb]", "tracker=tensorboard,wandb", ""),
        ("[]", "tracker=none", ""),
        ("none", "tracker=none", ""),
        ("all", "", "tensorboard, as by default here; --tracker names others"),
        ("[wandb, comet_ml]", "tracker=wandb", "comet_ml: no tracker here, but a class of your own is one"),
        ('["", wandb]', "tracker=wandb", ""),
        ("neptune", "", "neptune: no tracker here, but a class of your own is one"),
    ],
)
def test_a_list_of_trackers(listed: str, became: str, remark: str) -> None:
    work = translating(f"report_to: {listed}\n")
    work.apply({"report_to": trackers})
    note = work.finish().notes[0]
    assert (note.became, note.remark) == (became, remark)


@pytest.mark.parametrize(("share", "written"), [("0.03", "3%"), ("1", "100%"), ("0", "0%"), ("0.001", "0.1%")])
def test_a_fraction_of_the_run_is_a_percentage(share: str, written: str) -> None:
    assert share_of_run(share) == written


@pytest.mark.parametrize("share", ["1.5", "-0.1", "often", "nan"])
def test_what_is_no_fraction_is_refused(share: str) -> None:
    with pytest.raises(ValueError, match="a number from 0 to 1 is needed"):
        share_of_run(share)
