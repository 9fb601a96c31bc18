"""A real SLURM of one node, on this machine, for the time of a test session: its own munge key, ports and state folder.

Only root can start one. Everything lives in one temporary folder, and `stop` ends the processes that `start` began.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from helpers import PATIENCE_SECONDS, free_ports, plain_environment, run_command

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc", "scancel", "sinfo", "scontrol")
SBIN = "/usr/sbin"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def find_program(name: str) -> str | None:
    """Path of a program, also in the folder of daemons, which is often not on PATH."""
    return shutil.which(name) or shutil.which(name, path=SBIN)


def reason_to_skip() -> str | None:
    """Why no SLURM can be started here; None where it can."""
    missing = [name for name in PROGRAMS if find_program(name) is None]
    if missing:
        return f"SLURM is not installed: {', '.join(missing)} missing (Debian: munge slurmctld slurmd slurm-client)"
    if os.geteuid() != 0:
        return "only root can start a SLURM"
    return None


@dataclass
class SlurmCluster:
    """One node that takes two tasks at a time; commands run in it through `run`.

    Attributes:
        folder: of its configuration, state and logs; absolute, and short enough for a socket's path.
        daemons: the processes that `start` began.
    """

    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Starts the daemons and waits until the node takes jobs."""
        host = socket.gethostname().split(".")[0]
        for name in ("state", "spool", "run", "cgroup"):
            (self.folder / name).mkdir()
        key, munge = self.folder / "munge.key", self.folder / "run" / "munge.socket"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        self._write_configuration(host, munge)
        self._start(
            "munged",
            *("--foreground", "--force", f"--key-file={key}", f"--socket={munge}"),
            *(f"--seed-file={self.folder}/munge.seed", f"--pid-file={self.folder}/run/munged.pid"),
            f"--log-file={self.folder}/munged.log",
        )
        self.wait_until(munge.exists, "munged has its socket")
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D", "-N", host)
        self.wait_until(lambda: "idle" in self._node_state(), "the node is idle")

    def _write_configuration(self, host: str, munge: Path) -> None:
        controller_port, node_port = free_ports(2)
        (self.folder / "slurm.conf").write_text(
            "\n".join(
                [
                    "ClusterName=test",
                    f"SlurmctldHost={host}(127.0.0.1)",
                    f"SlurmctldPort={controller_port}",
                    f"SlurmdPort={node_port}",
                    "AuthType=auth/munge",
                    f"AuthInfo=socket={munge},cred_expire=5",  # a job that is queued again waits so long
                    "CredType=cred/munge",
                    "SlurmUser=root",
                    "SlurmdUser=root",
                    f"StateSaveLocation={self.folder}/state",
                    f"SlurmdSpoolDir={self.folder}/spool",
                    f"SlurmctldPidFile={self.folder}/run/slurmctld.pid",
                    f"SlurmdPidFile={self.folder}/run/slurmd.pid",
                    f"SlurmctldLogFile={self.folder}/slurmctld.log",
                    f"SlurmdLogFile={self.folder}/slurmd.log",
                    "ProctrackType=proctrack/linuxproc",
                    "TaskPlugin=task/none",
                    "SchedulerParameters=sched_interval=1",
                    "OverTimeLimit=5",  # minutes in which a busy machine may save
                    "SelectType=select/cons_tres",
                    "SelectTypeParameters=CR_CPU",
                    "JobAcctGatherType=jobacct_gather/none",
                    "MpiDefault=none",
                    "ReturnToService=2",
                    "SlurmdParameters=config_overrides",
                    f"NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000",
                    f"PartitionName=all Nodes={host} Default=YES MaxTime=10 State=UP",
                    "",
                ]
            )
        )
        (self.folder / "cgroup.conf").write_text(
            f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={self.folder}/cgroup\nCgroupAutomount=no\n"
            "ConstrainCores=no\nConstrainDevices=no\nConstrainRAMSpace=no\nConstrainSwapSpace=no\n"
        )

    def stop(self) -> None:
        """Ends the daemons, the last one started first."""
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def run(
        self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs srun, sbatch or another command of this cluster."""
        return run_command(command, {**self.environment, **(environment or {})}, check=check)

    def submit(self, arguments: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> str:
        """Submits a batch job and waits for its end.

        `sbatch --wait` looks only every few seconds; this asks more often.

        Args:
            arguments: of sbatch.
            environment: variables of the job.

        Returns:
            SLURM's word for how it ended: COMPLETED, FAILED, …
        """
        job = self.run(["sbatch", "--parsable", *arguments], environment).stdout.strip()
        try:
            self.wait_until(lambda: self.state_of(job) in ENDED, f"job {job} has ended")
        except RuntimeError:
            self.run(["scancel", job], check=False)
            raise
        return self.state_of(job)

    def state_of(self, job: str) -> str:
        """SLURM's word for what a job is doing, or how it ended."""
        return self.run(["scontrol", "show", "job", job]).stdout.partition("JobState=")[2].split()[0]

    def _start(self, program: str, *arguments: str) -> None:
        path = find_program(program)
        assert path is not None
        with (self.folder / f"{program}.out").open("wb") as output:
            environment = plain_environment(self.environment)
            self.daemons.append(
                subprocess.Popen(
                    [path, *arguments], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            )

    def _node_state(self) -> str:
        return self.run(["sinfo", "--noheader", "--format=%t"], check=False).stdout

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Asks ten times a second until something is so; past the time, fails and shows the logs."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                logs = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
                texts = "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs)
                raise RuntimeError(f"SLURM: waited {PATIENCE_SECONDS:.0f} s until {what}\n{texts}")
            time.sleep(0.1)
