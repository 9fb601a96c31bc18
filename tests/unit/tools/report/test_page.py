"""The page: everything that files hold is escaped, and tables say what they are asked to."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.tools.report.run_folders import event, training_report, write_lines, write_run

from pretraining.tools.report.markup import Markup, element, joined, table
from pretraining.tools.report.page import changes, differences, render
from pretraining.tools.report.plots import described, numbers, plots_of, script_data
from pretraining.tools.report.run_record import Event, RunRecord, read_run

ATTACK = '<script>alert("x")</script><img src=x onerror=alert(1)>\'&amp;'


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script id="page-data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


class Tags(HTMLParser):
    """Every tag of a page, and its texts outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if not self.tags or self.tags[-1] not in ("script", "style"):
            self.texts.append(data)


def attacked(folder: Path) -> RunRecord:
    """A run whose every text tries to be more than text."""
    write_run(folder)
    names = {f"loss/{ATTACK}": 1.0, f"custom/{ATTACK}": 2.0, ATTACK: 3.0}
    write_lines(folder / "logs" / "metrics.jsonl", [training_report(step, **names) for step in (1, 2)])
    happened = [event(ATTACK, 1, **{ATTACK: ATTACK}), event("sample", 2, prompt=ATTACK, text=ATTACK)]
    happened += [event("skip", 1, reason=ATTACK), event("checkpoint", 2, kind=ATTACK, path=f"/{ATTACK}")]
    write_lines(folder / "logs" / "events.jsonl", happened)
    (folder / "logs" / "environment.json").write_text(json.dumps([{ATTACK: ATTACK, "command": ATTACK}] * 2))
    run = read_run(folder, ATTACK)
    run.settings[ATTACK] = ATTACK
    run.notes.append(ATTACK)
    return run


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_that_a_file_holds_becomes_markup(tmp_path: Path, count: int) -> None:
    page = render([attacked(tmp_path / str(number)) for number in range(count)], "/* the library */")
    tags = Tags(page)
    assert tags.tags.count("script") == 3 and "img" not in tags.tags
    assert any(ATTACK in text for text in tags.texts)
    assert data_of(page)["runs"][0]["name"] == ATTACK


def test_the_library_cannot_end_its_element() -> None:
    page = render([RunRecord(Path("a"), "a")], 'const text = "</script><b>";')
    assert "</script><b>" not in page and "<\\/script><b>" in page


def test_a_slot_in_a_text_is_no_slot(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert "{{plotly}}" in render([read_run(tmp_path, "{{plotly}}")], "LIBRARY")


def test_names_on_a_page_are_its_own(tmp_path: Path) -> None:
    page = render([attacked(tmp_path)], "")
    names = re.findall(r'<[^<>]* id="([^"]+)"', page)
    assert len(names) > 20 and len(names) == len(set(names))
    assert set(re.findall(r'getElementById\("([^"]+)"\)', page)) <= set(names)
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(names)


def test_a_page_asks_the_network_for_nothing(tmp_path: Path) -> None:
    page = render([read_run(write_run(tmp_path), "a")], "")
    assert "default-src 'none'" in page
    assert not re.search(r'(src|href)="(?!#)', page) and "http" not in page.replace("http-equiv", "")


@given(text=st.text())
def test_elements_escape_texts_and_attributes(text: str) -> None:
    class Reader(HTMLParser):
        found: list[object]

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.found = [tag, dict(attrs).get("title")]

    plain = text.replace("\r", "").replace("\x00", "")
    reader = Reader()
    reader.feed(element("p", plain, title=plain))
    assert reader.found == ["p", plain]
    assert "<" not in joined([plain]) and joined([Markup("<b>")]) == "<b>"


def test_tables_name_rows_and_columns() -> None:
    made = table("Both", ["name", "size"], [["a", "1"]], numbers=[1])
    assert '<th scope="row">a</th><td class="number">1</td>' in made and "<caption>Both</caption>" in made


def test_a_run_of_no_report_has_a_page_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    page = render([read_run(tmp_path, "a")], "")
    assert "There is no logs/metrics.jsonl." in page and "No report can be drawn yet." in page
    assert data_of(page)["plots"] == []


def test_settings_that_differ_are_shown_beside_each_other(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, f"learning_rate={name}"), name) for name in ("0.001", "0.002")]
    page = render(runs, "")
    assert "Settings that differ between the runs: 1<" in page
    assert '<th scope="row">optimizer.learning_rate</th><td>0.001</td><td>0.002</td>' in page


