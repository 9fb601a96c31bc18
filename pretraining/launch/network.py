"""The network interface of this machine that leads to the job's other machines.

gloo offers its peers the address of this host's own name. Debian's /etc/hosts makes that 127.0.1.1, which other
machines cannot reach. The interface on the route to another machine of the job has the right address.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

DISCARD_PORT = 9  # nothing is sent

_SIOCGIFADDR = 0x8915  # linux/sockios.h: get the IPv4 address of an interface


@dataclass(frozen=True)
class Interface:
    """A network interface and its IPv4 address."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.address} ({self.name})"


def interface_towards(host: str) -> Interface | None:
    """Return the interface on the route to a host; None if the host is unknown or has no route."""
    with suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, DISCARD_PORT))  # chooses the route; a datagram socket sends nothing here
        address = probe.getsockname()[0]
        if (name := _names_of_interfaces().get(address)) is not None:
            return Interface(name, address)
    return None


def interface_to_others(hosts: Iterable[str]) -> Interface | None:
    """Return the interface on the route to the first host that is another machine; None if there is none."""
    found = (interface_towards(host) for host in hosts)
    # A loopback address means that the host is this machine.
    return next((each for each in found if each is not None and not each.address.startswith("127.")), None)


def _names_of_interfaces() -> dict[str, str]:
    """Return the names of interfaces by IPv4 address; empty on systems other than Linux."""
    names: dict[str, str] = {}
    if sys.platform != "linux":
        return names
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                # name[16], then a sockaddr_in: family (2), port (2), address (4)
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("40s", name.encode()))
                names[socket.inet_ntoa(answer[20:24])] = name
    return names
