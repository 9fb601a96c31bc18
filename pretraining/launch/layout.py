"""The place of this process in its job, and the address of rank 0, read from any launcher's environment variables.

Launchers nest: torchrun runs inside `srun` tasks, and `mpirun` starts its daemons with `srun`. The outer launcher's
variables are then set, too, and count other processes. So launchers are tried from the innermost outwards:

    torchrun       TORCHELASTIC_RUN_ID    also `python -m torch.distributed.launch`
    openmpi        OMPI_COMM_WORLD_RANK
    mpich          MPI_LOCALRANKID        Hydra, the mpirun of MPICH and of Intel MPI
    slurm          SLURM_STEP_NUM_TASKS   a task of `srun`; a batch script's shell lacks it, and is a single process
    pals           PALS_RANKID            HPE Cray's mpiexec
    pmi            PMI_RANK               other launchers of MPICH; srun --mpi=pmi2 sets it, too
    environment    RANK or WORLD_SIZE     set by hand or by a platform
    single         none of these
    interactive    a shell of `srun --pty`, which has the variables of its step, but is one process

Without MASTER_ADDR and MASTER_PORT, the address of rank 0 is derived from facts that all processes of the job know.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pretraining.errors import LaunchError

LOCALHOST = "127.0.0.1"
NAMES_OF_THIS_HOST = (LOCALHOST, "localhost", "::1")


@dataclass(frozen=True)
class Launcher:
    """A launcher's environment variables.

    Attributes:
        sign: variable that identifies the launcher.
        variables: rank, world size, local rank, local world size (SLURM's last one lists all nodes); "A|B" is A or, if
            it is not set, B.
        job: variable with a name that all processes of a job share, and no other job.
    """

    name: str
    sign: str
    variables: tuple[str, str, str, str]
    job: str = ""


BY_HAND = Launcher("environment", "RANK", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_PALS = ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE|PMI_LOCAL_SIZE|LOCAL_WORLD_SIZE")
_PMI = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK|LOCAL_RANK", "PMI_LOCAL_SIZE|LOCAL_WORLD_SIZE")
# Innermost first. PMI_RANK comes after SLURM, which sets it, too.
LAUNCHERS = (
    Launcher("torchrun", "TORCHELASTIC_RUN_ID", BY_HAND.variables),
    Launcher("openmpi", "OMPI_COMM_WORLD_RANK", _OPEN_MPI, job="PMIX_NAMESPACE"),
    Launcher("mpich", "MPI_LOCALRANKID", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    Launcher("slurm", "SLURM_STEP_NUM_TASKS", _SLURM),
    Launcher("pals", "PALS_RANKID", _PALS, job="PALS_APID"),
    Launcher("pmi", "PMI_RANK", _PMI),
)
INTERACTIVE = "interactive"
_TERMINAL = "/dev/tty"

# Derived ports lie in 16384..32767: above most services, and below the ports that Linux gives to outgoing connections
# (32768 and up).
FIRST_PORT = 16384
PORTS = 16384
STEPS_PER_JOB = 16

# SLURM's compressed notations of node lists and of tasks per node, read without `scontrol`, which containers often
# lack. A comma outside brackets separates names; a comma inside separates numbers of one name.
_BETWEEN_NAMES = re.compile(r",(?![^\[]*\])")
_FIRST_IN_BRACKETS = re.compile(r"\[(\d+)[-,\d]*\]")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class ProcessLayout:
    """The place of this process in its job; `local_` numbers count the processes of this node.

    Attributes:
        launcher: name of one of `LAUNCHERS`, "environment" (set by hand), "single" or "interactive".
        master_addr, master_port: address of rank 0.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str
    master_addr: str
    master_port: int

    def as_environment(self) -> dict[str, str]:
        """Return the variables that `init_process_group("env://")` and most libraries read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def resolve_layout(environ: Mapping[str, str] = os.environ) -> ProcessLayout:
    """Read the layout from the environment.

    Raises:
        LaunchError: the variables contradict each other, or the address of rank 0 cannot be derived.
    """
    by_hand = read_variable(environ, "RANK"), read_variable(environ, "WORLD_SIZE")
    launcher = next((each for each in LAUNCHERS if each.sign in environ), None)
    is_shell = launcher is not None and launcher.name == "slurm" and _is_shell_of_step(environ)
    if launcher is None or is_shell:
        if by_hand[0] is None and by_hand[1] in (None, "1"):  # alone, so any port does
            _check_alone(read_variable(environ, "PET_NNODES"))
            return ProcessLayout(0, 1, 0, 1, INTERACTIVE if is_shell else "single", LOCALHOST, free_port())
        launcher = BY_HAND
    rank, world_size, local_rank, local_world_size = _read_ranks(launcher, environ)
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        names = [*launcher.variables, "SLURM_NODEID"] if launcher.name == "slurm" else launcher.variables
        raise LaunchError(
            f"{launcher.name}'s variables contradict each other: "
            f"{', '.join(f'{name}={environ.get(name)}' for each in names for name in each.split('|'))}.\n"
            "Some are left over from another job or step: start from a fresh shell."
        )
    if None not in by_hand and by_hand != (str(rank), str(world_size)):
        raise LaunchError(
            f"{launcher.name} makes this rank {rank} of {world_size}, but RANK={by_hand[0]} and WORLD_SIZE="
            f"{by_hand[1]} are set. Unset RANK and WORLD_SIZE, or start without {launcher.name}."
        )
    is_one_node = world_size == local_world_size
    address = read_variable(environ, "MASTER_ADDR") or _derive_address(launcher, environ, is_one_node)
    port = _read_port(environ) or _derive_port(launcher, environ, is_one_node, world_size)
    if address is None or port is None:
        raise LaunchError(
            f"{'MASTER_ADDR' if address is None else 'MASTER_PORT'} is not set, and cannot be derived from the "
            f"variables of {launcher.name}. Give all {world_size} processes the same: export MASTER_ADDR=<host of rank "
            "0> MASTER_PORT=29500 (with mpirun: -x NAME=VALUE or -genv NAME VALUE)."
        )
    return ProcessLayout(rank, world_size, local_rank, local_world_size, launcher.name, address, port)


def _read_ranks(launcher: Launcher, environ: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Return rank, world size, local rank and local world size."""
    rank, world_size = (_read_integer(environ, name, launcher) for name in launcher.variables[:2])
    if world_size == 1 or (read_variable(environ, "MASTER_ADDR") or LOCALHOST) in NAMES_OF_THIS_HOST:
        on_one_node = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
        environ = {**on_one_node, **{name: text for name, text in environ.items() if text.strip()}}
    local_rank = _read_integer(environ, launcher.variables[2], launcher)
    if launcher.name != "slurm":
        return rank, world_size, local_rank, _read_integer(environ, launcher.variables[3], launcher)
    node = _read_integer(environ, "SLURM_NODEID", launcher)
    tasks = tasks_of_nodes(environ.get(launcher.variables[3], ""))
    fits = sum(tasks) == world_size and 0 <= node < len(tasks)
    return rank, world_size, local_rank, tasks[node] if fits else 0


def _check_alone(machines: str | None) -> None:
    """Refuse a process that torchrun did not start, in one of several pods that torchrun's variables count."""
    if machines not in (None, "1", "1:1"):
        raise LaunchError(
            f"PET_NNODES={machines} is set, but torchrun did not start this process: each machine would train alone. "
            "Start it with `bash scripts/train.sh` or torchrun, or unset PET_NNODES."
        )


def _is_shell_of_step(environ: Mapping[str, str]) -> bool:
    """Return whether this process was started in the shell of `srun --pty`, whose step has several tasks.

    The shell leads its session, as any task of `srun`. Tasks of an `srun` that is called in this shell inherit
    SLURM_PTY_PORT, but they have no terminal.
    """
    if "SLURM_PTY_PORT" not in environ or environ["SLURM_STEP_NUM_TASKS"] == "1" or os.getsid(0) == os.getpid():
        return False
    try:
        os.close(os.open(_TERMINAL, os.O_RDWR))
    except OSError:
        return False
    return True


def _derive_address(launcher: Launcher, environ: Mapping[str, str], is_one_node: bool) -> str | None:
    """Return the host of rank 0: this host if the job has one node, else the first host in SLURM's node list."""
    if is_one_node and launcher.name != "torchrun":
        return LOCALHOST
    return first_node(environ.get("SLURM_STEP_NODELIST", "")) if launcher.name == "slurm" else None


def _derive_port(launcher: Launcher, environ: Mapping[str, str], is_one_node: bool, world_size: int) -> int | None:
    """Return a port derived from a value that all processes of this job share, and no other job does."""
    if world_size == 1 and launcher.name != "torchrun":
        return free_port()
    if launcher.name == "slurm":
        job, step = (_read_integer(environ, name, launcher) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        return port_of_slurm_step(job, step)
    name = read_variable(environ, launcher.job) if launcher.job else None
    if launcher.name == "mpich" and is_one_node:  # Hydra does not name its jobs, but their processes have one ancestor
        proxy = ancestor_named("hydra_pmi_proxy")
        name = None if proxy is None else f"hydra {proxy}"
    return None if name is None else port_of_name(name)


def free_port() -> int:
    """Return a free TCP port of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOCALHOST, 0))
        return int(probe.getsockname()[1])


def port_of_slurm_step(job: int, step: int) -> int:
    """Return the port of a SLURM step, distinct for 16 steps of each of any 1024 consecutive jobs."""
    return FIRST_PORT + (job * STEPS_PER_JOB + step % STEPS_PER_JOB) % PORTS


def port_of_name(name: str) -> int:
    """Return a port that depends only on the name (`hash()` is salted per process)."""
    return FIRST_PORT + zlib.crc32(name.encode()) % PORTS


def ancestor_named(name: str, pid: int | str = "self", proc: Path = Path("/proc")) -> int | None:
    """Return the id of the closest ancestor process with this command name (15 characters at most), or None."""
    with suppress(OSError):
        while str(pid) not in ("0", "1"):
            stat = (proc / str(pid) / "stat").read_text()
            # "pid (command) state parent ..."; the command may contain blanks and brackets.
            command, _, rest = stat.partition("(")[2].rpartition(")")
            if command == name:
                return int(stat.split()[0])
            pid = rest.split()[1]
    return None


def first_node(node_list: str) -> str | None:
    """Return the first host of a node list, which runs task 0: `node[01-03,7],gpu-a` -> `node01`."""
    first = _FIRST_IN_BRACKETS.sub(r"\1", _BETWEEN_NAMES.split(node_list)[0])
    return first if re.fullmatch(r"[\w.-]+", first) else None


def tasks_of_nodes(text: str) -> tuple[int, ...]:
    """Return the number of tasks on each node, in node order: `4(x2),1` -> (4, 4, 1); empty for malformed text."""
    parts = [_TASKS.fullmatch(part) for part in text.split(",")]
    counts = [(int(part[1]),) * int(part[2] or 1) for part in parts if part is not None]
    return sum(counts, ()) if None not in parts else ()


def read_variable(environ: Mapping[str, str], name: str) -> str | None:
    """Return a value without surrounding blanks; None if it is unset or empty (`export NAME=` means unset)."""
    return environ.get(name, "").strip() or None


def _read_integer(environ: Mapping[str, str], name: str, launcher: Launcher) -> int:
    text = next((text for each in name.split("|") if (text := read_variable(environ, each)) is not None), None)
    try:
        return int(text or "")
    except ValueError:
        name = name.replace("|", " or ")
        fault = "is not set" if text is None else f"is {text!r}, not an integer"
        if launcher is BY_HAND:
            raise LaunchError(f"{name} {fault}: set {', '.join(BY_HAND.variables)}, or none of them.") from None
        raise LaunchError(
            f"{name} {fault}, though {launcher.sign} is set by {launcher.name}: start the whole job with "
            f"{launcher.name}, or unset the variables left over from it."
        ) from None


def _read_port(environ: Mapping[str, str]) -> int | None:
    text = read_variable(environ, "MASTER_PORT")
    if text is not None and not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise LaunchError(f"MASTER_PORT={text!r} is not a port: give a number from 1 to 65535.")
    return None if text is None else int(text)
