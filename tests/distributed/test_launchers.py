"""Real launchers start real jobs: every process knows its place, all of them meet, and training runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, free_ports, run_command
from slurm_cluster import SlurmCluster

pytestmark = pytest.mark.thorough

REPORT = ROOT / "tests" / "distributed" / "report_layout.py"
REPORTING = f"{sys.executable} {REPORT}"
MAIN = ROOT / "main_training.py"

# Scripts take the environment that runs the tests; MPI on a small machine may need more processes than cores.
HERE = {
    "VIRTUAL_ENV": sys.prefix,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


SHORT = ["--use_dummy_dataset=true", "--model_variant=tiny", "--hidden_size=32", "--intermediate_size=64"]
SHORT += ["--num_hidden_layers=1", "--seq_length=32", "--num_steps=2", "--vocab_size=64", "--report_interval=1"]


def reports(output: str) -> list[dict[str, Any]]:
    """What each process printed, by rank."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


# The same as one YAML of a training stub, which is an argument by itself.
STUB = """
dist: {cpu_only: True, backend: gloo, dtype: float32, sharding_stage: zero2}
dataset: {batch_size: 1, num_workers: 0, path_train: path/to/train, path_eval: path/to/eval}
model: {hf_config: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 4,
  num_key_value_heads: 4, vocab_size: 64, max_position_embeddings: 32}}
optim: {lr: 1e-3, weight_decay: 0.01}
lr_scheduler: {total_iterations: 2, warmup_iterations: 1}
checkpoint: {state_dict_type: full, chkpt_saving_iterations: 1, directory: FOLDER, prefix: run}
"""


def trained_steps(folder: Path) -> int:
    """The last step that a run reports in its metrics."""
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    return max(int(json.loads(line)["step"]) for line in lines)


def mpirun(kind: str) -> str:
    """The mpirun of Open MPI ("openmpi") or MPICH ("mpich"), under its own name or as plain mpirun; skips without."""
    for name in (f"mpirun.{kind}", "mpirun"):
        path = shutil.which(name)
        if path is None:
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        if (kind == "mpich") == ("HYDRA" in version):
            return path
    pytest.skip(f"no mpirun of {kind} (Debian: openmpi-bin, mpich)")


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        (f"RANK=0 {REPORTING} & RANK=1 {REPORTING} && wait $!", "environment"),
        (f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 {REPORT}", "torchrun"),
        (f"{{openmpi}} -n 2 bash -c '{REPORTING}; true'", "openmpi"),
        (f"{{mpich}} -n 2 bash -c '{REPORTING}; true'", "mpich"),
        (f"{{mpich}} -n 2 env -u MPI_LOCALRANKID -u MPI_LOCALNRANKS {REPORTING}", "pmi"),
        (
            f"{{mpich}} -n 2 env -u MPI_LOCALRANKID -u MPI_LOCALNRANKS PALS_APID=7 bash -c "
            f"'PALS_RANKID=$PMI_RANK PALS_LOCAL_RANKID=$PMI_RANK {REPORTING}'",
            "pals",
        ),
        (f"srun -n 2 {REPORTING}", "slurm"),
        (f"srun -n 1 {sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 {REPORT}", "torchrun"),
        (f"salloc -n 2 {{openmpi}} -n 2 {REPORTING}", "openmpi"),
        (f"salloc -n 2 {{mpich}} -n 2 {REPORTING}", "mpich"),
    ],
)
def test_processes_know_their_places_and_meet(command: str, launcher: str, request: pytest.FixtureRequest) -> None:
    environment = dict(HERE)
    if launcher == "environment":
        environment["WORLD_SIZE"] = "2"
    if launcher in ("environment", "pmi"):
        environment["MASTER_PORT"] = str(free_ports(1)[0])
    if command.startswith(("srun", "salloc")):
        environment |= request.getfixturevalue("slurm").environment
    for kind in ("openmpi", "mpich"):
        if f"{{{kind}}}" in command:
            command = command.format(**{kind: mpirun(kind)})
    first, second = reports(run_command(["bash", "-c", command], environment).stdout)
    for rank, report in enumerate((first, second)):
        place = {"rank": rank, "world_size": 2, "local_rank": rank, "local_world_size": 2, "launcher": launcher}
        assert {name: report[name] for name in place} == place and report["total"] == 3
    assert (first["master_addr"], first["master_port"]) == (second["master_addr"], second["master_port"])


