"""A process of test_simulated_memory.py: simulates plans, a list of flags each, and prints a line each."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import simulate

from pretraining.config.command_line import parse_config
from pretraining.config.commands import PlanConfig
from pretraining.config.variants import resolve_shape
from pretraining.launch.program import run_as_program
from pretraining.tools.planner import cluster_of, make_plan


def main() -> None:
    cases, simulate.FEWEST_BLOCKS = json.loads(sys.argv[1]), int(sys.argv[2])
    for flags in cases:
        config = parse_config(PlanConfig, flags, {})
        shape = resolve_shape(config.model)
        plan = make_plan(config, shape, cluster_of(config))
        mesh = (config.plan.gpus // plan.shard_size, plan.shard_size)
        found = simulate.simulate(config, shape, plan.batch, mesh)
        memory, largest, at_peak = plan.memory, found.largest, found.at_peak
        parts = {
            "parameters": (memory.parameters, largest["parameters"]),
            "gradients": (memory.gradients, largest["gradients"]),
            "optimizer state": (memory.optimizer_state, largest["optimizer_state"]),
            "activations, loss": (memory.activations + memory.loss, at_peak["activations"]),
            "at the peak": (memory.total - memory.runtime, found.total),
        }
        print(json.dumps({"parts": parts, "total": found.total, **asdict(found)}), flush=True)


if __name__ == "__main__":
    run_as_program(main)
