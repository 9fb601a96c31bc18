"""Which process of a job this is, and where its processes meet (rendezvous): one answer for every launcher.

Each launcher says it in environment variables of its own. They are looked for in the order in which launchers nest,
innermost first: torchrun runs inside `srun` tasks, and `mpirun` starts its daemons with `srun`, so the outer launcher's
variables are there too and number other things.

    torchrun       TORCHELASTIC_RUN_ID    also `python -m torch.distributed.launch`
    openmpi        OMPI_COMM_WORLD_RANK
    mpich          MPI_LOCALRANKID        Hydra, the mpirun of MPICH and of Intel MPI
    slurm          SLURM_STEP_NUM_TASKS   a task of `srun`; the shell of a batch script lacks it and is one process
    environment    RANK or WORLD_SIZE     set by hand or by a platform
    single         none of these

Where rank 0 answers is derived from what all processes of the job know, if MASTER_ADDR and MASTER_PORT are not given.
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

# launcher -> the variables of rank, world size, local rank, local world size. (SLURM lists the last one for all nodes.)
VARIABLES: dict[str, tuple[str, str, str, str]] = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "environment": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
}

# The variables that tell the launchers, innermost first. PMI_RANK alone does not: srun --mpi=pmi2 sets it as well.
SIGNS = {
    "TORCHELASTIC_RUN_ID": "torchrun",
    "OMPI_COMM_WORLD_RANK": "openmpi",
    "MPI_LOCALRANKID": "mpich",
    "SLURM_STEP_NUM_TASKS": "slurm",
}

# How a user gives every process the same MASTER_ADDR and MASTER_PORT.
HOW_TO_SET = {
    "torchrun": "start with torchrun itself, which sets both",
    "openmpi": "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500",
    "mpich": "mpirun -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT 29500",
    "slurm": "export MASTER_ADDR=<host of task 0> MASTER_PORT=29500 before srun",
    "environment": "export MASTER_ADDR=<host of rank 0> MASTER_PORT=29500, the same for every process",
}

# Derived ports lie in 16384..32767: above most services of a machine, below the range from which Linux gives ports to
# outgoing connections (32768 and up), so that chance seldom takes them.
FIRST_PORT = 16384
PORTS = 16384
STEPS_OF_A_JOB = 16

# SLURM's compressed notations of node lists and of tasks a node, read without `scontrol`, which containers often lack.
# A comma that is not inside brackets: those separate numbers of one name.
_BETWEEN_NAMES = re.compile(r",(?![^\[]*\])")
_FIRST_IN_BRACKETS = re.compile(r"\[(\d+)[-,\d]*\]")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class ProcessLayout:
    """This process among all processes of the job; the `local_` numbers count those of this node.

    Attributes:
        launcher: a key of `VARIABLES`, or "single".
        master_addr, master_port: where rank 0 answers.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str
    master_addr: str
    master_port: int

    def as_environment(self) -> dict[str, str]:
        """The variables that `init_process_group("env://")` and most libraries read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def resolve_layout(environ: Mapping[str, str] = os.environ) -> ProcessLayout:
    """Reads the layout from the environment.

    Raises:
        LaunchError: the variables contradict each other, or the address of rank 0 is not given and cannot be derived.
    """
    launcher = _launcher(environ)
    if launcher == "single":
        return ProcessLayout(0, 1, 0, 1, launcher, LOCALHOST, free_port())  # alone, so any port does
    rank, world_size, local_rank, local_world_size = _place(launcher, environ)
    _check_ranges(launcher, rank, world_size, local_rank, local_world_size)
    _check_agreement(launcher, environ, rank, world_size)
    address = read_text(environ, "MASTER_ADDR")
    if address is None:
        address = _derive_address(launcher, environ, world_size, local_world_size)
    port = read_port(environ)
    if port is None and world_size == 1 and launcher != "torchrun":
        port = free_port()
    elif port is None:
        port = _derive_port(launcher, environ, world_size == local_world_size)
    return ProcessLayout(rank, world_size, local_rank, local_world_size, launcher, address, port)


def _launcher(environ: Mapping[str, str]) -> str:
    for name, launcher in SIGNS.items():
        if name in environ:
            return launcher
    if read_text(environ, "RANK") is not None or (read_text(environ, "WORLD_SIZE") or "1") != "1":
        return "environment"
    return "single"


def _place(launcher: str, environ: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Rank, world size, local rank and local world size as the launcher gives them."""
    if launcher == "environment":
        return _place_by_hand(launcher, environ)
    *names, local_world_name = VARIABLES[launcher]
    rank, world_size, local_rank = (read_integer(environ, name, launcher) for name in names)
    if launcher != "slurm":
        return rank, world_size, local_rank, read_integer(environ, local_world_name, launcher)
    node = read_integer(environ, "SLURM_NODEID", launcher)
    tasks_text = environ.get(local_world_name, "")
    tasks = tasks_of_nodes(tasks_text)
    if sum(tasks) != world_size or not 0 <= node < len(tasks):
        raise LaunchError(
            f"SLURM's variables contradict each other: SLURM_STEP_NUM_TASKS={world_size}, but {local_world_name}="
            f"{tasks_text} and SLURM_NODEID={node}. Some are left over from another step: use srun from a fresh shell."
        )
    return rank, world_size, local_rank, tasks[node]