def test_a_single_run_shows_what_is_not_at_its_default(tmp_path: Path) -> None:
    page = render([read_run(write_run(tmp_path), "a")], "")
    assert '<th scope="row">run.num_steps</th><td>40</td><td>1000</td>' in page
    assert page.count("optimizer.adam_epsilon") == 1  # among all settings; its 1.0e-08 is the default


TEXTS = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy"))


@given(settings=st.lists(TEXTS, min_size=1, max_size=4))
def test_differences_are_exactly_the_names_whose_values_are_not_all_equal(settings: list[dict[str, str]]) -> None:
    found = differences(settings)
    for name in "abc":
        values = [each.get(name) for each in settings]
        assert (name in found) == (len(set(values)) > 1)
        if name in found:
            assert found[name] == [value or "–" for value in values]


def test_what_changed_between_starts_is_told(tmp_path: Path) -> None:
    assert changes({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == {"b": ("2", "3")}
    page = render([read_run(write_run(tmp_path), "a")], "")
    assert '<th scope="row">2</th><td>packages.torch</td><td>2.12</td><td>2.13</td>' in page
    assert "packages.numpy</td><td>2.3</td><td>" not in page


def test_the_head_says_how_the_run_stands_and_what_came_of_it(tmp_path: Path) -> None:
    page = render([read_run(write_run(tmp_path), "a")], "")
    assert 'class="state good">finished<' in page and "40 of 40 steps are done" in page
    assert "4.1000<small>best 4.1000 at step 40" in page and "4.2000<small>best 4.2000 at step 40" in page
    assert "40s<small>from first to last report, 50% of it training" in page and "2 starts" in page
    assert "MFU</dt>" not in page


def test_times_that_do_not_fit_each_other_give_no_share(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = render([read_run(tmp_path, "a")], "")
    assert "15s (38%)" in page and "5s (12%)" in page and "20s (50%)" in page
    slow = [training_report(step, step_seconds=100.0) for step in (1, 2)]
    write_lines(tmp_path / "logs" / "metrics.jsonl", slow)
    page = render([read_run(tmp_path, "a")], "")
    assert "of it training" not in page and "What the wall time went to" not in page


def test_a_run_under_way_says_how_long_it_will_take(tmp_path: Path) -> None:
    write_run(tmp_path, status="running")
    (tmp_path / "lease.json").write_text("{}")
    assert "1m 00s<small>at the rate so far" in render([read_run(tmp_path, "a")], "")


def test_samples_of_text_are_shown_the_newest_first(tmp_path: Path) -> None:
    write_run(tmp_path)
    samples = [event("sample", step, prompt="Once", text=f" upon {step}") for step in (20, 40)]
    write_lines(tmp_path / "logs" / "events.jsonl", [*samples, event("sample", 40, text=3)])
    page = render([read_run(tmp_path, "a")], "")
    assert page.index("<b>Once</b> upon 40") < page.index("Earlier samples of a: 1") < page.index("<b>Once</b> upon 20")


def test_several_runs_are_rows_of_a_table(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, shift=shift), name) for name, shift in (("a", 0.0), ("b", 1.0))]
    page = render(runs, "")
    assert '<th scope="row">a</th>' in page and '<td class="number">5.2000 (best 5.2000 at step 40)</td>' in page
    losses = next(plot for plot in data_of(page)["plots"] if plot["key"] == "loss")
    assert [(each["run"], each["label"]) for each in losses["series"]] == [
        *((0, "training"), (0, "evaluation"), (1, "training"), (1, "evaluation"))
    ]


def test_points_keep_their_steps_and_not_their_places(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path), "a")
    data = script_data([run], plots_of([run]))["runs"][0]["evaluations"]
    assert (data["step"], data["seconds"]) == ([20, 40], [20, 40])
    assert data["curves"]["evaluation_loss"] == {"at": None, "y": [4.5, 4.2]}


