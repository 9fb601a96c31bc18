"""The network interface of this machine that leads to the job's other machines.

gloo offers its peers the address of this host's own name. Debian's /etc/hosts makes that 127.0.1.1, which other
machines cannot reach. The interface on the route to another machine of the job has the right address.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress

GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

DISCARD_PORT = 9  # nothing is sent

_SIOCGIFADDR = 0x8915  # linux/sockios.h: get the IPv4 address of an interface


def address_towards(hosts: Iterable[str]) -> str:
    """Return this machine's address on the route to the first host that is another machine; empty if there is none."""
    for host in hosts:
        with suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, DISCARD_PORT))  # chooses the route; a datagram socket sends nothing here
            address = str(probe.getsockname()[0])
            if not address.startswith("127."):  # loopback: the host is this machine
                return address
    return ""


def interface_with(address: str) -> str | None:
    """Return the name of the interface with an IPv4 address; None if there is none, or the system is not Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                # name[16], then a sockaddr_in: family (2), port (2), address (4)
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("40s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
