"""What an update costs by optimizer, beside AdamW's.

    python -m scripts.benchmark.measure.optimizers
    python -m scripts.benchmark.measure.optimizers --model_variant=125m --rounds=5 --optimizers=adamw,muon

Updates of all contenders take turns, on the same model in the same layout with the same gradients; nothing else of a
step is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from pretraining.config.command_line import load_train_config
from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.variants import parameter_count, resolve_shape
from pretraining.distributed.grad_norm import is_sharded
from pretraining.distributed.mesh import build_mesh
from pretraining.distributed.processes import Processes
from pretraining.model.init import parameter_name
from pretraining.optim.optimizer import update
from pretraining.optim.registry import build_optimizer
from pretraining.train.build import build_model
from scripts.benchmark.common import (
    Number,
    Table,
    announce,
    check_processes,
    flag_parser,
    in_turn,
    parse_with_settings,
    read_settings,
    synchronize,
)
from scripts.benchmark.job import run_job

DEFAULTS = ("use_dummy_dataset=true", "model_variant=small")
OWN = ("optimizer", "sharding_strategy")
WARM_UP = 2


def measure(
    processes: Processes, settings: Sequence[str], strategy: str, names: Sequence[str], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each round's update by contender; a collective call."""
    made = {}
    for name in names:
        config = load_train_config([*settings, f"optimizer={name}", f"sharding_strategy={strategy}"])
        sizes = (processes.world_size, processes.local_world_size)
        mesh = build_mesh(config.parallel, *sizes, processes.device.type)
        model = build_model(resolve_shape(config.model), config, mesh, processes.device, initialize=True)
        parameters = {parameter_name(each): parameter for each, parameter in model.parameters.items()}
        made[name] = parameters, build_optimizer(parameters, config.optimizer)
    skipped = torch.zeros((), dtype=torch.bool, device=processes.device)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + WARM_UP):
        for name, (parameters, optimizer) in made.items():
            generator = torch.Generator(processes.device).manual_seed(turn)
            for parameter in parameters.values():
                gradient = torch.empty_like(parameter)
                local = gradient.to_local() if is_sharded(gradient) else gradient
                local.normal_(generator=generator)
                parameter.grad = gradient
            dist.barrier()
            synchronize()
            began = time.perf_counter()
            update(optimizer, skipped)
            synchronize()
            dist.barrier()
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
            optimizer.zero_grad(set_to_none=True)
    return seconds


def main() -> None:
    parser = flag_parser(
        (__doc__ or "").splitlines()[0],
        rounds=Number(7, "turns that are measured", least=3),
    )
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help="comma list (default %(default)s)")
    parser.add_argument("--processes", default="1,2", help="of each job, comma list (default %(default)s)")
    flags, settings = parse_with_settings(parser, OWN)
    names = ["adamw", *(name for name in flags.optimizers.split(",") if name != "adamw")]
    worlds = [int(count) for count in flags.processes.split(",") if count.isdigit() and int(count) > 0]
    if set(names) - set(OPTIMIZERS):
        parser.error(f"--optimizers={flags.optimizers}: give any of {', '.join(OPTIMIZERS)}")
    if not worlds or len(worlds) < len(flags.processes.split(",")):
        parser.error(f"--processes={flags.processes}: write numbers of processes, comma list")
    settings = [*DEFAULTS, *settings]
    config = read_settings(settings)
    check_processes(max(worlds))
    announce(flags)
    print(f"model     {parameter_count(resolve_shape(config.model)):,} parameters")
    table = Table("optimizer", "processes", "strategy", "ms an update", "of AdamW's")
    layouts = [(world, strategy) for world in worlds for strategy in (("fsdp", "ddp") if world > 1 else ("ddp",))]
    for world, strategy in in_turn(layouts):
        seconds = run_job(measure, world, settings, strategy, names, flags.rounds)
        adamw = statistics.median(seconds["adamw"])
        for name in names:
            ratio = statistics.median(own / base for own, base in zip(seconds[name], seconds["adamw"], strict=True))
            milliseconds = 1000 * (adamw if name == "adamw" else statistics.median(seconds[name]))
            table.add(name, str(world), strategy, f"{milliseconds:.1f}", f"{ratio:.2f}")
    table.print()


if __name__ == "__main__":
    main()
