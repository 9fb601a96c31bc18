"""What an update costs by optimizer, beside AdamW's, and ways to make Muon's whole matrices on several processes.

    python -m scripts.benchmark.measure.optimizers
    python -m scripts.benchmark.measure.optimizers --model_variant=125m --rounds=5 --optimizers=adamw,muon

Updates of all contenders take turns, on the same model in the same layout with the same gradients; nothing else of a
step is measured. `muon, gathered everywhere` is Muon with every matrix gathered and worked on by every process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from pretraining.config.command_line import load_train_config
from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.variants import parameter_count, resolve_shape
from pretraining.distributed.grad_norm import is_sharded
from pretraining.distributed.mesh import build_mesh
from pretraining.distributed.processes import Processes
from pretraining.distributed.torch_private import start_all_gather
from pretraining.model.init import parameter_name
from pretraining.optim import muon
from pretraining.optim.optimizer import update
from pretraining.optim.registry import build_optimizer
from pretraining.train.build import build_model
from scripts.benchmark.common import (
    Number,
    Table,
    announce,
    announce_rest,
    check_processes,
    flag_parser,
    parse_with_settings,
    read_settings,
    synchronize,
)
from scripts.benchmark.job import run_job

DEFAULTS = ("use_dummy_dataset=true", "model_variant=small")
OWN = ("optimizer", "sharding_strategy")
EVERYWHERE = "muon, gathered everywhere"
WARM_UP = 2


class GatheredEverywhere(muon.MatrixOwners):
    """Every process gathers all matrices and works on all of them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)

    def share(self, parts: Sequence[torch.Tensor], work_on: Callable[[muon.Matrices], muon.Matrices]) -> muon.Matrices:
        """As `MatrixOwners`."""
        whole = [_gathered(part, parameter) for part, parameter in zip(parts, self._parameters, strict=True)]
        worked = work_on(whole)
        found = []
        for part, parameter, matrix in zip(parts, self._parameters, worked, strict=True):
            block = -(-parameter.size(0) // _shards(parameter))
            begin = min(parameter.size(0), _shard(parameter) * block)
            found.append(matrix[begin : begin + part.size(0)])
        return found


def _shards(parameter: nn.Parameter) -> int:
    return parameter.device_mesh["shard"].size() if is_sharded(parameter) else 1


def _shard(parameter: nn.Parameter) -> int:
    return parameter.device_mesh["shard"].get_local_rank() if is_sharded(parameter) else 0


def _gathered(part: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    if not is_sharded(parameter):
        return part
    group = parameter.device_mesh["shard"].get_group()
    block = -(-parameter.size(0) // group.size())
    padded = part.new_zeros(block, part.size(1))
    padded[: part.size(0)] = part
    gathered = part.new_empty(group.size() * block, part.size(1))
    start_all_gather(gathered, padded, group).wait()
    return gathered[: parameter.size(0)]


def measure(
    processes: Processes, settings: Sequence[str], strategy: str, names: Sequence[str], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each round's update by contender; a collective call."""
    made = {}
    for name in names:
        config = load_train_config([*settings, f"optimizer={name.partition(',')[0]}", f"sharding_strategy={strategy}"])
        sizes = (processes.world_size, processes.local_world_size)
        mesh = build_mesh(config.parallel, *sizes, processes.device.type)
        model = build_model(resolve_shape(config.model), config, mesh, processes.device, initialize=True)
        parameters = {parameter_name(each): parameter for each, parameter in model.parameters.items()}
        made[name] = parameters, build_optimizer(parameters, config.optimizer)
    skipped = torch.zeros((), dtype=torch.bool, device=processes.device)
    owners = muon.MatrixOwners
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + WARM_UP):
        for name, (parameters, optimizer) in made.items():
            muon.MatrixOwners = GatheredEverywhere if name == EVERYWHERE else owners  # type: ignore[misc]
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
    began = time.perf_counter()
    for number, (world, strategy) in enumerate(layouts):
        contenders = [*names, *([EVERYWHERE] if "muon" in names and world > 1 else [])]
        seconds = run_job(measure, world, settings, strategy, contenders, flags.rounds)
        if number == 0 and len(layouts) > 1:
            announce_rest((len(layouts) - 1) * (time.perf_counter() - began))
        adamw = statistics.median(seconds["adamw"])
        for name in contenders:
            ratio = statistics.median(own / base for own, base in zip(seconds[name], seconds["adamw"], strict=True))
            milliseconds = 1000 * (adamw if name == "adamw" else statistics.median(seconds[name]))
            table.add(name, str(world), strategy, f"{milliseconds:.1f}", f"{ratio:.2f}")
    table.print()


if __name__ == "__main__":
    main()
