"""Write run/, the run folders that later versions have to resume, and what comes after them.

    python tests/golden/make_golden_run.py          next_steps.json alone, by the code of this checkout
    python tests/golden/make_golden_run.py --run    run/ and next_batches.json, too

run/ is of release 0.3.0, before which nothing was published. It is never made again to make a test pass: it stands for
the runs that people have. Where a format changes, the code goes on reading this one, and a new version of it gets a
folder of its own beside this one.

next_batches.json holds the tokens of the step after each checkpoint, as `pretrain inspect` shows them. They are part
of the promise: a run goes on with the very tokens that it would have seen.

next_steps.json holds the losses and digests of the tensors of a few steps from there. Make it again only where the
numbers of a step are meant to change, and say why in the commit. Losses in it that move by more than rounding are a
bug.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from golden_runs import (  # noqa: E402
    NEXT_BATCHES,
    NEXT_STEPS,
    RUN,
    STARTS,
    STEPS,
    arithmetic,
    checkpoint_at,
    copy_of_golden,
    digests,
    inspected,
    inspection,
    manifests,
    next_steps_runs,
    tensors_in,
    train_on,
)
from helpers import PATIENCE_SECONDS, ROOT, free_ports, plain_environment, run_command  # noqa: E402
from training_runs import VOCABULARY, losses_of, write_dataset  # noqa: E402

# Some 2,200 parameters; all that has a state in a checkpoint is on.
COMMON = [
    "model_variant=tiny",
    "hidden_size=8",
    "intermediate_size=16",
    "num_hidden_layers=2",
    "num_attention_heads=2",
    "num_key_value_heads=1",
    f"vocab_size={VOCABULARY}",
    "seq_length=16",
    "data_path=data",
    "datasets=first,second",
    "sep_token=0",
    "logical_shards=2",
    "held_out_fraction=0.1",
    "eval_batches=1",
    "num_steps=40",
    "warmup_steps=2",
    "learning_rate=1e-2",
    "global_batch_size=6",
    "batch_size=2",
    "spike_threshold=6",
    "spike_window=8",
    "report_interval=1",
    "tracker=none",
    "progress=plain",
]
SHARDED = [*COMMON, "ckpt_save_path=sharded", "mixed_precision=false", "checkpoint_interval=4", "eval_interval=2"]
FULL = [
    *COMMON,
    "ckpt_save_path=full",
    "ckpt_format=full",
    "ckpt_name=tokens",
    "mixed_precision=true",
    "mp_dtype=float16",
    "packing=best_fit",
    "document_mask=true",
    "eval_interval=0",
    "checkpoint_interval=0",
    "keep_last=2",
]
# A loss that is not finite: its update is left out, which the guards count, and float16 halves the scale of the loss.
OVERFLOW = "z_loss_weight=1e38"
PREEMPTED = "max_skipped_steps=0"  # tells the start that gets a signal
SECOND_PHASE = ["weights=1,1", "skip_samples=40-42"]

# Processes and settings of each start, one after the other.
STARTED = [
    (2, [*SHARDED, "weights=3,1", "run_steps=4"]),
    (2, [*SHARDED, *SECOND_PHASE, "run_steps=4"]),
    # Preempted after a step or two, with an evaluation of the last one still owed.
    (2, [*SHARDED, *SECOND_PHASE, OVERFLOW, "eval_interval=1", PREEMPTED]),
    (1, [*FULL, "weights=3,1", OVERFLOW, "run_steps=1"]),
    (1, [*FULL, "weights=3,1", "run_steps=3"]),
    (1, [*FULL, *SECOND_PHASE, "num_steps=6"]),
]


def make_run(folder: Path) -> None:
    """Writes the run folders, from inside their folder, so that no path of this machine is in them."""
    write_dataset(folder / "data" / "first", documents=60)
    write_dataset(folder / "data" / "second", documents=40, seed=1)
    for processes, settings in STARTED:
        train(folder, processes, settings)


def train(folder: Path, processes: int, settings: list[str]) -> None:
    """Trains in a folder as `pretrain train` does; the start with `PREEMPTED` gets a signal once it has trained a step.

    Raises:
        RuntimeError: a process ended otherwise than it should.
    """
    metrics = folder / "sharded" / "logs" / "metrics.jsonl"
    reported = metrics.stat().st_size if metrics.exists() else 0
    shared = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_PORT": free_ports(1)[0]}
    started = []
    for rank in range(processes):
        layout = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", **shared}
        environment = plain_environment({name: str(value) for name, value in layout.items()})
        command = [sys.executable, str(ROOT / "main_training.py"), *settings]
        started.append(subprocess.Popen(command, cwd=folder, env=environment))
    if PREEMPTED in settings:
        while metrics.stat().st_size == reported:
            time.sleep(0.01)
        started[-1].send_signal(signal.SIGUSR1)
    codes = [process.wait(timeout=PATIENCE_SECONDS) for process in started]
    if set(codes) != {75 if PREEMPTED in settings else 0}:
        raise RuntimeError(f"{' '.join(settings)}: processes ended with {codes}")


def next_batches() -> dict[str, list[object]]:
    """The global batch of the step after each checkpoint."""
    with tempfile.TemporaryDirectory() as temporary:
        golden = copy_of_golden(Path(temporary))
        found = {}
        for name in STARTS:
            for manifest in manifests(golden / name):
                step = json.loads(manifest.read_text())["step"]
                command = ["-c", "from pretraining.cli import main; main()", *inspection(golden, name, step)]
                shown = run_command([sys.executable, *command]).stdout
                found[f"{name} after {step}"] = inspected(shown, golden)
    return found


def next_steps() -> dict[str, object]:
    """What comes after the checkpoints of `STARTS`, by run and by the number of processes."""
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as temporary:
        golden = copy_of_golden(Path(temporary))
        for processes in (1, 2):
            into = Path(temporary) / str(processes)
            train_on(processes, list(next_steps_runs(golden, into).values()))
            for name, start in STARTS.items():
                losses = losses_of(into / name)
                tensors = digests(tensors_in(checkpoint_at(into / name, start + STEPS)))
                found[f"{name} on {processes}"] = {"losses": [loss.hex() for loss in losses], "tensors": tensors}
    return found


def main() -> None:
    if "--run" in sys.argv[1:]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "run"
            make_run(made)
            for record in [*made.glob("*/logs/*"), *made.glob("data/*/.index/*.times")]:  # of this machine
                if record.name != "metrics.jsonl":
                    record.unlink()
            for config in made.glob("*/config.yaml"):
                config.write_text(config.read_text().replace(str(made), "/golden"))
            shutil.rmtree(RUN, ignore_errors=True)
            shutil.copytree(made, RUN, symlinks=True)
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(batch)}" for name, batch in next_batches().items())
        NEXT_BATCHES.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    document = {"arithmetic": arithmetic(), "next": next_steps()}
    NEXT_STEPS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
