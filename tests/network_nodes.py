"""Two machines made of network namespaces: a link between them, and hosts files as Debian writes them.

Each knows the other by its address, and itself as 127.0.1.1, where the other does not reach it. File system and process
ids are shared.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from helpers import plain_environment

HOSTS_OF_NAMESPACES = Path("/etc/netns")
ADDRESSES = ("10.231.77.1", "10.231.77.2")


def reason_to_skip() -> str | None:
    """Why no namespaces can be made here; None where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "network namespaces need the programs ip (iproute2) and unshare"
    probe = f"pt{os.getpid()}probe"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return None if done.returncode == 0 else f"no network namespace can be made: {done.stderr.strip()}"


class Nodes:
    """The two machines; `close` removes them, and ends what runs on them."""

    def __init__(self) -> None:
        self.names = [f"pt{os.getpid()}{letter}" for letter in "ab"]

    def open(self) -> None:
        """Makes them."""
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        one, other = self.names
        _ip("link", "add", "way0", "netns", one, "type", "veth", "peer", "name", "way0", "netns", other)
        for name, address, other, address_of_other in (
            (*self._place(0), *self._place(1)),
            (*self._place(1), *self._place(0)),
        ):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "way0")
            _ip("-n", name, "link", "set", "way0", "up")
            folder = HOSTS_OF_NAMESPACES / name
            folder.mkdir(parents=True)
            lines = ("127.0.0.1 localhost", f"127.0.1.1 {name}", f"{address_of_other} {other}")
            (folder / "hosts").write_text("".join(f"{line}\n" for line in lines))

    def close(self) -> None:
        """Removes what `open` has made, as far as it came."""
        for node, name in enumerate(self.names):
            self.kill(node)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(HOSTS_OF_NAMESPACES / name, ignore_errors=True)

    def cut_link(self) -> None:
        """Takes the link between them down; nobody is told."""
        _ip("-n", self.names[0], "link", "set", "way0", "down")

    def kill(self, node: int) -> None:
        """Ends all that runs on one of them, by SIGKILL."""
        found = subprocess.run(["ip", "netns", "pids", self.names[node]], capture_output=True, text=True).stdout.split()
        if found:
            subprocess.run(["kill", "-KILL", *found], capture_output=True)

    def start(self, node: int, command: Sequence[str | Path], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Starts a program on one of them."""
        name = self.names[node]
        on_node = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
        return subprocess.Popen(
            [*on_node, *map(str, command)],
            env=plain_environment(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _place(self, node: int) -> tuple[str, str]:
        return self.names[node], ADDRESSES[node]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
