"""A process of test_simulate.py: simulates plans, a list of flags each, and prints what came of it, a line each."""

from __future__ import annotations

import json
import sys

from pretraining.config.command_line import parse_config
from pretraining.config.commands import PlanConfig
from pretraining.launch.program import run_as_program
from pretraining.tools import simulate
from pretraining.tools.plan import compare, simulate_plan


def main() -> None:
    cases, simulate.FEWEST_BLOCKS = json.loads(sys.argv[1]), int(sys.argv[2])
    for flags in cases:
        config = parse_config(PlanConfig, flags, {})
        chosen, found = simulate_plan(config)
        parts = {name: sizes for name, *sizes in compare(chosen.memory, found)}
        print(json.dumps({"parts": parts, **found.as_document()}), flush=True)


if __name__ == "__main__":
    run_as_program(main)