def test_every_number_of_a_report_is_drawn_or_follows_from_one(tmp_path: Path) -> None:
    write_run(tmp_path)
    groups = {"learning_rate_group_0": 1e-3, "learning_rate_group_1": 2e-3, "news": 5.0, "z_loss": 1.0}
    mine = {"custom/hits": 1.0, "loss/code": 3.0}
    rows = [training_report(1, **groups, **mine), {"step": 1, "evaluation_loss": 2.0, "evaluation_custom/hits": 1.0}]
    write_lines(tmp_path / "logs" / "metrics.jsonl", rows)
    plots = {plot.title: plot for plot in plots_of([read_run(tmp_path, "a")])}
    assert [label for _, _, label in plots["Learning rate"].numbers] == ["group 0", "group 1"]
    assert [label for _, _, label in plots["Training loss by dataset"].numbers] == ["web", "code"]
    assert plots["news"].section == "other" and "z-loss" in plots and "Updates left out" not in plots
    assert [label for _, _, label in plots["hits"].numbers] == ["training", "evaluation"]
    assert "perplexity" not in plots


@given(values=st.lists(st.floats()))
def test_numbers_are_json_and_close_to_what_they_were(values: list[float]) -> None:
    for value, written in zip(values, json.loads(json.dumps(numbers(values), allow_nan=False)), strict=True):
        assert (written is None) == (not math.isfinite(value))
        if written is not None:
            assert written == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "details", "text"),
    [
        ("start", {}, "the run begins"),
        (
            "restart",
            {"number": 3, "previous_status": "failed", "previous_reason": "x"},
            "start 3, after the one before failed: x",
        ),
        ("restore", {"checkpoint": "/runs/a/step_2_ckp"}, "goes on from step_2_ckp"),
        ("checkpoint", {"kind": "best", "path": "/runs/a/step_2_ckp"}, "best, step_2_ckp"),
        ("evaluation", {"evaluation_loss": 2.5}, "loss 2.5"),
        ("skip", {"reason": "a spike"}, "update left out: a spike"),
        ("rollback", {"first_step": 7, "samples": [1, 9]}, "back to before step 7, without samples 1-9"),
        ("rollback", {}, "back to before step "),
        ("phase", {"global_batch_size": 4, "weights": {"a": 1, "b": 3}}, "batches of 4 sequences, a 25.0%, b 75.0%"),
        ("phase", {"global_batch_size": 4, "weights": {"a": "x", "b": 0}}, "batches of 4 sequences"),
        ("end", {"status": "failed", "reason": "x"}, "failed: x"),
        ("news", {"a": 1}, "a 1"),
        ("news", {"a": "x" * 400}, "a " + "x" * 297 + "…"),
    ],
)
def test_events_are_told_in_a_line(kind: str, details: dict[str, Any], text: str) -> None:
    assert described(Event(kind, 0.0, 0.0, details)) == text


def test_curves_that_are_thinned_say_so(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert "Every report is a point" in render([read_run(tmp_path, "a")], "")
    write_lines(tmp_path / "logs" / "metrics.jsonl", ({"step": n, "loss": math.sin(n)} for n in range(5000)))
    page = render([read_run(tmp_path, "a")], "")
    found = re.search(r"the longest has 5,000 reports, of which ([\d,]+) are drawn", page)
    assert found is not None and int(found[1].replace(",", "")) <= 2002
