"""In a guest: what becomes of calls when cables, devices and ranks fail. A commit's gate runs an eighth of what is
thorough: tests/conftest.py slices here, too."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cables import all_plugged, allow_resets, cut_and_mend, hardware, kernel_objects, netem, plug, unplug, verbs
from faults import COUNT, PROMPT, Launch, Progress, add_up, add_up_until, in_the_middle, told
from ranks import Ranks, wait_until

import hetcoll
from hetcoll import PeerLostError


@pytest.fixture(autouse=True)
def _cables() -> Iterator[None]:
    yield
    all_plugged()


def run_while(ranks: Ranks, happens: Callable[[Progress], None]) -> list[tuple[dict[str, int], str]]:
    """`happens` in the middle of calls; then what each rank says."""
    ranks.run(add_up, 2)
    for outcome in in_the_middle(ranks, happens):
        assert outcome.error is None, outcome.trace
    ranks.run(add_up, 1)
    return ranks.run(told)


def test_one_cable_is_cut(launch: Launch) -> None:
    def cut(progress: Progress) -> None:
        unplug("veth2")
        progress.until(lambda counters: counters["lost_rails"] > 0)

    found = run_while(verbs(launch, 2, **PROMPT), cut)
    for counters, text in found:
        assert counters["lost_rails"] > 0
        assert counters["links_over_tcp"] == 0
        assert "over verbs" in text
        assert re.search(r"rxe[23] to rxe[23] \(down: .* rxe[23] port 1 GID \S+ QP \d+ to rank", text), text
    # Soft-RoCE refuses to send through a port that is down; at the other end there is no answer, which the device says
    # or, where it is slower than we are patient, does not. Who was first to know tells the other.
    everything = "".join(text for _, text in found)
    reasons = r"IBV_WC_(LOC_QP_OP|RETRY_EXC)_ERR|no completion for \d+ ms: the device has stalled"
    assert re.search(rf"\(down: [^)]* ({reasons})", everything), everything


def test_both_cables_are_cut(launch: Launch) -> None:
    def cut(progress: Progress) -> None:
        unplug("veth1")
        unplug("veth2")
        progress.until(lambda counters: counters["links_over_tcp"] > 0)

    ranks = verbs(launch, 2, **PROMPT)
    for counters, text in run_while(ranks, cut):
        assert counters["links_over_tcp"] > 0
        assert "over tcp" in text
    for rank in range(2):
        lines = [line for line in ranks.output(rank).splitlines() if "rank" in line]
        assert lines, "nothing was logged"
        assert len(lines) == len(set(lines)), lines  # once each


def test_both_cables_are_back(launch: Launch) -> None:
    """In the middle of calls: they go on over TCP, and over RDMA again."""
    ranks = verbs(launch, 2, **PROMPT)

    def cut_and_mend(progress: Progress) -> None:
        unplug("veth1")
        unplug("veth2")
        progress.until(lambda counters: counters["tcp_bytes"] > COUNT)
        all_plugged()
        progress.until(lambda counters: counters["links_over_tcp"] == 0)

    for counters, text in run_while(ranks, cut_and_mend):
        assert counters["lost_rails"] > 0, text
    wait_until(lambda: all(c["recovered_rails"] == c["lost_rails"] for c, _ in ranks.run(told)), 60)
    before = ranks.run(told)
    ranks.run(add_up, 3)
    for (was, _), (now, text) in zip(before, ranks.run(told), strict=True):
        assert now["links_over_tcp"] == 0, text
        assert now["tcp_bytes"] == was["tcp_bytes"], text
        assert now["bytes"] > was["bytes"] + COUNT, text
        assert "over verbs" in text
        assert "(down" not in text, text
    lines = ranks.output(0).splitlines()
    assert any("going on over TCP" in line for line in lines), lines
    assert any("took up a lost rail again, 1 in use" in line for line in lines), lines


def test_control_sockets_are_reset(launch: Launch) -> None:
    """In the handshake, and while both ends agree over them on how a rail comes back. The rails go on."""
    allow_resets()

    for counters, text in run_while(
        verbs(launch, 2, HETCOLL_FAULT="reset=100", **PROMPT), cut_and_mend("veth2", shows="lost_rails")
    ):
        assert counters["tcp_reconnects"] > 0, counters
        assert counters["links_over_tcp"] == 0, text


def test_control_sockets_are_reset_while_they_carry_all(launch: Launch) -> None:
    """The frames, since both cables are cut; until they are back."""
    allow_resets()

    def cut_and_mend(progress: Progress) -> None:
        unplug("veth1")
        unplug("veth2")
        progress.until(lambda counters: counters["links_over_tcp"] > 0)
        before = progress.notes()[0]["tcp_reconnects"]
        progress.until(lambda counters: counters["tcp_reconnects"] > before + 3)
        all_plugged()
        progress.until(lambda counters: counters["links_over_tcp"] == 0)

    ranks = verbs(launch, 2, HETCOLL_FAULT="reset=400000", HETCOLL_INTEGRITY="all", **PROMPT)
    for counters, text in run_while(ranks, cut_and_mend):
        assert counters["tcp_bytes"] > COUNT, text
        assert counters["spoiled_pieces"] == 0, counters
    lines = [line for line in ranks.output(0).splitlines() if "was made again" in line]
    assert len(lines) == 1, lines


def split(comm: hetcoll.Communicator) -> tuple[dict[str, int], str]:
    """What a communicator that is made now says after some calls."""
    part = comm.split(0)
    assert part is not None
    add_up(part, 1)
    return told(part)


@pytest.mark.thorough
def test_a_port_that_is_down_for_a_moment(launch: Launch) -> None:
    """Its rail is lost, not for communicators that come later, and in its own until it was tried again."""

    def flap(progress: Progress) -> None:
        unplug("veth0")
        progress.until(lambda counters: counters["lost_rails"] > 0)
        plug("veth0")
        unplug("veth0")
        all_plugged()

    ranks = verbs(launch, 2, **PROMPT)
    found = run_while(ranks, flap)
    for counters, text in found:
        assert counters["links_over_tcp"] == 0, text
        assert counters["lost_rails"] > 0, text
    for counters, text in ranks.run(split):
        assert counters["lost_rails"] == 0, text
        assert text.count("bytes sent") == 2 * len(text.splitlines()[1:]), text
    wait_until(lambda: all(c["recovered_rails"] == c["lost_rails"] for c, _ in ranks.run(told)), 60)
    before = ranks.run(carried)
    ranks.run(add_up, 3)
    for was, now, (counters, text) in zip(before, ranks.run(carried), ranks.run(told), strict=True):
        assert counters["rail_tries"] >= counters["recovered_rails"] > 0, text
        assert all(now[device] - was[device] > COUNT for device in now), (was, now, text)
        assert "(down" not in text, text
        assert re.search(r"rxe[01] to rxe[01] \([^)]*, taken up again \d times\)", text), text
    lines = ranks.output(0).splitlines()
    counters, text = ranks.run(told)[0]
    for event in ("lost a rail, 1 left", "took up a lost rail again, 2 in use"):
        assert sum(event in line for line in lines) == counters["lost_rails"], (lines, text)


def patient(pool: Launch) -> Ranks:
    """Ranks that stay for other tests, since they lose no rail: they wait for longer."""
    return verbs(pool, 2, HETCOLL_IB_TIMEOUT="17")  # 0.5 s until a packet is sent again, and eight times that


@pytest.mark.thorough
def test_a_silence_costs_nothing_but_time(pool: Launch) -> None:
    """What happens when a switch learns a new way: for a moment nothing arrives, and nobody is told."""

    def silence(progress: Progress) -> None:
        for calls in (5, 10):
            with netem("veth0", "loss", "100%"):
                time.sleep(0.3)
            progress.until_call(calls)

    for counters, text in run_while(patient(pool), silence):
        assert (counters["lost_rails"], counters["links_over_tcp"]) == (0, 0), text


def test_packets_are_lost(pool: Launch) -> None:
    ranks = patient(pool)
    ranks.run(add_up, 1)
    before = hardware("rxe0")
    with netem("veth0", "loss", "2%"), netem("veth1", "loss", "2%"):
        ranks.run(add_up, 6, timeout=60)
    after = hardware("rxe0")
    resent = sum(after[name] - before[name] for name in ("completer_retry_err", "rcvd_seq_err", "duplicate_request"))
    assert resent > 0, after
    for counters, text in ranks.run(told):
        assert counters["lost_rails"] == 0, text


@pytest.mark.thorough
def test_packets_are_late_and_out_of_order(pool: Launch) -> None:
    ranks = patient(pool)
    with netem("veth1", "delay", "2ms", "reorder", "25%"):
        ranks.run(add_up, 5, timeout=60)
    for counters, text in ranks.run(told):
        assert counters["lost_rails"] == 0, text


def carried(comm: hetcoll.Communicator) -> Counter[str]:
    """Bytes that this rank has sent over each of its devices."""
    found: Counter[str] = Counter()
    for link in json.loads(comm._engine.links()):
        for rail in link["rails"]:
            found[rail["device"]] += rail["bytes"]
    return found


@pytest.mark.thorough
def test_a_slow_cable_carries_less(pool: Launch) -> None:
    ranks = patient(pool)
    ranks.run(add_up, 1)
    before = ranks.run(carried)
    with netem("veth2", "rate", "8mbit"), netem("veth3", "rate", "8mbit"):  # 1 MB/s
        ranks.run(add_up, 10, timeout=60)
    for was, now, (counters, text) in zip(before, ranks.run(carried), ranks.run(told), strict=True):
        assert counters["lost_rails"] == 0, text
        slow, fast = sorted((now - was).items())[::-1]  # rxe2 or rxe3, rxe0 or rxe1
        assert 2 * slow[1] < fast[1], (slow, fast, text)


def test_a_rank_is_killed(launch: Launch, tmp_path: Path) -> None:
    ranks = verbs(launch, 3)
    ranks.start(add_up_until, tmp_path)
    Progress(tmp_path, ranks.size).until_call(3)
    ranks.kill(1)
    for outcome in ranks.finish(30, only=[0, 2]):
        assert isinstance(outcome.error, PeerLostError), outcome.trace
        assert outcome.error.rank == 1


@pytest.mark.thorough
def test_a_rank_is_killed_in_its_sleep(launch: Launch) -> None:
    """Nobody is in a call: the next one fails."""
    ranks = verbs(launch, 2)
    ranks.run(add_up, 1)
    ranks.kill(1)
    ranks.start(add_up, 1, only=[0])
    (outcome,) = ranks.finish(30, only=[0])
    assert isinstance(outcome.error, PeerLostError), outcome.trace


def test_what_does_not_carry_bytes_is_not_used(launch: Launch) -> None:
    """Two devices that might reach each other, but there is no cable between them."""
    ranks = launch(2, HETCOLL_TRANSPORT="verbs", HETCOLL_IB_HCA=("=rxe0", "=rxe3"), **PROMPT)
    ranks.run(add_up, 2, timeout=60)
    for counters, text in ranks.run(told):
        assert counters["links_over_tcp"] > 0
        assert "over tcp" in text
        assert "rxe" in text


@pytest.mark.thorough
def test_of_two_rails_the_one_that_works_is_used(launch: Launch) -> None:
    """rxe0 and rxe1 have a cable, rxe2 has lost its own."""
    unplug("veth3")
    ends = ("=rxe0,rxe2", "=rxe1")
    ranks = launch(2, HETCOLL_TRANSPORT="verbs", HETCOLL_IB_HCA=ends, **PROMPT)
    ranks.run(add_up, 2, timeout=60)
    for counters, text in ranks.run(told):
        assert counters["links_over_tcp"] == 0, text
        assert "over verbs" in text


def receive_into_dead_keys(comm: hetcoll.Communicator, messages: int) -> None:
    """Rank 1 lets rank 0 write straight into its memory, with keys that the devices no longer know."""
    data = np.arange(COUNT, dtype=np.float32)
    got = np.empty_like(data)
    with comm.register(got if comm.rank == 1 else data):
        if comm.rank == 1:
            memory = comm._wiring.memory
            assert memory is not None
            for entry in memory._entries:
                for region in entry.regions:
                    region.close()
        comm.send(data[:1], 1) if comm.rank == 0 else comm.recv(got[:1], 0)  # which connects them
        for i in range(messages):
            if comm.rank == 0:
                if i == 0:
                    wait_until(lambda: comm.counters()["clear_to_sends"] > 0, 30)
                comm.send(data + i, 1)
            else:
                comm.recv(got, 0)
                assert (got == data + i).all(), i


def test_keys_that_are_wrong(launch: Launch) -> None:
    """What was refused comes again without them."""
    ranks = verbs(launch, 2, **PROMPT)
    ranks.run(add_up, 1)
    ranks.run(receive_into_dead_keys, 8, timeout=60)
    counters, text = ranks.run(told)[0]
    assert counters["lost_rails"] > 0, text
    assert counters["resent"] > 0, text
    assert re.search(r"IBV_WC_REM_ACCESS_ERR, vendor error \d+: .*key", text), text


def flood(comm: hetcoll.Communicator, messages: int, full: Path) -> None:
    """Many messages at once, both ways, of which nobody receives any before all are sent."""
    peer = 1 - comm.rank
    sizes = [(17 * i) % 257 for i in range(messages)]
    works = [comm.send(np.full(n, i % 251, np.uint8), peer, async_op=True) for i, n in enumerate(sizes)]
    if comm.rank == 0:
        wait_until(lambda: comm.counters()["waits"] > 0, 30)
        full.touch()
    wait_until(full.exists, 30)
    for i, n in enumerate(sizes):
        got = np.zeros(n, np.uint8)
        comm.recv(got, peer)
        assert (got == i % 251).all(), i
    for work in works:
        work.wait()


@pytest.mark.thorough
def test_queues_are_filled_to_the_brim(launch: Launch, tmp_path: Path) -> None:
    ranks = patient(launch)
    ranks.run(flood, 400, tmp_path / "full", timeout=60)
    for counters, text in ranks.run(told):
        assert counters["lost_rails"] == 0, text
        assert counters["waits"] > 0


@pytest.mark.thorough
def test_a_rank_that_is_stopped_for_a_while(pool: Launch) -> None:
    """The device works on without its process: what it owes, it does when it goes on."""
    ranks = patient(pool)
    ranks.run(add_up, 1)
    ranks.signal(1, signal.SIGSTOP)
    ranks.start(add_up, 3)
    time.sleep(1.5)
    ranks.signal(1, signal.SIGCONT)
    for outcome in ranks.finish(30):
        assert outcome.error is None, outcome.trace


def test_nothing_is_left_in_the_kernel(launch: Launch) -> None:
    before = kernel_objects()
    ranks = verbs(launch, 2)
    ranks.run(add_up, 1)
    during = kernel_objects()
    assert all(during[kind] > before[kind] for kind in before), during
    ranks.run(close)
    wait_until(lambda: kernel_objects() == before)


def close(comm: hetcoll.Communicator) -> None:
    comm.close()