def _place_by_hand(launcher: str, environ: Mapping[str, str]) -> tuple[int, int, int, int]:
    """RANK and WORLD_SIZE set by hand; the local ones follow from them where all processes are on this machine."""
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if read_text(environ, name) is None:
            raise LaunchError(
                f"{other}={environ[other]} is set without {name}: this process cannot know its place. "
                "Set both, or neither for one process, or start with torchrun, srun or mpirun."
            )
    rank, world_size = read_integer(environ, "RANK", launcher), read_integer(environ, "WORLD_SIZE", launcher)
    address = read_text(environ, "MASTER_ADDR") or LOCALHOST
    local: list[int] = []
    for name, on_one_node in (("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", world_size)):
        if read_text(environ, name) is not None:
            local.append(read_integer(environ, name, launcher))
        elif world_size == 1 or address in NAMES_OF_THIS_HOST:
            local.append(on_one_node)
        else:
            raise LaunchError(
                f"RANK={rank}, WORLD_SIZE={world_size} and MASTER_ADDR={address} are set, but {name} is not. "
                "With several nodes set LOCAL_RANK and LOCAL_WORLD_SIZE too (0 and 1 for one process a node)."
            )
    return rank, world_size, local[0], local[1]


def _check_ranges(launcher: str, rank: int, world_size: int, local_rank: int, local_world_size: int) -> None:
    rank_name, world_name, local_rank_name, local_world_name = VARIABLES[launcher]
    if not 0 <= rank < world_size:
        raise LaunchError(f"{rank_name}={rank} does not fit {world_name}={world_size}: ranks go from 0 to one less.")
    if not 0 <= local_rank < local_world_size <= world_size:
        raise LaunchError(
            f"{local_rank_name}={local_rank}, {local_world_size} processes on this node ({local_world_name}) and "
            f"{world_name}={world_size} contradict each other: local ranks go from 0 to one less than the processes of "
            "the node, which are at most all of the job's."
        )


def _check_agreement(launcher: str, environ: Mapping[str, str], rank: int, world_size: int) -> None:
    """RANK and WORLD_SIZE beside SLURM's or MPI's variables must say the same: else somebody meant another layout."""
    by_hand = read_text(environ, "RANK"), read_text(environ, "WORLD_SIZE")
    if None not in by_hand and by_hand != (str(rank), str(world_size)):
        raise LaunchError(
            f"Two launchers claim this process: {launcher} says rank {rank} of {world_size}, but RANK={by_hand[0]} and "
            f"WORLD_SIZE={by_hand[1]} are set. Unset RANK and WORLD_SIZE, or start without {launcher}."
        )


