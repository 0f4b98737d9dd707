"""RDMA discovery without devices: a made-up tree of sysfs and a fake for pyverbs with the calls that are used."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

import hetcoll.links.verbs.local_nics
from hetcoll.config.env import Config
from hetcoll.config.variables import DeviceFilter
from hetcoll.links.verbs import library, nics, pci
from hetcoll.links.verbs.library import Library, UnavailableError
from hetcoll.links.verbs.pci import Distance
from hetcoll.links.verbs.ports import Port, choose_gid, choose_ports, list_ports
from hetcoll.links.wiring import Wiring
from hetcoll.plan.rails import ETHERNET, Nic

IPV4 = "::ffff:10.0.0.7"


class FakeVerbsError(Exception):
    """Stands for PyverbsError."""


@dataclasses.dataclass
class Spec:
    """A port of a made-up device: state, link layer, GIDs as (index, address, type)."""

    state: int = 4
    layer: int = 2
    gids: tuple[tuple[int, str, int], ...] = ((0, "fe80::1", 2), (1, IPV4, 1), (2, IPV4, 2))


class FakeContext:
    def __init__(self, ports: list[Spec]) -> None:
        self._ports = ports

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def query_device(self) -> SimpleNamespace:
        return SimpleNamespace(phys_port_cnt=len(self._ports))

    def query_port(self, number: int) -> SimpleNamespace:
        spec = self._ports[number - 1]
        lid = 0 if spec.layer == 2 else 7
        return SimpleNamespace(
            state=spec.state,
            link_layer=spec.layer,
            lid=lid,
            active_mtu=3,
            active_speed=64,
            active_width=2,
            gid_tbl_len=8,
        )

    def query_gid_table(self, most: int) -> list[SimpleNamespace]:
        entries = []
        for number, spec in enumerate(self._ports, 1):
            for index, address, kind in spec.gids:
                raw = socket.inet_pton(socket.AF_INET6, address)
                halves = [int.from_bytes(raw[at : at + 8], "little") for at in (0, 8)]
                entries.append(
                    SimpleNamespace(
                        gid_subnet_prefix=halves[0], gid_interface_id=halves[1], gid_index=index, port_num=number,
                        gid_type=kind, ndev_ifindex=3,
                    )
                )  # fmt: skip
        return entries[:most]


def fake_library(devices: dict[str, list[Spec] | str]) -> Library:
    """Devices with their ports, or the reason why one cannot be opened."""

    def context(name: str) -> FakeContext:
        found = devices[name]
        if isinstance(found, str):
            raise FakeVerbsError(found)
        return FakeContext(found)

    def get_device_list() -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name.encode()) for name in devices]

    device = SimpleNamespace(get_device_list=get_device_list, Context=context)
    return Library(device, None, None, FakeVerbsError, "made up", True)


def one_port(**changes: Any) -> Port:
    (port,), _ = list_ports(fake_library({"mlx5_0": [Spec(**changes)]}))
    return port


# Ports and addresses ------------------------------------------------------------------------------------------------


def test_what_a_port_says() -> None:
    port = one_port()
    assert (port.name, port.state, port.layer, port.mtu, port.gbps) == ("mlx5_0:1", "active", "Ethernet", 1024, 200.0)
    assert [str(gid) for gid in port.gids] == [
        "0: fe80::1 (RoCE v2)", "1: 10.0.0.7 (RoCE v1)", "2: 10.0.0.7 (RoCE v2)"
    ]  # fmt: skip
    assert port.gids[2].raw == bytes(10) + b"\xff\xff\x0a\0\0\7"


def test_a_device_that_cannot_be_opened_does_not_hide_the_others() -> None:
    ports, problems = list_ports(fake_library({"mlx5_1": [Spec(), Spec(state=1)], "mlx5_0": "Permission denied"}))
    assert [port.name for port in ports] == ["mlx5_1:1", "mlx5_1:2"]
    assert problems == {"mlx5_0": "Permission denied"}


def test_no_rdma_in_the_kernel_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise FakeVerbsError("Failed to get devices list")

    monkeypatch.setattr("hetcoll.links.verbs.ports.list_names", list)
    found = Library(SimpleNamespace(get_device_list=refuse), None, None, FakeVerbsError, "made up", True)
    assert list_ports(found) == ([], {})
    monkeypatch.setattr("hetcoll.links.verbs.ports.list_names", lambda: ["mlx5_0"])
    assert list_ports(found) == ([], {"mlx5_0": "Failed to get devices list"})


GLOBAL = ("2001:db8::7", 2)
LOCAL = ("fe80::1", 2)


@pytest.mark.parametrize(
    ("gids", "family", "index"),
    [
        ([LOCAL, (IPV4, 1), (IPV4, 2)], socket.AF_INET, 2),  # v2, not v1
        ([LOCAL, (IPV4, 2), GLOBAL], socket.AF_INET6, 2),
        ([LOCAL, GLOBAL], socket.AF_INET6, 1),
        ([(IPV4, 2), LOCAL], socket.AF_INET6, 1),  # nothing better
        ([("::ffff:169.254.1.1", 2), (IPV4, 2)], socket.AF_INET, 1),
    ],
)
def test_which_address(gids: list[tuple[str, int]], family: socket.AddressFamily, index: int) -> None:
    port = one_port(gids=tuple((i, *gid) for i, gid in enumerate(gids)))
    assert choose_gid(port, family=family).index == index


def test_infiniband_has_one_kind_of_address() -> None:
    port = one_port(layer=1, gids=((0, "fe80::2:c903:0:1", 0), (1, "fe80::2:c903:0:2", 0)))
    assert (port.layer, port.lid, choose_gid(port).index, choose_gid(port, index=1).index) == ("InfiniBand", 7, 0, 1)


def test_an_address_that_is_not_there_says_which_are() -> None:
    with pytest.raises(UnavailableError, match=r"HETCOLL_IB_GID_INDEX: wanted a GID at 5, but mlx5_0:1 has 0: fe80::1"):
        choose_gid(one_port(), index=5)
    with pytest.raises(UnavailableError, match="wanted a GID of RoCE v2 with an IPv4 address, but mlx5_0:1 has none"):
        choose_gid(one_port(gids=()))


def test_every_port_is_used_or_has_a_reason() -> None:
    devices: dict[str, list[Spec] | str] = {
        "mlx5_0": [Spec(), Spec()],
        "mlx5_1": [Spec(state=1)],
        "mlx5_2": [Spec(gids=((0, "fe80::1", 2),))],
        "mlx5_3": [Spec()],
    }
    ports, _ = list_ports(fake_library(devices))
    chosen, passed = choose_ports(ports, DeviceFilter.parse("^mlx5_0:2,mlx5_3"))
    assert [port.name for port, _ in chosen] == ["mlx5_0:1"]
    assert passed["mlx5_0:2"] == passed["mlx5_3:1"] == "HETCOLL_IB_HCA=^mlx5_0:2,mlx5_3 leaves it out"
    assert passed["mlx5_1:1"] == "its link is down"
    assert passed["mlx5_2:1"].startswith("wanted a GID of RoCE v2")


@pytest.mark.parametrize(
    ("text", "allowed", "refused"),
    [
        ("mlx5", [("mlx5_0", 1), ("mlx5_1", 2)], [("rxe0", 1)]),
        ("=mlx5_0:1,mlx5_2", [("mlx5_0", 1), ("mlx5_2", 3)], [("mlx5_0", 2), ("mlx5_20", 1)]),
        ("^mlx5_1:2", [("mlx5_1", 1), ("rxe0", 2)], [("mlx5_1", 2), ("mlx5_10", 2)]),
        ("^=mlx5_1", [("mlx5_10", 1)], [("mlx5_1", 1)]),
    ],
)
def test_device_filters_read_as_in_nccl(
    text: str, allowed: list[tuple[str, int]], refused: list[tuple[str, int]]
) -> None:
    names = DeviceFilter.parse(text)
    assert all(names.allows(*each) for each in allowed)
    assert not any(names.allows(*each) for each in refused)
    assert str(names) == text


# Distances ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[str, int], Path]:
    """Makes PCI functions: the path below sys/devices, and the NUMA node."""

    def make(path: str, node: int) -> Path:
        folder = tmp_path / "devices" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numa_node").write_text(f"{node}\n")
        by_address = tmp_path / "bus/pci/devices" / folder.name
        by_address.parent.mkdir(parents=True, exist_ok=True)
        if not by_address.exists():
            by_address.symlink_to(folder)
        return folder

    return make


ROOT = "pci0000:3a/0000:3a:00.0"
SWITCH = f"{ROOT}/0000:3b:00.0"


@pytest.mark.parametrize(
    ("gpu", "nic", "distance"),
    [
        (f"{SWITCH}/0000:3c:00.0/0000:3d:00.0", f"{SWITCH}/0000:3c:00.0/0000:3d:00.1", Distance.SAME),
        (f"{SWITCH}/0000:3c:00.0/0000:3d:00.0", f"{SWITCH}/0000:3c:04.0/0000:3e:00.0", Distance.SWITCH),
        (f"{SWITCH}/0000:3c:00.0/0000:3d:00.0/0000:40:00.0/0000:41:00.0", f"{SWITCH}/0000:3c:04.0/0000:3e:00.0",
         Distance.SWITCHES),
        (f"{SWITCH}/0000:3c:00.0/0000:3d:00.0", "pci0000:3a/0000:3a:01.0/0000:50:00.0", Distance.BRIDGE),
        ("pci0000:3a/0000:3a:01.0/0000:50:00.0", "pci0000:3a/0000:3a:01.1/0000:51:00.0", Distance.BRIDGE),
        (f"{ROOT}/0000:3b:00.0", "pci0000:5a/0000:5a:00.0/0000:5b:00.0", Distance.NODE),
        (f"{ROOT}/0000:3b:00.0", "pci0000:ba/0000:ba:00.0/0000:bb:00.0", Distance.SYSTEM),
    ],
)  # fmt: skip
def test_distances(tree: Callable[[str, int], Path], gpu: str, nic: str, distance: Distance) -> None:
    a, b = (tree(path, 1 if "pci0000:ba" in path else 0) for path in (gpu, nic))
    assert pci.between(a, b) is pci.between(b, a) is distance
    assert pci.between(a, a) is Distance.SAME
    assert pci.between(a, None) is Distance.SYSTEM


def test_devices_are_found_in_the_tree(tree: Callable[[str, int], Path], tmp_path: Path) -> None:
    card, ethernet = tree(f"{SWITCH}/0000:3c:04.0/0000:3e:00.0", 0), tree("pci0000:3a/0000:3a:01.0/0000:50:00.0", 0)
    for folder in ("class/infiniband/mlx5_0", "class/infiniband/rxe0", "class/infiniband/rxe1", "class/net/eth0"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "class/infiniband/mlx5_0/device").symlink_to(card)
    (tmp_path / "class/infiniband/rxe0/parent").write_text("eth0\n")
    (tmp_path / "class/infiniband/rxe1/parent").write_text("veth0\n")
    (tmp_path / "class/net/eth0/device").symlink_to(ethernet)
    assert pci.device_folder("mlx5_0", tmp_path) == card
    assert pci.device_folder("rxe0", tmp_path) == ethernet  # software on a card is as near as the card
    assert pci.device_folder("rxe1", tmp_path) is None
    assert pci.pci_folder("0000:3E:00.0", tmp_path) == card
    assert pci.pci_folder("0000:ff:00.0", tmp_path) is None


class RecordedError(Exception):
    """Instead of an offer: what it would have been made near to."""


def test_ports_near_the_ranks_gpu_come_first(
    tree: Callable[[str, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the GPU that the rank was told to use to the order of its ports; two GPUs say nothing."""
    gpu = tree(f"{SWITCH}/0000:3c:00.0/0000:3d:00.0", 0)
    cards = {
        "mlx5_0": tree("pci0000:ba/0000:ba:00.0/0000:bb:00.0", 1),
        "mlx5_1": tree("pci0000:3a/0000:3a:01.0/0000:50:00.0", 0),
        "mlx5_2": tree(f"{SWITCH}/0000:3c:04.0/0000:3e:00.0", 0),
    }
    for name, card in cards.items():
        (tmp_path / "class/infiniband" / name).mkdir(parents=True)
        (tmp_path / "class/infiniband" / name / "device").symlink_to(card)
    for node, cores in enumerate(("0-3\n", "4-7\n")):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(cores)
    monkeypatch.setattr(pci.device_folder, "__defaults__", (tmp_path,))
    monkeypatch.setattr(pci.pci_folder, "__defaults__", (tmp_path,))
    monkeypatch.setattr(pci.to_cores, "__defaults__", (tmp_path,))
    monkeypatch.setattr(nics, "list_names", lambda: list(cards))
    monkeypatch.setattr(nics, "load", lambda: fake_library({name: [Spec()] for name in cards}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})

    def order(near: Path | None) -> list[tuple[str, Distance]]:
        chosen, _ = nics.choose(Config(), near=near)
        return [(each.port.device, each.distance) for each in chosen]

    assert order(gpu) == [("mlx5_2", Distance.SWITCH), ("mlx5_1", Distance.BRIDGE), ("mlx5_0", Distance.SYSTEM)]
    assert [device for device, _ in order(None)] == ["mlx5_0", "mlx5_1", "mlx5_2"]  # near core 5

    # A rank that sees several GPUs says which it uses with its first array.
    opened = hetcoll.links.verbs.local_nics.LocalNics.__new__(hetcoll.links.verbs.local_nics.LocalNics)
    opened.nics = tuple(Nic(f"{name}:1", ETHERNET, "10.0.0.1", "") for name in cards)
    opened._numbers = [4, 5, 6]
    wiring = Wiring.__new__(Wiring)
    wiring.local_nics = opened
    assert wiring.ports_near("0000:3D:00.0") == (2, 1, 0)
    assert wiring.ports_near("0000:bb:00.0") == (0, 1, 2)
    assert wiring.ports_near("0000:99:00.0") == (0, 1, 2)  # which nobody knows: as they are
    assert [opened.number(nic) for nic in opened.nics[::-1]] == [6, 5, 4]
    opened._ports = [{"gbps": 100.0}, {"gbps": 2.5}]
    assert opened.rate == 102_500
    opened._ports.append({"gbps": 0.0})  # a speed that this library does not know
    assert opened.rate == 0

    def offer(*given: Any) -> None:
        raise RecordedError(given[-1])

    monkeypatch.setattr(hetcoll.links.verbs.local_nics, "LocalNics", offer)
    for buses, near in ((["0000:3d:00.0"], gpu), (["0000:3d:00.0", "0000:50:00.0"], None), (["0000:99:00.0"], None)):
        wiring = Wiring.__new__(Wiring)
        wiring._config, wiring._gpus = Config(transport="verbs"), buses
        wiring.engine = None  # type: ignore[assignment]
        with pytest.raises(RecordedError) as told:
            wiring._open_nics([])
        assert told.value.args == (near,)


