"""What a step's time goes to: compute, communication, waiting and idling, and the operations that take longest.

    python -m scripts.benchmark.measure.operations --model_variant=1b --seq_length=4096 --batch_size=8
    python -m scripts.benchmark.measure.operations --model_variant=tiny --seq_length=128 --batch_size=2      # on a CPU

The project's own loop trains on made-up data, and PyTorch's profiler records some of its steps: kernels on a GPU,
operations on a CPU. Recording takes time itself, most of all on a CPU, so shares say more than milliseconds.
"""

from __future__ import annotations

import itertools
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import torch

from pretraining.observability.trace_events import TraceSummary, summarise
from scripts.benchmark.common import (
    LENGTH,
    Number,
    Over,
    announce,
    parse,
    print_table,
    read_settings,
    synchronize,
    train_project,
)

DEFAULTS = ("use_dummy_dataset=true", "tracker=none", "progress=plain")
OWN = (*LENGTH, "use_profiler", "report_interval")
WARM_UP_STEPS = 5
SHARES = {
    "compute": "compute",
    "communication that nothing hides": "exposed_communication",
    "waiting for data": "data",
    "idle": "idle",
}


def record(settings: list[str], steps: int, folder: Path) -> TraceSummary:
    """Trains, and records as many steps once it is warm."""
    length = WARM_UP_STEPS + steps + 1
    own = [f"num_steps={length}", f"report_interval={length}", f"ckpt_save_path={folder}/run"]
    config = read_settings([*DEFAULTS, *settings, *own])
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # Its own schedule marks the steps, which is what tells their operations from what comes around them.
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
    trace = torch.profiler.profile(activities=activities, schedule=schedule)
    begun = itertools.count()

    def before_step(loss: float | None) -> None:
        number = next(begun)
        synchronize()
        if number == WARM_UP_STEPS - 1:
            trace.__enter__()
        elif number == WARM_UP_STEPS + steps:
            trace.__exit__(None, None, None)
            raise Over
        elif number >= WARM_UP_STEPS:
            trace.step()

    with (folder / "log").open("w") as log, redirect_stdout(log):
        train_project(config, before_step)
    summary = summarise(trace.events() or ())
    assert summary is not None and summary.steps == steps
    return summary


def main() -> None:
    flags, settings = parse(
        (__doc__ or "").splitlines()[0],
        OWN,
        steps=Number(4, "that are recorded"),
        operations=Number(15, "that are shown, the longest first"),
    )
    read_settings([*DEFAULTS, *settings])
    announce(flags)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        summary = record(settings, flags.steps, Path(folder))
    step = summary.shares.seconds / summary.steps
    shares = {name: getattr(summary.shares, share) for name, share in SHARES.items()}
    rows = [(name, f"{share:.1%}", f"{1000 * share * step:,.2f}") for name, share in shares.items()]
    print_table(("where the time goes", "of a step", "ms a step"), [*rows, ("a step", "100%", f"{1000 * step:,.2f}")])
    print_table(
        ("operation", "ms a step", "of a step", "calls a step"),
        [
            (
                operation.name.replace("|", "/")[:80],
                f"{1000 * operation.seconds / summary.steps:,.2f}",
                f"{operation.seconds / summary.shares.seconds:.1%}",
                f"{operation.calls / summary.steps:,.1f}",
            )
            for operation in summary.operations[: flags.operations]
        ],
    )


if __name__ == "__main__":
    main()
