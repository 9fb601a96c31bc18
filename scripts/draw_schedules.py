"""Draws the learning-rate schedules that ship: docs/pictures/schedules.svg, or what is named.

python -m scripts.draw_schedules [picture]
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from pretraining.config.training import ScheduleConfig
from pretraining.optim.schedules import LearningRate, build_learning_rate
from pretraining.progress import Duration, TokenSchedule

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "schedules.svg"
STEPS = 1000
WARM_UP = Duration(5, "percent")
POINTS = ("0%:0", "10%:1", "40%:0.7", "60%:0.7", "100%:0")
EXAMPLES = {
    "cosine": ScheduleConfig(warmup_steps=WARM_UP),
    "linear": ScheduleConfig("linear", warmup_steps=WARM_UP),
    "polynomial, decay_power 2": ScheduleConfig("polynomial", warmup_steps=WARM_UP, decay_power=2.0),
    "constant": ScheduleConfig("constant", warmup_steps=WARM_UP),
    "wsd, decay_steps 30%": ScheduleConfig("wsd", warmup_steps=WARM_UP, decay_steps=Duration(30, "percent")),
    "trapezoid, decay_steps 30%": ScheduleConfig(
        "trapezoid", warmup_steps=WARM_UP, decay_steps=Duration(30, "percent")
    ),
    f"piecewise_linear, {','.join(POINTS)}": ScheduleConfig("piecewise_linear", schedule_points=POINTS),
    "training_stage annealing": ScheduleConfig(training_stage="annealing"),
}


def examples() -> dict[str, LearningRate]:
    """The schedules of the picture, over a run of 1,000 steps."""
    length, tokens = Duration(STEPS, "steps"), TokenSchedule(((0, 0, 1),))
    return {name: build_learning_rate(schedule, length, tokens, None) for name, schedule in EXAMPLES.items()}


def main(path: Path) -> None:
    """Write the picture: learning rates as shares of their peaks."""
    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, schedule in examples().items():
        axes.plot(
            [step / STEPS for step in range(STEPS)], [schedule.at(step, 1.0) for step in range(STEPS)], label=name
        )
    axes.set_xlabel("share of the run")
    axes.set_ylabel("learning rate / peak")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main(
        Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "docs" / "pictures" / "schedules.svg"
    )
