"""The golden run folders of release 0.3.0, and how runs go on from a copy of them.

    golden/run/data/{first,second}     token files, and beside them the index files of that release
    golden/run/sharded                 a run of 2 processes in float32, sharded files; its newest checkpoint is .preempt
    golden/run/full                    a run of 1 process in float16, unsharded files, documents packed, now finished

tests/golden/make_golden_run.py has written them and next_batches.json, the tokens of the step after each checkpoint.
Neither is ever made again to make a test pass: they stand for the runs that people have. If a format changes, the code
goes on reading this one, and a new version of it gets a folder of its own. The script also makes next_steps.json.

Nothing of the package is imported here: formats are read as what they are, JSON and tensor files, so that a name that
changes in the code does not change in the test as well.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from forked import run_forked
from helpers import free_ports
from safetensors import safe_open
from torch import nn

FOLDER = Path(__file__).parent / "golden"
RUN = FOLDER / "run"
NEXT_BATCHES, NEXT_STEPS = FOLDER / "next_batches.json", FOLDER / "next_steps.json"

STARTS = {"sharded": 8, "full": 4}
"""Step of the checkpoint of each run that the stored next steps go on from."""
STEPS = 4
"""How many next steps are stored."""

WITHOUT_UPDATES = ("z_loss_weight=1e38", "max_skipped_steps=0")
"""The loss is not finite, so each update is left out: weights, moments and their step stay as they are, bit for bit."""


def copy_of_golden(folder: Path) -> Path:
    """A copy that runs may write into, with times of files and with links."""
    return shutil.copytree(RUN, folder / "golden", symlinks=True)


def continuation(golden: Path, name: str, *changes: str) -> list[str]:
    """The settings of a golden run as its config.yaml keeps them, with changes.

    Args:
        golden: a copy of the folder.
        name: of the run; without a `ckpt_save_path` among the changes, it goes on in place.
        changes: overrides.
    """
    moved = [f"data_path={golden / 'data'}", f"ckpt_save_path={golden / name}"]
    usual = ["z_loss_weight=0", "time_limit=none", "num_steps=40", "run_steps=none"]  # its last start had others
    return [f"recipe={golden / name / 'config.yaml'}", *moved, *usual, *changes]


def train_on(processes: int, runs: Sequence[Sequence[str]]) -> str:
    """Trains several runs in one job of processes with one thread each; returns what they printed."""
    jobs = list(zip(free_ports(len(runs)), runs, strict=True))
    worker = Path(__file__).parent / "distributed" / "training_worker.py"
    done = run_forked(worker, processes, [json.dumps(jobs)])
    return done.stdout + done.stderr


def next_steps_runs(golden: Path, into: Path) -> dict[str, list[str]]:
    """The runs whose losses and tensors `next_steps.json` keeps, by name."""
    return {
        name: continuation(
            golden,
            name,
            f"ckpt_load_path={checkpoint_at(golden / name, step)}",
            f"ckpt_save_path={into / name}",
            f"run_steps={STEPS}",
            f"checkpoint_interval={STEPS // 2}",
            "ckpt_name=step",
            "eval_interval=0",
        )
        for name, step in STARTS.items()
    }


def checkpoint_at(run: Path, step: int) -> Path:
    """The checkpoint of a step, whatever its name."""
    (found,) = [path.parent for path in manifests(run) if json.loads(path.read_text())["step"] == step]
    return found


def manifests(run: Path) -> list[Path]:
    """The manifests of a run's checkpoints, each once."""
    return sorted(path for path in run.glob("checkpoints/*/manifest.json") if not path.parent.is_symlink())


def manifest_at(run: Path, step: int) -> dict[str, Any]:
    """The manifest of a step's checkpoint."""
    document: dict[str, Any] = json.loads((checkpoint_at(run, step) / "manifest.json").read_text())
    return document


def inspection(golden: Path, name: str, step: int) -> list[str]:
    """The arguments of `pretrain` that show the batch after the checkpoint of a step."""
    checkpoint = checkpoint_at(golden / name, step)
    where = [f"--ckpt_load_path={checkpoint}", f"--data_path={golden / 'data'}"]
    return ["inspect", *where, f"--step={step + 1}", "--tokens", "--json"]


def inspected(shown: str, golden: Path) -> list[Any]:
    """What `pretrain inspect` printed, with files relative to the folder of the data."""
    slots = [json.loads(line) for line in shown.splitlines()]
    for slot in slots:
        for span in slot["spans"]:
            span["file"] = str(Path(span["file"]).relative_to(golden / "data"))
    return slots


def tensors_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of either form, put together from their pieces."""
    if (checkpoint / "model_state_dict.pt").exists():
        model, optimizer = (
            torch.load(checkpoint / f"{name}_state_dict.pt", weights_only=True) for name in ("model", "optim")
        )
        kept = {
            f"optimizer.{key}.{name}": value for name, of in optimizer["state"].items() for key, value in of.items()
        }
        return {**model, **kept}
    pieces: dict[str, list[tuple[list[int], torch.Tensor]]] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                pieces.setdefault(name, []).append((offsets[name]["saved_offsets"], file.get_tensor(name)))
    # FSDP cuts along the first dim, so pieces in the order of their offsets are the whole.
    return {
        name: found[0][1] if len(found) == 1 else torch.cat([piece for _, piece in sorted(found, key=lambda it: it[0])])
        for name, found in pieces.items()
    }


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """80 bits of SHA-256 of each tensor's type, shape and bytes."""
    found = {}
    for name, tensor in sorted(tensors.items()):
        content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found[name] = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode() + content).hexdigest()[:20]
    return found


def arithmetic() -> str:
    """A digest of how this machine calculates: PyTorch's version, and the bits that a small network comes to.

    Kernels for other instruction sets add in another order, so the last bits of a step are a machine's own. Where this
    is equal, the kernels that matter to the golden runs round alike.
    """
    found = [torch.__version__.encode()]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dtype in (torch.float32, torch.float16):
            values = torch.arange(96 * 8, dtype=torch.float32).mul(0.37).sin().reshape(96, 8)
            weights = [
                nn.Parameter(torch.arange(rows * columns).mul(0.61).cos().reshape(rows, columns))
                for rows, columns in ((8, 8), (16, 8), (8, 16), (64, 8))
            ]
            optimizer = torch.optim.AdamW(weights, fused=True)
            query, up, down, head = (weight.to(dtype) for weight in weights)
            hidden = values.to(dtype) @ query.T
            heads = hidden.reshape(6, 16, 2, 4).transpose(1, 2)
            hidden = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            hidden = nn.functional.silu(hidden.transpose(1, 2).reshape(96, 8) @ up.T) @ down.T
            hidden = hidden.float() * torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + 1e-5)
            logits = (hidden.to(dtype) @ head.T).float()
            loss = nn.functional.cross_entropy(logits, torch.arange(96) % 64)
            loss.backward()
            optimizer.step()
            found += [tensor.detach().numpy().tobytes() for tensor in (loss, *weights)]
    finally:
        torch.set_num_threads(threads)
    return hashlib.sha256(b"".join(found)).hexdigest()[:20]
