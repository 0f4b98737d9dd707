"""Two hosts with two networks between them, made of network namespaces: rendezvous, striping, a network that fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import DEADLINE, PATIENCE
from thorough import parametrize

from hetcoll.rendezvous import control, uplink
from hetcoll.rendezvous.connections import pulse, sockets

RANK = """
import socket, sys, time
from hetcoll.rendezvous.control import WORLD, ControlClient
from hetcoll.links.descriptors import host_identity
from hetcoll.links.edges import EdgeKey, Request, pack_addresses, unpack_addresses
from hetcoll.config.env import environment
from hetcoll.links.listener import Listener
from hetcoll.rendezvous.bootstrap import bootstrap

launch, config = environment().launch, environment().config
unique_id = bootstrap(launch, config)
client = ControlClient(unique_id, launch.rank, launch.size, 20)
listener = Listener(config, unique_id.secret)
told = client.exchange(WORLD, b"addresses", pack_addresses(listener.addresses))
peer = 1 - launch.rank
addresses = unpack_addresses(told[peer])
requests = [Request(EdgeKey(bytes(16), 0, 1, 0, i), addresses) for i in range(4)]
made = listener.ensure(launch.rank, requests, time.monotonic() + 20)
paths = [f"{made[r.key].getsockname()[0]}>{made[r.key].getpeername()[0]}" for r in requests]
print(launch.rank, len(set(client.exchange(WORLD, b"host", host_identity().encode()))), *paths, flush=True)
client.exchange(WORLD, b"end", b"")
client.close()
listener.close()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=PATIENCE * 20)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces, joined by eth0 (10.77.0.0/24) and eth1 (10.77.1.0/24)."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip(8) to make network namespaces")
    made = [f"hetcoll-{os.getpid()}-{i}" for i in range(2)]
    try:
        for name in made:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        for net in range(2):
            ip("-n", made[0], "link", "add", f"eth{net}", "type", "veth", "peer", "name", f"eth{net}", "netns", made[1])
        for host, name in enumerate(made):
            ip("-n", name, "link", "set", "lo", "up")
            for net in range(2):
                ip("-n", name, "addr", "add", f"10.77.{net}.{host + 1}/24", "dev", f"eth{net}")
                ip("-n", name, "link", "set", f"eth{net}", "up")
        yield made
    finally:
        for name in made:
            ip("netns", "delete", name)


