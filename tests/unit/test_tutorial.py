"""docs/tutorial.md: every block runs, in order, in a new folder; only training is shorter."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from helpers import ROOT, run_command

pytestmark = pytest.mark.slow
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
PROMPT = "def main("
STEPS = 20
PROGRAMS = {"pretrain": "-m pretraining", "python": "", "lm_eval": "-m lm_eval"}
"""What the page calls, and how this interpreter runs it."""


class Tutorial:
    """The blocks of the page by section, and the folder that they run in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tutorial"
        (folder / "scripts").symlink_to(ROOT / "scripts")
        (folder / "bin").mkdir()
        for name, arguments in PROGRAMS.items():
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
            (folder / "bin" / name).chmod(0o755)
        page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
        beginning, *sections = page.split("\n## ")
        self.sections = {text.partition("\n")[0]: BLOCK.findall(text) for text in sections}
        self.environment = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
        self.environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
        self._run(BLOCK.findall(beginning), folder)

    def run(self, section: str) -> str:
        """Run the blocks of a section, and return their output."""
        return self._run(self.sections[section], self.folder)

    def _run(self, blocks: list[str], folder: Path) -> str:
        assert blocks
        script = "".join(blocks).replace("--num_steps=400", f"--num_steps={STEPS}")
        script = script.replace("--num_steps=420", f"--num_steps={STEPS + 20}")
        script = re.sub(r"(?m)^pip install .*$", "", script)
        return run_command(["bash", "-ec", script], self.environment, cwd=folder).stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tutorial, dict[str, str]]:
    """Run the page up to the model, and return the output of its sections."""
    tutorial = Tutorial(tmp_path_factory.mktemp("tutorial"))
    names = ("1. Text to tokens", "2. Look before you train", "3. Train", "4. Try it", "5. Transformers")
    return tutorial, {name: tutorial.run(name) for name in names}


def test_no_block_is_left_out(trained: tuple[Tutorial, dict[str, str]]) -> None:
    tutorial, printed = trained
    assert set(tutorial.sections) == {*printed, "6. llama.cpp", "7. lm-eval", "From here"}
    assert tutorial.sections["From here"] == []


def test_the_page_leads_from_text_to_a_model(trained: tuple[Tutorial, dict[str, str]]) -> None:
    tutorial, printed = trained
    recipe = (tutorial.folder / "tutorial.yaml").read_text()
    assert all(part in printed["1. Text to tokens"] for part in ("--datasets=stdlib", "--sep_token=0"))
    assert "datasets: stdlib" in recipe and "sep_token: 0 " in recipe
    assert "no faults" in printed["2. Look before you train"]
    assert "step 1, all ranks: the global batch has 8 slots" in printed["2. Look before you train"]
    assert f"step_{STEPS}_ckp" in printed["3. Train"]
    *_, last = printed["4. Try it"].splitlines()
    assert printed["4. Try it"].startswith(PROMPT)
    assert json.loads(last)["evaluation_loss"] < 8.3


def test_transformers_generates_the_text_of_the_run(trained: tuple[Tutorial, dict[str, str]]) -> None:
    _, printed = trained
    generated = printed["5. Transformers"][printed["5. Transformers"].index(PROMPT) :]
    assert printed["4. Try it"].startswith(generated.rstrip())


def test_llama_cpp_completes_the_prompt(trained: tuple[Tutorial, dict[str, str]]) -> None:
    pytest.importorskip("gguf", reason="needs the extra `slow`")
    pytest.importorskip("xllamacpp", reason="needs the extra `slow`")
    tutorial, _ = trained
    assert re.search(rf"(?m)^{re.escape(PROMPT)}.", tutorial.run("6. llama.cpp"))


def test_lm_eval_and_training_score_the_page_s_questions_alike(trained: tuple[Tutorial, dict[str, str]]) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra `slow`")
    tutorial, _ = trained
    printed = tutorial.run("7. lm-eval")
    (results,) = (tutorial.folder / "found").rglob("results_*.json")
    accuracy = json.loads(results.read_text())["results"]["python"]["acc,none"]
    (found,) = (json.loads(line) for line in printed.splitlines() if line.startswith('{"checkpoint"'))
    assert found["evaluation_task/python/acc"] == accuracy
    scored = re.findall(r"step (\d+)  evaluation_task/python  acc ", printed)
    assert scored == [str(STEPS + 10), str(STEPS + 20)]