def test_a_shell_of_srun_pty_trains_alone_and_srun_in_it_starts_all_tasks(slurm: SlurmCluster, tmp_path: Path) -> None:
    train = f"{sys.executable} {MAIN} {' '.join(SHORT)} --ckpt_save_path={tmp_path}/shell"
    first = "[[ $SLURM_PROCID == 0 ]] || exit 0"  # the other tasks of a shell find no input, and end
    inside = f"{first}; {train} && {REPORTING} && srun --overlap -n 2 {REPORTING}"
    command = ["script", "--quiet", "--return", "--command", f"srun -n 2 --pty bash -c '{inside}'", "/dev/null"]
    out = run_command(command, {**HERE, **slurm.environment}).stdout
    assert "one process: this shell is one of several tasks" in out and trained_steps(tmp_path / "shell") == 2
    places = [(line["launcher"], line["rank"], line["world_size"]) for line in reports(out)]
    assert sorted(places) == [("interactive", 0, 1), ("slurm", 0, 2), ("slurm", 1, 2)]


def test_one_process_is_a_job_also_in_a_batch_script_of_two_tasks(slurm: SlurmCluster, tmp_path: Path) -> None:
    slurm.submit(["-n", "2", "-o", tmp_path / "output", "--wrap", REPORTING])
    for output in (run_command([sys.executable, REPORT]).stdout, (tmp_path / "output").read_text()):
        [report] = reports(output)
        assert (report["launcher"], report["world_size"], report["total"]) == ("single", 1, 1)


def test_torch_distributed_launch_trains(tmp_path: Path) -> None:
    """It adds --local-rank to the flags."""
    launch = [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node=2", "--standalone"]
    run_command([*launch, MAIN, *SHORT, f"--ckpt_save_path={tmp_path}"])
    assert trained_steps(tmp_path) == 2


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_the_script_for_mpi_trains(kind: str, tmp_path: Path) -> None:
    environment = {**HERE, "NPROC": "2", "MPIRUN": mpirun(kind)}
    (tmp_path / "cfg.yaml").write_text(STUB.replace("FOLDER", str(tmp_path)))
    run_command(["bash", "scripts/train_mpi.sh", tmp_path / "cfg.yaml", "--use_dummy_dataset=true"], environment)
    (run,) = tmp_path.glob("run.*")  # all processes agree on the time in its name
    assert trained_steps(run) == 2 and (run / "checkpoints" / "step_2_ckp" / "iter_state_dict.pt").is_file()


def submit_training(slurm: SlurmCluster, output: Path, flags: list[str], tasks: int = 1) -> str:
    """Submits scripts/train.slurm to the one node of the tests, which has no GPU; returns how the job ended."""
    options = ["--nodes=1", f"--ntasks-per-node={tasks}", "--gpus-per-node=0", f"--output={output}"]
    return slurm.submit([*options, "scripts/train.slurm", *flags], {**HERE, "NPROC": "2"})


@pytest.mark.parametrize("tasks", [1, 2])
def test_the_script_for_slurm_trains_one_job_of_any_tasks(slurm: SlurmCluster, tmp_path: Path, tasks: int) -> None:
    flags = [*SHORT, "--batch_size=1", "--global_batch_size=2", f"--ckpt_save_path={tmp_path / 'run'}"]
    state = submit_training(slurm, tmp_path / "output", flags, tasks)
    output = (tmp_path / "output").read_text()
    assert state == "COMPLETED", output
    assert trained_steps(tmp_path / "run") == 2
    assert "over 2 x cpu" in output


def test_a_job_with_a_wrong_flag_fails_with_one_error(slurm: SlurmCluster, tmp_path: Path) -> None:
    state = submit_training(slurm, tmp_path / "output", ["--use_dummy_dataset=true", "--modle_variant=tiny"])
    output = (tmp_path / "output").read_text()
    assert state == "FAILED"
    assert output.count("model_variant") == 1, output
    assert sum(line.startswith("error: ") for line in output.splitlines()) == 1, output
    assert "Traceback" not in output, output


def test_processes_share_out_prepare(tmp_path: Path) -> None:
    """One of them says what to do next."""
    lines = [json.dumps({"text": f"Document {number} for a launcher. " * 9}) + "\n" for number in range(60)]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    (tmp_path / "prepare.py").write_text(
        "from pretraining.cli import run_console_script\nfrom pretraining.tools.prepare import units\n"
        "units.UNIT_BYTES = 2000\nrun_console_script()\n"
    )
    command: list[str | Path] = [tmp_path / "prepare.py", "prepare"]
    command += [f"--input_path={tmp_path}/in.jsonl", f"--output_path={tmp_path}/out"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = run_command([*launch, *command]).stdout
    assert output.count("Train on it with:") == 1
    assert len(list(tmp_path.glob("out/in/*.arrow"))) > 5 and not list((tmp_path / "out").glob(".*"))
