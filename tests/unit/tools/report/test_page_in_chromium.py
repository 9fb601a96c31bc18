"""The page in a browser: it draws, it listens, it fits a phone, and it asks the network for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import PROGRAM, Browser, Page
from unit.tools.report.run_folders import event, training_report, write_lines, write_run

from pretraining.config.commands import PageConfig
from pretraining.tools.report.report import report

pytest.importorskip("plotly", reason="needs plotly: pip install 'pretraining[report]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium"),
]
ATTACK = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
DRAWN = (
    "document.documentElement?.dataset.drawn !== undefined && "
    "Number(document.documentElement.dataset.drawn) === document.querySelectorAll('.plot').length"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of one run, of two, and of one whose names are hostile."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {name: write_run(folder / name, shift=shift) for name, shift in (("a", 0.0), ("b", 1.0), ("c", 0.0))}
    hostile = {f"loss/{ATTACK}": 1.0, f"custom/{ATTACK}": 2.0, ATTACK: 3.0}
    write_lines(runs["c"] / "logs" / "metrics.jsonl", [training_report(step, **hostile) for step in (1, 2, 3)])
    write_lines(runs["c"] / "logs" / "events.jsonl", [event(ATTACK, 1, text=ATTACK), event("skip", 2, reason=ATTACK)])
    found = {name: folder / f"{name}.html" for name in ("one", "two", "hostile")}
    for name, chosen in (("one", "a"), ("two", "ab"), ("hostile", "c")):
        report(PageConfig(tuple(str(runs[each]) for each in chosen), output_path=str(found[name])))
    return found


def opened(browser: Browser, path: Path, **how: Any) -> Page:
    page = browser.open(path, **how)
    page.wait_for(DRAWN)
    return page


def plot(page: Page, key: str, what: str) -> Any:
    """A part of what the library holds of a plot."""
    return page.run(f"document.querySelector('[data-plot={key}]').{what}")


@pytest.mark.parametrize("name", ["one", "two", "hostile"])
def test_every_plot_is_drawn_without_a_word_on_the_console_or_the_network(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    page = opened(browser, pages[name])
    assert page.run("[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('.main-svg'))")
    assert page.run("document.querySelectorAll('.plot .trace').length") > 8
    assert page.problems == []
    assert page.requests == [pages[name].absolute().as_uri()]
    assert page.run("document.title") != "taken"
    assert page.run("document.querySelectorAll('img').length") == 0


def test_sketches_are_there_where_no_script_runs_and_gone_when_plots_are_drawn(
    browser: Browser, pages: dict[str, Path]
) -> None:
    page = opened(browser, pages["one"])
    assert page.run("document.querySelectorAll('.sketch').length") == 0
    page.send("Emulation.setScriptExecutionDisabled", value=True)
    page.send("Page.reload")
    shown = "document.querySelectorAll('.plot .sketch polyline')"
    page.wait_for(f"{shown}.length > 8")
    assert page.run(f"[...{shown}].every((line) => line.getBoundingClientRect().width > 100)")
    assert "this browser runs none" in page.run("document.querySelector('noscript').textContent")


def test_no_button_sends_a_chart_anywhere(browser: Browser, pages: dict[str, Path]) -> None:
    page = opened(browser, pages["one"])
    titles = page.run("[...document.querySelectorAll('.modebar-btn')].map((button) => button.dataset.title)")
    assert titles and all("cloud" not in (title or "").lower() for title in titles)
    assert plot(page, "loss", "_context.toImageButtonOptions.format") == "svg"


def test_the_horizontal_axis_can_be_chosen(browser: Browser, pages: dict[str, Path]) -> None:
    page = opened(browser, pages["one"])
    found = {}
    for axis in ("steps", "tokens", "time", "flops"):
        page.run(f"document.querySelector('input[value={axis}]').click()")
        found[axis] = plot(page, "loss", "data[0].x.slice(0, 2)")
    assert (found["steps"], found["tokens"], found["time"]) == ([2, 4], [64, 128], [2, 4])
    assert found["flops"][1] == 2 * found["flops"][0] > 10**6
    assert page.problems == []


def test_smoothing_keeps_what_was_measured_behind_it(browser: Browser, pages: dict[str, Path]) -> None:
    page = opened(browser, pages["one"])
    before = plot(page, "loss", "data[0].y")
    page.run("document.getElementById('smoothing').value = 0.9")
    page.run("document.getElementById('smoothing').dispatchEvent(new Event('input'))")
    page.wait_for("document.querySelector('[data-plot=loss]').data[0].opacity === 0.25")
    assert plot(page, "loss", "data[0].y") == before
    smoothed = plot(page, "loss", "data[1].y")
    assert smoothed[0] == pytest.approx(before[0]) and smoothed[-1] > before[-1] and len(smoothed) == len(before)


def test_axes_become_logarithmic(browser: Browser, pages: dict[str, Path]) -> None:
    page = opened(browser, pages["one"])
    page.run("document.querySelector('button[data-log=loss]').click()")
    page.run("document.getElementById('log-x').click()")
    assert plot(page, "loss", "layout.yaxis.type") == plot(page, "loss", "layout.xaxis.type") == "log"
    assert plot(page, "grad-norm", "layout.yaxis.type") == "linear"
    assert page.run("document.querySelector('button[data-log=loss]').getAttribute('aria-pressed')") == "true"


def test_marks_are_switched_on_and_off(browser: Browser, pages: dict[str, Path]) -> None:
    page = opened(browser, pages["one"])
    marked = "data.filter((trace) => trace.yaxis === 'y2').map((trace) => trace.x[0])"
    assert sorted(plot(page, "loss", marked)) == [0, 7]  # starts, and the skipped update
    click = "[...document.querySelectorAll('#marks label')].find((label) => label.textContent === '{}').click()"
    page.run(click.format("checkpoints"))
    assert sorted(plot(page, "loss", marked)) == [0, 7, 20]
    page.run(click.format("starts"))
    assert sorted(plot(page, "loss", marked)) == [7, 20]


def test_a_zoom_into_one_plot_is_one_into_all(browser: Browser, pages: dict[str, Path]) -> None:
    page = opened(browser, pages["one"])
    zoom = "{'xaxis.range[0]': 10, 'xaxis.range[1]': 20}"
    page.run(f"void Plotly.relayout(document.querySelector('[data-plot=loss]'), {zoom})")
    page.wait_for("document.querySelector('[data-plot=memory]').layout.xaxis.range[1] === 20")
    assert plot(page, "grad-norm", "layout.xaxis.range") == [10, 20]
    assert page.problems == []


@pytest.mark.parametrize("name", ["one", "two", "hostile"])
@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_page_never_scrolls_sideways(browser: Browser, pages: dict[str, Path], name: str, width: int) -> None:
    page = opened(browser, pages[name], width=width, height=844)
    assert page.run("[...document.querySelectorAll('details')].forEach((part) => { part.open = true; })") is None
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("[...document.querySelectorAll('.plot .main-svg')].every((plot) => plot.clientWidth <= innerWidth)")


def test_light_and_dark_differ_on_the_page_and_in_plots_and_change_at_once(
    browser: Browser, pages: dict[str, Path]
) -> None:
    page = opened(browser, pages["one"])

    def colours() -> list[Any]:
        body = page.run("getComputedStyle(document.body).backgroundColor")
        return [body, plot(page, "loss", "data[0].line.color"), plot(page, "loss", "layout.font.color")]

    light = colours()
    page.prefer("dark")
    page.wait_for(f"document.querySelector('[data-plot=loss]').data[0].line.color !== '{light[1]}'")
    dark = colours()
    assert all(a != b for a, b in zip(light, dark, strict=True))


def test_a_printed_page_is_light_and_narrow(browser: Browser, pages: dict[str, Path]) -> None:
    page = opened(browser, pages["one"], scheme="dark")
    page.run("window.dispatchEvent(new Event('beforeprint'))")
    assert page.run("getComputedStyle(document.documentElement).getPropertyValue('--page').trim()") == "#ffffff"
    assert plot(page, "loss", "_fullLayout.width") == 660
    page.run("window.dispatchEvent(new Event('afterprint'))")
    page.wait_for("document.querySelector('[data-plot=loss]')._fullLayout.width > 700")
