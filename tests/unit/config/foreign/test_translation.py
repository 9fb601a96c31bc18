"""What every translation of a foreign file promises: each key is accounted for, with its line; nothing is silent."""

from __future__ import annotations

from typing import Any

import pytest

from pretraining.config.foreign.kinds import KINDS, recognise, translate
from pretraining.config.foreign.translation import FILLED_IN, Source, Translating, becomes, left_out, one_of, only
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
    assert done.notes[2].remark == "not known to the reader of some files"
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


def test_an_argument_of_the_command_line_wins_over_the_files_key() -> None:
    content = "lr: 1\n"
    work = Translating("some", Source("a.yaml", None, content, {"lr": "1"}, {"lr": "often", "seed": "3"}))
    work.take_override("lr")
    work.take_override("other")
    assert work.values == {"lr": "often"}
    with pytest.raises(ConfigError, match=r"^--lr: often: a number is needed"):
        work.number("lr")
    work.set("lr", learning_rate="2")
    assert work.finish().used_overrides == {"lr"}


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


def test_a_kind_that_is_not_known_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--from=stup is not known: did you mean stub"):
        translate(Source("a.yaml", None, "", {}), ".yaml", "stup")


def test_no_sign_of_a_kind_is_one_of_another() -> None:
    signs = [sign for kind in KINDS.values() for sign in kind.signs]
    assert len(signs) == len(set(signs))
