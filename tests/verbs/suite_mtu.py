"""In a guest: ports, and a network between them, that take packets of different sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cables import narrow, tool, verbs
from faults import PROMPT, Launch, add_up, told

MISMATCH = "packets of 4096 bytes did not: MTU mismatch"


@pytest.fixture
def small_port() -> Iterator[None]:
    """rxe0's port takes 1024 bytes in a packet, the others 4096."""
    tool("ip", "link", "set", "veth0", "mtu", "1500")
    yield
    tool("ip", "link", "set", "veth0", "mtu", "4200")


def test_ports_of_two_sizes_agree(launch: Launch, small_port: None) -> None:
    assert "active_mtu:\t\t1024" in tool("ibv_devinfo", "-d", "rxe0")
    assert "active_mtu:\t\t4096" in tool("ibv_devinfo", "-d", "rxe1")
    ranks = verbs(launch, 2, **PROMPT)
    ranks.run(add_up, 3, timeout=60)
    for counters, text in ranks.run(told):
        assert (counters["lost_rails"], counters["links_over_tcp"]) == (0, 0), text
        assert text.count("bytes sent") == 2 * len(text.splitlines()[1:]), text  # over both cables


def test_a_network_that_takes_less_than_its_ports(launch: Launch) -> None:
    """Of two cables the one that brings whole frames is used, and both ends know what is wrong with the other."""
    ranks = verbs(launch, 2, **PROMPT)
    with narrow("veth1", 2000):
        ranks.run(add_up, 2, timeout=60)
        for counters, text in ranks.run(told):
            assert counters["links_over_tcp"] == 0, text
            assert MISMATCH in text, text


def test_a_network_that_takes_less_from_now_on(launch: Launch) -> None:
    ranks = verbs(launch, 2, **PROMPT)
    ranks.run(add_up, 2, timeout=60)
    with narrow("veth1", 2000):
        ranks.run(add_up, 2, timeout=60)
        found = ranks.run(told)
    for counters, text in found:
        assert counters["lost_rails"] > 0, text
        assert counters["links_over_tcp"] == 0, text
    assert "MTU mismatch" in "".join(text for _, text in found), found