def _derive_address(launcher: str, environ: Mapping[str, str], world_size: int, local_world_size: int) -> str:
    """Where rank 0 is: here if the whole job is, else where SLURM's node list begins."""
    if launcher != "torchrun" and world_size == local_world_size:
        return LOCALHOST
    nodes = read_text(environ, "SLURM_STEP_NODELIST")
    if launcher == "slurm" and nodes is not None:
        return first_node(nodes)
    raise LaunchError(
        f"MASTER_ADDR is not set and {launcher} does not say on which host rank 0 runs ({world_size} processes, "
        f"{local_world_size} of them on this node). Say it: {HOW_TO_SET[launcher]}."
    )


def _derive_port(launcher: str, environ: Mapping[str, str], one_node: bool) -> int:
    """A port from what every process of this job knows and no other job shares."""
    if launcher == "slurm":
        job, step = (read_integer(environ, name, launcher) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        return port_of_slurm_step(job, step)
    namespace = read_text(environ, "PMIX_NAMESPACE")
    if launcher == "openmpi" and namespace is not None:
        return port_of_name(namespace)
    # Hydra gives its jobs no name, but all processes of a node descend from one proxy.
    proxy = ancestor_named("hydra_pmi_proxy") if launcher == "mpich" and one_node else None
    if proxy is not None:
        return port_of_name(f"hydra {proxy}")
    raise LaunchError(
        f"MASTER_PORT is not set, and {launcher} says nothing that is the same in all processes of this job and in no "
        f"other, so none can be derived. Say it: {HOW_TO_SET[launcher]}."
    )


def free_port() -> int:
    """A TCP port of this machine that nothing listens on right now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_of_slurm_step(job: int, step: int) -> int:
    """The port of a SLURM step: different for 16 steps of each of any 1024 jobs in a row."""
    return FIRST_PORT + (job * STEPS_OF_A_JOB + step % STEPS_OF_A_JOB) % PORTS


def port_of_name(name: str) -> int:
    """The same port for the same name in every process (`hash()` is salted in each)."""
    return FIRST_PORT + zlib.crc32(name.encode()) % PORTS


def ancestor_named(name: str, pid: int | str = "self", proc: Path = Path("/proc")) -> int | None:
    """The process id of the closest ancestor with this command name, of at most 15 characters; None without one."""
    with suppress(OSError):
        while str(pid) not in ("0", "1"):
            stat = (proc / str(pid) / "stat").read_text()
            # "pid (command) state parent ..."; a command may hold blanks and brackets itself.
            command, _, rest = stat.partition("(")[2].rpartition(")")
            if command == name:
                return int(stat.split()[0])
            pid = rest.split()[1]
    return None


def first_node(node_list: str) -> str:
    """The first host of a node list, where SLURM places task 0: `node[01-03,7],gpu-a` -> `node01`."""
    first = _FIRST_IN_BRACKETS.sub(r"\1", _BETWEEN_NAMES.split(node_list)[0])
    if not re.fullmatch(r"[\w.-]+", first):
        raise LaunchError(
            f"Cannot read the node list {node_list!r} of SLURM; export MASTER_ADDR=<host of task 0> before srun."
        )
    return first


def tasks_of_nodes(text: str) -> tuple[int, ...]:
    """Tasks on each node of a step, in node order: `4(x2),1` -> (4, 4, 1)."""
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise LaunchError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} is not of the form '4(x2),1'. "
                "srun sets it; start the job with srun, or with torchrun."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def read_text(environ: Mapping[str, str], name: str) -> str | None:
    """The value without surrounding blanks; None where it is unset or empty (`export NAME=` means unset)."""
    return environ.get(name, "").strip() or None


def read_integer(environ: Mapping[str, str], name: str, launcher: str) -> int:
    """A variable that `launcher` has to set to a number; a LaunchError where it has not."""
    text = read_text(environ, name)
    if text is None:
        raise LaunchError(
            f"{name} is not set, though other variables say that {launcher} started this process. "
            f"Start the job with {launcher} itself, or unset what is left over from it."
        )
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} is not an integer; mend or unset it (launcher: {launcher}).") from None


def read_port(environ: Mapping[str, str]) -> int | None:
    """MASTER_PORT; None where it is not given."""
    text = read_text(environ, "MASTER_PORT")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise LaunchError(f"MASTER_PORT={text!r} is not a port: give a number from 1 to 65535.")
    return int(text)
