"""`pretrain` with the arguments of this script, for `forked.run_forked`."""

from __future__ import annotations

from pretraining.cli import run_console_script

if __name__ == "__main__":
    run_console_script()
