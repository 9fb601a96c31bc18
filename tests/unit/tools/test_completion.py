"""What a shell offers at a tab: asked of the shells themselves, with the script that `pretrain completion` prints."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from helpers import PATIENCE_SECONDS

from pretraining.cli import COMMANDS, main
from pretraining.config.command_line import ACCEPTS
from pretraining.config.fields import settings_of
from pretraining.config.recipes import shipped_recipes
from pretraining.config.training import TrainConfig
from pretraining.config.variants import VARIANTS

BASH, ZSH = shutil.which("bash"), shutil.which("zsh")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x07|\r|.\x08")
needs_zsh = pytest.mark.skipif(ZSH is None, reason="zsh is not installed")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts of both shells, and some files to complete."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh"):
        with pytest.MonkeyPatch.context() as patch:
            lines: list[str] = []
            patch.setattr("builtins.print", lambda text, lines=lines: lines.append(text))
            main(["completion", shell])
        (folder / f"pretrain.{shell}").write_text("\n".join(lines) + "\n")
    (folder / "my recipe.yaml").touch()
    (folder / "data").mkdir()
    return folder


ASK = r"""
source pretrain.bash
COMP_WORDS=("$@") COMP_CWORD=$(( $# - 1 ))
_pretrain
printf '%s\n' "${COMPREPLY[@]}"
"""


def offered(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words, which readline has split at = as it does."""
    command = [str(BASH), "--norc", "-c", ASK, "bash", "pretrain", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.stderr == "" and done.returncode == 0
    return [line for line in done.stdout.splitlines() if line]


def test_the_first_word_is_a_command(scripts: Path) -> None:
    assert offered(scripts, "") == [f"{name} " for name in (*COMMANDS, "--help", "--version")]
    assert offered(scripts, "tra") == ["train ", "translate "]


def test_every_command_offers_its_own_flags_and_no_other(scripts: Path) -> None:
    for name, (_, root, _) in COMMANDS.items():
        flags = {flag.strip().removeprefix("--").removesuffix("=") for flag in offered(scripts, name, "--")}
        also = {"recipe", "config", *ACCEPTS} if issubclass(root, TrainConfig) else set()
        also |= {"from"} if name == "translate" else set()
        assert flags == {*settings_of(root), "help", *also}


def test_a_flag_stays_open_for_its_value(scripts: Path) -> None:
    assert offered(scripts, "train", "--num_s") == ["--num_steps="]
    assert offered(scripts, "train", "--hel") == ["--held_out_fraction=", "--help ", "--help="]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("train", "--packing", "=", "best"), ["best_fit "]),
        (("train", "--packing=best"), ["--packing=best_fit "]),  # where = breaks no words
        (("train", "--sharding-strategy", "=", "hsdp"), ["hsdp ", "hsdp_zero2 "]),
        (("plan", "--use_torch_compile", "="), ["true ", "false "]),
        (("train", "--mixed_precision", "=", "n"), ["none "]),
        (("train", "--tracker", "=", "tensorboard,m"), ["tensorboard,mlflow"]),
        (("train", "--recipe", "=", "de"), ["demo"]),
        (("train", "--recipe", "=", "demo,my"), ["demo,my recipe.yaml"]),
        (("train", "--data_path", "=", "d"), ["data/"]),
        (("sample", "--ckpt_load_path", "=", "da"), ["data/"]),
        (("train", "my"), ["my recipe.yaml"]),
        (("train", "--help", "=", "opt"), ["optimizer "]),
        (("export", "--format", "="), ["hf ", "full "]),
        (("completion", "z"), ["zsh "]),
        (("plan", "--gpu", "=", "h"), ["h100 ", "h200 "]),
        (("translate", "--kind", "=", "n"), ["nanogpt ", "none "]),
        (("translate", "--from", "=", "st"), ["stub "]),
        (("train", "--seed", "=", "1"), []),
        (("train", "--packing", "=", "best_fit", "--num_st"), ["--num_steps="]),
    ],
)
def test_values_are_those_that_a_flag_takes(words: tuple[str, ...], expected: list[str], scripts: Path) -> None:
    assert offered(scripts, *words) == expected


def test_models_and_recipes_are_offered_by_name(scripts: Path) -> None:
    assert offered(scripts, "train", "--model_variant", "=") == [f"{name} " for name in (*VARIANTS, "none")]
    assert set(shipped_recipes()) <= set(offered(scripts, "train", "--recipe", "="))


def test_no_python_starts_at_a_tab(scripts: Path) -> None:
    script = (scripts / "pretrain.bash").read_text()
    assert not re.search(r"\bpython|\$\(pretrain", script)


def typed(shell: list[str], folder: Path, begin: str, keys: str, wanted: str) -> str:
    """What an interactive shell shows once it shows `wanted`, after it has read a line and then keys."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update({"PS1": "ready> ", "TERM": "dumb", "ZDOTDIR": str(folder), "HOME": str(folder)})
        os.execvp(shell[0], shell)
    shown, sent, deadline = "", [begin + "; echo re''ady\n", keys], time.monotonic() + PATIENCE_SECONDS
    try:
        while wanted not in CONTROL.sub("", shown):
            assert time.monotonic() < deadline, shown
            if sent and (len(sent) == 2 or "ready\r\n" in shown):
                os.write(terminal, sent.pop(0).encode())
            if select.select([terminal], [], [], 0.2)[0]:
                shown += os.read(terminal, 10_000).decode(errors="replace")
    finally:
        os.close(terminal)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return shown


def test_bash_completes_a_line_that_is_typed(scripts: Path) -> None:
    shell = [str(BASH), "--norc", "--noprofile", "-i"]
    assert typed(shell, scripts, "source pretrain.bash", "pretrain trai\t--packing=bes\t", "--packing=best_fit")


@needs_zsh
@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ("pretrain transl\t", "pretrain translate"),
        ("pretrain train --packing=bes\t", "--packing=best_fit"),
        ("pretrain train --num_st\t", "--num_steps="),
        ("pretrain plan --gpus_per\t", "--gpus_per_node="),
        ("pretrain train --tracker=tensorboard,mlf\t", "--tracker=tensorboard,mlflow"),
        ("pretrain train --recipe=dem\t", "--recipe=demo"),
        ("pretrain sample --ckpt_load_path=da\t", "--ckpt_load_path=data/"),
        ("pretrain completion zs\t", "completion zsh"),
    ],
)
def test_zsh_completes_a_line_that_is_typed(keys: str, wanted: str, scripts: Path) -> None:
    begin = "autoload -U compinit; compinit -u; source ./pretrain.zsh"
    assert typed([str(ZSH), "-f", "-i"], scripts, begin, keys, wanted)


@needs_zsh
def test_the_script_of_zsh_is_valid(scripts: Path) -> None:
    done = subprocess.run(
        [str(ZSH), "-n", "pretrain.zsh"], cwd=scripts, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said"), [([], "--shell is missing"), (["fish"], "not known, use one of bash, zsh")]
)
def test_a_shell_that_is_not_known_is_an_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["completion", *arguments])
    assert ending.value.code == 1 and said in capsys.readouterr().err
