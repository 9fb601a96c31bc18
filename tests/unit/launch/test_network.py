from __future__ import annotations

import socket
import sys

import pytest

from pretraining.launch.network import address_towards, interface_with

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="names of interfaces are read as Linux tells them")


@linux_only
def test_the_route_to_this_machine_is_loopback_which_is_never_chosen() -> None:
    assert interface_with("127.0.0.1") == "lo"
    assert address_towards(["127.0.0.1", "localhost"]) == ""


@linux_only
def test_an_address_that_leads_elsewhere_is_that_of_an_interface() -> None:
    address = address_towards(["192.0.2.1"])  # a documentation address: reached by the default route, if there is one
    assert not address or interface_with(address) in [name for _, name in socket.if_nameindex()]
    assert interface_with("192.0.2.1") is None


@pytest.mark.parametrize("host", ["no-such-host.invalid", "", "a" * 300, "bad..name"])
def test_an_unknown_host_has_no_route(host: str) -> None:
    assert address_towards([host]) == ""