def test_cores_have_devices_of_their_own_node(tree: Callable[[str, int], Path], tmp_path: Path) -> None:
    near, far = tree("pci0000:00/0000:00:01.0/0000:01:00.0", 0), tree("pci0000:80/0000:80:01.0/0000:81:00.0", 1)
    assert pci.to_cores(near, {0}, tmp_path) is Distance.NODE  # a machine that does not speak of nodes
    for node, cores in enumerate(("0-1,8\n", "4-5\n")):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(cores)
    assert pci.to_cores(near, {8}, tmp_path) is Distance.NODE
    assert pci.to_cores(near, {4, 5}, tmp_path) is Distance.SYSTEM
    assert pci.to_cores(far, {1, 5}, tmp_path) is Distance.NODE  # a rank that may run on both
    assert pci.to_cores(None, {0}, tmp_path) is Distance.SYSTEM


# pyverbs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_pyverbs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing of pyverbs is loaded or found, but in the folder given, which stands for the distribution's."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(library, "DISTRIBUTION", str(tmp_path))
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not (Path(p) / "pyverbs").exists()])
    importlib.invalidate_caches()
    library.load.cache_clear()
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        del sys.modules[name]
    library.load.cache_clear()


def test_without_pyverbs_it_says_how_to_get_it(no_pyverbs: Path) -> None:
    with pytest.raises(UnavailableError, match="pyverbs is not installed: apt install python3-pyverbs"):
        library.load()


def test_the_distributions_pyverbs_comes_without_its_neighbours(no_pyverbs: Path) -> None:
    package = no_pyverbs / "pyverbs"
    package.mkdir()
    for name in ("__init__", "pd", "mr"):
        (package / f"{name}.py").write_text("")
    (package / "device.py").write_text("import logging\nlogging.basicConfig(level=logging.DEBUG, force=True)\n")
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    (package / "pyverbs_error.py").write_text("class PyverbsError(Exception): pass\n")
    (no_pyverbs / "neighbour_of_pyverbs.py").write_text("")
    found = library.load()
    assert found.origin == str(package)
    assert (root.level, root.handlers) == before  # the real one does that, too
    assert importlib.util.find_spec("neighbour_of_pyverbs") is None


def test_a_pyverbs_for_another_python_is_said_to_be_one(no_pyverbs: Path) -> None:
    (no_pyverbs / "pyverbs").mkdir()
    (no_pyverbs / "pyverbs/__init__.py").write_text("")
    with pytest.raises(UnavailableError, match=r"cannot be loaded by Python 3.*No module named 'pyverbs\.device'"):
        library.load()
