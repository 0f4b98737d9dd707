"""In a guest: what the discovery says of real devices, and memory that they take."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import socket
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from cables import all_plugged, unplug
from ranks import PATIENCE

import hetcoll.cli
from hetcoll.config.variables import DeviceFilter
from hetcoll.links.verbs.library import DISTRIBUTION, load
from hetcoll.links.verbs.pci import Distance, device_folder, to_cores
from hetcoll.links.verbs.ports import Port, choose_gid, choose_ports, list_ports
from hetcoll.tools.checks import Level, rdma

INFINIBAND = Path("/sys/class/infiniband")


@pytest.fixture(scope="module")
def ports() -> list[Port]:
    found, problems = list_ports(load())
    assert problems == {}
    return found


def test_pyverbs_is_the_one_that_comes_first() -> None:
    """And the engine has opened the same libibverbs."""
    folders = [folder for folder in sys.path if Path(folder, "pyverbs").is_dir()]
    assert load().origin == f"{folders[0] if folders else DISTRIBUTION}/pyverbs"
    assert all(finding.level is Level.FINE for finding in rdma.libraries())
    mapped = Path("/proc/self/maps").read_text().split()
    assert len({word for word in mapped if "/libibverbs.so" in word}) == 1


def test_ports_are_what_the_kernel_says(ports: list[Port]) -> None:
    assert [port.name for port in ports] == ["rxe0:1", "rxe1:1", "rxe2:1", "rxe3:1"]
    for port in ports:
        folder = INFINIBAND / port.device / f"ports/{port.number}"
        assert (folder / "state").read_text().split()[1].lower() == port.state == "active"
        assert (folder / "link_layer").read_text().strip() == port.layer
        assert float((folder / "rate").read_text().split()[0]) == port.gbps
        assert port.mtu == 4096
        for gid in port.gids:
            text = (folder / f"gids/{gid.index}").read_text().strip().replace(":", "")
            assert bytes.fromhex(text) == gid.raw
            assert (folder / f"gid_attrs/types/{gid.index}").read_text().strip() == gid.kind
            assert (folder / f"gid_attrs/ndevs/{gid.index}").read_text().strip() == socket.if_indextoname(gid.interface)


def test_the_address_follows_the_family(ports: list[Port]) -> None:
    chosen = [str(choose_gid(port).address) for port in ports]
    assert chosen == ["10.77.0.1", "10.77.0.2", "10.77.1.1", "10.77.1.2"]
    assert choose_gid(ports[0], family=socket.AF_INET6).address.is_link_local  # there is no other
    assert choose_gid(ports[0], index=0).address.is_link_local


def test_the_nearest_device_of_software_is_everywhere_as_near() -> None:
    assert device_folder("rxe0") is None
    assert to_cores(None, os.sched_getaffinity(0)) is Distance.NODE  # the guest has one NUMA node


@pytest.fixture
def down() -> Iterator[str]:
    """veth2, without a link while the test runs."""
    unplug("veth2")
    yield "rxe2:1"
    all_plugged()


def test_a_link_that_is_down_is_passed_over(down: str) -> None:
    found, _ = list_ports(load())
    chosen, passed = choose_ports(found, DeviceFilter.parse("=rxe1,rxe2,rxe3:1"))
    assert passed["rxe2:1"] == "its link is down"
    assert passed["rxe0:1"] == "HETCOLL_IB_HCA==rxe1,rxe2,rxe3:1 leaves it out"
    assert "rxe1:1" in [port.name for port, _ in chosen]


def test_the_doctor_is_content(capfd: pytest.CaptureFixture[str]) -> None:
    """Asked in this process: emulated, another one takes ten seconds to import what this one has."""
    status, told = hetcoll.cli.main(["doctor", "--json"]), json.loads(capfd.readouterr().out)
    assert (status, told["problems"]) == (0, 0)
    lines = {finding["about"]: finding for finding in told["findings"]}
    assert lines["rxe1:1"]["level"] == "fine"
    assert lines["rxe1:1"]["text"].endswith("GID 1: 10.77.0.2 (RoCE v2)")
    assert lines["ib_uverbs"]["level"] == lines["pyverbs"]["level"] == "fine"


def test_soft_roce_takes_no_dma_buf() -> None:
    assert rdma.takes_dma_buf(load(), "rxe0") is False
    assert {finding.level for finding in rdma.gpu_memory()} == {Level.NOTE}


def test_too_little_memory_to_lock_is_a_problem() -> None:
    """As another user, since root may lock what it likes."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    asked = context.Process(target=_ask_with_little, args=(theirs,))
    asked.start()
    theirs.close()
    assert ours.poll(60 * PATIENCE)
    assert ours.recv() == [(Level.PROBLEM, "64 KiB: too little to register memory for RDMA")]
    asked.join(60 * PATIENCE)
    assert asked.exitcode == 0


def _ask_with_little(pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    os.setuid(65534)
    pipe.send([(finding.level, finding.text) for finding in rdma.locked_memory()])