def start_ranks(hosts: list[str], script: str, **variables: str) -> list[subprocess.Popen[str]]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HETCOLL_")}
    env |= {"PYTHONPATH": str(Path(control.__file__).parents[2]), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
    env |= {"WORLD_SIZE": str(len(hosts)), "HETCOLL_INIT_TIMEOUT": "20"} | variables
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, "-c", script],
            env=env | {"RANK": str(rank)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip


def run_ranks(hosts: list[str], **variables: str) -> list[list[str]]:
    """The words that each rank of RANK prints."""
    ranks = start_ranks(hosts, RANK, **variables)
    try:
        outputs = [rank.communicate(timeout=DEADLINE) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), outputs
    return [out.split() for out, _ in outputs]


def test_stripes_use_both_networks(hosts: list[str]) -> None:
    first, second = run_ranks(hosts)
    assert first[:2] == ["0", "2"]  # host identities differ
    assert first[2:] == ["10.77.0.1>10.77.0.2", "10.77.1.1>10.77.1.2"] * 2
    assert second[2:] == ["10.77.0.2>10.77.0.1", "10.77.1.2>10.77.1.1"] * 2


def test_the_interface_filter_keeps_to_one_network(hosts: list[str]) -> None:
    first, _ = run_ranks(hosts, HETCOLL_SOCKET_IFNAME="=eth1", HETCOLL_SECRET="sesame")
    assert first[2:] == ["10.77.1.1>10.77.1.2"] * 4


def test_a_network_that_does_not_carry_is_passed_over(hosts: list[str]) -> None:
    ip("-n", hosts[1], "addr", "del", "10.77.1.2/24", "dev", "eth1")
    ip("-n", hosts[1], "addr", "add", "10.78.1.2/24", "dev", "eth1")  # rank 0 has no route there
    first, _ = run_ranks(hosts)
    assert first[2:] == ["10.77.0.1>10.77.0.2"] * 4


EXPLAIN = """
import hetcoll
with hetcoll.init() as comm:
    print(comm.explain("allreduce", 1 << 20).network, flush=True)
"""


@parametrize("stripes", [2, 1], first=1)
def test_ranks_know_the_rate_of_the_cards_that_they_use(hosts: list[str], stripes: int) -> None:
    """veth(4) says 10 Gbit/s of each."""
    ranks = start_ranks(hosts, EXPLAIN, HETCOLL_SOCKET_STRIPES=str(stripes), HETCOLL_SECRET="s" * 16)
    try:
        told = {rank.communicate(timeout=DEADLINE) for rank in ranks}  # on a busy machine also of the latency
    finally:
        for rank in ranks:
            rank.kill()
    found = {(text.rstrip().split(";")[0], problems) for text, problems in told}
    assert found == {(f"network between hosts: {10 * stripes} Gbit/s, as the system of rank 0 says of its cards", "")}


WATCH = """
import sys, threading
from hetcoll.rendezvous.connections import sockets
sockets._KEEP_ALIVE, sockets._VANISHED = 1, 3  # instead of 5 and 22 s
from hetcoll.rendezvous.control import WORLD, ControlClient
from hetcoll.rendezvous.protocol.news import Lost
from hetcoll.config.env import environment
from hetcoll.rendezvous.bootstrap import bootstrap

launch, config = environment().launch, environment().config
lost = threading.Event()
def note(group, event):
    if isinstance(event, Lost):
        print(launch.rank, event.rank, event.reason, flush=True)
        lost.set()
client = ControlClient(bootstrap(launch, config), launch.rank, 2, 20, note)
client.exchange(WORLD, b"all here", b"")
print("ready", flush=True)
sys.stdin.readline()  # the link is cut
client.leave_verdict(WORLD, b"k", b"")  # to the store; what it sends on to the other host is acknowledged by nobody
lost.wait(60)
client.close()
"""


def outputs_after_a_cut(ranks: list[subprocess.Popen[str]], host: str) -> list[str]:
    """What ranks print after "ready", where the links of `host` are cut once all are."""
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        for net in range(2):
            ip("-n", host, "link", "set", f"eth{net}", "down")
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("cut\n")
            rank.stdin.flush()
        return [rank.communicate(timeout=DEADLINE)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def test_a_host_that_vanishes_is_noticed_on_both_sides(hosts: list[str]) -> None:
    """Nobody says goodbye and no packet comes back: the link is cut. The kernel, which would wait for an
    acknowledgement for half a minute, is not waited for."""
    outputs = outputs_after_a_cut(start_ranks(hosts, WATCH), hosts[1])
    assert outputs[0].startswith("0 1 nothing came from its host for 3 s, and "), outputs
    assert outputs[1] == "1 0 its process hosted the job's store: nothing came from its host for 3 s\n", outputs


def test_a_host_that_vanishes_is_lost_within_20_to_30_seconds() -> None:
    """By what is waited for. An idle connection hears of the other end every `_KEEP_ALIVE` seconds."""
    for last_try in (pulse._ANSWER, uplink._LAST_TRY):
        assert sockets._VANISHED - sockets._KEEP_ALIVE + last_try >= 20.0
        assert sockets._VANISHED + last_try <= 30.0


GO_ON = """
import numpy as np
import hetcoll
from hetcoll.rendezvous import succession
from hetcoll.rendezvous.connections import sockets
sockets._KEEP_ALIVE, sockets._VANISHED, succession._UNSURE_GRACE = 1, 4.0, 6.0  # instead of 5, 22 and 15 s
comm = hetcoll.init()
comm.barrier()
print("ready", flush=True)
try:
    if comm.rank:
        comm.allreduce(np.ones(4))
    else:
        comm.recv(np.empty(1), 1)
except hetcoll.CommunicationError as error:
    lost = type(error).__name__, error.rank
try:
    rest = comm.shrink(timeout=5.0)
    rest.allreduce(x := np.ones(4))
    print(*lost, rest.size, x.sum(), flush=True)
    rest.close()
except hetcoll.HetcollError as error:
    print(*lost, type(error).__name__, flush=True)
"""


@pytest.mark.slow
def test_when_rank_0s_host_vanishes_more_than_half_of_the_job_goes_on(hosts: list[str]) -> None:
    """And nobody else does: rank 0 cannot know which half it is."""
    alone, *outputs = outputs_after_a_cut(start_ranks([hosts[0], hosts[1], hosts[1]], GO_ON), hosts[0])
    assert outputs == ["PeerLostError 0 2 8.0\n"] * 2, outputs
    assert alone.startswith("PeerLostError "), alone
    assert alone.endswith(" PeerLostError\n"), alone
