"""`pretrain report`: what is written where, and what is refused."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, plain_environment
from unit.tools.report.run_folders import write_run

from pretraining.cli import main
from pretraining.config.command_line import parse_config
from pretraining.config.commands import PageConfig
from pretraining.errors import ConfigError, DataError
from pretraining.tools.report.report import report

pytest.importorskip("plotly", reason="needs plotly: pip install 'pretraining[report]'")


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Makes a package one that is not installed."""
    really = builtins.__import__

    def importing(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return really(name, *rest, **more)

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", importing)


def test_the_page_of_a_run_lands_in_its_folder(tmp_path: Path) -> None:
    main(["report", str(write_run(tmp_path / "a"))])
    page = (tmp_path / "a" / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "<h1>a</h1>" in page and "Plotly" in page


def test_the_page_of_several_runs_lands_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main(["report", str(write_run(tmp_path / "a")), str(write_run(tmp_path / "b"))])
    assert "<h1>a, b</h1>" in (tmp_path / "report.html").read_text()


def test_runs_are_words_or_a_comma_list_and_folders_of_a_sweep_keep_their_commas(tmp_path: Path) -> None:
    odd = tmp_path / "rate=1,optimizer=adamw"
    odd.mkdir()

    def read(*words: str, **flags: str) -> tuple[str, ...]:
        return parse_config(PageConfig, words, flags).run_path

    assert read("a", "b", output_path="x") == ("a", "b")
    assert read("a,b", "c") == read(run_path="a,b,c") == ("a", "b", "c")
    assert read(str(odd), "c", "output_path=x") == (str(odd), "c")
    with pytest.raises(ConfigError, match=r"a,,b: there is an empty item"):
        read("a,,b")
    with pytest.raises(ConfigError, match="two values for run_path, a b and --run_path=c: keep one"):
        read("a", "b", run_path="c")


def test_pages_and_pictures_go_where_they_are_asked_to(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = str(write_run(tmp_path / "a"))
    places = [tmp_path / "new" / name for name in ("page.html", "loss.svg")]
    main(["report", run, f"--output_path={places[0]}", f"--picture={places[1]}"])
    assert places[0].exists() and "<svg" in places[1].read_text()
    main(["report", run, f"--output_path={places[0]}", f"--picture={tmp_path / 'loss.png'}"])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "a" / "report.html").exists()


def test_no_run_is_one_error_and_no_page(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run"):
        report(PageConfig((str(tmp_path),)))
    with pytest.raises(ConfigError, match="--run_path is empty"):
        report(PageConfig(()))
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_a_folder_or_cannot_be_written_is_said(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"is a folder: name a file, such as .*report\.html"):
        report(PageConfig((run,), output_path=str(tmp_path)))
    with pytest.raises(DataError, match="cannot be written"):
        report(PageConfig((run,), output_path=str(tmp_path / "a" / "config.yaml" / "page.html")))


def test_nothing_but_an_earlier_page_is_replaced(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    metrics = run / "logs" / "metrics.jsonl"
    before = metrics.read_bytes()
    with pytest.raises(ConfigError, match=r"--output_path=.*metrics\.jsonl must end in \.html"):
        report(PageConfig((str(run),), output_path=str(metrics)))
    (tmp_path / "link.html").symlink_to(metrics)
    with pytest.raises(DataError, match=r"link\.html: cannot be written: it is a link, not a file"):
        report(PageConfig((str(run),), output_path=str(tmp_path / "link.html")))
    assert metrics.read_bytes() == before


def test_a_picture_has_one_of_two_endings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--picture=loss\.pdf must end in \.png or \.svg"):
        report(PageConfig((str(write_run(tmp_path / "a")),), picture="loss.pdf"))


@pytest.mark.parametrize("package", ["plotly", "matplotlib"])
def test_a_missing_package_is_one_error_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    run = str(write_run(tmp_path / "a"))
    without(monkeypatch, package)
    with pytest.raises(ConfigError, match=rf"needs {package}: pip install 'pretraining\[report\]'"):
        report(PageConfig((run,), picture=str(tmp_path / "loss.png")))


def test_a_page_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; from pretraining.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "report", str(write_run(tmp_path / "a"))]
    done = subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
