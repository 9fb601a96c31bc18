"""Which network interface of this machine leads to the other machines of a job.

gloo offers its peers the address that this host's own name resolves to. On Debian and its kin /etc/hosts makes that
127.0.1.1, where no other machine reaches it. The way to a machine of the job is a better answer.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

DISCARD_PORT = 9  # nothing is sent there

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface, behind its name of 16 bytes


@dataclass(frozen=True)
class Interface:
    """A network interface, and its IPv4 address from which packets to some host leave."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.address} ({self.name})"


def interface_towards(host: str) -> Interface | None:
    """Return the interface that leads to a host; None where nobody knows the host or a way to it."""
    with suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, DISCARD_PORT))  # chooses the way; a datagram socket sends nothing by it
        address = probe.getsockname()[0]
        if (name := _names_of_interfaces().get(address)) is not None:
            return Interface(name, address)
    return None


def interface_to_others(hosts: Iterable[str]) -> Interface | None:
    """Return the interface that leads to the first of the hosts that is on another machine; None where none is."""
    found = (interface_towards(host) for host in hosts)
    # Only this machine hears what is sent to a loopback address.
    return next((each for each in found if each is not None and not each.address.startswith("127.")), None)


def _names_of_interfaces() -> dict[str, str]:
    """Return names by IPv4 address, as Linux gives them; nothing elsewhere."""
    names: dict[str, str] = {}
    if sys.platform != "linux":
        return names
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                # name[16], then a sockaddr_in: family (2), port (2), address (4)
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("40s", name.encode()))
                names[socket.inet_ntoa(answer[20:24])] = name
    return names
