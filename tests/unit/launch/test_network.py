from __future__ import annotations

import socket
import sys

import pytest

from pretraining.launch import network
from pretraining.launch.network import Interface, interface_to_others, interface_towards

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="names of interfaces are read as Linux tells them")


@linux_only
def test_the_route_to_this_machine_is_loopback_which_is_never_chosen() -> None:
    assert interface_towards("127.0.0.1") == Interface("lo", "127.0.0.1")
    assert interface_to_others(["127.0.0.1", "localhost"]) is None


@linux_only
def test_every_address_of_this_machine_maps_to_its_interface() -> None:
    names = network._names_of_interfaces()
    assert set(names.values()) <= {name for _, name in socket.if_nameindex()}
    for address, name in names.items():
        assert interface_towards(address) == Interface(name, address)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "", "a" * 300, "bad..name"])
def test_an_unknown_host_has_no_route(host: str) -> None:
    assert interface_to_others([host]) is None
