from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.token_files import loader, make_root, plan, rows, write_documents

from pretraining.config.training import DataConfig
from pretraining.errors import DamagedError, DataError


@pytest.fixture
def state(small: DataConfig) -> dict[str, Any]:
    made = loader(small, plan(8))
    next(made)
    return made.state_dict()


def refusal(state: dict[str, Any], config: DataConfig, batch: int = 8, seed: int = 7) -> str:
    """The error with which a loader refuses a state; the loader keeps its position."""
    made = loader(config, plan(batch), seed=seed)
    next(made)
    with pytest.raises((DataError, DamagedError)) as raised:
        made.load_state_dict(state)
    assert made.next_step == 1
    return str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_length": 8},
        {"logical_shards": 5},
        {"sep_token": 3},
        {"sep_token": 3, "datasets": ("books",)},  # where no dataset is the same
        {"bos_token": 3},
        {"strip_tokens": (5, 3, 5)},
        {"min_length": 2},
        {"held_out_fraction": 0.1},
        {"packing": "best_fit"},
        {"use_dummy_dataset": True},
    ],
)
def test_other_settings_are_refused_by_name(small: DataConfig, state: dict[str, Any], changes: dict[str, Any]) -> None:
    make_root(Path(small.data_path or ""), books=40)
    assert next(iter(changes)) in refusal(state, replace(replace(small, datasets=("web", "code")), **changes))


def test_all_differences_are_in_one_error_with_what_may_differ(small: DataConfig, state: dict[str, Any]) -> None:
    state["datasets"]["web"]["settings"] = "of another release"
    text = refusal(state | {"split": "held_out"}, replace(small, seq_length=8), seed=6)
    assert text.count("\n  - ") == 4 and "--ckpt_save_path" in text
    assert all(named in text for named in ("seed", "seq_length", "split", "dataset 'web'"))


def test_changed_files_are_refused_and_named(small: DataConfig, state: dict[str, Any]) -> None:
    write_documents(Path(small.data_path or "") / "web/three.arrow", [[1] * 50])
    assert "added: three.arrow" in refusal(state, small)


@pytest.mark.parametrize(
    "damage",
    [
        *({"version": 1}, {"datasets": 3}, {"next_sample": "x"}, {"next_sample": -8}, {"phases": []}),
        *({"next_sample": 9}, {"first_sample": 9}, {"first_step": 2}, {"first_step": 0}, {"seq_length": 8}),
        *(
            {"base_counts": {"code": [[16, 4]], "web": [[16, 4]]}},
            {"skip_samples": [["4", 5]]},
            {"skipped": {"web": 3}},
        ),
    ],
)
def test_a_phase_that_cannot_be_is_damage(small: DataConfig, state: dict[str, Any], damage: dict[str, Any]) -> None:
    changed = loader(small, plan(4))
    changed.load_state_dict(state)
    state = changed.state_dict()
    loader(small, plan(4)).load_state_dict(state)
    first, second = state["phases"]
    refusal(state | damage if damage.keys() <= state.keys() else state | {"phases": [first, second | damage]}, small)


def test_a_state_of_another_version_is_refused_with_what_to_do(small: DataConfig, state: dict[str, Any]) -> None:
    text = refusal(state | {"version": 3}, small)
    assert "version 3" in text and "--weights_only=true" in text


# Values that may replace a number or a list in a damaged or foreign state.
NONSENSE: st.SearchStrategy[Any] = st.sampled_from(
    [None, -1, 0, 1, 2**63, -(2**63), 10**30, 1.5, float("inf"), float("nan"), "5", [], {}, [1]]
)


@st.composite
def damaged_states(draw: st.DrawFn, state: dict[str, Any]) -> dict[str, Any]:
    """A state with nonsense somewhere in it."""
    state = json.loads(json.dumps(state))
    inner: Any = state
    while True:
        key = draw(st.sampled_from(list(inner) if isinstance(inner, dict) else range(len(inner))))
        if not (isinstance(inner[key], dict | list) and inner[key] and draw(st.integers(0, 5))):
            break
        inner = inner[key]
    if draw(st.booleans()):
        inner[key] = draw(NONSENSE)
    else:
        del inner[key]
    return state


def test_any_state_is_refused_or_resumed(small: DataConfig) -> None:
    made = loader(replace(small, skip_samples=("3-4", "100-120", "200")), plan(8))
    next(made)
    other = replace(small, datasets=("web", "code"), weights=(3.0, 1.0))
    changed = loader(other, plan(5))
    changed.load_state_dict(made.state_dict())
    next(changed)
    good = changed.state_dict()
    refused = 0

    @settings(max_examples=300)
    @given(damaged_states(good))
    def load(state: dict[str, Any]) -> None:
        nonlocal refused
        changed.rewind()
        try:
            changed.load_state_dict(state)
        except (DataError, DamagedError):
            refused += 1
        else:
            json.dumps(changed.state_dict())
            assert len(rows(next(changed))) == 5

    load()
    assert refused > 100
