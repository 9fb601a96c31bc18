"""Variables of NCCL, PyTorch and gloo: what does harm is named, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretraining.tools.doctor import communication
from pretraining.tools.doctor.communication import (
    EXPLAINED,
    HARMS,
    KNOWN,
    check_variables,
    variables_in,
)
from pretraining.tools.doctor.verdicts import Check

INTERFACES = ("lo", "eth0", "eth1", "ib0")


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NCCL's own files are those of the test."""
    monkeypatch.setattr(communication, "CONF_FILES", (str(tmp_path / "etc.conf"), str(tmp_path / "home.conf")))


def check(name: str, value: str, is_on_gpu: bool = True) -> Check:
    (found,) = (
        check_variables({name: value}, INTERFACES, is_on_gpu)
        if name.startswith(communication.PREFIXES)
        else (list(check_variables({name: value}, INTERFACES, is_on_gpu))[1:])
    )
    return found


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "bad"),
        ("CUDA_LAUNCH_BLOCKING", "0", "good"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "bad"),
        ("NCCL_BLOCKING_WAIT", "1", "bad"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "bad"),
        ("TORCH_DISTRIBUTED_DEBUG", "OFF", "good"),
        ("NCCL_DEBUG", "trace", "bad"),
        ("NCCL_DEBUG", "INFO", "look at"),
        ("NCCL_DEBUG", "WARN", "good"),
        ("NCCL_P2P_DISABLE", "1", "look at"),
        ("NCCL_P2P_DISABLE", "0", "good"),
        ("NCCL_IB_DISABLE", "1", "look at"),
        ("NCCL_SHM_DISABLE", "1", "look at"),
        ("NCCL_NVLS_ENABLE", "0", "look at"),
        ("NCCL_NVLS_ENABLE", "1", "good"),
        ("NCCL_P2P_LEVEL", "LOC", "look at"),
        ("NCCL_P2P_LEVEL", "NVL", "good"),
        ("NCCL_IB_HCA", "mlx5_0", "good"),
        ("NCCL_VERSION", "2.27.3", "good"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "look at"),
        ("NCCL_DMABUF_ENABLE", "yes", "look at"),
        ("NCCL_DMABUF_ENABLE", "-1", "good"),
    ],
)
def test_each_variable_gets_a_verdict(name: str, value: str, verdict: str) -> None:
    found = check(name, value)
    assert found.verdict == verdict and name in found.found and value.lower() in found.found.lower()
    assert bool(found.advice) is (verdict != "good")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_IB_DISABLED", "NCCL_IB_DISABLE"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
        ("GLOO_SOCKET_IFNAM", "GLOO_SOCKET_IFNAME"),
    ],
)
def test_a_name_that_is_not_known_is_named_with_the_nearest_one(name: str, meant: str) -> None:
    found = check(name, "1")
    assert found.verdict == "look at" and found.advice == f"did you mean {meant}?"


def test_a_name_like_no_other_is_looked_at_too() -> None:
    assert check("NCCL_QQQQQQ", "1").advice.startswith("unset it, or look it up")


@pytest.mark.parametrize(
    ("name", "value", "verdict", "named"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", "good", "eth0, eth1"),
        ("NCCL_SOCKET_IFNAME", "=eth", "bad", "names no interface"),
        ("NCCL_SOCKET_IFNAME", "=eth0,ib0", "good", "eth0, ib0"),
        ("NCCL_SOCKET_IFNAME", "^eth,lo", "good", "ib0"),
        ("NCCL_SOCKET_IFNAME", "^=eth0", "good", "eth1, ib0, lo"),
        ("NCCL_SOCKET_IFNAME", "ens", "bad", "which has eth0, eth1, ib0, lo"),
        ("NCCL_SOCKET_IFNAME", "lo", "look at", "only this machine"),
        ("GLOO_SOCKET_IFNAME", "eth0", "good", "eth0"),
        ("GLOO_SOCKET_IFNAME", "eth", "bad", "names no interface"),
    ],
)
def test_interfaces_are_looked_for_as_the_library_does(name: str, value: str, verdict: str, named: str) -> None:
    found = check(name, value)
    assert found.verdict == verdict and named in found.found


def test_what_only_gpus_notice_is_good_on_cpus() -> None:
    assert check("CUDA_LAUNCH_BLOCKING", "1", is_on_gpu=False).verdict == "good"
    assert check("NCCL_P2P_DISABLE", "1", is_on_gpu=False).verdict == "good"
    assert check("TORCH_DISTRIBUTED_DEBUG", "DETAIL", is_on_gpu=False).verdict == "bad"
    assert check("GLOO_SOCKET_IFNAME", "eth9", is_on_gpu=False).verdict == "bad"
    assert check("NCCL_SOCKET_IFNAME", "eth9", is_on_gpu=False).verdict == "good"


def test_where_nothing_is_set_that_is_good() -> None:
    (found,) = check_variables({"PATH": "/bin"}, INTERFACES, is_on_gpu=True)
    assert found.verdict == "good" and "no variable is set" in found.found


def test_the_files_of_nccl_count_beneath_the_environment(tmp_path: Path) -> None:
    (tmp_path / "etc.conf").write_text("NCCL_DEBUG=INFO\nNCCL_IB_HCA = mlx5\n# NCCL_ALGO=Ring\nnonsense\n")
    (tmp_path / "home.conf").write_text("NCCL_DEBUG=TRACE\n")
    (tmp_path / "named.conf").write_text("NCCL_DEBUG=VERSION\n")
    assert variables_in({"NCCL_NET": "IB"}) == {"NCCL_DEBUG": "TRACE", "NCCL_IB_HCA": "mlx5", "NCCL_NET": "IB"}
    assert variables_in({"NCCL_DEBUG": "WARN"})["NCCL_DEBUG"] == "WARN"
    assert variables_in({"NCCL_CONF_FILE": str(tmp_path / "named.conf")})["NCCL_DEBUG"] == "VERSION"


def test_every_name_is_known_once_and_every_harm_says_what_to_do() -> None:
    assert all(name == name.upper() for name in KNOWN)
    assert not [name for name in KNOWN if name.startswith("NCCL_NCCL")]
    assert all(harm.consequence and harm.advice and harm.verdict != "good" for harm in HARMS.values())
    assert all(EXPLAINED.values())
