"""Agents with NIXL's interface: one program runs over them and, where it is installed, over NIXL itself."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import signal
import unittest.mock
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from agents import heard, over
from nixl_interface import CONFIG, METHODS
from ranks import Ranks, wait_until

import hetcoll
from hetcoll import ArgumentError, ClosedError
from hetcoll.serving.nixl import nixl_agent, nixl_agent_config

Pool = Callable[..., Ranks]
PIECE, COUNT = 96, 8
NAMES = ("prefill", "decode")
HAVE_NIXL = importlib.util.find_spec("nixl_cu12") is not None
REFUSED = {
    "get_plugin_params", "get_backend_params", "query_memory", "estimate_xfer_cost", "get_xfer_telemetry",
    "prep_mem_view", "release_mem_view", "send_local_metadata", "send_partial_agent_metadata", "fetch_remote_metadata",
    "invalidate_local_metadata", "get_remote_descs",
}  # fmt: skip


def spelled(function: Any) -> str:
    """Arguments as in METHODS."""
    found = [each for each in inspect.signature(function).parameters.values() if each.name not in ("self", "comm")]
    return " ".join(each.name + ("" if each.default is each.empty else "*") for each in found)


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_what_nixls_take(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(ArgumentError, match="wanted one of the calls that hetcoll"):
            getattr(nixl_agent, name)(None, 1, two=2)
    else:
        assert spelled(getattr(nixl_agent, name)) == METHODS[name]
    assert spelled(nixl_agent_config.__init__) == CONFIG


@pytest.mark.skipif(not HAVE_NIXL, reason="NIXL is not installed")
def test_what_was_written_by_hand_is_nixls() -> None:
    from nixl_cu12 import _api as real

    public = {name for name, each in vars(real.nixl_agent).items() if inspect.isfunction(each) and name[0] != "_"}
    assert public | {"__init__"} == set(METHODS)
    for name, wanted in METHODS.items():
        assert spelled(getattr(real.nixl_agent, name)) == wanted, name
    assert spelled(real.nixl_agent_config.__init__) == CONFIG


def regions(array: Any) -> list[tuple[int, int, int]]:
    """A descriptor for each piece."""
    return [(array.ctypes.data + at * PIECE, PIECE, 0) for at in range(COUNT)]


def program(comm: hetcoll.Communicator, agent: Any) -> None:
    """As NIXL's own examples: the first one writes and reads pieces of the other's memory, in other orders."""
    writes, other = comm.rank == 0, NAMES[1 - comm.rank]
    mine = np.arange(PIECE * COUNT, dtype=np.int64).astype(np.uint8) + np.uint8(100 * comm.rank)
    before = mine.copy()
    registered = agent.register_memory([(mine.ctypes.data, mine.nbytes, 0, "")], "DRAM")
    assert registered.descCount() == 1
    told = comm.allgather_object((agent.get_agent_metadata(), regions(mine)))
    name = agent.add_remote_agent(told[1 - comm.rank][0])
    assert name == other.encode()
    assert agent.check_remote_metadata(other)
    theirs = np.array(told[1 - comm.rank][1])
    if writes:
        here = agent.prep_xfer_dlist("NIXL_INIT_AGENT", regions(mine), "DRAM")
        there = agent.prep_xfer_dlist(other, agent.get_xfer_descs(theirs, "DRAM"))
        handle = agent.make_prepped_xfer("WRITE", here, [0, 1, 2], there, np.array([7, 5, 6], np.int32), b"wrote 1")
        assert agent.transfer(handle) in ("PROC", "DONE")
        assert over(agent, handle) == "DONE"
        local, remote = (agent.get_xfer_descs([tuple(row)], "DRAM") for row in (regions(mine)[4], theirs[3].tolist()))
        read = agent.initialize_xfer("READ", local, remote, name, b"read 1")
        agent.transfer(read)
        assert over(agent, read) == "DONE"
        agent.transfer(handle, b"wrote 2")  # once more
        assert over(agent, handle) == "DONE"
        agent.send_notif(other, b"that is all")
        before[4 * PIECE : 5 * PIECE] = np.arange(3 * PIECE, 4 * PIECE).astype(np.uint8) + np.uint8(100)
        for each in (handle, read):
            agent.release_xfer_handle(each)
        for side in (here, there):
            agent.release_dlist_handle(side)
    else:
        assert sorted(heard(agent, 4)) == [b"read 1", b"that is all", b"wrote 1", b"wrote 2"]
        for source, target in zip((0, 1, 2), (7, 5, 6), strict=True):
            before[target * PIECE : (target + 1) * PIECE] = np.arange(source * PIECE, (source + 1) * PIECE)
    assert (mine == before).all()
    comm.barrier()
    agent.deregister_memory(registered)
    agent.remove_remote_agent(other)


def with_hetcoll(comm: hetcoll.Communicator) -> None:
    with nixl_agent(NAMES[comm.rank], nixl_agent_config(backends=["UCX"], comm=comm)) as agent:
        program(comm, agent)
        comm.barrier()


def with_nixl(comm: hetcoll.Communicator) -> None:
    from nixl_cu12 import _api as real

    agent = real.nixl_agent(NAMES[comm.rank], real.nixl_agent_config(backends=["UCX"]))
    program(comm, agent)
    comm.barrier()
    os._exit(0)  # it may crash when it is taken down


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_program_for_nixl(pool: Pool, transport: str) -> None:
    pool(2, HETCOLL_TRANSPORT=transport).run(with_hetcoll)


@pytest.mark.skipif(not HAVE_NIXL, reason="NIXL is not installed")
def test_the_same_program_over_nixl() -> None:
    with Ranks(2, tidy=False) as ranks:
        assert [each.died for each in ranks.outcomes(with_nixl, timeout=60)] == [0, 0]
        ranks.kill_all()


def one_agent_after_another(comm: hetcoll.Communicator) -> None:
    for _ in range(2):
        with_hetcoll(comm)


def test_one_agent_after_another(pool: Pool) -> None:
    pool(2).run(one_agent_after_another)


def same_memory_again(comm: hetcoll.Communicator) -> None:
    """Rank 1 registers one array again and again; what rank 0 has heard of it before is no more."""
    with nixl_agent(NAMES[comm.rank], nixl_agent_config(comm=comm)) as agent:
        other, mine = NAMES[1 - comm.rank], np.zeros(PIECE, np.uint8)
        agent.register_memory(mine)
        for turn in range(8):
            descs = agent.register_memory([mine[:8]] if turn % 2 else [mine]) if comm.rank == 1 else None
            told = comm.allgather_object((agent.get_agent_metadata(), descs and agent.get_serialized_descs(descs)))[1]
            if comm.rank == 0:
                agent.add_remote_agent(told[0])
                there = agent.deserialize_descs(told[1])
                here = agent.get_xfer_descs([mine[:8]] if turn % 2 else [mine])
                handle = agent.initialize_xfer("WRITE", here, there, other)
                agent.transfer(handle, b"there")
                assert over(agent, handle) == "DONE", handle.error
            else:
                assert heard(agent, 1) == [b"there"]
                agent.deregister_memory(descs)
            comm.barrier()


def test_the_same_memory_again(pool: Pool) -> None:
    pool(2).run(same_memory_again)


def later(comm: hetcoll.Communicator) -> None:
    """Memory that comes and goes, one agent for itself; messages that are longer and more than the ring; mistakes."""
    config = nixl_agent_config(comm=comm)
    with pytest.raises(ArgumentError, match="agent_name: wanted one of its own for each rank, got"):
        nixl_agent("same", config)
    with nixl_agent(NAMES[comm.rank], config) as agent:
        other = NAMES[1 - comm.rank]
        first, second = np.zeros(PIECE * COUNT, np.uint8), np.full(PIECE, 9, np.uint8)
        registered = agent.register_memory(first)
        agent.add_remote_agent(comm.allgather_object(agent.get_agent_metadata())[1 - comm.rank])
        if comm.rank == 1:
            late = np.zeros(PIECE, np.uint8)
            descs = agent.register_memory([late])
            agent.send_notif(other, agent.get_partial_agent_metadata(descs))
            agent.send_notif(other, agent.get_serialized_descs(descs.trim()))
            assert heard(agent, 1) == [b"there"]
            assert (late == 9).all()
            agent.deregister_memory(descs)
            with pytest.raises(ArgumentError, match="dereg_list: wanted registered memory"):
                agent.deregister_memory(descs)
            late[:] = 1
            agent.send_notif(other, b"gone")
            comm.barrier()
            assert (late == 1).all()
            assert heard(agent, 201) == [bytes([at % 256]) * 9000 for at in range(200)] + [b""]
            agent.send_notif(other, "done")
        else:
            more, told = heard(agent, 2)
            with pytest.raises(ArgumentError, match="wanted registered DRAM of decode, as far as its metadata came"):
                agent.prep_xfer_dlist(other, agent.deserialize_descs(told))
            agent.add_remote_agent(more)
            agent.register_memory(second)
            handle = agent.initialize_xfer("WRITE", agent.get_xfer_descs(second), agent.deserialize_descs(told), other)
            agent.transfer(handle, "there")
            assert over(agent, handle) == "DONE"
            assert heard(agent, 1) == [b"gone"]
            agent.transfer(handle, b"never told")
            assert over(agent, handle) == "ERR"
            assert "closed by its rank" in str(handle.error)
            mistakes(agent, handle, second, other)
            comm.barrier()
            for at in range(200):
                agent.send_notif(other, bytes([at % 256]) * 9000)
            agent.send_notif(other, b"")

            def answered() -> bool:
                agent._notifications.pump(1)
                return bool(agent.check_remote_xfer_done(other, b"do"))

            wait_until(answered, 60)
        agent.deregister_memory(registered)
        comm.barrier()


def mistakes(agent: Any, handle: Any, array: Any, other: str) -> None:
    """Each is told on its line."""
    here = agent.prep_xfer_dlist("", [array])
    far = agent.prep_xfer_dlist(agent.name, [array])
    for call, wanted in [
        (lambda: agent.add_remote_agent(b"nixl"), "metadata: wanted that of an agent of hetcoll"),
        (lambda: agent.send_notif("nobody", b""), "agent: wanted one of .*, got 'nobody'"),
        (lambda: agent.register_memory([(1, 2, 3, "")], "FILE"), "mem_type: wanted DRAM or VRAM, got 'FILE'"),
        (lambda: agent.register_memory(array, backends=["POSIX"]), "backends: wanted HETCOLL or UCX, got"),
        (lambda: agent.get_xfer_descs([(1, 2)], "DRAM"), "descs: wanted rows of address, length and device"),
        (lambda: agent.prep_xfer_dlist("", np.zeros(4)), "descs: wanted registered DRAM of this agent"),
        (lambda: agent.make_prepped_xfer("MOVE", here, [0], far, [0]), "operation: wanted WRITE or READ"),
        (lambda: agent.make_prepped_xfer("READ", here, [0], here, [0]), "wanted one of NIXL_INIT_AGENT"),
        (lambda: agent.make_prepped_xfer("READ", here, [1], far, [0]), "local_indices: wanted 0 to 0, got 1 to 1"),
        (lambda: agent.make_prepped_xfer("READ", here, [0], far, []), "wanted as many local as remote ones"),
        (lambda: nixl_agent_config(enable_listen_thread=True), "enable_listen_thread: wanted False"),
        (lambda: agent.add_remote_agent(None), "metadata: wanted that of an agent of hetcoll, got None"),
        (lambda: agent.deserialize_descs(b'["DRAM", [[1.5, 2, 3]]]'), "serialized_descs: wanted what"),
        (lambda: agent.deserialize_descs(b'["DRAM", [[%d, 2, 3]]]' % 2**70), "serialized_descs: wanted what"),
        (lambda: agent.make_prepped_xfer("READ", None, [0], far, [0]), "wanted one of NIXL_INIT_AGENT"),
        (
            lambda: agent.make_prepped_xfer("READ", here, [0], far, [[0], [0, 1]]),
            "remote_indices: wanted a sequence of",
        ),
        (lambda: agent.make_prepped_xfer("READ", here, [0], far, [0], 5), "notif_msg: wanted bytes, got 5"),
        (lambda: agent.transfer(handle, 5), "notif_msg: wanted bytes, got 5"),
        (lambda: agent.send_notif(other, None), "notif_msg: wanted bytes, got None"),
        (lambda: agent.check_remote_xfer_done(other, None), "lookup_tag: wanted bytes, got None"),
        (lambda: agent.check_remote_xfer_done(other, b"", None), "backends: wanted a list of names, got None"),
        (lambda: agent.transfer(None), "handle: wanted one of make_prepped_xfer or initialize_xfer, got None"),
        (lambda: agent.release_xfer_handle("h"), "handle: wanted one of make_prepped_xfer"),
        (lambda: agent.get_serialized_descs([]), "descs: wanted one or more arrays"),
        (lambda: nixl_agent("new", object()), "nixl_conf: wanted hetcoll.serving.nixl's nixl_agent_config, got"),
        (lambda: nixl_agent(None), "agent_name: wanted a name, got None"),
        (lambda: nixl_agent("NIXL_INIT_AGENT"), "agent_name: wanted a name, got 'NIXL_INIT_AGENT'"),
    ]:
        with pytest.raises(ArgumentError, match=wanted):
            call()
    nothing = agent.get_serialized_descs(agent.get_xfer_descs(np.empty((0, 3), np.int64), "DRAM"))
    assert agent.deserialize_descs(nothing).isEmpty()


def in_two_regions(comm: hetcoll.Communicator) -> None:
    """Of a transfer whose memory is gone in part, here or there, nothing is told as done, nor as over too early."""
    with nixl_agent(NAMES[comm.rank], nixl_agent_config(comm=comm)) as agent:
        other = NAMES[1 - comm.rank]
        arrays = [np.full(count, comm.rank, np.uint8) for count in (PIECE, 64 << 20)]
        registered = [agent.register_memory([array]) for array in arrays]
        here = agent.get_xfer_descs(arrays)
        told = comm.allgather_object((agent.get_agent_metadata(), agent.get_serialized_descs(here)))[1 - comm.rank]
        agent.add_remote_agent(told[0])
        there = agent.deserialize_descs(told[1])
        handle = agent.initialize_xfer("READ", here, there, other)
        comm.barrier()
        if comm.rank == 1:
            agent.deregister_memory(registered[0])
            comm.barrier()
        else:
            comm.barrier()
            agent.transfer(handle)
            assert over(agent, handle) == "ERR"
            assert "closed by its rank" in str(handle.error)
            assert not handle._works
            assert (arrays[1] == 1).all()
            again = agent.initialize_xfer("WRITE", here, there, other, b"never told")
            agent.deregister_memory(registered[1])
            arrays[0][:] = 7
            for call, wanted in [
                (agent.transfer, "transfer: wanted registered memory here"),
                (agent.check_xfer_state, "wanted a transfer that was posted"),
            ]:
                with pytest.raises(ArgumentError, match=wanted):
                    call(again)
        comm.barrier()
        assert agent.get_new_notifs() == {}
        assert comm.rank == 0 or all((array == 1).all() for array in arrays)
        comm.barrier()


def all_or_none(comm: hetcoll.Communicator) -> None:
    """Rank 1 is stopped, so that a transfer to it is under way: its memory is not taken back."""
    with nixl_agent(NAMES[comm.rank], nixl_agent_config(comm=comm)) as agent:
        other = NAMES[1 - comm.rank]
        arrays = [np.full(count, comm.rank, np.uint8) for count in (PIECE, 64 << 20)]
        descs = agent.register_memory(arrays)
        told = comm.allgather_object((agent.get_agent_metadata(), agent.get_serialized_descs(descs), os.getpid()))
        agent.add_remote_agent(told[1 - comm.rank][0])
        if comm.rank == 0:
            comm.barrier()
            strange = agent.get_reg_descs([arrays[0], np.zeros(1)])
            with pytest.raises(ArgumentError, match="dereg_list: wanted registered memory"):
                agent.deregister_memory(strange)
            handle = agent.initialize_xfer("WRITE", descs, agent.deserialize_descs(told[1][1]), other)
            os.kill(told[1][2], signal.SIGSTOP)
            try:
                agent.transfer(handle)
                with pytest.raises(ArgumentError, match="dereg_list: wanted memory that no transfer is at"):
                    agent.deregister_memory(descs)
                with pytest.raises(ArgumentError, match="release: wanted a transfer that is over"):
                    agent.release_xfer_handle(handle)
            finally:
                os.kill(told[1][2], signal.SIGCONT)
            assert over(agent, handle) == "DONE"
            agent.deregister_memory(arrays)
            with pytest.raises(ArgumentError, match="wanted registered DRAM of this agent"):
                agent.prep_xfer_dlist("", descs)
        else:
            comm.barrier()
            wait_until(lambda: not any(array.any() for array in arrays), 60)
        comm.barrier()


def test_memory_is_taken_back_all_or_none(pool: Pool) -> None:
    pool(2).run(all_or_none, timeout=60)


def heard_and_failed(comm: hetcoll.Communicator) -> None:
    """What comes together with a message between agents whose answer finds nobody."""
    with nixl_agent(NAMES[comm.rank], nixl_agent_config(comm=comm)) as agent:
        if comm.rank == 1:
            agent.send_notif(NAMES[0], b"heard")
            agent._notifications.post(0, json.dumps(["mapped", 5]).encode(), inner=True)
            wait_until(lambda: agent._notifications.pump(0), 60)
        comm.barrier()
        if comm.rank == 0:
            with (
                unittest.mock.patch.object(agent._mappings, "_tell", side_effect=ClosedError("it left")),
                pytest.raises(ClosedError),
            ):
                agent.get_new_notifs()
            assert agent.get_new_notifs() == {NAMES[1]: [b"heard"]}
        comm.barrier()


def test_a_failure_between_agents_loses_no_notification(pool: Pool) -> None:
    pool(2).run(heard_and_failed)


def test_an_agent_that_is_not_made_leaves_no_communicator() -> None:
    with pytest.raises(hetcoll.InitError, match="nixl_agent") as caught:
        nixl_agent("a name that is too long" * 100)
    with nixl_agent("a name") as agent:
        assert agent.name == "a name"
    assert caught.value.__traceback__, "which refers to the one that was not made"


def test_a_transfer_that_cannot_be_in_part(pool: Pool) -> None:
    pool(2).run(in_two_regions)


def test_memory_that_comes_and_goes(pool: Pool) -> None:
    pool(2).run(later, timeout=60)


def dying(comm: hetcoll.Communicator) -> str:
    agent = nixl_agent(NAMES[comm.rank], nixl_agent_config(comm=comm))
    mine = np.zeros(PIECE, np.uint8)
    agent.register_memory(mine)
    told = comm.allgather_object((agent.get_agent_metadata(), (mine.ctypes.data, PIECE, 0)))
    if comm.rank == 1:
        os._exit(7)
    agent.add_remote_agent(told[1][0])
    handle = agent.initialize_xfer(
        "READ", agent.get_xfer_descs(mine), agent.get_xfer_descs([told[1][1]], "DRAM"), "decode"
    )

    def look() -> bool:
        agent.transfer(handle)
        return over(agent, handle) == "ERR"

    wait_until(look, 60)
    return str(handle.error)


def test_a_transfer_from_an_agent_that_died() -> None:
    with Ranks(2) as ranks:
        first, second = ranks.outcomes(dying, timeout=60)
        assert second.died == 7
        assert first.error is None, first.trace
        assert "rank 1" in first.value
        ranks.kill_all()
